//! Saving checkpoints: the coordinator's part, each rank's, asynchronous saves, and parts that ranks write without
//! communicating.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use embcache::checkpoint::{
    AsyncSaveOptions, AsyncSaveTable, CheckpointName, CheckpointPart, CheckpointSave, LatestCheckpoint, OpenCheckpoint,
    PRE_IMAGE_BYTES, RankDigest, RankSnapshot, RankWriter, RowSink, SaveOptions, TableSpec, prune,
};
use embcache::rows::RowHeader;
use embcache::{Error, Kind};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::PyIterator;

use crate::buffers::{headers_from_python, slice, slice2};
use crate::error::{input, to_python};
use crate::foreign::{DetachedDrop, EndingObject, detached};
use crate::paths::PyCheckpointDirectory;
use crate::records::{
    PyBaseCheckpoint, PyCheckpointId, PyManifestDigest, PyNewestCheckpoint, PyPruneReport, PyPublishedCheckpoint,
    PyStreamRange, PyTableWriteStats, PyWrittenPart,
};
use crate::rows::PyRowMetadata;
use crate::table::PyTable;

/// Returns the name of the latest complete checkpoint of a directory.
#[pyfunction]
pub(crate) fn latest_checkpoint(py: Python<'_>, directory: &PyCheckpointDirectory) -> PyResult<String> {
    detached(py, || LatestCheckpoint::read(&directory.inner)).map(|latest| latest.to_string())
}

/// Returns the metadata of the latest checkpoint of a directory, if there is one.
#[pyfunction]
pub(crate) fn newest_checkpoint(
    py: Python<'_>,
    directory: &PyCheckpointDirectory,
) -> PyResult<Option<PyNewestCheckpoint>> {
    let directory = &directory.inner;
    detached(py, || {
        let Some(latest) = LatestCheckpoint::find(directory)? else { return Ok(None) };
        OpenCheckpoint::open(directory, latest).map(|newest| Some(PyNewestCheckpoint::of(&newest)))
    })
}

/// Removes every checkpoint of a directory except the latest `keep` and their base checkpoints.
#[pyfunction]
pub(crate) fn prune_checkpoints(
    py: Python<'_>,
    directory: &PyCheckpointDirectory,
    keep: usize,
) -> PyResult<PyPruneReport> {
    detached(py, || prune(&directory.inner, keep)).map(Into::into)
}

/// The coordinator's part of a save.
#[pyclass(frozen, name = "CheckpointSave", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointSave {
    inner: EndingObject<CheckpointSave>,
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
        let save = detached(py, || CheckpointSave::begin_with(&directory.inner, random, options))?;
        Ok(Self { name: save.name().to_string(), inner: EndingObject::new("save", save) })
    }

    fn adopt(
        &self,
        py: Python<'_>,
        rank: u32,
        world_size: u32,
        parts: Vec<PyWrittenPart>,
    ) -> PyResult<PyManifestDigest> {
        self.inner.with(py, |save| {
            let part = |part: PyWrittenPart| {
                let directory = save.directory_of_parts(Path::new(&part.directory))?;
                Ok((directory, part.name.parse()?, part.digest.into()))
            };
            let parts = parts.into_iter().map(part).collect::<embcache::Result<Vec<_>>>();
            save.adopt(rank, world_size, &parts?).map(Into::into)
        })
    }

    fn write_dense_metadata(&self, py: Python<'_>, metadata: &[u8]) -> PyResult<()> {
        self.inner.with(py, |save| save.write_dense_metadata(metadata))
    }

    fn publish(
        &self,
        py: Python<'_>,
        digests: Vec<PyManifestDigest>,
        next_epoch: u32,
    ) -> PyResult<PyPublishedCheckpoint> {
        let digests: Vec<RankDigest> = digests.into_iter().map(Into::into).collect();
        self.inner.end(py, |save| save.publish(&digests, next_epoch).map(Into::into))
    }

    /// Removes the written files. Does nothing if the save has ended: it was published, or its failed publication
    /// removed the files.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.abandon(py, CheckpointSave::abandon)
    }
}

/// One rank's part of a save.
#[pyclass(frozen, name = "CheckpointWriter", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointWriter {
    inner: EndingObject<RankWriter>,
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
        let writer = detached(py, || RankWriter::new(&directory.inner, name, rank, world_size))?;
        Ok(Self { inner: EndingObject::new("writer", writer.with_counts(counters)) })
    }

    fn write_table(
        &self,
        py: Python<'_>,
        module: &str,
        table: &PyTable,
        hyperparameters: BTreeMap<String, f64>,
    ) -> PyResult<PyTableWriteStats> {
        self.inner
            .with(py, |writer| writer.write_rows_of(module, &table.inner, hyperparameters))
            .map(PyTableWriteStats::rows)
    }

    fn link_table(
        &self,
        py: Python<'_>,
        module: &str,
        table: &PyTable,
        hyperparameters: BTreeMap<String, f64>,
    ) -> PyResult<PyTableWriteStats> {
        self.inner
            .with(py, |writer| writer.link_rows_of(module, &table.inner, hyperparameters))
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
        let base = base.into();
        self.inner
            .with(py, |writer| writer.write_changes_of(module, &table.inner, hyperparameters, &base))
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
        let (spec, buckets) = (source.spec.clone(), bucket_begin..bucket_end);
        let written =
            self.inner.with(py, |writer| writer.write_table(spec, buckets, &mut |sink| source.for_each_chunk(sink)));
        source.raised.map_or(written, Err)
    }

    fn finish(&self, py: Python<'_>) -> PyResult<PyManifestDigest> {
        self.inner.end(py, |writer| writer.finish().map(Into::into))
    }
}

/// Rows to write into a checkpoint. Parts that are `None` are written as zeros.
#[pyclass(frozen, get_all, name = "RowWriteBatch", module = "torchrec_embcache._native")]
pub(crate) struct PyRowWriteBatch {
    ids: Py<PyArray1<i64>>,
    vectors: Py<PyArray2<f32>>,
    scalars: Option<Py<PyArray1<f32>>>,
    metadata: Option<Py<PyRowMetadata>>,
}

#[pymethods]
impl PyRowWriteBatch {
    #[new]
    #[pyo3(signature = (ids, vectors, scalars=None, metadata=None))]
    fn new(
        ids: Py<PyArray1<i64>>,
        vectors: Py<PyArray2<f32>>,
        scalars: Option<Py<PyArray1<f32>>>,
        metadata: Option<Py<PyRowMetadata>>,
    ) -> Self {
        Self { ids, vectors, scalars, metadata }
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.ids.bind(py).len()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("RowWriteBatch of {} rows", self.__len__(py)?))
    }
}

/// Rows from a Python iterable of `RowWriteBatch`, chunk by chunk.
struct PyRowSource {
    spec: TableSpec,
    vector_floats: usize,
    chunks: Py<PyIterator>,
    /// The exception that the iterable raised.
    raised: Option<PyErr>,
}

impl PyRowSource {
    fn new(spec: &str, chunks: &Bound<'_, PyAny>) -> PyResult<Self> {
        let spec = TableSpec::from_json(spec).map_err(to_python)?;
        let optimizer = spec.optimizer_kind().map_err(to_python)?;
        let vector_floats = optimizer.layout(spec.dim as usize).vector_floats();
        Ok(Self { spec, vector_floats, chunks: chunks.try_iter()?.unbind(), raised: None })
    }

    /// Returns the next chunk as headers and vectors.
    fn next(&self, py: Python<'_>) -> PyResult<Option<(Vec<RowHeader>, Vec<f32>)>> {
        let Some(chunk) = self.chunks.bind(py).clone().next().transpose()? else { return Ok(None) };
        let chunk = chunk.cast::<PyRowWriteBatch>()?.get();
        let (ids, vectors) = (chunk.ids.bind(py).try_readonly()?, chunk.vectors.bind(py).try_readonly()?);
        let scalars = chunk.scalars.as_ref().map(|scalars| scalars.bind(py).try_readonly()).transpose()?;
        let scalars = scalars.as_ref().map(|scalars| slice("scalars", scalars)).transpose()?;
        let metadata = chunk.metadata.as_ref().map(|metadata| metadata.get().borrowed(py)).transpose()?;
        let headers = headers_from_python(slice("ids", &ids)?, scalars, metadata.as_ref())?;
        let vectors = slice2("vectors", &vectors, self.vector_floats)?;
        if vectors.len() != headers.len() * self.vector_floats {
            return Err(input(format!(
                "vectors has {} floats; {} rows of table {:?} have {} each",
                vectors.len(),
                headers.len(),
                self.spec.table,
                self.vector_floats
            )));
        }
        Ok(Some((headers, vectors.to_vec())))
    }

    /// Passes every row to `sink`, in chunks.
    fn for_each_chunk(&mut self, sink: &mut RowSink<'_>) -> embcache::Result<()> {
        loop {
            match Python::attach(|py| self.next(py)) {
                Ok(Some((headers, vectors))) => sink(&headers, &vectors)?,
                Ok(None) => return Ok(()),
                Err(error) => {
                    self.raised = Some(error);
                    return Err(Kind::State.error("the rows to write could not be read"));
                }
            }
        }
    }
}

/// Lowers the priority of the calling thread permanently.
#[pyfunction]
pub(crate) fn work_in_background() {
    embcache::checkpoint::work_in_background();
}

/// A table to save asynchronously.
#[pyclass(frozen, name = "AsyncSaveTable", module = "torchrec_embcache._native")]
pub(crate) struct PyAsyncSaveTable {
    pub(crate) module: String,
    pub(crate) table: Py<PyTable>,
    pub(crate) hyperparameters: BTreeMap<String, f64>,
    pub(crate) base: Option<PyBaseCheckpoint>,
}

#[pymethods]
impl PyAsyncSaveTable {
    #[new]
    #[pyo3(signature = (module, table, hyperparameters, base=None))]
    fn new(
        module: String,
        table: Py<PyTable>,
        hyperparameters: BTreeMap<String, f64>,
        base: Option<PyBaseCheckpoint>,
    ) -> Self {
        Self { module, table, hyperparameters, base }
    }
}

/// Snapshot of one rank's tables.
#[pyclass(frozen, name = "CheckpointSnapshot", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointSnapshot {
    inner: DetachedDrop<EndingObject<RankSnapshot>>,
}

#[pymethods]
impl PyCheckpointSnapshot {
    #[new]
    #[pyo3(signature = (directory, name, rank, world_size, tables, next_epoch, bytes_per_second, *, counters=true))]
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
        Ok(Self { inner: DetachedDrop::new(EndingObject::new("snapshot", detached(py, begin)?)) })
    }

    fn write_table(&self, py: Python<'_>) -> PyResult<Option<PyTableWriteStats>> {
        Ok(self.inner.with(py, RankSnapshot::write_next)?.map(PyTableWriteStats::changes))
    }

    fn finish(&self, py: Python<'_>) -> PyResult<PyManifestDigest> {
        self.inner.end(py, |snapshot| snapshot.finish().map(Into::into))
    }

    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.abandon(py, |snapshot| {
            drop(snapshot);
            Ok(())
        })
    }
}

/// Removes the checkpoint parts in a directory that no process holds. Returns an error for each part that could not be
/// removed.
#[pyfunction]
pub(crate) fn remove_stale_parts(py: Python<'_>, directory: &PyCheckpointDirectory) -> PyResult<Vec<String>> {
    let left = detached(py, || embcache::checkpoint::remove_stale_parts(&directory.inner))?;
    Ok(left.iter().map(Error::to_string).collect())
}

/// The part of a checkpoint that one rank writes without communicating before the end.
#[pyclass(frozen, name = "CheckpointPart", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointPart {
    inner: DetachedDrop<EndingObject<CheckpointPart>>,
    directory: OsString,
    #[pyo3(get)]
    name: String,
}

#[pymethods]
impl PyCheckpointPart {
    #[new]
    fn new(py: Python<'_>, directory: &PyCheckpointDirectory, random: u64, expected_bytes: u64) -> PyResult<Self> {
        let part = detached(py, || CheckpointPart::begin(&directory.inner, random, expected_bytes))?;
        let directory = directory.inner.path().as_os_str().to_owned();
        let name = part.name().to_string();
        Ok(Self { directory, name, inner: DetachedDrop::new(EndingObject::new("part of a checkpoint", part)) })
    }

    fn write_table(
        &self,
        py: Python<'_>,
        module: &str,
        table: &PyTable,
        hyperparameters: BTreeMap<String, f64>,
    ) -> PyResult<PyTableWriteStats> {
        self.inner
            .with(py, |part| part.rank_writer()?.write_rows_of(module, &table.inner, hyperparameters))
            .map(PyTableWriteStats::rows)
    }

    fn snapshot_tables(&self, py: Python<'_>, tables: Vec<Py<PyAsyncSaveTable>>, next_epoch: u32) -> PyResult<()> {
        let tables: Vec<_> = tables
            .iter()
            .map(Py::get)
            .map(|table| (table.module.clone(), &table.table.get().inner, table.hyperparameters.clone()))
            .collect();
        self.inner.with(py, |part| part.snapshot_tables(tables, next_epoch))
    }

    fn write_snapshot(&self, py: Python<'_>) -> PyResult<u64> {
        self.inner.with(py, CheckpointPart::write_snapshots)
    }

    fn append(&self, py: Python<'_>, data: PyReadonlyArray1<'_, u8>) -> PyResult<()> {
        let data = slice("data", &data)?;
        self.inner.with(py, |part| part.dense_writer()?.append(data))
    }

    fn end_dense_extent(&self, py: Python<'_>) -> PyResult<PyStreamRange> {
        let extent = self.inner.with(py, |part| part.dense_writer()?.end_extent())?;
        Ok(PyStreamRange { offset: extent.offset, bytes: extent.bytes })
    }

    fn finish(&self, py: Python<'_>) -> PyResult<PyWrittenPart> {
        let digest = self.inner.with(py, CheckpointPart::finish)?.into();
        Ok(PyWrittenPart { directory: self.directory.clone(), name: self.name.clone(), digest })
    }

    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.abandon(py, CheckpointPart::abandon)
    }
}
