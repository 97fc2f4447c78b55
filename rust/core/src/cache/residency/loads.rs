//! Rows that are being read from SSD into host slots, and what becomes of them.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::Residency;
use crate::error::{Error, Kind, Result};
use crate::kernels::threads::parallel_pipeline;
use crate::rows::RowMut;
use crate::slots::RowState;
use crate::ssd::{FetchBatch, RowFetch};
use crate::sync::{Mutex, lock};
use crate::types::{CacheSlot, Id};

/// Rows that one thread bears at a time.
const NEW_ROWS_AT_ONCE: usize = 512;

/// Some reads into host slots, submitted together. The slots are LOADING until the residency has finished them under the table's lock.
pub(crate) struct HostLoad {
    fetch: Arc<RowFetch>,
    /// The ids and the slots that they are read into, in the order of the fetch.
    rows: Vec<(Id, CacheSlot)>,
    finished: Mutex<Option<Result<()>>>,
}

impl HostLoad {
    /// Wait for the reads. This needs no lock. How they ended, [`Residency::finish_load`] says.
    pub(crate) fn wait(&self) {
        let _ = self.fetch.wait();
    }

    pub(crate) fn is_done(&self) -> bool {
        self.fetch.is_done()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = Id> + '_ {
        self.rows.iter().map(|&(id, _)| id)
    }

    /// How it ended, once the residency has finished it.
    fn outcome(&self) -> Option<Result<()>> {
        lock(&self.finished).clone()
    }
}

impl Residency {
    /// Read rows into host slots, once `batch` is submitted. The slots are inserted, pinned and LOADING.
    pub(super) fn start_load(&mut self, rows: Vec<(Id, CacheSlot)>, batch: &mut FetchBatch) -> Arc<HostLoad> {
        let ssd = self.context.ssd.as_ref().expect("rows are read from SSD only where there is one");
        let arena = Arc::clone(self.host.arena());
        let wanted: Vec<(Id, RowMut)> = rows
            .iter()
            // SAFETY: the slot was taken, so it is valid in the arena, which the fetch keeps. It is LOADING, so nobody else reads or
            // writes its row until the load is finished.
            .map(|&(id, slot)| (id, unsafe { RowMut::new(arena.row(slot)) }))
            .collect();
        let fetch = ssd.fetch_in(wanted, arena, batch);
        self.record_moved(rows.iter().map(|&(id, _)| id));
        let loading = Arc::new(HostLoad { fetch, rows, finished: Mutex::new(None) });
        self.loads.push(Arc::clone(&loading));
        loading
    }

    /// Settle the slots of a load. It is waited for if it is not done. The error is that of the reads; every plan that waits for the load
    /// gets it.
    pub(crate) fn finish_load(&mut self, loading: &Arc<HostLoad>) -> Result<()> {
        if let Some(outcome) = loading.outcome() {
            return outcome;
        }
        let result = loading.fetch.wait();
        self.loads.retain(|other| !Arc::ptr_eq(other, loading));
        let outcome = match result {
            Ok(absent) => {
                self.rows_were_read(&loading.rows, absent);
                Ok(())
            }
            Err(error) => {
                for &(_, slot) in &loading.rows {
                    self.host.slots.set_state(slot, RowState::OCCUPIED.with(RowState::FAILED));
                }
                Err(error)
            }
        };
        for &(id, slot) in &loading.rows {
            // The pins of rows that are there are not asked for, which would have those of all groups counted.
            if !self.host.slots.state(slot).is_current() && !self.host.slots.is_pinned(slot) {
                self.forget_provisional(slot, id);
            }
        }
        *lock(&loading.finished) = Some(outcome.clone());
        outcome
    }

    /// Settle the slots of reads that succeeded. `absent` are positions, rising, of rows that turned out not to be there.
    fn rows_were_read(&mut self, rows: &[(Id, CacheSlot)], absent: Vec<u32>) {
        let missing = absent.len() as u64;
        let found = rows.len() as u64 - missing;
        self.traffic.ssd_hits += found;
        self.traffic.ssd_misses += missing;
        self.traffic.host.written_bytes += found * self.context.layout.stride_bytes() as u64;
        self.absent_reads += missing;
        let mut absent = absent.into_iter().peekable();
        for (position, &(id, slot)) in rows.iter().enumerate() {
            self.host.slots.unmark(slot, RowState::LOADING);
            if absent.next_if_eq(&(position as u32)).is_some() {
                // The SSD index keeps no ids, and took another id's record for this one's. So this one was never trained.
                self.initialize_in_host(&[(id, slot)]);
                self.host.slots.set_state(slot, RowState::OCCUPIED.with(RowState::PROVISIONAL));
                self.counts.became_provisional(1);
            }
        }
    }

    /// Finish every load whose reads are done, without waiting. Their errors belong to the plans that wait for them.
    pub(super) fn finish_ready_loads(&mut self) {
        for loading in self.loads.clone() {
            if loading.is_done() {
                let _ = self.finish_load(&loading);
            }
        }
    }

    /// Wait for every load and finish it, also those that fail. After that no read writes into any slot. Their errors belong to the plans
    /// that wait for them, so that nobody else fails for them.
    pub(crate) fn finish_loads(&mut self) {
        for loading in self.loads.clone() {
            let _ = self.finish_load(&loading);
        }
    }

    /// The error of somebody who wants a row whose read failed for an earlier plan.
    pub(super) fn unread_row_error(&self, id: Id) -> Error {
        Error::new(
            Kind::Storage,
            format!(
                "table {:?}: the row of id {id} could not be read from SSD by an earlier batch that is still in flight; \
                 release that batch to try again",
                self.context.config.name
            ),
        )
    }

    /// Forget a host row without pins that is provisional, or whose read failed. Other rows, and rows being read, stay.
    pub(super) fn forget_provisional(&mut self, slot: CacheSlot, id: Id) {
        let row = self.host.slots.state(slot);
        if row.has(RowState::PROVISIONAL.with(RowState::FAILED)) && !row.has(RowState::LOADING) {
            if row.has(RowState::PROVISIONAL) {
                self.counts.vanished(1);
            }
            self.host.slots.remove(slot, id, false);
            self.host.shrink_overflow();
        }
    }

    /// Do `admit`, which hands over ids with host slots that it has taken and pinned for their births, of about so many rows. `threads` threads,
    /// of which this is one once `admit` is over, write their initial values. All are there when this returns.
    pub(super) fn initialize_in_parallel<R>(
        &mut self,
        threads: usize,
        rows: u64,
        admit: impl FnOnce(&mut Self, &mut dyn FnMut(&[(Id, CacheSlot)])) -> R,
    ) -> R {
        let (base, arena) = (Arc::clone(&self.context), Arc::clone(self.host.arena()));
        let cost = rows * base.floats() as u64;
        // SAFETY: the slots were taken, so they are valid in the arena, and each is one id's. Until all are born no plan that has them is in
        // place, so no kernel uses them. Whoever else wants a row needs the table's lock, which the caller has, and `admit` looks only at rows
        // that are not pinned.
        let bear = |born: Vec<(Id, CacheSlot)>| unsafe {
            base.initialize_rows(born.len(), |row| (born[row].0, arena.row(born[row].1)), 1);
        };
        parallel_pipeline(threads, cost, bear, |give| {
            admit(self, &mut |born| born.chunks(NEW_ROWS_AT_ONCE).for_each(|some| give(some.to_vec())))
        })
    }

    /// Write the initial values of ids into their host slots, which no plan that is in place has.
    pub(super) fn initialize_in_host(&self, new_rows: &[(Id, CacheSlot)]) {
        let arena = self.host.arena();
        // SAFETY: the slots were taken, so they are valid in the arena, and each is one id's. No kernel uses them, since no plan that has
        // them is in place yet, and whoever else wants a row needs the table's lock, which the caller has.
        unsafe { self.context.initialize_rows(new_rows.len(), |row| (new_rows[row].0, arena.row(new_rows[row].1)), 1) };
    }
}
