"""Measures the step of a DLRM with all rows in RAM during an asynchronous save, relative to the step without a save.

The DLRM and the batches are those of dlrm.py. Steps with and without a save alternate. The first step of a save includes the call.
This prints one row of results.json.

    python benches/python/dlrm_async.py [--smoke]
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dlrm import DIM, SAMPLES, TABLES, THREADS, Batches, Scale, Side, Stream, make_ours, one_rank
from results import row
from torchrec_embcache import TierBudgets
from torchrec_embcache.checkpoint import Saver

NAME = "save_async_step_slowdown"
# Bytes of the host budget per row of DIM floats, with its metadata, index and policy, and some headroom.
ROW_BYTES = DIM * 4 + 144
# Number of batches that are ready before a save starts. When they are used up, more are created between two steps.
BATCHES_AHEAD = 150


def while_saving(side: Side, stream: Stream, model: torch.nn.Module, path: Path) -> tuple[list[float], float]:
    """Returns the seconds of each step during a save, and the seconds of the save."""
    stream.make_until(side.next + BATCHES_AHEAD)
    begin = time.perf_counter()
    future = Saver().save_async(model, path)
    call = time.perf_counter() - begin
    seconds = side.run(1)
    seconds[0] += call
    while not future.done():
        seconds += side.run(1)
    future.result()
    return seconds, time.perf_counter() - begin


def measure(scale: Scale, folder: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Measures, and returns the bench's row of results.json."""
    torch.set_num_threads(THREADS)
    stream = Stream(Batches(scale))
    tiers = TierBudgets(host_bytes=scale.rows // TABLES * ROW_BYTES)
    model, pipeline = make_ours(scale, tiers)
    note("its rows are there")
    side = Side(pipeline, stream, scale.lookahead + 2)
    side.run(scale.warm_steps)
    ratios, first, late, saves, alone = [], [], [], [], []
    for number in range(scale.rounds):
        path = folder / f"save-{number}"
        stream.make_until(side.next + BATCHES_AHEAD + scale.steps)
        usual = side.run(scale.steps)
        steps, took = while_saving(side, stream, model, path)
        shutil.rmtree(path)
        usual += side.run(scale.steps)
        stream.forget_before(side.next)
        median = statistics.median(usual)
        ratios.append(statistics.median(steps) / median)
        alone.append(median)
        first.append(steps[0])
        late.append(sorted(steps)[int(len(steps) * 0.99)])
        saves.append(took)
        note(
            f"{len(steps)} steps while saving for {took:.1f} s: {ratios[-1]:.3f} x {median * 1e3:.0f} ms, "
            f"first {steps[0] * 1e3:.0f} ms"
        )
    figures = {
        "step_ms": round(statistics.median(alone) * 1e3, 1),
        "first_step_ms": round(statistics.median(first) * 1e3, 1),
        "p99_step_ms": round(statistics.median(late) * 1e3, 1),
        "save_seconds": round(statistics.median(saves), 1),
    }
    return row(NAME, "ratio", "lower", ratios, run=figures)


def run(description: str | None, steps: tuple[int, int], measure: Callable[..., dict[str, Any]]) -> int:
    """Command line of a bench that saves this DLRM with all rows in RAM. It prints the row returned by `measure`.

    `steps` are two step counts of its `Scale`, for a full run.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of benches; there is one here, which is measured whatever they are")
    parser.add_argument("--smoke", action="store_true", help="small tables, one round: shows that it runs")
    parser.add_argument("--rows", type=int, default=10_000_000, help="of all tables together")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lookahead = 2
    if options.smoke:
        scale = Scale(80_000, 256, 4, 3, 1, lookahead, "s3fifo")
    else:
        scale = Scale(options.rows, SAMPLES, *steps, options.rounds, lookahead, "s3fifo")
    with one_rank() as (folder, note):
        measured = measure(scale, folder, note)
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(run(__doc__, (20, 15), measure))
