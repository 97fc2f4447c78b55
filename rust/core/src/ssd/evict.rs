//! Rows leave the table, oldest segments first.
//!
//! Who evicts goes on where the last call stopped, and begins again at the oldest segment when it has come to the newest. So the footer of a
//! segment is read once for all rows that leave it, and rows that had to stay are asked for again a round later.

use std::sync::Arc;

use super::footers::read_entries;
use super::format::{Content, Entry};
use super::segment::Segment;
use super::shared::{Counters, Shared};
use crate::error::Result;
use crate::sync::{Ordering, lock};
use crate::types::Id;

/// Where the last eviction stopped.
#[derive(Debug, Default)]
pub(super) struct Sweep {
    /// Serial of the segment.
    serial: u64,
    /// Ids and numbers of those of its records that were live and are to be looked at, the next one last.
    ahead: Vec<(Id, u32)>,
}

impl Shared {
    pub(super) fn evict(self: &Arc<Self>, rows: u64, keep: &dyn Fn(Id) -> bool) -> Result<Vec<Id>> {
        let mut gone: Vec<Id> = Vec::new();
        let mut sweep = std::mem::take(&mut *lock(&self.sweep));
        let evicted = self.evict_into(rows, keep, &mut sweep, &mut gone);
        *lock(&self.sweep) = sweep;
        Counters::add(&self.counters.dropped_rows, gone.len() as u64);
        // Who asked must know which rows are gone; the error comes again with the next call, which drops none.
        if gone.is_empty() { evicted.map(|()| gone) } else { Ok(gone) }
    }

    fn evict_into(
        self: &Arc<Self>,
        rows: u64,
        keep: &dyn Fn(Id) -> bool,
        sweep: &mut Sweep,
        gone: &mut Vec<Id>,
    ) -> Result<()> {
        self.check_writable()?;
        // Where a round began amid the segments, the next one looks at those that it left out.
        let (mut gone_before, mut in_vain) = (0, 0);
        while (gone.len() as u64) < rows {
            let Some(segment) = self.segment_to_sweep(sweep)? else {
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
            // Whoever waits for room must not keep a file that is to make it.
            drop(segment);
            self.forget(
                &ids,
                |state, at| {
                    let (id, record) = leaving[at];
                    let here = state.segments[slot as usize].as_ref().filter(|segment| segment.serial == serial);
                    here.is_some_and(|segment| state.index.is_at(id, segment.location(record)))
                },
                gone,
            )?;
        }
        Ok(())
    }

    /// The segment that `sweep` is at, with records ahead; `None` when it has come to the end.
    fn segment_to_sweep(&self, sweep: &mut Sweep) -> Result<Option<Arc<Segment>>> {
        loop {
            let (at, after) = (sweep.serial, !sweep.ahead.is_empty());
            let next = {
                let state = self.view();
                let rows = state.current().filter(|segment| segment.content == Content::Rows);
                let live = rows.filter(|segment| segment.live.load(Ordering::Relaxed) > 0);
                live.filter(|s| s.serial > at || (after && s.serial == at)).min_by_key(|s| s.serial).cloned()
            };
            let Some(segment) = next else {
                sweep.ahead = Vec::new();
                return Ok(None);
            };
            if segment.serial != at {
                let mut entries = self.entries_of(&segment)?;
                let state = self.view();
                entries.retain(|entry| state.index.is_at(entry.id, segment.location(entry.record)));
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
    fn entries_of(&self, segment: &Arc<Segment>) -> Result<Vec<Entry>> {
        loop {
            let generation = self.home.space.generation();
            {
                let state = self.view();
                if let Some(open) = state.open.iter().flatten().find(|open| Arc::ptr_eq(&open.segment, segment)) {
                    return Ok(open.entries.clone());
                }
            }
            if segment.sealed().is_some() {
                let mut entries = read_entries(&*self.home.engine, segment)?;
                entries.sort_unstable_by_key(|entry| entry.record);
                return Ok(entries);
            }
            self.check_writable()?;
            // Its footer is on the way to disk.
            self.home.space.wait_change(generation);
        }
    }
}
