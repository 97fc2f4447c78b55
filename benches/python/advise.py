"""Compares the split of `advise` with twelve other splits of the same RAM, all of them measured.

The model is TorchRec's DLRM over tables on SSD that differ in rows, skew and frequency of use. It is first trained with an even
split, while its tables measure their traffic. It is then opened with each split in alternation with the split of `advise`, over the
same batches, because the speed of the machine drifts over minutes. One result row is the number of rows that a step reads with the
best of the twelve splits, divided by the number with the split of `advise`. The other is the same ratio of the median step times.
1.0 means equal, higher is better.

    python benches/python/advise.py [--smoke]

Shapes: B samples.
"""

import argparse
import json
import random
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
    """A table of the DLRM: its rows, the exponent of its Zipf distribution, and the ids per bag."""

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

    share: float  # fraction of the rows above
    samples: int  # B
    measured_steps: int  # while the tables measure their traffic
    warm_steps: int  # per split
    steps: int
    rounds: int
    splits: int  # number of the twelve splits that are measured

    @property
    def rows(self) -> list[int]:
        """The rows of each table."""
        return [max(int(table.rows * self.share), 1000) for table in TABLES]


class Batches:
    """An endless stream of batches with new ids."""

    def __init__(self, scale: Scale) -> None:
        self._random = np.random.default_rng(11)
        self._samples = scale.samples
        self.rows = scale.rows
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


def opened(folder: Path, rows: Sequence[int], host: Sequence[int], *, sizing: bool = False) -> tuple[Any, Any]:
    """Opens the model with these budgets in RAM, and its pipeline. It resumes from the last flush."""
    configs = [
        EmbCacheEmbeddingBagConfig(
            name=table.name,
            embedding_dim=DIM,
            num_embeddings=of_table,
            feature_names=[table.name],
            initializer=initializers.Uniform(-0.001, 0.001),
            tiers=TierBudgets(host_bytes=size, ssd_bytes="1GiB", ssd_dir=folder, reopen="auto", sizing=sizing),
        )
        for table, of_table, size in zip(TABLES, rows, host, strict=True)
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
    """Returns the number of rows that were read from SSD for batches."""
    stats = [table.stats().ssd for module in cache_modules(model).values() for table in module.tables.values()]
    return sum(ssd.hits for ssd in stats if ssd is not None)


def measured(folder: Path, scale: Scale, ahead: Sequence[Batch], host: Sequence[int]) -> tuple[float, float]:
    """Returns the median seconds of a step with these budgets, and the number of rows that a step reads."""
    model, pipeline = opened(folder, scale.rows, host)
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


@dataclass(frozen=True)
class Pair:
    """One of the twelve splits and the split of `advise`, measured alternately over the same batches."""

    step: float  # seconds
    advised_step: float
    reads: float  # rows per step
    advised_reads: float


def pair(folder: Path, scale: Scale, source: Iterator[Batch], other: Sequence[int], advised: Sequence[int]) -> Pair:
    """Measures in the order other, advised, advised, other: a second run over the same batches is slower for either split."""
    ahead = [next(source) for _ in range(scale.warm_steps + scale.steps + 4)]
    runs = [measured(folder, scale, ahead, host) for host in (other, advised, advised, other)]
    steps, read = [run[0] for run in runs], [run[1] for run in runs]
    return Pair((steps[0] + steps[3]) / 2, (steps[1] + steps[2]) / 2, (read[0] + read[3]) / 2, (read[1] + read[2]) / 2)


def splits(traffic: Sequence[TableTraffic], ram: int) -> dict[str, list[int]]:
    """Returns twelve divisions of RAM: each table gets its minimum, and the rest is divided by these fractions."""
    least = [
        2 * table.curve.largest_batch * table.row_bytes.host + table.rows * table.row_bytes.index + (1 << 20)
        for table in traffic
    ]
    free = ram - sum(least)
    count = len(traffic)
    draws = np.random.default_rng(3)
    shares = {
        "even": np.ones(count),
        "by rows": np.array([table.rows for table in traffic], np.float64),
        "by lookups": np.array([table.lookups_per_batch for table in traffic]),
    }
    for favoured, table in enumerate(traffic):
        shares[f"most to {table.name}"] = np.where(np.arange(count) == favoured, 0.7 * count, 0.3)
    while len(shares) < SPLITS:
        shares[f"at random {len(shares)}"] = draws.dirichlet(np.ones(count))
    return {
        name: [size + int(free * part) for size, part in zip(least, share / share.sum(), strict=True)]
        for name, share in shares.items()
    }


def measured_traffic(folder: Path, scale: Scale, batches: Batches, ram: int) -> list[TableTraffic]:
    """Fills the tables, trains with an even split, and returns the measured traffic of the tables."""
    model, pipeline = opened(folder, scale.rows, [ram // len(TABLES)] * len(TABLES), sizing=True)
    tables = [table for module in cache_modules(model).values() for table in module.tables.values()]
    for table, rows in zip(tables, batches.rows, strict=True):
        table.import_rows(torch.arange(rows), torch.empty(rows, DIM).uniform_(-0.001, 0.001))
    source = iter(batches)
    for step in range(2 * scale.measured_steps):
        if step == scale.measured_steps:  # the caches are warm
            for table in tables:
                table.miss_ratio_curve(reset=True)
        pipeline.progress(source)
    traffic = traffic_of(model)
    pipeline.detach()
    close(model)
    return traffic


def measure(scale: Scale, folder: Path, note: Any) -> list[dict[str, Any]]:
    """Measures, and returns the rows of results.json."""
    torch.set_num_threads(THREADS)
    batches = Batches(scale)
    # A tenth of the bytes of all rows, and the index of the rows on SSD.
    ram = sum(rows * (DIM * 4 // 10 + 12) for rows in batches.rows) + len(TABLES) * (8 << 20)
    traffic = measured_traffic(folder, scale, batches, ram)
    advice = advise(traffic, ram=ram, ssd="4GiB", batches_in_flight=4)
    note(f"the tables were measured\n{advice}")
    advised = [table.host_bytes for table in advice.tables.values()]
    named = dict(list(splits(traffic, ram).items())[: scale.splits])
    pairs: dict[str, list[Pair]] = {name: [] for name in named}
    source = iter(batches)
    for _ in range(scale.rounds):
        for name in random.sample(list(named), len(named)):
            both = pair(folder, scale, source, named[name], advised)
            pairs[name].append(both)
            note(
                f"{name}: {both.step * 1e3:.1f} ms, {both.reads:.0f} reads a step; "
                f"advised: {both.advised_step * 1e3:.1f} ms, {both.advised_reads:.0f}"
            )
    return rows_of(pairs, round(advice.reads_per_batch))


def rows_of(pairs: dict[str, list[Pair]], expected_reads: int) -> list[dict[str, Any]]:
    """Returns the rows of results.json. The best split has the minimum median ratio."""
    step = {name: [of.step / of.advised_step for of in measured] for name, measured in pairs.items()}
    read = {name: [of.reads / max(of.advised_reads, 1.0) for of in measured] for name, measured in pairs.items()}
    fastest = min(step, key=lambda name: statistics.median(step[name]))
    fewest = min(read, key=lambda name: statistics.median(read[name]))
    run = {
        "fastest_of_twelve": fastest,
        "fewest_reads_of_twelve": fewest,
        "advised_reads": round(statistics.median(of.advised_reads for of in pairs[fewest])),
        "expected_reads": expected_reads,
        **{f"step: {name}": round(statistics.median(ratios), 3) for name, ratios in step.items()},
        **{f"reads: {name}": round(statistics.median(ratios), 3) for name, ratios in read.items()},
    }
    return [row(READS, "ratio", "higher", read[fewest], run=run), row(STEP, "ratio", "higher", step[fastest], run=run)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    scale = Scale(0.02, 256, 20, 2, 2, 1, 2) if smoke else Scale(1.0, 2048, 60, 30, 20, 3, SPLITS)
    with one_rank() as (folder, note):
        rows = measure(scale, folder, note)
    for measured_row in rows:
        print(json.dumps(measured_row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
