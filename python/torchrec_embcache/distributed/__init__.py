"""The collections under `DistributedModelParallel`: row-wise by bucket, and table-wise."""

from .collections import EmbCacheShardedEmbeddingBagCollection, EmbCacheShardedEmbeddingCollection
from .planning import offload_stats, planner_constraints
from .sharders import EmbCacheEmbeddingBagCollectionSharder, EmbCacheEmbeddingCollectionSharder

__all__ = [
    "EmbCacheEmbeddingBagCollectionSharder",
    "EmbCacheEmbeddingCollectionSharder",
    "EmbCacheShardedEmbeddingBagCollection",
    "EmbCacheShardedEmbeddingCollection",
    "offload_stats",
    "planner_constraints",
]
