//! The current set: the segments that the index points into, and those of tombstones. A publish would name them.

use std::sync::Arc;

use crate::ssd::format::segment::SegmentContent;
use crate::ssd::index::{PREFETCH_DISTANCE, RecordLocation};
use crate::ssd::segment::file::Segment;
use crate::ssd::tier::dead::DeadRecords;

/// The segments of the current set by number, and which of them can go.
#[derive(Debug, Default)]
pub(crate) struct CurrentSegments {
    by_slot: Vec<Option<Arc<Segment>>>,
    /// Sealed segments of tombstones.
    tombstones: Vec<TombstoneSegment>,
    /// Numbers of segments that had no live record when they were looked at.
    emptied: Vec<u32>,
    /// Records that died and are to be counted. See [`Segments::bury`].
    uncounted_dead: Vec<RecordLocation>,
    /// By segment number: how many of these it has; 0 but while they are counted.
    dead_counts: Vec<u32>,
    /// By segment number: the dead records of a segment that was opened since the tier was. Those of others are not known.
    dead: Vec<Option<DeadRecords>>,
}

/// Tombstones are needed while a segment with a smaller serial than `before` holds a dead record, which could be one of theirs. Compaction
/// copies live records only, so a dead record never moves to a later segment.
#[derive(Debug)]
struct TombstoneSegment {
    segment: Arc<Segment>,
    before: u64,
}

/// Tombstones of the current set in numbers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TombstoneCounts {
    pub(crate) segments: usize,
    pub(crate) bytes: u64,
    /// The oldest of them are needed while a segment with a smaller serial than this holds a dead record; 0 where there are none.
    pub(crate) before: u64,
}

impl CurrentSegments {
    /// Add a segment, which has been named.
    pub(crate) fn add(&mut self, segment: Arc<Segment>) {
        let slot = segment.slot as usize;
        if self.by_slot.len() <= slot {
            self.by_slot.resize(slot + 1, None);
            self.dead_counts.resize(slot + 1, 0);
            self.dead.resize_with(slot + 1, || None);
        }
        self.dead[slot] = (segment.records() == 0).then(DeadRecords::default);
        self.by_slot[slot] = Some(segment);
    }

    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Segment>> + Clone {
        self.by_slot.iter().flatten()
    }

    /// The segment with this number, if there is one.
    pub(crate) fn in_slot(&self, slot: u32) -> Option<&Arc<Segment>> {
        self.by_slot.get(slot as usize).and_then(Option::as_ref)
    }

    /// Segment numbers are below this.
    pub(crate) fn slots(&self) -> usize {
        self.by_slot.len()
    }

    /// The segment that a location of the index points into.
    #[inline]
    pub(crate) fn of(&self, location: RecordLocation) -> &Arc<Segment> {
        self.by_slot[location.segment as usize].as_ref().expect("the index points into the current set")
    }

    /// Note that the index no longer points to a record. [`Segments::count_dead`] counts it before the tier's lock is given up. Not at
    /// once, because what is known of a segment's records lies far apart in memory, and other threads have changed it.
    #[inline]
    pub(crate) fn mark_dead(&mut self, location: RecordLocation) {
        self.uncounted_dead.push(location);
    }

    /// The dead records of a segment, where they are known.
    pub(crate) fn dead_in(&self, slot: u32) -> Option<&DeadRecords> {
        self.dead.get(slot as usize).and_then(Option::as_ref)
    }

    /// Count the records that died.
    pub(crate) fn count_dead(&mut self) {
        for at in 0..self.uncounted_dead.len() {
            if let Some(later) = self.uncounted_dead.get(at + PREFETCH_DISTANCE)
                && let Some(dead) = &self.dead[later.segment as usize]
            {
                dead.prefetch(later.record);
            }
            let RecordLocation { segment, record } = self.uncounted_dead[at];
            if let Some(dead) = &mut self.dead[segment as usize] {
                dead.add(record);
            }
            self.dead_counts[segment as usize] += 1;
        }
        for RecordLocation { segment: slot, .. } in self.uncounted_dead.drain(..) {
            let count = std::mem::take(&mut self.dead_counts[slot as usize]);
            if count == 0 {
                continue;
            }
            let segment = self.by_slot[slot as usize].as_ref().expect("the index points into the current set");
            if segment.remove_live(count) == 0 {
                self.emptied.push(slot);
            }
        }
    }

    /// Look at this segment of rows at the next [`Segments::reap`]: it has no live record.
    pub(crate) fn mark_emptied(&mut self, slot: u32) {
        self.emptied.push(slot);
    }

    /// Add a segment of tombstones that was closed, and that is in the set. A dead record that it speaks of is in a segment before
    /// `before`.
    pub(crate) fn add_tombstones(&mut self, segment: Arc<Segment>, before: u64) {
        self.tombstones.push(TombstoneSegment { segment, before });
    }

    /// Let go of sealed segments without live rows, and then of tombstones that nothing needs any more.
    pub(crate) fn reap(&mut self) {
        if self.emptied.is_empty() {
            return;
        }
        let (mut kept, looked_at) = (Vec::new(), self.emptied.len());
        for slot in std::mem::take(&mut self.emptied) {
            let Some(segment) = &self.by_slot[slot as usize] else { continue };
            if segment.live() > 0 {
                continue;
            }
            if is_removable(segment) {
                self.remove(slot);
            } else {
                kept.push(slot);
            }
        }
        if kept.len() < looked_at {
            self.prune_tombstones();
        }
        self.emptied = kept;
    }

    /// Let go of tombstones that nothing needs any more.
    pub(crate) fn prune_tombstones(&mut self) {
        if self.tombstones.is_empty() {
            return;
        }
        let with_dead = self.iter().filter(|s| s.content == SegmentContent::Rows && s.dead() > 0);
        let oldest = with_dead.map(|segment| segment.serial).min().unwrap_or(u64::MAX);
        let (needless, needed): (Vec<_>, Vec<_>) = std::mem::take(&mut self.tombstones)
            .into_iter()
            .partition(|t| is_removable(&t.segment) && t.before <= oldest);
        self.tombstones = needed;
        for tombstones in needless {
            self.remove(tombstones.segment.slot);
        }
    }

    /// The tombstones in numbers.
    pub(crate) fn tombstones(&self) -> TombstoneCounts {
        TombstoneCounts {
            segments: self.tombstones.len(),
            bytes: self.tombstones.iter().map(|tombstones| tombstones.segment.held_bytes()).sum(),
            before: self.tombstones.first().map_or(0, |tombstones| tombstones.before),
        }
    }

    /// Let go of every segment.
    pub(crate) fn clear(&mut self) {
        self.emptied.clear();
        self.tombstones.clear();
        for slot in 0..self.by_slot.len() as u32 {
            self.remove(slot);
        }
    }

    fn remove(&mut self, slot: u32) {
        if let Some(segment) = self.by_slot[slot as usize].take() {
            self.dead[slot as usize] = None;
            segment.remove_ref();
        }
    }
}

/// Whether a segment without live records can go: its file is complete and no scan is to come to it.
fn is_removable(segment: &Segment) -> bool {
    segment.sealed().is_some() && !segment.has_pending_scans()
}
