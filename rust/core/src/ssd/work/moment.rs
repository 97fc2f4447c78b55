//! The rows of one moment, while the tier goes on: for a save beside training.
//!
//! Segments that are listed at the moment stay, and are not compacted, until their rows are read. Where room is short before, whoever waits
//! for it reads the rows of a segment itself and gives them to the moment's owner.

use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::ssd::segment::part::SegmentPart;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::moment::{EarlyRowSink, SsdSnapshotState, UnreadSegments};
use crate::ssd::work::scan::{ScanScope, ScanSink, parts_of, scan_part};
use crate::types::Id;

/// Ids that are looked up at once.
const IDS_PER_LOOKUP: usize = 1024;

/// The rows that a tier held at one moment. Dropping it lets go of what was kept for it.
pub struct SsdSnapshot {
    tier: Arc<TierInner>,
    unread: Arc<UnreadSegments>,
}

impl std::fmt::Debug for SsdSnapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SsdSnapshot").field("unread", &self.unread.len()).finish_non_exhaustive()
    }
}

/// See [`SsdTier::moment`](crate::ssd::SsdTier::moment).
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
    /// Hand every row of the moment to `sink`, in no particular order, except those that were given to `keep`. No lock is held meanwhile.
    pub fn for_each_row(&self, sink: &mut ScanSink<'_>) -> Result<()> {
        self.tier.check_usable()?;
        while let Some(part) = self.unread.take_next() {
            let read = scan_part(&self.tier, &part, self.unread.since, ScanScope::Snapshot, sink);
            end_part(&self.tier, &self.unread, part);
            read?;
        }
        // Others may still be reading rows before their turn.
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
            // In a forked child its parent's locks are not to be waited for.
            std::mem::forget(Arc::clone(&self.unread));
            return;
        }
        let parts = self.unread.take_all();
        let moment = self.tier.state().end_snapshot();
        drop((parts, moment));
        self.tier.context.space.notify_waiters();
    }
}

/// Let go of a segment whose rows were read, or cannot be.
fn end_part(tier: &TierInner, unread: &Arc<UnreadSegments>, part: SegmentPart) {
    let mut state = tier.state();
    state.end_snapshot_read(unread, part.segment.slot);
    drop(part);
    state.reap();
    drop(state);
    tier.context.space.notify_waiters();
}

/// Read the rows of a segment that is kept for a moment, so that its room can be had; false where none waits to be read.
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
