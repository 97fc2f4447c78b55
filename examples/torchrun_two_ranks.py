"""Train one model in two processes. Tables are sharded row-wise, by TorchRec's own DistributedModelParallel and pipeline.

    torchrun --nproc-per-node 2 examples/torchrun_two_ranks.py

Without torchrun the script launches itself in this way. Each rank holds its shard of every table (the ids of a range of buckets),
trains on its half of each batch, and saves its part of one checkpoint. Any number of ranks can load it.
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

# Hide warnings that the libraries raise about each other.
warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|tensordict|torchmetrics).*")
for library in ("torchrec", "torch.fx"):
    logging.getLogger(library).setLevel(logging.ERROR)

import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingBagConfig,
    TierBudgets,
    cache_modules,
)
from torchrec_embcache.checkpoint import Saver

FEATURES = ["who", "what", "where"]


class Model(nn.Module):
    """Two tables of different widths with three features, and one linear layer."""

    def __init__(self, ssd_dir: Path) -> None:
        super().__init__()
        self.tables = EmbCacheEmbeddingBagCollection(
            tables=[
                EmbCacheEmbeddingBagConfig(
                    name="people",
                    embedding_dim=16,
                    num_embeddings=1_000_000,
                    feature_names=["who"],
                    pooling=PoolingType.SUM,
                ),
                EmbCacheEmbeddingBagConfig(
                    name="things",
                    embedding_dim=32,
                    num_embeddings=1_000_000,
                    feature_names=["what", "where"],
                    pooling=PoolingType.MEAN,
                ),
            ],
            tiers=TierBudgets(host_bytes="4MiB", ssd_bytes="256MiB", ssd_dir=ssd_dir),  # per rank, for both tables
            name="tables",
            device=torch.device("cpu"),
        )
        self.over = nn.Linear(16 + 32 + 32, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss, and the logits [B]."""
        pooled = self.tables(batch.sparse_features)
        logits = self.over(torch.cat([pooled[feature] for feature in FEATURES], 1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()


def batches(steps: int, size: int, rank: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        lengths = torch.randint(0, 4, (len(FEATURES) * size,), generator=generator)
        values = (torch.rand(int(lengths.sum()), generator=generator) ** 4 * 100_000).long() * 0x1E3779B97F4A7C15
        labels = torch.randint(0, 2, (size,), generator=generator).float()
        yield Batch(torch.empty(size, 0), KeyedJaggedTensor(FEATURES, values, lengths=lengths.int()), labels)


def train(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    torch.manual_seed(0)
    model = Model(options.folder / "ssd")
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.05})
    model = DistributedModelParallel(model, device=device, sharders=[EmbCacheEmbeddingBagCollectionSharder()])
    dense = torch.optim.SGD([parameter for name, parameter in model.named_parameters() if "over" in name], lr=0.1)
    pipeline = TrainPipelineSparseDist(model, dense, device, execute_all_batches=True)
    data = batches(options.steps, 256, rank)
    loss = torch.zeros(())
    while True:
        try:
            logits = pipeline.progress(data)
        except StopIteration:
            break
        loss = logits.mean()
    for module in cache_modules(model).values():
        for name, table in module.tables.items():
            stats = table.stats()
            on_ssd = stats.ssd.rows if stats.ssd else 0
            print(f"rank {rank}, {name}: {stats.rows} rows, {stats.host.rows} in RAM, {on_ssd} on SSD", flush=True)
    Saver(rank).save(model, str(options.folder / "checkpoint"))
    dist.barrier()
    if rank == 0:
        files = sorted(path.name for path in (options.folder / "checkpoint").rglob("*") if path.is_file())
        print(f"mean logit {float(loss):.4f}; saved {len(files)} files: {', '.join(files)}")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--folder", type=Path, help="where SSD tier and checkpoint go, kept; by default a temporary one"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        train(options)
        # DistributedModelParallel wraps the dense part in DistributedDataParallel, which keeps its process group and its threads
        # until the process ends, even after `del model` and destroy_process_group(). If one of these threads releases a tensor
        # during interpreter shutdown, it aborts the process ("terminate called without an active exception"). Everything is saved
        # here, so the process exits without that shutdown.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        (folder / "ssd").mkdir(mode=0o750, exist_ok=True)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        command = [*launch, "--steps", str(options.steps), "--folder", str(folder)]
        return subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
