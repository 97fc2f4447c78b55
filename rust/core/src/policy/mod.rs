//! Replacement policies. A policy orders the slots of a tier for eviction; it sees ids and slots, never bytes.

use crate::config::PolicyKind;
use crate::types::{CacheSlot, Id};

/// Which rows leave a tier first. Called under the tier's lock.
///
/// 1. `inserted` when a row takes a slot; 2. `accessed` for each later plan that uses it; 3. `victim` proposes slots until one is
/// evictable; 4. `removed` when the row has left, by eviction (`evicted = true`) or otherwise.
pub trait Policy: Send + std::fmt::Debug {
    /// A row took `slot`.
    fn inserted(&mut self, slot: CacheSlot, id: Id);
    /// A plan used the rows in `slots` (each at most once a call).
    fn accessed(&mut self, slots: &[CacheSlot]);
    /// The slot to evict next among those for which `evictable` says true, `None` if there is none. The slot stays known until
    /// `removed`. Asks `evictable` at most a small multiple of the resident slots.
    fn victim(&mut self, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Option<CacheSlot>;
    /// The row in `slot` left.
    fn removed(&mut self, slot: CacheSlot, id: Id, evicted: bool);
    /// Bytes of RAM a slot costs this policy, for the budget.
    fn bytes_per_slot(&self) -> usize;
}

/// First in, first out: a stand-in until the real policies land.
#[derive(Debug, Default)]
struct Fifo {
    queue: std::collections::VecDeque<CacheSlot>,
}

impl Policy for Fifo {
    fn inserted(&mut self, slot: CacheSlot, _id: Id) {
        self.queue.push_back(slot);
    }
    fn accessed(&mut self, _slots: &[CacheSlot]) {}
    fn victim(&mut self, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Option<CacheSlot> {
        for _ in 0..self.queue.len() {
            let slot = self.queue.pop_front()?;
            self.queue.push_back(slot);
            if evictable(slot) {
                return Some(slot);
            }
        }
        None
    }
    fn removed(&mut self, slot: CacheSlot, _id: Id, _evicted: bool) {
        self.queue.retain(|&other| other != slot);
    }
    fn bytes_per_slot(&self) -> usize {
        4
    }
}

/// The policy of `kind` for a tier of `capacity` slots (overflow slots past it may appear).
pub fn new_policy(kind: PolicyKind, capacity: u32) -> Box<dyn Policy> {
    let _ = (kind, capacity);
    Box::new(Fifo::default())
}
