"""One table: settings, rows, eviction and admission."""
