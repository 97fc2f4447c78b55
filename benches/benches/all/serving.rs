//! Measures look-ups in a checkpoint that is served, beside a plain loop over the same files and, where rows are not in memory, raw reads
//! of them. A request has 2,000 ids and is answered by one thread.
//!
//! `EMBCACHE_BENCH_SERVE_ROWS` sets the number of rows (10M).

use std::collections::BTreeMap;
use std::time::Instant;

use embcache::types::Id;
use embcache_benches::{
    Bench, Better, BufferedReads, DIM, Group, Ids, PlainServing, Publisher, REQUEST_IDS, Requests, Rounds, RowRun,
    Scale, Scratch, SplitMix64, StoreWork, forget_all_cached, quantile, scattered_id, scattered_slot, setting,
    zipf_ranks,
};

/// Rounds of a full run. With the requests of each they are more than 20,000 requests.
const WARM_ROUNDS: usize = 15;
const WARM_REQUESTS: usize = 1500;
const COLD_ROUNDS: usize = 7;
const COLD_REQUESTS: usize = 200;
/// Ids of a request whose rows are not in memory: 2%.
const COLD_IDS: usize = REQUEST_IDS / 50;
/// Rows of a region. Every other region is not in memory. The rows of every other page of such a region are used once each.
const REGION_ROWS: usize = 1024;
const PAGE_ROWS: usize = 16;

pub(crate) fn group() -> Group {
    Group::Alone(vec![
        Bench {
            name: "serve_lookup_warm_2000",
            unit: "rows/s",
            better: Better::Higher,
            limit: Some("plain loop over the same mapped files, open addressing with 16-byte entries, prefetch"),
            make: Warm::make,
        },
        Bench {
            name: "serve_lookup_cold_2pct",
            unit: "rows/s",
            better: Better::Higher,
            limit: Some(
                "raw buffered io_uring reads of the rows that are not in memory, and the plain loop for the rest meanwhile",
            ),
            make: Cold::make,
        },
    ])
}

/// Publish the rows of a full checkpoint with its index.
fn published(scale: Scale) -> (u64, Publisher, Scratch) {
    let rows = setting("EMBCACHE_BENCH_SERVE_ROWS", scale.pick(10_000_000, 50_000));
    let scratch = Scratch::new(Publisher::bytes(rows, 0)).unwrap_or_else(|why| panic!("{why}"));
    let mut publisher = Publisher::new(&scratch.path().join("published"), rows);
    publisher.publish(publisher.write_full());
    publisher.make_index();
    (rows, publisher, scratch)
}

/// Everything is in memory: it was preloaded.
struct Warm {
    ids: Ids,
    rows: u64,
    requests: Requests,
    plain: PlainServing,
    plain_out: Vec<f32>,
    plain_found: Vec<bool>,
    /// The seconds of each request so far, of ours and of the plain loop.
    seconds: Vec<f64>,
    plain_seconds: Vec<f64>,
    _scratch: Scratch,
}

impl Warm {
    fn make(scale: Scale) -> Box<dyn Rounds> {
        let (rows, publisher, scratch) = published(scale);
        // File pages that are already cached as small pages are not mapped as huge pages. Nothing else may read the files first.
        forget_all_cached(&publisher.files());
        let mut requests = Requests::preloaded(&publisher);
        let plain = PlainServing::open(&publisher.files());
        plain.bring_all_in();
        let all: Vec<Id> = (0..rows).map(scattered_id).collect();
        for ids in all.chunks(REQUEST_IDS) {
            requests.answer(ids);
        }
        let ranks = zipf_ranks(5, REQUEST_IDS * scale.pick(WARM_REQUESTS, 20), rows, 1.05);
        Box::new(Self {
            ids: Ids::from_ranks(&ranks, REQUEST_IDS, scattered_id),
            rows,
            requests,
            plain,
            plain_out: vec![0.0; REQUEST_IDS * DIM],
            plain_found: vec![false; REQUEST_IDS],
            seconds: Vec::new(),
            plain_seconds: Vec::new(),
            _scratch: scratch,
        })
    }
}

impl Rounds for Warm {
    fn ours(&mut self) -> f64 {
        let begin = Instant::now();
        for ids in self.ids.batches() {
            self.seconds.push(self.requests.answer(ids));
        }
        self.ids.values.len() as f64 / begin.elapsed().as_secs_f64()
    }

    fn limit(&mut self) -> Option<f64> {
        let begin = Instant::now();
        for ids in self.ids.batches() {
            let one = Instant::now();
            self.plain.lookup(ids, &mut self.plain_out, &mut self.plain_found);
            self.plain_seconds.push(one.elapsed().as_secs_f64());
        }
        Some(self.ids.values.len() as f64 / begin.elapsed().as_secs_f64())
    }

    fn rounds(&self) -> usize {
        WARM_ROUNDS
    }

    fn figures(&self) -> BTreeMap<&'static str, f64> {
        BTreeMap::from([
            ("p50_us", quantile(&self.seconds, 0.5) * 1e6),
            ("p99_us", quantile(&self.seconds, 0.99) * 1e6),
            ("requests", self.seconds.len() as f64),
            ("p50_us_of_the_limit", quantile(&self.plain_seconds, 0.5) * 1e6),
            ("p99_us_of_the_limit", quantile(&self.plain_seconds, 0.99) * 1e6),
        ])
    }

    fn data(&self) -> Option<(&Ids, u64)> {
        Some((&self.ids, self.rows))
    }

    fn store(&self) -> Option<StoreWork> {
        Some(StoreWork::Lookup { rows: self.rows })
    }

    fn check(&mut self) {
        for ids in self.ids.batches() {
            self.requests.check(ids);
            self.plain.lookup(ids, &mut self.plain_out, &mut self.plain_found);
            assert!(self.requests.out == self.plain_out && self.requests.found == self.plain_found, "the same rows");
        }
    }
}

/// Some rows are not in memory. Each of them is looked up once, by ours or by the limit, so that none has to leave memory again.
struct Cold {
    requests: Requests,
    plain: PlainServing,
    reads: BufferedReads,
    /// The ids of requests whose rows are in memory.
    warm: Vec<Id>,
    warm_ids: usize,
    /// The rows that are not in memory, from `next` on.
    away: Vec<RowRun>,
    next: usize,
    plain_out: Vec<f32>,
    plain_found: Vec<bool>,
    /// The share of the rows in each round that were not in memory.
    shares: Vec<f64>,
    _scratch: Scratch,
}

impl Cold {
    fn make(scale: Scale) -> Box<dyn Rounds> {
        let (_, publisher, scratch) = published(scale);
        forget_all_cached(&publisher.files());
        let plain = PlainServing::open(&publisher.files());
        let mut requests = Requests::open(&publisher);
        let (mut present, mut away): (Vec<Id>, Vec<RowRun>) = (Vec::new(), Vec::new());
        for (number, run) in plain.runs(REGION_ROWS).into_iter().enumerate() {
            if number % 2 == 0 {
                plain.bring_in(run);
                present.extend(plain.ids(run));
            } else {
                let rows = (PAGE_ROWS..REGION_ROWS - PAGE_ROWS).step_by(2 * PAGE_ROWS);
                away.extend(rows.map(|row| RowRun { first: run.first + row, rows: 1, ..run }));
            }
        }
        shuffle(&mut away);
        // Rows that lie side by side follow each other here, and so are answered fast.
        for ids in present.chunks(REQUEST_IDS) {
            requests.check(ids);
        }
        let count = present.len() as u64;
        let ranks = zipf_ranks(6, (REQUEST_IDS - COLD_IDS) * scale.pick(COLD_REQUESTS, 4), count, 1.05);
        let warm = ranks.iter().map(|rank| present[scattered_slot(*rank, count) as usize]).collect();
        Box::new(Self {
            reads: plain.reads(COLD_IDS.next_power_of_two() as u32),
            requests,
            plain,
            warm,
            warm_ids: REQUEST_IDS - COLD_IDS,
            away,
            next: 0,
            plain_out: vec![0.0; REQUEST_IDS * DIM],
            plain_found: vec![false; REQUEST_IDS],
            shares: Vec::new(),
            _scratch: scratch,
        })
    }

    /// The rows of a round that are not in memory: so many for each request.
    fn next_rows(&mut self) -> Vec<RowRun> {
        let end = self.next + self.warm.len() / self.warm_ids * COLD_IDS;
        let rows = self.away.get(self.next..end).expect("rows for each round").to_vec();
        self.next = end;
        let share = self.plain.not_cached(&rows) as f64 / rows.len() as f64;
        assert!(share > 0.95, "only {share} of the rows are out of memory");
        self.shares.push(share);
        rows
    }
}

fn shuffle<T>(values: &mut [T]) {
    let mut random = SplitMix64(12);
    for at in (1..values.len()).rev() {
        values.swap(at, random.next_below(at as u64 + 1) as usize);
    }
}

/// A request in which every so-many-th id is one of `cold`.
fn mixed(warm: &[Id], cold: &[Id]) -> Vec<Id> {
    let parts = warm.chunks(warm.len().div_ceil(cold.len()));
    parts.zip(cold).flat_map(|(part, id)| part.iter().chain([id])).copied().collect()
}

impl Rounds for Cold {
    fn ours(&mut self) -> f64 {
        let rows = self.next_rows();
        let cold: Vec<Id> = rows.iter().map(|row| self.plain.ids(*row)[0]).collect();
        let warm = self.warm.chunks_exact(self.warm_ids);
        let requests: Vec<Vec<Id>> =
            warm.zip(cold.chunks_exact(COLD_IDS)).map(|(warm, cold)| mixed(warm, cold)).collect();
        let begin = Instant::now();
        for ids in &requests {
            self.requests.answer(ids);
        }
        (requests.len() * REQUEST_IDS) as f64 / begin.elapsed().as_secs_f64()
    }

    fn limit(&mut self) -> Option<f64> {
        let rows = self.next_rows();
        let (out, cold_out) = self.plain_out.split_at_mut(self.warm_ids * DIM);
        let begin = Instant::now();
        for (warm, cold) in self.warm.chunks_exact(self.warm_ids).zip(rows.chunks_exact(COLD_IDS)) {
            self.plain.lookup_and_read(warm, (out, &mut self.plain_found), &mut self.reads, (cold, cold_out));
        }
        Some((rows.len() / COLD_IDS * REQUEST_IDS) as f64 / begin.elapsed().as_secs_f64())
    }

    fn rounds(&self) -> usize {
        COLD_ROUNDS
    }

    fn figures(&self) -> BTreeMap<&'static str, f64> {
        BTreeMap::from([
            ("cold_share_of_2pct", quantile(&self.shares, 0.5)),
            ("requests_a_round", (self.warm.len() / self.warm_ids) as f64),
        ])
    }
}
