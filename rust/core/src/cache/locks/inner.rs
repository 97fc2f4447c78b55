//! What the handles, plans and moments of a table share, and who may take its locks.

use std::sync::{Arc, PoisonError, TryLockError};
use std::time::Duration;

use super::guards::{Held, Locked, RowsHeld};
use super::left::Left;
use super::torn::{Tear, Torn};
use super::turn::Turn;
use crate::cache::base::TableBase;
use crate::cache::residency::{Hold, Residency};
use crate::error::{Error, Kind, Result};
use crate::logical_thread::{ForeignCode, Running};
use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, RwLock, lock};

/// One table. Its handles, plans and moments share it, and it goes with the last of them.
pub(crate) struct TableInner {
    base: Arc<TableBase>,
    /// Held for writing while kernels update rows, and for reading while they read rows or others copy rows that plans have pinned.
    rows_in_use: RwLock<()>,
    locked: Mutex<Locked>,
    /// Whether a moment of the table is held. It changes while `rows_in_use` is held for reading.
    has_moment: AtomicBool,
    /// What was let go of while the table's lock could not be had.
    left: Left,
    /// Whether the holder of `rows_in_use` is running the code of [`Plan::exclusively`](crate::cache::Plan::exclusively).
    changing_device: ForeignCode,
    closed: AtomicBool,
    torn: Torn,
    /// The process that opened the table.
    pid: u32,
}

impl std::ops::Deref for TableInner {
    type Target = TableBase;
    #[inline]
    fn deref(&self) -> &TableBase {
        &self.base
    }
}

impl TableInner {
    pub(crate) fn new(base: Arc<TableBase>, residency: Residency) -> Self {
        Self {
            base,
            rows_in_use: RwLock::new(()),
            locked: Mutex::new(Locked { residency, unusable: None }),
            has_moment: AtomicBool::new(false),
            left: Left::default(),
            changing_device: ForeignCode::default(),
            closed: AtomicBool::new(false),
            torn: Torn::default(),
            pid: std::process::id(),
        }
    }

    /// The table's residency.
    ///
    /// Errors: `State` when the table is closed, waits for a load after one failed, is torn, or is used in a forked child.
    pub(crate) fn lock(&self) -> Result<Held<'_>> {
        self.usable(self.lock_any()?)
    }

    /// As [`TableInner::lock`], also of a table that waits for a load.
    pub(crate) fn lock_any(&self) -> Result<Held<'_>> {
        self.check_open()?;
        self.held(lock(&self.locked))
    }

    /// As [`TableInner::lock`]; `None` where another thread has the lock now.
    pub(crate) fn try_lock(&self) -> Result<Option<Held<'_>>> {
        self.try_lock_any()?.map(|held| self.usable(held)).transpose()
    }

    fn try_lock_any(&self) -> Result<Option<Held<'_>>> {
        self.check_open()?;
        let locked = match self.locked.try_lock() {
            Ok(locked) => locked,
            Err(TryLockError::Poisoned(locked)) => locked.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        self.held(locked).map(Some)
    }

    fn usable<'a>(&self, held: Held<'a>) -> Result<Held<'a>> {
        if let Some(reason) = held.unusable() {
            let message = format!("table {:?} cannot be used: {reason}", self.config.name);
            return Err(Error::new(Kind::State, message));
        }
        Ok(held)
    }

    fn check_open(&self) -> Result<()> {
        if self.is_closed() {
            return Err(Error::new(Kind::State, format!("table {:?} is closed", self.config.name)));
        }
        self.check_process()
    }

    fn held<'a>(&'a self, locked: MutexGuard<'a, Locked>) -> Result<Held<'a>> {
        let mut held = Held::new(&self.torn, &self.base.lock_held, locked);
        if let Some(tear) = self.torn.get() {
            return Err(Error::new(
                Kind::State,
                format!(
                    "table {:?} cannot be used since {}: open the table again, to go on from its last flush, or load a checkpoint \
                     into a new one",
                    self.config.name,
                    tear.what_happened()
                ),
            ));
        }
        if self.left.any() {
            self.do_what_was_left(&mut held);
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
            if self.torn.get().is_none()
                && let Err(error) = self.amid_sweeps(|| Ok(self.lock_always()), |held| held.tell_rest())
            {
                tracing::warn!(
                    "table {:?}: nobody is told of what its last sweep has taken: {error}",
                    self.config.name
                );
            }
            let mut held = self.lock_always();
            held.end_telling();
            held.give_back_budget(self.torn.get().is_some());
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
    pub(crate) fn lock_always(&self) -> Held<'_> {
        Held::new(&self.torn, &self.base.lock_held, lock(&self.locked))
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
    pub(crate) fn tear(&self, tear: Tear) {
        self.torn.set(tear);
    }

    /// Keep out whoever writes rows that plans have pinned.
    ///
    /// Errors: `State` in a forked child, and where the caller himself keeps everybody out.
    pub(crate) fn reading_rows(&self) -> Result<RowsHeld<'_>> {
        self.check_rows()?;
        let guard = self.rows_in_use.read().unwrap_or_else(PoisonError::into_inner);
        Ok(RowsHeld::reading(guard))
    }

    /// As [`TableInner::reading_rows`], also where the caller keeps everybody out already, for as long as this call lasts.
    pub(super) fn without_kernel_writes(&self) -> Result<RowsHeld<'_>> {
        if self.changing_device.is_calling() { Ok(RowsHeld::by_caller()) } else { self.reading_rows() }
    }

    /// Keep out everybody else who uses rows that plans have pinned. Errors as [`TableInner::reading_rows`].
    pub(crate) fn writing_rows<'a, S>(&'a self, _first: &'a Turn<'_, S>) -> Result<RowsHeld<'a>> {
        self.check_rows()?;
        let guard = self.rows_in_use.write().unwrap_or_else(PoisonError::into_inner);
        Ok(RowsHeld::writing(guard))
    }

    /// As [`TableInner::writing_rows`], also where the caller keeps everybody out already.
    pub(crate) fn writing_rows_or_exclusive<'a, S>(&'a self, first: &'a Turn<'_, S>) -> Result<RowsHeld<'a>> {
        if self.changing_device.is_calling() { Ok(RowsHeld::by_caller()) } else { self.writing_rows(first) }
    }

    /// As [`TableInner::reading_rows`], also where the caller keeps everybody out already.
    pub(crate) fn reading_rows_or_exclusive<'a, S>(&'a self, _first: &'a Turn<'_, S>) -> Result<RowsHeld<'a>> {
        if self.changing_device.is_calling() { Ok(RowsHeld::by_caller()) } else { self.reading_rows() }
    }

    /// Refuse a caller who would wait for himself if he asked for `rows_in_use`, and a forked child.
    ///
    /// Errors: `State`.
    pub(crate) fn check_rows(&self) -> Result<()> {
        self.check_process()?;
        self.base.check_not_reading_device()?;
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
    pub(crate) fn begin_changing_device<'a>(&'a self, _rows: &'a RowsHeld<'_>) -> Running<'a> {
        self.changing_device.begin()
    }

    /// Whether a moment of the table is held. `rows_in_use` is held meanwhile, so that it does not change.
    #[inline]
    pub(crate) fn has_moment(&self, _rows: &RowsHeld<'_>) -> bool {
        self.has_moment.load(Ordering::Acquire)
    }

    /// Note that a moment is held from now on.
    pub(crate) fn note_moment(&self, _rows: &RowsHeld<'_>) {
        self.has_moment.store(true, Ordering::Release);
    }

    /// Give back what a plan held, without waiting for the table's lock.
    pub(crate) fn leave_hold(&self, hold: Hold) {
        // In a forked child the pins are its parent's, and so are the locks.
        if self.check_process().is_ok() {
            self.left.hold(hold);
            self.do_now_if_free();
        }
    }

    /// Let go of the moment of the table, without waiting for the table's lock.
    pub(crate) fn leave_moment(&self) {
        if self.check_process().is_ok() {
            self.left.moment();
            self.do_now_if_free();
        }
    }

    fn do_now_if_free(&self) {
        // Whoever takes the lock does what was left. A table that is closed or torn has no use for it.
        drop(self.try_lock_any());
    }

    #[cold]
    fn do_what_was_left(&self, residency: &mut Residency) {
        let (holds, moment_gone) = self.left.take();
        // Of a torn table nobody knows what is pinned.
        if self.torn.get().is_none() {
            for hold in holds {
                residency.release(hold);
            }
        }
        if moment_gone {
            residency.end_moment();
            self.has_moment.store(false, Ordering::Release);
        }
    }

    /// Whether no moment of the table is held. It works for a closed or torn table, too.
    fn is_without_moment(&self) -> bool {
        let mut held = self.lock_always();
        if self.left.any() {
            self.do_what_was_left(&mut held);
        }
        !held.has_moment()
    }

    /// Wait until no moment of the table is held.
    ///
    /// Errors: `State` by the code that reads device rows. Also, where a moment is held, by a caller who keeps everybody out of the rows
    /// that its save is still to copy.
    pub(crate) fn wait_for_moment(&self) -> Result<()> {
        self.base.check_not_reading_device()?;
        loop {
            let gone = self.left.moments_gone();
            if self.is_without_moment() {
                return Ok(());
            }
            self.check_not_exclusive()?;
            self.left.wait_for_moment(gone);
        }
    }

    /// As [`TableInner::wait_for_moment`], for about `most` at most. Returns whether no moment was held.
    pub(crate) fn wait_for_moment_at_most(&self, most: Duration) -> Result<bool> {
        self.base.check_not_reading_device()?;
        let gone = self.left.moments_gone();
        if self.is_without_moment() {
            return Ok(true);
        }
        self.check_not_exclusive()?;
        self.left.wait_for_moment_at_most(gone, most);
        Ok(false)
    }
}
