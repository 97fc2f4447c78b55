//! User directories: of checkpoints, and of SSD tiers.

use std::ffi::OsString;
use std::os::fd::IntoRawFd;
use std::path::PathBuf;
use std::sync::Arc;

use embcache::checkpoint::CheckpointDirectory;
use embcache::io::{ConfinedEngine, IoEngine, default_engine};
use embcache::paths::{PathChecks, directory_for_ssd, encode_name, open_for_ssd};
use embcache::ssd::CommitDirectory;
use embcache::{Error, Kind};
use pyo3::prelude::*;

use crate::error::to_python;
use crate::logging::follow_levels;

/// A user's `ssd_dir`, and its path checks.
#[derive(Clone, Debug)]
pub(crate) struct CheckedSsdDir {
    path: PathBuf,
    checks: PathChecks,
}

impl CheckedSsdDir {
    pub(crate) fn new(path: PathBuf, checks: &str) -> PyResult<Self> {
        Ok(Self { path, checks: checks_from(checks)? })
    }

    /// Checks and opens the directory. Returns its absolute path, and an engine that works in it even if the path is
    /// replaced.
    pub(crate) fn engine(&self) -> embcache::Result<(PathBuf, Arc<dyn IoEngine>)> {
        let (path, directory) = open_for_ssd(&self.path, self.checks)?;
        // Files that others can read are harmless for an SSD tier.
        let checks = if self.checks == PathChecks::Strict { PathChecks::Basic } else { self.checks };
        let engine = ConfinedEngine::engine(default_engine()?, &path, directory, checks.entry_check());
        Ok((path, engine))
    }
}

/// Checks a user's `ssd_dir`. Returns its absolute path.
#[pyfunction]
#[pyo3(signature = (ssd_dir, path_checks))]
pub(crate) fn check_ssd_dir(py: Python<'_>, ssd_dir: PathBuf, path_checks: &str) -> PyResult<OsString> {
    let root = CheckedSsdDir::new(ssd_dir, path_checks)?;
    py.detach(|| directory_for_ssd(&root.path, root.checks)).map(PathBuf::into_os_string).map_err(to_python)
}

/// Makes a user's path absolute. `field` is its name in messages.
#[pyfunction]
#[pyo3(signature = (field, path))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn check_path(field: &str, path: PathBuf) -> PyResult<OsString> {
    embcache::paths::checked_user_path(field, &path).map(PathBuf::into_os_string).map_err(to_python)
}

/// Returns the directory of a table's shard below `ssd_dir`.
#[pyfunction]
#[pyo3(signature = (ssd_dir, module, table, rank, world_size))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn table_dir(ssd_dir: PathBuf, module: &str, table: &str, rank: u32, world_size: u32) -> OsString {
    ssd_dir.join(encode_name(module)).join(encode_name(table)).join(format!("{rank}-of-{world_size}")).into_os_string()
}

/// A directory that contains the directories of tables, and the commit records of their flushes.
#[pyclass(frozen, name = "CommitDirectory", module = "torchrec_embcache._native")]
pub(crate) struct PyCommitDirectory {
    inner: CommitDirectory,
    engine: Arc<dyn IoEngine>,
}

impl PyCommitDirectory {
    /// Returns an engine that works in the directory, even if its path is replaced.
    pub(crate) fn engine(&self) -> Arc<dyn IoEngine> {
        Arc::clone(&self.engine)
    }
}

#[pymethods]
impl PyCommitDirectory {
    #[new]
    fn new(py: Python<'_>, ssd_dir: PathBuf, path_checks: &str) -> PyResult<Self> {
        let root = CheckedSsdDir::new(ssd_dir, path_checks)?;
        let (path, engine) = py.detach(|| root.engine()).map_err(to_python)?;
        Ok(Self { inner: CommitDirectory::new(Arc::clone(&engine), &path), engine })
    }

    fn identify(&self, py: Python<'_>, random: u64) -> PyResult<u64> {
        py.detach(|| self.inner.ensure_name(random)).map_err(to_python)
    }

    fn has_id(&self, py: Python<'_>, root_id: u64) -> PyResult<bool> {
        py.detach(|| self.inner.has_name(root_id)).map_err(to_python)
    }

    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn prepare(&self, py: Python<'_>, commit_id: u64, coordinator: PathBuf, root_id: u64) -> PyResult<()> {
        py.detach(|| self.inner.prepare(commit_id, &coordinator, root_id)).map_err(to_python)
    }

    fn commit(&self, py: Python<'_>, commit_id: u64) -> PyResult<()> {
        py.detach(|| self.inner.commit(commit_id)).map_err(to_python)
    }

    fn is_committed(&self, py: Python<'_>, commit_id: u64) -> PyResult<bool> {
        py.detach(|| self.inner.is_committed(commit_id)).map_err(to_python)
    }

    fn forget(&self, py: Python<'_>, commit_id: u64) -> PyResult<()> {
        py.detach(|| self.inner.remove_records(commit_id)).map_err(to_python)
    }

    fn commit_ids(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        py.detach(|| self.inner.commit_ids()).map_err(to_python)
    }
}

/// Parses the name of the path checks.
fn checks_from(name: &str) -> PyResult<PathChecks> {
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
