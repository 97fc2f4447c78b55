"""Block-level checkpoints that are damaged, truncated, or changed while they are read."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tables import Contents, make_bag, random_batches, train
from torchrec_embcache import _native
from torchrec_embcache._paths import open_to_load
from torchrec_embcache.checkpoint.recis import _writer, loader
from torchrec_embcache.checkpoint.recis._reader import RecisCheckpoint
from torchrec_embcache.checkpoint.recis._session import RecisSession
from torchrec_embcache.exceptions import CorruptionError, MismatchError, PathError, StateError, UnsupportedError
from torchrec_embcache.serialize import Loader, Saver

BATCHES = random_batches(6, bags=8, ids=90, seed=3)


def trained() -> Any:
    bag = make_bag()
    train(bag, BATCHES)
    return bag


def saved_folder(path: Path) -> Path:
    return path / (path / "LATEST.blocks").read_text().split()[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


def test_a_load_that_failed_keeps_nothing_of_the_checkpoint_open(path: Path) -> None:
    Saver(0, 1, 2, str(path), {"item": trained()}).save()
    damaged = next(saved_folder(path).glob("model-000000-*"))
    data = bytearray(damaged.read_bytes())
    data[4096] ^= 1  # the first byte after the header
    damaged.write_bytes(data)
    with pytest.raises(CorruptionError) as kept:
        Loader(str(path), {"item": make_bag()}).load()
    links = [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]
    assert not [link for link in links if os.path.lexists(link) and str(saved_folder(path)) in os.readlink(link)]
    assert kept.traceback, "it holds all that the load had"


def test_each_changed_byte_poisons_tables_until_a_good_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_writer, "RUN_BYTES", 900)
    bag, dense = trained(), {"w": torch.randn(50)}
    Saver(0, 1, 2, str(path), {"item": bag}, dense).save()
    shutil.copytree(path, path.with_name("good"))
    rng = np.random.default_rng(0)
    files = sorted(
        file for file in saved_folder(path).iterdir() if file.name not in ("begun.json", "index", "tensorkey.json")
    )
    files = [file for file in files if file.stat().st_size and file.suffix != ".lock"]
    assert len(files) == 5
    used = 0
    for file in [*files, path / "LATEST.blocks"]:
        good = file.read_bytes()
        for at in {0, len(good) - 1, *rng.integers(0, len(good), 12).tolist()}:
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(bad)
            other = make_bag()
            with pytest.raises((CorruptionError, MismatchError, UnsupportedError)):
                Loader(str(path), {"item": other}, {"w": torch.zeros(50)}).load()
            try:
                len(other)
                list(other.export())
            except StateError:
                used += 1
                Loader(str(path.with_name("good")), {"item": other}, {"w": torch.zeros(50)}).load()
                assert Contents.of(other) == Contents.of(bag)
            else:
                assert len(other) == 0
        file.write_bytes(good)
    assert used  # some damage is found when rows are loaded already


@pytest.mark.parametrize("what", ["symlink", "fifo", "device", "directory", "nothing", "shorter", "longer"])
def test_files_replaced_by_something_else_are_refused_without_waiting(what: str, path: Path) -> None:
    Saver(0, 1, 1, str(path), {"item": trained()}).save()
    names = [
        f.name
        for f in saved_folder(path).iterdir()
        if f.name.startswith(("model", "check", "shard-000000-of", "manifest"))
    ]
    for name in (*names, "../LATEST.blocks"):
        file = saved_folder(path) / name
        kept = path.with_name("kept")
        file.rename(kept)
        good = kept.read_bytes()
        if what == "symlink":
            file.symlink_to(kept)
        elif what == "fifo":
            os.mkfifo(file)
        elif what == "device":
            if os.geteuid() != 0:
                pytest.skip("only root can make a device")
            os.mknod(file, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
        elif what == "directory":
            file.mkdir()
        elif what == "shorter":
            file.write_bytes(good[:-1])
        elif what == "longer":
            file.write_bytes(good + b" ")
        bag = make_bag()
        with pytest.raises((CorruptionError, PathError)):
            Loader(str(path), {"item": bag}).load()
        assert len(bag) == 0
        if what == "directory":
            file.rmdir()
        elif what != "nothing":
            file.unlink()
        kept.rename(file)
    Loader(str(path), {"item": make_bag()}).load()


def test_a_save_that_fails_leaves_the_one_before_and_no_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bag = trained()
    Saver(path=str(path), hashtables={"item": bag}).save()
    before, content = saved_folder(path), Contents.of(bag)
    train(bag, BATCHES[:2])
    stages: list[tuple[Any, str]] = [
        (RecisSession, "open_files"), (_writer._ShardWriter, "_append"), (_writer._ShardWriter, "_write_table"),
        (RecisSession, "publish"),
    ]  # fmt: skip
    for module, name in stages:

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(module, name, fail)
            with pytest.raises(OSError, match="No space"):
                Saver(path=str(path), hashtables={"item": bag}).save()
        assert [entry for entry in path.iterdir() if entry.is_dir()] == [before]
    other = make_bag()
    Loader(str(path), {"item": other}).load()
    assert Contents.of(other) == content


def test_a_checkpoint_stays_while_it_is_loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bag = trained()
    Saver(path=str(path), hashtables={"item": bag}).save()
    content = Contents.of(bag)

    plain = loader._find_differences

    def compare(*args: Any) -> Any:
        train(bag, BATCHES[:1])
        Saver(path=str(path), hashtables={"item": bag}).save()
        return plain(*args)

    monkeypatch.setattr(loader, "_find_differences", compare)
    other = make_bag()
    Loader(str(path), {"item": other}).load()
    assert Contents.of(other) == content


def crc32c(data: bytes) -> int:
    """The checksum of all of `data`."""
    return int(_native.chunk_checksums(np.frombuffer(data, np.uint8), len(data))[0])


def reseal(path: Path) -> None:
    """Make the checksums of the manifests right again, from those of the shards up to LATEST."""
    folder = saved_folder(path)
    shards = sorted(folder.glob("shard-*-of-*.json"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"] = [crc32c(shard.read_bytes()) for shard in shards]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    checksum = crc32c((folder / "manifest.json").read_bytes())
    (path / "LATEST.blocks").write_text(f"{folder.name} {checksum:08x}\n")


def places(value: object, *at: Any) -> Iterator[tuple[Any, ...]]:
    """The positions of the numbers in a JSON value."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from places(below, *at, name)
    elif isinstance(value, list):
        for place, below in enumerate(value):
            yield from places(below, *at, place)
    elif isinstance(value, int):
        yield at


@pytest.mark.parametrize("wrong", [2**20, 2**31 - 1, 2**40, 2**62, -1, 10**30, None, "x", [], {}, 0.5, True])
def test_no_value_of_a_manifest_makes_a_load_end_untyped(wrong: object, path: Path) -> None:
    # The allocations of a load for them are tested where they are counted: in tests/rust/tests/hostile/recis.rs.
    Saver(0, 1, 2, str(path), {"item": trained()}, {"w": torch.randn(50)}).save()
    shard = next(saved_folder(path).glob("shard-*-of-*.json"))
    good = json.loads(shard.read_text())
    refused = 0
    for at in places(good):
        bad = json.loads(json.dumps(good))
        owner = bad
        for part in at[:-1]:
            owner = owner[part]
        owner[at[-1]] = wrong
        shard.write_text(json.dumps(bad))
        reseal(path)
        try:
            with RecisCheckpoint() as saved:
                saved.open(open_to_load(path))
        except (CorruptionError, UnsupportedError):
            refused += 1
    assert refused > 20


def test_a_header_that_says_it_is_huge_is_refused(path: Path) -> None:
    Saver(0, 1, 1, str(path), {"item": trained()}).save()
    for name in ("model-000000-of-000001.safetensors", "check-000000-of-000001.safetensors"):
        file = saved_folder(path) / name
        good = file.read_bytes()
        file.write_bytes((1 << 62).to_bytes(8, "little") + good[8:])
        with pytest.raises(CorruptionError):
            Loader(str(path), {"item": make_bag()}).load()
        file.write_bytes(good)
