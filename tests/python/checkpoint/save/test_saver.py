"""Checkpoints of a model's tables round-trip, and no save or load is left incomplete."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from saver_cases import IN_RAM, OPTIMIZERS, data_files, make_bag, root, rows, train
from tables import bucket_of
from torchrec_embcache import EmbCacheEmbedding, TierBudgets, _native, cache_modules, optimizers
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.config import DEFAULT_TOTAL_NUM_BUCKETS
from torchrec_embcache.exceptions import ConfigError, CorruptionError, InputError, MismatchError, PathError, StateError

__all__ = ["root"]  # fixtures


# ---- round trips


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
def test_training_goes_on_bit_for_bit_after_a_load(optimizer: optimizers.OptimizerSpec, root: Path) -> None:
    straight, saved, loaded = (make_bag(optimizer=optimizer) for _ in range(3))
    train(straight)
    train(saved)
    Saver(0).save(saved, root)
    train(loaded, seed=9)  # contents that the load replaces
    Saver(0).load(loaded, root)
    assert rows(loaded) == rows(saved)
    assert loaded.table.step() == 5
    train(straight, seed=1)
    train(loaded, seed=1)
    before, after = rows(straight), rows(loaded)
    # Only the checkpoint epoch of rows that were trained since tells the two apart.
    assert {row_id: row[:-2] for row_id, row in after.items()} == {row_id: row[:-2] for row_id, row in before.items()}
    assert loaded.table.step() == straight.table.step() == 10


@pytest.mark.parametrize("count", [0, 1])
def test_a_table_of_no_row_and_one_of_one_row(count: int, root: Path) -> None:
    saved, loaded = make_bag(), make_bag()
    saved.import_rows(torch.tensor([-(1 << 63)])[:count], torch.full((count, 4), 3.0))
    train(loaded)
    Saver(0).save(saved, root)
    Saver(0).load(loaded, root)
    assert rows(loaded) == rows(saved)
    assert len(loaded) == count


def tiered(tmp_path: Path, name: str, **budgets: Any) -> TierBudgets:
    directory = tmp_path / name
    directory.mkdir(mode=0o700)
    return TierBudgets(ssd_dir=directory, ssd_bytes="16MiB", **budgets)


@pytest.mark.slow
def test_any_tiers_load_what_any_tiers_saved(tmp_path: Path, root: Path) -> None:
    small = "64KiB"
    tiers: list[Callable[[str], TierBudgets]] = [
        lambda _: IN_RAM,
        lambda _: TierBudgets(host_bytes="1MiB", device_bytes="4KiB"),
        lambda name: tiered(tmp_path, name, host_bytes=small),
        lambda name: tiered(tmp_path, name, host_bytes=small, device_bytes="4KiB"),
    ]
    ids = torch.arange(-1500, 1500)
    expected = None
    for number, of in enumerate(tiers):
        saved = make_bag(tiers=of(f"saved{number}"), embedding_dim=16)
        saved.import_rows(ids, torch.arange(3000.0)[:, None] * torch.ones(16), {"sum": torch.arange(3000.0)})
        Saver(0).save(saved, root / str(number))
        expected = expected or rows(saved)
        assert len(expected) == 3000
        assert rows(saved) == expected
    for number in range(len(tiers)):
        for other, of in enumerate(tiers):
            loaded = make_bag(tiers=of(f"loaded{number}{other}"), embedding_dim=16)
            train(loaded)
            Saver(0).load(loaded, root / str(number))
            assert rows(loaded) == expected
            loaded.close()


class Two(nn.Module):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.left = make_bag("shared", **changes)
        self.deep = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"right": make_bag("shared", **changes)}))
        embedding: dict[str, Any] = {"optimizer": optimizers.Adam(lr=0.1), "tiers": IN_RAM}
        self.rows = EmbCacheEmbedding(name="rows", embedding_dim=3, **embedding)


def test_several_modules_with_tables_of_one_name(root: Path) -> None:
    saved, loaded = Two(), Two()
    train(saved.left)
    train(saved.deep[1]["right"], seed=3)
    saved.rows(torch.arange(5)).sum().backward()
    Saver(0).save(saved, root)
    Saver(0).load(loaded, root)
    assert list(cache_modules(loaded)) == ["left", "deep.1.right", "rows"]
    for path, module in cache_modules(saved).items():
        assert rows(module), path
        assert rows(cache_modules(loaded)[path]) == rows(module), path


class DistributedDataParallel(nn.Module):
    """A module with the name of torch's wrapper, without a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_do_not_change_what_a_table_is_called(root: Path) -> None:
    saved, loaded = Two(), Two()
    train(saved.left)
    Saver(0).save(DistributedDataParallel(saved), root)
    Saver(0).load(loaded, root)
    assert rows(loaded.left) == rows(saved.left)
    clash = nn.Module()
    clash.inner = DistributedDataParallel(nn.ModuleDict({"a": make_bag()}))
    clash.inner.a = make_bag()
    with pytest.raises(InputError, match=r"inner\.a"):
        Saver(0).save(clash, root)


def test_a_module_without_tables_and_one_too_deep_are_refused(root: Path) -> None:
    with pytest.raises(InputError, match="no cache module"):
        Saver(0).save(nn.Linear(2, 2), root)
    with pytest.raises(InputError, match="give an nn.Module"):
        Saver(0).save({"a": 1}, root)  # type: ignore[arg-type]
    bag = make_bag()
    for depth, allowed in ((500, True), (501, False)):
        model: nn.Module = bag
        for _ in range(depth):
            outer = nn.Module()
            outer.m = model
            model = outer
        if allowed:
            Saver(0).save(model, root)
        else:
            with pytest.raises(InputError, match="500 deep"):
                Saver(0).save(model, root)


def test_the_number_of_buckets_and_the_key_come_from_the_file(tmp_path: Path, root: Path) -> None:
    saved = make_bag(total_num_buckets=5)
    train(saved)
    Saver(0).save(saved, root)
    loaded = make_bag(total_num_buckets=4093, tiers=tiered(tmp_path, "ssd", host_bytes="64KiB"))
    loaded.table._key = 12345  # as if the table had been made under another name
    train(loaded)
    Saver(0).load(loaded, root)
    assert rows(loaded) == rows(saved)
    assert (loaded.table.total_num_buckets, loaded.table.buckets) == (5, (0, 5))
    assert loaded.table._native_table.key == saved.table._native_table.key
    train(saved, seed=2)
    train(loaded, seed=2)
    assert {row_id: row[:2] for row_id, row in rows(loaded).items()} == {
        row_id: row[:2] for row_id, row in rows(saved).items()
    }


# ---- the directory


def test_a_second_save_replaces_the_first(root: Path) -> None:
    bag = make_bag()
    train(bag)
    Saver(0).save(bag, root)
    first = (root / "LATEST").read_text()
    train(bag, seed=1)
    bag.remove_rows(torch.arange(-60, 0))
    Saver(0).save(bag, root)
    assert (root / "LATEST").read_text() != first
    assert len(list(root.iterdir())) == 3, "LATEST, its lock and one checkpoint"
    newest = root / (root / "LATEST").read_text().strip()
    assert sorted(path.name for path in newest.iterdir()) == ["%+item", "0-of-1.json", "manifest.json"]
    loaded = make_bag()
    Saver(0).load(loaded, root)
    assert rows(loaded) == rows(bag)


def test_rows_trained_after_a_save_carry_a_newer_epoch(root: Path) -> None:
    bag = make_bag()
    train(bag, ids=4)
    Saver(0).save(bag, root)
    bag(torch.tensor([[3]])).sum().backward()
    after = bag.read_rows(torch.tensor([3, 2])).metadata.modified_epoch.tolist()
    assert after[0] > after[1]
    loaded = make_bag()
    Saver(0).load(loaded, root)
    assert loaded.table._native_table.epoch() == bag.table._native_table.epoch()


# ---- what does not fit


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"embedding_dim": 5}, "embedding_dim"), ({"optimizer": optimizers.Adagrad(lr=0.1)}, "optimizer")],
)
def test_a_table_that_differs_is_refused_and_left_alone(changes: dict[str, Any], field: str, root: Path) -> None:
    saved = make_bag()
    train(saved)
    Saver(0).save(saved, root)
    other = make_bag(**changes)
    train(other, seed=4)
    before = rows(other)
    with pytest.raises(MismatchError, match=field):
        Saver(0).load(other, root)
    assert rows(other) == before


def test_missing_and_extra_tables_are_named(root: Path) -> None:
    Saver(0).save(nn.ModuleDict({"a": make_bag("one"), "b": make_bag("two")}), root)
    with pytest.raises(MismatchError, match="'two' of module 'b'"):
        Saver(0).load(nn.ModuleDict({"a": make_bag("one")}), root)
    three = nn.ModuleDict({"a": make_bag("one"), "b": make_bag("two"), "c": make_bag("three")})
    with pytest.raises(MismatchError, match="'three' of module 'c'"):
        Saver(0).load(three, root)


def test_rank_and_arguments_are_checked(root: Path) -> None:
    for rank in (-1, True, 1.5, "0"):
        with pytest.raises(ConfigError, match="rank"):
            Saver(rank)  # type: ignore[arg-type]
    for use in (Saver(1).save, Saver(1).load, Saver(rank=1).save_async):
        with pytest.raises(
            ConfigError, match="rank=1 without torch.distributed, where this process has the whole model"
        ):
            use(make_bag(), root)
    with pytest.raises(PathError, match="missing"):
        Saver(0).load(make_bag(), root)
    root.mkdir(mode=0o700)
    with pytest.raises(PathError, match="no checkpoint"):
        Saver(0).load(make_bag(), root)
    bag = make_bag()
    train(bag)
    Saver().save(module=bag, path=root)  # the process is rank 0
    assert Saver().load(module=make_bag(), path=root).rows == {"item": len(bag)}


def test_a_table_in_use_by_a_batch_is_not_loaded_into(root: Path) -> None:
    bag = make_bag()
    train(bag)
    Saver(0).save(bag, root)
    out = bag(torch.tensor([[1, 2]]))
    before = rows(bag)
    with pytest.raises(StateError, match="in flight"):
        Saver(0).load(bag, root)
    assert rows(bag) == before
    out.sum().backward()
    Saver(0).load(bag, root)


# ---- damage


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def tensor_offset(path: Path, name: str) -> int:
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little")
    offsets: list[int] = json.loads(data[8 : 8 + header])[name]["data_offsets"]
    return 8 + header + offsets[0]


def test_damaged_manifests_and_headers_leave_the_tables_as_they_were(root: Path) -> None:
    bag = make_bag()
    train(bag)
    Saver(0).save(bag, root)
    train(bag, seed=8)
    before = rows(bag)
    manifests = [root / "LATEST", *root.rglob("*.json")]
    assert len(manifests) == 3
    (data,) = data_files(root)
    places = [(path, 20) for path in manifests]
    places += [
        (data, offset) for offset in (0, 100, tensor_offset(data, "checksums"), tensor_offset(data, "bucket_offsets"))
    ]
    for path, offset in places:
        damage(path, offset)
        with pytest.raises(CorruptionError) as caught:
            Saver(0).load(bag, root)
        assert isinstance(caught.value, OSError)
        assert rows(bag) == before
        damage(path, offset)
    for path in [*manifests, data]:
        whole = path.read_bytes()
        path.unlink()
        os.mkfifo(path)  # nobody ever writes to it
        with pytest.raises(CorruptionError, match="a regular file and is a pipe"):
            Saver(0).load(bag, root)
        path.unlink()
        path.write_bytes(whole + bytes(9))
        with pytest.raises(CorruptionError, match="damaged at byte [0-9]+: .* should be .* and is "):
            Saver(0).load(bag, root)
        assert rows(bag) == before
        path.write_bytes(whole)
    Saver(0).load(bag, root)


def test_damaged_rows_poison_all_tables_until_a_load_succeeds(root: Path) -> None:
    model = nn.ModuleDict({"a": make_bag(), "b": make_bag()})
    for number, bag in enumerate(model.values()):
        train(bag, seed=number)  # type: ignore[arg-type]
    Saver(0).save(model, root)
    kept = {name: rows(bag) for name, bag in model.items()}
    for name in ("id", "weight", "sum", "count", "score", "last_step", "modified_epoch"):
        path = data_files(root)[1]
        offset = tensor_offset(path, name)
        damage(path, offset)
        with pytest.raises(CorruptionError):
            Saver(0).load(model, root)
        uses: list[Callable[[], object]] = [
            lambda: model["a"](torch.tensor([[1]])),
            lambda: rows(model["a"]),
            lambda: len(model["b"]),  # type: ignore[arg-type]
            lambda: model["a"].import_rows(torch.tensor([1]), torch.ones(1, 4)),  # type: ignore[operator]
            lambda: model["a"].flush(),  # type: ignore[operator]
            lambda: Saver(0).save(model, root),
        ]
        for use in uses:
            with pytest.raises(StateError, match="did not succeed"):
                use()
        damage(path, offset)
        Saver(0).load(model, root)
        assert {name: rows(bag) for name, bag in model.items()} == kept


def test_a_save_that_fails_leaves_the_checkpoint_before(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bag = make_bag()
    train(bag)
    Saver(0).save(bag, root)
    before = rows(bag)
    train(bag, seed=1)

    def full(*_arguments: object, **_settings: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_native, "CheckpointWriter", full)
        with pytest.raises(OSError, match="No space left"):
            Saver(0).save(bag, root)
    assert len(list(root.iterdir())) == 3, "the unfinished checkpoint is removed"
    loaded = make_bag()
    Saver(0).load(loaded, root)
    assert rows(loaded) == before


# ---- the files


def test_the_safetensors_library_alone_reads_the_rows(root: Path) -> None:
    bag = make_bag(optimizer=optimizers.Adam(lr=0.1))
    train(bag)
    Saver(0).save(bag, root)
    (path,) = data_files(root)
    assert path.stat().st_size % 4096 == 0
    tensors = safetensors.torch.load_file(path)
    ids = tensors["id"]
    found = bag.read_rows(ids)
    assert bool(found.found.all())
    assert len(ids) == len(bag)
    assert torch.equal(tensors["weight"], found.weights)
    assert torch.equal(tensors["exp_avg"], found.slots["exp_avg"])
    assert torch.equal(tensors["exp_avg_sq"], found.slots["exp_avg_sq"])
    assert torch.equal(tensors["count"].to(torch.int64), found.metadata.count)
    assert torch.equal(tensors["last_step"].to(torch.int64), found.metadata.last_step)
    assert torch.equal(tensors["score"], found.metadata.score)
    unsigned = ids.numpy().view(np.uint64)
    buckets = np.array([bucket_of(row_id, DEFAULT_TOTAL_NUM_BUCKETS) for row_id in unsigned.tolist()])
    order = np.lexsort((unsigned, buckets))
    assert (order == np.arange(len(ids))).all(), "sorted by bucket, then by id"
    assert tensors["bucket_offsets"].tolist() == [0, len(ids)], "few rows have an offset at each end"
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["table"] == "item"


def test_the_manifest_says_what_a_table_is(root: Path) -> None:
    bag = make_bag(optimizer=optimizers.Adam(lr=0.1, betas=(0.8, 0.9)))
    train(bag)
    bag.optimizer.param_groups[0]["lr"] = 0.025
    Saver(0).save(nn.ModuleDict({"m": bag}), root)
    (path,) = root.glob("*/manifest.json")
    manifest = json.loads(path.read_text())
    assert (manifest["version"], manifest["kind"], manifest["parent"], manifest["seq"]) == (1, "full", None, 1)
    (entry,) = manifest["tables"]
    spec = entry["spec"]
    assert entry["rows"] == len(bag)
    assert (spec["module"], spec["table"], spec["dim"], spec["dtype"], spec["step"], spec["seed"]) == (
        "m",
        "item",
        4,
        "F32",
        5,
        7,
    )
    assert spec["key"] == bag.table._native_table.key
    assert spec["initializer"] == {"name": "uniform", "low": -1.0, "high": 1.0}
    assert spec["optimizer"] == {
        "name": "adam",
        "hyperparameters": {"lr": 0.025, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0},
    }
