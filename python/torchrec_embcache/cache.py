"""One table shard in Python: its settings, its tiers, its rows.

Shapes: n rows, D the table's width, V = D * (1 + vector slots) floats of a row's vector part (weights first).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import _native, disk, lifetime, publish
from .buckets import DEFAULT_BUCKET_HASH, BucketHash, buckets_of
from .collective import world_size as ranks_of_process
from .config import (
    DEFAULT_TOTAL_NUM_BUCKETS,
    MAX_NUM_BUCKETS,
    OnFull,
    Policy,
    TierBudgets,
    bucket_range,
    check_choice,
    check_int,
    check_name,
)
from .exceptions import ConfigError, EmbCacheError, EmbCacheWarning, HostMemoryError, InputError, StateError
from .initializers import Initializer
from .kernels import DeviceTier
from .metrics import TableStats
from .optimizers import SGD, OptimizerSpec
from .owners import import_on_owners
from .rows import FoundRows, Ids, RowChunk, RowExport, RowMetadata, Values, ids_array, row_ids, row_vectors
from .table_copy import described, in_memory_copy, rows_text
from .under_way import refuse_in_own_save

__all__ = ["CacheTable", "FoundRows", "Ids", "RowChunk", "RowExport", "RowMetadata", "Values", "ids_array"]

_log = logging.getLogger(__name__)


class CacheTable:
    """One table shard: settings checked at construction, opened at first use or by `open()`.

    `close()` it, or use it in a `with` statement. A table with an SSD tier that is not closed is flushed when it is dropped and
    when the process ends, unless other ranks have to take part (see `lifetime`). The SSD tier's files are in
    `<ssd_dir>/<module>/<name>/<rank>-of-<world_size>/`, the names percent-encoded.
    """

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
        policy: Policy = "s3fifo",
        on_full: OnFull = "error",
        total_num_buckets: int = DEFAULT_TOTAL_NUM_BUCKETS,
        buckets: tuple[int, int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        key: int | None = None,
    ) -> None:
        """Check the settings; write nothing.

        `optimizer=None` can be read, not trained, until one is set. `buckets`, [begin, end), defaults to this rank's share. `key`
        defaults to one derived from `name`. Raises `ConfigError`, `PathError` or `StoragePermissionError`.
        """
        self.name = check_name("name", name)
        self.module = check_name("module", module if module is not None else name)
        self.dim = check_int("embedding_dim", dim, 1, 65_536)
        self.seed = check_int("seed", seed, 0, (1 << 64) - 1)
        self.world_size = check_int("world_size", world_size, 1, 1 << 20)
        self.rank = check_int("rank", rank, 0, self.world_size - 1)
        self.total_num_buckets = check_int("total_num_buckets", total_num_buckets, 1, MAX_NUM_BUCKETS)
        # How ids fall into buckets: of a new table this, of one that is resumed or loaded what its files say.
        self.bucket_hash: BucketHash = DEFAULT_BUCKET_HASH
        self.buckets = (
            buckets if buckets is not None else bucket_range(self.rank, self.world_size, self.total_num_buckets)
        )
        begin, end = self.buckets
        if not 0 <= begin <= end <= self.total_num_buckets:
            raise ConfigError(
                f"buckets={self.buckets!r} is no range of the {self.total_num_buckets} buckets: give (begin, end)"
            )
        if not isinstance(tiers, TierBudgets):
            raise ConfigError(f"tiers={tiers!r} is not TierBudgets: give TierBudgets(host_bytes=...)")
        if not isinstance(initializer, Initializer):
            raise ConfigError(f"initializer={initializer!r} is not known: use one of torchrec_embcache.initializers")
        check_choice("policy", policy, Policy)
        check_choice("on_full", on_full, OnFull)
        self.tiers = tiers
        self.initializer = initializer
        self.policy: Policy = policy
        self.on_full: OnFull = on_full
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as cause:
            raise ConfigError(f"device={device!r} is not a device: give one such as 'cpu' or 'cuda:0'") from cause
        self.key = key
        # What distinguishes these contents from those before a load replaced them, and the step that a load found.
        self.contents = secrets.token_hex(8)
        self.past_contents: set[str] = set()
        self.loaded_step = 0
        self._tier: DeviceTier | None = None
        self._native: _native.Table | None = None
        self._closed = False
        # The version of the rows that a resume finds; None: it finds others, or none.
        self._flushed: int | None = None
        self._supersedes = False
        self._opened_by = 0
        self._opened_among_ranks = False
        # Held from the choice of a flush's token until its state is published.
        self.flushing = threading.RLock()
        self._discard = False
        self._unusable: str | None = None
        self._optimizer = _check_optimizer(optimizer)
        self.device_rows = self._check_budgets()
        try:
            self.device = torch.empty(0, device=self.device).device  # "cuda" is the current one
        except (RuntimeError, AssertionError) as cause:
            raise ConfigError(f"device={str(device)!r} cannot be used: {cause}") from cause
        if self.directory is not None:
            _native.check_ssd_dir(str(tiers.ssd_dir))

    def _check_budgets(self) -> int | None:
        row_bytes = _native.row_bytes(self.dim, self.spec.kind, self.policy)
        for field, budget, row in (
            ("host_bytes", self.tiers.host, row_bytes.host),
            ("device_bytes", self.tiers.device, row_bytes.device),
            ("ssd_bytes", self.tiers.ssd, self.spec.record_floats(self.dim) * 4),
        ):
            if budget < row and (budget or field == "host_bytes"):
                raise ConfigError(
                    f"TierBudgets.{field}={budget} is too small for one row of table {self.name!r}: {row} bytes at least"
                )
        if self.device.type != "cpu" and not self.tiers.device:
            raise ConfigError(
                f"TierBudgets.device_bytes=0 on {self.device}: give the device tier of table {self.name!r} a budget"
            )
        return min(self.tiers.device // row_bytes.device, (1 << 31) - 1) if self.tiers.device else None

    def _check_device_memory(self, spec: OptimizerSpec) -> None:
        """`ConfigError` for a device tier larger than the device's whole memory, which the system may promise all the same."""
        if self.device.type == "cuda":
            memory = int(torch.cuda.mem_get_info(self.device)[1])
        elif self.device.type == "cpu":
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        else:
            return
        wanted = (self.device_rows or 0) * spec.record_floats(self.dim) * 4
        if wanted > memory:
            raise ConfigError(
                f"TierBudgets.device_bytes={self.tiers.device} of table {self.name!r} takes {wanted} bytes on {self.device}, "
                f"which has {memory}: give less"
            )

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """The optimizer whose slots the rows carry; None until one is set. Fixed once the table has rows."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: OptimizerSpec) -> None:
        spec = _check_optimizer(optimizer)
        if self._native is not None and spec is not None and spec.kind != self.spec.kind:
            if len(self._native):
                raise StateError(
                    f"table {self.name!r} has rows with the slots of {self.spec.given_as}: set {spec.given_as} before it has any"
                )
            refuse_in_own_save(self, "set the optimizer")
            self._discard = True  # what the empty table just opened left behind
            self._native.close()
            self._native = self._tier = None
        self._optimizer = spec
        self.device_rows = self._check_budgets()

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer, or the one without slots where none is set."""
        return self._optimizer if self._optimizer is not None else SGD()

    @property
    def directory(self) -> str | None:
        """The SSD tier's directory of this shard; None without an SSD tier."""
        if not self.tiers.ssd:
            return None
        return _native.table_dir(str(self.tiers.ssd_dir), self.module, self.name, self.rank, self.world_size)

    @property
    def native(self) -> _native.Table:
        """The core's table, opened if it is not."""
        if self._native is None:
            self.open()
        assert self._native is not None, "open() sets it or raises"
        return self._native

    @property
    def native_or_none(self) -> _native.Table | None:
        """The core's table, if it is open."""
        return self._native

    @property
    def tier(self) -> DeviceTier | None:
        """The device tier's tensors; None where kernels run on the host tier's rows in place. Opens the table."""
        self.open()
        return self._tier

    @property
    def is_open(self) -> bool:
        """Whether the tiers are open."""
        return self._native is not None

    def open(self, resume_token: int | None = None, segments: _native.SnapshotSegments | None = None) -> None:
        """Open the tiers; harmless twice. `resume_token` names the state to resume; by default the newest complete one. `segments`
        become the contents, in place of whatever is in the directory.

        Raises `ConfigError`, `InUseError` (another process holds the directory), `StateError` (closed), `MismatchError`,
        `StorageError`.
        """
        if self._closed:
            raise StateError(f"table {self.name!r} is closed: make a new module to use it again")
        # What an adoption that was interrupted had closed is opened again.
        if self._native is not None and not (self._discard and self._native.is_closed()):
            return
        directory, reopen = self.directory, "discard" if self._discard else self.tiers.reopen
        published: list[int] = []
        unfinished: int | None = None
        if directory is not None and reopen in ("resume", "auto"):
            published = self.published()
            if resume_token is None and reopen == "resume":
                resume_token = publish.resume_token(str(self.tiers.ssd_dir), directory, published)
            elif resume_token is None:
                resume_token = publish.newest_complete(str(self.tiers.ssd_dir), published)
                if resume_token is None:
                    unfinished = published[-1] if published else None
                    disk.say_unflushed(directory)
        tier = None
        if self.device_rows is not None:
            spec = self.spec
            self._check_device_memory(spec)
            try:
                tier = DeviceTier(self.dim, spec.vector_slots, spec.scalar_slot(), self.device_rows, self.device)
            except RuntimeError as cause:
                raise HostMemoryError(
                    f"TierBudgets.device_bytes={self.tiers.device} of table {self.name!r} cannot be had on {self.device}: give "
                    f"less, or free memory there ({cause})"
                ) from cause
        native: _native.Table | None = None
        try:
            native = _native.Table(
                name=self.name,
                key=self.key,
                dim=self.dim,
                optimizer=self.spec.kind,
                initializer=self.initializer.native(),
                seed=self.seed,
                total_num_buckets=self.total_num_buckets,
                bucket_hash=self.bucket_hash,
                bucket_begin=self.buckets[0],
                bucket_end=self.buckets[1],
                host_bytes=self.tiers.host,
                device_rows=self.device_rows,
                device_gather=tier.gather if tier is not None else None,
                ssd_dir=directory,
                ssd_bytes=self.tiers.ssd,
                reopen=reopen,
                resume_token=resume_token,
                policy=self.policy,
                on_full=self.on_full,
                segments=segments,
                unfinished=unfinished,
                ssd_root=str(self.tiers.ssd_dir) if directory is not None else None,
            )
            if self._unusable is not None:
                native.set_unusable(self._unusable)
            self.bucket_hash = native.bucket_hash
            self._opened_by = os.getpid()
            self._opened_among_ranks = self.world_size > 1 or ranks_of_process() > 1
            self._flushed = native.version() if segments is None else None
            # Both at once: an interrupt leaves the table open or not.
            self._tier, self._native = tier, native
        except BaseException:
            # Not left to whoever keeps the error: it would hold the directory.
            if native is not None and self._native is not native:
                native.close()
            raise
        if resume_token is not None and published[0] < resume_token and self.published()[0] == resume_token:
            warnings.warn(
                f"table {self.name!r} goes on from its last flush; of the one before, files in {directory} are damaged or missing, "
                "and it was dropped: check the disk",
                EmbCacheWarning,
                stacklevel=2,
            )
        if directory is not None:
            lifetime.opened(self)
        self._supersedes = disk.look_after(self, lifetime.open_tables(), resumed=resume_token)

    def set_unusable(self, reason: str | None) -> None:
        """Refuse every use (`StateError` with the reason) until this is called with None: the contents are incomplete."""
        self._unusable = reason
        if self._native is not None and not self._native.is_closed():
            self._native.set_unusable(reason)

    @property
    def unusable(self) -> str | None:
        """Why every use is refused; None where it is not."""
        # What the core says counts: an interrupt may have come before it was told that a load has succeeded.
        if self._native is not None and not self._native.is_closed():
            return self._native.unusable()
        return self._unusable

    def _refuse_unusable(self) -> None:
        reason = self.unusable
        if reason is not None:
            raise StateError(f"table {self.name!r} cannot be used: {reason}")

    def buckets_of(self, total_num_buckets: int) -> tuple[int, int]:
        """The buckets [begin, end) that this shard owns where there are `total_num_buckets`: all if it owns all now."""
        if self.buckets == (0, self.total_num_buckets):
            return 0, total_num_buckets
        return bucket_range(self.rank, self.world_size, total_num_buckets)

    def owns(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of `ids` [n] fall into the buckets of this shard: bool [n]."""
        begin, end = self.buckets
        buckets = buckets_of(ids, self.total_num_buckets, self.bucket_hash)
        return (buckets >= begin) & (buckets < end)

    def adopt(
        self,
        total_num_buckets: int,
        key: int,
        bucket_hash: BucketHash,
        segments: _native.SnapshotSegments | None = None,
    ) -> bool:
        """Take the number of buckets, how ids fall into them, and the key of a checkpoint, for a load into an open table. Where one
        of them is another the table is made anew, without its rows; with `segments`, with the rows, step and epoch of a snapshot's.
        Whether the buckets changed.
        """
        self.past_contents.add(self.contents)
        self.contents = secrets.token_hex(8)
        changed = (total_num_buckets, bucket_hash) != (self.total_num_buckets, self.bucket_hash)
        if changed or key != self.native.key or segments is not None:
            refuse_in_own_save(self, "load")
            self._discard = True  # the rows of the table before
            buckets = self.buckets_of(total_num_buckets)
            self.native.close()
            # At once: wherever an interrupt comes, `open` makes an empty table of the settings before or of the new ones.
            settings = buckets, total_num_buckets, key, bucket_hash, None
            self.buckets, self.total_num_buckets, self.key, self.bucket_hash, self._native = settings
            self._tier = None
            self.open(segments=segments)
        return changed

    def __bool__(self) -> bool:
        """True, with no rows too."""
        return True

    def __len__(self) -> int:
        """Rows in all tiers of this shard: born in training or imported, and not removed."""
        return len(self.native)

    def stats(self) -> TableStats:
        """Counters of the table and its tiers."""
        return TableStats.of(self.native.stats())

    def published(self) -> list[int]:
        """Tokens of the states that a resume can take, oldest first."""
        directory = self.directory
        return _native.Table.published(directory, str(self.tiers.ssd_dir)) if directory is not None else []

    def export(self, chunk_rows: int = 65_536) -> RowExport:
        """Every row of every tier as of this call, in chunks; a step taken meanwhile ends it (`StateError`).

        So does a call that needs room on SSD, where chunks are left untaken and the files that they are still to be read from
        stand in its way.

        For example `table.export().to_numpy()["weights"]`, where all rows fit in RAM.
        """
        stream = self.native.export(check_int("chunk_rows", chunk_rows, 1, 1 << 30))
        return RowExport((RowChunk(*self._parts(block.ids, block)) for block in stream), self._no_rows)

    def _no_rows(self) -> RowChunk:
        found = self.read_rows(torch.empty(0, dtype=torch.int64))
        return RowChunk(found.ids, found.weights, found.slots, found.metadata)

    def read_rows(self, ids: Ids) -> FoundRows:
        """The rows of `ids` [n] (an int64 or int32 tensor, a numpy array or a list), in that order; touches neither policy nor
        counters.
        """
        array = row_ids(ids, self.device)
        rows = self.native.read_rows(array)
        return FoundRows(*self._parts(array.copy(), rows), found=torch.from_numpy(rows.found))

    def import_rows(
        self,
        ids: Ids,
        weights: Values,
        slots: Mapping[str, Values] | None = None,
        metadata: RowMetadata | None = None,
        *,
        collective: bool = False,
    ) -> None:
        """Put rows in the table, over those that are there. `ids` [n] distinct 64-bit integers; `weights` [n, D].

        Tensors, numpy arrays and lists are taken; numbers of another type become float32. `slots` are those of the optimizer, as
        in `RowChunk`; None: zeros. `metadata` None: as never used. Raises `InputError`, and `StateError` when a batch in flight
        uses one of the rows. On an error no row has changed, unless it says how many were imported: a table with
        `on_full="evict"` takes them in parts. Where the disk of the SSD tier fails amid the call, all rows are imported, what could
        not be written stays in RAM, and the next call that writes raises `ReadOnlyError`.

        With `collective=True` every rank calls this at the same time, each with rows of any ids, or with none, and every row goes
        to the rank that owns it. Without it the ids must be this shard's own: those of other shards' buckets are refused.

        For example `table.import_rows([7, 9], np.zeros((2, 64)))`.
        """
        if collective:
            import_on_owners(self.name, self, ids, weights, slots, metadata)
            return
        self._refuse_unusable()
        array = row_ids(ids, self.device)
        if not isinstance(metadata, RowMetadata | None):
            raise InputError(f"metadata is a {type(metadata).__name__}: give RowMetadata, or leave it out")
        vectors, scalars = row_vectors(self.spec, self.dim, len(array), weights, slots)
        self.native.import_rows(array, vectors, scalars, metadata.native(len(array)) if metadata is not None else None)

    def remove_rows(self, ids: Ids) -> int:
        """Forget the rows of `ids` [n] (a tensor, a numpy array or a list): unseen from now on. How many there were.

        On an error all of them are there as before, unless it says how many were removed. Where the disk of the SSD tier fails amid
        the call, all are removed, and the next call that writes raises `ReadOnlyError`.
        """
        return self.native.remove_rows(row_ids(ids, self.device))

    def _parts(
        self, ids: NDArray[np.int64], rows: _native.RowBlock | _native.FoundRows
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], RowMetadata]:
        columns = torch.split(torch.from_numpy(rows.vectors), self.dim, 1)
        spec = self.spec
        slots = {name: part.contiguous() for name, part in zip(spec.slot_names, columns[1:], strict=False)}
        if spec.scalar_slot():
            slots[spec.slot_names[-1]] = torch.from_numpy(rows.scalars)
        return torch.from_numpy(ids), columns[0].contiguous(), slots, RowMetadata.of(rows.metadata)

    @property
    def ssd_bytes_held(self) -> int:
        """Bytes of the files of the SSD tier."""
        ssd = self.native.stats().ssd
        return ssd.tier.bytes if ssd is not None else 0

    @property
    def of_several_ranks(self) -> bool:
        """Whether it was opened in a process that is one of several ranks."""
        return self._opened_among_ranks

    @property
    def has_unflushed_rows(self) -> bool:
        """Whether it is open in this process with an SSD tier, and its rows changed since a resume would find them."""
        native = self._native
        if native is None or self._closed or self._opened_by != os.getpid() or native.is_closed():
            return False
        return bool(self.tiers.ssd) and self.unusable is None and native.version() != self._flushed

    def step(self) -> int:
        """Training steps so far."""
        return self.native.step()

    def flush(self) -> None:
        """Write every dirty row to the SSD tier and publish one state, which a resume takes. Without an SSD tier: nothing.

        Threads that flush one table take turns.
        """
        self._refuse_unusable()
        if self.directory is not None:
            began = time.monotonic()
            with self.flushing:
                version = self.flush_as(None)
            self.note_flushed(version)
            _log.info("flushed %d rows of table %r in %.1f s", len(self), self.name, time.monotonic() - began)

    def known_tokens(self) -> list[int]:
        """Tokens of the states in the directory, and that of the last one published or resumed, whose state may be gone."""
        last = self.native.last_token()
        return self.published() if last is None else [*self.published(), last]

    def flush_as(self, token: int | None) -> int:
        """Flush as the state named `token` (see `publish`); None is the next token of this table alone.

        States that a flush of several tables left incomplete are forgotten. Gives the version of the rows that the state has, for
        `note_flushed`.
        """
        for other in self.published():
            try:
                complete = publish.is_complete(str(self.tiers.ssd_dir), other)
            except StateError:  # older than the one that was resumed: nobody needs it
                complete = False
            if not complete:
                self.native.forget_published(other)
        # Read first: what is trained meanwhile may be in the state or not.
        version = self.native.version()
        self.native.flush(token)
        return version

    def note_flushed(self, version: int, *, by_all_ranks: bool = False) -> None:
        """A resume finds the rows of this version from now on. `by_all_ranks`: those of every rank."""
        self._flushed = version
        if self._supersedes:
            self._supersedes = disk.remove_superseded(self, by_all_ranks=by_all_ranks)

    def close(self) -> None:
        """Flush and close; harmless twice. The tiers are closed even when the flush fails, which raises.

        A save beside training that has the table is waited for. Ctrl-C ends the wait, and the flush: then the table is open, and
        this can be called again. `StateError` from a `progress` callable of that save, which would wait for itself.
        """
        native = self._native
        if self._closed or native is None or native.is_closed():
            self._closed = True
            return
        refuse_in_own_save(self, "close")
        try:
            # What a failed load left is no state to resume.
            if self.unusable is None:
                self.flush()
            native.close()
        except Exception:
            native.close()
            self._closed = True
            raise
        self._closed = True

    def __del__(self) -> None:
        # The constructor may have raised before there was anything to look after.
        if getattr(self, "_native", None) is not None:
            lifetime.dropped(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except EmbCacheError as failure:
            if error is None:
                raise
            error.add_note(f"closing table {self.name!r} failed too: {failure}")

    def describe(self, numbers: Mapping[str, Any] | None = None) -> str:
        """Settings, optimizer, rows and budgets in one line. Opens nothing. `numbers`: the optimizer's as they are now."""
        return described(self, rows_text(self, closed=self._closed), numbers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A table of its own in memory, with the same rows, slots, metadata, step and epoch. `StateError` with an SSD tier."""
        if self.directory is not None:
            raise StateError(
                f"table {self.name!r} cannot be copied: the files of its SSD tier have one owner. Make a second module with "
                "budgets of its own (in RAM, or another ssd_dir), and give it the rows: Saver(rank).save(model, path), then "
                "Saver(rank).load(copy, path)"
            )
        if self._closed:
            raise StateError(f"table {self.name!r} is closed: make a new module to use it again")
        self._refuse_unusable()
        return in_memory_copy(self, memo)

    def __reduce__(self) -> str:
        raise StateError(
            f"table {self.name!r} cannot be pickled: it owns memory and files; save its rows with Saver(rank).save(model, path), "
            "or export() them"
        )


def _check_optimizer(optimizer: object) -> OptimizerSpec | None:
    if not isinstance(optimizer, OptimizerSpec | None):
        raise ConfigError(f"optimizer={optimizer!r} is not known: use one of torchrec_embcache.optimizers")
    return optimizer
