"""Tables of several ranks for the checkpoint tests."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tables import bucket_of
from torchrec_embcache import CacheTable, TierBudgets, initializers, optimizers
from torchrec_embcache.model import CacheModule

IDS = torch.cat([torch.arange(-500, 500), torch.tensor([-(1 << 63), (1 << 63) - 1])])
BUCKETS = 11


def weights_of(ids: torch.Tensor) -> torch.Tensor:
    return ids.to(torch.float64).mul(1e-3).to(torch.float32)[:, None] * torch.tensor([1.0, -2.0, 0.5])


class Shards(CacheModule, nn.Module):
    """A table that is spread over all ranks by bucket, and one that is whole on the last rank."""

    def __init__(self, rank: int, size: int, total_num_buckets: int = BUCKETS) -> None:
        super().__init__()
        self.changed = 0
        common: dict[str, Any] = {
            "dim": 3,
            "tiers": TierBudgets(host_bytes="1MiB"),
            "initializer": initializers.Constant(0.0),
            "optimizer": optimizers.RowWiseAdagrad(lr=0.1),
            "total_num_buckets": total_num_buckets,
            "rank": rank,
            "world_size": size,
        }
        self._tables = {"spread": CacheTable(name="spread", **common)}
        if rank == size - 1:
            self._tables["whole"] = CacheTable(name="whole", buckets=(0, total_num_buckets), **common)

    @property
    def tables(self) -> Mapping[str, CacheTable]:
        return self._tables

    def refresh_buckets(self) -> None:
        self.changed += 1

    def fill(self, ids: torch.Tensor) -> None:
        for table in self._tables.values():
            begin, end = table.buckets
            mine = torch.tensor([begin <= bucket_of(row_id, BUCKETS) < end for row_id in ids.tolist()])
            table.import_rows(ids[mine], weights_of(ids[mine]), {"sum": ids[mine].to(torch.float32)})
            table._native_table.set_step(42)

    def contents(self) -> list[tuple[str, int, list[float], float]]:
        return [
            (table.name, row_id, chunk.weights[n].tolist(), float(chunk.slots["sum"][n]))
            for table in self._tables.values()
            for chunk in table.export()
            for n, row_id in enumerate(chunk.ids.tolist())
        ]
