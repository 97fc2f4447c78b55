//! Rows of a checkpoint as arrays, without a table, for commands that read, convert or reshard checkpoints.

use std::sync::{Mutex, PoisonError};

use embcache::checkpoint::{
    CheckpointChain, IdHistoryEntry, IdState, OpenCheckpoint, RowSink, RowSource, TableSpec, copy, make_for_serving,
    reshard,
};
use embcache::lifecycle::CountedId;
use embcache::rows::RowHeader;
use embcache::{Error, Kind};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyIterator;

use crate::buffers::{headers_from_python, slice, slice2};
use crate::checkpoint_load::open_chain;
use crate::directory::PyCheckpointDirectory;
use crate::error::{input, to_python};
use crate::records::{PyCheckpointCopyReport, PyPublishedCheckpoint};
use crate::rows::{PyRowBlock, PyRowMetadata};
use crate::settings::precision_from;

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
pub(crate) struct PyRowSource {
    spec: TableSpec,
    vector_floats: usize,
    chunks: Py<PyIterator>,
    /// The exception that the iterable raised.
    raised: Option<PyErr>,
}

impl PyRowSource {
    pub(crate) fn new(spec: &str, chunks: &Bound<'_, PyAny>) -> PyResult<Self> {
        let spec = TableSpec::from_json(spec).map_err(to_python)?;
        let optimizer = spec.optimizer_kind().map_err(to_python)?;
        let vector_floats = optimizer.layout(spec.dim as usize).vector_floats();
        Ok(Self { spec, vector_floats, chunks: chunks.try_iter()?.unbind(), raised: None })
    }

    pub(crate) fn spec(&self) -> TableSpec {
        self.spec.clone()
    }

    /// Returns the result of writing the rows, or the exception of the iterable, if it raised one.
    pub(crate) fn end<T>(self, written: PyResult<T>) -> PyResult<T> {
        self.raised.map_or(written, Err)
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
}

impl RowSource for PyRowSource {
    fn for_each_chunk(&mut self, sink: &mut RowSink<'_>) -> embcache::Result<()> {
        loop {
            match Python::attach(|py| self.next(py)) {
                Ok(Some((headers, vectors))) => sink(&headers, &vectors)?,
                Ok(None) => return Ok(()),
                Err(error) => {
                    self.raised = Some(error);
                    return Err(Error::new(Kind::State, "the rows to write could not be had"));
                }
            }
        }
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
        format!("LinkOfId with {now}")
    }
}

impl PyIdHistoryEntry {
    fn of(py: Python<'_>, link: IdHistoryEntry) -> PyResult<Self> {
        let row = link.row.map(|(header, weights)| {
            let dim = weights.len();
            Py::new(py, PyRowBlock::of(py, &[header], weights, dim)?)
        });
        let count = |count: CountedId| Py::new(py, PyCountedIds::of(py, &[count]));
        let taken = link.expired_by.into_iter().map(|taken| {
            let rule = taken.rule_json().map_err(to_python)?;
            Py::new(py, PyIdExpiry { sweep: taken.sweep, rule, score: taken.score })
        });
        Ok(Self {
            row: row.transpose()?,
            has_tombstone: link.has_tombstone,
            count: link.count.map(count).transpose()?,
            sweeps: taken.collect::<PyResult<_>>()?,
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
        let bytes = self.inner.manifest().to_json().map_err(to_python)?;
        String::from_utf8(bytes).map_err(|error| input(error.to_string()))
    }

    /// Returns the manifests of the checkpoint and its base checkpoints, latest first.
    fn chain_manifests(&self) -> PyResult<Vec<String>> {
        let text = |link: &OpenCheckpoint| {
            let bytes = link.manifest().to_json().map_err(to_python)?;
            String::from_utf8(bytes).map_err(|error| input(error.to_string()))
        };
        self.inner.links().iter().map(text).collect()
    }

    /// Passes the rows to `sink` in chunks, each as a `RowBlock`. Then passes the `CountedIds` of each bucket to
    /// `counts`. Without both, only reads and verifies rows and counts.
    #[expect(clippy::needless_pass_by_value, reason = "it is called with the GIL taken anew")]
    #[expect(clippy::too_many_arguments, reason = "they say what is read, and who takes it")]
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
        // Both sinks may raise.
        let raised = Mutex::new(None);
        let taken = |result: PyResult<()>| {
            result.map_err(|error| {
                *raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                Error::new(Kind::State, "what was read could not be taken")
            })
        };
        let read = py.detach(|| {
            let reader = self.inner.table_reader(module, table, bucket_begin..bucket_end)?;
            let vector_floats = reader.spec().optimizer_kind()?.layout(reader.spec().dim as usize).vector_floats();
            if sink.is_none() && counts.is_none() {
                return reader.verify();
            }
            let mut take_rows = |headers: &[RowHeader], vectors: &[f32]| {
                let Some(sink) = &sink else { return Ok(()) };
                taken(Python::attach(|py| {
                    let block = PyRowBlock::of(py, headers, vectors.to_vec(), vector_floats)?;
                    sink.call1(py, (block,)).map(drop)
                }))
            };
            let Some(counts) = &counts else { return reader.read(&mut take_rows) };
            reader.read_rows_and_counts(&mut take_rows, &mut |bucket| {
                taken(Python::attach(|py| counts.call1(py, (PyCountedIds::of(py, &bucket.ids),)).map(drop)))
            })
        });
        let raised = raised.into_inner().unwrap_or_else(PoisonError::into_inner);
        raised.map_or_else(|| read.map_err(to_python), Err)
    }

    /// Returns the entry of each checkpoint of the chain for an id, latest first.
    fn id_history(&self, py: Python<'_>, module: &str, table: &str, id: i64) -> PyResult<Vec<PyIdHistoryEntry>> {
        let life = py.detach(|| self.inner.id_history(module, table, id)).map_err(to_python)?;
        life.into_iter().map(|link| PyIdHistoryEntry::of(py, link)).collect()
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
        py.detach(|| copy(&self.inner, &to.inner)).map(Into::into).map_err(to_python)
    }

    #[pyo3(signature = (to, random, precision, keep))]
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
