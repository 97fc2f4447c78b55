//! Replacement policies. A policy orders the slots of a tier for eviction; it sees ids and slots, never bytes.

mod ghost;
mod lfu;
mod list;
mod lru;
mod s3fifo;

use std::collections::TryReserveError;

use crate::config::PolicyKind;
use crate::types::{CacheSlot, Id};

/// Which rows leave a tier first. Called under the tier's lock.
///
/// 1. `inserted` when a row takes a slot
/// 2. `accessed` for each later plan that uses it
/// 3. `victim` proposes a slot for eviction
/// 4. `removed` when the row has left, by eviction (`evicted = true`) or otherwise
pub trait Policy: Send + std::fmt::Debug {
    /// A row took `slot`.
    fn inserted(&mut self, slot: CacheSlot, id: Id);
    /// Start loading what `inserted` will look at for `id`.
    fn prefetch_insert(&self, _id: Id) {}
    /// A plan used the rows in `slots` (each at most once a call).
    fn accessed(&mut self, slots: &[CacheSlot]);
    /// The slot to evict next among those for which `evictable` says true, `None` if there is none. The slot stays known until
    /// `removed`, and is proposed again until then. Slots found in use are passed over for a few calls, so that a slot that has just
    /// become evictable may be proposed later than its turn. Over many calls each asks `evictable` a few times, whatever share of
    /// the slots is in use; a call that returns `None` has asked for all.
    fn victim(&mut self, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Option<CacheSlot>;
    /// Make sure that rows in slots below `slots` take no more memory.
    fn reserve(&mut self, slots: usize) -> Result<(), TryReserveError>;
    /// The row in `slot` left.
    fn removed(&mut self, slot: CacheSlot, id: Id, evicted: bool);
    /// Bytes of RAM a slot costs this policy, for the budget.
    fn bytes_per_slot(&self) -> usize;
}

/// Parked slots that each `victim` looks at again. A slot that is in use when its turn comes is parked: put aside, so that the
/// next `victim` does not meet it again. So every call pays for a few parked slots and for those it parks itself.
const RECHECKED: u32 = 2;

/// How many slots ahead `accessed` asks for what it knows of them.
const AHEAD: usize = 16;

/// The policy of `kind` for a tier of `capacity` slots (overflow slots past it may appear).
pub fn new_policy(kind: PolicyKind, capacity: u32) -> Box<dyn Policy> {
    match kind {
        PolicyKind::Lru => Box::new(lru::Lru::new(capacity)),
        PolicyKind::Lfu => Box::new(lfu::Lfu::new(capacity)),
        PolicyKind::S3Fifo => Box::new(s3fifo::S3Fifo::new(capacity)),
    }
}

#[cfg(test)]
mod tests;
