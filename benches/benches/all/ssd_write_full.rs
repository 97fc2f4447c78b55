//! Measures rows that leave RAM under Zipf's law (exponent 1.05) and are written to the SSD tier of one table that is 65% or 80%
//! full, while compaction keeps up. The values are rows a second beside raw sequential writes, and the bytes handed to the files'
//! writes divided by the bytes of the rows given. In both a row counts as 288 bytes, as in RAM.
//!
//! `EMBCACHE_BENCH_SSD_SECONDS` sets the length of a window in seconds (12), `EMBCACHE_BENCH_SSD_ROWS` the number of rows (4M).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use embcache::ssd::SsdTier;
use embcache_benches::{
    APPEND_ROWS, Better, CountedEngine, Evictions, Group, Limit, PlainWriteBack, RAW_WRITE, RECORD_BYTES, ROW_BYTES,
    Row, Scale, TierRows, WrittenDisk, median, new_tier, raw_write_rate, scattered_id, setting, settle, window,
};

const WINDOWS: usize = 5;
/// The trace has so many rows for each row of the table. It also says how many of these the store is given before the first window.
const TRACE: usize = 8;
const WARM: usize = 4;

struct Fullness {
    percent: u64,
    rate: &'static str,
    /// The row of bytes written, on a real disk alone.
    amplification: Option<&'static str>,
}

impl Fullness {
    fn names(&self) -> impl Iterator<Item = &'static str> {
        [self.rate].into_iter().chain(self.amplification)
    }

    /// The limit's name.
    fn limit(&self) -> &'static str {
        if self.amplification.is_some() { RAW_WRITE } else { PlainWriteBack::WHAT }
    }
}

const FULLNESS: [Fullness; 3] = [
    Fullness {
        percent: 80,
        rate: "ssd_writeback_80pct_full",
        amplification: Some("ssd_write_amplification_80pct_full"),
    },
    Fullness {
        percent: 65,
        rate: "ssd_writeback_65pct_full",
        amplification: Some("ssd_write_amplification_65pct_full"),
    },
    Fullness { percent: 80, rate: "ssd_writeback_80pct_null_disk", amplification: None },
];

pub(crate) fn group() -> Group {
    let names: Vec<&str> = FULLNESS.iter().flat_map(Fullness::names).collect();
    Group::rows(&names, |scale, wanted| {
        let rows = setting("EMBCACHE_BENCH_SSD_ROWS", scale.pick(4_000_000, 40_000));
        let ranks: Vec<u32> = Evictions::new(5, rows as u32, 1.05).take(TRACE * rows as usize).collect();
        for full in &FULLNESS {
            if full.names().any(wanted) {
                for row in measure(scale, full, rows, &ranks) {
                    if wanted(row.name) {
                        row.print();
                    }
                }
            }
        }
    })
}

struct Writer<'a> {
    tier: SsdTier,
    engine: Arc<CountedEngine>,
    batch: TierRows,
    ranks: &'a [u32],
    at: usize,
    /// Rows given to the tier so far.
    given: u64,
}

impl<'a> Writer<'a> {
    fn next_ids(&mut self) -> impl ExactSizeIterator<Item = i64> + use<'a> {
        let left = &self.ranks[self.at..];
        let count = APPEND_ROWS.min(left.len());
        self.at = (self.at + count) % self.ranks.len();
        left[..count].iter().map(|&rank| scattered_id(u64::from(rank)))
    }

    fn write(&mut self) {
        let ids = self.next_ids();
        self.given += ids.len() as u64;
        self.batch.append(&self.tier, ids, true);
    }

    /// Write for `time`. The result is the rate in rows a second, and the bytes handed to the engine for each byte of the rows
    /// given.
    fn write_for(&mut self, time: Duration) -> (f64, f64) {
        let (begin, written, given) = (Instant::now(), self.engine.written_bytes(), self.given);
        while begin.elapsed() < time {
            self.write();
        }
        let rows = (self.given - given) as f64;
        let written = (self.engine.written_bytes() - written) as f64;
        (rows / begin.elapsed().as_secs_f64(), written / (rows * ROW_BYTES as f64))
    }
}

fn measure(scale: Scale, full: &Fullness, rows: u64, ranks: &[u32]) -> Vec<Row<'static>> {
    // A small tier has less room in proportion, because of its segments and the note of its checkpoints.
    let cap = rows * ROW_BYTES as u64 * 100 / full.percent + scale.pick(0, 1 << 20);
    let mut disk = if full.amplification.is_some() { WrittenDisk::real(scale, cap) } else { WrittenDisk::null(rows) };
    let (engine, folder) = disk.open();
    let engine = CountedEngine::over(engine);
    let tier = new_tier(&folder, &(engine.clone() as _), cap);
    let mut writer = Writer { tier, engine, batch: TierRows::default(), ranks, at: 0, given: 0 };
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
        limits.push(limit(&mut disk, scale, &mut writer));
        // Use up, before the clock starts, what compaction did ahead meanwhile.
        writer.write_for(window / 6);
        let (rate, amplification) = writer.write_for(window);
        rates.push(rate);
        amplifications.push(amplification);
    }
    assert_eq!(writer.tier.rows(), rows);
    let run: BTreeMap<&'static str, f64> = [
        ("live share of the cap, in bytes of rows", (rows * ROW_BYTES as u64) as f64 / cap as f64),
        ("live share of the cap, in bytes of records", (rows * RECORD_BYTES as u64) as f64 / cap as f64),
        ("caps written before the first window", turnover),
        ("seconds before the first window", (warmed - begin).as_secs_f64()),
        ("amplification of the first window", amplifications[0]),
        ("amplification of the last window", amplifications[amplifications.len() - 1]),
    ]
    .into();
    let limit = Some(Limit { what: full.limit(), value: median(&limits) });
    let rate = Row { limit, run: run.clone(), ..Row::new(full.rate, "rows/s", Better::Higher, rates) };
    let amplification = |name| Row { run, ..Row::new(name, "bytes/byte", Better::Lower, amplifications) };
    [rate].into_iter().chain(full.amplification.map(amplification)).collect()
}

/// Rows a second of the limit, which writes the rows that come next.
fn limit(disk: &mut WrittenDisk, scale: Scale, writer: &mut Writer<'_>) -> f64 {
    let plain = match disk {
        WrittenDisk::Real(scratch) => return raw_write_rate(scratch.path(), scale),
        WrittenDisk::Null(plain) => plain,
    };
    let (begin, time, mut rows) = (Instant::now(), window(scale) / 4, 0);
    while begin.elapsed() < time {
        let ids: Vec<i64> = writer.next_ids().collect();
        plain.write(&ids, &writer.batch.bytes()[..ids.len()]);
        rows += ids.len();
    }
    rows as f64 / begin.elapsed().as_secs_f64()
}
