"""Tables in Megatron-Core's distributed checkpoints, together with tensors and objects, on one rank and on several."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import nn

from megatron_cases import run_beside
from processes import World, process_group
from tables import OPTIMIZERS, Contents, bucket_of, make_bag, random_batches, train
from torchrec_embcache import TierBudgets, initializers, optimizers
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.exceptions import (
    EmbCacheWarning,
    InputError,
    MismatchError,
    PathError,
    StorageError,
    StoragePermissionError,
    UnsupportedError,
)
from torchrec_embcache.integrations import megatron
from torchrec_embcache.model import CacheModule
from torchrec_embcache.table.cache_table import CacheTable

BATCHES = random_batches(4, bags=8, ids=90, seed=3)


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    megatron.register()
    with process_group(0, 1, str(tmp_path_factory.mktemp("group") / "store")):
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    return path


class Model(nn.Module):
    """A dense part and a table."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.dense = nn.Linear(6, 5)
        self.bag = make_bag()

    def state(self) -> dict[str, Any]:
        """A sharded state dict as megatron's models give it, with the tables."""
        tensors = {
            name: ShardedTensor.from_rank_offsets(f"dense.{name}", t) for name, t in self.dense.state_dict().items()
        }
        return {"model": tensors, "sparse": megatron.sharded_tables(self)}


def trained() -> Model:
    model = Model()
    train(model.bag, BATCHES)
    return model


def extra(value: object) -> dict[str, Any]:
    return {"rng": ShardedObject("rng", value, (1,), (0,)), "iteration": 12}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tables_tensors_objects_and_common_state_come_back(asynchronous: bool, path: Path) -> None:
    model = trained()
    content, weight = Contents.of(model.bag), model.dense.weight.detach().clone()
    state = model.state() | extra({"seed": 4})
    request = dist_checkpointing.save(state, str(path), megatron.STRATEGY, async_sharded_save=asynchronous)
    if asynchronous:
        train(model.bag, BATCHES)
        assert not dist_checkpointing.check_is_distributed_checkpoint(str(path))
        run_beside(request)
        for finalize in request.finalize_fns:
            finalize()
    other = Model(seed=8)
    loaded = dist_checkpointing.load(other.state() | extra(None), str(path))
    assert loaded["sparse"]["embcache"] is other
    assert loaded["rng"] == {"seed": 4}
    assert loaded["iteration"] == 12
    assert torch.equal(loaded["model"]["weight"], weight)
    assert Contents.of(other.bag) == content
    config = json.loads((path / "metadata.json").read_text())
    assert (config["sharded_backend"], config["sharded_backend_version"]) == megatron.STRATEGY


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tables_alone_come_back_with_the_slots_of_any_optimizer(optimizer: str, path: Path) -> None:
    model, other = Model(), Model()
    for each in (model, other):
        each.bag = make_bag(optimizer=OPTIMIZERS[optimizer])
    train(model.bag, BATCHES)
    dist_checkpointing.save(megatron.sharded_tables(model), str(path), megatron.STRATEGY)
    dist_checkpointing.load(megatron.sharded_tables(other), str(path))
    assert Contents.of(other.bag) == Contents.of(model.bag)


def test_tables_come_back_without_slots_under_another_optimizer(path: Path) -> None:
    model = trained()
    dist_checkpointing.save({"sparse": megatron.sharded_tables(model)}, str(path), megatron.STRATEGY)
    other = Model()
    other.bag = make_bag(optimizer=optimizers.Adam(lr=0.1))
    with pytest.raises(MismatchError, match="slots=False"):
        dist_checkpointing.load({"sparse": megatron.sharded_tables(other)}, str(path))
    dist_checkpointing.load({"sparse": megatron.sharded_tables(other, slots=False)}, str(path))
    ids = torch.cat([chunk.ids for chunk in model.bag.export()])
    found = other.bag.read_rows(ids)
    assert found.found.all()
    assert torch.equal(found.weights, model.bag.read_rows(ids).weights)
    assert not any(slot.any() for slot in found.slots.values())
    assert other.bag.table.step() == 0
    with pytest.raises(InputError, match=r"slots=False.*is for a load"):
        dist_checkpointing.save({"sparse": megatron.sharded_tables(model, slots=False)}, str(path), megatron.STRATEGY)


def test_unsafe_table_directory_is_rejected(path: Path, tmp_path: Path) -> None:
    """A link, a pipe, or a directory that others can write to."""
    bag = trained().bag
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o750)
    save, load = megatron.SaveCommonStrategy(), megatron.LoadCommonStrategy()
    save.save_sharded_objects(megatron.sharded_tables(bag), path)
    folder, kept = path / "embcache-embcache", tmp_path / "kept"

    def refused(*types: type[Exception], where: Path = path) -> None:
        for use in (save.save_sharded_objects, load.load_sharded_objects):
            with pytest.raises(types):
                use(megatron.sharded_tables(other := make_bag()), where)
            assert len(other) == 0

    def linked(target: Path) -> None:
        folder.symlink_to(target)
        os.lchown(folder, 12345, -1)  # one's own links are followed

    folder.rename(kept)
    links = [lambda: linked(elsewhere), lambda: linked(kept)] if os.geteuid() == 0 else []
    for make in (*links, lambda: os.mkfifo(folder), folder.touch):
        make()
        # Without the directory of the tables a load finds no tables.
        refused(PathError, MismatchError, StoragePermissionError)
        folder.unlink()
    kept.rename(folder)
    before = sorted(path.rglob("*"))
    folder.chmod(0o770)
    refused(StoragePermissionError)
    folder.chmod(0o750)
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)  # another user's tables may be read but not written
        with pytest.raises((StoragePermissionError, PathError)):
            save.save_sharded_objects(megatron.sharded_tables(make_bag()), path)
        os.chown(folder, 0, -1)
        (tmp_path / "link").symlink_to(path)
        os.lchown(tmp_path / "link", 12345, -1)
        refused(PathError, StoragePermissionError, where=tmp_path / "link")
    assert sorted(path.rglob("*")) == before
    assert not list(elsewhere.iterdir())
    load.load_sharded_objects(megatron.sharded_tables(other := make_bag()), path)
    assert Contents.of(other) == Contents.of(bag)


def test_metadata_names_tensors_objects_and_tables(path: Path) -> None:
    model = trained()
    dist_checkpointing.save(model.state() | extra(1), str(path), megatron.STRATEGY)
    tensors = dist_checkpointing.load_tensors_metadata(str(path))
    assert {key: (tuple(t.global_shape), t.dtype) for key, t in tensors.items()} == {
        "dense.weight": ((5, 6), torch.float32),
        "dense.bias": ((5,), torch.float32),
    }
    everything = dist_checkpointing.serialization.load_sharded_metadata(str(path))
    assert {each.key for each in everything.values()} == {"dense.weight", "dense.bias", "rng", "embcache"}
    assert all(each.data is None for each in everything.values())
    plain = dist_checkpointing.load_plain_tensors(str(path))
    assert torch.equal(plain["dense.weight"], model.dense.weight)


def test_missing_and_unexpected_keys_are_reported_as_megatron_does(path: Path) -> None:
    model = trained()
    dist_checkpointing.save(model.state(), str(path), megatron.STRATEGY)
    other = Model()
    state = {"model": other.state()["model"], "sparse": megatron.sharded_tables(other, key="renamed")}
    _, missing, unexpected = dist_checkpointing.load(state, str(path), strict="return_all")
    assert (missing, unexpected) == ({"embcache"}, {"renamed"})
    assert len(other.bag) == 0
    with pytest.raises(MismatchError, match=r"no tables of the key \['renamed'\]; it has \['embcache'\]"):
        dist_checkpointing.load({"sparse": megatron.sharded_tables(other, key="renamed")}, str(path))


def test_linked_checkpoint_loads_where_it_fits_or_names_a_remedy(path: Path, tmp_path: Path) -> None:
    def model(name: str) -> Model:
        (tmp_path / name).mkdir(mode=0o750)
        made = Model()
        made.bag = make_bag(tiers=TierBudgets(host_bytes=3000, ssd_bytes="4MiB", ssd_dir=tmp_path / name))
        return made

    saved = model("saved")
    train(saved.bag, BATCHES)
    dist_checkpointing.save(megatron.sharded_tables(saved), str(path), megatron.STRATEGY)
    (tables,) = [found for found in path.iterdir() if (found / "LATEST").is_file()]
    assert Saver().save(saved, tables, linked=True).linked_bytes > 0
    fits = model("fits")
    dist_checkpointing.load(megatron.sharded_tables(fits), str(path))
    assert Contents.of(fits.bag) == Contents.of(saved.bag)
    other = Model()
    with pytest.raises(MismatchError, match=f"no SSD tier.*`embcache compact {tables}`"):
        dist_checkpointing.load(megatron.sharded_tables(other), str(path))
    Saver().compact(tables)
    dist_checkpointing.load(megatron.sharded_tables(other), str(path))
    assert Contents.of(other.bag) == Contents.of(saved.bag)


def test_tables_and_tensors_are_removed_by_the_prefix_of_their_key(path: Path) -> None:
    model = trained()
    strategy = megatron.SaveShardedStrategy(separation_hint="dense")
    state = {
        "model": model.state()["model"],
        "kept": ShardedTensor.from_rank_offsets("kept", torch.ones(3)),
        "a": megatron.sharded_tables(model, key="user/new"),
        "b": megatron.sharded_tables(model, key="item"),
    }
    dist_checkpointing.save(state, str(path), strategy)
    dist_checkpointing.remove_sharded_tensors(str(path), "user")
    keys = {each.key for each in dist_checkpointing.serialization.load_sharded_metadata(str(path)).values()}
    assert keys == {"dense.weight", "dense.bias", "kept", "item"}
    dist_checkpointing.remove_sharded_tensors(str(path), "dense")
    keys = {each.key for each in dist_checkpointing.serialization.load_sharded_metadata(str(path)).values()}
    assert keys == {"kept", "item"}
    assert not list(path.glob("dense*"))
    other = Model()
    with pytest.raises(MismatchError):
        dist_checkpointing.load({"a": megatron.sharded_tables(other, key="user/new")}, str(path))
    kept = {
        "kept": ShardedTensor.from_rank_offsets("kept", torch.zeros(3)),
        "b": megatron.sharded_tables(other, key="item"),
    }
    loaded = dist_checkpointing.load(kept, str(path))
    assert torch.equal(loaded["kept"], torch.ones(3))
    assert Contents.of(other.bag) == Contents.of(model.bag)
    with pytest.warns(EmbCacheWarning, match="begins with 'nothing'"):
        dist_checkpointing.remove_sharded_tensors(str(path), "nothing")


class OnlyTensorsSave(megatron.SaveShardedStrategy):
    """A strategy that leaves objects to the common strategy."""

    can_handle_sharded_objects = False  # type: ignore[assignment]


class OnlyTensorsLoad(megatron.LoadShardedStrategy):
    """A strategy that leaves objects to the common strategy."""

    can_handle_sharded_objects = False  # type: ignore[assignment]


def test_common_strategies_accept_tables_with_objects_left_over(path: Path) -> None:
    model = trained()
    dist_checkpointing.save(model.state() | extra({"seed": 4}), str(path), OnlyTensorsSave())
    assert (path / "rng" / "shard_0_1.pt").exists()
    other = Model(seed=8)
    loaded = dist_checkpointing.load(other.state() | extra(None), str(path), OnlyTensorsLoad())
    assert loaded["rng"] == {"seed": 4}
    assert torch.equal(loaded["model"]["weight"], model.dense.weight)
    assert Contents.of(other.bag) == Contents.of(model.bag)
    found = dist_checkpointing.serialization.load_sharded_metadata(str(path), OnlyTensorsLoad())
    assert {each.key for each in found.values()} == {"dense.weight", "dense.bias", "rng", "embcache"}


def test_megatron_checkpoints_are_read_and_others_rejected(path: Path) -> None:
    tensor = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}
    dist_checkpointing.save(tensor, str(path), megatron.SaveShardedStrategy("torch_dist", 1))
    into = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))}
    assert torch.equal(dist_checkpointing.load(into, str(path))["w"], torch.arange(4.0))  # megatron's own
    into = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))}
    loaded = dist_checkpointing.load(into, str(path), megatron.LoadShardedStrategy())
    assert torch.equal(loaded["w"], torch.arange(4.0))
    config = json.loads((path / "metadata.json").read_text())
    for change in ({"sharded_backend": "zarr"}, {"sharded_backend_version": 2}):
        (path / "metadata.json").write_text(json.dumps(config | change))
        with pytest.raises(UnsupportedError, match="this strategy reads"):
            dist_checkpointing.load(into, str(path), megatron.LoadShardedStrategy())


def test_unwritable_tensors_raise_and_leave_no_checkpoint(path: Path) -> None:
    model = trained()
    request = dist_checkpointing.save(model.state(), str(path), megatron.STRATEGY, async_sharded_save=True)
    for entry in path.iterdir():
        if entry.is_file():
            entry.unlink()
    path.rename(path.with_name("moved"))
    with pytest.raises(StorageError, match="rank 0: Worker failure"):
        request.execute_sync()
    assert not (path.with_name("moved") / "metadata.json").exists()


def test_async_save_waits_for_tables_and_fails_with_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: Future[Any] = Future()
    monkeypatch.setattr(Saver, "save_async", lambda *_: tables)
    request = dist_checkpointing.save(trained().state(), str(path), megatron.STRATEGY, async_sharded_save=True)
    run_beside(request)
    tables.set_exception(StorageError("the disk is full"))
    with pytest.raises(StorageError, match="the disk is full"):
        request.finalize_fns[0]()
    assert not (path / "metadata.json").exists()
    # The files of the failed save are not part of the next save of the process, which has other files, and more of them.
    monkeypatch.undo()
    again = path.parent / "again"
    again.mkdir()
    model = trained()
    request = dist_checkpointing.save(
        model.state() | extra({"seed": 5}), str(again), megatron.STRATEGY, async_sharded_save=True
    )
    run_beside(request)
    for finalize in request.finalize_fns:
        finalize()
    loaded = dist_checkpointing.load(Model(seed=8).state() | extra(None), str(again))
    assert loaded["rng"] == {"seed": 5}
    assert torch.equal(loaded["model"]["weight"], model.dense.weight)


def test_the_interface_is_that_of_megatrons_base_classes() -> None:
    saves = (megatron.SaveShardedStrategy(), megatron.SaveCommonStrategy())
    loads = (megatron.LoadShardedStrategy(), megatron.LoadCommonStrategy())
    assert all(strategy.can_handle_sharded_objects is True for strategy in (*saves, *loads))
    assert all(isinstance(strategy, megatron.SaveStrategyBase) for strategy in saves)
    assert isinstance(saves[0], megatron.AsyncSaveShardedStrategy)
    for strategy in loads:
        assert isinstance(strategy, megatron.LoadStrategyBase)
        strategy.check_backend_compatibility(loaded_backend="torch_dist")
        with pytest.raises(UnsupportedError, match="zarr"):
            strategy.check_backend_compatibility(loaded_backend="zarr")
        with pytest.raises(UnsupportedError, match="version 7"):
            strategy.check_version_compatibility(loaded_version=7)


def test_tables_of_an_unexecuted_request_are_removed_later(path: Path) -> None:
    """The next save removes them."""
    model = trained()
    rest = {key: value for key, value in model.state().items() if key != "sparse"}
    for key in ("dropped", "kept"):
        dist_checkpointing.save(
            {**rest, "sparse": megatron.sharded_tables(model, key)},
            str(path),
            megatron.STRATEGY,
            async_sharded_save=True,
        )
    assert sorted(entry.name for entry in path.glob("embcache-*")) == ["embcache-kept"]
    request = dist_checkpointing.save(
        {**rest, "sparse": megatron.sharded_tables(model, "kept")},
        str(path),
        megatron.STRATEGY,
        async_sharded_save=True,
    )
    run_beside(request)
    for finalize in request.finalize_fns:
        finalize()
    # A checkpoint that is whole keeps its tables.
    megatron.SaveShardedStrategy().async_save(megatron.sharded_tables(model, "more"), path)
    assert sorted(entry.name for entry in path.glob("embcache-*")) == ["embcache-kept", "embcache-more"]


def test_wrong_arguments_are_refused(path: Path) -> None:
    model = Model()
    with pytest.raises(InputError, match="no cache module"):
        megatron.sharded_tables(nn.Linear(1, 1))
    with pytest.raises(InputError, match="shorter"):
        megatron.sharded_tables(model, key="/" * 100)
    tables = megatron.sharded_tables(model)["embcache"]
    with pytest.raises(InputError, match="in a list"):
        dist_checkpointing.save({"a": [tables]}, str(path), megatron.STRATEGY)
    strategy = megatron.SaveShardedStrategy()
    with pytest.raises(InputError, match="one key"):
        strategy.save({"a": tables, "b": {"c": tables}}, path)


@pytest.mark.slow
def test_without_megatron_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["megatron"] = None
import torchrec_embcache
from torchrec_embcache.exceptions import UnsupportedError
try:
    import torchrec_embcache.integrations.megatron
except UnsupportedError as error:
    assert "pip install" in str(error), error
else:
    raise SystemExit("imported")
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})


class Shard(CacheModule, nn.Module):
    """A table as one of several ranks has it."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.table = CacheTable(
            name="item", dim=4, tiers=TierBudgets(host_bytes="1MiB"), seed=7, rank=rank, world_size=world,
            initializer=initializers.Uniform(-0.5, 0.5), optimizer=optimizers.Adagrad(lr=0.1),
        )  # fmt: skip

    @property
    def tables(self) -> Mapping[str, CacheTable]:
        return {"item": self.table}

    def owned(self) -> torch.Tensor:
        """Those of 400 ids that belong to this rank."""
        begin, end = self.table.buckets
        return torch.tensor([i for i in range(-200, 200) if begin <= bucket_of(i, self.table.total_num_buckets) < end])


def values(ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([ids * k for k in (1, 2, 3, 4)], 1).float()


def state_of(shard: Shard, rank: int, world: int, fill: bool) -> dict[str, Any]:
    part = torch.arange(12.0).chunk(world)[rank] if fill else torch.zeros(12 // world)
    return {
        "w": ShardedTensor.from_rank_offsets("w", part.clone(), (0, rank, world)),
        "same": ShardedTensor.from_rank_offsets("same", torch.ones(3) * fill, replica_id=rank),
        "rng": ShardedObject("rng", rank if fill else None, (world,), (rank,)),
        "step": 3,
        "sparse": megatron.sharded_tables(shard),
    }


def check_loaded(shard: Shard, loaded: dict[str, Any], rank: int, world: int) -> None:
    assert torch.equal(loaded["w"], torch.arange(12.0).chunk(world)[rank])
    assert torch.equal(loaded["same"], torch.ones(3))
    ids = shard.owned()
    found = shard.table.read_rows(ids)
    assert found.found.all()
    assert torch.equal(found.weights, values(ids))
    assert len(shard.table) == len(ids)


def _save_and_load(rank: int, world: int, where: str, asynchronous: bool) -> None:
    megatron.register()
    # Megatron writes by processes of its own, which the tests' processes may not start, because they are daemons.
    mp.current_process()._config["daemon"] = False
    shard = Shard(rank, world)
    shard.table.import_rows(ids := shard.owned(), values(ids))
    request = dist_checkpointing.save(
        state_of(shard, rank, world, True), where, megatron.STRATEGY, async_sharded_save=asynchronous
    )
    if asynchronous:
        shard.table.remove_rows(ids)
        request.execute_sync()
    other = Shard(rank, world)
    loaded = dist_checkpointing.load(state_of(other, rank, world, False), where)
    assert loaded["rng"] == rank
    check_loaded(other, loaded, rank, world)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_ranks_save_and_one_or_two_load(two_ranks: World, asynchronous: bool, path: Path) -> None:
    two_ranks.run(_save_and_load, str(path), asynchronous)
    shard = Shard(0, 1)
    state = state_of(shard, 0, 1, False)
    del state["rng"]  # megatron's objects belong to as many ranks as saved them
    check_loaded(shard, dist_checkpointing.load(state, str(path)), 0, 1)
