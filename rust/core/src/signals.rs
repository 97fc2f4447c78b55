//! Signals that are kept back while a lock is held.
//!
//! A program's signal handler may ask for a lock that the thread on which it runs holds, and would then wait for itself. While a
//! [`SignalDeferral`] lives, signals are only noted. When it is dropped, each noted signal is sent again, and finds the handler that was
//! there before.
//!
//! Handlers belong to the whole process. While one thread keeps signals back, the other threads do not see them either.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub use crate::process::is_main_thread;

/// The highest signal number. The lowest is 1.
pub const LAST: c_int = if cfg!(target_os = "linux") { 64 } else { 31 };

/// Bit `n - 1` is set when signal `n` came while it was kept back.
static PENDING_SIGNALS: AtomicU64 = AtomicU64::new(0);
/// The process that keeps signals back, or 0. A forked child inherits the handlers, but has nobody who would send the noted signals
/// again.
static OWNER_PID: AtomicU32 = AtomicU32::new(0);
static SAVED_ACTIONS: SavedActions = SavedActions([const { UnsafeCell::new(MaybeUninit::uninit()) }; LAST as usize]);

/// For each signal, its action from before. An entry is written before the handler that reads it is set.
struct SavedActions([UnsafeCell<MaybeUninit<libc::sigaction>>; LAST as usize]);

// SAFETY: only the thread that made its process the KEEPER writes an entry, while this module's handler is not set for the signal.
// Only that handler and the same keeper read it.
unsafe impl Sync for SavedActions {}

/// Keeps signals back until it is dropped.
#[must_use = "signals are kept back until it is dropped"]
pub struct SignalDeferral {
    signals: u64,
}

/// Keep the given signals back. `None` where somebody does so already. Signals after which a program cannot go on, such as
/// `SIGSEGV`, and numbers that are no signals are left as they are.
pub fn defer_signals(signals: impl IntoIterator<Item = c_int>) -> Option<SignalDeferral> {
    let (keeper, me) = (OWNER_PID.load(Ordering::Acquire), std::process::id());
    if keeper == me || OWNER_PID.compare_exchange(keeper, me, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return None;
    }
    if keeper != 0 {
        // Signals that came to the parent of this process are not for this process.
        PENDING_SIGNALS.store(0, Ordering::Relaxed);
    }
    let mut kept = SignalDeferral { signals: 0 };
    for signal in signals {
        kept.add(signal);
    }
    Some(kept)
}

/// Whether signals are kept back now.
pub fn are_deferred() -> bool {
    OWNER_PID.load(Ordering::Acquire) == std::process::id()
}

impl SignalDeferral {
    fn add(&mut self, signal: c_int) {
        let never = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT, libc::SIGTRAP];
        if !(1..=LAST).contains(&signal) || never.contains(&signal) || self.signals & bit(signal) != 0 {
            return;
        }
        // A child that was forked while its parent kept signals back has inherited the handler and the entry.
        if is_recorded(signal) {
            // SAFETY: the entry was filled before the handler was set, and only this thread, the keeper, may write it.
            unsafe { restore_action(signal) };
        }
        let before = SAVED_ACTIONS.0[signal as usize - 1].get();
        let mut noting = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: zeros are a valid sigaction with an empty mask, whose other fields are set here. Until the handler is set
        // `before` is this keeper's alone, and it is filled first.
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
            // SAFETY: the entry was filled before the signal's handler was set, and nobody has written it since.
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

/// Whether this module's handler is set for the signal.
fn is_recorded(signal: c_int) -> bool {
    let mut now = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: `now` is read only where the call succeeded, and has filled it.
    unsafe {
        libc::sigaction(signal, null(), now.as_mut_ptr()) == 0 && (*now.as_ptr()).sa_sigaction == recording_handler()
    }
}

/// Restore the action that the signal had before, unless somebody has set another one meanwhile.
///
/// # Safety
/// The signal's entry in `BEFORE` is filled, and nobody writes it during the call.
unsafe fn restore_action(signal: c_int) {
    if is_recorded(signal) {
        // SAFETY: by the caller's promise the entry is filled and nobody writes it.
        unsafe { libc::sigaction(signal, (*SAVED_ACTIONS.0[signal as usize - 1].get()).as_ptr(), null_mut()) };
    }
}

/// The handler. It calls only what may be called within a handler.
extern "C" fn record_signal(signal: c_int) {
    if are_deferred() {
        PENDING_SIGNALS.fetch_or(bit(signal), Ordering::Relaxed);
    } else {
        // SAFETY: in a forked child nobody writes the entries, and this one was filled before the handler was set.
        unsafe {
            restore_action(signal);
            libc::raise(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    static HANDLED: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn handled(_: c_int) {
        HANDLED.fetch_add(1, Ordering::SeqCst);
    }

    fn handler_of(signal: c_int) -> libc::sighandler_t {
        let mut now = MaybeUninit::<libc::sigaction>::uninit();
        // SAFETY: the call fills `now`, as the assertion checks.
        unsafe {
            assert_eq!(libc::sigaction(signal, null(), now.as_mut_ptr()), 0);
            (*now.as_ptr()).sa_sigaction
        }
    }

    // All of this is one test, because handlers belong to the process.
    #[test]
    fn signals_wait_until_they_are_let_go_and_each_comes_once() {
        let (one, two) = (libc::SIGUSR1, libc::SIGUSR2);
        // SAFETY: the handler counts and does nothing else.
        unsafe {
            libc::signal(one, handled as extern "C" fn(c_int) as libc::sighandler_t);
            libc::signal(two, handled as extern "C" fn(c_int) as libc::sighandler_t);
        }
        let kept = defer_signals([one, two, libc::SIGSEGV, libc::SIGKILL, 0, 65]).expect("nobody else");
        assert_eq!(kept.signals, bit(one) | bit(two));
        assert!(defer_signals([one]).is_none(), "kept back already");
        // SAFETY: the handler that is set now only notes the signal.
        let raised = unsafe { (libc::raise(one), libc::raise(one)) };
        assert_eq!((raised, HANDLED.load(Ordering::SeqCst)), ((0, 0), 0));
        drop(kept);
        assert_eq!(HANDLED.load(Ordering::SeqCst), 1);
        assert_eq!(handler_of(one), handled as extern "C" fn(c_int) as libc::sighandler_t);

        let kept = defer_signals([one]).expect("nobody else");
        // SAFETY: the child ends by a signal's default action or by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: the handler only counts, and in the child it runs at once. _exit ends the child.
            unsafe {
                libc::raise(one);
                libc::_exit(HANDLED.load(Ordering::SeqCst) as c_int);
            }
        }
        let mut status = 0;
        // SAFETY: this waits for the child, and `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 2));
        // SAFETY: this only ignores the signal, as another thread of the program might do.
        unsafe { libc::signal(one, libc::SIG_IGN) };
        drop(kept);
        assert_eq!(handler_of(one), libc::SIG_IGN, "what was set meanwhile stays");
    }
}
