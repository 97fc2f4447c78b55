"""Initializers of new rows.

Each initializer is a counter-based random function of (seed, table key, id, column). The initial weights of a row are therefore
independent of the order in which ids arrive and of the number of ranks, threads and evictions. Optimizer slots start at zero.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import numpy as np

from . import _native
from .exceptions import ConfigError

__all__ = ["Constant", "Initializer", "Linear", "Normal", "TruncatedNormal", "Uniform"]


@dataclass(frozen=True)
class Initializer(ABC):
    """Base class of the initializers. Raises `ConfigError` for an argument that is not a finite float32.

    Examples:
        >>> from torchrec_embcache import initializers
        >>> isinstance(initializers.Uniform(-0.01, 0.01), initializers.Initializer)
        True
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                number = float(value)
            except (TypeError, ValueError):
                number = math.nan
            if isinstance(value, str | bool) or not abs(number) <= float(np.finfo(np.float32).max):
                raise ConfigError(
                    f"{type(self).__name__}.{field.name}={value!r} is not a finite float32: give a number"
                )
            object.__setattr__(self, field.name, number)
            if field.name == "std" and number < 0:
                raise ConfigError(f"{type(self).__name__}.std={number!r} is negative: give 0 or more")

    @abstractmethod
    def native(self) -> _native.RowInitializer:
        """Returns the native form."""


@dataclass(frozen=True)
class Constant(Initializer):
    """Sets every weight to `value`.

    Examples:
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers
        >>> tiers = TierBudgets(host_bytes="1MiB")
        >>> table = CacheTable(name="item", dim=3, tiers=tiers, optimizer=None, initializer=initializers.Constant(0.25))
        >>> table.read_rows([7]).weights  # float32 [1, 3]: what the id 7 would be born with
        tensor([[0.2500, 0.2500, 0.2500]])
    """

    value: float = 0.0

    def native(self) -> _native.RowInitializer:
        """Returns the native form."""
        return _native.RowInitializer.constant(self.value)


@dataclass(frozen=True)
class Uniform(Initializer):
    """Draws uniformly from [low, high). Raises `ConfigError` if `low` is above `high`.

    Examples:
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers
        >>> tiers = TierBudgets(host_bytes="1MiB")
        >>> table = CacheTable(name="item", dim=3, tiers=tiers, optimizer=None, initializer=initializers.Uniform(-0.01, 0.01))
        >>> table.read_rows([7]).weights  # float32 [1, 3]: what the id 7 would be born with
        tensor([[ 0.0096, -0.0070,  0.0010]])
    """

    low: float = 0.0
    high: float = 1.0

    def native(self) -> _native.RowInitializer:
        """Returns the native form."""
        return _native.RowInitializer.uniform(self.low, self.high)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ConfigError(f"Uniform.low={self.low!r} is above Uniform.high={self.high!r}: swap them")


@dataclass(frozen=True)
class Normal(Initializer):
    """Draws from a normal distribution with `mean` and standard deviation `std`, which have the defaults of `torch.nn.Embedding`.

    Raises `ConfigError` if `std` is negative.

    Examples:
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers
        >>> tiers = TierBudgets(host_bytes="1MiB")
        >>> table = CacheTable(name="item", dim=3, tiers=tiers, optimizer=None, initializer=initializers.Normal(0.0, 0.01))
        >>> table.read_rows([7]).weights  # float32 [1, 3]: what the id 7 would be born with
        tensor([[ 0.0211, -0.0103,  0.0013]])
    """

    mean: float = 0.0
    std: float = 1.0

    def native(self) -> _native.RowInitializer:
        """Returns the native form."""
        return _native.RowInitializer.normal(self.mean, self.std)


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Draws from a normal distribution, redrawing values outside mean ± 2 std. `std` is the standard deviation before truncation.

    Raises `ConfigError` if `std` is negative.

    Examples:
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers
        >>> tiers = TierBudgets(host_bytes="1MiB")
        >>> table = CacheTable(name="item", dim=3, tiers=tiers, optimizer=None, initializer=initializers.TruncatedNormal(0.0, 0.01))
        >>> table.read_rows([7]).weights  # float32 [1, 3]: what the id 7 would be born with
        tensor([[ 0.0176, -0.0097,  0.0012]])
    """

    mean: float = 0.0
    std: float = 1.0

    def native(self) -> _native.RowInitializer:
        """Returns the native form."""
        return _native.RowInitializer.truncated_normal(self.mean, self.std)


@dataclass(frozen=True)
class Linear(Initializer):
    """The same ramp for every id, from `low` in the first column to `high` in the last. RecSDK's name is LINEAR.

    Examples:
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers
        >>> tiers = TierBudgets(host_bytes="1MiB")
        >>> table = CacheTable(name="item", dim=3, tiers=tiers, optimizer=None, initializer=initializers.Linear(0.0, 1.0))
        >>> table.read_rows([7]).weights  # float32 [1, 3]: what the id 7 would be born with
        tensor([[0.0000, 0.5000, 1.0000]])
    """

    low: float = 0.0
    high: float = 1.0

    def native(self) -> _native.RowInitializer:
        """Returns the native form."""
        return _native.RowInitializer.linear(self.low, self.high)
