//! Rows as numpy arrays, and rows of the device tier, which Python reads.
//!
//! Shapes: n rows, V floats of a row's vector part, U distinct rows of a plan, M rows that a plan fetched, S slots of a
//! device tier.

use std::sync::Arc;

use embcache::cache::DeviceRowReader;
use embcache::config::TableConfig;
use embcache::rows::RowHeader;
use embcache::types::CacheSlot;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::buffers::{DeviceArrayBorrows, MetadataArrays, matrix, scalars_to_python, slice, slice2, slots_to_python};
use crate::error::{from_python, input};
use crate::foreign::with_rows_locked_off_main;

/// Metadata of rows.
#[pyclass(frozen, get_all, new = "from_fields", name = "RowMetadata", module = "torchrec_embcache._native")]
pub(crate) struct PyRowMetadata {
    count: Py<PyArray1<u32>>,
    last_step: Py<PyArray1<u64>>,
    score: Py<PyArray1<f32>>,
    modified_epoch: Py<PyArray1<u32>>,
}

#[pymethods]
impl PyRowMetadata {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("RowMetadata of {} rows", self.count.bind(py).len()?))
    }
}

impl PyRowMetadata {
    fn of(py: Python<'_>, headers: &[RowHeader]) -> PyResult<Py<Self>> {
        let count: Vec<u32> = headers.iter().map(|header| header.count).collect();
        let last_step: Vec<u64> = headers.iter().map(|header| header.last_step).collect();
        let score: Vec<f32> = headers.iter().map(|header| header.score).collect();
        let modified_epoch: Vec<u32> = headers.iter().map(|header| header.modified_epoch).collect();
        let metadata = Self {
            count: count.into_pyarray(py).unbind(),
            last_step: last_step.into_pyarray(py).unbind(),
            score: score.into_pyarray(py).unbind(),
            modified_epoch: modified_epoch.into_pyarray(py).unbind(),
        };
        Py::new(py, metadata)
    }

    /// Borrows the arrays, which must not be written during this time.
    pub(crate) fn borrowed<'py>(&self, py: Python<'py>) -> PyResult<MetadataArrays<'py>> {
        Ok(MetadataArrays {
            count: self.count.bind(py).try_readonly()?,
            last_step: self.last_step.bind(py).try_readonly()?,
            score: self.score.bind(py).try_readonly()?,
            modified_epoch: self.modified_epoch.bind(py).try_readonly()?,
        })
    }
}

/// Rows with values and metadata.
#[pyclass(frozen, get_all, new = "from_fields", name = "RowBlock", module = "torchrec_embcache._native")]
pub(crate) struct PyRowBlock {
    ids: Py<PyArray1<i64>>,
    vectors: Py<PyArray2<f32>>,
    scalars: Py<PyArray1<f32>>,
    metadata: Py<PyRowMetadata>,
}

#[pymethods]
impl PyRowBlock {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.ids.bind(py).len()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("RowBlock of {} rows", self.__len__(py)?))
    }
}

impl PyRowBlock {
    pub(crate) fn of(py: Python<'_>, headers: &[RowHeader], vectors: Vec<f32>, vector_floats: usize) -> PyResult<Self> {
        let ids: Vec<i64> = headers.iter().map(|header| header.id).collect();
        Ok(Self {
            ids: ids.into_pyarray(py).unbind(),
            vectors: matrix(py, vectors, vector_floats)?.unbind(),
            scalars: scalars_to_python(py, headers).unbind(),
            metadata: PyRowMetadata::of(py, headers)?,
        })
    }
}

/// The rows of some ids, in the order of the ids. For an id without a row, its initial value.
#[pyclass(frozen, get_all, name = "FoundRows", module = "torchrec_embcache._native")]
pub(crate) struct PyFoundRows {
    found: Py<PyArray1<bool>>,
    vectors: Py<PyArray2<f32>>,
    scalars: Py<PyArray1<f32>>,
    metadata: Py<PyRowMetadata>,
}

#[pymethods]
impl PyFoundRows {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("FoundRows of {} ids", self.found.bind(py).len()?))
    }
}

impl PyFoundRows {
    pub(crate) fn of(
        py: Python<'_>,
        found: Vec<bool>,
        headers: &[RowHeader],
        vectors: Vec<f32>,
        vector_floats: usize,
    ) -> PyResult<Self> {
        Ok(Self {
            found: found.into_pyarray(py).unbind(),
            vectors: matrix(py, vectors, vector_floats)?.unbind(),
            scalars: scalars_to_python(py, headers).unbind(),
            metadata: PyRowMetadata::of(py, headers)?,
        })
    }
}

/// The rows that a plan fetched for a device tier, and their target slots.
#[pyclass(frozen, get_all, name = "FetchedRows", module = "torchrec_embcache._native")]
pub(crate) struct PyFetchedRows {
    pub(crate) slots: Py<PyArray1<i64>>,
    pub(crate) vectors: Option<Py<PyArray2<f32>>>,
    pub(crate) scalars: Py<PyArray1<f32>>,
}

#[pymethods]
impl PyFetchedRows {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("FetchedRows of {} slots", self.slots.bind(py).len()?))
    }
}

/// The rows of some slots of a device tier, gathered by a Python callable.
#[pyclass(frozen, get_all, new = "from_fields", name = "GatheredRows", module = "torchrec_embcache._native")]
pub(crate) struct PyGatheredRows {
    pub(crate) vectors: Py<PyArray2<f32>>,
    pub(crate) scalars: Py<PyArray1<f32>>,
}

#[pymethods]
impl PyGatheredRows {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("GatheredRows of {} slots", self.scalars.bind(py).len()?))
    }
}

/// The occurrences of a plan's ids by distinct row.
#[pyclass(frozen, get_all, name = "RowOccurrences", module = "torchrec_embcache._native")]
pub(crate) struct PyRowOccurrences {
    pub(crate) slots: Py<PyArray1<i64>>,
    pub(crate) starts: Py<PyArray1<i64>>,
    pub(crate) occurrences: Py<PyArray1<i64>>,
}

#[pymethods]
impl PyRowOccurrences {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("RowOccurrences of {} rows", self.slots.bind(py).len()?))
    }
}

/// The device tier of one table, as arrays that share the memory of its tensors.
#[pyclass(frozen, get_all, new = "from_fields", name = "DeviceArrays", module = "torchrec_embcache._native")]
pub(crate) struct PyDeviceArrays {
    weights: Py<PyArray2<f32>>,
    vector_slots: Vec<Py<PyArray2<f32>>>,
    scalars: Option<Py<PyArray1<f32>>>,
}

#[pymethods]
impl PyDeviceArrays {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("DeviceArrays of {} slots", self.weights.bind(py).len()?))
    }
}

/// Device arrays of each table of a lookup, from Python; `None` for a table whose kernels run on the host tier.
pub(crate) type DeviceArrayArgs = Option<Vec<Option<Py<PyDeviceArrays>>>>;

/// Borrows the arrays of `args`, which must not be read or written by other code during this time.
pub(crate) fn borrow_device<'py>(
    py: Python<'py>,
    args: &DeviceArrayArgs,
) -> PyResult<Vec<Option<DeviceArrayBorrows<'py>>>> {
    let busy = |_| input("the device arrays are in use by another call: end it first");
    let borrow = |arrays: &PyDeviceArrays| -> PyResult<DeviceArrayBorrows<'py>> {
        let vector_slots = arrays.vector_slots.iter().map(|slot| slot.bind(py).try_readwrite().map_err(busy));
        Ok((
            arrays.weights.bind(py).try_readwrite().map_err(busy)?,
            vector_slots.collect::<PyResult<_>>()?,
            arrays.scalars.as_ref().map(|scalars| scalars.bind(py).try_readwrite().map_err(busy)).transpose()?,
        ))
    };
    let tables = args.as_deref().unwrap_or_default();
    tables.iter().map(|arrays| arrays.as_ref().map(|arrays| borrow(arrays.get())).transpose()).collect()
}

/// Reads rows of the device tier through a Python callable.
pub(crate) struct PythonGather {
    callable: Py<PyAny>,
    vector_floats: usize,
}

impl PythonGather {
    pub(crate) fn of(callable: Py<PyAny>, config: &TableConfig) -> Arc<dyn DeviceRowReader> {
        Arc::new(Self { callable, vector_floats: config.layout().vector_floats() })
    }
}

impl DeviceRowReader for PythonGather {
    fn gather(&self, slots: &[CacheSlot], vectors: &mut [f32], scalars: &mut [f32]) -> embcache::Result<()> {
        with_rows_locked_off_main(|py| {
            let mut call = || -> PyResult<()> {
                let answer = self.callable.call1(py, (slots_to_python(py, slots),))?;
                let gathered = answer.bind(py).cast::<PyGatheredRows>()?.get();
                let (rows, scalar_slots) =
                    (gathered.vectors.bind(py).try_readonly()?, gathered.scalars.bind(py).try_readonly()?);
                let rows = slice2("device rows", &rows, self.vector_floats)?;
                let scalar_slots = slice("device scalars", &scalar_slots)?;
                if rows.len() != slots.len() * self.vector_floats || scalar_slots.len() != slots.len() {
                    return Err(crate::error::input(format!(
                        "device_gather gave {} floats and {} scalars for {} slots of {} floats",
                        rows.len(),
                        scalar_slots.len(),
                        slots.len(),
                        self.vector_floats
                    )));
                }
                vectors.copy_from_slice(rows);
                scalars.copy_from_slice(scalar_slots);
                Ok(())
            };
            call().map_err(|error| from_python(py, &error, "reading rows of the device tier"))
        })
    }
}
