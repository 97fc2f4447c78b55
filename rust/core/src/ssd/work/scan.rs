//! Scans: every row once, or every row modified since an epoch, segment by segment, in bounded memory.
//!
//! A scan lists the segments as they are, and keeps compaction off those it has not come to yet. So no row moves from a segment that it has
//! to read to one that it does not know of. What it finds is counted: see `tally`.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::rows::{RowHeader, RowRef};
use crate::ssd::format::footer::Entry;
use crate::ssd::format::head::id_of;
use crate::ssd::format::segment::Content;
use crate::ssd::segment::file::Segment;
use crate::ssd::segment::footers::read_entries;
use crate::ssd::segment::part::Part;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::state::TierState;
use crate::ssd::tier::takers::GiveWay;
use crate::ssd::tier::tally::Tally;
use crate::ssd::work::by_entry::{CHUNK_BYTES, Wanted, at_once, decode_wanted, live_of, read_records, read_wanted};

/// A segment is read from its start to its end where more than one in this many of its records is wanted.
const WANTED_OF_ALL: usize = 4;

/// Takes the rows of a scan.
pub type ScanSink<'a> = dyn FnMut(RowRef<'_>) -> Result<()> + 'a;

/// A scan under way of the rows that the index points to.
struct Scan<'a> {
    tier: &'a TierInner,
    parts: Vec<Part>,
    tally: Arc<Tally>,
}

impl Drop for Scan<'_> {
    fn drop(&mut self) {
        // The segments go first, because whoever is woken below looks at them.
        self.parts.clear();
        if self.tier.home.workers.check_process().is_ok() {
            self.tier.state().end_scan(&self.tally);
            self.tier.home.space.poke();
        }
    }
}

/// Which rows of a segment are wanted.
#[derive(Clone, Copy)]
pub(crate) enum Which<'a> {
    /// Those that the index points to.
    Now(&'a Tally),
    /// Those that it pointed to at the tier's moment.
    OfMoment,
}

/// Hand every row to `sink`, once.
pub(crate) fn scan(tier: &TierInner, sink: &mut ScanSink<'_>) -> Result<()> {
    tier.check_usable()?;
    let mut scan = begin_scan(tier, 0);
    for part in std::mem::take(&mut scan.parts) {
        scan_part(tier, &part, 0, Which::Now(&scan.tally), sink)?;
        drop(part);
        tier.home.space.poke();
    }
    Ok(())
}

/// As [`scan`], where somebody may keep it waiting. Where others need the room of files that the scan keeps, `taker` is asked to end it.
pub(crate) fn scan_giving_way(tier: &TierInner, taker: &Arc<dyn GiveWay>, sink: &mut ScanSink<'_>) -> Result<()> {
    // Dropped after the scan, which has let go of its files by then.
    let _listed = tier.takers.list(taker);
    scan(tier, sink)
}

/// Hand every row whose `modified_epoch` is at least `since` to `sink`, once. Segments without any are not read. Of those that have few,
/// only the footer and these rows are.
pub(crate) fn scan_since(tier: &TierInner, since: u32, sink: &mut ScanSink<'_>) -> Result<()> {
    tier.check_usable()?;
    let mut scan = begin_scan(tier, since);
    for part in std::mem::take(&mut scan.parts) {
        let mut wanted = Vec::new();
        if part.segment.sealed().is_some() {
            wanted = read_entries(&*tier.home.engine, &part.segment)?;
            wanted.retain(|entry| entry.modified_epoch >= since);
        }
        if part.segment.sealed().is_none() || wanted.len() > part.records as usize / WANTED_OF_ALL {
            drop(wanted);
            scan_part(tier, &part, since, Which::Now(&scan.tally), sink)?;
        } else {
            scan_entries(tier, &part.segment, wanted, sink)?;
        }
        drop(part);
        tier.home.space.poke();
    }
    Ok(())
}

/// Hand those of these records of a sealed segment that are live to `sink`.
fn scan_entries(
    tier: &TierInner,
    segment: &Arc<Segment>,
    mut entries: Vec<Entry>,
    sink: &mut ScanSink<'_>,
) -> Result<()> {
    entries.sort_unstable_by_key(|entry| entry.record);
    let mut vector = vec![0.0; tier.layout.vector_floats()];
    let wanted: Vec<Wanted> = entries.iter().map(|entry| (entry.id, entry.record)).collect();
    for wanted in wanted.chunks(at_once(segment)) {
        let live = live_of(tier, segment, wanted);
        let records = read_wanted(tier, segment, &live)?;
        for (wanted, bytes) in live.iter().zip(records.chunks_exact(segment.record_bytes)) {
            let record = decode_wanted(segment, *wanted, bytes)?;
            let header: RowHeader = record.unpack(&tier.layout, &mut vector);
            sink(RowRef { header: &header, vector: &vector })?;
        }
    }
    Ok(())
}

/// Begin to scan the segments with rows modified in epoch `since` or later.
fn begin_scan(tier: &TierInner, since: u32) -> Scan<'_> {
    let _compacting = tier.not_compacting();
    let mut state = tier.state();
    let parts = parts_of(&state, since);
    let tally = Arc::new(Tally::of(&parts));
    state.begin_scan(Arc::clone(&tally));
    Scan { tier, parts, tally }
}

/// The segments as they are now with rows modified in epoch `since` or later.
pub(crate) fn parts_of(state: &TierState, since: u32) -> Vec<Part> {
    let rows = state.segments().iter().filter(|s| s.content == Content::Rows && s.highest_epoch() >= since);
    rows.cloned().map(Part::of).collect()
}

/// Hand the rows of a segment whose `modified_epoch` is at least `since` to `sink`. `Corruption` where fewer live records are found, of any
/// epoch, than the tier counts.
pub(crate) fn scan_part(
    tier: &TierInner,
    part: &Part,
    since: u32,
    which: Which<'_>,
    sink: &mut ScanSink<'_>,
) -> Result<()> {
    let segment = &part.segment;
    let record_bytes = segment.record_bytes;
    let at_once = (CHUNK_BYTES / record_bytes).max(1) as u32;
    let mut bytes = vec![0; at_once as usize * record_bytes];
    let mut vector = vec![0.0; tier.layout.vector_floats()];
    let (mut ids, mut here, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
    let (mut found, mut of_moment) = (0, None);
    for first in (0..part.records).step_by(at_once as usize) {
        let count = at_once.min(part.records - first);
        let chunk = &mut bytes[..count as usize * record_bytes];
        read_records(tier, segment, first, chunk)?;
        ids.clear();
        ids.extend(chunk.chunks_exact(record_bytes).map(id_of));
        here.clear();
        here.resize(ids.len(), None);
        wanted.clear();
        {
            let state = tier.view();
            state.index().get_batch(&ids, &mut here);
            let moment = state.moment().filter(|_| matches!(which, Which::OfMoment));
            wanted.extend((first..).zip(&here).map(|(number, here)| {
                let location = segment.location(number);
                (*here == Some(location)) != moment.is_some_and(|moment| moment.is_marked(location))
            }));
            let live = wanted.iter().filter(|wanted| **wanted).count() as u32;
            found += live;
            match which {
                Which::Now(tally) => tally.found(segment.slot, first + count, live),
                Which::OfMoment => of_moment = moment.and_then(|moment| moment.live_records(segment.slot)),
            }
        }
        for (at, record) in chunk.chunks_exact(record_bytes).enumerate() {
            if !wanted[at] {
                continue;
            }
            let record = segment.decode(first + at as u32, record)?;
            if record.head.modified_epoch < since {
                continue;
            }
            let header: RowHeader = record.unpack(&tier.layout, &mut vector);
            sink(RowRef { header: &header, vector: &vector })?;
        }
    }
    let missing = match which {
        Which::Now(tally) => tally.missing(segment.slot),
        Which::OfMoment => of_moment.unwrap_or(found).saturating_sub(found),
    };
    if missing == 0 {
        return Ok(());
    }
    Err(live_records_missing(tier, segment, part.records, (found + missing, found)))
}

/// The error where `found` of the `counted` live records among a segment's first `records` were found. It names the first record that is
/// damaged. Where none is, whole records lie where others belong.
pub(crate) fn live_records_missing(
    tier: &TierInner,
    segment: &Arc<Segment>,
    records: u32,
    (counted, found): (u32, u32),
) -> Error {
    let at_once = (CHUNK_BYTES / segment.record_bytes).max(1) as u32;
    let mut bytes = vec![0; at_once.min(records) as usize * segment.record_bytes];
    for first in (0..records).step_by(at_once as usize) {
        let chunk = &mut bytes[..at_once.min(records - first) as usize * segment.record_bytes];
        if read_records(tier, segment, first, chunk).is_err() {
            break;
        }
        let mut decoded = (first..).zip(chunk.chunks_exact(segment.record_bytes));
        if let Some(damage) = decoded.find_map(|(number, bytes)| segment.decode(number, bytes).err()) {
            let context = format!(
                "table '{}': a segment has {counted} live records, and {found} of them can be found",
                tier.identity.table
            );
            return damage.context(context);
        }
    }
    let what = "the number of live records that can be found";
    Error::corruption(segment.path(), segment.offset(0), what, counted, found)
}
