//! Chooses the next segment to compact: [`choose`], a function of a [`CompactionView`] of the tier.
//!
//! Compaction moves the live records of a segment elsewhere, so that its file can be removed. It works as late as
//! possible, because older segments have more dead records. It looks for, in this order:
//!
//! 1. [`CompactionChoice::FreeSpace`]: space is short, and no published state references the segment, so that its bytes
//!    are freed immediately.
//! 2. [`CompactionChoice::FreeTombstones`]: tombstones pile up, and this is the oldest segment with dead records, which
//!    keeps them alive.
//! 3. [`CompactionChoice::Thin`]: published states reference the segment, many of its records are dead, and both copies
//!    fit. The next publishes free it.
//! 4. [`CompactionChoice::Merge`]: frequent publishes leave many small segments, and this is the smallest.
//!
//! A segment is chosen only if all its live records fit the open segments and the free space: moving only some of them
//! frees nothing.

use crate::ssd::workers::COMPACTORS;

/// Space is short, in a tier that was never published, if fewer than 5 segments are free: one for each hotness group,
/// which may all be opened at the same time, and one for tombstones. Such a tier keeps no more free, because all that
/// it compacts is freed immediately.
const SHORT_SEGMENTS: u64 = 5;
/// Space is short, in a published tier, if less than an eighth of the cap is free: a publish references every segment,
/// so that writes until the next publish have only this space.
const SHORT_SHARE: u64 = 8;
/// Space is short, in a published tier, if fewer than 4 segments are free, for any cap.
const MIN_SHORT_SEGMENTS: u64 = 4;
/// Rows from RAM wait if fewer than 3 segments are free: 2 are reserved, and the third is theirs. Then any segment is
/// worth moving.
const URGENT_SEGMENTS: u64 = 3;
/// While rows need not wait, a published tier moves segments that are at most half live. This writes at most as much as
/// it frees; fuller segments may empty until the next publish.
const WORTH_MOVING: f64 = 0.5;
/// While rows wait and discarding published states would free space, a segment is moved only if it is at most three
/// quarters live. Moving a fuller one writes more than three records to free the space of one, while discarding a state
/// costs nothing.
const WORTH_MOVING_BEFORE_DROPPING_STATES: f64 = 0.75;
/// Segments that must be free before anything is moved for a reason other than space: such a move must not itself make
/// space short.
const FREE_TO_MOVE_FOR_TOMBSTONES: u64 = 2;
/// Segments that must be free before referenced or small segments are moved. Such a move frees nothing before the next
/// publish.
const FREE_TO_MOVE_WITHOUT_GAIN: u64 = 4;
/// Tombstones pile up if they occupy more than 1/16 of the cap, which is the fraction that the capacity leaves for dead
/// records.
const TOMBSTONE_SHARE: u64 = 16;
/// Tombstones pile up if they have more than 8 segments.
const TOMBSTONE_SEGMENTS: usize = 8;
/// Referenced segments are thinned out if less than a third of the cap is free: above that, the next publishes have
/// enough space.
const THIN_BELOW_FREE_SHARE: u64 = 3;
/// Referenced segments are thinned out if files that only published states need occupy less than a quarter of the cap:
/// thinning adds to them.
const THIN_BELOW_RETAINED_SHARE: u64 = 4;
/// A referenced segment is thinned out if less than 0.6 of its records are live.
const THIN_LIVE_SHARE: f64 = 0.6;
/// A segment is small if it has at most a quarter of the rows of a full one.
const SMALL_SHARE_OF_ROWS: u32 = 4;
/// If there are more than 16 small segments, the smallest is merged: each costs a file, and a footer to read at a
/// resume.
const SMALL_SEGMENTS: u64 = 16;
/// A small cap allows fewer small segments: one for each 8 segments that fit it.
const SMALL_SHARE_OF_CAP: u64 = 8;

/// The choice, with the slot of the segment to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompactionChoice {
    /// Moves it, because space is short.
    FreeSpace(u32),
    /// Moves it, so that tombstones can be removed.
    FreeTombstones(u32),
    /// Moves it, so that the next publishes free it.
    Thin(u32),
    /// Moves it, because there are many small ones.
    Merge(u32),
    /// Moves none.
    Nothing,
}

impl CompactionChoice {
    /// Slot of the segment to move.
    pub(crate) fn slot(self) -> Option<u32> {
        match self {
            Self::FreeSpace(slot) | Self::FreeTombstones(slot) | Self::Thin(slot) | Self::Merge(slot) => Some(slot),
            Self::Nothing => None,
        }
    }

    /// The reason, for logs.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::FreeSpace(_) => "make room",
            Self::FreeTombstones(_) => "free tombstones",
            Self::Thin(_) => "thin",
            Self::Merge(_) => "merge",
            Self::Nothing => "nothing",
        }
    }
}

/// The properties of a tier that compaction depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompactionView {
    /// If true, segments can be moved: the tier is neither closed nor read-only.
    pub(crate) can_write: bool,
    /// Bytes of the cap.
    pub(crate) cap_bytes: u64,
    /// Maximum bytes of a segment.
    pub(crate) segment_bytes: u64,
    /// Rows of a full segment with the current record format.
    pub(crate) rows_per_segment: u32,
    /// Bytes of such a segment.
    pub(crate) full_bytes: u64,
    /// Bytes of the cap that no file holds.
    pub(crate) free_bytes: u64,
    /// Segments that are being moved.
    pub(crate) moving: u32,
    /// Rows that fit the open segments and those that can be opened, in addition to the rows that are being moved.
    pub(crate) rows_to_move: u64,
    /// True if the tier was ever published or resumed.
    pub(crate) was_published: bool,
    /// Number of published states from which the tier can be resumed.
    pub(crate) states: usize,
    /// Bytes of files that only published states need.
    pub(crate) retained_bytes: u64,
    /// Segments of tombstones that are still needed.
    pub(crate) tombstone_segments: usize,
    /// Bytes of these.
    pub(crate) tombstone_bytes: u64,
    /// The oldest tombstones are needed while a segment with a smaller serial than this has dead records.
    pub(crate) tombstones_before: u64,
    /// The next record's `write_seq`.
    pub(crate) next_seq: u64,
}

/// The properties of a segment of the current set that compaction depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentView {
    pub(crate) slot: u32,
    pub(crate) serial: u64,
    /// True if it contains rows, its file is complete, no scan is waiting for it, no thread moves it, and its bytes can
    /// be read.
    pub(crate) can_move: bool,
    /// True if its file is complete.
    pub(crate) sealed: bool,
    pub(crate) records: u32,
    /// Records that the index points to.
    pub(crate) live: u32,
    /// Bytes of the cap that it occupies.
    pub(crate) held_bytes: u64,
    /// Number of references from the current set and the published states.
    pub(crate) ref_count: u32,
    /// The next record's `write_seq` when the segment was created.
    pub(crate) made_seq: u64,
}

impl SegmentView {
    /// Live records, relative to the number of current-format records in the same bytes of a full segment. Below 1,
    /// moving its rows to full segments frees space.
    pub(crate) fn utilization(&self, view: &CompactionView) -> f64 {
        let held = self.held_bytes as f64 * f64::from(view.rows_per_segment);
        f64::from(self.live) * view.full_bytes as f64 / held.max(1.0)
    }

    /// Fraction of its records that are live.
    pub(crate) fn live_share(&self) -> f64 {
        f64::from(self.live) / f64::from(self.records.max(1))
    }

    /// Benefit by cost: the space that moving it frees, divided by the bytes read and written for it, times its age.
    /// Because of the age, segments whose records are about to become dead wait (Rosenblum, Ousterhout: The design and
    /// implementation of a log-structured file system, 1992).
    fn benefit(&self, view: &CompactionView) -> f64 {
        let age = view.next_seq.saturating_sub(self.made_seq).max(1) as f64;
        let share = self.utilization(view);
        (1.0 - share) / (1.0 + share) * age
    }
}

impl CompactionView {
    fn segments(&self, count: u64) -> u64 {
        self.segment_bytes * count
    }

    /// True if rows from RAM have to wait for free space.
    fn is_urgent(&self) -> bool {
        self.free_bytes < self.segments(URGENT_SEGMENTS)
    }

    fn is_short(&self) -> bool {
        let short = if self.was_published {
            (self.cap_bytes / SHORT_SHARE).max(self.segments(MIN_SHORT_SEGMENTS))
        } else {
            self.segments(SHORT_SEGMENTS)
        };
        self.free_bytes < short
    }

    /// True if discarding published states would free space, directly or by compaction.
    pub(crate) fn states_hold_space(&self, mut segments: impl Iterator<Item = SegmentView>) -> bool {
        // A segment that is being sealed does not occupy its final bytes yet.
        self.states > 0
            && (self.retained_bytes > 0 || segments.any(|s| s.ref_count > 1 && s.sealed && s.utilization(self) < 1.0))
    }

    /// Maximum utilization of a segment that is worth moving when space is short.
    fn worth_moving(&self, segments: impl Iterator<Item = SegmentView>) -> f64 {
        if !self.was_published {
            1.0
        } else if !self.is_urgent() {
            WORTH_MOVING
        } else if self.states_hold_space(segments) {
            WORTH_MOVING_BEFORE_DROPPING_STATES
        } else {
            1.0
        }
    }
}

/// Chooses the next segment to compact.
pub(crate) fn choose(view: &CompactionView, segments: impl Iterator<Item = SegmentView> + Clone) -> CompactionChoice {
    // Each segment that is being moved must find its space: if all were half moved when space runs out, none could be
    // finished.
    let one_more = view.segments(u64::from(view.moving) + 1);
    if !view.can_write || (view.moving > 0 && (view.moving >= COMPACTORS || view.free_bytes < one_more)) {
        return CompactionChoice::Nothing;
    }
    let candidates = segments.clone().filter(|s| s.can_move && u64::from(s.live) <= view.rows_to_move);
    if view.is_short() {
        let most = view.worth_moving(segments);
        let unnamed =
            candidates.clone().filter(|s| s.ref_count == 1 && s.utilization(view) < 1.0 && s.utilization(view) <= most);
        if let Some(best) = unnamed.max_by(|a, b| a.benefit(view).total_cmp(&b.benefit(view))) {
            return CompactionChoice::FreeSpace(best.slot);
        }
    }
    if view.free_bytes < view.segments(FREE_TO_MOVE_FOR_TOMBSTONES) {
        return CompactionChoice::Nothing;
    }
    if view.tombstone_bytes > view.cap_bytes / TOMBSTONE_SHARE || view.tombstone_segments > TOMBSTONE_SEGMENTS {
        let with_dead = candidates.clone().filter(|s| s.live < s.records && s.serial < view.tombstones_before);
        if let Some(oldest) = with_dead.min_by_key(|s| s.serial) {
            return CompactionChoice::FreeTombstones(oldest.slot);
        }
    }
    if view.free_bytes < view.segments(FREE_TO_MOVE_WITHOUT_GAIN) {
        return CompactionChoice::Nothing;
    }
    if view.free_bytes < view.cap_bytes / THIN_BELOW_FREE_SHARE
        && view.retained_bytes < view.cap_bytes / THIN_BELOW_RETAINED_SHARE
    {
        let retained = candidates.clone().filter(|s| s.ref_count > 1 && s.live_share() < THIN_LIVE_SHARE);
        if let Some(emptiest) = retained.min_by(|a, b| a.live_share().total_cmp(&b.live_share())) {
            return CompactionChoice::Thin(emptiest.slot);
        }
    }
    let small = candidates.filter(|s| s.records <= view.rows_per_segment / SMALL_SHARE_OF_ROWS);
    let many = SMALL_SEGMENTS.min(view.cap_bytes / view.segment_bytes / SMALL_SHARE_OF_CAP);
    if small.clone().count() as u64 <= many {
        return CompactionChoice::Nothing;
    }
    small.min_by_key(|s| s.records).map_or(CompactionChoice::Nothing, |smallest| CompactionChoice::Merge(smallest.slot))
}
