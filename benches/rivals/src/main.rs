//! Stores with which the SSD tier and serving are compared, one in a process. Rounds are measured between those of ours and of the limit.
//!
//! 1. The driver starts `rivals --serve` and writes one line of JSON: [`Request`].
//! 2. The store loads; the program prints one line of JSON: `{"what": ...}`, or `{"missing": why}` where the machine does not have
//!    the store's library, and ends.
//! 3. For each line `run` the program runs a round and prints `{"value": rows a second, "cpu_us_per_row": user and system}`.
//! 4. The driver closes stdin; the program removes the store's files and ends.

mod flat;
mod library;
mod lmdb;
mod rocksdb;
mod rows;

use std::io::{BufRead as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use embcache_benches::{Scratch, SplitMix64, StoreWork, cpu_seconds, die_with_parent, scattered_id};
use serde::{Deserialize, Serialize};

use lmdb::Lmdb;
use rows::{VALUE_BYTES, WEIGHT_BYTES, value, weights};

/// The reason why a store cannot be measured here: the machine lacks its library.
type Missing = String;

/// The driver's request.
#[derive(Deserialize)]
struct Request {
    /// The store: `rocksdb`, `lmdb` or `mmap`.
    store: String,
    work: StoreWork,
    /// For `StoreWork::Fetch` and `StoreWork::Lookup`, a file of int64 ids in little-endian order.
    ids: Option<PathBuf>,
    /// The number of ids of a batch. A round of `StoreWork::Fetch` is one batch, and one of `StoreWork::Lookup` is all of them.
    batch: usize,
}

#[derive(Serialize)]
struct Answer {
    value: f64,
    cpu_us_per_row: f64,
}

/// A loaded store from which batches are fetched.
trait FetchStore {
    /// The store's name, its version, and the settings that matter.
    fn what(&self) -> String;
    /// Remove the store's files from the page cache.
    fn cool(&mut self);
    /// Write the value of each id to `out`, which is `[ids, VALUE_BYTES]`.
    fn fetch(&mut self, ids: &[i64], out: &mut [u8]);
}

/// A loaded store, all in RAM, in which one thread looks requests up.
trait LookupStore {
    fn what(&self) -> String;
    /// Write the weights of each id to `out`, which is `[ids, WEIGHT_BYTES]`.
    fn lookup(&mut self, ids: &[i64], out: &mut [u8]);
}

/// A loaded store in which rows are rewritten.
trait RewriteStore {
    fn what(&self) -> String;
    fn write(&mut self, ids: &[i64]);
    /// Wait until all that was written is where it stays.
    fn drain(&mut self);
}

type Round = Box<dyn FnMut() -> Answer>;

fn main() {
    if std::env::args().any(|argument| argument == "--list") {
        return;
    }
    die_with_parent();
    let mut lines = std::io::stdin().lock().lines();
    let mut next = || lines.next().map(|line| line.expect("the driver writes text"));
    let Some(request) = next() else { return };
    let request: Request = serde_json::from_str(&request).expect("a request as this program's documentation says");
    // A row takes at most 380 bytes in any of the stores.
    let scratch = Scratch::new(request.work.rows() * 380).unwrap_or_else(|why| panic!("{why}"));
    let mut out = std::io::stdout().lock();
    let (what, mut round) = match make(&request, scratch.path()) {
        Ok(made) => made,
        Err(missing) => {
            writeln!(out, "{}", serde_json::json!({ "missing": missing })).expect("the driver listens");
            return;
        }
    };
    writeln!(out, "{}", serde_json::json!({ "what": what })).expect("the driver listens");
    while let Some(line) = next() {
        assert_eq!(line, "run", "the driver asked for something else");
        writeln!(out, "{}", serde_json::json!(round())).expect("the driver listens");
    }
}

fn make(request: &Request, dir: &Path) -> Result<(String, Round), Missing> {
    match request.work {
        StoreWork::Fetch { rows, ram_bytes } => {
            let store: Box<dyn FetchStore> = match &request.store[..] {
                "rocksdb" => Box::new(rocksdb::Fetches::load(dir, rows, ram_bytes)?),
                "lmdb" => Box::new(lmdb::Fetches(Lmdb::load(dir, rows, value)?)),
                "mmap" => Box::new(flat::Flat::load(dir, rows)),
                other => panic!("no store named {other}"),
            };
            Ok((store.what(), fetch_rounds(store, ids_of(request), request.batch)))
        }
        StoreWork::Lookup { rows } => {
            let store: Box<dyn LookupStore> = match &request.store[..] {
                "rocksdb" => Box::new(rocksdb::Lookups::load(dir, rows)?),
                "lmdb" => Box::new(lmdb::Lookups::new(Lmdb::load(dir, rows, weights)?)),
                other => panic!("no store named {other} that rows are looked up in"),
            };
            Ok((store.what(), lookup_rounds(store, ids_of(request), request.batch)))
        }
        StoreWork::Rewrite { rows, ram_bytes, batch, seconds } => {
            let store: Box<dyn RewriteStore> = match &request.store[..] {
                "rocksdb" => Box::new(rocksdb::Rewrites::load(dir, rows, ram_bytes)?),
                other => panic!("no store named {other} that rows are rewritten in"),
            };
            Ok((store.what(), rewrite_rounds(store, rows, batch, Duration::from_secs_f64(seconds))))
        }
    }
}

fn ids_of(request: &Request) -> Vec<i64> {
    let path = request.ids.as_ref().expect("work that has ids");
    let bytes = std::fs::read(path).expect("the driver's file");
    bytes.chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().expect("eight bytes"))).collect()
}

fn lookup_rounds(mut store: Box<dyn LookupStore>, ids: Vec<i64>, batch: usize) -> Round {
    let mut out = vec![0; batch * WEIGHT_BYTES];
    // The first pass over all requests brings in what they need.
    for request in ids.chunks_exact(batch) {
        store.lookup(request, &mut out);
        let right = request.iter().zip(out.chunks_exact(WEIGHT_BYTES)).all(|(id, bytes)| bytes == weights(*id));
        assert!(right, "rows of other ids");
    }
    Box::new(move || {
        let (begin, cpu) = (Instant::now(), cpu_seconds());
        for request in ids.chunks_exact(batch) {
            store.lookup(request, &mut out);
        }
        let (seconds, cpu) = (begin.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        Answer { value: ids.len() as f64 / seconds, cpu_us_per_row: cpu * 1e6 / ids.len() as f64 }
    })
}

fn fetch_rounds(mut store: Box<dyn FetchStore>, ids: Vec<i64>, batch: usize) -> Round {
    let mut out = vec![0; batch * VALUE_BYTES];
    let mut fetch = move |ids: &[i64], check: bool| {
        store.cool();
        let (begin, cpu) = (Instant::now(), cpu_seconds());
        store.fetch(ids, &mut out);
        let took = (begin.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        let right = || ids.iter().zip(out.chunks_exact(VALUE_BYTES)).all(|(id, bytes)| bytes == value(*id));
        assert!(!check || right(), "values of other rows");
        took
    };
    fetch(&ids[..batch], true);
    let mut at = 0;
    Box::new(move || {
        let (seconds, cpu) = fetch(&ids[at..at + batch], false);
        at = if at + 2 * batch <= ids.len() { at + batch } else { 0 };
        Answer { value: batch as f64 / seconds, cpu_us_per_row: cpu * 1e6 / batch as f64 }
    })
}

fn rewrite_rounds(mut store: Box<dyn RewriteStore>, rows: u64, batch: usize, window: Duration) -> Round {
    let mut random = SplitMix64(11);
    Box::new(move || {
        let (begin, cpu) = (Instant::now(), cpu_seconds());
        let mut written = 0;
        while begin.elapsed() < window {
            let ids: Vec<i64> = (0..batch).map(|_| scattered_id(random.next_below(rows))).collect();
            store.write(&ids);
            written += batch;
        }
        store.drain();
        Answer {
            value: written as f64 / begin.elapsed().as_secs_f64(),
            cpu_us_per_row: (cpu_seconds() - cpu) * 1e6 / written as f64,
        }
    })
}
