//! Planning of a batch over several tables.

use std::sync::Arc;

use super::handle::{Plan, check_len};
use super::table_plan::{LookupShape, PlanThreads, TablePlan};
use crate::cache::placement::PlanMode;
use crate::cache::table::Table;
use crate::error::{Kind, Result};
use crate::index::{DedupedIds, IdDeduper};
use crate::kernels::thread_pool::for_each_that_waits;
use crate::runtime::memory;
use crate::runtime::sync::{Mutex, lock};
use crate::types::Id;

/// Maximum number of bytes that planning uses per id: distinct ids, positions, slots, the transposed index, the
/// deduper's table.
const PLAN_BYTES_AN_ID: usize = 112;
/// Exclusive upper bound of the number of ids of a plan.
const MAX_IDS: usize = 1 << 30;

/// A fixed list of features over tables. Feature `f` reads table `feature_tables[f]`. Features of one table are
/// adjacent.
#[derive(Debug)]
pub struct Lookup {
    shape: Arc<LookupShape>,
    /// As many as have been in use at the same time. Each keeps its memory for the next batch.
    dedupers: Mutex<Vec<IdDeduper>>,
}

impl Lookup {
    /// Errors: `Input` unless every table is passed once and has features, which are adjacent and in the order of the
    /// tables.
    pub fn new(tables: &[Table], feature_tables: &[usize]) -> Result<Self> {
        let tables = tables.iter().map(|table| Arc::clone(&table.inner)).collect();
        Ok(Self { shape: Arc::new(LookupShape::new(tables, feature_tables)?), dedupers: Mutex::default() })
    }

    /// Plans a batch. `ids` is `[N]`, feature after feature; `feature_splits` is `[F + 1]` and contains the start of
    /// each feature's ids. `clicks` are those of the occurrences: `[N]`, or empty for none. Only
    /// [`AdmissionRule::ShowClick`](crate::config::AdmissionRule::ShowClick) uses them.
    pub fn plan(&self, ids: &[Id], feature_splits: &[i64], mode: PlanMode, clicks: &[u32]) -> Result<Plan> {
        let shape = &self.shape;
        if !clicks.is_empty() {
            check_len("clicks", clicks.len(), ids.len())?;
        }
        let splits = check_splits(ids.len(), feature_splits, shape.features())?;
        shape.tables.iter().try_for_each(|table| table.check_process())?;
        if mode.train {
            shape.tables.iter().try_for_each(|table| table.check_writable())?;
        }
        memory::check_available("plan a batch", ids.len() * PLAN_BYTES_AN_ID)?;
        let all_on_device = shape.tables.iter().all(|table| table.has_device());
        let of_tables = shape.table_features.iter().map(|features| splits[features.end] - splits[features.start]);
        let threads = PlanThreads::of(mode, of_tables, all_on_device);
        let mode = PlanMode { threads: threads.per_table, ..mode };
        let mut tables: Vec<Option<TablePlan>> = shape.tables.iter().map(|_| None).collect();
        let parts = tables.iter_mut().zip(shape.tables.iter().zip(&shape.table_features));
        for_each_that_waits(threads.tables, parts, |(planned, (table, features))| {
            let range = splits[features.start]..splits[features.end];
            let deduped = self.dedupe(&ids[range.clone()]);
            let clicks = clicks.get(range).unwrap_or_default();
            *planned = Some(TablePlan::new(Arc::clone(table), deduped, mode, clicks));
        });
        let tables = tables.into_iter().flatten().collect();
        // Dropping the plan unpins its rows, on errors too.
        let plan = Plan::new(Arc::clone(shape), splits, mode, threads, tables);
        plan.start()?;
        Ok(plan)
    }

    fn dedupe(&self, ids: &[Id]) -> DedupedIds {
        let mut deduper = lock(&self.dedupers).pop().unwrap_or_default();
        let mut deduped = DedupedIds::default();
        deduper.dedupe(ids, &mut deduped);
        lock(&self.dedupers).push(deduper);
        deduped
    }
}

fn check_splits(ids: usize, splits: &[i64], features: usize) -> Result<Vec<usize>> {
    let refuse = |message: String| Err(Kind::Input.error(message));
    if splits.len() != features + 1 {
        return refuse(format!(
            "feature_splits has {} entries; {} features need {}",
            splits.len(),
            features,
            features + 1
        ));
    }
    // Another thread may modify the caller's buffer, so a copy is checked and used.
    let splits = splits.to_vec();
    if splits[0] != 0 || splits[features] != ids as i64 || splits.windows(2).any(|pair| pair[0] > pair[1]) {
        return refuse(format!("feature_splits={splits:?} must rise from 0 to the {ids} ids"));
    }
    if ids >= MAX_IDS {
        return refuse(format!("a batch of {ids} ids is too large: use fewer than 2^30"));
    }
    Ok(splits.iter().map(|&split| split as usize).collect())
}
