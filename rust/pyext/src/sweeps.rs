//! Sweeps of several tables.

use embcache::cache::Table;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::to_python;
use crate::settings::PyEvictionRule;
use crate::table::PyTable;

/// Sweep tables by the rules beside them, or by their own where that is `None`. No signal of Python's comes between two of them.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned lists")]
pub(crate) fn sweep_tables(
    py: Python<'_>,
    tables: Vec<Py<PyTable>>,
    rules: Vec<Option<Py<PyEvictionRule>>>,
) -> PyResult<()> {
    if tables.len() != rules.len() {
        return Err(PyValueError::new_err(format!("{} tables and {} rules", tables.len(), rules.len())));
    }
    let rules = rules.iter().map(|rule| rule.as_ref().map(|rule| &rule.get().core));
    let all: Vec<_> = tables.iter().map(|table| table.get().inner.clone()).zip(rules).collect();
    py.detach(|| Table::sweep_all(&all)).map_err(to_python)
}
