//! Saving checkpoints: the coordinator's part, and each rank's.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use embcache::checkpoint::{
    CheckpointName, CheckpointSave, LatestCheckpoint, OpenCheckpoint, RankDigest, RankWriter, SaveOptions, prune,
};
use embcache::{Error, Kind};
use pyo3::prelude::*;

use crate::checkpoint_rows::PyRowSource;
use crate::directory::PyCheckpointDirectory;
use crate::error::to_python;
use crate::records::{
    PyBaseCheckpoint, PyCheckpointId, PyManifestDigest, PyNewestCheckpoint, PyPruneReport, PyPublishedCheckpoint,
    PyTableWriteStats, PyWrittenPart,
};
use crate::table::PyTable;

/// Locks `mutex`. The holder must not acquire the GIL before it unlocks, because a thread with the GIL may wait for the
/// lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn ended_error(object: &str) -> Error {
    Error::new(Kind::State, format!("the {object} has ended: make another"))
}

/// Returns the name of the latest complete checkpoint of a directory.
#[pyfunction]
pub(crate) fn latest_checkpoint(py: Python<'_>, directory: &PyCheckpointDirectory) -> PyResult<String> {
    py.detach(|| LatestCheckpoint::read(&directory.inner)).map(|latest| latest.to_string()).map_err(to_python)
}

/// Returns the metadata of the latest checkpoint of a directory, if there is one.
#[pyfunction]
pub(crate) fn newest_checkpoint(
    py: Python<'_>,
    directory: &PyCheckpointDirectory,
) -> PyResult<Option<PyNewestCheckpoint>> {
    let directory = &directory.inner;
    let newest = py.detach(|| {
        let Some(latest) = LatestCheckpoint::find(directory)? else { return Ok(None) };
        OpenCheckpoint::open(directory, latest).map(|newest| Some(PyNewestCheckpoint::of(&newest)))
    });
    newest.map_err(to_python)
}

/// Removes every checkpoint of a directory except the latest `keep` and their base checkpoints.
#[pyfunction]
#[pyo3(signature = (directory, keep))]
pub(crate) fn prune_checkpoints(
    py: Python<'_>,
    directory: &PyCheckpointDirectory,
    keep: usize,
) -> PyResult<PyPruneReport> {
    py.detach(|| prune(&directory.inner, keep)).map(Into::into).map_err(to_python)
}

/// The coordinator's part of a save.
#[pyclass(frozen, name = "CheckpointSave", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointSave {
    inner: Mutex<Option<CheckpointSave>>,
    #[pyo3(get)]
    name: String,
}

#[pymethods]
impl PyCheckpointSave {
    #[new]
    #[pyo3(signature = (directory, random, *, keep=1, parent=None, merged=None, linked=false))]
    fn new(
        py: Python<'_>,
        directory: &PyCheckpointDirectory,
        random: u64,
        keep: usize,
        parent: Option<PyCheckpointId>,
        merged: Option<PyCheckpointId>,
        linked: bool,
    ) -> PyResult<Self> {
        let options = SaveOptions {
            parent: parent.map(Into::into),
            merged: merged.map(Into::into),
            linked,
            keep,
            ..SaveOptions::default()
        };
        let save = py.detach(|| CheckpointSave::begin_with(&directory.inner, random, options)).map_err(to_python)?;
        Ok(Self { name: save.name().to_string(), inner: Mutex::new(Some(save)) })
    }

    fn adopt(
        &self,
        py: Python<'_>,
        rank: u32,
        world_size: u32,
        parts: Vec<PyWrittenPart>,
    ) -> PyResult<PyManifestDigest> {
        py.detach(|| {
            let save = lock(&self.inner);
            let save = save.as_ref().ok_or_else(|| ended_error("save"))?;
            let part = |part: PyWrittenPart| {
                let directory = save.directory_of_parts(Path::new(&part.directory))?;
                Ok((directory, part.name.parse()?, part.digest.into()))
            };
            let parts = parts.into_iter().map(part).collect::<embcache::Result<Vec<_>>>();
            save.adopt(rank, world_size, &parts?).map(Into::into)
        })
        .map_err(to_python)
    }

    fn write_dense_metadata(&self, py: Python<'_>, metadata: &[u8]) -> PyResult<()> {
        py.detach(|| {
            let mut save = lock(&self.inner);
            save.as_mut().ok_or_else(|| ended_error("save"))?.write_dense_metadata(metadata)
        })
        .map_err(to_python)
    }

    fn publish(
        &self,
        py: Python<'_>,
        digests: Vec<PyManifestDigest>,
        next_epoch: u32,
    ) -> PyResult<PyPublishedCheckpoint> {
        let digests: Vec<RankDigest> = digests.into_iter().map(Into::into).collect();
        py.detach(|| {
            let save = lock(&self.inner).take().ok_or_else(|| ended_error("save"))?;
            save.publish(&digests, next_epoch).map(Into::into)
        })
        .map_err(to_python)
    }

    /// Removes the written files. Does nothing if the save has ended: it was published, or its failed publication
    /// removed the files.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| lock(&self.inner).take().map_or(Ok(()), CheckpointSave::abandon)).map_err(to_python)
    }
}

/// One rank's part of a save.
#[pyclass(frozen, name = "CheckpointWriter", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointWriter {
    inner: Mutex<Option<RankWriter>>,
}

impl PyCheckpointWriter {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut RankWriter) -> embcache::Result<T> + Send,
    ) -> PyResult<T> {
        py.detach(|| work(lock(&self.inner).as_mut().ok_or_else(|| ended_error("writer"))?)).map_err(to_python)
    }
}

#[pymethods]
impl PyCheckpointWriter {
    #[new]
    #[pyo3(signature = (directory, name, rank, world_size, *, counters=true))]
    fn new(
        py: Python<'_>,
        directory: &PyCheckpointDirectory,
        name: &str,
        rank: u32,
        world_size: u32,
        counters: bool,
    ) -> PyResult<Self> {
        let name: CheckpointName = name.parse().map_err(to_python)?;
        let writer = py.detach(|| RankWriter::new(&directory.inner, name, rank, world_size)).map_err(to_python)?;
        let writer = if counters { writer } else { writer.without_counts() };
        Ok(Self { inner: Mutex::new(Some(writer)) })
    }

    fn write_table(
        &self,
        py: Python<'_>,
        module: &str,
        table: &PyTable,
        hyperparameters: BTreeMap<String, f64>,
    ) -> PyResult<PyTableWriteStats> {
        self.with(py, |writer| writer.write_rows_of(module, &table.inner, hyperparameters)).map(PyTableWriteStats::rows)
    }

    fn link_table(
        &self,
        py: Python<'_>,
        module: &str,
        table: &PyTable,
        hyperparameters: BTreeMap<String, f64>,
    ) -> PyResult<PyTableWriteStats> {
        self.with(py, |writer| writer.link_rows_of(module, &table.inner, hyperparameters))
            .map(PyTableWriteStats::linked)
    }

    fn write_changes(
        &self,
        py: Python<'_>,
        module: &str,
        table: &PyTable,
        hyperparameters: BTreeMap<String, f64>,
        base: PyBaseCheckpoint,
    ) -> PyResult<PyTableWriteStats> {
        let ancestor = base.into();
        self.with(py, |writer| writer.write_changes_of(module, &table.inner, hyperparameters, &ancestor))
            .map(PyTableWriteStats::changes)
    }

    fn write_rows(
        &self,
        py: Python<'_>,
        spec: &str,
        bucket_begin: u32,
        bucket_end: u32,
        chunks: &Bound<'_, PyAny>,
    ) -> PyResult<u64> {
        let mut source = PyRowSource::new(spec, chunks)?;
        let written = self.with(py, |writer| writer.write_table(source.spec(), bucket_begin..bucket_end, &mut source));
        source.end(written)
    }

    fn finish(&self, py: Python<'_>) -> PyResult<PyManifestDigest> {
        py.detach(|| {
            let writer = lock(&self.inner).take().ok_or_else(|| ended_error("writer"))?;
            writer.finish().map(Into::into)
        })
        .map_err(to_python)
    }
}
