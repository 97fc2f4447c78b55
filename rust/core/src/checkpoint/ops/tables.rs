//! Writes tables of the cache into a checkpoint, and loads them from one.

use std::collections::BTreeMap;

use super::async_save::WriteRateLimiter;
use super::chain::ChainReader;
use crate::cache::{BaseCheckpoint, GroupSink, PickedRows, Table, TableSnapshot};
use crate::checkpoint::manifest::spec::TableSpec;
use crate::checkpoint::rows::counters::{CountsSource, MergedCounts};
use crate::checkpoint::rows::writer::{DeltaChanges, RankWriter, RowSink};
use crate::config::TableConfig;
use crate::error::{Kind, Result};
use crate::rows::RowHeader;
use crate::ssd::LinkedBytes;
use crate::types::Id;

/// Maximum chunk size when copying rows of a snapshot; a larger row is a chunk on its own. A training step waits for at
/// most one chunk.
const SNAPSHOT_CHUNK_BYTES: usize = 256 << 10;

/// Contents of a table in a linked checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkedTable {
    /// Number of rows.
    pub rows: u64,
    /// Bytes of its segments that were linked, and bytes that were copied.
    pub bytes: LinkedBytes,
}

/// Returns `State` if the table is past `step`, so that the written rows are of several steps.
fn check_not_trained(table: &Table, step: u64) -> Result<()> {
    if table.step()? == step {
        return Ok(());
    }
    Err(Kind::State
        .error(format!("table {:?} was trained while it was saved: save between steps", table.config().name)))
}

impl RankWriter {
    /// Writes every current row of a table. Returns the number of rows. `module` is the path of the table's module in
    /// the model.
    ///
    /// Errors: as [`Self::write_table`]; `State` if the table is trained or changed concurrently.
    pub fn write_rows_of(
        &mut self,
        module: &str,
        table: &Table,
        hyperparameters: BTreeMap<String, f64>,
    ) -> Result<u64> {
        let config = table.config();
        let step = table.step()?;
        let spec = TableSpec::new(module, config, hyperparameters, step, table.oov_row()?);
        let rows = self.write_groups(spec, config.buckets.clone(), &mut |sink| table.for_each_group(sink))?;
        self.last_table().clock = table.clock()?;
        self.write_counts_of(table, None)?;
        check_not_trained(table, step)?;
        Ok(rows)
    }

    /// Writes the current admission counts of pending ids; with `since`, only of ids that were counted in that epoch or
    /// later.
    fn write_counts_of(&mut self, table: &Table, since: Option<u32>) -> Result<()> {
        let Some(generations) = table.generations()? else { return Ok(()) };
        self.write_counts(CountsSource {
            clicks: table.config().admission.counts_clicks(),
            generations: &generations,
            for_each_bucket: &mut |sink| table.for_each_bucket(since, sink),
        })
    }

    /// Writes the rows and admission counts of a chain of checkpoints. `progress` is called with numbers of rows; an
    /// error from it aborts the work.
    pub(super) fn write_chain(
        &mut self,
        chain: &ChainReader,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let (mut merged, buckets) = (MergedCounts::default(), chain.buckets().clone());
        self.write_merged_rows(chain.spec().clone(), chain, Some(&mut merged), progress)?;
        self.last_table().clock = chain.clock()?.clone();
        if !chain.has_counts() {
            return Ok(());
        }
        let generations: Vec<u32> = buckets.map(|bucket| merged.generation(bucket)).collect();
        self.write_counts(CountsSource {
            clicks: chain.counts_clicks(),
            generations: &generations,
            for_each_bucket: &mut |sink| std::mem::take(&mut merged).into_buckets().try_for_each(sink),
        })
    }

    /// Writes the rows of a chain of checkpoints, and collects its admission counts in `counts`. `progress` is called
    /// with numbers of rows; an error from it aborts the work.
    pub(super) fn write_merged_rows(
        &mut self,
        spec: TableSpec,
        chain: &ChainReader,
        mut counts: Option<&mut MergedCounts>,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let mut rows = |sink: &mut RowSink<'_>| {
            let mut hand_over = |headers: &[RowHeader], vectors: &[f32]| {
                sink(headers, vectors)?;
                progress(headers.len() as u64)
            };
            let read = chain.read_columns(&mut |rows| chain.emit(rows, &mut hand_over), counts.as_deref_mut());
            read.map(|_| ())
        };
        self.write_table(spec, chain.buckets().clone(), &mut rows).map(|_| ())
    }

    /// Writes every current row of a table to a linked checkpoint. The segments of an SSD tier are hard-linked if the
    /// file system supports that, and copied otherwise. The rows of a table without SSD tier are written. `module` is
    /// the path of the table's module in the model.
    ///
    /// Errors: as [`Self::write_rows_of`], and errors of demoting rows from RAM to the SSD tier.
    pub fn link_rows_of(
        &mut self,
        module: &str,
        table: &Table,
        hyperparameters: BTreeMap<String, f64>,
    ) -> Result<LinkedTable> {
        let Some((held, counters, shared)) = table.pin_segments()? else {
            let rows = self.write_rows_of(module, table, hyperparameters)?;
            return Ok(LinkedTable { rows, bytes: LinkedBytes::default() });
        };
        let config = table.config();
        let spec = TableSpec::new(module, config, hyperparameters, counters.step, shared);
        let set = held.set().clone();
        let rows = set.rows;
        let bytes =
            self.write_segments(spec, config.buckets.clone(), set, |engine, path_of| held.link_to(engine, path_of))?;
        self.last_table().clock = table.clock()?;
        self.write_counts_of(table, None)?;
        Ok(LinkedTable { rows, bytes })
    }

    /// Writes the changes of a table since `base`. Returns the numbers of rows and tombstones. `module` is the path of
    /// the table's module in the model.
    ///
    /// Errors: as [`Self::write_table`]; `State` if the changes are unknown, so that a full save is required, or if the
    /// table is trained or changed concurrently.
    pub fn write_changes_of(
        &mut self,
        module: &str,
        table: &Table,
        hyperparameters: BTreeMap<String, f64>,
        base: &BaseCheckpoint,
    ) -> Result<(u64, u64)> {
        let config = table.config();
        let step = table.step()?;
        let spec = TableSpec::new(module, config, hyperparameters, step, table.oov_row()?);
        let tombstones = table.tombstones_since(base)?;
        let sweeps = table.sweeps_since(base)?;
        let changes = DeltaChanges { tombstones: &tombstones, sweeps: &sweeps, total_rows: table.len()? };
        let mut modified = |sink: &mut dyn GroupSink| table.for_each_modified_group(base.next_epoch, sink);
        let rows = self.write_groups(spec, config.buckets.clone(), &mut modified)?;
        self.add_changes(changes)?;
        self.last_table().clock = table.clock()?;
        self.write_counts_of(table, Some(base.next_epoch))?;
        check_not_trained(table, step)?;
        Ok((rows, tombstones.len() as u64))
    }

    /// Writes the rows of a snapshot, no faster than `limiter` allows. The checkpoint must be a delta if the snapshot
    /// is one of changes. Returns the numbers of rows and tombstones.
    pub fn write_snapshot(
        &mut self,
        module: &str,
        snapshot: TableSnapshot,
        hyperparameters: BTreeMap<String, f64>,
        limiter: &mut WriteRateLimiter,
    ) -> Result<(u64, u64)> {
        let config = snapshot.config().clone();
        let spec = TableSpec::new(module, &config, hyperparameters, snapshot.step(), snapshot.oov_row().cloned());
        let row_bytes = config.layout().vector_floats() * 4 + size_of::<RowHeader>();
        let chunk_rows = (SNAPSHOT_CHUNK_BYTES / row_bytes).max(1);
        let (tombstones, sweeps, total_rows) =
            (snapshot.tombstones().map(<[Id]>::to_vec), snapshot.sweeps().to_vec(), snapshot.rows());
        let clock = snapshot.clock().clone();
        // Reading the rows consumes the snapshot. So its counts are collected first, and written after the rows.
        let (generations, mut counts) = (snapshot.generations(), MergedCounts::default());
        snapshot.for_each_bucket(&mut |bucket| {
            counts.add(bucket, |_| false);
            Ok(())
        })?;
        let mut snapshot = Some(snapshot);
        let mut rows = |sink: &mut RowSink<'_>| {
            let once = || Kind::State.error("the rows of a snapshot can be read only once");
            snapshot.take().ok_or_else(once)?.for_each_chunk(chunk_rows, &mut |chunk| {
                sink(&chunk.headers, &chunk.vectors)?;
                limiter.wait((chunk.headers.len() * row_bytes) as u64);
                Ok(())
            })
        };
        let written = self.write_table(spec, config.buckets, &mut rows)?;
        if let Some(tombstones) = &tombstones {
            self.add_changes(DeltaChanges { tombstones, sweeps: &sweeps, total_rows })?;
        }
        self.last_table().clock = clock;
        if let Some(generations) = &generations {
            self.write_counts(CountsSource {
                clicks: config.admission.counts_clicks(),
                generations,
                for_each_bucket: &mut |sink| std::mem::take(&mut counts).into_buckets().try_for_each(sink),
            })?;
        }
        Ok((written, tombstones.map_or(0, |tombstones| tombstones.len() as u64)))
    }
}

impl ChainReader {
    /// Checks that the rows match a table of this configuration. `Kind::Mismatch` names the difference.
    pub fn check_fits(&self, config: &TableConfig) -> Result<()> {
        let spec = self.spec();
        spec.check_fits(config, self.has_slots())?;
        if spec.bucketing() != config.bucketing() || *self.buckets() != config.buckets {
            return Err(Kind::Mismatch.error(format!(
                "table {:?} owns buckets {:?} of {} and the reader was made for {:?} of {}",
                config.name,
                config.buckets,
                config.total_num_buckets,
                self.buckets(),
                spec.total_num_buckets
            )));
        }
        Ok(())
    }

    /// Replaces the contents and the step of a table. Returns its new number of rows. After an error its contents are
    /// unusable. So the caller marks the table unusable before the load ([`Table::set_unusable`]), and usable when
    /// every table of every rank is loaded.
    pub fn load_into(&self, table: &Table) -> Result<u64> {
        self.load_with(table, &mut |_| Ok(()))
    }

    /// Like [`Self::load_into`]. `progress` is called with the number of loaded rows; an error from it aborts the load.
    pub fn load_with(&self, table: &Table, progress: &mut dyn FnMut(u64) -> Result<()>) -> Result<u64> {
        self.check_fits(table.config())?;
        table.clear()?;
        // Adam variants correct the bias of the moments by the number of steps. Rows without slots start with new
        // moments, so at step 0. The step is set before the rows are imported, so that rows dropped by a full table are
        // reported with it.
        let resets_step = table.config().optimizer.corrects_bias() && !self.has_slots();
        table.restore_clock(self.clock()?)?;
        table.set_step(if resets_step { 0 } else { self.spec().step })?;
        let dropped = table.stats()?.dropped_rows;
        table.reserve_rows(self.rows_of_oldest())?;
        let mut counts = MergedCounts::default();
        let mut import = |rows: PickedRows<'_>| {
            table.import_columns(rows)?;
            progress(rows.len() as u64)
        };
        let read = self.read_columns(&mut import, Some(&mut counts))?;
        counts.into_buckets().try_for_each(|counts| table.restore_bucket(&counts))?;
        let stats = table.stats()?;
        let rows = stats.rows;
        if rows + (stats.dropped_rows - dropped) != read {
            return Err(Kind::Corruption.error(format!(
                "the checkpoint of table {:?} has {read} rows and only {rows} distinct ids",
                table.config().name
            )));
        }
        let saved = self.spec().oov_row.as_ref();
        let layout = table.config().layout();
        let without_slots = saved.filter(|_| !self.has_slots()).map(|saved| saved.without_slots(layout));
        table.load_oov_row(without_slots.as_ref().or(saved))?;
        Ok(read)
    }
}
