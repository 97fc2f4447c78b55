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

// This is one test, because handlers belong to the process.
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
    // SAFETY: the handler that is set at this point only records the signal.
    let raised = unsafe { (libc::raise(one), libc::raise(one)) };
    assert_eq!((raised, HANDLED.load(Ordering::SeqCst)), ((0, 0), 0));
    drop(kept);
    assert_eq!(HANDLED.load(Ordering::SeqCst), 1);
    assert_eq!(handler_of(one), handled as extern "C" fn(c_int) as libc::sighandler_t);

    let kept = defer_signals([one]).expect("nobody else");
    // SAFETY: the child is terminated by a signal's default action or by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the handler only counts, and in the child it runs immediately. _exit terminates the child.
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
