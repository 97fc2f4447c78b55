//! Measures a store of 100M rows in the SSD tier of one table: the resident bytes an id while it is loaded, the rates of appending
//! and fetching at 1M, 10M and 100M rows, and the time to reopen it. One store serves all of this, so the program prints rows and
//! does not run in rounds.
//!
//! `EMBCACHE_BENCH_BIG_ROWS` sets another number of rows.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use embcache::config::ReopenMode;
use embcache::io::default_engine;
use embcache::rows::{RowAddress, RowHeader, RowMut, RowRef};
use embcache::ssd::{SsdTier, StateCounters};
use embcache_benches::{
    Better, DIM, Group, ROW_BYTES, Row, Scale, Scratch, Wanted, cpu_seconds, die_with_parent, forget_cached, open_tier,
    resident, scattered_id, uniform_ranks,
};

const BATCH: usize = 16_384;
/// Fetches of a round, a batch each.
const BATCHES: usize = 10;
const ROUNDS: usize = 5;
/// Bytes of disk for each row: those of a row in RAM, and a margin for its entry in a footer and the headroom of the cap.
const BYTES_A_ROW: u64 = ROW_BYTES as u64 + 80;

const RAM: &str = "ram_bytes_per_ssd_id";
const REOPEN: &str = "reopen_100m_rows_seconds";
const FETCH: [&str; 3] = ["ssd_fetch_uniform_1m", "ssd_fetch_uniform_10m", "ssd_fetch_uniform_100m"];
/// Starts this program to open a store again.
const REOPENS: &str = "--reopen";
const APPEND: [&str; 3] = ["ssd_append_1m", "ssd_append_10m", "ssd_append_100m"];

/// The rows that one measurement gives. A plain `cargo bench` leaves them out, because they are too large.
pub(crate) fn group() -> Group {
    let names: Vec<&str> = [RAM, REOPEN].into_iter().chain(FETCH).chain(APPEND).collect();
    Group::large_rows(&names, measure)
}

/// Open a store again and print what that took, if this process was started for that; whether it was.
pub(crate) fn reopens() -> bool {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [flag, dir, rows] = &arguments[..] else { return false };
    if flag == REOPENS {
        reopen(Path::new(dir), rows.parse().expect("a number of rows"));
    }
    flag == REOPENS
}

fn open(dir: &Path, rows: u64, reopen: ReopenMode) -> SsdTier {
    open_tier(dir, &default_engine().expect("an engine"), cap_bytes(rows), reopen)
}

fn cap_bytes(rows: u64) -> u64 {
    rows * BYTES_A_ROW + (512 << 20)
}

/// Rows that are given to the tier and taken from it, always in the same memory. The first weight of a row is its rank.
struct Batch {
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
}

impl Batch {
    fn new() -> Self {
        Self { headers: vec![RowHeader::default(); BATCH], vectors: vec![1.0; BATCH * DIM] }
    }

    /// Append the rows of ranks `begin..end`.
    fn append(&mut self, tier: &SsdTier, begin: u64, end: u64) {
        let rows = self.headers.iter_mut().zip(self.vectors.chunks_exact_mut(DIM)).zip(begin..end);
        let rows: Vec<RowRef<'_>> = rows
            .map(|((header, vector), rank)| {
                header.id = scattered_id(rank);
                vector[0] = f32::from_bits(rank as u32);
                RowRef { header, vector }
            })
            .collect();
        tier.append(&rows, &vec![false; rows.len()]).expect("the tier has room");
    }

    /// Fetch the rows of `ranks`, a batch at most, and check that they are the right ones.
    #[allow(unsafe_code)]
    fn fetch(&mut self, tier: &SsdTier, ranks: &[u64]) {
        let targets = self.headers.iter_mut().zip(self.vectors.chunks_exact_mut(DIM));
        let wanted = ranks.iter().zip(targets).map(|(rank, (header, vector))| {
            // SAFETY: the buffers belong to this bench, and nobody looks at them before the fetch is done.
            let target = unsafe { RowMut::new(RowAddress { header, vector: vector.as_mut_ptr() }) };
            (scattered_id(*rank), target)
        });
        let missing = tier.fetch(wanted.collect()).wait().expect("rows on disk");
        assert!(missing.is_empty());
        let rows = self.headers.iter().zip(self.vectors.chunks_exact(DIM)).zip(ranks);
        for ((header, vector), rank) in rows {
            assert!(header.id == scattered_id(*rank) && vector[0].to_bits() == *rank as u32, "another row than {rank}");
        }
    }
}

/// Loads the store, and measures on the way.
struct Load {
    tier: SsdTier,
    batch: Batch,
    rows: u64,
    /// The rows and the resident bytes from which growth is counted.
    base: (u64, u64),
    /// The largest growth in resident bytes for each row of growth, from a tenth of the rows on, and the number of rows at which it
    /// occurred.
    worst: (f64, u64),
}

impl Load {
    /// Append rows until there are `to`. The result is the rate in rows a second.
    fn append(&mut self, to: u64, mut seen: impl FnMut(&mut Self)) -> f64 {
        let (begin, before) = (Instant::now(), self.rows);
        while self.rows < to {
            let end = to.min(self.rows + BATCH as u64);
            self.batch.append(&self.tier, self.rows, end);
            self.rows = end;
            seen(self);
        }
        (self.rows - before) as f64 / begin.elapsed().as_secs_f64()
    }

    /// Append rows until there are `size`, and note the worst growth of resident bytes from `from` rows on. The result is the rates in
    /// rows a second of the last tenth of the way, so that they are those of a store of about this size.
    fn grow_to(&mut self, size: u64, from: u64) -> Vec<f64> {
        let watch = |load: &mut Load| {
            if load.rows >= from && load.base.0 > 0 {
                let grown = resident().now.saturating_sub(load.base.1) as f64 / (load.rows - load.base.0) as f64;
                if grown > load.worst.0 {
                    load.worst = (grown, load.rows);
                }
            }
        };
        self.append(size - size / 10, watch);
        let part = |number: u64| size - size / 10 + size / 10 * number / ROUNDS as u64;
        let rates = (1..=ROUNDS as u64).map(|number| self.append(part(number), watch)).collect();
        self.append(size, watch);
        rates
    }

    /// Do rounds of fetches, uniform over all rows so far. The result is the rate of each round in rows a second, and CPU
    /// microseconds a row.
    fn fetch(&mut self, rounds: usize, batches: usize) -> (Vec<f64>, f64) {
        let count = batches * BATCH;
        let (mut rates, cpu) = (Vec::new(), cpu_seconds());
        for round in 0..rounds {
            let ranks = uniform_ranks(17 + round as u64, count, self.rows);
            let begin = Instant::now();
            ranks.chunks(BATCH).for_each(|ranks| self.batch.fetch(&self.tier, ranks));
            rates.push(count as f64 / begin.elapsed().as_secs_f64());
        }
        (rates, (cpu_seconds() - cpu) * 1e6 / (rounds * count) as f64)
    }
}

fn measure(scale: Scale, wanted: Wanted<'_>) {
    let setting = std::env::var("EMBCACHE_BENCH_BIG_ROWS").ok().and_then(|text| text.parse().ok());
    let rows: u64 = setting.unwrap_or(scale.pick(100_000_000, 60_000));
    // The cap covers the footers and the file system's share, and nothing is written past it.
    let scratch = Scratch::new(cap_bytes(rows) + (1 << 30)).unwrap_or_else(|why| {
        eprintln!("{why}");
        std::process::exit(1)
    });
    let tier = open(scratch.path(), rows, ReopenMode::Never);
    let mut load = Load { tier, batch: Batch::new(), rows: 0, base: (0, 0), worst: (0.0, 0) };
    let before = resident().now;
    let sizes = [rows / 100, rows / 10, rows];
    for (at, size) in sizes.into_iter().enumerate() {
        if at == 1 {
            // By now all is resident that every store takes whatever its size, such as the buffers of fetches. Buffers of rows on
            // their way to disk come next.
            let mut base = 0;
            load.append(size / 10 * 3, |_| base = base.max(resident().now));
            load.base = (load.rows, base);
        }
        let rates = load.grow_to(size, sizes[1]);
        let median = Row::new(APPEND[at], "rows/s", Better::Higher, rates.clone()).value;
        eprintln!("{size} rows: {median:.0} rows/s, {} MiB resident", resident().now >> 20);
        if wanted(APPEND[at]) {
            Row::new(APPEND[at], "rows/s", Better::Higher, rates).print();
        }
        if wanted(FETCH[at]) || at == 0 {
            let (rates, cpu) = load.fetch(scale.pick(ROUNDS, 1), scale.pick(BATCHES, 1));
            eprintln!("{size} rows: {:.0} fetched/s, {} MiB resident", rates[0], resident().now >> 20);
            if wanted(FETCH[at]) {
                let mut row = Row::new(FETCH[at], "rows/s", Better::Higher, rates);
                row.run.insert("cpu_us_per_row", cpu);
                row.print();
            }
        }
    }
    if wanted(RAM) {
        print_ram(&load, before);
    }
    if wanted(REOPEN) {
        let begin = Instant::now();
        load.tier.publish(Some(1), StateCounters::default(), Vec::new()).expect("a sync");
        let publish = begin.elapsed().as_secs_f64();
        load.tier.close().expect("all is written");
        drop(load);
        reopened(scratch.path(), rows, publish, scale.pick(ROUNDS, 1));
    }
}

/// Print the row of resident bytes for each id. `before` were resident before the load.
fn print_ram(load: &Load, before: u64) {
    let mut row = Row::new(RAM, "bytes", Better::Lower, vec![load.worst.0]);
    row.run.extend([
        ("worst_at_rows", load.worst.1 as f64),
        ("resident_bytes", resident().now as f64),
        ("peak_resident_bytes", resident().peak as f64),
        ("resident_bytes_before", before as f64),
        ("index_bytes_per_id", load.tier.stats().index_bytes as f64 / load.rows as f64),
    ]);
    row.print();
}

/// Print the row of reopening. Each round is a process of its own.
fn reopened(dir: &Path, rows: u64, publish_seconds: f64, rounds: usize) {
    let this = std::env::current_exe().expect("the program's own path");
    let (mut seconds, mut peak) = (Vec::new(), 0.0_f64);
    for _ in 0..rounds {
        let child = Command::new(&this).arg(REOPENS).arg(dir).arg(rows.to_string()).output().expect("it starts");
        let text = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success(), "reopening failed: {}", String::from_utf8_lossy(&child.stderr));
        let figures: Vec<f64> = text.split_whitespace().map(|word| word.parse().expect("a number")).collect();
        seconds.push(figures[0]);
        peak = peak.max(figures[1]);
    }
    let mut row = Row::new(REOPEN, "s", Better::Lower, seconds);
    row.run.extend([("peak_resident_bytes", peak), ("publish_seconds", publish_seconds)]);
    row.print();
}

/// Open the store and fetch a batch. Prints the seconds, and the process's peak of resident bytes.
fn reopen(dir: &Path, rows: u64) {
    die_with_parent();
    for entry in std::fs::read_dir(dir.join("tier")).expect("the store").flatten() {
        forget_cached(&File::open(entry.path()).expect("a file of the store"));
    }
    let mut batch = Batch::new();
    let ranks = uniform_ranks(23, BATCH, rows);
    let begin = Instant::now();
    let tier = open(dir, rows, ReopenMode::Resume);
    batch.fetch(&tier, &ranks);
    let seconds = begin.elapsed().as_secs_f64();
    assert_eq!(tier.rows(), rows);
    println!("{seconds} {}", resident().peak);
}
