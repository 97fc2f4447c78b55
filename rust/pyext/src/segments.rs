//! The segments of a linked checkpoint on their way into a table.

use std::sync::Arc;

use embcache::lifecycle::{BucketCounts, SharedRow, StepClock};
use embcache::ssd::{SegmentFiles, StateCounters};
use pyo3::prelude::*;

/// What a table's SSD tier consisted of when a linked checkpoint was saved.
#[pyclass(frozen, name = "LinkedSegments", module = "torchrec_embcache._native")]
pub(crate) struct PySegments {
    pub(crate) files: Arc<SegmentFiles>,
    pub(crate) counters: StateCounters,
    pub(crate) counts: Vec<BucketCounts>,
    pub(crate) clock: StepClock,
    pub(crate) shared_row: Option<SharedRow>,
}

#[pymethods]
impl PySegments {
    #[getter]
    fn rows(&self) -> u64 {
        self.files.rows()
    }
}
