//! Replacement policies. A policy orders the slots of a tier for eviction. It knows ids and slots, but not the contents
//! of rows.

mod lfu;
mod linked_list;
mod lru;
mod s3fifo;

use std::collections::TryReserveError;

use crate::config::PolicyKind;
use crate::types::{CacheSlot, Id};

/// Decides which rows leave a tier first. All calls are made under the tier's lock:
///
/// 1. `inserted` when a row takes a slot,
/// 2. `accessed` for each later plan that uses the row,
/// 3. `victim` to propose a slot for eviction,
/// 4. `removed` when the row has left, by eviction (`evicted = true`) or otherwise.
///
/// A row that moves to another slot is reported as `removed` (not evicted) and `inserted`. A victim that is kept,
/// because it could not be written to SSD, is reported as evicted and inserted. Both lose their position in the order.
/// A device and a host tier have one policy each, so a row that changes the tier is inserted as a new row.
pub trait ReplacementPolicy: Send + std::fmt::Debug {
    /// Records that a row took `slot`.
    fn inserted(&mut self, slot: CacheSlot, id: Id);
    /// Prefetches the data that `inserted` will read for `id` into the CPU cache.
    fn prefetch_insert(&self, _id: Id) {}
    /// Records that rows took `slots`: like `inserted` for each, in order. `slots` and `ids` are `[n]`.
    fn all_inserted(&mut self, slots: &[CacheSlot], ids: &[Id]) {
        for (at, (&slot, &id)) in slots.iter().zip(ids).enumerate() {
            if let Some(&later) = ids.get(at + AHEAD) {
                self.prefetch_insert(later);
            }
            self.inserted(slot, id);
        }
    }
    /// Records that a plan used the rows in `slots`, each at most once per call.
    fn accessed(&mut self, slots: &[CacheSlot]);
    /// Returns the slot to evict next among those for which `evictable` returns true; `None` if there is none. Until
    /// `removed` is called the slot may be proposed again.
    ///
    /// Slots in use at the end of the order are skipped for a few calls, so a slot that has just become evictable may
    /// be proposed late. On average over many calls, `evictable` is called a few times per call, for any fraction of
    /// slots in use. A call that returns `None` has called it for all slots.
    fn victim(&mut self, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Option<CacheSlot>;
    /// Returns the slots to evict next, up to `requested`: like `victim`, each followed by `removed`. Follow with
    /// `remember`.
    fn victims(&mut self, requested: usize, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Vec<PolicyVictim> {
        let mut victims = Vec::with_capacity(requested);
        while victims.len() < requested
            && let Some(slot) = self.victim(evictable)
        {
            self.all_removed(&[slot]);
            victims.push(PolicyVictim { slot, departures: 0 });
        }
        victims
    }
    /// Remembers the ids of rows that left. `victims` is a result of `victims`; both are `[n]`.
    fn remember(&mut self, _victims: &[PolicyVictim], _ids: &[Id]) {}
    /// Reserves memory, so that rows in slots below `slots` need no more.
    fn reserve(&mut self, slots: usize) -> Result<(), TryReserveError>;
    /// Records that the row in `slot` left.
    fn removed(&mut self, slot: CacheSlot, id: Id, evicted: bool);
    /// Records that the rows in `slots` left, none of them by eviction: like `removed` for each.
    fn all_removed(&mut self, slots: &[CacheSlot]);
    /// Bytes of RAM per slot that this policy uses, for the table's budget.
    fn bytes_per_slot(&self) -> usize;
    /// Returns a copy with the same state of every slot.
    fn boxed_clone(&self) -> Box<dyn ReplacementPolicy>;
}

/// A slot whose row a policy has chosen to evict, and forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyVictim {
    /// The slot.
    pub slot: CacheSlot,
    /// Number of departures for which the policy remembers the row's id.
    departures: u32,
}

/// The number of parked slots that each `victim` checks again. A slot that is in use at the end of the order is
/// *parked*, so that the next `victim` does not visit it again. So a call costs the check of a few parked slots, and of
/// those that it parks itself.
const RECHECKED: u32 = 2;

/// Distance, in slots, at which passes over many slots prefetch.
const AHEAD: usize = 16;

/// Creates the policy of `kind` for a tier of `capacity` slots. Overflow slots beyond the capacity may be used too.
pub fn new_policy(kind: PolicyKind, capacity: u32) -> Box<dyn ReplacementPolicy> {
    match kind {
        PolicyKind::Lru => Box::new(lru::LruPolicy::new(capacity)),
        PolicyKind::Lfu => Box::new(lfu::LfuPolicy::new(capacity)),
        PolicyKind::S3Fifo => Box::new(s3fifo::S3FifoPolicy::new(capacity)),
    }
}

#[cfg(test)]
mod tests;
