"""TorchRec's collections and configs over tables larger than memory, unsharded; `sharded` has them sharded."""

from .collections import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection
from .configs import EmbCacheEmbeddingBagConfig, EmbCacheEmbeddingConfig

__all__ = [
    "EmbCacheEmbeddingBagCollection",
    "EmbCacheEmbeddingBagConfig",
    "EmbCacheEmbeddingCollection",
    "EmbCacheEmbeddingConfig",
]
