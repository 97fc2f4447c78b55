//! Serving: read-only tables of checkpoints. Shapes: N ids, B bags, D a table's width.
//!
//! A lookup holds no lock and not the GIL. A directory is followed by a thread of the Rust core, which does not use
//! Python.

use std::process;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use embcache::Kind;
use embcache::serve::{
    MissingRead, PollOutcome, PoolingMode, ServeIndexReport, ServeOptions, ServedTable, ServedVersion, ServingFollower,
    ServingStats, TableServer,
};
use numpy::{PyReadonlyArray1, PyReadwriteArray1, PyReadwriteArray2};
use pyo3::prelude::*;

use crate::buffers::{slice, slice_mut, slice2_mut};
use crate::error::to_python;
use crate::foreign::{detached, lock, with_signal_checks};
use crate::logging::{follow_levels, follow_levels_sometimes};
use crate::paths::PyCheckpointDirectory;
use crate::settings::{missing_read_from, value_named};

/// Converts a number of seconds to a duration. `name` is its name in the error.
fn seconds(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        to_python(Kind::Config.error(format!("{name}={seconds} is not a duration: give seconds from 0 to 2^64")))
    })
}

/// A thread that follows a directory, and the process that started it. A forked child has the handle, but not the
/// thread.
struct FollowerThread {
    process: u32,
    follower: Option<ServingFollower>,
}

impl Drop for FollowerThread {
    /// Stops the thread and waits for it, if it belongs to this process.
    fn drop(&mut self) {
        if self.process != process::id() {
            std::mem::forget(self.follower.take());
        }
    }
}

/// A served directory of checkpoints.
#[pyclass(frozen, name = "TableServer", module = "torchrec_embcache._native")]
pub(crate) struct PyTableServer {
    inner: Arc<TableServer>,
    following: Mutex<Option<FollowerThread>>,
}

#[pymethods]
impl PyTableServer {
    #[new]
    #[pyo3(signature = (directory, *, at=None, host_bytes=None, max_staleness_seconds=None, raise_when_stale=false, missing=None, missing_value=0.0, source=None, preload=false, verify=false))]
    fn new(
        py: Python<'_>,
        directory: &PyCheckpointDirectory,
        at: Option<String>,
        host_bytes: Option<u64>,
        max_staleness_seconds: Option<f64>,
        raise_when_stale: bool,
        missing: Option<&str>,
        missing_value: f32,
        source: Option<&PyCheckpointDirectory>,
        preload: bool,
        verify: bool,
    ) -> PyResult<Self> {
        let max_staleness = max_staleness_seconds.map(|given| seconds("max_staleness_seconds", given)).transpose()?;
        let missing = missing.map(|name| match name {
            "value" => Ok(MissingRead::Value(missing_value)),
            name => missing_read_from("missing", name),
        });
        let missing = missing.transpose()?;
        let source = source.map(|source| source.inner.clone());
        let options =
            ServeOptions { at, host_bytes, max_staleness, raise_when_stale, source, missing, preload, verify };
        follow_levels(py)?;
        let root = directory.inner.clone();
        let inner = with_signal_checks(py, |wait| TableServer::open_while(root, options, wait))?;
        Ok(Self { inner, following: Mutex::new(None) })
    }

    fn pin(&self, py: Python<'_>) -> PyResult<PyServedVersion> {
        follow_levels_sometimes(py)?;
        self.inner.pin().map(|inner| PyServedVersion { inner }).map_err(to_python)
    }

    /// Polls for a newer checkpoint. Returns its name if it is served after the call.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<String>> {
        follow_levels(py)?;
        match with_signal_checks(py, |wait| self.inner.poll_while(wait))? {
            PollOutcome::Newer(name) => Ok(Some(name.to_string())),
            PollOutcome::UpToDate => Ok(None),
        }
    }

    fn rollback(&self, py: Python<'_>) -> PyResult<String> {
        detached(py, || self.inner.rollback()).map(|name| name.to_string())
    }

    /// Starts the polling thread, and stops an earlier one.
    fn follow(&self, py: Python<'_>, every_seconds: f64) -> PyResult<()> {
        let every = seconds("poll_seconds", every_seconds)?;
        detached(py, || {
            let follower = self.inner.follow(every)?;
            let following = FollowerThread { process: process::id(), follower: Some(follower) };
            drop(lock(&self.following).replace(following));
            Ok(())
        })
    }

    /// Stops the polling thread. Idempotent.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| drop(lock(&self.following).take()));
    }

    fn stats(&self, py: Python<'_>) -> PyServingStats {
        py.detach(|| self.inner.stats()).into()
    }
}

/// A served checkpoint, which stays readable while this exists.
#[pyclass(frozen, name = "ServedVersion", module = "torchrec_embcache._native")]
pub(crate) struct PyServedVersion {
    inner: Arc<ServedVersion>,
}

#[pymethods]
impl PyServedVersion {
    #[getter]
    fn name(&self) -> String {
        self.inner.name().to_string()
    }

    /// Publication time in seconds since 1970.
    #[getter]
    fn published_at(&self) -> f64 {
        self.inner.published().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
    }

    fn tables(&self) -> Vec<PyServedTable> {
        self.inner.tables().iter().map(|table| PyServedTable { inner: Arc::clone(table) }).collect()
    }

    /// Returns the table `name`, or "module/name". Returns `Mismatch`, which lists the tables, if there is none.
    fn table(&self, name: &str) -> PyResult<PyServedTable> {
        self.inner.table(name).map(|table| PyServedTable { inner: Arc::clone(table) }).map_err(to_python)
    }

    fn __repr__(&self) -> String {
        format!("ServedVersion({})", self.inner.name())
    }
}

/// A table of a version.
#[pyclass(frozen, name = "ServedTable", module = "torchrec_embcache._native")]
pub(crate) struct PyServedTable {
    inner: Arc<ServedTable>,
}

#[pymethods]
impl PyServedTable {
    #[getter]
    fn module(&self) -> &str {
        self.inner.module()
    }

    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    #[getter]
    fn dim(&self) -> usize {
        self.inner.dim()
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.inner.rows()
    }

    /// Precision of the weights in the served files: "fp32", "fp16", "bf16" or "int8".
    #[getter]
    fn precision(&self) -> &'static str {
        self.inner.precision().name()
    }

    /// Bytes of a row in that precision.
    #[getter]
    fn stored_bytes(&self) -> usize {
        self.inner.precision().row_bytes(self.inner.dim())
    }

    /// Fills `out` [N, `stored_bytes`] and `found` [N]. Returns the number of missing ids.
    fn lookup_stored(
        &self,
        py: Python<'_>,
        ids: PyReadonlyArray1<'_, i64>,
        mut out: PyReadwriteArray2<'_, u8>,
        mut found: PyReadwriteArray1<'_, bool>,
    ) -> PyResult<usize> {
        let (ids, out, found) =
            (slice("ids", &ids)?, slice2_mut("out", &mut out, self.stored_bytes())?, slice_mut("found", &mut found)?);
        detached(py, || self.inner.lookup_stored(ids, out, found))
    }

    /// Fills `out` [N, D] and `found` [N]. Returns the number of missing ids.
    fn lookup(
        &self,
        py: Python<'_>,
        ids: PyReadonlyArray1<'_, i64>,
        mut out: PyReadwriteArray2<'_, f32>,
        mut found: PyReadwriteArray1<'_, bool>,
    ) -> PyResult<usize> {
        let (ids, out, found) =
            (slice("ids", &ids)?, slice2_mut("out", &mut out, self.inner.dim())?, slice_mut("found", &mut found)?);
        detached(py, || self.inner.lookup(ids, out, found))
    }

    /// Fills `out` [B, D] with the pooled bags into which `offsets` [B + 1] divide `ids` [N]. Returns the number of
    /// missing ids.
    fn lookup_pooled(
        &self,
        py: Python<'_>,
        ids: PyReadonlyArray1<'_, i64>,
        offsets: PyReadonlyArray1<'_, i64>,
        pooling: &str,
        weights: Option<PyReadonlyArray1<'_, f32>>,
        mut out: PyReadwriteArray2<'_, f32>,
    ) -> PyResult<usize> {
        let pooling = value_named("pooling", pooling, &[("sum", PoolingMode::Sum), ("mean", PoolingMode::Mean)])?;
        let (ids, offsets) = (slice("ids", &ids)?, slice("offsets", &offsets)?);
        let weights = weights.as_ref().map(|weights| slice("per_sample_weights", weights)).transpose()?;
        let out = slice2_mut("out", &mut out, self.inner.dim())?;
        detached(py, || self.inner.lookup_pooled(ids, offsets, pooling, weights, out))
    }

    fn __repr__(&self) -> String {
        format!("ServedTable({:?} of module {:?}, dim={})", self.inner.name(), self.inner.module(), self.inner.dim())
    }
}

/// Statistics of a served directory.
#[pyclass(frozen, get_all, name = "ServingStats", module = "torchrec_embcache._native")]
pub(crate) struct PyServingStats {
    version: String,
    seq: u64,
    staleness_seconds: f64,
    polls: u64,
    swaps: u64,
    failed_polls: u64,
    last_error: Option<String>,
    versions: u64,
    lookups: u64,
    ids: u64,
    missing: u64,
    cold_rows: u64,
    rows: u64,
    overlay_ids: u64,
    shared_index_bytes: u64,
    private_bytes: u64,
}

#[pymethods]
impl PyServingStats {
    fn __repr__(&self) -> String {
        format!("ServingStats(version={:?}, lookups={}, polls={})", self.version, self.lookups, self.polls)
    }
}

impl From<ServingStats> for PyServingStats {
    fn from(core: ServingStats) -> Self {
        Self {
            version: core.version.to_string(),
            seq: core.version.seq,
            staleness_seconds: core.staleness_seconds,
            polls: core.polls,
            swaps: core.swaps,
            failed_polls: core.failed_polls,
            last_error: core.last_error,
            versions: core.versions,
            lookups: core.lookups,
            ids: core.ids,
            missing: core.missing,
            cold_rows: core.cold_rows,
            rows: core.rows,
            overlay_ids: core.overlay_ids,
            shared_index_bytes: core.shared_index_bytes,
            private_bytes: core.private_bytes,
        }
    }
}

/// Result of building a serving index.
#[pyclass(frozen, get_all, name = "ServeIndexReport", module = "torchrec_embcache._native")]
pub(crate) struct PyServeIndexReport {
    checkpoint: String,
    rows: u64,
    bytes: u64,
    existed: bool,
}

#[pymethods]
impl PyServeIndexReport {
    fn __repr__(&self) -> String {
        format!("ServeIndexReport of {}, {} rows, {} bytes", self.checkpoint, self.rows, self.bytes)
    }
}

impl From<ServeIndexReport> for PyServeIndexReport {
    fn from(made: ServeIndexReport) -> Self {
        Self { checkpoint: made.checkpoint.to_string(), rows: made.rows, bytes: made.bytes, existed: made.existed }
    }
}

/// Verifies the index file of a checkpoint against its rows. Returns its number of rows; `None` if there is no such
/// file, or one that servers rebuild.
#[pyfunction]
#[pyo3(signature = (directory, at=None))]
pub(crate) fn check_serving_index(
    py: Python<'_>,
    directory: &PyCheckpointDirectory,
    at: Option<&str>,
) -> PyResult<Option<u64>> {
    follow_levels(py)?;
    with_signal_checks(py, |wait| embcache::serve::check_index(&directory.inner, at, wait))
}

/// Builds the index file of a checkpoint, if it does not exist.
#[pyfunction]
#[pyo3(signature = (directory, at=None))]
pub(crate) fn build_serving_index(
    py: Python<'_>,
    directory: &PyCheckpointDirectory,
    at: Option<&str>,
) -> PyResult<PyServeIndexReport> {
    follow_levels(py)?;
    with_signal_checks(py, |wait| embcache::serve::make_index(&directory.inner, at, wait)).map(Into::into)
}
