"""A model with two cache modules, its batches, and its rows, for tests on one or several ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.streamable import Pipelineable

from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingCollectionSharder,
    EmbCacheEmbeddingConfig,
    TierBudgets,
    cache_modules,
    initializers,
)

CPU = torch.device("cpu")
TIERS = TierBudgets(host_bytes="4MiB")
TABLES = ("ta", "tb", "tc")
ROW_WISE = dict.fromkeys(TABLES, "row_wise")
TABLE_WISE = dict.fromkeys(TABLES, "table_wise")
MIXED = {"ta": "table_wise", "tb": "row_wise", "tc": "row_wise"}
# Ids at the ends of the 64-bit range, negative ones, and enough others for each of four ranks.
IDS = [-1, -2, -(2**63), 2**63 - 1, 0, 5, 2**40 + 3, -17, 10**12, *range(100, 160)]


@dataclass
class Batch(Pipelineable):
    features: KeyedJaggedTensor
    target: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(self.features.to(device, non_blocking), self.target.to(device))

    def record_stream(self, stream: Any) -> None:
        pass

    def pin_memory(self) -> "Batch":
        return self


@dataclass(frozen=True)
class Settings:
    """The settings that tests vary."""

    weighted: bool = False
    buckets: int = 7
    tiers: TierBudgets = TIERS
    pooling: PoolingType = PoolingType.MEAN
    need_indices: bool = False
    replicated: bool = False  # True to train it unsharded on each of several ranks
    options: dict[str, Any] = field(default_factory=dict)  # settings of every table


PLAIN = Settings()


class Model(nn.Module):
    """Bags of "a", "b" (in two tables of different widths) and "c", sequences of "a", a linear layer, and a mean loss."""

    def __init__(self, settings: Settings = PLAIN) -> None:
        super().__init__()
        torch.manual_seed(0)
        common = {
            "num_embeddings": 10**9,
            "total_num_buckets": settings.buckets,
            "initializer": initializers.Uniform(-0.1, 0.1),
            **settings.options,
        }
        pooling = PoolingType.SUM if settings.weighted else settings.pooling
        self.bags = EmbCacheEmbeddingBagCollection(
            [
                EmbCacheEmbeddingBagConfig(name="ta", embedding_dim=16, feature_names=["a", "b"], **common),
                EmbCacheEmbeddingBagConfig(
                    name="tb", embedding_dim=8, feature_names=["b", "c"], pooling=pooling, **common
                ),
            ],
            is_weighted=settings.weighted,
            tiers=settings.tiers,
            name="bags",
            seed=3,
            replicated=settings.replicated,
        )
        self.sequences = EmbCacheEmbeddingCollection(
            [EmbCacheEmbeddingConfig(name="tc", embedding_dim=4, feature_names=["a"], **common)],
            need_indices=settings.need_indices,
            tiers=settings.tiers,
            name="sequences",
            seed=4,
            replicated=settings.replicated,
        )
        self.weighted = settings.weighted
        self.linear = nn.Linear(16 + 16 + 8 + 8 + 4, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        pooled = self.bags(batch.features)
        columns = [pooled[key] for key in ("a", "b@ta", "b@tb", "c")]
        if not self.weighted:
            rows = self.sequences(batch.features)["a"]
            columns.append(torch.segment_reduce(rows.values(), "sum", lengths=rows.lengths(), initial=0))
        else:
            columns.append(torch.zeros(batch.features.stride(), 4))
        out = self.linear(torch.cat(columns, 1))[:, 0]
        loss = nn.functional.mse_loss(out, batch.target)
        return loss, (loss.detach(), out.detach())

    def table_parameters(self) -> list[nn.Parameter]:
        return [*self.bags.parameters(), *self.sequences.parameters()]


def batches(count: int, rank: int = 0, world: int = 1, *, size: int = 8, weighted: bool = False) -> Iterator[Batch]:
    """`count` global batches of `size` samples, of which this is the portion of rank `rank`."""
    generator = torch.Generator().manual_seed(1)
    pool = torch.tensor(IDS)
    for _ in range(count):
        lengths = torch.randint(0, 4, (3, size), generator=generator)
        values = pool[torch.randint(0, len(pool), (int(lengths.sum()),), generator=generator)]
        weights = torch.rand(len(values), generator=generator)
        target = torch.rand(size, generator=generator)
        mine = torch.arange(rank * size // world, (rank + 1) * size // world)
        chosen = torch.repeat_interleave(torch.isin(torch.arange(size), mine).repeat(3), lengths.view(-1))
        yield Batch(
            KeyedJaggedTensor(
                ["a", "b", "c"],
                values[chosen],
                weights=weights[chosen] if weighted else None,
                lengths=lengths[:, mine].reshape(-1),
            ),
            target[mine],
        )


def sharded(
    model: nn.Module, shardings: dict[str, str] | None = None, fused_params: dict[str, Any] | None = None
) -> DistributedModelParallel:
    """Shards `model` by TorchRec's planner, each table as in `shardings` (None: the planner's choice)."""
    sharders = [
        EmbCacheEmbeddingBagCollectionSharder(fused_params),
        EmbCacheEmbeddingCollectionSharder(fused_params),
    ]
    constraints = {table: ParameterConstraints(sharding_types=[kind]) for table, kind in (shardings or {}).items()}
    world = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=world, compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    return DistributedModelParallel(model, device=CPU, sharders=sharders, plan=plan)


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for name, param in model.named_parameters() if "linear" in name], lr=0.1)


def train(model: nn.Module, steps: Iterator[Batch], optimizer: torch.optim.Optimizer | None = None) -> Tensor:
    """Trains in a plain loop. Returns the loss of each step."""
    optimizer = optimizer or dense_optimizer(model)
    losses = []
    for batch in steps:
        optimizer.zero_grad()
        loss, (value, _) = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(value)
    return torch.stack(losses)


def drain(pipeline: Any, steps: Iterator[Batch]) -> Tensor:
    """Trains on all batches with a pipeline. Returns the loss of each step."""
    losses = []
    while True:
        try:
            losses.append(pipeline.progress(steps)[0])
        except StopIteration:
            return torch.stack(losses)


Rows = dict[tuple[str, str, int], list[float]]


def rows_of(model: nn.Module) -> Rows:
    """Every row on this rank, weights and slots concatenated, by (module, table, id)."""
    found: Rows = {}
    for path, module in cache_modules(model).items():
        for name, table in module.tables.items():
            for chunk in table.export():
                columns = [chunk.weights, *(slot.view(len(chunk), -1) for slot in chunk.slots.values())]
                for id_, row in zip(chunk.ids.tolist(), torch.cat(columns, 1).tolist(), strict=True):
                    found[path, name, id_] = row
    return found


def together(parts: list[Rows]) -> Rows:
    """Merges the rows of all ranks. Asserts that each row is on one rank only."""
    merged: Rows = {}
    for part in parts:
        assert not merged.keys() & part.keys()
        merged.update(part)
    return merged


def assert_same_rows(got: Rows, want: Rows, tolerance: float = 1e-5) -> None:
    assert got.keys() == want.keys()
    for key, row in got.items():
        torch.testing.assert_close(torch.tensor(row), torch.tensor(want[key]), atol=tolerance, rtol=tolerance)


def pinned_rows(model: nn.Module) -> int:
    return sum(
        table.stats().pinned_rows for module in cache_modules(model).values() for table in module.tables.values()
    )
