"""Saves and resumes of a table through Megatron-Core and Lightning."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_cases import run_beside
from processes import process_group
from torchrec_embcache.integrations import megatron


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A directory for Megatron's checkpoint, and the process group that its saves ask for."""
    megatron.register()
    (tmp_path / "checkpoint").mkdir()
    with process_group(0, 1, str(tmp_path / "store")):
        yield tmp_path / "checkpoint"


def megatrons(model: Any) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4)), **megatron.sharded_tables(model)}


def save(model: Any, path: Path) -> None:
    dist_checkpointing.save(megatrons(model), str(path), megatron.STRATEGY)


def begin(model: Any, path: Path) -> Any:
    """Begin a save beside training. `finish` ends what this returns."""
    return dist_checkpointing.save(megatrons(model), str(path), megatron.STRATEGY, async_sharded_save=True)


def finish(request: Any) -> None:
    run_beside(request)
    for finalize in request.finalize_fns:
        finalize()
