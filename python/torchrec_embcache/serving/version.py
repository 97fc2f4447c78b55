"""A served checkpoint, its tables, and their rows.

Shapes: N ids, B bags, D a table's width.
"""

from __future__ import annotations

import copy
import threading
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache import _native
from torchrec_embcache._closing import CloseOnExitMixin
from torchrec_embcache._lookup.offsets import check_offsets
from torchrec_embcache.config import check_choice
from torchrec_embcache.exceptions import ConfigError, InputError, StateError
from torchrec_embcache.table.rows import IdsLike, as_array, check_float32, contiguous, ids_array

__all__ = ["Pooling", "Rows", "Table", "Version", "current_version"]

I64 = NDArray[np.int64]
Pooling = Literal["sum", "mean"]

_CPU = torch.device("cpu")
# The dtype of stored rows by the precision of the checkpoint. An int8 row consists of its codes, its scale and its bias.
_STORED_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8}
# The versions of the `with` statements that this task or thread is in, innermost last.
_PINNED: ContextVar[tuple[Version, ...]] = ContextVar("pinned versions", default=())


class Rows(Tensor):
    """The rows of N ids: a tensor [N, D] on the CPU, and `found`, bool [N], True for each id that has a row.

    Rows in their stored int8 form are [N, D + 4].

    If `found` is False, the row is the value read for missing ids. Results that torch computes from rows are plain tensors.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers, serving
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> report = Saver(0).save(item, "ckpt")
        >>> with serving.open("ckpt", missing="zeros") as tables, tables.pin() as version:
        ...     rows = version["item"].lookup([7, 8])
        >>> rows, rows.found
        (Rows([[1., 2.],
              [0., 0.]]), tensor([ True, False]))
        >>> rows @ torch.ones(2)
        tensor([3., 0.])
    """

    # Like torch's Parameter: operations see a plain tensor, without overhead.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    found: Tensor

    def __new__(cls, values: Tensor, found: Tensor) -> Self:
        """Returns rows that share the memory of `values`."""
        rows = values.as_subclass(cls)
        rows.found = found
        return rows

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns a copy of the rows and of `found`."""
        copied = type(self)(self.as_subclass(Tensor).clone(), copy.deepcopy(self.found, memo))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: object) -> tuple[type[Self], tuple[Tensor, Tensor]]:
        """Pickles the rows together with `found`."""
        return type(self), (self.as_subclass(Tensor), self.found)


class _VersionHandle:
    """A native version until it is unpinned. Tables reference it instead of `Version` to avoid a reference cycle."""

    def __init__(self, native: _native.ServedVersion) -> None:
        self.name = native.name
        self.native: _native.ServedVersion | None = native

    def get(self) -> _native.ServedVersion:
        """Returns the version. Raises `StateError` if it is unpinned."""
        native = self.native  # another thread may unpin it
        if native is None:
            raise StateError(f"version {self.name} was unpinned: pin a version again with Tables.pin()")
        return native


class Table:
    """One table of a version: read-only rows. It is obtained from a `Version` and is usable until that version is unpinned.

    `name`, `module` (the path of its module in the trainer's model), `dim` (D) and `rows` are read from the checkpoint. `dtype` is
    the dtype of the stored rows: torch.float32, or the precision chosen by `embcache convert --precision`.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers, serving
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.import_rows([7, 8], [[1.0, 2.0], [3.0, 4.0]])
        >>> report = Saver(0).save(item, "ckpt")
        >>> with serving.open("ckpt") as tables, tables.pin() as version:
        ...     table = version["item"]
        ...     print(table, table.lookup([8, 7]).tolist())
        Table('item', dim=2, rows=2) [[3.0, 4.0], [1.0, 2.0]]
    """

    def __init__(self, handle: _VersionHandle, native: _native.ServedTable) -> None:
        self._handle = handle
        self._native = native
        self.module = native.module
        self.name = native.name
        self.dim = native.dim
        self.rows = native.rows
        self.dtype = _STORED_DTYPES[native.precision]
        self._last = threading.local()

    @property
    def found(self) -> Tensor:
        """For each id of this thread's last `lookup` in this table, True if it has a row: bool [N]. The returned rows have it too.

        Raises:
            StateError: there was no such lookup, or it failed.
        """
        found: Tensor | None = getattr(self._last, "found", None)
        if found is None:
            raise StateError(
                f"this thread has no lookup in table {self.name!r} that succeeded: call lookup before found"
            )
        return found

    def lookup(self, ids: IdsLike, dtype: torch.dtype = torch.float32) -> Rows:
        """Returns the rows of ids [N]: float32 [N, D], and `found`, bool [N].

        Args:
            ids: an int64 or int32 CPU tensor, an array or a list of integers; ids may be repeated.
            dtype: torch.float32, or the table's `dtype` for rows in their smaller stored form. Rows of torch.uint8 are [N, D + 4]:
                a code for each weight, then the row's scale and bias in float16, as expected by FBGEMM's
                `FusedNBitRowwiseQuantizedSBHalfToFloat`.

        Raises:
            InputError: `ids` are not such integers or have another shape; `dtype` is neither of these two, or cannot represent the
                value of missing ids.
            StateError: the version is unpinned.
            CorruptionError: the file that contains a row was truncated, which is detected when its page is read from disk. A row
                whose page was recently in memory is read without a check; in that case the OS kills the process with SIGBUS
                (docs/serving-operations.md, "Memory and the first start").
            StorageError: a row cannot be read.

        Examples:
            >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers, serving
            >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
            >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
            >>> item.import_rows([7], [[1.0, 2.0]])
            >>> report = Saver(0).save(item, "ckpt")
            >>> with serving.open("ckpt", missing=0.5) as tables, tables.pin() as version:
            ...     version["item"].lookup(torch.tensor([7, 8])).tolist()
            [[1.0, 2.0], [0.5, 0.5]]
        """
        self._last.found = None
        if dtype == torch.float32:
            rows = self.lookup_array(_flat_ids("ids", ids))
        elif dtype == self.dtype:
            rows = self._lookup_stored(_flat_ids("ids", ids))
        else:
            stored = "" if self.dtype == torch.float32 else f" or {self.dtype}, as its rows are stored"
            raise InputError(f"dtype={dtype!r}: table {self.name!r} gives torch.float32{stored}")
        self._last.found = rows.found
        return rows

    def lookup_array(self, ids: I64) -> Rows:
        """Like `lookup`, for an int64 array [N]."""
        values, found = (
            torch.empty(len(ids), self.dim, dtype=torch.float32, device="cpu"),
            torch.empty(len(ids), dtype=torch.bool, device="cpu"),
        )
        self._ready().lookup(ids, values.numpy(), found.numpy())
        return Rows(values, found)

    def _lookup_stored(self, ids: I64) -> Rows:
        stored = torch.empty(len(ids), self._native.stored_bytes, dtype=torch.uint8, device="cpu")
        found = torch.empty(len(ids), dtype=torch.bool, device="cpu")
        self._ready().lookup_stored(ids, stored.numpy(), found.numpy())
        return Rows(stored.view(self.dtype), found)

    def lookup_pooled(
        self, ids: IdsLike, offsets: IdsLike, pooling: Pooling = "sum", per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Returns the sums or means of the rows of bags: float32 [B, D]. An empty bag yields zeros.

        Args:
            ids: [N], the ids of all bags, concatenated.
            offsets: [B + 1], the start of each bag in `ids`, and N as the last value, like `KeyedJaggedTensor.offsets()`.
            pooling: "sum" or "mean".
            per_sample_weights: float32 [N], factors of the rows. Only with "sum".

        Raises:
            InputError: the arguments do not match each other.
            ConfigError: another `pooling`, or weights with "mean".
            StateError: the version is unpinned.
            CorruptionError: the file that contains a row was truncated, which is detected when its page is read from disk. A row
                whose page was recently in memory is read without a check; in that case the OS kills the process with SIGBUS
                (docs/serving-operations.md, "Memory and the first start").
            StorageError: a row cannot be read.

        Examples:
            >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers, serving
            >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
            >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
            >>> item.import_rows([7, 8], [[1.0, 2.0], [3.0, 4.0]])
            >>> report = Saver(0).save(item, "ckpt")
            >>> with serving.open("ckpt") as tables, tables.pin() as version:
            ...     version["item"].lookup_pooled([7, 8, 8], [0, 2, 2, 3], "mean").tolist()
            [[2.0, 3.0], [0.0, 0.0], [3.0, 4.0]]
        """
        check_choice("pooling", pooling, Pooling)
        if per_sample_weights is not None and pooling != "sum":
            raise ConfigError(f'per_sample_weights with pooling={pooling!r}: as in torch, use pooling="sum"')
        flat, bounds = _flat_ids("ids", ids), _flat_ids("offsets", offsets)
        check_offsets(bounds, len(flat), 1)
        weights = None
        if per_sample_weights is not None:
            check_float32("per_sample_weights", per_sample_weights, (len(flat),))
            weights = contiguous(per_sample_weights.detach().cpu()).numpy()
        return self.pool_array(flat, bounds, pooling, weights)

    def pool_array(self, ids: I64, offsets: I64, pooling: Pooling, weights: NDArray[np.float32] | None) -> Tensor:
        """Like `lookup_pooled`, for arrays that were already checked."""
        out = torch.empty(len(offsets) - 1, self.dim, dtype=torch.float32, device="cpu")
        self._ready().lookup_pooled(ids, offsets, pooling, weights, out.numpy())
        return out

    def _ready(self) -> _native.ServedTable:
        if self._handle.native is None:
            raise StateError(
                f"table {self.name!r} is of version {self._handle.name}, which was unpinned: pin a version again"
            )
        return self._native

    def __reduce__(self) -> NoReturn:
        raise _copy_error(self._handle.name)

    def __repr__(self) -> str:
        of = f" of module {self.module!r}" if self.module else ""
        return f"Table({self.name!r}{of}, dim={self.dim}, rows={self.rows})"


class Version(CloseOnExitMixin):
    """A checkpoint with all its tables, returned by `Tables.pin`. Checkpoints published later do not change it.

    `name` is the checkpoint's name and `published_at` the time of its publication, in seconds since 1970. `close()` or the end of a
    `with` statement unpins it; an unpinned version is freed once a newer version is served. Inside the `with` statement, every
    module that `serving.replace` created for the same tables reads this version if it runs in the same thread or task:
    `asyncio.to_thread` inherits the statement, an executor's `submit` does not.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers, serving
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> report = Saver(0).save(item, "ckpt")
        >>> with serving.open("ckpt") as tables, tables.pin() as version:
        ...     version.tables, version["item"].rows, version.name == report.checkpoint
        ((Table('item', dim=2, rows=1),), 1, True)
        >>> version.close()  # harmless twice
    """

    def __init__(self, server: object, native: _native.ServedVersion) -> None:
        self.server = server
        self._handle = _VersionHandle(native)
        self.name = self._handle.name
        self._tables: dict[tuple[str, str], Table] = {}
        self._named: dict[str, Table] = {}
        self._by_pair: dict[tuple[str, str], Table] | None = None

    @property
    def published_at(self) -> float:
        """Time at which the checkpoint was published, in seconds since 1970."""
        return self._handle.get().published_at

    @property
    def is_pinned(self) -> bool:
        """True until it is unpinned."""
        return self._handle.native is not None

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables, in the order of the checkpoint."""
        return tuple(self.by_pair().values())

    def by_pair(self) -> dict[tuple[str, str], Table]:
        """Returns all tables by module path and name."""
        native, found = self._handle.get(), self._by_pair
        if found is None:
            found = {(table.module, table.name): self._table_for(table) for table in native.tables()}
            self._by_pair = found
            self._clear_if_closed()
        return found

    def _table_for(self, table: _native.ServedTable) -> Table:
        """Returns the same object for every access to a table."""
        return self._tables.setdefault((table.module, table.name), Table(self._handle, table))

    def __getitem__(self, name: str) -> Table:
        """Returns a table by its name or by "module/name". Raises `MismatchError`, which lists the tables, if none or several
        match.
        """
        found = self._named.get(name)
        if found is None:
            if not isinstance(name, str):
                raise InputError(f"a table is named by text, not by {name!r}: give its name")
            found = self._named[name] = self._table_for(self._handle.get().table(name))
            self._clear_if_closed()
        return found

    def _clear_if_closed(self) -> None:
        """Drops tables created while another thread unpinned the version: they would keep its files open."""
        if not self.is_pinned:
            self.close()

    def close(self) -> None:
        """Unpins the version. Idempotent. Its tables raise `StateError` afterwards."""
        self._handle.native = None
        self._tables.clear()
        self._named.clear()
        self._by_pair = None

    def __enter__(self) -> Self:
        self._handle.get()
        _PINNED.set((*_PINNED.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _PINNED.set(tuple(version for version in _PINNED.get() if version is not self))
        super().__exit__(kind, error, trace)

    def __reduce__(self) -> NoReturn:
        raise _copy_error(self.name)

    def __repr__(self) -> str:
        return f"Version({self.name!r}{'' if self.is_pinned else ', unpinned'})"


def _copy_error(name: str) -> StateError:
    return StateError(
        f"version {name} and its tables can be neither pickled nor copied: pin a version by Tables.pin() where it is to be used"
    )


def current_version(tables: object) -> Version | None:
    """Returns the version of these tables whose `with` statement encloses the caller; None if there is none."""
    # A version that was unpinned by another thread or task is still in the list.
    return next(
        (version for version in reversed(_PINNED.get()) if version.server is tables and version.is_pinned), None
    )


def _flat_ids(field: str, ids: IdsLike) -> I64:
    """Converts to a 1-D array of 64-bit integers [N]. Raises `InputError`, which names `field`, for anything else."""
    given = ids if isinstance(ids, Tensor) else as_array(field, ids)
    if given.ndim != 1:
        raise InputError(f"{field} has shape {list(given.shape)}: give one dimension, as by .reshape(-1)")
    if isinstance(given, Tensor):
        return ids_array(given, field, _CPU)
    if given.dtype.kind not in "iu" and len(given):
        raise InputError(
            f"{field} has dtype {given.dtype}: give integers, as an int64 tensor or array or a list of int"
        )
    # Ids are arbitrary 64-bit patterns, so a uint64 array keeps its bits.
    return np.ascontiguousarray(given).astype(np.int64, casting="unsafe", copy=False)
