"""DCP through this package's storage on several ranks: sharded tensors, resharding, tables, and errors of one rank."""

import contextlib
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint import CheckpointableTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.futures import Future

from dcp_cases import IDS, Model, held, load, rows, save
from processes import World
from torchrec_embcache import EmbCacheStorageReader, EmbCacheStorageWriter, _native
from torchrec_embcache.exceptions import InputError

ROWS, COLUMNS = 13, 9
# The ways to spread a tensor over ranks. The state has one tensor of each, and loads put each into the others.
KINDS = [
    "rows", "columns", "boxes", "chunks", "dtensor", "across", "replica", "checkpointable", "own items", "plain",
]  # fmt: skip


def full(salt: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + 1000 * salt


def spec(dim: int, ranks: list[int]) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in ranks])


def uneven(size: int) -> EnumerableShardingSpec:
    """Boxes of both dimensions, several on each rank."""
    cuts = [(0, 0, 4, 9), (4, 0, 9, 5), (4, 5, 3, 4), (7, 5, 6, 4)]
    shards = [
        ShardMetadata(shard_offsets=[r, c], shard_sizes=[n, m], placement=f"rank:{place % size}/cpu")
        for place, (r, c, n, m) in enumerate(cuts)
    ]
    return EnumerableShardingSpec(shards)


def sharded(how: Any, value: torch.Tensor) -> Any:
    """A ShardedTensor of `value`."""
    made = sharded_tensor.zeros(how, ROWS, COLUMNS)
    for shard in made.local_shards():
        (r, c), (n, m) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(value[r : r + n, c : c + m])
    return made


def rows_of(rank: int, size: int) -> tuple[int, int]:
    """Where the rows of a rank begin and end, if ranks do not have equally many."""
    cuts = [0, *(ROWS - 3 * (size - n) for n in range(1, size)), ROWS]
    return cuts[rank], cuts[rank + 1]


def checkpointable(value: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's rows in two pieces that lie apart in one local tensor. The attributes of `CheckpointableTensor` describe them."""
    begin, end = rows_of(rank, size)
    made: Any = torch.zeros(end - begin + 2, COLUMNS + 1)
    made.global_shape = (ROWS, COLUMNS)
    made.global_offsets = ((begin, 0), (begin + 1, 0))
    made.local_offsets = ((0, 0), (2, 1))
    made.local_sizes = ((1, COLUMNS), (end - begin - 1, COLUMNS))
    pieces_of(made)[0].copy_(value[begin : begin + 1])
    pieces_of(made)[1].copy_(value[begin + 1 : end])
    assert isinstance(made, CheckpointableTensor)
    return made


def pieces_of(made: Any) -> list[torch.Tensor]:
    return [made[r : r + n, c : c + m] for (r, c), (n, m) in zip(made.local_offsets, made.local_sizes, strict=True)]


class OwnItems(torch.Tensor):
    """A rank's rows. It makes DCP's items itself, as tensors could before `CheckpointableTensor`."""

    begin: int

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.begin, 0]), torch.Tensor.size(self))

    def size(self) -> torch.Size:  # type: ignore[override]
        return torch.Size([ROWS, COLUMNS])

    def __create_write_items__(self, name: str, _tensor: torch.Tensor) -> list[WriteItem]:
        properties = TensorProperties(self.dtype)
        data = TensorWriteData(self._chunk(), properties, self.size())
        return [WriteItem(MetadataIndex(name, self._chunk().offsets), WriteItemType.SHARD, None, data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def spread(kind: str, value: torch.Tensor) -> Any:
    """The tensor `value`, spread over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = list(range(size))
    if kind == "plain":
        return value.clone()
    if kind == "checkpointable":
        return checkpointable(value, rank, size)
    if kind == "own items":
        begin, end = rows_of(rank, size)
        made = value[begin:end].clone().as_subclass(OwnItems)
        made.begin = begin
        return made
    how = {
        "rows": spec(0, everyone),
        "columns": spec(1, everyone),
        "boxes": uneven(size),
        "chunks": spec(0, [*everyone, *reversed(everyone)]),
    }
    if kind in how:
        return sharded(how[kind], value)
    placement = {"dtensor": Shard(0), "across": Shard(1), "replica": Replicate()}[kind]
    return distribute_tensor(value, init_device_mesh("cpu", (size,)), [placement])


def check(made: Any, value: torch.Tensor) -> None:
    """Checks that this rank's shard of a sharded tensor is that of `value`."""
    if isinstance(made, DTensor):
        assert torch.equal(made.full_tensor(), value)
    elif isinstance(made, ShardedTensor):
        for shard in made.local_shards():
            (r, c), (n, m) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            assert torch.equal(shard.tensor, value[r : r + n, c : c + m])
    elif isinstance(made, OwnItems):
        assert torch.equal(made.as_subclass(torch.Tensor), value[made.begin : made.begin + len(made)])
    elif isinstance(made, CheckpointableTensor):
        for piece, (begin, _) in zip(pieces_of(made), made.global_offsets, strict=True):
            assert torch.equal(piece, value[begin : begin + len(piece)])
        assert made[1:2].count_nonzero() == made[2:, 0].count_nonzero() == 0, "what lies between is left alone"
    else:
        assert torch.equal(made, value)


def state_of(salt: int | None, turn: int = 0) -> dict[str, Any]:
    """A tensor of each kind, moved on by `turn` kinds, and replicated tensors and objects. Without `salt` all are zeros."""
    state: dict[str, Any] = {"object": ["saved", salt]}
    for n, name in enumerate(KINDS):
        value = torch.zeros(ROWS, COLUMNS) if salt is None else full(salt) + n
        state[name] = spread(KINDS[(n + turn) % len(KINDS)], value)
    return state


def check_state(state: dict[str, Any], salt: int) -> None:
    for n, name in enumerate(KINDS):
        check(state[name], full(salt) + n)
    assert state["object"] == ["saved", salt]


def save_ranks(rank: int, size: int, path: str, salts: list[int], caching: bool = False) -> None:
    for salt in salts:
        planner = DefaultSavePlanner(enable_plan_caching=caching)
        model = Model(rank, size, salt)
        metadata = save(state_of(salt), path, model, planner=planner)
        assert len(pickle.dumps(metadata)) < 30_000, "it travels to every rank"
        loaded = Model(rank, size)
        blank = state_of(None)
        load(blank, path, loaded)
        check_state(blank, salt)
        mine = {row for row, *_ in model.contents()}
        assert sorted(loaded.contents()) == [row for row in rows(salt) if row[0] in mine]
        dist.barrier()
        if rank == 0:
            assert len(held(path)) == 2, "LATEST and one checkpoint"


def load_ranks(rank: int, size: int, path: str, salt: int, turns: list[int]) -> list[tuple[int, list[float], float]]:
    """Load as it was saved, with tables, and then each tensor into those of other kinds. Returns the tables' contents."""
    model = Model(rank, size)
    for turn in turns:
        state = state_of(None, turn)
        load(state, path, model if turn == 0 else None)
        check_state(state, salt)
    return model.contents()


@pytest.fixture(scope="module")
def saved(two_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "ckpt"
    two_ranks.run(save_ranks, str(path), [0, 1])
    return path


def test_two_ranks_save_and_load_every_kind_of_tensor_into_every_other(saved: Path, two_ranks: World) -> None:
    two_ranks.run(load_ranks, str(saved), 1, list(range(len(KINDS))))


def test_two_ranks_save_and_three_load_into_other_shards(saved: Path, three_ranks: World) -> None:
    loaded = three_ranks.run(load_ranks, str(saved), 1, [0, 3, 7])
    assert sorted(row for contents in loaded for row in contents) == rows(1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_ranks_save_and_one_loads_whole_tensors(saved: Path) -> None:
    state: dict[str, Any] = {name: torch.zeros(ROWS, COLUMNS) for name in KINDS}
    model = Model()
    load({**state, "object": None}, saved, model)
    for n, name in enumerate(KINDS):
        assert torch.equal(state[name], full(1) + n), name
    assert sorted(model.contents()) == rows(1)
    part = {"boxes": torch.zeros(ROWS, COLUMNS)}
    dcp.load(part, storage_reader=EmbCacheStorageReader(saved))
    assert torch.equal(part["boxes"], full(1) + KINDS.index("boxes"))


def test_ranks_save_again_and_again_with_cached_plans(two_ranks: World, tmp_path: Path) -> None:
    two_ranks.run(save_ranks, str(tmp_path / "ckpt"), [0, 1, 2], True)


def alone(rank: int, size: int, path: str) -> None:
    for salt in (1, 2):
        state = {"mine": torch.full((5,), float(rank + 10 * salt)), "rows": spread("rows", full(salt))}
        save(state, path, use_collectives=False)
    state = {"mine": torch.zeros(5), "rows": spread("rows", full(0))}
    load(state, path)
    assert torch.equal(state["mine"], torch.full((5,), float(rank + 20)))
    check(state["rows"], full(2))
    with pytest.raises(NotImplementedError, match="leave model out"):
        save(state, path, Model(rank, size, 1), use_collectives=False)
    dist.barrier()


def test_ranks_save_and_load_without_collectives(two_ranks: World, tmp_path: Path) -> None:
    two_ranks.run(alone, str(tmp_path / "ckpt"))
    assert held(tmp_path / "ckpt") == ["rank-0", "rank-1"]


class Unreadable:
    """An object that cannot be pickled on one rank."""

    def __reduce__(self) -> Any:
        raise TypeError("not for pickling")


def failing(rank: int, size: int, path: str) -> None:
    save(state_of(1), path, Model(rank, size, 1))
    broken = state_of(2)
    if rank == 1:
        # The error is found when rank 1 writes. By then rank 0 has written its part, or is about to.
        del broken["plain"]
        broken["only here"] = Unreadable()
    with pytest.raises(CheckpointException, match="not for pickling"):
        save(broken, path, Model(rank, size, 2))
    loaded = state_of(None)
    model = Model(rank, size)
    load(loaded, path, model)
    check_state(loaded, 1)
    # On one rank a table does not fit. Then the tables of no rank are changed.
    other = Model(rank, size, 7) if rank == 0 else Model(rank, size, dim=4)
    before = other.contents() if rank == 0 else None
    with pytest.raises(CheckpointException):
        load(loaded, path, other)
    if rank == 0:
        assert other.contents() == before
    save(state_of(3), path, Model(rank, size, 3))
    dist.barrier()
    if rank == 0:
        assert len(held(path)) == 2, "nothing is left of the save that failed"
    contents: list[Any] = [None] * size
    final = Model(rank, size)
    load(state_of(None), path, final)
    dist.all_gather_object(contents, final.contents())
    assert sorted(row for rank_rows in contents for row in rank_rows) == rows(3)


def test_error_on_one_rank_fails_the_save_on_all(two_ranks: World, tmp_path: Path) -> None:
    """The previous checkpoint stays."""
    two_ranks.run(failing, str(tmp_path / "ckpt"))


SAVE_STEPS = ["set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "later", "finish"]
LOAD_STEPS = [
    "read_metadata",
    "set_up_storage_reader",
    "prepare_local_plan",
    "prepare_global_plan",
    "read_data",
    "later",
]
ON_COORDINATOR = {"prepare_global_plan", "finish"}


def break_step(storage: Any, step: str) -> Any:
    """The storage with a step that raises. For "later" that is the future of its data."""

    def broken(*_args: Any, **_kwargs: Any) -> Any:
        raise ValueError(f"broken {step}")

    def later(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        future: Future[Any] = Future()
        future.set_exception(ValueError("broken later"))
        return future

    if step == "later":
        name = "write_data" if isinstance(storage, EmbCacheStorageWriter) else "read_data"
        original = getattr(storage, name)
        setattr(storage, name, later)
    else:
        setattr(storage, step, broken)
    return storage


def failing_steps(rank: int, size: int, path: str) -> None:
    save(state_of(1), path, Model(rank, size, 1))
    for step in SAVE_STEPS:
        writer = EmbCacheStorageWriter(path, Model(rank, size, 2))
        if rank == (0 if step in ON_COORDINATOR else 1):
            break_step(writer, step)
        with pytest.raises(CheckpointException, match=f"broken {step}") as raised:
            dcp.save(state_of(2), storage_writer=writer)
        assert raised.value.failures.keys() == {0 if step in ON_COORDINATOR else 1}
        writer.close()  # else what it wrote is held as long as it lives
    for step in LOAD_STEPS:
        reader = EmbCacheStorageReader(path, Model(rank, size))
        if rank == (0 if step in ON_COORDINATOR else 1):
            break_step(reader, step)
        with pytest.raises(CheckpointException, match=f"broken {step}"):
            dcp.load(state_of(None), storage_reader=reader)
    state, model = state_of(None), Model(rank, size)
    load(state, path, model)
    check_state(state, 1)
    # A load that failed holds the checkpoint as long as its reader lives. Here the reader is in a cycle with the error.
    del reader
    gc.collect()
    dist.barrier()
    # The same writer can be used again after a save that failed.
    writer = EmbCacheStorageWriter(path, Model(rank, size, 3))
    for fails in (True, False):
        broken = state_of(3) | ({"only here": Unreadable()} if fails and rank == 1 else {})
        with pytest.raises(CheckpointException) if fails else contextlib.nullcontext():
            dcp.save(broken, storage_writer=writer)
    load(state, path, model)
    check_state(state, 3)
    dist.barrier()
    if rank == 0:
        assert len(held(path)) == 2, f"nothing is left of the saves that failed: {held(path)}"


def test_an_error_at_any_step_of_one_rank_is_every_ranks(two_ranks: World, tmp_path: Path) -> None:
    two_ranks.run(failing_steps, str(tmp_path / "ckpt"))


def asynchronous(rank: int, size: int, path: str) -> None:
    group = dist.new_group(backend="gloo")
    writer = EmbCacheStorageWriter(path, model := Model(rank, size, 1))
    state = {"rows": spread("rows", full(1)), "plain": full(1)}
    future = dcp.async_save(state, storage_writer=writer, process_group=group)
    # Training goes on, with its collectives.
    state["plain"].zero_()
    for shard in state["rows"].local_shards():
        shard.tensor.zero_()
    model.fill(5)
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    future.result()
    dist.barrier()
    loaded = {"rows": spread("columns", full(0)), "plain": torch.zeros(ROWS, COLUMNS)}
    tables = Model(rank, size)
    load(loaded, path, tables)
    check(loaded["rows"], full(1))
    assert torch.equal(loaded["plain"], full(1))
    assert sorted(tables.contents()) == [row for row in rows(1) if row[0] in {i for i, *_ in model.contents()}]
    # If one rank cannot stage something, the save fails on both.
    held_back = _native.CheckpointPart(_native.CheckpointDirectory.open_to_save(path, "basic"), rank, 0)
    if rank == 1:
        held_back.snapshot_tables([_native.AsyncSaveTable("", model.tables["spread"]._native_table, {})], 9)
    future = dcp.async_save(state, storage_writer=writer, process_group=group)
    with pytest.raises(CheckpointException, match="has a save in the background"):
        future.result()
    held_back.abandon()
    dist.barrier()


@pytest.mark.slow
def test_ranks_save_asynchronously_while_training_goes_on(two_ranks: World, tmp_path: Path) -> None:
    two_ranks.run(asynchronous, str(tmp_path / "ckpt"))


def by_the_default_group(rank: int, size: int, path: str) -> None:
    writer = EmbCacheStorageWriter(path, Model(rank, size, 1))
    for group in (None, dist.group.WORLD):
        with pytest.raises(InputError, match=r"process_group is the default group.*dist\.new_group"):
            dcp.async_save({"plain": full(1)}, storage_writer=writer, process_group=group)
        dist.all_reduce(torch.ones(1))
    if rank == 0:
        # One rank that saves alone has no collectives.
        alone = EmbCacheStorageWriter(f"{path}-alone")
        dcp.async_save({"plain": full(1)}, storage_writer=alone, no_dist=True).result()
    dcp.save({"plain": full(1)}, storage_writer=writer)


def test_an_asynchronous_save_by_the_group_of_training_is_refused(two_ranks: World, tmp_path: Path) -> None:
    two_ranks.run(by_the_default_group, str(tmp_path / "ckpt"))
    assert "part" not in " ".join(held(tmp_path / "ckpt"))


PLACEMENTS = [[Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(0), Shard(1)]]


def meshes(rank: int, size: int, path: str) -> None:
    value = full(1)
    square, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    hows = [(square, placements) for placements in PLACEMENTS] + [(line, [Shard(0)]), (line, [Replicate()])]
    save({str(n): distribute_tensor(value + n, *how) for n, how in enumerate(hows)}, path)
    for turn in range(len(hows)):
        turned = [*hows[turn:], *hows[:turn]]
        state = {str(n): distribute_tensor(torch.zeros(ROWS, COLUMNS), *how) for n, how in enumerate(turned)}
        load(state, path)
        for n in range(len(hows)):
            assert torch.equal(state[str(n)].full_tensor(), value + n)
    del rank, size


def test_four_ranks_load_into_other_meshes_than_they_saved_from(four_ranks: World, tmp_path: Path) -> None:
    four_ranks.run(meshes, str(tmp_path / "ckpt"))


class Collective(Stateful):
    """An object that every rank must load at the same time."""

    def __init__(self) -> None:
        self.sum = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        self.sum = torch.full((1,), float(dist.get_rank() + 1))
        dist.all_reduce(self.sum)


def network(how: str, size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    made: nn.Module = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    if how == "fsdp":
        fully_shard(made, mesh=init_device_mesh("cpu", (size,)))
    elif how == "ddp":
        made = nn.parallel.DistributedDataParallel(made)
    return made, torch.optim.Adam(made.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> torch.Tensor:
    loss = torch.zeros(())
    for step in steps:
        inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def resumed(_rank: int, size: int, path: str) -> None:
    for how in ("fsdp", "ddp"):
        model, optimizer = network(how, size)
        train(model, optimizer, range(2))
        parts = get_state_dict(model, optimizer)
        first, second = Collective(), Collective()
        # The order is different on each rank.
        objects = {"a": first, "b": second} if dist.get_rank() == 0 else {"b": second, "a": first}
        save({"model": parts[0], "optimizer": parts[1], **objects}, f"{path}-{how}")
        expected = train(model, optimizer, range(2, 4))
        again, its_optimizer = network(how, size)
        state = dict(zip(("model", "optimizer"), get_state_dict(again, its_optimizer), strict=True))
        load({**state, **objects}, f"{path}-{how}")
        assert first.sum == second.sum == size * (size + 1) / 2
        set_state_dict(again, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert torch.equal(train(again, its_optimizer, range(2, 4)), expected)


def test_sharded_and_replicated_models_resume_bit_for_bit(two_ranks: World, tmp_path: Path) -> None:
    two_ranks.run(resumed, str(tmp_path / "ckpt"))


def test_the_ids_of_the_model_are_spread(two_ranks: World) -> None:
    counts: list[int] = two_ranks.run(count)
    assert sum(counts) == len(IDS)
    assert all(counts)


def count(rank: int, size: int) -> int:
    return len(Model(rank, size, 0).contents())
