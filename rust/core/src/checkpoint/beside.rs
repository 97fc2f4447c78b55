//! One rank's part of a save beside training: the rows of the moment when it began.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::RowSink;
use super::format::rank_file;
use super::latest::CheckpointName;
use super::manifest::{RankDigest, TableSpec};
use super::writer::RankWriter;
use crate::cache::{PreImages, Table, TableSnapshot};
use crate::error::{Error, Kind, Result};
use crate::io::IoEngine;
use crate::rows::RowHeader;

pub use crate::process::work_behind;

/// Bytes of the chunks in which rows are copied (one row at least): a training step waits for one at most.
const CHUNK_BYTES: usize = 256 << 10;
/// Memory for rows that training changes before they are written, by default: see [`PreImages`].
pub const IMAGE_BYTES: usize = 32 << 20;

/// Settings of a save beside training.
#[derive(Clone, Copy, Debug)]
pub struct BesideOptions {
    /// Rows trained after the moment are of this epoch: what the checkpoint is published with.
    pub next_epoch: u32,
    /// See [`IMAGE_BYTES`].
    pub image_bytes: usize,
    /// Bytes of rows written in a second at most.
    pub bytes_per_second: Option<u64>,
}

/// A table to save: its module's path in the model, itself, its optimizer's hyperparameters.
pub type TableToSave = (String, Table, BTreeMap<String, f64>);

/// The tables of one rank at one moment, and where they go. Dropping it lets go of them; what it wrote is swept by the next save.
#[derive(Debug)]
pub struct RankSnapshot {
    writer: RankWriter,
    tables: VecDeque<(String, TableSnapshot, BTreeMap<String, f64>)>,
    images: Arc<PreImages>,
    pace: Pace,
}

impl RankSnapshot {
    /// Hold the rows that the tables have now, for the part of `rank` (of `world`) in the checkpoint `name` in `root`. No table is
    /// trained meanwhile.
    ///
    /// Errors: those of [`Table::snapshot`]; then none is held.
    pub fn begin(
        engine: Arc<dyn IoEngine>,
        root: &Path,
        name: CheckpointName,
        (rank, world): (u32, u32),
        tables: Vec<TableToSave>,
        options: BesideOptions,
    ) -> Result<Self> {
        let writer = RankWriter::new(Arc::clone(&engine), root, name, rank, world)?;
        let path = root.join(name.to_string()).join(rank_file(rank, world)).with_extension("preimages");
        let images = Arc::new(PreImages::new(engine, path, options.image_bytes, tables.len()));
        let hold = |(module, table, hyperparameters): TableToSave| {
            Ok((module, table.snapshot(&images, options.next_epoch)?, hyperparameters))
        };
        let tables = tables.into_iter().map(hold).collect::<Result<_>>()?;
        Ok(Self { writer, tables, images, pace: Pace::new(options.bytes_per_second) })
    }

    /// Write the next table; how many rows it had, or `None` when there was none left.
    pub fn write_next(&mut self) -> Result<Option<u64>> {
        let Some((module, snapshot, hyperparameters)) = self.tables.pop_front() else { return Ok(None) };
        let config = snapshot.config().clone();
        let spec = TableSpec::new(&module, &config, hyperparameters, snapshot.step());
        let row_bytes = config.layout().vector_floats() * 4 + size_of::<RowHeader>();
        let chunk_rows = (CHUNK_BYTES / row_bytes).max(1);
        let (mut snapshot, pace) = (Some(snapshot), &mut self.pace);
        let rows = self.writer.write_table(spec, config.buckets.clone(), &mut |sink: &mut RowSink<'_>| {
            let once = || Error::new(Kind::State, "the rows of a snapshot are there once");
            snapshot.take().ok_or_else(once)?.for_each_chunk(chunk_rows, &mut |chunk| {
                sink(&chunk.headers, &chunk.vectors)?;
                pace.wait((chunk.headers.len() * row_bytes) as u64);
                Ok(())
            })
        })?;
        Ok(Some(rows))
    }

    /// Make this rank's part durable, when every table is written. The digest goes to the coordinator.
    pub fn finish(self) -> Result<RankDigest> {
        if let Some((_, snapshot, _)) = self.tables.front() {
            let message = format!("table {:?} is not written yet", snapshot.config().name);
            return Err(Error::new(Kind::State, message));
        }
        self.images.close()?;
        self.writer.finish()
    }
}

/// Keeps to so many bytes a second.
#[derive(Debug)]
struct Pace {
    bytes_per_second: Option<u64>,
    /// When the bytes so far should have been written.
    due: Instant,
}

impl Pace {
    /// What a slow disk left of the rate is made up for in so much time.
    const CREDIT: Duration = Duration::from_millis(200);

    fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, due: Instant::now() }
    }

    fn wait(&mut self, bytes: u64) {
        std::thread::sleep(self.after(bytes, Instant::now()));
    }

    /// How long to wait after bytes that were written by `now`.
    fn after(&mut self, bytes: u64, now: Instant) -> Duration {
        let Some(rate) = self.bytes_per_second else { return Duration::ZERO };
        let earliest = now.checked_sub(Self::CREDIT).unwrap_or(now);
        self.due = self.due.max(earliest) + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
        self.due.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_the_time_that_the_rate_gives_them_and_a_slow_disk_is_made_up_for() {
        let mut pace = Pace::new(Some(1 << 20));
        let mut now = pace.due;
        for _ in 0..4 {
            let wait = pace.after(1 << 19, now);
            assert_eq!(wait, Duration::from_millis(500));
            now += wait;
        }
        // Three seconds lost, of which the credit is had back.
        now += Duration::from_secs(3);
        assert_eq!(pace.after(1 << 20, now), Duration::from_millis(800));
        assert_eq!(Pace::new(None).after(u64::MAX, now), Duration::ZERO);
    }
}
