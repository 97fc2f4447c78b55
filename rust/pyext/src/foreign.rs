//! Python code that runs while a lock of the core's is held.
//!
//! Three rules keep it from waiting for itself. Python may run a signal handler between any two instructions of the main thread: so
//! either signals wait there until the lock is free ([`without_handlers`]), or the code runs on another thread ([`under_lock`]). What it
//! drops, or has the garbage collector drop, does not wait for the lock ([`Plan`](embcache::cache::Plan), `TableMoment`). And whatever
//! else it does with the table is refused by the core.

use std::sync::atomic::{AtomicBool, Ordering};

use embcache::logical_thread::off_main_thread;
use embcache::signals::{self, are_kept_back, is_main_thread, keep_back};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The interpreter is about to end: from then on it gives its lock to the main thread alone.
static ENDING: AtomicBool = AtomicBool::new(false);

/// To be called by `atexit`.
#[pyfunction]
fn interpreter_ends() {
    ENDING.store(true, Ordering::Release);
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let ends = wrap_pyfunction!(interpreter_ends, module)?;
    module.py().import("atexit")?.call_method1("register", (ends,)).map(drop)
}

/// Run Python under a lock of the core's that was taken for other reasons than to run Python. The caller does not hold the GIL.
pub(crate) fn under_lock<T: Send>(work: impl FnOnce(Python<'_>) -> T + Send) -> T {
    let run = || Python::attach(work);
    if are_kept_back() || ENDING.load(Ordering::Acquire) { run() } else { off_main_thread(run) }
}

/// Do `work`, which takes a lock of the core's and runs Python under it, while no signal handler of Python's runs: those of signals that
/// come meanwhile run after it, and those of signals that came before, first. What a handler raises before `work` is the error here.
///
/// The caller's thread does it, because what torch keeps by thread (its stream, its device, its threads) is the caller's.
pub(crate) fn without_handlers<T>(py: Python<'_>, work: impl FnOnce(Python<'_>) -> PyResult<T>) -> PyResult<T> {
    // Handlers run on no other thread.
    let _kept_back = if is_main_thread() { keep_back(handled_by_python(py)?) } else { None };
    py.check_signals()?;
    work(py)
}

/// The signals that have a handler in Python.
fn handled_by_python(py: Python<'_>) -> PyResult<Vec<i32>> {
    static GET: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    // The function below `signal.getsignal`, which makes enumerations of its answers.
    let get = GET.get_or_try_init(py, || py.import("_signal")?.getattr("getsignal").map(Bound::unbind))?.bind(py);
    let mut handled = Vec::new();
    for signal in 1..=signals::LAST {
        if get.call1((signal,)).is_ok_and(|handler| handler.is_callable()) {
            handled.push(signal);
        }
    }
    Ok(handled)
}

/// Drop something of the core's that may take its locks or wait for its threads, whose holders may want the GIL. Where the interpreter
/// has ended they would wait for ever, and nobody has a use for what it frees.
pub(crate) fn drop_detached<T: Send>(value: Option<T>) {
    let mut value = value;
    if Python::try_attach(|py| py.detach(|| drop(value.take()))).is_none() {
        std::mem::forget(value);
    }
}
