//! Saving and loading checkpoints.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use embcache::checkpoint::{Checkpoint, CheckpointName, Latest, RankDigest, RankWriter, Save, TableReader};
use embcache::io::default_engine;
use embcache::paths::{directory_to_load, directory_to_save};
use embcache::{Error, Kind};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::checkpoint_rows::GivenRows;
use crate::error::to_python;
use crate::table::PyTable;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ended(what: &str) -> PyErr {
    to_python(Error::new(Kind::State, format!("the {what} has ended: make another")))
}

/// Check the directory that a checkpoint is saved to, making it when missing; its absolute path.
#[pyfunction]
#[pyo3(signature = (path))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn check_save_dir(py: Python<'_>, path: PathBuf) -> PyResult<OsString> {
    py.detach(|| directory_to_save(&path)).map(PathBuf::into_os_string).map_err(to_python)
}

/// Check the directory that a checkpoint is loaded from; its absolute path.
#[pyfunction]
#[pyo3(signature = (path))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn check_load_dir(py: Python<'_>, path: PathBuf) -> PyResult<OsString> {
    py.detach(|| directory_to_load(&path)).map(PathBuf::into_os_string).map_err(to_python)
}

/// The newest complete checkpoint of a directory.
#[pyfunction]
#[pyo3(signature = (path))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn latest_checkpoint(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    py.detach(|| Latest::read(&*default_engine()?, &path)).map(|latest| latest.to_string()).map_err(to_python)
}

/// The coordinator's part of a save.
#[pyclass(frozen, name = "CheckpointSave", module = "torchrec_embcache._native")]
pub(crate) struct PySave {
    inner: Mutex<Option<Save>>,
    #[pyo3(get)]
    name: String,
}

impl PySave {
    fn take(&self) -> PyResult<Save> {
        lock(&self.inner).take().ok_or_else(|| ended("save"))
    }
}

#[pymethods]
impl PySave {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn new(py: Python<'_>, path: PathBuf, random: u64) -> PyResult<Self> {
        let save = py.detach(|| Save::begin(default_engine()?, &path, random)).map_err(to_python)?;
        Ok(Self { name: save.name().to_string(), inner: Mutex::new(Some(save)) })
    }

    fn publish(&self, py: Python<'_>, digests: Vec<(u64, u64)>, next_epoch: u32) -> PyResult<Vec<String>> {
        let save = self.take()?;
        let digests: Vec<RankDigest> = digests.into_iter().map(|(bytes, xxh3)| RankDigest { bytes, xxh3 }).collect();
        let published = py.detach(|| save.publish(&digests, next_epoch)).map_err(to_python)?;
        Ok(published.left.iter().map(Error::to_string).collect())
    }

    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        let save = self.take()?;
        py.detach(|| save.abandon()).map_err(to_python)
    }
}

/// One rank's part of a save.
#[pyclass(frozen, name = "CheckpointWriter", module = "torchrec_embcache._native")]
pub(crate) struct PyWriter {
    inner: Mutex<Option<RankWriter>>,
}

#[pymethods]
impl PyWriter {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn new(py: Python<'_>, path: PathBuf, name: &str, rank: u32, world_size: u32) -> PyResult<Self> {
        let name: CheckpointName = name.parse().map_err(to_python)?;
        let writer =
            py.detach(|| RankWriter::new(default_engine()?, &path, name, rank, world_size)).map_err(to_python)?;
        Ok(Self { inner: Mutex::new(Some(writer)) })
    }

    fn write_table(
        &self,
        py: Python<'_>,
        module: &str,
        table: &PyTable,
        hyperparameters: BTreeMap<String, f64>,
    ) -> PyResult<u64> {
        py.detach(|| {
            let mut writer = lock(&self.inner);
            let writer = writer.as_mut().ok_or_else(|| ended("writer"))?;
            writer.write_rows_of(module, &table.inner, hyperparameters).map_err(to_python)
        })
    }

    #[pyo3(signature = (spec, bucket_begin, bucket_end, chunks))]
    fn write_rows(
        &self,
        py: Python<'_>,
        spec: &str,
        bucket_begin: u32,
        bucket_end: u32,
        chunks: &Bound<'_, PyAny>,
    ) -> PyResult<u64> {
        let mut source = GivenRows::new(spec, chunks)?;
        let written = py.detach(|| {
            let mut writer = lock(&self.inner);
            let writer = writer.as_mut().ok_or_else(|| ended("writer"))?;
            writer.write_table(source.spec(), bucket_begin..bucket_end, &mut source).map_err(to_python)
        });
        source.end(written)
    }

    fn finish(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        py.detach(|| {
            let writer = lock(&self.inner).take().ok_or_else(|| ended("writer"))?;
            writer.finish().map(|digest| (digest.bytes, digest.xxh3)).map_err(to_python)
        })
    }
}

/// A checkpoint whose manifests are checked.
#[pyclass(frozen, name = "CheckpointReader", module = "torchrec_embcache._native")]
pub(crate) struct PyReader {
    inner: Checkpoint,
    /// By module and table: what `check_table` made ready.
    readers: Mutex<HashMap<(String, String), TableReader>>,
}

#[pymethods]
impl PyReader {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn new(py: Python<'_>, path: PathBuf, latest: &str) -> PyResult<Self> {
        let latest: Latest = latest.parse().map_err(to_python)?;
        let inner = py.detach(|| Checkpoint::open(default_engine()?, &path, latest)).map_err(to_python)?;
        Ok(Self { inner, readers: Mutex::default() })
    }

    #[getter]
    fn name(&self) -> &str {
        &self.inner.manifest().name
    }

    #[getter]
    fn next_epoch(&self) -> u32 {
        self.inner.manifest().next_epoch
    }

    fn tables<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let entries = &self.inner.manifest().tables;
        entries
            .iter()
            .map(|entry| {
                let (spec, dict) = (&entry.spec, PyDict::new(py));
                dict.set_item("module", &spec.module)?;
                dict.set_item("table", &spec.table)?;
                dict.set_item("key", spec.key)?;
                dict.set_item("dim", spec.dim)?;
                dict.set_item("optimizer", &spec.optimizer.name)?;
                dict.set_item("hyperparameters", spec.optimizer.hyperparameters.clone())?;
                dict.set_item("step", spec.step)?;
                dict.set_item("seed", spec.seed)?;
                dict.set_item("total_num_buckets", spec.total_num_buckets)?;
                dict.set_item("rows", entry.rows)?;
                Ok(dict)
            })
            .collect()
    }

    fn check_table(
        &self,
        py: Python<'_>,
        module: String,
        table: &PyTable,
        bucket_begin: u32,
        bucket_end: u32,
    ) -> PyResult<()> {
        let name = table.inner.config().name.clone();
        let reader = py
            .detach(|| {
                let entry = self.inner.table(&module, &name)?;
                entry.spec.check_fits(table.inner.config())?;
                table.inner.check_idle()?;
                self.inner.table_reader(&module, &name, bucket_begin..bucket_end)
            })
            .map_err(to_python)?;
        lock(&self.readers).insert((module, name), reader);
        Ok(())
    }

    fn load_table(&self, py: Python<'_>, module: String, table: &PyTable) -> PyResult<u64> {
        let name = table.inner.config().name.clone();
        let reader = lock(&self.readers).remove(&(module, name)).ok_or_else(|| {
            to_python(Error::new(Kind::State, "check_table() comes before load_table(), once for each"))
        })?;
        py.detach(|| reader.load_into(&table.inner)).map_err(to_python)?;
        Ok(reader.rows())
    }
}
