"""Measures the DLRM of dlrm.py with its tables on a GPU.

    python benches/python/cuda_dlrm.py [--smoke]

`cuda_step_cache10pct_zipf105`: samples per second with a tenth of the rows on the GPU and the rest in RAM, relative to all rows on
the GPU. The rival is FBGEMM's UVM caching with a tenth of the rows in its cache. `cuda_step_ssd_zipf105`: a tenth on the GPU, a
fifth in RAM and the rest on SSD, relative to the first bench. `cuda_exposed_wait_share`: idle time of the compute stream between
the end of a step and the lookups of the next, with a tenth of the rows on the GPU minus with all of them, as a fraction of the
step. Prints one JSON row each, and writes them to target/bench/results.json, for `make bench-docs`.

`--smoke` runs on small data, and without a GPU on the CPU in Triton's interpreter (TRITON_INTERPRET=1), to check that the bench
runs.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from dlrm import (
    DIM,
    ROOT,
    SAMPLES,
    TABLES,
    Batches,
    Scale,
    Side,
    Stream,
    look_up_every_row,
    make_ours,
    make_rival,
    one_rank,
)
from results import Row, merge, row, setting
from torchrec_embcache import TierBudgets, cache_modules
from torchrec_embcache._kernels.triton import launch

FULL = Scale(10_000_000, SAMPLES, 100, 20, 7, 2, "s3fifo")
SMOKE = Scale(800, 4, 1, 2, 1, 1, "s3fifo")
RIVAL = "FBGEMM's UVM caching"
# A row with its scalar slot and its native metadata.
ROW_BYTES = DIM * 4 + 64


class HostEvent:
    """Equivalent of `torch.cuda.Event` for a CPU."""

    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def record(self) -> None:
        """Records the current time."""
        self.at = time.perf_counter()

    def elapsed_time(self, other: "HostEvent") -> float:
        """Returns the milliseconds from this event to another one."""
        return (other.at - self.at) * 1e3


class Idle:
    """Measures the idle time of the compute stream between the end of a step and the first lookup of the next."""

    def __init__(self, device: torch.device) -> None:
        made: Any = torch.cuda.Event if device.type == "cuda" else HostEvent
        self._make: Callable[[], Any] = partial(made, enable_timing=True)
        self._ended: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def forget(self) -> None:
        """Discards all measurements."""
        self._pairs, self._ended = [], None

    def step_ended(self, *_: Any) -> None:
        """Records an event after the compute work of a step was queued."""
        self._ended = self._make()
        self._ended.record()

    def looked_up(self) -> None:
        """Records an event before a lookup is launched, after all work that it waits for."""
        if self._ended is not None:
            begun = self._make()
            begun.record()
            self._pairs.append((self._ended, begun))
            self._ended = None

    def milliseconds(self) -> float:
        """Returns the median since `forget`. The device must be idle."""
        return float(statistics.median(ended.elapsed_time(begun) for ended, begun in self._pairs))


def note_lookups(idle: Idle) -> None:
    """Reports each lookup to `idle`. At its launch, all work that its rows wait for has been queued."""
    pool = launch.pool_rows

    def noted(*arguments: Any) -> None:
        idle.looked_up()
        pool(*arguments)

    setattr(launch, pool.__name__, noted)


class Measured:
    """A side with its measurements of each round."""

    def __init__(self, pipeline: Any, stream: Stream, scale: Scale, idle: Idle, device: torch.device) -> None:
        self._side = Side(pipeline, stream, scale.lookahead + 2)
        self._stream, self._scale, self._idle, self._device = stream, scale, idle, device
        self.samples_a_second: list[float] = []
        self.idle_ms: list[float] = []
        self.step_ms: list[float] = []

    def warm(self) -> None:
        """Runs steps until the tiers are in their steady state."""
        self._side.run(self._scale.warm_steps)

    def round(self) -> None:
        """Runs one round. Its first steps are not counted, because their rows were prefetched while other sides ran."""
        ahead = self._scale.lookahead + 2
        self._stream.make_until(self._side.next + self._scale.steps + 2 * ahead)
        self._side.run(ahead)
        self._wait()
        self._idle.forget()
        begin = time.perf_counter()
        self._side.run(self._scale.steps)
        self._wait()
        seconds = time.perf_counter() - begin
        self.samples_a_second.append(self._scale.samples * self._scale.steps / seconds)
        self.step_ms.append(seconds / self._scale.steps * 1e3)

    def note_idle(self) -> None:
        """Records the idle time of the stream in this round."""
        self.idle_ms.append(self._idle.milliseconds())

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def budgets(scale: Scale, folder: Path) -> dict[str, TierBudgets]:
    """Returns the budgets of each table: all rows on the device; a tenth there; a tenth there with the rest on SSD."""
    rows = scale.rows // TABLES
    every = rows * 512 + (4 << 20)
    tenth = rows // 10 * ROW_BYTES + (64 << 10)
    return {
        "whole": TierBudgets(device_bytes=rows * ROW_BYTES + (64 << 10), host_bytes=every),
        "tenth": TierBudgets(device_bytes=tenth, host_bytes=every),
        "ssd": TierBudgets(
            device_bytes=tenth,
            host_bytes=rows // 5 * ROW_BYTES + (1 << 20),
            ssd_bytes=max(rows * DIM * 4 * 5 // 2, 64 << 20),
            ssd_dir=folder,
        ),
    }


def measure(scale: Scale, folder: Path, device: torch.device, note: Callable[[str], None]) -> list[Row]:
    """Returns all rows."""
    idle, stream = Idle(device), Stream(Batches(scale))
    models, sides = [], {}
    for name, tiers in budgets(scale, folder).items():
        model, pipeline = make_ours(scale, tiers, device)
        if name == "whole":
            look_up_every_row(model, scale, device)
        models.append(model)
        sides[name] = Measured(pipeline, stream, scale, idle, device)
        note(f"{name} has its rows")
    if device.type == "cuda":
        pipeline = make_rival(scale, EmbeddingComputeKernel.FUSED_UVM_CACHING, device, 0.1)
        sides[RIVAL] = Measured(pipeline, stream, scale, idle, device)
    note_lookups(idle)
    # Registered last: after its record, a step moves the rows of the next step.
    register_optimizer_step_post_hook(idle.step_ended)
    for side in sides.values():
        side.warm()
    for number in range(scale.rounds):
        for name, side in sides.items():
            side.round()
            if name != RIVAL:
                side.note_idle()
            note(f"round {number}: {name} {side.samples_a_second[-1]:.0f} samples/s")
    for model in models:
        for module in cache_modules(model).values():
            for table in module.tables.values():
                table.close()
    return rows_of(sides, device)


def rows_of(sides: dict[str, Measured], device: torch.device) -> list[Row]:
    """Returns the result rows of the measurements."""
    whole, tenth, ssd = (sides[name] for name in ("whole", "tenth", "ssd"))
    median = statistics.median
    rivals = [{"what": "all rows on the GPU", "value": median(whole.samples_a_second)}]
    if RIVAL in sides:
        rivals.append({"what": RIVAL, "value": median(sides[RIVAL].samples_a_second)})
    in_ram = {"what": "all others in RAM", "value": median(tenth.samples_a_second)}
    shares = [
        max(0.0, (cached - all_there) / step)
        for cached, all_there, step in zip(tenth.idle_ms, whole.idle_ms, tenth.step_ms, strict=True)
    ]
    run = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "kernels": "triton"}
    return [
        row("cuda_step_cache10pct_zipf105", "samples/s", "higher", tenth.samples_a_second, rivals=rivals, run=run),
        row("cuda_step_ssd_zipf105", "samples/s", "higher", ssd.samples_a_second, rivals=[in_ram], run=run),
        row("cuda_exposed_wait_share", "share", "lower", shares, run=run),
    ]


def main() -> int:
    """Measures, prints the rows and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small data, one round: shows that it runs")
    smoke = parser.parse_args().smoke
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not smoke:
        print("no CUDA device is here, so nothing was measured", file=sys.stderr)
        return 1
    os.environ["EMBCACHE_KERNELS"] = "triton"
    with one_rank() as (folder, note):
        tables = folder / "tables"
        tables.mkdir(mode=0o750)
        rows = measure(SMOKE if smoke else FULL, tables, device, note)
    for each in rows:
        print(json.dumps(each))
    if not smoke:
        merge(ROOT / "target" / "bench" / "results.json", *({**each, "setting": setting()} for each in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
