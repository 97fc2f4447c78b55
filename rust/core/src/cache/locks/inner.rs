//! What the handles, plans and moments of a table share, and who may take its locks.

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

/// One table. Its handles, plans and moments share it, and it goes with the last of them.
pub(crate) struct TableInner {
    context: Arc<TableContext>,
    /// Held for writing while kernels update rows, and for reading while they read rows or others copy rows that plans have pinned.
    rows_in_use: RwLock<()>,
    locked: Mutex<LockedTable>,
    /// Whether a moment of the table is held. It changes while `rows_in_use` is held for reading.
    has_snapshot: AtomicBool,
    /// What was let go of while the table's lock could not be had.
    deferred: DeferredReleases,
    /// Whether the holder of `rows_in_use` is running the code of [`Plan::exclusively`](crate::cache::Plan::exclusively).
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

    /// The table's residency.
    ///
    /// Errors: `State` when the table is closed, waits for a load after one failed, is torn, or is used in a forked child.
    pub(crate) fn lock(&self) -> Result<TableGuard<'_>> {
        self.check_usable(self.lock_any()?)
    }

    /// As [`TableInner::lock`], also of a table that waits for a load.
    pub(crate) fn lock_any(&self) -> Result<TableGuard<'_>> {
        self.check_open()?;
        self.make_guard(lock(&self.locked))
    }

    /// As [`TableInner::lock`]; `None` where another thread has the lock now.
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

    /// Whether the table was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Refuse all use from now on, once reads under way have ended and whoever is told of evicted rows is told of all. Returns whether the table was open.
    pub(crate) fn close(&self) -> bool {
        let was_open = !self.closed.swap(true, Ordering::AcqRel);
        if was_open {
            self.lock_always().finish_loads();
            // Of a torn table nobody knows which rows it has.
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

    /// End an export by slot. This works for a table that refuses its lock, too. In a forked child the export is its parent's.
    pub(crate) fn end_export(&self, number: u64) {
        if self.check_process().is_ok() {
            self.lock_always().end_export(number);
        }
    }

    /// The table's residency, also of a table that is closed or torn.
    pub(crate) fn lock_always(&self) -> TableGuard<'_> {
        TableGuard::new(&self.poison, &self.context.lock_held, lock(&self.locked))
    }

    /// Refuse a process forked from the one that opened the table. No lock is to be asked for before this: one that another thread had at
    /// the fork stays locked in the child.
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

    /// Refuse every use from now on.
    pub(crate) fn poison(&self, cause: PoisonCause) {
        self.poison.set(cause);
    }

    /// Keep out whoever writes rows that plans have pinned.
    ///
    /// Errors: `State` in a forked child, and where the caller himself keeps everybody out.
    pub(crate) fn reading_rows(&self) -> Result<RowUseGuard<'_>> {
        self.check_rows()?;
        let guard = self.rows_in_use.read().unwrap_or_else(PoisonError::into_inner);
        Ok(RowUseGuard::reading(guard))
    }

    /// As [`TableInner::reading_rows`], also where the caller keeps everybody out already, for as long as this call lasts.
    pub(super) fn without_kernel_writes(&self) -> Result<RowUseGuard<'_>> {
        if self.changing_device.is_calling() { Ok(RowUseGuard::held_by_caller()) } else { self.reading_rows() }
    }

    /// Keep out everybody else who uses rows that plans have pinned. Errors as [`TableInner::reading_rows`].
    pub(crate) fn writing_rows<'a, S>(&'a self, _guard: &'a PlanGuard<'_, S>) -> Result<RowUseGuard<'a>> {
        self.check_rows()?;
        let guard = self.rows_in_use.write().unwrap_or_else(PoisonError::into_inner);
        Ok(RowUseGuard::writing(guard))
    }

    /// As [`TableInner::writing_rows`], also where the caller keeps everybody out already.
    pub(crate) fn writing_rows_or_exclusive<'a, S>(&'a self, guard: &'a PlanGuard<'_, S>) -> Result<RowUseGuard<'a>> {
        if self.changing_device.is_calling() { Ok(RowUseGuard::held_by_caller()) } else { self.writing_rows(guard) }
    }

    /// As [`TableInner::reading_rows`], also where the caller keeps everybody out already.
    pub(crate) fn reading_rows_or_exclusive<'a, S>(&'a self, _guard: &'a PlanGuard<'_, S>) -> Result<RowUseGuard<'a>> {
        if self.changing_device.is_calling() { Ok(RowUseGuard::held_by_caller()) } else { self.reading_rows() }
    }

    /// Refuse a caller who would wait for himself if he asked for `rows_in_use`, and a forked child.
    ///
    /// Errors: `State`.
    pub(crate) fn check_rows(&self) -> Result<()> {
        self.check_process()?;
        self.context.check_not_reading_device()?;
        self.check_not_exclusive()
    }

    /// Refuse a caller who keeps everybody out of the table's rows himself, by [`Plan::exclusively`](crate::cache::Plan::exclusively).
    ///
    /// Errors: `State`.
    pub(crate) fn check_not_exclusive(&self) -> Result<()> {
        if self.changing_device.is_calling() {
            return Err(self.called_from_within("its rows on the device are placed or updated"));
        }
        Ok(())
    }

    /// The holder of `rows_in_use` begins to run code of his caller's, which changes rows on the device.
    pub(crate) fn begin_changing_device<'a>(&'a self, _rows: &'a RowUseGuard<'_>) -> ForeignCall<'a> {
        self.changing_device.begin()
    }

    /// Whether a moment of the table is held. `rows_in_use` is held meanwhile, so that it does not change.
    #[inline]
    pub(crate) fn has_snapshot(&self, _rows: &RowUseGuard<'_>) -> bool {
        self.has_snapshot.load(Ordering::Acquire)
    }

    /// Note that a moment is held from now on.
    pub(crate) fn set_has_snapshot(&self, _rows: &RowUseGuard<'_>) {
        self.has_snapshot.store(true, Ordering::Release);
    }

    /// Give back what a plan held, without waiting for the table's lock.
    pub(crate) fn defer_release(&self, pins: PlanPins) {
        // In a forked child the pins are its parent's, and so are the locks.
        if self.check_process().is_ok() {
            self.deferred.add_pins(pins);
            self.run_deferred_if_free();
        }
    }

    /// Let go of the moment of the table, without waiting for the table's lock.
    pub(crate) fn defer_snapshot_end(&self) {
        if self.check_process().is_ok() {
            self.deferred.add_snapshot_end();
            self.run_deferred_if_free();
        }
    }

    fn run_deferred_if_free(&self) {
        // Whoever takes the lock does what was left. A table that is closed or torn has no use for it.
        drop(self.try_lock_any());
    }

    #[cold]
    fn run_deferred(&self, residency: &mut Residency) {
        let (holds, moment_gone) = self.deferred.take();
        // Of a torn table nobody knows what is pinned.
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

    /// Whether no moment of the table is held. It works for a closed or torn table, too.
    fn is_without_snapshot(&self) -> bool {
        let mut held = self.lock_always();
        if self.deferred.has_any() {
            self.run_deferred(&mut held);
        }
        !held.has_snapshot()
    }

    /// Wait until no moment of the table is held.
    ///
    /// Errors: `State` by the code that reads device rows. Also, where a moment is held, by a caller who keeps everybody out of the rows
    /// that its save is still to copy.
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

    /// As [`TableInner::wait_for_snapshot_end`], for about `most` at most. Returns whether no moment was held.
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
