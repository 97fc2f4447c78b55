//! Full tables drop rows by policy, but no rows of the call that needs the space.

use std::path::PathBuf;
use std::sync::Arc;

use embcache::Kind;
use embcache::cache::{Lookup, Plan, PlanMode, RowBlock};
use embcache::config::{OnFull, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::MemoryEngine;
use embcache::rows::RowHeader;
use embcache::types::Id;
use embcache_tests::{Rig, config};

const DIM: usize = 4;

fn import(rig: &Rig, ids: std::ops::Range<Id>, version: f32) {
    let headers: Vec<RowHeader> = ids.clone().map(|id| RowHeader { id, ..RowHeader::default() }).collect();
    let vectors: Vec<f32> = ids.flat_map(|id| [id as f32 + version; DIM]).collect();
    rig.table.import_rows(RowBlock { headers: &headers, vectors: &vectors }).expect("an import");
}

/// Returns the ids of all rows, after a check that each row has the value of `version`.
fn ids_of(rig: &Rig, version: impl Fn(Id) -> f32) -> Vec<Id> {
    let mut ids = Vec::new();
    let sink = &mut |chunk: embcache::cache::RowChunk| {
        for (at, header) in chunk.headers.iter().enumerate() {
            assert_eq!(
                chunk.vectors[at * DIM..][..DIM],
                [header.id as f32 + version(header.id); DIM],
                "id {}",
                header.id
            );
            ids.push(header.id);
        }
        Ok(())
    };
    rig.table.for_each_chunk(10, sink).expect("every row");
    ids.sort_unstable();
    assert_eq!(ids.len() as u64, rig.table.len().expect("a length"));
    ids
}

/// An evaluation uses ids that the table does not have. Concurrently the full table is trained on ids that it has, and
/// then on a missing id of the evaluation.
fn missing_ids_of_an_evaluation_take_no_room(on_full: OnFull, device_rows: Option<u32>, ahead: bool) {
    let mut wanted = config(DIM, OptimizerKind::Sgd, 60);
    wanted.on_full = on_full;
    wanted.device_rows = device_rows;
    let rig = Rig::open(wanted, Arc::new(MemoryEngine::default())).expect("a table");
    import(&rig, 0..60, 0.0);
    assert_eq!(rig.table.len().expect("a length"), 60);
    let missing: Vec<Id> = (1000..1010).collect();
    let evaluation = rig.plan(&missing, PlanMode { is_prefetch: ahead, ..PlanMode::EVALUATE }).expect("a plan");
    if !ahead {
        rig.place(&evaluation).expect("its rows");
    }
    rig.train(&[1, 2, 3], 1, 0).expect("there is room for what is there");
    let stats = rig.table.stats().expect("counters");
    assert_eq!((stats.rows, stats.dropped_rows), (60, 0));
    // They use space as soon as they are trained.
    let born = rig.train(&[1000, 4], 1, 1);
    let stats = rig.table.stats().expect("counters");
    match on_full {
        OnFull::Evict => {
            born.expect("room was made");
            assert_eq!((stats.rows, stats.dropped_rows), (60, 1));
        }
        OnFull::Error => {
            assert_eq!(born.expect_err("the table is full").kind(), Kind::Capacity);
            assert_eq!((stats.rows, stats.dropped_rows), (60, 0));
        }
    }
    evaluation.release();
    // The plans have left nothing in the accounts: after the removal of one row, the table fits one row, and not two.
    rig.table.remove_rows(&[5]).expect("a removal");
    let room = 60 - rig.table.len().expect("a length");
    assert_eq!(room, 1);
    rig.train(&[2000], 1, 2).expect("there is room");
    assert_eq!(rig.table.stats().expect("counters").dropped_rows, stats.dropped_rows);
    if on_full == OnFull::Error {
        assert_eq!(rig.train(&[2001], 1, 3).expect_err("the table is full").kind(), Kind::Capacity);
    }
}

#[test]
fn missing_ids_that_an_evaluation_holds_take_no_room_of_a_full_table() {
    for on_full in [OnFull::Evict, OnFull::Error] {
        for device_rows in [None, Some(20)] {
            for ahead in [false, true] {
                missing_ids_of_an_evaluation_take_no_room(on_full, device_rows, ahead);
            }
        }
    }
}

/// A table that drops rows when it is full.
fn evicting(ssd: bool, device_rows: Option<u32>) -> Rig {
    let wanted = TableConfig {
        on_full: OnFull::Evict,
        device_rows,
        ssd: ssd.then(|| SsdConfig {
            dir: PathBuf::from("/base/m/t/0-of-1"),
            bytes: 96 << 10,
            reopen: ReopenMode::Never,
            resume_commit_id: None,
        }),
        ..config(DIM, OptimizerKind::Sgd, 60)
    };
    Rig::open(wanted, Arc::new(MemoryEngine::default())).expect("a table")
}

fn an_import_into_a_full_table_keeps_the_rows_that_it_overwrites(ssd: bool, device_rows: Option<u32>) {
    let rig = evicting(ssd, device_rows);
    import(&rig, 0..3000, 0.25);
    let first = ids_of(&rig, |_| 0.25);
    let most = first.len() as Id;
    assert!(most < 3000, "some had to go");
    if device_rows.is_some() {
        rig.evaluate(&first[..30], 1, false).expect("some rows on the device");
    }
    // These are the oldest rows that were kept, which would be dropped next, and some that were dropped.
    let (from, to) = (first[0] - 10, first[0] + 10);
    let there: Vec<Id> = first.iter().copied().filter(|id| (from..to).contains(id)).collect();
    assert!(!there.is_empty() && there.len() < 20);
    import(&rig, from..to, 0.5);
    let second = ids_of(&rig, |id| if (from..to).contains(&id) { 0.5 } else { 0.25 });
    assert!((from..to).all(|id| second.binary_search(&id).is_ok()), "{there:?} of {from}..{to} were there");
}

#[test]
fn import_into_full_ram_table_keeps_overwritten_rows() {
    an_import_into_a_full_table_keeps_the_rows_that_it_overwrites(false, None);
}

#[test]
fn import_into_full_device_table_keeps_overwritten_rows() {
    an_import_into_a_full_table_keeps_the_rows_that_it_overwrites(false, Some(40));
}

#[test]
fn import_into_full_ssd_table_keeps_overwritten_rows() {
    an_import_into_a_full_table_keeps_the_rows_that_it_overwrites(true, None);
}

#[test]
fn import_into_full_three_tier_table_keeps_overwritten_rows() {
    an_import_into_a_full_table_keeps_the_rows_that_it_overwrites(true, Some(40));
}

/// Full tables with each number of tiers that drop rows, and their number of rows.
fn full_tables() -> impl Iterator<Item = (Rig, Id)> {
    let tiers = [(false, None), (false, Some(40)), (true, None), (true, Some(40))];
    tiers.into_iter().map(|(ssd, device_rows)| {
        let rig = evicting(ssd, device_rows);
        import(&rig, 0..3000, 0.25);
        let most = rig.table.len().expect("a length") as Id;
        assert!((60..2000).contains(&most), "{most} rows are there");
        (rig, most)
    })
}

/// The state of a table, which a rejected batch must not change.
fn state_of(rig: &Rig) -> (Vec<Id>, u64) {
    (ids_of(rig, |_| 0.25), rig.table.stats().expect("counters").dropped_rows)
}

#[test]
fn batch_larger_than_table_is_rejected_and_evicts_no_row() {
    for (rig, most) in full_tables() {
        let before = state_of(&rig);
        let batch: Vec<Id> = (5000..5001 + most).collect();
        let refused = rig.train(&batch, 1, 0).expect_err("one row too many");
        assert_eq!(refused.kind(), Kind::Capacity, "{refused}");
        assert!(refused.to_string().contains("this batch and others in flight use"), "{refused}");
        assert_eq!(state_of(&rig), before);
        // With some ids of the table, one of which is in RAM.
        let known = before.0[..5].iter().chain(&before.0[before.0.len() - 5..]).copied();
        let batch: Vec<Id> = known.chain(5000..4991 + most).collect();
        assert_eq!(rig.train(&batch, 1, 0).expect_err("one row too many").kind(), Kind::Capacity);
        assert_eq!(state_of(&rig), before);
        rig.train(&batch[1..], 1, 0).expect("all others were dropped for it");
        assert_eq!(rig.table.len().expect("a length") as Id, most);
    }
}

/// A batch without space next to the batches in flight is rejected, and evicts no row.
#[test]
fn batch_without_space_is_rejected_and_evicts_no_row() {
    for (rig, most) in full_tables() {
        let before = state_of(&rig);
        let in_flight = rig.plan(&before.0[..40], PlanMode::TRAIN).expect("a plan");
        rig.place(&in_flight).expect("its rows");
        let batch: Vec<Id> = (5000..4961 + most).collect();
        assert_eq!(rig.train(&batch, 1, 0).expect_err("one row too many").kind(), Kind::Capacity);
        assert_eq!(state_of(&rig), before);
        rig.train(&batch[1..], 1, 0).expect("all others were dropped for it");
        in_flight.release();
        rig.train(&batch, 1, 0).expect("there is room once the other batch is over");
    }
}

#[test]
fn prefetched_batch_evicts_rows_only_at_its_step() {
    for (rig, most) in full_tables() {
        let before = state_of(&rig);
        let some: Vec<Id> = (5000..5030).collect();
        drop(rig.plan(&some, PlanMode::TRAIN_PREFETCH).expect("a plan that never comes"));
        assert_eq!(state_of(&rig), before);
        let ahead = rig.plan(&some, PlanMode::TRAIN_PREFETCH).expect("a plan");
        assert!(ahead.is_prefetched().expect("a plan"), "nothing else is left for later");
        assert_eq!(state_of(&rig), before);
        rig.finish(&ahead, some.len(), 1, 0).expect("a step");
        assert_eq!(rig.table.stats().expect("counters").dropped_rows, before.1 + 30);
        let too_many: Vec<Id> = (9000..9001 + most).collect();
        let rows = rig.contents().expect("every row");
        let ahead = rig.plan(&too_many, PlanMode::TRAIN_PREFETCH).expect("its forward says so");
        assert_eq!(rig.place(&ahead).expect_err("one row too many").kind(), Kind::Capacity);
        assert!(rig.contents().expect("every row") == rows);
    }
}

/// Plans two tables: these ids of the first, and those of the second.
fn plan_of_two(rigs: [&Rig; 2], first: &[Id], second: &[Id], mode: PlanMode) -> embcache::Result<Plan> {
    let lookup = Lookup::new(&rigs.map(|rig| rig.table.clone()), &[0, 1]).expect("a lookup");
    let ends = [0, first.len() as i64, (first.len() + second.len()) as i64];
    lookup.plan(&[first, second].concat(), &ends, mode, &[])
}

#[test]
fn no_table_drops_rows_for_a_batch_that_another_table_refuses() {
    for (evicts, other) in full_tables().zip(full_tables()) {
        for threads in [1, 4] {
            let (first, second) = (&evicts.0, &other.0);
            let before = [state_of(first), state_of(second)];
            let (some, too_many): (Vec<Id>, Vec<Id>) = ((5000..5030).collect(), (5000..5001 + other.1).collect());
            for rigs in [[first, second], [second, first]] {
                let is_first = std::ptr::eq(rigs[0], first);
                let ids = if is_first { [&some, &too_many] } else { [&too_many, &some] };
                let now = PlanMode { threads, ..PlanMode::TRAIN };
                let refused = plan_of_two(rigs, ids[0], ids[1], now).expect_err("one row too many");
                assert_eq!(refused.kind(), Kind::Capacity, "{refused}");
                let ahead = PlanMode { is_prefetch: true, ..now };
                for checks_first in [false, true] {
                    let plan = plan_of_two(rigs, ids[0], ids[1], ahead).expect("its forward says so");
                    let refused = if checks_first { plan.check_space() } else { plan.wait(&mut []) };
                    assert_eq!(refused.expect_err("one row too many").kind(), Kind::Capacity);
                }
                assert_eq!([state_of(first), state_of(second)], before);
            }
        }
    }
}
