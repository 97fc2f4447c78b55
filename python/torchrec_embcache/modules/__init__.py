"""TorchRec's collections and configs over tables larger than memory, unsharded; `distributed` has the sharded ones."""

from .collections import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection
from .configs import EmbCacheEmbeddingBagConfig, EmbCacheEmbeddingConfig

__all__ = [
    "EmbCacheEmbeddingBagCollection",
    "EmbCacheEmbeddingBagConfig",
    "EmbCacheEmbeddingCollection",
    "EmbCacheEmbeddingConfig",
]
