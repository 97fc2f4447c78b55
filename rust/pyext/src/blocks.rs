//! Directories of checkpoints, checked and held; and what block-level checkpoints, whose files Python writes, need besides.

use std::ffi::OsString;
use std::os::fd::{IntoRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::io::{BeneathEngine, IoEngine, default_engine};
use embcache::paths::{open_to_load, open_to_save};
use numpy::{IntoPyArray as _, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use crate::buffers::slice;
use crate::error::{input, to_python};

/// Check a directory that is saved to; its absolute path, and an engine that works in it whatever becomes of the path.
pub(crate) fn saving_in(path: &Path) -> embcache::Result<(PathBuf, Arc<dyn IoEngine>)> {
    let (path, directory) = open_to_save(path)?;
    let engine = BeneathEngine::engine(default_engine()?, &path, directory);
    Ok((path, engine))
}

/// Check a directory that is loaded from, as [`saving_in`].
pub(crate) fn loading_from(path: &Path) -> embcache::Result<(PathBuf, Arc<dyn IoEngine>)> {
    let (path, directory) = open_to_load(path)?;
    let engine = BeneathEngine::engine(default_engine()?, &path, directory);
    Ok((path, engine))
}

fn opened((path, directory): (PathBuf, OwnedFd)) -> (OsString, i32) {
    (path.into_os_string(), directory.into_raw_fd())
}

/// Check the directory that a checkpoint is saved to, making it when missing; its absolute path and an open descriptor.
#[pyfunction]
#[pyo3(signature = (path))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn open_save_dir(py: Python<'_>, path: PathBuf) -> PyResult<(OsString, i32)> {
    py.detach(|| open_to_save(&path)).map(opened).map_err(to_python)
}

/// Check the directory that a checkpoint is loaded from; its absolute path and an open descriptor.
#[pyfunction]
#[pyo3(signature = (path))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn open_load_dir(py: Python<'_>, path: PathBuf) -> PyResult<(OsString, i32)> {
    py.detach(|| open_to_load(&path)).map(opened).map_err(to_python)
}

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
