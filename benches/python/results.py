"""The file results.json. It has one row per bench, merged by name, with the setting and the time of the measurement."""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Row", "against", "describe", "merge", "quantity", "ratio", "read", "refuse_dev_build", "row", "setting"]

ROOT = Path(__file__).resolve().parents[2]

# A row has name, unit, better ("higher" or "lower"), value (the median), low, high, limit ({what, value} or null) and rivals
# ([{what, value}]). It also has missing (rivals that are unavailable on this machine, with the reason), rounds, run (figures of the
# same run that are not compared) and setting (see `setting`). A row that was measured against another tree has against (see
# `against`).
Row = dict[str, Any]


def ratio(row: Row, other: float) -> float:
    """Returns the ratio of ours to another value, oriented so that ours is ahead above 1."""
    value = float(row["value"])
    return value / other if row["better"] == "higher" else other / value


def quantity(value: float) -> str:
    """Formats a value with three digits, and with k, M or G."""
    for power, letter in ((9, " G"), (6, " M"), (3, " k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.3g}{letter}"
    return f"{value:.3g}"


def describe(row: Row) -> str:
    """Formats the row as one line of text."""
    text = f"{quantity(row['value'])} {row['unit']} [{quantity(row['low'])} .. {quantity(row['high'])}]"
    if row["limit"]:
        text += f", {ratio(row, row['limit']['value']):.2f} of the limit"
    for rival in row["rivals"]:
        text += f", {ratio(row, rival['value']):.2f} x {rival['what']}"
    for rival, why in row.get("missing", {}).items():
        text += f", {rival} MISSING: {why}"
    if pairs := row.get("against"):
        text += f"; {pairs['ratio']:.2f} [{pairs['low']:.2f} .. {pairs['high']:.2f}] x {pairs['tree']} ({pairs['pairs']} pairs)"
    return text


def against(row: Row, tree: str, ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """Returns the row with the ratios of our rounds to those of another tree, round by round. Above 1 ours is ahead.

    Ours runs first in even rounds, and second in odd rounds. The second can be twice as fast, for example because it reuses memory
    that the first has freed. The ratio is therefore the geometric mean of two medians, one for each order, in which this effect
    cancels out.
    """
    higher = row["better"] == "higher"
    ratios = [a / b if higher else b / a for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.geometric_mean(statistics.median(order) for order in (ratios[::2], ratios[1::2]) if order)
    found = {"tree": tree, "ratio": ratio, "low": min(ratios), "high": max(ratios), "pairs": len(ratios)}
    return row | {"against": found}


def refuse_dev_build(tree: Path = ROOT) -> None:
    """Exits if the extension of a checkout is a dev build, as its times would not be those of users."""
    if (tree / ".venv" / ".dev").exists():
        sys.exit(f"the extension in {tree} is a dev build (make dev): build it in release with make setup")


def row(
    name: str,
    unit: str,
    better: str,
    rounds: Sequence[float],
    *,
    limit: dict[str, Any] | None = None,
    rivals: Sequence[dict[str, Any]] = (),
    run: dict[str, Any] | None = None,
) -> Row:
    """Returns a row with the median of our rounds and their spread. Exits for a dev build."""
    refuse_dev_build()
    return {
        "name": name,
        "unit": unit,
        "better": better,
        "value": statistics.median(rounds),
        "low": min(rounds),
        "high": max(rounds),
        "limit": limit,
        "rivals": list(rivals),
        "rounds": len(rounds),
        "run": run or {},
    }


def read(path: Path) -> list[Row]:
    """Reads the existing rows."""
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    return rows


def merge(path: Path, *rows: Row) -> None:
    """Adds rows; each replaces the row of the same name, if any. The file is replaced atomically."""
    merged = list(({old["name"]: old for old in read(path)} | {row["name"]: row for row in rows}).values())
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("[\n" + ",\n".join(json.dumps(row) for row in merged) + "\n]\n")
    part.replace(path)


@cache
def setting() -> dict[str, str]:
    """Returns the machine, the versions, the commit and the day (UTC)."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    rustc = subprocess.run(["rustc", "--version"], stdout=subprocess.PIPE, text=True, check=False).stdout.split()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    ).stdout.strip()
    packages = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu")
    versions = {name: version for name in packages if (version := version_of(name))}
    return {
        "cpu": cpu[0].split(":", 1)[1].strip() if cpu else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_kib / 2**20:.0f} GiB",
        "kernel": platform.release().split("-")[0],
        "rustc": rustc[1] if len(rustc) > 1 else "",
        "python": platform.python_version(),
        **versions,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
