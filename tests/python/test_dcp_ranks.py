"""DCP through this package's storage, on several ranks: sharded tensors, resharding, tables, and errors of one rank."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_cases import IDS, Model, held, load, rows, save
from torchrec_embcache import EmbCacheStorageReader, EmbCacheStorageWriter
from world import World

ROWS, COLUMNS = 13, 9


def full(salt: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + 1000 * salt


def spec(dim: int, size: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in range(size)])


def uneven(size: int) -> EnumerableShardingSpec:
    """Boxes of both dimensions, several on a rank."""
    cuts = [(0, 0, 4, 9), (4, 0, 9, 5), (4, 5, 3, 4), (7, 5, 6, 4)]
    shards = [
        ShardMetadata(shard_offsets=[r, c], shard_sizes=[n, m], placement=f"rank:{place % size}/cpu")
        for place, (r, c, n, m) in enumerate(cuts)
    ]
    return EnumerableShardingSpec(shards)


def sharded(how: Any, value: torch.Tensor | None) -> Any:
    """A ShardedTensor of `value`, or of zeros."""
    made = sharded_tensor.zeros(how, ROWS, COLUMNS)
    for shard in made.local_shards():
        (r, c), (n, m) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        if value is not None:
            shard.tensor.copy_(value[r : r + n, c : c + m])
    return made


def check_shards(made: Any, value: torch.Tensor) -> None:
    for shard in made.local_shards():
        (r, c), (n, m) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        assert torch.equal(shard.tensor, value[r : r + n, c : c + m])


def state_of(size: int, salt: int | None) -> dict[str, Any]:
    """Shards of every kind, replicated tensors and objects; zeros without `salt`."""
    value = None if salt is None else full(salt)
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.zeros(ROWS, COLUMNS) if value is None else value
    return {
        "rows": sharded(spec(0, size), value),
        "columns": sharded(spec(1, size), None if value is None else value + 1),
        "boxes": sharded(uneven(size), None if value is None else value + 2),
        "dtensor": distribute_tensor(whole + 3 * (value is not None), mesh, [Shard(0)]),
        "across": distribute_tensor(whole + 4 * (value is not None), mesh, [Shard(1)]),
        "replica": distribute_tensor(whole + 5 * (value is not None), mesh, [Replicate()]),
        "plain": whole + 6 * (value is not None),
        "object": ["saved", salt],
    }


def check_state(state: dict[str, Any], salt: int) -> None:
    for add, name in enumerate(("rows", "columns", "boxes")):
        check_shards(state[name], full(salt) + add)
    for add, name in enumerate(("dtensor", "across", "replica"), 3):
        assert isinstance(state[name], DTensor)
        assert torch.equal(state[name].full_tensor(), full(salt) + add)
    assert torch.equal(state["plain"], full(salt) + 6)
    assert state["object"] == ["saved", salt]


def save_ranks(rank: int, size: int, path: str, salts: list[int], caching: bool = False) -> None:
    for salt in salts:
        planner = DefaultSavePlanner(enable_plan_caching=caching)
        model = Model(rank, size, salt)
        state = state_of(size, salt)
        metadata = save(state, path, model, planner=planner)
        assert len(pickle.dumps(metadata)) < 20_000, "it travels to every rank"
        loaded = Model(rank, size)
        blank = state_of(size, None)
        load(blank, path, loaded)
        check_state(blank, salt)
        mine = {row for row, *_ in model.contents()}
        assert sorted(loaded.contents()) == [row for row in rows(salt) if row[0] in mine]
        dist.barrier()
        if rank == 0:
            assert len(held(path)) == 2, "LATEST and one checkpoint"


def load_ranks(rank: int, size: int, path: str, salt: int) -> list[tuple[int, list[float], float]]:
    model = Model(rank, size)
    state = state_of(size, None)
    load(state, path, model)
    check_state(state, salt)
    return model.contents()


@pytest.fixture(scope="module")
def saved(two_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "ckpt"
    two_ranks.run(save_ranks, str(path), [0, 1])
    return path


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    world = World(3)
    yield world
    world.stop()


def test_two_ranks_save_and_three_load_into_other_shards(saved: Path, three_ranks: World) -> None:
    loaded = three_ranks.run(load_ranks, str(saved), 1)
    assert sorted(row for contents in loaded for row in contents) == rows(1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_ranks_save_and_one_loads_whole_tensors(saved: Path) -> None:
    names = ("rows", "columns", "boxes", "dtensor", "across", "replica", "plain")
    state: dict[str, Any] = {name: torch.zeros(ROWS, COLUMNS) for name in names}
    model = Model()
    load({**state, "object": None}, saved, model)
    for add, name in enumerate(names):
        assert torch.equal(state[name], full(1) + add), name
    assert sorted(model.contents()) == rows(1)
    part = {"boxes": torch.zeros(ROWS, COLUMNS)}
    dcp.load(part, storage_reader=EmbCacheStorageReader(saved))
    assert torch.equal(part["boxes"], full(1) + 2)


def test_ranks_save_again_and_again_with_cached_plans(two_ranks: World, tmp_path: Path) -> None:
    two_ranks.run(save_ranks, str(tmp_path / "ckpt"), [0, 1, 2], True)


def alone(rank: int, size: int, path: str) -> None:
    for salt in (1, 2):
        state = {"mine": torch.full((5,), float(rank + 10 * salt)), "rows": sharded(spec(0, size), full(salt))}
        save(state, path, use_collectives=False)
    state = {"mine": torch.zeros(5), "rows": sharded(spec(0, size), None)}
    load(state, path)
    assert torch.equal(state["mine"], torch.full((5,), float(rank + 20)))
    check_shards(state["rows"], full(2))
    with pytest.raises(NotImplementedError, match="leave model out"):
        save(state, path, Model(rank, size, 1), use_collectives=False)
    dist.barrier()


def test_ranks_save_and_load_without_collectives(two_ranks: World, tmp_path: Path) -> None:
    two_ranks.run(alone, str(tmp_path / "ckpt"))
    assert held(tmp_path / "ckpt") == ["rank-0", "rank-1"]


class Unreadable:
    """Cannot be pickled on one rank."""

    def __reduce__(self) -> Any:
        raise TypeError("not for pickling")


def failing(rank: int, size: int, path: str) -> None:
    state = state_of(size, 1)
    save(state, path, Model(rank, size, 1))
    broken = dict(state_of(size, 2))
    if rank == 1:
        # Found when rank 1 writes: rank 0 has written its part by then, or is about to.
        del broken["plain"]
        broken["only here"] = Unreadable()
    with pytest.raises(CheckpointException, match="not for pickling"):
        save(broken, path, Model(rank, size, 2))
    loaded = state_of(size, None)
    model = Model(rank, size)
    load(loaded, path, model)
    check_state(loaded, 1)
    # A rank whose table does not fit: no rank's table is touched.
    other = Model(rank, size, 7) if rank == 0 else Model(rank, size, dim=4)
    before = other.contents() if rank == 0 else None
    with pytest.raises(CheckpointException):
        load(loaded, path, other)
    if rank == 0:
        assert other.contents() == before
    save(state_of(size, 3), path, Model(rank, size, 3))
    dist.barrier()
    if rank == 0:
        assert len(held(path)) == 2, "nothing is left of the save that failed"
    contents: list[Any] = [None] * size
    final = Model(rank, size)
    load(state_of(size, None), path, final)
    dist.all_gather_object(contents, final.contents())
    assert sorted(row for rank_rows in contents for row in rank_rows) == rows(3)


def test_an_error_of_one_rank_fails_the_save_on_all_and_leaves_the_checkpoint_before(
    two_ranks: World, tmp_path: Path
) -> None:
    two_ranks.run(failing, str(tmp_path / "ckpt"))


def asynchronous(rank: int, size: int, path: str) -> None:
    group = dist.new_group(backend="gloo")
    writer = EmbCacheStorageWriter(path, model := Model(rank, size, 1))
    state = {"rows": sharded(spec(0, size), full(1)), "plain": full(1)}
    future = dcp.async_save(state, storage_writer=writer, process_group=group)
    # Training goes on, collectives and all.
    state["plain"].zero_()
    for shard in state["rows"].local_shards():
        shard.tensor.zero_()
    model.fill(5)
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    future.result()
    dist.barrier()
    loaded = {"rows": sharded(spec(1, size), None), "plain": torch.zeros(ROWS, COLUMNS)}
    tables = Model(rank, size)
    load(loaded, path, tables)
    check_shards(loaded["rows"], full(1))
    assert torch.equal(loaded["plain"], full(1))
    assert sorted(tables.contents()) == [row for row in rows(1) if row[0] in {i for i, *_ in model.contents()}]


def test_ranks_save_asynchronously_while_training_goes_on(two_ranks: World, tmp_path: Path) -> None:
    two_ranks.run(asynchronous, str(tmp_path / "ckpt"))


def test_the_ids_of_the_model_are_spread(two_ranks: World) -> None:
    counts: list[int] = two_ranks.run(count)
    assert sum(counts) == len(IDS)
    assert all(counts)


def count(rank: int, size: int) -> int:
    return len(Model(rank, size, 0).contents())
