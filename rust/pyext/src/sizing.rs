//! Measurements for sizing the budgets of a table.

use embcache::cache::{INDEX_BYTES_PER_ROW, Table, device_row_bytes, host_row_bytes};
use embcache::sizing::MissRatioCurve;
use embcache::ssd::SsdTier;
use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;

use crate::error::to_python;
use crate::settings::{PyRowBytes, optimizer_from, policy_from};
use crate::table::PyTable;

/// The miss ratios of caches of many sizes under one policy.
#[pyclass(frozen, get_all, name = "MissRatioCurve", module = "torchrec_embcache._native")]
pub(crate) struct PyMissRatioCurve {
    policy: &'static str,
    /// `[n]`
    rows: Py<PyArray1<u64>>,
    /// `[n]`
    miss_ratios: Py<PyArray1<f64>>,
    first_use_ratio: f64,
    new_row_ratio: f64,
    lookups: u64,
    batches: u64,
    largest_batch: u64,
    distinct_ids: u64,
    sampling_rate: f64,
}

impl PyMissRatioCurve {
    fn new(py: Python<'_>, curve: &MissRatioCurve) -> Self {
        Self {
            policy: curve.policy.name(),
            rows: curve.rows.to_pyarray(py).unbind(),
            miss_ratios: curve.miss_ratios.to_pyarray(py).unbind(),
            first_use_ratio: curve.first_use_ratio,
            new_row_ratio: curve.new_row_ratio,
            lookups: curve.lookups,
            batches: curve.batches,
            largest_batch: curve.largest_batch,
            distinct_ids: curve.distinct_ids,
            sampling_rate: curve.sampling_rate,
        }
    }
}

/// Returns the curve of the table's policy, then that of `lru` if the policy differs; `None` if nothing is measured.
/// With `reset` the counts restart at zero.
#[pyfunction]
#[pyo3(signature = (table, *, reset))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned references")]
pub(crate) fn miss_ratio_curves(
    py: Python<'_>,
    table: Py<PyTable>,
    reset: bool,
) -> PyResult<Option<Vec<PyMissRatioCurve>>> {
    let table: &Table = &table.get().inner;
    let curves = py.detach(|| table.miss_ratio_curves(reset)).map_err(to_python)?;
    Ok(curves.map(|curves| curves.iter().map(|curve| PyMissRatioCurve::new(py, curve)).collect()))
}

/// Returns the bytes of one row in each budget.
#[pyfunction]
pub(crate) fn row_bytes(dim: usize, optimizer: &str, policy: &str) -> PyResult<PyRowBytes> {
    let layout = optimizer_from(optimizer)?.layout(dim);
    let policy = policy_from(policy)?;
    Ok(PyRowBytes {
        host: host_row_bytes(&layout, policy),
        device: device_row_bytes(&layout, policy),
        ssd: SsdTier::record_bytes(&layout),
        index: INDEX_BYTES_PER_ROW,
    })
}
