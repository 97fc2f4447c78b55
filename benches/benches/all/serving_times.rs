//! Measures what a process that serves a checkpoint waits for: the index, the open, the slowest requests, and a delta that a trainer
//! publishes meanwhile. A request has 2,000 ids and is answered by one thread. One checkpoint serves all of this, so the program
//! prints rows.
//!
//! `EMBCACHE_BENCH_SERVE_ROWS` sets the number of rows (10M), of which a delta has a tenth.

use std::time::{Duration, Instant, SystemTime};

use embcache::types::Id;
use embcache_benches::{
    Better, DIM, Group, Ids, PlainServing, Publisher, REQUEST_IDS, Requests, Row, Scale, Scratch, cpu_seconds,
    forget_all_cached, median, quantile, read_through, scattered_id, setting, zipf_ranks,
};

const INDEX: &str = "serve_index_10m_seconds";
const OPEN: &str = "serve_open_10m_seconds";
const SPREAD: &str = "serve_lookup_warm_p99_over_p50";
const VISIBLE: &str = "serve_delta_1m_visible_seconds";
const DELTA_SPREAD: &str = "serve_delta_p99_over_before";

const ROUNDS: usize = 5;
/// Requests of a round of [`SPREAD`], and those that are measured before and after a delta.
const REQUESTS: usize = 5000;
/// A delta has one of so many rows.
const DELTA_SHARE: u64 = 10;
/// How often a server looks for a delta, as an application sets it. Where the time until a delta is seen is measured it is the usual
/// second. Where requests meanwhile are measured it is short, so that most of them are answered while the delta is read.
const USUAL_POLL: Duration = Duration::from_secs(1);
const SHORT_POLL: Duration = Duration::from_millis(100);

pub(crate) fn group() -> Group {
    Group::rows(&[INDEX, OPEN, SPREAD, VISIBLE, DELTA_SPREAD], |scale, wanted| {
        let mut served = Served::make(scale);
        served.measure_index(wanted(INDEX));
        if wanted(OPEN) {
            served.measure_open();
        }
        let has_delta = wanted(VISIBLE) || wanted(DELTA_SPREAD);
        if wanted(SPREAD) || has_delta {
            let mut requests = served.warm();
            if wanted(SPREAD) {
                served.measure_spread(&mut requests);
            }
            if has_delta {
                served.measure_deltas(&mut requests, wanted);
            }
        }
    })
}

struct Served {
    rows: u64,
    rounds: usize,
    publisher: Publisher,
    /// A pass of requests.
    ids: Ids,
    _scratch: Scratch,
}

impl Served {
    fn make(scale: Scale) -> Self {
        let rows = setting("EMBCACHE_BENCH_SERVE_ROWS", scale.pick(10_000_000, 50_000));
        let rounds = scale.pick(ROUNDS, 1);
        let deltas = 2 * rounds as u64 * rows / DELTA_SHARE;
        let scratch = Scratch::new(Publisher::bytes(rows, deltas)).unwrap_or_else(|why| panic!("{why}"));
        let mut publisher = Publisher::new(&scratch.path().join("published"), rows);
        publisher.publish(publisher.write_full());
        let ranks = zipf_ranks(7, REQUEST_IDS * scale.pick(REQUESTS, 50), rows, 1.05);
        let ids = Ids::from_ranks(&ranks, REQUEST_IDS, scattered_id);
        Self { rows, rounds, publisher, ids, _scratch: scratch }
    }

    /// Make the index, once or in rounds. Nothing of the checkpoint is in the page cache before.
    fn measure_index(&self, is_wanted: bool) {
        let (mut seconds, mut bytes) = (Vec::new(), 0);
        for _ in 0..if is_wanted { self.rounds } else { 1 } {
            let index = self.publisher.newest().join("serve.idx");
            if index.exists() {
                std::fs::remove_file(index).expect("our own file");
            }
            forget_all_cached(&self.publisher.newest());
            let begin = Instant::now();
            bytes = self.publisher.make_index().bytes;
            seconds.push(begin.elapsed().as_secs_f64());
        }
        if is_wanted {
            let mut row = Row::new(INDEX, "s", Better::Lower, seconds);
            row.run.insert("bytes_per_row", bytes as f64 / self.rows as f64);
            row.print();
        }
    }

    /// Open the checkpoint and answer the first request, with nothing in the page cache, and again with everything there.
    fn measure_open(&self) {
        let first = self.ids.batches().next().expect("a request");
        let open = || {
            let begin = Instant::now();
            let mut requests = Requests::open(&self.publisher);
            let opened = begin.elapsed().as_secs_f64();
            requests.answer(first);
            let answered = begin.elapsed().as_secs_f64();
            requests.check(first);
            (opened, answered)
        };
        let (mut cold, mut warm, mut opened) = (Vec::new(), Vec::new(), [Vec::new(), Vec::new()]);
        for _ in 0..self.rounds {
            forget_all_cached(&self.publisher.newest());
            let (alone, answered) = open();
            opened[0].push(alone);
            cold.push(answered);
            read_through(&self.publisher.newest());
            let (alone, answered) = open();
            opened[1].push(alone);
            warm.push(answered);
        }
        let mut row = Row::new(OPEN, "s", Better::Lower, cold);
        row.run.extend([
            ("seconds_in_page_cache", median(&warm)),
            ("open_alone_seconds", median(&opened[0])),
            ("open_alone_seconds_in_page_cache", median(&opened[1])),
        ]);
        row.print();
    }

    /// The checkpoint, opened, with every row in memory.
    fn warm(&self) -> Requests {
        read_through(&self.publisher.newest());
        let mut requests = Requests::open(&self.publisher);
        let all: Vec<Id> = (0..self.rows).map(scattered_id).collect();
        all.chunks(REQUEST_IDS).for_each(|ids| requests.check(ids));
        requests
    }

    /// The slowest requests, and those of the plain loop in the same minute, which say what the machine does to any loop.
    fn measure_spread(&self, requests: &mut Requests) {
        let plain = PlainServing::open(&self.publisher.files());
        plain.bring_all_in();
        let (mut out, mut found) = (vec![0.0; REQUEST_IDS * DIM], vec![false; REQUEST_IDS]);
        let (mut ratios, mut all, mut all_plain) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            let seconds: Vec<f64> = self.ids.batches().map(|ids| requests.answer(ids)).collect();
            ratios.push(quantile(&seconds, 0.99) / quantile(&seconds, 0.5));
            all.extend(seconds);
            all_plain.extend(self.ids.batches().map(|ids| {
                let begin = Instant::now();
                plain.lookup(ids, &mut out, &mut found);
                begin.elapsed().as_secs_f64()
            }));
        }
        let mut row = Row::new(SPREAD, "ratio", Better::Lower, ratios);
        row.run.extend([
            ("p50_us", quantile(&all, 0.5) * 1e6),
            ("p99_us", quantile(&all, 0.99) * 1e6),
            ("requests", all.len() as f64),
            ("ratio_of_a_plain_loop", quantile(&all_plain, 0.99) / quantile(&all_plain, 0.5)),
        ]);
        row.print();
    }

    /// Deltas of a tenth of the rows, which come while requests are answered: in each round of other rows, twice.
    fn measure_deltas(&mut self, requests: &mut Requests, wanted: &dyn Fn(&str) -> bool) {
        let mut deltas = Deltas::default();
        for round in 0..self.rounds as u64 {
            for (version, poll) in [(2 * round + 1, USUAL_POLL), (2 * round + 2, SHORT_POLL)] {
                deltas.add(self.delta(requests, round, version, poll), poll);
            }
        }
        deltas.print(wanted);
    }

    /// Publish a delta, and answer requests before, until one sees it, and after.
    fn delta(&mut self, requests: &mut Requests, tenth: u64, version: u64, poll: Duration) -> Delta {
        let of_tenth = |tenth: u64| (tenth..self.rows).step_by(DELTA_SHARE as usize).map(scattered_id);
        // The rows of the delta before are new files, which requests read from the disk once.
        let before: Vec<Id> = of_tenth(tenth).chain(of_tenth(tenth.saturating_sub(1))).collect();
        for ids in before.chunks(REQUEST_IDS) {
            requests.answer(ids);
        }
        let seen_by = scattered_id(tenth);
        let written = self.publisher.write_delta(version, of_tenth(tenth));
        let follower = requests.serving().follow(poll).expect("a thread");
        settle();
        let ids = &self.ids;
        let mut request = vec![0; REQUEST_IDS];
        let mut batches = (0..).map(|number| &ids.values[number * REQUEST_IDS % ids.values.len()..][..REQUEST_IDS]);
        let mut answer = |requests: &mut Requests| {
            request.copy_from_slice(batches.next().expect("they come again"));
            request[0] = seen_by;
            let seconds = requests.answer(&request);
            (seconds, requests.out[2].to_bits() == (version as f32).to_bits())
        };
        let count = ids.values.len() / REQUEST_IDS;
        let before: Vec<f64> = (0..count).map(|_| answer(requests).0).collect();
        let (mut during, mut seen_at) = (Vec::new(), None);
        let publisher = &mut self.publisher;
        std::thread::scope(|scope| {
            scope.spawn(|| publisher.publish(written));
            while seen_at.is_none() {
                let (seconds, is_seen) = answer(requests);
                during.push((SystemTime::now(), seconds));
                seen_at = is_seen.then(SystemTime::now);
            }
        });
        let after: Vec<f64> = (0..count).map(|_| answer(requests).0).collect();
        drop(follower);
        settle();
        let renamed = self.publisher.renamed();
        // The requests that ended before the rename are none of those meanwhile.
        let during = during.into_iter().filter(|(at, _)| *at >= renamed).map(|(_, seconds)| seconds).collect();
        let visible = seen_at.expect("it was seen").duration_since(renamed).expect("it was seen after that");
        Delta { visible: visible.as_secs_f64(), before, during, after }
    }
}

/// Seconds of the requests around one delta.
struct Delta {
    visible: f64,
    before: Vec<f64>,
    during: Vec<f64>,
    after: Vec<f64>,
}

#[derive(Default)]
struct Deltas {
    usual: Vec<Delta>,
    short: Vec<Delta>,
}

impl Deltas {
    fn add(&mut self, delta: Delta, poll: Duration) {
        eprintln!(
            "delta seen after {:.2} s ({poll:?}); p99 {:.0} us before, {:.0} meanwhile, {:.0} after",
            delta.visible,
            quantile(&delta.before, 0.99) * 1e6,
            quantile(&delta.during, 0.99) * 1e6,
            quantile(&delta.after, 0.99) * 1e6
        );
        if poll == USUAL_POLL { &mut self.usual } else { &mut self.short }.push(delta);
    }

    fn print(&self, wanted: &dyn Fn(&str) -> bool) {
        let visible = |deltas: &[Delta]| deltas.iter().map(|delta| delta.visible).collect::<Vec<f64>>();
        if wanted(VISIBLE) {
            let mut row = Row::new(VISIBLE, "s", Better::Lower, visible(&self.usual));
            row.run.extend([
                ("poll_seconds", USUAL_POLL.as_secs_f64()),
                ("seconds_polled_ten_times_a_second", median(&visible(&self.short))),
            ]);
            row.print();
        }
        if wanted(DELTA_SPREAD) {
            let ratio = |delta: &Delta| quantile(&delta.during, 0.99) / quantile(&delta.before, 0.99);
            let mut row = Row::new(DELTA_SPREAD, "ratio", Better::Lower, self.short.iter().map(ratio).collect());
            let all = |of: fn(&Delta) -> &[f64]| self.short.iter().flat_map(of).copied().collect::<Vec<f64>>();
            let (before, during, after) = (all(|one| &one.before), all(|one| &one.during), all(|one| &one.after));
            row.run.extend([
                ("p99_us_before", quantile(&before, 0.99) * 1e6),
                ("p99_us_meanwhile", quantile(&during, 0.99) * 1e6),
                ("p99_us_after", quantile(&after, 0.99) * 1e6),
                ("p50_us_before", quantile(&before, 0.5) * 1e6),
                ("p50_us_meanwhile", quantile(&during, 0.5) * 1e6),
                ("longest_us_meanwhile", quantile(&during, 1.0) * 1e6),
                ("requests_meanwhile", during.len() as f64),
            ]);
            row.print();
        }
    }
}

/// Wait until no other thread of this process works.
fn settle() {
    const PAUSE: Duration = Duration::from_millis(300);
    loop {
        let before = cpu_seconds();
        std::thread::sleep(PAUSE);
        if cpu_seconds() - before < PAUSE.as_secs_f64() / 20.0 {
            return;
        }
    }
}
