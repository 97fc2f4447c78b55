//! Rows that leave the table because it is full, oldest segments first.
//!
//! An eviction goes on where the last one stopped, and begins again at the oldest segment when it has come to the newest. So the footer of
//! a segment is read once for all rows that leave it, and a row that had to stay is asked for again a round later.

use std::sync::Arc;

use crate::error::Result;
use crate::ssd::format::segment::{Content, Entry};
use crate::ssd::segment::file::Segment;
use crate::ssd::segment::footers::read_entries;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::sweep::Sweep;
use crate::ssd::work::remove::forget;
use crate::sync::{Ordering, lock};
use crate::types::Id;

/// See [`SsdTier::evict`](crate::ssd::SsdTier::evict).
pub(crate) fn evict(tier: &Arc<TierInner>, rows: u64, keep: &dyn Fn(Id) -> bool) -> Result<Vec<Id>> {
    let mut gone: Vec<Id> = Vec::new();
    let mut sweep = std::mem::take(&mut *lock(&tier.sweep));
    let evicted = evict_into(tier, rows, keep, &mut sweep, &mut gone);
    *lock(&tier.sweep) = sweep;
    tier.counters.dropped_rows.fetch_add(gone.len() as u64, Ordering::Relaxed);
    // Whoever asked must know which rows are gone. The error comes again with the next call, which drops none.
    if gone.is_empty() { evicted.map(|()| gone) } else { Ok(gone) }
}

fn evict_into(
    tier: &Arc<TierInner>,
    rows: u64,
    keep: &dyn Fn(Id) -> bool,
    sweep: &mut Sweep,
    gone: &mut Vec<Id>,
) -> Result<()> {
    tier.check_writable()?;
    // A round that began amid the segments leaves some out; the next one looks at these.
    let (mut gone_before, mut in_vain) = (0, 0);
    while (gone.len() as u64) < rows {
        let Some(segment) = segment_to_sweep(tier, sweep)? else {
            in_vain = if gone.len() == gone_before { in_vain + 1 } else { 0 };
            if in_vain == 2 {
                break;
            }
            (sweep.serial, gone_before) = (0, gone.len());
            continue;
        };
        let mut leaving: Vec<(Id, u32)> = Vec::new();
        while leaving.len() < rows as usize - gone.len()
            && let Some((id, record)) = sweep.ahead.pop()
        {
            if !keep(id) {
                leaving.push((id, record));
            }
        }
        let ids: Vec<Id> = leaving.iter().map(|(id, _)| *id).collect();
        let (slot, serial) = (segment.slot, segment.serial);
        // Whoever waits for room must not keep a file whose going is to make it.
        drop(segment);
        forget(
            tier,
            &ids,
            |state, at| {
                let (id, record) = leaving[at];
                let here = state.segments().in_slot(slot).filter(|segment| segment.serial == serial);
                here.is_some_and(|segment| state.index().is_at(id, segment.location(record)))
            },
            gone,
        )?;
    }
    Ok(())
}

/// The segment that `sweep` is at, with records ahead; `None` when it has come to the end.
fn segment_to_sweep(tier: &TierInner, sweep: &mut Sweep) -> Result<Option<Arc<Segment>>> {
    loop {
        let (at, after) = (sweep.serial, !sweep.ahead.is_empty());
        let next = {
            let state = tier.view();
            let live = state.segments().iter().filter(|s| s.content == Content::Rows && s.live() > 0);
            live.filter(|s| s.serial > at || (after && s.serial == at)).min_by_key(|s| s.serial).cloned()
        };
        let Some(segment) = next else {
            sweep.ahead = Vec::new();
            return Ok(None);
        };
        if segment.serial != at {
            let mut entries = entries_of(tier, &segment)?;
            let state = tier.view();
            entries.retain(|entry| state.index().is_at(entry.id, segment.location(entry.record)));
            drop(state);
            sweep.serial = segment.serial;
            sweep.ahead = entries.iter().rev().map(|entry| (entry.id, entry.record)).collect();
        }
        if !sweep.ahead.is_empty() {
            return Ok(Some(segment));
        }
    }
}

/// The entries of a segment's records so far, in the order of writing.
fn entries_of(tier: &TierInner, segment: &Arc<Segment>) -> Result<Vec<Entry>> {
    loop {
        let generation = tier.home.space.generation();
        if let Some(open) = tier.view().open().of(segment) {
            return Ok(open.entries().to_vec());
        }
        if segment.sealed().is_some() {
            let mut entries = read_entries(&*tier.home.engine, segment)?;
            entries.sort_unstable_by_key(|entry| entry.record);
            return Ok(entries);
        }
        tier.check_writable()?;
        // Its footer is on the way to disk.
        tier.home.space.wait_change(generation);
    }
}
