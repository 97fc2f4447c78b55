"""The Rust core as Python sees it. It is private: the public classes wrap it.

Shapes: T tables of a lookup, F features, B bags a feature, N occurrences of ids, U distinct rows, D a table's width, V floats of a row's
vector part (`D * (1 + vector slots)`: the weights first, then each vector slot), C columns of the pooled output, S slots of a device tier.
All arrays are C-contiguous numpy arrays. Every method that can block releases the GIL. Errors are the classes of
`torchrec_embcache.exceptions`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from ._native_checkpoint import (
    BaseCheckpoint as BaseCheckpoint,
    RecisReader as RecisReader,
    RecisRun as RecisRun,
    RecisSave as RecisSave,
    RecisBlockShape as RecisBlockShape,
    RecisBlockSpec as RecisBlockSpec,
    ChangeCounts as ChangeCounts,
    ChainCompaction as ChainCompaction,
    CheckpointId as CheckpointId,
    CheckpointSnapshot as CheckpointSnapshot,
    CheckpointPart as CheckpointPart,
    CheckpointReader as CheckpointReader,
    CheckpointRows as CheckpointRows,
    CheckpointSave as CheckpointSave,
    CheckpointWriter as CheckpointWriter,
    CheckpointCopyReport as CheckpointCopyReport,
    ManifestDigest as ManifestDigest,
    CheckpointDirectory as CheckpointDirectory,
    LinkedSegments as LinkedSegments,
    IdHistoryEntry as IdHistoryEntry,
    NewestCheckpoint as NewestCheckpoint,
    CountedIds as CountedIds,
    PruneReport as PruneReport,
    PublishedCheckpoint as PublishedCheckpoint,
    RowWriteBatch as RowWriteBatch,
    SavedTable as SavedTable,
    RecisShardOutcome as RecisShardOutcome,
    StreamRange as StreamRange,
    RecisTableInfo as RecisTableInfo,
    TableStep as TableStep,
    AsyncSaveTable as AsyncSaveTable,
    TableWriteStats as TableWriteStats,
    IdExpiry as IdExpiry,
    WrittenPart as WrittenPart,
    RecisWrittenTable as RecisWrittenTable,
    chunk_checksums as chunk_checksums,
    latest_checkpoint as latest_checkpoint,
    newest_checkpoint as newest_checkpoint,
    prune_checkpoints as prune_checkpoints,
    remove_stale_parts as remove_stale_parts,
    work_in_background as work_in_background,
)
from ._native_serving import (
    ServeIndexReport as ServeIndexReport,
    ServedTable as ServedTable,
    ServedVersion as ServedVersion,
    TableServer as TableServer,
    ServingStats as ServingStats,
    check_serving_index as check_serving_index,
    build_serving_index as build_serving_index,
)

__version__: str  # of the package

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

# Reads the rows of cache slots [n] of the device tier.
DeviceGather = Callable[[I64], GatheredRows]
Optimizer = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "partial_rowwise_adam", "ftrl", "lamb"]
CachePolicy = Literal["lru", "lfu", "s3fifo"]

@final
class RowInitializer:
    """How the rows of a table are born."""

    @staticmethod
    def constant(value: float) -> RowInitializer: ...
    @staticmethod
    def uniform(low: float, high: float) -> RowInitializer: ...  # in [low, high)
    @staticmethod
    def normal(mean: float, std: float) -> RowInitializer: ...
    @staticmethod
    def truncated_normal(mean: float, std: float) -> RowInitializer: ...  # drawn again outside mean ± 2 std
    @staticmethod
    def linear(low: float, high: float) -> RowInitializer: ...  # the same ramp for every id

MissingMode = Literal["initial", "zeros", "not_admitted"]  # what an id without a row reads

@final
class RowAdmission:
    """Which ids get a row. `window_steps=None`: no id is forgotten for its age. `memory` is in bytes, of all shards together."""

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
    """Which rows a sweep after step s takes, of those that were trained last at s or before. It is frozen."""

    @staticmethod
    def last_step(steps: int) -> SweepRule: ...  # rows whose last training step is s - steps or before
    @staticmethod
    def trained_until(step: int) -> SweepRule: ...  # rows whose last training step is this one or before, whatever s is
    @staticmethod
    def nothing() -> SweepRule: ...  # no rows
    @staticmethod
    def per_sweep(*, needs_clock: bool = False) -> SweepRule: ...  # as a Table's `eviction`: each `sweep` gives its rule; `timed`: and the table notes when its steps are made
    @staticmethod
    def score(below: float) -> SweepRule: ...  # rows whose score, decayed to s, is below this
    @staticmethod
    def l2_norm(below: float) -> SweepRule: ...  # rows whose weights have a norm below this
    @staticmethod
    def below_rank(score: int, last_step: int, row_id: int) -> SweepRule: ...  # rows that stand below this: see Census
    @staticmethod
    def any(rules: Sequence[SweepRule]) -> SweepRule: ...  # rows that any of these takes
    @staticmethod
    def all(rules: Sequence[SweepRule]) -> SweepRule: ...  # rows that all of these take

@final
class RankKey:
    """Where a row stands in the order in which sweeps take rows: (score, last step, id). The score is mapped to a number that rises with it."""

    def __new__(cls, score: int, last_step: int, row_id: int) -> RankKey: ...

@final
class RankKeyRange:
    """The standings from `low` to `high`, both included, and whether they are listed. Otherwise they are counted."""

    def __new__(cls, low: RankKey, high: RankKey, *, is_listed: bool) -> RankKeyRange: ...

@final
class RankRangeCounts:
    """The rows of a census in one span of standings: P parts that have rows, in rising order, or n listed standings."""

    digits: NDArray[np.uint32]  # [P] what tells the parts apart, the same on all ranks
    rows: NDArray[np.uint64]  # [P]
    lows: NDArray[np.uint64]  # [P, 3] the lowest standing of each part
    highs: NDArray[np.uint64]  # [P, 3] the highest
    listed: NDArray[np.uint64]  # [n, 3] in no order

@final
class ScoreHistogram:
    """How many rows of a shard stand where in the order in which sweeps take them."""

    version: int  # of the contents that were counted
    rows: int  # those that were trained last at the step of the census or before
    newest: int  # those of them that were trained last at that step
    ranges: list[RankRangeCounts]

@final
class RowMetadata:
    """What is known of n rows beside their values."""

    def __new__(cls, count: NDArray[np.uint32], last_step: NDArray[np.uint64], score: F32, modified_epoch: NDArray[np.uint32]) -> RowMetadata: ...
    count: NDArray[np.uint32]  # [n] occurrences in training batches
    last_step: NDArray[np.uint64]  # [n] the table's step at the row's last training step
    score: F32  # [n] decayed use
    modified_epoch: NDArray[np.uint32]  # [n] the checkpoint epoch of the last training step

@final
class RowBlock:
    """n rows with everything that belongs to them, in memory of their own."""

    def __new__(cls, ids: I64, vectors: F32, scalars: F32, metadata: RowMetadata) -> RowBlock: ...
    ids: I64  # [n]
    vectors: F32  # [n, V]
    scalars: F32  # [n], zeros where rows have no scalar slot
    metadata: RowMetadata
    def __len__(self) -> int: ...

@final
class FoundRows:
    """The rows of n ids, in the order of the ids."""

    found: NDArray[np.bool_]  # [n]; False: the id has no row, and what stands here is its initial value
    vectors: F32  # [n, V]
    scalars: F32  # [n], zeros where rows have no scalar slot
    metadata: RowMetadata

@final
class TierStats:
    """Counters that every tier has; `stats.py` says what each counts."""

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
    """How often durations of which sizes were counted. Buckets without any are left out."""

    count: int
    sum_ns: int
    bounds: list[int]  # the largest duration in ns of each bucket, ascending
    counts: list[int]  # of that bucket alone

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
    """The evicted rows of one table that wait to be told of. It outlives the table."""

    def __len__(self) -> int: ...  # rows
    def take(self) -> EvictedBlock | None: ...  # None: none waits
    def wait(self) -> EvictedBlock | None: ...  # once rows wait and it is not held; None: it has ended, and none are left
    def pause(self) -> None: ...  # keeps `wait` waiting, and sweeps, until `go_on` or the end
    def resume(self) -> None: ...
    def reopen(self) -> bool: ...  # the table stays open; whether nobody waits, because whoever did was told of the end
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
    """How often a table was trained, and the checkpoint epoch that rows trained now are marked with."""

    step: int
    epoch: int

@final
class MissRatioCurve:
    """What caches of many sizes under one policy miss."""

    policy: CachePolicy
    rows: NDArray[np.uint64]  # [n], rising
    miss_ratios: NDArray[np.float64]  # [n], first uses included
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
    """How many bytes a row takes of each budget."""

    host: int
    device: int
    ssd: int  # of a record, without the room that compaction needs
    index: int  # of `host_bytes`, for a row on SSD, at most

@final
class SharedBudget:
    """The bytes of a module's `host_bytes` that its tables share. Each has a fixed part of it too."""

    # `tables` divide host_bytes. `gain`: the least that one which shares can have more for each byte by which that is raised.
    def __new__(cls, size: int, *, host_bytes: int, tables: int, gain: float) -> SharedBudget: ...
    free: int  # bytes that no table has taken
    host_bytes: int
    tables: int
    def __deepcopy__(self, _memo: object) -> SharedBudget: ...  # with no byte taken

@final
class Table:
    """One table shard: its host and SSD tiers, and the bookkeeping of its device tier."""

    def __new__(
        cls,
        *,
        name: str,
        key: int | None,  # None: it is derived from the name
        dim: int,
        optimizer: Optimizer,
        initializer: RowInitializer,
        seed: int,
        total_num_buckets: int,
        bucket_begin: int,
        bucket_end: int,
        host_bytes: int,
        device_rows: int | None,  # None: kernels run on the host tier's rows in place
        device_gather: DeviceGather | None,
        ssd_dir: str | None,  # the table's own directory
        ssd_bytes: int,
        reopen: Literal["resume", "discard", "auto"] | None,  # "auto" resumes resume_token, and starts anew where that is None
        resume_commit_id: int | None,
        policy: CachePolicy,
        on_full: Literal["error", "evict"],
        segments: LinkedSegments | None = None,  # become its contents, in place of whatever is in ssd_dir
        uncommitted: int | None = None,  # with reopen="auto": the newest state there, where no flush of several tables completed it
        ssd_root: CommitDirectory | None = None,  # the user's directory, held open as long as the table is
        admission: RowAdmission | None = None,  # None: every id gets a row
        not_admitted: Literal["zeros", "initial", "oov"] | float | None = None,  # None: "initial"
        missing_read: Literal["zeros", "initial", "oov"] | float | None = None,  # None: as `not_admitted`
        score_half_life_steps: int | None = None,
        eviction: SweepRule | None = None,  # None: rows leave by `remove_rows` and `on_full` alone
        sizing: bool = False,  # measure miss ratios
        evict_every_steps: int | None = None,  # a sweep after each step whose number is a multiple of it; None: only where `sweep` says so
        shared_budget: SharedBudget | None = None,  # from which it takes what it needs beyond host_bytes
    ) -> Table: ...
    name: str
    key: int
    dim: int
    optimizer: str
    slot_names: list[str]
    vector_floats: int
    def __len__(self) -> int: ...  # rows of all tiers: those that were born and not removed
    def version(self) -> int: ...  # changes with every change of a row, not when rows move between tiers
    def is_closed(self) -> bool: ...
    def step(self) -> int: ...  # training steps so far
    def set_step(self, step: int) -> None: ...
    has_oov_row: bool  # whether ids that are refused a row share one
    def oov_row(self) -> F32 | None: ...  # [D * (1 + vector slots) + scalar slots]: its weights, then its slots
    def set_oov_row(self, values: F32) -> None: ...  # all its numbers, likewise
    def epoch(self) -> int: ...  # the checkpoint epoch that rows trained now are marked with
    def set_epoch(self, epoch: int) -> None: ...
    def base_checkpoints(self) -> list[BaseCheckpoint]: ...  # the checkpoints that a delta can build on, oldest first
    def sweeps_since(self, base: BaseCheckpoint) -> list[str]: ...  # each as text, which is the same for the same sweep
    def count_changes(self, base: BaseCheckpoint) -> ChangeCounts: ...
    def record_base(self, base: BaseCheckpoint) -> None: ...  # once it is published on all ranks, or loaded
    def finish_background_save(self, next_epoch: int, base: BaseCheckpoint | None = None) -> None: ...  # as saved_as, of a CheckpointMoment's moment; None: its save failed
    def set_unusable(self, reason: str | None) -> None: ...  # refuse every use (StateError with the reason) until set to None
    def unusable(self) -> str | None: ...  # the reason, while it refuses
    def counters(self) -> TableCounters: ...  # of an unusable table too
    def stats(self) -> TableStats: ...
    def export(self, chunk_rows: int) -> TableExport: ...
    def read_rows(self, ids: I64, *, incomplete: bool = False) -> FoundRows: ...  # `incomplete`: of an unusable table too
    def import_rows(self, ids: I64, vectors: F32, scalars: F32 | None, metadata: RowMetadata | None) -> None: ...  # distinct ids; StateError if one is in use by a batch in flight
    def remove_rows(self, ids: I64) -> int: ...  # how many were there
    def sweep(self, rule: SweepRule | None = None) -> None: ...  # applies `eviction` after the present step; nothing where there is none. `rule`: where that is `given()`
    def prepare_sweep(self, rule: SweepRule | None = None) -> None: ...  # all that can fail of `sweep`
    def now(self) -> int: ...  # the table's time in milliseconds, what was set or the system's, never before that of its last step
    def step_at(self, time: int) -> int | None: ...  # the greatest step that was surely made by this time; None where that is said of no step
    def set_time(self, time: int) -> None: ...  # the table's time from now on, until the next; InputError where it would go back
    def check_time(self, time: int) -> None: ...  # the error of `set_time`
    def start_evicted_queue(self) -> EvictedQueue: ...  # of the rows that are evicted from now on
    def next_evicted(self) -> EvictedBlock | None: ...  # from that queue, and the sweep under way goes on until there is a full chunk
    def end_evicted_queue(self) -> None: ...  # ends that queue, when all rows are in it that are dead by now; nothing once it is closed
    def adopt_lifecycle(self, source: Table) -> None: ...  # of the ids of its buckets that wait for rows, the row that such ids share, when steps were made, and what time it is; it knows nothing of them so far
    def adopt_time_source(self, previous: Table) -> None: ...  # its rows are in the place of those of a table that may be closed: goes on in time that is set where that did
    def score_histogram(self, step: int, ranges: Sequence[RankKeyRange], version: int | None) -> ScoreHistogram | None: ...  # None where the version is another one
    def is_unchanged_since_sweep(self) -> bool: ...  # whether nothing has changed since a sweep but what that took
    def clear(self) -> None: ...
    def clear_rows(self) -> None: ...  # as clear, but the counts of ids that wait for rows stay
    def flush(self, commit_id: int | None) -> None: ...  # writes every dirty row down and publishes one state; None: under the next even token
    def last_commit_id(self) -> int | None: ...  # of the last state that was flushed or resumed, even where that is gone
    def has_lost_flush(self) -> bool: ...  # whether the states to resume were given up for space since the last flush
    def check_writable(self) -> None: ...  # ReadOnlyError where is_read_only, with the cause
    def is_read_only(self) -> bool: ...  # whether a write of the SSD tier failed, so that it only reads
    def forget_commit(self, commit_id: int) -> None: ...  # does nothing where no state has this token
    def close(self) -> None: ...  # stops background work; does not flush
    @staticmethod
    def remove_shard(ssd_dir: str, ssd_root: str, path_checks: Literal["strict", "trusted"]) -> None: ...  # a table's own directory, with all in it; InUseError, StateError where other files lie there
    @staticmethod
    def commit_ids(ssd_dir: str, ssd_root: str, path_checks: Literal["strict", "trusted"]) -> list[int]: ...  # tokens of the states there, whole or not, oldest first

@final
class TableExport:
    """Streams every row as of the moment when it was made. `StateError` ends it where the table was trained meanwhile."""

    def __iter__(self) -> TableExport: ...
    def __next__(self) -> RowBlock: ...

@final
class CommitDirectory:
    """A directory that the directories of tables lie in (`ssd_dir`), with the marks of their flushes; `publish.py` has the order of calls."""

    def __new__(cls, ssd_dir: str, path_checks: Literal["strict", "trusted"]) -> CommitDirectory: ...
    def identify(self, random: int) -> int: ...  # its name; `random` (64 bits) becomes it where there is none. Marks there are durable then
    def has_id(self, root_id: int) -> bool: ...
    def prepare(self, commit_id: int, coordinator: str, root_id: int) -> None: ...  # that root, by absolute path and name, says whether `token` is complete
    def commit(self, commit_id: int) -> None: ...  # `token` is complete
    def is_committed(self, commit_id: int) -> bool: ...  # StateError where the coordinator has to say it and is not there
    def forget(self, commit_id: int) -> None: ...
    def commit_ids(self) -> list[int]: ...  # of all marks there

@final
class Lookup:
    """Plans batches over several tables. `feature_tables[f]` is the table of feature f; the features of one table lie side by side."""

    def __new__(cls, tables: Sequence[Table], feature_tables: Sequence[int]) -> Lookup: ...
    def plan(
        self,
        ids: I64,  # [N], feature after feature
        feature_splits: I64,  # [F + 1], where the ids of each feature begin in `ids`, and where the last ones end
        mode: PlanMode,
        threads: int,  # that may work for it, mostly on births of rows
        clicks: NDArray[np.uint32] | None = None,  # [N], for tables that admit ids by shows and clicks
    ) -> Plan: ...

@final
class PlanMode:
    """How a plan treats the ids of its batch."""

    def __new__(cls, *, train: bool, is_prefetch: bool, missing: MissingMode) -> PlanMode: ...
    train: bool  # a backward follows; False: ids that were never trained are not inserted
    is_prefetch: bool  # fetch as far as the budget allows, and never overflow; `Plan.wait` does the rest
    missing: MissingMode  # with train=False: what an id without a row reads

@final
class FetchedRows:
    """The M rows that a plan fetched for the device tier of a table."""

    slots: I64  # [M], where each is to be scattered to
    vectors: F32 | None  # [M, V]; None: they are the first rows of what was lent for them
    scalars: F32  # [M]

@final
class GatheredRows:
    """The rows of n cache slots of a device tier."""

    def __new__(cls, vectors: F32, scalars: F32) -> GatheredRows: ...
    vectors: F32  # [n, V]
    scalars: F32  # [n], zeros where rows have no scalar slot

@final
class RowOccurrences:
    """The occurrences of a plan's ids of one table, by distinct row: those of row u are `occurrences[starts[u]:starts[u + 1]]`."""

    slots: I64  # [U]
    starts: I64  # [U + 1]
    occurrences: I64  # [N'], positions in the plan's `ids`

@final
class DeviceArrays:
    """The device tier of one table as CPU arrays, for the core's kernels."""

    def __new__(cls, weights: F32, vector_slots: Sequence[F32], scalars: F32 | None) -> DeviceArrays: ...
    weights: F32  # [S, D]
    vector_slots: list[F32]  # each [S, D]
    scalars: F32 | None  # [S]; None: rows have no scalar slot

@final
class Plan:
    """One batch. Its rows are pinned from the plan until the backward, `release`, or the plan's death.

    The calls, in order:

    1. `wait`; for tables with a device tier `required_slots`, `fetched`, whose rows are to be scattered, and `scattered`.
    2. A forward, any number of times.
    3. For tables with a shared row `train_oov_row`.
    4. Either a backward of the core, or `transposed`, `begin_update`, torch ops and `commit`.

    `release` can be called at any time.
    """

    # Until every row is in a slot of the tier that kernels run on (with a device tier: in `fetched`). `lent` may have, for each table, memory
    # [most_arriving, V] for rows on their way to its device tier; `fetched` gets the same.
    def wait(self, staging: Sequence[F32 | None] | None = None) -> None: ...
    def check_space(self) -> None: ...  # CapacityError where a table has no room for the batch; in `wait` full tables drop rows. See `Plan::check_room`
    def wait_for_reads(self) -> None: ...  # for reads that were begun; `wait` does it too, and reads what was not begun. Call it before `exclusively`
    def is_ready(self) -> bool: ...  # whether no read that was begun is under way
    def is_placed(self) -> bool: ...  # whether every row is in its slot
    def max_arriving_rows(self) -> list[int]: ...  # for each table: about how many rows go to its device tier, mostly no more than this
    def is_prefetched(self) -> bool: ...  # whether an `ahead` plan fetched everything, or the budget ended it early
    def overflow_rows(self) -> list[int]: ...  # for each table: how many rows did not fit the tier that kernels run on
    # Of a table of the lookup with a device tier, by its number:
    def required_slots(self, table: int) -> int: ...  # the device tensors must have at least so many slots; those from device_rows on are overflow
    def fetched_rows(self, table: int, staging: F32 | None = None) -> FetchedRows: ...  # to be scattered before the forward
    def mark_scattered(self) -> None: ...  # says that what `fetched` gave is in the tensors of all tables; a plan released before leaves rows where they were
    def slots(self, feature: int) -> I64: ...  # [N_f], the cache slot of each occurrence of the feature; -1 for one that reads `absent_row`
    def missing_row(self, table: int) -> F32 | None: ...  # [D], what ids read that have no row and get none; None: zeros
    def row_occurrences(self, table: int) -> RowOccurrences: ...
    # The same of all features and of several tables, into memory that is given: [N], as `slots`; and of the tables `of`, one after another,
    # as `transposed`, with the table of each row as its position in `of`. `row_counts`: the distinct rows of each table.
    def splits(self) -> list[int]: ...  # [F + 1], where the ids of each feature begin, and where the last ones end
    def row_counts(self) -> list[int]: ...
    def fill_slots(self, out: I32) -> None: ...
    def fill_row_occurrences(self, table_numbers: list[int], tables: I32, slots: I32, starts: I32, occurrences: I32) -> None: ...
    # Does `work` while nobody else forwards, updates or copies rows. Handlers of signals run after it. `work` is either `wait`, scatter and
    # `scattered`, or `begin_update`, update and `commit`, or kernels on the tensors. Where it ends before `scattered`, the plan is released.
    def run_exclusively(self, work: Callable[[], None]) -> None: ...
    def begin_update(self) -> None: ...  # from here to `commit` rows change; an error in between leaves tables that refuse all use
    # The gradients of the batch's refused ids, for each table with a shared row: the exact sum of each column, and how many ids were refused.
    def oov_gradient_sums_pooled(self, grad: F32, threads: int) -> I64: ...  # sums of several ranks are added up number by number
    def oov_gradient_sums_sequence(self, grad: F32, threads: int) -> I64: ...
    def train_oov_row(self, sums: I64, hyperparameters: NDArray[np.float64]) -> None: ...  # by these the commit trains the shared rows
    def commit(self) -> None: ...  # after torch ops updated the tensors: marks rows dirty, counts, unpins, and advances the step
    # The core's kernels. `device[t]` has the arrays of table t, or None where kernels run on the host tier's rows in place.
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
        weight_grad: F32 | None,  # [N], is filled with the gradient of `weights`, from the rows before the update
        device: Sequence[DeviceArrays | None] | None,
        threads: int,
    ) -> None: ...  # updates, commits and unpins; StateError the second time. offsets, weights and mean are those of the forward
    def backward_sequence(self, grad: F32, hyperparameters: NDArray[np.float64], device: Sequence[DeviceArrays | None] | None, threads: int) -> None: ...
    def release(self) -> None: ...  # unpins without training; harmless twice

@final
class BucketOrder:
    """Rows in the order of their buckets."""

    order: I64  # of the rows, by (bucket, uint64(id))
    starts: I64  # where in that order each bucket of [begin, end) starts, and the last one ends

def io_engine_name() -> str: ...  # the engine this process uses
def drain_log() -> None: ...  # hands the events of the core so far to Python's logging; reads its levels first
def table_key(name: str) -> int: ...
def row_bytes(dim: int, optimizer: Optimizer, policy: CachePolicy) -> RowBytes: ...
def check_path(field: str, path: str) -> str: ...  # absolute; PathError: no text for a path, or one of another storage
def check_ssd_dir(ssd_dir: str, path_checks: Literal["strict", "trusted"]) -> str: ...  # absolute; PathError, StoragePermissionError: missing, a link, of another, too open, not writable
def table_dir(ssd_dir: str, module: str, table: str, rank: int, world_size: int) -> str: ...  # a table's own directory, names encoded
def sweep_tables(tables: list[Table], rules: list[SweepRule | None]) -> None: ...  # `Table.sweep` of each with its rule, which no Ctrl-C cuts in two
def has_memory_for_threads() -> bool: ...  # memory for threads: one that begins and gets none for what is its own ends the process
def buckets_of(ids: NDArray[np.int64], total_num_buckets: int) -> NDArray[np.uint32]: ...
def hash_ids(ids: NDArray[np.int64]) -> None: ...  # in place; the hash modulo the number of buckets is the bucket
def unhash_ids(hashes: NDArray[np.int64]) -> None: ...  # in place: the inverse
def bucket_order(ids: I64, total_num_buckets: int, begin: int, end: int) -> BucketOrder: ...
