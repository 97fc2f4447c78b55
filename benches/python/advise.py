"""Holds the split of `advise` against a sweep of twelve other splits of the same RAM, all of them measured.

The model is TorchRec's DLRM over tables on SSD that differ in rows, in skew and in how often they are used. It is trained with an
even split first, while its tables measure their traffic, and is then opened with each split in turn. One row is the rows that a
step reads with the best of the twelve, divided by those with the split that `advise` names. The other is the same of the median
step. 1.0 is as good, and more is better.

    python benches/python/advise.py [--smoke]

Shapes: B samples.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel

from dlrm import DENSE, DIM, THREADS, dense_optimizer, one_rank, shard
from results import row
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingBagConfig,
    EmbCacheTrainPipelineSparseDist,
    TierBudgets,
    cache_modules,
    flush,
    initializers,
)
from torchrec_embcache.sizing import TableTraffic, advise, traffic_of

STEP = "advised_step_of_best_split"
READS = "advised_reads_of_best_split"
CPU = torch.device("cpu")
SPLITS = 12


@dataclass(frozen=True)
class Table:
    """A table of the DLRM: its rows, the exponent of its zipf distribution, and the ids of a bag."""

    name: str
    rows: int
    exponent: float
    bag: int


TABLES = (
    Table("item", 400_000, 1.05, 8),
    Table("user", 400_000, 0.7, 1),
    Table("query", 100_000, 0.9, 4),
    Table("page", 50_000, 0.0, 1),
)


@dataclass(frozen=True)
class Scale:
    """The size of the data, and the length of the run."""

    share: float  # of the rows above
    samples: int  # B
    measured_steps: int  # while the tables measure
    warm_steps: int  # of each split
    steps: int
    rounds: int


class Batches:
    """Batches of new ids."""

    def __init__(self, scale: Scale) -> None:
        self._random = np.random.default_rng(11)
        self._samples = scale.samples
        self.rows = [max(int(table.rows * scale.share), 1000) for table in TABLES]
        weights = [np.arange(1, rows + 1.0) ** -table.exponent for rows, table in zip(self.rows, TABLES, strict=True)]
        self._cumulative = [np.cumsum(of_table) for of_table in weights]
        self._scattered = [self._random.permutation(rows) for rows in self.rows]

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self._make()

    def _make(self) -> Batch:
        ids = []
        for table, cumulative, scattered in zip(TABLES, self._cumulative, self._scattered, strict=True):
            points = self._random.random(self._samples * table.bag) * cumulative[-1]
            ids.append(scattered[np.minimum(np.searchsorted(cumulative, points), len(scattered) - 1)])
        lengths = torch.tensor([table.bag for table in TABLES], dtype=torch.int32).repeat_interleave(self._samples)
        features = KeyedJaggedTensor(
            [table.name for table in TABLES], torch.from_numpy(np.concatenate(ids)), lengths=lengths
        )
        dense = torch.from_numpy(self._random.random((self._samples, DENSE), dtype=np.float32))
        return Batch(dense, features, torch.from_numpy(self._random.integers(0, 2, self._samples, dtype=np.int32)))


def opened(folder: Path, batches: Batches, host: Sequence[int], *, sizing: bool = False) -> tuple[Any, Any]:
    """The model with these budgets in RAM, and its pipeline. It goes on from the last flush."""
    configs = [
        EmbCacheEmbeddingBagConfig(
            name=table.name,
            embedding_dim=DIM,
            num_embeddings=rows,
            feature_names=[table.name],
            initializer=initializers.Uniform(-0.001, 0.001),
            tiers=TierBudgets(host_bytes=size, ssd_bytes="1GiB", ssd_dir=folder, reopen="auto", sizing=sizing),
        )
        for table, rows, size in zip(TABLES, batches.rows, host, strict=True)
    ]
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 1e-8}
    model = shard(
        EmbCacheEmbeddingBagCollection(configs, name="tables", device=CPU), EmbCacheEmbeddingBagCollectionSharder(fused)
    )
    return model, EmbCacheTrainPipelineSparseDist(model, dense_optimizer(model), CPU, lookahead=2)


def close(model: DistributedModelParallel) -> None:
    flush(model)
    for module in cache_modules(model).values():
        for table in module.tables.values():
            table.close()


def reads(model: DistributedModelParallel) -> int:
    """Rows that were read from SSD for batches."""
    stats = [table.stats().ssd for module in cache_modules(model).values() for table in module.tables.values()]
    return sum(ssd.hits for ssd in stats if ssd is not None)


def measured(folder: Path, scale: Scale, batches: Batches, host: Sequence[int]) -> tuple[float, float]:
    """The seconds of a step with these budgets, the median, and the rows that a step reads."""
    model, pipeline = opened(folder, batches, host)
    source = iter(batches)
    ahead = [next(source) for _ in range(scale.warm_steps + scale.steps + 4)]
    given = iter(ahead)
    for _ in range(scale.warm_steps):
        pipeline.progress(given)
    before, seconds = reads(model), []
    for _ in range(scale.steps):
        begin = time.perf_counter()
        pipeline.progress(given)
        seconds.append(time.perf_counter() - begin)
    read = (reads(model) - before) / scale.steps
    pipeline.detach()
    close(model)
    return statistics.median(seconds), read


def splits(traffic: Sequence[TableTraffic], ram: int) -> dict[str, list[int]]:
    """Twelve ways to divide RAM: each table has what it needs at least, and the rest is divided by these shares."""
    least = [
        2 * table.curve.largest_batch * table.row_bytes.host + table.rows * table.row_bytes.index + (1 << 20)
        for table in traffic
    ]
    free = ram - sum(least)
    count = len(traffic)
    random = np.random.default_rng(3)
    shares = {
        "even": np.ones(count),
        "by rows": np.array([table.rows for table in traffic], np.float64),
        "by lookups": np.array([table.lookups_per_batch for table in traffic]),
    }
    for favoured, table in enumerate(traffic):
        shares[f"most to {table.name}"] = np.where(np.arange(count) == favoured, 0.7 * count, 0.3)
    while len(shares) < SPLITS:
        shares[f"at random {len(shares)}"] = random.dirichlet(np.ones(count))
    return {
        name: [size + int(free * part) for size, part in zip(least, share / share.sum(), strict=True)]
        for name, share in shares.items()
    }


def measure(scale: Scale, folder: Path, note: Any) -> list[dict[str, Any]]:
    """Measure, and return the rows of results.json."""
    torch.set_num_threads(THREADS)
    batches = Batches(scale)
    # A tenth of the bytes of all rows, and the index of those on SSD.
    ram = sum(rows * (DIM * 4 // 10 + 12) for rows in batches.rows) + len(TABLES) * (8 << 20)
    model, pipeline = opened(folder, batches, [ram // len(TABLES)] * len(TABLES), sizing=True)
    for module in cache_modules(model).values():
        for table, rows in zip(module.tables.values(), batches.rows, strict=True):
            table.import_rows(torch.arange(rows), torch.empty(rows, DIM).uniform_(-0.001, 0.001))
    source = iter(batches)
    for step in range(2 * scale.measured_steps):
        if step == scale.measured_steps:  # the caches are warm
            for module in cache_modules(model).values():
                for table in module.tables.values():
                    table.miss_ratio_curve(reset=True)
        pipeline.progress(source)
    traffic = traffic_of(model)
    pipeline.detach()
    close(model)
    advice = advise(traffic, ram=ram, ssd="4GiB", batches_in_flight=4)
    note(f"the tables were measured\n{advice}")
    named = {**splits(traffic, ram), "advised": [table.host_bytes for table in advice.tables.values()]}
    times: dict[str, list[float]] = {name: [] for name in named}
    read: dict[str, float] = {}
    for number in range(scale.rounds):
        order = list(named) if number % 2 == 0 else list(reversed(named))
        for name in order:
            seconds, read[name] = measured(folder, scale, batches, named[name])
            times[name].append(seconds)
            note(f"{name}: {seconds * 1e3:.1f} ms, {read[name]:.0f} reads a step")
    medians = {name: statistics.median(seconds) for name, seconds in times.items() if name != "advised"}
    fewest = min(count for name, count in read.items() if name != "advised")
    best = min(medians, key=lambda name: medians[name])
    figures = {
        "best_of_twelve": best,
        "best_step_ms": round(medians[best] * 1e3, 1),
        "worst_step_ms": round(max(medians.values()) * 1e3, 1),
        "advised_step_ms": round(statistics.median(times["advised"]) * 1e3, 1),
        "advised_reads": round(read["advised"]),
        "fewest_reads": round(fewest),
        "most_reads": round(max(read.values())),
        "expected_reads": round(advice.reads_per_batch),
    }
    steps = [medians[best] / seconds for seconds in times["advised"]]
    return [
        row(READS, "ratio", "higher", [fewest / read["advised"]], run=figures),
        row(STEP, "ratio", "higher", steps, run=figures),
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    scale = Scale(0.02, 256, 20, 2, 2, 1) if smoke else Scale(1.0, 2048, 60, 30, 15, 2)
    with one_rank() as (folder, note):
        rows = measure(scale, folder, note)
    for measured_row in rows:
        print(json.dumps(measured_row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
