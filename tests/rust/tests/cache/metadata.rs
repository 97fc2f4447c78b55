//! The other state in a published state, at the minimum `ssd_bytes` that fits it: no part of it is lost silently.

use std::sync::Arc;

use embcache::Kind;
use embcache::cache::BaseCheckpoint;
use embcache::config::{
    AdmissionRule, EvictionConfig, EvictionRule, MissingRead, OptimizerKind, ReopenMode, SsdConfig, TableConfig,
};
use embcache::io::MemoryEngine;
use embcache::lifecycle::OovRow;
use embcache::rows::RowHeader;
use embcache::types::Id;
use embcache_tests::{Contents, Rig, config};

/// The metadata blob gets one part in this number.
const SHARE: u64 = 2048;
const MINUTE: u64 = 60_000;

/// A table with an OOV row, or with a rule in seconds, or with both. Only imported rows are trained.
fn settings(dim: usize, shared: bool, timed: bool, ssd_bytes: u64) -> TableConfig {
    let ssd = SsdConfig { dir: "/t".into(), bytes: ssd_bytes, reopen: ReopenMode::Never, resume_commit_id: None };
    TableConfig {
        ssd: Some(ssd),
        admission: AdmissionRule::ReadOnly,
        not_admitted: if shared { MissingRead::OovRow } else { MissingRead::Zeros },
        eviction: timed.then_some(EvictionConfig { rule: EvictionRule::PerSweepTimed, every_steps: None }),
        ..config(dim, OptimizerKind::Adam, 5000)
    }
}

fn import(rig: &Rig, ids: std::ops::Range<Id>, dim: usize) {
    let row_of = |id| (RowHeader { id, ..RowHeader::default() }, vec![0.5_f32.to_bits(); 3 * dim]);
    let rows: Contents = ids.map(|id| (id, row_of(id))).collect();
    rig.import(&rows).expect("imported");
}

/// The table after a resume of its last flush.
fn resumed(rig: Rig, mut wanted: TableConfig, engine: &Arc<MemoryEngine>) -> Rig {
    rig.table.flush_next().expect("a flush");
    drop(rig);
    wanted.ssd.as_mut().expect("an SSD tier").reopen = ReopenMode::Resume;
    Rig::open(wanted, Arc::clone(engine) as _).expect("a resumed table")
}

/// The minimum bytes in the error of a table with too few.
fn least(dim: usize, shared: bool, timed: bool, ssd_bytes: u64) -> u64 {
    let opened = Rig::open(settings(dim, shared, timed, ssd_bytes), Arc::new(MemoryEngine::default()));
    let error = opened.expect_err("there is no room");
    assert_eq!(error.kind(), Kind::Config, "{error}");
    let message = error.to_string();
    assert_eq!(message.contains("the OOV row"), shared, "{message}");
    assert_eq!(message.contains("lower embedding_dim"), shared, "{message}");
    assert_eq!(message.contains("the step times"), timed, "{message}");
    let (_, after) = message.split_once("set it to ").expect("what to do");
    after.split(' ').next().and_then(|number| number.parse().ok()).expect("a number")
}

#[test]
fn oov_row_and_step_times_resume_at_minimum_ssd_bytes() {
    for dim in [64, 1500] {
        for (shared, timed) in [(true, false), (false, true), (true, true)] {
            let what = format!("{dim} floats, shared {shared}, timed {timed}");
            let bytes = least(dim, shared, timed, 1000);
            assert_eq!(least(dim, shared, timed, bytes - 1), bytes, "{what}");
            let (wanted, engine) = (settings(dim, shared, timed, bytes), Arc::new(MemoryEngine::default()));
            let rig = Rig::open(wanted.clone(), Arc::clone(&engine) as _).expect("a table");
            import(&rig, 0..3, dim);
            let row = shared.then(|| {
                let values = (0..3 * dim).map(|at| if at % 9 == 0 { f32::NAN } else { -0.1 * at as f32 }).collect();
                OovRow::from_values(wanted.layout(), values).expect("as many as the layout has")
            });
            if let Some(row) = &row {
                rig.table.set_oov_row(Some(row)).expect("set");
            }
            for minute in 0..500 {
                if timed {
                    rig.table.set_time(MINUTE * minute).expect("time rises");
                }
                rig.train(&[1], 1, 0).expect("a step");
            }
            let clock = rig.table.clock().expect("a clock");
            assert_eq!(clock.is_empty(), !timed);
            let rig = resumed(rig, wanted, &engine);
            assert_eq!(rig.table.oov_row().expect("an open table"), row, "{what}");
            let after = rig.table.clock().expect("a clock");
            assert_eq!((after.is_empty(), after.latest()), (!timed, clock.latest()), "{what}");
            let known =
                (0..500).filter(|minute| after.step_at(MINUTE * minute) == clock.step_at(MINUTE * minute)).count();
            assert!(known > if timed { 30 } else { 499 }, "{what}: {known} times");
            assert!((0..500).all(|minute| after.step_at(MINUTE * minute) <= clock.step_at(MINUTE * minute)), "{what}");
        }
    }
}

/// A table with an OOV row records as many expired ids as a flush can store next to that row.
#[test]
fn table_records_as_many_expired_ids_as_a_flush_can_store() {
    const DIM: usize = 64;
    let row_bytes = least(DIM, true, false, 1000) / SHARE;
    for (left, kept) in [(400, true), (600, false)] {
        let wanted = settings(DIM, true, false, (row_bytes + 4096) * SHARE);
        let engine = Arc::new(MemoryEngine::default());
        let rig = Rig::open(wanted.clone(), Arc::clone(&engine) as _).expect("a table");
        import(&rig, 0..1000, DIM);
        let next_epoch = rig.table.epoch().expect("an epoch") + 1;
        rig.table.set_epoch(next_epoch).expect("an epoch");
        rig.table.saved_as(BaseCheckpoint { name: "saved".into(), manifest_xxh3: 7, next_epoch }).expect("saved");
        rig.table.remove_rows(&(0..left).collect::<Vec<Id>>()).expect("removed");
        let before = rig.table.base_checkpoints().expect("ancestors");
        assert_eq!(before.len(), usize::from(kept), "{left} ids left");
        let rig = resumed(rig, wanted, &engine);
        assert_eq!(rig.table.base_checkpoints().expect("ancestors"), before, "{left} ids left");
    }
}
