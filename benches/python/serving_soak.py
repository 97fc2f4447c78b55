"""Servers under load follow a trainer that saves deltas in which rows are inserted, change and expire, and every row is checked.

    python benches/python/serving_soak.py [NAME ...] [--smoke] [--seconds 600] [--processes 4]

One run has no faults. In another run the trainer is killed during saves and restarted, a delta is corrupted, the trainer stops
saving until the served version is too old, and the disk is full. A third run measures the total memory of four servers.

It prints rows of results.json, and to standard error one line per time window. The reports of each server and window are in
target/bench, as lines of JSON in serving_soak.jsonl and serving_soak_faults.jsonl, together with plots. The exit status is 1 if a
row was wrong, if a server answered from a checkpoint that was not published or is too old, or rejected a valid one, or if its
memory grew without bound.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

import soak_faults
from plots import soak_plot
from results import row
from scratch import die_with_parent, scratch
from served import ROOT
from soak_faults import Program, start
from soak_published import Checkpoint, Published
from soak_truth import Truth

P99, WRONG, PSS = "serving_soak_p99_ms", "serving_soak_wrong_rows_with_faults", "serving_pss_of_four_over_one"
# Number of deltas between full saves.
FULL_EVERY = 20
FOLDER = ROOT / "target" / "bench"
# Number of saves that fail while the disk is full.
FAILED_SAVES = 2


@dataclass(frozen=True)
class Scale:
    """The size of a run: the number of saves, in addition to those of faults, and the pauses between them."""

    saves: int
    save_seconds: float
    window_seconds: float
    processes: int
    ids: int
    pss_rows: int
    # Maximum age of a version, without faults and with them.
    max_staleness: float
    max_staleness_with_faults: float
    disk_mib: int
    # A server's private memory in the second half may be at most this multiple of that in the first half, plus this many bytes.
    growth: float
    growth_bytes: int
    # A program that hangs is killed after this time, which ends the soak.
    limit_seconds: float


FULL = Scale(
    saves=300,
    save_seconds=2,
    window_seconds=5,
    processes=4,
    ids=50_000,
    pss_rows=2_000_000,
    max_staleness=20,
    max_staleness_with_faults=20,
    disk_mib=1024,
    growth=1.2,
    growth_bytes=8 << 20,
    limit_seconds=3000,
)
SMOKE = Scale(
    saves=12,
    save_seconds=0.5,
    window_seconds=1,
    processes=2,
    ids=2000,
    pss_rows=20_000,
    max_staleness=20,
    max_staleness_with_faults=3,
    disk_mib=64,
    growth=1.0,  # its halves are too short to be comparable
    growth_bytes=32 << 20,
    limit_seconds=900,
)


class Soak:
    """A trainer, servers, and their reports."""

    def __init__(self, path: Path, scale: Scale, max_staleness: float, log: Path) -> None:
        self.path, self.scale = path, scale
        self.published = Published(max_staleness)
        self.windows: list[dict[str, Any]] = []
        self.marks: list[tuple[float, str]] = []
        self.saves = self.failed_saves = 0
        self._step = 0  # the trainer's step
        self._commanded = 0.0  # start time of the running save
        self._started = time.time()
        self._log = log.open("w", encoding="utf-8")
        servers = [
            ("soak_server.py", path, scale.ids, "--seed", seed, "--max-staleness", max_staleness)
            for seed in range(scale.processes)
        ]
        self.servers = [Program(*given, seconds=scale.limit_seconds) for given in servers]
        self._next_trainer = self._make_trainer()
        self.trainer = self._next_trainer
        self.restart_trainer()
        self.save("full")
        for server in self.servers:
            server.write("begin")
        for server in self.servers:
            server.read()
        self._looked = self.now

    def _make_trainer(self) -> Program:
        return Program("soak_trainer.py", self.path, self.scale.ids, seconds=self.scale.limit_seconds)

    @property
    def now(self) -> float:
        """Seconds since the start of the soak."""
        return time.time() - self._started

    def mark(self, what: str) -> None:
        """Records an event at the current time."""
        self.marks.append((self.now, what))
        self._write({"at": self.now, "what": what}, f"{self.now:.1f} s: {what}")

    def _write(self, line: dict[str, Any], text: str) -> None:
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()
        print(text, file=sys.stderr, flush=True)

    # ---- the trainer

    def latest(self) -> str | None:
        """Returns the name in LATEST."""
        try:
            return (self.path / "LATEST").read_text().split()[0]
        except FileNotFoundError:
            return None

    def restart_trainer(self) -> None:
        """Starts a trainer from the latest checkpoint, and prepares its successor. A save of the previous trainer may have
        published a checkpoint without an answer.
        """
        latest = self.latest()
        if latest and latest not in self.published.checkpoints:
            self._add(latest, self._step + Truth(1).save_every, "unheard")
        self.trainer, self._next_trainer = self._next_trainer, self._make_trainer()
        loaded = self.trainer.ask("begin")
        self.published.check_restart(loaded["checkpoint"], loaded["step"])
        self._step = loaded["step"]

    def _add(self, name: str, step: int, kind: str) -> None:
        published = self.published
        builds_on_damaged = (
            kind != "full" and bool(published.checkpoints) and published.newest.name in published.damaged
        )
        published.add(Checkpoint(name, step, self._commanded, time.time()))
        if builds_on_damaged:
            published.damage(name)

    def command(self, kind: str) -> None:
        """Sends the trainer a save command, "save" or "full"."""
        self._commanded = time.time()
        self.trainer.write(kind)

    def answer(self) -> None:
        """Records the trainer's answer to the save command."""
        said = self.trainer.read()
        self.saves += 1
        self._step = said["step"]
        if "failed" in said:
            self.failed_saves += 1
            self.mark("a save failed")
            wanted = self.published.newest.name if self.published.checkpoints else None
        else:
            wanted = said["checkpoint"]
            self._add(wanted, said["step"], said["kind"])
            if said["kind"] == "full":
                self.mark("full")
        if (latest := self.latest()) != wanted:
            self.published.problems.append(f"LATEST names {latest}, and not {wanted}, after a save that said {said}")

    def save(self, kind: str) -> None:
        """Commands a save, "save" or "full", and records the answer."""
        self.command(kind)
        self.answer()

    # ---- the servers

    def look(self) -> None:
        """Collects a report from each server."""
        for server in self.servers:
            server.write("report")
        seen = []
        for number, server in enumerate(self.servers):
            said = server.read()
            said["swapped"] = [moment - self._started for moment in said["swapped"]]
            seen.append({"at": self.now, "process": number, **said})
            self._log.write(json.dumps(seen[-1]) + "\n")
        self._log.flush()
        self._looked = self.now
        self.windows += seen
        print(f"{self.now:.1f} s: {said_of(seen)}", file=sys.stderr, flush=True)

    def look_now_and_then(self) -> None:
        """Collects the servers' reports if a window has ended."""
        if self.now - self._looked >= self.scale.window_seconds:
            self.look()

    def wait(self, until: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Waits until the condition holds for the current states of the servers (see `soak_server.Now`), and returns these. It also
        ends when a server has given a wrong answer. The trainer must not be saving.
        """
        while True:
            self.look_now_and_then()
            all_now = [server.ask("now") for server in self.servers]
            if until(all_now) or any(self.published.is_wrong_answer(*now["answered"]) for now in all_now):
                return all_now
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends all programs."""
        self._next_trainer.kill()
        for program in [*self.servers, self.trainer]:
            program.close()
        self._log.close()


def said_of(windows: list[dict[str, Any]]) -> str:
    """Summarizes the servers' reports of one window in a line."""
    p99, p50 = (max(window[name] for window in windows) / 1e3 for name in ("p99", "p50"))
    requests, refused = (sum(window[name] for window in windows) for name in ("requests", "stale"))
    swaps, wrong = (sum(len(window[name]) for window in windows) for name in ("swapped", "wrong"))
    oldest = max(window["staleness"] for window in windows)
    return (
        f"p99 {p99:.2f} ms, p50 {p50:.2f} ms, {requests} requests, {refused} refused, {swaps} swaps, at most {oldest:.1f} s old, "
        f"{wrong} wrong"
    )


def faults(soak: Soak, *, disk: bool) -> list[Callable[[], None]]:
    """Returns the faults, in order."""
    first, second, third, last = (partial(soak_faults.kill, soak, place) for place in soak_faults.KILLS)
    full = [partial(soak_faults.fill, soak, FAILED_SAVES)] if disk else []
    return [first, second, partial(soak_faults.damage, soak), partial(soak_faults.silence, soak), *full, third, last]


def run(path: Path, scale: Scale, log: Path, *, with_faults: bool, disk: bool = False) -> Soak:
    """Runs the saves. Faults occur in order, distributed over the saves."""
    most = scale.max_staleness_with_faults if with_faults else scale.max_staleness
    with Soak(path, scale, most, log) as soak:
        trouble = faults(soak, disk=disk) if with_faults else []
        turns = np.linspace(1, scale.saves, len(trouble) + 1).astype(int).tolist()[:-1]
        for number in range(1, scale.saves + 1):
            begin = soak.now
            for turn, fault in zip(turns, trouble, strict=True):
                if turn == number:
                    fault()
            soak.save("full" if number % FULL_EVERY == 0 else "save")
            soak.look_now_and_then()
            time.sleep(max(0.0, begin + scale.save_seconds - soak.now))
        soak.save("full")
        newest = soak.published.newest.name
        soak.wait(lambda all_now: all(now["version"] == newest for now in all_now))
        soak.look()
    return soak


def found(soak: Soak) -> dict[str, Any]:
    """Returns the figures of a run."""
    windows = soak.windows
    wrong = [text for window in windows for text in window["wrong"]]
    problems = [*soak.published.problems, *soak.published.check(windows), *grown(windows, soak.scale)]
    return {
        "wrong": len(wrong),
        "problems": len(problems),
        "refused": sum(window["stale"] for window in windows),
        "requests": sum(window["requests"] for window in windows),
        "versions_served": len({served[0] for window in windows for served in window["served"]}),
        "swaps": sum(len(window["swapped"]) for window in windows),
        "saves": soak.saves,
        "failed_saves": soak.failed_saves,
        "failed_polls": max(window["failed_polls"] for window in windows),
        "p50_us": float(np.median([window["p50"] for window in windows if window["requests"]])),
        "most_staleness_seconds": max(window["staleness"] for window in windows),
        "own_bytes_by_half": [max(halves) for halves in zip(*own_by_half(windows).values(), strict=True)],
        "most_mappings": max(window["mappings"] for window in windows),
        "most_files": max(window["files"] for window in windows),
        "examples": [*wrong[:3], *problems[:10]],
    }


def own_by_half(windows: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """Returns the private memory of each server in the first and in the second half of its windows: the median, because a running
    poll uses some temporarily.
    """
    by_process: dict[int, list[int]] = {}
    for window in windows:
        by_process.setdefault(window["process"], []).append(window["own"])
    halves = {process: (own[: (len(own) + 1) // 2], own[len(own) // 2 :]) for process, own in by_process.items()}
    return {process: (float(np.median(first)), float(np.median(second))) for process, (first, second) in halves.items()}


def grown(windows: list[dict[str, Any]], scale: Scale) -> Iterator[str]:
    """Yields the servers whose private memory grew more than allowed."""
    for process, (first, second) in own_by_half(windows).items():
        if second > first * scale.growth + scale.growth_bytes:
            yield f"server {process} had {first:.0f} bytes of its own in the first half of the run, and {second:.0f} in the second"


def is_right(figures: dict[str, Any]) -> bool:
    """True if servers answered, no row was wrong, and no other guarantee was violated."""
    return not figures["wrong"] and not figures["problems"] and figures["requests"] > 0


def soak_row(folder: Path, scale: Scale) -> Iterator[dict[str, Any]]:
    soak = run(folder / "plain", scale, log_of("serving_soak"), with_faults=False)
    figures = found(soak)
    assert not figures["refused"], f"{figures['refused']} requests were refused because no checkpoint came in time"
    draw(soak, "serving_soak.svg")
    yield row(P99, "ms", "lower", [window["p99"] / 1e3 for window in soak.windows if window["requests"]], run=figures)


def fault_row(folder: Path, scale: Scale) -> Iterator[dict[str, Any]]:
    with soak_faults.small_disk(scale.disk_mib) as disk:
        path, log = (disk or folder) / "faults", log_of("serving_soak_faults")
        soak = run(path, scale, log, with_faults=True, disk=disk is not None)
    figures = found(soak) | {"disk_was_full": disk is not None}
    draw(soak, "serving_soak_faults.svg")
    yield row(WRONG, "rows", "lower", [figures["wrong"] + figures["problems"]], run=figures)


def log_of(name: str) -> Path:
    """Returns the log file of the servers' reports of a run."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    return FOLDER / f"{name}.jsonl"


def draw(soak: Soak, name: str) -> None:
    """Draws the run."""
    (FOLDER / name).write_text(soak_plot(soak.windows, soak.marks), encoding="utf-8")


def pss_row(folder: Path, scale: Scale) -> Iterator[dict[str, Any]]:
    """Yields the total memory of four servers that have read every row, each shared page counted once, divided by that of one."""
    path = folder / "shared"
    rows = scale.pss_rows
    start("soak_memory.py", path, rows, "--save", seconds=600).close()
    servers = [start("soak_memory.py", path, rows, seconds=600) for _ in range(4)]
    for server in servers:  # every server has read all rows before any reports its memory
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
    parser.add_argument("--seconds", type=float, help="of saves and pauses; faults come on top")
    parser.add_argument("--processes", type=int)
    given = parser.parse_args()
    die_with_parent()
    scale = SMOKE if given.smoke else FULL
    if given.seconds:
        limit = max(scale.limit_seconds, given.seconds * 5)
        scale = replace(scale, saves=max(1, int(given.seconds / scale.save_seconds)), limit_seconds=limit)
    if given.processes:
        scale = replace(scale, processes=given.processes)
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
