//! Checkpoint parts and dense extents.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::Mutex;

use embcache::checkpoint::{CheckpointPart, remove_stale_parts};
use embcache::{Error, Kind};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use crate::buffers::slice;
use crate::checkpoint::lock;
use crate::directory::PyCheckpointDirectory;
use crate::error::to_python;
use crate::foreign::drop_detached;
use crate::records::{PyAsyncSaveTable, PyStreamRange, PyTableWriteStats, PyWrittenPart};
use crate::table::PyTable;

/// Removes the checkpoint parts in a directory that no process holds. Returns an error for each part that could not be
/// removed.
#[pyfunction]
#[pyo3(name = "remove_stale_parts")]
pub(crate) fn remove_orphan_parts(py: Python<'_>, directory: &PyCheckpointDirectory) -> PyResult<Vec<String>> {
    let left = py.detach(|| remove_stale_parts(&directory.inner)).map_err(to_python)?;
    Ok(left.iter().map(Error::to_string).collect())
}

/// The part of a checkpoint that one rank writes without communicating before the end.
#[pyclass(frozen, name = "CheckpointPart", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointPart {
    inner: Mutex<Option<CheckpointPart>>,
    directory: OsString,
    #[pyo3(get)]
    name: String,
}

impl Drop for PyCheckpointPart {
    fn drop(&mut self) {
        drop_detached(lock(&self.inner).take());
    }
}

impl PyCheckpointPart {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut CheckpointPart) -> embcache::Result<T> + Send,
    ) -> PyResult<T> {
        let ended = || Error::new(Kind::State, "the part of a checkpoint has ended: make another");
        py.detach(|| lock(&self.inner).as_mut().ok_or_else(ended).and_then(work)).map_err(to_python)
    }
}

#[pymethods]
impl PyCheckpointPart {
    #[new]
    fn new(py: Python<'_>, directory: &PyCheckpointDirectory, random: u64, expected_bytes: u64) -> PyResult<Self> {
        let part = py.detach(|| CheckpointPart::begin(&directory.inner, random, expected_bytes)).map_err(to_python)?;
        let directory = directory.inner.path().as_os_str().to_owned();
        Ok(Self { directory, name: part.name().to_string(), inner: Mutex::new(Some(part)) })
    }

    fn write_table(
        &self,
        py: Python<'_>,
        module: &str,
        table: &PyTable,
        hyperparameters: BTreeMap<String, f64>,
    ) -> PyResult<PyTableWriteStats> {
        self.with(py, |part| part.rank_writer()?.write_rows_of(module, &table.inner, hyperparameters))
            .map(PyTableWriteStats::rows)
    }

    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned lists")]
    fn snapshot_tables(&self, py: Python<'_>, tables: Vec<Py<PyAsyncSaveTable>>, next_epoch: u32) -> PyResult<()> {
        let tables: Vec<_> = tables
            .iter()
            .map(Py::get)
            .map(|table| (table.module.clone(), &table.table.get().inner, table.hyperparameters.clone()))
            .collect();
        self.with(py, |part| part.snapshot_tables(tables, next_epoch))
    }

    fn write_snapshot(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, CheckpointPart::write_snapshots)
    }

    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned arrays")]
    fn append(&self, py: Python<'_>, data: PyReadonlyArray1<'_, u8>) -> PyResult<()> {
        let data = slice("data", &data)?;
        self.with(py, |part| part.dense_writer()?.append(data))
    }

    fn end_dense_extent(&self, py: Python<'_>) -> PyResult<PyStreamRange> {
        let extent = self.with(py, |part| part.dense_writer()?.end_extent())?;
        Ok(PyStreamRange { offset: extent.offset, bytes: extent.bytes })
    }

    fn finish(&self, py: Python<'_>) -> PyResult<PyWrittenPart> {
        let digest = self.with(py, CheckpointPart::finish)?.into();
        Ok(PyWrittenPart { directory: self.directory.clone(), name: self.name.clone(), digest })
    }

    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| lock(&self.inner).take().map_or(Ok(()), CheckpointPart::abandon)).map_err(to_python)
    }
}
