//! The host RAM budget of a table, and its conversion to slots.

use std::sync::Arc;

use super::HostTier;
use crate::budget::SharedBudget;
use crate::config::PolicyKind;
use crate::slots::SlotMap;

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
    fn grow(&mut self, bytes: u64) -> bool {
        let missing = bytes.saturating_sub(self.bytes());
        let grows = missing == 0 || self.shared().is_some_and(|shared| shared.take(missing));
        self.taken += if grows { missing } else { 0 };
        grows
    }

    /// Returns taken bytes beyond `bytes`.
    fn shrink(&mut self, bytes: u64) {
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

impl HostTier {
    pub(crate) fn budget(&self) -> &HostBudget {
        &self.budget
    }

    /// Capacity of the budget in rows.
    pub(crate) fn budget_rows(&self) -> u32 {
        self.budget_rows
    }

    fn follow_budget(&mut self) {
        let rows = self.budget.bytes() / self.bytes_per_row;
        self.budget_rows = rows.min(u64::from(self.slots.capacity())) as u32;
    }

    /// Takes missing shared bytes so that the budget fits `rows` rows. Returns true on success; otherwise nothing has
    /// changed.
    pub(crate) fn grow_to(&mut self, rows: u64) -> bool {
        let fits = self.budget.shared.is_some() && rows <= u64::from(self.slots.capacity());
        if !fits || !self.budget.grow(rows * self.bytes_per_row) {
            return false;
        }
        self.follow_budget();
        self.slots.set_limit(self.budget_rows.max(self.slots.limit()));
        true
    }

    /// Returns shared bytes that `rows` rows do not need. Once the slots in use fit the budget, closes the slots beyond
    /// it and returns true: the caller must then move rows from slots above the limit.
    pub(crate) fn shrink_to(&mut self, rows: u64) -> bool {
        self.budget.shrink(rows * self.bytes_per_row);
        self.follow_budget();
        let closes = self.slots.limit() > self.budget_rows && self.slots.used() <= self.budget_rows;
        if closes {
            self.slots.set_limit(self.budget_rows);
        }
        closes
    }

    /// Returns all shared bytes, and empty slots for the tier.
    pub(super) fn empty_slots(&mut self, policy: PolicyKind) -> SlotMap {
        self.budget.shrink(0);
        self.follow_budget();
        SlotMap::growing(self.slots.capacity(), self.budget_rows, policy)
    }

    /// Opens slots for `rows` more rows, in the budget or beyond it: ids without a row have slots while a batch reads
    /// them. Takes no shared bytes for these.
    pub(super) fn open_slots(&mut self, rows: u32) {
        if self.budget.shared.is_some() && rows > self.slots.free_slots() {
            self.slots.set_limit(self.slots.used().saturating_add(rows));
        }
    }

    /// Number of rows that could be added, if no other table took shared bytes.
    pub(crate) fn free_rows(&self) -> u64 {
        let used = u64::from(self.slots.used());
        let within_reach = || (self.budget.within_reach() / self.bytes_per_row).min(u64::from(self.slots.capacity()));
        self.budget.shared().map_or(u64::from(self.slots.free_slots()), |_| within_reach().saturating_sub(used))
    }

    /// Number of rows in slots that exceed both the budget and the free shared bytes.
    pub(crate) fn rows_past_budget(&self) -> u32 {
        let past =
            |_| u64::from(self.slots.used()).saturating_sub(self.budget.within_reach() / self.bytes_per_row) as u32;
        self.budget.shared().map_or(0, past)
    }
}
