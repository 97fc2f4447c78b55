//! Lookups, which plan batches over several tables; the plan of one batch, and the kernels that run on it.

use embcache::cache::{Lookup, Plan, RowLists};
use embcache::kernels::Hyperparameters;
use embcache::{Error, Kind};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray1, PyReadwriteArray2};
use pyo3::prelude::*;

use crate::buffers::{
    device_tensors, matrix, positions_to_python, slice, slice_mut, slice2, slice2_mut, slots_to_python,
};
use crate::error::to_python;
use crate::foreign::{drop_detached, with_rows_locked, without_signal_handlers};
use crate::logging::follow_levels_sometimes;
use crate::rows::{DeviceArrayArgs, PyFetchedRows, PyRowOccurrences, borrow_device};
use crate::settings::PyPlanMode;
use crate::table::PyTable;

/// One batch, whose rows are pinned.
#[pyclass(frozen, name = "Plan", module = "torchrec_embcache._native")]
pub(crate) struct PyPlan {
    /// `None` only during drop.
    inner: Option<Plan>,
}

impl PyPlan {
    pub(crate) fn new(plan: Plan) -> Self {
        Self { inner: Some(plan) }
    }

    fn plan(&self) -> PyResult<&Plan> {
        self.inner.as_ref().ok_or_else(|| to_python(Error::new(Kind::State, "the plan is gone")))
    }

    /// Returns the gradient sums of ids that were not admitted, computed by `work` from the output's gradient.
    fn oov_gradient_sums<'py>(
        &self,
        py: Python<'py>,
        grad: &PyReadonlyArray2<'py, f32>,
        columns: impl FnOnce(&Plan) -> embcache::Result<usize>,
        work: impl FnOnce(&Plan, &[f32]) -> embcache::Result<Vec<i64>> + Send,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let plan = self.plan()?;
        let grad = slice2("grad", grad, columns(plan).map_err(to_python)?)?;
        let sums = py.detach(|| work(plan, grad)).map_err(to_python)?;
        Ok(sums.into_pyarray(py))
    }
}

impl Drop for PyPlan {
    fn drop(&mut self) {
        drop_detached(self.inner.take());
    }
}

fn hyperparameters(rows: &PyReadonlyArray2<'_, f64>) -> PyResult<Vec<Hyperparameters>> {
    Ok(slice2("hyperparameters", rows, 8)?
        .as_chunks()
        .0
        .iter()
        .map(|&[lr, eps, beta1, beta2, weight_decay, beta, l1, l2]| Hyperparameters {
            lr,
            eps,
            beta1,
            beta2,
            weight_decay,
            beta,
            l1,
            l2,
        })
        .collect())
}

#[pymethods]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned borrows")]
impl PyPlan {
    #[pyo3(signature = (staging = None))]
    fn wait(&self, py: Python<'_>, staging: Option<Vec<Option<PyReadwriteArray2<'_, f32>>>>) -> PyResult<()> {
        let plan = self.plan()?;
        let mut lent = staging.unwrap_or_default();
        let rows = lent.iter_mut().enumerate().map(|(table, rows)| {
            let floats = plan.vector_floats(table).map_err(to_python)?;
            rows.as_mut().map(|rows| slice2_mut("lent", rows, floats)).transpose()
        });
        let mut rows = rows.collect::<PyResult<Vec<_>>>()?;
        py.detach(|| plan.wait(&mut rows)).map_err(to_python)
    }
    fn check_space(&self, py: Python<'_>) -> PyResult<()> {
        let plan = self.plan()?;
        py.detach(|| plan.check_space()).map_err(to_python)
    }
    fn wait_for_reads(&self, py: Python<'_>) -> PyResult<()> {
        let plan = self.plan()?;
        py.detach(|| plan.wait_for_reads()).map_err(to_python)
    }
    fn is_ready(&self, py: Python<'_>) -> PyResult<bool> {
        let plan = self.plan()?;
        py.detach(|| plan.is_ready()).map_err(to_python)
    }
    fn is_placed(&self, py: Python<'_>) -> PyResult<bool> {
        let plan = self.plan()?;
        py.detach(|| plan.is_placed()).map_err(to_python)
    }
    fn max_arriving_rows(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        let plan = self.plan()?;
        py.detach(|| plan.max_arriving_rows()).map_err(to_python)
    }
    fn is_prefetched(&self, py: Python<'_>) -> PyResult<bool> {
        let plan = self.plan()?;
        py.detach(|| plan.is_prefetched()).map_err(to_python)
    }
    fn overflow_rows(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        let plan = self.plan()?;
        py.detach(|| plan.overflow_rows()).map_err(to_python)
    }
    fn missing_row<'py>(&self, py: Python<'py>, table: usize) -> PyResult<Option<Bound<'py, PyArray1<f32>>>> {
        let plan = self.plan()?;
        let row = py.detach(|| plan.absent_row(table)).map_err(to_python)?;
        Ok(row.map(|row| row.into_pyarray(py)))
    }
    fn required_slots(&self, py: Python<'_>, table: usize) -> PyResult<u32> {
        let plan = self.plan()?;
        py.detach(|| plan.required_slots(table)).map_err(to_python)
    }

    #[pyo3(signature = (table, staging = None))]
    fn fetched_rows(
        &self,
        py: Python<'_>,
        table: usize,
        mut staging: Option<PyReadwriteArray2<'_, f32>>,
    ) -> PyResult<PyFetchedRows> {
        let plan = self.plan()?;
        let floats = plan.vector_floats(table).map_err(to_python)?;
        let lent = staging.as_mut().map(|lent| slice2_mut("lent", lent, floats)).transpose()?.unwrap_or_default();
        let fetched = py.detach(|| plan.fetched(table, lent)).map_err(to_python)?;
        let vectors = fetched.vectors.map(|vectors| matrix(py, vectors, floats)).transpose()?;
        Ok(PyFetchedRows {
            slots: slots_to_python(py, &fetched.slots).unbind(),
            vectors: vectors.map(Bound::unbind),
            scalars: fetched.scalars.into_pyarray(py).unbind(),
        })
    }

    fn slots<'py>(&self, py: Python<'py>, feature: usize) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let plan = self.plan()?;
        let slots = py.detach(|| plan.slots(feature)).map_err(to_python)?;
        Ok(slots_to_python(py, &slots))
    }

    fn splits(&self) -> PyResult<Vec<usize>> {
        Ok(self.plan()?.splits().to_vec())
    }
    fn fill_slots(&self, py: Python<'_>, mut out: PyReadwriteArray1<'_, i32>) -> PyResult<()> {
        let plan = self.plan()?;
        let out = slice_mut("out", &mut out)?;
        py.detach(|| plan.fill_slots(out)).map_err(to_python)
    }
    fn row_counts(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        let plan = self.plan()?;
        py.detach(|| plan.row_counts()).map_err(to_python)
    }
    fn fill_row_occurrences(
        &self,
        py: Python<'_>,
        table_numbers: Vec<usize>,
        mut tables: PyReadwriteArray1<'_, i32>,
        mut slots: PyReadwriteArray1<'_, i32>,
        mut starts: PyReadwriteArray1<'_, i32>,
        mut occurrences: PyReadwriteArray1<'_, i32>,
    ) -> PyResult<()> {
        let plan = self.plan()?;
        let mut lists = RowLists {
            tables: slice_mut("tables", &mut tables)?,
            slots: slice_mut("slots", &mut slots)?,
            starts: slice_mut("starts", &mut starts)?,
            occurrences: slice_mut("occurrences", &mut occurrences)?,
        };
        py.detach(|| plan.fill_rows(&table_numbers, &mut lists)).map_err(to_python)
    }

    fn row_occurrences(&self, py: Python<'_>, table: usize) -> PyResult<PyRowOccurrences> {
        let plan = self.plan()?;
        let (slots, starts, occurrences) = py.detach(|| plan.transposed(table)).map_err(to_python)?;
        Ok(PyRowOccurrences {
            slots: slots_to_python(py, &slots).unbind(),
            starts: positions_to_python(py, &starts).unbind(),
            occurrences: positions_to_python(py, &occurrences).unbind(),
        })
    }

    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned callables")]
    fn run_exclusively(&self, py: Python<'_>, work: Py<PyAny>) -> PyResult<()> {
        let plan = self.plan()?;
        without_signal_handlers(py, |py| {
            py.detach(|| plan.exclusively(|| with_rows_locked(|py| work.call0(py).map(drop)))).map_err(to_python)?
        })
    }

    fn mark_scattered(&self, py: Python<'_>) -> PyResult<()> {
        let plan = self.plan()?;
        py.detach(|| plan.scattered()).map_err(to_python)
    }

    fn begin_update(&self, py: Python<'_>) -> PyResult<()> {
        let plan = self.plan()?;
        py.detach(|| plan.begin_update()).map_err(to_python)
    }

    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        let plan = self.plan()?;
        py.detach(|| plan.commit()).map_err(to_python)
    }

    fn oov_gradient_sums_pooled<'py>(
        &self,
        py: Python<'py>,
        grad: PyReadonlyArray2<'py, f32>,
        threads: usize,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        self.oov_gradient_sums(
            py,
            &grad,
            |plan| Ok(plan.pooled_columns()),
            |plan, grad| plan.oov_gradient_sums_pooled(grad, threads),
        )
    }

    fn oov_gradient_sums_sequence<'py>(
        &self,
        py: Python<'py>,
        grad: PyReadonlyArray2<'py, f32>,
        threads: usize,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        self.oov_gradient_sums(py, &grad, Plan::common_dim, |plan, grad| plan.oov_gradient_sums_sequence(grad, threads))
    }

    fn train_oov_row(
        &self,
        py: Python<'_>,
        sums: PyReadonlyArray1<'_, i64>,
        hyperparameters: PyReadonlyArray2<'_, f64>,
    ) -> PyResult<()> {
        let plan = self.plan()?;
        let sums = slice("sums", &sums)?;
        let hyperparameters = self::hyperparameters(&hyperparameters)?;
        py.detach(|| plan.train_oov_row(sums, &hyperparameters)).map_err(to_python)
    }

    #[expect(clippy::too_many_arguments, reason = "one call a phase")]
    fn forward_pooled(
        &self,
        py: Python<'_>,
        offsets: PyReadonlyArray1<'_, i64>,
        weights: Option<PyReadonlyArray1<'_, f32>>,
        mean: PyReadonlyArray1<'_, bool>,
        mut out: PyReadwriteArray2<'_, f32>,
        device: DeviceArrayArgs,
        threads: usize,
    ) -> PyResult<()> {
        let plan = self.plan()?;
        let (offsets, mean) = (slice("offsets", &offsets)?, slice("mean", &mean)?);
        let weights = weights.as_ref().map(|weights| slice("weights", weights)).transpose()?;
        let out = slice2_mut("out", &mut out, plan.pooled_columns())?;
        let mut borrowed = borrow_device(py, &device)?;
        let mut device = device_tensors(plan, &mut borrowed)?;
        py.detach(|| plan.forward_pooled(offsets, weights, mean, out, &mut device, threads)).map_err(to_python)
    }

    fn forward_sequence(
        &self,
        py: Python<'_>,
        mut out: PyReadwriteArray2<'_, f32>,
        device: DeviceArrayArgs,
        threads: usize,
    ) -> PyResult<()> {
        let plan = self.plan()?;
        let out = slice2_mut("out", &mut out, plan.common_dim().map_err(to_python)?)?;
        let mut borrowed = borrow_device(py, &device)?;
        let mut device = device_tensors(plan, &mut borrowed)?;
        py.detach(|| plan.forward_sequence(out, &mut device, threads)).map_err(to_python)
    }

    fn backward_pooled(
        &self,
        py: Python<'_>,
        grad: PyReadonlyArray2<'_, f32>,
        hyperparameters: PyReadonlyArray2<'_, f64>,
        mut weight_grad: Option<PyReadwriteArray1<'_, f32>>,
        device: DeviceArrayArgs,
        threads: usize,
    ) -> PyResult<()> {
        let plan = self.plan()?;
        let grad = slice2("grad", &grad, plan.pooled_columns())?;
        let hyperparameters = self::hyperparameters(&hyperparameters)?;
        let weight_grad = weight_grad.as_mut().map(|grad| slice_mut("weight_grad", grad)).transpose()?;
        let mut borrowed = borrow_device(py, &device)?;
        let mut device = device_tensors(plan, &mut borrowed)?;
        py.detach(|| plan.backward_pooled(grad, &hyperparameters, weight_grad, &mut device, threads)).map_err(to_python)
    }

    fn backward_sequence(
        &self,
        py: Python<'_>,
        grad: PyReadonlyArray2<'_, f32>,
        hyperparameters: PyReadonlyArray2<'_, f64>,
        device: DeviceArrayArgs,
        threads: usize,
    ) -> PyResult<()> {
        let plan = self.plan()?;
        let grad = slice2("grad", &grad, plan.common_dim().map_err(to_python)?)?;
        let hyperparameters = self::hyperparameters(&hyperparameters)?;
        let mut borrowed = borrow_device(py, &device)?;
        let mut device = device_tensors(plan, &mut borrowed)?;
        py.detach(|| plan.backward_sequence(grad, &hyperparameters, &mut device, threads)).map_err(to_python)
    }

    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let plan = self.plan()?;
        py.detach(|| plan.release());
        Ok(())
    }
}

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
        py.detach(|| self.inner.plan(ids, splits, mode, clicks)).map(PyPlan::new).map_err(to_python)
    }
}
