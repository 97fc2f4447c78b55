//! User directories of checkpoints.

use std::ffi::OsString;
use std::os::fd::IntoRawFd;
use std::path::PathBuf;

use embcache::checkpoint::CheckpointDirectory;
use embcache::paths::PathChecks;
use embcache::{Error, Kind};
use pyo3::prelude::*;

use crate::error::to_python;
use crate::logging::follow_levels;

/// Parses the name of the path checks.
pub(crate) fn checks_from(name: &str) -> PyResult<PathChecks> {
    match name {
        "strict" => Ok(PathChecks::Strict),
        "basic" => Ok(PathChecks::Basic),
        "trusted" => Ok(PathChecks::Trusted),
        _ => Err(to_python(Error::new(
            Kind::Config,
            format!("path_checks={name:?} is not known: use \"strict\", \"basic\" or \"trusted\""),
        ))),
    }
}

/// A directory that passed the checks of path, owner and permission bits, held by its descriptor while this exists.
#[pyclass(frozen, name = "CheckpointDirectory", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointDirectory {
    pub(crate) inner: CheckpointDirectory,
}

#[pymethods]
impl PyCheckpointDirectory {
    #[staticmethod]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn open_to_save(py: Python<'_>, path: PathBuf, checks: &str) -> PyResult<Self> {
        let checks = checks_from(checks)?;
        follow_levels(py)?;
        py.detach(|| CheckpointDirectory::open_to_save(&path, checks)).map(|inner| Self { inner }).map_err(to_python)
    }

    #[staticmethod]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn open_to_load(py: Python<'_>, path: PathBuf, checks: &str) -> PyResult<Self> {
        let checks = checks_from(checks)?;
        follow_levels(py)?;
        py.detach(|| CheckpointDirectory::open_to_load(&path, checks)).map(|inner| Self { inner }).map_err(to_python)
    }

    #[getter]
    fn path(&self) -> OsString {
        self.inner.path().as_os_str().to_owned()
    }

    fn __str__(&self) -> OsString {
        self.path()
    }

    fn __repr__(&self) -> String {
        format!("CheckpointDirectory({})", self.inner.path().display())
    }

    /// True if the directory has an entry of this name; a link is not followed.
    fn contains(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        py.detach(|| self.inner.has(name)).map_err(to_python)
    }

    /// Returns a descriptor of the directory, which the caller closes.
    fn open_descriptor(&self) -> PyResult<i32> {
        let descriptor = self.inner.descriptor().map(|descriptor| descriptor.try_clone_to_owned());
        let missing = || Error::new(Kind::State, "the directory has no descriptor");
        let owned = descriptor
            .ok_or_else(missing)
            .and_then(|copy| copy.map_err(|error| Error::io("hold", self.inner.path(), &error)));
        owned.map(IntoRawFd::into_raw_fd).map_err(to_python)
    }
}
