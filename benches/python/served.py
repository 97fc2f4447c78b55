"""Finds and builds the Rust bench programs, asks them for rounds, or lets them print whole rows.

A bench that is *served* measures a round when it is asked to, so that rivals take turns (see benches/src/serve.rs). A bench that
*prints rows* needs the machine for itself, or measures several things on one store.
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
    """An executable, and how it measures a bench: in rounds that it serves, or as one of the rows that a group of it prints."""

    path: Path
    group: str | None


# The packages whose features are united. The tests are built with these, so a smoke run finds the core that they have built.
PACKAGES = ("embcache", "embcache-tests", "embcache-benches", "embcache-rivals")


@cache
def built(smoke: bool, root: Path = ROOT) -> dict[str, list[Path]]:
    """Build the bench programs of all packages of the tree `root`. The result is by the package's folder. A smoke run uses the
    tests' profile, which is built faster.
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
    """Build the bench programs of the tree `root`, and map the name of each bench to the program that has it."""
    found: dict[str, Program] = {}
    for path in built(smoke, root)["benches"]:
        listed = subprocess.run([path, "--list"], check=True, stdout=subprocess.PIPE, text=True).stdout
        for line in listed.splitlines():
            name, *how = line.split()
            # Older trees have a program for each group, and say no name of it.
            found[name] = Program(path, group=(how[1:] or [path.name])[0] if how else None)
    return found


class Child:
    """A program that answers in lines of JSON. It is killed when its time is over."""

    def __init__(self, command: list[str], seconds: float, env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env and os.environ | env
        )
        self._seconds = seconds
        self._timer = threading.Timer(seconds, self._process.kill)
        self._timer.daemon = True
        self._timer.start()

    def write(self, line: str) -> None:
        """Hand the program a line. Raises as `read`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._has_ended()

    def read(self) -> Any:
        """The next line of the program.

        `EOFError` after a program that ended without an error, `RuntimeError` after one that failed or was out of time.
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
        """End the program, by ending its input. One that has ended already is no error."""
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
    """A Rust bench that measures a round when it is asked to."""

    def __init__(self, program: Path, name: str, smoke: bool, seconds: float) -> None:
        self._child = Child([str(program), "--serve", name, *(["--smoke"] if smoke else [])], seconds)
        self.ready: dict[str, Any] = self._child.read()

    def ask(self, line: str) -> Any:
        """The answer to one line of the protocol."""
        self._child.write(line)
        return self._child.read()

    def close(self) -> None:
        """End the program."""
        self._child.close()


def rows_of(command: list[str], seconds: float, env: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows that a program prints, each as soon as it is printed."""
    child = Child(command, seconds, env)
    try:
        while True:
            yield child.read()
    except EOFError:
        return
    finally:
        child.close()
