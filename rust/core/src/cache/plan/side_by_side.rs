//! Parallel work on the tables of a plan. Each table has its own locks, so with enough threads a plan of many tables
//! takes little longer than a plan of one.

use crate::cache::residency::PlanMode;
use crate::error::{Error, Result};
use crate::kernels::threads::for_each_that_waits;
use crate::logical_thread::CallContext;
use crate::sync::{Mutex, lock};

/// With fewer ids than this per thread, a further thread costs more time than it saves.
const IDS_PER_THREAD: usize = 4096;

/// Thread counts of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanThreads {
    /// Number of tables processed at the same time.
    pub(super) tables: usize,
    /// Number of threads per table.
    pub(super) per_table: usize,
}

impl PlanThreads {
    /// Thread counts for a plan of tables with `ids` ids each. `all_on_device` is true if the kernels of all tables run
    /// on device tiers.
    pub(super) fn of(mode: PlanMode, ids: impl Iterator<Item = usize> + Clone, all_on_device: bool) -> Self {
        // A prefetch plan would take threads from kernels that work on the previous batch.
        let threads = if mode.is_prefetch && !all_on_device { 1 } else { mode.threads };
        let (all, most) = (ids.clone().sum::<usize>(), ids.max().unwrap_or(0));
        // If one table has most of the ids and uses all threads, few other tables are worth a thread.
        let at_once = threads.min(all / most.max(IDS_PER_THREAD)).max(1);
        Self { tables: at_once, per_table: (mode.threads / at_once).max(1) }
    }
}

/// Does `work` for each table of a plan, `at_once` of them at a time, on behalf of the calling thread. All tables are
/// processed, including those after a failed one, so that the effect on a table does not depend on the number of
/// threads.
///
/// Errors: that of the first failed table, in table order.
pub(super) fn for_each_table<T: Send>(
    tables: impl Iterator<Item = T>,
    at_once: usize,
    work: impl Fn(T) -> Result<()> + Sync,
) -> Result<()> {
    if at_once == 1 {
        let mut done = Ok(());
        for table in tables {
            let this = work(table);
            done = done.and(this);
        }
        return done;
    }
    let me = CallContext::current();
    let first: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    for_each_that_waits(at_once, tables.enumerate(), |(number, table)| {
        if let Err(error) = me.run(|| work(table)) {
            let mut first = lock(&first);
            if first.as_ref().is_none_or(|(other, _)| number < *other) {
                *first = Some((number, error));
            }
        }
    });
    let first = lock(&first).take();
    first.map_or(Ok(()), |(_, error)| Err(error))
}
