"""Every way to save and load a checkpoint goes through the sessions, and what crosses the border is frozen and has names."""

import ast
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrec_embcache
from tables import Contents, make_bag, random_batches, step, train
from torchrec_embcache import _native
from torchrec_embcache.cli.convert import Settings, convert
from torchrec_embcache.dcp import EmbCacheStorageReader, EmbCacheStorageWriter
from torchrec_embcache.exceptions import StateError
from torchrec_embcache.saver import Saver
from torchrec_embcache.serialize import BlockSaver

PACKAGE = Path(torchrec_embcache.__file__).parent
SECONDS = 60.0
# What begins a save or a load in the core, and what ends it.
BEGINS = {
    "CheckpointSave", "CheckpointWriter", "CheckpointPart", "CheckpointMoment", "CheckpointReader", "CheckpointCompaction",
    "BlockSave",
}  # fmt: skip
ENDS = {"publish", "abandon", "adopt"}


def modules_that_call(names: set[str]) -> set[str]:
    """The modules of the package that call `_native.NAME` or its static methods."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).split(".")
                if called[0] == "_native" and called[1] in names:
                    found.add(path.relative_to(PACKAGE).as_posix())
    return found


def test_only_the_sessions_begin_saves_and_loads_in_the_core() -> None:
    called = modules_that_call(BEGINS)
    # `verify` reads the bytes beside the tables without a load.
    assert {path for path in called if not path.startswith("sessions/")} == {"cli/checkpoints.py"}
    assert {"sessions/save.py", "sessions/part.py", "sessions/moment.py", "sessions/blocks.py"} <= called


def doors(path: Path) -> dict[str, Callable[[Any], object]]:
    """Each way to save `bag`, and to load it, by name."""

    def dense() -> dict[str, torch.Tensor]:
        return {"x": torch.ones(3)}

    def compact(bag: Any) -> None:
        Saver(0).save(bag, path / "chain")
        step(bag, random_batches(1, bags=8, ids=60, seed=3)[0])
        Saver(0).save(bag, path / "chain", incremental=True)
        Saver(0).compact(path / "chain")

    def by_dcp(bag: Any) -> None:
        dcp.save(dense(), storage_writer=EmbCacheStorageWriter(path / "dcp", bag), no_dist=True)
        dcp.load(dense(), storage_reader=EmbCacheStorageReader(path / "dcp", bag), no_dist=True)

    def by_conversion(bag: Any) -> None:
        Saver(0).save(bag, path / "saved")
        convert(str(path / "saved"), str(path / "plain"), "embcache", "npy", Settings())
        convert(str(path / "plain"), str(path / "back"), "auto", "embcache", Settings())

    return {
        "save": lambda bag: Saver(0).save(bag, path / "save"),
        "async": lambda bag: Saver(0).save_async(bag, path / "async").result(SECONDS),
        "compact": compact,
        "dcp": by_dcp,
        "dcp async": lambda bag: dcp.async_save(
            dense(), storage_writer=EmbCacheStorageWriter(path / "dcp", bag), no_dist=True
        ).result(),
        "convert": by_conversion,
        "blocks": lambda bag: BlockSaver(path=str(path / "blocks"), hashtables={"item": bag}).save(),
    }


@pytest.mark.parametrize("door", ["save", "async", "compact", "dcp", "dcp async", "convert", "blocks"])
def test_whatever_is_begun_is_ended_by_a_session(door: str, tmp_path: Path) -> None:
    bag = make_bag()
    train(bag, random_batches(2, bags=8, ids=60, seed=9))
    callers: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or function.__name__ not in ENDS:
            return
        if type(getattr(function, "__self__", None)).__module__ == "torchrec_embcache._native":
            callers.add((function.__name__, frame.f_globals["__name__"]))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        doors(tmp_path)[door](bag)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert callers
    assert all(module.startswith("torchrec_embcache.sessions.") for _, module in callers), callers


def test_what_ranks_send_each_other_is_pickled_and_compared_by_value() -> None:
    identity = _native.CheckpointId("0000000001-0000000000000001", 7)
    values = [
        _native.Digest(1, 2),
        identity,
        _native.Ancestor(identity, 3),
    ]
    for value in values:
        again = pickle.loads(pickle.dumps(value))
        assert again == value
        assert hash(again) == hash(value)
        assert repr(again) == repr(value)
    part = pickle.loads(pickle.dumps(_native.WrittenPart("/a", "part-0000000000000001", _native.Digest(1, 2))))
    assert (part.directory, part.name, part.digest) == ("/a", "part-0000000000000001", _native.Digest(1, 2))
    assert _native.Digest(1, 2) != _native.Digest(1, 3)
    with pytest.raises(AttributeError):
        identity.name = "another"


def test_a_directory_that_was_opened_to_load_from_is_not_saved_to(tmp_path: Path) -> None:
    bag = make_bag()
    Saver(0).save(bag, tmp_path / "saved")
    directory = _native.Directory.to_load(str(tmp_path / "saved"), "strict")
    assert directory.has("LATEST")
    assert not directory.has("missing")
    assert str(directory) == directory.path == str(tmp_path / "saved")
    with pytest.raises(StateError, match="opened to load from"):
        _native.CheckpointSave(directory, 1)
    other = make_bag()
    Saver(0).load(other, tmp_path / "saved")
    assert Contents.of(other) == Contents.of(bag)
