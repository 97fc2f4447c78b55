//! Parts of a checkpoint, and extents.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;

use embcache::checkpoint::{Part, sweep_parts};
use embcache::{Error, Kind};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use crate::blocks::saving_in;
use crate::buffers::slice;
use crate::checkpoint::lock;
use crate::error::to_python;
use crate::foreign::drop_detached;
use crate::table::PyTable;

/// Remove the parts in a directory that nobody holds; what could not be removed.
#[pyfunction]
#[pyo3(name = "sweep_parts", signature = (path))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn sweep(py: Python<'_>, path: PathBuf) -> PyResult<Vec<String>> {
    let swept = py.detach(|| {
        let (path, engine) = saving_in(&path)?;
        sweep_parts(&*engine, &path)
    });
    let left = swept.map_err(to_python)?;
    Ok(left.iter().map(Error::to_string).collect())
}

/// What one rank writes of a save whose ranks agree on nothing before its end.
#[pyclass(frozen, name = "CheckpointPart", module = "torchrec_embcache._native")]
pub(crate) struct PyPart {
    inner: Mutex<Option<Part>>,
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
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn new(py: Python<'_>, path: PathBuf, random: u64, expected_bytes: u64) -> PyResult<Self> {
        let part = py.detach(|| {
            let (path, engine) = saving_in(&path)?;
            Part::begin(engine, &path, random, expected_bytes)
        });
        let part = part.map_err(to_python)?;
        Ok(Self { name: part.name().to_string(), inner: Mutex::new(Some(part)) })
    }

    fn write_table(
        &self,
        py: Python<'_>,
        module: &str,
        table: &PyTable,
        hyperparameters: BTreeMap<String, f64>,
    ) -> PyResult<u64> {
        self.with(py, |part| part.tables()?.write_rows_of(module, &table.inner, hyperparameters))
    }

    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned lists")]
    fn hold_tables(
        &self,
        py: Python<'_>,
        tables: Vec<(String, Py<PyTable>, BTreeMap<String, f64>)>,
        next_epoch: u32,
    ) -> PyResult<()> {
        let tables: Vec<_> = tables
            .iter()
            .map(|(module, table, hyperparameters)| (module.clone(), &table.get().inner, hyperparameters.clone()))
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

    fn end_extent(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let extent = self.with(py, |part| part.extents()?.end_extent())?;
        Ok((extent.offset, extent.bytes))
    }

    fn finish(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let digest = self.with(py, Part::finish)?;
        Ok((digest.bytes, digest.xxh3))
    }

    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| lock(&self.inner).take().map_or(Ok(()), Part::abandon)).map_err(to_python)
    }
}
