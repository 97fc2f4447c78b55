//! One rank's part of a save beside training.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;

use embcache::checkpoint::{BesideOptions, CheckpointName, IMAGE_BYTES, RankMoment, TableToSave};
use pyo3::prelude::*;

use crate::blocks::saving_in;
use crate::checkpoint::{ancestor, ended, lock};
use crate::error::to_python;
use crate::foreign::drop_detached;
use crate::table::PyTable;

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

/// A table's module, itself, its hyperparameters, and the checkpoint that a delta of it builds on.
type GivenTable = (String, Py<PyTable>, BTreeMap<String, f64>, Option<(String, u64, u32)>);

#[pymethods]
impl PyMoment {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned values")]
    #[expect(clippy::too_many_arguments, reason = "one call of Python")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        name: &str,
        rank: u32,
        world_size: u32,
        tables: Vec<GivenTable>,
        next_epoch: u32,
        bytes_per_second: Option<u64>,
    ) -> PyResult<Self> {
        let name: CheckpointName = name.parse().map_err(to_python)?;
        let tables: Vec<TableToSave> = tables
            .into_iter()
            .map(|(module, table, hyperparameters, builds_on)| TableToSave {
                module,
                table: table.get().inner.clone(),
                hyperparameters,
                ancestor: builds_on.map(ancestor),
            })
            .collect();
        let options = BesideOptions { next_epoch, image_bytes: IMAGE_BYTES, bytes_per_second };
        let begin = || {
            let (path, engine) = saving_in(&path)?;
            RankMoment::begin(engine, &path, name, (rank, world_size), tables, options)
        };
        let begun = py.detach(begin).map_err(to_python)?;
        Ok(Self { inner: Mutex::new(Some(begun)) })
    }

    fn write_table(&self, py: Python<'_>) -> PyResult<Option<(u64, u64)>> {
        let write = || lock(&self.inner).as_mut().map(RankMoment::write_next);
        py.detach(write).ok_or_else(|| ended("moment"))?.map_err(to_python)
    }

    fn finish(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let finish = || {
            let moment = lock(&self.inner).take();
            moment.map(|moment| moment.finish().map(|digest| (digest.bytes, digest.xxh3)))
        };
        py.detach(finish).ok_or_else(|| ended("moment"))?.map_err(to_python)
    }

    fn release(&self, py: Python<'_>) {
        py.detach(|| {
            let moment = lock(&self.inner).take();
            drop(moment);
        });
    }
}
