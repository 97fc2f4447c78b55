//! Planning a batch over several tables at once.

use std::ops::Range;
use std::sync::Arc;

use super::place::{PlanMode, TablePlan};
use super::plan::Plan;
use super::table::{Shared, Table};
use crate::error::{Error, Kind, Result};
use crate::index::{Deduped, Deduper};
use crate::memory;
use crate::sync::{Mutex, lock};
use crate::types::Id;

/// A fixed list of features over tables. Feature `f` reads table `feature_tables[f]`; features of one table are neighbours.
#[derive(Debug)]
pub struct Lookup {
    shape: Arc<Shape>,
    deduper: Mutex<Deduper>,
}

/// What a lookup's plans share.
pub(crate) struct Shape {
    pub(crate) tables: Vec<Arc<Shared>>,
    pub(crate) feature_tables: Vec<usize>,
    /// For each table its features.
    pub(crate) table_features: Vec<Range<usize>>,
    /// For each feature where its columns start in the pooled output.
    pub(crate) columns: Vec<usize>,
    /// Columns of the pooled output: `C`.
    pub(crate) total_columns: usize,
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shape").field("feature_tables", &self.feature_tables).finish_non_exhaustive()
    }
}

impl Lookup {
    /// `Input` unless every table is given once and has features, as neighbours, in the tables' order.
    pub fn new(tables: &[Table], feature_tables: &[usize]) -> Result<Self> {
        let mut table_features: Vec<Range<usize>> = Vec::with_capacity(tables.len());
        for (feature, &table) in feature_tables.iter().enumerate() {
            if table + 1 == table_features.len() {
                table_features[table].end = feature + 1;
            } else if table == table_features.len() && table < tables.len() {
                table_features.push(feature..feature + 1);
            } else {
                return Err(Error::new(
                    Kind::Input,
                    format!(
                        "feature_tables={feature_tables:?}: features must come in the order of their {} tables",
                        tables.len()
                    ),
                ));
            }
        }
        if table_features.len() != tables.len() {
            return Err(Error::new(
                Kind::Input,
                format!(
                    "feature_tables={feature_tables:?} leaves some of the {} tables without a feature",
                    tables.len()
                ),
            ));
        }
        for (second, table) in tables.iter().enumerate() {
            // Its locks would be taken twice by one thread, which would wait for itself for ever.
            if let Some(first) = tables[..second].iter().position(|other| Arc::ptr_eq(&other.shared, &table.shared)) {
                return Err(Error::new(
                    Kind::Input,
                    format!(
                        "tables[{first}] and tables[{second}] are both table {:?}: give a table once, with all its features \
                         side by side in feature_tables={feature_tables:?}",
                        table.config().name
                    ),
                ));
            }
        }
        let mut columns = Vec::with_capacity(feature_tables.len());
        let mut total_columns = 0;
        for &table in feature_tables {
            columns.push(total_columns);
            total_columns += tables[table].shared.layout.dim;
        }
        let shape = Shape {
            tables: tables.iter().map(|table| Arc::clone(&table.shared)).collect(),
            feature_tables: feature_tables.to_vec(),
            table_features,
            columns,
            total_columns,
        };
        Ok(Self { shape: Arc::new(shape), deduper: Mutex::default() })
    }

    /// Plan a batch. `ids` is `[N]`, feature after feature; `feature_splits` is `[F + 1]`.
    ///
    /// - `train`: a backward will follow. Otherwise unseen ids read their initial value (zeros with `unseen_zeros`) and are forgotten.
    /// - `ahead`: fetch as far as the budget goes; the rest is done by [`Plan::wait`].
    pub fn plan(
        &self,
        ids: &[Id],
        feature_splits: &[i64],
        train: bool,
        ahead: bool,
        unseen_zeros: bool,
    ) -> Result<Plan> {
        self.plan_on(1, ids, feature_splits, train, ahead, unseen_zeros)
    }

    /// [`Lookup::plan`], with up to `threads` threads for it and for [`Plan::wait`]. The result is the same for any number.
    pub fn plan_on(
        &self,
        threads: usize,
        ids: &[Id],
        feature_splits: &[i64],
        train: bool,
        ahead: bool,
        unseen_zeros: bool,
    ) -> Result<Plan> {
        let shape = &self.shape;
        let splits = check_splits(ids.len(), feature_splits, shape.feature_tables.len())?;
        shape.tables.iter().try_for_each(|table| table.check_process())?;
        if train {
            shape.tables.iter().try_for_each(|table| table.check_writable())?;
        }
        memory::check_room("plan a batch", ids.len() * PLAN_BYTES_AN_ID)?;
        let mode = PlanMode { train, ahead, unseen_zeros, threads };
        let mut tables = Vec::with_capacity(shape.tables.len());
        for (shared, features) in shape.tables.iter().zip(&shape.table_features) {
            let mut deduped = Deduped::default();
            lock(&self.deduper).dedupe(&ids[splits[features.start]..splits[features.end]], &mut deduped);
            let Deduped { unique, inverse } = deduped;
            tables.push(TablePlan::new(Arc::clone(shared), unique, inverse, train));
        }
        // From here on the plan's drop takes back what was pinned, on errors too.
        let plan = Plan::new(Arc::clone(shape), splits, mode, tables);
        plan.start()?;
        Ok(plan)
    }
}

/// Bytes that planning takes for each id, at the most: distinct ids, positions, slots, the transposed index, the deduper's table.
const PLAN_BYTES_AN_ID: usize = 96;
/// Ids of one plan stay below this.
const MAX_IDS: usize = 1 << 30;

fn check_splits(ids: usize, splits: &[i64], features: usize) -> Result<Vec<usize>> {
    let refuse = |message: String| Err(Error::new(Kind::Input, message));
    if splits.len() != features + 1 {
        return refuse(format!(
            "feature_splits has {} entries; {} features need {}",
            splits.len(),
            features,
            features + 1
        ));
    }
    // Another thread of the caller's may change what it lent: what is checked is a copy.
    let splits = splits.to_vec();
    if splits[0] != 0 || splits[features] != ids as i64 || splits.windows(2).any(|pair| pair[0] > pair[1]) {
        return refuse(format!("feature_splits={splits:?} must rise from 0 to the {ids} ids"));
    }
    if ids >= MAX_IDS {
        return refuse(format!("a batch of {ids} ids is too large: use fewer than 2^30"));
    }
    Ok(splits.iter().map(|&split| split as usize).collect())
}
