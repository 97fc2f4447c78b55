//! RecIS-format saves and loads.

use std::ops::Range;
use std::sync::{Mutex, PoisonError, RwLock};

use embcache::checkpoint::{
    RecisBlockShape, RecisBlockSpec, RecisJoinMode, RecisReader, RecisRun, RecisSave, RecisShard, RecisShardOutcome,
    RecisShardWriter, RecisTableInfo, RecisTableShare,
};
use embcache::types::BucketMapper;
use embcache::{Error, Kind};
use numpy::{IntoPyArray as _, PyArray1, PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray1};
use pyo3::prelude::*;

use crate::buffers::{slice, slice_mut};
use crate::error::{input, to_python};
use crate::foreign::{detached, drop_detached, lock, with_signal_checks};
use crate::paths::PyCheckpointDirectory;

/// Returns the CRC-32C of each chunk of `data`.
#[pyfunction]
pub(crate) fn chunk_checksums<'py>(
    py: Python<'py>,
    data: PyReadonlyArray1<'py, u8>,
    chunk_bytes: usize,
) -> PyResult<Bound<'py, PyArray1<u32>>> {
    let bytes = slice("data", &data)?;
    if chunk_bytes == 0 {
        return Err(input("chunk_bytes is 0: give 1 at least"));
    }
    let found: Vec<u32> = py.detach(|| bytes.chunks(chunk_bytes).map(crc32c::crc32c).collect());
    Ok(found.into_pyarray(py))
}

/// A block to write: the ids or one slot of a table's rows, or a dense tensor.
#[pyclass(frozen, name = "RecisBlockSpec", module = "torchrec_embcache._native")]
pub(crate) struct PyRecisBlockSpec(RecisBlockSpec);

#[pymethods]
impl PyRecisBlockSpec {
    #[new]
    fn new(name: String, slot: Option<String>, dtype: String, shape: Vec<u64>) -> Self {
        Self(RecisBlockSpec { name, slot, dtype, shape })
    }
}

/// A table whose blocks were written: its manifest entry.
#[pyclass(frozen, name = "RecisWrittenTable", module = "torchrec_embcache._native")]
pub(crate) struct PyRecisWrittenTable(RecisTableShare);

#[pymethods]
impl PyRecisWrittenTable {
    #[new]
    #[pyo3(signature = (*, name, dim, optimizer, key, seed, step, epoch, total_num_buckets, bucket_begin, bucket_end,
        runs))]
    fn new(
        name: String,
        dim: u32,
        optimizer: String,
        key: u64,
        seed: u64,
        step: u64,
        epoch: u32,
        total_num_buckets: u32,
        bucket_begin: u32,
        bucket_end: u32,
        runs: Vec<u64>,
    ) -> Self {
        let buckets = [bucket_begin, bucket_end];
        Self(RecisTableShare { name, dim, optimizer, key, seed, step, epoch, total_num_buckets, buckets, runs })
    }
}

/// A table name and its number of training steps.
#[pyclass(frozen, get_all, from_py_object, name = "TableStep", module = "torchrec_embcache._native")]
#[pyo3(new = "from_fields")]
#[derive(Clone, Debug)]
pub(crate) struct PyTableStep {
    name: String,
    step: u64,
}

#[pymethods]
impl PyTableStep {
    fn __repr__(&self) -> String {
        format!("TableStep({:?}, {})", self.name, self.step)
    }
}

/// One shard's part of a RecIS-format save.
#[pyclass(frozen, name = "RecisSave", module = "torchrec_embcache._native")]
pub(crate) struct PyRecisSave {
    save: Mutex<Option<RecisSave>>,
    writer: RwLock<Option<RecisShardWriter>>,
    #[pyo3(get)]
    name: String,
}

impl Drop for PyRecisSave {
    fn drop(&mut self) {
        drop_detached(Some((self.take_writer(), lock(&self.save).take())));
    }
}

impl PyRecisSave {
    fn begin(
        py: Python<'_>,
        directory: &PyCheckpointDirectory,
        (index, count): (u32, u32),
        steps: Vec<PyTableStep>,
        join: &RecisJoinMode,
        random: u64,
    ) -> PyResult<Self> {
        let shard = RecisShard { index, count };
        let steps: Vec<(String, u64)> = steps.into_iter().map(|table| (table.name, table.step)).collect();
        let save =
            with_signal_checks(py, |wait| RecisSave::begin(&directory.inner, shard, &steps, join, random, wait))?;
        let name = save.name().to_string();
        Ok(Self { save: Mutex::new(Some(save)), writer: RwLock::new(None), name })
    }

    fn append_with(&self, block: usize, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> embcache::Result<()> {
        let writer = self.writer.read().unwrap_or_else(PoisonError::into_inner);
        writer.as_ref().ok_or_else(closed_error)?.append(block, bytes, copy)
    }

    fn take_writer(&self) -> Option<RecisShardWriter> {
        self.writer.write().unwrap_or_else(PoisonError::into_inner).take()
    }
}

fn ended_error() -> Error {
    Kind::State.error("the save has ended: make another")
}

fn closed_error() -> Error {
    Kind::State.error("these blocks are finished: make another writer")
}

#[pymethods]
impl PyRecisSave {
    /// Joins the latest save that waits for the shard, or creates one.
    #[staticmethod]
    fn join_or_begin(
        py: Python<'_>,
        directory: &PyCheckpointDirectory,
        shard: u32,
        shards: u32,
        steps: Vec<PyTableStep>,
        random: u64,
    ) -> PyResult<Self> {
        Self::begin(py, directory, (shard, shards), steps, &RecisJoinMode::NewestOrNew, random)
    }

    /// Creates a save.
    #[new]
    fn new(
        py: Python<'_>,
        directory: &PyCheckpointDirectory,
        shard: u32,
        shards: u32,
        steps: Vec<PyTableStep>,
        random: u64,
    ) -> PyResult<Self> {
        Self::begin(py, directory, (shard, shards), steps, &RecisJoinMode::New, random)
    }

    /// Joins the save `name`.
    #[staticmethod]
    fn join(
        py: Python<'_>,
        directory: &PyCheckpointDirectory,
        shard: u32,
        shards: u32,
        steps: Vec<PyTableStep>,
        name: String,
    ) -> PyResult<Self> {
        Self::begin(py, directory, (shard, shards), steps, &RecisJoinMode::Named(name), 0)
    }

    /// Creates the data files.
    fn open_files(&self, py: Python<'_>, parallel: u32, blocks: Vec<Py<PyRecisBlockSpec>>) -> PyResult<()> {
        let blocks: Vec<RecisBlockSpec> = blocks.iter().map(|block| block.get().0.clone()).collect();
        detached(py, || {
            let save = lock(&self.save);
            let writer = RecisShardWriter::new(save.as_ref().ok_or_else(ended_error)?, parallel, blocks);
            *self.writer.write().unwrap_or_else(PoisonError::into_inner) = Some(writer?);
            Ok(())
        })
    }

    /// Appends bytes to a block.
    fn append(&self, py: Python<'_>, block: usize, data: PyReadonlyArray1<'_, u8>) -> PyResult<()> {
        let data = slice("data", &data)?;
        let copy = |at: usize, into: &mut [u8]| into.copy_from_slice(&data[at..at + into.len()]);
        detached(py, || self.append_with(block, data.len(), copy))
    }

    /// Appends the rows `rows[order]` to a block. `rows` is `[n, bytes]`, and the bytes of a row must be contiguous.
    fn append_rows(
        &self,
        py: Python<'_>,
        block: usize,
        rows: PyReadonlyArray2<'_, u8>,
        order: PyReadonlyArray1<'_, i64>,
    ) -> PyResult<()> {
        let (rows, order) = (rows.as_array(), slice("order", &order)?);
        let width = rows.ncols();
        let known = |&row: &i64| usize::try_from(row).is_ok_and(|row| row < rows.nrows());
        if rows.strides()[1] != 1 || !py.detach(|| order.iter().all(known)) {
            return Err(input("order has a row that is not there, or bytes of a row do not lie together"));
        }
        let copy = |at: usize, into: &mut [u8]| {
            let (mut row, mut from, mut done) = (at / width, at % width, 0);
            while done < into.len() {
                let count = (width - from).min(into.len() - done);
                let source = rows.row(order[row] as usize).to_slice().unwrap_or_default();
                into[done..done + count].copy_from_slice(&source[from..from + count]);
                (row, from, done) = (row + 1, 0, done + count);
            }
        };
        detached(py, || self.append_with(block, order.len() * width, copy))
    }

    /// Makes everything durable. The last shard publishes the save.
    fn publish(&self, py: Python<'_>, tables: Vec<Py<PyRecisWrittenTable>>) -> PyResult<PyRecisShardOutcome> {
        let tables: Vec<RecisTableShare> = tables.iter().map(|table| table.get().0.clone()).collect();
        let finished = with_signal_checks(py, |wait| {
            let writer = self.take_writer().ok_or_else(closed_error)?;
            let save = lock(&self.save);
            writer.finish(save.as_ref().ok_or_else(closed_error)?, tables, wait)
        })?;
        // Other processes may remove it after this.
        py.detach(|| drop(lock(&self.save).take()));
        let (is_last, left) = match finished {
            RecisShardOutcome::WaitingForShards => (false, Vec::new()),
            RecisShardOutcome::Published(left) => (true, left),
        };
        Ok(PyRecisShardOutcome { is_last, cleanup_errors: left.iter().map(Error::to_string).collect() })
    }

    /// Abandons the shard's part after writes in progress have finished. Idempotent.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || {
            drop(self.take_writer());
            lock(&self.save).take().map_or(Ok(()), RecisSave::abandon)
        })
    }
}

/// Result of finishing a shard's part.
#[pyclass(frozen, get_all, name = "RecisShardOutcome", module = "torchrec_embcache._native")]
pub(crate) struct PyRecisShardOutcome {
    is_last: bool,
    cleanup_errors: Vec<String>,
}

/// Dtype and shape of a block of a table's rows, or of a dense tensor.
#[pyclass(frozen, get_all, name = "RecisBlockShape", module = "torchrec_embcache._native")]
pub(crate) struct PyRecisBlockShape {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
}

impl PyRecisBlockShape {
    fn of(name: &str, shape: &RecisBlockShape) -> Self {
        let RecisBlockShape { dtype, shape, bytes } = shape.clone();
        Self { name: name.to_owned(), dtype, shape, bytes }
    }
}

/// Metadata of a table in a RecIS-format save.
#[pyclass(frozen, get_all, name = "RecisTableInfo", module = "torchrec_embcache._native")]
pub(crate) struct PyRecisTableInfo {
    name: String,
    dim: u32,
    key: u64,
    step: u64,
    epoch: u32,
    total_num_buckets: u32,
    slots: Vec<Py<PyRecisBlockShape>>,
}

impl PyRecisTableInfo {
    fn of(py: Python<'_>, table: &RecisTableInfo) -> PyResult<Self> {
        let shape = |(slot, shape): (&String, &RecisBlockShape)| Py::new(py, PyRecisBlockShape::of(slot, shape));
        Ok(Self {
            name: table.name.clone(),
            dim: table.dim,
            key: table.key,
            step: table.step,
            epoch: table.epoch,
            total_num_buckets: table.bucketing.total(),
            slots: table.slots.iter().map(shape).collect::<PyResult<_>>()?,
        })
    }
}

/// Adjacent rows in the blocks of one shard.
#[pyclass(frozen, name = "RecisRun", module = "torchrec_embcache._native")]
pub(crate) struct PyRecisRun(RecisRun);

#[pymethods]
impl PyRecisRun {
    #[getter]
    fn rows(&self) -> u64 {
        self.0.rows()
    }
}

/// The latest complete save of a directory; `None` after it is released.
#[pyclass(frozen, name = "RecisReader", module = "torchrec_embcache._native")]
pub(crate) struct PyRecisReader(RwLock<Option<RecisReader>>);

impl PyRecisReader {
    fn with<T>(&self, work: impl FnOnce(&RecisReader) -> embcache::Result<T>) -> embcache::Result<T> {
        let reader = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let released = || Kind::State.error("this RecIS-format save was released: open it again");
        work(reader.as_ref().ok_or_else(released)?)
    }
}

#[pymethods]
impl PyRecisReader {
    #[new]
    fn new(py: Python<'_>, directory: &PyCheckpointDirectory) -> PyResult<Self> {
        let reader = with_signal_checks(py, |wait| RecisReader::open(&directory.inner, wait))?;
        Ok(Self(RwLock::new(Some(reader))))
    }

    /// Closes its files, and allows saves to remove it. Waits for reads in progress. Idempotent.
    fn release(&self, py: Python<'_>) {
        py.detach(|| drop(self.0.write().unwrap_or_else(PoisonError::into_inner).take()));
    }

    fn tables(&self, py: Python<'_>) -> PyResult<Vec<PyRecisTableInfo>> {
        let tables: Vec<RecisTableInfo> =
            self.with(|reader| Ok(reader.tables().cloned().collect())).map_err(to_python)?;
        tables.iter().map(|table| PyRecisTableInfo::of(py, table)).collect()
    }

    fn tensors(&self) -> PyResult<Vec<PyRecisBlockShape>> {
        let all = |reader: &RecisReader| {
            Ok(reader.tensors().map(|(name, shape)| PyRecisBlockShape::of(name, &shape)).collect())
        };
        self.with(all).map_err(to_python)
    }

    fn runs(
        &self,
        py: Python<'_>,
        table: &str,
        total_num_buckets: u32,
        bucket_begin: u32,
        bucket_end: u32,
    ) -> PyResult<Vec<PyRecisRun>> {
        if total_num_buckets == 0 {
            return Err(input("total_num_buckets is 0: give 1 at least"));
        }
        let bucketing = BucketMapper::new(total_num_buckets);
        let buckets: Range<u32> = bucket_begin..bucket_end;
        let runs = detached(py, || self.with(|reader| reader.runs(table, bucketing, &buckets)))?;
        Ok(runs.into_iter().map(PyRecisRun).collect())
    }

    fn read_rows(
        &self,
        py: Python<'_>,
        table: &str,
        run: &PyRecisRun,
        slot: &str,
        mut into: PyReadwriteArray1<'_, u8>,
    ) -> PyResult<()> {
        let into = slice_mut("into", &mut into)?;
        detached(py, || self.with(|reader| reader.read_rows(table, &run.0, slot, into)))
    }

    fn read_tensor(&self, py: Python<'_>, name: &str, begin: u64, mut into: PyReadwriteArray1<'_, u8>) -> PyResult<()> {
        let into = slice_mut("into", &mut into)?;
        detached(py, || self.with(|reader| reader.read_tensor(name, begin, into)))
    }
}
