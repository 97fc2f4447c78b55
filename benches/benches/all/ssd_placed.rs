//! Measures rows that a table reads from its SSD tier after its own policy has evicted them. So the table decides where they lie.
//!
//! The table has a RAM budget of an eighth of the store, and the store's cap is twice its rows. The rows are born by training. Then
//! the table trains on the trace until eviction is steady.
//!
//! A round goes on with the trace as a training does that plans one batch ahead: plan a batch, wait for the one before, commit
//! that. All of this is timed, and so is the compaction beside it. The rate counts distinct rows that were not in RAM.
//!
//! The limit is raw reads of as many records at random positions in the same files, in turns with ours. On neither side does a
//! batch wait for the last read of the one before.
//!
//! `EMBCACHE_BENCH_SSD_ROWS` sets the number of rows (10M), `EMBCACHE_BENCH_SSD_WARM` the number of batches before the first round
//! (120).

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use embcache::cache::{Lookup, Plan, PlanMode, Table, TableStats};
use embcache::config::{OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::default_engine;
use embcache::rows::InitializerSpec;
use embcache_benches::{
    BATCH_IDS, Bench, Better, DIM, Group, Ids, RAW_DEPTH, RECORD_BYTES, ROW_BYTES, RawRecords, Rounds, Scale, Scratch,
    SplitMix64, StoreWork, Zipf, scattered_id, scattered_slot, setting, table_config,
};

/// Batches of a turn. A round is a turn of each side.
const BATCHES: usize = 10;
const ROUNDS: usize = 14;
/// The misses of so many batches are noted for other stores.
const MISSED: usize = 20;
const EXPONENT: f64 = 1.05;
/// Ids of a group in the trace of sessions.
const GROUP: u64 = 16;
/// After so many draws, each with probability one half, all but an eighth of the ids have been present.
const DRAWS: u64 = 3;

pub(crate) fn group() -> Group {
    let limit =
        Some("raw io_uring, O_DIRECT, depth 256, same read size, random offsets in the same files, sorted and merged");
    let (unit, better) = ("rows/s", Better::Higher);
    Group::Alone(vec![
        Bench { name: "ssd_fetch_zipf105", unit, better, limit, make: |scale| Placed::make(scale, Trace::zipf) },
        Bench { name: "ssd_fetch_sessions", unit, better, limit, make: |scale| Placed::make(scale, Trace::sessions) },
    ])
}

/// Makes the ids of batches.
struct Trace {
    rows: u64,
    batch: usize,
    zipf: Zipf,
    random: SplitMix64,
    sessions: bool,
}

impl Trace {
    /// A trace whose ids are drawn one by one by Zipf's law.
    fn zipf(rows: u64, batch: usize) -> Self {
        Self { rows, batch, zipf: Zipf::new(rows, EXPONENT), random: SplitMix64(5), sessions: false }
    }

    /// A trace of sessions: groups of ids are drawn by Zipf's law, and each id of a drawn group is present with probability one
    /// half.
    fn sessions(rows: u64, batch: usize) -> Self {
        Self { rows, batch, zipf: Zipf::new(rows / GROUP, EXPONENT), random: SplitMix64(5), sessions: true }
    }

    /// Call `seen` with the ranks in the order in which the table first meets them, which has nothing to do with how often they
    /// will be drawn. In a trace of sessions each group is drawn until most of its ids have been present, and once more with all
    /// the others.
    fn history(&mut self, seen: &mut dyn FnMut(u64)) {
        if !self.sessions {
            (0..self.rows).for_each(|at| seen(scattered_slot(at, self.rows) as u64));
            return;
        }
        let groups = self.rows / GROUP;
        let mut unborn = vec![u16::MAX; groups as usize];
        for draw in 0..=DRAWS {
            for at in 0..groups {
                // Each draw goes through the groups in another order.
                let group = (0..=draw).fold(at, |at, _| scattered_slot(at, groups) as u64);
                let drawn = self.random.next_u64() as u16;
                let present = match (draw, unborn[group as usize]) {
                    (DRAWS, 0) => 0,
                    (DRAWS, left) => drawn | left,
                    _ => drawn,
                };
                unborn[group as usize] &= !present;
                (0..GROUP).filter(|member| present >> member & 1 == 1).for_each(|member| seen(group * GROUP + member));
            }
        }
    }

    fn batch(&mut self) -> Vec<i64> {
        let mut ids = Vec::with_capacity(self.batch);
        while ids.len() < self.batch {
            let rank = self.zipf.draw(&mut self.random);
            if self.sessions {
                let present = self.random.next_u64() as u16;
                let members = (0..GROUP).filter(|member| present >> member & 1 == 1);
                ids.extend(members.map(|member| scattered_id(rank * GROUP + member)));
            } else {
                ids.push(scattered_id(rank));
            }
        }
        ids.truncate(self.batch);
        ids
    }
}

fn config(rows: u64, dir: Option<&Path>, host_bytes: u64, ssd_bytes: u64) -> TableConfig {
    let initializer = InitializerSpec::Uniform { low: -1.0, high: 1.0 };
    let ssd = dir.map(|dir| SsdConfig {
        dir: dir.to_owned(),
        bytes: ssd_bytes,
        reopen: ReopenMode::Never,
        resume_commit_id: None,
    });
    TableConfig { initializer, seed: rows, host_bytes, ssd, ..table_config(OptimizerKind::RowWiseAdagrad, 0) }
}

struct Placed {
    table: Table,
    lookup: Lookup,
    trace: Trace,
    rows: u64,
    /// The number of rows that a batch read in the last turn.
    read: usize,
    /// The rate that raw reads reached in the last round.
    raw_rate: Option<f64>,
    /// The counters before the first round.
    begin: Option<TableStats>,
    batches: usize,
    /// Ids that batches before the first round read from SSD. They are for other stores, which keep no rows in RAM.
    missed: Ids,
    host_bytes: u64,
    scratch: Scratch,
}

impl Placed {
    fn make(scale: Scale, trace: fn(u64, usize) -> Trace) -> Box<dyn Rounds> {
        let rows = setting("EMBCACHE_BENCH_SSD_ROWS", scale.pick(10_000_000, 100_000));
        let store = rows * ROW_BYTES as u64;
        let (host_bytes, ssd_bytes) = (store / 8, store * 2 + scale.pick(0, 16 << 20));
        let scratch = Scratch::new(ssd_bytes).unwrap_or_else(|why| panic!("{why}"));
        let config = config(rows, Some(&scratch.path().join("tier")), host_bytes, ssd_bytes);
        let table = Table::open(config, None, default_engine().expect("an engine")).expect("a table");
        let lookup = Lookup::new(std::slice::from_ref(&table), &[0]).expect("one feature");
        let trace = trace(rows, scale.pick(BATCH_IDS, BATCH_IDS / 100));
        let missed = Ids { values: Vec::new(), batch: 0 };
        let mut this = Self {
            table,
            lookup,
            trace,
            rows,
            read: 0,
            raw_rate: None,
            begin: None,
            batches: 0,
            missed,
            host_bytes,
            scratch,
        };
        this.load();
        this.warm(setting("EMBCACHE_BENCH_SSD_WARM", scale.pick(120, 8)));
        Box::new(this)
    }

    /// Train until eviction is steady, and note the misses of the last batches.
    fn warm(&mut self, batches: u64) {
        let mut missed = Vec::new();
        for at in 0..batches {
            let ids = self.trace.batch();
            let plan = self.plan(&ids);
            if at + MISSED as u64 >= batches {
                missed.push(plan.reading().expect("no forked child").remove(0));
            }
            plan.wait(&mut []).expect("rows on disk");
            plan.commit().expect("a step");
        }
        self.missed.batch = missed.iter().map(Vec::len).min().unwrap_or(0);
        self.read = self.missed.batch;
        self.missed.values = missed.iter().flat_map(|ids| &ids[..self.missed.batch]).copied().collect();
    }

    fn load(&mut self) {
        let mut ids = Vec::with_capacity(self.trace.batch);
        let lookup = &self.lookup;
        let train = |ids: &mut Vec<i64>| {
            let plan = lookup.plan(ids, &[0, ids.len() as i64], PlanMode::TRAIN, &[]).expect("room for the rows");
            plan.wait(&mut []).expect("its rows");
            plan.commit().expect("a step");
            ids.clear();
        };
        let batch = self.trace.batch;
        self.trace.history(&mut |rank| {
            ids.push(scattered_id(rank));
            if ids.len() == batch {
                train(&mut ids);
            }
        });
        train(&mut ids);
        assert_eq!(self.table.len().expect("an open table"), self.rows);
    }

    fn plan(&self, ids: &[i64]) -> Plan {
        self.lookup.plan(ids, &[0, ids.len() as i64], PlanMode::TRAIN, &[]).expect("a plan")
    }

    /// Do a turn of ours. The result is the number of rows read from SSD, and the time of the whole turn.
    fn train(&mut self) -> (usize, Duration) {
        self.batches += BATCHES;
        let batches: Vec<Vec<i64>> = (0..BATCHES).map(|_| self.trace.batch()).collect();
        let ahead = |ids: &Vec<i64>| {
            self.lookup.plan(ids, &[0, ids.len() as i64], PlanMode::TRAIN_PREFETCH, &[]).expect("a plan")
        };
        let before = self.rows_read();
        let begin = Instant::now();
        let mut planned: Option<Plan> = None;
        for next in batches.iter().map(|ids| Some(ahead(ids))).chain([None]) {
            if let Some(plan) = std::mem::replace(&mut planned, next) {
                plan.wait(&mut []).expect("rows on disk");
                plan.commit().expect("a step");
            }
        }
        let took = begin.elapsed();
        let read = (self.rows_read() - before) as usize;
        self.read = read / BATCHES;
        (read, took)
    }

    /// Do a turn of the limit.
    fn read_raw(&self) -> Duration {
        // The files are opened anew, because compaction makes and removes files between turns. A table has two submissions in
        // flight.
        let mut raw = RawRecords::over(&self.scratch.path().join("tier"), RECORD_BYTES, 2 * RAW_DEPTH);
        let mut batches: Vec<_> = (0..BATCHES).map(|_| raw.draw(self.read)).collect();
        raw.read(&mut batches)
    }

    fn stats(&self) -> TableStats {
        self.table.stats().expect("an open table")
    }

    /// The number of rows that plans have read from SSD so far.
    fn rows_read(&self) -> u64 {
        self.stats().ssd.expect("an SSD tier").tier.hits
    }
}

impl Rounds for Placed {
    fn ours(&mut self) -> f64 {
        if self.begin.is_none() {
            self.begin = Some(self.stats());
        }
        let mut rate = 0.0;
        // The two sides come first in turn.
        let first = (self.batches / BATCHES).is_multiple_of(2);
        for ours in [first, !first] {
            if ours {
                let (rows, took) = self.train();
                rate = rows as f64 / took.as_secs_f64();
            } else {
                self.raw_rate = Some((BATCHES * self.read) as f64 / self.read_raw().as_secs_f64());
            }
        }
        rate
    }

    fn limit(&mut self) -> Option<f64> {
        self.raw_rate
    }

    fn rounds(&self) -> usize {
        ROUNDS
    }

    fn figures(&self) -> BTreeMap<&'static str, f64> {
        let (Some(begin), now) = (&self.begin, self.stats()) else { return BTreeMap::new() };
        let (Some(ssd_begin), Some(ssd)) = (&begin.ssd, &now.ssd) else { return BTreeMap::new() };
        let batches = self.batches as f64;
        let rows = (ssd.tier.hits - ssd_begin.tier.hits) as f64;
        BTreeMap::from([
            ("rows_a_batch", rows / batches),
            ("rows_a_read", rows / (ssd.reads - ssd_begin.reads) as f64),
            (
                "bytes_a_read",
                (ssd.tier.read_bytes - ssd_begin.tier.read_bytes) as f64 / (ssd.reads - ssd_begin.reads) as f64,
            ),
        ])
    }

    fn data(&self) -> Option<(&Ids, u64)> {
        Some((&self.missed, self.rows))
    }

    fn store(&self) -> Option<StoreWork> {
        Some(StoreWork::Fetch { rows: self.rows, ram_bytes: self.host_bytes })
    }

    /// Check that rows that are read have the same bits as rows that never left RAM.
    fn check(&mut self) {
        let ids = self.trace.batch();
        let rows = |lookup: &Lookup, train: bool| {
            let plan =
                lookup.plan(&ids, &[0, ids.len() as i64], PlanMode { train, ..PlanMode::TRAIN }, &[]).expect("a plan");
            plan.wait(&mut []).expect("rows on disk");
            let mut out = vec![0.0; ids.len() * DIM];
            plan.forward_sequence(&mut out, &mut [None], 1).expect("rows");
            out
        };
        let other = Table::open(config(self.rows, None, 256 << 20, 0), None, default_engine().expect("an engine"));
        let other = Lookup::new(&[other.expect("a table")], &[0]).expect("one feature");
        let before = self.rows_read();
        let ours = rows(&self.lookup, true);
        assert!(self.rows_read() > before, "nothing was read");
        assert!(ours == rows(&other, false), "rows differ from those of a table in RAM");
    }
}
