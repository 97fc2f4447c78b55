"""Pending ids on several ranks: checkpoints that other ranks load, and pipelines."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from megatron.core import dist_checkpointing
from torch.nn.parallel import DistributedDataParallel

import dcp_cases
from admission_rank_cases import PIPELINES, SIZE, drain, made, pending, pipeline_of, pipelines_on_a_cpu, state, train
from processes import World, process_group
from torchrec_embcache import EmbCacheStorageWriter
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.integrations import megatron
from torchrec_models import (
    MIXED,
    ROW_WISE,
    Rows,
    assert_same_rows,
    batches,
    rows_of,
    together,
)

# The step of the save, and the last one.
SAVED, END = 6, 14
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


# Functions that start an asynchronous save, and return a function that waits for its end.


def by_saver(model: Any, path: str) -> Callable[[], object]:
    return Saver().save_async(model, path).result


def by_delta(model: Any, path: str) -> Callable[[], object]:
    return Saver().save_async(model, path, incremental=True).result


def by_dcp(model: Any, path: str) -> Callable[[], object]:
    # A group of its own, because training goes on in the other one.
    group = dist.new_group(backend="gloo")
    writer = EmbCacheStorageWriter(path, model)
    return dcp.async_save({"weight": torch.ones(3)}, storage_writer=writer, process_group=group).result


def by_megatron(model: Any, path: str) -> Callable[[], object]:
    megatron.register()
    # Megatron writes by processes of its own, which the tests' processes may not start, because they are daemons.
    mp.current_process()._config["daemon"] = False
    if dist.get_rank() == 0:
        os.mkdir(path, 0o750)
    dist.barrier()
    state = {"sparse": megatron.sharded_tables(model)}
    request = dist_checkpointing.save(state, path, megatron.STRATEGY, async_sharded_save=True)
    return request.execute_sync


DOORS = {"saver": by_saver, "delta": by_delta, "dcp": by_dcp, "megatron": by_megatron}


def load(door: str, model: Any, path: str) -> None:
    if door == "dcp":
        dcp_cases.load({"weight": torch.zeros(3)}, path, model)
    elif door == "megatron":
        megatron.register()
        dist_checkpointing.load({"sparse": megatron.sharded_tables(model)}, path)
    else:
        Saver().load(model, path)


def _saved(rank: int, world: int, door: str, path: str) -> tuple[Rows, Rows, list[int], bool]:
    model, other = made(MIXED), made(MIXED)
    train(model, rank, world, range(SAVED // 2))
    if door == "delta":
        Saver().save(model, path)
    train(model, rank, world, range(SAVED // 2, SAVED))
    waiting, rows = pending(model), rows_of(model)
    wait = DOORS[door](model, path)
    train(model, rank, world, range(SAVED, END))
    wait()
    load(door, other, path)
    same = (pending(other), rows_of(other)) == (waiting, rows)
    train(other, rank, world, range(SAVED, END))
    return rows_of(model), rows_of(other), waiting, same


def _goes_on(rank: int, world: int, door: str, path: str) -> tuple[Rows, list[int]]:
    model = made(ROW_WISE)
    load(door, model, path)
    waiting = pending(model)
    train(model, rank, world, range(SAVED, END))
    return rows_of(model), waiting


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_ranks_continue_from_counts_of_other_ranks_async_save(
    two_ranks: World, three_ranks: World, tmp_path: Path, door: str
) -> None:
    path = str(tmp_path / "saved")
    results = two_ranks.run(_saved, door, path)
    for rows, after_load, _, same in results:
        assert same
        assert after_load == rows, "two ranks go on with the same bits"
    rows = together([result[0] for result in results])
    waiting = sum(count for result in results for count in result[2])
    assert len(rows) > 50 < waiting
    with process_group(0, 1, str(tmp_path / "store")):
        alone = _goes_on(0, 1, door, path)
    for others in ([alone], three_ranks.run(_goes_on, door, path)):
        assert sum(count for _, counts in others for count in counts) == waiting
        assert_same_rows(together([rows for rows, _ in others]), rows)


# ---- pipelines


def _saved_in_flight(rank: int, world: int, kind: str, path: str) -> dict[str, bool]:
    """Saves while later batches are in flight. The ids that they have prefetched or forwarded are not in the save."""
    every = list(batches(END, rank, world, size=SIZE))
    with pipelines_on_a_cpu():
        whole, drained, other = made(MIXED), made(MIXED), made(MIXED)
        pipeline, steps = pipeline_of(kind, whole), iter(every)
        for _ in range(SAVED):
            pipeline.progress(steps)
        Saver().save(whole, path)
        drain(pipeline, steps)
        drain(pipeline_of(kind, drained), iter(every[:SAVED]))
        Saver().load(other, path)
        found = {"as of the step": state(other) == state(drained), "some wait": sum(pending(other)) > 5}
        for model in (other, drained):
            drain(pipeline_of(kind, model), iter(every[SAVED:]))
        found["goes on"] = state(other) == state(drained)
        found["rows"] = len(rows_of(other)) > 10
        if kind != "semi-sync":
            found["as without a load"] = state(other) == state(whole)
        return found


@pytest.mark.parametrize("kind", PIPELINES)
def test_checkpoint_in_a_pipeline_has_counts_of_finished_steps(two_ranks: World, tmp_path: Path, kind: str) -> None:
    for found in two_ranks.run(_saved_in_flight, kind, str(tmp_path / "saved")):
        assert all(found.values()), found


def _semi_sync(rank: int, world: int) -> bool:
    """True if TorchRec's pipeline does the same as a loop that forwards each batch before the backward of the previous one."""
    every = list(batches(END, rank, world, size=SIZE))
    plain, piped = made(MIXED), made(MIXED)
    with pipelines_on_a_cpu():
        drain(pipeline_of("semi-sync", piped), iter(every))
    inner = plain.module.module if isinstance(plain.module, DistributedDataParallel) else plain.module
    before = None
    for batch in every:
        loss, _ = inner(batch)
        if before is not None:
            before.backward()
        before = loss
    before.backward()
    return state(plain) == state(piped) and len(rows_of(plain)) > 10 < sum(pending(plain))


def test_batch_forwarded_before_a_backward_uses_earlier_counts(
    two_ranks: World,
) -> None:
    """The counts at its forward decide, without those of the last backward."""
    assert all(two_ranks.run(_semi_sync))
