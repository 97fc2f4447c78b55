"""A checkpoint that TorchRec trained and `torch.distributed.checkpoint` saved."""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torchrec
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec import KeyedJaggedTensor as Kjt
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

ROWS = {"user": 101, "item": 37, "wide": 20, "words": 64}


class Model(nn.Module):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        bags = [
            EmbeddingBagConfig(name="user", embedding_dim=8, num_embeddings=ROWS["user"], feature_names=["u"]),
            EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=ROWS["item"], feature_names=["i"]),
            EmbeddingBagConfig(name="wide", embedding_dim=256, num_embeddings=ROWS["wide"], feature_names=["w"]),
        ]
        words = [EmbeddingConfig(name="words", embedding_dim=8, num_embeddings=ROWS["words"], feature_names=["t"])]
        self.bags = EmbeddingBagCollection(tables=bags, device=torch.device("meta"))
        self.sequence = EmbeddingCollection(tables=words, device=torch.device("meta"))
        self.over = nn.Linear(2, 2)
        apply_optimizer_in_backward(optimizer, self.bags.parameters(), {"lr": 0.1})
        apply_optimizer_in_backward(optimizer, self.sequence.parameters(), {"lr": 0.1})


def save_trained(rank: int, size: int, path: str, optimizer: str, wide: str) -> dict[str, Any]:
    """Train TorchRec's own model for a step on every rank, and save it through DCP. Returns this rank's shards of each tensor by
    name.
    """
    torch.manual_seed(7)
    kind = torchrec.optim.RowWiseAdagrad if optimizer == "rowwise" else torch.optim.Adagrad
    constraints = {
        "user": ParameterConstraints(sharding_types=["table_wise"]),
        "item": ParameterConstraints(sharding_types=["table_wise"]),
        "wide": ParameterConstraints(sharding_types=[wide], min_partition=128),
        "words": ParameterConstraints(sharding_types=["row_wise"]),
    }
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    planner = EmbeddingShardingPlanner(topology=Topology(size, "cpu"), constraints=constraints)
    plan = planner.collective_plan(Model(kind), sharders, torch.distributed.group.WORLD)
    model = DistributedModelParallel(Model(kind), device=torch.device("cpu"), plan=plan, sharders=sharders)
    features = ["u", "i", "w"]
    ids = torch.tensor([3 + rank, 4, 5, 7, 8, 9])
    bags = model.module.bags(Kjt.from_lengths_sync(features, ids, torch.ones(6, dtype=torch.int64)))
    words = model.module.sequence(Kjt.from_lengths_sync(["t"], ids[:3] * 10, torch.ones(3, dtype=torch.int64)))
    (bags.values().sum() + words["t"].values().sum()).backward()
    state = {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=path)
    return {
        name: (tuple(value.size()), [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()])
        for group in (state["model"], *state["optim"]["state"].values())
        for name, value in group.items()
        if hasattr(value, "local_shards")
    }
