//! Python code that runs while a table's rows on the device may not change, or may be changed only by this code. The
//! table's own lock is free during this time; the lock that keeps kernels from the rows is held.
//!
//! Four rules prevent deadlocks of such code with itself:
//!
//! 1. Python may run a signal handler between any two instructions of the main thread, and the handler may access the
//!    rows. So either signals wait on that thread until the lock is free ([`without_signal_handlers`]), or the code
//!    runs on another thread ([`with_rows_locked_off_main`]).
//! 2. The garbage collector, which runs finalizers of arbitrary objects whenever Python creates an object, is paused
//!    until the code has finished ([`CollectorPause`]).
//! 3. Objects that the code drops do not wait for the lock ([`Plan`](embcache::cache::Plan), `TableSnapshot`).
//! 4. The Rust core rejects any other access of the code to the rows.
//!
//! Also work of the Rust core that releases the GIL: locks, drops, and work during which signals are checked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use embcache::runtime::call_context::off_main_thread;
use embcache::runtime::signals::{self, are_deferred, defer_signals, is_main_thread};
use embcache::{Error, Kind};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::IntoPyDict;

use crate::error::to_python;

/// True once interpreter exit has started. Afterwards only the main thread can acquire the GIL.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Called by `atexit`.
#[pyfunction]
fn on_interpreter_exit() {
    ENDING.store(true, Ordering::Release);
    embcache::work_alone();
}

/// Resumes the garbage collector in a forked child, where the threads that paused it do not exist.
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
    // Acquires the GIL, so it runs before any thread can hold the lock of `COLLECTOR_PAUSES`.
    COLLECTOR.get_or_try_init(py, || py.import("gc").map(Bound::unbind))?;
    let after_fork = [("after_in_child", wrap_pyfunction!(resume_collector_in_child, module)?)].into_py_dict(py)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&after_fork))?;
    let ends = wrap_pyfunction!(on_interpreter_exit, module)?;
    py.import("atexit")?.call_method1("register", (ends,)).map(drop)
}

/// The module `gc`.
static COLLECTOR: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// Number of threads whose code pauses the garbage collector, and true if it was enabled before the first of them.
static COLLECTOR_PAUSES: Mutex<(usize, bool)> = Mutex::new((0, false));

/// Pauses Python's automatic garbage collection while it lives: a finalizer could wait for a thread that needs the rows
/// locked by the current code. Explicit calls of `gc.collect()` still run.
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

/// Calls a function of the module `gc`. None of the functions called here releases the GIL, so no thread waits for the
/// lock of `COLLECTOR_PAUSES` while it has the GIL.
fn call_collector<'py>(py: Python<'py>, function: &str) -> Option<Bound<'py, PyAny>> {
    COLLECTOR.get(py)?.bind(py).call_method0(function).ok()
}

/// Runs Python code while the caller keeps kernels from changing rows on the device, or changes them itself. The
/// garbage collector is paused during this time.
pub(crate) fn with_rows_locked<T>(work: impl FnOnce(Python<'_>) -> T) -> T {
    Python::attach(|py| {
        let _waits = CollectorPause::begin(py);
        work(py)
    })
}

/// Like [`with_rows_locked`], for a caller that does not hold the GIL and whose thread may be the main one.
pub(crate) fn with_rows_locked_off_main<T: Send>(work: impl FnOnce(Python<'_>) -> T + Send) -> T {
    let run = || with_rows_locked(work);
    if are_deferred() || ENDING.load(Ordering::Acquire) { run() } else { off_main_thread(run) }
}

/// Runs `work`, which takes a lock of the Rust core and runs Python under it, while no Python signal handler runs.
///
/// Handlers of earlier signals run first; an exception from one is returned. Handlers of signals that arrive during
/// `work` run afterwards. The work runs on the caller's thread, because torch keeps its stream, device and number of
/// threads per thread.
pub(crate) fn without_signal_handlers<T>(py: Python<'_>, work: impl FnOnce(Python<'_>) -> PyResult<T>) -> PyResult<T> {
    // Handlers run on the main thread only.
    let _kept_back = if is_main_thread() { defer_signals(handled_by_python(py)?) } else { None };
    py.check_signals()?;
    work(py)
}

/// Returns the signals that have a Python handler.
fn handled_by_python(py: Python<'_>) -> PyResult<Vec<i32>> {
    static GET: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    // `signal.getsignal` wraps this function and converts its result to enumerations, which is slow.
    let get = GET.get_or_try_init(py, || py.import("_signal")?.getattr("getsignal").map(Bound::unbind))?.bind(py);
    let mut handled = Vec::new();
    for signal in 1..=signals::LAST {
        if get.call1((signal,)).is_ok_and(|handler| handler.is_callable()) {
            handled.push(signal);
        }
    }
    Ok(handled)
}

/// Runs `work` of the Rust core without the GIL.
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> embcache::Result<T> + Send) -> PyResult<T> {
    py.detach(work).map_err(to_python)
}

/// Drops an object of the Rust core without the GIL. The drop may take locks or wait for threads whose holders need the
/// GIL.
///
/// After interpreter exit they would wait indefinitely. The value is then leaked, since the process is about to end.
pub(crate) fn drop_detached<T: Send>(value: Option<T>) {
    let mut value = value;
    if Python::try_attach(|py| py.detach(|| drop(value.take()))).is_none() {
        std::mem::forget(value);
    }
}

/// An object of the Rust core that is dropped by [`drop_detached`].
pub(crate) struct DetachedDrop<T: Send>(Option<T>);

impl<T: Send> DetachedDrop<T> {
    pub(crate) fn new(object: T) -> Self {
        Self(Some(object))
    }
}

impl<T: Send> std::ops::Deref for DetachedDrop<T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.0.as_ref().expect("only the drop takes the object")
    }
}

impl<T: Send> Drop for DetachedDrop<T> {
    fn drop(&mut self) {
        drop_detached(self.0.take());
    }
}

/// An object of the Rust core that ends before its Python object.
pub(crate) struct EndingObject<T> {
    object: Mutex<Option<T>>,
    /// Its name in errors.
    name: &'static str,
}

impl<T: Send> EndingObject<T> {
    pub(crate) fn new(name: &'static str, object: T) -> Self {
        Self { object: Mutex::new(Some(object)), name }
    }

    /// Returns the error of using the object after its end.
    fn ended_error(&self) -> Error {
        Kind::State.error(format!("the {} has ended: make another", self.name))
    }

    /// Runs `work` on the object without the GIL.
    pub(crate) fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut T) -> embcache::Result<R> + Send,
    ) -> PyResult<R> {
        detached(py, || work(lock(&self.object).as_mut().ok_or_else(|| self.ended_error())?))
    }

    /// Ends the object by `work`, without the GIL.
    pub(crate) fn end<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(T) -> embcache::Result<R> + Send,
    ) -> PyResult<R> {
        detached(py, || {
            let object = lock(&self.object).take();
            work(object.ok_or_else(|| self.ended_error())?)
        })
    }

    /// Ends the object by `work`, without the GIL, unless it has ended.
    pub(crate) fn abandon(&self, py: Python<'_>, work: impl FnOnce(T) -> embcache::Result<()> + Send) -> PyResult<()> {
        detached(py, || {
            let object = lock(&self.object).take();
            object.map_or(Ok(()), work)
        })
    }
}

/// Locks `mutex`, even if a thread panicked while it held the lock. No caller may wait for the GIL while it holds the
/// lock, because a thread that has the GIL may be waiting for the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The exception that Python code raised during work of the Rust core.
pub(crate) struct RaisedException(Mutex<Option<PyErr>>);

impl RaisedException {
    /// Keeps the exception of `done`, if it is one. Returns `message` as the error of the work then.
    pub(crate) fn catch<T>(&self, done: PyResult<T>, message: &str) -> embcache::Result<T> {
        done.map_err(|exception| {
            *lock(&self.0) = Some(exception);
            Kind::State.error(message)
        })
    }
}

/// Like [`detached`], for work that runs Python code. If that raised an exception, raises it.
pub(crate) fn detached_with_python<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&RaisedException) -> embcache::Result<T> + Send,
) -> PyResult<T> {
    let raised = RaisedException(Mutex::new(None));
    let done = py.detach(|| work(&raised));
    raised.0.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)?;
    done.map_err(to_python)
}

/// Runs `work`, which may take long or wait for another process, without the GIL. Checks for signals repeatedly: an
/// exception of a signal handler aborts the work.
pub(crate) fn with_signal_checks<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&mut (dyn FnMut() -> embcache::Result<()> + '_)) -> embcache::Result<T> + Send,
) -> PyResult<T> {
    detached_with_python(py, |raised| {
        #[expect(clippy::redundant_closure_for_method_calls, reason = "the method alone is of one lifetime")]
        let check = || Python::attach(|py| py.check_signals());
        work(&mut || raised.catch(check(), "a signal ended the work"))
    })
}
