//! Directories of SSD tiers.

use std::ffi::OsString;
use std::path::PathBuf;

use embcache::io::default_engine;
use embcache::paths::{directory_for_ssd, encode_name};
use embcache::ssd::Root;
use pyo3::prelude::*;

use crate::error::to_python;

/// Check a user's `ssd_dir`; its absolute path.
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

/// A directory that tables' directories lie in, and the marks of their flushes.
#[pyclass(frozen, name = "FlushRoot", module = "torchrec_embcache._native")]
pub(crate) struct PyRoot {
    inner: Root,
}

#[pymethods]
impl PyRoot {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn new(ssd_dir: PathBuf) -> PyResult<Self> {
        Ok(Self { inner: Root::new(default_engine().map_err(to_python)?, &ssd_dir) })
    }

    fn name(&self, py: Python<'_>, random: u64) -> PyResult<u64> {
        py.detach(|| self.inner.name(random)).map_err(to_python)
    }

    fn is_named(&self, py: Python<'_>, name: u64) -> bool {
        py.detach(|| self.inner.is_named(name))
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
}
