//! The rows of one moment, while the tier goes on: for a save beside training.
//!
//! Segments that are listed at the moment stay, and are not compacted, until their rows are read. Where room is short before, whoever waits
//! for it reads the rows of a segment itself and gives them to the moment's owner.

use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::ssd::segment::part::Part;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::moment::{KeepRow, Moment, Unread};
use crate::ssd::work::scan::{ScanSink, Which, parts_of, scan_part};
use crate::types::Id;

/// Ids that are looked up at once.
const IDS_AT_ONCE: usize = 1024;

/// The rows that a tier held at one moment. Dropping it lets go of what was kept for it.
pub struct SsdMoment {
    tier: Arc<TierInner>,
    unread: Arc<Unread>,
}

impl std::fmt::Debug for SsdMoment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SsdMoment").field("unread", &self.unread.len()).finish_non_exhaustive()
    }
}

/// See [`SsdTier::moment`](crate::ssd::SsdTier::moment).
pub(crate) fn begin(
    tier: &Arc<TierInner>,
    stale: &mut dyn Iterator<Item = Id>,
    since: u32,
    keep: Box<KeepRow>,
) -> Result<SsdMoment> {
    tier.check_usable()?;
    let mut state = tier.state();
    if state.moment().is_some() {
        let message = "the rows of an earlier moment are still being read: wait for that";
        return Err(Error::new(Kind::State, message));
    }
    let mut parts = parts_of(&state, since);
    parts.sort_unstable_by_key(|part| part.segment.serial);
    let mut moment = Moment::new(parts, state.segments().slots(), since, keep);
    let mut locations = [None; IDS_AT_ONCE];
    loop {
        let ids: Vec<Id> = (&mut *stale).take(IDS_AT_ONCE).collect();
        if ids.is_empty() {
            break;
        }
        let locations = &mut locations[..ids.len()];
        locations.fill(None);
        state.index().get_batch(&ids, locations);
        locations.iter().flatten().for_each(|location| moment.leave_out(*location));
    }
    let unread = Arc::clone(moment.unread());
    state.begin_moment(moment);
    Ok(SsdMoment { tier: Arc::clone(tier), unread })
}

impl SsdMoment {
    /// Hand every row of the moment to `sink`, in no particular order, except those that were given to `keep`. No lock is held meanwhile.
    pub fn for_each_row(&self, sink: &mut ScanSink<'_>) -> Result<()> {
        self.tier.check_usable()?;
        while let Some(part) = self.unread.next() {
            let read = scan_part(&self.tier, &part, self.unread.since, Which::OfMoment, sink);
            end_part(&self.tier, &self.unread, part);
            read?;
        }
        // Others may still be reading rows before their turn.
        loop {
            let generation = self.tier.home.space.generation();
            if !self.tier.view().moment().is_some_and(Moment::is_unread) {
                return self.unread.failed().map_or(Ok(()), Err);
            }
            self.tier.home.space.wait_change(generation);
        }
    }
}

impl Drop for SsdMoment {
    fn drop(&mut self) {
        if self.tier.home.workers.check_process().is_err() {
            // In a forked child its parent's locks are not to be waited for.
            std::mem::forget(Arc::clone(&self.unread));
            return;
        }
        let parts = self.unread.take_all();
        let moment = self.tier.state().end_moment();
        drop((parts, moment));
        self.tier.home.space.poke();
    }
}

/// Let go of a segment whose rows were read, or cannot be.
fn end_part(tier: &TierInner, unread: &Arc<Unread>, part: Part) {
    let mut state = tier.state();
    state.was_read_for(unread, part.segment.slot);
    drop(part);
    state.reap();
    drop(state);
    tier.home.space.poke();
}

/// Read the rows of a segment that is kept for a moment, so that its room can be had; false where none waits to be read.
pub(crate) fn read_before_turn(tier: &TierInner) -> bool {
    let Some(unread) = tier.view().moment().map(|moment| Arc::clone(moment.unread())) else {
        return false;
    };
    let Some(part) = unread.emptiest() else { return false };
    let read = scan_part(tier, &part, unread.since, Which::OfMoment, &mut |row| {
        unread.keep(row);
        Ok(())
    });
    if let Err(error) = read {
        unread.fail(error);
    }
    end_part(tier, &unread, part);
    true
}
