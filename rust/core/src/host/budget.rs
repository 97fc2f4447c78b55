//! The bytes of host RAM that a table may use, and how its slots follow them.

use std::sync::Arc;

use super::HostTier;
use crate::budget::SharedBudget;
use crate::config::PolicyKind;
use crate::slots::SlotMap;

/// The bytes that a table may use: a part of its own, and what it has taken of those that the tables of its module share.
#[derive(Debug)]
pub(crate) struct HostBudget {
    shared: Option<Arc<SharedBudget>>,
    own: u64,
    taken: u64,
}

impl HostBudget {
    /// A budget of `own` bytes, with nothing taken of `shared`.
    pub(crate) fn new(own: u64, shared: Option<Arc<SharedBudget>>) -> Self {
        Self { shared, own, taken: 0 }
    }

    pub(crate) fn shared(&self) -> Option<&SharedBudget> {
        self.shared.as_deref()
    }

    /// Bytes of its own and those that it has taken.
    pub(crate) fn bytes(&self) -> u64 {
        self.own + self.taken
    }

    /// The most bytes that it can have.
    pub(super) fn most(&self) -> u64 {
        self.own + self.shared().map_or(0, SharedBudget::bytes)
    }

    /// The bytes that it could have now, if no other table took any.
    pub(crate) fn within_reach(&self) -> u64 {
        self.bytes() + self.shared().map_or(0, SharedBudget::free)
    }

    /// Its bytes and an equal share of those that no table has taken, so that the budgets of all tables add up to that of their module.
    pub(crate) fn with_share_of_free(&self) -> u64 {
        self.bytes() + self.shared().map_or(0, |shared| shared.free() / u64::from(shared.tables()))
    }

    /// Have at least `bytes`. Returns whether it has them; where it does not, nothing has changed.
    fn grow(&mut self, bytes: u64) -> bool {
        let missing = bytes.saturating_sub(self.bytes());
        let grows = missing == 0 || self.shared().is_some_and(|shared| shared.take(missing));
        self.taken += if grows { missing } else { 0 };
        grows
    }

    /// Give back what was taken beyond `bytes`.
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

    /// How many rows the budget holds.
    pub(crate) fn budget_rows(&self) -> u32 {
        self.budget_rows
    }

    fn follow_budget(&mut self) {
        let rows = self.budget.bytes() / self.bytes_per_row;
        self.budget_rows = rows.min(u64::from(self.slots.capacity())) as u32;
    }

    /// Take what is missing of the shared bytes so that the budget holds `rows` rows. Returns whether it does; where it does not, nothing has
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

    /// Give back shared bytes that `rows` rows do not need. Once no more slots are in use than the budget holds, those past it are closed, and
    /// the return value is true: rows in slots above the limit are to move then.
    pub(crate) fn shrink_to(&mut self, rows: u64) -> bool {
        self.budget.shrink(rows * self.bytes_per_row);
        self.follow_budget();
        let closes = self.slots.limit() > self.budget_rows && self.slots.used() <= self.budget_rows;
        if closes {
            self.slots.set_limit(self.budget_rows);
        }
        closes
    }

    /// Slots of the tier, all empty, once all shared bytes are given back.
    pub(super) fn empty_slots(&mut self, policy: PolicyKind) -> SlotMap {
        self.budget.shrink(0);
        self.follow_budget();
        SlotMap::growing(self.slots.capacity(), self.budget_rows, policy)
    }

    /// Open slots for `rows` more rows, in the budget or past it: ids without a row have slots while a batch reads them. No shared bytes are
    /// taken for these.
    pub(super) fn open_slots(&mut self, rows: u32) {
        if self.budget.shared.is_some() && rows > self.slots.free_slots() {
            self.slots.set_limit(self.slots.used().saturating_add(rows));
        }
    }

    /// How many rows could be added, if no other table took shared bytes.
    pub(crate) fn free_rows(&self) -> u64 {
        let used = u64::from(self.slots.used());
        let within_reach = || (self.budget.within_reach() / self.bytes_per_row).min(u64::from(self.slots.capacity()));
        self.budget.shared().map_or(u64::from(self.slots.free_slots()), |_| within_reach().saturating_sub(used))
    }

    /// How many rows are in slots for which neither the budget nor what other tables have left of it has bytes.
    pub(crate) fn rows_past_budget(&self) -> u32 {
        let past =
            |_| u64::from(self.slots.used()).saturating_sub(self.budget.within_reach() / self.bytes_per_row) as u32;
        self.budget.shared().map_or(0, past)
    }
}
