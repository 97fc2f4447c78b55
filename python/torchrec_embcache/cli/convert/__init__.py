"""`embcache convert`: tables of other formats to checkpoints, and back."""
