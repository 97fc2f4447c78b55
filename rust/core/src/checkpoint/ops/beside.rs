//! One rank's part of an asynchronous save, which writes the rows as of the start of the save.

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

/// Default memory limit in bytes for copies of rows that training changes before they are written. See [`PreImages`].
pub const PRE_IMAGE_BYTES: usize = 32 << 20;

/// Options of an asynchronous save.
#[derive(Clone, Copy, Debug)]
pub struct AsyncSaveOptions {
    /// Epoch of rows that are trained after the snapshot. The checkpoint is published with it.
    pub next_epoch: u32,
    /// Memory limit for copy-on-write row copies in bytes. See [`PRE_IMAGE_BYTES`].
    pub pre_image_bytes: usize,
    /// Maximum bytes of rows written per second; `None` for no limit.
    pub bytes_per_second: Option<u64>,
    /// If true, admission counts of pending ids are written.
    pub counts: bool,
}

/// A table to save.
#[derive(Clone, Debug)]
pub struct AsyncSaveTable {
    /// Path of its module in the model.
    pub module: String,
    /// The table.
    pub table: Table,
    /// Hyperparameters of its optimizer.
    pub hyperparameters: BTreeMap<String, f64>,
    /// Base checkpoint of the delta; `None` for a full save.
    pub base: Option<BaseCheckpoint>,
}

/// A snapshot of one rank's tables, and the writer of its part of the checkpoint. Dropping it releases the snapshot;
/// the next save removes files already written.
#[derive(Debug)]
pub struct RankSnapshot {
    writer: RankWriter,
    tables: VecDeque<(String, TableSnapshot, BTreeMap<String, f64>)>,
    images: Arc<PreImages>,
    limiter: WriteRateLimiter,
}

impl RankSnapshot {
    /// Takes a snapshot of the tables, for the part of `rank` (of `world`) in the checkpoint `name` in `root`. No table
    /// may be trained during this call.
    ///
    /// Errors: as [`Table::snapshot`]. After an error no snapshot is held.
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

    /// Writes the next table. Returns its numbers of rows and tombstones, or `None` if no table is left.
    pub fn write_next(&mut self) -> Result<Option<(u64, u64)>> {
        let Some((module, moment, hyperparameters)) = self.tables.pop_front() else { return Ok(None) };
        self.writer.write_snapshot(&module, moment, hyperparameters, &mut self.limiter).map(Some)
    }

    /// Makes this rank's part durable after every table is written. The caller sends the digest to the coordinator.
    pub fn finish(self) -> Result<RankDigest> {
        if let Some((_, moment, _)) = self.tables.front() {
            let message = format!("table {:?} is not written yet", moment.config().name);
            return Err(Error::new(Kind::State, message));
        }
        self.images.close()?;
        self.writer.finish()
    }
}

/// Limits the number of bytes written per second.
#[derive(Debug)]
pub struct WriteRateLimiter {
    bytes_per_second: Option<u64>,
    /// Time at which the limit allows the next bytes.
    due: Instant,
}

impl WriteRateLimiter {
    /// If a slow disk has fallen behind the limit, later bytes are written faster, to make up for at most this much
    /// time.
    const CREDIT: Duration = Duration::from_millis(200);

    /// Creates a limiter in bytes per second; `None` for no limit.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, due: Instant::now() }
    }

    /// Sleeps until the limit allows more, after `bytes` were written.
    pub(super) fn wait(&mut self, bytes: u64) {
        std::thread::sleep(self.delay_after(bytes, Instant::now()));
    }

    /// Time to sleep at time `now`, when `bytes` were just written.
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
    fn rate_limit_delays_bytes_and_compensates_for_slow_disk() {
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
