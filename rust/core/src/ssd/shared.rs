//! What the threads of one tier share: its state under one lock, its space, its counters.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};

use super::Identity;
use super::classes::{Classes, MOST_CLASSES};
use super::compact::{self, MOST_MOVING};
use super::evict::Sweep;
use super::fetch::FetchJob;
use super::format::Content;
use super::give_way::GiveWay;
use super::home::Home;
use super::index::{Location, Prints, TagIndex};
use super::manifest::Published;
use super::moment::Moment;
use super::open::HeldDir;
use super::segment::{OpenSegment, Segment};
use super::space::Geometry;
use super::tally::Tally;
use crate::error::{Error, Kind, Result};
use crate::rows::RowLayout;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, RwLock, RwLockReadGuard, RwLockWriteGuard, was_torn};

/// Whole segments kept free for compaction while nothing is moved; see [`Shared::bytes_kept`].
pub(super) const KEPT_SEGMENTS: u32 = 2;

/// Which open segment a record goes to: that of its class of rows (see `classes`), or that of tombstones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Rows(u8),
    Tombstones,
}

impl Stream {
    pub(super) const COUNT: usize = MOST_CLASSES as usize + 1;

    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..MOST_CLASSES).map(Self::Rows).chain([Self::Tombstones])
    }

    pub(super) fn index(self) -> usize {
        match self {
            Self::Rows(class) => class as usize,
            Self::Tombstones => MOST_CLASSES as usize,
        }
    }

    fn content(self) -> Content {
        match self {
            Self::Rows(_) => Content::Rows,
            Self::Tombstones => Content::Tombstones,
        }
    }

    fn class(self) -> u8 {
        match self {
            Self::Rows(class) => class,
            Self::Tombstones => 0,
        }
    }
}

/// Tombstones are needed while a segment made before `before` holds a dead record: it could be one of theirs. Compaction copies
/// live records only, so a dead one never moves to a later segment.
#[derive(Debug)]
pub(super) struct Tombstones {
    pub(super) segment: Arc<Segment>,
    pub(super) before: u64,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) index: TagIndex,
    /// The current set by segment number: what the index points to, what a publish would name.
    pub(super) segments: Vec<Option<Arc<Segment>>>,
    /// By [`Stream::index`].
    pub(super) open: [Option<OpenSegment>; Stream::COUNT],
    pub(super) tombstones: Vec<Tombstones>,
    /// Oldest first, at most two.
    pub(super) published: Vec<Published>,
    pub(super) next_seq: u64,
    pub(super) next_serial: u64,
    /// No state may have a smaller or equal token.
    pub(super) last_token: Option<u64>,
    pub(super) highest_epoch: u32,
    /// Segments without live records, to be let go of.
    pub(super) emptied: Vec<u32>,
    /// By segment number: records that are to be counted as dead; see [`State::bury_later`].
    buried: Vec<u32>,
    /// Segments that have some.
    with_buried: Vec<u32>,
    /// Segments whose rows compaction is moving now.
    pub(super) moving: u32,
    /// See [`Classes::of_rewritten`].
    dither: f32,
    pub(super) given_up: bool,
    pub(super) closed: bool,
    /// The moment whose rows are being read, if any.
    pub(super) moment: Option<Moment>,
    /// Of the scans under way.
    pub(super) tallies: Vec<Arc<Tally>>,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) row_bytes_given: AtomicU64,
    pub(super) compaction_bytes: AtomicU64,
    pub(super) dropped_rows: AtomicU64,
    pub(super) hits: AtomicU64,
    pub(super) misses: AtomicU64,
    pub(super) reads: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) fetch_ns: AtomicU64,
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64, value: u64) {
        counter.fetch_add(value, Ordering::Relaxed);
    }
}

/// One tier. Locks in order: `publishing`, `compacting`, `state`, then (leaves, never two at once) a segment's queue and blocks, the
/// space, the buffer pool. Nobody waits for the disk, for space or for a buffer while holding `state`, except for making, removing
/// and renaming files.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) home: Home,
    pub(super) layout: RowLayout,
    pub(super) identity: Identity,
    state: RwLock<State>,
    /// Those of the index.
    pub(super) prints: Prints,
    pub(super) publishing: Mutex<()>,
    /// Held, together with others that do the same, while a segment's rows are moved.
    compacting: RwLock<()>,
    pub(super) compaction_scheduled: AtomicBool,
    /// Fetches that wait in a batch; see [`super::FetchBatch`].
    pub(super) unsubmitted: Mutex<Vec<FetchJob>>,
    /// Who takes the rows of scans that end where they are in the way.
    pub(super) takers: Mutex<Vec<Arc<dyn GiveWay>>>,
    pub(super) counters: Counters,
    pub(super) lock: Mutex<Option<HeldDir>>,
    /// The note of the state that was resumed.
    pub(super) note: Mutex<Vec<u8>>,
    pub(super) sweep: Mutex<Sweep>,
}

impl State {
    pub(super) fn new(index: TagIndex) -> Self {
        Self {
            index,
            segments: Vec::new(),
            open: Default::default(),
            tombstones: Vec::new(),
            published: Vec::new(),
            next_seq: 1,
            next_serial: 1,
            last_token: None,
            highest_epoch: 0,
            emptied: Vec::new(),
            buried: Vec::new(),
            with_buried: Vec::new(),
            moving: 0,
            dither: 0.0,
            given_up: false,
            closed: false,
            moment: None,
            tallies: Vec::new(),
        }
    }

    /// The next of a series that is spread evenly over 0 to 1 (multiples of the golden ratio).
    pub(super) fn next_dither(&mut self) -> f32 {
        self.dither = (self.dither + 0.618_034).fract();
        self.dither
    }

    /// Add a segment to the current set.
    pub(super) fn adopt(&mut self, segment: Arc<Segment>) {
        let slot = segment.slot as usize;
        if self.segments.len() <= slot {
            self.segments.resize(slot + 1, None);
            self.buried.resize(slot + 1, 0);
        }
        self.segments[slot] = Some(segment);
    }

    /// The segment that a location of the index names.
    #[inline]
    pub(super) fn segment(&self, location: Location) -> &Arc<Segment> {
        self.segments[location.segment as usize].as_ref().expect("the index points into the current set")
    }

    /// The record at `location` is not the newest of its id any more. Counted by [`State::count_buried`], before the state's lock is given
    /// up: the counts of segments that other threads changed are far from this one.
    #[inline]
    pub(super) fn bury_later(&mut self, location: Location) {
        if let Some(moment) = &mut self.moment {
            moment.mark(location);
        }
        self.tallies.iter().for_each(|tally| tally.died(location));
        let buried = &mut self.buried[location.segment as usize];
        *buried += 1;
        if *buried == 1 {
            self.with_buried.push(location.segment);
        }
    }

    /// See [`State::bury_later`].
    pub(super) fn count_buried(&mut self) {
        while let Some(slot) = self.with_buried.pop() {
            let buried = std::mem::take(&mut self.buried[slot as usize]);
            let segment = self.segments[slot as usize].as_ref().expect("the index points into the current set");
            if segment.remove_live(buried) == 0 {
                self.emptied.push(slot);
            }
        }
    }

    /// The current set.
    pub(super) fn current(&self) -> impl Iterator<Item = &Arc<Segment>> {
        self.segments.iter().flatten()
    }

    /// Let go of sealed segments without live rows, and then of tombstones that nothing needs any more.
    pub(super) fn reap(&mut self) {
        if self.emptied.is_empty() {
            return;
        }
        let (mut kept, looked_at) = (Vec::new(), self.emptied.len());
        for slot in std::mem::take(&mut self.emptied) {
            let Some(segment) = &self.segments[slot as usize] else { continue };
            if segment.live.load(Ordering::Relaxed) > 0 {
                continue;
            }
            if !segment.is_unneeded_by_scans() {
                kept.push(slot);
                continue;
            }
            self.drop_segment(slot);
        }
        if kept.len() < looked_at {
            self.prune_tombstones();
        }
        self.emptied = kept;
    }

    pub(super) fn drop_segment(&mut self, slot: u32) {
        if let Some(segment) = self.segments[slot as usize].take() {
            segment.unhold();
        }
    }

    /// Serial of the oldest segment of rows that holds a dead record.
    pub(super) fn oldest_with_dead(&self) -> Option<&Arc<Segment>> {
        self.current().filter(|s| s.content == Content::Rows && s.dead() > 0).min_by_key(|s| s.serial)
    }

    /// Let go of tombstones that nothing needs any more.
    pub(super) fn prune_tombstones(&mut self) {
        if self.tombstones.is_empty() {
            return;
        }
        let oldest = self.oldest_with_dead().map_or(u64::MAX, |segment| segment.serial);
        let (needless, needed) = std::mem::take(&mut self.tombstones)
            .into_iter()
            .partition(|t| t.segment.is_unneeded_by_scans() && t.before <= oldest);
        self.tombstones = needed;
        let needless: Vec<Tombstones> = needless;
        for tombstones in needless {
            self.drop_segment(tombstones.segment.slot);
        }
    }

    /// Bytes held by files that only published states need.
    pub(super) fn retained_bytes(&self) -> u64 {
        let mut seen: Vec<&Arc<Segment>> = Vec::new();
        for segment in self.published.iter().flat_map(|published| &published.segments) {
            let current = self.segments.get(segment.slot as usize).and_then(Option::as_ref);
            if !current.is_some_and(|c| Arc::ptr_eq(c, segment)) {
                seen.push(segment);
            }
        }
        seen.sort_unstable_by_key(|segment| segment.serial);
        seen.dedup_by_key(|segment| segment.serial);
        seen.iter().map(|segment| segment.held_bytes()).sum()
    }

    /// Whether giving up published states would make room, now or by compaction.
    pub(super) fn published_is_in_the_way(&self, geometry: &Geometry) -> bool {
        // What is being closed is not yet of the length that it will be.
        let wasteful = |s: &Arc<Segment>| s.holds() > 1 && s.sealed().is_some() && compact::share(s, geometry) < 1.0;
        !self.published.is_empty() && (self.retained_bytes() > 0 || self.current().any(wasteful))
    }

    /// Close an open segment of rows that holds dead records, so that compaction can take it: they, and the tombstones they keep, may
    /// be all that stands in the way. Whether there was one.
    fn seal_one_with_dead(&mut self) -> bool {
        let with_dead =
            |stream: &Stream| self.open[stream.index()].as_ref().is_some_and(|open| open.segment.dead() > 0);
        let rows = (0..MOST_CLASSES).rev().map(Stream::Rows);
        let Some(stream) = rows.into_iter().find(with_dead) else { return false };
        self.seal(stream);
        true
    }

    /// Whether `stream` has no open segment with room for one more record.
    #[inline]
    pub(super) fn is_full(&self, stream: Stream) -> bool {
        let open = self.open[stream.index()].as_ref();
        open.is_none_or(|open| open.is_full(self.next_seq, self.highest_epoch))
    }

    /// Whether `stream` has an open segment with room; a full one is closed.
    fn takes(&mut self, stream: Stream) -> bool {
        if self.is_full(stream) {
            self.seal(stream);
        }
        self.open[stream.index()].is_some()
    }

    /// Close the open segment of a stream; the flusher finishes it.
    pub(super) fn seal(&mut self, stream: Stream) {
        if let Some(open) = self.open[stream.index()].take() {
            let segment = open.seal();
            if stream == Stream::Tombstones {
                self.tombstones.push(Tombstones { segment, before: self.next_serial });
            } else if segment.live.load(Ordering::Relaxed) == 0 {
                self.emptied.push(segment.slot);
            }
        }
    }
}

impl Shared {
    pub(super) fn new(home: Home, layout: RowLayout, identity: Identity, state: State, held: Option<HeldDir>) -> Self {
        Self {
            home,
            layout,
            identity,
            prints: state.index.prints(),
            state: RwLock::new(state),
            publishing: Mutex::new(()),
            compacting: RwLock::new(()),
            compaction_scheduled: AtomicBool::new(false),
            unsubmitted: Mutex::default(),
            takers: Mutex::default(),
            counters: Counters::default(),
            lock: Mutex::new(held),
            note: Mutex::default(),
            sweep: Mutex::default(),
        }
    }

    /// The state, to change it. Those who wait for this go before those who wait to read, so that fetches starve nobody.
    pub(super) fn state(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, to look things up.
    pub(super) fn view(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be held while a segment's rows are moved.
    pub(super) fn compacting(&self) -> RwLockReadGuard<'_, ()> {
        self.compacting.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wait until no segment's rows are being moved; none are as long as this is held.
    pub(super) fn not_compacting(&self) -> RwLockWriteGuard<'_, ()> {
        self.compacting.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Run a background task that changes this tier. Its panic counts as a failed write: from then on the tier only reads.
    pub(super) fn contain(&self, what: &str, task: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(task)) {
            self.home.space.fail(Error::panicked(what, &*panic));
        }
    }

    /// `State` in a forked process, and after a panic amid a change of the state: neither index nor counts can be believed then.
    pub(super) fn check_usable(&self) -> Result<()> {
        self.home.background.check_process()?;
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

    /// `ReadOnly` after a failed write, `State` when closed or in a forked process.
    pub(super) fn check_writable(&self) -> Result<()> {
        self.check_usable()?;
        if let Some(cause) = self.home.space.failed() {
            return Err(read_only(&cause));
        }
        if self.view().closed {
            return Err(Error::new(Kind::State, "the SSD tier is closed: open the table again"));
        }
        Ok(())
    }

    /// Bytes that must be free before a row from RAM, or a tombstone, is taken, and before the open segments are closed by a publish.
    ///
    /// While nothing is moved it is two whole segments, so that compaction can always move a victim: as rows move, the free bytes and the
    /// room in open segments together do not shrink by more than the segments emptied give. So where less than a segment is free, more
    /// than one is in the open segments, which takes the live rows of any victim; nothing but compaction goes on then. While something is
    /// moved it is one for each that can be moved at a time, or rows from RAM would take the room that the others need. A segment for such
    /// a row is made where as much stays free.
    pub(super) fn bytes_kept(&self, state: &State) -> u64 {
        let segments = if state.moving == 0 { KEPT_SEGMENTS } else { MOST_MOVING };
        self.home.geometry.segment_bytes * u64::from(segments)
    }

    /// Whether a segment for rows from RAM, or for tombstones, can be made.
    fn has_room(&self, state: &State, free: u64) -> bool {
        free >= self.bytes_kept(state) + self.home.geometry.segment_bytes
    }

    /// The classes of rows, as many rows as there are now.
    pub(super) fn classes(&self, state: &State) -> Classes {
        Classes { count: self.home.geometry.classes, rows: state.index.len() as u64 }
    }

    /// Whether a row from RAM, or a tombstone, can be pushed to `stream`; makes a segment where there is none and the space has room.
    pub(super) fn ready(&self, state: &mut State, stream: Stream) -> Result<bool> {
        let free = self.home.space.free_bytes();
        if free < self.bytes_kept(state) {
            return Ok(false);
        }
        Ok(state.takes(stream) || (self.has_room(state, free) && self.open_segment(state, stream)?))
    }

    /// As [`Shared::ready`], for a row that compaction moves: the stream that can take it, its own class's where there is room for a
    /// whole segment of it, since a smaller one would be the next to be moved.
    pub(super) fn ready_for_moved(&self, state: &mut State, class: u8) -> Result<Option<Stream>> {
        let own = Stream::Rows(class);
        if state.takes(own) {
            return Ok(Some(own));
        }
        let free = self.home.space.free_bytes();
        if free >= self.home.geometry.segment_bytes && self.open_segment(state, own)? {
            return Ok(Some(own));
        }
        Ok((0..MOST_CLASSES).map(Stream::Rows).find(|stream| state.takes(*stream)))
    }

    /// Make an open segment for `stream`; whether there was room for its file.
    fn open_segment(&self, state: &mut State, stream: Stream) -> Result<bool> {
        let what = (stream.content(), stream.class(), state.next_seq);
        let room = self.home.geometry.segment_bytes;
        let open = OpenSegment::create(&self.home, state.next_serial, what, room).inspect_err(|error| {
            self.home.space.fail(error.clone());
        })?;
        let Some(open) = open else { return Ok(false) };
        state.next_serial += 1;
        state.adopt(open.segment.clone());
        state.open[stream.index()] = Some(open);
        Ok(true)
    }

    /// Wait until rows from RAM can be taken: for compaction, for readers of files that are gone, and when neither helps by giving up
    /// what only published states need. To be called without any lock.
    pub(super) fn wait_for_room(self: &Arc<Self>) -> Result<()> {
        // A disk that failed to read for compaction may read again: one more try for each who waits.
        self.view().current().filter(|segment| segment.is_damaged()).for_each(|segment| segment.forgive());
        loop {
            let generation = self.home.space.generation();
            self.check_writable()?;
            // A fetch keeps the files that it reads, and nobody else may be there to submit it.
            self.submit_fetches();
            let mut state = self.state();
            // Before all looks below: what ends between two of them, each would miss.
            let was_coming = self.room_is_coming(&state);
            state.reap();
            state.prune_tombstones();
            if self.has_room(&state, self.home.space.free_bytes()) {
                return Ok(());
            }
            if state.moving > 0 || compact::victim(self, &state).is_some() {
                drop(state);
                self.schedule_compaction();
            } else if self.home.space.generation() != generation {
                // Files went between the looks at the free bytes: with more of them free fewer segments are worth compacting.
                continue;
            } else if let Some(cause) = self.home.space.failed() {
                // Since it was looked at above: then nothing is compacted, and nothing is to be given up for that.
                return Err(read_only(&cause));
            } else if state.seal_one_with_dead() {
                continue;
            } else if state.moment.as_ref().is_some_and(Moment::is_unread) {
                drop(state);
                if self.read_for_moment() {
                    continue;
                }
            } else if self.waiting_scans_give_way() {
                // They end as soon as they notice.
                drop(state);
            } else if state.published_is_in_the_way(&self.home.geometry) {
                self.give_up_oldest(&mut state)?;
                continue;
            } else {
                if !was_coming && !self.room_is_coming(&state) {
                    let stuck = "the SSD tier has no room left, because files it no longer needs could not be removed";
                    if let Some(cause) = self.home.space.lost() {
                        return Err(cause.context(stuck));
                    }
                    let unread = "the SSD tier has no room left, because a segment with dead records cannot be read";
                    let wasteful = |segment: &&Arc<Segment>| compact::share(segment, &self.home.geometry) < 1.0;
                    let damage = state.current().filter(wasteful).find_map(|segment| segment.damage());
                    let full = || self.full(state.index.len() as u64, 0);
                    return Err(damage.map_or_else(full, |cause| cause.context(unread)));
                }
                drop(state);
            }
            self.home.space.wait_change(generation);
        }
    }

    /// Whether something is under way that makes room, or lets compaction make some: scans, footers on the way to disk, files that go.
    fn room_is_coming(&self, state: &State) -> bool {
        let held: u64 = state.current().map(|segment| segment.held_bytes()).sum();
        let scanning = state.current().any(|segment| segment.scans.load(Ordering::Relaxed) > 0);
        let sealing = state.current().any(|s| s.sealed().is_none() && !state.is_open(s));
        scanning || sealing || self.home.space.leaving_bytes(held) > 0
    }

    /// The error of rows that do not fit.
    pub(super) fn full(&self, rows: u64, more: u64) -> Error {
        let capacity = self.home.geometry.capacity_rows;
        if capacity == TagIndex::MOST_IDS {
            let message = format!(
                "table '{}': the SSD tier holds {rows} rows of this rank, {more} more are to be added, and its index takes {capacity}: \
                 use more ranks, or let rows leave with on_full = \"evict\"",
                self.identity.table
            );
            return Error::new(Kind::Capacity, message);
        }
        Error::new(
            Kind::Capacity,
            format!(
                "table '{}': the SSD tier holds {rows} rows, {more} more are to be added, and its budget has room for {capacity}: \
                 raise ssd_bytes, or let rows leave with on_full = \"evict\"",
                self.identity.table
            ),
        )
    }

    /// Let the compactor look at this tier.
    pub(super) fn schedule_compaction(self: &Arc<Self>) {
        if !self.compaction_scheduled.swap(true, Ordering::AcqRel) {
            self.home.background.compact(self);
        }
    }

    /// Let the compactor look at this tier if there is something for it to do.
    pub(super) fn compact_if_worthwhile(self: &Arc<Self>, state: &State) {
        if compact::victim(self, state).is_some() {
            self.schedule_compaction();
        }
    }
}

impl State {
    fn is_open(&self, segment: &Arc<Segment>) -> bool {
        self.open.iter().flatten().any(|open| Arc::ptr_eq(&open.segment, segment))
    }
}

/// The error of every write after `cause`.
pub(super) fn read_only(cause: &Error) -> Error {
    let what = "the SSD tier only reads since an earlier write failed (what it holds can be read and saved elsewhere)";
    cause.clone().context(what).with_kind(Kind::ReadOnly)
}
