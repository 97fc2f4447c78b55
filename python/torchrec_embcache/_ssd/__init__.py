"""SSD tiers: commits, flushes, resume and disk diagnostics."""
