//! Appends rows to the tier.

use std::sync::Arc;

use crate::error::{Kind, Result};
use crate::rows::{RowHeader, RowRef};
use crate::runtime::sync::Ordering;
use crate::ssd::format::record::{HeadWidths, RecordMaxima, encode_rows};
use crate::ssd::format::segment_file::SegmentContent;
use crate::ssd::hotness::{HotnessClasses, MAX_HOTNESS_CLASSES, keep_neighbours_together};
use crate::ssd::index::{RecordLocation, TagIndex, TagMatch};
use crate::ssd::ops::compaction;
use crate::ssd::ops::evict::remove_without_tombstones;
use crate::ssd::ops::make_space::{MAX_RECORDS_PER_LOCK, check_memory, spill_if_short, wait_for_more_space};
use crate::ssd::segment::Segment;
use crate::ssd::segment::open_segment::NewRecord;
use crate::ssd::segment::write_buffer::WriteBufferPool;
use crate::ssd::store::TierInner;
use crate::ssd::store::state::{SegmentStream, TierState};
use crate::types::Id;

/// Maximum bytes of records that are written while the tier's lock is held once.
const MAX_BYTES_PER_LOCK: usize = 1 << 20;

/// Records of rows that are being appended, and are in no segment yet.
struct AppendRecords {
    bytes: Vec<u8>,
    hotness: Vec<u8>,
    /// Lookup results of the ids with an older version in the tier.
    matches: Vec<TagMatch>,
    /// `write_seq` of the first record. Those of the others follow.
    first_seq: u64,
    /// Widths of their heads.
    widths: HeadWidths,
}

/// See [`SsdTier::append`](crate::ssd::SsdTier::append).
pub(crate) fn append(tier: &Arc<TierInner>, rows: &[RowRef<'_>], known: &[bool]) -> Result<()> {
    check_rows(tier, rows, known)?;
    tier.check_writable()?;
    let new = known.iter().filter(|known| !**known).count() as u64;
    if new > 0 {
        let mut state = tier.state();
        let held = state.rows();
        if held + new > tier.context.sizing.capacity_rows {
            drop(state);
            return Err(tier.capacity_error(held, new));
        }
        debug_assert!(held + new <= TagIndex::MAX_IDS, "the capacity is no larger");
        state.reserve(new as usize)?;
    }
    check_memory(tier, rows.len(), tier.context.sizing.row_bytes)?;
    let mut done = 0;
    append_all(tier, rows, known, &mut done).inspect_err(|_| {
        // Rows that the caller does not know to be present must not be present.
        let new = rows[..done].iter().zip(known).filter(|(_, known)| !**known);
        remove_without_tombstones(tier, &new.map(|(row, _)| row.header.id).collect::<Vec<Id>>());
    })
}

/// Appends rows. Increases `done` by their number, even on an error.
fn append_all(tier: &Arc<TierInner>, rows: &[RowRef<'_>], known: &[bool], done: &mut usize) -> Result<()> {
    let at_once = (MAX_BYTES_PER_LOCK / tier.context.sizing.row_bytes).clamp(1, MAX_RECORDS_PER_LOCK);
    let (mut records, dither) = begin_append(tier, rows);
    for (rows, known) in rows.chunks(at_once).zip(known.chunks(at_once)) {
        choose_hotness(tier, rows, known, dither, &mut records);
        encode(tier, rows, &mut records);
        let mut taken = 0;
        while taken < rows.len() {
            WriteBufferPool::of_process().throttle();
            if tier.context.space.has_failed() {
                tier.check_writable()?;
            }
            let mut state = tier.state();
            if state.widths() != records.widths {
                // Another thread has written rows that need wider heads.
                records.widths = state.widths();
                drop(state);
                encode(tier, rows, &mut records);
                continue;
            }
            let (more, ready) = append_some(tier, &mut state, rows, known, &records, taken);
            *done += more;
            ready?;
            if more == 0 {
                drop(state);
                wait_for_more_space(tier, *done > 0)?;
                continue;
            }
            taken += more;
            state.reap();
            compaction::schedule_if_worthwhile(tier, &state);
        }
        records.first_seq += rows.len() as u64;
        tier.counters.row_bytes_given.fetch_add(records.bytes.len() as u64, Ordering::Relaxed);
    }
    spill_if_short(tier);
    Ok(())
}

/// Starts an append: returns the records for the first rows, and the dither for their hotness groups.
fn begin_append(tier: &TierInner, rows: &[RowRef<'_>]) -> (AppendRecords, f32) {
    let highest = RecordMaxima::of_rows(rows.iter().map(|row| row.header));
    let mut state = tier.state();
    state.raise_highest(highest);
    let first_seq = state.take_seqs(rows.len() as u64);
    let widths = state.widths();
    let records = AppendRecords { bytes: Vec::new(), hotness: Vec::new(), matches: Vec::new(), first_seq, widths };
    (records, state.next_dither())
}

fn check_rows(tier: &TierInner, rows: &[RowRef<'_>], known: &[bool]) -> Result<()> {
    if rows.len() != known.len() {
        return Err(Kind::Input.error(format!("{} rows and {} flags: give one flag a row", rows.len(), known.len())));
    }
    let floats = tier.layout.vector_floats();
    let Some(row) = rows.iter().find(|row| row.vector.len() != floats) else { return Ok(()) };
    Err(Kind::Input.error(format!(
        "the row of id {} has {} floats and the table's rows have {floats}",
        row.header.id,
        row.vector.len()
    )))
}

fn record_bytes(tier: &TierInner, widths: HeadWidths) -> usize {
    tier.context.schema.record_bytes(SegmentContent::Rows, widths)
}

/// Encodes the records of rows, without the tier's lock.
fn encode(tier: &TierInner, rows: &[RowRef<'_>], records: &mut AppendRecords) {
    let AppendRecords { bytes, widths, first_seq, .. } = records;
    bytes.resize(rows.len() * record_bytes(tier, *widths), 0);
    encode_rows(bytes, rows, &tier.layout, (*widths, *first_seq));
}

/// Chooses the hotness groups of rows. Holds the tier's lock only to look up older versions.
fn choose_hotness(tier: &TierInner, rows: &[RowRef<'_>], known: &[bool], dither: f32, records: &mut AppendRecords) {
    records.hotness.clear();
    records.hotness.resize(rows.len(), HotnessClasses::for_new_row());
    records.matches.clear();
    records.matches.resize(rows.len(), TagMatch::NONE);
    if known.contains(&true) {
        let ids: Vec<Id> = rows.iter().map(|row| row.header.id).collect();
        let state = tier.view();
        state.index().find_batch(&ids, &mut records.matches);
        let classes = tier.hotness_classes(&state);
        let older = records.matches.iter().zip(known);
        let older: Vec<Option<RecordLocation>> =
            older.map(|(found, known)| found.location().filter(|_| *known)).collect();
        let of_segment = |segment: &Segment| (segment.hotness.min(classes.count - 1), segment.mean_seq());
        let slots = state.segments().slots();
        // If there are fewer segments than rows, each is read once.
        let all: Vec<(u8, u64)> = if slots <= rows.len() {
            let in_slot = |slot| state.segments().in_slot(slot as u32).map_or((0, 0), |segment| of_segment(segment));
            (0..slots).map(in_slot).collect()
        } else {
            Vec::new()
        };
        for ((class, older), seq) in records.hotness.iter_mut().zip(&older).zip(records.first_seq..) {
            if let Some(older) = older {
                let known = all.get(older.segment as usize).copied();
                let (before, mean_seq) = known.unwrap_or_else(|| of_segment(state.segments().of(*older)));
                *class = classes.after_rewrite(before, seq.saturating_sub(mean_seq), dither);
            }
        }
        keep_neighbours_together(&mut records.hotness, &older);
    }
}

/// Writes rows from number `first` on, as long as the open segments or new ones have space. Returns their number.
fn append_some(
    tier: &TierInner,
    state: &mut TierState,
    rows: &[RowRef<'_>],
    known: &[bool],
    records: &AppendRecords,
    first: usize,
) -> (usize, Result<()>) {
    if tier.context.space.free_bytes() < tier.reserved_bytes(state) {
        return (0, Ok(()));
    }
    let bytes = records.bytes.chunks_exact(record_bytes(tier, records.widths));
    let each = rows.iter().zip(records.hotness.iter().zip(bytes)).zip(records.first_seq..);
    let (mut places, mut ready) = (Vec::with_capacity(rows.len() - first), Ok(true));
    let mut left = [0; MAX_HOTNESS_CLASSES as usize];
    for ((row, (class, bytes)), write_seq) in each.skip(first) {
        let (stream, left) = (SegmentStream::Rows(*class), &mut left[*class as usize]);
        if *left == 0 {
            if state.is_full(stream) {
                ready = tier.prepare_stream(state, stream);
                if !matches!(ready, Ok(true)) {
                    break;
                }
            }
            *left = state.records_left(stream);
        }
        let RowHeader { id, modified_epoch, last_step, .. } = *row.header;
        places.push(state.write_row(stream, NewRecord { id, write_seq, modified_epoch, last_step, bytes }));
        *left -= 1;
    }
    let ids = rows.iter().map(|row| row.header.id).zip(known.iter().copied());
    state.point_to(ids.skip(first), &records.matches[first..], &places);
    state.count_dead();
    (places.len(), ready.map(|_| ()))
}
