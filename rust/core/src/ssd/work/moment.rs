//! Reads a snapshot of the tier while it keeps changing, for an asynchronous save.
//!
//! The snapshot's segments stay, and are not compacted, until their rows are read. If space is short before, a thread
//! that waits for it reads the rows of a segment itself and passes them to the snapshot's owner.

use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::ssd::segment::part::SegmentPart;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::moment::{EarlyRowSink, SsdSnapshotState, UnreadSegments};
use crate::ssd::work::scan::{ScanScope, ScanSink, parts_of, scan_part};
use crate::types::Id;

/// Ids per lookup.
const IDS_PER_LOOKUP: usize = 1024;

/// A snapshot of a tier's rows. Dropping it releases its segments.
pub struct SsdSnapshot {
    tier: Arc<TierInner>,
    unread: Arc<UnreadSegments>,
}

impl std::fmt::Debug for SsdSnapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SsdSnapshot").field("unread", &self.unread.len()).finish_non_exhaustive()
    }
}

/// See [`SsdTier::snapshot`](crate::ssd::SsdTier::snapshot).
pub(crate) fn begin_snapshot(
    tier: &Arc<TierInner>,
    stale: &mut dyn Iterator<Item = Id>,
    since: u32,
    early_rows: Box<EarlyRowSink>,
) -> Result<SsdSnapshot> {
    tier.check_usable()?;
    let mut state = tier.state();
    if state.snapshot().is_some() {
        let message = "the rows of an earlier moment are still being read: wait for that";
        return Err(Error::new(Kind::State, message));
    }
    let mut parts = parts_of(&state, since);
    parts.sort_unstable_by_key(|part| part.segment.serial);
    let mut moment = SsdSnapshotState::new(parts, state.segments().slots(), since, early_rows);
    let mut locations = [None; IDS_PER_LOOKUP];
    loop {
        let ids: Vec<Id> = (&mut *stale).take(IDS_PER_LOOKUP).collect();
        if ids.is_empty() {
            break;
        }
        let locations = &mut locations[..ids.len()];
        locations.fill(None);
        state.index().get_batch(&ids, locations);
        locations.iter().flatten().for_each(|location| moment.exclude(*location));
    }
    let unread = Arc::clone(moment.unread());
    state.begin_snapshot(moment);
    Ok(SsdSnapshot { tier: Arc::clone(tier), unread })
}

impl SsdSnapshot {
    /// Passes every row of the snapshot to `sink`, in unspecified order, except those that were passed to `early_rows`.
    /// Holds no lock.
    pub fn for_each_row(&self, sink: &mut ScanSink<'_>) -> Result<()> {
        self.tier.check_usable()?;
        while let Some(part) = self.unread.take_next() {
            let read = scan_part(&self.tier, &part, self.unread.since, ScanScope::Snapshot, sink);
            end_part(&self.tier, &self.unread, part);
            read?;
        }
        // Other threads may still be reading rows out of order.
        loop {
            let generation = self.tier.context.space.generation();
            if !self.tier.view().snapshot().is_some_and(SsdSnapshotState::has_unread) {
                return self.unread.failed().map_or(Ok(()), Err);
            }
            self.tier.context.space.wait_change(generation);
        }
    }
}

impl Drop for SsdSnapshot {
    fn drop(&mut self) {
        if self.tier.context.workers.check_process().is_err() {
            // A forked child must not wait for its parent's locks.
            std::mem::forget(Arc::clone(&self.unread));
            return;
        }
        let parts = self.unread.take_all();
        let moment = self.tier.state().end_snapshot();
        drop((parts, moment));
        self.tier.context.space.notify_waiters();
    }
}

/// Releases a segment after a read, successful or not.
fn end_part(tier: &TierInner, unread: &Arc<UnreadSegments>, part: SegmentPart) {
    let mut state = tier.state();
    state.end_snapshot_read(unread, part.segment.slot);
    drop(part);
    state.reap();
    drop(state);
    tier.context.space.notify_waiters();
}

/// Reads the rows of a segment that a snapshot pins, to free its space. Returns false if none is left to be read.
pub(crate) fn read_segment_early(tier: &TierInner) -> bool {
    let Some(unread) = tier.view().snapshot().map(|moment| Arc::clone(moment.unread())) else {
        return false;
    };
    let Some(part) = unread.take_emptiest() else { return false };
    let read = scan_part(tier, &part, unread.since, ScanScope::Snapshot, &mut |row| {
        unread.keep_early_row(row);
        Ok(())
    });
    if let Err(error) = read {
        unread.fail(error);
    }
    end_part(tier, &unread, part);
    true
}
