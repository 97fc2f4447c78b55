"""Servers under load follow a trainer that saves deltas in which rows come, change and expire, and every row is checked.

    python benches/python/serving_soak.py [NAME ...] [--smoke] [--seconds 600] [--processes 4]

One run goes without faults. In another one the trainer is killed and starts again, a delta is damaged, and the disk is full. A
third one measures what memory four servers take together. It prints rows of results.json, and draws target/bench/serving_soak.svg
and serving_soak_faults.svg. The exit status is 1 where a row was wrong.
"""

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import soak_faults
from plots import soak_plot
from results import row
from scratch import die_with_parent, scratch
from served import ROOT
from soak_faults import Program, start
from soak_truth import Truth

P99, WRONG, PSS = "serving_soak_p99_ms", "serving_soak_wrong_rows_with_faults", "serving_pss_of_four_over_one"
# A checkpoint's tables are rewritten whole after so many deltas.
FULL_EVERY = 20
DISK_MIB = 1024


@dataclass(frozen=True)
class Scale:
    """How much there is to do."""

    seconds: float
    save_seconds: float
    window_seconds: float
    processes: int
    ids: int
    pss_rows: int


@dataclass
class Soak:
    """A trainer, servers, and what they said."""

    path: Path
    scale: Scale
    max_staleness: float
    started: float = field(default_factory=time.monotonic)
    windows: list[dict[str, Any]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    failed_saves: int = 0
    saves: int = 0

    def __post_init__(self) -> None:
        # A program that hangs is ended, and so the soak.
        self._limit = self.scale.seconds * 3 + 120
        self.restart_trainer()
        self.save("full")
        self.servers = [self._server(seed) for seed in range(self.scale.processes)]

    def _server(self, seed: int) -> Program:
        given = (self.path, self.scale.ids, "--seed", seed, "--max-staleness", self.max_staleness)
        return start("soak_server.py", *given, seconds=self._limit)

    @property
    def now(self) -> float:
        """Seconds since the soak began."""
        return time.monotonic() - self.started

    def restart_trainer(self) -> None:
        """Start a trainer, from the newest checkpoint there is."""
        self.trainer = start("soak_trainer.py", self.path, self.scale.ids, seconds=self._limit)
        assert self.trainer.first["step"] % Truth(1).save_every == 0, "only what was saved is loaded"

    def save(self, kind: str) -> None:
        """Let the trainer save, "save" or "full", and note what it says."""
        self.trainer.write(kind)
        said = self.trainer.read()
        self.saves += 1
        self.failed_saves += "failed" in said
        if "failed" in said or kind == "full":
            self.marks.append((self.now, "save failed" if "failed" in said else "full"))

    def look(self) -> None:
        """Ask each server what it saw."""
        for server in self.servers:
            server.write("report")
        for number, server in enumerate(self.servers):
            self.windows.append({"at": self.now, "process": number, **server.read()})

    def close(self) -> None:
        """End all programs."""
        for program in [*self.servers, self.trainer]:
            program.close()


def faults(soak: Soak, disk: bool) -> Iterator[str]:
    """One fault after the other. Each is done when its name is asked for."""
    dice = random.Random(5)
    for _ in range(3):
        soak_faults.kill(soak, dice.uniform(0.0, 0.4))
        yield "killed"
    soak_faults.damage(soak)
    yield "damaged"
    soak.save("save")
    yield "on the damaged one"
    soak.save("full")
    yield "mended"
    if disk:
        soak_faults.fill(soak, 2)
        yield "disk full"
    soak_faults.kill(soak, dice.uniform(0.0, 0.4))
    yield "killed"


def run(path: Path, scale: Scale, *, with_faults: bool, disk: bool = False) -> Soak:
    """Save every so often until the time is over. Faults come in turn, spread over the time."""
    soak = Soak(path, scale, max_staleness=scale.seconds if with_faults else max(20.0, 10 * scale.save_seconds))
    trouble = faults(soak, disk) if with_faults else iter(())
    saves = max(1, int(scale.seconds / scale.save_seconds))
    turns = np.linspace(1, max(2, saves - 4), 8 if disk else 7).astype(int).tolist() if with_faults else []
    looked = soak.now
    for number in range(1, saves + 1):
        begin = soak.now
        for _ in range(turns.count(number)):
            soak.marks.append((soak.now, next(trouble, "")))
        soak.save("full" if number % FULL_EVERY == 0 else "save")
        if soak.now - looked >= scale.window_seconds or number == saves:
            soak.look()
            looked = soak.now
        time.sleep(max(0.0, begin + scale.save_seconds - soak.now))
    soak.save("full")
    wait_for_newest(soak)
    soak.close()
    return soak


def wait_for_newest(soak: Soak) -> None:
    """Wait until every server serves the newest checkpoint. One that hangs is ended by its time limit."""
    newest = (soak.path / "LATEST").read_text().split()[0]
    while True:
        soak.look()
        if all(window["version"] == newest for window in soak.windows[-len(soak.servers) :]):
            return
        time.sleep(0.2)


def found(soak: Soak) -> dict[str, Any]:
    """The figures of a run."""
    windows, half = soak.windows, soak.windows[len(soak.windows) // 2 :]
    wrong = [text for window in windows for text in window["wrong"]]
    unpublished = [step for window in windows for step in window["steps"] if step % Truth(1).save_every]
    first, last = ([window["anonymous"] for window in part] for part in (windows[: len(windows) // 2], half))
    return {
        "wrong": len(wrong),
        "unpublished": len(unpublished),
        "refused": sum(window["stale"] for window in windows),
        "requests": sum(window["requests"] for window in windows),
        "versions_served": len({step for window in windows for step in window["steps"]}),
        "saves": soak.saves,
        "failed_saves": soak.failed_saves,
        "failed_polls": max(window["failed_polls"] for window in windows),
        "p50_us": float(np.median([window["p50"] for window in windows])),
        "most_staleness_seconds": max(window["staleness"] for window in windows),
        "anonymous_bytes_second_half_of_first": float(np.max(last) / np.max(first)) if first else 1.0,
        "most_mappings": max(window["mappings"] for window in windows),
        "most_files": max(window["files"] for window in windows),
        "examples_of_wrong": wrong[:3],
    }


def is_right(figures: dict[str, Any]) -> bool:
    """Whether no row was wrong, and every version that was served had been published."""
    return not figures["wrong"] and not figures["unpublished"] and figures["requests"] > 0


def soak_row(folder: Path, scale: Scale) -> Iterator[dict[str, Any]]:
    soak = run(folder / "plain", scale, with_faults=False)
    figures = found(soak)
    assert not figures["refused"], f"{figures['refused']} requests were refused because no checkpoint came in time"
    draw(soak, "serving_soak.svg")
    yield row(P99, "ms", "lower", [window["p99"] / 1e3 for window in soak.windows if window["requests"]], run=figures)


def fault_row(folder: Path, scale: Scale) -> Iterator[dict[str, Any]]:
    with soak_faults.small_disk(DISK_MIB) as disk:
        soak = run((disk or folder) / "faults", scale, with_faults=True, disk=disk is not None)
    figures = found(soak) | {"disk_was_full": disk is not None}
    assert figures["failed_polls"] > 0, "a damaged delta must be seen"
    assert disk is None or soak.failed_saves > 0, "a full disk must be seen"
    draw(soak, "serving_soak_faults.svg")
    yield row(WRONG, "rows", "lower", [figures["wrong"] + figures["unpublished"]], run=figures)


def draw(soak: Soak, name: str) -> None:
    """Draw the run."""
    folder = ROOT / "target" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(soak_plot(soak.windows, soak.marks), encoding="utf-8")


def pss_row(folder: Path, scale: Scale) -> Iterator[dict[str, Any]]:
    """What the pages of four servers that have read every row come to, each shared page counted once, over those of one."""
    path = folder / "shared"
    rows = scale.pss_rows
    start("soak_memory.py", path, rows, "--save", seconds=600).close()
    servers = [start("soak_memory.py", path, rows, seconds=600) for _ in range(4)]
    for server in servers:  # all of them have read every row before one of them looks
        server.write("read")
        server.read()
    said = []
    for server in servers:
        server.write("memory")
        said.append(server.read())
    for server in servers:
        server.close()
    over = sum(each["pss"] for each in said) / max(each["rss"] for each in said)
    yield row(PSS, "", "lower", [over], run={"rows": rows, **said[0]})


MEASURES = {P99: soak_row, WRONG: fault_row, PSS: pss_row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *MEASURES], metavar="NAME")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--processes", type=int)
    given = parser.parse_args()
    die_with_parent()
    scale = Scale(6, 0.5, 1, 2, 2000, 20_000) if given.smoke else Scale(600, 2, 5, 4, 50_000, 2_000_000)
    changed = {name: getattr(given, name) for name in ("seconds", "processes") if getattr(given, name)}
    scale = Scale(**{**scale.__dict__, **changed})
    right = True
    with scratch(2 << 30) as folder:
        folder.chmod(0o700)
        for name in given.names or MEASURES:
            for made in MEASURES[name](folder, scale):
                print(json.dumps(made), flush=True)
                right &= name == PSS or is_right(made["run"])
    return 0 if right else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
