"""Stream Criteo-like clicks from parquet files through worker processes into tables larger than their RAM. Stop it with Ctrl-C and
run it again: it resumes with the click after the last trained one.

The first run writes the files: 13 dense columns and 26 columns of hashed 64-bit ids, drawn from Zipf distributions over columns of
very different sizes, like Criteo's. Then:

- A `DataLoader` with worker processes reads the row groups. An item is a row group, and worker w of W reads every W-th, so items
  arrive in the order of the files for any W. The workers are forked before the tables are opened: a worker needs no table, and a
  worker that is forked later could not use its parent's tables.
- `EmbCacheTrainPipelineSparseDist` reads the rows of the next batches from SSD while this one trains (`--lookahead`).
- Every `--save-every` steps, and at the end, also after Ctrl-C, the tables are flushed and the dense parameters are written next to
  them, with the number of steps: the next run starts at that position in the files. (Steps that a killed process trained since are
  lost.)

    python examples/criteo_parquet.py [--steps 100] [--workers 2] [--folder criteo]
"""

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

# Hide warnings that the libraries raise about each other.
warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|tensordict|torchmetrics).*")
for library in ("torchrec", "torch.fx"):
    logging.getLogger(library).setLevel(logging.ERROR)

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_embcache import (
    CacheTable,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingBagConfig,
    EmbCacheTrainPipelineSparseDist,
    TierBudgets,
    cache_modules,
    flush,
)

DENSE = [f"I{column}" for column in range(1, 14)]
SPARSE = [f"C{column}" for column in range(1, 27)]
DIM = 16
BATCH = 256
GROUP = 16 * BATCH  # rows per row group
CPU = torch.device("cpu")
Clicks = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # labels [n], dense features [n, 13], ids [26, n]


def write_files(folder: Path, files: int, groups: int) -> None:
    """Writes parquet files of `groups` row groups each. A label depends on hidden values of three of the ids."""
    for number in range(files):
        generator = np.random.default_rng(number)
        rows = groups * GROUP
        columns: dict[str, np.ndarray] = {}
        liking = np.zeros(rows)
        for at, name in enumerate(SPARSE):
            ids = np.minimum(generator.zipf(1.15, rows), 10 ** (1 + at % 6))
            columns[name] = ids * np.int64(0x1E3779B97F4A7C15) + at  # similar to the hash of a string
            if at % 9 == 3:
                liking += np.sin(ids * 1.7)
        for name in DENSE:
            columns[name] = np.log1p(generator.exponential(10, rows)).astype(np.float32)
        columns["label"] = (liking + generator.normal(0, 0.5, rows) > 0).astype(np.float32)
        unfinished = folder / f"clicks-{number:03}.tmp"
        pq.write_table(pa.table(columns), unfinished, row_group_size=GROUP)
        unfinished.rename(folder / f"clicks-{number:03}.parquet")


class RowGroups(IterableDataset[Clicks]):
    """The row groups of some files from group `first` on, in an endless loop."""

    def __init__(self, files: list[Path], first: int) -> None:
        super().__init__()
        self.files = files
        self.first = first

    def __iter__(self) -> Iterator[Clicks]:
        worker = get_worker_info()
        begin, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        opened = [pq.ParquetFile(file) for file in self.files]
        places = [(file, group) for file in opened for group in range(file.num_row_groups)]
        at = self.first + begin
        while True:
            file, group = places[at % len(places)]
            table = file.read_row_group(group, use_threads=False)
            dense = np.stack([table[name].to_numpy() for name in DENSE], 1)
            ids = np.stack([table[name].to_numpy() for name in SPARSE])
            yield torch.tensor(table["label"].to_numpy()), torch.from_numpy(dense), torch.from_numpy(ids)
            at += stride


def batches(groups: Iterator[Clicks], skip: int, count: int) -> Iterator[Batch]:
    """Yields `count` batches from row groups, without the first `skip`. Each sample has one id per feature."""
    lengths = torch.ones(len(SPARSE) * BATCH, dtype=torch.int32)
    for labels, dense, ids in groups:
        for begin in range(skip * BATCH, GROUP, BATCH):
            if count == 0:
                return
            part = slice(begin, begin + BATCH)
            features = KeyedJaggedTensor(SPARSE, ids[:, part].reshape(-1), lengths=lengths)
            yield Batch(dense[part], features, labels[part])
            count -= 1
        skip = 0


class Training:
    """The model with its tables and optimizers, and the state that is needed to resume."""

    def __init__(self, folder: Path, host: str, lookahead: int) -> None:
        torch.manual_seed(0)
        configs = [
            EmbCacheEmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=10**7, feature_names=[name])
            for name in SPARSE
        ]
        # The budgets are totals of all 26 tables. "auto" resumes from the last flush, or starts empty if there is none.
        tiers = TierBudgets(host_bytes=host, ssd_bytes="2GiB", ssd_dir=folder / "rows", reopen="auto")
        tables = EmbCacheEmbeddingBagCollection(tables=configs, tiers=tiers, name="tables", device=CPU)
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.02})
        dlrm = DLRM(
            embedding_bag_collection=tables,
            dense_in_features=len(DENSE),
            dense_arch_layer_sizes=[32, DIM],
            over_arch_layer_sizes=[32, 1],
        )
        self.model = DistributedModelParallel(
            DLRMTrain(dlrm), device=CPU, sharders=[EmbCacheEmbeddingBagCollectionSharder()]
        )
        (collection,) = cache_modules(self.model).values()
        self.tables: dict[str, CacheTable] = dict(collection.tables)
        parameters = {name: p for name, p in self.model.named_parameters() if "embedding_bags" not in name}
        self.parameters = parameters
        self.optimizer = torch.optim.Adam(parameters.values(), lr=0.002)
        self.pipeline = EmbCacheTrainPipelineSparseDist(self.model, self.optimizer, CPU, lookahead=lookahead)
        self.file = folder / "dense.pt"
        self.steps = 0
        if self.file.exists():
            state = torch.load(self.file, weights_only=True)
            self.steps = state["steps"]
            self.optimizer.load_state_dict(state["optimizer"])
            for name, parameter in parameters.items():
                parameter.data.copy_(state["parameters"][name])

    def save(self) -> None:
        """Makes the trained state durable, as the starting point of the next run."""
        flush(self.model)
        unfinished = self.file.with_suffix(".tmp")
        optimizer = self.optimizer.state_dict()
        torch.save({"steps": self.steps, "parameters": self.parameters, "optimizer": optimizer}, unfinished)
        unfinished.rename(self.file)

    def hits(self) -> dict[str, int]:
        """Returns the number of rows that batches found in each tier, and the number of ids that had no row yet."""
        stats = [table.stats() for table in self.tables.values()]
        on_ssd = [tier.ssd for tier in stats if tier.ssd]
        return {
            "RAM": sum(tier.host.hits for tier in stats),
            "SSD": sum(tier.hits for tier in on_ssd),
            "new": sum(tier.misses for tier in on_ssd),
        }

    def run(self, data: Iterator[Batch], say_every: int, save_every: int) -> None:
        """Trains on all of `data`."""
        losses: list[float] = []
        began, before = time.perf_counter(), self.hits()
        while True:
            try:
                loss, _ = self.pipeline.progress(data)[:2]
            except StopIteration:
                return
            self.steps += 1
            losses.append(float(loss))
            if len(losses) == say_every:
                speed, hits = BATCH * say_every / (time.perf_counter() - began), self.hits()
                asked = max(sum(hits.values()) - sum(before.values()), 1)
                shares = ", ".join(f"{100 * (hits[tier] - before[tier]) / asked:.1f}% {tier}" for tier in hits)
                mean = sum(losses) / say_every
                print(f"step {self.steps}: loss {mean:.4f}, {speed:,.0f} clicks/s; rows: {shares}", flush=True)
                losses, began, before = [], time.perf_counter(), hits
            if self.steps % save_every == 0:
                self.save()

    def close(self) -> None:
        """Prints the location of the rows, and closes the tables."""
        stats = [table.stats() for table in self.tables.values()]
        on_ssd = sum(table.ssd.rows for table in stats if table.ssd)
        rows, in_ram = sum(table.rows for table in stats), sum(table.host.rows for table in stats)
        print(f"after {self.steps} steps: {rows} rows, {in_ram} in RAM, {on_ssd} on SSD", flush=True)
        for table in self.tables.values():
            table.close()


def train(options: argparse.Namespace) -> None:
    folder: Path = options.folder
    files = sorted(folder.glob("*.parquet"))
    dense = folder / "dense.pt"
    begun: int = torch.load(dense, weights_only=True)["steps"] if dense.exists() else 0
    print(f"begins with click {begun * BATCH:,} of {len(files)} files", flush=True)
    group, skip = divmod(begun * BATCH, GROUP)
    loader = DataLoader(RowGroups(files, group), batch_size=None, num_workers=options.workers)
    groups = iter(loader)  # this forks the workers, and must precede the tables
    training = Training(folder, options.host, options.lookahead)
    try:
        training.run(batches(groups, skip // BATCH, options.steps), options.say_every, options.save_every)
    finally:
        # Ctrl-C leads here too.
        training.save()
        training.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help=f"batches of {BATCH} clicks, for this run")
    parser.add_argument("--files", type=int, default=2, help="written by the first run")
    parser.add_argument("--groups", type=int, default=4, help=f"row groups of a file, each with {GROUP} clicks")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--host", default="4MiB", help="the RAM of all tables together")
    parser.add_argument("--say-every", type=int, default=20, help="steps")
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    parser.add_argument("--folder", type=Path, default=Path("criteo"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # the dense part is tiny
    options.folder.mkdir(mode=0o750, exist_ok=True)
    (options.folder / "rows").mkdir(mode=0o750, exist_ok=True)
    if not any(options.folder.glob("*.parquet")):
        write_files(options.folder, options.files, options.groups)
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory() as meeting:
        dist.init_process_group("gloo", init_method=f"file://{meeting}/group", rank=0, world_size=1)
        try:
            train(options)
        finally:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
