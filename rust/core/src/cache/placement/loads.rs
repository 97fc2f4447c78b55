//! Reads of rows from SSD into host slots, and their completion.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::Placement;
use crate::error::{Error, Kind, Result};
use crate::kernels::thread_pool::parallel_pipeline;
use crate::rows::RowMut;
use crate::runtime::sync::{Mutex, lock};
use crate::slots::RowState;
use crate::ssd::{FetchBatch, RowFetch};
use crate::types::{CacheSlot, Id};

/// Number of rows that one thread initializes at a time.
const NEW_ROWS_AT_ONCE: usize = 512;

/// Reads into host slots that were submitted together. The slots are LOADING until [`Placement::finish_load`] finishes
/// them under the table's lock.
pub(crate) struct HostLoad {
    fetch: Arc<RowFetch>,
    /// The ids and the slots that they are read into, in the order of the fetch.
    rows: Vec<(Id, CacheSlot)>,
    finished: Mutex<Option<Result<()>>>,
}

impl HostLoad {
    /// Waits for the reads, without a lock. [`Placement::finish_load`] returns their result.
    pub(crate) fn wait(&self) {
        let _ = self.fetch.wait();
    }

    pub(crate) fn is_done(&self) -> bool {
        self.fetch.is_done()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = Id> + '_ {
        self.rows.iter().map(|&(id, _)| id)
    }

    /// The result, once the load is finished.
    fn outcome(&self) -> Option<Result<()>> {
        lock(&self.finished).clone()
    }
}

impl Placement {
    /// Adds reads of rows into host slots to `batch`. The slots are inserted, pinned and LOADING.
    pub(crate) fn start_load(&mut self, rows: Vec<(Id, CacheSlot)>, batch: &mut FetchBatch) -> Arc<HostLoad> {
        let ssd = self.context.ssd.as_ref().expect("rows are read from SSD only where there is one");
        let arena = Arc::clone(self.host.arena());
        let wanted: Vec<(Id, RowMut)> = rows
            .iter()
            // SAFETY: the slot was taken, so it is valid in the arena, which the fetch keeps. It is LOADING, so no
            // other thread reads or writes its row until the load is finished.
            .map(|&(id, slot)| (id, unsafe { RowMut::new(arena.row(slot)) }))
            .collect();
        let fetch = ssd.fetch_in(wanted, Some(arena), batch);
        self.changes.moved.record(rows.iter().map(|&(id, _)| id));
        let loading = Arc::new(HostLoad { fetch, rows, finished: Mutex::new(None) });
        self.loads.push(Arc::clone(&loading));
        loading
    }

    /// Finishes a load: waits for its reads and updates its slots. The error is that of the reads; every plan that
    /// waits for the load receives it.
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
            // The pins of current rows are not queried, because that would count the pins of all groups.
            if !self.host.slots.state(slot).is_current() && !self.host.slots.is_pinned(slot) {
                self.forget_provisional(slot, id);
            }
        }
        *lock(&loading.finished) = Some(outcome.clone());
        outcome
    }

    /// Updates the slots of successful reads. `absent` are positions, ascending, of rows that turned out to be missing.
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
                // The SSD index stores no ids, and returned a record of another id. So this row was never trained.
                self.initialize_in_host(&[(id, slot)]);
                self.host.slots.set_state(slot, RowState::OCCUPIED.with(RowState::PROVISIONAL));
                self.counts.became_provisional(1);
            }
        }
    }

    /// Finishes every load whose reads are done, without waiting. Errors go to the plans that wait for the loads.
    pub(crate) fn finish_ready_loads(&mut self) {
        for loading in self.loads.clone() {
            if loading.is_done() {
                let _ = self.finish_load(&loading);
            }
        }
    }

    /// Waits for every load and finishes it, including failed ones. Afterwards no read writes to a slot. Errors go only
    /// to the plans that wait for the loads.
    pub(crate) fn finish_loads(&mut self) {
        for loading in self.loads.clone() {
            let _ = self.finish_load(&loading);
        }
    }

    /// The error for a row whose read failed for an earlier plan.
    pub(crate) fn unread_row_error(&self, id: Id) -> Error {
        Kind::Storage.error(format!(
            "table {:?}: the row of id {id} could not be read from SSD by an earlier batch that is still in flight; \
                 release that batch to try again",
            self.context.config.name
        ))
    }

    /// Removes an unpinned host row that is provisional or whose read failed. Keeps other rows and rows being read.
    pub(crate) fn forget_provisional(&mut self, slot: CacheSlot, id: Id) {
        let row = self.host.slots.state(slot);
        if row.has(RowState::PROVISIONAL.with(RowState::FAILED)) && !row.has(RowState::LOADING) {
            if row.has(RowState::PROVISIONAL) {
                self.counts.vanished(1);
            }
            self.host.slots.remove(slot, id, false);
            self.host.shrink_overflow();
        }
    }

    /// Runs `admit`, which passes on ids with host slots that it has taken and pinned for about `rows` new rows. Up to
    /// `threads` threads, including this one after `admit`, write their initial values. All are written when this
    /// returns.
    pub(crate) fn initialize_in_parallel<R>(
        &mut self,
        threads: usize,
        rows: u64,
        admit: impl FnOnce(&mut Self, &mut dyn FnMut(&[(Id, CacheSlot)])) -> R,
    ) -> R {
        let (base, arena) = (Arc::clone(&self.context), Arc::clone(self.host.arena()));
        let cost = rows * base.floats() as u64;
        // SAFETY: the slots were taken, so they are valid in the arena, and each belongs to one id. Until all are
        // initialized no plan that has them is active, so no kernel uses them. Any other access to a row needs the
        // table's lock, which the caller has, and `admit` accesses only unpinned rows.
        let initialize = |new_rows: Vec<(Id, CacheSlot)>| unsafe {
            base.initialize_rows(new_rows.len(), |row| (new_rows[row].0, arena.row(new_rows[row].1)), 1);
        };
        parallel_pipeline(threads, cost, initialize, |give| {
            admit(self, &mut |new_rows| new_rows.chunks(NEW_ROWS_AT_ONCE).for_each(|some| give(some.to_vec())))
        })
    }

    /// Writes the initial values of ids into their host slots, which no active plan uses.
    pub(crate) fn initialize_in_host(&self, new_rows: &[(Id, CacheSlot)]) {
        let arena = self.host.arena();
        // SAFETY: the slots were taken, so they are valid in the arena, and each belongs to one id. No kernel uses
        // them, because no plan that has them is active yet, and any other access to a row needs the table's lock,
        // which the caller has.
        unsafe { self.context.initialize_rows(new_rows.len(), |row| (new_rows[row].0, arena.row(new_rows[row].1)), 1) };
    }
}
