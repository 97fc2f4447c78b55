"""A soak: processes train, flush, save, merge and load at random until they are killed or the power fails, again and again.

Each process must find the rows of the last flush and of the last save that returned, or of one that was running. Every row of every
table is compared. With `EMBCACHE_STRESS=20` there are twenty times as many processes.

On file systems of its own, which need root and loop devices, the disk also gets full, and half of the ends are power cuts. For
these the file system is shut down as it is, so that neither its journal nor its dirty pages are written any more, and is mounted
again.
"""

import collections
import fcntl
import logging
import os
import random
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from processes import Child
from soak import IDS, Rows, apply, copied, difference, no_rows, operations, same, soak

ROUNDS = 3 * int(os.environ.get("EMBCACHE_STRESS", "1"))
# FS_IOC_SHUTDOWN of Linux, and its argument by which nothing more is written.
SHUT_DOWN, AS_IT_IS = 0x8004587D, struct.pack("I", 2)
# The arguments of mkfs, and the size of the image.
FILE_SYSTEMS = {
    "ext4": (["mkfs.ext4", "-q", "-F"], 64 << 20),
    "xfs": (["mkfs.xfs", "-q", "-f"], 320 << 20),
    "btrfs": (["mkfs.btrfs", "-q", "-f"], 200 << 20),
}
LOG = logging.getLogger("soak")


class Disk:
    """A directory on a disk, which may be the test's own."""

    def __init__(self, place: Path, image: Path | None = None) -> None:
        self.place = place
        self._image = image

    @property
    def is_own(self) -> bool:
        return self._image is not None

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", str(self._image), str(self.place)], check=True, capture_output=True)
        self.place.chmod(0o700)

    def unmount(self) -> None:
        subprocess.run(["umount", str(self.place)], check=True, capture_output=True)

    def cut_power(self) -> bool:
        """Let nothing reach the disk from here on. `False` where this file system has no such call."""
        at = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(at, SHUT_DOWN, AS_IT_IS)
        except OSError:
            return False
        finally:
            os.close(at)
        return True


def _made(name: str, folder: Path) -> Disk:
    """A disk with this file system. Where there can be none the test is skipped, and says why."""
    command, size = FILE_SYSTEMS[name]
    image, place = folder / "image", folder / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    disk = Disk(place, image)
    try:
        subprocess.run([*command, str(image)], check=True, capture_output=True)
        disk.mount()
    except FileNotFoundError as error:
        pytest.skip(f"no {name} can be made here, so the power is not cut on it: {error}")
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode().strip()
        pytest.skip(
            f"no {name} can be mounted here (that needs root and loop devices), so the power is not cut on it: {said}"
        )
    return disk


@pytest.fixture(params=["disk", "tmpfs", *FILE_SYSTEMS])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if request.param == "disk":
        yield Disk(tmp_path)
    elif request.param == "tmpfs":
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("there is no /dev/shm to write to")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            yield Disk(Path(place))
    else:
        disk = _made(request.param, tmp_path)
        try:
            yield disk
        finally:
            disk.unmount()


class Promises:
    """Rows that the next process must find: those of the last flush and save that returned, or of those started since."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes
        self.of: dict[str, list[tuple[int, Rows]]] = {"flush": [(-1, no_rows())], "save": []}
        self.counts: collections.Counter[str] = collections.Counter()

    def listen(self, words: list[tuple[str, int, int]], seed: int) -> None:
        """Check what a process said, and note what it promised."""
        ahead, model = operations(seed), no_rows()
        skipped: set[int] = set()
        reached = 0
        for what, number, compared in words:
            assert not what.startswith("wrong"), f"seed {seed}: {what}"
            self.counts[what] += 1
            self.counts["rows compared"] += compared
            if what in ("loaded", "resumed", "begun from the load"):
                model = self._found(what, seed)
            elif what == "refused":
                skipped.add(number)
            elif what.endswith("begun"):
                while reached < number:
                    operation = next(ahead)
                    assert operation.number == reached
                    reached += 1
                    if operation.number not in skipped:
                        apply(model, operation)
                self.of[what.split()[0]].append((number, copied(model)))
            elif what.endswith("done") and not what.startswith("refused"):
                store = what.split()[0]
                self.of[store] = self.of[store][[known for known, _ in self.of[store]].index(number) :]

    def _found(self, what: str, seed: int) -> Rows:
        """The rows that a process found must be some that were promised. From now on they are the promised ones."""
        with np.load(self._notes / f"{what}.npz") as file:
            found = {table: file[table] for table in IDS}
        store = "flush" if what == "resumed" else "save"
        # A table in RAM is empty in each new process.
        tables = ("plain", "device") if what == "resumed" else tuple(IDS)
        promised = [rows for _, rows in self.of[store]]
        missed = [difference(found, rows) for rows in promised]
        assert any(same(found, rows, tables) for rows in promised), f"seed {seed}: {what} none of these: {missed}"
        self.counts["rows compared"] += sum(IDS[table] for table in tables)
        self.of[store] = [(-1, copied(found))]
        if what == "begun from the load":
            # Until the next flush there may be nothing to resume.
            self.of["flush"] = [(-1, no_rows()), (-1, copied(found))]
        return found


def _one(disk: Disk, notes: Path, draw: random.Random, promises: Promises, last: bool) -> None:
    """Run one process from its start to its end. The last process only looks."""
    seed = -1 if last else draw.randrange(1 << 30)
    child = Child(soak, str(disk.place), str(notes), seed, draw.random() < 0.25 and not last, disk.is_own)
    words = []
    ended = cut = False
    for _word in range(1000 if last else draw.randrange(2, 14)):
        try:
            words.append(child.hear())
        except EOFError:
            ended = True
            break
    if not ended:
        time.sleep(draw.random() * 0.02)
        cut = disk.is_own and draw.random() < 0.5 and disk.cut_power()
        child.kill()
    rest, status = child.ended()
    words.extend(rest)
    promises.counts["processes"] += 1
    promises.counts["power cuts"] += cut
    promises.counts["kills"] += status == -9 and not cut
    promises.listen(words, seed)
    assert cut or status == -9 or any(what == "ended" for what, *_ in words), (
        f"seed {seed}: ended with {status}, {words}"
    )
    if disk.is_own:
        disk.unmount()
        disk.mount()
        (disk.place / "ballast").unlink(missing_ok=True)


def test_processes_killed_and_cut_off_at_random_lose_and_mix_no_row(disk: Disk, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir(mode=0o700)
    draw = random.Random(int(os.environ.get("EMBCACHE_SOAK_SEED", "7")))
    promises = Promises(notes)
    for _round in range(ROUNDS):
        _one(disk, notes, draw, promises, last=False)
    _one(disk, notes, draw, promises, last=True)
    LOG.info("%s: %s", tmp_path.name, dict(promises.counts))
    assert promises.counts["flush done"] > 0
    assert promises.counts["save done"] > 0
    assert promises.counts["resumed"] > 0
