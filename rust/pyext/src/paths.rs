//! Directories of SSD tiers that users name.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::io::{BeneathEngine, IoEngine, default_engine};
use embcache::paths::{directory_for_ssd, encode_name, open_for_ssd};
use embcache::ssd::Root;
use pyo3::prelude::*;

use crate::error::to_python;

/// Check and hold a user's `ssd_dir`. Returns its absolute path, and an engine that works in it whatever becomes of the path.
pub(crate) fn ssd_engine(ssd_dir: &Path) -> embcache::Result<(PathBuf, Arc<dyn IoEngine>)> {
    let (path, directory) = open_for_ssd(ssd_dir)?;
    let engine = BeneathEngine::engine(default_engine()?, &path, directory);
    Ok((path, engine))
}

/// Check a user's `ssd_dir`. Returns its absolute path.
#[pyfunction]
#[pyo3(signature = (ssd_dir))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn check_ssd_dir(py: Python<'_>, ssd_dir: PathBuf) -> PyResult<OsString> {
    py.detach(|| directory_for_ssd(&ssd_dir)).map(PathBuf::into_os_string).map_err(to_python)
}

/// The directory of a table's shard below `ssd_dir`.
#[pyfunction]
#[pyo3(signature = (ssd_dir, module, table, rank, world_size))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn table_dir(ssd_dir: PathBuf, module: &str, table: &str, rank: u32, world_size: u32) -> OsString {
    ssd_dir.join(encode_name(module)).join(encode_name(table)).join(format!("{rank}-of-{world_size}")).into_os_string()
}

/// A directory in which the directories of tables lie, and the marks of their flushes.
#[pyclass(frozen, name = "FlushRoot", module = "torchrec_embcache._native")]
pub(crate) struct PyRoot {
    inner: Root,
}

#[pymethods]
impl PyRoot {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn new(py: Python<'_>, ssd_dir: PathBuf) -> PyResult<Self> {
        let (path, engine) = py.detach(|| ssd_engine(&ssd_dir)).map_err(to_python)?;
        Ok(Self { inner: Root::new(engine, &path) })
    }

    fn name(&self, py: Python<'_>, random: u64) -> PyResult<u64> {
        py.detach(|| self.inner.name(random)).map_err(to_python)
    }

    fn is_named(&self, py: Python<'_>, name: u64) -> PyResult<bool> {
        py.detach(|| self.inner.is_named(name)).map_err(to_python)
    }

    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn prepare(&self, py: Python<'_>, token: u64, coordinator: PathBuf, name: u64) -> PyResult<()> {
        py.detach(|| self.inner.prepare(token, &coordinator, name)).map_err(to_python)
    }

    fn commit(&self, py: Python<'_>, token: u64) -> PyResult<()> {
        py.detach(|| self.inner.commit(token)).map_err(to_python)
    }

    fn is_complete(&self, py: Python<'_>, token: u64) -> PyResult<bool> {
        py.detach(|| self.inner.is_complete(token)).map_err(to_python)
    }

    fn forget(&self, py: Python<'_>, token: u64) -> PyResult<()> {
        py.detach(|| self.inner.forget(token)).map_err(to_python)
    }

    fn tokens(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        py.detach(|| self.inner.tokens()).map_err(to_python)
    }
}
