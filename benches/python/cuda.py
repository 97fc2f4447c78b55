"""Measures the kernels of a device tier on a GPU, as fractions of the rate at which the same GPU copies memory.

    python benches/python/cuda.py [--smoke]

`cuda_forward_pooled` and `cuda_train_rowwise_adagrad`: bytes that must move for a batch of 8,192 bags of 20 ids, Zipf 1.05, 64
float32 per row, divided by the time of the GPU's kernels. Each distinct row counts once, as do the pooled output and its gradient.
The limit is the copy of 1 GiB. The rival is FBGEMM's table-batched embedding with its rows on the GPU.
`cuda_table_step_cache10pct_zipf105`: lookups, backwards and updates per second of one table (no DLRM) with a tenth of the rows in
`device_bytes`, relative to the same table with all of them. Prints one JSON row each, and writes them to target/bench/results.json,
for `make bench-docs`.

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from results import Row, merge, row, setting
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers

DIM, IDS_OF_A_BAG, EXPONENT = 64, 20, 1.05
RIVAL = "FBGEMM TBE"
ROW_BYTES = DIM * 4


@dataclass(frozen=True)
class Sizes:
    """Rows of the table, bags per batch, batches, rounds, and bytes of the copy."""

    rows: int
    bags: int
    batches: int
    rounds: int
    copied: int


FULL = Sizes(4_000_000, 8192, 20, 7, 1 << 30)
SMOKE = Sizes(200, 8, 2, 1, 1 << 20)


def batches_of(sizes: Sizes) -> list[torch.Tensor]:
    """Returns batches of ids [bags, 20], drawn from a Zipf distribution and scattered."""
    rng = np.random.default_rng(0)
    cumulative = np.cumsum(np.arange(1, sizes.rows + 1, dtype=np.float64) ** -EXPONENT)
    drawn = rng.random((sizes.batches, sizes.bags, IDS_OF_A_BAG)) * cumulative[-1]
    ranks = np.minimum(np.searchsorted(cumulative, drawn), sizes.rows - 1)
    return list(torch.from_numpy(rng.permutation(sizes.rows)[ranks]))


def kernel_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Returns the time of the kernels of `run` on the GPU; on the CPU, the total time."""
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize(device)
    # Copies to and from the host are not kernels.
    events = [event for event in seen.key_averages() if "Memcpy" not in event.key and "Memset" not in event.key]
    seconds = float(sum(event.self_device_time_total for event in events)) / 1e6
    if not seconds:
        raise RuntimeError(
            "the profiler saw no kernel: the driver may keep it from profiling (see NVIDIA's ERR_NVGPUCTRPERM)"
        )
    return seconds


def copy_rate(device: torch.device, sizes: Sizes) -> float:
    """Returns the bytes per second that a copy on the device reads and writes."""
    source = torch.zeros(sizes.copied // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    # Uses a kernel rather than the copy engine.
    times = [kernel_seconds(device, lambda: torch.add(source, 1.0, out=target)) for _ in range(sizes.rounds)]
    return 2 * sizes.copied / statistics.median(times)


def table(device: torch.device, sizes: Sizes, device_rows: int) -> EmbCacheEmbeddingBag:
    """Creates a table whose device tier fits about `device_rows` rows."""
    # A row also has its scalar slot and its native metadata.
    tiers = TierBudgets(
        device_bytes=device_rows * (ROW_BYTES + 64) + (1 << 16), host_bytes=sizes.rows * 512 + (1 << 20)
    )
    return EmbCacheEmbeddingBag(
        name="item",
        embedding_dim=DIM,
        mode="sum",
        tiers=tiers,
        optimizer=optimizers.RowWiseAdagrad(lr=0.02),
        device=device,
    )


def born(bag: EmbCacheEmbeddingBag, sizes: Sizes) -> EmbCacheEmbeddingBag:
    """Initializes all rows of the table and returns it."""
    for ids in torch.split(torch.arange(sizes.rows), sizes.bags * IDS_OF_A_BAG):
        bag(ids.view(-1, 1)).sum().backward()
    return bag


def fbgemm(device: torch.device, sizes: Sizes) -> Any:
    """Creates FBGEMM's table with the same rows and optimizer, on the GPU."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    return SplitTableBatchedEmbeddingBagsCodegen(
        [(sizes.rows, DIM, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.02,
        device=device,
    )


def _keep(outs: list[torch.Tensor], forward: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> None:
    outs.append(forward(ids))


def rates(
    device: torch.device, batches: list[torch.Tensor], rounds: int, forward: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[float], list[float]]:
    """Returns the bytes that must move per kernel second of each round: for the forward, and for forward, backward and update."""
    distinct = sum(len(np.unique(ids.numpy())) for ids in batches)
    pooled = sum(ids.shape[0] for ids in batches) * ROW_BYTES
    of_forward = distinct * ROW_BYTES + pooled
    of_update = pooled + 2 * distinct * (ROW_BYTES + 4)
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for_forward, for_backward = 0.0, 0.0
        for ids in batches:
            outs: list[torch.Tensor] = []
            for_forward += kernel_seconds(device, partial(_keep, outs, forward, ids))
            for_backward += kernel_seconds(device, partial(outs[0].backward, torch.ones_like(outs[0])))
        found[0].append(of_forward / for_forward)
        found[1].append((of_forward + of_update) / (for_forward + for_backward))
    return found


def steps_a_second(bag: EmbCacheEmbeddingBag, batches: list[torch.Tensor], rounds: int) -> list[float]:
    """Returns the steps per second of lookups with their backwards, in each round."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for ids in batches:
            bag(ids).sum().backward()
        if bag.table.device.type == "cuda":
            torch.cuda.synchronize(bag.table.device)
        found.append(len(batches) / (time.perf_counter() - begin))
    return found


def measure(device: torch.device, sizes: Sizes) -> list[Row]:
    """Returns all rows."""
    batches, copied = batches_of(sizes), copy_rate(device, sizes)
    limit = {"what": "a kernel that reads and writes memory in order", "value": copied}
    all_there = born(table(device, sizes, sizes.rows), sizes)
    ours = rates(device, batches, sizes.rounds, all_there)
    rivals: list[list[dict[str, Any]]] = [[], []]
    if device.type == "cuda":
        rival_table = fbgemm(device, sizes)
        offsets = torch.arange(0, sizes.bags * IDS_OF_A_BAG + 1, IDS_OF_A_BAG, device=device)
        found = rates(device, batches, sizes.rounds, lambda ids: rival_table(ids.flatten().to(device), offsets))
        rivals = [[{"what": RIVAL, "value": statistics.median(each)}] for each in found]
    whole = steps_a_second(all_there, batches, sizes.rounds)
    all_there.close()
    tenth = born(table(device, sizes, sizes.rows // 10), sizes)
    steps_a_second(tenth, batches, 1)  # moves the frequent rows to the device
    cached = steps_a_second(tenth, batches, sizes.rounds)
    tenth.close()
    run = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "kernels": "triton"}
    in_device = {"what": "all rows in device_bytes", "value": statistics.median(whole)}
    names = ("cuda_forward_pooled", "cuda_train_rowwise_adagrad")
    kernels = [
        row(name, "bytes/s", "higher", each, limit=limit, rivals=rival, run=run)
        for name, each, rival in zip(names, ours, rivals, strict=True)
    ]
    return [
        *kernels,
        row("cuda_table_step_cache10pct_zipf105", "steps/s", "higher", cached, rivals=[in_device], run=run),
    ]


def main() -> int:
    """Measures, prints the rows and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small data, one round: shows that it runs")
    smoke = parser.parse_args().smoke
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not smoke:
        print("no CUDA device is here, so nothing was measured", file=sys.stderr)
        return 1
    os.environ["EMBCACHE_KERNELS"] = "triton"
    rows = measure(device, SMOKE if smoke else FULL)
    for each in rows:
        print(json.dumps(each))
    if not smoke:
        path = Path(__file__).resolve().parents[2] / "target" / "bench" / "results.json"
        merge(path, *({**each, "setting": setting()} for each in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
