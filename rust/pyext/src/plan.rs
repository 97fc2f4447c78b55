//! Lookups, which plan batches over several tables; the plan of one batch, and the kernels that run on it.

use embcache::cache::{Lookup, Plan, RowLists};
use embcache::kernels::Hyperparameters;
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray1, PyReadwriteArray2};
use pyo3::prelude::*;

use crate::buffers::{
    device_tensors, matrix, positions_to_python, slice, slice_mut, slice2, slice2_mut, slots_to_python,
};
use crate::error::to_python;
use crate::foreign::{DetachedDrop, detached, with_rows_locked, without_signal_handlers};
use crate::logging::follow_levels_sometimes;
use crate::rows::{DeviceArrayArgs, PyFetchedRows, PyRowOccurrences, borrow_device};
use crate::settings::PyPlanMode;
use crate::table::PyTable;

/// One batch, whose rows are pinned.
#[pyclass(frozen, name = "Plan", module = "torchrec_embcache._native")]
pub(crate) struct PyPlan {
    inner: DetachedDrop<Plan>,
}

impl PyPlan {
    /// Returns the gradient sums of ids that were not admitted, computed by `work` from the output's gradient.
    fn oov_gradient_sums<'py>(
        &self,
        py: Python<'py>,
        grad: &PyReadonlyArray2<'py, f32>,
        columns: impl FnOnce(&Plan) -> embcache::Result<usize>,
        work: impl FnOnce(&Plan, &[f32]) -> embcache::Result<Vec<i64>> + Send,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let grad = slice2("grad", grad, columns(&self.inner).map_err(to_python)?)?;
        let sums = detached(py, || work(&self.inner, grad))?;
        Ok(sums.into_pyarray(py))
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
impl PyPlan {
    #[pyo3(signature = (staging = None))]
    fn wait(&self, py: Python<'_>, staging: Option<Vec<Option<PyReadwriteArray2<'_, f32>>>>) -> PyResult<()> {
        let mut lent = staging.unwrap_or_default();
        let rows = lent.iter_mut().enumerate().map(|(table, rows)| {
            let floats = self.inner.vector_floats(table).map_err(to_python)?;
            rows.as_mut().map(|rows| slice2_mut("lent", rows, floats)).transpose()
        });
        let mut rows = rows.collect::<PyResult<Vec<_>>>()?;
        detached(py, || self.inner.wait(&mut rows))
    }
    fn check_space(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.inner.check_space())
    }
    fn wait_for_reads(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.inner.wait_for_reads())
    }
    fn is_ready(&self, py: Python<'_>) -> PyResult<bool> {
        detached(py, || self.inner.is_ready())
    }
    fn is_placed(&self, py: Python<'_>) -> PyResult<bool> {
        detached(py, || self.inner.is_placed())
    }
    fn max_arriving_rows(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        detached(py, || self.inner.max_arriving_rows())
    }
    fn is_prefetched(&self, py: Python<'_>) -> PyResult<bool> {
        detached(py, || self.inner.is_prefetched())
    }
    fn overflow_rows(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        detached(py, || self.inner.overflow_rows())
    }
    fn missing_row<'py>(&self, py: Python<'py>, table: usize) -> PyResult<Option<Bound<'py, PyArray1<f32>>>> {
        let row = detached(py, || self.inner.absent_row(table))?;
        Ok(row.map(|row| row.into_pyarray(py)))
    }
    fn required_slots(&self, py: Python<'_>, table: usize) -> PyResult<u32> {
        detached(py, || self.inner.required_slots(table))
    }

    #[pyo3(signature = (table, staging = None))]
    fn fetched_rows(
        &self,
        py: Python<'_>,
        table: usize,
        mut staging: Option<PyReadwriteArray2<'_, f32>>,
    ) -> PyResult<PyFetchedRows> {
        let floats = self.inner.vector_floats(table).map_err(to_python)?;
        let lent = staging.as_mut().map(|lent| slice2_mut("lent", lent, floats)).transpose()?.unwrap_or_default();
        let fetched = detached(py, || self.inner.fetched(table, lent))?;
        let vectors = fetched.vectors.map(|vectors| matrix(py, vectors, floats)).transpose()?;
        Ok(PyFetchedRows {
            slots: slots_to_python(py, &fetched.slots).unbind(),
            vectors: vectors.map(Bound::unbind),
            scalars: fetched.scalars.into_pyarray(py).unbind(),
        })
    }

    fn slots<'py>(&self, py: Python<'py>, feature: usize) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let slots = detached(py, || self.inner.slots(feature))?;
        Ok(slots_to_python(py, &slots))
    }

    fn splits(&self) -> Vec<usize> {
        self.inner.splits().to_vec()
    }
    fn fill_slots(&self, py: Python<'_>, mut out: PyReadwriteArray1<'_, i32>) -> PyResult<()> {
        let out = slice_mut("out", &mut out)?;
        detached(py, || self.inner.fill_slots(out))
    }
    fn row_counts(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        detached(py, || self.inner.row_counts())
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
        let mut lists = RowLists {
            tables: slice_mut("tables", &mut tables)?,
            slots: slice_mut("slots", &mut slots)?,
            starts: slice_mut("starts", &mut starts)?,
            occurrences: slice_mut("occurrences", &mut occurrences)?,
        };
        detached(py, || self.inner.fill_rows(&table_numbers, &mut lists))
    }

    fn row_occurrences(&self, py: Python<'_>, table: usize) -> PyResult<PyRowOccurrences> {
        let (slots, starts, occurrences) = detached(py, || self.inner.transposed(table))?;
        Ok(PyRowOccurrences {
            slots: slots_to_python(py, &slots).unbind(),
            starts: positions_to_python(py, &starts).unbind(),
            occurrences: positions_to_python(py, &occurrences).unbind(),
        })
    }

    fn run_exclusively(&self, py: Python<'_>, work: Py<PyAny>) -> PyResult<()> {
        without_signal_handlers(py, |py| {
            detached(py, || self.inner.exclusively(|| with_rows_locked(|py| work.call0(py).map(drop))))?
        })
    }

    fn mark_scattered(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.inner.scattered())
    }

    fn begin_update(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.inner.begin_update())
    }

    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.inner.commit())
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
        let sums = slice("sums", &sums)?;
        let hyperparameters = self::hyperparameters(&hyperparameters)?;
        detached(py, || self.inner.train_oov_row(sums, &hyperparameters))
    }

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
        let (offsets, mean) = (slice("offsets", &offsets)?, slice("mean", &mean)?);
        let weights = weights.as_ref().map(|weights| slice("weights", weights)).transpose()?;
        let out = slice2_mut("out", &mut out, self.inner.pooled_columns())?;
        let mut borrowed = borrow_device(py, &device)?;
        let mut device = device_tensors(&self.inner, &mut borrowed)?;
        detached(py, || self.inner.forward_pooled(offsets, weights, mean, out, &mut device, threads))
    }

    fn forward_sequence(
        &self,
        py: Python<'_>,
        mut out: PyReadwriteArray2<'_, f32>,
        device: DeviceArrayArgs,
        threads: usize,
    ) -> PyResult<()> {
        let out = slice2_mut("out", &mut out, self.inner.common_dim().map_err(to_python)?)?;
        let mut borrowed = borrow_device(py, &device)?;
        let mut device = device_tensors(&self.inner, &mut borrowed)?;
        detached(py, || self.inner.forward_sequence(out, &mut device, threads))
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
        let grad = slice2("grad", &grad, self.inner.pooled_columns())?;
        let hyperparameters = self::hyperparameters(&hyperparameters)?;
        let weight_grad = weight_grad.as_mut().map(|grad| slice_mut("weight_grad", grad)).transpose()?;
        let mut borrowed = borrow_device(py, &device)?;
        let mut device = device_tensors(&self.inner, &mut borrowed)?;
        detached(py, || self.inner.backward_pooled(grad, &hyperparameters, weight_grad, &mut device, threads))
    }

    fn backward_sequence(
        &self,
        py: Python<'_>,
        grad: PyReadonlyArray2<'_, f32>,
        hyperparameters: PyReadonlyArray2<'_, f64>,
        device: DeviceArrayArgs,
        threads: usize,
    ) -> PyResult<()> {
        let grad = slice2("grad", &grad, self.inner.common_dim().map_err(to_python)?)?;
        let hyperparameters = self::hyperparameters(&hyperparameters)?;
        let mut borrowed = borrow_device(py, &device)?;
        let mut device = device_tensors(&self.inner, &mut borrowed)?;
        detached(py, || self.inner.backward_sequence(grad, &hyperparameters, &mut device, threads))
    }

    fn release(&self, py: Python<'_>) {
        py.detach(|| self.inner.release());
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
    fn new(tables: Vec<Py<PyTable>>, feature_tables: Vec<usize>) -> PyResult<Self> {
        let tables: Vec<_> = tables.iter().map(|table| table.get().inner.clone()).collect();
        Ok(Self { inner: Lookup::new(&tables, &feature_tables).map_err(to_python)? })
    }

    #[pyo3(signature = (ids, feature_splits, mode, threads, clicks=None))]
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
        detached(py, || self.inner.plan(ids, splits, mode, clicks))
            .map(|plan| PyPlan { inner: DetachedDrop::new(plan) })
    }
}
