"""`embcache top`: a live view of the counters of running tables."""
