//! Tests of eviction by rule when batches pin rows, when an operation fails, and when rows are imported or the step is
//! set concurrently.

use embcache::Kind;
use embcache::cache::{BaseCheckpoint, Plan, PlanMode};
use embcache::config::{EvictionConfig, EvictionRule, OptimizerKind, TableConfig};
use embcache::rows::RowHeader;
use embcache::types::Id;
use embcache_tests::{Contents, Rig, config, three_tiers};

const DIM: usize = 4;
const BAG: usize = 5;

/// A table whose rule is applied by calls. With `on_device` it has three tiers, and space in RAM for several hundred
/// rows and the index.
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
    Rig::with_faults(TableConfig { eviction: Some(EvictionConfig { rule, every_steps: None }), ..made }).0
}

/// Imports rows whose last step is 0.
fn import(rig: &Rig, ids: std::ops::Range<Id>) {
    let row_of = |id| (RowHeader { id, count: 7, score: 2.0, ..RowHeader::default() }, vec![0.5_f32.to_bits(); DIM]);
    for first in ids.clone().step_by(1000) {
        let rows: Contents = (first..ids.end.min(first + 1000)).map(|id| (id, row_of(id))).collect();
        rig.import(&rows).expect("imported");
    }
}

/// A table with this number of rows that match a sweep, and a batch that was placed before it: its row, of id 5, has a
/// slot on the device and is not there yet.
fn swept_during_batch(rows: Id) -> (Rig, Plan) {
    let rig = rig(EvictionRule::Unused { steps: 1 }, true);
    import(&rig, 0..rows);
    rig.train(&[-1], BAG, 0).expect("a step");
    rig.train(&[-2], BAG, 0).expect("a step");
    let batch = rig.plan(&[5], PlanMode::TRAIN).expect("a plan");
    batch.wait(&mut []).expect("placed");
    rig.table.sweep().expect("a sweep");
    (rig, batch)
}

fn ids_of(rig: &Rig) -> Vec<Id> {
    rig.contents().expect("contents").into_keys().collect()
}

/// The number of times that the row of an id was trained.
fn count_of(rig: &Rig, id: Id) -> u32 {
    rig.table.read_rows(&[id]).expect("rows").headers[0].count
}

fn is_under_way(rig: &Rig) -> bool {
    rig.table.stats().expect("stats").eviction.expect("a rule").is_sweeping
}

/// A row that a batch has not yet fetched to the device expires when the batch is released.
#[test]
fn unfetched_row_expires_when_batch_is_released() {
    for rows in [1000, 30_000] {
        let (rig, first) = swept_during_batch(rows);
        rig.evaluate(&[-2], BAG, true).expect("an evaluation");
        let second = rig.plan(&[5], PlanMode::TRAIN).expect("a plan");
        drop(first);
        rig.finish(&second, 1, BAG, 0).expect("a step");
        assert_eq!(count_of(&rig, 5), 1, "{rows} rows: the row was born anew");
        assert_eq!(ids_of(&rig), [-2, 5]);
    }
}

#[test]
fn row_to_be_fetched_stays_for_concurrent_batches() {
    for rows in [1000, 30_000] {
        let (rig, first) = swept_during_batch(rows);
        let second = rig.plan(&[5], PlanMode::TRAIN).expect("a plan");
        second.wait(&mut []).expect("placed");
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

/// Sweeps while an active batch has row 1, so that the sweep defers the row. The batch then ends.
fn leave_spared(rig: &Rig) {
    let held = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
    rig.place(&held).expect("a place");
    rig.table.sweep().expect("a sweep");
    rig.evaluate(&[3], BAG, true).expect("an evaluation");
    assert!(is_under_way(rig), "the row is spared");
}

#[test]
fn batch_never_reads_expired_row_after_failed_removal() {
    let rig = rig(EvictionRule::NormBelow(100.0), true);
    rig.train(&[1, 2], BAG, 0).expect("a step");
    leave_spared(&rig);
    // The rule reads the weights, which are on the device.
    let plan = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
    rig.set_device_busy(true);
    assert_eq!(rig.place(&plan).expect_err("the row cannot be judged for the batch either").kind(), Kind::Storage);
    rig.set_device_busy(false);
    drop(plan);
    let plan = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
    rig.amid_device_read(0, || Err(Kind::Storage.error("the device is busy")));
    rig.place(&plan).expect("the row is judged once more for the batch");
    assert!(rig.device_read_ended());
    let out = rig.forward(&plan, 1, BAG).expect("a forward");
    drop(plan);
    let born = rig.evaluate(&[1], BAG, false).expect("an evaluation");
    assert_eq!(out, born, "the row is not there");
    assert_eq!(ids_of(&rig), [] as [Id; 0]);
}

/// A row that no sweep expires stays, also if its weights could not be read at first.
#[test]
fn retained_row_survives_failed_weight_read() {
    let rig = rig(EvictionRule::NormBelow(0.001), true);
    rig.train(&[1, 2], BAG, 0).expect("a step");
    let before = rig.contents().expect("contents");
    leave_spared(&rig);
    let plan = rig.plan(&[1, 2], PlanMode::TRAIN).expect("a plan");
    rig.amid_device_read(0, || Err(Kind::Storage.error("the device is busy")));
    rig.place(&plan).expect("the rows are judged once more for the batch");
    assert!(rig.device_read_ended());
    drop(plan);
    assert_eq!(rig.contents().expect("contents"), before);
}

#[test]
fn batch_never_reads_expired_row_while_callback_is_slow() {
    for on_device in [false, true] {
        let rig = rig(EvictionRule::Unused { steps: 1 }, on_device);
        let queue = rig.table.start_evicted_queue().expect("a queue");
        rig.train(&[1, 2], BAG, 0).expect("a step");
        rig.train(&[3], BAG, 0).expect("a step");
        let held = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
        rig.place(&held).expect("a place");
        rig.table.sweep().expect("a sweep");
        rig.evaluate(&[3], BAG, true).expect("an evaluation");
        assert!(is_under_way(&rig), "the row of the batch is spared");
        queue.pause();
        drop(held);
        let unseen = rig.evaluate(&[-5], BAG, true).expect("an evaluation");
        assert_eq!(rig.evaluate(&[1], BAG, true).expect("an evaluation"), unseen, "on a device: {on_device}");
        rig.train(&[1], BAG, 0).expect("a step");
        assert_eq!(count_of(&rig, 1), 1, "the row was born anew");
        assert_eq!((ids_of(&rig), queue.rows()), (vec![1, 3], 2));
    }
}

#[test]
fn rows_inserted_during_sweep_expire_by_second_call() {
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
    // Without such rows nothing blocks, and rows trained afterwards do not belong to the old sweep.
    rig.table.sweep().expect("a sweep");
    rig.table.set_step(0).expect("set back");
    rig.train(&[9], BAG, 0).expect("a step");
    assert_eq!(ids_of(&rig), [1, 9]);
    rig.table.sweep().expect("a sweep of an earlier step");
    assert_eq!(ids_of(&rig), [1, 9]);
}

/// A table whose sweeps receive their rules, and a batch between its forward and its backward that has row 1. A sweep
/// by weights, which matches row 1 and row 2, has not finished.
fn held_by_a_sweep_that_reads_the_device() -> (Rig, embcache::cache::Plan) {
    let rig = rig(EvictionRule::PerSweep, true);
    rig.train(&[1, 2], BAG, 0).expect("a step");
    let held = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
    rig.place(&held).expect("a place");
    rig.table.sweep_with_rule(&EvictionRule::NormBelow(100.0)).expect("a sweep");
    (rig, held)
}

fn busy() -> embcache::Result<()> {
    Err(Kind::Storage.error("the device is busy"))
}

#[test]
fn waiting_sweep_begins_only_after_other_ends() {
    let (rig, held) = held_by_a_sweep_that_reads_the_device();
    let nothing = EvictionRule::Nothing;
    for fails in [true, true, false] {
        if fails {
            rig.amid_device_read(0, busy);
        }
        let prepared = rig.table.prepare_sweep(Some(&nothing));
        assert_eq!(prepared.is_err(), fails, "{prepared:?}");
        let stats = rig.table.stats().expect("stats").eviction.expect("a rule");
        assert_eq!((stats.evicted, stats.is_sweeping), (u64::from(!fails), true), "row 1 is spared in the end");
    }
    // Row 1 expires with its batch. Starting a prepared sweep reads nothing, and so cannot fail.
    drop(held);
    rig.amid_device_read(0, busy);
    rig.table.sweep_with_rule(&nothing).expect("prepared");
    rig.table.sweep_with_rule(&EvictionRule::TrainedUntil { step: 0 }).expect("the one before took nothing");
    assert_eq!(rig.table.len().expect_err("row 1 is to be judged first").kind(), Kind::Storage);
    assert!(rig.device_read_ended());
    assert_eq!(ids_of(&rig), [] as [Id; 0]);
    assert!(!is_under_way(&rig));
}

#[test]
fn what_is_prepared_and_never_begun_leaves_the_sweep_before_as_it_was() {
    for is_trained in [false, true] {
        let (rig, held) = held_by_a_sweep_that_reads_the_device();
        rig.table.prepare_sweep(Some(&EvictionRule::Nothing)).expect("prepared");
        rig.train(&[3], BAG, 0).expect("a step");
        if is_trained {
            let out = rig.forward(&held, 1, BAG).expect("a forward");
            rig.backward(&held, out.len(), 0).expect("a backward");
            assert_eq!(ids_of(&rig), [1, 3]);
        } else {
            drop(held);
            assert_eq!(ids_of(&rig), [3]);
        }
        assert!(!is_under_way(&rig));
    }
}

/// A batch never reads a row that an older sweep expired, also if the removal of that row has failed.
#[test]
fn expired_row_is_never_read_after_failed_removal() {
    let (rig, held) = held_by_a_sweep_that_reads_the_device();
    rig.table.sweep_with_rule(&EvictionRule::Nothing).expect("a sweep");
    drop(held);
    for fails in [2, 1] {
        let plan = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
        if fails == 2 {
            // The sweep fails to continue, and so does the second evaluation of the batch's own rows.
            rig.amid_device_read(0, busy);
            let again = rig.table.len();
            assert_eq!(again.expect_err("the device is busy").kind(), Kind::Storage);
            rig.amid_device_read(0, busy);
            rig.place(&plan).expect("the row is judged once more for the batch");
        } else {
            rig.place(&plan).expect("a place");
        }
        let out = rig.forward(&plan, 1, BAG).expect("a forward");
        drop(plan);
        assert_eq!(out, rig.evaluate(&[1], BAG, false).expect("an evaluation"), "the row is not there");
    }
    assert_eq!(ids_of(&rig), [] as [Id; 0]);
}

/// Runs sweeps by weights until they defer more than a table keeps, with a checkpoint saved after the first
/// ones, while a batch has row 1, whose norm is 1. Returns the remaining ids, and the number of checkpoints that can be
/// the base of a delta.
fn after_many_sweeps_during_batch(below: impl Fn(u32) -> f64) -> (Vec<Id>, usize) {
    let rig = rig(EvictionRule::PerSweep, false);
    import(&rig, 1..3);
    rig.train(&[3], BAG, 0).expect("a step");
    let held = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
    rig.place(&held).expect("a place");
    for number in 0..70 {
        rig.table.sweep_with_rule(&EvictionRule::NormBelow(below(number))).expect("a sweep");
        // It does not match the rows of the previous sweep.
        rig.table.sweep_with_rule(&EvictionRule::Nothing).expect("a sweep");
        if number == 40 {
            let next_epoch = rig.table.epoch().expect("an epoch") + 1;
            rig.table.set_epoch(next_epoch).expect("set");
            rig.table.saved_as(BaseCheckpoint { name: "c".into(), manifest_xxh3: 1, next_epoch }).expect("noted");
        }
    }
    drop(held);
    (ids_of(&rig), rig.table.base_checkpoints().expect("an open table").len())
}

#[test]
fn endless_batch_defers_rows_of_limited_number_of_sweeps() {
    assert_eq!(
        after_many_sweeps_during_batch(|number| f64::from(100 + number)),
        (vec![], 1),
        "the newer ones take them"
    );
    let once = |number| if number == 69 { 100.0 } else { 0.5 / f64::from(1 + number) };
    assert_eq!(after_many_sweeps_during_batch(once), (vec![], 0), "the last one takes them");
    let once = |number| if number == 0 { 100.0 } else { 0.5 / f64::from(1 + number) };
    assert_eq!(
        after_many_sweeps_during_batch(once),
        (vec![1], 0),
        "the first one is forgotten, and with it the checkpoints"
    );
}

#[test]
fn deferred_rows_do_not_fill_table_after_their_batch() {
    let room = 64;
    let eviction = Some(EvictionConfig { rule: EvictionRule::Unused { steps: 1 }, every_steps: None });
    let small = TableConfig { eviction, ..config(DIM, OptimizerKind::RowWiseAdagrad, room) };
    let (rig, _) = Rig::with_faults(small);
    let ids: Vec<Id> = (1..room as Id).collect();
    rig.train(&ids, BAG, 0).expect("a step");
    rig.train(&[-1], BAG, 0).expect("a step");
    let held = rig.plan(&ids, PlanMode::TRAIN).expect("a plan");
    rig.place(&held).expect("a place");
    rig.table.sweep().expect("a sweep");
    assert_eq!(rig.table.len().expect("rows"), room);
    assert_eq!(rig.plan(&[-2], PlanMode::TRAIN).map(drop).expect_err("full").kind(), Kind::Capacity);
    drop(held);
    // No batch was placed since, which would have removed them.
    let plan = rig.plan(&[-2, -3], PlanMode::TRAIN).expect("there is room");
    rig.finish(&plan, 2, BAG, 0).expect("a step");
    assert_eq!(ids_of(&rig), [-3, -2, -1]);
}

#[test]
fn resumed_state_knows_if_last_change_was_a_sweep() {
    use embcache::config::{ReopenMode, SsdConfig};

    let ssd = |reopen| Some(SsdConfig { dir: "/t".into(), bytes: 64 << 20, reopen, resume_commit_id: None });
    let eviction = Some(EvictionConfig { rule: EvictionRule::PerSweep, every_steps: None });
    let wanted = |reopen| TableConfig {
        ssd: ssd(reopen),
        eviction: eviction.clone(),
        ..config(DIM, OptimizerKind::RowWiseAdagrad, 60)
    };
    for then in ["nothing", "a step"] {
        let engine: std::sync::Arc<dyn embcache::io::IoEngine> =
            std::sync::Arc::new(embcache::io::MemoryEngine::default());
        let rig = Rig::open(wanted(ReopenMode::Never), std::sync::Arc::clone(&engine)).expect("opened");
        rig.train(&(0..200).collect::<Vec<Id>>(), BAG, 0).expect("a step");
        rig.table.sweep_with_rule(&EvictionRule::NormBelow(0.2)).expect("a sweep");
        if then == "a step" {
            rig.train(&[1], BAG, 0).expect("a step");
        }
        rig.table.flush_next().expect("a flush");
        let (left, is_as_swept) = (ids_of(&rig), rig.table.is_unchanged_since_sweep().expect("known"));
        assert_eq!(is_as_swept, then == "nothing");
        drop(rig);
        let again = Rig::open(wanted(ReopenMode::Resume), engine).expect("resumed");
        assert_eq!(
            (ids_of(&again), again.table.is_unchanged_since_sweep().expect("known")),
            (left, is_as_swept),
            "{then}"
        );
        again.table.set_epoch(again.table.epoch().expect("an epoch") + 1).expect("set");
        assert_eq!(again.table.is_unchanged_since_sweep().expect("known"), is_as_swept);
        again.train(&[1], BAG, 0).expect("a step");
        assert!(!again.table.is_unchanged_since_sweep().expect("known"));
    }
}

/// A table whose rows all match a sweep except those of ids below 0, and an evaluation that has pinned the row of id 5.
fn swept_during_evaluation(on_device: bool) -> (Rig, Plan) {
    let rig = rig(EvictionRule::Unused { steps: 1 }, on_device);
    import(&rig, 0..40);
    rig.train(&[50], BAG, 0).expect("a step");
    rig.train(&(-40..0).collect::<Vec<Id>>(), BAG, 0).expect("a step");
    let evaluation = rig.plan(&[5], PlanMode::EVALUATE).expect("a plan");
    rig.place(&evaluation).expect("a place");
    rig.table.sweep().expect("a sweep");
    assert_eq!(rig.table.len().expect("rows"), 41);
    (rig, evaluation)
}

#[test]
fn evaluation_ending_during_export_does_not_end_it() {
    let expected: Vec<Id> = (-40..0).chain([5]).collect();
    for on_device in [false, true] {
        let (rig, evaluation) = swept_during_evaluation(on_device);
        let mut export = rig.table.export(1).expect("an export");
        let mut ids: Vec<Id> =
            export.next().expect("a chunk").expect("a row").headers.iter().map(|row| row.id).collect();
        drop(evaluation);
        // The row has expired, and this would have removed it.
        rig.evaluate(&[-1, 60], BAG, true).expect("an evaluation");
        for chunk in export.by_ref() {
            ids.extend(
                chunk
                    .unwrap_or_else(|error| panic!("on the device: {on_device}: {error}"))
                    .headers
                    .iter()
                    .map(|row| row.id),
            );
        }
        ids.sort_unstable();
        assert_eq!(ids, expected, "on the device: {on_device}");
        assert!(is_under_way(&rig));
        rig.evaluate(&[-1], BAG, true).expect("an evaluation");
        assert!(!is_under_way(&rig), "the export has ended");
        assert_eq!(rig.table.len().expect("rows"), 40);
    }
}

/// The evaluation ends during an export that no caller reads to its end.
#[test]
fn row_of_ended_evaluation_expires_when_export_is_dropped() {
    let (rig, evaluation) = swept_during_evaluation(false);
    let mut export = rig.table.export(1).expect("an export");
    export.next().expect("a chunk").expect("a row");
    drop(evaluation);
    rig.evaluate(&[-1], BAG, true).expect("an evaluation");
    assert!(is_under_way(&rig));
    drop(export);
    // The export's thread may still exist, and stops soon.
    while is_under_way(&rig) {
        rig.evaluate(&[-1], BAG, true).expect("an evaluation");
        std::thread::yield_now();
    }
    assert_eq!(rig.table.len().expect("rows"), 40);
}

#[test]
fn evaluation_ending_during_walk_does_not_end_it() {
    for on_device in [false, true] {
        let (rig, evaluation) = swept_during_evaluation(on_device);
        let (mut held, mut ids) = (Some(evaluation), Vec::new());
        let mut take = |chunk: embcache::cache::RowChunk| {
            ids.extend(chunk.headers.iter().map(|row| row.id));
            if held.take().is_some() {
                rig.evaluate(&[-1, 60], BAG, true)?;
            }
            Ok(())
        };
        rig.table.for_each_chunk(1, &mut take).unwrap_or_else(|error| panic!("on the device: {on_device}: {error}"));
        assert_eq!(ids.len(), 41, "on the device: {on_device}");
        assert_eq!(rig.table.len().expect("rows"), 40);
    }
}

/// An evaluation never reads an expired row that an export has kept. It ends the export.
#[test]
fn evaluation_ends_export_instead_of_reading_kept_row() {
    for on_device in [false, true] {
        let (rig, evaluation) = swept_during_evaluation(on_device);
        let mut export = rig.table.export(1).expect("an export");
        export.next().expect("a chunk").expect("a row");
        drop(evaluation);
        let zeros = rig.evaluate(&[5], BAG, true).expect("an evaluation");
        assert!(zeros.iter().all(|value| *value == 0.0), "on the device: {on_device}");
        let error = export.find_map(Result::err).expect("the row has left");
        assert_eq!(error.kind(), Kind::State);
        assert_eq!(rig.table.len().expect("rows"), 40);
    }
}
