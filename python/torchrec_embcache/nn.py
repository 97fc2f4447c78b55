"""Drop-ins for `torch.nn.Embedding` and `torch.nn.EmbeddingBag` over a table larger than memory; torch and numpy only.

Shapes: N ids, B bags, D the embedding's width.
"""

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .cache import CacheTable, FoundRows, Ids, RowExport, RowMetadata, Values
from .collective import world_size
from .config import DEFAULT_TOTAL_NUM_BUCKETS, OnFull, Policy, TierBudgets, Unseen, check_choice, check_int
from .exceptions import ConfigError, EmbCacheWarning, InputError, UnsupportedError
from .initializers import Initializer, Uniform
from .lifetime import FlushSchedule
from .lookup import LookupGroup, check_offsets
from .metrics import TableStats
from .optimizers import SGD, FusedOptimizer, OptimizerSpec
from .rows import check_float32, check_plain, ids_array
from .state_dicts import check_rows_are_here, note_rows
from .tracing import as_one_call
from .whole_model import CacheModule

__all__ = ["EmbCacheEmbedding", "EmbCacheEmbeddingBag"]

I64 = NDArray[np.int64]
Mode = Literal["sum", "mean", "max"]


class Settings(TypedDict, total=False):
    """Settings of the modules that `from_pretrained` passes on. `mode` and `include_last_offset` are those of bags."""

    mode: Mode
    include_last_offset: bool
    initializer: Initializer | None
    seed: int
    padding_idx: int | None
    policy: Policy
    on_full: OnFull
    unseen: Unseen
    total_num_buckets: int
    device: torch.device | str


class _ByName:
    """Refuses the arguments of torch's classes that have no place here, with the call to write instead."""

    def __new__(cls, *positional: object, **settings: object) -> Self:
        """Any settings by name. Raises `ConfigError` for positional ones and for `num_embeddings`, as `torch.nn` takes them."""
        if not positional and "num_embeddings" not in settings:
            return super().__new__(cls)
        given = [*map(repr, positional), *(f"{name}={value!r}" for name, value in settings.items())]
        width = settings.get("embedding_dim", positional[1] if len(positional) > 1 else 64)
        raise ConfigError(
            f"{cls.__name__}({', '.join(given)}): settings are given by name, and there is no num_embeddings, because every "
            f"64-bit id has a row and budgets in bytes say how many stay in memory. Write {cls.__name__}(name='item', "
            f"embedding_dim={width!r}, tiers=TierBudgets(host_bytes='1GiB'), optimizer=optimizers.RowWiseAdagrad(lr=0.02))"
        )


class _EmbeddingBase(CacheModule, nn.Module, _ByName):
    """One table and its lookups. `weight`, empty [0, D], is what `parameters()` shows: freezing it freezes the table."""

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
        policy: Policy = "s3fifo",
        on_full: OnFull = "error",
        unseen: Unseen = "initial",
        total_num_buckets: int = DEFAULT_TOTAL_NUM_BUCKETS,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_norm: None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        replicated: bool = False,
    ) -> None:
        super().__init__()
        for field, value in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
            if value:
                raise UnsupportedError(
                    f"{field}={value!r}: the update is fused into the backward, which has no such thing; leave it out"
                )
        if dtype not in (None, torch.float32):
            raise UnsupportedError(f"dtype={dtype!r}: rows are float32; leave it out")
        del norm_type  # means nothing without max_norm
        if optimizer is None:
            raise ConfigError(
                "optimizer=None: the update is fused into the backward; give one of torchrec_embcache.optimizers"
            )
        self.embedding_dim = check_int("embedding_dim", embedding_dim, 1, 65_536)
        self.padding_idx = None
        if padding_idx is not None:
            self.padding_idx = check_int("padding_idx", padding_idx, -(1 << 63), (1 << 63) - 1)
        bound = 1 / math.sqrt(self.embedding_dim)
        self.table = CacheTable(
            name=name,
            dim=self.embedding_dim,
            tiers=tiers,
            initializer=initializer if initializer is not None else Uniform(-bound, bound),
            optimizer=optimizer,
            seed=seed,
            policy=policy,
            on_full=on_full,
            total_num_buckets=total_num_buckets,
            device=device,
        )
        self.weight = nn.Parameter(torch.empty(0, self.embedding_dim, device=self.table.device))
        self.optimizer = FusedOptimizer([self.weight], [optimizer])
        self._group = _group_of(self.table, self.optimizer, unseen)
        self._warned_state_dict = False
        self._replicated = replicated
        self._flushes = FlushSchedule([tiers.flush_interval], collective=False)
        self.table.open()

    @property
    def tables(self) -> Mapping[str, CacheTable]:
        """The one table, by its name."""
        return {self.table.name: self.table}

    def hyperparameters(self, table: str) -> dict[str, Any]:
        """The numbers of the one table's `param_groups` entry."""
        del table
        return dict(self.optimizer.param_groups[0])

    def _begin_forward(self) -> bool:
        """Whether this forward trains; what is due before one that does."""
        if not self._trains:
            return False
        if not self._replicated and (ranks := world_size()) > 1:
            self._replicated = True
            warnings.warn(
                f"table {self.table.name!r} trains on each of {ranks} ranks by itself: every rank has rows of its own, which "
                "nothing averages, DistributedDataParallel neither; to share one table use an EmbCacheEmbeddingBagCollection "
                "with its sharder (DistributedModelParallel(..., sharders=[...])), or say replicated=True if this is meant",
                EmbCacheWarning,
                stacklevel=3,
            )
        self._flushes.before_forward()
        return True

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled() and self.weight.requires_grad

    def __len__(self) -> int:
        """Rows in all tiers."""
        return len(self.table)

    def __bool__(self) -> bool:
        """True, with no rows too: modules are asked so whether they are there."""
        return True

    def stats(self) -> TableStats:
        """See `CacheTable.stats`."""
        return self.table.stats()

    def export(self, chunk_rows: int = 65_536) -> RowExport:
        """See `CacheTable.export`."""
        return self.table.export(chunk_rows)

    def read_rows(self, ids: Ids) -> FoundRows:
        """See `CacheTable.read_rows`."""
        return self.table.read_rows(ids)

    def import_rows(
        self,
        ids: Ids,
        weights: Values,
        slots: Mapping[str, Values] | None = None,
        metadata: RowMetadata | None = None,
    ) -> None:
        """See `CacheTable.import_rows`."""
        self.table.import_rows(ids, weights, slots, metadata)

    @classmethod
    def from_pretrained(
        cls,
        ids: Ids,
        weights: Values | None = None,
        *,
        name: str,
        tiers: TierBudgets,
        optimizer: OptimizerSpec | None = None,
        freeze: bool = True,
        **settings: Unpack[Settings],
    ) -> Self:
        """A module with rows that were trained elsewhere: `ids` [n] distinct 64-bit integers, `weights` [n, D].

        Tensors, numpy arrays and lists are taken; the width is that of `weights`. As in torch the rows are frozen unless
        `freeze=False` is said, which needs an `optimizer`. `settings` are those of the class. Raises as `import_rows` does.

        For example `EmbCacheEmbedding.from_pretrained([7, 9], vectors, name="item", tiers=TierBudgets(host_bytes="1MiB"))`.
        """
        if weights is None:
            raise InputError(
                f"from_pretrained has no weights: rows have ids here, so write {cls.__name__}.from_pretrained(ids, weights, ...); "
                "torch.arange(len(weights)) numbers them as torch.nn does"
            )
        if optimizer is None and not freeze:
            raise ConfigError("freeze=False without an optimizer: give one of torchrec_embcache.optimizers")
        try:
            shape = np.shape(weights)
        except ValueError as cause:
            raise InputError(f"weights is no array of numbers: {cause}") from cause
        if len(shape) != 2:
            raise InputError(f"weights has shape {list(shape)}: give [n, D], a row for each id")
        given: dict[str, Any] = {"optimizer": optimizer if optimizer is not None else SGD(), **settings}
        made = cls(name=name, embedding_dim=shape[1], tiers=tiers, **given)
        try:
            made.import_rows(ids, weights)
        except BaseException:
            made.close()
            raise
        made.weight.requires_grad_(not freeze)
        return made

    def remove_rows(self, ids: Ids) -> int:
        """See `CacheTable.remove_rows`."""
        return self.table.remove_rows(ids)

    def flush(self) -> None:
        """See `CacheTable.flush`."""
        self.table.flush()

    def close(self) -> None:
        """Drop what was prefetched, then as `CacheTable.close`."""
        self._group.drop_prefetched()
        self.table.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group.drop_prefetched()
        self.table.__exit__(kind, error, trace)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        note_rows(destination, {f"{prefix}weight": self.table})
        if not self._warned_state_dict and self.table.is_open and len(self.table):
            self._warned_state_dict = True
            warnings.warn(
                f"state_dict() does not hold the {len(self.table)} rows of table {self.table.name!r}: save them with "
                "torchrec_embcache.saver.Saver, or export()",
                EmbCacheWarning,
                stacklevel=2,
            )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *lists: Any) -> None:
        check_rows_are_here(state_dict, {f"{prefix}weight": self.table}, strict=strict)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        probe = fn(torch.empty(0, device=self.weight.device))
        if probe.dtype != torch.float32:
            raise UnsupportedError(f"table {self.table.name!r} cannot become {probe.dtype}: rows are float32")
        if probe.device != self.weight.device:
            raise UnsupportedError(
                f"table {self.table.name!r} cannot move to {probe.device}: make the module with device={str(probe.device)!r}"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A module of its own with the same rows, slots, step and numbers. `StateError` where there is an SSD tier."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            if name != "_group":
                made.__dict__[name] = copy.deepcopy(value, memo)
        made.__dict__["_group"] = _group_of(made.table, made.optimizer, self._group.unseen)
        return made

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return self.table.describe(self.hyperparameters(self.table.name))


class EmbCacheEmbedding(_EmbeddingBase):
    """`torch.nn.Embedding` without `num_embeddings`: any 64-bit id has a row, born when first trained.

    `loss.backward()` updates the rows of the batch with `optimizer`. `padding_idx` names an id that reads zeros and is not trained.
    With `eval()`, `torch.no_grad()` or a frozen `weight`, an unseen id reads its initial value (`unseen="zeros"`: zeros) and
    nothing is inserted.

    Where `torch.distributed` has several ranks, each trains a table of its own, and a warning says so: `replicated=True` says that
    this is meant. To share one table, use a collection of `torchrec_embcache` with its sharder.
    """

    def forward(self, input: Tensor) -> Tensor:
        """`input`: int64 or int32, any shape; gives float32 of that shape and D."""
        traced = as_one_call(self, input)
        if traced is not None:
            return cast(Tensor, traced)
        ids, present = self._ids(input)
        out = self._group.sequence(ids, _splits(ids), train=self._begin_forward(), anchor=self.weight)
        if present is not None:
            mask = torch.from_numpy(present).to(out.device)
            out = out.new_zeros(len(present), self.embedding_dim).masked_scatter(mask[:, None], out)
        return out.view(*input.shape, self.embedding_dim)

    def prefetch(self, input: Tensor) -> bool:
        """Fetch the rows of a later `forward(input)`, in the forwards' order; False when the budget ended before all of them."""
        ids, _ = self._ids(input)
        return self._group.prefetch(ids, _splits(ids), train=self._trains)

    def _ids(self, input: Tensor) -> tuple[I64, NDArray[np.bool_] | None]:
        """Ids [n] that are not padding, and where they are in the flat input [N]; None: everywhere."""
        ids = ids_array(input, "input", self.table.device)
        if self.padding_idx is None:
            return ids, None
        present = ids != self.padding_idx
        return ids[present], present


class EmbCacheEmbeddingBag(_EmbeddingBase):
    """`torch.nn.EmbeddingBag` without `num_embeddings`, modes "sum" and "mean"; see `EmbCacheEmbedding`.

    Ids equal to `padding_idx` are left out of their bags, of the mean's divisor too.
    """

    def __init__(
        self,
        *,
        name: str,
        embedding_dim: int,
        tiers: TierBudgets,
        optimizer: OptimizerSpec,
        mode: Mode = "mean",
        include_last_offset: bool = False,
        initializer: Initializer | None = None,
        seed: int = 0,
        padding_idx: int | None = None,
        policy: Policy = "s3fifo",
        on_full: OnFull = "error",
        unseen: Unseen = "initial",
        total_num_buckets: int = DEFAULT_TOTAL_NUM_BUCKETS,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_norm: None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        replicated: bool = False,
    ) -> None:
        """Settings but `mode` and `include_last_offset` are those of `EmbCacheEmbedding`."""
        if mode == "max":
            raise UnsupportedError("mode='max': the fused backward sums; use mode='sum' or 'mean'")
        check_choice("mode", mode, Literal["sum", "mean"])
        super().__init__(
            name=name,
            embedding_dim=embedding_dim,
            tiers=tiers,
            optimizer=optimizer,
            initializer=initializer,
            seed=seed,
            padding_idx=padding_idx,
            policy=policy,
            on_full=on_full,
            unseen=unseen,
            total_num_buckets=total_num_buckets,
            device=device,
            dtype=dtype,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            replicated=replicated,
        )
        self.mode: Mode = mode
        self.include_last_offset = include_last_offset

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """[B, D]. `input`: int64 or int32 ids, [N] with `offsets` [B] (or [B + 1] with `include_last_offset`), or [B, L] without.

        `per_sample_weights`: float32, of the input's shape, mode "sum" only; gets a gradient, from the rows before the update.
        As in torch, the backward raises `RuntimeError` where `offsets` or `per_sample_weights` were changed in place since.
        """
        traced = as_one_call(self, input, offsets, per_sample_weights)
        if traced is not None:
            return cast(Tensor, traced)
        ids, bounds, present = self._bags(input, offsets)
        weights = None
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise UnsupportedError(f"per_sample_weights with mode={self.mode!r}: as in torch, use mode='sum'")
            check_float32("per_sample_weights", per_sample_weights, tuple(input.shape))
            if per_sample_weights.device != self.table.device:
                raise InputError(
                    f"per_sample_weights is on {per_sample_weights.device} and the table on {self.table.device}: move one of them"
                )
            weights = per_sample_weights.reshape(-1)
            if present is not None:
                weights = weights[torch.from_numpy(present).to(weights.device)]
        lent = [offsets] if isinstance(offsets, Tensor) else []
        return self._group.pooled(
            ids, bounds, [self.mode == "mean"], weights, train=self._begin_forward(), anchor=self.weight, lent=lent
        )

    def prefetch(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> bool:
        """Fetch the rows of a later forward of these arguments; see `EmbCacheEmbedding.prefetch`."""
        del per_sample_weights  # changes no row that is needed
        ids, _, _ = self._bags(input, offsets)
        return self._group.prefetch(ids, _splits(ids), train=self._trains)

    def _bags(self, input: Tensor, offsets: object) -> tuple[I64, I64, NDArray[np.bool_] | None]:
        """Ids [n] that are not padding, where each bag starts in them [B + 1], and which of the input [N] they are; None: all."""
        ids = ids_array(input, "input", self.table.device)
        if input.dim() == 2:
            if offsets is not None:
                raise InputError("offsets with a 2-D input: each row is a bag already; leave offsets out")
            bounds = np.arange(input.shape[0] + 1, dtype=np.int64) * input.shape[1]
        elif input.dim() == 1:
            if offsets is None:
                raise InputError("offsets=None with a 1-D input: give the position where each bag starts")
            if isinstance(offsets, Tensor):
                check_plain("offsets", offsets)
            if isinstance(offsets, Tensor) and offsets.dim() != 1:
                raise InputError(
                    f"offsets has shape {list(offsets.shape)}: give [B], or [B + 1] with include_last_offset"
                )
            bounds = ids_array(offsets, "offsets", self.table.device)
            if not self.include_last_offset:
                bounds = np.append(bounds, len(ids))
        else:
            raise InputError(f"input has shape {list(input.shape)}: give [N] with offsets, or [B, L]")
        if len(bounds) == 1 and len(ids) and not self.include_last_offset and input.dim() == 1:
            raise InputError(f"offsets is empty and there are {len(ids)} ids: give the position where each bag starts")
        check_offsets(bounds, len(ids), 1)
        if self.padding_idx is None:
            return ids, bounds, None
        present = ids != self.padding_idx
        return ids[present], np.concatenate([[0], np.cumsum(present)])[bounds], present


def _group_of(table: CacheTable, optimizer: FusedOptimizer, unseen: Unseen) -> LookupGroup:
    """The lookup of a module's one table. It holds no reference to the module: without a cycle, deleting frees at once."""
    return LookupGroup([table], [0], lambda: optimizer.param_groups, unseen=unseen)


def _splits(ids: I64) -> I64:
    return np.array([0, len(ids)], np.int64)
