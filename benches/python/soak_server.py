"""A serving process of the soak. It answers requests until its input ends, and holds every row against the truth.

    python benches/python/soak_server.py CHECKPOINTS IDS --seed 1

Each line that it is given is answered with a line of JSON about the time since the last one: see `Report`. A request looks up the
same ids in both tables of one version.
"""

import argparse
import dataclasses
import json
import selectors
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scratch import die_with_parent
from soak_trainer import TABLES
from soak_truth import CLOCK, Truth
from torchrec_embcache import serving
from torchrec_embcache.exceptions import StaleError

REQUEST_IDS = 1000
POLL_SECONDS = 0.1


@dataclass
class Report:
    """What a process saw since its last report. Times are in microseconds, memory in bytes."""

    requests: int = 0
    wrong: list[str] = field(default_factory=list)
    stale: int = 0  # requests that were refused because no checkpoint came for too long
    steps: list[int] = field(default_factory=list)  # of the checkpoints that were served
    p50: float = 0.0
    p99: float = 0.0
    version: str = ""
    staleness: float = 0.0
    failed_polls: int = 0
    last_error: str | None = None
    private_bytes: int = 0
    versions: int = 0
    pss: int = 0
    anonymous: int = 0
    mappings: int = 0
    files: int = 0


def memory() -> dict[str, int]:
    """Memory of this process in bytes, and how many files it has open and mappings it has."""
    rollup = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    kib = {what: int(rollup[name].split()[0]) << 10 for what, name in (("pss", "Pss"), ("anonymous", "Anonymous"))}
    mappings = Path("/proc/self/maps").read_text().count("\n")
    return {**kib, "mappings": mappings, "files": sum(1 for _ in Path("/proc/self/fd").iterdir())}


class Server:
    """Looks rows up, and compares them."""

    def __init__(self, tables: serving.Tables, truth: Truth, seed: int) -> None:
        self._tables, self._truth, self._random = tables, truth, np.random.default_rng(seed)
        self._times: list[float] = []
        self._report = Report()

    def request(self) -> None:
        """One request: the clock and random ids, in both tables of one version."""
        ids = self._random.integers(1, self._truth.ids + 1, REQUEST_IDS)
        ids[0] = CLOCK
        begin = time.perf_counter()
        try:
            with self._tables.pin() as version:
                found = [version[name].lookup(ids) for name in TABLES]
                name = version.name
        except StaleError:
            self._report.stale += 1
            return
        self._times.append(time.perf_counter() - begin)
        self._report.requests += 1
        for table, rows in zip(TABLES, found, strict=True):
            self._check(f"{name}/{table}", ids, rows[:].numpy(), rows.found.numpy())
        if found[0][0, 0] != found[1][0, 0]:
            self._report.wrong.append(f"{name}: a request saw the steps {found[0][0, 0]} and {found[1][0, 0]}")

    def _check(self, what: str, ids: np.ndarray, rows_ND: np.ndarray, found: np.ndarray) -> None:
        step = int(rows_ND[0, 0])
        if step not in self._report.steps:
            self._report.steps.append(step)
        values, is_there = self._truth.rows(ids, step)
        wrong = (rows_ND != values[:, None]).any(axis=1) | (found != is_there)
        for place in np.flatnonzero(wrong)[:3]:
            seen, want = (bool(found[place]), rows_ND[place].tolist()), (bool(is_there[place]), float(values[place]))
            self._report.wrong.append(f"{what} at step {step}, id {ids[place]}: {seen} instead of {want}")

    def report(self) -> Report:
        """What was seen since the last report."""
        report, stats = self._report, self._tables.stats()
        if self._times:
            report.p50, report.p99 = (float(at) for at in np.quantile(self._times, [0.5, 0.99]) * 1e6)
        for name in ("version", "failed_polls", "last_error", "private_bytes", "versions"):
            setattr(report, name, getattr(stats, name))
        report.staleness = stats.staleness_seconds
        for name, value in memory().items():
            setattr(report, name, value)
        self._report, self._times = Report(), []
        return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("ids", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between two requests")
    parser.add_argument("--max-staleness", type=float, default=60.0)
    given = parser.parse_args()
    die_with_parent()
    follow = serving.Follow(poll_seconds=POLL_SECONDS, max_staleness_seconds=given.max_staleness, on_stale="raise")
    with serving.open(given.path, follow=follow) as tables, selectors.DefaultSelector() as asked:
        asked.register(sys.stdin, selectors.EVENT_READ)
        server = Server(tables, Truth(given.ids), given.seed)
        print(json.dumps({"ready": tables.stats().version}), flush=True)
        while True:
            server.request()
            if asked.select(given.pause):
                if not sys.stdin.readline():
                    return
                print(json.dumps(dataclasses.asdict(server.report())), flush=True)


if __name__ == "__main__":
    main()
