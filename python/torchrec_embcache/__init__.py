"""A multi-level (device, host RAM, SSD) embedding cache for PyTorch and TorchRec.

Importing the package imports torch and numpy only. The names that need TorchRec, or torch's DCP, are
imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import exceptions, initializers, optimizers
from .cache import CacheTable, FoundRows, RowChunk, RowMetadata
from .config import TierBudgets
from .exceptions import EmbCacheError, EmbCacheWarning
from .metrics import SsdStats, TableStats, TierStats
from .nn import EmbCacheEmbedding, EmbCacheEmbeddingBag
from .whole_model import cache_modules, flush

if TYPE_CHECKING:
    from .dcp import EmbCacheStorageReader, EmbCacheStorageWriter
    from .modules import (
        EmbCacheEmbeddingBagCollection,
        EmbCacheEmbeddingBagConfig,
        EmbCacheEmbeddingCollection,
        EmbCacheEmbeddingConfig,
    )
    from .sharded import (
        EmbCacheEmbeddingBagCollectionSharder,
        EmbCacheEmbeddingCollectionSharder,
        EmbCacheShardedEmbeddingBagCollection,
        EmbCacheShardedEmbeddingCollection,
    )
    from .train_pipeline import EmbCacheTrainPipelineSparseDist

__all__ = [
    "CacheTable",
    "EmbCacheEmbedding",
    "EmbCacheEmbeddingBag",
    "EmbCacheEmbeddingBagCollection",
    "EmbCacheEmbeddingBagCollectionSharder",
    "EmbCacheEmbeddingBagConfig",
    "EmbCacheEmbeddingCollection",
    "EmbCacheEmbeddingCollectionSharder",
    "EmbCacheEmbeddingConfig",
    "EmbCacheError",
    "EmbCacheShardedEmbeddingBagCollection",
    "EmbCacheShardedEmbeddingCollection",
    "EmbCacheStorageReader",
    "EmbCacheStorageWriter",
    "EmbCacheTrainPipelineSparseDist",
    "EmbCacheWarning",
    "FoundRows",
    "RowChunk",
    "RowMetadata",
    "SsdStats",
    "TableStats",
    "TierBudgets",
    "TierStats",
    "cache_modules",
    "exceptions",
    "flush",
    "initializers",
    "optimizers",
]

# Public names by the module that has them: imported on first use, because they need TorchRec or DCP.
_LAZY: dict[str, str] = {
    "EmbCacheEmbeddingBagCollection": "modules",
    "EmbCacheEmbeddingBagCollectionSharder": "sharded",
    "EmbCacheEmbeddingBagConfig": "modules",
    "EmbCacheEmbeddingCollection": "modules",
    "EmbCacheEmbeddingCollectionSharder": "sharded",
    "EmbCacheEmbeddingConfig": "modules",
    "EmbCacheShardedEmbeddingBagCollection": "sharded",
    "EmbCacheShardedEmbeddingCollection": "sharded",
    "EmbCacheStorageReader": "dcp",
    "EmbCacheStorageWriter": "dcp",
    "EmbCacheTrainPipelineSparseDist": "train_pipeline",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
