//! Whether a table can be loaded from a checkpoint, and in which way. No table is changed.

use std::ops::Range;

use super::chain::{ChainReader, CheckpointChain};
use crate::cache::Table;
use crate::checkpoint::rows::counts::MergedCounts;
use crate::error::{Kind, Result};
use crate::lifecycle::{BucketCounts, OovRow, StepClock};
use crate::ssd::{LinkedSegments, StateCounters};

/// Which columns of the rows a load takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadColumns {
    /// All. The table must have the checkpoint's optimizer.
    All,
    /// All but the optimizer's slots, into a table with any optimizer.
    WithoutSlots,
}

/// Whether the caller can open a table from the segments of a linked checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadSegments {
    /// It can.
    Open,
    /// It reads rows only.
    Refuse,
}

/// Which table of a checkpoint is to be loaded, and how.
#[derive(Clone, Debug)]
pub struct TableRequest<'a> {
    /// The path of the table's module in the checkpoint.
    pub module: &'a str,
    /// The table's name in the checkpoint.
    pub table: &'a str,
    /// The buckets that the rank owns.
    pub buckets: Range<u32>,
    /// Which columns are wanted.
    pub columns: LoadColumns,
    /// Whether segments will do.
    pub segments: LoadSegments,
}

/// How a table that was checked is loaded.
#[derive(Debug)]
pub enum TableSource {
    /// Row by row, by [`ChainReader::load_with`].
    Rows(ChainReader),
    /// By opening the table from segments, with these counters, these counts of ids that wait for rows, these times of its steps, and this
    /// shared row.
    Segments(LinkedSegments, StateCounters, Vec<BucketCounts>, StepClock, Option<OovRow>),
}

impl TableSource {
    /// No fewer rows than the table will have.
    pub fn max_rows(&self) -> u64 {
        match self {
            Self::Rows(reader) => reader.max_rows(),
            Self::Segments(files, ..) => files.rows(),
        }
    }
}

impl CheckpointChain {
    /// Check that the checkpoint has a table that fits `into`, that no batch uses the rows of `into`, and the headers of the files that
    /// hold the rows of the buckets.
    ///
    /// Errors: `Mismatch` (no such table, another dim or optimizer, or segments that `into` cannot be opened from), `State` (rows in
    /// use), `Corruption`, `Storage`.
    pub fn check_table(&self, into: &Table, request: &TableRequest<'_>) -> Result<TableSource> {
        self.refuse_serving("tables that are trained or evaluated by a model are loaded")?;
        let entry = self.table(request.module, request.table)?;
        entry.spec.check_fits(into.config(), request.columns == LoadColumns::All)?;
        into.check_unused()?;
        let rows = || self.table_reader(request.module, request.table, request.buckets.clone());
        if request.columns == LoadColumns::WithoutSlots {
            // Segments hold rows with their slots: these are read row by row.
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
