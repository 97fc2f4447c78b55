//! Disk faults below the cache return typed errors in the step that hits them. Rows in RAM are not lost, and no pin is
//! left.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use embcache::Kind;
use embcache::cache::{PickedRows, PlanMode, RowColumns};
use embcache::config::{OnFull, OptimizerKind, TableConfig};
use embcache::io::{IoFault, IoOperation};
use embcache::rows::RowHeader;
use embcache::types::Id;
use embcache_tests::{Contents, Rig, config};

const DIM: usize = 16;

fn three_tiers(device_rows: Option<u32>, host_rows: u64, ssd_bytes: u64) -> TableConfig {
    embcache_tests::three_tiers(DIM, device_rows, host_rows, ssd_bytes)
}

fn contents(rig: &Rig) -> BTreeMap<Id, Vec<u32>> {
    let floats = rig.table.config().layout().vector_floats();
    let mut rows = BTreeMap::new();
    rig.table
        .for_each_chunk(100, &mut |chunk| {
            for (position, header) in chunk.headers.iter().enumerate() {
                let vector = chunk.vectors[position * floats..][..floats].iter().map(|value| value.to_bits()).collect();
                assert!(rows.insert(header.id, vector).is_none(), "a row twice");
            }
            Ok(())
        })
        .expect("every row can be read");
    rows
}

fn trained_oracle(batches: &[Vec<Id>]) -> BTreeMap<Id, Vec<u32>> {
    let (oracle, _) = Rig::with_faults(config(DIM, OptimizerKind::Adagrad, 100_000));
    for (salt, ids) in batches.iter().enumerate() {
        oracle.train(ids, 4, salt as u32).expect("the oracle trains");
    }
    contents(&oracle)
}

fn batches(count: i64, rows: i64) -> Vec<Vec<Id>> {
    (0..count).map(|batch| (0..rows).map(|row| batch * rows / 2 + row).collect()).collect()
}

fn a_read_error_is_raised_by_its_batch_and_the_rows_can_be_read_again(device_rows: Option<u32>) {
    let (rig, faults) = Rig::with_faults(three_tiers(device_rows, 60, 1 << 22));
    let done = batches(20, 50);
    for (salt, ids) in done.iter().enumerate() {
        rig.train(ids, 4, salt as u32).expect("a step");
    }
    rig.table.flush(1).expect("a flush, so that rows are read from disk and not from buffers");
    faults.hit_every(IoOperation::Read, IoFault::Fail(libc::EIO));
    let error = rig.train(&done[0], 4, 99).expect_err("its rows cannot be read");
    assert_eq!(error.kind(), Kind::Storage, "{error}");
    assert_eq!(rig.table.stats().expect("counters").pinned_rows, 0);

    faults.clear();
    assert_eq!(contents(&rig), trained_oracle(&done));
    let again: Vec<Vec<Id>> = done.iter().cloned().chain([done[0].clone()]).collect();
    rig.train(&done[0], 4, 20).expect("the same batch, once the disk answers");
    assert_eq!(contents(&rig), trained_oracle(&again));
}

#[test]
fn read_error_fails_its_batch_and_retry_works_in_place() {
    a_read_error_is_raised_by_its_batch_and_the_rows_can_be_read_again(None);
}

#[test]
fn read_error_fails_its_batch_and_retry_works_with_device_tier() {
    a_read_error_is_raised_by_its_batch_and_the_rows_can_be_read_again(Some(30));
}

/// A plan initializes rows on a second thread while its own thread frees space for the next rows.
#[test]
fn plan_without_space_leaves_no_row() {
    let (before, new): (Vec<Id>, Vec<Id>) = ((0..12_000).collect(), (100_000..112_000).collect());
    let mode = PlanMode { threads: 2, ..PlanMode::TRAIN };
    let train = |rig: &Rig| {
        for (salt, ids) in before.chunks(4000).enumerate() {
            rig.train(ids, 4, salt as u32).expect("a step");
        }
    };
    let (oracle, _) = Rig::with_faults(config(DIM, OptimizerKind::Adagrad, 100_000));
    train(&oracle);
    let (old_rows, born) =
        (contents(&oracle), oracle.evaluate(&new, 4, false).expect("what the new rows are born with"));
    oracle.train(&new, 4, 9).expect("a step");
    let all_rows = contents(&oracle);
    let mut failed_after_births = 0;
    for passing in 0..8 {
        let (rig, faults) = Rig::with_faults(three_tiers(None, 12_500, 16 << 20));
        train(&rig);
        let misses = || rig.table.stats().expect("counters").host.misses;
        let missed = misses();
        faults.hit_once(IoOperation::Create, passing, IoFault::Fail(libc::ENOSPC));
        let planned = rig.plan(&new, mode);
        faults.clear();
        if let Ok(plan) = planned {
            rig.finish(&plan, new.len(), 4, 9).expect("a step");
            assert_eq!(contents(&rig), all_rows, "{passing}");
            continue;
        }
        failed_after_births += u32::from(misses() > missed);
        let stats = rig.table.stats().expect("counters");
        assert_eq!((stats.pinned_rows, stats.rows), (0, before.len() as u64), "{passing}");
        assert_eq!(contents(&rig), old_rows, "{passing}");
        // The table is read-only. Reads of the new ids return their initial values, even if the plan had started to
        // initialize them.
        assert_eq!(rig.evaluate(&new, 4, false).expect("an evaluation"), born, "{passing}");
        assert_eq!(rig.train(&new, 4, 9).expect_err("no room").kind(), Kind::ReadOnly);
    }
    assert!(failed_after_births > 0, "no plan failed after it had begun to bear rows");
}

/// The time that a plan waits for the SSD tier counts once for any number of reads.
#[test]
fn ssd_wait_time_of_plan_counts_once() {
    let (rig, faults) = Rig::with_faults(three_tiers(None, 12_000, 16 << 20));
    for first in (0..30_000).step_by(6000) {
        rig.train(&(first..first + 6000).collect::<Vec<Id>>(), 4, 1).expect("a step");
    }
    rig.table.flush(1).expect("a flush, so that rows are read from disk and not from buffers");
    let waited = || rig.table.stats().expect("counters").ssd.expect("an SSD tier").tier.time_ns;
    let before = waited();
    faults.hold(IoOperation::Read);
    let plan = rig.plan(&(0..10_000).collect::<Vec<Id>>(), PlanMode::TRAIN_PREFETCH).expect("a plan of several reads");
    let begun = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            faults.release();
        });
        plan.wait(&mut []).expect("its rows");
    });
    // The time for which the plan waits depends on when its thread runs.
    let (counted, most) = (u128::from(waited() - before), begun.elapsed().as_nanos());
    assert!((1..=most).contains(&counted), "{counted} ns in {most} ns");
}

#[test]
fn a_damaged_record_is_found_and_never_served() {
    let (rig, faults) = Rig::with_faults(three_tiers(None, 60, 1 << 22));
    let done = batches(20, 50);
    for (salt, ids) in done.iter().enumerate() {
        rig.train(ids, 4, salt as u32).expect("a step");
    }
    rig.table.flush(1).expect("a flush");
    faults.hit_every(IoOperation::Read, IoFault::Flip);
    let error = rig.evaluate(&done[0], 4, false).expect_err("every record has a flipped bit");
    assert_eq!(error.kind(), Kind::Corruption, "{error}");
    assert!(error.path().is_some(), "it names the file");
}

#[test]
fn failed_read_before_clear_leaves_rows_loaded_after() {
    let (rig, faults) = Rig::with_faults(three_tiers(None, 12_000, 16 << 20));
    for first in (0..30_000).step_by(6000) {
        rig.train(&(first..first + 6000).collect::<Vec<Id>>(), 4, 1).expect("a step");
    }
    rig.table.flush(1).expect("a flush, so that rows are read from disk and not from buffers");
    // Read rows that are only on SSD, in several batches of reads, all of which fail.
    faults.hit_every(IoOperation::Read, IoFault::Fail(libc::EIO));
    drop(
        rig.plan(&(0..10_000).collect::<Vec<Id>>(), PlanMode::TRAIN_PREFETCH).expect("a plan ahead, never waited for"),
    );
    rig.table.clear().expect("no batch is in flight");
    faults.clear();
    assert_eq!(rig.table.len().expect("a length"), 0);

    let ids: Vec<Id> = (1_000_000..1_011_000).collect();
    let zeros = vec![0_u32; ids.len()];
    let (steps, scores) = (vec![0_u64; ids.len()], vec![0.0; ids.len()]);
    let part = |salt: f32| -> Vec<f32> { (0..ids.len() * DIM).map(|at| (at / DIM) as f32 + salt).collect() };
    let (weights, sums) = (part(0.25), part(0.5));
    let columns = RowColumns {
        ids: &ids,
        last_steps: &steps,
        counts: &zeros,
        scores: &scores,
        scalars: None,
        modified_epochs: &zeros,
        parts: vec![&weights, &sums],
    };
    rig.table.import_columns(PickedRows::all(&columns)).expect("a load");
    // The next plan adopts reads that have completed.
    rig.evaluate(&ids[..10], 1, false).expect("rows that are there");
    let read = rig.table.read_rows(&ids).expect("rows that are there");
    assert_eq!(read.found.iter().filter(|found| !**found).count(), 0, "rows are gone");
    for (at, row) in read.vectors.chunks(2 * DIM).enumerate() {
        assert_eq!((row[0], row[DIM]), (at as f32 + 0.25, at as f32 + 0.5), "id {}", ids[at]);
    }
    assert_eq!(rig.table.len().expect("a length"), ids.len() as u64);
    assert_eq!(contents(&rig).len(), ids.len());
}

#[test]
fn a_read_that_failed_for_a_batch_that_is_gone_fails_nothing_else() {
    let (rig, faults) = Rig::with_faults(three_tiers(None, 60, 1 << 22));
    let done = batches(20, 50);
    for (salt, ids) in done.iter().enumerate() {
        rig.train(ids, 4, salt as u32).expect("a step");
    }
    rig.table.flush(1).expect("a flush, so that rows are read from disk and not from buffers");
    let fails = || {
        faults.hit_every(IoOperation::Read, IoFault::Fail(libc::EIO));
        let plan = rig.plan(&done[0][..40], PlanMode::TRAIN_PREFETCH).expect("a plan ahead, never waited for");
        assert!(!plan.reading().expect("no forked child")[0].is_empty());
        while !plan.is_ready().expect("no forked child") {
            std::thread::yield_now();
        }
        drop(plan);
        faults.clear();
    };
    // The table has not adopted the failed reads yet. Each of these calls does.
    fails();
    rig.table.flush(2).expect("a flush reads nothing");
    fails();
    assert!(rig.table.read_rows(&done[1]).expect("other rows").found.iter().all(|found| *found));
    fails();
    assert_eq!(contents(&rig), trained_oracle(&done));
    fails();
    assert_eq!(rig.table.remove_rows(&done[0]).expect("a removal"), 50);
}

#[test]
fn reads_of_a_plan_can_be_waited_for_before_its_rows_are_placed() {
    for device_rows in [None, Some(60)] {
        let (rig, faults) = Rig::with_faults(three_tiers(device_rows, 60, 1 << 22));
        let done = batches(20, 50);
        for (salt, ids) in done.iter().enumerate() {
            rig.train(ids, 4, salt as u32).expect("a step");
        }
        rig.table.flush(1).expect("a flush, so that rows are read from disk and not from buffers");
        let ahead = || rig.plan(&done[0][..40], PlanMode::TRAIN_PREFETCH).expect("a plan");
        let plan = ahead();
        assert!(!plan.reading().expect("no forked child")[0].is_empty());
        plan.wait_for_reads().expect("rows that are there");
        plan.wait_for_reads().expect("nothing is left to wait for");
        assert!(plan.is_ready().expect("no forked child") && !plan.is_placed().expect("no forked child"));
        rig.place(&plan).expect("rows in their slots");
        assert!(plan.is_placed().expect("no forked child"));
        plan.wait_for_reads().expect("nothing is left to wait for");
        rig.finish(&plan, 40, 4, 99).expect("a step");
        assert!(!plan.is_placed().expect("no forked child"), "its rows are given back");

        // Evict the rows from RAM again.
        for ids in &done[1..] {
            rig.evaluate(ids, 4, false).expect("rows that are there");
        }
        rig.table.flush(2).expect("a flush");
        faults.hit_every(IoOperation::Read, IoFault::Fail(libc::EIO));
        let plan = ahead();
        assert_eq!(plan.wait_for_reads().expect_err("the disk is gone").kind(), Kind::Storage);
        assert_eq!(rig.table.stats().expect("counters").pinned_rows, 0, "the plan is released");
        assert!(!plan.is_placed().expect("no forked child"));
        faults.clear();
        let plan = ahead();
        plan.wait_for_reads().expect("the disk is back");
        rig.place(&plan).expect("rows in their slots");
    }
}

fn after_a_failed_write_everything_can_still_be_read(device_rows: Option<u32>) {
    let (rig, faults) = Rig::with_faults(three_tiers(device_rows, 60, 1 << 24));
    // The same ids repeat, so only the disk runs out of space, however late it is written to.
    let all = batches(60, 50);
    let mut done = Vec::new();
    let mut failure = None;
    for (salt, ids) in all.iter().cycle().enumerate() {
        if salt == 30 {
            faults.hit_every(IoOperation::Write, IoFault::Fail(libc::ENOSPC));
        }
        match rig.train(ids, 4, salt as u32) {
            Ok(_) => done.push(ids.clone()),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    let error = failure.expect("the disk is full, so some step fails");
    assert!(matches!(error.kind(), Kind::Storage | Kind::ReadOnly), "{error:?}");
    assert_eq!(rig.table.stats().expect("counters").pinned_rows, 0);
    assert_eq!(contents(&rig), trained_oracle(&done), "the steps before are all there");
    if error.kind() == Kind::Storage {
        assert!(error.to_string().contains("saved elsewhere"), "{error}");
    }
    // Evaluations succeed too, with rows of every tier and with missing ids, also beyond the rows in RAM that cannot be
    // moved.
    let (oracle, _) = Rig::with_faults(config(DIM, OptimizerKind::Adagrad, 100_000));
    for (salt, ids) in done.iter().enumerate() {
        oracle.train(ids, 4, salt as u32).expect("the oracle trains");
    }
    for ids in done.iter().chain([&vec![-9; 4]]) {
        let read = rig.evaluate(ids, 4, false).expect("an evaluation writes nothing");
        assert_eq!(read, oracle.evaluate(ids, 4, false).expect("read"));
    }
    assert_eq!(contents(&rig), trained_oracle(&done), "reading changed nothing");
    assert_eq!(rig.table.stats().expect("counters").pinned_rows, 0);
    let error = rig.table.flush(1).expect_err("a flush needs the disk");
    assert_eq!(error.kind(), Kind::ReadOnly, "{error:?}");
    // The tier still fails after the disk has space again, because only a reopen verifies its contents.
    faults.clear();
    assert_eq!(rig.table.flush(2).expect_err("sticky").kind(), Kind::ReadOnly);
}

#[test]
fn after_a_failed_write_everything_can_still_be_read_in_place() {
    after_a_failed_write_everything_can_still_be_read(None);
}

#[test]
fn failed_write_leaves_rows_readable_with_device_tier() {
    after_a_failed_write_everything_can_still_be_read(Some(30));
}

#[test]
fn a_full_table_says_so_before_anything_is_lost() {
    for (device_rows, ssd) in [(None, false), (Some(20), false), (None, true), (Some(20), true)] {
        let mut wanted = three_tiers(device_rows, 64, 256 << 10);
        if !ssd {
            wanted.ssd = None;
        }
        let (rig, _) = Rig::with_faults(wanted);
        let mut done = Vec::new();
        let mut failure = None;
        for (salt, ids) in batches(400, 50).into_iter().enumerate() {
            match rig.train(&ids, 4, salt as u32) {
                Ok(_) => done.push(ids),
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        let error = failure.expect("the table is full at some step");
        assert_eq!(error.kind(), Kind::Capacity, "{error}");
        assert!(error.to_string().contains(if ssd { "ssd_bytes" } else { "host_bytes" }), "{error}");
        assert_eq!(contents(&rig), trained_oracle(&done));
        let known = done.last().expect("at least one step fits").clone();
        rig.train(&known, 4, 7).expect("rows that are there still train");
    }
}

#[test]
fn a_full_table_may_drop_rows_by_policy_and_counts_them() {
    for (device_rows, ssd) in [(None, false), (Some(20), false), (None, true), (Some(20), true)] {
        let mut wanted = three_tiers(device_rows, 64, 256 << 10);
        wanted.on_full = OnFull::Evict;
        if !ssd {
            wanted.ssd = None;
        }
        let (rig, _) = Rig::with_faults(wanted);
        let mut seen = 0;
        for (salt, ids) in batches(200, 40).into_iter().enumerate() {
            rig.train(&ids, 4, salt as u32).expect("a step");
            seen = ids.last().map_or(seen, |&last| last + 1);
        }
        let stats = rig.table.stats().expect("counters");
        assert!(stats.dropped_rows > 0);
        assert_eq!(stats.rows + stats.dropped_rows, seen as u64, "rows that came back after they were dropped: none");
        assert_eq!(contents(&rig).len() as u64, stats.rows);
    }
}

/// An import that does not fit changes nothing, for any number of rows.
#[test]
fn import_that_does_not_fit_changes_nothing() {
    // This is more rows than one import chunk, and the first chunk would fit.
    const ROWS: i64 = 9000;
    for (device_rows, ssd) in [(None, None), (Some(20), None), (None, Some(5 << 18)), (Some(20), Some(5 << 18))] {
        let mut wanted = three_tiers(device_rows, if ssd.is_some() { 300 } else { 6000 }, ssd.unwrap_or_default());
        if ssd.is_none() {
            wanted.ssd = None;
        }
        let (rig, _) = Rig::with_faults(wanted);
        rig.train(&(0..50).collect::<Vec<Id>>(), 4, 1).expect("a step");
        let before = contents(&rig);
        let floats = rig.table.config().layout().vector_floats();
        let made = |ids: std::ops::Range<Id>| -> Contents {
            ids.map(|id| (id, (RowHeader { id, ..RowHeader::default() }, vec![id as u32; floats]))).collect()
        };
        let error = rig.import(&made(20..ROWS)).expect_err("it does not fit");
        assert_eq!(error.kind(), Kind::Capacity, "{error}");
        assert_eq!(contents(&rig), before, "a part of it was taken");
        assert_eq!(rig.table.len().expect("counted"), 50);
        // Rows that fit are imported, over rows that exist.
        rig.import(&made(20..4500)).expect("it fits");
        assert_eq!(rig.table.len().expect("counted"), 4500);
        rig.import(&made(0..4500)).expect("all of them are there");
        assert_eq!(rig.table.len().expect("counted"), 4500);
    }
}
