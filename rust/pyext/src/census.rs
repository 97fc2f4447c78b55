//! Counts of rows by their standings in the order in which sweeps take them.
//!
//! A standing is (score, last step, id), the score as the core maps it. Shapes: P parts of a span that have rows, n standings that are listed.

use embcache::lifecycle::{Counted, Span, SpanContents, Standing};
use numpy::{IntoPyArray as _, PyArray1, PyArray2};
use pyo3::prelude::*;

use crate::buffers::matrix;

/// A standing in the order of rows.
#[pyclass(frozen, name = "Standing", module = "torchrec_embcache._native")]
pub(crate) struct PyStanding {
    core: Standing,
}

#[pymethods]
impl PyStanding {
    #[new]
    fn new(score: u32, last_step: u64, row_id: u64) -> Self {
        Self { core: Standing { score, last_step, id: row_id } }
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.core)
    }
}

/// The standings from one to another, both included.
#[pyclass(frozen, name = "Span", module = "torchrec_embcache._native")]
pub(crate) struct PySpan {
    pub(crate) core: Span,
}

#[pymethods]
impl PySpan {
    #[new]
    #[pyo3(signature = (low, high, *, is_listed))]
    fn new(low: &PyStanding, high: &PyStanding, is_listed: bool) -> Self {
        Self { core: Span { low: low.core, high: high.core, is_listed } }
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.core)
    }
}

/// What was found in a span.
#[pyclass(frozen, get_all, name = "SpanCounted", module = "torchrec_embcache._native")]
pub(crate) struct PySpanCounted {
    digits: Py<PyArray1<u32>>,
    rows: Py<PyArray1<u64>>,
    lows: Py<PyArray2<u64>>,
    highs: Py<PyArray2<u64>>,
    listed: Py<PyArray2<u64>>,
}

#[pymethods]
impl PySpanCounted {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("SpanCounted of {} parts, {} listed", self.rows.bind(py).len()?, self.listed.bind(py).len()?))
    }
}

fn columns<'a>(standings: impl Iterator<Item = &'a Standing>) -> Vec<u64> {
    standings.flat_map(|standing| [u64::from(standing.score), standing.last_step, standing.id]).collect()
}

impl PySpanCounted {
    fn of(py: Python<'_>, found: &SpanContents) -> PyResult<Self> {
        let (parts, listed): (&[_], &[_]) = match found {
            SpanContents::Counted(parts) => (parts, &[]),
            SpanContents::Listed(listed) => (&[], listed),
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

/// A count of the rows of a shard.
#[pyclass(frozen, get_all, name = "Census", module = "torchrec_embcache._native")]
pub(crate) struct PyCensus {
    version: u64,
    rows: u64,
    newest: u64,
    spans: Vec<Py<PySpanCounted>>,
}

#[pymethods]
impl PyCensus {
    fn __repr__(&self) -> String {
        format!("Census of {} rows, in {} spans", self.rows, self.spans.len())
    }
}

impl PyCensus {
    pub(crate) fn of(py: Python<'_>, (version, counted): (u64, Counted)) -> PyResult<Self> {
        let spans = counted.spans.iter().map(|found| Py::new(py, PySpanCounted::of(py, found)?));
        let spans = spans.collect::<PyResult<_>>()?;
        Ok(Self { version, rows: counted.rows, newest: counted.newest, spans })
    }
}
