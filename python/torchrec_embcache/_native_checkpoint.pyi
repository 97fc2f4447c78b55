"""The part of `_native` that saves and loads checkpoints (`rust/core/src/checkpoint`). This module does not exist at run time.

`torchrec_embcache.checkpoint` documents the order of calls of a save and of a load. Shapes: n rows, V floats of a row's vector part, as in `_native`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from ._native import (F32, I64, RowBlock, RowMetadata, Table)

@final
class CheckpointId:
    """The identity of a checkpoint. Compared by value, picklable."""

    def __new__(cls, name: str, manifest_xxh3: int) -> CheckpointId: ...
    name: str
    manifest_xxh3: int

@final
class BaseCheckpoint:
    """A checkpoint on which a delta of a table can be based. Compared by value, picklable."""

    def __new__(cls, id: CheckpointId, next_epoch: int) -> BaseCheckpoint: ...  # noqa: A002
    id: CheckpointId
    next_epoch: int  # the first epoch whose modifications it does not have

@final
class ChangeCounts:
    """Counts of a table's changes since a checkpoint. Compared by value, picklable."""

    def __new__(cls, rows: int, tombstones: int, swept: int, expiring: int) -> ChangeCounts: ...
    rows: int  # of the table
    tombstones: int  # removed ids with tombstones in a delta
    swept: int  # rows evicted by sweeps, without tombstones
    expiring: int  # rows in RAM that a load would drop

@final
class CheckpointDirectory:
    """A directory that passed the checks of path, owner and permission bits, held by its descriptor.

    Operations use the checked directory, even if its path is replaced. Except with strict checks, symbolic links in the path are
    resolved once, when it is opened.
    """

    @staticmethod
    def open_to_save(path: str, checks: Literal["strict", "basic", "trusted"]) -> CheckpointDirectory: ...  # created (mode 0750) if missing; PathError, StoragePermissionError
    @staticmethod
    def open_to_load(path: str, checks: Literal["strict", "basic", "trusted"]) -> CheckpointDirectory: ...  # may be read-only
    path: str  # absolute, without links
    def contains(self, name: str) -> bool: ...  # True if the entry exists; does not follow a link
    def open_descriptor(self) -> int: ...  # of the directory, closed by the caller

@final
class ManifestDigest:
    """The identity of a manifest of a rank or of a part. Compared by value, picklable."""

    def __new__(cls, bytes: int, xxh3: int) -> ManifestDigest: ...  # noqa: A002
    bytes: int
    xxh3: int

@final
class TableWriteStats:
    """The result of writing one table."""

    rows: int
    tombstones: int
    linked_bytes: int  # of segments shared with the SSD tier
    copied_bytes: int  # of segments that could not be linked

@final
class PublishedCheckpoint:
    """The result of committing a checkpoint."""

    id: CheckpointId
    parent: CheckpointId | None  # the base of a delta: it may have been merged since the delta was started
    cleanup_errors: list[str]  # older checkpoints that could not be removed, with the reasons

@final
class CheckpointCopyReport:
    """The result of a copy of a checkpoint."""

    names: list[str]  # of the copied checkpoints, oldest first
    bytes: int  # of their files
    is_newest: bool  # True if loads there find it

@final
class PruneReport:
    """The result of a removal of checkpoints."""

    removed: list[str]  # names, oldest first
    errors: list[str]  # checkpoints that could not be removed, with the reasons

@final
class WrittenPart:
    """A part that one rank wrote. Picklable."""

    def __new__(cls, directory: str, name: str, digest: ManifestDigest) -> WrittenPart: ...
    directory: str
    name: str
    digest: ManifestDigest

@final
class StreamRange:
    """A range of a rank's stream of extents."""

    offset: int
    bytes: int

@final
class AsyncSaveTable:
    """A table of this rank, for an asynchronous save."""

    def __new__(cls, module: str, table: Table, hyperparameters: Mapping[str, float], base: BaseCheckpoint | None = None) -> AsyncSaveTable: ...  # `base`: the base of a delta of it

@final
class NewestCheckpoint:
    """Metadata of the latest checkpoint of a directory."""

    id: CheckpointId
    merged: CheckpointId | None  # the delta that it was merged from
    next_epoch: int
    kind: Literal["full", "delta", "linked", "serving"]
    tables: list[SavedTable]

@final
class SavedTable:
    """Metadata of a table in a checkpoint."""

    module: str
    table: str
    key: int
    dim: int
    optimizer: str
    hyperparameters: Mapping[str, float]  # of its optimizer, at the save
    step: int
    seed: int
    total_num_buckets: int
    rows: int
    pending: int | None  # number of ids with an admission count and no row; None if counts were not saved
    has_oov_row: bool  # True if the OOV row was saved

def chunk_checksums(data: NDArray[np.uint8], chunk_bytes: int) -> NDArray[np.uint32]: ...  # CRC-32C of each chunk of contiguous bytes
def remove_stale_parts(directory: CheckpointDirectory) -> list[str]: ...  # removes parts without an owner; returns those that could not be removed
def prune_checkpoints(directory: CheckpointDirectory, keep: int) -> PruneReport: ...  # all but the latest and their bases; PathError if there is none
def latest_checkpoint(directory: CheckpointDirectory) -> str: ...  # the argument of CheckpointReader; PathError if there is none
def newest_checkpoint(directory: CheckpointDirectory) -> NewestCheckpoint | None: ...  # None if there is none

@final
class RecisBlockSpec:
    """A block to write: the ids or one slot of a table's rows, or a dense tensor (slot None)."""

    def __new__(cls, name: str, slot: str | None, dtype: str, shape: Sequence[int]) -> RecisBlockSpec: ...

@final
class RecisWrittenTable:
    """A table whose blocks were written: its entry in the shard's manifest."""

    def __new__(
        cls,
        *,
        name: str,
        dim: int,
        optimizer: str,
        key: int,
        seed: int,
        step: int,
        epoch: int,
        total_num_buckets: int,
        bucket_begin: int,
        bucket_end: int,
        runs: Sequence[int],  # rows of each run
    ) -> RecisWrittenTable: ...

@final
class RecisShardOutcome:
    """The result of finishing a shard's part."""

    is_last: bool  # it committed the save
    cleanup_errors: list[str]  # older saves that could not be removed, with the reasons

@final
class TableStep:
    """A table, by its name, and its number of training steps."""

    def __new__(cls, name: str, step: int) -> TableStep: ...
    name: str
    step: int

@final
class RecisSave:
    """One shard's part of a RecIS-format save. While it exists the part is not removed, and no other process writes the shard.

    `steps`: those of the tables. Ctrl-C interrupts a wait for other processes.
    """

    def __new__(cls, directory: CheckpointDirectory, shard: int, shards: int, steps: Sequence[TableStep], random: int) -> RecisSave: ...  # a new save
    @staticmethod
    def join_or_begin(
        directory: CheckpointDirectory, shard: int, shards: int, steps: Sequence[TableStep], random: int
    ) -> RecisSave: ...  # the latest that waits for this shard and has the same steps of tables, or a new one
    @staticmethod
    def join(
        directory: CheckpointDirectory, shard: int, shards: int, steps: Sequence[TableStep], name: str
    ) -> RecisSave: ...  # InUseError if it does not fit
    name: str
    def open_files(self, parallel: int, blocks: Sequence[RecisBlockSpec]) -> None: ...
    def append(self, block: int, data: NDArray[np.uint8]) -> None: ...
    def append_rows(self, block: int, rows: NDArray[np.uint8], order: I64) -> None: ...  # [n, bytes of a row]
    def publish(self, tables: Sequence[RecisWrittenTable]) -> RecisShardOutcome: ...
    def abandon(self) -> None: ...  # removes a save of one shard; idempotent

@final
class RecisBlockShape:
    """The contents of a block, one slot of a table's rows, or a dense tensor."""

    name: str
    dtype: str  # safetensors name
    shape: list[int]  # of one row, or of the tensor
    bytes: int  # of one row, or of the tensor

@final
class RecisTableInfo:
    """Metadata of a table in a RecIS-format save."""

    name: str
    dim: int
    key: int
    step: int
    epoch: int
    total_num_buckets: int
    slots: list[RecisBlockShape]

@final
class RecisRun:
    """Rows that are contiguous in the blocks of one shard, sorted by (bucket, uint64(id))."""

    rows: int

@final
class RecisReader:
    """The latest complete RecIS-format save of a directory, with verified manifests. It is kept until `release`."""

    def __new__(cls, directory: CheckpointDirectory) -> RecisReader: ...
    def release(self) -> None: ...  # closes its files, so that saves may remove it; idempotent
    def tables(self) -> list[RecisTableInfo]: ...
    def tensors(self) -> list[RecisBlockShape]: ...
    def runs(
        self, table: str, total_num_buckets: int, bucket_begin: int, bucket_end: int
    ) -> list[RecisRun]: ...  # with the save's own buckets only those rows, else all
    def read_rows(self, table: str, run: RecisRun, slot: str, into: NDArray[np.uint8]) -> None: ...  # verified; ids are those of the buckets, in order
    def read_tensor(self, name: str, begin: int, into: NDArray[np.uint8]) -> None: ...  # verified

@final
class CheckpointSave:
    """The coordinator's part of a save. While it exists other saves do not remove its directory."""

    def __new__(
        cls,
        directory: CheckpointDirectory,
        random: int,  # 64 bits that distinguish concurrent saves
        *,
        keep: int = 1,
        parent: CheckpointId | None = None,  # of a delta
        merged: CheckpointId | None = None,  # the delta or linked checkpoint that it replaces
        linked: bool = False,  # tables are written by `link_table`
    ) -> CheckpointSave: ...
    name: str
    def adopt(self, rank: int, world_size: int, parts: Sequence[WrittenPart]) -> ManifestDigest: ...  # the rank's digest
    def write_dense_metadata(self, metadata: bytes) -> None: ...  # describes the ranks' extents
    def publish(self, digests: Sequence[ManifestDigest], next_epoch: int) -> PublishedCheckpoint: ...  # digests by rank
    def abandon(self) -> None: ...  # does nothing once it has ended

@final
class RowWriteBatch:
    """A batch of n rows to write into a checkpoint. Parts that are None are written as zeros."""

    def __new__(cls, ids: I64, vectors: F32, scalars: F32 | None = None, metadata: RowMetadata | None = None) -> RowWriteBatch: ...
    ids: I64  # [n], distinct
    vectors: F32  # [n, V]
    scalars: F32 | None  # [n]
    metadata: RowMetadata | None
    def __len__(self) -> int: ...

@final
class CheckpointWriter:
    """One rank's part of a save."""

    def __new__(
        cls,
        directory: CheckpointDirectory,
        name: str,
        rank: int,
        world_size: int,
        *,
        counters: bool = True,  # False: omits admission counts
    ) -> CheckpointWriter: ...
    def write_table(self, module: str, table: Table, hyperparameters: Mapping[str, float]) -> TableWriteStats: ...
    def link_table(self, module: str, table: Table, hyperparameters: Mapping[str, float]) -> TableWriteStats: ...  # like write_table without an SSD tier
    def write_rows(
        self,
        spec: str,  # the table's entry in a manifest (`spec`), JSON
        bucket_begin: int,
        bucket_end: int,
        chunks: Iterable[RowWriteBatch],  # each id in one of them
    ) -> int: ...  # number of rows written; raises the errors of `chunks`
    def write_changes(self, module: str, table: Table, hyperparameters: Mapping[str, float], base: BaseCheckpoint) -> TableWriteStats: ...
    def finish(self) -> ManifestDigest: ...  # for `publish`

@final
class CheckpointSnapshot:
    """One rank's part of an asynchronous save: a snapshot of the tables at creation, held until it is released or destroyed."""

    def __new__(
        cls,
        directory: CheckpointDirectory,
        name: str,
        rank: int,
        world_size: int,
        tables: Sequence[AsyncSaveTable],
        next_epoch: int,  # the epoch of rows trained after the snapshot
        bytes_per_second: int | None,
        *,
        counters: bool = True,
    ) -> CheckpointSnapshot: ...  # StateError while another snapshot of a table is held
    def write_table(self) -> TableWriteStats | None: ...  # the next one; None if none is left
    def finish(self) -> ManifestDigest: ...  # for `publish`
    def release(self) -> None: ...  # idempotent

def work_in_background() -> None: ...  # permanently gives the calling thread the lowest priority

@final
class ChainCompaction:
    """One rank's part of merging a chain of deltas."""

    @staticmethod
    def open(directory: CheckpointDirectory, latest: str, *, counters: bool = True) -> ChainCompaction | None: ...  # None if it is already full
    id: CheckpointId
    next_epoch: int
    rows: int
    def release(self) -> None: ...  # ends reading, so that saves may remove the merged checkpoints
    def write(self, name: str, rank: int, world_size: int, progress: Callable[[int], object] | None = None) -> ManifestDigest: ...  # for `publish`; progress is called with row counts

@final
class CheckpointPart:
    """One rank's part of a save whose ranks do not communicate before its end. It is not removed while this exists."""

    def __new__(cls, directory: CheckpointDirectory, random: int, expected_bytes: int) -> CheckpointPart: ...  # expected_bytes: of all extents
    name: str
    def write_table(self, module: str, table: Table, hyperparameters: Mapping[str, float]) -> TableWriteStats: ...
    def snapshot_tables(self, tables: Sequence[AsyncSaveTable], next_epoch: int) -> None: ...  # takes a snapshot; rows trained afterwards have next_epoch
    def write_snapshot(self) -> int: ...  # during training; number of rows written
    def append(self, data: NDArray[np.uint8]) -> None: ...  # to the current extent
    def end_dense_extent(self) -> StreamRange: ...  # its position in this rank's stream
    def finish(self) -> WrittenPart: ...  # for `adopt`
    def abandon(self) -> None: ...  # idempotent

@final
class CheckpointReader:
    """A checkpoint and its bases, with verified manifests. Saves do not remove them while this exists, or until `release`."""

    def __new__(cls, directory: CheckpointDirectory, latest: str) -> CheckpointReader: ...
    name: str
    id: CheckpointId
    chain_names: list[str]  # names, latest first
    next_epoch: int
    kind: Literal["full", "delta", "linked", "serving"]
    def release(self) -> None: ...  # ends reading, so that saves may remove them
    def tables(self) -> list[SavedTable]: ...
    def check_table(
        self,
        module: str,
        table: Table,
        bucket_begin: int,
        bucket_end: int,
        *,
        saved: SavedTable | None = None,  # the table that it is loaded from, one of `tables`; None: the table of the same module and name
        segments: bool = False,  # False: MismatchError if it would have to be opened from segments
        slots: bool = True,  # False: rows are loaded without the optimizer's slots, and any optimizer fits
    ) -> int: ...  # checks that it fits and is not in use, and files' headers; an upper bound of the rows to load
    def segments(self, module: str, table: str) -> LinkedSegments | None: ...  # after check_table; not None: create a Table from these, without load_table
    def load_table(self, module: str, table: Table, progress: Callable[[int], object] | None = None) -> int: ...  # after check_table, with its buckets; number of rows loaded; progress is called with row counts
    def dense_metadata(self) -> bytes | None: ...  # the bytes passed to `write_dense_metadata`
    def stream_bytes(self) -> list[int]: ...  # length of each rank's stream of extents
    def read_dense(self, rank: int, offset: int, into: NDArray[np.uint8]) -> None: ...  # any part of a stream, verified

@final
class LinkedSegments:
    """The segments of a table's SSD tier in a linked checkpoint, with verified footers."""

    rows: int

@final
class CountedIds:
    """The admission counts of n ids, in ascending order as unsigned integers."""

    ids: I64  # [n]
    shows: NDArray[np.uint32]  # [n] occurrences in training batches
    clicks: NDArray[np.uint32]  # [n] zeros if clicks are not counted
    is_older: NDArray[np.bool_]  # [n] in the older generation of its bucket, which is forgotten next
    def __len__(self) -> int: ...

@final
class IdExpiry:
    """A sweep in a delta that evicts a row."""

    sweep: int  # its index in the delta
    rule: str  # JSON: the part of its rule that matches the row
    score: float | None  # the row's after the sweep's step, if the rule uses scores

@final
class IdHistoryEntry:
    """The state of one id in one checkpoint of a chain."""

    row: RowBlock | None  # one row, without slots, if its own files have it
    has_tombstone: bool  # the id was removed since the parent; with a row it was inserted again
    count: CountedIds | None  # of the id, if its own files have it
    sweeps: list[IdExpiry]  # its sweeps that evict the row of the previous checkpoints
    has_row_now: bool  # including its bases
    count_now: CountedIds | None  # the same

@final
class CheckpointRows:
    """A checkpoint whose rows are read without tables."""

    def __new__(cls, directory: CheckpointDirectory, latest: str) -> CheckpointRows: ...
    def release(self) -> None: ...  # ends reading, so that saves may remove it
    def manifest(self) -> str: ...  # JSON
    def check_ranks(self, part: int, parts: int) -> None: ...  # CorruptionError in a manifest of part of the ranks, also of bases
    def chain_manifests(self) -> list[str]: ...  # JSON: the manifests of it and of all its bases, latest first
    def read(
        self,
        module: str,
        table: str,
        bucket_begin: int,
        bucket_end: int,
        sink: Callable[[RowBlock], None] | None,
        *,
        counts: Callable[[CountedIds], None] | None = None,
    ) -> int: ...  # number of rows of the buckets, verified, passed to `sink` in chunks, then the counts of each bucket passed to `counts` (both None: only verified); raises their errors
    def id_history(self, module: str, table: str, id: int) -> list[IdHistoryEntry]: ...  # noqa: A002  # of each checkpoint, newest first; MismatchError
    def reshard(self, to: CheckpointDirectory, random: int, world_size: int, *, counters: bool = True) -> PublishedCheckpoint: ...  # rewritten there
    def copy(self, to: CheckpointDirectory) -> CheckpointCopyReport: ...  # to another directory, and verified there; CorruptionError, StateError, InUseError
    def write_serving_checkpoint(
        self, to: CheckpointDirectory, random: int, precision: str, keep: int
    ) -> PublishedCheckpoint: ...  # written there without slots; "fp32", "fp16", "bf16" or "int8", else ConfigError; InputError names a row that it cannot represent

