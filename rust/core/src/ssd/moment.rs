//! The rows of one moment, while the tier goes on: for a save beside training.
//!
//! At the moment the segments are listed, and from then on every record that comes or goes in the index is marked: one bit a record, in
//! segments that have any. A record belongs to the moment if the index points to it and it is not marked, or if it is marked and the
//! index does not: it was the newest of its id then and is no more. Listed segments stay, and stay uncompacted, until their rows are
//! read; where room is short before, whoever waits for it reads the rows of a segment himself and gives them to the moment's owner.

use std::collections::VecDeque;
use std::sync::Arc;

use super::index::Location;
use super::scan::{Part, Which};
use super::shared::Shared;
use super::{ScanSink, SsdTier};
use crate::error::{Error, Kind, Result};
use crate::rows::RowRef;
use crate::sync::{Mutex, Ordering, lock};
use crate::types::Id;

/// Ids looked up at once.
const IDS_AT_ONCE: usize = 1024;

/// Takes rows of the moment that are read before their turn.
pub type KeepRow = dyn Fn(RowRef<'_>) + Send + Sync;

/// What a tier's state holds of a moment.
pub(super) struct Moment {
    /// By segment number, until the segment's rows are read.
    marks: Vec<Option<Marks>>,
    unread: Arc<Unread>,
}

/// Which of a segment's first `records` records are marked.
struct Marks {
    records: u32,
    /// Of them those that belong to the moment.
    live: u32,
    /// Empty as long as none is.
    bits: Vec<u64>,
}

/// Segments whose rows are not read yet, and who takes rows of those that cannot wait.
struct Unread {
    parts: Mutex<VecDeque<Part>>,
    /// Rows modified before this epoch are not wanted.
    since: u32,
    /// Why rows that were read before their turn are not all there.
    failed: Mutex<Option<Error>>,
    keep: Box<KeepRow>,
}

impl std::fmt::Debug for Moment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Moment").field("segments", &self.marks.iter().flatten().count()).finish_non_exhaustive()
    }
}

impl Moment {
    /// The index begins or ceases to point to a record.
    #[inline]
    pub(super) fn mark(&mut self, location: Location) {
        let Some(Some(marks)) = self.marks.get_mut(location.segment as usize) else { return };
        if location.record < marks.records {
            if marks.bits.is_empty() {
                marks.bits = vec![0; marks.records.div_ceil(64) as usize];
            }
            marks.bits[location.record as usize / 64] ^= 1 << (location.record % 64);
        }
    }

    /// The record at `location` does not belong to the moment, whose newest version of the row is elsewhere.
    fn leave_out(&mut self, location: Location) {
        self.mark(location);
        if let Some(Some(marks)) = self.marks.get_mut(location.segment as usize)
            && location.record < marks.records
        {
            marks.live = marks.live.saturating_sub(1);
        }
    }

    /// The records of a segment that belong to the moment, if it is being read.
    pub(super) fn live_records(&self, slot: u32) -> Option<u32> {
        self.marks.get(slot as usize).and_then(Option::as_ref).map(|marks| marks.live)
    }

    /// Whether a record of a segment that is being read is marked.
    pub(super) fn is_marked(&self, location: Location) -> bool {
        let marks = self.marks.get(location.segment as usize).and_then(Option::as_ref);
        let word = marks.and_then(|marks| marks.bits.get(location.record as usize / 64));
        word.is_some_and(|word| word >> (location.record % 64) & 1 == 1)
    }

    /// Whether rows are still to be read, or are being read.
    pub(super) fn is_unread(&self) -> bool {
        self.marks.iter().any(Option::is_some)
    }
}

/// The rows that a tier held at one moment. Dropping it lets go of what was kept for it.
pub struct SsdMoment {
    tier: Arc<Shared>,
    unread: Arc<Unread>,
}

impl std::fmt::Debug for SsdMoment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SsdMoment").field("unread", &lock(&self.unread.parts).len()).finish_non_exhaustive()
    }
}

impl SsdTier {
    /// Hold the rows of now that were modified in epoch `since` or later, but for `stale` ids, which are here: those whose newest version
    /// is elsewhere. `keep` takes rows that had to be read before their turn: to be asked for after [`SsdMoment::for_each_row`], it may be
    /// called until then, from any thread.
    ///
    /// `State` while another moment is held.
    pub fn moment(&self, stale: &mut dyn Iterator<Item = Id>, since: u32, keep: Box<KeepRow>) -> Result<SsdMoment> {
        self.shared.check_usable()?;
        let mut state = self.shared.state();
        if state.moment.is_some() {
            let message = "the rows of an earlier moment are still being read: wait for that";
            return Err(Error::new(Kind::State, message));
        }
        let mut parts = Shared::parts_of(&state, since);
        parts.sort_unstable_by_key(|part| part.segment.serial);
        let mut marks: Vec<Option<Marks>> = Vec::new();
        marks.resize_with(state.segments.len(), || None);
        for part in &parts {
            let live = part.segment.live.load(Ordering::Relaxed);
            marks[part.segment.slot as usize] = Some(Marks { records: part.records, live, bits: Vec::new() });
        }
        let unread = Arc::new(Unread { parts: Mutex::new(parts.into()), since, failed: Mutex::default(), keep });
        let mut moment = Moment { marks, unread: Arc::clone(&unread) };
        let mut locations = [None; IDS_AT_ONCE];
        loop {
            let ids: Vec<Id> = (&mut *stale).take(IDS_AT_ONCE).collect();
            if ids.is_empty() {
                break;
            }
            let locations = &mut locations[..ids.len()];
            locations.fill(None);
            state.index.get_batch(&ids, locations);
            locations.iter().flatten().for_each(|location| moment.leave_out(*location));
        }
        state.moment = Some(moment);
        Ok(SsdMoment { tier: Arc::clone(&self.shared), unread })
    }
}

impl SsdMoment {
    /// Hand every row of the moment to `sink`, but for those that were given to `keep`, in no particular order. No lock is held meanwhile.
    pub fn for_each_row(&self, sink: &mut ScanSink<'_>) -> Result<()> {
        self.tier.check_usable()?;
        loop {
            let Some(part) = lock(&self.unread.parts).pop_front() else { break };
            let read = self.tier.scan_part(&part, self.unread.since, Which::OfMoment, sink);
            self.tier.end_part(&self.unread, part);
            read?;
        }
        // Nothing is left out that somebody else reads now.
        loop {
            let generation = self.tier.home.space.generation();
            if !self.tier.view().moment.as_ref().is_some_and(Moment::is_unread) {
                return lock(&self.unread.failed).clone().map_or(Ok(()), Err);
            }
            self.tier.home.space.wait_change(generation);
        }
    }
}

impl Drop for SsdMoment {
    fn drop(&mut self) {
        if self.tier.home.background.check_process().is_err() {
            // In a forked child its parent's locks are not to be waited for.
            std::mem::forget(Arc::clone(&self.unread));
            return;
        }
        let parts = std::mem::take(&mut *lock(&self.unread.parts));
        let moment = self.tier.state().moment.take();
        drop((parts, moment));
        self.tier.home.space.poke();
    }
}

impl Shared {
    /// Let go of a segment whose rows are read, or cannot be.
    fn end_part(&self, unread: &Arc<Unread>, part: Part) {
        let mut state = self.state();
        let slot = part.segment.slot as usize;
        if let Some(moment) = state.moment.as_mut().filter(|moment| Arc::ptr_eq(&moment.unread, unread)) {
            moment.marks[slot] = None;
        }
        drop(part);
        state.reap();
        drop(state);
        self.home.space.poke();
    }

    /// Read the rows of a segment that is kept for a moment, so that its room can be had; false where none waits to be read.
    pub(super) fn read_for_moment(&self) -> bool {
        let Some(unread) = self.view().moment.as_ref().map(|moment| Arc::clone(&moment.unread)) else {
            return false;
        };
        let part = {
            let mut parts = lock(&unread.parts);
            // The one that is emptied soonest.
            let live = |part: &Part| part.segment.live.load(Ordering::Relaxed);
            let soonest = (0..parts.len()).min_by_key(|&at| live(&parts[at]));
            soonest.and_then(|at| parts.remove(at))
        };
        let Some(part) = part else { return false };
        let read = self.scan_part(&part, unread.since, Which::OfMoment, &mut |row| {
            (unread.keep)(row);
            Ok(())
        });
        if let Err(error) = read {
            // For the moment's owner, not for him who waits for room.
            lock(&unread.failed).get_or_insert(error);
        }
        self.end_part(&unread, part);
        true
    }
}
