//! Rows that die by a rule of their own columns, a slice of them a call.
//!
//! A burial goes through the segments of rows by rising serial. Segments all of whose rows die come before all others, because their files
//! go then, and with them the room that tombstones take. Meanwhile rows come into open segments, new ones and ones that compaction
//! moves, also into segments that the burial has passed. So it notes how many records of each open segment it has looked at, and comes back
//! to those that follow. A row is therefore looked at wherever it is moved to, and when nothing is left none was missed.
//!
//! Footers know the last steps of their rows. So a segment whose rows were all trained after the rule's step is not looked at, and where
//! the step alone decides only footers are read. A few footers have no room for last steps; the records of their segments are read.

use std::collections::HashSet;
use std::sync::Arc;

use crate::error::Result;
use crate::rows::RowHeader;
use crate::ssd::format::footer::LastStep;
use crate::ssd::segment::file::Segment;
use crate::ssd::segment::open::OpenSegment;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::state::TierState;
use crate::ssd::tier::walk::{Ahead, Walk};
use crate::ssd::work::by_entry::{Wanted, at_once, decode_wanted, live_of, read_wanted};
use crate::ssd::work::copies::{Copies, Tell};
use crate::ssd::work::remove::forget;
use crate::ssd::work::walk::{entries_of, go_to, is_still_at, live_segments, segment_at};
use crate::types::Id;

/// Reading so many entries of a footer costs about as much as looking at a record.
const ENTRIES_A_RECORD: usize = 16;
/// Reading a footer, however short, costs at least as much as looking at so many records.
const RECORDS_A_FOOTER: usize = 64;

/// Which rows die.
#[derive(Clone, Copy)]
pub struct Dying<'a> {
    /// Rows that were trained after this step live.
    pub last_step: u64,
    /// Decides about the others by their header and vector part, and says true for those that die. With `None` all of them die.
    pub by_row: Option<&'a RowRule<'a>>,
}

/// Says of a row, by its header and vector part, whether it dies.
pub type RowRule<'a> = dyn Fn(&RowHeader, &[f32]) -> bool + 'a;

impl std::fmt::Debug for Dying<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let by_row = self.by_row.map(|_| "a rule");
        f.debug_struct("Dying").field("last_step", &self.last_step).field("by_row", &by_row).finish()
    }
}

/// Where a burial stopped. The default is its beginning. The rule of a call takes all rows that the rule of the call before takes, except
/// those that were written since.
#[derive(Debug, Default)]
pub struct Burial {
    /// Whether all records are to be come to once more when this walk has come to its end.
    again: bool,
    walk: Walk,
    /// The highest serial of a segment that the burial has come to in its turn.
    reached: u64,
    /// Serials of segments that the burial has come to before their turn, because all of their rows die. No row comes into them any more.
    whole: HashSet<u64>,
    /// Segments that were open when the burial came to them.
    passed: Vec<Passed>,
    /// Whether it is known of the records ahead that they die, because their entries say it.
    decided: bool,
}

/// A segment that was open when a burial came to it.
#[derive(Clone, Copy, Debug)]
struct Passed {
    serial: u64,
    /// The burial has come to so many of its records.
    records: u32,
}

/// What a call of a burial has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Buried {
    /// The rows that are gone, each with the `modified_epoch` that it had.
    pub rows: Vec<(Id, u32)>,
    /// Whether no row was left that dies, except those that had to stay.
    pub finished: bool,
}

/// See [`SsdTier::bury`](crate::ssd::SsdTier::bury).
pub(crate) fn bury(
    tier: &Arc<TierInner>,
    burial: &mut Burial,
    dying: &Dying<'_>,
    keep: &dyn Fn(Id) -> bool,
    most: usize,
    tell: Option<&mut Tell<'_>>,
) -> Result<Buried> {
    let mut rows = Vec::new();
    match bury_into(tier, burial, (dying, keep), most, &mut rows, tell) {
        Ok(finished) => Ok(Buried { rows, finished }),
        // Whoever asked must know which rows are gone. The error comes again with the next call.
        Err(_) if !rows.is_empty() => Ok(Buried { rows, finished: false }),
        Err(error) => Err(error),
    }
}

/// Look at records, and put the rows that are gone into `rows`; whether none is left to be looked at.
///
/// It looks at `most` records at most, or at one, and reads the footers of so many segments: those of `most / RECORDS_A_FOOTER` segments at
/// most, which have `most * ENTRIES_A_RECORD` entries at most, and one more. One footer is read as a whole.
fn bury_into(
    tier: &Arc<TierInner>,
    burial: &mut Burial,
    rule: (&Dying<'_>, &dyn Fn(Id) -> bool),
    most: usize,
    rows: &mut Vec<(Id, u32)>,
    mut tell: Option<&mut Tell<'_>>,
) -> Result<bool> {
    tier.check_writable()?;
    let mut left = most.max(1);
    while left > 0 {
        let segment = match next_segment(tier, burial, rule.0, &mut left)? {
            Next::At(segment) => segment,
            Next::Later => break,
            Next::Nowhere if burial.again => {
                *burial = Burial::default();
                continue;
            }
            Next::Nowhere => return Ok(true),
        };
        let decided = burial.decided;
        let ahead = &mut burial.walk.ahead;
        let looked_at = ahead.len().min(left.max(1)).min(at_once(&segment));
        left = left.saturating_sub(looked_at);
        let rest = ahead.len() - looked_at;
        let here: Vec<Ahead> = ahead[rest..].iter().rev().copied().collect();
        let dead = dead_of(tier, &segment, here, rule, decided)?;
        let ids: Vec<Id> = dead.iter().map(|at| at.id).collect();
        let mut copies = tell.as_ref().map(|_| Copies::read(tier, &segment, &dead)).transpose()?;
        let place = (segment.slot, segment.serial);
        // Whoever waits for room must not keep a file whose going is to make it.
        drop(segment);
        let gone = |at: usize| {
            rows.push((dead[at].id, dead[at].modified_epoch));
            if let Some(copies) = &mut copies {
                copies.left(at);
            }
        };
        let forgotten = forget(tier, &ids, |state, at| is_still_at(state, place, dead[at]), gone);
        if let (Some(copies), Some(tell)) = (copies, &mut tell) {
            copies.hand_over(tier.layout.vector_floats(), tell);
        }
        forgotten?;
        // After an error these are looked at again.
        ahead.truncate(rest);
    }
    Ok(false)
}

/// Those of the records `here` of a segment, in the order of the file, whose rows are live and die.
fn dead_of(
    tier: &TierInner,
    segment: &Arc<Segment>,
    mut here: Vec<Ahead>,
    (dying, keep): (&Dying<'_>, &dyn Fn(Id) -> bool),
    decided: bool,
) -> Result<Vec<Ahead>> {
    here.retain(|at| !keep(at.id));
    if decided {
        return Ok(here);
    }
    let wanted: Vec<Wanted> = here.iter().map(|at| (at.id, at.record)).collect();
    let live = live_of(tier, segment, &wanted);
    let records = read_wanted(tier, segment, &live)?;
    let mut vector = vec![0.0; tier.layout.vector_floats()];
    let (mut dead, mut here) = (Vec::new(), here.into_iter());
    for (wanted, bytes) in live.iter().zip(records.chunks_exact(segment.record_bytes)) {
        let record = decode_wanted(segment, *wanted, bytes)?;
        let dies = record.head.last_step <= dying.last_step
            && dying.by_row.is_none_or(|dies| dies(&record.unpack(&tier.layout, &mut vector), &vector));
        if dies {
            dead.extend(here.find(|at| at.record == wanted.1));
        }
    }
    Ok(dead)
}

/// What a burial comes to next.
enum Next {
    /// This segment, with records ahead.
    At(Arc<Segment>),
    /// It has not been found out: so many footers were read that it is another call's turn.
    Later,
    /// It has come to all records.
    Nowhere,
}

/// What a burial comes to next. What it costs to read footers is taken off `left`.
fn next_segment(tier: &TierInner, burial: &mut Burial, dying: &Dying<'_>, left: &mut usize) -> Result<Next> {
    loop {
        if let Some(segment) = segment_at(tier, &burial.walk) {
            return Ok(Next::At(segment));
        }
        burial.walk.ahead = Vec::new();
        if *left == 0 {
            return Ok(Next::Later);
        }
        let next = burial.choose(&tier.view(), dying);
        let Some((segment, from)) = next else { return Ok(Next::Nowhere) };
        let is_whole = dies_whole(&segment, dying);
        let mut so_far = entries_of(tier, &segment)?;
        let records = so_far.entries.len();
        *left = left.saturating_sub((records / ENTRIES_A_RECORD).max(RECORDS_A_FOOTER));
        so_far.entries.retain(|entry| {
            entry.record >= from && entry.last_step.get().is_none_or(|last_step| last_step <= dying.last_step)
        });
        let known = so_far.entries.iter().all(|entry| entry.last_step != LastStep::UNKNOWN);
        burial.decided = known && dying.by_row.is_none();
        if is_whole {
            burial.whole.insert(segment.serial);
        } else {
            burial.reached = burial.reached.max(segment.serial);
        }
        burial.passed.retain(|passed| passed.serial != segment.serial);
        if so_far.is_open {
            burial.passed.push(Passed { serial: segment.serial, records: records as u32 });
        }
        go_to(&mut burial.walk, &segment, so_far.entries.iter());
    }
}

/// Whether all rows of a segment die, as its footer says.
fn dies_whole(segment: &Segment, dying: &Dying<'_>) -> bool {
    dying.by_row.is_none() && segment.steps().is_some_and(|steps| steps.highest <= dying.last_step)
}

impl Burial {
    /// Come to all records once more when this walk has come to its end. The walk goes on where it is, so that records far behind have their
    /// turn however often this is asked for.
    pub fn once_more(&mut self) {
        self.again = self.reached > 0 || !self.whole.is_empty();
    }

    /// The segment that comes next, and the first of its records that was not come to. Segments whose footers say that all of their rows were
    /// trained after the rule's step are left out.
    ///
    /// An open segment is come to although it has no live row, because it may get some later. Segments that were passed come last. A row
    /// that is moved into one of them after this look is among those that follow there.
    fn choose(&self, state: &TierState, dying: &Dying<'_>) -> Option<(Arc<Segment>, u32)> {
        let may_die = |segment: &&Arc<Segment>| segment.steps().is_none_or(|steps| steps.lowest <= dying.last_step);
        let open = state.open().of_rows().map(OpenSegment::segment);
        let live = || live_segments(state).filter(may_die);
        let is_new = |segment: &&Arc<Segment>| segment.serial > self.reached && !self.whole.contains(&segment.serial);
        let whole = live().filter(|segment| dies_whole(segment, dying)).filter(is_new);
        if let Some(segment) = whole.min_by_key(|segment| segment.serial) {
            return Some((Arc::clone(segment), 0));
        }
        let new = live().chain(open).filter(is_new);
        if let Some(segment) = new.min_by_key(|segment| segment.serial) {
            return Some((Arc::clone(segment), 0));
        }
        let passed = |segment: &&Arc<Segment>| self.passed.iter().find(|passed| passed.serial == segment.serial);
        live()
            .filter_map(|segment| passed(&segment).map(|passed| (Arc::clone(segment), passed.records)))
            .filter(|(segment, records)| segment.records() > *records)
            .min_by_key(|(segment, _)| segment.serial)
    }
}
