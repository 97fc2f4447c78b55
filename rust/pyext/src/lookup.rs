//! A lookup over several tables, which plans batches.

use embcache::cache::Lookup;
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use crate::buffers::slice;
use crate::error::to_python;
use crate::logging::follow_levels_sometimes;
use crate::plan::PyPlan;
use crate::settings::PyPlanMode;
use crate::table::PyTable;

/// Plans batches over several tables.
#[pyclass(frozen, name = "Lookup", module = "torchrec_embcache._native")]
pub(crate) struct PyLookup {
    inner: Lookup,
}

#[pymethods]
impl PyLookup {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned lists")]
    fn new(tables: Vec<Py<PyTable>>, feature_tables: Vec<usize>) -> PyResult<Self> {
        let tables: Vec<_> = tables.iter().map(|table| table.get().inner.clone()).collect();
        Ok(Self { inner: Lookup::new(&tables, &feature_tables).map_err(to_python)? })
    }

    #[pyo3(signature = (ids, feature_splits, mode, threads, clicks=None))]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned borrows")]
    fn plan(
        &self,
        py: Python<'_>,
        ids: PyReadonlyArray1<'_, i64>,
        feature_splits: PyReadonlyArray1<'_, i64>,
        mode: Py<PyPlanMode>,
        threads: usize,
        clicks: Option<PyReadonlyArray1<'_, u32>>,
    ) -> PyResult<PyPlan> {
        follow_levels_sometimes(py)?;
        let (ids, splits) = (slice("ids", &ids)?, slice("feature_splits", &feature_splits)?);
        let mode = mode.get().on(threads)?;
        let clicks = clicks.as_ref().map(|clicks| slice("clicks", clicks)).transpose()?.unwrap_or_default();
        py.detach(|| self.inner.plan_with_clicks(ids, splits, mode, clicks)).map(PyPlan::new).map_err(to_python)
    }
}
