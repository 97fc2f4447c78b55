//! The budget that the tables of a module share.

use std::sync::Arc;

use embcache::budget::SharedBudget;
use pyo3::prelude::*;

use crate::settings::config_error;

/// The bytes of a module's `host_bytes` that its tables share.
#[pyclass(frozen, name = "SharedBudget", module = "torchrec_embcache._native")]
pub(crate) struct PySharedBudget {
    pub(crate) core: Arc<SharedBudget>,
}

#[pymethods]
impl PySharedBudget {
    #[new]
    #[pyo3(signature = (size, *, host_bytes, tables, gain))]
    fn new(size: u64, host_bytes: u64, tables: u32, gain: f64) -> PyResult<Self> {
        if !(gain > 0.0 && gain <= 1.0) {
            return Err(config_error(format!("gain={gain} of a shared budget: give a number above 0, at most 1")));
        }
        Ok(Self { core: Arc::new(SharedBudget::new(size, host_bytes, tables, gain)) })
    }

    /// Bytes not allocated to a table.
    #[getter]
    fn free(&self) -> u64 {
        self.core.free()
    }

    #[getter]
    fn host_bytes(&self) -> u64 {
        self.core.host_bytes()
    }

    #[getter]
    fn tables(&self) -> u32 {
        self.core.tables()
    }

    /// Returns a budget for copies of the tables, with no bytes allocated.
    fn __deepcopy__(&self, _memo: &Bound<'_, PyAny>) -> Self {
        Self { core: Arc::new(self.core.untaken()) }
    }
}
