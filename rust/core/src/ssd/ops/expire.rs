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
use crate::ssd::SsdTier;
use crate::ssd::format::footer::LastStep;
use crate::ssd::ops::cursor::{entries_of, live_among, live_segments, oldest, read_each, records_per_read};
use crate::ssd::ops::evict::{EvictedRowsSink, remove_records};
use crate::ssd::segment::Segment;
use crate::ssd::segment::open_segment::OpenSegment;
use crate::ssd::store::TierInner;
use crate::ssd::store::scan_state::{CursorRecord, SegmentCursor};
use crate::ssd::store::state::TierState;
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

impl SsdTier {
    /// Removes the rows that expire by `rule`, in slices: a call evaluates at most `max_records` records, and continues
    /// where `cursor` stopped. It reads complete footers of about 16 × `max_records` entries. It reaches every row,
    /// also rows that are appended or moved during the pass. Rows for which `keep` returns true stay, because they are
    /// in RAM: the rule is evaluated there, and their records here may be stale. Passes the expired rows to `on_evicted`,
    /// if given, and reads their records for that.
    ///
    /// Errors: like [`SsdTier::remove`], and `Corruption` if a row that the rule or `on_evicted` needs cannot be read;
    /// the row stays. If an error occurs after some rows were removed, returns these rows, and the next call returns the
    /// error.
    pub fn expire(
        &self,
        cursor: &mut SsdExpiryCursor,
        rule: &SsdExpiryRule<'_>,
        keep: &dyn Fn(Id) -> bool,
        max_records: usize,
        on_evicted: Option<&mut EvictedRowsSink<'_>>,
    ) -> Result<SsdExpiredRows> {
        let tier = &self.inner;
        let mut rows = Vec::new();
        match expire_into(tier, cursor, (rule, keep), max_records, &mut rows, on_evicted) {
            Ok(finished) => Ok(SsdExpiredRows { rows, finished }),
            // The caller must know the removed rows. The next call returns the error.
            Err(_) if !rows.is_empty() => Ok(SsdExpiredRows { rows, finished: false }),
            Err(error) => Err(error),
        }
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
    let mut budget = max_records.max(1);
    while budget > 0 {
        let segment = match next_segment(tier, cursor, rule.0, &mut budget)? {
            SsdExpiryStep::Segment(segment) => segment,
            SsdExpiryStep::Yield => break,
            SsdExpiryStep::Done if cursor.has_next_pass => {
                *cursor = SsdExpiryCursor::default();
                continue;
            }
            SsdExpiryStep::Done => return Ok(true),
        };
        let candidates = cursor.position.peek(budget.max(1).min(records_per_read(&segment)));
        let visited = candidates.len();
        budget = budget.saturating_sub(visited);
        let expired = expired_records(tier, &segment, candidates, rule, cursor.all_expired)?;
        let on_removed = |at: CursorRecord| rows.push((at.id, at.modified_epoch));
        remove_records(tier, segment, expired, on_evicted.as_deref_mut(), on_removed)?;
        // After an error these are visited again.
        cursor.position.advance(visited);
    }
    Ok(false)
}

/// Returns those of the records `candidates` of a segment, in the order of the file, whose rows expire. They are live,
/// unless `all_expired` states that all of them expire.
fn expired_records(
    tier: &TierInner,
    segment: &Arc<Segment>,
    mut candidates: Vec<CursorRecord>,
    (rule, keep): (&SsdExpiryRule<'_>, &dyn Fn(Id) -> bool),
    all_expired: bool,
) -> Result<Vec<CursorRecord>> {
    candidates.retain(|at| !keep(at.id));
    if all_expired {
        return Ok(candidates);
    }
    let live = live_among(tier, segment, &candidates);
    let mut vector = vec![0.0; tier.layout.vector_floats()];
    let mut expired = Vec::new();
    read_each(tier, segment, &live, |at, record| {
        if record.head.last_step <= rule.last_step
            && rule.row_predicate.is_none_or(|expires| expires(&record.unpack(&tier.layout, &mut vector), &vector))
        {
            expired.push(at);
        }
        Ok(())
    })?;
    Ok(expired)
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
        if let Some(segment) = cursor.position.current_segment(tier) {
            return Ok(SsdExpiryStep::Segment(segment));
        }
        if *budget == 0 {
            return Ok(SsdExpiryStep::Yield);
        }
        let next = cursor.choose_segment(&tier.view(), rule);
        let Some((segment, first)) = next else { return Ok(SsdExpiryStep::Done) };
        let is_fully_expired = is_fully_expired(&segment, rule);
        let mut present = entries_of(tier, &segment)?;
        let records = present.entries.len();
        *budget = budget.saturating_sub((records / ENTRIES_PER_RECORD).max(RECORDS_PER_FOOTER));
        present.entries.retain(|entry| {
            entry.record >= first && entry.last_step.get().is_none_or(|last_step| last_step <= rule.last_step)
        });
        let steps_known = present.entries.iter().all(|entry| entry.last_step != LastStep::UNKNOWN);
        cursor.all_expired = steps_known && rule.row_predicate.is_none();
        if is_fully_expired {
            cursor.fully_expired.insert(segment.serial);
        } else {
            cursor.highest_serial = cursor.highest_serial.max(segment.serial);
        }
        cursor.visited_open.retain(|visited| visited.serial != segment.serial);
        if present.is_open {
            cursor.visited_open.push(VisitedSegment { serial: segment.serial, records: records as u32 });
        }
        cursor.position.enter(&segment, present.entries.iter().map(CursorRecord::from).collect());
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
        let may_expire =
            |segment: &&Arc<Segment>| segment.step_range().is_none_or(|steps| steps.lowest <= rule.last_step);
        let open = state.open().of_rows().map(OpenSegment::segment);
        let live = || live_segments(state).filter(may_expire);
        let is_new = |segment: &&Arc<Segment>| {
            segment.serial > self.highest_serial && !self.fully_expired.contains(&segment.serial)
        };
        let fully_expired = live().filter(|segment| is_fully_expired(segment, rule)).filter(is_new);
        if let Some(segment) = oldest(fully_expired).or_else(|| oldest(live().chain(open).filter(is_new))) {
            return Some((segment, 0));
        }
        let visited = |segment: &Segment| self.visited_open.iter().find(|visited| visited.serial == segment.serial);
        let grown = live()
            .filter_map(|segment| visited(segment).map(|visited| (segment, visited.records)))
            .filter(|(segment, records)| segment.records() > *records)
            .min_by_key(|(segment, _)| segment.serial);
        grown.map(|(segment, records)| (Arc::clone(segment), records))
    }
}
