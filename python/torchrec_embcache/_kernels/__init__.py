"""Kernels of lookups and updates, and their selection by device."""
