"""The public table: rows by id, in up to three tiers.

Members with an underscore are for this package's modules.

Shapes: n rows, D the table's width, V = D * (1 + vector slots) floats of a row's vector part, weights first.
"""

from __future__ import annotations

import copy
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache import _native
from torchrec_embcache._buckets import buckets_of
from torchrec_embcache._closing import CloseOnExitMixin
from torchrec_embcache._device.tier import DeviceTier, convert_out_of_memory
from torchrec_embcache._dist.ranks import Ranks, SingleRank, all_ranks
from torchrec_embcache._kernels.select import make_tier
from torchrec_embcache._saves_in_flight import check_not_own_save
from torchrec_embcache._ssd import autoflush, commit, diagnostics
from torchrec_embcache._ssd.resume import ResumeState, find_resume_state, warn_of_lost_state
from torchrec_embcache.config import (
    DEFAULT_TOTAL_NUM_BUCKETS,
    CachePolicy,
    OnFull,
    Reopen,
    TierBudgets,
    bucket_range,
    bytes_text,
    check_int,
    to_float,
)
from torchrec_embcache.eviction import Policy as EvictionPolicy
from torchrec_embcache.eviction._inputs import SweepInputs
from torchrec_embcache.exceptions import ConfigError, EmbCacheError, InputError, InUseError, StateError
from torchrec_embcache.initializers import Initializer
from torchrec_embcache.optimizers import SGD, OptimizerSpec
from torchrec_embcache.stats import TableStats

from . import _host_memory
from ._evict_callback import EvictionNotifier
from ._import_rows import import_on_all_ranks
from ._settings import (
    TableOptionFields,
    TableOptions,
    TableSettings,
    check_device_memory,
    check_optimizer,
    device_rows,
    list_options,
)
from .miss_ratio_curve import MissRatioCurve
from .rows import (
    EvictedRows,
    FoundRows,
    IdsLike,
    RowChunk,
    RowExport,
    RowMetadata,
    ValuesLike,
    ids_array,
    import_columns,
    row_ids,
    row_parts,
)

__all__ = [
    "CacheTable",
    "EvictedRows",
    "FoundRows",
    "IdsLike",
    "RowChunk",
    "RowExport",
    "RowMetadata",
    "TableOptions",
    "ValuesLike",
    "describe_table",
    "ids_array",
    "inherited_step",
    "sweep_prepared",
    "sweep_tables",
    "to_milliseconds",
]
_log = logging.getLogger(__name__)

_MAX_SECONDS = 1 << 52


class CacheTable(CloseOnExitMixin):
    """One shard of a table: rows by 64-bit id, within a byte budget per tier.

    Users get a table from a module, as `bag.table` or `collection.tables["item"]`, and read, import and export its rows. The
    modules train it. The settings are checked by the constructor; the tiers are opened on first use or by `open()`.

    Call `close()`, or use the table in a `with` statement. A table with an SSD tier that was not closed is flushed when it is
    garbage collected and when the process exits, unless the flush needs other ranks. The files of the SSD tier are stored in
    `<ssd_dir>/<module>/<name>/<rank>-of-<world_size>/`, with the names percent-encoded.

    Shapes: n rows, D the table's width.

    Args:
        name: 1 to 200 bytes of UTF-8. It names the SSD directory, and the initial values of rows depend on it.
        dim: D, from 1 to 65,536.
        tiers: the budgets in bytes of the device, host and SSD tier.
        initializer: initial values of new rows; one of `torchrec_embcache.initializers`.
        optimizer: the optimizer whose slots the rows have; one of `torchrec_embcache.optimizers`. None: rows can be read but not
            trained until one is set.
        seed: the seed of the initial values.
        module: the module that the table belongs to, which also names the SSD directory; by default `name`.
        total_num_buckets: number of buckets into which ids are hashed, from 1 to 2^20.
        buckets: the buckets [begin, end) of this shard; by default those of `rank`.
        rank: the rank of this shard, from 0.
        world_size: number of ranks that share the table.
        device: the device of the device tier, such as "cpu" or "cuda:0".
        key: the second input of the initial values, besides `seed`; by default it is derived from `name`.

    The other arguments are those of `TableOptions`.

    Raises:
        ConfigError: a setting is out of range or contradicts another.
        PathError, StoragePermissionError: `ssd_dir` is not a directory that only this user can write to.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers, optimizers
        >>> table = CacheTable(
        ...     name="item",
        ...     dim=2,
        ...     tiers=TierBudgets(host_bytes="1MiB"),
        ...     initializer=initializers.Constant(0.5),
        ...     optimizer=optimizers.Adagrad(lr=0.1),
        ... )
        >>> table.import_rows([7, -1], [[1.0, 2.0], [3.0, 4.0]])  # n = 2
        >>> found = table.read_rows([7, 8])
        >>> found.weights  # [n, D]: the id 8 has no row, so this is its initial value
        tensor([[1.0000, 2.0000],
                [0.5000, 0.5000]])
        >>> found.found
        tensor([ True, False])
        >>> found.slots["sum"].shape
        torch.Size([2, 2])
        >>> sorted(id for chunk in table.export() for id in chunk.ids.tolist())
        [-1, 7]
        >>> table.remove_rows([7]), len(table), table.step(), table.stats().host.rows
        (1, 1, 0, 1)
        >>> table.describe()
        "'item', embedding_dim=2, optimizer=Adagrad(lr=0.1), policy=s3fifo, rows=1, tiers=(host 1 MiB)"
        >>> table.close()
    """

    @list_options(TableOptionFields)
    def __init__(
        self,
        *,
        name: str,
        dim: int,
        tiers: TierBudgets,
        initializer: Initializer,
        optimizer: OptimizerSpec | None,
        seed: int = 0,
        module: str | None = None,
        total_num_buckets: int = DEFAULT_TOTAL_NUM_BUCKETS,
        buckets: tuple[int, int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        key: int | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        settings = TableSettings(
            options=TableOptionFields(**options),
            name=name,
            module=name if module is None else module,
            dim=dim,
            tiers=tiers,
            initializer=initializer,
            seed=seed,
            total_num_buckets=total_num_buckets,
            buckets=buckets,
            rank=rank,
            world_size=world_size,
            device=device,  # type: ignore[arg-type]  # the settings convert it
            key=key,
        )
        self._set_up(settings, optimizer)

    def _set_up(self, settings: TableSettings, optimizer: OptimizerSpec | None) -> None:
        """Checks settings beyond `TableSettings`. Raises `ConfigError`, `PathError` or `StoragePermissionError`; writes nothing."""
        self._is_closed = self._is_discarding = self._has_superseded_files = False
        self._tier_or_none: DeviceTier | None = None
        self._native_or_none: _native.Table | None = None
        self._optimizer = check_optimizer(optimizer)
        self._device_rows = device_rows(settings, self._spec)
        self._settings = settings = settings.with_device_index()
        self._evict_notifier = EvictionNotifier(settings.name, settings.dim, settings.options.on_evict)
        # A load may replace these three with those of the checkpoint. A resume rejects files with others.
        self._key = settings.key
        self._total_num_buckets = settings.total_num_buckets
        assert settings.buckets is not None, "the settings find them"
        self._buckets = settings.buckets
        # Identifies these contents, as opposed to those before a load; and the step that a load found.
        self._contents_id = secrets.token_hex(8)
        self._past_contents_ids: set[str] = set()
        self._loaded_step = 0
        # The row version that a resume finds. None: it finds other rows, or none.
        self._flushed: int | None = None
        self._opened_by_pid, self._is_multi_rank = 0, False  # set when it is opened
        self._lifecycle_source: _native.Table | None = None  # closed; the next table that is opened adopts its counts
        # Held from the choice of a flush's commit id until its state is committed.
        self._flush_lock = threading.RLock()
        self._unusable_reason: str | None = None
        if self.directory is not None:
            _native.check_ssd_dir(*self.tiers.ssd_root)

    # ---- settings

    @property
    def name(self) -> str:
        """The table's name."""
        return self._settings.name

    @property
    def module(self) -> str:
        """The name of the module that the table belongs to."""
        return self._settings.module

    @property
    def dim(self) -> int:
        """The width D of a row."""
        return self._settings.dim

    @property
    def tiers(self) -> TierBudgets:
        """The budgets of the tiers. If tables of a module share RAM, this has the table's portion by expected rows."""
        return self._settings.tiers

    @property
    def initializer(self) -> Initializer:
        """The initializer of new rows."""
        return self._settings.initializer

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """The optimizer whose slots the rows have; None until one is set.

        Setting another kind of optimizer raises `StateError` once the table has rows.
        """
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: OptimizerSpec | None) -> None:
        spec = check_optimizer(optimizer)
        # First, because it raises if the budgets are too small.
        rows = device_rows(self._settings, spec or SGD())
        if self._native_or_none is not None and spec is not None and spec.kind != self._spec.kind:
            if len(self._native_or_none):
                raise StateError(
                    f"table {self.name!r} has rows with the slots of {self._spec.display_name}: set {spec.display_name} "
                    f"before it has any"
                )
            check_not_own_save(self, "set the optimizer")
            self._is_discarding = True  # the files of the empty table that was just opened
            self._native_or_none.close()
            self._lifecycle_source, self._native_or_none, self._tier_or_none = self._native_or_none, None, None
        self._optimizer, self._device_rows = spec, rows

    @property
    def seed(self) -> int:
        """The seed of the rows' initial values."""
        return self._settings.seed

    @property
    def policy(self) -> CachePolicy:
        """The replacement policy of a full tier."""
        return self._settings.options.policy

    @property
    def eviction(self) -> EvictionPolicy | None:
        """The rules that expire rows, and when they run. None: no rows expire."""
        return self._settings.lifecycle.eviction

    @property
    def on_full(self) -> OnFull:
        """Behavior when the last tier is full: "error" or "evict"."""
        return self._settings.options.on_full

    @property
    def device(self) -> torch.device:
        """The device of the device tier and of lookup results."""
        return self._settings.device

    @property
    def rank(self) -> int:
        """The rank of this shard."""
        return self._settings.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that share the table."""
        return self._settings.world_size

    @property
    def total_num_buckets(self) -> int:
        """Number of buckets into which ids are hashed. Loading a checkpoint sets it to the checkpoint's number."""
        return self._total_num_buckets

    @property
    def buckets(self) -> tuple[int, int]:
        """The buckets [begin, end) of this shard."""
        return self._buckets

    @property
    def directory(self) -> str | None:
        """The SSD tier's directory of this shard; None without an SSD tier."""
        if not self.tiers.ssd:
            return None
        return _native.table_dir(str(self.tiers.ssd_dir), self.module, self.name, self.rank, self.world_size)

    @property
    def _is_sharded(self) -> bool:
        """True if the table is sharded over ranks."""
        return bool(self._settings.is_sharded)

    @property
    def _spec(self) -> OptimizerSpec:
        """The optimizer, or one without slots if none is set."""
        return self._optimizer if self._optimizer is not None else SGD()

    def _buckets_of(self, total_num_buckets: int) -> tuple[int, int]:
        """Returns the buckets [begin, end) of this shard out of `total_num_buckets`: all, if the table is not sharded."""
        if not self._is_sharded:
            return 0, total_num_buckets
        return bucket_range(self.rank, self.world_size, total_num_buckets)

    def _owns(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns a mask of those of `ids` [n] that are in the buckets of this shard: bool [n]."""
        begin, end = self.buckets
        buckets = buckets_of(ids, self.total_num_buckets)
        return (buckets >= begin) & (buckets < end)

    @property
    def _needs_collective_sweep(self) -> bool:
        """True if a sweep of the table depends on other ranks: its rule is collective, and the table is sharded over them.

        Depends only on settings, so that all of these ranks agree, even ranks that own no bucket of a loaded checkpoint.
        """
        return self.eviction is not None and self.eviction.is_collective and self._is_sharded

    # ---- opening

    @property
    def _native_table(self) -> _native.Table:
        """The native table, which is opened if it is not open."""
        if self._native_or_none is None:
            self.open()
        assert self._native_or_none is not None, "open() sets it or raises"
        return self._native_or_none

    @property
    def _tier(self) -> DeviceTier | None:
        """The device tier's tensors; None if kernels run directly on the host tier's rows. Opens the table."""
        self.open()
        return self._tier_or_none

    @property
    def is_open(self) -> bool:
        """True if the tiers were opened. It stays True after `close`."""
        return self._native_or_none is not None

    def open(self, commit_id: int | None = None) -> None:
        """Opens the tiers. Idempotent.

        Args:
            commit_id: the committed state of the SSD tier to resume, one of `commit_ids()`; by default the latest complete one.

        Raises:
            InUseError: another process or table uses the directory.
            MismatchError: the directory belongs to a table with other settings.
            StateError: the table is closed, or there is no state to resume.
            StorageError, CorruptionError, HostMemoryError: the files cannot be read, or memory allocation fails.
        """
        self._open(commit_id, None)

    def _open(self, commit_id: int | None, segments: _native.LinkedSegments | None) -> None:
        """Opens the tiers. `segments` become the contents, replacing those of the directory."""
        if self._is_closed:
            raise StateError(f"table {self.name!r} is closed: make a new module to use it again")
        # An interrupted adoption may have closed the native table: then it is opened again.
        if self._native_or_none is not None and not (self._is_discarding and self._native_or_none.is_closed()):
            return
        directory = self.directory
        reopen: Reopen | None = "discard" if self._is_discarding else self.tiers.reopen
        state = find_resume_state(self, reopen, commit_id)
        tier = self._create_tier()
        native: _native.Table | None = None
        try:
            native = self._create_native(directory, reopen, state, tier, segments)
            if self._lifecycle_source is not None:
                native.adopt_lifecycle(self._lifecycle_source)
            if self._unusable_reason is not None:
                native.set_unusable(self._unusable_reason)
            self._opened_by_pid = os.getpid()
            self._is_multi_rank = self.world_size > 1 or all_ranks().world_size > 1
            self._flushed = native.version() if segments is None else None
            self._tier_or_none, self._native_or_none, self._lifecycle_source = tier, native, None
            if directory is not None:
                autoflush.track_table(self)
            _host_memory.warn_if_over_memory(self)
            self._has_superseded_files = diagnostics.check_opened_table(
                self, autoflush.open_tables(), resumed=state.commit_id
            )
            warn_of_lost_state(self, state)
            self._evict_notifier.attach(native, self._spec)
        except BaseException as error:
            if isinstance(error, InUseError) and any(directory == other.directory for other in autoflush.open_tables()):
                error.message += ". torchrec_embcache.close_all() closes every table of this process"
            # After any failure, such as a warning that the user turned into an error, the table can be opened again. The native
            # table is closed, because a stored error would keep it and its directory open.
            self._tier_or_none = self._native_or_none = None
            if native is not None:
                native.close()
            raise

    def _create_tier(self) -> DeviceTier | None:
        if self._device_rows is None:
            return None
        check_device_memory(self._settings, self._spec, self._device_rows)
        with convert_out_of_memory(
            f"TierBudgets.device_bytes={self.tiers.device} of table {self.name!r} cannot be allocated on {self.device}: give "
            "less, or free memory there"
        ):
            return make_tier(self.dim, self._spec, self._device_rows, self.device)

    def _create_native(
        self,
        directory: str | None,
        reopen: Reopen | None,
        state: ResumeState,
        tier: DeviceTier | None,
        segments: _native.LinkedSegments | None,
    ) -> _native.Table:
        return _native.Table(
            name=self.name,
            key=self._key,
            dim=self.dim,
            optimizer=self._spec.kind,
            initializer=self._settings.initializer.native(),
            seed=self.seed,
            total_num_buckets=self.total_num_buckets,
            bucket_begin=self.buckets[0],
            bucket_end=self.buckets[1],
            **self._settings.host_budget(),
            device_rows=self._device_rows,
            device_gather=tier.gather if tier is not None else None,
            ssd_dir=directory,
            ssd_bytes=self.tiers.ssd,
            reopen=reopen,
            resume_commit_id=state.commit_id,
            policy=self.policy,
            on_full=self.on_full,
            segments=segments,
            uncommitted=state.uncommitted,
            ssd_root=_native.CommitDirectory(*self.tiers.ssd_root) if directory is not None else None,
            sizing=self.tiers.sizing,
            **self._settings.lifecycle.native(),
        )

    # ---- used by loads

    def _set_unusable(self, reason: str | None) -> None:
        """Poisons the table: every use raises a `StateError` with the reason, until this is called with None."""
        self._unusable_reason = reason
        if self._native_or_none is not None and not self._native_or_none.is_closed():
            self._native_or_none.set_unusable(reason)

    @property
    def _unusable(self) -> str | None:
        """The reason why the table is poisoned; None if it is not."""
        # The native table's state has priority: an interrupt may have come before it was cleared after a successful load.
        if self._native_or_none is not None and not self._native_or_none.is_closed():
            return self._native_or_none.unusable()
        return self._unusable_reason

    def _check_usable(self) -> None:
        """Raises `StateError` if the table is poisoned."""
        reason = self._unusable
        if reason is not None:
            raise StateError(f"table {self.name!r} cannot be used: {reason}")

    def _adopt(self, total_num_buckets: int, key: int, segments: _native.LinkedSegments | None = None) -> bool:
        """Adopts the number of buckets and the key of a checkpoint that is about to be loaded.

        If one of them differs, the table is rebuilt without its rows. With `segments` it is rebuilt with the rows, step and epoch
        of a linked checkpoint. Returns True if the buckets changed.
        """
        self._past_contents_ids.add(self._contents_id)
        self._contents_id = secrets.token_hex(8)
        changed = total_num_buckets != self.total_num_buckets
        if changed or key != self._native_table.key or segments is not None:
            check_not_own_save(self, "load")
            self._is_discarding = True  # the rows of the previous table
            buckets, before = self._buckets_of(total_num_buckets), self._native_table
            before.close()
            # In one statement: after an interrupt, `open` creates an empty table with either the old or the new settings.
            settings = buckets, total_num_buckets, key, None, None
            self._buckets, self._total_num_buckets, self._key, self._native_or_none, self._tier_or_none = settings
            self._open(None, segments)
            self._native_table.adopt_time_source(before)
        return changed

    # ---- rows

    def __bool__(self) -> bool:
        """Returns True, even for a table without rows."""
        return True

    def __len__(self) -> int:
        """Number of rows of this shard in all tiers."""
        return len(self._native_table)

    def step(self) -> int:
        """Number of training steps of the table."""
        return self._native_table.step()

    def stats(self) -> TableStats:
        """Returns the counters of the table and of its tiers."""
        return TableStats.from_native(
            self._native_table.stats(),
            {"kernels": self._tier_or_none.kernels if self._tier_or_none is not None else "core"},
        )

    def miss_ratio_curve(self, policy: CachePolicy | None = None, *, reset: bool = False) -> MissRatioCurve:
        """Returns the miss ratios of other cache sizes, measured since the table was opened or since the last call with `reset`.

        Requires `TierBudgets(sizing=True)`, which uses at most 8 MiB of RAM per table in addition to its budgets.

        Args:
            policy: the replacement policy of the caches: the table's own (None), or "lru", which is always measured, too.
            reset: restarts the counters at zero after this call. The caches stay warm, so that the next measurement is not a cold
                start.

        Raises:
            StateError: the table does not measure its miss ratios.
            ConfigError: `policy` is neither the table's nor "lru".
        """
        curves = _native.miss_ratio_curves(self._native_table, reset=reset)
        if curves is None:
            raise StateError(
                f"table {self.name!r} does not measure its miss ratios: open it with TierBudgets(sizing=True)"
            )
        for curve in curves:
            if curve.policy == (policy or self.policy):
                return MissRatioCurve.from_native(curve)
        known = " or ".join(repr(curve.policy) for curve in curves)
        raise ConfigError(f"policy={policy!r} is not measured for table {self.name!r}: use {known}, or None")

    def export(self, chunk_rows: int = 65_536) -> RowExport:
        """Returns a snapshot of the rows of all tiers, in chunks of at most `chunk_rows` rows, each in newly allocated memory.

        Iterating raises `StateError` if the table was trained or changed since the call. It also raises if another call needs space
        on the SSD tier that is occupied by files which remaining chunks are read from.

        For example `table.export().to_numpy()["weights"]` returns [n, D], if all rows fit in RAM.
        """
        stream = self._native_table.export(check_int("chunk_rows", chunk_rows, 1, 1 << 30))
        return RowExport((RowChunk(*self._split_rows(block.ids, block)) for block in stream), self._empty_chunk)

    def read_rows(self, ids: IdsLike) -> FoundRows:
        """Returns the rows of `ids` [n], in that order, with a mask `found` [n]. An id without a row reads its initial value.

        `ids` are an int64 or int32 tensor, a numpy array or a list. Reading moves no rows between tiers and changes no counters.
        """
        array = row_ids(ids, self.device)
        rows = self._native_table.read_rows(array)
        return FoundRows(*self._split_rows(array.copy(), rows), found=torch.from_numpy(rows.found))

    def oov_row(self) -> NDArray[np.float32]:
        """Returns the current weights of the OOV row, shared by ids that are not admitted: float32 [D]. They are equal on all
        ranks.

        Raises `StateError` if the table was not created with `not_admitted="oov"`.

        Examples:
            >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, admission, optimizers
            >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
            >>> settings = {"admission": admission.Count(3), "not_admitted": "oov"}
            >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd, **settings)
            >>> item(torch.tensor([7, 8])).sum().backward()  # both occur for the first time
            >>> item.table.oov_row()
            array([-1., -1.], dtype=float32)
        """
        row = self._native_table.oov_row()
        if row is None:
            raise StateError(f'table {self.name!r} has no OOV row: make it with not_admitted="oov" and an admission')
        return row[: self.dim].copy()

    def import_rows(
        self,
        ids: IdsLike,
        weights: ValuesLike,
        slots: Mapping[str, ValuesLike] | None = None,
        metadata: RowMetadata | None = None,
        *,
        collective: bool = False,
    ) -> None:
        """Inserts or overwrites rows.

        Args:
            ids: [n] distinct 64-bit integers, as a tensor, a numpy array or a list.
            weights: [n, D] numbers, likewise. Other dtypes are converted to float32.
            slots: the optimizer's slots by name, as in `RowChunk.slots`. None: zeros.
            metadata: None: the metadata of rows that were never used.
            collective: every rank calls this at the same time, with rows of any ids or with none, and every row is sent to the rank
                that owns it. Otherwise the ids must be in this shard's buckets.

        Raises:
            InputError: an argument is malformed, or an id is duplicated or belongs to another shard.
            StateError: a batch in flight uses one of the rows.
            CapacityError: the rows do not fit.

        On an error no row has changed, unless the error states how many rows were imported: a table with `on_full="evict"` imports
        in parts. If the disk of the SSD tier fails during the call, all rows are imported, rows that could not be written stay in
        RAM, and the next call that writes raises `ReadOnlyError`.
        """
        if collective:
            import_on_all_ranks(self.name, self, ids, weights, slots, metadata)
            return
        self._check_usable()
        array = row_ids(ids, self.device)
        columns = import_columns(self._spec, self.dim, len(array), weights, slots, metadata)
        self._native_table.import_rows(array, *columns)

    def remove_rows(self, ids: IdsLike) -> int:
        """Removes the rows of `ids` [n]. Returns the number of rows removed.

        On an error no row was removed, unless the error states how many were. If the disk of the SSD tier fails during the call,
        all rows are removed, and the next call that writes raises `ReadOnlyError`.
        """
        return self._native_table.remove_rows(row_ids(ids, self.device))

    def evict(self) -> None:
        """Runs one eviction pass on this shard for the latest training step: rows that match `eviction` are removed.

        Does nothing if the table has no `eviction`. If ranks share the table, each rank evicts from its own shard;
        `torchrec_embcache.evict(model)` does it for all tables on all ranks.

        Raises `StateError` if the table is closed or poisoned, or if its `eviction` needs all ranks that share the table. Raises
        `ReadOnlyError` if its SSD tier could not be written.
        """
        if self._needs_collective_sweep:
            raise StateError(
                f"table {self.name!r} is shared by {self.world_size} ranks, which have to agree on what its eviction takes: call "
                "torchrec_embcache.evict(model) on all of them"
            )
        if self.eviction is None or not self.eviction.is_collective:
            self._native_table.sweep()
        else:
            sweep_tables([self], self.step(), SingleRank())

    def set_time(self, seconds: float) -> None:
        """Sets the event time used by `Ttl(seconds=...)` until the next call; see `torchrec_embcache.set_time`.

        Does nothing for a table without such a rule. Raises `InputError` if the time would decrease or is not a number from 0 to
        2^52, and `StateError` if other ranks share the table.
        """
        if self._needs_collective_sweep:
            raise StateError(
                f"table {self.name!r} is shared by {self.world_size} ranks, which have one time: call "
                "torchrec_embcache.set_time(model, seconds) on all of them"
            )
        time = to_milliseconds("set_time", seconds)
        if self._settings.lifecycle.needs_clock:
            self._native_table.set_time(time)

    def drain_evicted(self) -> Iterator[EvictedRows]:
        """Yields the rows that were evicted from this shard and not drained yet, chunk by chunk, in eviction order.

        Requires `on_evict="keep"`. Each chunk is yielded once. If the loop stops early, the remaining rows stay queued, even after
        the table is closed. A sweep in progress is completed incrementally, so that at the end every row evicted so far was
        yielded.

        Raises `StateError` if evicted rows are not kept, or are delivered to a callable. `EvictedRows` has an example.
        """
        return self._evict_notifier.drain(self._native_or_none)

    def _empty_chunk(self) -> RowChunk:
        found = self.read_rows(torch.empty(0, dtype=torch.int64, device="cpu"))
        return RowChunk(found.ids, found.weights, found.slots, found.metadata)

    def _split_rows(
        self, ids: NDArray[np.int64], rows: _native.RowBlock | _native.FoundRows
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], RowMetadata]:
        parts = row_parts(self._spec, self.dim, rows.vectors, rows.scalars)
        return torch.from_numpy(ids), *parts, RowMetadata.from_native(rows.metadata)

    # ---- flushing and closing

    def commit_ids(self) -> list[int]:
        """Returns the commit ids of the states of the SSD tier that can be resumed, oldest first."""
        directory = self.directory
        return _native.Table.commit_ids(directory, *self.tiers.ssd_root) if directory is not None else []

    def _known_commit_ids(self) -> list[int]:
        """Returns the commit ids of the states in the directory, and the last one committed or resumed, whose state may be gone."""
        last = self._native_table.last_commit_id()
        return self.commit_ids() if last is None else [*self.commit_ids(), last]

    @property
    def _ssd_bytes_held(self) -> int:
        """Size of the SSD tier's files in bytes."""
        return ssd.tier.bytes if (ssd := self._native_table.stats().ssd) is not None else 0

    @property
    def _has_unflushed_rows(self) -> bool:
        """True if it is open in this process with an SSD tier, and has rows changed since the last state that can be resumed."""
        native = self._native_or_none
        if native is None or self._is_closed or self._opened_by_pid != os.getpid() or native.is_closed():
            return False
        return bool(self.tiers.ssd) and self._unusable is None and native.version() != self._flushed

    def flush(self) -> None:
        """Writes every dirty row to the SSD tier and commits a state that can be resumed. Does nothing without an SSD tier.

        Concurrent flushes of one table run one after another. Raises `StorageError` if the disk fails; the previous state is then
        kept.
        """
        self._check_usable()
        if self.directory is not None:
            began = time.monotonic()
            with self._flush_lock:
                version = self._flush_with_commit_id(None)
            self._mark_flushed(version)
            _log.info("flushed %d rows of table %r in %.1f s", len(self), self.name, time.monotonic() - began)

    def _flush_with_commit_id(self, commit_id: int | None) -> int:
        """Flushes the table as the state `commit_id` (see `_ssd/commit.py`); None selects the next commit id of this table.

        Discards states of incomplete flushes of several tables. Returns the version of its rows, for `_mark_flushed`.
        """
        for other in self.commit_ids():
            try:
                complete = commit.is_committed(self.tiers.ssd_root, other)
            except StateError:  # older than the resumed state, and not needed
                complete = False
            if not complete:
                self._native_table.forget_commit(other)
        # Read before the flush: the state may or may not contain rows that are trained during the flush.
        version = self._native_table.version()
        self._native_table.flush(commit_id)
        return version

    def _mark_flushed(self, version: int, *, by_all_ranks: bool = False) -> None:
        """Records that a resume finds the rows of this version; `by_all_ranks`: the rows of every rank."""
        self._flushed = version
        if self._has_superseded_files:
            self._has_superseded_files = diagnostics.remove_superseded(self, by_all_ranks=by_all_ranks)

    def close(self) -> None:
        """Flushes and closes the table. Idempotent. If the flush fails, the tiers are closed and the error is raised.

        Waits for an asynchronous save of the table, and until `on_evict` has received every row evicted so far. Raises
        `EvictionHookError` if `on_evict` raised. Ctrl-C interrupts the wait and the flush; the table is then still open, and this
        method can be called again. Raises `StateError` in a `progress` callable of that save or in `on_evict`, which would wait for
        itself.
        """
        native = self._native_or_none
        self._evict_notifier.check_not_own_thread("close")
        if not self._is_closed and native is not None and not native.is_closed():
            check_not_own_save(self, "close")
            try:
                # The state after a failed load is not a state to resume.
                if self._unusable is None:
                    self.flush()
                with self._evict_notifier.closing(native):
                    native.close()
            except Exception as error:
                native.close()
                self._is_closed = True
                self._evict_notifier.finish(error)
                raise
        self._is_closed = True
        self._evict_notifier.finish()

    def _close_unflushed(self) -> None:
        """Closes a partially loaded table without a flush: a resume finds the last flush."""
        self._set_unflushable()
        self.close()

    def _set_unflushable(self) -> None:
        """Poisons a partially loaded table, so that it is not flushed either."""
        self._set_unusable("only a part of the rows that it was to take over is in it")

    # ---- representation and copies

    def describe(self, hyperparameters: Mapping[str, Any] | None = None) -> str:
        """Returns settings, optimizer, row count and budgets in one line, without opening the table.

        `hyperparameters`: current hyperparameters of the optimizer.
        """
        return describe_table(self, hyperparameters)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns an in-memory copy with the same rows, slots, metadata, step and epoch. Raises `StateError` with an SSD tier."""
        if self.directory is not None:
            raise StateError(
                f"table {self.name!r} cannot be copied: the files of its SSD tier have one owner. Make a second module with "
                "budgets of its own (in RAM, or another ssd_dir), and give it the rows: Saver(rank).save(model, path), then "
                "Saver(rank).load(copy, path)"
            )
        if self._is_closed:
            raise StateError(f"table {self.name!r} is closed: make a new module to use it again")
        self._check_usable()
        settings = replace(
            self._settings,
            total_num_buckets=self.total_num_buckets,
            buckets=self.buckets,
            key=self._key,
            share=copy.deepcopy(self._settings.share, memo),
        )
        made = type(self).__new__(type(self))
        made._set_up(settings, self.optimizer)
        if self.is_open:
            made.open()
            for chunk in self.export():
                made.import_rows(chunk.ids, chunk.weights, chunk.slots, chunk.metadata)
            made._native_table.adopt_lifecycle(self._native_table)
            made._native_table.set_step(self._native_table.step())
            made._native_table.set_epoch(self._native_table.epoch())
            made._loaded_step = inherited_step(self)
        memo[id(self)] = made
        return made

    def __reduce__(self) -> str:
        raise StateError(
            f"table {self.name!r} cannot be pickled: it owns memory and files; save its rows with Saver(rank).save(model, path), "
            "or export() them"
        )

    def __del__(self) -> None:
        # The constructor may have raised before there was anything to flush.
        if hasattr(self, "_evict_notifier"):
            autoflush.flush_dropped_table(self)
            self._evict_notifier.on_table_dropped(self._native_or_none)


def _rows_text(table: CacheTable) -> str:
    """Returns the number of rows, or the state in which it is unknown. Opens and raises nothing."""
    try:
        if table._is_closed or (table._native_or_none is not None and table._native_or_none.is_closed()):
            return "closed"
        if table._unusable is not None:
            return "unusable"
        return str(len(table)) if table.is_open else "not opened yet"
    except EmbCacheError:  # failed during an update, or used in a forked process; the next use raises the reason
        return "unusable"


def describe_table(
    table: CacheTable, hyperparameters: Mapping[str, Any] | None, chosen_optimizer: OptimizerSpec | None = None
) -> str:
    """Returns settings, optimizer, rows and budgets in one line.

    `hyperparameters`: the current ones of the optimizer. `chosen_optimizer`: the optimizer that a table without one will get.
    """
    spec = table.optimizer or chosen_optimizer
    optimizer = "none"
    if spec is not None:
        lr = (hyperparameters or spec.param_group()).get("lr")
        optimizer = f"{type(spec).__name__}(lr={lr})"
    return (
        f"{table.name!r}, embedding_dim={table.dim}, optimizer={optimizer}, policy={table.policy}"
        f"{table._settings.lifecycle.describe()}, rows={_rows_text(table)}, tiers=({_tiers_text(table)})"
    )


def _tiers_text(table: CacheTable) -> str:
    share, text = table._settings.share, table.tiers.describe()
    if share is None:
        return text
    return f"{text} of {bytes_text(share.budget.host_bytes)} that {share.budget.tables} tables share"


def inherited_step(table: CacheTable) -> int:
    """Returns the `loaded_step` of a table that continues with the rows of an open one.

    It prevents a second save from evicting another fraction of rows that were not trained since the first.
    """
    return table._native_table.step() if table._native_table.is_unchanged_since_sweep() else table._loaded_step


def to_milliseconds(field: str, seconds: object) -> int:
    """Returns `seconds` as milliseconds, rounded. Raises `InputError` unless it is a number from 0 to 2^52."""
    number = to_float(seconds)
    if number is None or not 0 <= number <= _MAX_SECONDS:
        raise InputError(f"{field}({seconds!r}): give seconds as a number from 0 to 2^52, an int or a float")
    return round(number * 1000)


def sweep_tables(tables: Sequence[CacheTable], step: int, ranks: Ranks) -> None:
    """Sweeps tables for one step by rules that all of `ranks` agree on. An error on one rank is raised on all."""
    rules: list[_native.SweepRule] = []
    for table in tables:
        policy = table._settings.lifecycle.eviction
        assert policy is not None, "only tables with a policy are swept"
        rules.append(policy.resolve(SweepInputs(step, table._native_table, ranks)))

    def prepare() -> None:
        for table, rule in zip(tables, rules, strict=True):
            table._native_table.prepare_sweep(rule)

    ranks.gather(prepare)
    sweep_prepared(tables, rules)


def sweep_prepared(tables: Sequence[CacheTable], rules: Sequence[_native.SweepRule | None]) -> None:
    """Sweeps prepared tables, each by its entry of `rules`, or by its own rule for None.

    Runs as one native call, so that Ctrl-C finds all of them swept, or none.
    """
    _native.sweep_tables([table._native_table for table in tables], list(rules))
