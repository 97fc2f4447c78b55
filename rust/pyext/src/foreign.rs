//! Python code that runs while a lock of the core's is held.
//!
//! Three rules keep it from waiting for itself. It never runs on the main thread, where Python may run a signal handler between any two
//! instructions: so handlers run when the lock is free. What it drops, or has the garbage collector drop, does not wait for the lock
//! ([`Plan`](embcache::cache::Plan), `TableSnapshot`). And whatever else it does with the table is refused by the core.

use std::sync::atomic::{AtomicBool, Ordering};

use embcache::logical_thread::off_main_thread;
use pyo3::prelude::*;

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

/// Run Python under a lock of the core's. The caller does not hold the GIL.
pub(crate) fn under_lock<T: Send>(work: impl FnOnce(Python<'_>) -> T + Send) -> T {
    let run = || Python::attach(work);
    if ENDING.load(Ordering::Acquire) { run() } else { off_main_thread(run) }
}

/// Drop something of the core's that may take its locks or wait for its threads, whose holders may want the GIL. Where the interpreter
/// has ended they would wait for ever, and nobody has a use for what it frees.
pub(crate) fn drop_detached<T: Send>(value: Option<T>) {
    let mut value = value;
    if Python::try_attach(|py| py.detach(|| drop(value.take()))).is_none() {
        std::mem::forget(value);
    }
}
