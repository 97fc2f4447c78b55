//! One rank's part of a save beside training.

use std::sync::Mutex;

use embcache::checkpoint::{BesideOptions, CheckpointName, IMAGE_BYTES, RankMoment, TableToSave};
use pyo3::prelude::*;

use crate::checkpoint::{ended, lock};
use crate::directory::PyDirectory;
use crate::error::to_python;
use crate::foreign::drop_detached;
use crate::records::{PyDigest, PyTableToSave, PyTableWritten};

/// From now on the calling thread works while others leave it time.
#[pyfunction]
pub(crate) fn work_behind() {
    embcache::checkpoint::work_behind();
}

/// The tables of one rank at one moment.
#[pyclass(frozen, name = "CheckpointMoment", module = "torchrec_embcache._native")]
pub(crate) struct PyMoment {
    inner: Mutex<Option<RankMoment>>,
}

impl Drop for PyMoment {
    fn drop(&mut self) {
        drop_detached(lock(&self.inner).take());
    }
}

#[pymethods]
impl PyMoment {
    #[new]
    #[pyo3(signature = (directory, name, rank, world_size, tables, next_epoch, bytes_per_second, *, counters=true))]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned values")]
    #[expect(clippy::too_many_arguments, reason = "one call of Python")]
    fn new(
        py: Python<'_>,
        directory: &PyDirectory,
        name: &str,
        rank: u32,
        world_size: u32,
        tables: Vec<Py<PyTableToSave>>,
        next_epoch: u32,
        bytes_per_second: Option<u64>,
        counters: bool,
    ) -> PyResult<Self> {
        let name: CheckpointName = name.parse().map_err(to_python)?;
        let table = |table: &Py<PyTableToSave>| {
            let table = table.get();
            TableToSave {
                module: table.module.clone(),
                table: table.table.get().inner.clone(),
                hyperparameters: table.hyperparameters.clone(),
                ancestor: table.ancestor.clone().map(Into::into),
            }
        };
        let tables: Vec<TableToSave> = tables.iter().map(table).collect();
        let options = BesideOptions { next_epoch, image_bytes: IMAGE_BYTES, bytes_per_second, counts: counters };
        let begin = || RankMoment::begin(&directory.inner, name, (rank, world_size), tables, options);
        let begun = py.detach(begin).map_err(to_python)?;
        Ok(Self { inner: Mutex::new(Some(begun)) })
    }

    fn write_table(&self, py: Python<'_>) -> PyResult<Option<PyTableWritten>> {
        let write = || lock(&self.inner).as_mut().map(RankMoment::write_next);
        let written = py.detach(write).ok_or_else(|| to_python(ended("moment")))?.map_err(to_python)?;
        Ok(written.map(PyTableWritten::changes))
    }

    fn finish(&self, py: Python<'_>) -> PyResult<PyDigest> {
        let finish = || {
            let moment = lock(&self.inner).take();
            moment.map(|moment| moment.finish().map(Into::into))
        };
        py.detach(finish).ok_or_else(|| to_python(ended("moment")))?.map_err(to_python)
    }

    fn release(&self, py: Python<'_>) {
        py.detach(|| {
            let moment = lock(&self.inner).take();
            drop(moment);
        });
    }
}
