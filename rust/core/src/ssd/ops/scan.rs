//! Scans, and reads of a snapshot: every row once, or every row modified since an epoch, segment by segment, in bounded
//! memory.
//!
//! A scan lists the segments at its start, and excludes those that it has not read yet from compaction. So no row moves
//! from a segment that it has to read to one that it does not know. The rows that it finds are counted: see
//! [`ScanTally`].
//!
//! A snapshot is read while the tier keeps changing, for an asynchronous save. If space is short, a thread that waits
//! for it reads the rows of a segment itself and passes them to the snapshot's owner.

use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::rows::{RowHeader, RowRef};
use crate::ssd::SsdTier;
use crate::ssd::format::record::id_of;
use crate::ssd::format::segment_file::SegmentContent;
use crate::ssd::ops::cursor::{live_among, read_each, read_records, record_chunks, records_per_read};
use crate::ssd::segment::footer_reader::read_entries;
use crate::ssd::segment::{Segment, SegmentPart};
use crate::ssd::store::TierInner;
use crate::ssd::store::scan_state::{CursorRecord, ScanTally};
use crate::ssd::store::snapshot::{EarlyRowSink, SsdSnapshotState, UnreadSegments};
use crate::ssd::store::state::TierState;
use crate::types::Id;

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
enum ScanScope<'a> {
    /// The rows that the index points to.
    Current(&'a ScanTally),
    /// The rows of the tier's snapshot.
    Snapshot,
}

/// Passes every row whose `modified_epoch` is at least `since` to `sink`, once. Does not read segments without any. For
/// segments with few, reads only the footer and these rows.
pub(crate) fn scan(tier: &TierInner, since: u32, sink: &mut ScanSink<'_>) -> Result<()> {
    tier.check_usable()?;
    let mut scan = begin_scan(tier, since);
    for part in std::mem::take(&mut scan.parts) {
        match few_modified(tier, &part, since)? {
            Some(records) => scan_records(tier, &part.segment, &records, sink)?,
            None => scan_part(tier, &part, since, ScanScope::Current(&scan.tally), sink)?,
        }
        drop(part);
        tier.context.space.notify_waiters();
    }
    Ok(())
}

/// Returns the records of a sealed segment that were modified in epoch `since` or later, in the order of the file;
/// `None` if they may be so many that reading all records is faster.
fn few_modified(tier: &TierInner, part: &SegmentPart, since: u32) -> Result<Option<Vec<CursorRecord>>> {
    if since == 0 || part.segment.sealed().is_none() {
        return Ok(None);
    }
    let mut entries = read_entries(&*tier.context.engine, &part.segment)?;
    entries.retain(|entry| entry.modified_epoch >= since);
    if entries.len() > part.records as usize / FULL_READ_SHARE {
        return Ok(None);
    }
    entries.sort_unstable_by_key(|entry| entry.record);
    Ok(Some(entries.iter().map(CursorRecord::from).collect()))
}

/// Passes those of these records of a sealed segment that are live to `sink`.
fn scan_records(
    tier: &TierInner,
    segment: &Arc<Segment>,
    records: &[CursorRecord],
    sink: &mut ScanSink<'_>,
) -> Result<()> {
    let mut vector = vec![0.0; tier.layout.vector_floats()];
    for records in records.chunks(records_per_read(segment)) {
        read_each(tier, segment, &live_among(tier, segment, records), |_, record| {
            let header = record.unpack(&tier.layout, &mut vector);
            sink(RowRef { header: &header, vector: &vector })
        })?;
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
fn parts_of(state: &TierState, since: u32) -> Vec<SegmentPart> {
    let rows = state.segments().iter().filter(|s| s.content == SegmentContent::Rows && s.highest_epoch() >= since);
    rows.cloned().map(SegmentPart::of).collect()
}

/// Passes the rows of a segment whose `modified_epoch` is at least `since` to `sink`. Returns `Corruption` if it finds
/// fewer live records, of any epoch, than the tier counts.
fn scan_part(
    tier: &TierInner,
    part: &SegmentPart,
    since: u32,
    scope: ScanScope<'_>,
    sink: &mut ScanSink<'_>,
) -> Result<()> {
    let segment = &part.segment;
    let record_bytes = segment.record_bytes;
    let mut bytes = vec![0; records_per_read(segment) * record_bytes];
    let mut vector = vec![0.0; tier.layout.vector_floats()];
    let (mut ids, mut locations, mut selected) = (Vec::new(), Vec::new(), Vec::new());
    let (mut found, mut in_snapshot) = (0, None);
    for (first, count) in record_chunks(segment, part.records) {
        let chunk = &mut bytes[..count as usize * record_bytes];
        read_records(tier, segment, first, chunk)?;
        ids.clear();
        ids.extend(chunk.chunks_exact(record_bytes).map(id_of));
        locations.clear();
        locations.resize(ids.len(), None);
        selected.clear();
        {
            let state = tier.view();
            state.index().get_batch(&ids, &mut locations);
            let snapshot = state.snapshot().filter(|_| matches!(scope, ScanScope::Snapshot));
            selected.extend((first..).zip(&locations).map(|(number, current)| {
                let location = segment.location(number);
                (*current == Some(location)) != snapshot.is_some_and(|snapshot| snapshot.is_marked(location))
            }));
            let live = selected.iter().filter(|selected| **selected).count() as u32;
            found += live;
            match scope {
                ScanScope::Current(tally) => tally.add_found(segment.slot, first + count, live),
                ScanScope::Snapshot => in_snapshot = snapshot.and_then(|snapshot| snapshot.live_records(segment.slot)),
            }
        }
        for (at, record) in chunk.chunks_exact(record_bytes).enumerate() {
            if !selected[at] {
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
        ScanScope::Snapshot => in_snapshot.unwrap_or(found).saturating_sub(found),
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
    let mut bytes = vec![0; records_per_read(segment).min(records as usize) * segment.record_bytes];
    for (first, count) in record_chunks(segment, records) {
        let chunk = &mut bytes[..count as usize * segment.record_bytes];
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

/// Ids per lookup.
const IDS_PER_LOOKUP: usize = 1024;

/// A snapshot of a tier's rows. Dropping it releases its segments.
pub struct SsdSnapshot {
    tier: Arc<TierInner>,
    unread: Arc<UnreadSegments>,
}

opaque_debug!(SsdSnapshot, self, unread = self.unread.len());

impl SsdTier {
    /// Takes a snapshot of the rows that were modified in epoch `since` or later, except those of the `stale` ids,
    /// whose latest versions are in another tier. `early_rows` receives rows that have to be read out of order. It may
    /// be called from any thread until [`SsdSnapshot::for_each_row`] has returned.
    ///
    /// Errors: `State` while another snapshot exists.
    pub fn snapshot(
        &self,
        stale: &mut dyn Iterator<Item = Id>,
        since: u32,
        early_rows: Box<EarlyRowSink>,
    ) -> Result<SsdSnapshot> {
        let tier = &self.inner;
        tier.check_usable()?;
        let mut state = tier.state();
        if state.snapshot().is_some() {
            return Err(Kind::State.error("an earlier snapshot is still being read: wait for its end"));
        }
        let mut parts = parts_of(&state, since);
        parts.sort_unstable_by_key(|part| part.segment.serial);
        let mut snapshot = SsdSnapshotState::new(parts, state.segments().slots(), since, early_rows);
        let mut locations = [None; IDS_PER_LOOKUP];
        loop {
            let ids: Vec<Id> = (&mut *stale).take(IDS_PER_LOOKUP).collect();
            if ids.is_empty() {
                break;
            }
            let locations = &mut locations[..ids.len()];
            locations.fill(None);
            state.index().get_batch(&ids, locations);
            locations.iter().flatten().for_each(|location| snapshot.exclude(*location));
        }
        let unread = Arc::clone(snapshot.unread());
        state.begin_snapshot(snapshot);
        Ok(SsdSnapshot { tier: Arc::clone(tier), unread })
    }
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
        let snapshot = self.tier.state().end_snapshot();
        drop((parts, snapshot));
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
    let Some(unread) = tier.view().snapshot().map(|snapshot| Arc::clone(snapshot.unread())) else {
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
