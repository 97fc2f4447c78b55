//! Rows of the device tier, read by Python.

use std::sync::Arc;

use embcache::cache::DeviceRowReader;
use embcache::config::TableConfig;
use embcache::types::CacheSlot;
use numpy::PyArrayMethods;
use pyo3::prelude::*;

use crate::buffers::{slice, slice2, slots_to_python};
use crate::error::from_python;
use crate::foreign::with_rows_locked_off_main;
use crate::rows::PyGatheredRows;

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
