//! Measures dirty rows that are written back to the SSD tier of one table. Live rows take half of the cap. On the disk the limit is raw
//! sequential writes. On a disk that costs nothing it is a plain loop: that is the processor's share.
//!
//! `EMBCACHE_BENCH_SSD_SECONDS` sets the length of a window in seconds (12).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use embcache::ssd::SsdTier;
use embcache_benches::{
    APPEND_ROWS, Bench, Better, Group, PlainWriteBack, RAW_WRITE, ROW_BYTES, Rounds, Scale, SplitMix64, StoreWork,
    TierRows, WrittenDisk, cpu_seconds, new_tier, raw_write_rate, scattered_id, settle, window,
};

pub(crate) fn group() -> Group {
    let bench = |name, limit, make| Bench { name, unit: "rows/s", better: Better::Higher, limit: Some(limit), make };
    Group::Alone(vec![
        bench("ssd_writeback", RAW_WRITE, |scale| WriteBack::make(scale, WrittenDisk::real(scale, cap_bytes(scale)))),
        bench("ssd_writeback_null_disk", PlainWriteBack::WHAT, |scale| {
            WriteBack::make(scale, WrittenDisk::null(rows(scale)))
        }),
    ])
}

fn rows(scale: Scale) -> u64 {
    scale.pick(3_000_000, 20_000)
}

/// The live bytes are half of the cap.
fn cap_bytes(scale: Scale) -> u64 {
    rows(scale) * ROW_BYTES as u64 * 2 + scale.pick(0, 4 << 20)
}

struct WriteBack {
    tier: SsdTier,
    rows: u64,
    batch: TierRows,
    random: SplitMix64,
    window: Duration,
    scale: Scale,
    disk: WrittenDisk,
    /// Seconds of all threads in the measured windows, and the rows that were written there.
    spent: (f64, f64),
}

impl WriteBack {
    fn make(scale: Scale, disk: WrittenDisk) -> Box<dyn Rounds> {
        let (engine, folder) = disk.open();
        let (rows, tier) = (rows(scale), new_tier(&folder, &engine, cap_bytes(scale)));
        let mut batch = TierRows::default();
        batch.load(&tier, rows);
        let mut this =
            Self { tier, rows, batch, random: SplitMix64(11), window: window(scale), scale, disk, spent: (0.0, 0.0) };
        // Write until the cap is full of dead records, and compaction keeps up.
        for _ in 0..2 * rows / APPEND_ROWS as u64 {
            this.write();
        }
        Box::new(this)
    }

    fn ids(&mut self) -> Vec<i64> {
        (0..APPEND_ROWS).map(|_| scattered_id(self.random.next_below(self.rows))).collect()
    }

    fn write(&mut self) {
        let ids = self.ids();
        self.batch.append(&self.tier, ids.into_iter(), true);
    }

    fn write_for(&mut self, time: Duration) -> f64 {
        let begin = Instant::now();
        let mut rows = 0;
        while begin.elapsed() < time {
            self.write();
            rows += APPEND_ROWS;
        }
        rows as f64 / begin.elapsed().as_secs_f64()
    }

    fn write_plainly_for(&mut self, time: Duration) -> f64 {
        let begin = Instant::now();
        let mut rows = 0;
        while begin.elapsed() < time {
            let ids = self.ids();
            if let WrittenDisk::Null(plain) = &mut self.disk {
                plain.write(&ids, &self.batch.bytes());
            }
            rows += APPEND_ROWS;
        }
        rows as f64 / begin.elapsed().as_secs_f64()
    }
}

impl Rounds for WriteBack {
    fn ours(&mut self) -> f64 {
        // Use up, before the clock starts, what compaction did ahead while the other sides ran.
        self.write_for(self.window / 6);
        let begin = cpu_seconds();
        let rate = self.write_for(self.window);
        self.spent.0 += cpu_seconds() - begin;
        self.spent.1 += rate * self.window.as_secs_f64();
        rate
    }

    fn limit(&mut self) -> Option<f64> {
        settle(&self.tier);
        match &self.disk {
            WrittenDisk::Real(scratch) => Some(raw_write_rate(scratch.path(), self.scale)),
            WrittenDisk::Null(_) => Some(self.write_plainly_for(self.window / 4)),
        }
    }

    fn rounds(&self) -> usize {
        5
    }

    fn figures(&self) -> BTreeMap<&'static str, f64> {
        [("cpu_us_per_row", self.spent.0 / self.spent.1 * 1e6)].into()
    }

    fn store(&self) -> Option<StoreWork> {
        let seconds = self.window.as_secs_f64();
        let work = StoreWork::Rewrite { rows: self.rows, ram_bytes: 256 << 20, batch: APPEND_ROWS, seconds };
        matches!(self.disk, WrittenDisk::Real(_)).then_some(work)
    }

    fn check(&mut self) {
        assert_eq!(self.tier.rows(), self.rows);
    }
}
