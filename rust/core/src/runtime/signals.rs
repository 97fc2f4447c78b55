//! Signals that are deferred while a lock is held.
//!
//! A program's signal handler may acquire a lock that its thread already holds, and would then deadlock. While a
//! [`SignalDeferral`] exists, signals are only recorded. When it is dropped, each recorded signal is raised again with
//! the previous handler in place.
//!
//! Handlers belong to the process. While one thread defers signals, the other threads do not receive them either.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub use crate::runtime::process::is_main_thread;

/// The highest signal number. The lowest is 1.
pub const LAST: c_int = if cfg!(target_os = "linux") { 64 } else { 31 };

/// Bit `n - 1` is set if signal `n` arrived while it was deferred.
static PENDING_SIGNALS: AtomicU64 = AtomicU64::new(0);
/// The process that defers signals, or 0. A forked child inherits the handlers, but has no thread that would raise the
/// recorded signals again.
static OWNER_PID: AtomicU32 = AtomicU32::new(0);
static SAVED_ACTIONS: SavedActions = SavedActions([const { UnsafeCell::new(MaybeUninit::uninit()) }; LAST as usize]);

/// The previous action of each signal. An entry is written before the handler that reads it is set.
struct SavedActions([UnsafeCell<MaybeUninit<libc::sigaction>>; LAST as usize]);

// SAFETY: only the thread that set OWNER_PID to its process writes an entry, while this module's handler is not set for
// the signal. Only that handler and the same thread read it.
unsafe impl Sync for SavedActions {}

/// Defers signals until it is dropped.
#[must_use = "signals are kept back until it is dropped"]
pub struct SignalDeferral {
    signals: u64,
}

/// Defers the given signals. Returns `None` if signals are already deferred. Signals after which a program cannot
/// continue, such as `SIGSEGV`, and invalid signal numbers are ignored.
pub fn defer_signals(signals: impl IntoIterator<Item = c_int>) -> Option<SignalDeferral> {
    let (keeper, me) = (OWNER_PID.load(Ordering::Acquire), std::process::id());
    if keeper == me || OWNER_PID.compare_exchange(keeper, me, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return None;
    }
    if keeper != 0 {
        // Signals that arrived in the parent of this process are not for this process.
        PENDING_SIGNALS.store(0, Ordering::Relaxed);
    }
    let mut kept = SignalDeferral { signals: 0 };
    for signal in signals {
        kept.add(signal);
    }
    Some(kept)
}

/// True while signals are deferred.
pub fn are_deferred() -> bool {
    OWNER_PID.load(Ordering::Acquire) == std::process::id()
}

impl SignalDeferral {
    fn add(&mut self, signal: c_int) {
        let never = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT, libc::SIGTRAP];
        if !(1..=LAST).contains(&signal) || never.contains(&signal) || self.signals & bit(signal) != 0 {
            return;
        }
        // A child that was forked while its parent deferred signals has inherited the handler and the entry.
        if is_recorded(signal) {
            // SAFETY: the entry was filled before the handler was set, and only this thread, the owner, may write it.
            unsafe { restore_action(signal) };
        }
        let before = SAVED_ACTIONS.0[signal as usize - 1].get();
        let mut noting = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: zeros are a valid sigaction with an empty mask, whose other fields are set here. Until the handler is
        // set, only this owner uses `before`, and it is filled first.
        let set = unsafe {
            (*noting.as_mut_ptr()).sa_sigaction = recording_handler();
            (*noting.as_mut_ptr()).sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
            libc::sigaction(signal, null(), (*before).as_mut_ptr()) == 0
                && libc::sigaction(signal, noting.as_ptr(), null_mut()) == 0
        };
        if set {
            self.signals |= bit(signal);
        }
    }
}

impl Drop for SignalDeferral {
    fn drop(&mut self) {
        for signal in (1..=LAST).filter(|signal| self.signals & bit(*signal) != 0) {
            // SAFETY: the entry was filled before the signal's handler was set, and has not been written since.
            unsafe { restore_action(signal) };
        }
        OWNER_PID.store(0, Ordering::Release);
        let came = PENDING_SIGNALS.fetch_and(!self.signals, Ordering::Relaxed) & self.signals;
        for signal in (1..=LAST).filter(|signal| came & bit(*signal) != 0) {
            // SAFETY: this sends a signal to the calling thread, whose handler is the program's own again.
            unsafe { libc::raise(signal) };
        }
    }
}

fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

fn recording_handler() -> libc::sighandler_t {
    record_signal as extern "C" fn(c_int) as libc::sighandler_t
}

/// True if this module's handler is set for the signal.
fn is_recorded(signal: c_int) -> bool {
    let mut now = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: `now` is read only if the call succeeded, which fills it.
    unsafe {
        libc::sigaction(signal, null(), now.as_mut_ptr()) == 0 && (*now.as_ptr()).sa_sigaction == recording_handler()
    }
}

/// Restores the previous action of the signal, unless other code has set another action since.
///
/// # Safety
/// The signal's entry in `SAVED_ACTIONS` is filled, and no thread writes it during the call.
unsafe fn restore_action(signal: c_int) {
    if is_recorded(signal) {
        // SAFETY: the caller guarantees that the entry is filled and not being written.
        unsafe { libc::sigaction(signal, (*SAVED_ACTIONS.0[signal as usize - 1].get()).as_ptr(), null_mut()) };
    }
}

/// The signal handler. It calls only async-signal-safe functions.
extern "C" fn record_signal(signal: c_int) {
    if are_deferred() {
        PENDING_SIGNALS.fetch_or(bit(signal), Ordering::Relaxed);
    } else {
        // SAFETY: in a forked child no thread writes the entries, and this one was filled before the handler was set.
        unsafe {
            restore_action(signal);
            libc::raise(signal);
        }
    }
}

#[cfg(test)]
mod tests;
