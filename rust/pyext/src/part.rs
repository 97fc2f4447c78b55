//! Parts of a checkpoint, and extents.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::Mutex;

use embcache::checkpoint::{Part, sweep_parts};
use embcache::{Error, Kind};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use crate::buffers::slice;
use crate::checkpoint::lock;
use crate::directory::PyDirectory;
use crate::error::to_python;
use crate::foreign::drop_detached;
use crate::records::{PyStreamRange, PyTableToSave, PyTableWritten, PyWrittenPart};
use crate::table::PyTable;

/// Remove the parts in a directory that nobody holds. Returns why some could not be removed.
#[pyfunction]
#[pyo3(name = "sweep_parts")]
pub(crate) fn sweep(py: Python<'_>, directory: &PyDirectory) -> PyResult<Vec<String>> {
    let left = py.detach(|| sweep_parts(&directory.inner)).map_err(to_python)?;
    Ok(left.iter().map(Error::to_string).collect())
}

/// What one rank writes of a save whose ranks agree on nothing before its end.
#[pyclass(frozen, name = "CheckpointPart", module = "torchrec_embcache._native")]
pub(crate) struct PyPart {
    inner: Mutex<Option<Part>>,
    directory: OsString,
    #[pyo3(get)]
    name: String,
}

impl Drop for PyPart {
    fn drop(&mut self) {
        drop_detached(lock(&self.inner).take());
    }
}

impl PyPart {
    fn with<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut Part) -> embcache::Result<T> + Send) -> PyResult<T> {
        let ended = || Error::new(Kind::State, "the part of a checkpoint has ended: make another");
        py.detach(|| lock(&self.inner).as_mut().ok_or_else(ended).and_then(work)).map_err(to_python)
    }
}

#[pymethods]
impl PyPart {
    #[new]
    fn new(py: Python<'_>, directory: &PyDirectory, random: u64, expected_bytes: u64) -> PyResult<Self> {
        let part = py.detach(|| Part::begin(&directory.inner, random, expected_bytes)).map_err(to_python)?;
        let directory = directory.inner.path().as_os_str().to_owned();
        Ok(Self { directory, name: part.name().to_string(), inner: Mutex::new(Some(part)) })
    }

    fn write_table(
        &self,
        py: Python<'_>,
        module: &str,
        table: &PyTable,
        hyperparameters: BTreeMap<String, f64>,
    ) -> PyResult<PyTableWritten> {
        self.with(py, |part| part.tables()?.write_rows_of(module, &table.inner, hyperparameters))
            .map(PyTableWritten::rows)
    }

    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned lists")]
    fn hold_tables(&self, py: Python<'_>, tables: Vec<Py<PyTableToSave>>, next_epoch: u32) -> PyResult<()> {
        let tables: Vec<_> = tables
            .iter()
            .map(Py::get)
            .map(|table| (table.module.clone(), &table.table.get().inner, table.hyperparameters.clone()))
            .collect();
        self.with(py, |part| part.hold(tables, next_epoch))
    }

    fn write_held_tables(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, Part::write_held)
    }

    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned arrays")]
    fn append(&self, py: Python<'_>, data: PyReadonlyArray1<'_, u8>) -> PyResult<()> {
        let data = slice("data", &data)?;
        self.with(py, |part| part.extents()?.append(data))
    }

    fn end_extent(&self, py: Python<'_>) -> PyResult<PyStreamRange> {
        let extent = self.with(py, |part| part.extents()?.end_extent())?;
        Ok(PyStreamRange { offset: extent.offset, bytes: extent.bytes })
    }

    fn finish(&self, py: Python<'_>) -> PyResult<PyWrittenPart> {
        let digest = self.with(py, Part::finish)?.into();
        Ok(PyWrittenPart { directory: self.directory.clone(), name: self.name.clone(), digest })
    }

    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| lock(&self.inner).take().map_or(Ok(()), Part::abandon)).map_err(to_python)
    }
}
