"""Helpers of the tests of RecIS-format checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from tables import make_bag, random_batches, train

BATCHES = random_batches(6, bags=8, ids=90, seed=3)


def trained(**settings: Any) -> Any:
    bag = make_bag(**settings)
    train(bag, BATCHES)
    return bag


def saved_folder(path: Path) -> Path:
    return path / (path / "LATEST.blocks").read_text().split()[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "blocks"
