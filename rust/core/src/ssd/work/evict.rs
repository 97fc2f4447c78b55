//! Evicts rows because the table is full, oldest segments first.
//!
//! An eviction continues where the last one stopped, and wraps around from the latest segment to the oldest. So the
//! footer of a segment is read once for all of its evicted rows, and a row that had to stay is tried again a round
//! later.

use std::sync::Arc;

use crate::error::Result;
use crate::ssd::segment::file::Segment;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::walk::{CursorRecord, SegmentCursor};
use crate::ssd::work::by_entry::records_per_read;
use crate::ssd::work::copies::{EvictedRowCopies, EvictedRowsSink};
use crate::ssd::work::remove::remove_where;
use crate::ssd::work::walk::{enter_segment, entries_of, is_still_at, live_segments, segment_at};
use crate::sync::{Ordering, lock};
use crate::types::Id;

/// See [`SsdTier::evict`](crate::ssd::SsdTier::evict).
pub(crate) fn evict(
    tier: &Arc<TierInner>,
    rows: u64,
    keep: &dyn Fn(Id) -> bool,
    on_evicted: Option<&mut EvictedRowsSink<'_>>,
) -> Result<Vec<Id>> {
    let mut gone: Vec<Id> = Vec::new();
    let mut walk = std::mem::take(&mut *lock(&tier.eviction_cursor));
    let evicted = evict_into(tier, rows, keep, &mut walk, &mut gone, on_evicted);
    *lock(&tier.eviction_cursor) = walk;
    tier.counters.dropped_rows.fetch_add(gone.len() as u64, Ordering::Relaxed);
    // The caller must know the evicted rows. The next call, which evicts none, returns an error of writing.
    if gone.is_empty() { evicted.map(|()| gone) } else { Ok(gone) }
}

fn evict_into(
    tier: &Arc<TierInner>,
    rows: u64,
    keep: &dyn Fn(Id) -> bool,
    cursor: &mut SegmentCursor,
    removed: &mut Vec<Id>,
    mut on_evicted: Option<&mut EvictedRowsSink<'_>>,
) -> Result<()> {
    tier.check_writable()?;
    // A round that started in the middle of the segments skips some; the next round visits these.
    let (mut gone_before, mut in_vain) = (0, 0);
    while (removed.len() as u64) < rows {
        let Some(segment) = next_segment(tier, cursor)? else {
            in_vain = if removed.len() == gone_before { in_vain + 1 } else { 0 };
            if in_vain == 2 {
                break;
            }
            (cursor.serial, gone_before) = (0, removed.len());
            continue;
        };
        let mut leaving: Vec<CursorRecord> = Vec::new();
        let most = if on_evicted.is_some() { records_per_read(&segment) } else { usize::MAX };
        while leaving.len() < most.min(rows as usize - removed.len())
            && let Some(ahead) = cursor.remaining.pop()
        {
            if !keep(ahead.id) {
                leaving.push(ahead);
            }
        }
        let ids: Vec<Id> = leaving.iter().map(|ahead| ahead.id).collect();
        // Rows that are read together with an unreadable one stay for this round, because eviction must get past such a
        // row.
        let mut copies = on_evicted.as_ref().map(|_| EvictedRowCopies::read(tier, &segment, &leaving)).transpose()?;
        let place = (segment.slot, segment.serial);
        // A thread that waits for free space must not pin a file whose removal would free it.
        drop(segment);
        let left = |at: usize| {
            removed.push(ids[at]);
            if let Some(copies) = &mut copies {
                copies.mark_removed(at);
            }
        };
        let forgotten = remove_where(tier, &ids, |state, at| is_still_at(state, place, leaving[at]), left);
        if let (Some(copies), Some(tell)) = (copies, &mut on_evicted) {
            copies.deliver(tier.layout.vector_floats(), tell);
        }
        forgotten?;
    }
    Ok(())
}

/// Returns the current segment of an eviction, with remaining records; `None` at the end.
fn next_segment(tier: &TierInner, cursor: &mut SegmentCursor) -> Result<Option<Arc<Segment>>> {
    loop {
        if let Some(segment) = segment_at(tier, cursor) {
            return Ok(Some(segment));
        }
        cursor.remaining = Vec::new();
        let next = live_segments(&tier.view()).filter(|s| s.serial > cursor.serial).min_by_key(|s| s.serial).cloned();
        let Some(segment) = next else { return Ok(None) };
        let entries = entries_of(tier, &segment)?.entries;
        enter_segment(tier, cursor, &segment, &entries);
    }
}
