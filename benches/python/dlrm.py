"""Measures the step of a DLRM whose tables have a tenth of their bytes in RAM, relative to the same DLRM with all of them in RAM on
FBGEMM.

Both are TorchRec's own DLRM under DistributedModelParallel in one process, and train alternately on the same batches. Ours runs on
`EmbCacheEmbeddingBagCollection` in `EmbCacheTrainPipelineSparseDist`, the rival on `EmbeddingBagCollection` in TorchRec's
`TrainPipelineSparseDist`. This prints one row of results.json.

    python benches/python/dlrm.py [--smoke]

Shapes: T tables, R rows per table, B samples, L ids per bag.
"""

import argparse
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

# Hide warnings that the libraries raise about each other.
warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|tensordict|torchmetrics).*")
for library in ("torchrec", "torch.fx"):
    logging.getLogger(library).setLevel(logging.ERROR)

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import CacheParams
from torchrec.models.dlrm import DLRM, DLRMTrain

from results import row
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingBagConfig,
    EmbCacheTrainPipelineSparseDist,
    TierBudgets,
    cache_modules,
)

NAME = "dlrm_step_ram10pct_zipf105"
RIVAL = "all in RAM on FBGEMM"
ROOT = Path(__file__).resolve().parents[2]
TABLES = 8
DIM = 64
DENSE = 13
SAMPLES = 8192
BAG = (2, 3, 2, 3, 2, 3, 2, 3)  # ids per bag of each table, 20 in total
FEATURES = [f"f{table}" for table in range(TABLES)]
EXPONENT = 1.05
THREADS = 2
CPU = torch.device("cpu")
SPARSE = {"learning_rate": 0.02, "eps": 1e-8}
DENSE_LR = 0.01
IMPORT_ROWS = 65_536


@dataclass(frozen=True)
class Scale:
    """The size of the data, and the length of the run."""

    rows: int  # of all tables together
    samples: int
    warm_steps: int  # after these the cache is in its steady state
    steps: int  # per round
    rounds: int
    lookahead: int
    policy: Any


class Batches:
    """Batches of ids that are drawn by Zipf's law over the rows of all tables together, and scattered within their table.

    Rank r of all rows is in table r % T. The ids of a table are drawn with the weights (r + 1)^-exponent of its ranks.
    """

    def __init__(self, scale: Scale) -> None:
        self._random = np.random.default_rng(5)
        self._samples = scale.samples
        self.rows = scale.rows // TABLES
        weights_RT = np.arange(1, self.rows * TABLES + 1, dtype=np.float64) ** -EXPONENT
        self._cumulative = [np.cumsum(column) for column in weights_RT.reshape(self.rows, TABLES).T]

    def make(self) -> Batch:
        """Creates one batch with new ids."""
        ids: list[NDArray[np.int64]] = []
        for cumulative, bag in zip(self._cumulative, BAG, strict=True):
            points = self._random.random(self._samples * bag) * cumulative[-1]
            rank = np.minimum(np.searchsorted(cumulative, points, side="right"), self.rows - 1)
            # This prime does not divide any row count in use, so the map is one-to-one. It sends neighbors far apart.
            ids.append((rank * 2_654_435_761 + 12_345) % self.rows)
        lengths_TB = torch.tensor(BAG, dtype=torch.int32).repeat_interleave(self._samples)
        features = KeyedJaggedTensor(FEATURES, torch.from_numpy(np.concatenate(ids)), lengths=lengths_TB)
        dense = torch.from_numpy(self._random.random((self._samples, DENSE), dtype=np.float32))
        labels = torch.from_numpy(self._random.integers(0, 2, self._samples, dtype=np.int32))
        return Batch(dense, features, labels)


def shard(
    tables: EmbeddingBagCollection,
    sharder: Any,
    kernel: EmbeddingComputeKernel | None = None,
    device: torch.device = CPU,
    cached: float | None = None,
) -> DistributedModelParallel:
    """Shards the DLRM over `tables`, with the same dense weights each time. `cached`: fraction of rows in FBGEMM's cache."""
    torch.manual_seed(0)
    model = DLRMTrain(
        DLRM(
            tables,
            dense_in_features=DENSE,
            dense_arch_layer_sizes=[512, 256, DIM],
            over_arch_layer_sizes=[512, 256, 1],
            dense_device=device,
        )
    )
    constraint = ParameterConstraints(
        sharding_types=["table_wise"],
        compute_kernels=[kernel.value] if kernel else None,
        cache_params=CacheParams(load_factor=cached) if cached else None,
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, local_world_size=1, compute_device=device.type),
        constraints={config.name: constraint for config in tables.embedding_bag_configs()},
    )
    plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    return DistributedModelParallel(model, device=device, sharders=[sharder], plan=plan)


def dense_optimizer(model: DistributedModelParallel) -> torch.optim.Optimizer:
    dense = [parameter for name, parameter in model.named_parameters() if "embedding_bags" not in name]
    return torch.optim.SGD(dense, lr=DENSE_LR)


def a_tenth_in_ram(scale: Scale, ssd_dir: Path) -> TierBudgets:
    """Returns budgets with a tenth of the bytes of the tables' weights in RAM, including the index of the rows on SSD."""
    weight_bytes = scale.rows // TABLES * DIM * 4
    return TierBudgets(host_bytes=weight_bytes // 10, ssd_bytes=max(weight_bytes * 5 // 2, 64 << 20), ssd_dir=ssd_dir)


def look_up_every_row(model: DistributedModelParallel, scale: Scale, device: torch.device) -> None:
    """Reads every row once, so that a device tier that fits all rows has them. Must precede the creation of the pipeline."""
    rows = scale.rows // TABLES
    lengths_TB = torch.tensor(BAG, dtype=torch.int32).repeat_interleave(scale.samples)
    dense = torch.zeros(scale.samples, DENSE)
    model.eval()
    with torch.no_grad():
        for part in range(-(-rows // (scale.samples * min(BAG)))):
            ids = [torch.arange(part * scale.samples * bag, (part + 1) * scale.samples * bag) % rows for bag in BAG]
            features = KeyedJaggedTensor(FEATURES, torch.cat(ids), lengths=lengths_TB)
            model(Batch(dense, features, torch.zeros(scale.samples, dtype=torch.int32)).to(device))
    model.train()


def tables_of(scale: Scale, tiers: TierBudgets, device: torch.device = CPU) -> EmbCacheEmbeddingBagCollection:
    """Creates our tables, each with these budgets."""
    configs = [
        EmbCacheEmbeddingBagConfig(
            name=f"t{table}",
            embedding_dim=DIM,
            num_embeddings=scale.rows // TABLES,
            feature_names=[FEATURES[table]],
            tiers=tiers,
            policy=scale.policy,
        )
        for table in range(TABLES)
    ]
    return EmbCacheEmbeddingBagCollection(configs, name="tables", device=device)


def our_sharder() -> EmbCacheEmbeddingBagCollectionSharder:
    """Creates the sharder of our tables, which uses rowwise Adagrad."""
    return EmbCacheEmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, **SPARSE})


def import_every_row(model: DistributedModelParallel, scale: Scale) -> None:
    """Imports every row into its table."""
    rows = scale.rows // TABLES
    for module in cache_modules(model).values():
        for table in module.tables.values():
            for ids in torch.split(torch.randperm(rows), IMPORT_ROWS):
                table.import_rows(ids, torch.empty(len(ids), DIM).uniform_(-0.001, 0.001))


def make_ours(scale: Scale, tiers: TierBudgets, device: torch.device = CPU) -> tuple[DistributedModelParallel, Any]:
    """Creates the model and its pipeline, in which each table has these budgets. Every row is in its table."""
    model = shard(tables_of(scale, tiers, device), our_sharder(), device=device)
    import_every_row(model, scale)
    pipeline = EmbCacheTrainPipelineSparseDist(model, dense_optimizer(model), device, lookahead=scale.lookahead)
    return model, pipeline


def make_rival(
    scale: Scale,
    kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
    device: torch.device = CPU,
    cached: float | None = None,
) -> Any:
    """Creates the pipeline on an FBGEMM kernel, by default on the CPU. `cached`: fraction of rows in its cache."""
    configs = [
        EmbeddingBagConfig(
            name=f"t{table}",
            embedding_dim=DIM,
            num_embeddings=scale.rows // TABLES,
            feature_names=[FEATURES[table]],
        )
        for table in range(TABLES)
    ]
    tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, **SPARSE})
    model = shard(tables, sharder, kernel, device, cached)
    return TrainPipelineSparseDist(model, dense_optimizer(model), device, execute_all_batches=True)


class Side:
    """One pipeline. It consumes the batches of all rounds in order, and may read ahead."""

    def __init__(self, pipeline: Any, batches: "Stream", ahead: int) -> None:
        self._pipeline = pipeline
        self._batches = batches
        self._ahead = ahead
        self.next = 0  # index of the batch that is trained next
        self._source: Iterator[Batch] | None = None

    def _numbered(self) -> Iterator[Batch]:
        number = self.next
        while True:
            yield self._batches.get(number)
            number += 1

    def run(self, steps: int) -> list[float]:
        """Runs `steps` steps, and returns the seconds of each. The batches are created before the timing starts."""
        self._batches.make_until(self.next + steps + self._ahead)
        self._source = self._source or self._numbered()
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            self._pipeline.progress(self._source)
            seconds.append(time.perf_counter() - begin)
            self.next += 1
        return seconds


class Stream:
    """Batches by index. They are kept as long as a side may need them."""

    def __init__(self, source: Batches) -> None:
        self._source = source
        self._made: dict[int, Batch] = {}
        self._until = 0

    def make_until(self, number: int) -> None:
        """Creates the batches before `number`."""
        while self._until < number:
            self._made[self._until] = self._source.make()
            self._until += 1

    def get(self, number: int) -> Batch:
        """Returns a batch that was created and not dropped."""
        return self._made[number]

    def forget_before(self, number: int) -> None:
        """Drops the batches before `number`, which all sides have trained."""
        for old in [old for old in self._made if old < number]:
            del self._made[old]


def measure(scale: Scale, folder: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Measures, and returns the bench's row of results.json."""
    torch.set_num_threads(THREADS)
    stream = Stream(Batches(scale))
    model, pipeline = make_ours(scale, a_tenth_in_ram(scale, folder))
    note("ours has its rows")
    # These steps start a round and are not counted. A side must not profit from reading ahead while the other side ran.
    uncounted = scale.lookahead + 2
    ours = Side(pipeline, stream, uncounted)
    rival = Side(make_rival(scale), stream, uncounted)
    note("the rival has its rows")
    while ours.next < scale.warm_steps:
        seconds = ours.run(min(10, scale.warm_steps - ours.next))
        stream.forget_before(ours.next)
        note(f"{ours.next} steps, {statistics.median(seconds) * 1e3:.0f} ms each")
    rival.next = ours.next
    before = tier_counters(model)
    times: dict[str, list[float]] = {"ours": [], RIVAL: []}
    steps: dict[str, list[float]] = {"ours": [], RIVAL: []}
    for _ in range(scale.rounds):
        for what, side in (("ours", ours), (RIVAL, rival)):
            side.run(uncounted)
            seconds = side.run(scale.steps)
            steps[what] += seconds
            times[what].append(scale.samples * scale.steps / sum(seconds))
        stream.forget_before(ours.next)
        note(f"ours {times['ours'][-1]:.0f} samples/s, the rival {times[RIVAL][-1]:.0f}")
    after = tier_counters(model)
    # Tables that are not closed here would be flushed at process exit, after the removal of their directory.
    for module in cache_modules(model).values():
        for table in module.tables.values():
            table.close()
    counted = (scale.steps + uncounted) * scale.rounds
    per_step = {name: (after[name] - before[name]) / counted for name in after}
    return row(
        NAME,
        "samples/s",
        "higher",
        times["ours"],
        rivals=[{"what": RIVAL, "value": statistics.median(times[RIVAL])}],
        run={
            "samples": scale.samples,
            "lookahead": scale.lookahead,
            "step_ms": round(statistics.median(steps["ours"]) * 1e3, 1),
            "rival_step_ms": round(statistics.median(steps[RIVAL]) * 1e3, 1),
            **{f"{name}_per_step": round(value) for name, value in per_step.items()},
        },
    )


def tier_counters(model: DistributedModelParallel) -> dict[str, int]:
    """Returns the summed counters of all tables."""
    counters = {"host_hits": 0, "ssd_reads": 0, "ssd_read_bytes": 0, "ssd_written_bytes": 0, "overflow_plans": 0}
    for module in cache_modules(model).values():
        for table in module.tables.values():
            stats = table.stats()
            assert stats.ssd is not None
            counters["host_hits"] += stats.host.hits
            counters["ssd_reads"] += stats.ssd.hits
            counters["ssd_read_bytes"] += stats.ssd.read_bytes
            counters["ssd_written_bytes"] += stats.ssd.written_bytes
            counters["overflow_plans"] += stats.overflow_plans
    return counters


@contextlib.contextmanager
def one_rank() -> Iterator[tuple[Path, Callable[[str], None]]]:
    """Creates a process group of a single rank. Yields a temporary directory, and a function that writes a line with the elapsed
    time to standard error.
    """
    begin = time.monotonic()

    def note(text: str) -> None:
        print(f"{time.monotonic() - begin:.0f} s: {text}", file=sys.stderr, flush=True)

    target = ROOT / "target" / "bench"
    target.mkdir(parents=True, exist_ok=True)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with tempfile.TemporaryDirectory(dir=target) as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield Path(folder), note
        finally:
            dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of benches; there is one here, which is measured whatever they are")
    parser.add_argument("--smoke", action="store_true", help="small tables, one round: shows that it runs")
    parser.add_argument("--rows", type=int, default=10_000_000, help="of all tables together")
    parser.add_argument("--warm-steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lookahead", type=int, default=2)
    parser.add_argument("--policy", default="s3fifo")
    options = parser.parse_args()
    if options.smoke:
        scale = Scale(80_000, 256, 4, 3, 1, options.lookahead, options.policy)
    else:
        scale = Scale(options.rows, SAMPLES, options.warm_steps, 20, options.rounds, options.lookahead, options.policy)
    with one_rank() as (folder, note):
        tables = folder / "tables"
        tables.mkdir(mode=0o750)
        measured = measure(scale, tables, note)
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
