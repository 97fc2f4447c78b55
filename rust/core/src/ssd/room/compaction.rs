//! What compaction takes next: [`choose`], a function of a [`View`] of the tier.
//!
//! Compaction moves the live records of a segment elsewhere, so that its file can go. It works as late as it can, because what waits longer
//! has more dead records. What it looks for, in this order:
//!
//! 1. [`Choice::FreeSpace`]: room is short, and the segment is named by no published state, so that its bytes are free at once.
//! 2. [`Choice::FreeTombstones`]: tombstones pile up, and this oldest segment with dead records is what keeps them.
//! 3. [`Choice::Thin`]: published states name the segment, many of its records are dead, and there is room for both copies. The next
//!    publishes free it.
//! 4. [`Choice::Merge`]: frequent publishes leave many small segments, and this is the smallest.
//!
//! None is chosen whose live records do not all fit what is open and free: a segment that is moved in part frees nothing.

use crate::ssd::workers::COMPACTORS;

/// Room is short, in a tier that was never published, where less than 5 segments are free: one for each class of rows, which all may be
/// opened at once, and one for tombstones. Such a tier keeps no more free than that, since all that it frees is free at once.
const SHORT_SEGMENTS: u64 = 5;
/// Room is short, in a tier that is published, where less than an eighth of the cap is free: a publish names every segment, so that until
/// the next one what is written finds no room but this.
const SHORT_SHARE: u64 = 8;
/// Room is short, in a tier that is published, where less than 4 segments are free, however small the cap is.
const MIN_SHORT_SEGMENTS: u64 = 4;
/// Where less than 3 segments are free, rows from RAM wait: 2 are kept, and theirs is the third. Then any segment is worth moving.
const URGENT_SEGMENTS: u64 = 3;
/// While rows need not wait, a published tier moves segments of which at most half is live. Moving those costs at most as much writing as
/// it makes room; fuller ones may empty until the next publish.
const WORTH_MOVING: f64 = 0.5;
/// While rows wait and giving up published states would make room, a segment is moved that is three quarters live at most. Moving fuller
/// ones writes more than three records for the room of one, where a state that is given up costs nothing.
const WORTH_MOVING_BEFORE_DROPPING_STATES: f64 = 0.75;
/// Segments that have to be free before anything is moved for another reason than room: it must not make room short itself.
const FREE_TO_MOVE_FOR_TOMBSTONES: u64 = 2;
/// Segments that have to be free before named or small segments are moved. What is moved then frees nothing before the next publish.
const FREE_TO_MOVE_WITHOUT_GAIN: u64 = 4;
/// Tombstones pile up where they hold more than one part in 16 of the cap, which is what the capacity leaves for what is dead.
const TOMBSTONE_SHARE: u64 = 16;
/// Tombstones pile up where there are more segments of them than 8.
const TOMBSTONE_SEGMENTS: usize = 8;
/// Named segments are thinned out where less than a third of the cap is free: above that the next publishes have room enough.
const THIN_BELOW_FREE_SHARE: u64 = 3;
/// Named segments are thinned out where files that published states alone need hold less than a quarter of the cap: thinning adds to them.
const THIN_BELOW_RETAINED_SHARE: u64 = 4;
/// A named segment is thinned out where less than 0.6 of its records is live.
const THIN_LIVE_SHARE: f64 = 0.6;
/// A segment is small that has at most one part in 4 of the rows of a full one.
const SMALL_SHARE_OF_ROWS: u32 = 4;
/// Where there are more small segments than 16, the smallest is merged: each costs a file, and a footer to read at a resume.
const SMALL_SEGMENTS: u64 = 16;
/// A small cap bears fewer small segments: one for each 8 segments that it has room for.
const SMALL_SHARE_OF_CAP: u64 = 8;

/// What is chosen, with the slot of the segment that is to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompactionChoice {
    /// Move it, because room is short.
    FreeSpace(u32),
    /// Move it, so that tombstones can go.
    FreeTombstones(u32),
    /// Move it, so that the next publishes free it.
    Thin(u32),
    /// Move it, because there are many small ones.
    Merge(u32),
    /// Move none.
    Nothing,
}

impl CompactionChoice {
    /// The slot of the segment that is to be moved.
    pub(crate) fn slot(self) -> Option<u32> {
        match self {
            Self::FreeSpace(slot) | Self::FreeTombstones(slot) | Self::Thin(slot) | Self::Merge(slot) => Some(slot),
            Self::Nothing => None,
        }
    }

    /// The reason, in a word.
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

/// A tier, as far as compaction has to know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompactionView {
    /// Whether anything can be moved: the tier is neither closed nor read-only.
    pub(crate) can_write: bool,
    /// Bytes of the cap.
    pub(crate) cap_bytes: u64,
    /// The most bytes of a segment.
    pub(crate) segment_bytes: u64,
    /// Rows of a full segment that is written now.
    pub(crate) rows_per_segment: u32,
    /// Bytes of such a segment.
    pub(crate) full_bytes: u64,
    /// Bytes of the cap that no file holds.
    pub(crate) free_bytes: u64,
    /// Segments that are being moved now.
    pub(crate) moving: u32,
    /// Rows that fit what is open and what can be opened, beside those that are being moved.
    pub(crate) rows_to_move: u64,
    /// Whether the tier was ever published or resumed.
    pub(crate) was_published: bool,
    /// Published states that it could be resumed from.
    pub(crate) states: usize,
    /// Bytes of files that only published states need.
    pub(crate) retained_bytes: u64,
    /// Segments of tombstones that are still needed.
    pub(crate) tombstone_segments: usize,
    /// Bytes of these.
    pub(crate) tombstone_bytes: u64,
    /// The oldest of these are needed while a segment with a smaller serial than this has dead records.
    pub(crate) tombstones_before: u64,
    /// The next record's `write_seq`.
    pub(crate) next_seq: u64,
}

/// A segment of the current set, as far as compaction has to know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentView {
    pub(crate) slot: u32,
    pub(crate) serial: u64,
    /// Whether it holds rows, its file is complete, no scan is to come to it, nobody moves it, and its bytes can be read.
    pub(crate) can_move: bool,
    /// Whether its file is complete.
    pub(crate) sealed: bool,
    pub(crate) records: u32,
    /// Records that the index points to.
    pub(crate) live: u32,
    /// Bytes of the cap that it holds.
    pub(crate) held_bytes: u64,
    /// How many of the current set and the published states name it.
    pub(crate) ref_count: u32,
    /// The next record's `write_seq` when the segment was made.
    pub(crate) made_seq: u64,
}

impl SegmentView {
    /// Its live records, as a share of those that its bytes take in a full segment of records as they are written now. Below 1, moving its
    /// rows to full segments makes room.
    pub(crate) fn utilization(&self, view: &CompactionView) -> f64 {
        let held = self.held_bytes as f64 * f64::from(view.rows_per_segment);
        f64::from(self.live) * view.full_bytes as f64 / held.max(1.0)
    }

    /// How much of its records is live.
    pub(crate) fn live_share(&self) -> f64 {
        f64::from(self.live) / f64::from(self.records.max(1))
    }

    /// Room by cost: what moving it makes free, for what is read and written for it, times its age. By age, segments wait whose records are
    /// about to die (Rosenblum, Ousterhout: The design and implementation of a log-structured file system, 1992).
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

    /// Whether rows from RAM have to wait for room.
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

    /// Whether giving up published states would make room, now or by compaction.
    pub(crate) fn states_hold_space(&self, mut segments: impl Iterator<Item = SegmentView>) -> bool {
        // A segment that is being closed does not yet hold the bytes that it will hold.
        self.states > 0
            && (self.retained_bytes > 0 || segments.any(|s| s.ref_count > 1 && s.sealed && s.utilization(self) < 1.0))
    }

    /// The largest share of a segment that is worth moving where room is short.
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

/// Choose what compaction takes next.
pub(crate) fn choose(view: &CompactionView, segments: impl Iterator<Item = SegmentView> + Clone) -> CompactionChoice {
    // Each segment that is being moved must find its room: none could be finished if all were half moved when the room ends.
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
        let named = candidates.clone().filter(|s| s.ref_count > 1 && s.live_share() < THIN_LIVE_SHARE);
        if let Some(emptiest) = named.min_by(|a, b| a.live_share().total_cmp(&b.live_share())) {
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
