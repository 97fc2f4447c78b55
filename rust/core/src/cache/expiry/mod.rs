//! The rows of a table, and their life: admission, sweeps by the table's eviction rule, and the clock of rules in seconds.

mod clock;
mod deferred;
mod expire;
mod histogram;
mod progress;
mod sweep;

use std::collections::BTreeMap;

pub(super) use clock::TableClock;

use self::deferred::DeferredRows;
use self::progress::SweepProgress;
use super::placement::{Placement, TableAdmission};
use crate::lifecycle::ExpirySweep;

/// The rows of one table: where they are, and which of them the table keeps.
pub(crate) struct Residency {
    pub(super) placement: Placement,
    pub(super) lifecycle: Lifecycle,
}

/// Decides which rows a table has: the admission of new ones, and the sweeps that remove rows.
pub(crate) struct Lifecycle {
    pub(super) admission: TableAdmission,
    pub(super) clock: TableClock,
    /// The sweep that has not removed all of its expired rows yet.
    sweep: Option<SweepProgress>,
    /// Rows deferred by earlier sweeps because active plans use them.
    deferred: DeferredRows,
    /// The last finished sweep, if no rows were added to the table since it started.
    pub(super) last_sweep: Option<ExpirySweep>,
    /// Number of rows expired by sweeps, by rule name.
    evicted_by_rule: BTreeMap<&'static str, u64>,
    /// The table's version, if nothing has changed since the last sweep except by that sweep.
    pub(super) version_after_sweep: Option<u64>,
}

impl Lifecycle {
    /// The lifecycle of a table that was just opened.
    pub(crate) fn new(admission: TableAdmission) -> Self {
        Self {
            admission,
            clock: TableClock::default(),
            sweep: None,
            deferred: DeferredRows::default(),
            last_sweep: None,
            evicted_by_rule: BTreeMap::new(),
            version_after_sweep: None,
        }
    }
}
