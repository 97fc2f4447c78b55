"""Somebody exchanges the directory, or a file in it, while the command or DCP runs. There is an exit status or a typed error,
and nothing is made elsewhere.
"""

import contextlib
import ctypes
import importlib
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from path_cases import (
    DOORS,
    Door,
    Place,
    load,
    load_by_dcp,
    of_another_user,
    save,
    save_beside_by_dcp,
    save_by_dcp,
    swapping,
    trained,
)
from tables import Contents, make_bag, random_batches, train
from torchrec_embcache import EmbCacheError, _native
from torchrec_embcache._fs import DirectoryHandle
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli import checkpoints, main
from torchrec_embcache.cli.convert.command import ConvertSettings, convert
from torchrec_embcache.cli.report import EXIT_FAILED, EXIT_FOUND
from torchrec_embcache.exceptions import PathError, StoragePermissionError

CONVERT = importlib.import_module("torchrec_embcache.cli.convert.command")
RENAME_EXCHANGE, AT_FDCWD = 2, -100


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextlib.contextmanager
def exchanging(one: Path, other: Path) -> Iterator[None]:
    """A thread that exchanges two paths all the time. At the end the first path is what it was."""
    libc, times = ctypes.CDLL(None, use_errno=True), 0
    begun, over = threading.Event(), threading.Event()

    def exchange() -> None:
        nonlocal times
        assert libc.renameat2(AT_FDCWD, bytes(one), AT_FDCWD, bytes(other), RENAME_EXCHANGE) == 0
        times += 1

    def work() -> None:
        # Now and then it waits long enough for the check to pass, and for nothing that follows.
        while not over.wait(random.random() * 0.004) or times % 2:
            exchange()
            if times == 2:
                begun.set()

    attacker = threading.Thread(target=work)
    attacker.start()
    try:
        assert begun.wait(600)
        yield
    finally:
        over.set()
        attacker.join()


@pytest.mark.parametrize("door", DOORS)
def test_directory_constantly_swapped_for_a_link_is_not_followed(door: Door, place: Place) -> None:
    save_it, load_it = door
    bag, planted = trained(), make_bag()
    planted.import_rows(torch.arange(5), torch.ones(5, 4))
    save_it(bag, place.root)
    save_it(planted, place.victim)
    before = {path: path.stat().st_mtime_ns for path in place.victim.rglob("*")}
    link = place.root.parent / "link"
    link.symlink_to(place.victim)
    of_another_user(link)
    passed = refused = 0
    other = make_bag()
    with exchanging(place.root, link):
        for _ in range(10):
            for use, given in ((save_it, bag), (load_it, other)):
                try:
                    use(given, place.root)
                    passed += 1
                except EmbCacheError:
                    refused += 1
                    continue
                assert use is save_it or Contents.of(other) == Contents.of(bag)
    print(passed, "passed,", refused, "refused")
    assert {path: path.stat().st_mtime_ns for path in place.victim.rglob("*")} == before
    load_it(other, place.root)
    assert Contents.of(other) == Contents.of(bag)


DCP_STAGES = [
    (save_by_dcp, "CheckpointDirectory.open_to_save"),
    (save_by_dcp, "remove_stale_parts"), (save_by_dcp, "CheckpointPart"),
    (save_by_dcp, "CheckpointSave"),
    (save_beside_by_dcp, "CheckpointDirectory.open_to_save"),
    (save_beside_by_dcp, "CheckpointPart"),
    (save_beside_by_dcp, "CheckpointSave"),
]  # fmt: skip


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("door", "name"), DCP_STAGES, ids=lambda value: getattr(value, "__name__", value))
def test_directory_swapped_in_a_dcp_save_gets_nothing_written(
    door: Any, name: str, after: bool, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, bag = make_bag(), trained()
    door(before, place.root)
    with monkeypatch.context() as patched:
        swapping(patched, place, _native, name, after)
        with contextlib.suppress(PathError, StoragePermissionError):
            door(bag, place.root)
    assert place.moved.exists(), "the step was not reached"
    assert not list(place.victim.iterdir())
    place.back()
    load_by_dcp(other := make_bag(), place.root)
    assert Contents.of(other) in (Contents.of(before), Contents.of(bag))
    door(bag, place.root)
    load_by_dcp(other, place.root)
    assert Contents.of(other) == Contents.of(bag)
    assert len(list(place.root.iterdir())) == 3, "what the attacked save left is swept"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["CheckpointDirectory.open_to_load", "latest_checkpoint", "CheckpointReader"])
def test_directory_swapped_in_a_dcp_load_is_not_read(
    name: str, after: bool, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bag, planted = trained(), make_bag()
    planted.import_rows(torch.arange(5), torch.ones(5, 4))
    save_by_dcp(bag, place.root)
    save_by_dcp(planted, place.victim)
    expected, other = Contents.of(bag), make_bag()
    with monkeypatch.context() as patched:
        swapping(patched, place, _native, name, after)
        try:
            load_by_dcp(other, place.root)
        except (PathError, StoragePermissionError):
            expected = Contents(0)
    assert place.moved.exists(), "the step was not reached"
    assert Contents.of(other) == expected


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Contents, Path, Path]:
    """A checkpoint with a delta, the same in another layout, and the rows that they hold."""
    base = tmp_path_factory.mktemp("chain")
    save(bag := trained(), base / "saved")
    train(bag, random_batches(1, bags=8, ids=60, seed=9))
    Saver(0).save(bag, base / "saved", incremental=True)
    convert(str(base / "saved"), str(base / "plain"), "embcache", "npy", ConvertSettings())
    return Contents.of(bag), base / "saved", base / "plain"


COMMANDS = [
    ("compact {root}", _native, "latest_checkpoint"), ("compact {root}", _native, "CheckpointSave"),
    ("verify {root}", _native, "latest_checkpoint"), ("verify {root}", _native, "CheckpointRows"),
    ("reshard {source} {root} --world-size 2", checkpoints.OpenCheckpoint, "open"),
    ("reshard {source} {root} --world-size 2", _native, "CheckpointDirectory.open_to_save"),
    ("reshard {root} {base}/made --world-size 2", _native, "latest_checkpoint"),
    ("reshard {root} {base}/made --world-size 2", _native, "CheckpointRows"),
    ("convert {plain} {root}", _native, "CheckpointDirectory.open_to_save"), ("convert {plain} {root}", _native, "CheckpointSave"),
    ("convert {plain} {root}", _native, "CheckpointWriter"),
    ("convert {source} {empty} --to npy", DirectoryHandle, "open_to_save"),
    ("convert {source} {empty} --to npy", DirectoryHandle, "create_file"),
    ("convert {source} {empty} --to npy", DirectoryHandle, "open_subdirectory"),
    ("convert {source} {empty} --to safetensors", DirectoryHandle, "open_subdirectory"),
    ("convert {source} {empty} --to safetensors", CONVERT, "_export_tables"),
]  # fmt: skip


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("command", "owner", "name"), COMMANDS, ids=lambda value: getattr(value, "__name__", str(value).partition(" ")[0])
)
def test_directory_swapped_in_a_command_fails_with_exit_status(
    command: str,
    owner: Any,
    name: str,
    after: bool,
    chain: tuple[Contents, Path, Path],
    tmp_path: Path,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected, source, plain = chain
    if "{empty}" not in command:
        shutil.copytree(source, place.root, dirs_exist_ok=True)
    names = {"root": place.root, "empty": place.root, "base": tmp_path, "source": source, "plain": plain}
    given = [part.format(**names) for part in command.split()]
    with monkeypatch.context() as patched:
        swapping(patched, place, owner, name, after)
        code = main(given)
    error = capsys.readouterr().err
    assert code in (0, EXIT_FAILED), error
    assert code == 0 or "PathError" in error or "StoragePermissionError" in error
    assert place.moved.exists(), "the step was not reached"
    assert not list(place.victim.iterdir()), "something was made elsewhere"
    place.back()
    if "{empty}" not in command:
        load(other := make_bag(), place.root)
        assert Contents.of(other) == expected
    elif code == 0:
        convert(str(place.root), str(tmp_path / "back"), "auto", "embcache", ConvertSettings())
        load(other := make_bag(), tmp_path / "back")
        assert Contents.of(other) == expected


@pytest.mark.parametrize("what", ["link", "pipe", "device"])
@pytest.mark.parametrize("command", ["verify {root}", "compact {root}", "reshard {root} {base}/made --world-size 2"])
def test_file_replaced_under_a_command_fails_with_exit_status(
    command: str,
    what: str,
    chain: tuple[Contents, Path, Path],
    tmp_path: Path,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if what == "device" and os.geteuid() != 0:
        pytest.skip("only root can make a device")
    shutil.copytree(chain[1], place.root, dirs_exist_ok=True)
    data, kept = next(place.root.rglob("*.safetensors")), tmp_path / "kept"
    owner = _native.ChainCompaction if "compact" in command else checkpoints.OpenCheckpoint

    class Opening:
        @staticmethod
        def replace(*args: Any, **settings: Any) -> Any:
            opened = plain(*args, **settings)
            data.rename(kept)
            if what == "link":
                data.symlink_to(kept)
            elif what == "pipe":
                os.mkfifo(data)
            else:
                os.mknod(data, 0o600 | 0o020000, os.makedev(1, 5))
            return opened

    if "compact" in command:
        plain = owner.open
        Opening.open = Opening.replace  # type: ignore[attr-defined]
        monkeypatch.setattr(_native, "ChainCompaction", Opening)
    else:
        plain = owner.open  # type: ignore[attr-defined]
        monkeypatch.setattr(owner, "open", Opening.replace)
    code = main([part.format(root=place.root, base=tmp_path) for part in command.split()])
    shown = capsys.readouterr()
    assert code in (EXIT_FOUND, EXIT_FAILED)
    assert str(data) in shown.out + shown.err
    data.unlink()
    kept.rename(data)
    load(other := make_bag(), place.root)
    assert Contents.of(other) == chain[0]
    assert not (tmp_path / "made" / "LATEST").exists()


@pytest.mark.parametrize("what", ["pipe", "device", "directory"])
@pytest.mark.parametrize("layout", ["npy", "safetensors", "recsdk"])
def test_special_file_in_a_converted_layout_is_rejected(
    layout: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command does not wait for it."""
    if what == "device" and os.geteuid() != 0:
        pytest.skip("only root can make a device")
    source, ids = tmp_path / "plain", np.arange(5)
    if layout == "recsdk":
        for folder, numbers, data in (
            ("key", [8, 5], ids),
            ("embedding", [4, 5, 2], np.ones((5, 2), np.float32)),
        ):
            (source / "item" / folder).mkdir(parents=True)
            data.tofile(source / "item" / folder / "slice.data")
            np.array(numbers).tofile(source / "item" / folder / "slice.attribute")
    else:
        save(trained(), tmp_path / "saved")
        convert(str(tmp_path / "saved"), str(source), "embcache", layout, ConvertSettings())
    target = str(tmp_path / "made")
    assert main(["convert", str(source), target, "--from", layout, "--step", "1"]) == 0
    capsys.readouterr()
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        path.rename(kept := tmp_path / "kept")
        if what == "pipe":
            os.mkfifo(path)
        elif what == "device":
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
        else:
            path.mkdir()
        assert main(["convert", str(source), f"{target}-{path.name}", "--from", layout]) == EXIT_FAILED, path
        path.rmdir() if what == "directory" else path.unlink()
        kept.rename(path)
