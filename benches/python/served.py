"""Finds and builds the Rust bench programs, and runs their rounds or reads the rows that they print.

A *served* bench measures a round on request, so that rivals alternate (see benches/src/serve.rs). A bench that *prints rows* needs
the machine exclusively, or measures several values on one store.
"""

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["ROOT", "Child", "Program", "Served", "built", "programs", "rows_of"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Program:
    """An executable, and its kind: it serves rounds of a bench, or a group of it prints rows."""

    path: Path
    group: str | None


# The packages whose features are unified. The tests are built with them, so a smoke run reuses the crate built for the tests.
PACKAGES = ("embcache", "embcache-tests", "embcache-benches", "embcache-rivals")


@cache
def built(smoke: bool, root: Path = ROOT) -> dict[str, list[Path]]:
    """Builds the bench programs of all packages of the tree `root`. Returns them by the package's folder. A smoke run uses the
    tests' profile, which builds faster.
    """
    command = ["cargo", "bench", "--locked", "--no-run", "--message-format=json-render-diagnostics"]
    command += [argument for package in PACKAGES for argument in ("-p", package)]
    command += ["--profile", "dev"] if smoke else []
    told = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
    messages = [json.loads(line) for line in told.splitlines()]
    found: dict[str, list[Path]] = {}
    for message in messages:
        if message["reason"] == "compiler-artifact" and "bench" in message["target"]["kind"] and message["executable"]:
            package = Path(message["manifest_path"]).parent.name
            found.setdefault(package, []).append(Path(message["executable"]))
    return found


def programs(smoke: bool, root: Path = ROOT) -> dict[str, Program]:
    """Builds the bench programs of the tree `root`, and maps the name of each bench to its program."""
    found: dict[str, Program] = {}
    for path in built(smoke, root)["benches"]:
        listed = subprocess.run([path, "--list"], check=True, stdout=subprocess.PIPE, text=True).stdout
        for line in listed.splitlines():
            name, *how = line.split()
            # Older trees have one program per group, without group names.
            found[name] = Program(path, group=(how[1:] or [path.name])[0] if how else None)
    return found


class Child:
    """A program that answers in lines of JSON. It is killed when its time limit expires."""

    def __init__(self, command: list[str], seconds: float, env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env and os.environ | env
        )
        self._seconds = seconds
        self._timer = threading.Timer(seconds, self._process.kill)
        self._timer.daemon = True
        self._timer.start()

    def write(self, line: str) -> None:
        """Writes a line to the program. Raises like `read`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._has_ended()

    def read(self) -> Any:
        """Reads the next line of the program.

        Raises `EOFError` if the program ended without an error, `RuntimeError` if it failed or exceeded its time limit.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else self._has_ended()

    def _has_ended(self) -> NoReturn:
        status = self._process.wait()
        if status == -9:
            raise RuntimeError(
                f"the bench was ended when its {self._seconds:.0f} s were over: measure it again while nothing else uses the "
                "machine and its disk (make bench ONLY=<name>)"
            )
        if status:
            raise RuntimeError(f"the bench ended with status {status}")
        raise EOFError("the bench ended before it was asked to")

    def close(self) -> None:
        """Ends the program by closing its input. Does nothing if it has already ended."""
        self._timer.cancel()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Served:
    """A Rust bench that measures a round on request."""

    def __init__(self, program: Path, name: str, smoke: bool, seconds: float) -> None:
        self._child = Child([str(program), "--serve", name, *(["--smoke"] if smoke else [])], seconds)
        self.ready: dict[str, Any] = self._child.read()

    def ask(self, line: str) -> Any:
        """Sends one line of the protocol and returns the answer."""
        self._child.write(line)
        return self._child.read()

    def close(self) -> None:
        """Ends the program."""
        self._child.close()


def rows_of(command: list[str], seconds: float, env: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the rows that a program prints, each as soon as it is printed."""
    child = Child(command, seconds, env)
    try:
        while True:
            yield child.read()
    except EOFError:
        return
    finally:
        child.close()
