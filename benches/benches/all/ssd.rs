//! Measures random fetches from the SSD tier of one table beside raw system calls. The two sides take turns batch by batch, and
//! other stores take theirs between rounds, which are of one batch too. This is because the speed of a virtual machine's disk
//! changes within seconds.
//!
//! `EMBCACHE_BENCH_SSD_ROWS` sets the number of rows (10M).

use std::time::{Duration, Instant};

use embcache::io::default_engine;
use embcache::rows::{RowAddress, RowHeader, RowMut};
use embcache::ssd::{SsdTier, StateCounters};
use embcache_benches::{
    BATCH_IDS, Bench, Better, DIM, Group, Ids, RAW_DEPTH, RECORD_BYTES, ROW_BYTES, RawRecords, Rounds, Scale, Scratch,
    StoreWork, TierRows, cpu_seconds, new_tier, scattered_id, setting, uniform_ranks,
};

/// Rounds, of one batch each.
const ROUNDS: usize = 20;

pub(crate) fn group() -> Group {
    let reads =
        "raw io_uring, O_DIRECT, depth 128, same read size, random offsets in the same files, sorted and merged";
    Group::Alone(vec![
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
    ])
}

struct Fetches {
    tier: SsdTier,
    rows: u64,
    /// The ids of all batches of the run.
    ids: Ids,
    /// The index of the next batch.
    next: usize,
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
    raw: RawRecords,
    /// The rate that raw reads reached in the last round.
    raw_rate: Option<f64>,
    cost: bool,
    _scratch: Scratch,
}

impl Fetches {
    fn make(scale: Scale, cost: bool) -> Box<dyn Rounds> {
        let rows = setting("EMBCACHE_BENCH_SSD_ROWS", scale.pick(10_000_000, 50_000));
        let bytes = rows * ROW_BYTES as u64 * 13 / 10 + scale.pick(0, 16 << 20);
        let scratch = Scratch::new(bytes).unwrap_or_else(|why| panic!("{why}"));
        let engine = default_engine().expect("an engine");
        let tier = new_tier(scratch.path(), &engine, bytes);
        TierRows::default().load(&tier, rows);
        tier.publish(Some(1), StateCounters::default(), Vec::new()).expect("a sync");
        let batch = scale.pick(BATCH_IDS, BATCH_IDS / 100);
        let ranks = uniform_ranks(4, ROUNDS * batch, rows);
        Box::new(Self {
            tier,
            rows,
            ids: Ids::from_ranks(&ranks, batch, scattered_id),
            next: 0,
            headers: vec![RowHeader::default(); batch],
            vectors: vec![0.0; batch * DIM],
            raw: RawRecords::over(&scratch.path().join("tier"), RECORD_BYTES, RAW_DEPTH),
            raw_rate: None,
            cost,
            _scratch: scratch,
        })
    }

    #[allow(unsafe_code)]
    fn fetch(&mut self, batch: usize) {
        let ids = &self.ids.values[batch * self.ids.batch..][..self.ids.batch];
        let targets = self.headers.iter_mut().zip(self.vectors.chunks_exact_mut(DIM));
        let wanted = ids.iter().zip(targets).map(|(id, (header, vector))| {
            // SAFETY: the buffers belong to this bench, and nobody looks at them before the fetch is done.
            (*id, unsafe { RowMut::new(RowAddress { header, vector: vector.as_mut_ptr() }) })
        });
        let missing = self.tier.fetch(wanted.collect()).wait().expect("rows on disk");
        assert!(missing.is_empty());
    }
}

impl Rounds for Fetches {
    fn ours(&mut self) -> f64 {
        let (mut spent, mut cpu) = (Duration::ZERO, 0.0);
        let rows = self.ids.batch as f64;
        // The two sides come first in turn.
        let first = self.next.is_multiple_of(2);
        for ours in [first, !first] {
            if ours {
                let (begin, before) = (Instant::now(), cpu_seconds());
                self.fetch(self.next);
                (spent, cpu) = (begin.elapsed(), cpu_seconds() - before);
            } else if !self.cost {
                let records = self.raw.draw(self.ids.batch);
                self.raw_rate = Some(rows / self.raw.read(&mut [records]).as_secs_f64());
            }
        }
        self.next = (self.next + 1) % ROUNDS;
        if self.cost { cpu * 1e6 / rows } else { rows / spent.as_secs_f64() }
    }

    fn limit(&mut self) -> Option<f64> {
        self.raw_rate
    }

    fn rounds(&self) -> usize {
        ROUNDS
    }

    fn data(&self) -> Option<(&Ids, u64)> {
        Some((&self.ids, self.rows))
    }

    fn store(&self) -> Option<StoreWork> {
        Some(StoreWork::Fetch { rows: self.rows, ram_bytes: self.rows * ROW_BYTES as u64 / 8 })
    }

    fn check(&mut self) {
        self.fetch(0);
        let wanted = &self.ids.values[..self.headers.len()];
        assert!(self.headers.iter().zip(wanted).all(|(header, id)| header.id == *id), "rows of other ids");
    }
}
