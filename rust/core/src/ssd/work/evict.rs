//! Rows that leave the table because it is full, oldest segments first.
//!
//! An eviction goes on where the last one stopped, and begins again at the oldest segment when it has come to the newest. So the footer of
//! a segment is read once for all rows that leave it, and a row that had to stay is asked for again a round later.

use std::sync::Arc;

use crate::error::Result;
use crate::ssd::segment::file::Segment;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::walk::{Ahead, Walk};
use crate::ssd::work::by_entry::at_once;
use crate::ssd::work::copies::{Copies, Tell};
use crate::ssd::work::remove::forget;
use crate::ssd::work::walk::{enter, entries_of, is_still_at, live_segments, segment_at};
use crate::sync::{Ordering, lock};
use crate::types::Id;

/// See [`SsdTier::evict`](crate::ssd::SsdTier::evict).
pub(crate) fn evict(
    tier: &Arc<TierInner>,
    rows: u64,
    keep: &dyn Fn(Id) -> bool,
    tell: Option<&mut Tell<'_>>,
) -> Result<Vec<Id>> {
    let mut gone: Vec<Id> = Vec::new();
    let mut walk = std::mem::take(&mut *lock(&tier.eviction));
    let evicted = evict_into(tier, rows, keep, &mut walk, &mut gone, tell);
    *lock(&tier.eviction) = walk;
    tier.counters.dropped_rows.fetch_add(gone.len() as u64, Ordering::Relaxed);
    // Whoever asked must know which rows are gone. An error of writing comes again with the next call, which drops none.
    if gone.is_empty() { evicted.map(|()| gone) } else { Ok(gone) }
}

fn evict_into(
    tier: &Arc<TierInner>,
    rows: u64,
    keep: &dyn Fn(Id) -> bool,
    walk: &mut Walk,
    gone: &mut Vec<Id>,
    mut tell: Option<&mut Tell<'_>>,
) -> Result<()> {
    tier.check_writable()?;
    // A round that began amid the segments leaves some out; the next one looks at these.
    let (mut gone_before, mut in_vain) = (0, 0);
    while (gone.len() as u64) < rows {
        let Some(segment) = next_segment(tier, walk)? else {
            in_vain = if gone.len() == gone_before { in_vain + 1 } else { 0 };
            if in_vain == 2 {
                break;
            }
            (walk.serial, gone_before) = (0, gone.len());
            continue;
        };
        let mut leaving: Vec<Ahead> = Vec::new();
        let most = if tell.is_some() { at_once(&segment) } else { usize::MAX };
        while leaving.len() < most.min(rows as usize - gone.len())
            && let Some(ahead) = walk.ahead.pop()
        {
            if !keep(ahead.id) {
                leaving.push(ahead);
            }
        }
        let ids: Vec<Id> = leaving.iter().map(|ahead| ahead.id).collect();
        // Rows beside one that cannot be read stay for this round, because a full table must not end at such a row.
        let mut copies = tell.as_ref().map(|_| Copies::read(tier, &segment, &leaving)).transpose()?;
        let place = (segment.slot, segment.serial);
        // Whoever waits for room must not keep a file whose going is to make it.
        drop(segment);
        let left = |at: usize| {
            gone.push(ids[at]);
            if let Some(copies) = &mut copies {
                copies.left(at);
            }
        };
        let forgotten = forget(tier, &ids, |state, at| is_still_at(state, place, leaving[at]), left);
        if let (Some(copies), Some(tell)) = (copies, &mut tell) {
            copies.hand_over(tier.layout.vector_floats(), tell);
        }
        forgotten?;
    }
    Ok(())
}

/// The segment that an eviction is at, with records ahead; `None` when it has come to the end.
fn next_segment(tier: &TierInner, walk: &mut Walk) -> Result<Option<Arc<Segment>>> {
    loop {
        if let Some(segment) = segment_at(tier, walk) {
            return Ok(Some(segment));
        }
        walk.ahead = Vec::new();
        let next = live_segments(&tier.view()).filter(|s| s.serial > walk.serial).min_by_key(|s| s.serial).cloned();
        let Some(segment) = next else { return Ok(None) };
        let entries = entries_of(tier, &segment)?.entries;
        enter(tier, walk, &segment, &entries);
    }
}
