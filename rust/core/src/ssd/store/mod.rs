//! One tier, as its threads share it: the immutable context, its state under one lock, and the locks for compaction and
//! publishing. `ops` uses it.
//!
//! - [`state`]: the data under the tier's lock: the index, the open segments, and the parts below.
//! - [`segment_sets`]: the current set of segments, and published states.
//! - [`scan_state`], [`snapshot`]: the records that a scan or a snapshot has to find, while records are added and become
//!   dead.
//! - [`reads`]: fetches in progress.

pub(crate) mod reads;
pub(crate) mod scan_state;
pub(crate) mod segment_sets;
pub(crate) mod snapshot;
pub(crate) mod state;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Result};
use crate::rows::RowLayout;
use crate::runtime::sync::{
    AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, RwLock, RwLockReadGuard, RwLockWriteGuard, lock, was_poisoned,
};
use crate::ssd::directory::{ShardIdentity, TierDirLock};
use crate::ssd::hotness::HotnessClasses;
use crate::ssd::index::TagIndex;
use crate::ssd::segment::SegmentContext;
use crate::ssd::segment::open_segment::OpenSegment;
use crate::ssd::store::reads::FetchContext;
use crate::ssd::store::scan_state::{ScanConsumers, SegmentCursor};
use crate::ssd::store::state::{SegmentStream, TierState};

/// One tier.
///
/// Its locks, in the order of acquisition: `publishing`, `compacting`, `state`; then a leaf, of which no thread holds
/// two: the jobs and blocks of a segment, the space, the buffer pool. A thread that holds `state` does not wait for the
/// disk, free space or a buffer, except to create, remove and rename files.
#[derive(Debug)]
pub(crate) struct TierInner {
    pub(crate) context: SegmentContext,
    pub(crate) layout: RowLayout,
    pub(crate) identity: ShardIdentity,
    pub(crate) reads: Arc<FetchContext>,
    /// Consumers of the scans in progress.
    pub(crate) scan_consumers: ScanConsumers,
    pub(crate) counters: SsdTierCounters,
    /// Where the last eviction stopped.
    pub(crate) eviction_cursor: Mutex<SegmentCursor>,
    state: RwLock<TierState>,
    publishing: Mutex<()>,
    /// Held for reading to move a segment's rows, and for writing to exclude moves.
    compacting: RwLock<()>,
    /// True if a thread was scheduled to compact this tier and has not started.
    is_compaction_due: AtomicBool,
    /// The lock of the tier's directory, until it is closed.
    dir_lock: Mutex<Option<TierDirLock>>,
    /// The metadata blob of the resumed state, until it is taken.
    metadata: Mutex<Vec<u8>>,
}

/// Counters of a tier, except those of its fetches.
#[derive(Debug, Default)]
pub(crate) struct SsdTierCounters {
    pub(crate) row_bytes_given: AtomicU64,
    pub(crate) compaction_bytes: AtomicU64,
    pub(crate) dropped_rows: AtomicU64,
    pub(crate) space_waits: SpaceWaits,
}

/// Minimum interval between log messages about waits for free space. A nearly full tier waits many times per second.
const LOG_WAITS_EVERY: Duration = Duration::from_secs(60);

/// Number of waits for free space, and the time of the last log message about them.
#[derive(Debug, Default)]
pub(crate) struct SpaceWaits {
    count: AtomicU64,
    last_logged: std::sync::Mutex<Option<Instant>>,
}

impl SpaceWaits {
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Counts a wait. Returns true if it is to be logged.
    pub(crate) fn begin(&self) -> bool {
        self.count.fetch_add(1, Ordering::Relaxed);
        let (mut last_logged, now) = (lock(&self.last_logged), Instant::now());
        let is_due = last_logged.is_none_or(|last_logged| now - last_logged >= LOG_WAITS_EVERY);
        if is_due {
            *last_logged = Some(now);
        }
        is_due
    }
}

impl TierInner {
    /// Creates a tier in the locked directory, with the metadata blob of the resumed state.
    pub(crate) fn new(
        context: SegmentContext,
        layout: RowLayout,
        identity: ShardIdentity,
        state: TierState,
        (dir_lock, metadata): (TierDirLock, Vec<u8>),
    ) -> Self {
        let reads = Arc::new(FetchContext::new(&context, layout, state.index().fingerprint_hasher()));
        Self {
            context,
            layout,
            identity,
            reads,
            scan_consumers: ScanConsumers::default(),
            counters: SsdTierCounters::default(),
            eviction_cursor: Mutex::default(),
            state: RwLock::new(state),
            publishing: Mutex::new(()),
            compacting: RwLock::new(()),
            is_compaction_due: AtomicBool::new(false),
            dir_lock: Mutex::new(Some(dir_lock)),
            metadata: Mutex::new(metadata),
        }
    }

    /// Locks the state for changes. Writers have priority over readers, so that fetches do not starve them.
    pub(crate) fn state(&self) -> RwLockWriteGuard<'_, TierState> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state for lookups.
    pub(crate) fn view(&self) -> RwLockReadGuard<'_, TierState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the publishing lock. It is held while a state is published or discarded by name, or all rows are removed.
    pub(crate) fn publishing(&self) -> MutexGuard<'_, ()> {
        lock(&self.publishing)
    }

    /// Takes the compaction lock, shared, for a thread that moves a segment's rows.
    pub(crate) fn compacting(&self) -> RwLockReadGuard<'_, ()> {
        self.compacting.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the compaction lock exclusively: waits until no segment's rows are being moved, and excludes moves while
    /// the guard is held.
    pub(crate) fn pause_compaction(&self) -> RwLockWriteGuard<'_, ()> {
        self.compacting.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests compaction of this tier. Returns true if a thread must be scheduled.
    pub(crate) fn request_compaction(&self) -> bool {
        !self.is_compaction_due.swap(true, Ordering::AcqRel)
    }

    /// Marks the start of compaction. Later requests must schedule a thread again.
    pub(crate) fn begin_compaction(&self) {
        self.is_compaction_due.store(false, Ordering::Release);
    }

    /// Runs a background task that changes this tier. A panic counts as a failed write, which makes the tier read-only.
    pub(crate) fn run_background(&self, action: &str, task: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(task)) {
            self.context.space.fail(Error::panicked(action, &*panic));
        }
    }

    /// Returns `State` in a forked process, and after a panic during a change of the state, when neither the index nor
    /// the counts are reliable.
    pub(crate) fn check_usable(&self) -> Result<()> {
        self.context.workers.check_process()?;
        if was_poisoned(&self.state) {
            return Err(Kind::State.error(format!(
                "table '{}': the SSD tier cannot be used since a panic interrupted a change of it: open the table again, to go \
                 on from its last flush, or load a checkpoint",
                self.identity.table
            )));
        }
        Ok(())
    }

    /// Returns `ReadOnly` after a failed write, `State` when closed, after a panic, or in a forked process.
    pub(crate) fn check_writable(&self) -> Result<()> {
        self.check_usable()?;
        if let Some(cause) = self.context.space.failed() {
            return Err(read_only_error(&cause));
        }
        if self.view().is_closed() {
            return Err(Kind::State.error("the SSD tier is closed: open the table again"));
        }
        Ok(())
    }

    /// Bytes that rows from RAM leave free. See
    /// [`SegmentSizing::reserved_bytes`](crate::ssd::space::sizing::SegmentSizing::reserved_bytes).
    pub(crate) fn reserved_bytes(&self, state: &TierState) -> u64 {
        self.context.sizing.reserved_bytes(state.moving())
    }

    /// Bytes that must be free to open a segment for rows from RAM, or for tombstones.
    pub(crate) fn bytes_needed(&self, state: &TierState) -> u64 {
        self.reserved_bytes(state) + self.context.sizing.segment_bytes
    }

    /// Returns the hotness groups for the present number of rows.
    pub(crate) fn hotness_classes(&self, state: &TierState) -> HotnessClasses {
        state.hotness_classes(self.context.sizing.hotness_classes)
    }

    /// Prepares `stream` for a row from RAM, or a tombstone. Opens a segment if there is none and the cap has space.
    /// Returns true if it can be written.
    pub(crate) fn prepare_stream(&self, state: &mut TierState, stream: SegmentStream) -> Result<bool> {
        let free = self.context.space.free_bytes();
        if free < self.reserved_bytes(state) {
            return Ok(false);
        }
        Ok(state.has_writable_segment(stream)
            || (free >= self.bytes_needed(state) && self.open_segment(state, stream)?))
    }

    /// Returns the stream for a row of `hotness` that compaction moves, if any has space. It is the group's own stream
    /// if that has space or a full segment can be opened; a smaller segment would soon be moved again.
    pub(crate) fn prepare_stream_for_move(&self, state: &mut TierState, hotness: u8) -> Result<Option<SegmentStream>> {
        let own = SegmentStream::Rows(hotness);
        if state.has_writable_segment(own) {
            return Ok(Some(own));
        }
        if self.context.space.free_bytes() >= self.context.sizing.segment_bytes && self.open_segment(state, own)? {
            return Ok(Some(own));
        }
        Ok(SegmentStream::of_rows().find(|stream| state.has_writable_segment(*stream)))
    }

    /// Opens a segment for `stream`. Returns true if there was space for its file.
    fn open_segment(&self, state: &mut TierState, stream: SegmentStream) -> Result<bool> {
        let (serial, widths, seq) = state.next_segment(stream);
        let open = OpenSegment::create(&self.context, (serial, widths), (stream.content(), stream.hotness(), seq))
            .inspect_err(|error| self.context.space.fail(error.clone()))?;
        let Some(open) = open else { return Ok(false) };
        state.add_open(stream, open);
        Ok(true)
    }

    /// The error when the tier has `rows` rows and `more` do not fit.
    pub(crate) fn capacity_error(&self, rows: u64, more: u64) -> Error {
        let (table, capacity) = (&self.identity.table, self.context.sizing.capacity_rows);
        let message = if capacity == TagIndex::MAX_IDS {
            format!(
                "table '{table}': the SSD tier holds {rows} rows of this rank, {more} more are to be added, and its index takes {capacity}: \
                 use more ranks, or let rows leave with on_full = \"evict\""
            )
        } else {
            format!(
                "table '{table}': the SSD tier holds {rows} rows, {more} more are to be added, and its budget has room for {capacity}: \
                 raise ssd_bytes, or let rows leave with on_full = \"evict\""
            )
        };
        Kind::Capacity.error(message)
    }

    /// Takes the metadata blob of the resumed state. Empty if there is none, and after the first call.
    pub(crate) fn take_metadata(&self) -> Vec<u8> {
        std::mem::take(&mut lock(&self.metadata))
    }

    /// Unlocks the directory, for another tier.
    pub(crate) fn unlock_directory(&self) {
        drop(lock(&self.dir_lock).take());
    }
}

/// The error of every write after `cause`.
pub(crate) fn read_only_error(cause: &Error) -> Error {
    let what = "the SSD tier only reads since an earlier write failed (what it holds can be read and saved elsewhere)";
    cause.clone().context(what).with_kind(Kind::ReadOnly)
}
