//! Checks if and how a table can be loaded from a checkpoint. Changes no table.

use std::ops::Range;

use super::chain::{ChainReader, CheckpointChain};
use crate::cache::Table;
use crate::checkpoint::rows::counts::MergedCounts;
use crate::error::{Kind, Result};
use crate::lifecycle::{BucketCounts, OovRow, StepClock};
use crate::ssd::{LinkedSegments, StateCounters};

/// Columns of the rows that a load reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadColumns {
    /// All. The table must have the checkpoint's optimizer.
    All,
    /// All except the optimizer's slots, into a table with any optimizer.
    WithoutSlots,
}

/// States if the caller can open a table from the segments of a linked checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadSegments {
    /// It can.
    Open,
    /// It reads rows only.
    Refuse,
}

/// A table of a checkpoint to load, and how.
#[derive(Clone, Debug)]
pub struct TableRequest<'a> {
    /// Path of the table's module in the checkpoint.
    pub module: &'a str,
    /// Name of the table in the checkpoint.
    pub table: &'a str,
    /// The buckets that the rank owns.
    pub buckets: Range<u32>,
    /// Columns to load.
    pub columns: LoadColumns,
    /// Support for segments.
    pub segments: LoadSegments,
}

/// Source from which a checked table is loaded.
#[derive(Debug)]
pub enum TableSource {
    /// Row by row, by [`ChainReader::load_with`].
    Rows(ChainReader),
    /// By opening the table from segments, with these counters, admission counts, step times and OOV row.
    Segments(LinkedSegments, StateCounters, Vec<BucketCounts>, StepClock, Option<OovRow>),
}

impl TableSource {
    /// Upper bound of the number of rows that the table will have.
    pub fn max_rows(&self) -> u64 {
        match self {
            Self::Rows(reader) => reader.max_rows(),
            Self::Segments(files, ..) => files.rows(),
        }
    }
}

impl CheckpointChain {
    /// Checks that the checkpoint has a table that matches `into`, that no batch uses rows of `into`, and the headers
    /// of the files with rows of the buckets.
    ///
    /// Errors: `Mismatch` (no such table, another dim or optimizer, or segments that `into` cannot be opened from),
    /// `State` (rows in use), `Corruption`, `Storage`.
    pub fn check_table(&self, into: &Table, request: &TableRequest<'_>) -> Result<TableSource> {
        self.refuse_serving("tables that are trained or evaluated by a model are loaded")?;
        let entry = self.table(request.module, request.table)?;
        entry.spec.check_fits(into.config(), request.columns == LoadColumns::All)?;
        into.check_unused()?;
        let rows = || self.table_reader(request.module, request.table, request.buckets.clone());
        if request.columns == LoadColumns::WithoutSlots {
            // Segments contain rows with their slots, so the rows are read one by one.
            return Ok(TableSource::Rows(rows()?.without_slots()));
        }
        let newest = &self.links()[0];
        let Some(files) = newest.segments_of(request.module, request.table, &request.buckets)? else {
            return rows().map(TableSource::Rows);
        };
        if request.segments == LoadSegments::Refuse {
            return Err(newest.only_for_same_ranks("only torchrec_embcache.Saver loads it"));
        }
        into.check_opens_from(&files).map_err(|error| match error.kind() {
            Kind::Mismatch => newest.only_for_same_ranks(&error.to_string()),
            _ => error,
        })?;
        let counters = StateCounters { step: entry.spec.step, epoch: self.manifest().next_epoch };
        let mut counts = Vec::new();
        if entry.pending.is_some() {
            let mut merged = MergedCounts::default();
            newest.table_reader(request.module, request.table, request.buckets.clone())?.read_counts(
                &mut |bucket| {
                    merged.add(bucket, |_| false);
                    Ok(())
                },
            )?;
            merged.hand_over(&mut |bucket| {
                counts.push(bucket);
                Ok(())
            })?;
        }
        Ok(TableSource::Segments(files, counters, counts, entry.clock.clone(), entry.spec.oov_row.clone()))
    }
}
