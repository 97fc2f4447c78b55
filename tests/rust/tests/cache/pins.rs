//! Pins that a plan takes together on rows that exist and on rows that are new or read: for any event during the plan,
//! the result equals separate pins of each row.

use std::path::PathBuf;
use std::sync::Arc;

use embcache::Kind;
use embcache::cache::PlanMode;
use embcache::config::{OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::{IoFault, IoOperation, MemoryEngine};
use embcache::types::Id;
use embcache_tests::{Rig, config};

/// More ids than are inserted into a tier in one call.
const MANY: Id = 10_000;

fn in_ram() -> Rig {
    Rig::open(config(4, OptimizerKind::RowWiseAdagrad, 100_000), Arc::new(MemoryEngine::default())).expect("a table")
}

fn on_ssd(host_rows: u64) -> TableConfig {
    let ssd =
        SsdConfig { dir: PathBuf::from("/base/t"), bytes: 64 << 20, reopen: ReopenMode::Never, resume_commit_id: None };
    TableConfig { ssd: Some(ssd), ..config(4, OptimizerKind::RowWiseAdagrad, host_rows) }
}

fn rows(rig: &Rig) -> u64 {
    rig.table.len().expect("an open table")
}

/// The number of rows pinned by plans, which converts the pins of groups to pins by slot; and the number of rows in
/// RAM.
fn pinned_and_here(rig: &Rig) -> (u64, u64) {
    let stats = rig.table.stats().expect("counters");
    (stats.pinned_rows, stats.host.rows)
}

fn ids(range: std::ops::Range<Id>) -> Vec<Id> {
    range.collect()
}

#[test]
fn dropped_plan_removes_its_new_rows_and_keeps_others() {
    for is_counted in [false, true] {
        let rig = in_ram();
        rig.train(&ids(0..100), 10, 0).expect("a step");
        for mode in [PlanMode::TRAIN, PlanMode::TRAIN_PREFETCH, PlanMode::EVALUATE] {
            let plan = rig.plan(&ids(50..MANY), mode).expect("a plan");
            if is_counted {
                assert_eq!(pinned_and_here(&rig), (MANY as u64 - 50, MANY as u64));
            }
            drop(plan);
            assert_eq!((rows(&rig), pinned_and_here(&rig)), (100, (0, 100)), "{mode:?}, counted: {is_counted}");
        }
    }
}

#[test]
fn new_rows_of_two_plans_stay_until_both_end() {
    for first_trains in [false, true] {
        for second_trains in [false, true] {
            let (rig, oracle) = (in_ram(), in_ram());
            let batches = [ids(0..300), ids(200..500)];
            let plans = batches.each_ref().map(|batch| rig.plan(batch, PlanMode::TRAIN).expect("a plan"));
            for ((plan, batch), trains) in plans.into_iter().zip(&batches).zip([first_trains, second_trains]) {
                if trains {
                    let out = rig.finish(&plan, batch.len(), 10, 1).expect("a step");
                    assert_eq!(out, oracle.train(batch, 10, 1).expect("the oracle's"));
                }
            }
            let what = format!("the first one trains: {first_trains}, the second one: {second_trains}");
            assert_eq!(rig.contents().expect("rows"), oracle.contents().expect("rows"), "{what}");
            assert_eq!(pinned_and_here(&rig), (0, rows(&oracle)), "{what}");
        }
    }
}

#[test]
fn ended_plan_leaves_pins_of_other_plans_on_its_rows() {
    let (rig, oracle) = (in_ram(), in_ram());
    let (first, second) = (ids(0..1000), ids(500..1500));
    let early = rig.plan(&first, PlanMode::TRAIN).expect("a plan");
    let late = rig.plan(&second, PlanMode::TRAIN_PREFETCH).expect("a plan ahead");
    rig.finish(&early, first.len(), 10, 1).expect("a step");
    drop(early);
    assert_eq!(pinned_and_here(&rig), (1000, 1500));
    rig.finish(&late, second.len(), 10, 2).expect("a step");
    oracle.train(&first, 10, 1).expect("the oracle's");
    oracle.train(&second, 10, 2).expect("the oracle's");
    assert_eq!(rig.contents().expect("rows"), oracle.contents().expect("rows"));
    assert_eq!(pinned_and_here(&rig), (0, 1500));
}

#[test]
fn nothing_that_a_plan_has_pinned_is_evicted_by_what_comes_after() {
    let rig = Rig::open(on_ssd(3000), Arc::new(MemoryEngine::default())).expect("a table");
    let oracle = in_ram();
    for (salt, first) in (0..6000).step_by(1000).enumerate() {
        rig.train(&ids(first..first + 1000), 10, salt as u32).expect("a step");
        oracle.train(&ids(first..first + 1000), 10, salt as u32).expect("the oracle's");
    }
    // Some rows are in RAM, some on SSD, and some are new. The next plans need space, and find it elsewhere.
    let held = ids(5500..6500).into_iter().chain(0..500).collect::<Vec<_>>();
    let plan = rig.plan(&held, PlanMode::TRAIN).expect("a plan");
    rig.place(&plan).expect("its rows");
    for (salt, first) in (1000..5000).step_by(1000).enumerate() {
        rig.train(&ids(first..first + 1000), 10, 10 + salt as u32).expect("a step");
        oracle.train(&ids(first..first + 1000), 10, 10 + salt as u32).expect("the oracle's");
    }
    let out = rig.finish(&plan, held.len(), 10, 20).expect("a step");
    assert_eq!(out, oracle.train(&held, 10, 20).expect("the oracle's"));
    assert_eq!(rig.contents().expect("rows"), oracle.contents().expect("rows"));
    assert_eq!(pinned_and_here(&rig).0, 0);
}

#[test]
fn error_during_insertion_leaves_no_row_and_no_pin() {
    // The rows to demote exceed the write buffers that wait for the disk, so the plan waits for a write.
    let mut wide = TableConfig { dim: 2048, ..on_ssd(0) };
    wide.ssd.as_mut().expect("an SSD tier").bytes = 512 << 20;
    let host_bytes = 10_000 * embcache::cache::host_row_bytes(&wide.layout(), wide.policy);
    let (rig, faults) = Rig::with_faults(TableConfig { host_bytes, ..wide });
    for first in (0..5000).step_by(500) {
        rig.train(&ids(first..first + 500), 10, 0).expect("a step");
    }
    let before = rig.contents().expect("rows");
    // The first rows of the batch find free slots. For others space has to be freed, which writes to the disk and
    // fails.
    faults.hit_every(IoOperation::Write, IoFault::Fail(libc::ENOSPC));
    let batch = ids(4900..4900 + MANY);
    let error = rig.plan(&batch, PlanMode::TRAIN).expect_err("no room on the disk");
    assert_eq!(error.kind(), Kind::ReadOnly, "{error}");
    assert_eq!(pinned_and_here(&rig).0, 0);
    assert_eq!(rig.contents().expect("rows"), before);
    rig.evaluate(&batch, 10, false).expect("what is read needs no room on the disk");
    assert_eq!((rows(&rig), pinned_and_here(&rig).0), (5000, 0));
}

/// Rows whose read fails are removed with their plan, also if it pinned them together with others.
#[test]
fn rows_of_failed_reads_are_removed_with_their_plan() {
    let (rig, faults) = Rig::with_faults(on_ssd(400));
    for first in (0..2000).step_by(200) {
        rig.train(&ids(first..first + 200), 10, 0).expect("a step");
    }
    rig.table.flush(1).expect("a flush, so that rows are in files");
    let before = rig.contents().expect("rows");
    faults.hit_once(IoOperation::Read, 0, IoFault::Fail(libc::EIO));
    // Some of these ids are in RAM, some on SSD, and some are new.
    let batch = ids(1900..2050).into_iter().chain(0..100).collect::<Vec<_>>();
    let plan = rig.plan(&batch, PlanMode::TRAIN).expect("the reads have only begun");
    assert_eq!(plan.wait(&mut []).expect_err("a read that fails").kind(), Kind::Storage);
    faults.clear();
    drop(plan);
    assert_eq!(rig.contents().expect("rows"), before);
    assert_eq!((rows(&rig), pinned_and_here(&rig).0), (2000, 0));
    rig.train(&batch, 10, 1).expect("the same batch again");
    assert_eq!((rows(&rig), pinned_and_here(&rig).0), (2050, 0));
}

#[test]
fn a_batch_that_several_threads_look_up_and_bear_is_trained_as_by_one() {
    let batches = [ids(0..2 * MANY), ids(MANY..4 * MANY), ids(0..4 * MANY)];
    let trained = |threads| {
        let rig = in_ram();
        for (salt, batch) in batches.iter().enumerate() {
            let plan = rig.plan(batch, PlanMode { threads, ..PlanMode::TRAIN }).expect("a plan");
            rig.finish(&plan, batch.len(), 10, salt as u32).expect("a step");
        }
        assert_eq!(pinned_and_here(&rig), (0, 4 * MANY as u64));
        rig.contents().expect("rows")
    };
    let alone = trained(1);
    for threads in [2, 5] {
        assert_eq!(trained(threads), alone, "{threads} threads");
    }
}
