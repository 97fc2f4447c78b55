//! Counters of a table and of its tiers, exported to Python.
//!
//! Each class lists its counters once. The names are those of the core's fields, of the attributes in `_native.pyi`,
//! and of the fields in `stats.py`; a test compares the last two with the classes here.

use std::collections::BTreeMap;

use embcache::cache::TableStats;
use embcache::stats::{AdmissionStats, EvictionStats, HistogramSnapshot, SsdStats, TierStats};
use pyo3::prelude::*;

/// Defines a frozen class with an attribute per counter, converted from a structure of the Rust core that has fields of
/// the same names.
macro_rules! counters {
    ($(#[$about:meta])* $class:ident, $name:tt, $core:ty { $($counter:ident: $kind:ty),+ $(,)? } $(, $inner:ident: $of:ty)* $(,)?) => {
        $(#[$about])*
        #[pyclass(frozen, get_all, name = $name, module = "torchrec_embcache._native")]
        pub(crate) struct $class {
            $($inner: Py<$of>,)*
            $($counter: $kind,)+
        }

        #[pymethods]
        impl $class {
            fn __repr__(&self) -> String {
                let counters = [$(format!(concat!(stringify!($counter), "={:?}"), self.$counter)),+];
                format!(concat!($name, "({})"), counters.join(", "))
            }
        }

        impl $class {
            fn new(py: Python<'_>, core: $core) -> PyResult<Py<Self>> {
                Py::new(py, Self { $($inner: <$of>::new(py, core.$inner)?,)* $($counter: core.$counter,)+ })
            }
        }
    };
}

counters! {
    /// Counters that every tier has.
    PyTierStats, "TierStats", TierStats {
        rows: u64,
        bytes: u64,
        capacity_bytes: u64,
        hits: u64,
        misses: u64,
        evictions: u64,
        read_bytes: u64,
        written_bytes: u64,
        time_ns: u64,
    }
}

counters! {
    /// A histogram of durations.
    PyHistogram, "Histogram", HistogramSnapshot {
        count: u64,
        sum_ns: u64,
        bounds: Vec<u64>,
        counts: Vec<u64>,
    }
}

counters! {
    /// Further counters of the SSD tier; `tier` has those that every tier has.
    PySsdStats, "SsdStats", SsdStats {
        io_engine: String,
        reads: u64,
        logical_written_bytes: u64,
        compaction_bytes: u64,
        live_share: f64,
        segments: u64,
        index_bytes: u64,
        dropped_rows: u64,
        has_lost_flush: bool,
        space_waits: u64,
        read_only: bool,
    }, tier: PyTierStats, read_latency: PyHistogram
}

counters! {
    /// Counters of admission.
    PyAdmissionStats, "AdmissionStats", AdmissionStats {
        admitted: u64,
        not_admitted: u64,
        pending: u64,
        pending_bytes: u64,
        forgotten: u64,
    }
}

counters! {
    /// Counters of eviction by rule.
    PyEvictionStats, "EvictionStats", EvictionStats {
        evicted: u64,
        evicted_by_rule: BTreeMap<&'static str, u64>,
        is_sweeping: bool,
        undelivered: u64,
    }
}

/// Counters of a table that belong to no tier.
#[pyclass(frozen, get_all, name = "TableStats", module = "torchrec_embcache._native")]
pub(crate) struct PyTableStats {
    rows: u64,
    step: u64,
    pinned_rows: u64,
    overflow_plans: u64,
    dropped_rows: u64,
    row_wait: Py<PyHistogram>,
    lock_held: Py<PyHistogram>,
    admission: Option<Py<PyAdmissionStats>>,
    eviction: Option<Py<PyEvictionStats>>,
    device: Option<Py<PyTierStats>>,
    host: Py<PyTierStats>,
    ssd: Option<Py<PySsdStats>>,
}

#[pymethods]
impl PyTableStats {
    fn __repr__(&self) -> String {
        format!(
            "TableStats(rows={}, step={}, pinned_rows={}, overflow_plans={}, dropped_rows={}, host={})",
            self.rows,
            self.step,
            self.pinned_rows,
            self.overflow_plans,
            self.dropped_rows,
            self.host.get().__repr__()
        )
    }
}

impl PyTableStats {
    pub(crate) fn new(py: Python<'_>, core: TableStats) -> PyResult<Self> {
        Ok(Self {
            rows: core.rows,
            step: core.step,
            pinned_rows: core.pinned_rows,
            overflow_plans: core.overflow_plans,
            dropped_rows: core.dropped_rows,
            row_wait: PyHistogram::new(py, core.row_wait)?,
            lock_held: PyHistogram::new(py, core.lock_held)?,
            admission: core.admission.map(|stats| PyAdmissionStats::new(py, stats)).transpose()?,
            eviction: core.eviction.map(|stats| PyEvictionStats::new(py, stats)).transpose()?,
            device: core.device.map(|tier| PyTierStats::new(py, tier)).transpose()?,
            host: PyTierStats::new(py, core.host)?,
            ssd: core.ssd.map(|tier| PySsdStats::new(py, tier)).transpose()?,
        })
    }
}
