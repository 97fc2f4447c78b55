//! The segments of a linked checkpoint, from which a table is opened.

use std::sync::Arc;

use embcache::lifecycle::{BucketCounts, OovRow, StepClock};
use embcache::ssd::{LinkedSegments, StateCounters};
use pyo3::prelude::*;

/// State of a table's SSD tier when a linked checkpoint was saved.
#[pyclass(frozen, name = "LinkedSegments", module = "torchrec_embcache._native")]
pub(crate) struct PyLinkedSegments {
    pub(crate) files: Arc<LinkedSegments>,
    pub(crate) counters: StateCounters,
    pub(crate) counts: Vec<BucketCounts>,
    pub(crate) clock: StepClock,
    pub(crate) oov_row: Option<OovRow>,
}

#[pymethods]
impl PyLinkedSegments {
    #[getter]
    fn rows(&self) -> u64 {
        self.files.rows()
    }
}
