//! State shared by the handles, plans and snapshots of a table, and the rules for taking its locks.

use std::sync::{Arc, PoisonError, TryLockError};
use std::time::Duration;

use super::guards::{LockedTable, RowUseGuard, TableGuard};
use super::left::DeferredReleases;
use super::torn::{PoisonCause, TablePoison};
use super::turn::PlanGuard;
use crate::cache::base::TableContext;
use crate::cache::residency::{PlanPins, Residency};
use crate::error::{Error, Kind, Result};
use crate::logical_thread::{ForeignCall, ForeignCode};
use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, RwLock, lock};

/// One table. Shared by its handles, plans and snapshots, and dropped with the last of them.
pub(crate) struct TableInner {
    context: Arc<TableContext>,
    /// Held for writing while kernels update rows, and for reading while kernels read rows or other code copies rows
    /// that plans have pinned.
    rows_in_use: RwLock<()>,
    locked: Mutex<LockedTable>,
    /// True if the table has a snapshot. Changes only while `rows_in_use` is held for reading.
    has_snapshot: AtomicBool,
    /// Releases that could not take the table's lock.
    deferred: DeferredReleases,
    /// Tracks whether the holder of `rows_in_use` is running the code of
    /// [`Plan::exclusively`](crate::cache::Plan::exclusively).
    changing_device: ForeignCode,
    closed: AtomicBool,
    poison: TablePoison,
    /// The process that opened the table.
    pid: u32,
}

impl std::ops::Deref for TableInner {
    type Target = TableContext;
    #[inline]
    fn deref(&self) -> &TableContext {
        &self.context
    }
}

impl TableInner {
    pub(crate) fn new(context: Arc<TableContext>, residency: Residency) -> Self {
        Self {
            context,
            rows_in_use: RwLock::new(()),
            locked: Mutex::new(LockedTable { residency, unusable: None }),
            has_snapshot: AtomicBool::new(false),
            deferred: DeferredReleases::default(),
            changing_device: ForeignCode::default(),
            closed: AtomicBool::new(false),
            poison: TablePoison::default(),
            pid: std::process::id(),
        }
    }

    /// Locks the table.
    ///
    /// Errors: `State` if the table is closed, waits for a load after a failed one, is poisoned, or is used in a forked
    /// child.
    pub(crate) fn lock(&self) -> Result<TableGuard<'_>> {
        self.check_usable(self.lock_any()?)
    }

    /// Like [`TableInner::lock`], but works for a table that waits for a load too.
    pub(crate) fn lock_any(&self) -> Result<TableGuard<'_>> {
        self.check_open()?;
        self.make_guard(lock(&self.locked))
    }

    /// Like [`TableInner::lock`]; `None` if another thread has the lock.
    pub(crate) fn try_lock(&self) -> Result<Option<TableGuard<'_>>> {
        self.try_lock_any()?.map(|held| self.check_usable(held)).transpose()
    }

    fn try_lock_any(&self) -> Result<Option<TableGuard<'_>>> {
        self.check_open()?;
        let locked = match self.locked.try_lock() {
            Ok(locked) => locked,
            Err(TryLockError::Poisoned(locked)) => locked.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        self.make_guard(locked).map(Some)
    }

    fn check_usable<'a>(&self, guard: TableGuard<'a>) -> Result<TableGuard<'a>> {
        if let Some(reason) = guard.unusable() {
            let message = format!("table {:?} cannot be used: {reason}", self.config.name);
            return Err(Error::new(Kind::State, message));
        }
        Ok(guard)
    }

    fn check_open(&self) -> Result<()> {
        if self.is_closed() {
            return Err(Error::new(Kind::State, format!("table {:?} is closed", self.config.name)));
        }
        self.check_process()
    }

    fn make_guard<'a>(&'a self, locked: MutexGuard<'a, LockedTable>) -> Result<TableGuard<'a>> {
        let mut held = TableGuard::new(&self.poison, &self.context.lock_held, locked);
        if let Some(tear) = self.poison.cause() {
            return Err(Error::new(
                Kind::State,
                format!(
                    "table {:?} cannot be used since {}: open the table again, to go on from its last flush, or load a checkpoint \
                     into a new one",
                    self.config.name,
                    tear.description()
                ),
            ));
        }
        if self.deferred.has_any() {
            self.run_deferred(&mut held);
        }
        Ok(held)
    }

    /// True if the table was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Rejects all later use, after reads in progress have finished and all evicted rows are queued. Returns true if
    /// the table was open.
    pub(crate) fn close(&self) -> bool {
        let was_open = !self.closed.swap(true, Ordering::AcqRel);
        if was_open {
            self.lock_always().finish_loads();
            // The rows of a poisoned table are unknown.
            if self.poison.cause().is_none()
                && let Err(error) = self.during_sweeps(|| Ok(self.lock_always()), |held| held.notify_rest())
            {
                tracing::warn!(
                    "table {:?}: nobody is told of what its last sweep has taken: {error}",
                    self.config.name
                );
            }
            let mut held = self.lock_always();
            held.end_notifying();
            held.give_back_budget(self.poison.cause().is_some());
        }
        was_open
    }

    /// Ends an export by slot, even if the table is unusable. Does nothing in a forked child, because the export
    /// belongs to the parent.
    pub(crate) fn end_export(&self, number: u64) {
        if self.check_process().is_ok() {
            self.lock_always().end_export(number);
        }
    }

    /// Locks the table even if it is closed or poisoned.
    pub(crate) fn lock_always(&self) -> TableGuard<'_> {
        TableGuard::new(&self.poison, &self.context.lock_held, lock(&self.locked))
    }

    /// Rejects a process forked from the one that opened the table. Must precede any lock: a lock that another thread
    /// held at the fork stays locked in the child.
    ///
    /// Errors: `State`.
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::new(
            Kind::State,
            format!(
                "table {:?} was opened by process {} and is used in a forked child: open tables after the fork, or start \
                 workers with the spawn method",
                self.config.name, self.pid
            ),
        ))
    }

    /// Rejects every later use.
    pub(crate) fn poison(&self, cause: PoisonCause) {
        self.poison.set(cause);
    }

    /// Excludes writers of rows that plans have pinned.
    ///
    /// Errors: `State` in a forked child, and if the caller itself has exclusive access.
    pub(crate) fn reading_rows(&self) -> Result<RowUseGuard<'_>> {
        self.check_rows()?;
        let guard = self.rows_in_use.read().unwrap_or_else(PoisonError::into_inner);
        Ok(RowUseGuard::reading(guard))
    }

    /// Like [`TableInner::reading_rows`], but works if the caller already has exclusive access, for the duration of
    /// this call.
    pub(super) fn without_kernel_writes(&self) -> Result<RowUseGuard<'_>> {
        if self.changing_device.is_calling() { Ok(RowUseGuard::held_by_caller()) } else { self.reading_rows() }
    }

    /// Excludes all other users of rows that plans have pinned. Errors: as [`TableInner::reading_rows`].
    pub(crate) fn writing_rows<'a, S>(&'a self, _guard: &'a PlanGuard<'_, S>) -> Result<RowUseGuard<'a>> {
        self.check_rows()?;
        let guard = self.rows_in_use.write().unwrap_or_else(PoisonError::into_inner);
        Ok(RowUseGuard::writing(guard))
    }

    /// Like [`TableInner::writing_rows`], but works if the caller already has exclusive access.
    pub(crate) fn writing_rows_or_exclusive<'a, S>(&'a self, guard: &'a PlanGuard<'_, S>) -> Result<RowUseGuard<'a>> {
        if self.changing_device.is_calling() { Ok(RowUseGuard::held_by_caller()) } else { self.writing_rows(guard) }
    }

    /// Like [`TableInner::reading_rows`], but works if the caller already has exclusive access.
    pub(crate) fn reading_rows_or_exclusive<'a, S>(&'a self, _guard: &'a PlanGuard<'_, S>) -> Result<RowUseGuard<'a>> {
        if self.changing_device.is_calling() { Ok(RowUseGuard::held_by_caller()) } else { self.reading_rows() }
    }

    /// Rejects a caller that would deadlock on `rows_in_use`, and a forked child.
    ///
    /// Errors: `State`.
    pub(crate) fn check_rows(&self) -> Result<()> {
        self.check_process()?;
        self.context.check_not_reading_device()?;
        self.check_not_exclusive()
    }

    /// Rejects a caller that has exclusive access to the table's rows by
    /// [`Plan::exclusively`](crate::cache::Plan::exclusively).
    ///
    /// Errors: `State`.
    pub(crate) fn check_not_exclusive(&self) -> Result<()> {
        if self.changing_device.is_calling() {
            return Err(self.called_from_within("its rows on the device are placed or updated"));
        }
        Ok(())
    }

    /// Marks that the holder of `rows_in_use` runs code of its caller, which changes rows on the device.
    pub(crate) fn begin_changing_device<'a>(&'a self, _rows: &'a RowUseGuard<'_>) -> ForeignCall<'a> {
        self.changing_device.begin()
    }

    /// True if the table has a snapshot. Holding `rows_in_use` keeps the answer valid.
    #[inline]
    pub(crate) fn has_snapshot(&self, _rows: &RowUseGuard<'_>) -> bool {
        self.has_snapshot.load(Ordering::Acquire)
    }

    /// Records that the table has a snapshot.
    pub(crate) fn set_has_snapshot(&self, _rows: &RowUseGuard<'_>) {
        self.has_snapshot.store(true, Ordering::Release);
    }

    /// Releases the pins of a plan without waiting for the table's lock.
    pub(crate) fn defer_release(&self, pins: PlanPins) {
        // In a forked child the pins and the locks belong to the parent.
        if self.check_process().is_ok() {
            self.deferred.add_pins(pins);
            self.run_deferred_if_free();
        }
    }

    /// Ends the snapshot of the table without waiting for the table's lock.
    pub(crate) fn defer_snapshot_end(&self) {
        if self.check_process().is_ok() {
            self.deferred.add_snapshot_end();
            self.run_deferred_if_free();
        }
    }

    fn run_deferred_if_free(&self) {
        // The holder of the lock runs the deferred releases. A closed or poisoned table does not need them.
        drop(self.try_lock_any());
    }

    #[cold]
    fn run_deferred(&self, residency: &mut Residency) {
        let (holds, moment_gone) = self.deferred.take();
        // The pins of a poisoned table are unknown.
        if self.poison.cause().is_none() {
            for hold in holds {
                residency.release(hold);
            }
        }
        if moment_gone {
            residency.end_snapshot();
            self.has_snapshot.store(false, Ordering::Release);
        }
    }

    /// True if the table has no snapshot. Works for a closed or poisoned table too.
    fn is_without_snapshot(&self) -> bool {
        let mut held = self.lock_always();
        if self.deferred.has_any() {
            self.run_deferred(&mut held);
        }
        !held.has_snapshot()
    }

    /// Waits until the table has no snapshot.
    ///
    /// Errors: `State` from code that reads device rows. Also, if there is a snapshot, from a caller that has exclusive
    /// access to the rows that its save has not copied yet.
    pub(crate) fn wait_for_snapshot_end(&self) -> Result<()> {
        self.context.check_not_reading_device()?;
        loop {
            let gone = self.deferred.snapshots_ended();
            if self.is_without_snapshot() {
                return Ok(());
            }
            self.check_not_exclusive()?;
            self.deferred.wait_for_snapshot_end(gone);
        }
    }

    /// Like [`TableInner::wait_for_snapshot_end`], for about `most` at most. Returns true if there was no snapshot.
    pub(crate) fn wait_for_snapshot_end_at_most(&self, most: Duration) -> Result<bool> {
        self.context.check_not_reading_device()?;
        let gone = self.deferred.snapshots_ended();
        if self.is_without_snapshot() {
            return Ok(true);
        }
        self.check_not_exclusive()?;
        self.deferred.wait_for_snapshot_end_at_most(gone, most);
        Ok(false)
    }
}
