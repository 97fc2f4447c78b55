//! The guards of a table's locks.
#![allow(unsafe_code)]

use std::time::Instant;

use super::torn::{PoisonCause, TablePoison};
use crate::cache::residency::Residency;
use crate::host::NoKernelWrites;
use crate::stats::DurationHistogram;
use crate::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

/// What the table's lock protects.
pub(crate) struct LockedTable {
    pub(crate) residency: Residency,
    /// Why every use is refused until a load succeeds, if so.
    pub(crate) unusable: Option<String>,
}

/// The residency of a table, with its lock held. Dropped by a panic it leaves the table torn.
pub(crate) struct TableGuard<'a> {
    poison: &'a TablePoison,
    /// How long the lock is held is counted here.
    durations: &'a DurationHistogram,
    locked_at: Instant,
    /// Whether the lock was taken by the clean-up after a panic.
    unwinding: bool,
    locked: MutexGuard<'a, LockedTable>,
}

impl<'a> TableGuard<'a> {
    pub(super) fn new(
        poison: &'a TablePoison,
        durations: &'a DurationHistogram,
        locked: MutexGuard<'a, LockedTable>,
    ) -> Self {
        Self { poison, durations, locked_at: Instant::now(), unwinding: std::thread::panicking(), locked }
    }

    /// Why every use is refused until a load succeeds; `None` where it is not.
    pub(crate) fn unusable(&self) -> Option<&str> {
        self.locked.unusable.as_deref()
    }

    pub(crate) fn set_unusable(&mut self, reason: Option<String>) {
        self.locked.unusable = reason;
    }
}

impl std::ops::Deref for TableGuard<'_> {
    type Target = Residency;
    #[inline]
    fn deref(&self) -> &Residency {
        &self.locked.residency
    }
}

impl std::ops::DerefMut for TableGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Residency {
        &mut self.locked.residency
    }
}

impl Drop for TableGuard<'_> {
    fn drop(&mut self) {
        self.durations.record(self.locked_at.elapsed());
        if std::thread::panicking() && !self.unwinding {
            self.poison.set(PoisonCause::Panic);
        }
    }
}

/// `rows_in_use` of a table, held: no kernel writes the table's rows meanwhile, but for those that the holder runs himself.
pub(crate) struct RowUseGuard<'a> {
    _reading: Option<RwLockReadGuard<'a, ()>>,
    _writing: Option<RwLockWriteGuard<'a, ()>>,
}

impl<'a> RowUseGuard<'a> {
    /// Kernels may read rows meanwhile.
    pub(super) fn reading(guard: RwLockReadGuard<'a, ()>) -> Self {
        Self { _reading: Some(guard), _writing: None }
    }

    /// No other kernel uses rows meanwhile.
    pub(super) fn writing(guard: RwLockWriteGuard<'a, ()>) -> Self {
        Self { _reading: None, _writing: Some(guard) }
    }

    /// The caller's own caller holds the lock for writing, in [`Plan::exclusively`](crate::cache::Plan::exclusively). `'a` is bound to a
    /// turn of that caller's code, which ends before.
    pub(super) fn held_by_caller() -> Self {
        Self { _reading: None, _writing: None }
    }

    /// Proof for reading rows of the host tier.
    #[expect(clippy::unused_self, reason = "the proof lasts as long as the guard")]
    pub(crate) fn no_kernel_writes(&self) -> NoKernelWrites<'_> {
        // SAFETY: kernels that write rows are run by somebody who holds `rows_in_use` for writing (`kernels` of a plan). While `self`
        // holds it for reading nobody does; while `self` or its caller holds it for writing, only the holder does, who is here and not in
        // a kernel.
        unsafe { NoKernelWrites::promise() }
    }
}
