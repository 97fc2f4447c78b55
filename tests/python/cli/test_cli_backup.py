"""`embcache ls`, `copy` and `prune`: output, copies and removals, during saves, after kills, and of damaged checkpoints."""

import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from cli_cases import flip, run
from tables import Contents, make_bag, random_batches, ssd_tiers, train
from torchrec_embcache import EmbCacheEmbeddingBag, _native
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.checkpoint.dcp import EmbCacheStorageReader, EmbCacheStorageWriter
from torchrec_embcache.cli import main
from torchrec_embcache.cli.checkpoints import OpenCheckpoint

BATCHES = random_batches(6, bags=8, ids=400, seed=7)


def chain(path: Path, deltas: int = 2, keep: int = 10) -> tuple[EmbCacheEmbeddingBag, list[str]]:
    """A bag, and the names of its checkpoints in `path`: a full one and deltas."""
    bag = make_bag()
    names = []
    for step in range(1 + deltas):
        train(bag, BATCHES[step : step + 1])
        names.append(Saver().save(bag, path, incremental=True, keep=keep).checkpoint)
    return bag, names


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def bytes_of(path: Path, name: str) -> dict[str, bytes]:
    files = (file for file in (path / name).rglob("*") if file.is_file() and file.name not in ("lock", "serve.idx"))
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def loaded(path: Path, **named: Any) -> Contents:
    bag = make_bag()
    Saver().load(bag, path, **named)
    return Contents.of(bag)


def test_ls_keeps_checkpoint_times_when_files_are_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "ckpt"
    before = datetime.now(UTC).replace(microsecond=0)
    _, names = chain(root, deltas=1)
    after = datetime.now(UTC)
    for name in names:
        os.utime(root / name / "manifest.json", (0, 0))
    code, found = run(capsys, "ls", root)
    assert (code, found["path"]) == (0, str(root))
    assert [(entry["name"], entry["kind"], entry["latest"]) for entry in found["checkpoints"]] == [
        (names[0], "full", False),
        (names[1], "delta", True),
    ]
    saved = [datetime.fromisoformat(entry["saved"]) for entry in found["checkpoints"]]
    assert before <= saved[0] <= saved[1] <= after
    code, inspected = run(capsys, "inspect", root)
    assert [entry["saved"] for entry in inspected["checkpoints"]] == [entry["saved"] for entry in found["checkpoints"]]
    assert before.timestamp() * 1000 <= inspected["checkpoint"]["saved_unix_ms"] <= after.timestamp() * 1000
    assert main(["copy", str(root), str(tmp_path / "backup")]) == 0
    capsys.readouterr()
    assert run(capsys, "ls", tmp_path / "backup")[1]["checkpoints"] == found["checkpoints"]
    assert main(["ls", str(root)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    (tmp_path / "empty").mkdir(mode=0o750)
    assert main(["ls", str(tmp_path / "empty")]) == 3
    assert "no checkpoint" in capsys.readouterr().err


def test_a_copy_has_the_same_bytes_and_is_loaded_and_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, backup = tmp_path / "ckpt", tmp_path / "backup"
    bag, names = chain(root)
    code, found = run(capsys, "copy", root, backup)
    assert (code, found["copied"], found["checkpoint"], found["latest"]) == (0, names, names[-1], True)
    assert found["bytes"] == sum(len(data) for name in names for data in bytes_of(backup, name).values())
    assert all(bytes_of(root, name) == bytes_of(backup, name) for name in names)
    assert loaded(backup) == Contents.of(bag)
    assert main(["verify", str(backup)]) == 0
    capsys.readouterr()
    # Only what is new is copied.
    train(bag, BATCHES[3:4])
    newest = Saver().save(bag, root, incremental=True, keep=10).checkpoint
    assert run(capsys, "copy", root, backup)[1]["copied"] == [newest]
    assert run(capsys, "copy", root, backup)[1]["copied"] == []
    # A run continues in the copy.
    other = make_bag()
    Saver().load(other, backup)
    train(bag, BATCHES[4:5])
    train(other, BATCHES[4:5])
    assert Saver().save(other, backup, incremental=True).kind == "delta"
    assert loaded(backup) == Contents.of(bag)


def test_copy_of_an_older_checkpoint_keeps_newer_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, backup = tmp_path / "ckpt", tmp_path / "backup"
    bag, names = chain(root)
    assert run(capsys, "copy", root / names[1], backup)[1]["copied"] == names[:2]
    older = loaded(backup)
    run(capsys, "copy", root, backup)
    other = tmp_path / "other"
    run(capsys, "copy", root, other)
    code = main(["copy", str(root / names[1]), str(other)])
    told = capsys.readouterr()
    assert code == 0
    assert f"{names[-1]} stays the newest" in told.err
    assert loaded(other) == Contents.of(bag)
    assert loaded(other, checkpoint=names[1]) == older
    assert main(["copy", str(root), str(root)]) == 3
    assert "holds the checkpoint itself" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_copied_and_nothing_of_it_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, backup = tmp_path / "ckpt", tmp_path / "backup"
    bag, names = chain(root)
    run(capsys, "copy", root, backup)
    expected = Contents.of(bag)
    train(bag, BATCHES[3:4])
    newest = Saver().save(bag, root, incremental=True, keep=10).checkpoint
    flip(root / newest)
    assert main(["copy", str(root), str(backup)]) == 3
    assert "CorruptionError" in capsys.readouterr().err
    assert names_in(backup) == names
    assert loaded(backup) == expected


def test_what_a_killed_copy_left_is_copied_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, backup = tmp_path / "ckpt", tmp_path / "backup"
    bag, names = chain(root)
    run(capsys, "copy", root, backup)
    # As after a kill before LATEST was written, and in the middle of the newest checkpoint.
    (backup / "LATEST").unlink()
    (backup / names[-1] / "manifest.json").unlink()
    assert run(capsys, "copy", root, backup)[1]["copied"] == names[-1:]
    assert loaded(backup) == Contents.of(bag)
    # A directory of this name that is another checkpoint is left alone.
    manifest = backup / names[0] / "manifest.json"
    manifest.write_bytes((root / names[1] / "manifest.json").read_bytes())
    assert main(["copy", str(root), str(backup)]) == 3
    assert f"has another checkpoint {names[0]}" in capsys.readouterr().err


def test_saves_do_not_remove_a_checkpoint_while_it_is_copied(tmp_path: Path) -> None:
    root, backup = tmp_path / "ckpt", tmp_path / "backup"
    bag, names = chain(root)
    expected = Contents.of(bag)
    opened = OpenCheckpoint.open(str(root))  # as `copy` holds it
    train(bag, BATCHES[3:4])
    Saver().save(bag, root, keep=1)
    assert set(names) < set(names_in(root))
    assert opened.rows.copy(_native.CheckpointDirectory.open_to_save(str(backup), "strict")).names == names
    assert loaded(backup) == expected
    opened.rows.release()
    Saver().save(bag, root, keep=1)
    assert not set(names) & set(names_in(root))


def test_copies_beside_a_trainer_that_saves_all_the_time_are_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, backup = tmp_path / "ckpt", tmp_path / "backup"
    bag, _ = chain(root, deltas=0, keep=1)
    done = threading.Event()
    failed: list[BaseException] = []

    def save() -> None:
        try:
            while not done.is_set():
                Saver().save(bag, root, keep=1)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        codes = [main(["copy", str(root), str(backup)]) for _ in range(12)]
    finally:
        done.set()
        thread.join()
    assert (codes, failed) == ([0] * 12, []), capsys.readouterr().err
    assert loaded(backup) == Contents.of(bag)


def test_linked_checkpoints_and_dense_state_are_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ssd").mkdir(mode=0o750)
    bag = make_bag(tiers=ssd_tiers(tmp_path / "ssd", host_bytes="8KiB"))
    train(bag, BATCHES)
    expected = Contents.of(bag)
    Saver().save(bag, tmp_path / "linked", linked=True)
    assert run(capsys, "copy", tmp_path / "linked", tmp_path / "copied")[0] == 0
    segment = next((tmp_path / "copied").glob("*/*/*.seg"))
    assert segment.stat().st_nlink == 1
    assert main(["compact", str(tmp_path / "copied")]) == 0
    assert loaded(tmp_path / "copied") == expected

    model = nn.ModuleDict({"over": nn.Linear(3, 2)})
    state = {"over": model["over"].state_dict()}
    dcp.save(state, storage_writer=EmbCacheStorageWriter(str(tmp_path / "dcp"), bag), no_dist=True)
    capsys.readouterr()
    code, found = run(capsys, "copy", tmp_path / "dcp", tmp_path / "dcp-copied")
    assert (code, found["latest"]) == (0, True)
    other = {"over": {name: torch.zeros_like(value) for name, value in state["over"].items()}}
    dcp.load(other, storage_reader=EmbCacheStorageReader(str(tmp_path / "dcp-copied")), no_dist=True)
    assert all(torch.equal(other["over"][name], state["over"][name]) for name in state["over"])
    extents = next((tmp_path / "dcp").glob("*/dense/*.extents"))
    data = bytearray(extents.read_bytes())
    data[0] ^= 1
    extents.write_bytes(data)
    assert main(["copy", str(tmp_path / "dcp"), str(tmp_path / "damaged")]) == 3
    assert "CorruptionError" in capsys.readouterr().err
    assert not names_in(tmp_path / "damaged")


def test_prune_keeps_the_newest_what_they_build_on_and_what_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "ckpt"
    bag, first = chain(root, deltas=1)
    second = [Saver().save(bag, root, keep=10).checkpoint]
    train(bag, BATCHES[3:4])
    second.append(Saver().save(bag, root, incremental=True, keep=10).checkpoint)
    expected = Contents.of(bag)
    unfinished = root / "0000000099-0123456789abcdef"
    unfinished.mkdir(mode=0o750)
    held = OpenCheckpoint.open(str(root / first[1]))
    code, found = run(capsys, "prune", root, "--keep", 1)
    assert (code, found["removed"], found["left"]) == (0, [unfinished.name], [])
    assert names_in(root) == first + second
    held.rows.release()
    freed = sum(len(data) for name in first for data in bytes_of(root, name).values())
    code, found = run(capsys, "prune", root, "--keep", 1)
    assert (code, found["removed"], found["bytes"]) == (0, first, freed)
    assert names_in(root) == second
    assert loaded(root) == expected
    for arguments, told in (((root, "--keep", 0), "give 1 or more"), ((tmp_path, "--keep", 1), "no checkpoint")):
        tmp_path.chmod(0o750)
        assert main(["prune", *map(str, arguments)]) == 3
        assert told in capsys.readouterr().err
