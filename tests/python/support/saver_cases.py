"""Helpers of the checkpoint tests: a small saved table, its rows, and training that changes them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, initializers, optimizers
from torchrec_embcache.checkpoint import Saver

OPTIMIZERS = [
    optimizers.SGD(lr=0.5),
    optimizers.Adagrad(lr=0.1),
    optimizers.RowWiseAdagrad(lr=0.1),
    optimizers.Adam(lr=0.1),
    optimizers.AdamW(lr=0.1),
    optimizers.PartialRowWiseAdam(lr=0.1),
    optimizers.FTRL(lr=0.1),
    optimizers.LAMB(lr=0.1),
]


IN_RAM = TierBudgets(host_bytes="1MiB")


def make_bag(name: str = "item", **changes: Any) -> EmbCacheEmbeddingBag:
    arguments: dict[str, Any] = {
        "name": name,
        "embedding_dim": 4,
        "mode": "sum",
        "tiers": IN_RAM,
        "initializer": initializers.Uniform(-1, 1),
        "optimizer": optimizers.RowWiseAdagrad(lr=0.1),
        "seed": 7,
    }
    return EmbCacheEmbeddingBag(**(arguments | changes))


def train(bag: EmbCacheEmbeddingBag, steps: int = 5, seed: int = 0, ids: int = 60) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(-ids, ids, (8, 3), generator=generator)
        (bag(batch) ** 2).sum().backward()


def rows(module: Any) -> dict[int, tuple[Any, ...]]:
    """Every row with all that belongs to it, as exact values."""
    found: dict[int, tuple[Any, ...]] = {}
    for table in module.tables.values():
        for chunk in table.export():
            meta = chunk.metadata
            for n, row_id in enumerate(chunk.ids.tolist()):
                assert row_id not in found
                found[row_id] = (
                    chunk.weights[n].numpy().tobytes(),
                    *(values[n].numpy().tobytes() for _, values in sorted(chunk.slots.items())),
                    *(int(column[n]) for column in (meta.count, meta.last_step, meta.modified_epoch)),
                    float(meta.score[n]),
                )
    return found


def data_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sparse"


def tiers(kind: str, path: Path) -> TierBudgets:
    (path / "ssd").mkdir(mode=0o750, exist_ok=True)
    ssd: dict[str, Any] = {"ssd_bytes": "4MiB", "ssd_dir": str(path / "ssd"), "reopen": "resume"}
    return {
        "ram": TierBudgets(host_bytes="1MiB"),
        "ssd": TierBudgets(host_bytes=3000, **ssd),
        "device": TierBudgets(device_bytes=2000, host_bytes=3000, **ssd),
    }[kind]


def loaded(root: Path, **changes: Any) -> dict[int, tuple[Any, ...]]:
    bag = make_bag(**changes)
    Saver(0).load(bag, root)
    return rows(bag)
