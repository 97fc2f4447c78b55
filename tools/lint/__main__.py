"""Runs all rules of the source tree: `python tools/lint`. One file of them: `python tools/lint/layers.py`."""

import sys

import catalogs
import layers
import self_check
import sizes
import stubs
import texts
from sources import report

if __name__ == "__main__":
    count = sum(report(*module.RULES) for module in (self_check, layers, sizes, stubs, texts, catalogs))
    sys.exit(f"{count} violations" if count else None)
