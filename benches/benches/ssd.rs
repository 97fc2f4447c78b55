//! The SSD tier of one table beside raw system calls: rows fetched at random, and dirty rows written back.
//!
//! `EMBCACHE_BENCH_SSD_ROWS` sets the rows of the fetch bench (10M), `EMBCACHE_BENCH_SSD_SECONDS` the length of a window of the
//! write-back bench (12).
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use embcache::config::{OptimizerKind, Reopen, SsdConfig};
use embcache::io::{IoEngine, default_engine};
use embcache::rows::{RowHeader, RowLayout, RowMut, RowRef};
use embcache::ssd::{Identity, SsdTier, StateCounters};
use embcache_benches::{
    BATCH_IDS, Bench, Better, Ids, RawRecords, Rounds, Scale, Scratch, SplitMix64, StoreWork, cpu_seconds, run,
    scattered_id, uniform_ranks, write_sequentially,
};

const DIM: usize = 64;
/// A record: 44 bytes of header, 64 floats, rowwise Adagrad's scalar.
const RECORD_BYTES: usize = 304;
/// A row as RAM holds it, which is what a log of rows would write at least.
const ROW_BYTES: usize = 288;
const DEPTH: usize = 128;
const BATCH: usize = 16_384;
/// Batches of a round of fetches, and rounds.
const BATCHES: usize = 4;
const ROUNDS: usize = 7;
const CHUNK: usize = 1 << 20;

fn main() {
    let reads =
        "raw io_uring, O_DIRECT, depth 128, same read size, random offsets in the same files, sorted and merged";
    run(&[
        Bench {
            name: "ssd_fetch_uniform",
            unit: "rows/s",
            better: Better::Higher,
            limit: Some(reads),
            make: |scale| Fetches::make(scale, false),
        },
        Bench {
            name: "ssd_fetch_cpu_us_per_row",
            unit: "us",
            better: Better::Lower,
            limit: None,
            make: |scale| Fetches::make(scale, true),
        },
        Bench {
            name: "ssd_writeback",
            unit: "rows/s",
            better: Better::Higher,
            limit: Some("raw sequential O_DIRECT of 1 MiB + fdatasync, 288 bytes a row"),
            make: WriteBack::make,
        },
    ]);
}

fn setting(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

fn directory() -> tempfile::TempDir {
    let target = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target");
    tempfile::tempdir_in(target).expect("the target directory is writable")
}

fn layout() -> RowLayout {
    OptimizerKind::RowWiseAdagrad.layout(DIM)
}

fn open(dir: &Path, engine: &Arc<dyn IoEngine>, bytes: u64) -> SsdTier {
    let config = SsdConfig { dir: dir.join("tier"), bytes, reopen: Reopen::Never, resume_token: None };
    let identity = Identity {
        table: "bench".into(),
        key: 1,
        dim: DIM as u64,
        optimizer: "rowwise_adagrad".into(),
        seed: 0,
        initializer: "Constant(0)".into(),
        total_num_buckets: 1,
        bucket_begin: 0,
        bucket_end: 1,
    };
    SsdTier::open(&config, &identity, layout(), engine.clone()).expect("a new tier").0
}

/// Rows to hand to the tier, with ids to be set.
struct Rows {
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
}

impl Rows {
    fn new(count: usize) -> Self {
        let mut random = SplitMix64(3);
        let vectors = (0..count * DIM).map(|_| random.next_f64() as f32).collect();
        Self { headers: vec![RowHeader::default(); count], vectors }
    }

    fn append(&mut self, tier: &SsdTier, ids: &[i64], known: bool) {
        for (header, &id) in self.headers.iter_mut().zip(ids) {
            header.id = id;
        }
        let rows: Vec<RowRef<'_>> = self.headers[..ids.len()]
            .iter()
            .zip(self.vectors.chunks_exact(DIM))
            .map(|(header, vector)| RowRef { header, vector })
            .collect();
        tier.append(&rows, &vec![known; ids.len()]).expect("the tier has room");
    }
}

fn load(tier: &SsdTier, rows: u64) {
    let mut batch = Rows::new(BATCH);
    let ids: Vec<i64> = (0..rows).map(scattered_id).collect();
    for ids in ids.chunks(BATCH) {
        batch.append(tier, ids, false);
    }
}

struct Fetches {
    tier: SsdTier,
    rows: u64,
    /// Every batch of the run.
    ids: Ids,
    /// Of the next batch.
    next: usize,
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
    raw: RawRecords,
    cost: bool,
    _scratch: Scratch,
}

impl Fetches {
    fn make(scale: Scale, cost: bool) -> Box<dyn Rounds> {
        let rows = setting("EMBCACHE_BENCH_SSD_ROWS", scale.pick(10_000_000, 50_000));
        let bytes = rows * RECORD_BYTES as u64 * 11 / 10 + (64 << 20);
        let scratch = Scratch::new(bytes).unwrap_or_else(|why| panic!("{why}"));
        let engine = default_engine().expect("an engine");
        let tier = open(scratch.path(), &engine, bytes);
        load(&tier, rows);
        tier.publish(1, StateCounters::default()).expect("a sync");
        let batch = scale.pick(BATCH_IDS, BATCH_IDS / 100);
        let ranks = uniform_ranks(4, ROUNDS * BATCHES * batch, rows);
        Box::new(Self {
            tier,
            rows,
            ids: Ids::from_ranks(&ranks, batch, scattered_id),
            next: 0,
            headers: vec![RowHeader::default(); batch],
            vectors: vec![0.0; batch * DIM],
            raw: RawRecords::over(&scratch.path().join("tier"), RECORD_BYTES, DEPTH),
            cost,
            _scratch: scratch,
        })
    }

    fn fetch(&mut self, batch: usize) {
        let ids = &self.ids.values[batch * self.ids.batch..][..self.ids.batch];
        let places = self.headers.iter_mut().zip(self.vectors.chunks_exact_mut(DIM));
        let wanted = ids
            .iter()
            .zip(places)
            .map(|(id, (header, vector))| (*id, RowMut { header, vector: vector.as_mut_ptr() }))
            .collect();
        let missing = self.tier.fetch(wanted).wait().expect("rows on disk");
        assert!(missing.is_empty());
    }
}

impl Rounds for Fetches {
    fn ours(&mut self) -> f64 {
        let (begin, cpu) = (Instant::now(), cpu_seconds());
        for _ in 0..BATCHES {
            self.fetch(self.next);
            self.next = (self.next + 1) % self.ids.batches().len();
        }
        let rows = (BATCHES * self.ids.batch) as f64;
        if self.cost { (cpu_seconds() - cpu) * 1e6 / rows } else { rows / begin.elapsed().as_secs_f64() }
    }

    fn limit(&mut self) -> Option<f64> {
        let mut spent = Duration::ZERO;
        for _ in 0..BATCHES {
            let mut places = self.raw.draw(self.ids.batch);
            let begin = Instant::now();
            self.raw.read(&mut places);
            spent += begin.elapsed();
        }
        Some((BATCHES * self.ids.batch) as f64 / spent.as_secs_f64())
    }

    fn rounds(&self) -> usize {
        ROUNDS
    }

    fn data(&self) -> Option<(&Ids, u64)> {
        Some((&self.ids, self.rows))
    }

    fn store(&self) -> Option<StoreWork> {
        Some(StoreWork::Fetch { rows: self.rows, ram_bytes: self.rows * RECORD_BYTES as u64 / 8 })
    }

    fn check(&mut self) {
        self.fetch(0);
        let wanted = &self.ids.values[..self.headers.len()];
        assert!(self.headers.iter().zip(wanted).all(|(header, id)| header.id == *id), "rows of other ids");
    }
}

struct WriteBack {
    tier: SsdTier,
    rows: u64,
    batch: Rows,
    random: SplitMix64,
    window: Duration,
    limit_bytes: usize,
    dir: tempfile::TempDir,
}

impl WriteBack {
    fn make(scale: Scale) -> Box<dyn Rounds> {
        let dir = directory();
        let engine = default_engine().expect("an engine");
        let rows: u64 = scale.pick(3_000_000, 20_000);
        // Live bytes at half the cap.
        let tier = open(dir.path(), &engine, rows * RECORD_BYTES as u64 * 2 + scale.pick(0, 4 << 20));
        load(&tier, rows);
        let window = match std::env::var("EMBCACHE_BENCH_SSD_SECONDS") {
            Ok(_) => Duration::from_secs(setting("EMBCACHE_BENCH_SSD_SECONDS", 12)),
            Err(_) => Duration::from_millis(scale.pick(12_000, 200)),
        };
        let mut this = Self {
            tier,
            rows,
            batch: Rows::new(BATCH),
            random: SplitMix64(11),
            window,
            limit_bytes: scale.pick(1 << 30, 16 << 20),
            dir,
        };
        // Until compaction keeps up with a cap that is full of dead records.
        for _ in 0..2 * rows / BATCH as u64 {
            this.write();
        }
        Box::new(this)
    }

    fn write(&mut self) {
        let ids: Vec<i64> = (0..BATCH).map(|_| scattered_id(self.random.next_below(self.rows))).collect();
        self.batch.append(&self.tier, &ids, true);
    }
}

impl Rounds for WriteBack {
    fn ours(&mut self) -> f64 {
        let begin = Instant::now();
        let mut rows = 0;
        while begin.elapsed() < self.window {
            self.write();
            rows += BATCH;
        }
        rows as f64 / begin.elapsed().as_secs_f64()
    }

    fn limit(&mut self) -> Option<f64> {
        let path = self.dir.path().join("raw");
        let begin = Instant::now();
        write_sequentially(&path, self.limit_bytes, CHUNK);
        let rate = self.limit_bytes as f64 / ROW_BYTES as f64 / begin.elapsed().as_secs_f64();
        std::fs::remove_file(&path).expect("our own file");
        Some(rate)
    }

    fn store(&self) -> Option<StoreWork> {
        let seconds = self.window.as_secs_f64();
        Some(StoreWork::Rewrite { rows: self.rows, ram_bytes: 256 << 20, batch: BATCH, seconds })
    }

    fn check(&mut self) {
        assert_eq!(self.tier.rows(), self.rows);
    }
}
