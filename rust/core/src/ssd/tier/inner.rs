//! One tier, as its threads share it: what never changes, its state under one lock, and who may move what.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Result};
use crate::rows::RowLayout;
use crate::ssd::classes::Classes;
use crate::ssd::directory::HeldDir;
use crate::ssd::identity::Identity;
use crate::ssd::index::TagIndex;
use crate::ssd::segment::home::Home;
use crate::ssd::segment::open::OpenSegment;
use crate::ssd::tier::reads::Reads;
use crate::ssd::tier::state::TierState;
use crate::ssd::tier::streams::Stream;
use crate::ssd::tier::takers::Takers;
use crate::ssd::tier::walk::Walk;
use crate::sync::{
    AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, RwLock, RwLockReadGuard, RwLockWriteGuard, lock, was_torn,
};

/// One tier.
///
/// Its locks, in the order in which they are taken: `publishing`, `compacting`, `state`; then a leaf, of which nobody takes two at once:
/// the jobs and blocks of a segment, the space, the buffer pool. Who holds `state` waits neither for the disk nor for room nor for a
/// buffer, except to make, remove and rename files.
#[derive(Debug)]
pub(crate) struct TierInner {
    pub(crate) home: Home,
    pub(crate) layout: RowLayout,
    pub(crate) identity: Identity,
    pub(crate) reads: Arc<Reads>,
    /// Who takes the rows of scans that are under way.
    pub(crate) takers: Takers,
    pub(crate) counters: Counters,
    /// Where the last eviction stopped.
    pub(crate) eviction: Mutex<Walk>,
    state: RwLock<TierState>,
    publishing: Mutex<()>,
    /// Whoever moves a segment's rows reads it; whoever wants none to be moved writes it.
    compacting: RwLock<()>,
    /// Whether a thread was told to compact this tier and has not begun.
    compaction_is_due: AtomicBool,
    /// The tier's directory, until it is closed.
    held: Mutex<Option<HeldDir>>,
    /// The note of the state that was resumed, until it is taken.
    note: Mutex<Vec<u8>>,
}

/// What a tier counts, beside its fetches.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) row_bytes_given: AtomicU64,
    pub(crate) compaction_bytes: AtomicU64,
    pub(crate) dropped_rows: AtomicU64,
    pub(crate) room_waits: RoomWaits,
}

/// The log says at most this often that a table waits for room. A tier that is nearly full waits many times a second.
const SAY_WAITS_EVERY: Duration = Duration::from_secs(60);

/// How often somebody has waited for room, and when the log said so last.
#[derive(Debug, Default)]
pub(crate) struct RoomWaits {
    count: AtomicU64,
    said: std::sync::Mutex<Option<Instant>>,
}

impl RoomWaits {
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Count a wait. Returns whether the log is to say so.
    pub(crate) fn begin(&self) -> bool {
        self.count.fetch_add(1, Ordering::Relaxed);
        let (mut said, now) = (lock(&self.said), Instant::now());
        let is_due = said.is_none_or(|said| now - said >= SAY_WAITS_EVERY);
        if is_due {
            *said = Some(now);
        }
        is_due
    }
}

impl TierInner {
    /// A tier in the directory that is `held`, with the note of the state that was resumed.
    pub(crate) fn new(
        home: Home,
        layout: RowLayout,
        identity: Identity,
        state: TierState,
        (held, note): (HeldDir, Vec<u8>),
    ) -> Self {
        let reads = Arc::new(Reads::new(&home, layout, state.index().prints()));
        Self {
            home,
            layout,
            identity,
            reads,
            takers: Takers::default(),
            counters: Counters::default(),
            eviction: Mutex::default(),
            state: RwLock::new(state),
            publishing: Mutex::new(()),
            compacting: RwLock::new(()),
            compaction_is_due: AtomicBool::new(false),
            held: Mutex::new(Some(held)),
            note: Mutex::new(note),
        }
    }

    /// The state, to change it. Those who wait for this go before those who wait to read, so that fetches starve nobody.
    pub(crate) fn state(&self) -> RwLockWriteGuard<'_, TierState> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, to look things up.
    pub(crate) fn view(&self) -> RwLockReadGuard<'_, TierState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be held while a state is published, given up by name, or all rows are forgotten.
    pub(crate) fn publishing(&self) -> MutexGuard<'_, ()> {
        lock(&self.publishing)
    }

    /// To be held while a segment's rows are moved.
    pub(crate) fn compacting(&self) -> RwLockReadGuard<'_, ()> {
        self.compacting.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wait until no segment's rows are being moved. None are as long as this is held.
    pub(crate) fn not_compacting(&self) -> RwLockWriteGuard<'_, ()> {
        self.compacting.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread is to compact this tier; whether one has to be told.
    pub(crate) fn compaction_becomes_due(&self) -> bool {
        !self.compaction_is_due.swap(true, Ordering::AcqRel)
    }

    /// A thread begins to compact this tier. Who has something for it from now on has to tell a thread.
    pub(crate) fn compaction_begins(&self) {
        self.compaction_is_due.store(false, Ordering::Release);
    }

    /// Run a background task that changes this tier. Its panic counts as a failed write: from then on the tier only reads.
    pub(crate) fn contain(&self, what: &str, task: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(task)) {
            self.home.space.fail(Error::panicked(what, &*panic));
        }
    }

    /// `State` in a forked process, and after a panic amid a change of the state: then neither the index nor the counts can be believed.
    pub(crate) fn check_usable(&self) -> Result<()> {
        self.home.workers.check_process()?;
        if was_torn(&self.state) {
            return Err(Error::new(
                Kind::State,
                format!(
                    "table '{}': the SSD tier cannot be used since a panic interrupted a change of it: open the table again, to go \
                     on from its last flush, or load a checkpoint",
                    self.identity.table
                ),
            ));
        }
        Ok(())
    }

    /// `ReadOnly` after a failed write, `State` when closed, after a panic, or in a forked process.
    pub(crate) fn check_writable(&self) -> Result<()> {
        self.check_usable()?;
        if let Some(cause) = self.home.space.failed() {
            return Err(read_only(&cause));
        }
        if self.view().is_closed() {
            return Err(Error::new(Kind::State, "the SSD tier is closed: open the table again"));
        }
        Ok(())
    }

    /// Bytes that rows from RAM leave free. See [`Geometry::kept_bytes`](crate::ssd::room::geometry::Geometry::kept_bytes).
    pub(crate) fn bytes_kept(&self, state: &TierState) -> u64 {
        self.home.geometry.kept_bytes(state.moving())
    }

    /// Bytes that have to be free for a segment for rows from RAM, or for tombstones, to be opened.
    pub(crate) fn bytes_needed(&self, state: &TierState) -> u64 {
        self.bytes_kept(state) + self.home.geometry.segment_bytes
    }

    /// The classes of rows, for as many rows as there are now.
    pub(crate) fn classes(&self, state: &TierState) -> Classes {
        state.classes(self.home.geometry.classes)
    }

    /// Whether a row from RAM, or a tombstone, can be written to `stream`. Opens a segment where there is none and the cap has room.
    pub(crate) fn ready(&self, state: &mut TierState, stream: Stream) -> Result<bool> {
        let free = self.home.space.free_bytes();
        if free < self.bytes_kept(state) {
            return Ok(false);
        }
        Ok(state.takes(stream) || (free >= self.bytes_needed(state) && self.open_segment(state, stream)?))
    }

    /// The stream that takes a row of `class` that compaction moves, if any does. It is the class's own where a whole segment of it can be
    /// opened; a smaller one would be the next to be moved.
    pub(crate) fn ready_for_moved(&self, state: &mut TierState, class: u8) -> Result<Option<Stream>> {
        let own = Stream::Rows(class);
        if state.takes(own) {
            return Ok(Some(own));
        }
        if self.home.space.free_bytes() >= self.home.geometry.segment_bytes && self.open_segment(state, own)? {
            return Ok(Some(own));
        }
        Ok(Stream::of_rows().find(|stream| state.takes(*stream)))
    }

    /// Open a segment for `stream`; whether there was room for its file.
    fn open_segment(&self, state: &mut TierState, stream: Stream) -> Result<bool> {
        let (serial, widths, seq) = state.next_segment(stream);
        let open = OpenSegment::create(&self.home, (serial, widths), (stream.content(), stream.class(), seq))
            .inspect_err(|error| self.home.space.fail(error.clone()))?;
        let Some(open) = open else { return Ok(false) };
        state.add_open(stream, open);
        Ok(true)
    }

    /// The error where `rows` rows are here and `more` do not fit.
    pub(crate) fn full(&self, rows: u64, more: u64) -> Error {
        let (table, capacity) = (&self.identity.table, self.home.geometry.capacity_rows);
        let message = if capacity == TagIndex::MOST_IDS {
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
        Error::new(Kind::Capacity, message)
    }

    /// The note of the state that was resumed, the first time; empty where there is none.
    pub(crate) fn take_note(&self) -> Vec<u8> {
        std::mem::take(&mut lock(&self.note))
    }

    /// Give the directory up. Somebody else may have it from now on.
    pub(crate) fn let_go_of_directory(&self) {
        drop(lock(&self.held).take());
    }
}

/// The error of every write after `cause`.
pub(crate) fn read_only(cause: &Error) -> Error {
    let what = "the SSD tier only reads since an earlier write failed (what it holds can be read and saved elsewhere)";
    cause.clone().context(what).with_kind(Kind::ReadOnly)
}
