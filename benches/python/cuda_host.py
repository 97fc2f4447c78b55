"""Measures the CPU work of a step of tables on a GPU: everything but the kernels, which are not launched.

    python benches/python/cuda_host.py [--smoke]

`cuda_host_step_cache10pct_zipf105`: samples per second of the tables of cuda_dlrm.py with a tenth of the rows on the device and the
others in RAM, relative to all of them on the device. The tables are sharded under DistributedModelParallel and trained by the
pipeline, with the Triton backend over CPU tensors. Ids are looked up and planned, rows are selected, copied in RAM and accounted
for, and the kernels' arguments are written, as on a GPU. Launches and copies over the bus take no time, and rows have arbitrary
values. A GPU waits for the CPU in each step that it computes faster than this. Prints one row of results.json.

Shapes: B samples, C columns of the pooled output.
"""

import argparse
import json
import os
import statistics
import sys
from typing import Any

# Triton decides on import.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["EMBCACHE_KERNELS"] = "triton"

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel

from dlrm import (
    CPU,
    DIM,
    SAMPLES,
    TABLES,
    THREADS,
    Batches,
    Scale,
    Side,
    Stream,
    import_every_row,
    look_up_every_row,
    one_rank,
    our_sharder,
    tables_of,
)
from results import Row, row
from torchrec_embcache import EmbCacheTrainPipelineSparseDist, TierBudgets
from torchrec_embcache._device.tier import DeviceTier
from torchrec_embcache._kernels.triton import launch
from torchrec_embcache._kernels.triton_backend import TritonRowMover

FULL = Scale(10_000_000, SAMPLES, 100, 20, 7, 2, "s3fifo")
SMOKE = Scale(80_000, 256, 4, 3, 1, 2, "s3fifo")
ROW_BYTES = DIM * 4 + 64


class GivenGradient(torch.autograd.Function):
    """A loss with a precomputed gradient, float32 [B, C], because the dense part is not measured."""

    @staticmethod
    def forward(ctx: Any, _output: Tensor, grad: Tensor) -> Tensor:
        """Returns zero."""
        ctx.grad = grad
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        """Returns the precomputed gradient."""
        return ctx.grad, None


class Tables(nn.Module):
    """The tables, and a parameter for the optimizer of the dense part."""

    def __init__(self, scale: Scale, tiers: TierBudgets) -> None:
        super().__init__()
        self.tables = tables_of(scale, tiers)
        self.dense = nn.Linear(1, 1)
        self.grad = torch.zeros(scale.samples, TABLES * DIM)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the loss, twice."""
        loss = GivenGradient.apply(self.tables(batch.sparse_features).values(), self.grad)
        return loss, loss.detach()


class Buffers:
    """Reused memory for the rows that are demoted from each tier, like a GPU's caching allocator."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def gather(self, tier: DeviceTier, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rows with arbitrary values."""
        kept = self._of.get(id(tier))
        if kept is None or len(kept) < len(slots):
            kept = self._of[id(tier)] = torch.zeros(2 * len(slots), tier.dim * (1 + len(tier.vector_slots)))
        return kept[: len(slots)], torch.zeros(len(slots))


def launch_nothing() -> None:
    """Replaces all kernel launches by no-ops."""
    buffers = Buffers()
    moves = {"gather": lambda _, tier, slots: buffers.gather(tier, slots), "scatter": lambda *_: None}
    launches = {
        "pool_rows": lambda *_, **__: None,
        "update_rows": lambda *_, **__: None,
        "find_gradients": lambda _features, _bags, _count, grad, _scaled: launch.DeviceGradients(grad),
        "sum_gradients": lambda _dim, _ranges, _occurrences, gradients: gradients,
    }
    for owner, functions in ((TritonRowMover, moves), (launch, launches)):
        for name, function in functions.items():
            setattr(owner, name, function)


def made(scale: Scale, device_rows: int) -> tuple[DistributedModelParallel, Any]:
    """Creates the tables with this number of rows on the device each, and their pipeline. Every row is in its table."""
    rows = scale.rows // TABLES
    tiers = TierBudgets(device_bytes=device_rows * ROW_BYTES + (64 << 10), host_bytes=rows * 512 + (4 << 20))
    model = DistributedModelParallel(Tables(scale, tiers), device=CPU, sharders=[our_sharder()])
    import_every_row(model, scale)
    dense = torch.optim.SGD([value for name, value in model.named_parameters() if "dense" in name], lr=0.1)
    return model, EmbCacheTrainPipelineSparseDist(model, dense, CPU, lookahead=scale.lookahead)


def measure(scale: Scale, note: Any) -> Row:
    """Returns the row."""
    torch.set_num_threads(THREADS)
    stream = Stream(Batches(scale))
    ahead = scale.lookahead + 2
    sides = []
    for device_rows in (scale.rows // TABLES // 10, scale.rows // TABLES):
        model, pipeline = made(scale, device_rows)
        look_up_every_row(model, scale, CPU)
        sides.append(Side(pipeline, stream, ahead))
        note(f"{device_rows} rows of each table are on the device")
    for side in sides:
        side.run(scale.warm_steps)
    rates: list[list[float]] = [[], []]
    for number in range(scale.rounds):
        for of_side, side in zip(rates, sides, strict=True):
            side.run(ahead)
            of_side.append(scale.samples * scale.steps / sum(side.run(scale.steps)))
        note(f"round {number}: {rates[0][-1]:.0f} samples/s with a tenth, {rates[1][-1]:.0f} with all")
        stream.forget_before(sides[0].next)
    tenth, whole = rates
    step_ms = [round(scale.samples / statistics.median(rate) * 1e3, 2) for rate in rates]
    return row(
        "cuda_host_step_cache10pct_zipf105",
        "samples/s",
        "higher",
        tenth,
        rivals=[{"what": "all rows on the device", "value": statistics.median(whole)}],
        run={"threads": THREADS, "step_ms": step_ms[0], "step_ms_all_there": step_ms[1]},
    )


def main() -> int:
    """Measures, and prints the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of benches; there is one here, which is measured whatever they are")
    parser.add_argument("--smoke", action="store_true", help="small tables, one round: shows that it runs")
    smoke = parser.parse_args().smoke
    launch_nothing()
    with one_rank() as (_, note):
        print(json.dumps(measure(SMOKE if smoke else FULL, note)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
