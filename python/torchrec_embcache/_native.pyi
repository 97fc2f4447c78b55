"""The private Python interface of the Rust core. The public classes wrap it.

Shapes: T tables of a lookup, F features, B bags per feature, N occurrences of ids, U distinct rows, D a table's width, V floats of
a row's vector part (`D * (1 + vector slots)`: the weights first, then each vector slot), C columns of the pooled output, S slots of
a device tier. All arrays are C-contiguous numpy arrays. Every method that can block releases the GIL. Errors are the classes of
`torchrec_embcache.exceptions`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from ._native_checkpoint import (AsyncSaveTable as AsyncSaveTable, BaseCheckpoint as BaseCheckpoint, ChainCompaction as ChainCompaction, ChangeCounts as ChangeCounts, CheckpointCopyReport as CheckpointCopyReport, CheckpointDirectory as CheckpointDirectory, CheckpointId as CheckpointId, CheckpointPart as CheckpointPart, CheckpointReader as CheckpointReader, CheckpointRows as CheckpointRows, CheckpointSave as CheckpointSave, CheckpointSnapshot as CheckpointSnapshot, CheckpointWriter as CheckpointWriter, CountedIds as CountedIds, IdExpiry as IdExpiry, IdHistoryEntry as IdHistoryEntry, LinkedSegments as LinkedSegments, ManifestDigest as ManifestDigest, NewestCheckpoint as NewestCheckpoint, PruneReport as PruneReport, PublishedCheckpoint as PublishedCheckpoint, RecisBlockShape as RecisBlockShape, RecisBlockSpec as RecisBlockSpec, RecisReader as RecisReader, RecisRun as RecisRun, RecisSave as RecisSave, RecisShardOutcome as RecisShardOutcome, RecisTableInfo as RecisTableInfo, RecisWrittenTable as RecisWrittenTable, RowWriteBatch as RowWriteBatch, SavedTable as SavedTable, StreamRange as StreamRange, TableStep as TableStep, TableWriteStats as TableWriteStats, WrittenPart as WrittenPart, chunk_checksums as chunk_checksums, latest_checkpoint as latest_checkpoint, newest_checkpoint as newest_checkpoint, prune_checkpoints as prune_checkpoints, remove_stale_parts as remove_stale_parts, work_in_background as work_in_background)
from ._native_serving import (ServeIndexReport as ServeIndexReport, ServedTable as ServedTable, ServedVersion as ServedVersion, ServingStats as ServingStats, TableServer as TableServer, build_serving_index as build_serving_index, check_serving_index as check_serving_index)

__version__: str  # of the package

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

# Returns the rows of cache slots [n] of the device tier.
DeviceGather = Callable[[I64], GatheredRows]
Optimizer = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "partial_rowwise_adam", "ftrl", "lamb"]
CachePolicy = Literal["lru", "lfu", "s3fifo"]

@final
class RowInitializer:
    """The initializer of new rows."""

    @staticmethod
    def constant(value: float) -> RowInitializer: ...
    @staticmethod
    def uniform(low: float, high: float) -> RowInitializer: ...  # in [low, high)
    @staticmethod
    def normal(mean: float, std: float) -> RowInitializer: ...
    @staticmethod
    def truncated_normal(mean: float, std: float) -> RowInitializer: ...  # redrawn outside mean ± 2 std
    @staticmethod
    def linear(low: float, high: float) -> RowInitializer: ...  # the same ramp for every id

MissingMode = Literal["initial", "zeros", "not_admitted"]  # the value read for an id without a row

@final
class RowAdmission:
    """An admission rule. `window_steps=None`: no id is forgotten because of its age. `memory` is in bytes, for all shards together.
    """

    @staticmethod
    def count(threshold: int, *, window_steps: int | None, memory: int) -> RowAdmission: ...
    @staticmethod
    def probability(p: float) -> RowAdmission: ...
    @staticmethod
    def show_click(*, alpha: float, beta: float, threshold: float, window_steps: int | None, memory: int) -> RowAdmission: ...
    @staticmethod
    def no_new_rows() -> RowAdmission: ...

@final
class SweepRule:
    """The rows that a sweep after step s evicts, among those last trained at or before s. Immutable."""

    @staticmethod
    def last_step(steps: int) -> SweepRule: ...  # rows whose last training step is s - steps or earlier
    @staticmethod
    def trained_until(step: int) -> SweepRule: ...  # rows whose last training step is at or before this one, for any s
    @staticmethod
    def nothing() -> SweepRule: ...  # no rows
    @staticmethod
    def per_sweep(*, needs_clock: bool = False) -> SweepRule: ...  # a Table's `eviction` whose rule is passed to each `sweep`; `needs_clock`: the table records the times of its steps
    @staticmethod
    def score(below: float) -> SweepRule: ...  # rows whose score, decayed to s, is below this
    @staticmethod
    def l2_norm(below: float) -> SweepRule: ...  # rows whose weights have a norm below this
    @staticmethod
    def below_rank(score: int, last_step: int, row_id: int) -> SweepRule: ...  # rows below this rank key: see ScoreHistogram
    @staticmethod
    def any(rules: Sequence[SweepRule]) -> SweepRule: ...  # rows that match any of these
    @staticmethod
    def all(rules: Sequence[SweepRule]) -> SweepRule: ...  # rows that match all of these

@final
class RankKey:
    """A row's position in eviction order: (score, last step, id). The score is mapped to an integer that increases with it."""

    def __new__(cls, score: int, last_step: int, row_id: int) -> RankKey: ...

@final
class RankKeyRange:
    """The rank keys from `low` to `high`, both included, which are listed or counted."""

    def __new__(cls, low: RankKey, high: RankKey, *, is_listed: bool) -> RankKeyRange: ...

@final
class RankRangeCounts:
    """The rows of a score histogram in one range of rank keys: P non-empty parts, ascending, or n listed keys."""

    digits: NDArray[np.uint32]  # [P] identifies the parts, the same on all ranks
    rows: NDArray[np.uint64]  # [P]
    lows: NDArray[np.uint64]  # [P, 3] the lowest rank key of each part
    highs: NDArray[np.uint64]  # [P, 3] the highest
    listed: NDArray[np.uint64]  # [n, 3] in any order

@final
class ScoreHistogram:
    """Row counts of a shard by rank key."""

    version: int  # of the counted contents
    rows: int  # rows last trained at or before the step of the histogram
    newest: int  # those of them that were last trained at that step
    ranges: list[RankRangeCounts]

@final
class RowMetadata:
    """Metadata of n rows."""

    def __new__(cls, count: NDArray[np.uint32], last_step: NDArray[np.uint64], score: F32, modified_epoch: NDArray[np.uint32]) -> RowMetadata: ...
    count: NDArray[np.uint32]  # [n] occurrences in training batches
    last_step: NDArray[np.uint64]  # [n] the table's step at the row's last training step
    score: F32  # [n] decayed number of occurrences
    modified_epoch: NDArray[np.uint32]  # [n] the checkpoint epoch of the last training step

@final
class RowBlock:
    """A block of n rows with their slots and metadata, in newly allocated memory."""

    def __new__(cls, ids: I64, vectors: F32, scalars: F32, metadata: RowMetadata) -> RowBlock: ...
    ids: I64  # [n]
    vectors: F32  # [n, V]
    scalars: F32  # [n], zeros if rows have no scalar slot
    metadata: RowMetadata
    def __len__(self) -> int: ...

@final
class FoundRows:
    """The rows of n ids, in the order of the ids."""

    found: NDArray[np.bool_]  # [n]; False: the id has no row, and the values are its initial ones
    vectors: F32  # [n, V]
    scalars: F32  # [n], zeros if rows have no scalar slot
    metadata: RowMetadata

@final
class TierStats:
    """Counters of every tier; `stats.py` documents each."""

    rows: int
    bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    read_bytes: int
    written_bytes: int
    time_ns: int

@final
class Histogram:
    """A histogram of durations. Empty buckets are omitted."""

    count: int
    sum_ns: int
    bounds: list[int]  # the largest duration in ns of each bucket, ascending
    counts: list[int]  # of each bucket, not cumulative

@final
class SsdStats:
    """Further counters of the SSD tier."""

    tier: TierStats
    io_engine: str
    reads: int
    read_latency: Histogram
    logical_written_bytes: int
    compaction_bytes: int
    live_share: float
    segments: int
    index_bytes: int
    dropped_rows: int
    has_lost_flush: bool
    space_waits: int
    read_only: bool

@final
class AdmissionStats:
    """Counters of admission."""

    admitted: int
    not_admitted: int
    pending: int
    pending_bytes: int
    forgotten: int

@final
class EvictionStats:
    """Counters of eviction by rule."""

    evicted: int
    evicted_by_rule: Mapping[str, int]
    is_sweeping: bool
    undelivered: int

@final
class EvictedBlock:
    """Rows that were evicted after one step for one reason."""

    step: int
    reason: str
    rows: RowBlock

@final
class EvictedQueue:
    """The undelivered evicted rows of one table. It outlives the table."""

    def __len__(self) -> int: ...  # rows
    def take(self) -> EvictedBlock | None: ...  # None: empty
    def wait(self) -> EvictedBlock | None: ...  # blocks until there are rows and it is not paused; None: it has ended, and none are left
    def pause(self) -> None: ...  # blocks `wait` and sweeps, until `resume` or the end
    def resume(self) -> None: ...
    def reopen(self) -> bool: ...  # the table stays open; True if no thread waits, because the waiter already received the end
    def is_ended(self) -> bool: ...

@final
class TableStats:
    """Counters of a table, and of its tiers."""

    rows: int
    step: int
    pinned_rows: int
    overflow_plans: int
    dropped_rows: int
    row_wait: Histogram
    lock_held: Histogram
    admission: AdmissionStats | None
    eviction: EvictionStats | None
    device: TierStats | None
    host: TierStats
    ssd: SsdStats | None

@final
class TableCounters:
    """The number of training steps of a table, and the checkpoint epoch assigned to rows trained now."""

    step: int
    epoch: int

@final
class MissRatioCurve:
    """Miss ratios of caches of several sizes under one policy."""

    policy: CachePolicy
    rows: NDArray[np.uint64]  # [n], ascending
    miss_ratios: NDArray[np.float64]  # [n], including first uses
    first_use_ratio: float
    new_row_ratio: float
    lookups: int
    batches: int
    largest_batch: int
    distinct_ids: int
    sampling_rate: float

def miss_ratio_curves(table: Table, *, reset: bool) -> list[MissRatioCurve] | None: ...  # of the table's policy, then of "lru"; None: not measured

@final
class RowBytes:
    """Bytes per row of each budget."""

    host: int
    device: int
    ssd: int  # of a record, without the space that compaction needs
    index: int  # part of `host_bytes` for a row on SSD, at most

@final
class SharedBudget:
    """The part of a module's `host_bytes` that its tables share. Each table also has a fixed part."""

    # `tables`: number of tables that divide host_bytes. `gain`: the minimum growth of a table's portion per byte by which
    # host_bytes grows.
    def __new__(cls, size: int, *, host_bytes: int, tables: int, gain: float) -> SharedBudget: ...
    free: int  # bytes not taken by any table
    host_bytes: int
    tables: int
    def __deepcopy__(self, _memo: object) -> SharedBudget: ...  # with no bytes taken

@final
class Table:
    """One table shard: its host and SSD tiers, and the bookkeeping of its device tier."""

    def __new__(
        cls,
        *,
        name: str,
        key: int | None,  # None: derived from the name
        dim: int,
        optimizer: Optimizer,
        initializer: RowInitializer,
        seed: int,
        total_num_buckets: int,
        bucket_begin: int,
        bucket_end: int,
        host_bytes: int,
        device_rows: int | None,  # None: kernels run directly on the host tier's rows
        device_gather: DeviceGather | None,
        ssd_dir: str | None,  # the table's own directory
        ssd_bytes: int,
        reopen: Literal["resume", "discard", "auto"] | None,  # "auto" resumes resume_commit_id, and starts empty if that is None
        resume_commit_id: int | None,
        policy: CachePolicy,
        on_full: Literal["error", "evict"],
        segments: LinkedSegments | None = None,  # become its contents, replacing those of ssd_dir
        uncommitted: int | None = None,  # with reopen="auto": the latest state there, if its flush of several tables is incomplete
        ssd_root: CommitDirectory | None = None,  # the user's directory, held open as long as the table
        admission: RowAdmission | None = None,  # None: every id is admitted
        not_admitted: Literal["zeros", "initial", "oov"] | float | None = None,  # None: "initial"
        missing_read: Literal["zeros", "initial", "oov"] | float | None = None,  # None: the same as `not_admitted`
        score_half_life_steps: int | None = None,
        eviction: SweepRule | None = None,  # None: rows are removed only by `remove_rows` and `on_full`
        sizing: bool = False,  # measure miss ratios
        evict_every_steps: int | None = None,  # a sweep after each step whose number is a multiple of it; None: only in `sweep`
        shared_budget: SharedBudget | None = None,  # from which it takes the bytes it needs beyond host_bytes
    ) -> Table: ...
    name: str
    key: int
    dim: int
    optimizer: str
    slot_names: list[str]
    vector_floats: int
    def __len__(self) -> int: ...  # number of rows in all tiers
    def version(self) -> int: ...  # changes with every change of a row, not when rows move between tiers
    def is_closed(self) -> bool: ...
    def step(self) -> int: ...  # number of training steps
    def set_step(self, step: int) -> None: ...
    has_oov_row: bool  # True if ids that are not admitted share an OOV row
    def oov_row(self) -> F32 | None: ...  # [D * (1 + vector slots) + scalar slots]: its weights, then its slots
    def set_oov_row(self, values: F32) -> None: ...  # all its values, in the same order
    def epoch(self) -> int: ...  # the checkpoint epoch assigned to rows trained now
    def set_epoch(self, epoch: int) -> None: ...
    def base_checkpoints(self) -> list[BaseCheckpoint]: ...  # the checkpoints on which a delta can be based, oldest first
    def sweeps_since(self, base: BaseCheckpoint) -> list[str]: ...  # each as text, equal for equal sweeps
    def count_changes(self, base: BaseCheckpoint) -> ChangeCounts: ...
    def record_base(self, base: BaseCheckpoint) -> None: ...  # once it is committed on all ranks, or loaded
    def finish_background_save(self, next_epoch: int, base: BaseCheckpoint | None = None) -> None: ...  # like `record_base`, for a CheckpointSnapshot; None: its save failed
    def set_unusable(self, reason: str | None) -> None: ...  # poisons the table (StateError with the reason) until set to None
    def unusable(self) -> str | None: ...  # the reason, while it is poisoned
    def counters(self) -> TableCounters: ...  # of a poisoned table too
    def stats(self) -> TableStats: ...
    def export(self, chunk_rows: int) -> TableExport: ...
    def read_rows(self, ids: I64, *, incomplete: bool = False) -> FoundRows: ...  # `incomplete`: of a poisoned table too
    def import_rows(self, ids: I64, vectors: F32, scalars: F32 | None, metadata: RowMetadata | None) -> None: ...  # distinct ids; StateError if a batch in flight uses one
    def remove_rows(self, ids: I64) -> int: ...  # number of rows removed
    def sweep(self, rule: SweepRule | None = None) -> None: ...  # applies `eviction` after the current step; does nothing without it. `rule`: if `eviction` is `per_sweep()`
    def prepare_sweep(self, rule: SweepRule | None = None) -> None: ...  # everything in `sweep` that can fail
    def now(self) -> int: ...  # the table's time in milliseconds, set or of the system clock, never before that of its last step
    def step_at(self, time: int) -> int | None: ...  # the greatest step known to be made by this time; None if unknown
    def set_time(self, time: int) -> None: ...  # until the next call; InputError if time would decrease
    def check_time(self, time: int) -> None: ...  # the error of `set_time`
    def start_evicted_queue(self) -> EvictedQueue: ...  # of the rows evicted after this call
    def next_evicted(self) -> EvictedBlock | None: ...  # from that queue; continues the sweep in progress until there is a full chunk
    def end_evicted_queue(self) -> None: ...  # ends that queue, after all rows evicted so far were added; does nothing if it is closed
    def adopt_lifecycle(self, source: Table) -> None: ...  # its admission counts of ids in these buckets, the OOV row, and the step clock; this table must have none yet
    def adopt_time_source(self, previous: Table) -> None: ...  # inherits the set time of a table, which may be closed, whose rows it replaces
    def score_histogram(self, step: int, ranges: Sequence[RankKeyRange], version: int | None) -> ScoreHistogram | None: ...  # None if the version has changed
    def is_unchanged_since_sweep(self) -> bool: ...  # True if it has only changed by the evictions of a sweep since that sweep
    def clear(self) -> None: ...
    def clear_rows(self) -> None: ...  # like `clear`, but keeps the admission counts
    def flush(self, commit_id: int | None) -> None: ...  # writes every dirty row down and commits a state; None: under the next even commit id
    def last_commit_id(self) -> int | None: ...  # of the last state that was flushed or resumed, even if it is gone
    def has_lost_flush(self) -> bool: ...  # True if the states to resume were discarded to free space since the last flush
    def check_writable(self) -> None: ...  # ReadOnlyError with the cause, if is_read_only
    def is_read_only(self) -> bool: ...  # True if a write of the SSD tier failed, so that it is read-only
    def forget_commit(self, commit_id: int) -> None: ...  # does nothing if no state has this commit id
    def close(self) -> None: ...  # stops background work; does not flush
    @staticmethod
    def remove_shard(ssd_dir: str, ssd_root: str, path_checks: Literal["strict", "trusted"]) -> None: ...  # a table's own directory and its contents; InUseError, StateError if it contains other files
    @staticmethod
    def commit_ids(ssd_dir: str, ssd_root: str, path_checks: Literal["strict", "trusted"]) -> list[int]: ...  # commit ids of the states there, complete or not, oldest first

@final
class TableExport:
    """Streams every row as of its creation. Raises `StateError` if the table is trained during the export."""

    def __iter__(self) -> TableExport: ...
    def __next__(self) -> RowBlock: ...

@final
class CommitDirectory:
    """A directory of table directories (`ssd_dir`), with the commit records of flushes; `_ssd/commit.py` has the order of calls."""

    def __new__(cls, ssd_dir: str, path_checks: Literal["strict", "trusted"]) -> CommitDirectory: ...
    def identify(self, random: int) -> int: ...  # its id; `random` (64 bits) becomes the id if there is none. Makes existing commit records durable
    def has_id(self, root_id: int) -> bool: ...
    def prepare(self, commit_id: int, coordinator: str, root_id: int) -> None: ...  # the root with this absolute path and id decides whether `commit_id` is complete
    def commit(self, commit_id: int) -> None: ...  # `commit_id` is complete
    def is_committed(self, commit_id: int) -> bool: ...  # StateError if the coordinator decides it and is not available
    def forget(self, commit_id: int) -> None: ...
    def commit_ids(self) -> list[int]: ...  # of all commit records there

@final
class Lookup:
    """Plans batches over several tables. `feature_tables[f]` is the table of feature f; features of the same table are adjacent."""

    def __new__(cls, tables: Sequence[Table], feature_tables: Sequence[int]) -> Lookup: ...
    def plan(
        self,
        ids: I64,  # [N], feature after feature
        feature_splits: I64,  # [F + 1], the bounds of the features in `ids`
        mode: PlanMode,
        threads: int,  # number of threads, mostly for initializing rows
        clicks: NDArray[np.uint32] | None = None,  # [N], for tables whose admission counts clicks
    ) -> Plan: ...

@final
class PlanMode:
    """Options of planning a batch."""

    def __new__(cls, *, train: bool, is_prefetch: bool, missing: MissingMode) -> PlanMode: ...
    train: bool  # a backward follows; False: ids without rows are not inserted
    is_prefetch: bool  # fetch as far as the budget allows, without overflow; `Plan.wait` does the rest
    missing: MissingMode  # with train=False: the value read for an id without a row

@final
class FetchedRows:
    """The M rows that a plan fetched for the device tier of a table."""

    slots: I64  # [M], the slot to scatter each row to
    vectors: F32 | None  # [M, V]; None: they are the first rows of the staging memory
    scalars: F32  # [M]

@final
class GatheredRows:
    """The rows of n cache slots of a device tier."""

    def __new__(cls, vectors: F32, scalars: F32) -> GatheredRows: ...
    vectors: F32  # [n, V]
    scalars: F32  # [n], zeros if rows have no scalar slot

@final
class RowOccurrences:
    """The occurrences of a plan's ids of one table, by distinct row: those of row u are `occurrences[starts[u]:starts[u + 1]]`."""

    slots: I64  # [U]
    starts: I64  # [U + 1]
    occurrences: I64  # [N'], positions in the plan's `ids`

@final
class DeviceArrays:
    """The device tier of one table as CPU arrays, for the native kernels."""

    def __new__(cls, weights: F32, vector_slots: Sequence[F32], scalars: F32 | None) -> DeviceArrays: ...
    weights: F32  # [S, D]
    vector_slots: list[F32]  # each [S, D]
    scalars: F32 | None  # [S]; None: rows have no scalar slot

@final
class Plan:
    """A batch in flight. Its rows are pinned from planning until the backward, `release`, or the plan's destruction.

    The calls, in order:

    1. `wait`; for tables with a device tier `required_slots`, `fetched_rows`, whose rows are to be scattered, and `mark_scattered`.
    2. A forward, any number of times.
    3. For tables with an OOV row `train_oov_row`.
    4. Either a native backward, or `row_occurrences`, `begin_update`, torch ops and `commit`.

    `release` can be called at any time.
    """

    # Waits until every row is in a slot of the tier that kernels run on (with a device tier: in `fetched_rows`). `staging` may
    # have, for each table, memory [max_arriving_rows, V] for rows on their way to its device tier; pass the same to `fetched_rows`.
    def wait(self, staging: Sequence[F32 | None] | None = None) -> None: ...
    def check_space(self) -> None: ...  # CapacityError if the batch does not fit into a table; in `wait` full tables drop rows
    def wait_for_reads(self) -> None: ...  # waits for started reads; `wait` does this too, and starts the others. Call it before `run_exclusively`
    def is_ready(self) -> bool: ...  # True if no started read is pending
    def is_placed(self) -> bool: ...  # True if every row is in its slot
    def max_arriving_rows(self) -> list[int]: ...  # per table: about the number of rows for its device tier, rarely exceeded
    def is_prefetched(self) -> bool: ...  # True if a prefetch plan fetched everything, False if the budget ended it early
    def overflow_rows(self) -> list[int]: ...  # per table: number of rows that did not fit into the tier that kernels run on
    # For a table of the lookup with a device tier, by its number:
    def required_slots(self, table: int) -> int: ...  # minimum number of slots of the device tensors; those from device_rows on are overflow
    def fetched_rows(self, table: int, staging: F32 | None = None) -> FetchedRows: ...  # to be scattered before the forward
    def mark_scattered(self) -> None: ...  # the rows of `fetched_rows` are in the tensors of all tables; a plan released before leaves rows in their tiers
    def slots(self, feature: int) -> I64: ...  # [N_f], the cache slot of each occurrence of the feature; -1 for one that reads `missing_row`
    def missing_row(self, table: int) -> F32 | None: ...  # [D], the value of ids without a row; None: zeros
    def row_occurrences(self, table: int) -> RowOccurrences: ...
    # The same for all features and for several tables, into the caller's memory: [N], like `slots`; and the tables `table_numbers`,
    # one after another, like `row_occurrences`, with the table of each row as its position in `table_numbers`. `row_counts`: the
    # number of distinct rows of each table.
    def splits(self) -> list[int]: ...  # [F + 1], the bounds of the features in `ids`
    def row_counts(self) -> list[int]: ...
    def fill_slots(self, out: I32) -> None: ...
    def fill_row_occurrences(self, table_numbers: list[int], tables: I32, slots: I32, starts: I32, occurrences: I32) -> None: ...
    # Runs `work` while no other thread forwards, updates or copies rows. Signal handlers run after it. `work` is either `wait`,
    # scatter and `mark_scattered`, or `begin_update`, update and `commit`, or kernels on the tensors. If it returns before
    # `mark_scattered`, the plan is released.
    def run_exclusively(self, work: Callable[[], None]) -> None: ...
    def begin_update(self) -> None: ...  # from here to `commit` rows change; an error in between poisons the tables
    # The gradients of the batch's ids that were not admitted, per table with an OOV row: the exact sum of each column, and the
    # count.
    def oov_gradient_sums_pooled(self, grad: F32, threads: int) -> I64: ...  # sums of several ranks are added elementwise
    def oov_gradient_sums_sequence(self, grad: F32, threads: int) -> I64: ...
    def train_oov_row(self, sums: I64, hyperparameters: NDArray[np.float64]) -> None: ...  # the commit trains the OOV rows by these
    def commit(self) -> None: ...  # after torch ops updated the tensors: marks rows dirty, counts, unpins, and advances the step
    # The native kernels. `device[t]` has the arrays of table t, or None if kernels run directly on the host tier's rows.
    def forward_pooled(
        self,
        offsets: I64,  # [F * B + 1] into `ids`, feature-major as in a KeyedJaggedTensor
        weights: F32 | None,  # [N]
        mean: NDArray[np.bool_],  # [F]
        out: F32,  # [B, C], C = sum of the features' dims, in feature order
        device: Sequence[DeviceArrays | None] | None,
        threads: int,
    ) -> None: ...
    def forward_sequence(self, out: F32, device: Sequence[DeviceArrays | None] | None, threads: int) -> None: ...  # out [N, D], one D
    def backward_pooled(
        self,
        grad: F32,  # [B, C]
        hyperparameters: NDArray[np.float64],  # [T, 8]: lr, eps, beta1, beta2, weight_decay, beta, l1, l2
        weight_grad: F32 | None,  # [N], filled with the gradient of `weights`, from the rows before the update
        device: Sequence[DeviceArrays | None] | None,
        threads: int,
    ) -> None: ...  # updates, commits and unpins; StateError the second time. offsets, weights and mean are those of the forward
    def backward_sequence(self, grad: F32, hyperparameters: NDArray[np.float64], device: Sequence[DeviceArrays | None] | None, threads: int) -> None: ...
    def release(self) -> None: ...  # unpins without training; idempotent

def io_engine_name() -> str: ...  # the engine of this process
def drain_log() -> None: ...  # passes pending native events to Python's logging, after reading its levels
def table_key(name: str) -> int: ...
def row_bytes(dim: int, optimizer: Optimizer, policy: CachePolicy) -> RowBytes: ...
def check_path(field: str, path: str) -> str: ...  # absolute; PathError: not valid text for a path, or another storage
def check_ssd_dir(ssd_dir: str, path_checks: Literal["strict", "trusted"]) -> str: ...  # absolute; PathError, StoragePermissionError: missing, a link, another user's, too open, not writable
def table_dir(ssd_dir: str, module: str, table: str, rank: int, world_size: int) -> str: ...  # a table's own directory, names encoded
def sweep_tables(tables: list[Table], rules: list[SweepRule | None]) -> None: ...  # `Table.sweep` of each with its rule, not interruptible by Ctrl-C
def has_memory_for_threads() -> bool: ...  # True if a new thread can allocate its memory; a thread that cannot would end the process
def buckets_of(ids: NDArray[np.int64], total_num_buckets: int) -> NDArray[np.uint32]: ...
def hash_ids(ids: NDArray[np.int64]) -> None: ...  # in place; the hash modulo the number of buckets is the bucket
def unhash_ids(hashes: NDArray[np.int64]) -> None: ...  # in place: the inverse
def bucket_order(ids: I64, total_num_buckets: int) -> I64: ...  # the order of rows by (bucket, uint64(id))
