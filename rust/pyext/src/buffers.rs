//! Arrays at the FFI boundary: conversions between numpy arrays and slices or vectors.

use embcache::cache::{DeviceTensors, Plan};
use embcache::rows::RowHeader;
use embcache::types::CacheSlot;
use numpy::{
    Element, IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray1,
    PyReadwriteArray2, PyUntypedArrayMethods,
};
use pyo3::prelude::*;

use crate::error::{input, to_python};

/// Metadata of n rows, borrowed from Python: each `[n]`.
pub(crate) struct MetadataArrays<'py> {
    pub(crate) count: PyReadonlyArray1<'py, u32>,
    pub(crate) last_step: PyReadonlyArray1<'py, u64>,
    pub(crate) score: PyReadonlyArray1<'py, f32>,
    pub(crate) modified_epoch: PyReadonlyArray1<'py, u32>,
}

/// Borrows a contiguous array as a slice.
pub(crate) fn slice<'a, T: Element>(name: &str, array: &'a PyReadonlyArray1<'_, T>) -> PyResult<&'a [T]> {
    array.as_slice().map_err(|_| input(format!("{name} is not contiguous: pass a contiguous array")))
}

/// Borrows an array `[n, columns]` in C order as a slice.
pub(crate) fn slice2<'a, T: Element>(
    name: &str,
    array: &'a PyReadonlyArray2<'_, T>,
    columns: usize,
) -> PyResult<&'a [T]> {
    check_matrix(name, array, columns)?;
    array.as_slice().map_err(|_| input(format!("{name} is not contiguous: pass a contiguous array")))
}

/// Borrows a contiguous array as a mutable slice.
pub(crate) fn slice_mut<'a, T: Element>(name: &str, array: &'a mut PyReadwriteArray1<'_, T>) -> PyResult<&'a mut [T]> {
    array.as_slice_mut().map_err(|_| input(format!("{name} is not contiguous: pass a contiguous array")))
}

/// Borrows an array `[n, columns]` in C order as a mutable slice.
pub(crate) fn slice2_mut<'a, T: Element>(
    name: &str,
    array: &'a mut PyReadwriteArray2<'_, T>,
    columns: usize,
) -> PyResult<&'a mut [T]> {
    check_matrix(name, array, columns)?;
    array.as_slice_mut().map_err(|_| input(format!("{name} is not contiguous: pass a contiguous array")))
}

/// Rejects an array of another width, or with rows that are not contiguous. An empty array is accepted with any width.
fn check_matrix<T: Element>(name: &str, array: &Bound<'_, PyArray2<T>>, columns: usize) -> PyResult<()> {
    let shape = array.shape();
    if array.is_empty() || shape[1] == columns && array.is_c_contiguous() {
        return Ok(());
    }
    let order = if array.is_c_contiguous() { "" } else { " whose rows are not one after another" };
    Err(input(format!("{name} is an array {shape:?}{order}: pass a contiguous array [n, {columns}] in C order")))
}

/// Converts a vector to an array `[rows, columns]` without copying.
pub(crate) fn matrix<T: Element>(py: Python<'_>, data: Vec<T>, columns: usize) -> PyResult<Bound<'_, PyArray2<T>>> {
    let rows = data.len().checked_div(columns).unwrap_or(0);
    data.into_pyarray(py).reshape([rows, columns])
}

/// Converts slots to int64; -1 represents a row of zeros.
pub(crate) fn slots_to_python<'py>(py: Python<'py>, slots: &[CacheSlot]) -> Bound<'py, PyArray1<i64>> {
    let slots: Vec<i64> =
        slots.iter().map(|&slot| if slot == embcache::types::NO_SLOT { -1 } else { i64::from(slot) }).collect();
    slots.into_pyarray(py)
}

/// Converts positions to int64, for torch.
pub(crate) fn positions_to_python<'py>(py: Python<'py>, positions: &[u32]) -> Bound<'py, PyArray1<i64>> {
    positions.iter().map(|&position| i64::from(position)).collect::<Vec<i64>>().into_pyarray(py)
}

/// Returns the scalar slots of rows: `[n]`.
pub(crate) fn scalars_to_python<'py>(py: Python<'py>, headers: &[RowHeader]) -> Bound<'py, PyArray1<f32>> {
    headers.iter().map(|header| header.scalar).collect::<Vec<f32>>().into_pyarray(py)
}

/// Builds headers from Python arrays. Parts that are `None` are zeros.
pub(crate) fn headers_from_python(
    ids: &[i64],
    scalars: Option<&[f32]>,
    metadata: Option<&MetadataArrays<'_>>,
) -> PyResult<Vec<RowHeader>> {
    let check = |what: &str, len: usize| {
        if len == ids.len() { Ok(()) } else { Err(input(format!("{what} has {len} entries for {} ids", ids.len()))) }
    };
    let mut headers: Vec<RowHeader> = ids.iter().map(|&id| RowHeader { id, ..RowHeader::default() }).collect();
    if let Some(scalars) = scalars {
        check("scalars", scalars.len())?;
        headers.iter_mut().zip(scalars).for_each(|(header, &scalar)| header.scalar = scalar);
    }
    if let Some(metadata) = metadata {
        let (count, last_step) = (slice("count", &metadata.count)?, slice("last_step", &metadata.last_step)?);
        let (score, epoch) = (slice("score", &metadata.score)?, slice("modified_epoch", &metadata.modified_epoch)?);
        check("count", count.len())?;
        check("last_step", last_step.len())?;
        check("score", score.len())?;
        check("modified_epoch", epoch.len())?;
        for (position, header) in headers.iter_mut().enumerate() {
            header.count = count[position];
            header.last_step = last_step[position];
            header.score = score[position];
            header.modified_epoch = epoch[position];
        }
    }
    Ok(headers)
}

/// Device arrays of one table, borrowed from Python: weights, vector slots, scalar slot.
pub(crate) type DeviceArrayBorrows<'py> =
    (PyReadwriteArray2<'py, f32>, Vec<PyReadwriteArray2<'py, f32>>, Option<PyReadwriteArray1<'py, f32>>);

/// Converts the borrowed arrays of the plan's tables to the slices that the Rust core expects.
pub(crate) fn device_tensors<'a>(
    plan: &Plan,
    arrays: &'a mut [Option<DeviceArrayBorrows<'_>>],
) -> PyResult<Vec<Option<DeviceTensors<'a>>>> {
    arrays
        .iter_mut()
        .enumerate()
        .map(|(table, borrows)| {
            let Some((weights, vector_slots, scalars)) = borrows else { return Ok(None) };
            let dim = plan.dim(table).map_err(to_python)?;
            Ok(Some(DeviceTensors {
                weights: slice2_mut("device weights", weights, dim)?,
                vector_slots: vector_slots
                    .iter_mut()
                    .map(|slot| slice2_mut("device slot", slot, dim))
                    .collect::<PyResult<_>>()?,
                scalars: scalars.as_mut().map(|scalars| slice_mut("device scalars", scalars)).transpose()?,
            }))
        })
        .collect()
}
