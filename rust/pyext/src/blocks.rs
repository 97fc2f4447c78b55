//! What block-level checkpoints, whose files Python writes, need of the core.

use std::path::PathBuf;
use std::sync::{PoisonError, RwLock};

use embcache::checkpoint::{BlockFile, BlockPlace, BlockWriter as Writer};
use embcache::io::{BeneathEngine, default_engine};
use numpy::{IntoPyArray as _, PyArray1, PyReadonlyArray1, PyReadonlyArray2};
use pyo3::prelude::*;

use crate::buffers::slice;
use crate::error::{input, to_python};

/// CRC-32C of each chunk of some bytes.
#[pyfunction]
#[pyo3(signature = (data, chunk_bytes))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts borrowed arrays")]
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

/// Writes the data files of a shard's blocks.
#[pyclass(frozen, module = "torchrec_embcache._native")]
pub(crate) struct BlockWriter(RwLock<Option<Writer>>);

impl BlockWriter {
    fn append_with(&self, block: usize, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> embcache::Result<()> {
        let writer = self.0.read().unwrap_or_else(PoisonError::into_inner);
        writer.as_ref().ok_or_else(closed)?.append(block, bytes, copy)
    }

    fn take(&self) -> Option<Writer> {
        self.0.write().unwrap_or_else(PoisonError::into_inner).take()
    }
}

fn closed() -> embcache::Error {
    embcache::Error::new(embcache::Kind::State, "these blocks are finished: make another writer")
}

#[pymethods]
impl BlockWriter {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    #[pyo3(signature = (path, directory, files, blocks, chunk_bytes, threads))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        directory: i32,
        files: Vec<(PathBuf, Vec<u8>, u64)>,
        blocks: Vec<(usize, u64, u64)>,
        chunk_bytes: usize,
        threads: usize,
    ) -> PyResult<Self> {
        let open = || {
            // A descriptor of our own of the caller's directory.
            let same = PathBuf::from(format!("/proc/self/fd/{directory}"));
            let held = std::fs::File::open(same).map_err(|error| embcache::Error::io("open", &path, &error))?;
            let engine = BeneathEngine::engine(default_engine()?, &path, held.into());
            let file = |(name, header, bytes)| BlockFile { path: path.join::<PathBuf>(name), header, bytes };
            let files: Vec<BlockFile> = files.into_iter().map(file).collect();
            let blocks: Vec<BlockPlace> =
                blocks.into_iter().map(|(file, start, bytes)| BlockPlace { file, start, bytes }).collect();
            Writer::new(&*engine, &files, &blocks, chunk_bytes, threads)
        };
        py.detach(open).map(|writer| Self(RwLock::new(Some(writer)))).map_err(to_python)
    }

    /// Add bytes to a block.
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts borrowed arrays")]
    fn append(&self, py: Python<'_>, block: usize, data: PyReadonlyArray1<'_, u8>) -> PyResult<()> {
        let data = slice("data", &data)?;
        let copy = |at: usize, into: &mut [u8]| into.copy_from_slice(&data[at..at + into.len()]);
        py.detach(|| self.append_with(block, data.len(), copy)).map_err(to_python)
    }

    /// Add rows `[n, bytes]`, whose bytes lie together, to a block, in this order.
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts borrowed arrays")]
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
        py.detach(|| self.append_with(block, order.len() * width, copy)).map_err(to_python)
    }

    /// Make it durable; of each block the CRC-32C of its chunks.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyArray1<u32>>>> {
        let finished = py.detach(|| self.take().ok_or_else(closed)?.finish()).map_err(to_python)?;
        Ok(finished.into_iter().map(|checksums| checksums.into_pyarray(py)).collect())
    }

    /// Write no more, when what is under way is written. Harmless twice.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.take()));
    }
}
