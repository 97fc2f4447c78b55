//! Measures dirty rows that are written back to the SSD tier of one table beside raw sequential writes. Live rows take half of the
//! cap.
//!
//! `EMBCACHE_BENCH_SSD_SECONDS` sets the length of a window in seconds (12).

use std::time::{Duration, Instant};

use embcache::io::default_engine;
use embcache::ssd::SsdTier;
use embcache_benches::{
    APPEND_ROWS, Bench, Better, RAW_WRITE, RECORD_BYTES, Rounds, Scale, Scratch, SplitMix64, StoreWork, TierRows,
    new_tier, raw_write_bytes, raw_write_rate, run, scattered_id, settle, window,
};

fn main() {
    run(&[Bench {
        name: "ssd_writeback",
        unit: "rows/s",
        better: Better::Higher,
        limit: Some(RAW_WRITE),
        make: WriteBack::make,
    }]);
}

struct WriteBack {
    tier: SsdTier,
    rows: u64,
    batch: TierRows,
    random: SplitMix64,
    window: Duration,
    scale: Scale,
    scratch: Scratch,
}

impl WriteBack {
    fn make(scale: Scale) -> Box<dyn Rounds> {
        let rows: u64 = scale.pick(3_000_000, 20_000);
        // The live bytes are half of the cap.
        let cap = rows * RECORD_BYTES as u64 * 2 + scale.pick(0, 4 << 20);
        let scratch = Scratch::new(cap + raw_write_bytes(scale) as u64).unwrap_or_else(|why| panic!("{why}"));
        let tier = new_tier(scratch.path(), &default_engine().expect("an engine"), cap);
        let mut batch = TierRows::default();
        batch.load(&tier, rows);
        let mut this = Self { tier, rows, batch, random: SplitMix64(11), window: window(scale), scale, scratch };
        // Write until the cap is full of dead records, and compaction keeps up.
        for _ in 0..2 * rows / APPEND_ROWS as u64 {
            this.write();
        }
        Box::new(this)
    }

    fn write(&mut self) {
        let ids: Vec<i64> = (0..APPEND_ROWS).map(|_| scattered_id(self.random.next_below(self.rows))).collect();
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
}

impl Rounds for WriteBack {
    fn ours(&mut self) -> f64 {
        // Use up, before the clock starts, what compaction did ahead while the other sides ran.
        self.write_for(self.window / 6);
        self.write_for(self.window)
    }

    fn limit(&mut self) -> Option<f64> {
        settle(&self.tier);
        Some(raw_write_rate(self.scratch.path(), self.scale))
    }

    fn rounds(&self) -> usize {
        5
    }

    fn store(&self) -> Option<StoreWork> {
        let seconds = self.window.as_secs_f64();
        Some(StoreWork::Rewrite { rows: self.rows, ram_bytes: 256 << 20, batch: APPEND_ROWS, seconds })
    }

    fn check(&mut self) {
        assert_eq!(self.tier.rows(), self.rows);
    }
}
