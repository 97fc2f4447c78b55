//! Scans: every row once, or every row modified since an epoch, segment by segment, in bounded memory.
//!
//! A scan lists the segments at its start, and excludes those that it has not read yet from compaction. So no row moves
//! from a segment that it has to read to one that it does not know. The rows that it finds are counted: see `tally`.

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

/// A segment is read completely if more than 1/4 of its records are requested.
const FULL_READ_SHARE: usize = 4;

/// Receives the rows of a scan.
pub type ScanSink<'a> = dyn FnMut(RowRef<'_>) -> Result<()> + 'a;

/// A scan in progress of the rows that the index points to.
struct SegmentScan<'a> {
    tier: &'a TierInner,
    parts: Vec<SegmentPart>,
    tally: Arc<ScanTally>,
}

impl Drop for SegmentScan<'_> {
    fn drop(&mut self) {
        // The segments are released first, because the threads woken below check them.
        self.parts.clear();
        if self.tier.context.workers.check_process().is_ok() {
            self.tier.state().end_scan(&self.tally);
            self.tier.context.space.notify_waiters();
        }
    }
}

/// Selects rows of a segment.
#[derive(Clone, Copy)]
pub(crate) enum ScanScope<'a> {
    /// The rows that the index points to.
    Current(&'a ScanTally),
    /// The rows of the tier's snapshot.
    Snapshot,
}

/// Passes every row to `sink`, once.
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

/// Like [`scan`], for a consumer that may block it. If other threads need the space of files that the scan pins,
/// cancels it by `consumer`.
pub(crate) fn scan_cancellable(
    tier: &TierInner,
    consumer: &Arc<dyn ScanConsumer>,
    sink: &mut ScanSink<'_>,
) -> Result<()> {
    // Dropped after the scan, which has released its files before.
    let _listed = tier.scan_consumers.register(consumer);
    scan(tier, sink)
}

/// Passes every row whose `modified_epoch` is at least `since` to `sink`, once. Does not read segments without any. For
/// segments with few, reads only the footer and these rows.
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

/// Passes those of these records of a sealed segment that are live to `sink`.
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

/// Starts a scan of the segments with rows modified in epoch `since` or later.
fn begin_scan(tier: &TierInner, since: u32) -> SegmentScan<'_> {
    let _compacting = tier.pause_compaction();
    let mut state = tier.state();
    let parts = parts_of(&state, since);
    let tally = Arc::new(ScanTally::of(&parts));
    state.begin_scan(Arc::clone(&tally));
    SegmentScan { tier, parts, tally }
}

/// Returns the present segments with rows modified in epoch `since` or later.
pub(crate) fn parts_of(state: &TierState, since: u32) -> Vec<SegmentPart> {
    let rows = state.segments().iter().filter(|s| s.content == SegmentContent::Rows && s.highest_epoch() >= since);
    rows.cloned().map(SegmentPart::of).collect()
}

/// Passes the rows of a segment whose `modified_epoch` is at least `since` to `sink`. Returns `Corruption` if it finds
/// fewer live records, of any epoch, than the tier counts.
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

/// Returns the error when only `found` of the `counted` live records among a segment's first `records` were found. It
/// names the first corrupted record. If there is none, intact records are at wrong positions.
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
