"""One table as an `nn.Module`: the base class of `EmbCacheEmbedding` and `EmbCacheEmbeddingBag`.

Shapes: n rows, D the table's width.
"""

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchrec_embcache._closing import CloseOnExitMixin
from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache._lookup.group import LookupGroup
from torchrec_embcache._lookup.prefetch import IdBatch
from torchrec_embcache._ssd.autoflush import FlushSchedule
from torchrec_embcache.config import DEFAULT_TOTAL_NUM_BUCKETS, CachePolicy, TierBudgets, check_int
from torchrec_embcache.exceptions import ConfigError, EmbCacheWarning, InputError, UnsupportedError
from torchrec_embcache.initializers import Initializer, Uniform
from torchrec_embcache.model import CacheModule
from torchrec_embcache.optimizers import SGD, FusedOptimizer, OptimizerSpec, check_one_optimizer
from torchrec_embcache.stats import TableStats
from torchrec_embcache.table._row_summary import mark_as_placeholder
from torchrec_embcache.table._settings import TableOptionFields, TableOptions, list_options
from torchrec_embcache.table.cache_table import (
    CacheTable,
    EvictedRows,
    FoundRows,
    IdsLike,
    RowExport,
    RowMetadata,
    ValuesLike,
)
from torchrec_embcache.table.miss_ratio_curve import MissRatioCurve
from torchrec_embcache.table.rows import clicks_array

__all__ = ["ModuleOptions", "TableModule"]

I64 = NDArray[np.int64]


class _KeywordOnlyMixin:
    """Rejects calls that `torch.nn` supports and this package does not, with the equivalent call in the error."""

    # Editors and type checkers read the arguments from `__init__` and `TableOptions`.
    if not TYPE_CHECKING:

        def __new__(cls, *positional: object, **settings: object) -> Self:
            """Raises `ConfigError` for positional arguments and for `num_embeddings`."""
            if not positional and "num_embeddings" not in settings:
                return super().__new__(cls)
            given = [*map(repr, positional), *(f"{name}={value!r}" for name, value in settings.items())]
            width = settings.get("embedding_dim", positional[1] if len(positional) > 1 else 64)
            raise ConfigError(
                f"{cls.__name__}({', '.join(given)}): settings are given by name, and there is no num_embeddings: every 64-bit id "
                f"has a row, and budgets in bytes say how many rows stay in memory. Write {cls.__name__}(name='item', "
                f"embedding_dim={width!r}, tiers=TierBudgets(host_bytes='1GiB'), optimizer=optimizers.RowWiseAdagrad(lr=0.02))"
            )


def _check_torch_arguments(
    *, dtype: torch.dtype | None, max_norm: None, scale_grad_by_freq: bool, sparse: bool
) -> None:
    """Raises `UnsupportedError` for values of `torch.nn`'s arguments that this package does not support."""
    for field, value in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if value:
            raise UnsupportedError(
                f"{field}={value!r}: the update is fused into the backward, which does not support it; leave it out"
            )
    if dtype not in (None, torch.float32):
        raise UnsupportedError(f"dtype={dtype!r}: rows are float32; leave it out")


class ModuleOptions(TableOptions, total=False):
    """The optional arguments of `TableModule`."""

    initializer: Initializer | None
    seed: int
    padding_idx: int | None
    total_num_buckets: int
    device: torch.device | str
    dtype: torch.dtype | None
    max_norm: None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool
    replicated: bool


class TableModule(CacheModule, CloseOnExitMixin, nn.Module, _KeywordOnlyMixin):
    """A module with one table and the lookups in it.

    `weight`, a parameter of shape [0, D], is returned by `parameters()`. Freezing it freezes the table.
    """

    @list_options(TableOptionFields)
    def __init__(
        self,
        *,
        name: str,
        embedding_dim: int,
        tiers: TierBudgets,
        optimizer: OptimizerSpec,
        initializer: Initializer | None = None,
        seed: int = 0,
        padding_idx: int | None = None,
        total_num_buckets: int = DEFAULT_TOTAL_NUM_BUCKETS,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_norm: None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        replicated: bool = False,
        **options: Unpack[TableOptions],
    ) -> None:
        _check_torch_arguments(dtype=dtype, max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        del norm_type  # without effect unless max_norm is set
        super().__init__()
        if optimizer is None:
            raise ConfigError(
                "optimizer=None: the update is fused into the backward; give one of torchrec_embcache.optimizers"
            )
        self.embedding_dim: int = check_int("embedding_dim", embedding_dim, 1, 65_536)
        self.padding_idx: int | None = None
        if padding_idx is not None:
            self.padding_idx = check_int("padding_idx", padding_idx, -(1 << 63), (1 << 63) - 1)
        bound = 1 / math.sqrt(self.embedding_dim)
        self.table: CacheTable = CacheTable(
            name=name,
            dim=self.embedding_dim,
            tiers=tiers,
            initializer=initializer if initializer is not None else Uniform(-bound, bound),
            optimizer=optimizer,
            seed=seed,
            total_num_buckets=total_num_buckets,
            device=device,
            **options,
        )
        self.weight: nn.Parameter = mark_as_placeholder(
            nn.Parameter(torch.empty(0, self.embedding_dim, dtype=torch.float32, device=self.table.device))
        )
        self.optimizer: FusedOptimizer = FusedOptimizer([self.weight], [optimizer])
        self._group = _group_of(self.table, self.optimizer)
        self._replicated = replicated
        self._flush_schedule = FlushSchedule([tiers.flush_interval], collective=False)
        self.table.open()

    @classmethod
    def _from_pretrained(
        cls, ids: IdsLike, weights: ValuesLike | None, optimizer: OptimizerSpec | None, *, freeze: bool, **settings: Any
    ) -> Self:
        """Creates a module with pretrained rows. Raises `InputError` if `weights` are not [n, D].

        Raises `ConfigError` if the module is to train without an optimizer. On an error of the import the module is closed without
        a flush.
        """
        width = _width_of(cls, weights)
        if optimizer is None and not freeze:
            raise ConfigError("freeze=False without an optimizer: give one of torchrec_embcache.optimizers")
        made = cls(embedding_dim=width, optimizer=optimizer if optimizer is not None else SGD(), **settings)
        try:
            made.import_rows(ids, cast(ValuesLike, weights))
        except BaseException:
            made.table._close_unflushed()
            raise
        made.weight.requires_grad_(not freeze)
        return made

    @property
    def tables(self) -> Mapping[str, CacheTable]:
        """The single table, by its name."""
        return {self.table.name: self.table}

    def param_group(self, table: str) -> dict[str, Any]:
        """Returns the optimizer's single entry of `param_groups`."""
        del table
        return self.optimizer.param_groups[0]

    def _begin_forward(self) -> bool:
        """Returns True if this forward trains. Then it also runs a due flush, and warns if there are several ranks."""
        if not self._trains:
            return False
        check_one_optimizer(self.table.name, self.weight, other_optimizers=1)
        if not self._replicated and (ranks := all_ranks().world_size) > 1:
            self._replicated = True
            warnings.warn(
                f"table {self.table.name!r} trains on each of {ranks} ranks by itself: every rank has rows of its own, which "
                "nothing averages, DistributedDataParallel neither. To share one table use an EmbCacheEmbeddingBagCollection "
                "with its sharder (DistributedModelParallel(..., sharders=[...])), or say replicated=True if this is meant",
                EmbCacheWarning,
                stacklevel=3,
            )
        self._flush_schedule.flush_if_due()
        return True

    def _id_batch(self, ids: I64, clicks: Tensor | None) -> tuple[IdBatch, NDArray[np.bool_] | None]:
        """Returns the ids [n] of one feature without padding, and a mask of them in `ids` [N], which is None without a padding id.

        Raises `InputError` if there are `clicks` and admission counts none, and as `clicks_array`.
        """
        counted = None
        if clicks is not None:
            if not self.table._settings.lifecycle.counts_clicks:
                raise InputError(
                    f"clicks of table {self.table.name!r}, which counts none: leave them out, or give it admission=ShowClick(...)"
                )
            counted = clicks_array(clicks, "clicks", len(ids))
        present = None if self.padding_idx is None else ids != self.padding_idx
        if present is not None:
            ids, counted = ids[present], None if counted is None else counted[present]
        return IdBatch(ids, np.array([0, len(ids)], np.int64), counted), present

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled() and self.weight.requires_grad

    def __len__(self) -> int:
        """Number of rows in all tiers."""
        return len(self.table)

    def __bool__(self) -> bool:
        """Returns True, even for a module without rows: code uses `if module` to test for None."""
        return True

    def stats(self) -> TableStats:
        """The counters of the table and of its tiers; see `CacheTable.stats`."""
        return self.table.stats()

    def miss_ratio_curve(self, policy: CachePolicy | None = None, *, reset: bool = False) -> MissRatioCurve:
        """Returns the miss ratios of other cache sizes; see `CacheTable.miss_ratio_curve`."""
        return self.table.miss_ratio_curve(policy, reset=reset)

    def export(self, chunk_rows: int = 65_536) -> RowExport:
        """Returns the rows of all tiers, in chunks of at most `chunk_rows`; see `CacheTable.export`."""
        return self.table.export(chunk_rows)

    def read_rows(self, ids: IdsLike) -> FoundRows:
        """Returns the rows of `ids` [n], in that order; see `CacheTable.read_rows`."""
        return self.table.read_rows(ids)

    def import_rows(
        self,
        ids: IdsLike,
        weights: ValuesLike,
        slots: Mapping[str, ValuesLike] | None = None,
        metadata: RowMetadata | None = None,
    ) -> None:
        """Inserts or overwrites rows of `ids` [n] with `weights` [n, D]; see `CacheTable.import_rows`."""
        self.table.import_rows(ids, weights, slots, metadata)

    def remove_rows(self, ids: IdsLike) -> int:
        """Removes the rows of `ids` [n]. Returns the number of rows removed; see `CacheTable.remove_rows`."""
        return self.table.remove_rows(ids)

    def evict(self) -> None:
        """Runs one eviction pass, which removes the rows that match `eviction`; see `CacheTable.evict`."""
        self.table.evict()

    def set_time(self, seconds: float) -> None:
        """Sets the event time used by `Ttl(seconds=...)` until the next call; see `torchrec_embcache.set_time`."""
        self.table.set_time(seconds)

    def drain_evicted(self) -> Iterator[EvictedRows]:
        """Yields the evicted rows that were not drained yet. Requires `on_evict="keep"`; see `CacheTable.drain_evicted`."""
        return self.table.drain_evicted()

    def flush(self) -> None:
        """Writes every dirty row to the SSD tier and commits a state; see `CacheTable.flush`."""
        self.table.flush()

    def close(self) -> None:
        """Drops prefetched batches, then flushes and closes the table; see `CacheTable.close`."""
        self._group.drop_prefetched()
        self.table.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns an independent module with equal rows, slots, step and hyperparameters. Raises `StateError` with an SSD tier."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            if name != "_group":
                made.__dict__[name] = copy.deepcopy(value, memo)
        made.__dict__["_group"] = _group_of(made.table, made.optimizer)
        return made

    def extra_repr(self) -> str:
        """Returns the text of `print(module)`: settings, rows, budgets and the optimizer's learning rate."""
        return self.table.describe(self.hyperparameters(self.table.name))


def _width_of(kind: type[TableModule], weights: ValuesLike | None) -> int:
    """Returns D of the rows `weights` [n, D] passed to `from_pretrained` of `kind`. Raises `InputError` for other shapes."""
    if weights is None:
        raise InputError(
            f"from_pretrained has no weights: rows have ids here, so write {kind.__name__}.from_pretrained(ids, weights, ...); "
            "torch.arange(len(weights)) numbers them as torch.nn does"
        )
    try:
        shape = np.shape(weights)
    except ValueError as cause:
        raise InputError(f"weights is not an array of numbers: {cause}") from cause
    if len(shape) != 2:
        raise InputError(f"weights has shape {list(shape)}: give [n, D], a row for each id")
    return int(shape[1])


def _group_of(table: CacheTable, optimizer: FusedOptimizer) -> LookupGroup:
    """Creates the lookup of a module's table. It has no reference to the module, to avoid a reference cycle."""
    return LookupGroup([table], [0], lambda: optimizer.param_groups)
