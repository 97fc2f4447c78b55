"""A multi-level (device, host RAM, SSD) embedding cache for PyTorch and TorchRec.

Importing the package imports torch and numpy only. The names that need TorchRec are imported on first use.
"""

from importlib import import_module
from typing import Any

from . import exceptions, initializers, optimizers
from .config import TierBudgets
from .exceptions import EmbCacheError, EmbCacheWarning

__all__ = [
    "EmbCacheError",
    "EmbCacheWarning",
    "TierBudgets",
    "exceptions",
    "initializers",
    "optimizers",
]

# Public names by the module that has them: imported on first use, because they need TorchRec.
_LAZY: dict[str, str] = {}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
