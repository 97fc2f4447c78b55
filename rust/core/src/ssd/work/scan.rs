//! Scans: every row once, or every row modified since an epoch, segment by segment, in bounded memory.
//!
//! A scan lists the segments as they are, and keeps compaction off those it has not come to yet. So no row moves from a segment that it has
//! to read to one that it does not know of. What it finds is counted: see `tally`.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::rows::{RowHeader, RowRef};
use crate::ssd::format::footer::FooterEntry;
use crate::ssd::format::head::id_of;
use crate::ssd::format::segment::SegmentContent;
use crate::ssd::segment::file::Segment;
use crate::ssd::segment::footers::read_entries;
use crate::ssd::segment::part::SegmentPart;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::state::TierState;
use crate::ssd::tier::takers::ScanConsumer;
use crate::ssd::tier::tally::ScanTally;
use crate::ssd::work::by_entry::{
    CHUNK_BYTES, RequestedRecord, decode_requested, live_requests, read_records, read_requested, records_per_read,
};

/// A segment is read from its start to its end where more than one in this many of its records is wanted.
const FULL_READ_SHARE: usize = 4;

/// Takes the rows of a scan.
pub type ScanSink<'a> = dyn FnMut(RowRef<'_>) -> Result<()> + 'a;

/// A scan under way of the rows that the index points to.
struct SegmentScan<'a> {
    tier: &'a TierInner,
    parts: Vec<SegmentPart>,
    tally: Arc<ScanTally>,
}

impl Drop for SegmentScan<'_> {
    fn drop(&mut self) {
        // The segments go first, because whoever is woken below looks at them.
        self.parts.clear();
        if self.tier.context.workers.check_process().is_ok() {
            self.tier.state().end_scan(&self.tally);
            self.tier.context.space.notify_waiters();
        }
    }
}

/// Which rows of a segment are wanted.
#[derive(Clone, Copy)]
pub(crate) enum ScanScope<'a> {
    /// Those that the index points to.
    Current(&'a ScanTally),
    /// Those that it pointed to at the tier's moment.
    Snapshot,
}

/// Hand every row to `sink`, once.
pub(crate) fn scan(tier: &TierInner, sink: &mut ScanSink<'_>) -> Result<()> {
    tier.check_usable()?;
    let mut scan = begin_scan(tier, 0);
    for part in std::mem::take(&mut scan.parts) {
        scan_part(tier, &part, 0, ScanScope::Current(&scan.tally), sink)?;
        drop(part);
        tier.context.space.notify_waiters();
    }
    Ok(())
}

/// As [`scan`], where somebody may keep it waiting. Where others need the room of files that the scan keeps, `consumer` is asked to end it.
pub(crate) fn scan_cancellable(
    tier: &TierInner,
    consumer: &Arc<dyn ScanConsumer>,
    sink: &mut ScanSink<'_>,
) -> Result<()> {
    // Dropped after the scan, which has let go of its files by then.
    let _listed = tier.scan_consumers.register(consumer);
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
            wanted = read_entries(&*tier.context.engine, &part.segment)?;
            wanted.retain(|entry| entry.modified_epoch >= since);
        }
        if part.segment.sealed().is_none() || wanted.len() > part.records as usize / FULL_READ_SHARE {
            drop(wanted);
            scan_part(tier, &part, since, ScanScope::Current(&scan.tally), sink)?;
        } else {
            scan_entries(tier, &part.segment, wanted, sink)?;
        }
        drop(part);
        tier.context.space.notify_waiters();
    }
    Ok(())
}

/// Hand those of these records of a sealed segment that are live to `sink`.
fn scan_entries(
    tier: &TierInner,
    segment: &Arc<Segment>,
    mut entries: Vec<FooterEntry>,
    sink: &mut ScanSink<'_>,
) -> Result<()> {
    entries.sort_unstable_by_key(|entry| entry.record);
    let mut vector = vec![0.0; tier.layout.vector_floats()];
    let wanted: Vec<RequestedRecord> = entries.iter().map(|entry| (entry.id, entry.record)).collect();
    for wanted in wanted.chunks(records_per_read(segment)) {
        let live = live_requests(tier, segment, wanted);
        let records = read_requested(tier, segment, &live)?;
        for (wanted, bytes) in live.iter().zip(records.chunks_exact(segment.record_bytes)) {
            let record = decode_requested(segment, *wanted, bytes)?;
            let header: RowHeader = record.unpack(&tier.layout, &mut vector);
            sink(RowRef { header: &header, vector: &vector })?;
        }
    }
    Ok(())
}

/// Begin to scan the segments with rows modified in epoch `since` or later.
fn begin_scan(tier: &TierInner, since: u32) -> SegmentScan<'_> {
    let _compacting = tier.pause_compaction();
    let mut state = tier.state();
    let parts = parts_of(&state, since);
    let tally = Arc::new(ScanTally::of(&parts));
    state.begin_scan(Arc::clone(&tally));
    SegmentScan { tier, parts, tally }
}

/// The segments as they are now with rows modified in epoch `since` or later.
pub(crate) fn parts_of(state: &TierState, since: u32) -> Vec<SegmentPart> {
    let rows = state.segments().iter().filter(|s| s.content == SegmentContent::Rows && s.highest_epoch() >= since);
    rows.cloned().map(SegmentPart::of).collect()
}

/// Hand the rows of a segment whose `modified_epoch` is at least `since` to `sink`. `Corruption` where fewer live records are found, of any
/// epoch, than the tier counts.
pub(crate) fn scan_part(
    tier: &TierInner,
    part: &SegmentPart,
    since: u32,
    scope: ScanScope<'_>,
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
            let moment = state.snapshot().filter(|_| matches!(scope, ScanScope::Snapshot));
            wanted.extend((first..).zip(&here).map(|(number, here)| {
                let location = segment.location(number);
                (*here == Some(location)) != moment.is_some_and(|moment| moment.is_marked(location))
            }));
            let live = wanted.iter().filter(|wanted| **wanted).count() as u32;
            found += live;
            match scope {
                ScanScope::Current(tally) => tally.add_found(segment.slot, first + count, live),
                ScanScope::Snapshot => of_moment = moment.and_then(|moment| moment.live_records(segment.slot)),
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
    let missing = match scope {
        ScanScope::Current(tally) => tally.missing(segment.slot),
        ScanScope::Snapshot => of_moment.unwrap_or(found).saturating_sub(found),
    };
    if missing == 0 {
        return Ok(());
    }
    Err(missing_live_records_error(tier, segment, part.records, (found + missing, found)))
}

/// The error where `found` of the `counted` live records among a segment's first `records` were found. It names the first record that is
/// damaged. Where none is, whole records lie where others belong.
pub(crate) fn missing_live_records_error(
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
