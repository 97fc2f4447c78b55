"""A DCP save that fails on one rank before the ranks agree on a sweep: no rank waits for another, and no row leaves."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import dcp_cases
from torchrec_embcache import EmbCacheStorageWriter, cache_modules
from torchrec_embcache.eviction import Keep, Policy
from torchrec_embcache.exceptions import StateError, StorageError
from torchrec_models import ROW_WISE, Model, Settings, batches, rows_of, sharded, train

KEPT = 30
OPTIONS = {"eviction": Policy([Keep(rows=KEPT)])}


class Planner(DefaultSavePlanner):
    """One that fails in a step."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step

    def _fail(self, step: str) -> None:
        if step == self.step:
            raise StorageError(f"broken {step}")

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._fail("set_up_planner")
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> Any:
        self._fail("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self._fail("create_global_plan")
        return super().create_global_plan(all_plans)


def made() -> Any:
    model = Model(Settings(options=OPTIONS))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    return sharded(model, ROW_WISE)


def rows_of_all(model: Any) -> dict[str, int]:
    """How many rows each table has, all ranks together."""
    tables = {name: table for module in cache_modules(model).values() for name, table in module.tables.items()}
    parts: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, {name: len(table) for name, table in tables.items()})
    return {name: sum(part[name] for part in parts) for name in tables}


def planned_badly(rank: int, world: int, path: str) -> None:
    model = made()
    train(model, batches(6, rank, world))
    before, full = rows_of(model), rows_of_all(model)
    assert min(full.values()) > KEPT
    for broken, step in ((1, "set_up_planner"), (1, "create_local_plan"), (0, "create_global_plan")):
        with pytest.raises(CheckpointException, match=f"broken {step}") as raised:
            dcp.save(
                dcp_cases.dense_state(),
                storage_writer=EmbCacheStorageWriter(path, model),
                planner=Planner(step if rank == broken else ""),
            )
        assert raised.value.failures.keys() == {broken}
        assert rows_of(model) == before
    dcp_cases.save(dcp_cases.dense_state(), path, model)
    assert set(rows_of_all(model).values()) == {KEPT}


def test_planner_failure_on_one_rank_aborts_before_the_sweep(two_ranks, tmp_path: Path):
    two_ranks.run(planned_badly, str(tmp_path / "saved"))


def closed_table(rank: int, world: int, path: str) -> None:
    model = made()
    train(model, batches(6, rank, world))
    if rank == 1:
        next(iter(cache_modules(model).values())).tables["ta"].close()
    with pytest.raises(CheckpointException, match="is closed") as raised:
        dcp_cases.save(dcp_cases.dense_state(), path, model)
    # The ranks have told each other.
    assert {type(error) for error, _ in raised.value.failures.values()} == {StateError}
    assert raised.value.failures.keys() == {0, 1}


def test_a_table_that_is_closed_on_one_rank_ends_the_save_on_all(two_ranks, tmp_path: Path):
    two_ranks.run(closed_table, str(tmp_path / "saved"))


def staged_badly(rank: int, world: int, path: str) -> None:
    model = made()
    train(model, batches(6, rank, world))
    before = rows_of(model)
    group = dist.new_group(backend="gloo")
    if rank == 1:
        Path(path, "file").write_text("no directory")
    dist.barrier()
    state = dcp_cases.stageable(dcp_cases.dense_state())
    own = str(Path(path, "file" if rank == 1 else "saved"))
    future = dcp.async_save(state, storage_writer=EmbCacheStorageWriter(own, model), process_group=group)
    with pytest.raises(CheckpointException, match="file"):
        future.result()
    assert rows_of(model) == before
    dist.barrier()
    writer = EmbCacheStorageWriter(str(Path(path, "saved")), model)
    dcp.async_save(state, storage_writer=writer, process_group=group).result()
    assert set(rows_of_all(model).values()) == {KEPT}


def test_unopenable_directory_on_one_rank_aborts_async_save(two_ranks, tmp_path: Path):
    two_ranks.run(staged_badly, str(tmp_path))


def refused(*_arguments: object) -> None:
    raise StorageError("the disk is full")


def written_badly(rank: int, world: int, path: str) -> None:
    model = made()
    train(model, batches(6, rank, world))
    group = dist.new_group(backend="gloo")
    state, writer = dcp_cases.stageable(dcp_cases.dense_state()), EmbCacheStorageWriter(path, model)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("torchrec_embcache.checkpoint.dcp.writer._write_item", refused)
        with pytest.raises(CheckpointException, match="the disk is full") as raised:
            dcp.async_save(state, storage_writer=writer, process_group=group).result()
        assert raised.value.failures.keys() == {1}
    dist.barrier()
    # Rank 0 holds its two parts until its next save; rank 1 has removed both of its own.
    parts = [name for name in dcp_cases.held(path) if name.startswith("part-")]
    assert len(parts) == 2, parts
    dist.barrier()
    dcp.async_save(state, storage_writer=writer, process_group=group).result()
    dist.barrier()
    assert not [name for name in dcp_cases.held(path) if name.startswith("part-")]


def test_failed_async_save_on_one_rank_leaves_no_part_later(two_ranks, tmp_path: Path):
    two_ranks.run(written_badly, str(tmp_path / "saved"))
