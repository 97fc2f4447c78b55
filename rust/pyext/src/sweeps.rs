//! Sweeps of several tables.

use embcache::cache::Table;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::to_python;
use crate::settings::PyEvictionRule;
use crate::table::PyTable;

/// Sweeps tables by the rules in `rules`, or by a table's own rule for `None`. No Python signal handler runs between
/// two of them.
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
