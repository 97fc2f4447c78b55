//! A table's locks: who may take them, what is done first by whoever gets them, and what makes a table refuse them.

use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

use super::commit::Pins;
use super::table::{Shared, State};
use crate::error::{Error, Kind, Result};
use crate::sync::{
    AtomicBool, AtomicU32, Condvar, Mutex, MutexGuard, Ordering, RwLockReadGuard, RwLockWriteGuard, lock, wait,
    wait_at_most,
};

/// What ended half-way and left a table in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tear {
    /// A panic, amid a change of the table's state or of its rows.
    Panic,
    /// A training step whose rows are updated in part.
    Update,
}

/// Whether a table is refused because something ended half-way.
#[derive(Debug)]
pub(crate) struct Torn(AtomicU32);

impl Default for Torn {
    fn default() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl Torn {
    fn set(&self, tear: Tear) {
        let number = match tear {
            Tear::Panic => 1,
            Tear::Update => 2,
        };
        self.0.store(number, Ordering::Release);
    }

    fn get(&self) -> Option<Tear> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            1 => Some(Tear::Panic),
            _ => Some(Tear::Update),
        }
    }
}

/// What plans and moments let go of when they are dropped.
///
/// They may be dropped anywhere: by a garbage collector that runs while somebody, perhaps the same thread, holds the table's lock.
/// So whoever drops them never waits for that lock. He leaves here what is to be done under it, does it at once where the lock is
/// free, and else whoever takes the lock next does it before anything else. The lock of this list is held for no longer than it takes
/// to add to it or to empty it.
pub(crate) struct Left {
    list: Mutex<LeftList>,
    /// Whether there is anything in the list.
    any: AtomicBool,
    /// A moment was let go of.
    moment_gone: Condvar,
}

#[derive(Default)]
struct LeftList {
    plans: Vec<Pins>,
    moment: bool,
    /// How many moments were let go of so far.
    moments_gone: u64,
}

impl Default for Left {
    fn default() -> Self {
        Self { list: Mutex::new(LeftList::default()), any: AtomicBool::new(false), moment_gone: Condvar::new() }
    }
}

impl Shared {
    /// The table's state; `State` errors when it is closed, unusable after a failed load or a panic, used in a forked child, or by the
    /// code that its own holder runs to read device rows.
    pub(crate) fn lock(&self) -> Result<Held<'_>> {
        self.usable(self.lock_any()?)
    }

    /// As `lock`, also of a table that waits for a load.
    pub(crate) fn lock_any(&self) -> Result<Held<'_>> {
        self.check_open()?;
        self.check_not_reading_device()?;
        self.held(lock(&self.state))
    }

    /// As `lock`; `None` where another thread holds it now.
    pub(crate) fn try_lock(&self) -> Result<Option<Held<'_>>> {
        self.try_lock_any()?.map(|state| self.usable(state)).transpose()
    }

    fn try_lock_any(&self) -> Result<Option<Held<'_>>> {
        self.check_open()?;
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        self.held(state).map(Some)
    }

    fn usable<'a>(&self, state: Held<'a>) -> Result<Held<'a>> {
        if let Some(reason) = &state.unusable {
            return Err(Error::new(Kind::State, format!("table {:?} cannot be used: {reason}", self.config.name)));
        }
        Ok(state)
    }

    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(Kind::State, format!("table {:?} is closed", self.config.name)));
        }
        self.check_process()
    }

    fn held<'a>(&'a self, state: MutexGuard<'a, State>) -> Result<Held<'a>> {
        let mut state = Held { torn: &self.torn, unwinding: std::thread::panicking(), state };
        if let Some(tear) = self.torn.get() {
            let what = match tear {
                Tear::Panic => "a panic interrupted a change of it, a bug of torchrec-embcache to report",
                Tear::Update => {
                    "the update of a training step failed half-way (its own error says why): some of the batch's rows are updated and \
                     others are not"
                }
            };
            return Err(Error::new(
                Kind::State,
                format!(
                    "table {:?} cannot be used since {what}: open the table again, to go on from its last flush, or load a checkpoint \
                     into a new one",
                    self.config.name
                ),
            ));
        }
        self.do_what_was_left(&mut state);
        Ok(state)
    }

    /// `State` in a process forked from the one that opened the table. No lock is to be asked for before this: one that another thread
    /// held at the fork stays locked in the child.
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

    /// `State` where the caller is the code that the holder of the table's lock runs to read device rows.
    pub(crate) fn check_not_reading_device(&self) -> Result<()> {
        if self.reading_device.is_calling() {
            Err(self.called_from_within("its rows are read from the device"))
        } else {
            Ok(())
        }
    }

    fn called_from_within(&self, what: &str) -> Error {
        Error::new(
            Kind::State,
            format!(
                "table {:?} is used by code that runs while {what} (a destructor, perhaps, or an object that the garbage collector \
                 finalizes), which would wait for itself for ever: use the table when that is done",
                self.config.name
            ),
        )
    }

    /// Refuse every use from now on.
    pub(crate) fn tear(&self, tear: Tear) {
        self.torn.set(tear);
    }

    /// Keeps kernels that write out. `State` in a forked child, and where the caller itself keeps everybody out.
    pub(crate) fn reading_rows(&self) -> Result<RwLockReadGuard<'_, ()>> {
        self.check_rows()?;
        Ok(self.rows_in_use.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Keeps all others out. Errors as `reading_rows`.
    pub(crate) fn writing_rows(&self) -> Result<RwLockWriteGuard<'_, ()>> {
        self.check_rows()?;
        Ok(self.rows_in_use.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// As `writing_rows`; `None` where the caller keeps all others out already, by [`Plan::exclusively`](super::Plan::exclusively).
    pub(crate) fn writing_rows_or_exclusive(&self) -> Result<Option<RwLockWriteGuard<'_, ()>>> {
        if self.changing_device.is_calling() { Ok(None) } else { self.writing_rows().map(Some) }
    }

    /// As `reading_rows`; `None` where the caller keeps all others out already, by [`Plan::exclusively`](super::Plan::exclusively).
    pub(crate) fn reading_rows_or_exclusive(&self) -> Result<Option<RwLockReadGuard<'_, ()>>> {
        if self.changing_device.is_calling() { Ok(None) } else { self.reading_rows().map(Some) }
    }

    fn check_rows(&self) -> Result<()> {
        self.check_process()?;
        self.check_not_reading_device()?;
        if self.changing_device.is_calling() {
            return Err(self.called_from_within("its rows on the device are placed or updated"));
        }
        Ok(())
    }

    /// A plan gives its pins back. Does not wait for the table's lock.
    pub(crate) fn leave_pins(&self, pins: Pins) {
        self.leave(|list| list.plans.push(pins));
    }

    /// The moment of the table is let go of. Does not wait for the table's lock.
    pub(crate) fn leave_moment(&self) {
        self.leave(|list| {
            list.moment = true;
            list.moments_gone += 1;
        });
        self.left.moment_gone.notify_all();
    }

    fn leave(&self, add: impl FnOnce(&mut LeftList)) {
        // In a forked child pins and moments are its parent's, and so are the locks.
        if self.check_process().is_err() {
            return;
        }
        {
            let mut list = lock(&self.left.list);
            add(&mut list);
            self.left.any.store(true, Ordering::Release);
        }
        // A table that is closed or torn has no use for it.
        drop(self.try_lock_any());
    }

    /// Do under the table's lock what was left for whoever takes it.
    #[inline]
    fn do_what_was_left(&self, state: &mut State) {
        if self.left.any.load(Ordering::Acquire) {
            self.do_all_that_was_left(state);
        }
    }

    #[cold]
    fn do_all_that_was_left(&self, state: &mut State) {
        let (plans, moment) = {
            let mut list = lock(&self.left.list);
            self.left.any.store(false, Ordering::Release);
            (std::mem::take(&mut list.plans), std::mem::take(&mut list.moment))
        };
        // Of a torn table nobody knows what is pinned.
        if self.torn.get().is_none() {
            for pins in plans {
                pins.release(state);
            }
        }
        if moment {
            state.moment = None;
            self.has_moment.store(false, Ordering::Release);
        }
    }

    /// As `wait_for_moment`, at most about so long; whether there is none.
    pub(crate) fn wait_for_moment_at_most(&self, most: Duration) -> Result<bool> {
        self.check_not_reading_device()?;
        let gone = lock(&self.left.list).moments_gone;
        {
            let mut state = lock(&self.state);
            self.do_what_was_left(&mut state);
            if state.moment.is_none() {
                return Ok(true);
            }
        }
        let list = lock(&self.left.list);
        if list.moments_gone == gone {
            drop(wait_at_most(&self.left.moment_gone, list, most));
        }
        Ok(false)
    }

    /// Wait until no moment of the table is held.
    pub(crate) fn wait_for_moment(&self) -> Result<()> {
        self.check_not_reading_device()?;
        loop {
            let gone = lock(&self.left.list).moments_gone;
            {
                let mut state = lock(&self.state);
                self.do_what_was_left(&mut state);
                if state.moment.is_none() {
                    return Ok(());
                }
            }
            let mut list = lock(&self.left.list);
            while list.moments_gone == gone {
                list = wait(&self.left.moment_gone, list);
            }
        }
    }
}

/// The table's state, held. Dropped by a panic it leaves the table torn.
pub(crate) struct Held<'a> {
    torn: &'a Torn,
    /// Whether it was taken by a panic's clean-up.
    unwinding: bool,
    state: MutexGuard<'a, State>,
}

impl std::ops::Deref for Held<'_> {
    type Target = State;
    #[inline]
    fn deref(&self) -> &State {
        &self.state
    }
}

impl std::ops::DerefMut for Held<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.unwinding {
            self.torn.set(Tear::Panic);
        }
    }
}
