//! Rows that move within RAM during a sweep: the sweep still evaluates them, and the next delta equals the table that
//! saved it.

use std::ops::Range;
use std::sync::Arc;

use embcache::cache::{RowBlock, host_row_bytes};
use embcache::config::{EvictionConfig, EvictionRule, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::IoEngine;
use embcache::rows::RowHeader;
use embcache::types::Id;
use embcache_tests::checkpoint::memory;
use embcache_tests::ranks::{load, save_as_base};
use embcache_tests::{Rig, config};

use crate::sweeps::rows_of;

const DIM: usize = 4;
/// Rows that expire and that were modified after the first save. Their ids are recorded when they expire, and use the
/// space of rows in RAM.
const MODIFIED: Id = 30_000;
/// Rows that expire and are unchanged since the first save. They are in the last slots, which are freed for the
/// recorded ids.
const LAST: Id = 3_000;

fn table(place: &str) -> TableConfig {
    let dir = format!("/ssd/{place}").into();
    TableConfig {
        host_bytes: 16 << 20,
        ssd: Some(SsdConfig { dir, bytes: 1 << 30, reopen: ReopenMode::Never, resume_commit_id: None }),
        eviction: Some(EvictionConfig { rule: EvictionRule::Unused { steps: 50 }, every_steps: None }),
        ..config(DIM, OptimizerKind::Sgd, 1)
    }
}

fn import(rig: &Rig, ids: Range<Id>, last_step: u64) {
    for first in ids.clone().step_by(4000) {
        let row = |id| RowHeader { id, last_step, count: 1, ..RowHeader::default() };
        let headers: Vec<RowHeader> = (first..ids.end.min(first + 4000)).map(row).collect();
        let vectors = vec![0.5; headers.len() * DIM];
        rig.table.import_rows(RowBlock { headers: &headers, vectors: &vectors }).expect("imported");
    }
}

/// Sweeps a table whose last slots contain expired rows. While `bury` advances the sweep, these rows move to slots that
/// the sweep has passed.
fn all_expired_rows_leave(bury: impl FnOnce(&Rig)) {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let rig = Rig::open(table("saved"), Arc::clone(&engine)).expect("opened");
    let config = rig.table.config();
    let slots = (config.host_bytes / host_row_bytes(&config.layout(), config.policy)) as Id;
    let end = slots - 200;
    import(&rig, 0..MODIFIED, 1);
    import(&rig, MODIFIED..end - LAST, 1000);
    import(&rig, end - LAST..end, 1);
    let saved = std::slice::from_ref(&rig);
    let full = save_as_base(&engine, saved, 1 << 20, None);
    import(&rig, 0..MODIFIED, 1);
    rig.table.set_step(1000).expect("set");
    rig.table.sweep().expect("a sweep");
    bury(&rig);
    let expected = rows_of(saved);
    let dead = expected.values().filter(|(header, _)| header.last_step <= 950).count();
    assert_eq!(dead, 0, "dead rows outlived the sweep");
    assert!(expected.contains_key(&MODIFIED), "rows live that the sweep does not take");
    save_as_base(&engine, saved, 1 << 20, Some(&full));
    let loaded = [Rig::open(table("loaded"), Arc::clone(&engine)).expect("opened")];
    load(&engine, &loaded);
    assert!(rows_of(&loaded) == expected, "the delta is the table that saved it");
}

/// Trains small batches until the sweep has ended.
fn in_slices(rig: &Rig) {
    while rig.table.stats().expect("stats").eviction.expect("a rule").is_sweeping {
        rig.train(&[MODIFIED], 1, 0).expect("a step");
    }
}

#[test]
fn sweep_ended_at_once_evaluates_rows_that_move() {
    all_expired_rows_leave(|rig| assert!(rig.table.len().expect("rows") > 0));
}

#[test]
fn sweep_in_slices_evaluates_rows_that_move() {
    all_expired_rows_leave(in_slices);
}

#[test]
fn sweep_evaluates_rows_moved_while_batch_removes_its_own() {
    all_expired_rows_leave(|rig| {
        let batch: Vec<Id> = (MODIFIED / 4..MODIFIED).collect();
        rig.train(&batch, 1, 0).expect("a step");
        in_slices(rig);
    });
}
