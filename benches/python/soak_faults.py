"""What goes wrong in the soak of serving on purpose: the trainer is killed, a delta is damaged, and the disk is full."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from served import Child

__all__ = ["Soak", "damage", "fill", "kill", "small_disk", "start"]

HERE = Path(__file__).resolve().parent


class Soak(Protocol):
    """What a fault needs of the soak."""

    path: Path
    trainer: "Program"
    servers: "list[Program]"

    def save(self, kind: str) -> None:
        """Let the trainer save, "save" or "full", and note what it says."""

    def restart_trainer(self) -> None:
        """Start a trainer, from the newest checkpoint there is."""


class Program(Child):
    """A program of the soak, which can be stopped for a while and killed."""

    def __init__(self, script: str, *arguments: object, seconds: float) -> None:
        command = [sys.executable, str(HERE / script), *(str(argument) for argument in arguments)]
        super().__init__(command, seconds)
        self.first = self.read()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()
        self.close()


def start(script: str, *arguments: object, seconds: float) -> Program:
    """Start a program of the soak, and wait for its first line."""
    return Program(script, *arguments, seconds=seconds)


def kill(soak: Soak, after: float) -> None:
    """Kill the trainer so many seconds after it was told to save, and start it again."""
    soak.trainer.write("save")
    time.sleep(after)
    soak.trainer.kill()
    soak.restart_trainer()


def damage(soak: Soak) -> None:
    """Let the trainer save a delta, and change a byte of it before a server sees it. Deltas build on it until a full save."""
    for server in soak.servers:
        server.signal(signal.SIGSTOP)
    try:
        soak.save("save")
        newest = soak.path / (soak.path / "LATEST").read_text().split()[0]
        largest = max((path for path in newest.rglob("*.safetensors")), key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-5, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
    finally:
        for server in soak.servers:
            server.signal(signal.SIGCONT)


def fill(soak: Soak, saves: int) -> None:
    """Fill the disk, and let the trainer save in vain."""
    ballast = soak.path.parent / "ballast"
    with ballast.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    try:
        for _ in range(saves):
            soak.save("save")
    finally:
        ballast.unlink()


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
