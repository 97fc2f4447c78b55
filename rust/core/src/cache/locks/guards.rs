//! The guards of a table's locks.
#![allow(unsafe_code)]

use std::time::Instant;

use super::torn::{PoisonCause, TablePoison};
use crate::cache::residency::Residency;
use crate::host::NoKernelWrites;
use crate::stats::DurationHistogram;
use crate::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

/// State guarded by the table's lock.
pub(crate) struct LockedTable {
    pub(crate) residency: Residency,
    /// If set, the reason why every use is rejected until a load succeeds.
    pub(crate) unusable: Option<String>,
}

/// The placement of a table, with its lock held. Poisons the table if dropped by a panic.
pub(crate) struct TableGuard<'a> {
    poison: &'a TablePoison,
    /// Records how long the lock is held.
    durations: &'a DurationHistogram,
    locked_at: Instant,
    /// True if the lock was acquired while unwinding.
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

    /// The reason why every use is rejected until a load succeeds; `None` if the table is usable.
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

/// Guard of `rows_in_use` of a table: no kernel writes the table's rows, except kernels of the holder.
pub(crate) struct RowUseGuard<'a> {
    _reading: Option<RwLockReadGuard<'a, ()>>,
    _writing: Option<RwLockWriteGuard<'a, ()>>,
}

impl<'a> RowUseGuard<'a> {
    /// Kernels may still read rows.
    pub(super) fn reading(guard: RwLockReadGuard<'a, ()>) -> Self {
        Self { _reading: Some(guard), _writing: None }
    }

    /// No other kernel uses rows.
    pub(super) fn writing(guard: RwLockWriteGuard<'a, ()>) -> Self {
        Self { _reading: None, _writing: Some(guard) }
    }

    /// The lock is already held for writing by the caller's caller, in
    /// [`Plan::exclusively`](crate::cache::Plan::exclusively). `'a` is bound to a plan guard of that caller's code,
    /// which ends earlier.
    pub(super) fn held_by_caller() -> Self {
        Self { _reading: None, _writing: None }
    }

    /// Token for reading rows of the host tier.
    #[expect(clippy::unused_self, reason = "the proof lasts as long as the guard")]
    pub(crate) fn no_kernel_writes(&self) -> NoKernelWrites<'_> {
        // SAFETY: kernels that write rows are run by a holder of `rows_in_use` for writing (`kernels` of a plan). While
        // `self` holds it for reading there is none; while `self` or its caller holds it for writing, only the holder
        // can run one, and it is here and not in a kernel.
        unsafe { NoKernelWrites::promise() }
    }
}
