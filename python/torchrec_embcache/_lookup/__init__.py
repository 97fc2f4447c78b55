"""Lookups of batches, prefetching and bag offsets."""
