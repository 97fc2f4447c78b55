//! Eviction: histograms of rows by rank key, in eviction order, and the rows that were evicted.
//!
//! A rank key is (score, last step, id), with the score as mapped by the Rust core. Shapes: P parts of a range that
//! have rows, n rank keys that are listed.

use std::sync::Arc;

use embcache::cache::{EvictedQueue, EvictedRows};
use embcache::lifecycle::{RankKey, RankKeyRange, RankRangeContents, ScoreHistogram};
use numpy::{IntoPyArray as _, PyArray1, PyArray2};
use pyo3::prelude::*;

use crate::buffers::matrix;
use crate::rows::PyRowBlock;

/// Rank key of a row in eviction order.
#[pyclass(frozen, name = "RankKey", module = "torchrec_embcache._native")]
pub(crate) struct PyRankKey {
    core: RankKey,
}

#[pymethods]
impl PyRankKey {
    #[new]
    fn new(score: u32, last_step: u64, row_id: u64) -> Self {
        Self { core: RankKey { score, last_step, id: row_id } }
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.core)
    }
}

/// The rank keys from `low` to `high`, both included.
#[pyclass(frozen, name = "RankKeyRange", module = "torchrec_embcache._native")]
pub(crate) struct PyRankKeyRange {
    pub(crate) core: RankKeyRange,
}

#[pymethods]
impl PyRankKeyRange {
    #[new]
    #[pyo3(signature = (low, high, *, is_listed))]
    fn new(low: &PyRankKey, high: &PyRankKey, is_listed: bool) -> Self {
        Self { core: RankKeyRange { low: low.core, high: high.core, is_listed } }
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.core)
    }
}

/// Counts of the rows in a range.
#[pyclass(frozen, get_all, name = "RankRangeCounts", module = "torchrec_embcache._native")]
pub(crate) struct PyRankRangeCounts {
    digits: Py<PyArray1<u32>>,
    rows: Py<PyArray1<u64>>,
    lows: Py<PyArray2<u64>>,
    highs: Py<PyArray2<u64>>,
    listed: Py<PyArray2<u64>>,
}

#[pymethods]
impl PyRankRangeCounts {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("RankRangeCounts of {} parts, {} listed", self.rows.bind(py).len()?, self.listed.bind(py).len()?))
    }
}

fn columns<'a>(keys: impl Iterator<Item = &'a RankKey>) -> Vec<u64> {
    keys.flat_map(|key| [u64::from(key.score), key.last_step, key.id]).collect()
}

impl PyRankRangeCounts {
    fn of(py: Python<'_>, found: &RankRangeContents) -> PyResult<Self> {
        let (parts, listed): (&[_], &[_]) = match found {
            RankRangeContents::Counted(parts) => (parts, &[]),
            RankRangeContents::Listed(listed) => (&[], listed),
        };
        let digits: Vec<u32> = parts.iter().map(|(digit, _)| *digit).collect();
        let rows: Vec<u64> = parts.iter().map(|(_, part)| part.rows).collect();
        Ok(Self {
            digits: digits.into_pyarray(py).unbind(),
            rows: rows.into_pyarray(py).unbind(),
            lows: matrix(py, columns(parts.iter().map(|(_, part)| &part.low)), 3)?.unbind(),
            highs: matrix(py, columns(parts.iter().map(|(_, part)| &part.high)), 3)?.unbind(),
            listed: matrix(py, columns(listed.iter()), 3)?.unbind(),
        })
    }
}

/// Counts of a shard's rows in ranges of rank keys.
#[pyclass(frozen, get_all, name = "ScoreHistogram", module = "torchrec_embcache._native")]
pub(crate) struct PyScoreHistogram {
    version: u64,
    rows: u64,
    newest: u64,
    ranges: Vec<Py<PyRankRangeCounts>>,
}

#[pymethods]
impl PyScoreHistogram {
    fn __repr__(&self) -> String {
        format!("ScoreHistogram of {} rows, in {} ranges", self.rows, self.ranges.len())
    }
}

impl PyScoreHistogram {
    pub(crate) fn of(py: Python<'_>, (version, counted): (u64, ScoreHistogram)) -> PyResult<Self> {
        let ranges = counted.ranges.iter().map(|found| Py::new(py, PyRankRangeCounts::of(py, found)?));
        let ranges = ranges.collect::<PyResult<_>>()?;
        Ok(Self { version, rows: counted.rows, newest: counted.newest, ranges })
    }
}

/// Rows that were evicted after one step for one reason.
#[pyclass(frozen, get_all, name = "EvictedBlock", module = "torchrec_embcache._native")]
pub(crate) struct PyEvictedBlock {
    step: u64,
    reason: &'static str,
    rows: Py<PyRowBlock>,
}

#[pymethods]
impl PyEvictedBlock {
    fn __repr__(&self) -> String {
        format!("EvictedBlock(step={}, reason={:?})", self.step, self.reason)
    }
}

impl PyEvictedBlock {
    pub(crate) fn of(py: Python<'_>, evicted: EvictedRows, vector_floats: usize) -> PyResult<Self> {
        let EvictedRows { step, reason, rows } = evicted;
        Ok(Self { step, reason, rows: Py::new(py, PyRowBlock::of(py, &rows.headers, rows.vectors, vector_floats)?)? })
    }
}

/// The undelivered evicted rows of one table. Outlives the table.
#[pyclass(frozen, name = "EvictedQueue", module = "torchrec_embcache._native")]
pub(crate) struct PyEvictedQueue {
    pub(crate) inner: Arc<EvictedQueue>,
}

#[pymethods]
impl PyEvictedQueue {
    fn __len__(&self) -> usize {
        self.inner.rows()
    }

    fn __repr__(&self) -> String {
        format!("EvictedQueue of {} rows", self.inner.rows())
    }

    fn take(&self, py: Python<'_>) -> PyResult<Option<PyEvictedBlock>> {
        let taken = py.detach(|| self.inner.take());
        taken.map(|rows| PyEvictedBlock::of(py, rows, self.inner.floats())).transpose()
    }

    fn wait(&self, py: Python<'_>) -> PyResult<Option<PyEvictedBlock>> {
        let taken = py.detach(|| self.inner.wait());
        taken.map(|rows| PyEvictedBlock::of(py, rows, self.inner.floats())).transpose()
    }

    fn pause(&self) {
        self.inner.pause();
    }

    fn resume(&self) {
        self.inner.resume();
    }

    fn reopen(&self) -> bool {
        self.inner.reopen()
    }

    fn is_ended(&self) -> bool {
        self.inner.is_ended()
    }
}
