//! Rows that are evicted because a table is full, and the effect of errors on the delivery of evicted rows.
//! `eviction` tests the rows that expire by a rule.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use embcache::Kind;
use embcache::cache::{EvictedQueue, EvictedRows};
use embcache::config::{EvictionConfig, EvictionRule, OnFull, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::{IoFault, IoOperation};
use embcache::types::Id;
use embcache_tests::dice::Dice;
use embcache_tests::{Contents, Rig, config};

const DIM: usize = 4;
const BAG: usize = 5;

/// Tables of several hundred rows: in RAM, on SSD with some rows in RAM, and on the device with others in RAM.
fn small(tiers: usize, eviction: Option<EvictionConfig>) -> TableConfig {
    let ssd = SsdConfig { dir: "/t".into(), bytes: 128 << 10, reopen: ReopenMode::Never, resume_commit_id: None };
    let made = match tiers {
        0 => config(DIM, OptimizerKind::RowWiseAdagrad, 300),
        1 => TableConfig { ssd: Some(ssd), ..config(DIM, OptimizerKind::RowWiseAdagrad, 150) },
        2 => TableConfig { device_rows: Some(60), ..config(DIM, OptimizerKind::RowWiseAdagrad, 200) },
        _ => TableConfig { device_rows: Some(60), ssd: Some(ssd), ..config(DIM, OptimizerKind::RowWiseAdagrad, 150) },
    };
    TableConfig { on_full: OnFull::Evict, eviction, ..made }
}

/// The contents of a queue: each row with the step and the reason of its eviction.
fn taken(queue: &EvictedQueue) -> Vec<(u64, &'static str, Id, String, Vec<u32>)> {
    let mut all = Vec::new();
    while let Some(EvictedRows { step, reason, rows }) = queue.take() {
        for (header, vector) in rows.headers.iter().zip(rows.vectors.chunks(queue.floats())) {
            let bits = vector.iter().map(|value| value.to_bits()).collect();
            all.push((step, reason, header.id, format!("{header:?}"), bits));
        }
    }
    all.sort();
    all
}

#[test]
fn rows_evicted_from_full_table_are_reported_once() {
    let rule = || EvictionConfig { rule: EvictionRule::Unused { steps: 12 }, every_steps: NonZeroU64::new(5) };
    for tiers in 0..4 {
        for eviction in [None, Some(rule())] {
            let (rig, _) = Rig::with_faults(small(tiers, eviction));
            let queue = rig.table.start_evicted_queue().expect("a queue");
            let mut dice = Dice(tiers as u64 + 7);
            let (mut before, mut full) = (Contents::new(), 0);
            for salt in 0..90 {
                let ids: Vec<Id> = (0..60).map(|_| dice.roll(4000) as Id).collect();
                rig.train(&ids, BAG, salt).expect("a step");
                let now = rig.contents().expect("contents");
                let told = taken(&queue);
                let gone: BTreeMap<Id, (String, Vec<u32>)> = before
                    .iter()
                    .filter(|(id, _)| !now.contains_key(id))
                    .map(|(id, (header, bits))| (*id, (format!("{header:?}"), bits.clone())))
                    .collect();
                let said: BTreeMap<Id, (String, Vec<u32>)> =
                    told.iter().map(|(_, _, id, header, bits)| (*id, (header.clone(), bits.clone()))).collect();
                assert_eq!((told.len(), said == gone), (gone.len(), true), "tiers {tiers}, step {salt}");
                // A full table drops rows before the step, and a sweep expires them after it.
                let when = |reason| if reason == "full" { u64::from(salt) } else { u64::from(salt) + 1 };
                assert!(told.iter().all(|(step, reason, ..)| *step == when(*reason)), "tiers {tiers}, step {salt}");
                full += told.iter().filter(|(_, reason, ..)| *reason == "full").count() as u64;
                before = now;
            }
            let dropped = rig.table.stats().expect("stats").dropped_rows;
            assert!(full == dropped && dropped > 100, "tiers {tiers}: {full} of {dropped}");
        }
    }
}

#[test]
fn unreadable_row_stays_and_is_reported_later() {
    let eviction = EvictionConfig { rule: EvictionRule::Unused { steps: 1 }, every_steps: None };
    let on_device = TableConfig { ssd: None, ..small(2, Some(eviction.clone())) };
    let (rig, _) = Rig::with_faults(on_device);
    let queue = rig.table.start_evicted_queue().expect("a queue");
    rig.train(&[1, 2, 3], BAG, 0).expect("a step");
    rig.train(&[9], BAG, 0).expect("a step");
    rig.table.sweep().expect("a sweep");
    rig.amid_device_read(0, || Err(Kind::Storage.error("the device is busy")));
    rig.table.len().expect_err("the rows cannot be read");
    assert_eq!((queue.rows(), rig.table.stats().expect("stats").rows), (0, 4));
    assert_eq!(rig.table.len().expect("rows"), 1);
    assert_eq!(taken(&queue).iter().map(|row| row.2).collect::<Vec<Id>>(), [1, 2, 3]);

    let (rig, faults) = Rig::with_faults(TableConfig { host_bytes: 100 << 10, ..small(1, Some(eviction)) });
    let queue = rig.table.start_evicted_queue().expect("a queue");
    rig.train(&(0..400).collect::<Vec<Id>>(), BAG, 0).expect("a step");
    rig.table.flush_next().expect("a flush");
    rig.evaluate(&(10_000..11_000).collect::<Vec<Id>>(), BAG, false).expect("an evaluation");
    rig.train(&[-1], BAG, 0).expect("a step");
    rig.table.sweep().expect("a sweep");
    // Rows that are still in write buffers are read all the same, so a single failure might be tried again unnoticed.
    faults.hit_every(IoOperation::Read, IoFault::Fail(libc::EIO));
    let error = rig.table.len().expect_err("the rows cannot be read");
    assert_eq!(error.kind(), Kind::Storage, "{error}");
    faults.clear();
    assert_eq!(rig.table.len().expect("rows"), 1);
    let told: Vec<Id> = taken(&queue).iter().map(|row| row.2).collect();
    assert_eq!((told.len(), told.iter().collect::<std::collections::BTreeSet<_>>().len()), (400, 400));
}

#[test]
fn closed_table_reports_all_evicted_rows_after_disk_failure() {
    let eviction = EvictionConfig { rule: EvictionRule::NormBelow(1e9), every_steps: None };
    let (rig, faults) = Rig::with_faults(TableConfig { host_bytes: 100 << 10, ..small(1, Some(eviction)) });
    let queue = rig.table.start_evicted_queue().expect("a queue");
    rig.train(&(0..400).collect::<Vec<Id>>(), BAG, 0).expect("a step");
    rig.table.sweep().expect("a sweep");
    faults.hit_once(IoOperation::Sync, 0, IoFault::Fail(libc::EIO));
    rig.table.flush_next().expect_err("a failed sync");
    let _ = rig.table.close();
    let told: Vec<Id> = taken(&queue).iter().map(|row| row.2).collect();
    assert_eq!((told.len(), queue.is_ended()), (400, true));
    assert!(queue.wait().is_none());
}
