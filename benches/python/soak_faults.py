"""What goes wrong in the soak of serving on purpose: the trainer is killed or silent, a delta is damaged, and the disk is full."""

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
# How far the directory of a new checkpoint has come: it is there; it has the first file of a table; a rank's manifest, after the
# last file of rows; and the manifest of all, after which only `LATEST` is missing.
PLACES = ("its directory", "a file of a table", "the rank's manifest", "the manifest")
PATTERNS = dict(zip(PLACES, ("", "*+*/*", "0-of-1.json", "manifest.json"), strict=True))
AFTER = "LATEST"
KILLS = (PLACES[0], PLACES[2], PLACES[3], AFTER)


class Soak(Protocol):
    """What a fault needs of the soak."""

    path: Path
    published: Published
    trainer: "Program"
    servers: "list[Program]"
    failed_saves: int

    def command(self, kind: str) -> None:
        """Tell the trainer to save, "save" or "full"."""

    def answer(self) -> None:
        """Note what the trainer says about the save that it was told."""

    def restart_trainer(self) -> None:
        """Start a trainer, from the newest checkpoint there is."""

    def latest(self) -> str | None:
        """The name in LATEST."""

    def mark(self, what: str) -> None:
        """Note that something happened now."""

    def wait(self, until: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Wait until this holds of what servers say of themselves now (see `soak_server.Now`), and return that. It ends, too,
        when one has answered from what it may not.
        """


class Program(Child):
    """A program of the soak, which can be stopped for a while and killed."""

    def __init__(self, script: str, *arguments: object, seconds: float) -> None:
        command = [sys.executable, str(HERE / script), *(str(argument) for argument in arguments)]
        super().__init__(command, seconds)

    def ask(self, line: str) -> Any:
        """The answer to a line."""
        self.write(line)
        return self.read()

    def has_said(self) -> bool:
        """Whether `read` would not wait."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def stop(self) -> None:
        """Stop it, and wait until all its threads have stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """Let it run again."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()
        self.close()


def start(script: str, *arguments: object, seconds: float) -> Program:
    """Start a program of the soak, and wait for its first line."""
    program = Program(script, *arguments, seconds=seconds)
    program.read()
    return program


# ---- kills


def kill(soak: Soak, place: str) -> None:
    """Kill the trainer in a save that has come to a place of `PLACES`, or, for `AFTER`, of which nobody has heard. Start it again.

    A save may be over before it can be stopped. Then the next one is tried, at an earlier place.
    """
    places = [AFTER] if place == AFTER else list(PLACES[: PLACES.index(place) + 1])
    while not stop_at(soak, places[-1]):
        soak.answer()
        places = places[:-1] or places
    soak.mark(f"killed, its save had come to {places[-1]}")
    soak.trainer.kill()
    soak.restart_trainer()


def stop_at(soak: Soak, place: str) -> bool:
    """Tell the trainer to save, and stop it when it has come to a place. `False` where it has gone on from there: then it runs."""
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


# ---- damage


def damage(soak: Soak) -> None:
    """Let the trainer save a delta, and change a bit of a weight that every request reads, before a server sees it. Deltas build on
    it until a full save. No server may serve any of them, and each must have seen that it cannot.
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
    """Wait until a look of each server, which began after this call, has failed."""
    # The first one that ends may have begun before.
    enough = [server.ask("now")["failed_polls"] + 2 for server in soak.servers]
    soak.wait(lambda all_now: all(now["failed_polls"] >= count for now, count in zip(all_now, enough, strict=True)))


def change_weight(checkpoint: Path, row_id: int) -> None:
    """Change the lowest bit of the last weight of the row of an id, in one table. `AssertionError` where no file has that row."""
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
    """Where in a file of rows the last weight of the row of an id begins, or None where the row is not in it."""
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
    """Let the trainer be silent until every server refuses, and what was published last is surely too old. Then each must answer
    again from what is saved next.
    """
    newest = soak.published.newest
    soak.mark("silent")
    seen = soak.wait(lambda all_now: soak.published.is_too_old(newest) and all(now["is_refusing"] for now in all_now))
    soak.mark("all refuse" if all(now["is_refusing"] for now in seen) else "one answered what it may not")

    def all_answer(all_now: list[dict[str, Any]]) -> bool:
        return all(now["answered"][0] == soak.published.newest.name for now in all_now)

    # Servers that get too little of the machine may find what was saved too old again. Then the trainer saves again.
    while True:
        soak.command("save")
        soak.answer()
        seen = soak.wait(lambda now: all_answer(now) or soak.published.is_too_old(soak.published.newest))
        if all_answer(seen) or not soak.published.is_too_old(soak.published.newest):
            break
    soak.mark("all answer" if all_answer(seen) else "one answered what it may not")


def fill(soak: Soak, saves: int) -> None:
    """Fill the disk, and let the trainer save until so many saves have failed."""
    ballast = soak.path.parent / "ballast"
    before = soak.failed_saves
    try:
        while soak.failed_saves < before + saves:
            # Servers that let a version go give bytes back.
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
    """A small file system in memory, or None where none may be mounted."""
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
