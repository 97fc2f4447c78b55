//! Work on the tables of a plan, side by side. Each table has locks of its own, so that a plan of many tables takes little longer than
//! that of one where there are threads.

use crate::cache::residency::PlanMode;
use crate::error::{Error, Result};
use crate::kernels::threads::for_each_that_waits;
use crate::logical_thread::CallContext;
use crate::sync::{Mutex, lock};

/// With fewer ids than this for each thread, a further thread costs more time than it saves.
const IDS_PER_THREAD: usize = 4096;

/// The threads of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanThreads {
    /// So many tables are worked on at once.
    pub(super) tables: usize,
    /// So many threads work on one table.
    pub(super) per_table: usize,
}

impl PlanThreads {
    /// For a plan of tables with so many ids each. `all_on_device` says that the kernels of all tables run on device tiers.
    pub(super) fn of(mode: PlanMode, ids: impl Iterator<Item = usize> + Clone, all_on_device: bool) -> Self {
        // A plan that is made ahead would take threads from kernels that work on the batch before.
        let threads = if mode.is_prefetch && !all_on_device { 1 } else { mode.threads };
        let (all, most) = (ids.clone().sum::<usize>(), ids.max().unwrap_or(0));
        // Beside one table with most of the ids, which wants all threads for itself, few others are worth a thread.
        let at_once = threads.min(all / most.max(IDS_PER_THREAD)).max(1);
        Self { tables: at_once, per_table: (mode.threads / at_once).max(1) }
    }
}

/// Do `work` for each table of a plan, `at_once` of them at a time, on behalf of the calling thread. All are done when this returns, also those
/// after a table whose work has failed, so that what happens to a table does not depend on the number of threads.
///
/// Errors: that of the first table, in their order, whose work has one.
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
