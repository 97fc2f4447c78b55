//! Operations of a table that need rows of its device tier in RAM.
//!
//! No code outside of the Rust core runs under the table's lock. An operation that needs device rows requests them.
//! Then the lock is released, the rows are read, and the operation runs again under the lock, with copies of them.
//! `rows_in_use` is held from the first to the last run, so that no kernel changes the rows and no row arrives on the
//! device. The lock itself is free for others, such as plans that start.

use super::guards::{RowUseGuard, TableGuard};
use super::inner::TableInner;
use crate::cache::residency::DeviceCopies;
use crate::error::Result;

impl TableInner {
    /// Runs `work` under the table's lock, taken by `lock`, until it stops requesting device rows. Returns the last
    /// result of `work`, and the lock, held since the start of that run.
    ///
    /// `work` must not change anything that it could not repeat before it has requested its rows.
    ///
    /// Errors: those of `lock` and of `work`.
    pub(crate) fn with_device_rows<'a, T>(
        &'a self,
        _rows: &RowUseGuard<'_>,
        lock: impl Fn() -> Result<TableGuard<'a>>,
        mut work: impl FnMut(&mut TableGuard<'a>) -> Result<T>,
    ) -> Result<(TableGuard<'a>, T)> {
        let mut copies = DeviceCopies::default();
        let mut chosen = DeviceVictimsGuard(None);
        loop {
            let mut held = lock()?;
            held.set_copies(copies);
            let done = work(&mut held);
            copies = held.take_copies();
            if done.is_ok() || !copies.has_pending_reads() {
                if chosen.0.take().is_some() {
                    held.keep_leaving_on_device();
                }
                return done.map(|done| (held, done));
            }
            drop(held);
            if copies.has_victims() {
                chosen.0 = Some(self);
            }
            copies.read(self);
        }
    }

    /// Like [`TableInner::with_device_rows`], for `work` that needs device rows only to finish a sweep in progress.
    /// Releases the lock.
    pub(crate) fn during_sweeps<'a, T>(
        &'a self,
        lock: impl Fn() -> Result<TableGuard<'a>>,
        work: impl FnMut(&mut TableGuard<'a>) -> Result<T>,
    ) -> Result<T> {
        self.lock_during_sweeps(lock, work).map(|(_, done)| done)
    }

    fn lock_during_sweeps<'a, T>(
        &'a self,
        lock: impl Fn() -> Result<TableGuard<'a>>,
        mut work: impl FnMut(&mut TableGuard<'a>) -> Result<T>,
    ) -> Result<(TableGuard<'a>, T)> {
        let mut held = lock()?;
        if self.has_device() && held.has_sweep() {
            drop(held);
            let rows = self.without_kernel_writes()?;
            return self.with_device_rows(&rows, lock, work);
        }
        let done = work(&mut held)?;
        Ok((held, done))
    }

    /// Locks the table after removing all rows that the sweep in progress matches, except rows of active plans.
    pub(crate) fn lock_after_sweep(&self) -> Result<TableGuard<'_>> {
        self.lock_during_sweeps(|| self.lock(), |held| held.finish_sweep()).map(|(held, ())| held)
    }
}

/// The table of an operation that has chosen victims of the device tier and is abandoned. Keeps the victims.
struct DeviceVictimsGuard<'a>(Option<&'a TableInner>);

impl Drop for DeviceVictimsGuard<'_> {
    fn drop(&mut self) {
        // A closed or poisoned table does not use its slots.
        if let Some(table) = self.0
            && let Ok(mut held) = table.lock_any()
        {
            held.keep_leaving_on_device();
        }
    }
}
