//! Reading checkpoints: loading them into tables, merging them, and reading rows as arrays without a table.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use embcache::Kind;
use embcache::checkpoint::{
    ChainCompaction, CheckpointChain, CheckpointManifest, CheckpointName, DenseExtent, DenseReader, IdHistoryEntry,
    IdState, LatestCheckpoint, LoadColumns, LoadSegments, TableRequest, TableSource, copy, make_for_serving, reshard,
};
use embcache::lifecycle::CountedId;
use embcache::rows::RowHeader;
use numpy::{PyArray1, PyReadwriteArray1};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffers::slice_mut;
use crate::error::{input, to_python};
use crate::foreign::{RaisedException, detached, detached_with_python, lock};
use crate::paths::PyCheckpointDirectory;
use crate::records::{PyCheckpointCopyReport, PyCheckpointId, PyManifestDigest, PyPublishedCheckpoint, PySavedTable};
use crate::rows::PyRowBlock;
use crate::settings::precision_from;
use crate::table::{PyLinkedSegments, PyTable};

/// Reports the number of additional rows to a rank's progress callback. An exception from it aborts the work.
fn report_progress(progress: Option<&Py<PyAny>>, raised: &RaisedException, rows: u64) -> embcache::Result<()> {
    let Some(progress) = progress else { return Ok(()) };
    raised.catch(Python::attach(|py| progress.call1(py, (rows,)).map(drop)), "progress raised an exception")
}

/// Returns a manifest as JSON.
fn json_of(manifest: &CheckpointManifest) -> PyResult<String> {
    let bytes = manifest.to_json().map_err(to_python)?;
    String::from_utf8(bytes).map_err(|error| input(error.to_string()))
}

/// Opens the checkpoint `latest` of a directory, with its base checkpoints.
fn open_chain(py: Python<'_>, directory: &PyCheckpointDirectory, latest: &str) -> PyResult<CheckpointChain> {
    let latest: LatestCheckpoint = latest.parse().map_err(to_python)?;
    detached(py, || CheckpointChain::open(&directory.inner, latest))
}

/// One rank's part of merging a chain of deltas.
#[pyclass(frozen, name = "ChainCompaction", module = "torchrec_embcache._native")]
pub(crate) struct PyChainCompaction {
    inner: ChainCompaction,
}

#[pymethods]
impl PyChainCompaction {
    #[staticmethod]
    #[pyo3(signature = (directory, latest, *, counters=true))]
    fn open(py: Python<'_>, directory: &PyCheckpointDirectory, latest: &str, counters: bool) -> PyResult<Option<Self>> {
        let latest: LatestCheckpoint = latest.parse().map_err(to_python)?;
        let inner = detached(py, || ChainCompaction::open(&directory.inner, latest, counters))?;
        Ok(inner.map(|inner| Self { inner }))
    }

    #[getter]
    fn id(&self) -> PyCheckpointId {
        self.inner.chain().identity().into()
    }

    #[getter]
    fn next_epoch(&self) -> u32 {
        self.inner.chain().manifest().next_epoch
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.inner.chain().manifest().tables.iter().map(|entry| entry.total_rows).sum()
    }

    fn release(&self) {
        self.inner.chain().release();
    }

    #[pyo3(signature = (name, rank, world_size, progress=None))]
    fn write(
        &self,
        py: Python<'_>,
        name: &str,
        rank: u32,
        world_size: u32,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<PyManifestDigest> {
        let name: CheckpointName = name.parse().map_err(to_python)?;
        let written = detached_with_python(py, |raised| {
            let mut report = |rows| report_progress(progress.as_ref(), raised, rows);
            self.inner.write(name, (rank, world_size), &mut report)
        });
        written.map(Into::into)
    }
}

/// A checkpoint with checked manifests, and its base checkpoints.
#[pyclass(frozen, name = "CheckpointReader", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointReader {
    inner: CheckpointChain,
    /// Sources of the tables that `check_table` has checked, by the table's own module and name.
    sources: Mutex<HashMap<(String, String), TableSource>>,
    /// Dense state of the latest checkpoint.
    extents: DenseReader,
}

#[pymethods]
impl PyCheckpointReader {
    #[new]
    fn new(py: Python<'_>, directory: &PyCheckpointDirectory, latest: &str) -> PyResult<Self> {
        let inner = open_chain(py, directory, latest)?;
        Ok(Self { extents: inner.links()[0].dense_reader(), inner, sources: Mutex::default() })
    }

    #[getter]
    fn name(&self) -> &str {
        &self.inner.manifest().name
    }

    #[getter]
    fn id(&self) -> PyCheckpointId {
        self.inner.identity().into()
    }

    #[getter]
    fn kind(&self) -> &'static str {
        self.inner.manifest().kind.name()
    }

    #[getter]
    fn chain_names(&self) -> Vec<String> {
        self.inner.names().map(str::to_owned).collect()
    }

    #[getter]
    fn next_epoch(&self) -> u32 {
        self.inner.manifest().next_epoch
    }

    fn release(&self) {
        self.inner.release();
    }

    fn dense_metadata<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let metadata = detached(py, || self.inner.links()[0].dense_metadata())?;
        Ok(metadata.map(|metadata| PyBytes::new(py, &metadata)))
    }

    fn stream_bytes(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        detached(py, || self.extents.stream_bytes())
    }

    fn read_dense(&self, py: Python<'_>, rank: u32, offset: u64, mut into: PyReadwriteArray1<'_, u8>) -> PyResult<()> {
        let into = slice_mut("into", &mut into)?;
        let extent = DenseExtent { offset, bytes: into.len() as u64 };
        detached(py, || self.extents.read(rank, extent, into))
    }

    fn tables(&self) -> Vec<PySavedTable> {
        self.inner.manifest().tables.iter().map(PySavedTable::of).collect()
    }

    #[pyo3(signature = (module, table, bucket_begin, bucket_end, *, saved=None, segments=false, slots=true))]
    fn check_table(
        &self,
        py: Python<'_>,
        module: String,
        table: &PyTable,
        bucket_begin: u32,
        bucket_end: u32,
        saved: Option<&PySavedTable>,
        segments: bool,
        slots: bool,
    ) -> PyResult<u64> {
        let name = table.inner.config().name.clone();
        let request = TableRequest {
            module: saved.map_or(&module, |saved| &saved.module),
            table: saved.map_or(&name, |saved| &saved.table),
            buckets: bucket_begin..bucket_end,
            columns: if slots { LoadColumns::All } else { LoadColumns::WithoutSlots },
            segments: if segments { LoadSegments::Open } else { LoadSegments::Refuse },
        };
        detached(py, || {
            let source = self.inner.check_table(&table.inner, &request)?;
            let rows = source.max_rows();
            lock(&self.sources).insert((module.clone(), name.clone()), source);
            Ok(rows)
        })
    }

    /// Returns the segments from which the table is opened, if `check_table` found them. They are returned once.
    fn segments(&self, module: String, table: String) -> Option<PyLinkedSegments> {
        let (mut sources, key) = (lock(&self.sources), (module, table));
        match sources.remove(&key)? {
            TableSource::Segments(files, counters, counts, clock, oov_row) => {
                Some(PyLinkedSegments { files: Arc::new(files), counters, counts, clock, oov_row })
            }
            rows @ TableSource::Rows(_) => {
                sources.insert(key, rows);
                None
            }
        }
    }

    #[pyo3(signature = (module, table, progress=None))]
    fn load_table(
        &self,
        py: Python<'_>,
        module: String,
        table: &PyTable,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        let source = lock(&self.sources).remove(&(module, table.inner.config().name.clone()));
        let Some(TableSource::Rows(reader)) = source else {
            return Err(to_python(Kind::State.error("check_table() comes before load_table(), once for each")));
        };
        detached_with_python(py, |raised| {
            reader.load_with(&table.inner, &mut |rows| report_progress(progress.as_ref(), raised, rows))
        })
    }
}

/// Admission counts of some pending ids.
#[pyclass(frozen, get_all, name = "CountedIds", module = "torchrec_embcache._native")]
pub(crate) struct PyCountedIds {
    ids: Py<PyArray1<i64>>,
    shows: Py<PyArray1<u32>>,
    clicks: Py<PyArray1<u32>>,
    is_older: Py<PyArray1<bool>>,
}

#[pymethods]
impl PyCountedIds {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.ids.bind(py).len()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("CountedIds of {} ids", self.__len__(py)?))
    }
}

impl PyCountedIds {
    fn of(py: Python<'_>, pending: &[CountedId]) -> Self {
        Self {
            ids: PyArray1::from_iter(py, pending.iter().map(|each| each.id)).unbind(),
            shows: PyArray1::from_iter(py, pending.iter().map(|each| each.shows)).unbind(),
            clicks: PyArray1::from_iter(py, pending.iter().map(|each| each.clicks)).unbind(),
            is_older: PyArray1::from_iter(py, pending.iter().map(|each| each.is_older)).unbind(),
        }
    }
}

/// A sweep that expired a row: its index in the delta, the part of its rule that matched, as JSON, and the row's score
/// after the sweep's step if the rule uses scores.
#[pyclass(frozen, get_all, name = "IdExpiry", module = "torchrec_embcache._native")]
pub(crate) struct PyIdExpiry {
    sweep: usize,
    rule: String,
    score: Option<f32>,
}

#[pymethods]
impl PyIdExpiry {
    fn __repr__(&self) -> String {
        format!("IdExpiry by sweep {}", self.sweep)
    }
}

/// State of an id in one checkpoint.
#[pyclass(frozen, get_all, name = "IdHistoryEntry", module = "torchrec_embcache._native")]
pub(crate) struct PyIdHistoryEntry {
    row: Option<Py<PyRowBlock>>,
    has_tombstone: bool,
    count: Option<Py<PyCountedIds>>,
    sweeps: Vec<Py<PyIdExpiry>>,
    has_row_now: bool,
    count_now: Option<Py<PyCountedIds>>,
}

#[pymethods]
impl PyIdHistoryEntry {
    fn __repr__(&self) -> String {
        let now = if self.has_row_now { "a row" } else { "no row" };
        format!("IdHistoryEntry with {now}")
    }
}

impl PyIdHistoryEntry {
    fn of(py: Python<'_>, link: IdHistoryEntry) -> PyResult<Self> {
        let row = link.row.map(|(header, weights)| {
            let dim = weights.len();
            Py::new(py, PyRowBlock::of(py, &[header], weights, dim)?)
        });
        let count = |count: CountedId| Py::new(py, PyCountedIds::of(py, &[count]));
        let sweeps = link.expired_by.into_iter().map(|expiry| {
            let rule = expiry.rule_json().map_err(to_python)?;
            Py::new(py, PyIdExpiry { sweep: expiry.sweep, rule, score: expiry.score })
        });
        Ok(Self {
            row: row.transpose()?,
            has_tombstone: link.has_tombstone,
            count: link.count.map(count).transpose()?,
            sweeps: sweeps.collect::<PyResult<_>>()?,
            has_row_now: link.state == IdState::HasRow,
            count_now: if let IdState::Pending(now) = link.state { Some(count(now)?) } else { None },
        })
    }
}

/// A checkpoint that is read without tables.
#[pyclass(frozen, name = "CheckpointRows", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointRows {
    inner: CheckpointChain,
}

#[pymethods]
impl PyCheckpointRows {
    #[new]
    fn new(py: Python<'_>, directory: &PyCheckpointDirectory, latest: &str) -> PyResult<Self> {
        open_chain(py, directory, latest).map(|inner| Self { inner })
    }

    /// Allows saves to remove the checkpoint. It must not be read after this call.
    fn release(&self) {
        self.inner.release();
    }

    fn manifest(&self) -> PyResult<String> {
        json_of(self.inner.manifest())
    }

    /// Returns the manifests of the checkpoint and its base checkpoints, latest first.
    fn chain_manifests(&self) -> PyResult<Vec<String>> {
        self.inner.links().iter().map(|link| json_of(link.manifest())).collect()
    }

    /// Reads and checks the manifests of `part` of `parts` of the ranks of the checkpoint and its base checkpoints.
    fn check_ranks(&self, py: Python<'_>, part: u32, parts: u32) -> PyResult<()> {
        detached(py, || self.inner.links().iter().try_for_each(|link| link.check_ranks(part, parts)))
    }

    /// Passes the rows to `sink` in chunks, each as a `RowBlock`. Then passes the `CountedIds` of each bucket to
    /// `counts`. Without both, only reads and verifies rows and counts.
    #[pyo3(signature = (module, table, bucket_begin, bucket_end, sink, *, counts=None))]
    fn read(
        &self,
        py: Python<'_>,
        module: &str,
        table: &str,
        bucket_begin: u32,
        bucket_end: u32,
        sink: Option<Py<PyAny>>,
        counts: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        detached_with_python(py, |raised| {
            let message = "the callback that receives rows or counts raised an exception";
            let reader = self.inner.table_reader(module, table, bucket_begin..bucket_end)?;
            let vector_floats = reader.spec().optimizer_kind()?.layout(reader.spec().dim as usize).vector_floats();
            if sink.is_none() && counts.is_none() {
                return reader.verify();
            }
            let mut take_rows = |headers: &[RowHeader], vectors: &[f32]| {
                let Some(sink) = &sink else { return Ok(()) };
                let pass_on = |py: Python<'_>| {
                    let block = PyRowBlock::of(py, headers, vectors.to_vec(), vector_floats)?;
                    sink.call1(py, (block,)).map(drop)
                };
                raised.catch(Python::attach(pass_on), message)
            };
            let Some(counts) = &counts else { return reader.read(&mut take_rows) };
            reader.read_rows_and_counts(&mut take_rows, &mut |bucket| {
                let pass_on = |py: Python<'_>| counts.call1(py, (PyCountedIds::of(py, &bucket.ids),)).map(drop);
                raised.catch(Python::attach(pass_on), message)
            })
        })
    }

    /// Returns the entry of each checkpoint of the chain for an id, latest first.
    fn id_history(&self, py: Python<'_>, module: &str, table: &str, id: i64) -> PyResult<Vec<PyIdHistoryEntry>> {
        let history = detached(py, || self.inner.id_history(module, table, id))?;
        history.into_iter().map(|link| PyIdHistoryEntry::of(py, link)).collect()
    }

    #[pyo3(signature = (to, random, world_size, *, counters=true))]
    fn reshard(
        &self,
        py: Python<'_>,
        to: &PyCheckpointDirectory,
        random: u64,
        world_size: u32,
        counters: bool,
    ) -> PyResult<PyPublishedCheckpoint> {
        let written = py.detach(|| reshard(&self.inner, &to.inner, random, world_size, counters));
        written.map(Into::into).map_err(to_python)
    }

    fn copy(&self, py: Python<'_>, to: &PyCheckpointDirectory) -> PyResult<PyCheckpointCopyReport> {
        detached(py, || copy(&self.inner, &to.inner)).map(Into::into)
    }

    fn write_serving_checkpoint(
        &self,
        py: Python<'_>,
        to: &PyCheckpointDirectory,
        random: u64,
        precision: &str,
        keep: usize,
    ) -> PyResult<PyPublishedCheckpoint> {
        let precision = precision_from(precision)?;
        let made = py.detach(|| make_for_serving(&self.inner, &to.inner, (random, keep), precision, &mut |_| Ok(())));
        made.map(Into::into).map_err(to_python)
    }
}
