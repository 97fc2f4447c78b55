"""Models of TorchRec's collections, unsharded and sharded, for the checkpoint tests."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_embcache import TierBudgets, initializers
from torchrec_embcache.distributed import EmbCacheEmbeddingBagCollectionSharder, EmbCacheEmbeddingCollectionSharder
from torchrec_embcache.modules import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingConfig,
)

FEATURES = ["a", "b"]
RAM = TierBudgets(host_bytes="4MiB")
SHARDING = {"spread": "row_wise", "whole": "table_wise", "rows": "row_wise"}


class Model(nn.Module):
    """Bags of two tables and sequences of one table. When they are sharded, the first table is spread and the second one whole."""

    def __init__(self, total_num_buckets: int, tiers: TierBudgets) -> None:
        super().__init__()
        common: dict[str, Any] = {
            "num_embeddings": 1000,
            "initializer": initializers.Uniform(-1.0, 1.0),
            "total_num_buckets": total_num_buckets,
        }
        self.ebc = EmbCacheEmbeddingBagCollection(
            tables=[
                EmbCacheEmbeddingBagConfig(
                    name=name, embedding_dim=dim, feature_names=[feature], pooling=PoolingType.SUM, **common
                )
                for name, dim, feature in (("spread", 4, "a"), ("whole", 8, "b"))
            ],
            tiers=tiers,
            name="bags",
            device=torch.device("cpu"),
            seed=7,
        )
        self.ec = EmbCacheEmbeddingCollection(
            tables=[EmbCacheEmbeddingConfig(name="rows", embedding_dim=4, feature_names=["a"], **common)],
            tiers=tiers,
            name="sequences",
            device=torch.device("cpu"),
            seed=7,
        )
        for module in (self.ebc, self.ec):
            apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.25})

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(batch).to_dict()
        sequences = self.ec(batch)
        return sum(part.pow(2).sum() for part in pooled.values()) + sequences["a"].values().pow(2).sum()


def make(size: int, sharded: bool, total_num_buckets: int = 11, tiers: TierBudgets = RAM) -> nn.Module:
    model = Model(total_num_buckets, tiers)
    if not sharded:
        return model
    sharders: list[Any] = [EmbCacheEmbeddingBagCollectionSharder(), EmbCacheEmbeddingCollectionSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=size, compute_device="cpu"),
        constraints={name: ParameterConstraints(sharding_types=[kind]) for name, kind in SHARDING.items()},
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        model, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu"), plan, sharders
    )


def contents(model: nn.Module) -> dict[tuple[str, int], tuple[list[float], float, int, int]]:
    from torchrec_embcache import cache_modules

    return {
        (name, row_id): (
            chunk.weights[n].tolist(),
            float(chunk.slots["sum"][n]),
            int(chunk.metadata.count[n]),
            int(chunk.metadata.last_step[n]),
        )
        for module in cache_modules(model).values()
        for name, table in module.tables.items()
        for chunk in table.export()
        for n, row_id in enumerate(chunk.ids.tolist())
    }


def merged(parts: list[dict[Any, Any]]) -> dict[Any, Any]:
    rows: dict[Any, Any] = {}
    for part in parts:
        assert not rows.keys() & part.keys(), "a row on two ranks"
        rows |= part
    return rows
