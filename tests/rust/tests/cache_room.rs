//! Tables near their cap: nobody waits for room that only he himself could make, and no more rows come than the cap holds.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use embcache::Kind;
use embcache::config::{OptimizerKind, Reopen, SsdConfig, TableConfig};
use embcache::io::MemoryEngine;
use embcache::types::Id;
use embcache_tests::{Rig, config, watched};

const DIM: usize = 4;

fn on_ssd(host_rows: u64, ssd_bytes: u64) -> TableConfig {
    let mut wanted = config(DIM, OptimizerKind::Sgd, host_rows);
    wanted.ssd = Some(SsdConfig {
        dir: PathBuf::from("/base/m/t/0-of-1"),
        bytes: ssd_bytes,
        reopen: Reopen::Never,
        resume_token: None,
    });
    wanted
}

fn rig(wanted: TableConfig) -> Rig {
    Rig::open(wanted, Arc::new(MemoryEngine::default())).expect("a table")
}

/// Train ids from the table's length on, `at_once` a step, until the table is full; how many there are then.
fn fill(rig: &Rig, at_once: Id) -> Id {
    let mut rows = rig.table.len().expect("a length") as Id;
    loop {
        let ids: Vec<Id> = (rows..rows + at_once).collect();
        match rig.train(&ids, 1, 1) {
            Ok(_) => rows += at_once,
            Err(error) => {
                assert_eq!(error.kind(), Kind::Capacity, "{error}");
                return rows;
            }
        }
    }
}

/// Numbers that look random, the same each time.
fn numbers() -> impl FnMut(Id) -> Id {
    let mut state = 1_u64;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % below as u64) as Id
    }
}

#[test]
fn a_plan_of_more_reads_than_are_submitted_at_once_never_waits_for_files_that_its_own_reads_keep() {
    watched(String::new, || {
        let table = rig(on_ssd(14_000, 4 << 20));
        let rows = fill(&table, 1000);
        let straight = rig(config(DIM, OptimizerKind::Sgd, 60_000));
        for first in (0..rows).step_by(1000) {
            straight.train(&(first..first + 1000).collect::<Vec<Id>>(), 1, 1).expect("a step");
        }
        let mut next = numbers();
        for salt in 0..40 {
            let ids: Vec<Id> = (0..13_000).map(|_| next(rows)).collect::<BTreeSet<Id>>().into_iter().collect();
            table.train(&ids, 1, salt).expect("a step");
            straight.train(&ids, 1, salt).expect("a step");
        }
        assert!(table.contents().expect("every row") == straight.contents().expect("every row"));
    });
}

/// Unseen ids that the index of the rows on SSD takes for rows that are there: it keeps parts of hashes, no ids.
fn false_traces(rig: &Rig, wanted: usize) -> Vec<Id> {
    let mut found = Vec::new();
    for first in (1 << 40..).step_by(100_000) {
        let ids: Vec<Id> = (first..first + 100_000).collect();
        let plan = rig.plan(&ids, false, false, true).expect("a plan");
        found.extend(plan.reading().remove(0));
        if found.len() >= wanted {
            break;
        }
    }
    found.truncate(wanted);
    found
}

#[test]
fn ids_that_turn_out_to_be_new_when_they_are_read_late_do_not_exceed_the_capacity() {
    let table = rig(on_ssd(1000, 1 << 20));
    fill(&table, 100);
    fill(&table, 3);
    let unseen = false_traces(&table, 3);
    let rows = table.table.len().expect("a length");
    // All of RAM is in use, so that a plan ahead leaves its reads to its forward.
    let held: Vec<Id> = (0..1000).collect();
    let holds = table.plan(&held, true, false, false).expect("a plan");
    table.place(&holds).expect("rows in place");
    let plan = table.plan(&unseen, true, true, false).expect("a plan");
    assert!(!plan.complete_ahead(), "there was no room");
    let error = table.place(&plan).expect_err("fewer than three rows fit");
    assert_eq!(error.kind(), Kind::Capacity, "{error}");
    drop((plan, holds));
    assert_eq!(table.table.len().expect("a length"), rows);
    assert_eq!(table.table.stats().expect("counters").pinned_rows, 0);
    table.table.flush(1).expect("what is there fits");
    assert_eq!(table.contents().expect("every row").len() as u64, rows);
}
