//! One rank's part of a save beside training. It writes the rows as they were when the save began.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cache::{BaseCheckpoint, PreImages, Table, TableSnapshot};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::digest::RankDigest;
use crate::checkpoint::manifest::latest::CheckpointName;
use crate::checkpoint::manifest::names::rank_file;
use crate::checkpoint::rows::writer::RankWriter;
use crate::error::{Error, Kind, Result};

pub use crate::process::work_in_background;

/// The default memory, in bytes, for rows that training changes before they are written: see [`PreImages`].
pub const PRE_IMAGE_BYTES: usize = 32 << 20;

/// Settings of a save beside training.
#[derive(Clone, Copy, Debug)]
pub struct AsyncSaveOptions {
    /// The epoch of rows that are trained after the moment. The checkpoint is published with it.
    pub next_epoch: u32,
    /// Memory for pre-images in bytes; see [`PRE_IMAGE_BYTES`].
    pub pre_image_bytes: usize,
    /// The most bytes of rows that are written in a second; `None` for no limit.
    pub bytes_per_second: Option<u64>,
    /// Whether counts of ids that wait for rows are written.
    pub counts: bool,
}

/// A table that is to be saved.
#[derive(Clone, Debug)]
pub struct AsyncSaveTable {
    /// The path of its module in the model.
    pub module: String,
    /// The table.
    pub table: Table,
    /// The hyperparameters of its optimizer.
    pub hyperparameters: BTreeMap<String, f64>,
    /// The checkpoint that the delta builds on; `None` in a full save.
    pub base: Option<BaseCheckpoint>,
}

/// The tables of one rank as they were at one moment, and what writes them into the checkpoint. Once this is dropped the tables are held
/// no more, and the next save removes what was written.
#[derive(Debug)]
pub struct RankSnapshot {
    writer: RankWriter,
    tables: VecDeque<(String, TableSnapshot, BTreeMap<String, f64>)>,
    images: Arc<PreImages>,
    limiter: WriteRateLimiter,
}

impl RankSnapshot {
    /// Hold the rows that the tables have now, for the part of `rank` (of `world`) in the checkpoint `name` in `root`. No table may be
    /// trained during this call.
    ///
    /// Errors: those of [`Table::moment`]. After one no table is held.
    pub fn begin(
        root: &CheckpointDirectory,
        name: CheckpointName,
        (rank, world): (u32, u32),
        tables: Vec<AsyncSaveTable>,
        options: AsyncSaveOptions,
    ) -> Result<Self> {
        let writer = RankWriter::new(root, name, rank, world)?;
        let writer = if options.counts { writer } else { writer.without_counts() };
        let path = root.subdirectory(name).join(rank_file(rank, world)).with_extension("preimages");
        let images = Arc::new(PreImages::new(root.shared_engine(), path, options.pre_image_bytes, tables.len()));
        let hold = |AsyncSaveTable { module, table, hyperparameters, base: ancestor }| {
            let moment = match ancestor {
                None => table.snapshot(&images, options.next_epoch)?,
                Some(ancestor) => table.snapshot_of_changes(&images, options.next_epoch, &ancestor)?,
            };
            Ok((module, moment, hyperparameters))
        };
        let tables = tables.into_iter().map(hold).collect::<Result<_>>()?;
        Ok(Self { writer, tables, images, limiter: WriteRateLimiter::new(options.bytes_per_second) })
    }

    /// Write the next table. Returns how many rows and tombstones it has, or `None` when no table was left.
    pub fn write_next(&mut self) -> Result<Option<(u64, u64)>> {
        let Some((module, moment, hyperparameters)) = self.tables.pop_front() else { return Ok(None) };
        self.writer.write_snapshot(&module, moment, hyperparameters, &mut self.limiter).map(Some)
    }

    /// Make this rank's part durable when every table is written. The digest goes to the coordinator.
    pub fn finish(self) -> Result<RankDigest> {
        if let Some((_, moment, _)) = self.tables.front() {
            let message = format!("table {:?} is not written yet", moment.config().name);
            return Err(Error::new(Kind::State, message));
        }
        self.images.close()?;
        self.writer.finish()
    }
}

/// Limits how many bytes are written in a second.
#[derive(Debug)]
pub struct WriteRateLimiter {
    bytes_per_second: Option<u64>,
    /// When the limit allows the next bytes.
    due: Instant,
}

impl WriteRateLimiter {
    /// Where a slow disk has fallen behind the limit, later bytes are written faster, to make up for at most this much time.
    const CREDIT: Duration = Duration::from_millis(200);

    /// A limit in bytes a second; `None` for no limit.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, due: Instant::now() }
    }

    /// Sleep until the limit allows more, after `bytes` were written.
    pub(super) fn wait(&mut self, bytes: u64) {
        std::thread::sleep(self.delay_after(bytes, Instant::now()));
    }

    /// How long to sleep at the time `now`, when `bytes` were just written.
    fn delay_after(&mut self, bytes: u64, now: Instant) -> Duration {
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
        let mut pace = WriteRateLimiter::new(Some(1 << 20));
        let mut now = pace.due;
        for _ in 0..4 {
            let wait = pace.delay_after(1 << 19, now);
            assert_eq!(wait, Duration::from_millis(500));
            now += wait;
        }
        // The disk loses three seconds, and only the credit is made up for.
        now += Duration::from_secs(3);
        assert_eq!(pace.delay_after(1 << 20, now), Duration::from_millis(800));
        assert_eq!(WriteRateLimiter::new(None).delay_after(u64::MAX, now), Duration::ZERO);
    }
}
