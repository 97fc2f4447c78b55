//! The real memory of a process under load stays within `host_bytes` and the constants of docs/configuration.md, and
//! does not grow over thousands of steps.
//!
//! Each case runs in its own process, so that only its own memory is measured.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use embcache::cache::{PlanMode, RowBlock, host_row_bytes};
use embcache::checkpoint::{CheckpointSave, RankWriter};
use embcache::config::{OnFull, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::default_engine;
use embcache::rows::RowHeader;
use embcache::types::{Id, hash_id};
use embcache_tests::{Rig, config, directory_in};

const CASE: &str = "EMBCACHE_TEST_MEMORY_CASE";
const MIB: u64 = 1 << 20;
/// Bytes that a table on SSD and its process use beyond `host_bytes`, as documented: write buffers, the engine's
/// buffers, threads, the first pages of the index, and footers of open segments.
const PROCESS_BYTES: u64 = 64 * MIB;
/// Bytes of a plan per distinct id, and per occurrence.
const PLAN_BYTES_PER_ID: u64 = 160;
const DIM: usize = 32;

/// The kilobytes that the kernel counts under `field`.
fn status(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap_or_else(|| panic!("no {field} in {status}"));
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Peak resident bytes of this process.
fn peak() -> u64 {
    status("VmHWM:") * 1024
}

fn resident() -> u64 {
    status("VmRSS:") * 1024
}

fn tiers(dir: &Path, host_bytes: u64, ssd_bytes: u64) -> TableConfig {
    let mut wanted = config(DIM, OptimizerKind::RowWiseAdagrad, 1);
    wanted.host_bytes = host_bytes;
    wanted.on_full = OnFull::Error;
    wanted.ssd =
        Some(SsdConfig { dir: dir.to_owned(), bytes: ssd_bytes, reopen: ReopenMode::Never, resume_commit_id: None });
    wanted
}

fn batch(step: u64, ids: u64, rows: u64) -> Vec<Id> {
    (0..ids).map(|at| (hash_id((step * ids + at) as Id) % rows) as Id).collect()
}

fn report(what: &str, limit: u64, start: u64) {
    let (peak, limit) = (peak().saturating_sub(start), limit);
    println!("{what}: {:.1} MiB of {:.1}", peak as f64 / MIB as f64, limit as f64 / MIB as f64);
    assert!(peak <= limit, "{what}: {peak} bytes more than at the start, {limit} are allowed");
}

/// Trains rows of several times the budget, three batches ahead, then flushes and saves.
fn train_and_save(dir: &Path) {
    let start = resident();
    let (host_bytes, rows, ids) = (12 * MIB, 330_000, 4096);
    let rig = Rig::open(tiers(&dir.join("t"), host_bytes, 88 * MIB), default_engine().unwrap()).unwrap();
    let mut ahead = std::collections::VecDeque::new();
    for step in 0..160 {
        let ids = batch(step, ids, rows);
        ahead.push_back((rig.plan(&ids, PlanMode::TRAIN_PREFETCH).unwrap(), ids));
        if ahead.len() > 3 {
            let (plan, ids) = ahead.pop_front().unwrap();
            rig.finish(&plan, ids.len(), 1, step as u32).unwrap();
        }
    }
    drop(ahead);
    let plans = 4 * ids * (PLAN_BYTES_PER_ID + DIM as u64 * 8);
    let stats = rig.table.stats().unwrap();
    println!("{stats:?}");
    assert!(stats.rows * host_row_bytes(&rig.table.config().layout(), rig.table.config().policy) > 4 * host_bytes);
    assert!(stats.ssd.as_ref().unwrap().compaction_bytes > 0 && stats.host.evictions > 0);
    report("training", host_bytes + PROCESS_BYTES + plans, start);
    rig.table.flush(1).unwrap();
    report("flushing", host_bytes + PROCESS_BYTES + plans, start);
    // Space for rows from SSD that are gathered to a group, and for six images of a group that are filled or being
    // written.
    let group = 2 * MIB;
    let engine = default_engine().unwrap();
    std::fs::create_dir(dir.join("saved")).unwrap();
    let directory = directory_in(&engine, dir.join("saved"));
    let save = CheckpointSave::begin(&directory, 1).unwrap();
    let mut writer = RankWriter::new(&directory, save.name(), 0, 1).unwrap().with_group_bytes(group as usize);
    assert_eq!(writer.write_rows_of("m", &rig.table, BTreeMap::new()).unwrap(), stats.rows);
    writer.finish().unwrap();
    let in_ram = 8 * host_bytes / host_row_bytes(&rig.table.config().layout(), rig.table.config().policy);
    report("saving", host_bytes + PROCESS_BYTES + plans + 7 * group + in_ram, start);
}

/// Puts rows on SSD until their index uses most of the budget, and rows in RAM are evicted for it.
fn index_growth(dir: &Path) {
    let start = resident();
    let host_bytes = 24 * MIB;
    let mut wanted = tiers(&dir.join("t"), host_bytes, 400 * MIB);
    wanted.dim = 1;
    wanted.optimizer = OptimizerKind::Sgd;
    let rig = Rig::open(wanted, default_engine().unwrap()).unwrap();
    let at_once = 50_000;
    for block in 0..36 {
        let headers: Vec<RowHeader> =
            (0..at_once).map(|at| RowHeader { id: block * at_once + at, ..RowHeader::default() }).collect();
        let vectors = vec![1.0; at_once as usize];
        rig.table.import_rows(RowBlock { headers: &headers, vectors: &vectors }).unwrap();
    }
    let stats = rig.table.stats().unwrap();
    println!("{stats:?}");
    assert!(stats.ssd.unwrap().index_bytes > 16 * MIB && stats.host.bytes <= host_bytes);
    report("importing", host_bytes + PROCESS_BYTES, start);
    assert!(
        resident().saturating_sub(start) < host_bytes + PROCESS_BYTES,
        "what the index took was given back by the arena"
    );
}

fn count(dir: &str) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// Runs thousands of small steps with evaluations, exports, flushes and dropped plans. Nothing may grow.
fn steps_leave_nothing(dir: &Path) {
    let rig = Rig::open(tiers(&dir.join("t"), MIB / 4, 2 * MIB), default_engine().unwrap()).unwrap();
    let mut token = 0;
    let mut run = |steps: std::ops::Range<u64>| {
        for step in steps {
            let ids = batch(step, 100, 5000);
            rig.train(&ids, 2, step as u32).unwrap();
            drop(rig.plan(&batch(step + 7, 100, 5000), PlanMode::TRAIN_PREFETCH).unwrap());
            rig.evaluate(&batch(step + 9, 50, 10_000), 2, true).unwrap();
            if step % 50 == 0 {
                token += 1;
                rig.table.flush(token).unwrap();
                let mut export = rig.table.export(100).unwrap();
                export.next().unwrap().unwrap();
            }
        }
    };
    run(0..1000);
    let before = (resident(), count("/proc/self/fd"), count("/proc/self/task"));
    run(1000..3000);
    let after = (resident(), count("/proc/self/fd"), count("/proc/self/task"));
    println!("resident, files, threads: {before:?}, then {after:?}");
    // The files are those of segments, whose number varies. A dropped export soon stops its thread.
    assert!(after.0 < before.0 + 4 * MIB, "{before:?} became {after:?}");
    assert!(after.1 < before.1 + 200 && after.2 < before.2 + 8, "{before:?} became {after:?}");
}

/// The other process of the tests below. Without the variable it does nothing.
#[test]
fn child() {
    let Some(case) = std::env::var_os(CASE) else { return };
    let dir = tempfile::Builder::new().prefix("memory-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    match case.to_str().unwrap() {
        "train" => train_and_save(dir.path()),
        "index" => index_growth(dir.path()),
        "steps" => steps_leave_nothing(dir.path()),
        other => panic!("no case {other}"),
    }
}

fn run(case: &str, engine: &str) {
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "memory::child", "--nocapture"])
        .env(CASE, case)
        .env("EMBCACHE_IO", engine)
        .output()
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{said}");
    print!("{said}");
}

/// The tables are several times the budget. Memory stays within the budget and the documented constants.
#[test]
fn training_and_saving_stay_within_documented_memory() {
    run("train", "");
    run("train", "pread");
}

#[test]
fn the_index_of_many_rows_on_ssd_takes_the_place_of_rows_in_ram() {
    run("index", "");
}

#[test]
fn thousands_of_steps_leave_no_memory_no_files_and_no_threads() {
    run("steps", "");
}
