//! One rank's part of an asynchronous save.

use std::sync::Mutex;

use embcache::checkpoint::{AsyncSaveOptions, AsyncSaveTable, CheckpointName, PRE_IMAGE_BYTES, RankSnapshot};
use pyo3::prelude::*;

use crate::checkpoint::{ended_error, lock};
use crate::directory::PyCheckpointDirectory;
use crate::error::to_python;
use crate::foreign::drop_detached;
use crate::records::{PyAsyncSaveTable, PyManifestDigest, PyTableWriteStats};

/// Lowers the priority of the calling thread permanently.
#[pyfunction]
pub(crate) fn work_in_background() {
    embcache::checkpoint::work_in_background();
}

/// Snapshot of one rank's tables.
#[pyclass(frozen, name = "CheckpointSnapshot", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointSnapshot {
    inner: Mutex<Option<RankSnapshot>>,
}

impl Drop for PyCheckpointSnapshot {
    fn drop(&mut self) {
        drop_detached(lock(&self.inner).take());
    }
}

#[pymethods]
impl PyCheckpointSnapshot {
    #[new]
    #[pyo3(signature = (directory, name, rank, world_size, tables, next_epoch, bytes_per_second, *, counters=true))]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned values")]
    #[expect(clippy::too_many_arguments, reason = "one call of Python")]
    fn new(
        py: Python<'_>,
        directory: &PyCheckpointDirectory,
        name: &str,
        rank: u32,
        world_size: u32,
        tables: Vec<Py<PyAsyncSaveTable>>,
        next_epoch: u32,
        bytes_per_second: Option<u64>,
        counters: bool,
    ) -> PyResult<Self> {
        let name: CheckpointName = name.parse().map_err(to_python)?;
        let table = |table: &Py<PyAsyncSaveTable>| {
            let table = table.get();
            AsyncSaveTable {
                module: table.module.clone(),
                table: table.table.get().inner.clone(),
                hyperparameters: table.hyperparameters.clone(),
                base: table.base.clone().map(Into::into),
            }
        };
        let tables: Vec<AsyncSaveTable> = tables.iter().map(table).collect();
        let options =
            AsyncSaveOptions { next_epoch, pre_image_bytes: PRE_IMAGE_BYTES, bytes_per_second, counts: counters };
        let begin = || RankSnapshot::begin(&directory.inner, name, (rank, world_size), tables, options);
        let begun = py.detach(begin).map_err(to_python)?;
        Ok(Self { inner: Mutex::new(Some(begun)) })
    }

    fn write_table(&self, py: Python<'_>) -> PyResult<Option<PyTableWriteStats>> {
        let write = || lock(&self.inner).as_mut().map(RankSnapshot::write_next);
        let written = py.detach(write).ok_or_else(|| to_python(ended_error("moment")))?.map_err(to_python)?;
        Ok(written.map(PyTableWriteStats::changes))
    }

    fn finish(&self, py: Python<'_>) -> PyResult<PyManifestDigest> {
        let finish = || {
            let moment = lock(&self.inner).take();
            moment.map(|moment| moment.finish().map(Into::into))
        };
        py.detach(finish).ok_or_else(|| to_python(ended_error("moment")))?.map_err(to_python)
    }

    fn release(&self, py: Python<'_>) {
        py.detach(|| {
            let moment = lock(&self.inner).take();
            drop(moment);
        });
    }
}
