//! Rows being read from SSD into host slots, and what becomes of them.

use std::sync::Arc;

use super::table::{Shared, State};
use crate::error::{Error, Kind, Result};
use crate::rows::RowMut;
use crate::slots::RowState;
use crate::ssd::{Fetch, FetchBatch};
use crate::sync::{Mutex, lock};
use crate::types::{CacheSlot, Id};

/// One batch of reads into host slots. The slots are LOADING until it is finished under the table's lock.
pub(crate) struct Loading {
    pub(crate) fetch: Arc<Fetch>,
    /// The reads' targets, in request order.
    pub(crate) rows: Vec<(Id, CacheSlot)>,
    finished: Mutex<Option<Result<()>>>,
}

impl Loading {
    /// How it ended, once the table has taken notice.
    fn outcome(&self) -> Option<Result<()>> {
        lock(&self.finished).clone()
    }
}

impl Shared {
    #[allow(unsafe_code)]
    /// Read rows into host slots that are inserted, pinned and LOADING, once `batch` is submitted.
    pub(crate) fn start_load(
        &self,
        state: &mut State,
        rows: Vec<(Id, CacheSlot)>,
        batch: &mut FetchBatch,
    ) -> Arc<Loading> {
        let ssd = self.ssd.as_ref().expect("rows are read from SSD only where there is one");
        let arena = Arc::clone(state.host.arena());
        let wanted: Vec<(Id, RowMut)> = rows
            .iter()
            .map(|&(id, slot)| {
                // SAFETY: the slot is LOADING, so nobody reads or writes its row until the load is finished, and the fetch keeps the
                // arena.
                (id, unsafe { RowMut::new(arena.row(slot)) })
            })
            .collect();
        let fetch = ssd.fetch_in(wanted, arena, batch);
        let loading = Arc::new(Loading { fetch, rows, finished: Mutex::new(None) });
        state.loading.push(Arc::clone(&loading));
        loading
    }

    /// Take notice of a load whose fetch is done (waits for it if it is not). The error is the fetch's.
    pub(crate) fn finish_load(&self, state: &mut State, loading: &Arc<Loading>) -> Result<()> {
        if let Some(outcome) = loading.outcome() {
            return outcome;
        }
        let result = loading.fetch.wait();
        state.loading.retain(|other| !Arc::ptr_eq(other, loading));
        let outcome = match result {
            Ok(absent) => {
                let mut absent = absent.into_iter().peekable();
                for (position, &(id, slot)) in loading.rows.iter().enumerate() {
                    state.host.slots.unmark(slot, RowState::LOADING);
                    if absent.next_if_eq(&(position as u32)).is_some() {
                        // The tag index named another id's record: this one was never trained.
                        self.bear(state, &[(id, slot)], 1);
                        state.host.slots.set_state(slot, RowState::OCCUPIED.with(RowState::PROVISIONAL));
                        state.provisional += 1;
                        state.absent_reads += 1;
                        state.ssd_hits -= 1;
                        state.ssd_misses += 1;
                    } else {
                        state.host_stats.written_bytes += self.layout.stride_bytes() as u64;
                    }
                }
                Ok(())
            }
            Err(error) => {
                for &(_, slot) in &loading.rows {
                    state.host.slots.set_state(slot, RowState::OCCUPIED.with(RowState::FAILED));
                }
                Err(error)
            }
        };
        for &(id, slot) in &loading.rows {
            if !state.host.slots.is_pinned(slot) {
                state.drop_unborn(slot, id);
            }
        }
        *lock(&loading.finished) = Some(outcome.clone());
        outcome
    }

    /// Take notice of every load whose reads are done, without waiting. Errors belong to the plans that asked.
    pub(crate) fn sweep_loads(&self, state: &mut State) {
        for loading in state.loading.clone() {
            if loading.fetch.is_done() {
                let _ = self.finish_load(state, &loading);
            }
        }
    }

    /// Wait for every load and take notice of it, those that failed too: after that no fetch writes into any slot. Errors belong to the
    /// plans that asked, so that nobody else fails for them.
    pub(crate) fn finish_loads(&self, state: &mut State) {
        for loading in state.loading.clone() {
            let _ = self.finish_load(state, &loading);
        }
    }

    /// The error of a plan that wants a row whose read failed for an earlier plan.
    pub(crate) fn unread_row(&self, id: Id) -> Error {
        Error::new(
            Kind::Storage,
            format!(
                "table {:?}: the row of id {id} could not be read from SSD by an earlier batch that is still in flight; \
                 release that batch to try again",
                self.config.name
            ),
        )
    }
}

impl State {
    /// Forget an unpinned host row that is provisional or whose read failed.
    pub(crate) fn drop_unborn(&mut self, slot: CacheSlot, id: Id) {
        let row = self.host.slots.state(slot);
        if row.has(RowState::PROVISIONAL.with(RowState::FAILED)) && !row.has(RowState::LOADING) {
            if row.has(RowState::PROVISIONAL) {
                self.provisional -= 1;
            }
            self.host.slots.remove(slot, id, false);
            self.host.shrink_overflow();
        }
    }
}
