//! Python code that runs while a lock of the core is held.
//!
//! Three rules keep it from waiting for itself:
//!
//! 1. Python may run a signal handler between any two instructions of the main thread, and the handler may want the lock. So either
//!    signals wait on that thread until the lock is free ([`without_handlers`]), or the code runs on another thread ([`under_lock`]).
//! 2. What the code drops, or lets the garbage collector drop, does not wait for the lock ([`Plan`](embcache::cache::Plan),
//!    `TableMoment`).
//! 3. The core refuses whatever else the code does with the table.

use std::sync::atomic::{AtomicBool, Ordering};

use embcache::logical_thread::off_main_thread;
use embcache::signals::{self, are_kept_back, is_main_thread, keep_back};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Whether the interpreter is about to end. From then on it gives the GIL to the main thread alone.
static ENDING: AtomicBool = AtomicBool::new(false);

/// `atexit` calls this.
#[pyfunction]
fn interpreter_ends() {
    ENDING.store(true, Ordering::Release);
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let ends = wrap_pyfunction!(interpreter_ends, module)?;
    module.py().import("atexit")?.call_method1("register", (ends,)).map(drop)
}

/// Run Python under a lock of the core that was taken for another reason. The caller does not hold the GIL.
pub(crate) fn under_lock<T: Send>(work: impl FnOnce(Python<'_>) -> T + Send) -> T {
    let run = || Python::attach(work);
    if are_kept_back() || ENDING.load(Ordering::Acquire) { run() } else { off_main_thread(run) }
}

/// Do `work`, which takes a lock of the core and runs Python under it, while no signal handler of Python runs.
///
/// Handlers of signals that came before run first, and what they raise is the error here. Handlers of signals that come meanwhile run
/// afterwards. The caller's thread does the work, because torch keeps its stream, device and number of threads by thread.
pub(crate) fn without_handlers<T>(py: Python<'_>, work: impl FnOnce(Python<'_>) -> PyResult<T>) -> PyResult<T> {
    // Handlers run on the main thread only.
    let _kept_back = if is_main_thread() { keep_back(handled_by_python(py)?) } else { None };
    py.check_signals()?;
    work(py)
}

/// The signals that have a handler in Python.
fn handled_by_python(py: Python<'_>) -> PyResult<Vec<i32>> {
    static GET: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    // `signal.getsignal` calls this function and makes enumerations of what it returns, which takes time.
    let get = GET.get_or_try_init(py, || py.import("_signal")?.getattr("getsignal").map(Bound::unbind))?.bind(py);
    let mut handled = Vec::new();
    for signal in 1..=signals::LAST {
        if get.call1((signal,)).is_ok_and(|handler| handler.is_callable()) {
            handled.push(signal);
        }
    }
    Ok(handled)
}

/// Drop something of the core without the GIL. The drop may take locks or wait for threads whose holders want the GIL.
///
/// Where the interpreter has ended they would wait for ever. Then the value is leaked, as the process is about to end anyway.
pub(crate) fn drop_detached<T: Send>(value: Option<T>) {
    let mut value = value;
    if Python::try_attach(|py| py.detach(|| drop(value.take()))).is_none() {
        std::mem::forget(value);
    }
}
