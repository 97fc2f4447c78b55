//! Measures rows that leave RAM under Zipf's law (exponent 1.05) and are written to the SSD tier of one table that is 65% or 80%
//! full, while compaction keeps up. The values are rows a second beside raw sequential writes, and the bytes handed to the files'
//! writes divided by the bytes of the rows given (304 bytes each, as records).
//!
//! `EMBCACHE_BENCH_SSD_SECONDS` sets the length of a window in seconds (12), `EMBCACHE_BENCH_SSD_ROWS` the number of rows (4M).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use embcache::io::default_engine;
use embcache::ssd::SsdTier;
use embcache_benches::{
    APPEND_ROWS, Better, CountedEngine, Evictions, Limit, RAW_WRITE, RECORD_BYTES, ROW_BYTES, Row, Scale, Scratch,
    TierRows, median, new_tier, raw_write_bytes, raw_write_rate, run_rows, scattered_id, setting, settle, window,
};

const WINDOWS: usize = 5;
/// The trace has so many rows for each row of the table. It also says how many of these the store is given before the first window.
const TRACE: usize = 8;
const WARM: usize = 4;

struct Fullness {
    percent: u64,
    rate: &'static str,
    amplification: &'static str,
}

const FULLNESS: [Fullness; 2] = [
    Fullness { percent: 80, rate: "ssd_writeback_80pct_full", amplification: "ssd_write_amplification_80pct_full" },
    Fullness { percent: 65, rate: "ssd_writeback_65pct_full", amplification: "ssd_write_amplification_65pct_full" },
];

fn main() {
    let names = FULLNESS.map(|full| [full.rate, full.amplification]);
    run_rows(names.as_flattened(), |scale, wanted| {
        let rows = setting("EMBCACHE_BENCH_SSD_ROWS", scale.pick(4_000_000, 40_000));
        let ranks: Vec<u32> = Evictions::new(5, rows as u32, 1.05).take(TRACE * rows as usize).collect();
        for full in &FULLNESS {
            if wanted(full.rate) || wanted(full.amplification) {
                for row in measure(scale, full, rows, &ranks) {
                    if wanted(row.name) {
                        row.print();
                    }
                }
            }
        }
    });
}

struct Writer<'a> {
    tier: SsdTier,
    engine: Arc<CountedEngine>,
    batch: TierRows,
    ranks: &'a [u32],
    at: usize,
}

impl Writer<'_> {
    fn write(&mut self) {
        let left = &self.ranks[self.at..];
        let count = APPEND_ROWS.min(left.len());
        self.batch.append(&self.tier, left[..count].iter().map(|&rank| scattered_id(u64::from(rank))), true);
        self.at = (self.at + count) % self.ranks.len();
    }

    /// Write for `time`. The result is the rate in rows a second, and the bytes handed to the engine for each byte of the rows
    /// given.
    fn write_for(&mut self, time: Duration) -> (f64, f64) {
        let (begin, written, given) = (Instant::now(), self.engine.written_bytes(), self.given());
        while begin.elapsed() < time {
            self.write();
        }
        let rows = (self.given() - given) / RECORD_BYTES as f64;
        let written = (self.engine.written_bytes() - written) as f64;
        (rows / begin.elapsed().as_secs_f64(), written / (rows * RECORD_BYTES as f64))
    }

    fn given(&self) -> f64 {
        self.tier.stats().row_bytes_given as f64
    }
}

fn measure(scale: Scale, full: &Fullness, rows: u64, ranks: &[u32]) -> [Row<'static>; 2] {
    // A small tier has less room in proportion, because of its segments and the note of its checkpoints.
    let cap = rows * RECORD_BYTES as u64 * 100 / full.percent + scale.pick(0, 1 << 20);
    let scratch = Scratch::new(cap + raw_write_bytes(scale) as u64).unwrap_or_else(|why| panic!("{why}"));
    let engine = CountedEngine::over(default_engine().expect("an engine"));
    let tier = new_tier(scratch.path(), &(engine.clone() as _), cap);
    let mut writer = Writer { tier, engine, batch: TierRows::default(), ranks, at: 0 };
    writer.batch.load(&writer.tier, rows);
    let (begin, written) = (Instant::now(), writer.engine.written_bytes());
    while writer.at < WARM * rows as usize {
        writer.write();
    }
    let warmed = Instant::now();
    let turnover = (writer.engine.written_bytes() - written) as f64 / cap as f64;
    let window = window(scale);
    let (mut rates, mut amplifications, mut limits) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..scale.pick(WINDOWS, 1) {
        settle(&writer.tier);
        limits.push(raw_write_rate(scratch.path(), scale));
        // Use up, before the clock starts, what compaction did ahead meanwhile.
        writer.write_for(window / 6);
        let (rate, amplification) = writer.write_for(window);
        rates.push(rate);
        amplifications.push(amplification);
    }
    assert_eq!(writer.tier.rows(), rows);
    let run: BTreeMap<&'static str, f64> = [
        ("live share of the cap", (rows * RECORD_BYTES as u64) as f64 / cap as f64),
        ("caps written before the first window", turnover),
        ("seconds before the first window", (warmed - begin).as_secs_f64()),
        ("amplification of the first window", amplifications[0]),
        ("amplification of the last window", amplifications[amplifications.len() - 1]),
        (
            "amplification counted in bytes of rows as in RAM",
            median(&amplifications) * RECORD_BYTES as f64 / ROW_BYTES as f64,
        ),
    ]
    .into();
    let limit = Some(Limit { what: RAW_WRITE, value: median(&limits) });
    [
        Row { limit, run: run.clone(), ..Row::new(full.rate, "rows/s", Better::Higher, rates) },
        Row { run, ..Row::new(full.amplification, "bytes/byte", Better::Lower, amplifications) },
    ]
}
