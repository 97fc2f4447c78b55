"""Measures every bench together with its limit and its rivals, into target/bench/results.json.

A served bench measures a round on request, so that ours, the limit and the rivals alternate on the same batches. Other benches
print their rows themselves (see served.py; SCRIPTS has those in Python). Each row is merged into the file as soon as it is
measured, so an interrupt only loses the running bench.

`--against TREE` also measures the benches of another checkout of this project, such as the commit before a change. A served bench
of TREE has a round after each of ours, or before it: the order alternates every round, because the second often has a warmer disk
cache. A bench that prints its rows is run once there, after ours.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from catalog import SECTIONS
from checkpoint_rivals import CHECKPOINT_RIVALS
from results import Row, against, describe, merge, refuse_dev_build, row, setting
from rivals import RIVALS, Round
from served import ROOT, Program, Served, programs, rows_of
from stores import STORES, Store

FOLDER = ROOT / "target" / "bench"
MINUTES = 84
# With another tree; the limit and the rivals are not measured twice.
MINUTES_AGAINST = 130
# Time limits in seconds for one bench, and for a program that prints several rows.
BENCH_SECONDS = 300.0
PROGRAM_SECONDS = 1200.0
# Two soaks of ten minutes.
SOAK_SECONDS = 1800.0
# The scripts in this folder, with the rows that each prints. The arguments of a script are the requested row names, and --smoke.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "advise.py": ("advised_reads_of_best_split", "advised_step_of_best_split"),
    "cuda_host.py": ("cuda_host_step_cache10pct_zipf105",),
    "dlrm.py": ("dlrm_step_ram10pct_zipf105",),
    "dlrm_async.py": ("save_async_step_slowdown",),
    "save_ram.py": ("save_extra_ram_bytes",),
    "serving_python.py": ("serve_python_630k_rows_ms",),
    "serving_soak.py": ("serving_soak_p99_ms", "serving_soak_wrong_rows_with_faults", "serving_pss_of_four_over_one"),
    "train_100m.py": (
        "train_100m_rows_peak_rss_bytes",
        "train_ssd_zipf105_1m",
        "train_ssd_zipf105_10m",
        "train_ssd_zipf105_100m",
    ),
}


@dataclass(frozen=True)
class Job:
    """A unit of measurement in one process. `rows` is called with the smoke flag and the time limit in seconds."""

    names: tuple[str, ...]
    seconds: float
    rows: Callable[[bool, float], Iterator[Row]]


@dataclass(frozen=True)
class Other:
    """Another checkout of this project, and its bench programs."""

    root: Path
    programs: dict[str, Program]

    @classmethod
    def built(cls, root: Path, smoke: bool) -> Self:
        """Builds the programs of the tree `root`."""
        return cls(root, programs(smoke, root))

    @property
    def name(self) -> str:
        """The commit of the tree."""
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, cwd=self.root, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    @property
    def env(self) -> dict[str, str]:
        """The environment in which a script imports the package of that tree."""
        return {"PYTHONPATH": str(self.root / "python")}


def in_turn(ours: Served, theirs: Served | None, number: int) -> tuple[float, float | None]:
    """Runs a round of ours and one of the other tree. The order alternates every round."""
    if theirs is None:
        return ours.ask("ours"), None
    if number % 2:
        before = theirs.ask("ours")
        return ours.ask("ours"), before
    return ours.ask("ours"), theirs.ask("ours")


def batches(served: Served) -> torch.Tensor:
    """Returns the ids of the batches that the bench draws: int64 [K, N]."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids"
        served.ask(f"data {path}")
        return torch.from_numpy(np.fromfile(path, "<i8").reshape(-1, served.ready["batch"]))


def measure(program: Path, name: str, smoke: bool, seconds: float, other: Other | None) -> Row:
    """Measures a served bench, and returns its row."""
    before = other and other.programs.get(name)
    served = Served(program, name, smoke, seconds)
    theirs: Served | None = None
    stores: list[Store] = []
    try:
        theirs = Served(before.path, name, smoke, seconds) if before else None
        ready = served.ready
        ids = batches(served) if ready["batch"] else None
        rivals: dict[str, Round] = {}
        if ready["rows"]:
            given = torch.empty(0, 0) if ids is None else ids
            wanted = (RIVALS | CHECKPOINT_RIVALS).get(name, {})
            rivals = {what: make(given, ready["rows"]) for what, make in wanted.items()}
        for what, every in STORES.get(name, {}).items() if ready["store"] else ():
            stores.append(Store(what, ready["store"], ids, every, smoke, seconds))
        here = [store for store in stores if not store.missing]
        values: dict[str, list[float]] = {"ours": []}
        pairs: list[float] = []
        rounds = 1 if smoke else ready["rounds"] + (ready["rounds"] % 2 if theirs else 0)
        for number in range(rounds):
            ours, again = in_turn(served, theirs, number)
            values["ours"].append(ours)
            pairs += [] if again is None else [again]
            if ready["limit"]:
                values.setdefault("limit", []).append(served.ask("limit"))
            for what, measured in rivals.items():
                values.setdefault(what, []).append(measured())
            for store in here:
                store.run()
        figures = served.ask("figures")
    finally:
        served.close()
        if theirs:
            theirs.close()
        for store in stores:
            store.close()
    median = {side: statistics.median(rounds) for side, rounds in values.items()}
    made = row(
        name,
        ready["unit"],
        ready["better"],
        values["ours"],
        limit={"what": ready["limit"], "value": median["limit"]} if ready["limit"] else None,
        rivals=[{"what": what, "value": median[what]} for what in rivals] + [store.row() for store in here],
        run=figures,
    )
    made |= {"missing": {store.what: store.missing for store in stores if store.missing}}
    return against(made, other.name, values["ours"], pairs) if other and pairs else made


def served_job(program: Path, name: str, other: Other | None) -> Job:
    def rows(smoke: bool, seconds: float) -> Iterator[Row]:
        yield measure(program, name, smoke, seconds, other)

    return Job((name,), BENCH_SECONDS * (2 if other else 1), rows)


@dataclass(frozen=True)
class Printing:
    """A command that prints rows, and its additional environment variables."""

    command: list[str]
    env: dict[str, str] | None = None

    def rows(self, names: tuple[str, ...], smoke: bool, seconds: float) -> Iterator[Row]:
        """Runs the command for the rows of these names."""
        return rows_of([*self.command, *names, *(["--smoke"] if smoke else [])], seconds, self.env)


def printing_job(
    ours: Printing, theirs: Printing | None, names: tuple[str, ...], tree: str, seconds: float = PROGRAM_SECONDS
) -> Job:
    def rows(smoke: bool, seconds: float) -> Iterator[Row]:
        made = {}
        for each in ours.rows(names, smoke, seconds):
            made[each["name"]] = each
            yield each
        for each in theirs.rows(names, smoke, seconds) if theirs else ():
            yield against(made[each["name"]], tree, [made[each["name"]]["value"]], [each["value"]])

    return Job(names, seconds, rows)


def printing_jobs(found: dict[str, Program], wanted: set[str], other: Other | None) -> Iterator[Job]:
    tree = other.name if other else ""
    for program in dict.fromkeys(program for program in found.values() if program.group is not None):
        names = tuple(name for name, each in found.items() if each == program and (not wanted or name in wanted))
        before = other.programs.get(names[0]) if other and names else None
        if names:
            theirs = Printing([str(before.path), "--rows"]) if before else None
            yield printing_job(Printing([str(program.path), "--rows"]), theirs, names, tree)
    for script, all_names in SCRIPTS.items():
        names = tuple(name for name in all_names if not wanted or name in wanted)
        if names:
            here, there = (str(root / "benches" / "python" / script) for root in (ROOT, other.root if other else ROOT))
            theirs = Printing([sys.executable, there], other.env) if other else None
            seconds = SOAK_SECONDS if script == "serving_soak.py" else PROGRAM_SECONDS
            yield printing_job(Printing([sys.executable, here]), theirs, names, tree, seconds)


def jobs(found: dict[str, Program], wanted: set[str], other: Other | None) -> list[Job]:
    """Returns the jobs of the requested benches; all jobs if none is named."""
    served = [served_job(program.path, name, other) for name, program in found.items() if program.group is None]
    return [job for job in served if not wanted or wanted & {*job.names}] + [*printing_jobs(found, wanted, other)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument(
        "--smoke", action="store_true", help="small data, one round, into smoke.json: shows that every bench runs"
    )
    parser.add_argument(
        "--against", type=Path, metavar="TREE", help="another checkout, whose extension is built: measured beside ours"
    )
    options = parser.parse_args()
    begin = time.monotonic()
    if options.against and not (options.against / "benches" / "Cargo.toml").is_file():
        parser.error(f"--against {options.against}: no checkout of this project is there (git worktree add makes one)")
    refuse_dev_build()
    if options.against:
        refuse_dev_build(options.against.resolve())
    found = programs(options.smoke)
    other = Other.built(options.against.resolve(), options.smoke) if options.against else None
    minutes = MINUTES_AGAINST if other else MINUTES
    names = sorted([*found, *(name for script in SCRIPTS.values() for name in script)])
    wanted = {name for name in options.only.split(",") if name}
    if unknown := sorted(wanted - {*names}):
        parser.error(f"no bench named {', '.join(unknown)}; there are {', '.join(names)}")
    if uneven := {*names} ^ {name for section in SECTIONS.values() for name in section}:
        raise SystemExit(f"benches and benches/python/catalog.py name each other, but for {', '.join(sorted(uneven))}")
    path = FOLDER / ("smoke.json" if options.smoke else "results.json")
    measured, failed = 0, 0
    for job in (todo := jobs(found, wanted, other)):
        now = time.monotonic() - begin
        left = min(job.seconds, minutes * 60 - now)
        at = f"[{todo.index(job) + 1}/{len(todo)}, {now:.0f} s]"
        missing = {*job.names}
        try:
            if left <= 0:
                raise TimeoutError("left out: out of time")
            for found_row in job.rows(options.smoke, left):
                merge(path, found_row | {"setting": setting()})
                print(f"{at} {found_row['name']}: {describe(found_row)}", flush=True)
                missing.discard(found_row["name"])
            measured += len(job.names) - len(missing)
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
