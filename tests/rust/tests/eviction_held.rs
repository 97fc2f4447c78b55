//! Eviction by rule where batches hold rows, where something fails on the way, and where rows come in or the step is set meanwhile.

use embcache::Kind;
use embcache::cache::{Plan, PlanMode};
use embcache::config::{Eviction, EvictionRule, OptimizerKind, TableConfig};
use embcache::rows::RowHeader;
use embcache::types::Id;
use embcache_tests::{Contents, Rig, config, three_tiers};

const DIM: usize = 4;
const BAG: usize = 5;

/// A table whose rule is applied by calls. With `on_device` it has three tiers, and room in RAM for some hundreds of rows and the index.
fn rig(rule: EvictionRule, on_device: bool) -> Rig {
    let made = if on_device {
        TableConfig {
            host_bytes: 400_000,
            optimizer: OptimizerKind::RowWiseAdagrad,
            ..three_tiers(DIM, Some(45), 60, 64 << 20)
        }
    } else {
        config(DIM, OptimizerKind::RowWiseAdagrad, 10_000)
    };
    Rig::with_faults(TableConfig { eviction: Some(Eviction { rule, every_steps: None }), ..made }).0
}

/// Import rows that were trained last at step 0.
fn import(rig: &Rig, ids: std::ops::Range<Id>) {
    let row_of = |id| (RowHeader { id, count: 7, score: 2.0, ..RowHeader::default() }, vec![0.5_f32.to_bits(); DIM]);
    for first in ids.clone().step_by(1000) {
        let rows: Contents = (first..ids.end.min(first + 1000)).map(|id| (id, row_of(id))).collect();
        rig.import(&rows).expect("imported");
    }
}

/// A table of so many rows that a sweep takes, and a batch that was placed before it: its row, of id 5, has a slot on the device and is not
/// there yet.
fn swept_amid_a_batch(rows: Id) -> (Rig, Plan) {
    let rig = rig(EvictionRule::Unused { steps: 1 }, true);
    import(&rig, 0..rows);
    rig.train(&[-1], BAG, 0).expect("a step");
    rig.train(&[-2], BAG, 0).expect("a step");
    let batch = rig.plan(&[5], PlanMode::TRAIN).expect("a plan");
    batch.wait().expect("placed");
    rig.table.sweep().expect("a sweep");
    (rig, batch)
}

fn ids_of(rig: &Rig) -> Vec<Id> {
    rig.contents().expect("contents").into_keys().collect()
}

/// How often the row of an id was trained.
fn count_of(rig: &Rig, id: Id) -> u32 {
    rig.table.read_rows(&[id]).expect("rows").headers[0].count
}

fn is_under_way(rig: &Rig) -> bool {
    rig.table.stats().expect("stats").eviction.expect("a rule").under_way
}

#[test]
fn a_row_that_a_batch_has_not_brought_to_the_device_dies_once_the_batch_is_released() {
    for rows in [1000, 30_000] {
        let (rig, first) = swept_amid_a_batch(rows);
        rig.evaluate(&[-2], BAG, true).expect("an evaluation");
        let second = rig.plan(&[5], PlanMode::TRAIN).expect("a plan");
        drop(first);
        rig.finish(&second, 1, BAG, 0).expect("a step");
        assert_eq!(count_of(&rig, 5), 1, "{rows} rows: the row was born anew");
        assert_eq!(ids_of(&rig), [-2, 5]);
    }
}

#[test]
fn a_row_that_a_batch_is_to_bring_to_the_device_lives_on_for_batches_beside_it() {
    for rows in [1000, 30_000] {
        let (rig, first) = swept_amid_a_batch(rows);
        let second = rig.plan(&[5], PlanMode::TRAIN).expect("a plan");
        second.wait().expect("placed");
        for plan in [&first, &second] {
            rig.scatter(plan, 0).expect("scattered");
            plan.scattered().expect("scattered");
            let out = rig.forward(plan, 1, BAG).expect("a forward");
            rig.backward(plan, out.len(), 1).expect("a backward");
        }
        assert_eq!(count_of(&rig, 5), 9, "{rows} rows: it was trained 7 times before");
        assert_eq!(rig.table.len().expect("rows"), 2);
        assert_eq!(ids_of(&rig), [-2, 5]);
    }
}

#[test]
fn a_batch_never_reads_a_dead_row_whose_burial_has_failed() {
    let rig = rig(EvictionRule::NormBelow(100.0), true);
    rig.train(&[1, 2], BAG, 0).expect("a step");
    let held = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
    rig.place(&held).expect("a place");
    rig.table.sweep().expect("a sweep");
    rig.evaluate(&[3], BAG, true).expect("an evaluation");
    assert!(is_under_way(&rig), "the row is spared");
    drop(held);
    for fails in [1, 2] {
        let plan = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
        // The weights decide, and they are on the device.
        let refused = || Err(embcache::Error::new(Kind::Storage, "the device is busy"));
        rig.amid_device_read(0, refused);
        if fails == 1 {
            rig.place(&plan).expect("the row is judged once more for the batch");
            assert!(rig.device_read_ended());
            let out = rig.forward(&plan, 1, BAG).expect("a forward");
            drop(plan);
            let born = rig.evaluate(&[1], BAG, false).expect("an evaluation");
            assert_eq!(out, born, "the row is not there");
        }
    }
    assert_eq!(ids_of(&rig), [] as [Id; 0]);
}

#[test]
fn a_batch_never_reads_a_dead_row_while_whoever_is_told_is_slow() {
    for on_device in [false, true] {
        let rig = rig(EvictionRule::Unused { steps: 1 }, on_device);
        let queue = rig.table.keep_evicted().expect("a queue");
        rig.train(&[1, 2], BAG, 0).expect("a step");
        rig.train(&[3], BAG, 0).expect("a step");
        let held = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
        rig.place(&held).expect("a place");
        rig.table.sweep().expect("a sweep");
        rig.evaluate(&[3], BAG, true).expect("an evaluation");
        assert!(is_under_way(&rig), "the row of the batch is spared");
        queue.hold();
        drop(held);
        let unseen = rig.evaluate(&[-5], BAG, true).expect("an evaluation");
        assert_eq!(rig.evaluate(&[1], BAG, true).expect("an evaluation"), unseen, "on a device: {on_device}");
        rig.train(&[1], BAG, 0).expect("a step");
        assert_eq!(count_of(&rig, 1), 1, "the row was born anew");
        assert_eq!((ids_of(&rig), queue.rows()), (vec![1, 3], 2));
    }
}

#[test]
fn rows_that_came_in_while_a_sweep_was_under_way_are_taken_by_a_second_call() {
    for on_device in [false, true] {
        let rig = rig(EvictionRule::Unused { steps: 1 }, on_device);
        rig.train(&[1], BAG, 0).expect("a step");
        rig.train(&[2], BAG, 0).expect("a step");
        let held = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
        rig.place(&held).expect("a place");
        rig.table.sweep().expect("a sweep");
        import(&rig, 7..9);
        assert!(is_under_way(&rig), "a row is spared");
        drop(held);
        assert_eq!(ids_of(&rig), [2, 7, 8], "the sweep was before these rows came in");
        assert!(!is_under_way(&rig));
        rig.table.sweep().expect("a sweep");
        assert_eq!(ids_of(&rig), [2], "on a device: {on_device}");
        let before = rig.table.version();
        rig.table.sweep().expect("a sweep");
        assert_eq!((rig.table.version(), is_under_way(&rig)), (before, false), "nothing came in since");
    }
}

#[test]
fn the_step_is_not_set_back_while_a_sweep_spares_rows_of_a_batch() {
    let rig = rig(EvictionRule::Unused { steps: 1 }, false);
    for id in 1..5 {
        rig.train(&[id], BAG, 0).expect("a step");
    }
    let held = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
    rig.place(&held).expect("a place");
    rig.table.sweep().expect("a sweep");
    let refused = rig.table.set_step(1).expect_err("the row would count as trained before the sweep");
    assert_eq!(refused.kind(), Kind::State);
    assert!(refused.to_string().contains("finish or drop those batches"), "{refused}");
    assert_eq!(rig.table.step().expect("a step"), 4);
    let out = rig.forward(&held, 1, BAG).expect("a forward");
    rig.backward(&held, out.len(), 0).expect("a backward");
    assert_eq!(ids_of(&rig), [1, 4]);
    // Without such rows nothing is in the way, and what is trained then is not the old sweep's.
    rig.table.sweep().expect("a sweep");
    rig.table.set_step(0).expect("set back");
    rig.train(&[9], BAG, 0).expect("a step");
    assert_eq!(ids_of(&rig), [1, 9]);
    rig.table.sweep().expect("a sweep of an earlier step");
    assert_eq!(ids_of(&rig), [1, 9]);
}
