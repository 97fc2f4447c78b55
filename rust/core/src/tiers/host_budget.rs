//! The host RAM budget of a table: its own bytes, and bytes taken from the budget that the tables of a module share.

use std::sync::Arc;

use crate::runtime::budget::SharedBudget;

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
    pub(super) fn most(&self) -> u64 {
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
    pub(super) fn grow(&mut self, bytes: u64) -> bool {
        let missing = bytes.saturating_sub(self.bytes());
        let grows = missing == 0 || self.shared().is_some_and(|shared| shared.take(missing));
        self.taken += if grows { missing } else { 0 };
        grows
    }

    /// Returns taken bytes beyond `bytes`.
    pub(super) fn shrink(&mut self, bytes: u64) {
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
