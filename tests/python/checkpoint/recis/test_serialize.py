"""Block-level checkpoints round-trip for any shards, whole or in the parts that a filter selects."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from processes import World
from serialize_cases import BATCHES, path, saved_folder, trained
from tables import Contents, bucket_of, make_bag, random_batches, ssd_tiers, train
from torchrec_embcache import EmbCacheStorageReader, EmbCacheStorageWriter, TierBudgets, initializers, optimizers
from torchrec_embcache.checkpoint import _tensor_bytes
from torchrec_embcache.checkpoint.recis import _reader, _writer
from torchrec_embcache.checkpoint.recis._threads import BoundedExecutor
from torchrec_embcache.config import DEFAULT_TOTAL_NUM_BUCKETS, bucket_range
from torchrec_embcache.exceptions import (
    CapacityError,
    ConfigError,
    InputError,
    MismatchError,
    PathError,
    StateError,
    UnsupportedError,
)
from torchrec_embcache.model import CacheModule
from torchrec_embcache.serialize import Loader, LoadInfo, Saver, WriteBlock
from torchrec_embcache.table.cache_table import CacheTable

__all__ = ["path"]  # fixtures

OPTIMIZERS = [
    optimizers.SGD(lr=0.1),
    optimizers.RowWiseAdagrad(lr=0.1),
    optimizers.Adagrad(lr=0.1),
    optimizers.Adam(lr=0.1),
    optimizers.PartialRowWiseAdam(lr=0.1),
    optimizers.FTRL(lr=0.1),
    optimizers.LAMB(lr=0.1),
]


def rank_shard(rank: int, world: int, **settings: Any) -> CacheTable:
    """The table of `make_bag()` as one of several ranks has it, without rows."""
    defaults: dict[str, Any] = {
        "name": "item", "dim": 4, "tiers": TierBudgets(host_bytes="1MiB"), "seed": 7, "rank": rank, "world_size": world,
        "initializer": initializers.Uniform(-0.5, 0.5), "optimizer": optimizers.Adagrad(lr=0.1),
    }  # fmt: skip
    return CacheTable(**(defaults | settings))


def rows_of(*tables: CacheTable) -> dict[int, tuple[bytes, ...]]:
    """Every bit of every row of the shards of a table."""
    found: dict[int, tuple[bytes, ...]] = {}
    for table in tables:
        for rows in table._native_table.export(50):
            known = rows.metadata
            columns = (rows.vectors, rows.scalars, known.count, known.last_step, known.score, known.modified_epoch)
            for n, row_id in enumerate(rows.ids.tolist()):
                assert row_id not in found
                found[row_id] = tuple(column[n].tobytes() for column in columns)
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
def test_table_and_tensors_round_trip_and_train_alike(
    optimizer: optimizers.OptimizerSpec, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_writer, "RUN_BYTES", 900)  # several runs
    bag, dense = trained(optimizer=optimizer), nn.Linear(7, 5)
    Saver(path=str(path), hashtables={"item": bag}, tensors=dict(dense.state_dict())).save()
    other, into = make_bag(optimizer=optimizer), nn.Linear(7, 5)
    loaded = Loader(str(path), hashtables={"item": other}, tensors=dict(into.state_dict())).load()
    assert loaded.tables == {"item": len(bag)}
    assert loaded.tensors == ["bias", "weight"]
    assert not loaded.missing
    assert not loaded.unexpected
    assert Contents.of(other) == Contents.of(bag)
    assert rows_of(other.table) == rows_of(bag.table)
    assert torch.equal(into.weight, dense.weight)
    more = random_batches(3, bags=6, ids=90, seed=9)
    train(bag, more)
    train(other, more)
    assert Contents.of(other) == Contents.of(bag)


def test_rows_of_all_tiers_are_saved_and_load_into_other_budgets(path: Path, tmp_path: Path) -> None:
    bag = make_bag(tiers=ssd_tiers(tmp_path / "a", host_bytes="16KiB"))
    train(bag, random_batches(40, bags=30, ids=3000, seed=1))
    assert bag.stats().ssd is not None
    assert bag.stats().ssd.rows > 100
    Saver(path=str(path), hashtables={"item": bag}).save()
    other = make_bag(tiers=ssd_tiers(tmp_path / "b", host_bytes="32KiB"))
    Loader(str(path), hashtables={"item": other}).load()
    assert Contents.of(other) == Contents.of(bag)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint16]
)
def test_tensors_of_any_type_shape_and_stride_come_back(
    dtype: torch.dtype, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tensor_bytes, "WINDOW_BYTES", 256 << 10)
    base = torch.randint(0, 2, (300, 500)).to(dtype)
    tensors = {"a": base, "strided": base.t(), "scalar": base[0, 0], "none": base[:0], "1": base[3]}
    Saver(path=str(path), tensors=tensors).save()
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    into["strided"] = torch.zeros_like(base).t()
    Loader(str(path), tensors=into).load()
    for name, tensor in tensors.items():
        assert torch.equal(into[name], tensor), name


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(6.0).view(1, 6)[:, 2],  # one element with a stride
        torch.arange(6.0).view(1, 6)[:, 2:3].expand(1, 1),
        torch.arange(4.0)[::4],
        torch.tensor([1 + 2j, 3 + 4j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,  # negated
        torch.tensor([[1 + 2j, 3 + 4j], [5 + 6j, 7 + 8j]]).mH[:1],
        torch.ones(1).expand(3),
    ],
)
def test_views_come_back_by_blocks_and_by_dcp_into_views_too(view: torch.Tensor, path: Path) -> None:
    Saver(path=str(path), tensors={"a": view}).save()
    dcp.save({"a": view}, storage_writer=EmbCacheStorageWriter(path / "dcp"))
    for into in (torch.zeros(view.shape, dtype=view.dtype), torch.zeros(*view.shape, 5, dtype=view.dtype)[..., 2]):
        Loader(str(path), tensors={"a": into}).load()
        assert torch.equal(into, view)
        dcp.load({"a": into.zero_()}, storage_reader=EmbCacheStorageReader(path / "dcp"))
        assert torch.equal(into, view)
    conjugate = torch.zeros(view.shape, dtype=torch.complex64).conj()
    if view.is_complex():
        Loader(str(path), tensors={"a": conjugate}).load()
        assert torch.equal(conjugate, view)
        dcp.load({"a": conjugate.zero_()}, storage_reader=EmbCacheStorageReader(path / "dcp"))
        assert torch.equal(conjugate, view)


def test_tensors_may_be_called_as_the_zeros_between_them_are(path: Path) -> None:
    names = ("__pad.0", "__pad.1", "___pad.0", "a", "a.crc32c")
    tensors = {name: torch.full((3,), number) for number, name in enumerate(names)}
    Saver(parallel=1, path=str(path), tensors=tensors).save()
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    Loader(str(path), tensors=into).load()
    assert all(torch.equal(into[name], tensors[name]) for name in names)
    found = safetensors.numpy.load_file(next(saved_folder(path).glob("model-*.safetensors")))
    assert all((found[name] == tensors[name].numpy()).all() for name in names)


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
@pytest.mark.parametrize("loading", [1, 2, 3, 4])
def test_any_number_of_shards_loads_what_any_number_saved(
    saved: int, loading: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_writer, "RUN_BYTES", 900)
    bag = trained()
    whole = rows_of(bag.table)
    Saver(path=str(path / "one"), hashtables={"item": bag}).save()
    shards = [rank_shard(rank, saved) for rank in range(saved)]
    for shard in shards:
        Loader(str(path / "one"), hashtables={"item": shard}).load()
    for rank in (*range(1, saved), 0):  # in any order
        tensors = {"dense": torch.arange(9)}
        Saver(rank, saved, path=str(path / "many"), hashtables={"item": shards[rank]}, tensors=tensors).save()
    into = [rank_shard(rank, loading) for rank in range(loading)]
    for rank, table in enumerate(into):
        dense = torch.zeros(9, dtype=torch.int64)
        loaded = Loader(str(path / "many"), hashtables={"item": table}, tensors={"dense": dense}).load()
        begin, end = bucket_range(rank, loading, table.total_num_buckets)
        owned = [i for i in whole if begin <= bucket_of(i, table.total_num_buckets) < end]
        assert loaded.tables["item"] == len(owned) == len(table)
        assert torch.equal(dense, torch.arange(9))
        assert table.step() == bag.table.step()
    assert rows_of(*into) == whole


def test_full_table_loads_its_own_blocks(path: Path, tmp_path: Path) -> None:
    def make(name: str, host_bytes: str) -> Any:
        folder = tmp_path / name
        folder.mkdir()
        return make_bag(
            embedding_dim=8,
            optimizer=optimizers.SGD(lr=0.1),
            tiers=ssd_tiers(folder, host_bytes=host_bytes, ssd_bytes="16MiB"),
        )

    bag, first, more = make("ssd", "128KiB"), 0, 500
    while more:  # until the index of the rows on SSD leaves no room for one more in RAM
        try:
            bag(torch.arange(first, first + more).view(-1, 1)).sum().backward()
            first += more
        except CapacityError:
            more //= 2
    assert len(bag) > 5000
    expected = rows_of(bag.table)
    Saver(path=str(path), hashtables={"item": bag}).save()
    Loader(str(path), {"item": bag}).load()
    assert rows_of(bag.table) == expected
    other = make("other", "160KiB")
    Loader(str(path), {"item": other}).load()
    assert rows_of(other.table) == expected


def test_without_threads_blocks_are_read_and_written_by_the_caller() -> None:
    here = threading.get_ident()
    with BoundedExecutor(0, "none") as none, BoundedExecutor(2, "some") as some:
        assert none.submit(threading.get_ident).result() == here
        assert isinstance(none.submit(int, "no number").exception(), ValueError)
        assert here not in {future.result() for future in [some.submit(threading.get_ident) for _ in range(20)]}
    with pytest.raises(RuntimeError, match="ended"):
        some.submit(int)


def test_a_table_with_another_number_of_buckets_takes_its_rows(path: Path) -> None:
    bag = trained()
    Saver(path=str(path), hashtables={"item": bag}).save()
    into = [rank_shard(rank, 3, total_num_buckets=17) for rank in range(3)]
    for table in into:
        Loader(str(path), hashtables={"item": table}).load()
    assert rows_of(*into) == rows_of(bag.table)


def test_a_shard_reads_only_what_it_owns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_writer, "RUN_BYTES", 900)
    read = 0

    plain = _reader.RecisTableReader._column

    def counted(table: _reader.RecisTableReader, run: Any, slot: str) -> Any:
        nonlocal read
        column = plain(table, run, slot)
        read += column.nbytes
        return column

    bag = trained()
    Saver(path=str(path), hashtables={"item": bag}).save()
    monkeypatch.setattr(_reader.RecisTableReader, "_column", counted)
    Loader(str(path), hashtables={"item": rank_shard(0, 1)}).load()
    whole, read = read, 0
    Loader(str(path), hashtables={"item": rank_shard(1, 4)}).load()
    assert read < whole * 0.5


def test_any_program_can_read_the_files_by_the_indexes_of_recis(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of RecIS' own reader, written down again: names by tensorkey.json, files by index, then plain safetensors."""
    monkeypatch.setattr(_writer, "RUN_BYTES", 900)
    bag = trained()
    Saver(path=str(path / "one"), hashtables={"item": bag}).save()
    shards = [rank_shard(rank, 2) for rank in range(2)]
    for rank, shard in enumerate(shards):
        Loader(str(path / "one"), hashtables={"item": shard}).load()
        Saver(rank, 2, 3, str(path / "two"), {"item": shard}, {"w": torch.eye(3)}).save()
    folder = saved_folder(path / "two")
    names = json.loads((folder / "tensorkey.json").read_text())
    index = json.loads((folder / "index").read_text())
    files = {number: name for name, number in index["file_index"].items()}
    blocks: dict[str, Any] = {}
    for part, file in index["block_index"].items():
        blocks[names.get(part, part)] = safetensors.numpy.load_file(folder / files[file])[part]
    assert np.array_equal(blocks.pop("w^ "), np.eye(3))
    found = {}
    slices = sorted({name.split("^")[1] for name in blocks})
    assert slices == ["0000@04093@4093", "0000@4093@4093"], "leading zeros distinguish the shards"
    for part in slices:
        begin, end, size = map(int, part.split("@"))
        ids = blocks[f"item@id^{part}"]
        assert all(begin <= i % 2**64 % size < end for i in ids.tolist())
        for n, row_id in enumerate(ids.tolist()):
            found[row_id] = (blocks[f"item@embedding^{part}"][n], blocks[f"item@sum^{part}"][n])
    for chunk in bag.export():
        for n, row_id in enumerate(chunk.ids.tolist()):
            weights, sums = found.pop(row_id)
            assert np.array_equal(weights, chunk.weights[n].numpy())
            assert np.array_equal(sums, chunk.slots["sum"][n].numpy())
    assert not found


def test_save_filter_gets_a_block_for_ids_and_each_slot(path: Path) -> None:
    bag = trained(optimizer=optimizers.Adam(lr=0.1))
    seen: list[WriteBlock] = []

    def only_values(blocks: list[WriteBlock]) -> list[WriteBlock]:
        seen.extend(blocks)
        return [block for block in blocks if block.dense or block.slot in ("id", "embedding")]

    tensors = {"w": torch.ones(2, 3)}
    Saver(0, 1, 2, str(path), {"item": bag}, tensors, only_values).save()
    slots = ["id", "embedding", "exp_avg", "exp_avg_sq", "last_step", "count", "score", "modified_epoch"]
    assert [block.tensor_name() for block in seen] == [*(f"item@{slot}" for slot in slots), "w"]
    assert seen[1].shape == (len(bag), 4)
    assert (seen[-1].dtype, seen[-1].shape, seen[-1].dense) == ("F32", (2, 3), True)
    other = make_bag(optimizer=optimizers.Adam(lr=0.1))
    with pytest.raises(MismatchError, match="item@exp_avg, item@exp_avg_sq"):
        Loader(str(path), hashtables={"item": other}, tensors={"w": torch.zeros(2, 3)}).load()
    assert len(other) == 0
    loaded = Loader(str(path), {"item": other}, {"w": torch.zeros(2, 3)}, strict=False).load()
    assert loaded.missing == [
        f"item@{slot}" for slot in ("count", "exp_avg", "exp_avg_sq", "last_step", "modified_epoch", "score")
    ]
    for chunk in other.export():
        found = bag.read_rows(chunk.ids)
        assert found.found.all()
        assert torch.equal(found.weights, chunk.weights)
        assert not chunk.slots["exp_avg"].any()


def test_the_load_info_is_json_and_a_filter_renames_drops_and_merges(path: Path) -> None:
    left, right = trained(name="left"), make_bag(name="right")
    train(right, random_batches(4, bags=8, ids=40, seed=77))
    tensors = {"w": torch.ones(3), "b": torch.zeros(2)}
    Saver(path=str(path), hashtables={"left": left, "right": right}, tensors=tensors).save()
    into, weight = make_bag(name="both"), torch.zeros(3)
    seen: list[LoadInfo] = []

    def merge(info: LoadInfo) -> LoadInfo:
        seen.append(json.loads(json.dumps(info)))
        slots = [slot for slot in info["both"]["both"] if slot != "sum"]
        return {"both": {"left": slots, "right": slots}, "weight": {"w": []}}

    loader = Loader(str(path), {"both": into}, {"weight": weight}, 4, merge, strict=False)
    loaded = loader.load()
    slots = ["id", "embedding", "sum", "last_step", "count", "score", "modified_epoch"]
    assert seen == [{"both": {"both": slots}, "weight": {"weight": []}}]
    assert seen[0] == loader.default_load_info()
    assert loaded.missing == []
    assert loaded.unexpected == ["b"]
    assert torch.equal(weight, torch.ones(3))
    ids = torch.tensor(sorted({*rows_of(left.table), *rows_of(right.table)}))
    assert sorted(rows_of(into.table)) == ids.tolist()
    expected, second, found = left.read_rows(ids), right.read_rows(ids), into.read_rows(ids)
    expected.weights[second.found] = second.weights[second.found]  # later sources lie over earlier ones
    assert torch.equal(found.weights, expected.weights)
    assert not found.slots["sum"].any()


def test_rows_and_slots_that_are_not_loaded_stay(path: Path) -> None:
    bag = trained()
    Saver(path=str(path), hashtables={"item": bag}).save()
    other = make_bag()
    train(other, random_batches(3, bags=8, ids=200, seed=5))
    ids = torch.tensor(sorted({*rows_of(other.table), *rows_of(bag.table)}))
    mine, theirs = other.read_rows(ids), bag.read_rows(ids)

    sums: LoadInfo = {"item": {"item": ["id", "sum"]}}
    Loader(str(path), {"item": other}, filter_func=lambda _: sums).load()
    now = other.read_rows(ids)
    assert now.found.all()
    assert torch.equal(now.weights, mine.weights)  # of rows that were not there: as they are born
    expected = torch.where(theirs.found[:, None], theirs.slots["sum"], mine.slots["sum"])
    assert torch.equal(now.slots["sum"], expected)
    assert torch.equal(now.metadata.count, mine.metadata.count)


def test_rows_loaded_under_another_name_go_on_being_born_alike(path: Path) -> None:
    bag = trained()
    Saver(path=str(path), hashtables={"item": bag}).save()
    other = make_bag(name="renamed")
    Loader(
        str(path), {"renamed": other}, filter_func=lambda info: {"renamed": {"item": info["renamed"]["renamed"]}}
    ).load()
    more = random_batches(3, bags=6, ids=300, seed=21)  # with ids not seen before
    train(bag, more)
    train(other, more)
    assert rows_of(other.table) == rows_of(bag.table)


def test_missing_and_extra_names_are_rejected_untouched(path: Path) -> None:
    Saver(path=str(path), hashtables={"item": trained()}, tensors={"w": torch.ones(3)}).save()
    bag, weight = make_bag(), torch.zeros(3)
    with pytest.raises(MismatchError, match="has no user"):
        Loader(str(path), {"item": bag, "user": make_bag(name="user")}, {"w": weight}).load()
    with pytest.raises(MismatchError, match="has no v"):
        Loader(str(path), {"item": bag}, {"w": weight, "v": torch.zeros(1)}).load()
    assert len(bag) == 0
    assert not weight.any()
    # Other content of the checkpoint is reported and not loaded.
    loaded = Loader(str(path), {"item": bag}).load()
    assert (loaded.tables, loaded.tensors, loaded.unexpected) == ({"item": len(bag)}, [], ["w"])
    assert len(bag) > 0
    loaded = Loader(str(path), tensors={"w": weight}).load()
    assert (loaded.tables, loaded.tensors, loaded.unexpected) == ({}, ["w"], ["item"])
    assert Loader(str(path)).load().unexpected == ["item", "w"]
    bag, weight = make_bag(), torch.zeros(3)
    # Names that a filter drops are not reported as missing.
    Loader(str(path), {"item": bag}, {"w": weight}, filter_func=lambda info: {"w": info["w"]}).load()
    assert len(bag) == 0
    assert weight.all()


def test_mismatched_blocks_are_rejected_untouched(path: Path) -> None:
    """Other widths, optimizers, types or shapes."""
    Saver(path=str(path), hashtables={"item": trained()}, tensors={"w": torch.ones(3)}).save()
    weight = torch.zeros(3)
    for wrong in (make_bag(embedding_dim=5), make_bag(optimizer=optimizers.RowWiseAdagrad(lr=0.1))):
        with pytest.raises(MismatchError, match="width and optimizer"):
            Loader(str(path), {"item": wrong}, {"w": weight}).load()
        assert len(wrong) == 0
    for tensor in (torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)):
        bag = make_bag()
        with pytest.raises(MismatchError, match="type and shape"):
            Loader(str(path), {"item": bag}, {"w": tensor}).load()
        assert len(bag) == 0


def test_until_every_shard_has_saved_the_checkpoint_before_is_loaded(path: Path) -> None:
    old = trained()
    Saver(path=str(path), hashtables={"item": old}).save()
    shards = [rank_shard(rank, 2) for rank in range(2)]
    for shard in shards:
        Loader(str(path), {"item": shard}).load()
        shard._native_table.set_step(99)
    Saver(1, 2, path=str(path), hashtables={"item": shards[1]}).save()
    between = make_bag()
    Loader(str(path), {"item": between}).load()
    assert between.table.step() == old.table.step()
    Saver(0, 2, path=str(path), hashtables={"item": shards[0]}).save()
    after = make_bag()
    Loader(str(path), {"item": after}).load()
    assert after.table.step() == 99
    assert [entry.name for entry in path.iterdir() if entry.is_dir()] == [saved_folder(path).name]


def test_killed_shard_does_not_complete_its_save_with_later_rows(path: Path) -> None:
    shards = [rank_shard(rank, 2) for rank in range(2)]
    Saver(0, 2, path=str(path), hashtables={"item": shards[0]}).save()  # shard 1 was killed here
    for shard in shards:
        shard._native_table.set_step(7)
    Saver(1, 2, path=str(path), hashtables={"item": shards[1]}).save()
    with pytest.raises(PathError, match="no RecIS-format checkpoint"):
        Loader(str(path), {"item": make_bag()}).load()
    Saver(0, 2, path=str(path), hashtables={"item": shards[0]}).save()
    bag = make_bag()
    Loader(str(path), {"item": bag}).load()
    assert bag.table.step() == 7
    assert len([entry for entry in path.iterdir() if entry.is_dir()]) == 1  # what was left is swept


def test_training_while_a_save_runs_ends_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_writer, "RUN_BYTES", 900)
    bag = trained()

    def train_on(blocks: list[WriteBlock]) -> list[WriteBlock]:
        train(bag, random_batches(1, bags=8, ids=400, seed=2))
        return blocks

    with pytest.raises(StateError, match="save between steps"):
        Saver(path=str(path), hashtables={"item": bag}, filter_func=train_on).save()
    assert not any(entry.is_dir() for entry in path.iterdir())


def test_shards_that_do_not_make_one_table_are_refused_by_the_last(path: Path) -> None:
    Saver(0, 2, path=str(path), hashtables={"item": rank_shard(0, 2)}).save()
    with pytest.raises(MismatchError, match="bucket 2047 is followed by 0"):
        Saver(1, 2, path=str(path), hashtables={"item": rank_shard(0, 2)}).save()
    Saver(0, 2, path=str(path), hashtables={"item": rank_shard(0, 2)}).save()
    with pytest.raises(MismatchError, match="slots"):
        Saver(1, 2, path=str(path), hashtables={"item": rank_shard(1, 2)}, filter_func=lambda blocks: blocks[:2]).save()


class _Pair(CacheModule, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = [make_bag(name="a"), make_bag(name="b")]

    @property
    def tables(self) -> dict[str, CacheTable]:
        return {bag.table.name: bag.table for bag in self.bags}


def test_the_tables_of_a_whole_module_are_blocks_by_their_names(path: Path) -> None:
    pair = _Pair()
    for bag in pair.bags:
        train(bag, BATCHES)
    Saver(path=str(path), hashtables={"ebc": pair}).save()
    other = _Pair()
    assert set(Loader(str(path), {"ebc": other}).load().tables) == {"ebc.a", "ebc.b"}
    for mine, theirs in zip(pair.bags, other.bags, strict=True):
        assert Contents.of(mine) == Contents.of(theirs)


def test_wrong_arguments_are_refused(path: Path) -> None:
    bag = trained()
    where = str(path)
    for wrong in ({"shard_index": 1}, {"shard_num": 0}, {"parallel": 0}, {"shard_index": -1}):
        with pytest.raises(ConfigError):
            Saver(**{"path": where, **wrong})  # type: ignore[arg-type]
    for tables, tensors in (
        ([bag], None),
        ({"a": nn.Linear(1, 1)}, None),
        ({"a@b": bag}, None),
        ({"": bag}, None),
        (None, [torch.ones(1)]),
        (None, {"a^": torch.ones(1)}),
        (None, {"__metadata__": torch.ones(1)}),
        (None, {"a": 5}),
        ({"a": bag}, {"a": torch.ones(1)}),
    ):
        for make in (lambda t, d: Saver(path=where, hashtables=t, tensors=d), lambda t, d: Loader(where, t, d)):
            with pytest.raises(InputError):
                make(tables, tensors)
    with pytest.raises(UnsupportedError):
        Saver(path=where, tensors={"a": torch.ones(2, 2).to_sparse()})
    twice: list[Callable[[Any], Any]] = [
        lambda blocks: blocks + blocks, lambda blocks: blocks[1:], lambda _: None, lambda _: ["item@id"],
    ]  # fmt: skip
    for pick in twice:
        with pytest.raises(InputError):
            Saver(path=where, hashtables={"item": bag}, filter_func=pick).save()
    Saver(path=where, hashtables={"item": bag}).save()
    load: list[Callable[[Any], Any]] = [
        lambda _: None, lambda info: {"other": info["item"]}, lambda _: {"item": {"item": ["embedding"]}},
        lambda _: {"item": {"item": ["id", "wrong"]}}, lambda _: {"item": ["id"]},
    ]  # fmt: skip
    for change in load:
        with pytest.raises(InputError):
            Loader(where, {"item": bag}, filter_func=change).load()
    with pytest.raises(PathError, match="no RecIS-format checkpoint"):
        Loader(str(path.parent), {"item": bag}).load()


def _save_and_load_together(rank: int, size: int, where: str, wrong: int | None) -> str:
    table = rank_shard(rank, size)
    begin, end = table.buckets
    owned = torch.tensor([i for i in range(-300, 300) if begin <= bucket_of(i, DEFAULT_TOTAL_NUM_BUCKETS) < end])
    table.import_rows(owned, torch.full((len(owned), 4), float(rank)))

    def fail(blocks: list[WriteBlock]) -> list[WriteBlock]:
        if rank == wrong:
            raise ValueError("this rank")
        return blocks

    saver = Saver(rank, size, path=where, hashtables={"item": table}, tensors={"w": torch.ones(3)}, filter_func=fail)
    try:
        saver.save()
    except Exception as error:
        return str(error)
    other, weight = rank_shard(rank, size), torch.zeros(3)
    Loader(where, {"item": other}, {"w": weight}).load()
    assert rows_of(other) == rows_of(table)
    assert weight.all()
    return "saved"


def test_ranks_of_one_group_save_together_and_raise_together(two_ranks: World, path: Path) -> None:
    assert two_ranks.run(_save_and_load_together, str(path), None) == ["saved"] * 2
    kept = saved_folder(path)
    found = two_ranks.run(_save_and_load_together, str(path), 1)
    assert all("this rank" in message for message in found)
    assert saved_folder(path) == kept
    assert two_ranks.run(_save_and_load_together, str(path), None) == ["saved"] * 2
    assert len([entry for entry in path.iterdir() if entry.is_dir()]) == 1
