//! Sets of segments: the current set, which the index points into and a publish references, with its tombstones and its
//! known dead records; and the published states, from which the directory can be resumed.

use std::sync::Arc;

use crate::runtime::simd::prefetch;
use crate::ssd::format::segment_file::SegmentContent;
use crate::ssd::index::{PREFETCH_DISTANCE, RecordLocation};
use crate::ssd::segment::Segment;

/// The segments of the current set by number, and the candidates for removal.
#[derive(Debug, Default)]
pub(crate) struct CurrentSegments {
    by_slot: Vec<Option<Arc<Segment>>>,
    /// Sealed segments of tombstones.
    tombstones: Vec<TombstoneSegment>,
    /// Numbers of segments without live records at their last check.
    emptied: Vec<u32>,
    /// Dead records that are to be counted. See [`CurrentSegments::mark_dead`].
    uncounted_dead: Vec<RecordLocation>,
    /// By segment number: the number of uncounted dead records; 0 except while they are counted.
    dead_counts: Vec<u32>,
    /// By segment number: the dead records of a segment that was opened since the tier was. Those of others are
    /// unknown.
    dead: Vec<Option<DeadRecords>>,
}

/// Tombstones are needed while a segment with a smaller serial than `before` contains a dead record, which could be one
/// of theirs. Compaction copies only live records, so a dead record never moves to a later segment.
#[derive(Debug)]
struct TombstoneSegment {
    segment: Arc<Segment>,
    before: u64,
}

/// Statistics of the tombstones of the current set.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TombstoneCounts {
    pub(crate) segments: usize,
    pub(crate) bytes: u64,
    /// The oldest of them are needed while a segment with a smaller serial than this contains a dead record; 0 if there
    /// are none.
    pub(crate) before: u64,
}

impl CurrentSegments {
    /// Adds a segment, which was referenced before.
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

    /// Iterates over all of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Segment>> + Clone {
        self.by_slot.iter().flatten()
    }

    /// The segment with this number, if there is one.
    pub(crate) fn in_slot(&self, slot: u32) -> Option<&Arc<Segment>> {
        self.by_slot.get(slot as usize).and_then(Option::as_ref)
    }

    /// Upper bound (exclusive) of segment numbers.
    pub(crate) fn slots(&self) -> usize {
        self.by_slot.len()
    }

    /// The segment that a location of the index points into.
    #[inline]
    pub(crate) fn of(&self, location: RecordLocation) -> &Arc<Segment> {
        self.by_slot[location.segment as usize].as_ref().expect("the index points into the current set")
    }

    /// Marks a record that the index does not point to. [`CurrentSegments::count_dead`] counts it before the tier's
    /// lock is released. Counting is deferred because the counters of segments are far apart in memory, and other
    /// threads have changed them.
    #[inline]
    pub(crate) fn mark_dead(&mut self, location: RecordLocation) {
        self.uncounted_dead.push(location);
    }

    /// The dead records of a segment, if they are known.
    pub(crate) fn dead_in(&self, slot: u32) -> Option<&DeadRecords> {
        self.dead.get(slot as usize).and_then(Option::as_ref)
    }

    /// Counts the records that became dead.
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

    /// Makes the next [`CurrentSegments::reap`] check this segment of rows, which has no live record.
    pub(crate) fn mark_emptied(&mut self, slot: u32) {
        self.emptied.push(slot);
    }

    /// Adds a sealed segment of tombstones, which is in the set. All dead records of its ids are in segments with
    /// serials below `before`.
    pub(crate) fn add_tombstones(&mut self, segment: Arc<Segment>, before: u64) {
        self.tombstones.push(TombstoneSegment { segment, before });
    }

    /// Removes sealed segments without live rows, and then tombstones that are not needed.
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

    /// Removes tombstones that are not needed.
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

    /// Statistics of the tombstones.
    pub(crate) fn tombstones(&self) -> TombstoneCounts {
        TombstoneCounts {
            segments: self.tombstones.len(),
            bytes: self.tombstones.iter().map(|tombstones| tombstones.segment.held_bytes()).sum(),
            before: self.tombstones.first().map_or(0, |tombstones| tombstones.before),
        }
    }

    /// Removes every segment.
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

/// True if a segment without live records can be removed: its file is complete and no scan will read it.
fn is_removable(segment: &Segment) -> bool {
    segment.sealed().is_some() && !segment.has_pending_scans()
}

/// A bit per record of a segment, set if the index does not point to it.
#[derive(Debug, Default)]
pub(crate) struct DeadRecords {
    words: Vec<u64>,
}

impl DeadRecords {
    /// Marks a record as dead.
    #[inline]
    pub(crate) fn add(&mut self, record: u32) {
        let word = record as usize / 64;
        if word >= self.words.len() {
            // Records become dead in any order, so the next ones are likely to have similarly high numbers.
            self.words.resize((word + 1).next_power_of_two(), 0);
        }
        self.words[word] |= 1 << (record % 64);
    }

    /// Prefetches a record's bit into the CPU cache.
    #[inline]
    pub(crate) fn prefetch(&self, record: u32) {
        prefetch(&self.words, record as usize / 64);
    }

    /// True if a record is dead.
    #[inline]
    pub(crate) fn contains(&self, record: u32) -> bool {
        self.words.get(record as usize / 64).is_some_and(|word| word >> (record % 64) & 1 == 1)
    }
}

/// A state from which the directory can be resumed. It pins the files of its segments.
#[derive(Debug)]
pub(crate) struct PublishedState {
    pub(crate) commit_id: u64,
    pub(crate) segments: Vec<Arc<Segment>>,
}

impl PublishedState {
    /// References `segments`: their files stay until [`PublishedState::release`].
    pub(crate) fn pin(commit_id: u64, segments: Vec<Arc<Segment>>) -> Self {
        for segment in &segments {
            segment.add_ref();
        }
        Self { commit_id, segments }
    }

    /// Releases the segments. The state's file has been removed durably.
    pub(crate) fn release(mut self) {
        for segment in std::mem::take(&mut self.segments) {
            segment.remove_ref();
        }
    }
}

/// The published states of a tier.
#[derive(Debug, Default)]
pub(crate) struct PublishedStates {
    /// Oldest first, at most two.
    published: Vec<PublishedState>,
    last_commit_id: Option<u64>,
    is_last_dropped: bool,
}

impl PublishedStates {
    /// The states that a resume found, oldest first. It resumed the latest.
    pub(crate) fn resumed(published: Vec<PublishedState>) -> Self {
        let last_commit_id = published.last().map(|newest| newest.commit_id);
        Self { published, last_commit_id, is_last_dropped: false }
    }

    /// Number of states.
    pub(crate) fn len(&self) -> usize {
        self.published.len()
    }

    /// Commit id of the last state that was published or resumed, even if that state was removed since. Later states
    /// have larger ones.
    pub(crate) fn last_commit_id(&self) -> Option<u64> {
        self.last_commit_id
    }

    /// True if the last state was discarded for space.
    pub(crate) fn is_last_dropped(&self) -> bool {
        self.is_last_dropped
    }

    /// The segments that they reference, some of them twice.
    pub(crate) fn segments(&self) -> impl Iterator<Item = &Arc<Segment>> {
        self.published.iter().flat_map(|published| &published.segments)
    }

    /// Adds a newly published state.
    pub(crate) fn add(&mut self, published: PublishedState) {
        self.last_commit_id = Some(published.commit_id);
        self.is_last_dropped = false;
        self.published.push(published);
    }

    /// Records that the oldest is about to be discarded for space. This must precede the removal: if that fails the
    /// file may be gone anyway.
    pub(crate) fn mark_oldest_dropped(&mut self) {
        self.is_last_dropped |= self.published.len() <= 1;
    }

    /// Commit id of the state at a position, oldest first.
    pub(crate) fn commit_id_at(&self, position: usize) -> Option<u64> {
        self.published.get(position).map(|published| published.commit_id)
    }

    /// Position of a commit id.
    pub(crate) fn position(&self, commit_id: u64) -> Option<usize> {
        self.published.iter().position(|published| published.commit_id == commit_id)
    }

    /// Removes the state at a position. Its file has been removed durably.
    pub(crate) fn remove(&mut self, position: usize) {
        self.published.remove(position).release();
    }
}

#[cfg(test)]
mod tests;
