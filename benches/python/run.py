"""Measures every bench beside its limit and its rivals, into target/bench/results.json.

The Rust benches run in their own process and measure a round when asked, so that ours, the limit and the rivals take turns on the
same batches. Each result is merged into the file as soon as it is there; stopping loses only the bench under way.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rivals import RIVALS, Round

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "target" / "bench"
ROUNDS = 7
MINUTES = 70


def programs() -> dict[str, Path]:
    """Bench name: the program that has it. Builds them first."""
    command = [
        "cargo",
        "bench",
        "--locked",
        "-p",
        "embcache-benches",
        "--no-run",
        "--message-format=json-render-diagnostics",
    ]
    built = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    messages = [json.loads(line) for line in built.splitlines()]
    found: dict[str, Path] = {}
    for message in messages:
        if message["reason"] == "compiler-artifact" and "bench" in message["target"]["kind"] and message["executable"]:
            program = Path(message["executable"])
            names = subprocess.run([program, "--list"], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
            found |= dict.fromkeys(names, program)
    return found


class Served:
    """A Rust bench that runs a round when asked; see benches/src/serve.rs."""

    def __init__(self, program: Path, name: str, smoke: bool, seconds: float) -> None:
        command = [str(program), "--serve", name, *(["--smoke"] if smoke else [])]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._timer = threading.Timer(seconds, self._process.kill)
        self._timer.daemon = True
        self._timer.start()
        self.ready: dict[str, Any] = self._read()

    def ask(self, line: str) -> Any:
        """The answer to one line of the protocol."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise RuntimeError(f"the bench ended with status {status}" + (", out of time" if status == -9 else ""))
        return json.loads(line)

    def close(self) -> None:
        """Ends the program."""
        self._timer.cancel()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def batches(served: Served) -> torch.Tensor:
    """int64 [K, N]"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids"
        served.ask(f"data {path}")
        return torch.from_numpy(np.fromfile(path, "<i8").reshape(-1, served.ready["batch"]))


def ratio(row: dict[str, Any], other: float) -> float:
    """Above 1: ours is ahead."""
    value = float(row["value"])
    return value / other if row["better"] == "higher" else other / value


def measure(program: Path, name: str, smoke: bool, seconds: float) -> dict[str, Any]:
    """The bench's row of results.json."""
    served = Served(program, name, smoke, seconds)
    try:
        ready = served.ready
        ids = batches(served) if ready["batch"] else None
        rivals: dict[str, Round] = {}
        if ids is not None:
            rivals = {what: make(ids, ready["rows"]) for what, make in RIVALS.get(name, {}).items()}
        values: dict[str, list[float]] = {"ours": []}
        for _ in range(1 if smoke else ROUNDS):
            values["ours"].append(served.ask("ours"))
            if ready["limit"]:
                values.setdefault("limit", []).append(served.ask("limit"))
            for what, run in rivals.items():
                values.setdefault(what, []).append(run())
    finally:
        served.close()
    median = {side: statistics.median(rounds) for side, rounds in values.items()}
    return {
        "name": name,
        "unit": ready["unit"],
        "better": ready["better"],
        "value": median["ours"],
        "low": min(values["ours"]),
        "high": max(values["ours"]),
        "limit": {"what": ready["limit"], "value": median["limit"]} if ready["limit"] else None,
        "rivals": [{"what": what, "value": median[what]} for what in rivals],
    }


def merge(path: Path, row: dict[str, Any]) -> None:
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [old for old in rows if old["name"] != row["name"]] + [row]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    part.replace(path)


def describe(row: dict[str, Any]) -> str:
    text = f"{row['value']:.4g} {row['unit']} [{row['low']:.4g} .. {row['high']:.4g}]"
    if row["limit"]:
        text += f", {ratio(row, row['limit']['value']):.2f} of the limit"
    for rival in row["rivals"]:
        text += f", {ratio(row, rival['value']):.2f} x {rival['what']}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument(
        "--smoke", action="store_true", help="small data, one round, into smoke.json: shows that every bench runs"
    )
    options = parser.parse_args()
    begin = time.monotonic()
    found = programs()
    names = [name for name in options.only.split(",") if name] or list(found)
    if unknown := sorted(set(names) - set(found)):
        parser.error(f"no bench named {', '.join(unknown)}; there are {', '.join(found)}")
    path = FOLDER / ("smoke.json" if options.smoke else "results.json")
    failed = []
    for number, name in enumerate(names, 1):
        left = MINUTES * 60 - (time.monotonic() - begin)
        print(f"[{number}/{len(names)}, {time.monotonic() - begin:.0f} s] {name} ... ", end="", flush=True)
        if left <= 0:
            print("left out: out of time")
            failed.append(name)
            continue
        try:
            row = measure(found[name], name, options.smoke, left)
        except (RuntimeError, OSError) as error:
            print(f"FAILED: {error}")
            failed.append(name)
            continue
        merge(path, row)
        print(describe(row), flush=True)
    print(f"{len(names) - len(failed)} measured, {len(failed)} failed: {path.relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped: what was measured is kept")
        sys.exit(130)
