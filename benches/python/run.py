"""Measures every bench beside its limit and its rivals, into target/bench/results.json.

A bench that is served measures a round when it is asked to, so that ours, the limit and the rivals take turns on the same batches.
Other benches print their rows themselves (see served.py; SCRIPTS has those in Python). Each row is merged into the file as soon as
it is measured, so stopping loses only the bench that is running.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from catalog import SECTIONS
from checkpoint_rivals import CHECKPOINT_RIVALS
from results import Row, describe, merge, row, setting
from rivals import RIVALS, Round
from served import ROOT, Program, Served, programs, rows_of
from stores import STORES, Store

FOLDER = ROOT / "target" / "bench"
MINUTES = 72
# Seconds for one bench, and for a program that prints several rows.
BENCH_SECONDS = 300.0
PROGRAM_SECONDS = 1200.0
# The scripts beside this file, each with the rows that it prints. A script is given the names of the wanted rows, and --smoke.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "dlrm.py": ("dlrm_step_ram10pct_zipf105",),
    "dlrm_async.py": ("save_async_step_slowdown",),
    "save_ram.py": ("save_extra_ram_bytes",),
    "train_100m.py": (
        "train_100m_rows_peak_rss_bytes",
        "train_ssd_zipf105_1m",
        "train_ssd_zipf105_10m",
        "train_ssd_zipf105_100m",
    ),
}


@dataclass(frozen=True)
class Job:
    """What one process measures. `rows` is told whether this is a smoke run, and how many seconds it may take."""

    names: tuple[str, ...]
    seconds: float
    rows: Callable[[bool, float], Iterator[Row]]


def batches(served: Served) -> torch.Tensor:
    """The ids of the batches that the bench draws: int64 [K, N]."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids"
        served.ask(f"data {path}")
        return torch.from_numpy(np.fromfile(path, "<i8").reshape(-1, served.ready["batch"]))


def measure(program: Path, name: str, smoke: bool, seconds: float) -> Row:
    """Measure a served bench, and return its row."""
    served = Served(program, name, smoke, seconds)
    stores: list[Store] = []
    try:
        ready = served.ready
        ids = batches(served) if ready["batch"] else None
        rivals: dict[str, Round] = {}
        if ready["rows"]:
            given = torch.empty(0, 0) if ids is None else ids
            wanted = (RIVALS | CHECKPOINT_RIVALS).get(name, {})
            rivals = {what: make(given, ready["rows"]) for what, make in wanted.items()}
        for store, every in STORES.get(name, {}).items() if ready["store"] else ():
            stores.append(Store(store, ready["store"], ids, every, smoke, seconds))
        here = [store for store in stores if not store.missing]
        values: dict[str, list[float]] = {"ours": []}
        for _ in range(1 if smoke else ready["rounds"]):
            values["ours"].append(served.ask("ours"))
            if ready["limit"]:
                values.setdefault("limit", []).append(served.ask("limit"))
            for what, run in rivals.items():
                values.setdefault(what, []).append(run())
            for other in here:
                other.run()
        figures = served.ask("figures")
    finally:
        served.close()
        for other in stores:
            other.close()
    median = {side: statistics.median(rounds) for side, rounds in values.items()}
    made = row(
        name,
        ready["unit"],
        ready["better"],
        values["ours"],
        limit={"what": ready["limit"], "value": median["limit"]} if ready["limit"] else None,
        rivals=[{"what": what, "value": median[what]} for what in rivals] + [other.row() for other in here],
        run=figures,
    )
    return made | {"missing": {other.what: other.missing for other in stores if other.missing}}


def served_job(program: Path, name: str) -> Job:
    def rows(smoke: bool, seconds: float) -> Iterator[Row]:
        yield measure(program, name, smoke, seconds)

    return Job((name,), BENCH_SECONDS, rows)


def printing_job(command: list[str], names: tuple[str, ...]) -> Job:
    def rows(smoke: bool, seconds: float) -> Iterator[Row]:
        return rows_of([*command, *names, *(["--smoke"] if smoke else [])], seconds)

    return Job(names, PROGRAM_SECONDS, rows)


def jobs(found: dict[str, Program], wanted: set[str]) -> list[Job]:
    """What measures the wanted benches; all of them when none is named."""
    served = [served_job(program.path, name) for name, program in found.items() if not program.prints_rows]
    printing = [
        ([str(path), "--rows"], [name for name, other in found.items() if other.path == path])
        for path in dict.fromkeys(program.path for program in found.values() if program.prints_rows)
    ]
    printing += [
        ([sys.executable, str(Path(__file__).with_name(script))], [*names]) for script, names in SCRIPTS.items()
    ]
    made = [job for job in served if not wanted or wanted & {*job.names}]
    for command, names in printing:
        some = tuple(name for name in names if not wanted or name in wanted)
        made += [printing_job(command, some)] if some else []
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument(
        "--smoke", action="store_true", help="small data, one round, into smoke.json: shows that every bench runs"
    )
    options = parser.parse_args()
    begin = time.monotonic()
    found = programs(options.smoke)
    names = sorted([*found, *(name for script in SCRIPTS.values() for name in script)])
    wanted = {name for name in options.only.split(",") if name}
    if unknown := sorted(wanted - {*names}):
        parser.error(f"no bench named {', '.join(unknown)}; there are {', '.join(names)}")
    if uneven := {*names} ^ {name for section in SECTIONS.values() for name in section}:
        raise SystemExit(f"benches and benches/python/catalog.py name each other, but for {', '.join(sorted(uneven))}")
    path = FOLDER / ("smoke.json" if options.smoke else "results.json")
    measured, failed = 0, 0
    for job in (todo := jobs(found, wanted)):
        now = time.monotonic() - begin
        left = min(job.seconds, MINUTES * 60 - now)
        at = f"[{todo.index(job) + 1}/{len(todo)}, {now:.0f} s]"
        missing = {*job.names}
        try:
            if left <= 0:
                raise TimeoutError("left out: out of time")
            for found_row in job.rows(options.smoke, left):
                merge(path, found_row | {"setting": setting()})
                print(f"{at} {found_row['name']}: {describe(found_row)}", flush=True)
                missing.discard(found_row["name"])
                measured += 1
            if missing:
                raise RuntimeError("no row")
        except (RuntimeError, OSError, EOFError) as error:
            print(f"{at} {', '.join(sorted(missing))}: FAILED: {error}", flush=True)
            failed += len(missing)
    print(f"{measured} measured, {failed} failed: {os.path.relpath(path)}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped: what was measured is kept")
        sys.exit(130)
