//! The locks of a table, in the order in which they are taken, and its poisoned state.
//!
//! 1. Exclusive access to a plan ([`PlanGuard`]).
//! 2. `rows_in_use` of each table ([`RowUseGuard`]), of several tables in the order of their addresses. Locking it for
//!    writing requires exclusive access to a plan, which is an argument of the function.
//! 3. The lock of a table ([`TableGuard`]).
//! 4. Locks inside of the SSD tier.
//!
//! No code outside of the Rust core runs under a table's lock: see [`TableInner::with_device_rows`]. Dropping a plan or
//! a snapshot never waits for it: see [`DeferredReleases`].
#![allow(unsafe_code)]

use std::sync::{Arc, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::expiry::Residency;
use super::placement::{DeviceCopies, PlanPins};
use super::plan_lock::PlanGuard;
use super::table_context::TableContext;
use crate::error::{Kind, Result};
use crate::runtime::call_context::{ForeignCall, ForeignCode};
use crate::runtime::sync::{
    AtomicBool, AtomicU32, Condvar, Mutex, MutexGuard, Ordering, RwLock, RwLockReadGuard, RwLockWriteGuard, lock, wait,
    wait_at_most,
};
use crate::stats::DurationHistogram;
use crate::tiers::NoKernelWrites;

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
        self.try_lock_any()?.map(|guard| self.check_usable(guard)).transpose()
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
            return Err(Kind::State.error(format!("table {:?} cannot be used: {reason}", self.config.name)));
        }
        Ok(guard)
    }

    fn check_open(&self) -> Result<()> {
        if self.is_closed() {
            return Err(Kind::State.error(format!("table {:?} is closed", self.config.name)));
        }
        self.check_process()
    }

    fn make_guard<'a>(&'a self, locked: MutexGuard<'a, LockedTable>) -> Result<TableGuard<'a>> {
        let mut guard = TableGuard::new(&self.poison, &self.context.lock_held, locked);
        if let Some(cause) = self.poison.cause() {
            return Err(Kind::State.error(format!(
                "table {:?} cannot be used since {}: open the table again, which resumes its last flush, or load a checkpoint \
                 into a new one",
                self.config.name,
                cause.description()
            )));
        }
        if self.deferred.has_any() {
            self.run_deferred(&mut guard);
        }
        Ok(guard)
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
            self.lock_always().placement.finish_loads();
            // The rows of a poisoned table are unknown.
            if self.poison.cause().is_none()
                && let Err(error) = self.during_sweeps(|| Ok(self.lock_always()), |guard| guard.notify_rest())
            {
                tracing::warn!("table {:?}: the rows of its last sweep are not delivered: {error}", self.config.name);
            }
            let mut guard = self.lock_always();
            guard.placement.end_notifying();
            guard.placement.give_back_budget(self.poison.cause().is_some());
        }
        was_open
    }

    /// Ends an export by slot, even if the table is unusable. Does nothing in a forked child, because the export
    /// belongs to the parent.
    pub(crate) fn end_export(&self, number: u64) {
        if self.check_process().is_ok() {
            self.lock_always().placement.changes.exports.end(number);
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
        Err(Kind::State.error(format!(
            "table {:?} was opened by process {} and is used in a forked child: open tables after the fork, or start \
                 workers with the spawn method",
            self.config.name, self.pid
        )))
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
    fn without_kernel_writes(&self) -> Result<RowUseGuard<'_>> {
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
        let (pins, snapshot_ended) = self.deferred.take();
        // The pins of a poisoned table are unknown.
        if self.poison.cause().is_none() {
            for plan_pins in pins {
                residency.release(plan_pins);
            }
        }
        if snapshot_ended {
            residency.end_snapshot();
            self.has_snapshot.store(false, Ordering::Release);
        }
    }

    /// True if the table has no snapshot. Works for a closed or poisoned table too.
    fn is_without_snapshot(&self) -> bool {
        let mut guard = self.lock_always();
        if self.deferred.has_any() {
            self.run_deferred(&mut guard);
        }
        guard.placement.changes.snapshot.is_none()
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

/// State guarded by the table's lock.
struct LockedTable {
    residency: Residency,
    /// If set, the reason why every use is rejected until a load succeeds.
    unusable: Option<String>,
}

/// The residency of a table, with its lock held. Poisons the table if dropped by a panic.
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
    fn new(poison: &'a TablePoison, durations: &'a DurationHistogram, locked: MutexGuard<'a, LockedTable>) -> Self {
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
    fn held_by_caller() -> Self {
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

/// The interrupted operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoisonCause {
    /// A panic during a change of the table's placement or rows.
    Panic,
    /// A training step that has updated only some of its rows.
    Update,
}

impl PoisonCause {
    /// Continuation of the message "the table cannot be used since".
    pub(crate) fn description(self) -> &'static str {
        match self {
            Self::Panic => "a panic interrupted a change of it, a bug of torchrec-embcache to report",
            Self::Update => {
                "the update of a training step failed half-way (its own error says why): some of the batch's rows are updated and \
                 others are not"
            }
        }
    }
}

/// Set if a table rejects all use because an operation was interrupted. It is permanent.
#[derive(Debug)]
struct TablePoison(AtomicU32);

impl Default for TablePoison {
    fn default() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl TablePoison {
    fn set(&self, cause: PoisonCause) {
        let number = match cause {
            PoisonCause::Panic => 1,
            PoisonCause::Update => 2,
        };
        self.0.store(number, Ordering::Release);
    }

    fn cause(&self) -> Option<PoisonCause> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            1 => Some(PoisonCause::Panic),
            _ => Some(PoisonCause::Update),
        }
    }
}

/// Releases of dropped plans and snapshots, for the next holder of the table's lock.
///
/// They may be dropped anywhere: by a garbage collector that runs while a thread, perhaps the same one, holds the
/// table's lock. So a drop never waits for that lock. The work under the lock is done immediately if the lock is free;
/// else the next holder of the lock does it before anything else.
#[derive(Default)]
struct DeferredReleases {
    /// Locked only to add to the list or to empty it.
    list: Mutex<DeferredList>,
    /// True if the list is not empty.
    has_any: AtomicBool,
    snapshot_ended: Condvar,
}

#[derive(Default)]
struct DeferredList {
    pins: Vec<PlanPins>,
    snapshot_ended: bool,
    /// Number of ended snapshots.
    snapshots_ended: u64,
}

impl DeferredReleases {
    /// Adds the pins of a plan to release.
    fn add_pins(&self, pins: PlanPins) {
        let mut list = lock(&self.list);
        list.pins.push(pins);
        self.has_any.store(true, Ordering::Release);
    }

    /// Adds the end of the table's snapshot.
    fn add_snapshot_end(&self) {
        {
            let mut list = lock(&self.list);
            list.snapshot_ended = true;
            list.snapshots_ended += 1;
            self.has_any.store(true, Ordering::Release);
        }
        self.snapshot_ended.notify_all();
    }

    /// True if there is deferred work.
    #[inline]
    fn has_any(&self) -> bool {
        self.has_any.load(Ordering::Acquire)
    }

    /// Takes the deferred work: the pins of plans, and true if the snapshot has ended.
    fn take(&self) -> (Vec<PlanPins>, bool) {
        let mut list = lock(&self.list);
        self.has_any.store(false, Ordering::Release);
        (std::mem::take(&mut list.pins), std::mem::take(&mut list.snapshot_ended))
    }

    /// Number of ended snapshots.
    fn snapshots_ended(&self) -> u64 {
        lock(&self.list).snapshots_ended
    }

    /// Waits until more than `ended` snapshots have ended.
    fn wait_for_snapshot_end(&self, ended: u64) {
        let mut list = lock(&self.list);
        while list.snapshots_ended == ended {
            list = wait(&self.snapshot_ended, list);
        }
    }

    /// Like [`DeferredReleases::wait_for_snapshot_end`], for about `most` at most.
    fn wait_for_snapshot_end_at_most(&self, ended: u64, most: Duration) {
        let list = lock(&self.list);
        if list.snapshots_ended == ended {
            drop(wait_at_most(&self.snapshot_ended, list, most));
        }
    }
}

impl TableInner {
    /// Runs `work` under the table's lock, taken by `lock`, until it stops requesting device rows. Returns the last
    /// result of `work`, and the lock, held since the start of that run.
    ///
    /// Between two runs the lock is free for others, such as plans that start, and the rows are read.
    /// `rows_in_use` is held from the first to the last run, so that no kernel changes the rows and no row arrives on
    /// the device.
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
            let mut guard = lock()?;
            guard.placement.set_copies(copies);
            let done = work(&mut guard);
            copies = std::mem::take(&mut guard.placement.copies);
            if done.is_ok() || !copies.has_pending_reads() {
                if chosen.0.take().is_some() {
                    guard.placement.keep_leaving_on_device();
                }
                return done.map(|done| (guard, done));
            }
            drop(guard);
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
        let mut guard = lock()?;
        if self.has_device() && guard.has_sweep() {
            drop(guard);
            let rows = self.without_kernel_writes()?;
            return self.with_device_rows(&rows, lock, work);
        }
        let done = work(&mut guard)?;
        Ok((guard, done))
    }

    /// Locks the table after removing all rows that the sweep in progress matches, except rows of active plans.
    pub(crate) fn lock_after_sweep(&self) -> Result<TableGuard<'_>> {
        self.lock_during_sweeps(|| self.lock(), |guard| guard.finish_sweep()).map(|(guard, ())| guard)
    }
}

/// The table of an operation that has chosen victims of the device tier and is abandoned. Keeps the victims.
struct DeviceVictimsGuard<'a>(Option<&'a TableInner>);

impl Drop for DeviceVictimsGuard<'_> {
    fn drop(&mut self) {
        // A closed or poisoned table does not use its slots.
        if let Some(table) = self.0
            && let Ok(mut guard) = table.lock_any()
        {
            guard.placement.keep_leaving_on_device();
        }
    }
}
