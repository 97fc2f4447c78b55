"""A block-level save is stopped at each operation on its files. A load finds the save before or the new one, whole."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tables import Contents, make_bag, random_batches, train
from torchrec_embcache._native import BlockWriter
from torchrec_embcache.blocks import files, writer
from torchrec_embcache.serialize import Loader, Saver

BATCHES = random_batches(6, bags=8, ids=90, seed=3)


class Stopped(BaseException):
    """Stands for the end of the process, or of the machine."""


class Disk:
    """`os` and `shutil` for the code that saves. It counts what changes files, stops at one of these, and knows what is durable."""

    def __init__(self, stash: Path, stop_at: int) -> None:
        self.changes, self.stopped = 0, False
        self._stash, self._stop_at = stash, stop_at
        stash.mkdir()
        self._unsynced: set[int] = set()  # the inodes whose content is durable
        self._names: list[
            tuple[str, Callable[[], None]]
        ] = []  # for each directory, how to undo the changes of its entries since its last sync

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _change(self, half: Callable[[], object] | None = None) -> None:
        if not self.stopped and self.changes == self._stop_at:
            self.stopped = True
            if half is not None:
                half()
        if self.stopped:
            raise Stopped
        self.changes += 1

    def _kept(self, path: str) -> Callable[[], None]:
        """A function that puts a file back as it is now."""
        if not os.path.exists(path):
            return lambda: None
        kept = self._stash / str(len(list(self._stash.iterdir())))
        os.link(path, kept)
        return lambda: os.replace(kept, path)

    def mkdir(self, name: str, mode: int, dir_fd: int) -> None:
        self._change()
        os.mkdir(name, mode, dir_fd=dir_fd)
        folder = os.readlink(f"/proc/self/fd/{dir_fd}")
        self._names.append((folder, lambda: shutil.rmtree(f"{folder}/{name}")))

    def open(self, name: str, flags: int, mode: int = 0o777, dir_fd: int | None = None) -> int:
        folder = os.readlink(f"/proc/self/fd/{dir_fd}")
        if flags & os.O_CREAT and not os.path.lexists(f"{folder}/{name}"):
            self._change()
            self._names.append((folder, lambda: os.unlink(f"{folder}/{name}")))
        return os.open(name, flags, mode, dir_fd=dir_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        folder = os.readlink(f"/proc/self/fd/{dir_fd}")
        if os.path.lexists(f"{folder}/{name}"):
            self._change()
            self._names.append((folder, self._kept(f"{folder}/{name}")))
        os.unlink(name, dir_fd=dir_fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._unsynced.add(os.fstat(fd).st_ino)
        self._change(lambda: os.pwrite(fd, data[: len(data) // 2], offset))
        return os.pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        self._change()
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            folder = os.readlink(f"/proc/self/fd/{fd}")
            self._names = [(other, undo) for other, undo in self._names if other != folder]
        else:
            self._unsynced.discard(found.st_ino)

    def rename(self, source: str, target: str, src_dir_fd: int, dst_dir_fd: int) -> None:
        self._change()
        folder = os.readlink(f"/proc/self/fd/{dst_dir_fd}")
        old = self._kept(f"{folder}/{target}")
        os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

        def undo() -> None:
            os.rename(f"{folder}/{target}", f"{folder}/{source}")
            old()

        self._names.append((folder, undo))

    def rmtree(self, name: str, dir_fd: int) -> None:
        folder = Path(os.readlink(f"/proc/self/fd/{dir_fd}"), name)
        self._change(lambda: [os.unlink(file) for file in sorted(folder.iterdir())[::2]])
        shutil.rmtree(name, dir_fd=dir_fd)

    def writer(self, path: str, fd: int, made: Any, *rest: Any) -> Any:
        """The core's writer of data files, for its operations on these."""
        disk = self
        for name, _, _ in made:
            self._change()
            self._names.append((path, lambda name=name: os.unlink(f"{path}/{name}")))
        native = BlockWriter(path, fd, made, *rest)
        inodes = {os.stat(name, dir_fd=fd).st_ino for name, _, _ in made}
        self._unsynced |= inodes

        class Watched:
            def append(self, block: int, data: Any) -> None:
                disk._change(lambda: native.append(block, data[: len(data) // 2]))
                native.append(block, data)

            def append_rows(self, block: int, rows: Any, order: Any) -> None:
                disk._change(lambda: native.append_rows(block, rows, order[: len(order) // 2]))
                native.append_rows(block, rows, order)

            def finish(self) -> Any:
                disk._change()
                checks = native.finish()
                disk._unsynced -= inodes
                return checks

            def close(self) -> None:
                native.close()

        return Watched()

    def lose_power(self, root: Path) -> None:
        """Lose what was not synced: entries become what they were, and content becomes zeros."""
        for _, undo in reversed(self._names):
            undo()
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_ino in self._unsynced:
                path.write_bytes(bytes(path.stat().st_size))


def found(path: Path) -> tuple[Contents, list[float]]:
    bag, dense = make_bag(), torch.zeros(9)
    Loader(str(path), {"item": bag}, {"w": dense}).load()
    return Contents.of(bag), dense.tolist()


@pytest.mark.parametrize("power", [False, True], ids=["killed", "without power"])
def test_a_save_that_is_stopped_at_any_operation_leaves_the_save_before_or_the_new_one(
    power: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RUN_BYTES", 2500)
    good, bag = tmp_path / "good", make_bag()
    train(bag, BATCHES[:3])
    Saver(path=str(good), hashtables={"item": bag}, tensors={"w": torch.ones(9)}).save()
    old = Contents.of(bag), [1.0] * 9
    train(bag, BATCHES[3:])
    new = Contents.of(bag), [2.0] * 9
    outcomes = []
    for stop_at in range(1000):
        path = tmp_path / f"stop{stop_at}"
        shutil.copytree(good, path)
        path.chmod(0o750)
        disk = Disk(tmp_path / f"stash{stop_at}", stop_at)
        saver = Saver(path=str(path), hashtables={"item": bag}, tensors={"w": torch.full((9,), 2.0)}, parallel=1)
        with monkeypatch.context() as patched:
            for name in ("os", "shutil"):
                patched.setattr(files, name, disk)
            patched.setattr(writer._native, "BlockWriter", disk.writer)
            try:
                saver.save()
                done = True
            except Stopped:
                done = False
        if power:
            disk.lose_power(path)
        after = found(path)
        assert after in (old, new), f"neither, after {stop_at} changes"
        assert after == new or not done, "a save that succeeded is lost"
        outcomes.append(after == new)
        # Saving goes on from there, and leaves one save.
        saver.save()
        assert found(path) == new
        assert len([entry for entry in path.iterdir() if entry.is_dir()]) == 1, "leftovers are swept"
        shutil.rmtree(path)
        shutil.rmtree(tmp_path / f"stash{stop_at}")
        if not disk.stopped:
            break
    assert outcomes[-1]
    assert not outcomes[0]
    assert outcomes == sorted(outcomes), "once it is there it stays"
    assert len(outcomes) > 30, f"{len(outcomes)} stops"
