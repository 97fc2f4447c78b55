"""A serving process of the soak. It answers requests until its input ends, and verifies every row against the expected values.

    python benches/python/soak_server.py CHECKPOINTS IDS --seed 1

Each input line is answered with a line of JSON. `begin` opens the checkpoints. `report` covers the time since the last report, see
`Report`, and `now` returns the current state, see `Now`. A request looks up the same ids in both tables of one version. Times are
in seconds since 1970.
"""

import argparse
import dataclasses
import json
import re
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
    """Measurements of a process since its last report. Times are in microseconds, memory in bytes."""

    requests: int = 0
    wrong: list[str] = field(default_factory=list)
    stale: int = 0  # requests rejected because the checkpoint was too old
    # For each checkpoint that it answered from: the name, the step in its rows, and the first and last times.
    served: list[tuple[str, int, float, float]] = field(default_factory=list)
    # For each checkpoint that it rejected as too old: the name, and the first time.
    refused: list[tuple[str, float]] = field(default_factory=list)
    # Times at which an answer was the first from another checkpoint than the previous answer.
    swapped: list[float] = field(default_factory=list)
    p50: float = 0.0
    p99: float = 0.0
    version: str = ""
    staleness: float = 0.0  # the maximum, in seconds
    failed_polls: int = 0
    last_error: str | None = None
    private_bytes: int = 0
    versions: int = 0
    pss: int = 0
    anonymous: int = 0
    own: int = 0  # anonymous memory allocated since it opened the checkpoints
    mappings: int = 0
    files: int = 0


@dataclass
class Now:
    """The served version of a process, and the results of its last requests."""

    version: str = ""
    failed_polls: int = 0
    answered: tuple[str, int, float] = (
        "",
        0,
        0.0,
    )  # the checkpoint of the last answer, its step, and the time before the request
    is_refusing: bool = False  # true if the last request was rejected


def memory() -> dict[str, int]:
    """Returns the memory of this process in bytes, and its numbers of open files and mappings."""
    rollup = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    kib = {what: int(rollup[name].split()[0]) << 10 for what, name in (("pss", "Pss"), ("anonymous", "Anonymous"))}
    mappings = Path("/proc/self/maps").read_text().count("\n")
    return {**kib, "mappings": mappings, "files": sum(1 for _ in Path("/proc/self/fd").iterdir())}


class Server:
    """Looks up rows, and verifies them."""

    def __init__(self, tables: serving.Tables, truth: Truth, seed: int, begun_with: int = 0) -> None:
        self._tables, self._truth, self._random = tables, truth, np.random.default_rng(seed)
        self._times: list[float] = []
        self._report = Report()
        self._now = Now()
        self._begun_with = begun_with

    def request(self) -> None:
        """Runs one request: the clock and random ids, in both tables of one version."""
        ids = self._random.integers(1, self._truth.ids + 1, REQUEST_IDS)
        ids[0] = CLOCK
        moment, begin = time.time(), time.perf_counter()
        try:
            with self._tables.pin() as version:
                found = [version[name].lookup(ids) for name in TABLES]
                name, published = version.name, version.published_at
        except StaleError as error:
            self._note_refusal(str(error))
            return
        self._times.append(time.perf_counter() - begin)
        self._report.requests += 1
        self._report.staleness = max(self._report.staleness, moment - published)
        self._note_answer(name, int(found[0][0, 0]), moment)
        for table, rows in zip(TABLES, found, strict=True):
            self._check(f"{name}/{table}", ids, rows[:].numpy(), rows.found.numpy())
        if found[0][0, 0] != found[1][0, 0]:
            self._report.wrong.append(f"{name}: a request saw the steps {found[0][0, 0]} and {found[1][0, 0]}")

    def _note_answer(self, name: str, step: int, moment: float) -> None:
        served = self._report.served
        if served and served[-1][:2] == (name, step):
            served[-1] = (name, step, served[-1][2], moment)
        else:
            served.append((name, step, moment, moment))
        if self._now.answered[0] not in ("", name):
            self._report.swapped.append(moment)
        self._now.answered, self._now.is_refusing = (name, step, moment), False

    def _note_refusal(self, message: str) -> None:
        said = re.search(r"checkpoint (\S+) was published", message)
        name = said[1] if said else message
        if name not in [refused for refused, _ in self._report.refused]:
            self._report.refused.append((name, time.time()))
        self._report.stale += 1
        self._now.is_refusing = True

    def _check(self, what: str, ids: np.ndarray, rows_ND: np.ndarray, found: np.ndarray) -> None:
        step = int(rows_ND[0, 0])
        values, is_there = self._truth.rows(ids, step)
        wrong = (rows_ND != values[:, None]).any(axis=1) | (found != is_there)
        for place in np.flatnonzero(wrong)[:3]:
            seen, want = (bool(found[place]), rows_ND[place].tolist()), (bool(is_there[place]), float(values[place]))
            self._report.wrong.append(f"{what} at step {step}, id {ids[place]}: {seen} instead of {want}")

    def report(self) -> Report:
        """Returns the measurements since the last report."""
        report, stats = self._report, self._tables.stats()
        if self._times:
            report.p50, report.p99 = (float(at) for at in np.quantile(self._times, [0.5, 0.99]) * 1e6)
        for name in ("version", "failed_polls", "last_error", "private_bytes", "versions"):
            setattr(report, name, getattr(stats, name))
        report.staleness = max(report.staleness, stats.staleness_seconds)
        for name, value in memory().items():
            setattr(report, name, value)
        report.own = report.anonymous - self._begun_with
        self._report, self._times = Report(), []
        return report

    def now(self) -> Now:
        """Returns the served version, and the results of the last requests."""
        stats = self._tables.stats()
        return dataclasses.replace(self._now, version=stats.version, failed_polls=stats.failed_polls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("ids", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between two requests")
    parser.add_argument("--max-staleness", type=float, default=60.0)
    given = parser.parse_args()
    die_with_parent()
    sys.stdin.readline()
    begun_with = memory()["anonymous"]
    follow = serving.Follow(poll_seconds=POLL_SECONDS, max_staleness_seconds=given.max_staleness, on_stale="raise")
    with serving.open(given.path, follow=follow) as tables, selectors.DefaultSelector() as asked:
        asked.register(sys.stdin, selectors.EVENT_READ)
        server = Server(tables, Truth(given.ids), given.seed, begun_with)
        print(json.dumps({"ready": tables.stats().version}), flush=True)
        while True:
            server.request()
            if asked.select(given.pause):
                line = sys.stdin.readline().strip()
                if not line:
                    return
                print(json.dumps(dataclasses.asdict(server.now() if line == "now" else server.report())), flush=True)


if __name__ == "__main__":
    main()
