//! Python code that runs while a table's rows on the device may not change, or may be changed by this code alone. The table's own lock is free
//! meanwhile; the one that is held is the lock that keeps kernels from the rows.
//!
//! Four rules keep such code from waiting for itself:
//!
//! 1. Python may run a signal handler between any two instructions of the main thread, and the handler may want the rows. So either
//!    signals wait on that thread until the lock is free ([`without_signal_handlers`]), or the code runs on another thread ([`with_rows_locked_off_main`]).
//! 2. The garbage collector, which runs finalisers of anybody's objects wherever Python makes an object, waits until the code is done
//!    ([`CollectorPause`]).
//! 3. What the code drops does not wait for the lock ([`Plan`](embcache::cache::Plan), `TableSnapshot`).
//! 4. The core refuses whatever else the code does with the rows.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use embcache::logical_thread::off_main_thread;
use embcache::signals::{self, are_deferred, defer_signals, is_main_thread};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::IntoPyDict;

/// Whether the interpreter is about to end. From then on it gives the GIL to the main thread alone.
static ENDING: AtomicBool = AtomicBool::new(false);

/// `atexit` calls this.
#[pyfunction]
fn on_interpreter_exit() {
    ENDING.store(true, Ordering::Release);
    embcache::work_alone();
}

/// A child was forked. Whoever kept the collector waiting is in the parent.
#[pyfunction]
fn resume_collector_in_child(py: Python<'_>) {
    let mut waits = COLLECTOR_PAUSES.lock().unwrap_or_else(PoisonError::into_inner);
    if waits.0 > 0 && waits.1 {
        call_collector(py, "enable");
    }
    *waits = (0, false);
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    // This waits for the GIL, and so it comes before anybody has the lock of `COLLECTOR_PAUSES`.
    COLLECTOR.get_or_try_init(py, || py.import("gc").map(Bound::unbind))?;
    let after_fork = [("after_in_child", wrap_pyfunction!(resume_collector_in_child, module)?)].into_py_dict(py)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&after_fork))?;
    let ends = wrap_pyfunction!(on_interpreter_exit, module)?;
    py.import("atexit")?.call_method1("register", (ends,)).map(drop)
}

/// The module `gc`.
static COLLECTOR: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// How many threads run code that the garbage collector waits for, and whether it was on before the first of them.
static COLLECTOR_PAUSES: Mutex<(usize, bool)> = Mutex::new((0, false));

/// As long as one of these lives, Python's garbage collector does not run by itself: a finaliser could wait for a thread that wants the rows
/// which the code in hand keeps from it. Whoever calls `gc.collect()` still runs it.
struct CollectorPause<'py>(Python<'py>);

impl<'py> CollectorPause<'py> {
    fn begin(py: Python<'py>) -> Self {
        let mut waits = COLLECTOR_PAUSES.lock().unwrap_or_else(PoisonError::into_inner);
        if waits.0 == 0 {
            waits.1 = call_collector(py, "isenabled").is_some_and(|is_on| is_on.is_truthy().unwrap_or(false));
            if waits.1 {
                call_collector(py, "disable");
            }
        }
        waits.0 += 1;
        Self(py)
    }
}

impl Drop for CollectorPause<'_> {
    fn drop(&mut self) {
        let mut waits = COLLECTOR_PAUSES.lock().unwrap_or_else(PoisonError::into_inner);
        waits.0 -= 1;
        if waits.0 == 0 && waits.1 {
            call_collector(self.0, "enable");
        }
    }
}

/// Call a function of the module `gc`. None of the functions that are called here gives up the GIL, so nobody who has it waits for the lock of
/// `COLLECTOR_PAUSES`.
fn call_collector<'py>(py: Python<'py>, function: &str) -> Option<Bound<'py, PyAny>> {
    COLLECTOR.get(py)?.bind(py).call_method0(function).ok()
}

/// Run Python while the caller keeps kernels from changing rows on the device, or changes them himself. The garbage collector waits meanwhile.
pub(crate) fn with_rows_locked<T>(work: impl FnOnce(Python<'_>) -> T) -> T {
    Python::attach(|py| {
        let _waits = CollectorPause::begin(py);
        work(py)
    })
}

/// As [`with_rows_locked`], for a caller who does not hold the GIL and whose thread may be the main one.
pub(crate) fn with_rows_locked_off_main<T: Send>(work: impl FnOnce(Python<'_>) -> T + Send) -> T {
    let run = || with_rows_locked(work);
    if are_deferred() || ENDING.load(Ordering::Acquire) { run() } else { off_main_thread(run) }
}

/// Do `work`, which takes a lock of the core and runs Python under it, while no signal handler of Python runs.
///
/// Handlers of signals that came before run first, and what they raise is the error here. Handlers of signals that come meanwhile run
/// afterwards. The caller's thread does the work, because torch keeps its stream, device and number of threads by thread.
pub(crate) fn without_signal_handlers<T>(py: Python<'_>, work: impl FnOnce(Python<'_>) -> PyResult<T>) -> PyResult<T> {
    // Handlers run on the main thread only.
    let _kept_back = if is_main_thread() { defer_signals(handled_by_python(py)?) } else { None };
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
