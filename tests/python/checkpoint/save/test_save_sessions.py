"""Every way to save and load a checkpoint uses the sessions, and the values that cross the binding are frozen and named."""

import ast
import json
import pickle
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrec_embcache
from tables import Contents, make_bag, random_batches, step, train
from torchrec_embcache import _native
from torchrec_embcache._dist.ranks import SingleRank
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.checkpoint._save import RankPart, SaveSession
from torchrec_embcache.checkpoint.dcp import EmbCacheStorageReader, EmbCacheStorageWriter
from torchrec_embcache.cli.checkpoints import OpenCheckpoint
from torchrec_embcache.cli.convert.command import ConvertSettings, convert
from torchrec_embcache.exceptions import InputError, StateError
from torchrec_embcache.optimizers import RowWiseAdagrad
from torchrec_embcache.serialize import BlockSaver

PACKAGE = Path(torchrec_embcache.__file__).parent
SECONDS = 600.0
# Names that start a save or a load in the native extension, and those that end it.
BEGINS = {
    "CheckpointSave", "CheckpointWriter", "CheckpointPart", "CheckpointSnapshot", "CheckpointReader", "ChainCompaction",
    "RecisSave",
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
    # `verify` reads the bytes of tensors and objects outside the tables without a load.
    assert {
        path for path in called if not path.startswith("checkpoint/_") and path != "checkpoint/recis/_session.py"
    } == {"cli/checkpoints.py"}
    assert {
        "checkpoint/_save.py",
        "checkpoint/_part.py",
        "checkpoint/_async.py",
        "checkpoint/recis/_session.py",
    } <= called


def test_whatever_saves_tables_sweeps_them_first() -> None:
    begins, sweeps = set(), set()
    for path in PACKAGE.rglob("*.py"):
        called = {
            ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        }
        module = path.relative_to(PACKAGE).as_posix()
        if called & {"SaveSession", "AsyncSaveSession", "PartSession", "RecisSession"} and not module.startswith(
            "checkpoint/_"
        ):
            begins.add(module)
        if "sweep_before_save" in called:
            sweeps.add(module)
    # A conversion has no tables. The tables of DCP's writer are in `checkpoint/dcp/_tables.py`.
    assert (
        begins - {"cli/convert/command.py", "checkpoint/dcp/writer.py", "checkpoint/recis/_session.py"}
        == sweeps
        != set()
    )


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
        convert(str(path / "saved"), str(path / "plain"), "embcache", "npy", ConvertSettings())
        convert(str(path / "plain"), str(path / "back"), "auto", "embcache", ConvertSettings())

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
    assert all(module.startswith("torchrec_embcache.checkpoint.") for _, module in callers), callers


def test_what_ranks_send_each_other_is_pickled_and_compared_by_value() -> None:
    identity = _native.CheckpointId("0000000001-0000000000000001", 7)
    values = [
        _native.ManifestDigest(1, 2),
        identity,
        _native.BaseCheckpoint(identity, 3),
    ]
    for value in values:
        again = pickle.loads(pickle.dumps(value))
        assert again == value
        assert hash(again) == hash(value)
        assert repr(again) == repr(value)
    part = pickle.loads(pickle.dumps(_native.WrittenPart("/a", "part-0000000000000001", _native.ManifestDigest(1, 2))))
    assert (part.directory, part.name, part.digest) == ("/a", "part-0000000000000001", _native.ManifestDigest(1, 2))
    assert _native.ManifestDigest(1, 2) != _native.ManifestDigest(1, 3)
    with pytest.raises(AttributeError):
        identity.name = "another"


def read_blocks(path: Path) -> tuple[dict[str, Any], list[_native.RowBlock]]:
    """The manifest's `spec` of the only table of the newest checkpoint in `path`, and the rows of that table."""
    opened = OpenCheckpoint.open(str(path))
    (spec,) = opened.tables
    blocks: list[_native.RowBlock] = []
    count = opened.rows.read(spec["module"], spec["table"], 0, spec["total_num_buckets"], blocks.append)
    assert count == spec.pop("rows") == sum(map(len, blocks))
    return spec, blocks


def write_chunks(path: Path, spec: dict[str, Any], chunks: Iterable[_native.RowWriteBatch]) -> None:
    """Save `chunks` to `path` as the table that `spec` describes."""
    with SaveSession(_native.CheckpointDirectory.open_to_save(str(path), "strict"), SingleRank()) as session:
        session.begin()
        writer = session.writer()
        writer.write_rows(json.dumps(spec), 0, spec["total_num_buckets"], chunks)
        session.write(lambda: RankPart(writer.finish()))
        session.publish(9)


def test_rows_cross_the_border_with_names_and_keep_every_part(tmp_path: Path) -> None:
    bag = make_bag(optimizer=RowWiseAdagrad())
    train(bag, random_batches(3, bags=8, ids=60, seed=4))
    Saver(0).save(bag, tmp_path / "saved")
    spec, blocks = read_blocks(tmp_path / "saved")
    for block in blocks:
        found = bag.read_rows(block.ids)
        assert found.found.all()
        assert np.array_equal(found.weights, block.vectors)
        assert np.array_equal(found.slots["sum"], block.scalars)
        for part in ("count", "last_step", "score", "modified_epoch"):
            assert np.array_equal(getattr(found.metadata, part), getattr(block.metadata, part))
    whole = [_native.RowWriteBatch(block.ids, block.vectors, block.scalars, block.metadata) for block in blocks]
    write_chunks(tmp_path / "whole", spec, whole)
    loaded = make_bag(optimizer=RowWiseAdagrad())
    Saver(0).load(loaded, tmp_path / "whole")
    assert Contents.of(loaded) == Contents.of(bag)

    write_chunks(tmp_path / "bare", spec, (_native.RowWriteBatch(block.ids, block.vectors) for block in blocks))
    for bare in read_blocks(tmp_path / "bare")[1]:
        assert np.array_equal(bag.read_rows(bare.ids).weights, bare.vectors)
        known = bare.metadata
        for zeros in (bare.scalars, known.count, known.last_step, known.score, known.modified_epoch):
            assert not zeros.any()


def test_a_chunk_that_does_not_fit_ends_the_save(tmp_path: Path) -> None:
    bag = make_bag()
    train(bag, random_batches(1, bags=8, ids=60, seed=4))
    Saver(0).save(bag, tmp_path / "saved")
    spec, (block, *_) = read_blocks(tmp_path / "saved")
    few = _native.RowMetadata(*(np.zeros(1, kind) for kind in (np.uint32, np.uint64, np.float32, np.uint32)))
    cases: list[tuple[Any, type[Exception], str]] = [
        ((block.ids, block.vectors, block.scalars, None), TypeError, "RowWriteBatch"),
        (_native.RowWriteBatch(block.ids, block.vectors[:, :1].copy()), InputError, "vectors is an array"),
        (_native.RowWriteBatch(block.ids, np.asfortranarray(block.vectors)), InputError, "not one after another"),
        (_native.RowWriteBatch(block.ids, block.vectors[:-1]), InputError, "vectors has"),
        (_native.RowWriteBatch(block.ids, block.vectors, block.scalars[:1]), InputError, "scalars has 1 entries"),
        (_native.RowWriteBatch(block.ids, block.vectors, None, few), InputError, "count has 1 entries"),
    ]
    for chunk, error, message in cases:
        with pytest.raises(error, match=message):
            write_chunks(tmp_path / "made", spec, [chunk])
        assert not any(path.is_dir() for path in (tmp_path / "made").iterdir())
    chunk = _native.RowWriteBatch(block.ids, block.vectors)
    with pytest.raises(AttributeError):
        chunk.scalars = block.scalars


def test_a_directory_that_was_opened_to_load_from_is_not_saved_to(tmp_path: Path) -> None:
    bag = make_bag()
    Saver(0).save(bag, tmp_path / "saved")
    directory = _native.CheckpointDirectory.open_to_load(str(tmp_path / "saved"), "strict")
    assert directory.contains("LATEST")
    assert not directory.contains("missing")
    assert str(directory) == directory.path == str(tmp_path / "saved")
    with pytest.raises(StateError, match="opened to load from"):
        _native.CheckpointSave(directory, 1)
    other = make_bag()
    Saver(0).load(other, tmp_path / "saved")
    assert Contents.of(other) == Contents.of(bag)
