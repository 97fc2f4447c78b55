//! Host RAM budgets: the budget that the tables of a module share, and the budget of one table.

use crate::runtime::sync::{AtomicU64, Ordering};
use std::sync::Arc;

/// The part of a module's `host_bytes` that its tables share. Each table also has a fixed part of `host_bytes`. A table
/// takes the bytes that it needs beyond that part, and returns them after its rows are gone. Bytes are counted by one
/// atomic, so tables that grow at the same time never wait for each other.
#[derive(Debug)]
pub struct SharedBudget {
    /// Bytes that no table has taken.
    free: AtomicU64,
    bytes: u64,
    host_bytes: u64,
    tables: u32,
    gain: f64,
}

impl SharedBudget {
    /// Creates a budget of `bytes`, out of the `host_bytes` of a module with `tables` tables. `gain`, above 0 and at
    /// most 1, is the minimum number of additional bytes that a sharing table can use per byte added to `host_bytes`.
    pub fn new(bytes: u64, host_bytes: u64, tables: u32, gain: f64) -> Self {
        Self { free: AtomicU64::new(bytes), bytes, host_bytes, tables: tables.max(1), gain }
    }

    /// Returns the same budget with no byte taken.
    #[must_use]
    pub fn untaken(&self) -> Self {
        Self::new(self.bytes, self.host_bytes, self.tables, self.gain)
    }

    /// Total number of bytes, taken or not.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of bytes that no table has taken.
    pub fn free(&self) -> u64 {
        self.free.load(Ordering::Relaxed)
    }

    /// The `host_bytes` of the module.
    pub fn host_bytes(&self) -> u64 {
        self.host_bytes
    }

    /// Number of tables that divide the `host_bytes` of the module.
    pub fn tables(&self) -> u32 {
        self.tables
    }

    /// Returns the `host_bytes` with which a table could use `missing` bytes more.
    pub fn host_bytes_with(&self, missing: u64) -> u64 {
        // If fixed parts grow too, each is rounded to a byte.
        let rounded = if self.gain < 1.0 { missing + u64::from(self.tables) } else { missing };
        self.host_bytes.saturating_add((rounded as f64 / self.gain).ceil() as u64)
    }

    /// Takes `bytes`, all or none. Returns true if they were taken.
    pub fn take(&self, bytes: u64) -> bool {
        let rest = |free: u64| free.checked_sub(bytes);
        self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).is_ok()
    }

    /// Returns bytes that were taken.
    pub fn give_back(&self, bytes: u64) {
        self.free.fetch_add(bytes, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

/// The bytes that a table may use: its own portion, and bytes taken from the budget shared by the tables of its module.
#[derive(Debug)]
pub(crate) struct HostBudget {
    shared: Option<Arc<SharedBudget>>,
    own: u64,
    taken: u64,
}

impl HostBudget {
    /// A budget of `own` bytes, with nothing taken from `shared`.
    pub(crate) fn new(own: u64, shared: Option<Arc<SharedBudget>>) -> Self {
        Self { shared, own, taken: 0 }
    }

    pub(crate) fn shared(&self) -> Option<&SharedBudget> {
        self.shared.as_deref()
    }

    /// Own and taken bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.own + self.taken
    }

    /// Maximum number of bytes that it can have.
    pub(crate) fn most(&self) -> u64 {
        self.own + self.shared().map_or(0, SharedBudget::bytes)
    }

    /// Number of bytes that it could have at present, if no other table took any.
    pub(crate) fn within_reach(&self) -> u64 {
        self.bytes() + self.shared().map_or(0, SharedBudget::free)
    }

    /// Its bytes and an equal portion of the free shared bytes, so that the budgets of all tables add up to that of
    /// their module.
    pub(crate) fn with_share_of_free(&self) -> u64 {
        self.bytes() + self.shared().map_or(0, |shared| shared.free() / u64::from(shared.tables()))
    }

    /// Grows to at least `bytes`. Returns true on success; otherwise nothing has changed.
    pub(crate) fn grow(&mut self, bytes: u64) -> bool {
        let missing = bytes.saturating_sub(self.bytes());
        let grows = missing == 0 || self.shared().is_some_and(|shared| shared.take(missing));
        self.taken += if grows { missing } else { 0 };
        grows
    }

    /// Returns taken bytes beyond `bytes`.
    pub(crate) fn shrink(&mut self, bytes: u64) {
        let unused = self.taken.saturating_sub(bytes.saturating_sub(self.own));
        if let Some(shared) = self.shared.as_deref().filter(|_| unused > 0) {
            shared.give_back(unused);
            self.taken -= unused;
        }
    }
}

impl Drop for HostBudget {
    fn drop(&mut self) {
        self.shrink(0);
    }
}
