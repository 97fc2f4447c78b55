//! Writes tables of the cache into a checkpoint, and loads them from one.

use std::collections::BTreeMap;

use super::chain::ChainReader;
use crate::cache::{GroupSink, Table};
use crate::checkpoint::manifest::manifests::TableSpec;
use crate::checkpoint::rows::reader::TableReader;
use crate::checkpoint::rows::source::{RowSink, RowSource};
use crate::checkpoint::rows::writer::RankWriter;
use crate::config::{OptimizerKind, TableConfig};
use crate::error::{Error, Kind, Result};

/// How many rows of a table are copied at a time.
const CHUNK_ROWS: usize = 1024;

/// Every row of a table, as of now.
struct TableRows<'a>(&'a Table);

impl RowSource for TableRows<'_> {
    fn for_each_chunk(&mut self, sink: &mut RowSink<'_>) -> Result<()> {
        self.0.for_each_chunk(CHUNK_ROWS, &mut |chunk| sink(&chunk.headers, &chunk.vectors))
    }

    fn for_each_group(&mut self, sink: &mut dyn GroupSink) -> Result<()> {
        self.0.for_each_group(sink)
    }
}

impl RankWriter {
    /// Write every row of a table as of now. Returns how many rows there were. `module` is the path of the table's module in the model.
    ///
    /// Errors: those of [`RankWriter::write_table`]; `State` when the table is trained or changed meanwhile.
    pub fn write_rows_of(
        &mut self,
        module: &str,
        table: &Table,
        hyperparameters: BTreeMap<String, f64>,
    ) -> Result<u64> {
        let config = table.config();
        let step = table.step()?;
        let spec = TableSpec::new(module, config, hyperparameters, step);
        let rows = self.write_table(spec, config.buckets.clone(), &mut TableRows(table))?;
        if table.step()? != step {
            return Err(Error::new(
                Kind::State,
                format!("table {:?} was trained while it was saved: save between steps", config.name),
            ));
        }
        Ok(rows)
    }
}

impl TableReader {
    /// Whether the rows can go into a table of this configuration; `Kind::Mismatch` names what differs.
    pub fn check_fits(&self, config: &TableConfig) -> Result<()> {
        let spec = self.spec();
        spec.check_fits(config, self.has_slots())?;
        if spec.bucketing() != config.bucketing() || *self.buckets() != config.buckets {
            let (here, there) = (config.bucket_hash.name(), spec.bucket_hash.name());
            return Err(Error::new(
                Kind::Mismatch,
                format!(
                    "table {:?} owns buckets {:?} of {} ({here}) and the reader was made for {:?} of {} ({there})",
                    config.name,
                    config.buckets,
                    config.total_num_buckets,
                    self.buckets(),
                    spec.total_num_buckets
                ),
            ));
        }
        Ok(())
    }
}

impl ChainReader {
    /// Replace the contents and the step of a table. Returns how many rows it has then. After an error its contents are of no use. So the
    /// caller marks the table unusable before ([`Table::set_unusable`]), and usable when every table of every rank is loaded.
    pub fn load_into(&self, table: &Table) -> Result<u64> {
        self.load_with(table, &mut |_| Ok(()))
    }

    /// Load as [`ChainReader::load_into`] does. `progress` is called with the number of rows that were loaded; its error ends the load.
    pub fn load_with(&self, table: &Table, progress: &mut dyn FnMut(u64) -> Result<()>) -> Result<u64> {
        self.check_fits(table.config())?;
        table.clear()?;
        let dropped = table.stats()?.dropped_rows;
        table.reserve_rows(self.rows_of_oldest())?;
        let read = self.read_columns(&mut |rows| {
            table.import_columns(rows)?;
            progress(rows.len() as u64)
        })?;
        let stats = table.stats()?;
        let rows = stats.rows;
        if rows + (stats.dropped_rows - dropped) != read {
            return Err(Error::new(
                Kind::Corruption,
                format!(
                    "the checkpoint of table {:?} has {read} rows and only {rows} distinct ids",
                    table.config().name
                ),
            ));
        }
        // Adam corrects its moments by the number of steps that made them. Rows without slots begin with new moments, so at step 0.
        let corrects = matches!(table.config().optimizer, OptimizerKind::Adam | OptimizerKind::AdamW);
        table.set_step(if corrects && !self.has_slots() { 0 } else { self.spec().step })?;
        Ok(read)
    }
}
