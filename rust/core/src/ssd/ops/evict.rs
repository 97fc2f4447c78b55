//! Removes rows: by id, with a tombstone each; all of them; or, because the table is full, the oldest ones.
//!
//! An eviction continues where the last one stopped, and wraps around from the latest segment to the oldest. So the
//! footer of a segment is read once for all of its evicted rows, and a row that had to stay is tried again a round
//! later.

use std::sync::Arc;

use crate::error::Result;
use crate::rows::RowHeader;
use crate::runtime::memory;
use crate::runtime::sync::{Ordering, lock};
use crate::ssd::SsdTier;
use crate::ssd::format::segment_file::SegmentContent;
use crate::ssd::index::PREFETCH_DISTANCE;
use crate::ssd::ops::compaction;
use crate::ssd::ops::cursor::{entries_of, live_among, live_segments, oldest, read_each, records_per_read};
use crate::ssd::ops::make_space::{MAX_RECORDS_PER_LOCK, check_memory, spill_if_short, wait_for_more_space};
use crate::ssd::segment::Segment;
use crate::ssd::segment::write_buffer::WriteBufferPool;
use crate::ssd::store::TierInner;
use crate::ssd::store::scan_state::{CursorRecord, SegmentCursor};
use crate::ssd::store::state::{SegmentStream, TierState};
use crate::types::Id;

/// Receives evicted rows: headers `[n]` and vector parts `[n, V]`.
pub type EvictedRowsSink<'a> = dyn FnMut(Vec<RowHeader>, Vec<f32>) + 'a;

/// Copies of the rows of some records.
struct EvictedRowCopies {
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
    /// True for each evicted row.
    removed: Vec<bool>,
}

impl EvictedRowCopies {
    /// Reads the rows of these live records of a segment, which are in the order of the file.
    ///
    /// Errors: those of reads, `Corruption`, `Memory`.
    fn read(tier: &TierInner, segment: &Arc<Segment>, records: &[CursorRecord]) -> Result<Self> {
        let floats = tier.layout.vector_floats();
        let mut vectors = memory::zeros("copy evicted rows", records.len() * floats)?;
        let mut headers = Vec::with_capacity(records.len());
        let mut rows = vectors.chunks_exact_mut(floats);
        read_each(tier, segment, records, |_, record| {
            headers.extend(rows.next().map(|vector| record.unpack(&tier.layout, vector)));
            Ok(())
        })?;
        Ok(Self { removed: vec![false; headers.len()], headers, vectors })
    }

    /// Passes the evicted rows to `on_evicted`.
    fn deliver(mut self, floats: usize, on_evicted: &mut EvictedRowsSink<'_>) {
        let mut kept = 0;
        for at in 0..self.removed.len() {
            if self.removed[at] {
                self.headers[kept] = self.headers[at];
                self.vectors.copy_within(at * floats..(at + 1) * floats, kept * floats);
                kept += 1;
            }
        }
        self.headers.truncate(kept);
        self.vectors.truncate(kept * floats);
        if kept > 0 {
            on_evicted(self.headers, self.vectors);
        }
    }
}

impl SsdTier {
    /// Evicts `rows` rows, or as many as possible, and returns their ids. Starts with the oldest segments; a call
    /// continues where the previous call stopped. Rows for which `keep` returns true stay. Passes the evicted rows to
    /// `on_evicted`, if given, and reads their records for that.
    ///
    /// Errors: with `on_evicted` also `Corruption` if a record cannot be read. Its row, and the rows that were read with
    /// it, stay until the next round.
    pub fn evict(
        &self,
        rows: u64,
        keep: &dyn Fn(Id) -> bool,
        on_evicted: Option<&mut EvictedRowsSink<'_>>,
    ) -> Result<Vec<Id>> {
        let tier = &self.inner;
        let mut evicted: Vec<Id> = Vec::new();
        let mut cursor = std::mem::take(&mut *lock(&tier.eviction_cursor));
        let outcome = evict_into(tier, rows, keep, &mut cursor, &mut evicted, on_evicted);
        *lock(&tier.eviction_cursor) = cursor;
        tier.counters.dropped_rows.fetch_add(evicted.len() as u64, Ordering::Relaxed);
        // The caller must know the evicted rows. The next call, which evicts none, returns an error of writing.
        if evicted.is_empty() { outcome.map(|()| evicted) } else { Ok(evicted) }
    }

    /// Removes ids that are present, each once. After an error all of them are still present. If a write fails after
    /// some were removed, all are removed, and the next call returns the error.
    pub fn remove(&self, ids: &[Id]) -> Result<()> {
        let tier = &self.inner;
        let mut last = None;
        let removed = remove_where(tier, ids, |_, _| true, |at| last = Some(at));
        if let (Err(_), Some(last), true) = (&removed, last, tier.context.space.has_failed()) {
            // The removed rows cannot be restored, because their records may be gone too. So the others are removed as
            // well.
            remove_without_tombstones(tier, &ids[last + 1..]);
            return Ok(());
        }
        removed
    }

    /// Removes all rows, for example when a load replaces the contents.
    pub fn clear(&self) -> Result<()> {
        self.inner.check_writable()?;
        let _publishing = self.inner.publishing();
        let _compacting = self.inner.pause_compaction();
        self.inner.state().clear();
        Ok(())
    }
}

fn evict_into(
    tier: &Arc<TierInner>,
    rows: u64,
    keep: &dyn Fn(Id) -> bool,
    cursor: &mut SegmentCursor,
    evicted: &mut Vec<Id>,
    mut on_evicted: Option<&mut EvictedRowsSink<'_>>,
) -> Result<()> {
    tier.check_writable()?;
    // A round that started in the middle of the segments skips some; the next round visits these.
    let (mut evicted_before, mut rounds_in_vain) = (0, 0);
    while (evicted.len() as u64) < rows {
        let Some(segment) = next_segment(tier, cursor)? else {
            rounds_in_vain = if evicted.len() == evicted_before { rounds_in_vain + 1 } else { 0 };
            if rounds_in_vain == 2 {
                break;
            }
            (cursor.serial, evicted_before) = (0, evicted.len());
            continue;
        };
        let mut candidates: Vec<CursorRecord> = Vec::new();
        let most = if on_evicted.is_some() { records_per_read(&segment) } else { usize::MAX };
        while candidates.len() < most.min(rows as usize - evicted.len())
            && let Some(next) = cursor.remaining.pop()
        {
            if !keep(next.id) {
                candidates.push(next);
            }
        }
        // Rows that are read together with an unreadable one stay for this round, because eviction must get past such a
        // row.
        remove_records(tier, segment, candidates, on_evicted.as_deref_mut(), |at| evicted.push(at.id))?;
    }
    Ok(())
}

/// Returns the current segment of an eviction, with remaining records; `None` at the end.
fn next_segment(tier: &TierInner, cursor: &mut SegmentCursor) -> Result<Option<Arc<Segment>>> {
    loop {
        if let Some(segment) = cursor.current_segment(tier) {
            return Ok(Some(segment));
        }
        let Some(segment) = oldest(live_segments(&tier.view()).filter(|segment| segment.serial > cursor.serial)) else {
            return Ok(None);
        };
        let records: Vec<CursorRecord> = entries_of(tier, &segment)?.entries.iter().map(CursorRecord::from).collect();
        cursor.enter(&segment, live_among(tier, &segment, &records));
    }
}

/// Removes those of `records` of a segment, in the order of the file, that the index still points to, with a tombstone
/// each. Calls `on_removed` with each removed record, even if an error follows, and then passes the removed rows to
/// `on_evicted`.
pub(crate) fn remove_records(
    tier: &Arc<TierInner>,
    segment: Arc<Segment>,
    mut records: Vec<CursorRecord>,
    on_evicted: Option<&mut EvictedRowsSink<'_>>,
    mut on_removed: impl FnMut(CursorRecord),
) -> Result<()> {
    let mut copies = None;
    if on_evicted.is_some() {
        // A record that the index does not point to never becomes live again.
        records = live_among(tier, &segment, &records);
        copies = Some(EvictedRowCopies::read(tier, &segment, &records)?);
    }
    // Numbers are reused after a segment is removed; serials are not.
    let (slot, serial) = (segment.slot, segment.serial);
    // A thread that waits for free space must not pin a file whose removal would free it.
    drop(segment);
    let ids: Vec<Id> = records.iter().map(|at| at.id).collect();
    let is_live = |state: &TierState, at: usize| {
        let current = state.segments().in_slot(slot).filter(|segment| segment.serial == serial);
        current.is_some_and(|segment| state.index().is_at(ids[at], segment.location(records[at].record)))
    };
    let removed = remove_where(tier, &ids, is_live, |at| {
        on_removed(records[at]);
        if let Some(copies) = &mut copies {
            copies.removed[at] = true;
        }
    });
    if let (Some(copies), Some(on_evicted)) = (copies, on_evicted) {
        copies.deliver(tier.layout.vector_floats(), on_evicted);
    }
    removed
}

/// Removes present ids without tombstones, from a read-only tier: it publishes no further state that would need them.
pub(crate) fn remove_without_tombstones(tier: &TierInner, ids: &[Id]) {
    let mut state = tier.state();
    for &id in ids {
        state.remove_without_tombstone(id);
    }
    state.count_dead();
}

/// Removes those of `ids` that are present and for which `is_current` returns true, with a tombstone each. Calls
/// `on_removed` with the position of each removed id, even if an error follows.
fn remove_where(
    tier: &Arc<TierInner>,
    ids: &[Id],
    is_current: impl Fn(&TierState, usize) -> bool,
    mut on_removed: impl FnMut(usize),
) -> Result<()> {
    tier.check_writable()?;
    check_memory(tier, ids.len(), tier.context.schema.max_record_bytes(SegmentContent::Tombstones))?;
    let mut done = 0;
    while done < ids.len() {
        WriteBufferPool::of_process().throttle();
        let mut state = tier.state();
        if !tier.prepare_stream(&mut state, SegmentStream::Tombstones)? {
            drop(state);
            wait_for_more_space(tier, done > 0)?;
            continue;
        }
        ids[done..].iter().take(PREFETCH_DISTANCE).for_each(|&id| state.index().prefetch(id));
        for (at, &id) in ids.iter().enumerate().skip(done).take(MAX_RECORDS_PER_LOCK) {
            if state.is_full(SegmentStream::Tombstones) {
                break;
            }
            if let Some(&later) = ids.get(at + PREFETCH_DISTANCE) {
                state.index().prefetch(later);
            }
            done += 1;
            if is_current(&state, at) && state.write_tombstone(id) {
                on_removed(at);
            }
        }
        state.count_dead();
        state.reap();
        compaction::schedule_if_worthwhile(tier, &state);
    }
    spill_if_short(tier);
    Ok(())
}
