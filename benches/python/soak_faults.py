"""Faults of the serving soak: the trainer is killed or stops saving, a delta is corrupted, and the disk is full."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from served import Child
from soak_published import Published
from soak_truth import CLOCK

__all__ = ["KILLS", "Program", "Soak", "damage", "fill", "kill", "silence", "small_disk", "start"]

HERE = Path(__file__).resolve().parent
# Progress of a new checkpoint's directory: it exists; it has the first file of a table; it has a rank's manifest, written after the
# last file of rows; it has the manifest of all ranks, after which only `LATEST` is missing.
PLACES = ("its directory", "a file of a table", "the rank's manifest", "the manifest")
PATTERNS = dict(zip(PLACES, ("", "*+*/*", "0-of-1.json", "manifest.json"), strict=True))
AFTER = "LATEST"
KILLS = (PLACES[0], PLACES[2], PLACES[3], AFTER)


class Soak(Protocol):
    """The interface of the soak that faults use."""

    path: Path
    published: Published
    trainer: "Program"
    servers: "list[Program]"
    failed_saves: int

    def command(self, kind: str) -> None:
        """Sends the trainer a save command, "save" or "full"."""

    def answer(self) -> None:
        """Records the trainer's answer to the save command."""

    def restart_trainer(self) -> None:
        """Starts a trainer from the latest checkpoint."""

    def latest(self) -> str | None:
        """Returns the name in LATEST."""

    def mark(self, what: str) -> None:
        """Records an event at the current time."""

    def wait(self, until: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Waits until the condition holds for the current states of the servers (see `soak_server.Now`), and returns these. It also
        ends when a server has given a wrong answer.
        """


class Program(Child):
    """A program of the soak, which can be suspended and killed."""

    def __init__(self, script: str, *arguments: object, seconds: float) -> None:
        command = [sys.executable, str(HERE / script), *(str(argument) for argument in arguments)]
        super().__init__(command, seconds)

    def ask(self, line: str) -> Any:
        """Sends a line and returns the answer."""
        self.write(line)
        return self.read()

    def has_said(self) -> bool:
        """True if `read` would not wait."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def stop(self) -> None:
        """Suspends it, and waits until all its threads are stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """Resumes it."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills it immediately."""
        self._process.kill()
        self.close()


def start(script: str, *arguments: object, seconds: float) -> Program:
    """Starts a program of the soak, and waits for its first line."""
    program = Program(script, *arguments, seconds=seconds)
    program.read()
    return program


# ---- kills


def kill(soak: Soak, place: str) -> None:
    """Kills the trainer during a save that has reached a point of `PLACES`, or, for `AFTER`, that no process has reported, and
    restarts it.

    A save may finish before it can be stopped. In that case the next save is tried, at an earlier point.
    """
    places = [AFTER] if place == AFTER else list(PLACES[: PLACES.index(place) + 1])
    while not stop_at(soak, places[-1]):
        soak.answer()
        places = places[:-1] or places
    soak.mark(f"killed, its save had come to {places[-1]}")
    soak.trainer.kill()
    soak.restart_trainer()


def stop_at(soak: Soak, place: str) -> bool:
    """Commands a save, and suspends the trainer at a point. Returns False if the save passed that point; the trainer then runs."""
    before = soak.latest()
    known = set(soak.path.iterdir())
    soak.command("save")
    while not soak.trainer.has_said():
        if place == AFTER:
            if soak.latest() != before:
                break
        else:
            new = [path for path in soak.path.iterdir() if path not in known and path.name[0].isdigit()]
            if any(not PATTERNS[place] or any(path.glob(PATTERNS[place])) for path in new):
                break
    soak.trainer.stop()
    if (soak.latest() != before) == (place == AFTER) and not soak.trainer.has_said():
        return True
    soak.trainer.go_on()
    return False


# ---- corruption


def damage(soak: Soak) -> None:
    """Commands a delta, and flips a bit of a weight that every request reads, before a server loads it. Later deltas are based on
    it until a full save. No server may serve any of them, and each must have detected that it cannot.
    """
    for server in soak.servers:
        server.stop()
    try:
        soak.command("save")
        soak.answer()
        newest = soak.published.newest.name
        change_weight(soak.path / newest, CLOCK)
        soak.published.damage(newest)
        soak.mark("damaged")
    finally:
        for server in soak.servers:
            server.go_on()
    wait_for_failed_polls(soak)
    for what in ("a delta on the damaged one", "another one"):
        soak.command("save")
        soak.answer()
        soak.mark(what)
        wait_for_failed_polls(soak)
    soak.command("full")
    soak.answer()
    soak.mark("mended")


def wait_for_failed_polls(soak: Soak) -> None:
    """Waits until a poll of each server that started after this call has failed."""
    # The first poll to finish may have started before.
    enough = [server.ask("now")["failed_polls"] + 2 for server in soak.servers]
    soak.wait(lambda all_now: all(now["failed_polls"] >= count for now, count in zip(all_now, enough, strict=True)))


def change_weight(checkpoint: Path, row_id: int) -> None:
    """Flips the lowest bit of the last weight of an id's row, in one table. Raises `AssertionError` if no file has that row."""
    for path in sorted(checkpoint.glob("item*/*.safetensors")):
        if (place := place_of_weight(path, row_id)) is not None:
            with path.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1]))
            return
    raise AssertionError(f"{checkpoint} has no row of id {row_id}")


def place_of_weight(path: Path, row_id: int) -> int | None:
    """Returns the offset of the last weight of an id's row in a file, or None if the file does not contain the row."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    columns = json.loads(raw[8:begin])
    first, end = columns["id"]["data_offsets"]
    found = np.flatnonzero(np.frombuffer(raw[begin + first : begin + end], "<i8") == row_id)
    if "weight" not in columns or not len(found):
        return None
    dim, weights = int(columns["weight"]["shape"][1]), begin + int(columns["weight"]["data_offsets"][0])
    return weights + 4 * (int(found[0]) * dim + dim - 1)


# ---- silence, and a full disk


def silence(soak: Soak) -> None:
    """Pauses saving until every server raises and the last published checkpoint is too old. Each must then answer again from the
    next save.
    """
    newest = soak.published.newest
    soak.mark("silent")
    seen = soak.wait(lambda all_now: soak.published.is_too_old(newest) and all(now["is_refusing"] for now in all_now))
    soak.mark("all refuse" if all(now["is_refusing"] for now in seen) else "one answered what it may not")

    def all_answer(all_now: list[dict[str, Any]]) -> bool:
        return all(now["answered"][0] == soak.published.newest.name for now in all_now)

    # Servers that get too little CPU time may find the new checkpoint too old again. In that case the trainer saves again.
    while True:
        soak.command("save")
        soak.answer()
        seen = soak.wait(lambda now: all_answer(now) or soak.published.is_too_old(soak.published.newest))
        if all_answer(seen) or not soak.published.is_too_old(soak.published.newest):
            break
    soak.mark("all answer" if all_answer(seen) else "one answered what it may not")


def fill(soak: Soak, saves: int) -> None:
    """Fills the disk, and commands saves until `saves` of them have failed."""
    ballast = soak.path.parent / "ballast"
    before = soak.failed_saves
    try:
        while soak.failed_saves < before + saves:
            # Servers that unpin a version free disk space.
            with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))
            soak.command("save")
            soak.answer()
    finally:
        ballast.unlink()
    soak.mark("the disk has room again")


@contextlib.contextmanager
def small_disk(mib: int) -> Iterator[Path | None]:
    """Mounts a small file system in memory; yields None if mounting is not permitted."""
    with tempfile.TemporaryDirectory() as place:
        options = f"size={mib}m,mode=700"
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], stderr=subprocess.DEVNULL, check=False
        )
        try:
            yield None if made.returncode else Path(place)
        finally:
            if not made.returncode:
                subprocess.run(["umount", "-l", place], check=True)
