"""A model's `stats()` as flat, typed samples, which all exporters and views share."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import nn

from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache.exceptions import EmbCacheError, InputError
from torchrec_embcache.model import cache_modules
from torchrec_embcache.model._names import display_name
from torchrec_embcache.stats import Histogram

__all__ = ["MetricValue", "Sample", "Sampler", "TableSample", "flatten_stats"]

#: The value of a metric: a number, a flag, a text, a histogram, or numbers by the values of an additional label.
MetricValue = int | float | bool | str | Histogram | Mapping[str, int]


@dataclass(frozen=True)
class TableSample:
    """Counters of one shard of a table at one time.

    - `module`: the path of its module in the model; "" if the model is the module.
    - `table`: its name.
    - `rank`: the rank of the process.
    - `values`: its counters by their path in `TableStats`, as "host.hits". Tiers and features that the table does not have are
      omitted.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> from torchrec_embcache.monitoring import Sampler
        >>> tiers = TierBudgets(host_bytes="1MiB")
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=optimizers.SGD(lr=0.1))
        >>> item(torch.tensor([7, 8])).sum().backward()
        >>> sample = Sampler(item).sample(step=1)
        >>> sample.tables[0].title, sample.tables[0].values["rows"]
        ('item', 2)
    """

    module: str
    table: str
    rank: int
    values: Mapping[str, MetricValue]

    @property
    def title(self) -> str:
        """Display name: "<module>/<table>", or only the table's name if the model is the module."""
        return display_name((self.module, self.table))


@dataclass(frozen=True)
class Sample:
    """Counters of the open tables of a model at one time.

    - `time`: seconds since 1970.
    - `step`: the step passed by the caller, or the largest step of the tables; None if there is no table.
    - `tables`: one entry for each open table of this process, in the order of the model.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> from torchrec_embcache.monitoring import Sampler
        >>> tiers = TierBudgets(host_bytes="1MiB")
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=optimizers.SGD(lr=0.1))
        >>> item(torch.tensor([7, 8])).sum().backward()
        >>> sample = Sampler(item).sample(step=1)
        >>> sample.step, len(sample.tables)
        (1, 1)
    """

    time: float
    step: int | None
    tables: tuple[TableSample, ...]


class Sampler:
    """Reads `stats()` of the open tables of a model.

    Between samples it holds no reference to the model or its tables. Tables that are closed, not opened yet or unusable are
    omitted, and samples are empty once the model is deleted.

    Args:
        model: any `nn.Module` with tables of this package. Its modules are collected at each sample, so it may be sharded later.

    Raises:
        InputError: `model` is not an `nn.Module`.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> from torchrec_embcache.monitoring import Sampler
        >>> item = EmbCacheEmbedding(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.1)
        ... )
        >>> item(torch.tensor([7, 8])).sum().backward()
        >>> (table,) = Sampler(item).sample().tables
        >>> table.title, table.values["host.rows"], table.values["row_wait"].count
        ('item', 2, 1)
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"model is a {type(model).__name__}: give an nn.Module")
        self._model = weakref.ref(model)

    def sample(self, step: int | None = None) -> Sample:
        """Returns the current counters. `step` is stored in the sample; default: the largest step of the tables."""
        now = time.time()
        tables = tuple(self._tables())
        steps = [table.values["step"] for table in tables]
        if step is None:
            step = max((value for value in steps if isinstance(value, int)), default=None)
        return Sample(now, step, tables)

    def _tables(self) -> Iterator[TableSample]:
        model = self._model()
        if model is None:
            return
        rank = all_ranks().rank
        for path, module in cache_modules(model).items():
            for name, table in module.tables.items():
                native = table._native_or_none
                if native is None or native.is_closed():
                    continue
                try:
                    stats = table.stats()
                except EmbCacheError:
                    continue  # closed concurrently, poisoned, or a table of a forked child's parent
                yield TableSample(path, name, rank, dict(flatten_stats(stats)))


def flatten_stats(stats: Any, prefix: str = "") -> Iterator[tuple[str, MetricValue]]:
    """Yields each value of a dataclass of counters with its path. Parts that are None are omitted."""
    for field in fields(stats):
        value, path = getattr(stats, field.name), f"{prefix}{field.name}"
        if value is None:
            continue
        if is_dataclass(value) and not isinstance(value, Histogram):
            yield from flatten_stats(value, f"{path}.")
        else:
            yield path, value
