"""Every call that reads or writes a checkpoint by path, and swaps of its directory while the call runs."""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tables import make_bag, random_batches, train
from torchrec_embcache import EmbCacheStorageReader, EmbCacheStorageWriter, serialize
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli.checkpoints import compact, reshard, verify
from torchrec_embcache.cli.convert.command import ConvertSettings, convert
from torchrec_embcache.exceptions import CorruptionError, PathError

BATCHES = random_batches(3, bags=8, ids=60, seed=3)


def save(bag: Any, path: Path) -> None:
    Saver(0).save(bag, path)


def load(bag: Any, path: Path) -> None:
    Saver(0).load(bag, path)


def save_basic(bag: Any, path: Path) -> None:
    Saver(0, path_checks="basic").save(bag, path)


def load_basic(bag: Any, path: Path) -> None:
    Saver(0, path_checks="basic").load(bag, path)


def save_blocks(bag: Any, path: Path) -> None:
    serialize.Saver(path=str(path), hashtables={"item": bag}, parallel=2).save()


def load_blocks(bag: Any, path: Path) -> None:
    serialize.Loader(str(path), hashtables={"item": bag}).load()


def save_by_command(bag: Any, path: Path) -> None:
    with tempfile.TemporaryDirectory() as source:
        save(bag, Path(source, "saved"))
        reshard(str(Path(source, "saved")), str(path), 2)


def load_by_command(bag: Any, path: Path) -> None:
    report = verify(str(path))
    if report.exit_code:
        raise CorruptionError("\n".join(report.lines))
    load_basic(bag, path)


def save_beside(bag: Any, path: Path) -> None:
    Saver(0).save_async(bag, path).result()


def compact_and_load(bag: Any, path: Path) -> None:
    compact(str(path), 1)
    load(bag, path)


def save_by_conversion(bag: Any, path: Path) -> None:
    with tempfile.TemporaryDirectory() as base:
        save(bag, Path(base, "saved"))
        convert(f"{base}/saved", f"{base}/plain", "embcache", "npy", ConvertSettings())
        convert(f"{base}/plain", str(path), "npy", "embcache", ConvertSettings())


def load_by_conversion(bag: Any, path: Path) -> None:
    with tempfile.TemporaryDirectory() as base:
        convert(str(path), f"{base}/plain", "embcache", "safetensors", ConvertSettings())
        convert(f"{base}/plain", f"{base}/saved", "safetensors", "embcache", ConvertSettings())
        load(bag, Path(base, "saved"))


def state() -> dict[str, Any]:
    return {"weight": torch.arange(6.0), "note": "x"}


@contextlib.contextmanager
def errors_of_dcp() -> Iterator[None]:
    """DCP without `torch.distributed` has one rank, whose error it wraps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        try:
            yield
        except CheckpointException as raised:
            [(error, _)] = raised.failures.values()
            if isinstance(error, AssertionError) and "symbolic link" in str(error):
                raise PathError(
                    str(error)
                ) from None  # an error that is raised where metadata are read keeps only its words
            raise error from None


def save_by_dcp(bag: Any, path: Path) -> None:
    with errors_of_dcp():
        dcp.save(state(), storage_writer=EmbCacheStorageWriter(path, bag))


def save_beside_by_dcp(bag: Any, path: Path) -> None:
    with errors_of_dcp():
        dcp.async_save(state(), storage_writer=EmbCacheStorageWriter(path, bag)).result()


def load_by_dcp(bag: Any, path: Path) -> None:
    EmbCacheStorageReader(path, bag).read_metadata()  # its errors have types: see above
    with errors_of_dcp():
        dcp.load(state(), storage_reader=EmbCacheStorageReader(path, bag))


STRICT_DOORS = [
    pytest.param((save, load), id="Saver"), pytest.param((save_beside, compact_and_load), id="async, compact"),
]  # fmt: skip


BASIC_DOORS = [
    pytest.param((save_blocks, load_blocks), id="blocks"), pytest.param((save_basic, load_basic), id="Saver basic"),
    pytest.param((save_by_command, load_by_command), id="command"), pytest.param((save_by_dcp, load_by_dcp), id="dcp"),
    pytest.param((save_by_conversion, load_by_conversion), id="convert"),
    pytest.param((save_beside_by_dcp, load_by_dcp), id="dcp async"),
]  # fmt: skip


DOORS = [*STRICT_DOORS, *BASIC_DOORS]
Door = tuple[Callable[[Any, Path], None], Callable[[Any, Path], None]]


def of_another_user(link: Path) -> None:
    """A user's own links are followed where checks are basic, and an attacker's are not. Only root can make the latter."""
    if os.geteuid() == 0:
        os.lchown(link, 12345, -1)


class Place:
    """A checkpoint's directory, and one of somebody else in which nothing may appear."""

    def __init__(self, base: Path) -> None:
        self.root, self.victim, self.moved = base / "checkpoint", base / "victim", base / "moved"
        for folder in (self.root, self.victim):
            folder.mkdir(mode=0o750)

    def swap(self) -> None:
        """Put a link to the victim in the directory's place, once."""
        if not self.moved.exists():
            self.root.rename(self.moved)
            self.root.symlink_to(self.victim)
            of_another_user(self.root)

    def back(self) -> None:
        self.root.unlink()
        self.moved.rename(self.root)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def trained() -> Any:
    bag = make_bag()
    train(bag, BATCHES)
    return bag


def swapping(monkeypatch: pytest.MonkeyPatch, place: Place, owner: Any, name: str, after: bool) -> None:
    """Swap the directory for a link right before or after the first call of `owner.name`, or of a static method there."""
    first, _, method = name.partition(".")
    plain = getattr(getattr(owner, first), method) if method else getattr(owner, first)

    def call(*args: Any, **named: Any) -> Any:
        if not after:
            place.swap()
        result = plain(*args, **named)
        place.swap()
        return result

    if method:
        # Classes of the core cannot be changed, so another object stands in for this one.
        methods = {each: getattr(getattr(owner, first), each) for each in ("open_to_save", "open_to_load")}
        monkeypatch.setattr(owner, first, SimpleNamespace(**methods | {method: call}))
    else:
        monkeypatch.setattr(owner, name, call)
