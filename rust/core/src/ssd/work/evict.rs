//! Rows that leave the table because it is full, oldest segments first.
//!
//! An eviction goes on where the last one stopped, and begins again at the oldest segment when it has come to the newest. So the footer of
//! a segment is read once for all rows that leave it, and a row that had to stay is asked for again a round later.

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
    // Whoever asked must know which rows are gone. An error of writing comes again with the next call, which drops none.
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
    // A round that began amid the segments leaves some out; the next one looks at these.
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
        // Rows beside one that cannot be read stay for this round, because a full table must not end at such a row.
        let mut copies = on_evicted.as_ref().map(|_| EvictedRowCopies::read(tier, &segment, &leaving)).transpose()?;
        let place = (segment.slot, segment.serial);
        // Whoever waits for room must not keep a file whose going is to make it.
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

/// The segment that an eviction is at, with records ahead; `None` when it has come to the end.
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
