//! Tables of the cache into a checkpoint and out of it.

use std::collections::BTreeMap;

use super::manifest::TableSpec;
use super::reader::TableReader;
use super::writer::RankWriter;
use crate::cache::{RowBlock, Table};
use crate::config::TableConfig;
use crate::error::{Error, Kind, Result};
use crate::rows::RowHeader;

/// Bytes of the chunks in which a table's rows are read (one row at least): they stay in a core's cache until they are copied.
const CHUNK_BYTES: usize = 512 << 10;

impl RankWriter {
    /// Write every row of a table, as of now; returns how many they were. `module` is the path of its module in the model.
    ///
    /// Errors: those of [`RankWriter::write_table`], and `State` when the table is trained or changed meanwhile.
    pub fn write_rows_of(
        &mut self,
        module: &str,
        table: &Table,
        hyperparameters: BTreeMap<String, f64>,
    ) -> Result<u64> {
        let config = table.config();
        let step = table.step()?;
        let spec = TableSpec::new(module, config, hyperparameters, step);
        let row_bytes = config.layout().vector_floats() * 4 + size_of::<RowHeader>();
        let chunk_rows = (CHUNK_BYTES / row_bytes).max(1);
        let rows = self.write_table(spec, config.buckets.clone(), &mut |sink: &mut super::RowSink<'_>| {
            table.for_each_chunk(chunk_rows, &mut |chunk| sink(&chunk.headers, &chunk.vectors))
        })?;
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
        spec.check_fits(config)?;
        if spec.total_num_buckets != config.total_num_buckets || *self.buckets() != config.buckets {
            return Err(Error::new(
                Kind::Mismatch,
                format!(
                    "table {:?} owns buckets {:?} of {} and the reader was made for {:?} of {}",
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

    /// Replace the contents of a table, its step included. After an error the contents are of no use: the caller marks the table
    /// unusable before ([`Table::set_unusable`]) and usable when every table of every rank is loaded.
    pub fn load_into(&self, table: &Table) -> Result<()> {
        self.check_fits(table.config())?;
        table.clear()?;
        self.read(&mut |headers, vectors| table.import_rows(RowBlock { headers, vectors }))?;
        let rows = table.stats()?.rows;
        if rows != self.rows() {
            return Err(Error::new(
                Kind::Corruption,
                format!(
                    "the checkpoint of table {:?} has {} rows and only {rows} distinct ids",
                    table.config().name,
                    self.rows()
                ),
            ));
        }
        table.set_step(self.spec().step)
    }
}
