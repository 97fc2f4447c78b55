//! Locks of block-level checkpoints, whose files Python writes.

use std::path::PathBuf;
use std::sync::Mutex;

use embcache::io::DirLock;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::checkpoint::lock;
use crate::error::to_python;

/// A lock on a directory or on a file in it, for `with`. Taking it and giving it up are each one call of the core, between whose steps
/// no Ctrl-C can come: a lock that Python code gave up could stay held with the error that interrupted it.
#[pyclass(frozen, name = "EntryLock", module = "torchrec_embcache._native")]
pub(crate) struct PyEntryLock {
    path: PathBuf,
    directory: i32,
    name: Option<String>,
    alone: bool,
    held: Mutex<Option<DirLock>>,
}

impl PyEntryLock {
    fn take(&self, py: Python<'_>, wait: bool) -> PyResult<bool> {
        loop {
            let taken = py.detach(|| {
                let open = PathBuf::from(format!("/proc/self/fd/{}", self.directory));
                DirLock::of_entry(&open, self.name.as_deref(), self.alone, wait)
                    .map_err(|error| error.renamed(&open, &self.path))
            });
            if let Some(taken) = taken.map_err(to_python)? {
                *lock(&self.held) = Some(taken);
                return Ok(true);
            }
            if !wait {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }
}

#[pymethods]
impl PyEntryLock {
    /// `directory` is the open descriptor of the directory `path`. Without `name` the lock is on the directory itself.
    #[new]
    #[pyo3(signature = (path, directory, name, alone))]
    fn new(path: PathBuf, directory: i32, name: Option<String>, alone: bool) -> Self {
        Self { path, directory, name, alone, held: Mutex::default() }
    }

    /// Take it if that can be done at once; whether it was.
    fn take_now(&self, py: Python<'_>) -> PyResult<bool> {
        self.take(py, false)
    }

    /// Give it up. Harmless twice.
    fn release(&self, py: Python<'_>) {
        py.detach(|| drop(lock(&self.held).take()));
    }

    /// Take it, when others have given it up.
    fn __enter__(slf: Py<Self>, py: Python<'_>) -> PyResult<Py<Self>> {
        slf.get().take(py, true)?;
        Ok(slf)
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) {
        self.release(py);
    }
}
