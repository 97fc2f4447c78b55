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
use crate::foreign::detached;
use crate::logging::follow_levels;
use crate::settings::value_named;

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
pub(crate) fn check_ssd_dir(py: Python<'_>, ssd_dir: PathBuf, path_checks: &str) -> PyResult<OsString> {
    let root = CheckedSsdDir::new(ssd_dir, path_checks)?;
    detached(py, || directory_for_ssd(&root.path, root.checks)).map(PathBuf::into_os_string)
}

/// Makes a user's path absolute. `field` is its name in messages.
#[pyfunction]
pub(crate) fn check_path(field: &str, path: PathBuf) -> PyResult<OsString> {
    embcache::paths::checked_user_path(field, &path).map(PathBuf::into_os_string).map_err(to_python)
}

/// Returns the directory of a table's shard below `ssd_dir`.
#[pyfunction]
pub(crate) fn table_dir(ssd_dir: PathBuf, module: &str, table: &str, rank: u32, world_size: u32) -> OsString {
    ssd_dir.join(encode_name(module)).join(encode_name(table)).join(format!("{rank}-of-{world_size}")).into_os_string()
}

/// A directory that contains the directories of tables, and the commit records of their flushes.
#[pyclass(frozen, name = "CommitDirectory", module = "torchrec_embcache._native")]
pub(crate) struct PyCommitDirectory {
    inner: CommitDirectory,
    /// Works in the directory, even if its path is replaced.
    pub(crate) engine: Arc<dyn IoEngine>,
}

#[pymethods]
impl PyCommitDirectory {
    #[new]
    fn new(py: Python<'_>, ssd_dir: PathBuf, path_checks: &str) -> PyResult<Self> {
        let root = CheckedSsdDir::new(ssd_dir, path_checks)?;
        let (path, engine) = detached(py, || root.engine())?;
        Ok(Self { inner: CommitDirectory::new(Arc::clone(&engine), &path), engine })
    }

    fn identify(&self, py: Python<'_>, random: u64) -> PyResult<u64> {
        detached(py, || self.inner.ensure_name(random))
    }

    fn has_id(&self, py: Python<'_>, root_id: u64) -> PyResult<bool> {
        detached(py, || self.inner.has_name(root_id))
    }

    fn prepare(&self, py: Python<'_>, commit_id: u64, coordinator: PathBuf, root_id: u64) -> PyResult<()> {
        detached(py, || self.inner.prepare(commit_id, &coordinator, root_id))
    }

    fn commit(&self, py: Python<'_>, commit_id: u64) -> PyResult<()> {
        detached(py, || self.inner.commit(commit_id))
    }

    fn is_committed(&self, py: Python<'_>, commit_id: u64) -> PyResult<bool> {
        detached(py, || self.inner.is_committed(commit_id))
    }

    fn forget(&self, py: Python<'_>, commit_id: u64) -> PyResult<()> {
        detached(py, || self.inner.remove_records(commit_id))
    }

    fn commit_ids(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        detached(py, || self.inner.commit_ids())
    }
}

/// Returns the path checks of this name.
fn checks_from(name: &str) -> PyResult<PathChecks> {
    use PathChecks::{Basic, Strict, Trusted};
    value_named("path_checks", name, &[("strict", Strict), ("basic", Basic), ("trusted", Trusted)])
}

/// A directory that passed the checks of path, owner and permission bits, held by its descriptor while this exists.
#[pyclass(frozen, name = "CheckpointDirectory", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointDirectory {
    pub(crate) inner: CheckpointDirectory,
}

#[pymethods]
impl PyCheckpointDirectory {
    #[staticmethod]
    fn open_to_save(py: Python<'_>, path: PathBuf, checks: &str) -> PyResult<Self> {
        let checks = checks_from(checks)?;
        follow_levels(py)?;
        detached(py, || CheckpointDirectory::open_to_save(&path, checks)).map(|inner| Self { inner })
    }

    #[staticmethod]
    fn open_to_load(py: Python<'_>, path: PathBuf, checks: &str) -> PyResult<Self> {
        let checks = checks_from(checks)?;
        follow_levels(py)?;
        detached(py, || CheckpointDirectory::open_to_load(&path, checks)).map(|inner| Self { inner })
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
        detached(py, || self.inner.has(name))
    }

    /// Returns a descriptor of the directory, which the caller closes.
    fn open_descriptor(&self) -> PyResult<i32> {
        let descriptor = self.inner.descriptor().map(|descriptor| descriptor.try_clone_to_owned());
        let missing = || Kind::State.error("the directory has no descriptor");
        let owned = descriptor
            .ok_or_else(missing)
            .and_then(|copy| copy.map_err(|error| Error::io("hold", self.inner.path(), &error)));
        owned.map(IntoRawFd::into_raw_fd).map_err(to_python)
    }
}
