//! Directories of SSD tiers.

use std::ffi::OsString;
use std::path::PathBuf;

use embcache::paths::{directory_for_ssd, encode_name};
use pyo3::prelude::*;

use crate::error::to_python;

/// Check a user's `ssd_dir`; its absolute path.
#[pyfunction]
#[pyo3(signature = (ssd_dir))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn check_ssd_dir(py: Python<'_>, ssd_dir: PathBuf) -> PyResult<OsString> {
    py.detach(|| directory_for_ssd(&ssd_dir)).map(PathBuf::into_os_string).map_err(to_python)
}

/// The directory of a table's shard below `ssd_dir`.
#[pyfunction]
#[pyo3(signature = (ssd_dir, module, table, rank, world_size))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn table_dir(ssd_dir: PathBuf, module: &str, table: &str, rank: u32, world_size: u32) -> OsString {
    ssd_dir.join(encode_name(module)).join(encode_name(table)).join(format!("{rank}-of-{world_size}")).into_os_string()
}
