"""State dicts and a model with tables for the tests of DCP."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tables import bucket_of
from torchrec_embcache import (
    CacheTable,
    EmbCacheStorageReader,
    EmbCacheStorageWriter,
    TierBudgets,
    initializers,
    optimizers,
)
from torchrec_embcache.model import CacheModule

IDS = torch.cat([torch.arange(-50, 50), torch.tensor([-(1 << 63), (1 << 63) - 1])])
BUCKETS = 11


def dense_state(salt: int = 0) -> dict[str, Any]:
    """One value of every unsharded kind: dtypes, views, empty, scalar and sparse tensors, one larger than a window, and objects."""
    generator = torch.Generator().manual_seed(salt)
    wide = torch.randn(1500, 1600, generator=generator)
    return {
        "weight": torch.randn(300, 7, generator=generator),
        "half": torch.randn(5, 3, generator=generator).bfloat16(),
        "eight": torch.randn(9, generator=generator).to(torch.float8_e4m3fn),
        "flags": torch.rand(11, generator=generator) < 0.5,
        "complex": torch.complex(torch.ones(2, 3), torch.randn(2, 3, generator=generator)),
        "conjugate": torch.complex(torch.ones(4), torch.randn(4, generator=generator)).conj(),
        "transposed": torch.arange(12).add(salt).view(3, 4).t(),
        "image": torch.randn(2, 3, 4, 5, generator=generator).contiguous(memory_format=torch.channels_last),
        "columns": wide[:, 3:1599],
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5 + salt),
        "sparse": torch.eye(4).mul(salt + 1).to_sparse(),
        "optimizer": {"state": [torch.full((3,), float(salt)), {"step": salt}], "name": f"adam {salt}"},
        "object": {1, salt},
        "none": None,
    }


def stageable(state: dict[str, Any]) -> dict[str, Any]:
    """The entries of a state dict that torch's stager supports."""
    return {key: value for key, value in state.items() if key != "sparse"}


def blank(value: Any) -> Any:
    """A state dict of the same structure with other contents."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            return torch.zeros_like(value)
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: blank(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [blank(entry) for entry in value]
    return "blank"


def same(left: Any, right: Any) -> bool:
    """True if two state dicts are bitwise identical."""
    if isinstance(left, torch.Tensor):
        left, right = (x.to_dense() if x.is_sparse else x.resolve_conj() for x in (left, right))
        if left.dtype == torch.float8_e4m3fn:
            left, right = left.view(torch.uint8), right.view(torch.uint8)
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def weights_of(ids: torch.Tensor, salt: int = 0) -> torch.Tensor:
    return (ids.to(torch.float64).mul(1e-3).to(torch.float32) + salt)[:, None] * torch.tensor([1.0, -2.0, 0.5])


class Model(CacheModule, nn.Module):
    """A model with one table, sharded by bucket over all ranks."""

    def __init__(self, rank: int = 0, size: int = 1, salt: int | None = None, dim: int = 3) -> None:
        super().__init__()
        self._tables = {
            "spread": CacheTable(
                name="spread",
                dim=dim,
                tiers=TierBudgets(host_bytes="1MiB"),
                initializer=initializers.Constant(0.0),
                optimizer=optimizers.RowWiseAdagrad(lr=0.1),
                total_num_buckets=BUCKETS,
                rank=rank,
                world_size=size,
            )
        }
        if salt is not None:
            self.fill(salt)

    @property
    def tables(self) -> Mapping[str, CacheTable]:
        return self._tables

    def fill(self, salt: int) -> None:
        table = self._tables["spread"]
        begin, end = table.buckets
        mine = IDS[torch.tensor([begin <= bucket_of(row_id, BUCKETS) < end for row_id in IDS.tolist()])]
        table.import_rows(mine, weights_of(mine, salt), {"sum": mine.to(torch.float32)})
        table._native_table.set_step(42 + salt)

    def contents(self) -> list[tuple[int, list[float], float]]:
        return [
            (row_id, chunk.weights[n].tolist(), float(chunk.slots["sum"][n]))
            for chunk in self._tables["spread"].export()
            for n, row_id in enumerate(chunk.ids.tolist())
        ]


def rows(salt: int) -> list[tuple[int, list[float], float]]:
    """The rows of all ranks of the model with this salt."""
    sums = IDS.to(torch.float32).tolist()
    return sorted(zip(IDS.tolist(), weights_of(IDS, salt).tolist(), sums, strict=True))


def held(path: Any) -> list[str]:
    """The entries of a checkpoint directory, except the lock of saves."""
    return sorted(name for name in os.listdir(path) if name != "lock")


def save(state: dict[str, Any], path: Any, model: nn.Module | None = None, **settings: Any) -> Any:
    return dcp.save(state, storage_writer=EmbCacheStorageWriter(path, model), **settings)


def load(state: dict[str, Any], path: Any, model: nn.Module | None = None, **settings: Any) -> dict[str, Any]:
    """Loads a saved state into `state`, which has the same structure."""
    dcp.load(state, storage_reader=EmbCacheStorageReader(path, model), **settings)
    return state
