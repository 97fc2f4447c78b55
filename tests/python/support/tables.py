"""Tables, batches and training loops shared by tests."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hypothesis import strategies as st

from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, initializers, optimizers

# Device and kernel backends of the tests that `make test-cuda` runs on a GPU.
DEVICE = torch.device("cuda:0" if os.environ.get("EMBCACHE_TEST_CUDA") == "1" else "cpu")
KERNELS = ["torch", "triton"] if DEVICE.type == "cuda" else ["core", "torch", "triton"]
AMPLE = TierBudgets(host_bytes="16MiB")
EXTREME_IDS = [0, 1, -1, 2**63 - 1, -(2**63), 2**40 + 3, -17, 10**12]
OPTIMIZERS = {
    "sgd": optimizers.SGD(lr=0.1),
    "adagrad": optimizers.Adagrad(lr=0.1),
    "rowwise_adagrad": optimizers.RowWiseAdagrad(lr=0.1),
    "adam": optimizers.Adam(lr=0.1),
    "adamw": optimizers.AdamW(lr=0.1, weight_decay=0.1),
    "partial_rowwise_adam": optimizers.PartialRowWiseAdam(lr=0.1, weight_decay=0.1),
    "lamb": optimizers.LAMB(lr=0.1, weight_decay=0.1),
    "ftrl": optimizers.FTRL(lr=0.1, beta=0.5, l1=0.01, l2=0.01),
}

Bags = list[list[int]]


def make_bag(**settings) -> EmbCacheEmbeddingBag:
    """A small table. Every setting can be overridden."""
    defaults = {
        "name": "item",
        "embedding_dim": 4,
        "tiers": AMPLE,
        "optimizer": optimizers.Adagrad(lr=0.1),
        "initializer": initializers.Uniform(-0.5, 0.5),
        "seed": 7,
        "device": DEVICE,
    }
    return EmbCacheEmbeddingBag(**{**defaults, **settings})


def bucket_of(row_id: int, total_num_buckets: int) -> int:
    """The bucket of an id, as a second implementation of the documented rule: SplitMix64's finalizer, then the remainder."""
    mask = (1 << 64) - 1
    mixed = row_id & mask
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
    return (mixed ^ mixed >> 31) % total_num_buckets


def jagged(bags: Bags) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids [N] and the offsets [B] of bags."""
    offsets = [0]
    for bag in bags:
        offsets.append(offsets[-1] + len(bag))
    return torch.tensor([i for bag in bags for i in bag], dtype=torch.int64), torch.tensor(
        offsets[:-1], dtype=torch.int64
    )


def bags_strategy(ids: Sequence[int] = (*EXTREME_IDS, *range(2, 14))) -> st.SearchStrategy[Bags]:
    """A strategy for one batch with empty bags, duplicate ids and extreme ids."""
    return st.lists(st.lists(st.sampled_from(ids), max_size=5), min_size=1, max_size=5)


def random_batches(count: int, bags: int, ids: int, seed: int = 0) -> list[Bags]:
    """Skewed batches over `ids` ids, with extreme ids, empty bags and duplicates."""
    rng = random.Random(seed)
    pool = [*EXTREME_IDS, *(rng.randrange(-(2**63), 2**63) for _ in range(ids - len(EXTREME_IDS)))]
    return [
        [[pool[int(ids * rng.random() ** 2)] for _ in range(rng.randrange(5))] for _ in range(bags)]
        for _ in range(count)
    ]


def step(module: EmbCacheEmbeddingBag, bags: Bags, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Does one training step with a gradient that depends on the output. Returns the output."""
    ids, offsets = jagged(bags)
    out = module(ids, offsets, per_sample_weights=weights)
    # Computed on the CPU, because a GPU multiplies by the inverse of a divisor.
    scale = (torch.arange(1, out.numel() + 1, dtype=torch.float32) / out.numel()).view(out.shape).to(out.device)
    (out * scale + out * out).sum().backward()
    return out.detach()


def train(module: EmbCacheEmbeddingBag, batches: Sequence[Bags], lookahead: int = 0) -> list[torch.Tensor]:
    """Trains on every batch, with prefetches `lookahead` batches ahead. Returns the outputs."""
    outs = []
    for place, bags in enumerate(batches):
        for ahead in range(place if place == 0 else place + lookahead, min(place + lookahead + 1, len(batches))):
            if lookahead:
                module.prefetch(*jagged(batches[ahead]))
        outs.append(step(module, bags))
    return outs


@dataclass
class Contents:
    """All rows of a table, by id."""

    step: int
    rows: dict[int, tuple[bytes, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: EmbCacheEmbeddingBag) -> "Contents":
        """Every bit of every row, its slots and its metadata."""
        contents = cls(module.stats().step)
        for chunk in module.export(chunk_rows=7):
            meta = chunk.metadata
            for place, row_id in enumerate(chunk.ids.tolist()):
                assert row_id not in contents.rows, "a row is exported twice"
                values = [chunk.weights[place], *(slot[place] for slot in chunk.slots.values())]
                counts = (meta.count[place], meta.last_step[place], meta.score[place])
                contents.rows[row_id] = tuple(value.numpy().tobytes() for value in (*values, *counts))
        assert len(contents.rows) == len(module)
        return contents


def ssd_tiers(directory: Path, **budgets) -> TierBudgets:
    """Budgets with an SSD tier below `directory`, which is created with mode 0700."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return TierBudgets(**{"host_bytes": "64KiB", "ssd_bytes": "64MiB", "ssd_dir": directory, **budgets})
