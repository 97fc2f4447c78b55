"""The Rust bench programs: found and built, asked for rounds, or left to print whole rows.

A bench is *served* (it measures a round when asked, so that rivals take turns; see benches/src/serve.rs) or it *prints rows*
(it needs the machine for itself, or measures several things on one store).
"""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Child", "Program", "Served", "built", "programs", "rows_of"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Program:
    """An executable and whether it prints the rows of a bench, or serves rounds."""

    path: Path
    prints_rows: bool


# Whose features are united: those that the tests are built with, so that a smoke run finds the core built by them.
PACKAGES = ("embcache", "embcache-tests", "embcache-benches", "embcache-rivals")


@cache
def built(smoke: bool) -> dict[str, list[Path]]:
    """Folder of a package: its bench programs, made first; for a smoke run in the tests' profile, which is built the sooner."""
    command = ["cargo", "bench", "--locked", "--no-run", "--message-format=json-render-diagnostics"]
    command += [argument for package in PACKAGES for argument in ("-p", package)]
    command += ["--profile", "dev"] if smoke else []
    told = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    messages = [json.loads(line) for line in told.splitlines()]
    found: dict[str, list[Path]] = {}
    for message in messages:
        if message["reason"] == "compiler-artifact" and "bench" in message["target"]["kind"] and message["executable"]:
            package = Path(message["manifest_path"]).parent.name
            found.setdefault(package, []).append(Path(message["executable"]))
    return found


def programs(smoke: bool) -> dict[str, Program]:
    """Bench name: the program that has it. Builds them first."""
    found: dict[str, Program] = {}
    for path in built(smoke)["benches"]:
        listed = subprocess.run([path, "--list"], check=True, stdout=subprocess.PIPE, text=True).stdout
        for line in listed.splitlines():
            name, *how = line.split()
            found[name] = Program(path, prints_rows=how == ["rows"])
    return found


class Child:
    """A program that answers in lines of JSON, killed when it is out of time."""

    def __init__(self, command: list[str], seconds: float, env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env and os.environ | env
        )
        self._timer = threading.Timer(seconds, self._process.kill)
        self._timer.daemon = True
        self._timer.start()

    def write(self, line: str) -> None:
        """Hands the program a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def read(self) -> Any:
        """The next line; `EOFError` at the end of a program that ended well."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        if status:
            raise RuntimeError(f"the bench ended with status {status}" + (", out of time" if status == -9 else ""))
        raise EOFError("the bench ended before it was asked to")

    def close(self) -> None:
        """Ends the program: it sees the end of its input."""
        self._timer.cancel()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Served:
    """A Rust bench that runs a round when asked."""

    def __init__(self, program: Path, name: str, smoke: bool, seconds: float) -> None:
        self._child = Child([str(program), "--serve", name, *(["--smoke"] if smoke else [])], seconds)
        self.ready: dict[str, Any] = self._child.read()

    def ask(self, line: str) -> Any:
        """The answer to one line of the protocol."""
        self._child.write(line)
        return self._child.read()

    def close(self) -> None:
        """Ends the program."""
        self._child.close()


def rows_of(command: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """The rows that a program prints, each as soon as it is there."""
    child = Child(command, seconds)
    try:
        while True:
            yield child.read()
    except EOFError:
        return
    finally:
        child.close()
