//! Expires rows by a rule of their own columns, a slice per call.
//!
//! An expiry pass visits the segments of rows by ascending serial. Segments whose rows all expire come first, because
//! their files are removed then, which frees the space for tombstones. Concurrently rows are written to open segments,
//! new ones and ones that compaction moves, also to segments that the pass has visited. So it records the number of
//! visited records of each open segment, and later visits those that follow. A row is therefore visited even if it is
//! moved, and a finished pass has missed none.
//!
//! Footers contain the last steps of their rows. So a segment whose rows were all trained after the rule's step is
//! skipped, and if the rule depends only on the step, only footers are read. A few footers have no space for last
//! steps; the records of their segments are read.

use std::collections::HashSet;
use std::sync::Arc;

use crate::error::Result;
use crate::rows::RowHeader;
use crate::ssd::format::footer::LastStep;
use crate::ssd::segment::file::Segment;
use crate::ssd::segment::open::OpenSegment;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::state::TierState;
use crate::ssd::tier::walk::{CursorRecord, SegmentCursor};
use crate::ssd::work::by_entry::{RequestedRecord, decode_requested, live_requests, read_requested, records_per_read};
use crate::ssd::work::copies::{EvictedRowCopies, EvictedRowsSink};
use crate::ssd::work::remove::remove_where;
use crate::ssd::work::walk::{entries_of, is_still_at, live_segments, move_to, segment_at};
use crate::types::Id;

/// Reading this many entries of a footer costs about as much as visiting a record.
const ENTRIES_PER_RECORD: usize = 16;
/// Reading a footer, however short, costs at least as much as visiting this many records.
const RECORDS_PER_FOOTER: usize = 64;

/// The rule that selects expired rows.
#[derive(Clone, Copy)]
pub struct SsdExpiryRule<'a> {
    /// Rows that were trained after this step do not expire.
    pub last_step: u64,
    /// Returns true for the others that expire, by their header and vector part. With `None` all of them expire.
    pub row_predicate: Option<&'a RowExpiryPredicate<'a>>,
}

/// Returns true if a row with this header and vector part expires.
pub type RowExpiryPredicate<'a> = dyn Fn(&RowHeader, &[f32]) -> bool + 'a;

impl std::fmt::Debug for SsdExpiryRule<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let by_row = self.row_predicate.map(|_| "a rule");
        f.debug_struct("SsdExpiryRule").field("last_step", &self.last_step).field("by_row", &by_row).finish()
    }
}

/// The position of an expiry pass. The default is its start. The rule of a call must match all rows that the rule of
/// the previous call matches, except those that were written since.
#[derive(Debug, Default)]
pub struct SsdExpiryCursor {
    /// If true, another pass over all records follows this one.
    has_next_pass: bool,
    position: SegmentCursor,
    /// The highest serial of a segment visited in order.
    highest_serial: u64,
    /// Serials of segments that were visited out of order, because all of their rows expire. They are sealed.
    fully_expired: HashSet<u64>,
    /// Segments that were open when they were visited.
    visited_open: Vec<VisitedSegment>,
    /// If true, the entries of all remaining records show that they expire.
    all_expired: bool,
}

/// A segment that was open when an expiry pass visited it.
#[derive(Clone, Copy, Debug)]
struct VisitedSegment {
    serial: u64,
    /// Number of its records that were visited.
    records: u32,
}

/// Result of one call of an expiry pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SsdExpiredRows {
    /// The removed rows, each with its last `modified_epoch`.
    pub rows: Vec<(Id, u32)>,
    /// True if no expired row is left, except those that had to stay.
    pub finished: bool,
}

/// See [`SsdTier::expire`](crate::ssd::SsdTier::expire).
pub(crate) fn expire(
    tier: &Arc<TierInner>,
    cursor: &mut SsdExpiryCursor,
    rule: &SsdExpiryRule<'_>,
    keep: &dyn Fn(Id) -> bool,
    max_records: usize,
    on_evicted: Option<&mut EvictedRowsSink<'_>>,
) -> Result<SsdExpiredRows> {
    let mut rows = Vec::new();
    match expire_into(tier, cursor, (rule, keep), max_records, &mut rows, on_evicted) {
        Ok(finished) => Ok(SsdExpiredRows { rows, finished }),
        // The caller must know the removed rows. The next call returns the error.
        Err(_) if !rows.is_empty() => Ok(SsdExpiredRows { rows, finished: false }),
        Err(error) => Err(error),
    }
}

/// Visits records, and adds the removed rows to `rows`. Returns true if none is left to be visited.
///
/// It visits at most `max_records` records, but at least one, and reads the footers of at most
/// `max_records / RECORDS_PER_FOOTER` segments with at most `max_records * ENTRIES_PER_RECORD` entries, and one more. A
/// footer is always read completely.
fn expire_into(
    tier: &Arc<TierInner>,
    cursor: &mut SsdExpiryCursor,
    rule: (&SsdExpiryRule<'_>, &dyn Fn(Id) -> bool),
    max_records: usize,
    rows: &mut Vec<(Id, u32)>,
    mut on_evicted: Option<&mut EvictedRowsSink<'_>>,
) -> Result<bool> {
    tier.check_writable()?;
    let mut left = max_records.max(1);
    while left > 0 {
        let segment = match next_segment(tier, cursor, rule.0, &mut left)? {
            SsdExpiryStep::Segment(segment) => segment,
            SsdExpiryStep::Yield => break,
            SsdExpiryStep::Done if cursor.has_next_pass => {
                *cursor = SsdExpiryCursor::default();
                continue;
            }
            SsdExpiryStep::Done => return Ok(true),
        };
        let decided = cursor.all_expired;
        let ahead = &mut cursor.position.remaining;
        let looked_at = ahead.len().min(left.max(1)).min(records_per_read(&segment));
        left = left.saturating_sub(looked_at);
        let rest = ahead.len() - looked_at;
        let here: Vec<CursorRecord> = ahead[rest..].iter().rev().copied().collect();
        let dead = expired_records(tier, &segment, here, rule, decided)?;
        let ids: Vec<Id> = dead.iter().map(|at| at.id).collect();
        let mut copies = on_evicted.as_ref().map(|_| EvictedRowCopies::read(tier, &segment, &dead)).transpose()?;
        let place = (segment.slot, segment.serial);
        // A thread that waits for free space must not pin a file whose removal would free it.
        drop(segment);
        let gone = |at: usize| {
            rows.push((dead[at].id, dead[at].modified_epoch));
            if let Some(copies) = &mut copies {
                copies.mark_removed(at);
            }
        };
        let forgotten = remove_where(tier, &ids, |state, at| is_still_at(state, place, dead[at]), gone);
        if let (Some(copies), Some(tell)) = (copies, &mut on_evicted) {
            copies.deliver(tier.layout.vector_floats(), tell);
        }
        forgotten?;
        // After an error these are visited again.
        ahead.truncate(rest);
    }
    Ok(false)
}

/// Returns those of the records `candidates` of a segment, in the order of the file, whose rows are live and expire.
fn expired_records(
    tier: &TierInner,
    segment: &Arc<Segment>,
    mut candidates: Vec<CursorRecord>,
    (dying, keep): (&SsdExpiryRule<'_>, &dyn Fn(Id) -> bool),
    decided: bool,
) -> Result<Vec<CursorRecord>> {
    candidates.retain(|at| !keep(at.id));
    if decided {
        return Ok(candidates);
    }
    let wanted: Vec<RequestedRecord> = candidates.iter().map(|at| (at.id, at.record)).collect();
    let live = live_requests(tier, segment, &wanted);
    let records = read_requested(tier, segment, &live)?;
    let mut vector = vec![0.0; tier.layout.vector_floats()];
    let (mut dead, mut here) = (Vec::new(), candidates.into_iter());
    for (wanted, bytes) in live.iter().zip(records.chunks_exact(segment.record_bytes)) {
        let record = decode_requested(segment, *wanted, bytes)?;
        let dies = record.head.last_step <= dying.last_step
            && dying.row_predicate.is_none_or(|dies| dies(&record.unpack(&tier.layout, &mut vector), &vector));
        if dies {
            dead.extend(here.find(|at| at.record == wanted.1));
        }
    }
    Ok(dead)
}

/// The next step of an expiry pass.
enum SsdExpiryStep {
    /// This segment has records to be visited.
    Segment(Arc<Segment>),
    /// The call has read its limit of footers, and a later call must continue.
    Yield,
    /// All records were visited.
    Done,
}

/// Finds the next step of an expiry pass. Subtracts the cost of reading footers from `budget`.
fn next_segment(
    tier: &TierInner,
    cursor: &mut SsdExpiryCursor,
    rule: &SsdExpiryRule<'_>,
    budget: &mut usize,
) -> Result<SsdExpiryStep> {
    loop {
        if let Some(segment) = segment_at(tier, &cursor.position) {
            return Ok(SsdExpiryStep::Segment(segment));
        }
        cursor.position.remaining = Vec::new();
        if *budget == 0 {
            return Ok(SsdExpiryStep::Yield);
        }
        let next = cursor.choose_segment(&tier.view(), rule);
        let Some((segment, from)) = next else { return Ok(SsdExpiryStep::Done) };
        let is_whole = is_fully_expired(&segment, rule);
        let mut so_far = entries_of(tier, &segment)?;
        let records = so_far.entries.len();
        *budget = budget.saturating_sub((records / ENTRIES_PER_RECORD).max(RECORDS_PER_FOOTER));
        so_far.entries.retain(|entry| {
            entry.record >= from && entry.last_step.get().is_none_or(|last_step| last_step <= rule.last_step)
        });
        let known = so_far.entries.iter().all(|entry| entry.last_step != LastStep::UNKNOWN);
        cursor.all_expired = known && rule.row_predicate.is_none();
        if is_whole {
            cursor.fully_expired.insert(segment.serial);
        } else {
            cursor.highest_serial = cursor.highest_serial.max(segment.serial);
        }
        cursor.visited_open.retain(|passed| passed.serial != segment.serial);
        if so_far.is_open {
            cursor.visited_open.push(VisitedSegment { serial: segment.serial, records: records as u32 });
        }
        move_to(&mut cursor.position, &segment, so_far.entries.iter());
    }
}

/// True if a segment's footer shows that all of its rows expire.
fn is_fully_expired(segment: &Segment, rule: &SsdExpiryRule<'_>) -> bool {
    rule.row_predicate.is_none() && segment.step_range().is_some_and(|steps| steps.highest <= rule.last_step)
}

impl SsdExpiryCursor {
    /// Requests another pass over all records after this one. The present pass continues, so that every record is
    /// eventually visited however often this is called.
    pub fn repeat_pass(&mut self) {
        self.has_next_pass = self.highest_serial > 0 || !self.fully_expired.is_empty();
    }

    /// Returns the next segment, and the first of its records that was not visited. Skips segments whose footers show
    /// that all of their rows were trained after the rule's step.
    ///
    /// An open segment is visited even if it has no live row, because it may get some later. Visited segments come
    /// last. A row that is moved into one of them after this call is among the records that follow there.
    fn choose_segment(&self, state: &TierState, rule: &SsdExpiryRule<'_>) -> Option<(Arc<Segment>, u32)> {
        let may_die = |segment: &&Arc<Segment>| segment.step_range().is_none_or(|steps| steps.lowest <= rule.last_step);
        let open = state.open().of_rows().map(OpenSegment::segment);
        let live = || live_segments(state).filter(may_die);
        let is_new = |segment: &&Arc<Segment>| {
            segment.serial > self.highest_serial && !self.fully_expired.contains(&segment.serial)
        };
        let whole = live().filter(|segment| is_fully_expired(segment, rule)).filter(is_new);
        if let Some(segment) = whole.min_by_key(|segment| segment.serial) {
            return Some((Arc::clone(segment), 0));
        }
        let new = live().chain(open).filter(is_new);
        if let Some(segment) = new.min_by_key(|segment| segment.serial) {
            return Some((Arc::clone(segment), 0));
        }
        let passed = |segment: &&Arc<Segment>| self.visited_open.iter().find(|passed| passed.serial == segment.serial);
        live()
            .filter_map(|segment| passed(&segment).map(|passed| (Arc::clone(segment), passed.records)))
            .filter(|(segment, records)| segment.records() > *records)
            .min_by_key(|(segment, _)| segment.serial)
    }
}
