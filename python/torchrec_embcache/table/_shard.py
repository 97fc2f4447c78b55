"""One shard of a table: the internal interface that this package's modules use. Its public interface is `CacheTable`.

Shapes: n rows, D the table's width, V = D * (1 + vector slots) floats of a row's vector part, weights first.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache import _native
from torchrec_embcache._buckets import buckets_of
from torchrec_embcache._device.tier import DeviceTier, convert_out_of_memory
from torchrec_embcache._dist.collective import world_size as ranks_of_process
from torchrec_embcache._kernels.select import make_tier
from torchrec_embcache._saves_in_flight import check_not_own_save
from torchrec_embcache._ssd import autoflush, commit, diagnostics
from torchrec_embcache._ssd.resume import ResumeState, find_resume_state, warn_of_lost_state
from torchrec_embcache.config import Reopen, bucket_range, check_int
from torchrec_embcache.exceptions import InputError, InUseError, StateError
from torchrec_embcache.optimizers import SGD, OptimizerSpec
from torchrec_embcache.stats import TableStats

from . import _host_memory
from ._evict_callback import EvictionNotifier
from ._import_rows import import_on_all_ranks
from ._settings import TableSettings, check_device_memory, check_optimizer, device_rows
from .rows import FoundRows, IdsLike, RowChunk, RowExport, RowMetadata, ValuesLike, row_ids, row_parts, row_vectors

__all__ = ["TableShard"]
_log = logging.getLogger(f"{__package__}.cache_table")  # the public module


class TableShard:
    """One shard of a table: its settings, its tiers and its rows. It is opened on first use, or by `open`."""

    def __init__(self, settings: TableSettings, optimizer: OptimizerSpec | None) -> None:
        """Checks settings beyond `TableSettings`. Raises `ConfigError`, `PathError` or `StoragePermissionError`; writes nothing."""
        self._closed = self._is_discarding = self._has_superseded_files = False
        self._tier: DeviceTier | None = None
        self._native: _native.Table | None = None
        self._optimizer = check_optimizer(optimizer)
        self.device_rows = device_rows(settings, self.spec)
        settings = settings.with_device_index()
        self.settings = settings
        self.name, self.module, self.dim = settings.name, settings.module, settings.dim
        self.tiers, self.device = settings.tiers, settings.device
        self.rank, self.world_size, self.seed = settings.rank, settings.world_size, settings.seed
        self.policy, self.on_full, self.is_sharded = settings.policy, settings.on_full, settings.is_sharded
        self.evict_notifier = EvictionNotifier(self.name, self.dim, settings.on_evict)
        # A load may replace these three with those of the checkpoint. A resume rejects files with others.
        self.key = settings.key
        self.total_num_buckets = settings.total_num_buckets
        self.buckets = settings.buckets
        # Identifies these contents, as opposed to those before a load; and the step that a load found.
        self.contents_id = secrets.token_hex(8)
        self.past_contents_ids: set[str] = set()
        self.loaded_step = 0
        # The row version that a resume finds. None: it finds other rows, or none.
        self._flushed: int | None = None
        self._opened_by_pid, self._opened_among_ranks = 0, False
        self._lifecycle_source: _native.Table | None = None  # closed; the next table that is opened adopts its counts
        # Held from the choice of a flush's commit id until its state is committed.
        self.flush_lock = threading.RLock()
        self._unusable: str | None = None
        if self.directory is not None:
            _native.check_ssd_dir(*self.tiers.ssd_root)

    # ---- settings

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """The optimizer whose slots the rows have; None until one is set. It is fixed once the table has rows."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: OptimizerSpec | None) -> None:
        spec = check_optimizer(optimizer)
        # First, because it raises if the budgets are too small.
        rows = device_rows(self.settings, spec or SGD())
        if self._native is not None and spec is not None and spec.kind != self.spec.kind:
            if len(self._native):
                raise StateError(
                    f"table {self.name!r} has rows with the slots of {self.spec.display_name}: set {spec.display_name} "
                    f"before it has any"
                )
            check_not_own_save(self, "set the optimizer")
            self._is_discarding = True  # the files of the empty table that was just opened
            self._native.close()
            self._lifecycle_source, self._native, self._tier = self._native, None, None
        self._optimizer, self.device_rows = spec, rows

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer, or one without slots if none is set."""
        return self._optimizer if self._optimizer is not None else SGD()

    @property
    def directory(self) -> str | None:
        """The SSD tier's directory of this shard; None without an SSD tier."""
        if not self.tiers.ssd:
            return None
        return _native.table_dir(str(self.tiers.ssd_dir), self.module, self.name, self.rank, self.world_size)

    def buckets_of(self, total_num_buckets: int) -> tuple[int, int]:
        """Returns the buckets [begin, end) of this shard out of `total_num_buckets`: all, if the table is not sharded."""
        if not self.is_sharded:
            return 0, total_num_buckets
        return bucket_range(self.rank, self.world_size, total_num_buckets)

    def owns(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns a mask of those of `ids` [n] that are in the buckets of this shard: bool [n]."""
        begin, end = self.buckets
        buckets = buckets_of(ids, self.total_num_buckets)
        return (buckets >= begin) & (buckets < end)

    # ---- opening

    @property
    def native(self) -> _native.Table:
        """The native table, which is opened if it is not open."""
        if self._native is None:
            self.open()
        assert self._native is not None, "open() sets it or raises"
        return self._native

    @property
    def native_or_none(self) -> _native.Table | None:
        """The native table, if it is open."""
        return self._native

    @property
    def tier(self) -> DeviceTier | None:
        """The device tier's tensors; None if kernels run directly on the host tier's rows. Opens the table."""
        self.open()
        return self._tier

    @property
    def is_open(self) -> bool:
        """True if the tiers were opened. It stays True after `close`."""
        return self._native is not None

    @property
    def is_closed(self) -> bool:
        """True if the table was closed and cannot be used again."""
        return self._closed

    def open(self, commit_id: int | None = None, segments: _native.LinkedSegments | None = None) -> None:
        """Opens the tiers. Idempotent. `segments` become the contents, replacing those of the directory.

        `commit_id` is the state to resume; by default the latest complete one.
        """
        if self._closed:
            raise StateError(f"table {self.name!r} is closed: make a new module to use it again")
        # An interrupted adoption may have closed the native table: then it is opened again.
        if self._native is not None and not (self._is_discarding and self._native.is_closed()):
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
            if self._unusable is not None:
                native.set_unusable(self._unusable)
            self._opened_by_pid = os.getpid()
            self._opened_among_ranks = self.world_size > 1 or ranks_of_process() > 1
            self._flushed = native.version() if segments is None else None
            self._tier, self._native, self._lifecycle_source = tier, native, None
            if directory is not None:
                autoflush.track_table(self)
            _host_memory.warn_if_over_memory(self)
            self._has_superseded_files = diagnostics.check_opened_table(
                self, autoflush.open_tables(), resumed=state.commit_id
            )
            warn_of_lost_state(self, state)
            self.evict_notifier.attach(native, self.spec)
        except BaseException as error:
            if isinstance(error, InUseError) and any(directory == other.directory for other in autoflush.open_tables()):
                error.message += ". torchrec_embcache.close_all() closes every table of this process"
            # After any failure, such as a warning that the user turned into an error, the table can be opened again. The native
            # table is closed, because a stored error would keep it and its directory open.
            self._tier = self._native = None
            if native is not None:
                native.close()
            raise

    def _create_tier(self) -> DeviceTier | None:
        if self.device_rows is None:
            return None
        check_device_memory(self.settings, self.spec, self.device_rows)
        with convert_out_of_memory(
            f"TierBudgets.device_bytes={self.tiers.device} of table {self.name!r} cannot be had on {self.device}: give less, or "
            "free memory there"
        ):
            return make_tier(self.dim, self.spec, self.device_rows, self.device)

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
            key=self.key,
            dim=self.dim,
            optimizer=self.spec.kind,
            initializer=self.settings.initializer.native(),
            seed=self.seed,
            total_num_buckets=self.total_num_buckets,
            bucket_begin=self.buckets[0],
            bucket_end=self.buckets[1],
            **self.settings.host_budget(),
            device_rows=self.device_rows,
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
            **self.settings.lifecycle.native(),
        )

    # ---- used by loads

    def set_unusable(self, reason: str | None) -> None:
        """Poisons the table: every use raises a `StateError` with the reason, until this is called with None."""
        self._unusable = reason
        if self._native is not None and not self._native.is_closed():
            self._native.set_unusable(reason)

    @property
    def unusable(self) -> str | None:
        """The reason why the table is poisoned; None if it is not."""
        # The native table's state has priority: an interrupt may have come before it was cleared after a successful load.
        if self._native is not None and not self._native.is_closed():
            return self._native.unusable()
        return self._unusable

    def check_usable(self) -> None:
        """Raises `StateError` if the table is poisoned."""
        reason = self.unusable
        if reason is not None:
            raise StateError(f"table {self.name!r} cannot be used: {reason}")

    def adopt(self, total_num_buckets: int, key: int, segments: _native.LinkedSegments | None = None) -> bool:
        """Adopts the number of buckets and the key of a checkpoint that is about to be loaded.

        If one of them differs, the table is rebuilt without its rows. With `segments` it is rebuilt with the rows, step and epoch
        of a linked checkpoint. Returns True if the buckets changed.
        """
        self.past_contents_ids.add(self.contents_id)
        self.contents_id = secrets.token_hex(8)
        changed = total_num_buckets != self.total_num_buckets
        if changed or key != self.native.key or segments is not None:
            check_not_own_save(self, "load")
            self._is_discarding = True  # the rows of the previous table
            buckets, before = self.buckets_of(total_num_buckets), self.native
            before.close()
            # In one statement: after an interrupt, `open` creates an empty table with either the old or the new settings.
            settings = buckets, total_num_buckets, key, None, None
            self.buckets, self.total_num_buckets, self.key, self._native, self._tier = settings
            self.open(segments=segments)
            self.native.adopt_time_source(before)
        return changed

    # ---- rows

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.native)

    def step(self) -> int:
        """Returns the number of training steps."""
        return self.native.step()

    def stats(self) -> TableStats:
        """Returns the counters of the table and of its tiers."""
        return TableStats.from_native(self.native.stats(), self._tier.kernels if self._tier is not None else "core")

    def export(self, chunk_rows: int = 65_536) -> RowExport:
        """Returns the rows of all tiers; see `CacheTable.export`."""
        stream = self.native.export(check_int("chunk_rows", chunk_rows, 1, 1 << 30))
        return RowExport((RowChunk(*self._split_rows(block.ids, block)) for block in stream), self._empty_chunk)

    def _empty_chunk(self) -> RowChunk:
        found = self.read_rows(torch.empty(0, dtype=torch.int64, device="cpu"))
        return RowChunk(found.ids, found.weights, found.slots, found.metadata)

    def read_rows(self, ids: IdsLike) -> FoundRows:
        """Returns the rows of `ids`; see `CacheTable.read_rows`."""
        array = row_ids(ids, self.device)
        rows = self.native.read_rows(array)
        return FoundRows(*self._split_rows(array.copy(), rows), found=torch.from_numpy(rows.found))

    def import_rows(
        self,
        ids: IdsLike,
        weights: ValuesLike,
        slots: Mapping[str, ValuesLike] | None = None,
        metadata: RowMetadata | None = None,
        *,
        collective: bool = False,
    ) -> None:
        """Inserts or overwrites rows; see `CacheTable.import_rows`."""
        if collective:
            import_on_all_ranks(self.name, self, ids, weights, slots, metadata)
            return
        self.check_usable()
        array = row_ids(ids, self.device)
        if not isinstance(metadata, RowMetadata | None):
            raise InputError(f"metadata is a {type(metadata).__name__}: give RowMetadata, or leave it out")
        vectors, scalars = row_vectors(self.spec, self.dim, len(array), weights, slots)
        self.native.import_rows(array, vectors, scalars, metadata.native(len(array)) if metadata is not None else None)

    def remove_rows(self, ids: IdsLike) -> int:
        """Removes the rows of `ids`; see `CacheTable.remove_rows`."""
        return self.native.remove_rows(row_ids(ids, self.device))

    def sweep(self) -> None:
        """Evicts the rows that match at the current step, for rules that need no agreement of ranks (see `_sweep`)."""
        self.native.sweep()

    def _split_rows(
        self, ids: NDArray[np.int64], rows: _native.RowBlock | _native.FoundRows
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], RowMetadata]:
        parts = row_parts(self.spec, self.dim, rows.vectors, rows.scalars)
        return torch.from_numpy(ids), *parts, RowMetadata.from_native(rows.metadata)

    # ---- flushing and closing

    def commit_ids(self) -> list[int]:
        """Returns the commit ids of the states that can be resumed, oldest first."""
        directory = self.directory
        return _native.Table.commit_ids(directory, *self.tiers.ssd_root) if directory is not None else []

    def known_commit_ids(self) -> list[int]:
        """Returns the commit ids of the states in the directory, and the last one committed or resumed, whose state may be gone."""
        last = self.native.last_commit_id()
        return self.commit_ids() if last is None else [*self.commit_ids(), last]

    @property
    def ssd_bytes_held(self) -> int:
        """Size of the SSD tier's files in bytes."""
        return ssd.tier.bytes if (ssd := self.native.stats().ssd) is not None else 0

    @property
    def is_multi_rank(self) -> bool:
        """True if it was opened in a process that is one of several ranks."""
        return self._opened_among_ranks

    @property
    def has_unflushed_rows(self) -> bool:
        """True if it is open in this process with an SSD tier, and has rows changed since the last state that can be resumed."""
        native = self._native
        if native is None or self._closed or self._opened_by_pid != os.getpid() or native.is_closed():
            return False
        return bool(self.tiers.ssd) and self.unusable is None and native.version() != self._flushed

    def flush(self) -> None:
        """Writes every dirty row to the SSD tier and commits a state; see `CacheTable.flush`."""
        self.check_usable()
        if self.directory is not None:
            began = time.monotonic()
            with self.flush_lock:
                version = self.flush_with_commit_id(None)
            self.mark_flushed(version)
            _log.info("flushed %d rows of table %r in %.1f s", len(self), self.name, time.monotonic() - began)

    def flush_with_commit_id(self, commit_id: int | None) -> int:
        """Flushes the table as the state `commit_id` (see `_ssd/commit.py`); None selects the next commit id of this table.

        Discards states of incomplete flushes of several tables. Returns the version of its rows, for `mark_flushed`.
        """
        for other in self.commit_ids():
            try:
                complete = commit.is_committed(self.tiers.ssd_root, other)
            except StateError:  # older than the resumed state, and not needed
                complete = False
            if not complete:
                self.native.forget_commit(other)
        # Read before the flush: the state may or may not contain rows that are trained during the flush.
        version = self.native.version()
        self.native.flush(commit_id)
        return version

    def mark_flushed(self, version: int, *, by_all_ranks: bool = False) -> None:
        """Records that a resume finds the rows of this version; `by_all_ranks`: the rows of every rank."""
        self._flushed = version
        if self._has_superseded_files:
            self._has_superseded_files = diagnostics.remove_superseded(self, by_all_ranks=by_all_ranks)

    def close(self) -> None:
        """Flushes and closes the table; see `CacheTable.close`."""
        native = self._native
        self.evict_notifier.check_not_own_thread("close")
        if not self._closed and native is not None and not native.is_closed():
            check_not_own_save(self, "close")
            try:
                # The state after a failed load is not a state to resume.
                if self.unusable is None:
                    self.flush()
                with self.evict_notifier.closing(native):
                    native.close()
            except Exception as error:
                native.close()
                self._closed = True
                self.evict_notifier.finish(error)
                raise
        self._closed = True
        self.evict_notifier.finish()

    def close_unflushed(self) -> None:
        """Closes a partially loaded table without a flush: a resume finds the last flush."""
        self.set_unflushable()
        self.close()

    def set_unflushable(self) -> None:
        """Poisons a partially loaded table, so that it is not flushed either."""
        self.set_unusable("only a part of the rows that it was to take over is in it")

    def __del__(self) -> None:
        # The constructor may have raised before there was anything to flush.
        if hasattr(self, "evict_notifier"):
            autoflush.flush_dropped_table(self)
            self.evict_notifier.on_table_dropped(self._native)
