//! Replacement policies. A policy puts the slots of a tier in an order for eviction. It knows ids and slots, and no bytes of rows.

mod ghost;
mod lfu;
mod list;
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
/// A row that moves to another slot is told as `removed` (not evicted) and `inserted`. So is a victim that stays after all, because it
/// could not be written to SSD, as evicted and inserted. Both lose their place in the order. A device and a host tier have a policy each,
/// so a row that changes the tier comes anew.
pub trait ReplacementPolicy: Send + std::fmt::Debug {
    /// A row took `slot`.
    fn inserted(&mut self, slot: CacheSlot, id: Id);
    /// Start to load what `inserted` will look at for `id` into the processor's cache.
    fn prefetch_insert(&self, _id: Id) {}
    /// Rows took `slots`: as `inserted` for each, in their order. `slots` and `ids` are `[n]`.
    fn all_inserted(&mut self, slots: &[CacheSlot], ids: &[Id]) {
        for (at, (&slot, &id)) in slots.iter().zip(ids).enumerate() {
            if let Some(&later) = ids.get(at + AHEAD) {
                self.prefetch_insert(later);
            }
            self.inserted(slot, id);
        }
    }
    /// A plan used the rows in `slots`, each at most once a call.
    fn accessed(&mut self, slots: &[CacheSlot]);
    /// The slot to evict next among those for which `evictable` returns true; `None` if there is none. Until `removed` is called
    /// the slot may be proposed again.
    ///
    /// Slots that are in use when their turn comes are passed over for a few calls, so a slot that has just become evictable may be
    /// proposed later than its turn. On average over many calls, `evictable` is asked a few times a call, whatever share of the
    /// slots is in use. A call that returns `None` has asked for all slots.
    fn victim(&mut self, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Option<CacheSlot>;
    /// The slots to evict next, `requested` of them or as many as there are: as `victim`, each followed by `removed`. Follow with `remember`.
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
    /// Remember the ids of rows that left. `victims`, as `victims` gave them, and `ids` are `[n]`.
    fn remember(&mut self, _victims: &[PolicyVictim], _ids: &[Id]) {}
    /// Reserve memory, so that rows in slots below `slots` need no more.
    fn reserve(&mut self, slots: usize) -> Result<(), TryReserveError>;
    /// The row in `slot` left.
    fn removed(&mut self, slot: CacheSlot, id: Id, evicted: bool);
    /// The rows in `slots` left, none of them by eviction: as `removed` for each.
    fn all_removed(&mut self, slots: &[CacheSlot]);
    /// Bytes of RAM that this policy takes for each slot, for the table's budget.
    fn bytes_per_slot(&self) -> usize;
    /// A copy, which knows the same of every slot.
    fn boxed_clone(&self) -> Box<dyn ReplacementPolicy>;
}

/// A slot whose row a policy has chosen to leave, and forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyVictim {
    /// The slot.
    pub slot: CacheSlot,
    /// The policy remembers the row's id for so many departures.
    departures: u32,
}

/// The number of parked slots that each `victim` looks at again. A slot that is in use when its turn comes is *parked*: it is put
/// aside, so that the next `victim` does not meet it again. So a call costs a look at a few parked slots, and at those that it
/// parks itself.
const RECHECKED: u32 = 2;

/// What goes over many slots prefetches what it looks at this many slots before its turn.
const AHEAD: usize = 16;

/// The policy of `kind` for a tier of `capacity` slots. Overflow slots past the capacity may be used too.
pub fn new_policy(kind: PolicyKind, capacity: u32) -> Box<dyn ReplacementPolicy> {
    match kind {
        PolicyKind::Lru => Box::new(lru::LruPolicy::new(capacity)),
        PolicyKind::Lfu => Box::new(lfu::LfuPolicy::new(capacity)),
        PolicyKind::S3Fifo => Box::new(s3fifo::S3FifoPolicy::new(capacity)),
    }
}

#[cfg(test)]
mod tests;
