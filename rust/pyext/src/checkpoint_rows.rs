//! Rows of a checkpoint as arrays, without a table, for the commands that read, convert or divide checkpoints.

use embcache::checkpoint::{Chain, RowSink, RowSource, TableSpec, reshard};
use embcache::rows::RowHeader;
use embcache::{Error, Kind};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyIterator;

use crate::buffers::{headers_from_python, slice, slice2};
use crate::checkpoint_load::open_chain;
use crate::directory::PyDirectory;
use crate::error::{input, to_python};
use crate::records::PyPublished;
use crate::rows::{PyRowBlock, PyRowMetadata};

/// Rows that are to be written into a checkpoint. Parts that are `None` are written as zeros.
#[pyclass(frozen, get_all, name = "RowsToWrite", module = "torchrec_embcache._native")]
pub(crate) struct PyRowsToWrite {
    ids: Py<PyArray1<i64>>,
    vectors: Py<PyArray2<f32>>,
    scalars: Option<Py<PyArray1<f32>>>,
    metadata: Option<Py<PyRowMetadata>>,
}

#[pymethods]
impl PyRowsToWrite {
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
        Ok(format!("RowsToWrite of {} rows", self.__len__(py)?))
    }
}

/// Rows that a Python iterable of `RowsToWrite` gives, chunk by chunk.
pub(crate) struct GivenRows {
    spec: TableSpec,
    vector_floats: usize,
    chunks: Py<PyIterator>,
    /// The exception that the iterable raised.
    raised: Option<PyErr>,
}

impl GivenRows {
    pub(crate) fn new(spec: &str, chunks: &Bound<'_, PyAny>) -> PyResult<Self> {
        let spec = TableSpec::from_json(spec).map_err(to_python)?;
        let optimizer = spec.optimizer_kind().map_err(to_python)?;
        let vector_floats = optimizer.layout(spec.dim as usize).vector_floats();
        Ok(Self { spec, vector_floats, chunks: chunks.try_iter()?.unbind(), raised: None })
    }

    pub(crate) fn spec(&self) -> TableSpec {
        self.spec.clone()
    }

    /// The result of writing the rows: the exception of the iterable, if it raised one.
    pub(crate) fn end<T>(self, written: PyResult<T>) -> PyResult<T> {
        self.raised.map_or(written, Err)
    }

    /// The next chunk as the core takes it.
    fn next(&self, py: Python<'_>) -> PyResult<Option<(Vec<RowHeader>, Vec<f32>)>> {
        let Some(chunk) = self.chunks.bind(py).clone().next().transpose()? else { return Ok(None) };
        let chunk = chunk.cast::<PyRowsToWrite>()?.get();
        let (ids, vectors) = (chunk.ids.bind(py).try_readonly()?, chunk.vectors.bind(py).try_readonly()?);
        let scalars = chunk.scalars.as_ref().map(|scalars| scalars.bind(py).try_readonly()).transpose()?;
        let scalars = scalars.as_ref().map(|scalars| slice("scalars", scalars)).transpose()?;
        let metadata = chunk.metadata.as_ref().map(|metadata| metadata.get().borrowed(py)).transpose()?;
        let headers = headers_from_python(slice("ids", &ids)?, scalars, metadata.as_ref())?;
        let vectors = slice2("vectors", &vectors)?;
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

impl RowSource for GivenRows {
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

/// A checkpoint that is read without tables.
#[pyclass(frozen, name = "CheckpointRows", module = "torchrec_embcache._native")]
pub(crate) struct PyRows {
    inner: Chain,
}

#[pymethods]
impl PyRows {
    #[new]
    fn new(py: Python<'_>, directory: &PyDirectory, latest: &str) -> PyResult<Self> {
        open_chain(py, directory, latest).map(|inner| Self { inner })
    }

    fn manifest(&self) -> PyResult<String> {
        let bytes = self.inner.manifest().to_json().map_err(to_python)?;
        String::from_utf8(bytes).map_err(|error| input(error.to_string()))
    }

    /// Rows are given to `sink` in chunks. It is called with a `RowBlock` for each. Without it rows and counts are read and verified.
    #[expect(clippy::needless_pass_by_value, reason = "it is called with the GIL taken anew")]
    fn read(
        &self,
        py: Python<'_>,
        module: &str,
        table: &str,
        bucket_begin: u32,
        bucket_end: u32,
        sink: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        let mut raised = None;
        let mut read = || {
            let reader = self.inner.table_reader(module, table, bucket_begin..bucket_end)?;
            let vector_floats = reader.spec().optimizer_kind()?.layout(reader.spec().dim as usize).vector_floats();
            let Some(sink) = &sink else { return reader.verify() };
            let mut rows = 0;
            reader.read(&mut |headers, vectors| {
                rows += headers.len() as u64;
                Python::attach(|py| {
                    let block = PyRowBlock::of(py, headers, vectors.to_vec(), vector_floats)?;
                    sink.call1(py, (block,)).map(drop)
                })
                .map_err(|error: PyErr| {
                    raised = Some(error);
                    Error::new(Kind::State, "the rows that were read could not be taken")
                })
            })?;
            Ok::<_, Error>(rows)
        };
        let read = py.detach(&mut read).map_err(to_python);
        raised.map_or(read, Err)
    }

    #[pyo3(signature = (to, random, world_size, *, counters=true))]
    fn reshard(
        &self,
        py: Python<'_>,
        to: &PyDirectory,
        random: u64,
        world_size: u32,
        counters: bool,
    ) -> PyResult<PyPublished> {
        let written = py.detach(|| reshard(&self.inner, &to.inner, random, world_size, counters));
        written.map(Into::into).map_err(to_python)
    }
}
