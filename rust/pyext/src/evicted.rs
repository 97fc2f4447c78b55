//! Rows that were evicted from a table, for delivery by Python.

use std::sync::Arc;

use embcache::cache::{EvictedQueue, EvictedRows};
use pyo3::prelude::*;

use crate::rows::PyRowBlock;

/// Rows that were evicted after one step for one reason.
#[pyclass(frozen, get_all, name = "EvictedBlock", module = "torchrec_embcache._native")]
pub(crate) struct PyEvictedBlock {
    step: u64,
    reason: &'static str,
    rows: Py<PyRowBlock>,
}

#[pymethods]
impl PyEvictedBlock {
    fn __repr__(&self) -> String {
        format!("EvictedBlock(step={}, reason={:?})", self.step, self.reason)
    }
}

impl PyEvictedBlock {
    pub(crate) fn of(py: Python<'_>, evicted: EvictedRows, vector_floats: usize) -> PyResult<Self> {
        let EvictedRows { step, reason, rows } = evicted;
        Ok(Self { step, reason, rows: Py::new(py, PyRowBlock::of(py, &rows.headers, rows.vectors, vector_floats)?)? })
    }
}

/// The undelivered evicted rows of one table. Outlives the table.
#[pyclass(frozen, name = "EvictedQueue", module = "torchrec_embcache._native")]
pub(crate) struct PyEvictedQueue {
    pub(crate) inner: Arc<EvictedQueue>,
}

#[pymethods]
impl PyEvictedQueue {
    fn __len__(&self) -> usize {
        self.inner.rows()
    }

    fn __repr__(&self) -> String {
        format!("EvictedQueue of {} rows", self.inner.rows())
    }

    fn take(&self, py: Python<'_>) -> PyResult<Option<PyEvictedBlock>> {
        let taken = py.detach(|| self.inner.take());
        taken.map(|rows| PyEvictedBlock::of(py, rows, self.inner.floats())).transpose()
    }

    fn wait(&self, py: Python<'_>) -> PyResult<Option<PyEvictedBlock>> {
        let taken = py.detach(|| self.inner.wait());
        taken.map(|rows| PyEvictedBlock::of(py, rows, self.inner.floats())).transpose()
    }

    fn pause(&self) {
        self.inner.pause();
    }

    fn resume(&self) {
        self.inner.resume();
    }

    fn reopen(&self) -> bool {
        self.inner.reopen()
    }

    fn is_ended(&self) -> bool {
        self.inner.is_ended()
    }
}
