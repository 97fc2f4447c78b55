//! Tables that share a budget in RAM: together they have as many rows as fit it, with any distribution over the tables.

use std::sync::Arc;

use embcache::cache::{Lookup, PlanMode, host_row_bytes};
use embcache::config::{OnFull, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::MemoryEngine;
use embcache::runtime::budget::SharedBudget;
use embcache::types::Id;
use embcache::{Error, Kind};
use embcache_tests::{Rig, config};

const DIM: usize = 4;
const OPTIMIZER: OptimizerKind = OptimizerKind::RowWiseAdagrad;
/// The number of rows that fit each table's own part.
const OWN: u64 = 20;

fn row_bytes() -> u64 {
    let one = config(DIM, OPTIMIZER, 1);
    host_row_bytes(&one.layout(), one.policy)
}

/// A budget for `rows` rows, in a module that also has the own parts of two tables.
fn shared(rows: u64) -> Arc<SharedBudget> {
    let bytes = rows * row_bytes();
    Arc::new(SharedBudget::new(bytes, bytes + 2 * OWN * row_bytes(), 2, 1.0))
}

fn wanted(budget: &Arc<SharedBudget>) -> TableConfig {
    TableConfig { shared_budget: Some(Arc::clone(budget)), ..config(DIM, OPTIMIZER, OWN) }
}

fn open(config: TableConfig) -> Rig {
    Rig::open(config, Arc::new(MemoryEngine::default())).expect("a table")
}

fn pair(rows: u64) -> (Arc<SharedBudget>, Rig, Rig) {
    let budget = shared(rows);
    let [one, other] = [open(wanted(&budget)), open(wanted(&budget))];
    (budget, one, other)
}

/// Trains rows `ids`, ten per step.
fn train(rig: &Rig, ids: std::ops::Range<Id>) -> embcache::Result<()> {
    ids.collect::<Vec<Id>>().chunks(10).try_for_each(|ids| rig.train(ids, 2, 1).map(drop))
}

fn rows(rig: &Rig) -> u64 {
    rig.table.len().expect("a length")
}

fn full(result: embcache::Result<()>) -> Error {
    let error = result.expect_err("no room is left");
    assert_eq!(error.kind(), Kind::Capacity, "{error}");
    error
}

#[test]
fn a_table_takes_what_others_leave_and_is_refused_when_all_is_taken() {
    for device_rows in [None, Some(60)] {
        let budget = shared(100);
        let [large, small] = [0, 1].map(|_| open(TableConfig { device_rows, ..wanted(&budget) }));
        train(&large, 0..110).expect("room");
        assert_eq!(budget.free(), 10 * row_bytes());
        train(&small, 0..30).expect("room for what is left");
        assert_eq!(budget.free(), 0);
        let before = (large.contents().expect("rows"), small.contents().expect("rows"));
        for rig in [&large, &small] {
            let error = full(train(rig, 1000..1003)).to_string();
            let host_bytes = 140 * row_bytes();
            let (is, to) =
                (format!("TierBudgets(host_bytes={host_bytes}), shared by its 2 tables"), host_bytes + 3 * row_bytes());
            assert!(error.contains(&is) && error.contains(&format!("to {to} or more")), "{error}");
        }
        assert!((large.contents().expect("rows"), small.contents().expect("rows")) == before);
        train(&large, 0..110).expect("no new row");
    }
}

#[test]
fn the_budget_that_an_error_names_is_enough() {
    let (_, one, other) = pair(5);
    train(&one, 0..20).expect("its own part");
    let error = full(train(&other, 0..30)).to_string();
    let named = error.split("to ").filter_map(|text| text.split(" or more").next()?.parse::<u64>().ok()).last();
    let bytes = named.expect("a number") - 2 * OWN * row_bytes();
    let budget = Arc::new(SharedBudget::new(bytes, 0, 2, 1.0));
    let [one, other] = [open(wanted(&budget)), open(wanted(&budget))];
    train(&one, 0..20).expect("its own part");
    train(&other, 0..30).expect("room");
    full(train(&other, 30..31));
}

#[test]
fn what_was_taken_goes_back_when_a_table_is_cleared_closed_or_dropped() {
    let (budget, one, other) = pair(100);
    for end in [|rig: &Rig| rig.table.clear(), |rig: &Rig| rig.table.close(), |_: &Rig| Ok(())] {
        let rig = open(wanted(&budget));
        train(&rig, 0..120).expect("room");
        full(train(&one, 0..21));
        end(&rig).expect("an end");
        assert_eq!(budget.free(), if rig.table.len().is_ok_and(|rows| rows == 120) { 0 } else { 100 * row_bytes() });
        drop(rig);
        assert_eq!(budget.free(), 100 * row_bytes());
    }
    train(&other, 0..120).expect("room");
    other.table.clear().expect("no batch is under way");
    train(&other, 200..320).expect("room");
    assert_eq!(rows(&other), 120);
}

#[test]
fn an_evaluation_takes_no_shared_bytes_for_ids_without_a_row() {
    let (budget, one, other) = pair(100);
    train(&one, 0..15).expect("room");
    let unseen: Vec<Id> = (500..560).collect();
    let plan = one.plan(&unseen, PlanMode::EVALUATE).expect("a plan");
    one.place(&plan).expect("rows in place");
    assert_eq!((budget.free(), plan.overflow_rows().expect("numbers")), (100 * row_bytes(), vec![0]));
    // A new row has a slot past the table's own part until the evaluation has ended.
    train(&one, 15..20).expect("room");
    train(&other, 0..120).expect("room for all that is free");
    drop(plan);
    assert_eq!((rows(&one), budget.free()), (20, 0));
    let plan = one.plan(&unseen, PlanMode::EVALUATE).expect("a plan");
    one.place(&plan).expect("an evaluation is not refused");
    assert_eq!(plan.overflow_rows().expect("numbers"), [60]);
    full(train(&one, 20..21));
    drop(plan);
    assert_eq!(one.contents().expect("rows").len(), 20);
    full(train(&one, 20..21));
    train(&one, 0..20).expect("no new row");
}

#[test]
fn a_batch_that_one_table_refuses_takes_nothing_for_the_others() {
    let (budget, one, other) = pair(100);
    train(&other, 0..60).expect("room");
    let (new, many): (Vec<Id>, Vec<Id>) = ((0..50).collect(), (0..200).collect());
    let tables = [one.table.clone(), other.table.clone()];
    let lookup = Lookup::new(&tables, &[0, 1]).expect("a lookup");
    for (first, second) in [(&new, &many), (&many, &new)] {
        let before = budget.free();
        let ids = [first.as_slice(), second.as_slice()].concat();
        let (middle, end) = (first.len() as i64, ids.len() as i64);
        let planned = lookup
            .plan(&ids, &[0, middle, end], PlanMode::TRAIN, &[])
            .and_then(|plan| plan.wait(&mut []).map(|()| plan));
        assert_eq!(planned.map(drop).expect_err("no room is left").kind(), Kind::Capacity);
        assert_eq!((rows(&one), rows(&other), budget.free()), (0, 60, before));
    }
    train(&one, 0..80).expect("room");
}

#[test]
fn rows_that_are_removed_leave_room_for_other_tables() {
    let (budget, one, other) = pair(100);
    train(&one, 0..120).expect("room");
    full(train(&other, 0..21));
    let before = one.contents().expect("rows");
    let removed: Vec<Id> = (0..120).filter(|id| id % 3 != 0).collect();
    one.table.remove_rows(&removed).expect("rows that no batch uses");
    assert_eq!(budget.free(), 80 * row_bytes());
    train(&other, 0..100).expect("room");
    full(train(&one, 200..201));
    let after = one.contents().expect("rows");
    assert!(after.len() == 40 && after.iter().all(|(id, row)| before.get(id) == Some(row)));
    one.table.remove_rows(&[0, 3]).expect("rows of its own part");
    assert_eq!(budget.free(), 2 * row_bytes());
}

#[test]
fn an_import_takes_room_for_all_of_its_rows_or_for_none() {
    let (budget, one, other) = pair(100);
    let source = open(config(DIM, OPTIMIZER, 200));
    train(&source, 0..121).expect("room");
    full(one.import(&source.contents().expect("rows")));
    assert_eq!((rows(&one), budget.free()), (0, 100 * row_bytes()));
    source.table.remove_rows(&[120]).expect("a row");
    one.import(&source.contents().expect("rows")).expect("room");
    assert!(one.contents().expect("rows") == source.contents().expect("rows"));
    full(train(&other, 0..21));
}

#[test]
fn tables_that_grow_at_once_never_exceed_their_budget_together() {
    let budget = shared(4000);
    let rigs: Vec<Rig> = (0..4).map(|_| open(wanted(&budget))).collect();
    std::thread::scope(|scope| {
        for rig in &rigs {
            scope.spawn(|| {
                let mut first = 0;
                while train(rig, first..first + 7).is_ok() {
                    first += 7;
                    // Ids without a row have slots during the evaluation, and use no shared bytes.
                    rig.evaluate(&[-1, -2, -3], 1, false).expect("an evaluation");
                }
            });
        }
    });
    let all: u64 = rigs.iter().map(rows).sum();
    assert!((4000 + 4 * OWN - 4 * 10..=4000 + 4 * OWN).contains(&all), "{all} rows");
    let taken: u64 = rigs.iter().map(|rig| rows(rig).saturating_sub(OWN)).sum();
    assert_eq!(budget.free(), (4000 - taken) * row_bytes(), "each byte is counted once");
}

/// Plans ahead reserve space for new rows before these are inserted, and release the space of rows that are not new.
#[test]
fn prefetched_plans_reserve_and_release_budget() {
    let (budget, one, other) = pair(100);
    let ids: Vec<Id> = (0..100).collect();
    let plan = one.plan(&ids, PlanMode::TRAIN_PREFETCH).expect("a plan");
    assert!(plan.is_prefetched().expect("no forked child"), "there is room");
    full(train(&other, 0..41));
    assert_eq!(budget.free(), 0);
    drop(plan);
    assert_eq!((rows(&one), rows(&other), budget.free()), (0, 40, 80 * row_bytes()));
    train(&one, 0..100).expect("room");
}

#[test]
fn only_tables_that_neither_drop_rows_nor_write_them_down_share() {
    let budget = shared(10);
    let ssd = SsdConfig { dir: "/base/t".into(), bytes: 1 << 20, reopen: ReopenMode::Never, resume_commit_id: None };
    for refused in [
        TableConfig { on_full: OnFull::Evict, ..wanted(&budget) },
        TableConfig { ssd: Some(ssd.clone()), ..wanted(&budget) },
    ] {
        let opened = Rig::open(refused, Arc::new(MemoryEngine::default()));
        assert_eq!(opened.expect_err("refused").kind(), Kind::Config);
    }
}
