//! State shared by all plans of a lookup.

use std::ops::Range;
use std::sync::Arc;

use crate::cache::locks::TableInner;
use crate::error::{Error, Kind, Result};

/// The features of a lookup, over its tables.
pub(super) struct LookupShape {
    pub(super) tables: Vec<Arc<TableInner>>,
    /// The table of each feature.
    pub(super) feature_tables: Vec<usize>,
    /// The features of each table.
    pub(super) table_features: Vec<Range<usize>>,
    /// The first column of each feature in the pooled output.
    pub(super) columns: Vec<usize>,
    /// Number of columns of the pooled output: `C`.
    pub(super) total_columns: usize,
}

impl std::fmt::Debug for LookupShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LookupShape").field("feature_tables", &self.feature_tables).finish_non_exhaustive()
    }
}

impl LookupShape {
    /// Errors: `Input` unless every table is passed once and has features, which are adjacent and in the order of the
    /// tables.
    pub(super) fn new(tables: Vec<Arc<TableInner>>, feature_tables: &[usize]) -> Result<Self> {
        let table_features = features_by_table(tables.len(), feature_tables)?;
        for (second, table) in tables.iter().enumerate() {
            // One thread would take its locks twice and deadlock.
            if let Some(first) = tables[..second].iter().position(|other| Arc::ptr_eq(other, table)) {
                return Err(Error::new(
                    Kind::Input,
                    format!(
                        "tables[{first}] and tables[{second}] are both table {:?}: give a table once, with all its features \
                         side by side in feature_tables={feature_tables:?}",
                        table.config.name
                    ),
                ));
            }
        }
        let mut columns = Vec::with_capacity(feature_tables.len());
        let mut total_columns = 0;
        for &table in feature_tables {
            columns.push(total_columns);
            total_columns += tables[table].layout.dim;
        }
        Ok(Self { tables, feature_tables: feature_tables.to_vec(), table_features, columns, total_columns })
    }

    /// Number of features.
    pub(super) fn features(&self) -> usize {
        self.feature_tables.len()
    }
}

fn features_by_table(tables: usize, feature_tables: &[usize]) -> Result<Vec<Range<usize>>> {
    let refuse = |what: String| Err(Error::new(Kind::Input, format!("feature_tables={feature_tables:?}{what}")));
    let mut table_features: Vec<Range<usize>> = Vec::with_capacity(tables);
    for (feature, &table) in feature_tables.iter().enumerate() {
        if table + 1 == table_features.len() {
            table_features[table].end = feature + 1;
        } else if table == table_features.len() && table < tables {
            table_features.push(feature..feature + 1);
        } else {
            return refuse(format!(": features must come in the order of their {tables} tables"));
        }
    }
    if table_features.len() != tables {
        return refuse(format!(" leaves some of the {tables} tables without a feature"));
    }
    Ok(table_features)
}
