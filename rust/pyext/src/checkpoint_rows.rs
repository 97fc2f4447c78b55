//! Rows of a checkpoint as arrays, without a table, for the commands that read, convert or divide checkpoints.

use embcache::checkpoint::{Chain, RowSink, RowSource, TableSpec, reshard};
use embcache::rows::RowHeader;
use embcache::{Error, Kind};
use numpy::{IntoPyArray, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::prelude::*;
use pyo3::types::PyIterator;

use crate::buffers::{GivenMeta, headers_from_python, matrix, meta_to_python, scalars_to_python, slice, slice2};
use crate::checkpoint_load::open_chain;
use crate::directory::PyDirectory;
use crate::error::{input, to_python};
use crate::records::PyPublished;

/// A chunk of rows: ids `[n]`, vectors `[n, V]`, scalars `[n]` or none, metadata or none.
type GivenChunk<'py> = (
    PyReadonlyArray1<'py, i64>,
    PyReadonlyArray2<'py, f32>,
    Option<PyReadonlyArray1<'py, f32>>,
    Option<GivenMeta<'py>>,
);

/// Rows that a Python iterable gives, chunk by chunk.
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
        let (ids, vectors, scalars, meta): GivenChunk<'_> = chunk.extract()?;
        let scalars = scalars.as_ref().map(|scalars| slice("scalars", scalars)).transpose()?;
        let headers = headers_from_python(slice("ids", &ids)?, scalars, meta.as_ref())?;
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

    /// Rows are given to `sink` in chunks; it is called once for each.
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
            let mut rows = 0;
            reader.read(&mut |headers, vectors| {
                rows += headers.len() as u64;
                let Some(sink) = &sink else { return Ok(()) };
                Python::attach(|py| {
                    let ids: Vec<i64> = headers.iter().map(|header| header.id).collect();
                    let chunk = (
                        ids.into_pyarray(py),
                        matrix(py, vectors.to_vec(), vector_floats)?,
                        scalars_to_python(py, headers),
                        meta_to_python(py, headers),
                    );
                    sink.call1(py, chunk).map(drop)
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

    fn reshard(&self, py: Python<'_>, to: &PyDirectory, random: u64, world_size: u32) -> PyResult<PyPublished> {
        let written = py.detach(|| reshard(&self.inner, &to.inner, random, world_size));
        written.map(Into::into).map_err(to_python)
    }
}
