"""Folders of the project that tests read."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
