//! Buckets of ids, which Python uses to send ids to ranks and to sort rows.

use embcache::types::{BucketMapper, Id, hash_id, id_of_hash};
use numpy::{IntoPyArray as _, PyArray1, PyReadonlyArray1, PyReadwriteArray1};
use pyo3::prelude::*;

use crate::buffers::{slice, slice_mut};
use crate::error::input;

/// Returns the order of rows by (bucket, `uint64(id)`).
#[pyfunction]
pub(crate) fn bucket_order<'py>(
    py: Python<'py>,
    ids: PyReadonlyArray1<'py, Id>,
    total_num_buckets: u32,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let ids = slice("ids", &ids)?;
    if total_num_buckets == 0 {
        return Err(input("total_num_buckets is 0: give 1 at least"));
    }
    let bucketing = BucketMapper::new(total_num_buckets);
    let order: Vec<i64> = py.detach(|| {
        let keyed = ids.iter().enumerate().map(|(row, &id)| (bucketing.of(id), id.cast_unsigned(), row));
        let mut keyed: Vec<(u32, u64, usize)> = keyed.collect();
        keyed.sort_unstable();
        keyed.iter().map(|&(.., row)| row as i64).collect()
    });
    Ok(order.into_pyarray(py))
}

/// Returns the bucket of each id.
#[pyfunction]
pub(crate) fn buckets_of<'py>(
    py: Python<'py>,
    ids: PyReadonlyArray1<'py, Id>,
    total_num_buckets: u32,
) -> PyResult<Bound<'py, PyArray1<u32>>> {
    let ids = slice("ids", &ids)?;
    if total_num_buckets == 0 {
        return Err(input("total_num_buckets is 0: give 1 at least"));
    }
    let bucketing = BucketMapper::new(total_num_buckets);
    let found: Vec<u32> = py.detach(|| ids.iter().map(|&id| bucketing.of(id)).collect());
    Ok(found.into_pyarray(py))
}

/// Replaces each id by the hash that determines its bucket.
#[pyfunction]
pub(crate) fn hash_ids(py: Python<'_>, mut ids: PyReadwriteArray1<'_, Id>) -> PyResult<()> {
    let ids = slice_mut("ids", &mut ids)?;
    py.detach(|| ids.iter_mut().for_each(|id| *id = hash_id(*id).cast_signed()));
    Ok(())
}

/// Replaces each hash by its id.
#[pyfunction]
pub(crate) fn unhash_ids(py: Python<'_>, mut hashes: PyReadwriteArray1<'_, Id>) -> PyResult<()> {
    let hashes = slice_mut("hashes", &mut hashes)?;
    py.detach(|| hashes.iter_mut().for_each(|hash| *hash = id_of_hash(hash.cast_unsigned())));
    Ok(())
}
