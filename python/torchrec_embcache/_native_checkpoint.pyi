"""The part of `_native` that saves and loads checkpoints (`rust/core/src/checkpoint`). There is no module of this name at run time.

The calls of a save and of a load, in order, are in `sessions`. Shapes: n rows, V floats of a row's vector part, as in `_native`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from ._native import F32, I64, RowBlock, RowMetadata, Table

@final
class CheckpointId:
    """What identifies a checkpoint. Compared by value, pickled."""

    def __new__(cls, name: str, manifest_xxh3: int) -> CheckpointId: ...
    name: str
    manifest_xxh3: int

@final
class BaseCheckpoint:
    """A checkpoint that a delta of a table can build on. Compared by value, pickled."""

    def __new__(cls, id: CheckpointId, next_epoch: int) -> BaseCheckpoint: ...  # noqa: A002
    id: CheckpointId
    next_epoch: int  # the first epoch whose modifications it does not have

@final
class ChangeCounts:
    """Counts of what changed in a table since a checkpoint. Compared by value, pickled."""

    def __new__(cls, rows: int, tombstones: int, swept: int, expiring: int) -> ChangeCounts: ...
    rows: int  # of the table
    tombstones: int  # ids that left, and of which a delta has tombstones
    swept: int  # rows that sweeps took, and of which it has none
    expiring: int  # rows in RAM that are there and that a load would drop

@final
class CheckpointDirectory:
    """A directory that passed the checks of path, owner and permission bits, and is held by its descriptor.

    What works in it works in the directory that was checked, whatever its path names by then. Except with strict checks the links in
    the path are followed once, when it is made.
    """

    @staticmethod
    def open_to_save(path: str, checks: Literal["strict", "basic", "trusted"]) -> CheckpointDirectory: ...  # made (mode 0750) when missing; PathError, StoragePermissionError
    @staticmethod
    def open_to_load(path: str, checks: Literal["strict", "basic", "trusted"]) -> CheckpointDirectory: ...  # it need not be writable
    path: str  # absolute, without links
    def contains(self, name: str) -> bool: ...  # whether something lies there; a link is not followed
    def open_descriptor(self) -> int: ...  # of the directory, the caller's to close

@final
class ManifestDigest:
    """What identifies the manifest of a rank or of a part. Compared by value, pickled."""

    def __new__(cls, bytes: int, xxh3: int) -> ManifestDigest: ...  # noqa: A002
    bytes: int
    xxh3: int

@final
class TableWriteStats:
    """What writing one table made."""

    rows: int
    tombstones: int
    linked_bytes: int  # of segments that the checkpoint shares with the SSD tier
    copied_bytes: int  # of segments that could not be linked

@final
class PublishedCheckpoint:
    """What publishing a checkpoint did."""

    id: CheckpointId
    parent: CheckpointId | None  # what a delta builds on: it may have been merged since the delta was begun
    cleanup_errors: list[str]  # which older checkpoints could not be removed, and why

@final
class CheckpointCopyReport:
    """The result of a copy of a checkpoint."""

    names: list[str]  # of the checkpoints that were not there yet, oldest first
    bytes: int  # of their files
    is_newest: bool  # whether loads there find it

@final
class PruneReport:
    """The result of a removal of checkpoints."""

    removed: list[str]  # names, oldest first
    errors: list[str]  # which could not be removed, and why

@final
class WrittenPart:
    """A part that one rank wrote. Pickled."""

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
    """A table of this rank that is to be held and written beside training."""

    def __new__(cls, module: str, table: Table, hyperparameters: Mapping[str, float], base: BaseCheckpoint | None = None) -> AsyncSaveTable: ...  # `ancestor`: what a delta of it builds on

@final
class NewestCheckpoint:
    """What the newest checkpoint of a directory says of itself."""

    id: CheckpointId
    merged: CheckpointId | None  # the delta that it was merged from
    next_epoch: int
    kind: Literal["full", "delta", "linked"]
    tables: list[SavedTable]

@final
class SavedTable:
    """What a checkpoint says of one of its tables."""

    module: str
    table: str
    key: int
    dim: int
    optimizer: str
    hyperparameters: Mapping[str, float]  # of its optimizer, as they were when it was saved
    step: int
    seed: int
    total_num_buckets: int
    rows: int
    pending: int | None  # ids without a row that have counts; None where counts were not saved
    has_oov_row: bool  # whether the row that refused ids share was saved

def chunk_checksums(data: NDArray[np.uint8], chunk_bytes: int) -> NDArray[np.uint32]: ...  # CRC-32C of each chunk of contiguous bytes
def remove_stale_parts(directory: CheckpointDirectory) -> list[str]: ...  # removes the parts that nobody holds; what could not be removed
def prune_checkpoints(directory: CheckpointDirectory, keep: int) -> PruneReport: ...  # all but the newest and what they build on; PathError when there is none
def latest_checkpoint(directory: CheckpointDirectory) -> str: ...  # what CheckpointReader takes; PathError when there is none
def newest_checkpoint(directory: CheckpointDirectory) -> NewestCheckpoint | None: ...  # None when there is none

@final
class RecisBlockSpec:
    """A block to write: of a table's rows the ids or one slot, or a dense tensor (slot None)."""

    def __new__(cls, name: str, slot: str | None, dtype: str, shape: Sequence[int]) -> RecisBlockSpec: ...

@final
class RecisWrittenTable:
    """A table whose blocks were written: what the shard's manifest says of it."""

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
        starts: I64,  # [runs, buckets + 1]: where in each run the rows of each bucket start, and the last ones end
    ) -> RecisWrittenTable: ...

@final
class RecisShardOutcome:
    """What the end of a shard's part did."""

    is_last: bool  # it published the save
    cleanup_errors: list[str]  # which older saves could not be removed, and why

@final
class TableStep:
    """A table, by its name, and how many training steps it has made."""

    def __new__(cls, name: str, step: int) -> TableStep: ...
    name: str
    step: int

@final
class RecisSave:
    """One shard's part of a block-level save. Nobody sweeps it, and no other process writes the shard, as long as this lives.

    `steps`: of the tables. Ctrl-C ends a wait for other processes.
    """

    def __new__(cls, directory: CheckpointDirectory, shard: int, shards: int, steps: Sequence[TableStep], random: int) -> RecisSave: ...  # a new one
    @staticmethod
    def join_or_begin(
        directory: CheckpointDirectory, shard: int, shards: int, steps: Sequence[TableStep], random: int
    ) -> RecisSave: ...  # the newest that waits for this shard and saw the tables at the same steps, or a new one
    @staticmethod
    def join(
        directory: CheckpointDirectory, shard: int, shards: int, steps: Sequence[TableStep], name: str
    ) -> RecisSave: ...  # InUseError where it does not fit
    name: str
    def open_files(self, parallel: int, blocks: Sequence[RecisBlockSpec]) -> None: ...
    def append(self, block: int, data: NDArray[np.uint8]) -> None: ...
    def append_rows(self, block: int, rows: NDArray[np.uint8], order: I64) -> None: ...  # [n, bytes of a row]
    def publish(self, tables: Sequence[RecisWrittenTable]) -> RecisShardOutcome: ...
    def abandon(self) -> None: ...  # a save of one shard is removed; harmless twice

@final
class RecisBlockShape:
    """What of a table's rows a block holds, by slot, or a dense tensor."""

    name: str
    dtype: str  # as safetensors names it
    shape: list[int]  # of one row, or of the tensor
    bytes: int  # of one row, or of the tensor

@final
class RecisTableInfo:
    """What a block-level save says of a table."""

    name: str
    dim: int
    key: int
    step: int
    epoch: int
    total_num_buckets: int
    slots: list[RecisBlockShape]

@final
class RecisRun:
    """Rows that lie together in the blocks of one shard, sorted by (bucket, uint64(id))."""

    rows: int

@final
class RecisReader:
    """The newest complete block-level save of a directory, whose manifests are checked. It stays until `release`."""

    def __new__(cls, directory: CheckpointDirectory) -> RecisReader: ...
    def release(self) -> None: ...  # closes its files: saves may remove it; harmless twice
    def tables(self) -> list[RecisTableInfo]: ...
    def tensors(self) -> list[RecisBlockShape]: ...
    def runs(
        self, table: str, total_num_buckets: int, bucket_begin: int, bucket_end: int
    ) -> list[RecisRun]: ...  # with the save's own buckets only those rows, else all
    def read_rows(self, table: str, run: RecisRun, slot: str, into: NDArray[np.uint8]) -> None: ...  # verified; ids are those of the buckets, in order
    def read_tensor(self, name: str, begin: int, into: NDArray[np.uint8]) -> None: ...  # verified

@final
class CheckpointSave:
    """The coordinator's part of a save. Other saves leave its directory alone for as long as it lives."""

    def __new__(
        cls,
        directory: CheckpointDirectory,
        random: int,  # 64 bits that tell saves at the same time apart
        *,
        keep: int = 1,
        parent: CheckpointId | None = None,  # of a delta
        merged: CheckpointId | None = None,  # the delta or linked checkpoint that it replaces
        linked: bool = False,  # tables are written by `link_table`
    ) -> CheckpointSave: ...
    name: str
    def adopt(self, rank: int, world_size: int, parts: Sequence[WrittenPart]) -> ManifestDigest: ...  # the rank's digest
    def write_dense_metadata(self, metadata: bytes) -> None: ...  # what the ranks' extents mean
    def publish(self, digests: Sequence[ManifestDigest], next_epoch: int) -> PublishedCheckpoint: ...  # digests by rank
    def abandon(self) -> None: ...  # harmless once it has ended

@final
class RowWriteBatch:
    """n rows that are to be written into a checkpoint. Parts that are None are written as zeros."""

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
        counters: bool = True,  # False: counts of ids that wait for rows are left out
    ) -> CheckpointWriter: ...
    def write_table(self, module: str, table: Table, hyperparameters: Mapping[str, float]) -> TableWriteStats: ...
    def link_table(self, module: str, table: Table, hyperparameters: Mapping[str, float]) -> TableWriteStats: ...  # without an SSD tier as write_table
    def write_rows(
        self,
        spec: str,  # the table's entry in a manifest (`spec`), JSON
        bucket_begin: int,
        bucket_end: int,
        chunks: Iterable[RowWriteBatch],  # each id in one of them
    ) -> int: ...  # rows written; what `chunks` raises is raised
    def write_changes(self, module: str, table: Table, hyperparameters: Mapping[str, float], base: BaseCheckpoint) -> TableWriteStats: ...
    def finish(self) -> ManifestDigest: ...  # for `publish`

@final
class CheckpointSnapshot:
    """One rank's part of a save beside training: the tables as they were when it was made, held until it is released or dropped."""

    def __new__(
        cls,
        directory: CheckpointDirectory,
        name: str,
        rank: int,
        world_size: int,
        tables: Sequence[AsyncSaveTable],
        next_epoch: int,  # of rows trained from now on
        bytes_per_second: int | None,
        *,
        counters: bool = True,
    ) -> CheckpointSnapshot: ...  # StateError while another moment of a table is held
    def write_table(self) -> TableWriteStats | None: ...  # the next one; None when there was none left
    def finish(self) -> ManifestDigest: ...  # for `publish`
    def release(self) -> None: ...  # harmless twice

def work_in_background() -> None: ...  # the calling thread gets the lowest priority, for good

@final
class ChainCompaction:
    """One rank's part of merging a chain of deltas."""

    @staticmethod
    def open(directory: CheckpointDirectory, latest: str, *, counters: bool = True) -> ChainCompaction | None: ...  # None where it is full already
    id: CheckpointId
    next_epoch: int
    rows: int
    def release(self) -> None: ...  # nothing more is read: saves may remove what is merged
    def write(self, name: str, rank: int, world_size: int, progress: Callable[[int], object] | None = None) -> ManifestDigest: ...  # for `publish`; progress is told of rows

@final
class CheckpointPart:
    """What one rank writes of a save whose ranks agree on nothing before its end. Nobody sweeps it for as long as it lives."""

    def __new__(cls, directory: CheckpointDirectory, random: int, expected_bytes: int) -> CheckpointPart: ...  # expected_bytes: of all extents
    name: str
    def write_table(self, module: str, table: Table, hyperparameters: Mapping[str, float]) -> TableWriteStats: ...
    def snapshot_tables(self, tables: Sequence[AsyncSaveTable], next_epoch: int) -> None: ...  # as of now; rows trained from now on carry next_epoch
    def write_snapshot(self) -> int: ...  # while training goes on; rows written
    def append(self, data: NDArray[np.uint8]) -> None: ...  # to the extent that is being written
    def end_dense_extent(self) -> StreamRange: ...  # where it is in this rank's stream
    def finish(self) -> WrittenPart: ...  # for `adopt`
    def abandon(self) -> None: ...  # harmless twice

@final
class CheckpointReader:
    """A checkpoint and those it builds on, whose manifests are checked. No save removes them while this lives, or until `release`."""

    def __new__(cls, directory: CheckpointDirectory, latest: str) -> CheckpointReader: ...
    name: str
    id: CheckpointId
    chain_names: list[str]  # names, newest first
    next_epoch: int
    kind: Literal["full", "delta", "linked"]
    def release(self) -> None: ...  # nothing more is read: saves may remove them
    def tables(self) -> list[SavedTable]: ...
    def check_table(
        self,
        module: str,
        table: Table,
        bucket_begin: int,
        bucket_end: int,
        *,
        saved: SavedTable | None = None,  # what it is loaded from, one of `tables`; None: the table of the same module and name
        segments: bool = False,  # False: MismatchError where it would have to be opened from segments
        slots: bool = True,  # False: rows come without the optimizer's slots, and any optimizer fits
    ) -> int: ...  # fits, is not in use, files' headers; no fewer rows than will be loaded
    def segments(self, module: str, table: str) -> LinkedSegments | None: ...  # after check_table: not None: make a Table of these, no load_table
    def load_table(self, module: str, table: Table, progress: Callable[[int], object] | None = None) -> int: ...  # after check_table, with the buckets it was given; rows loaded; progress is told of rows
    def dense_metadata(self) -> bytes | None: ...  # as `write_dense_metadata` was given it
    def stream_bytes(self) -> list[int]: ...  # of each rank's stream of extents
    def read_dense(self, rank: int, offset: int, into: NDArray[np.uint8]) -> None: ...  # any part of a stream, verified

@final
class LinkedSegments:
    """The segments of a table's SSD tier in a linked checkpoint; checked as far as footers go."""

    rows: int

@final
class CountedIds:
    """The counts of n ids that wait for rows, ids rising as unsigned numbers."""

    ids: I64  # [n]
    shows: NDArray[np.uint32]  # [n] occurrences in training batches
    clicks: NDArray[np.uint32]  # [n] zeros where clicks are not counted
    is_older: NDArray[np.bool_]  # [n] of the older generation of its bucket, which is forgotten next
    def __len__(self) -> int: ...

@final
class IdExpiry:
    """A sweep of a delta that takes a row."""

    sweep: int  # which of the delta's it is
    rule: str  # JSON: what of its rule takes the row
    score: float | None  # the row's after the sweep's step, where the rule looks at scores

@final
class IdHistoryEntry:
    """What one checkpoint of a chain says of one id."""

    row: RowBlock | None  # one row, without slots, where its own files have it
    has_tombstone: bool  # the id left since the parent; with a row it is back
    count: CountedIds | None  # of the id, where its own files have it
    sweeps: list[IdExpiry]  # its sweeps that take the row of the checkpoints before
    has_row_now: bool  # with what it builds on
    count_now: CountedIds | None  # the same

@final
class CheckpointRows:
    """A checkpoint whose rows are read without tables."""

    def __new__(cls, directory: CheckpointDirectory, latest: str) -> CheckpointRows: ...
    def release(self) -> None: ...  # saves may remove it, and nothing more is read
    def manifest(self) -> str: ...  # JSON
    def chain_manifests(self) -> list[str]: ...  # JSON: the manifests of it and of all that it builds on, newest first
    def read(
        self,
        module: str,
        table: str,
        bucket_begin: int,
        bucket_end: int,
        sink: Callable[[RowBlock], None] | None,
        *,
        counts: Callable[[CountedIds], None] | None = None,
    ) -> int: ...  # rows of the buckets, verified, given to `sink` in chunks, then the counts of each bucket given to `counts` (both None: all only verified); what they raise is raised
    def id_history(self, module: str, table: str, id: int) -> list[IdHistoryEntry]: ...  # noqa: A002  # of each checkpoint, newest first; MismatchError
    def reshard(self, to: CheckpointDirectory, random: int, world_size: int, *, counters: bool = True) -> PublishedCheckpoint: ...  # written again there
    def copy(self, to: CheckpointDirectory) -> CheckpointCopyReport: ...  # to another directory, and verified there; CorruptionError, StateError, InUseError
    def write_serving_checkpoint(
        self, to: CheckpointDirectory, random: int, precision: str, keep: int
    ) -> PublishedCheckpoint: ...  # written there without slots; "fp32", "fp16", "bf16" or "int8", else ConfigError; InputError names a row that it cannot hold

