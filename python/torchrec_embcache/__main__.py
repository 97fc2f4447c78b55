"""Runs `embcache` as `python -m torchrec_embcache`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
