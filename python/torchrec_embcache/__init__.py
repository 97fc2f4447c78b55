"""A multi-level (device, host RAM, SSD) embedding cache for PyTorch and TorchRec.

Importing the package imports only torch and numpy. Names that need TorchRec or torch.distributed.checkpoint (DCP) are imported on
first use. Without TorchRec, `__all__` omits the names that need it, so that `from torchrec_embcache import *` works.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from . import admission, eviction, exceptions, initializers, optimizers
from ._native import __version__ as __version__
from ._ssd.autoflush import close_all
from .config import TierBudgets
from .exceptions import EmbCacheError, EmbCacheWarning
from .model import cache_modules, flush
from .model._evict import evict
from .model._set_time import set_time
from .nn import EmbCacheEmbedding, EmbCacheEmbeddingBag
from .stats import AdmissionStats, EvictionStats, Histogram, SsdStats, TableStats, TierStats
from .table.cache_table import CacheTable, EvictedRows, FoundRows, RowChunk, RowMetadata, TableOptions
from .table.miss_ratio_curve import MissRatioCurve

if TYPE_CHECKING:
    from .checkpoint import Saver
    from .checkpoint.dcp import EmbCacheStorageReader, EmbCacheStorageWriter
    from .distributed import (
        EmbCacheEmbeddingBagCollectionSharder,
        EmbCacheEmbeddingCollectionSharder,
        EmbCacheShardedEmbeddingBagCollection,
        EmbCacheShardedEmbeddingCollection,
    )
    from .distributed.train_pipeline import EmbCacheTrainPipelineSparseDist
    from .model._state_dict import TableState
    from .modules import (
        EmbCacheEmbeddingBagCollection,
        EmbCacheEmbeddingBagConfig,
        EmbCacheEmbeddingCollection,
        EmbCacheEmbeddingConfig,
    )

__all__ = [
    "AdmissionStats",
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
    "EvictedRows",
    "EvictionStats",
    "FoundRows",
    "Histogram",
    "MissRatioCurve",
    "RowChunk",
    "RowMetadata",
    "Saver",
    "SsdStats",
    "TableOptions",
    "TableState",
    "TableStats",
    "TierBudgets",
    "TierStats",
    "admission",
    "cache_modules",
    "close_all",
    "evict",
    "eviction",
    "exceptions",
    "flush",
    "initializers",
    "optimizers",
    "set_time",
]

# Maps public names to their modules, which are imported on first use because they need TorchRec, DCP or torch.distributed.
_LAZY: dict[str, str] = {
    "EmbCacheEmbeddingBagCollection": "modules",
    "EmbCacheEmbeddingBagCollectionSharder": "distributed",
    "EmbCacheEmbeddingBagConfig": "modules",
    "EmbCacheEmbeddingCollection": "modules",
    "EmbCacheEmbeddingCollectionSharder": "distributed",
    "EmbCacheEmbeddingConfig": "modules",
    "EmbCacheShardedEmbeddingBagCollection": "distributed",
    "EmbCacheShardedEmbeddingCollection": "distributed",
    "EmbCacheStorageReader": "checkpoint.dcp",
    "EmbCacheStorageWriter": "checkpoint.dcp",
    "EmbCacheTrainPipelineSparseDist": "distributed.train_pipeline",
    "Saver": "checkpoint",
    "TableState": "model._state_dict",
}
_NEED_TORCHREC = {"modules", "distributed", "distributed.train_pipeline"}

# `from torchrec_embcache import *` gets every name in `__all__`.
if not all(map(find_spec, ("torchrec", "fbgemm_gpu"))):
    __all__ = [name for name in __all__ if _LAZY.get(name) not in _NEED_TORCHREC]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("torchrec", "fbgemm_gpu"):
            raise
        raise ModuleNotFoundError(
            f"{name} needs TorchRec, and there is no module {error.name!r}: pip install 'torchrec-embcache[torchrec]'; without an "
            "NVIDIA driver, see docs/install.md",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
