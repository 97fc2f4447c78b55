"""Block-level checkpoints on disk, behind `serialize`: `files` (directories, layouts), `publication`, `schema` (which
blocks a table has), `writer`, `reader`.
"""
