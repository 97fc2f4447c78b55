//! Tests of admission: the ids that get rows, compared with a model of maps, for any tiers and any number of batches
//! planned ahead.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU64;

use embcache::Kind;
use embcache::cache::{DeviceTensors, MissingMode, Plan, PlanMode};
use embcache::config::{AdmissionRule, MissingRead, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::types::Id;
use embcache_tests::dice::{Dice, bits};
use embcache_tests::{Contents, Rig, config, hyperparameters, three_tiers};

const DIM: usize = 4;
const BAG: usize = 5;
const MEMORY: u64 = 1 << 20;

/// A table that admits every id, and is trained only with the ids that a model of the rule admits.
struct Model {
    rig: Rig,
    threshold: u32,
    counts: BTreeMap<Id, u32>,
    rows: BTreeSet<Id>,
}

impl Model {
    fn new(threshold: u32) -> Self {
        let (rig, _) = Rig::with_faults(config(DIM, OptimizerKind::RowWiseAdagrad, 100_000));
        Self { rig, threshold, counts: BTreeMap::new(), rows: BTreeSet::new() }
    }

    fn occurrences(ids: &[Id]) -> BTreeMap<Id, u32> {
        let mut occurrences = BTreeMap::new();
        for &id in ids {
            *occurrences.entry(id).or_default() += 1;
        }
        occurrences
    }

    fn has_or_gets(&self, id: Id, occurrences: u32) -> bool {
        self.rows.contains(&id) || self.counts.get(&id).unwrap_or(&0) + occurrences >= self.threshold
    }

    /// The batch without the ids that are not admitted: ids, and the starts of the bags.
    fn admitted(&self, ids: &[Id]) -> (Vec<Id>, Vec<i64>) {
        let occurrences = Self::occurrences(ids);
        let (mut kept, mut offsets) = (Vec::new(), vec![0]);
        for bag in ids.chunks(BAG) {
            kept.extend(bag.iter().filter(|id| self.has_or_gets(**id, occurrences[id])));
            offsets.push(kept.len() as i64);
        }
        (kept, offsets)
    }

    fn forward(&self, plan: &Plan, offsets: &[i64]) -> Vec<f32> {
        self.rig.place(plan).expect("a place");
        let mut out = vec![0.0; (offsets.len() - 1) * DIM];
        self.rig
            .with_tensors(|tensors| plan.forward_pooled(offsets, None, &[false], &mut out, tensors, 1))
            .expect("a forward");
        out
    }

    fn train(&mut self, ids: &[Id], salt: u32) -> Vec<f32> {
        let (kept, offsets) = self.admitted(ids);
        let plan = self.rig.plan(&kept, PlanMode::TRAIN).expect("a plan");
        let out = self.forward(&plan, &offsets);
        self.rig.backward(&plan, out.len(), salt).expect("a backward");
        for (id, occurrences) in Self::occurrences(ids) {
            if self.has_or_gets(id, occurrences) {
                self.rows.insert(id);
                self.counts.remove(&id);
            } else {
                *self.counts.entry(id).or_default() += occurrences;
            }
        }
        out
    }

    /// The result of an evaluation in which ids without a row read zeros.
    fn evaluate(&self, ids: &[Id]) -> Vec<f32> {
        let (mut kept, mut offsets) = (Vec::new(), vec![0]);
        for bag in ids.chunks(BAG) {
            kept.extend(bag.iter().filter(|id| self.rows.contains(id)));
            offsets.push(kept.len() as i64);
        }
        let plan = self.rig.plan(&kept, PlanMode::EVALUATE).expect("a plan");
        self.forward(&plan, &offsets)
    }
}

/// Batches that are planned and not trained yet.
type Ahead = VecDeque<(Vec<Id>, Plan)>;

/// A table that admits by count, and its model.
struct Pair {
    rig: Rig,
    model: Model,
    ahead: Ahead,
    salt: u32,
}

impl Pair {
    fn train_next(&mut self) {
        let (ids, plan) = self.ahead.pop_front().expect("a planned batch");
        self.salt += 1;
        let out = self.rig.finish(&plan, ids.len(), BAG, self.salt).expect("a step");
        assert_eq!(bits(&out), bits(&self.model.train(&ids, self.salt)), "step {}", self.salt);
    }

    fn finish(&mut self) {
        while !self.ahead.is_empty() {
            self.train_next();
        }
    }

    fn random_step(&mut self, dice: &mut Dice, depth: usize) {
        while self.ahead.len() < depth {
            let ids = dice.ids(40);
            let plan = self.rig.plan(&ids, PlanMode::TRAIN_PREFETCH).expect("a plan ahead");
            self.ahead.push_back((ids, plan));
        }
        match dice.roll(10) {
            0 => {
                // A forward that no backward follows counts nothing.
                let ids = dice.ids(30);
                let plan = self.rig.plan(&ids, PlanMode::TRAIN).expect("a plan");
                self.rig.place(&plan).expect("a place");
                self.rig.forward(&plan, ids.len(), BAG).expect("a forward");
            }
            1 => {
                let ids = dice.ids(30);
                let mode = PlanMode { missing: MissingMode::NotAdmitted, ..PlanMode::EVALUATE };
                let plan = self.rig.plan(&ids, mode).expect("a plan");
                self.rig.place(&plan).expect("a place");
                let out = self.rig.forward(&plan, ids.len(), BAG).expect("a forward");
                assert_eq!(bits(&out), bits(&self.model.evaluate(&ids)));
            }
            2 => {
                self.finish();
                let gone: Vec<Id> = self.model.rows.iter().copied().filter(|_| dice.roll(4) == 0).collect();
                assert_eq!(self.rig.table.remove_rows(&gone).expect("removed"), gone.len() as u64);
                self.model.rig.table.remove_rows(&gone).expect("removed");
                self.model.rows.retain(|id| !gone.contains(id));
            }
            3 => {
                self.finish();
                let new: BTreeSet<Id> = dice.ids(5).into_iter().collect();
                let rows: Contents = new.iter().map(|&id| (id, row_of(id))).collect();
                self.rig.import(&rows).expect("imported");
                self.model.rig.import(&rows).expect("imported");
                self.model.rows.extend(&new);
                self.model.counts.retain(|id, _| !new.contains(id));
            }
            _ if self.ahead.is_empty() => {
                let ids = dice.ids(40);
                let plan = self.rig.plan(&ids, PlanMode::TRAIN).expect("a plan");
                self.ahead.push_back((ids, plan));
                self.train_next();
            }
            _ => self.train_next(),
        }
    }
}

fn row_of(id: Id) -> (embcache::rows::RowHeader, Vec<u32>) {
    let header = embcache::rows::RowHeader { id, count: 7, scalar: 0.5, ..Default::default() };
    (header, (0..DIM as u32).map(|column| (column as f32 + 0.25).to_bits()).collect())
}

fn count(threshold: u32) -> AdmissionRule {
    AdmissionRule::Count { threshold, window_steps: None, memory: MEMORY }
}

fn settings(number: usize, admission: AdmissionRule, not_admitted: MissingRead) -> TableConfig {
    let ssd = SsdConfig { dir: "/t".into(), bytes: 64 << 20, reopen: ReopenMode::Never, resume_commit_id: None };
    let made = match number {
        0 => config(DIM, OptimizerKind::RowWiseAdagrad, 100_000),
        1 => TableConfig { ssd: Some(ssd), ..config(DIM, OptimizerKind::RowWiseAdagrad, 60) },
        _ => TableConfig { optimizer: OptimizerKind::RowWiseAdagrad, ..three_tiers(DIM, Some(45), 60, 64 << 20) },
    };
    TableConfig { admission, not_admitted, seed: 0, key: 0, ..made }
}

#[test]
fn the_same_ids_get_the_same_rows_for_any_tiers_and_any_lookahead() {
    for (tiers, depth, threshold) in
        [(0, 0, 3), (0, 3, 2), (1, 0, 4), (1, 1, 3), (1, 8, 3), (2, 0, 3), (2, 2, 5), (0, 1, 1)]
    {
        let (rig, _) = Rig::with_faults(settings(tiers, count(threshold), MissingRead::Zeros));
        let model = Model {
            rig: Rig::with_faults(settings(0, AdmissionRule::All, MissingRead::Initial)).0,
            ..Model::new(threshold)
        };
        let mut pair = Pair { rig, model, ahead: Ahead::new(), salt: 0 };
        let mut dice = Dice((tiers * 1000 + depth) as u64 * 1_000_000);
        for _ in 0..150 * embcache_tests::times() {
            pair.random_step(&mut dice, depth);
        }
        pair.finish();
        assert_eq!(
            pair.rig.contents().expect("contents"),
            pair.model.rig.contents().expect("contents"),
            "{tiers} {depth}"
        );
        assert_eq!(pair.rig.table.len().expect("rows"), pair.model.rows.len() as u64);
        let stats = pair.rig.table.stats().expect("stats").admission.expect("admission");
        assert_eq!(stats.pending, pair.model.counts.len() as u64);
        assert!(stats.admitted > 0 && (threshold == 1) == (stats.not_admitted == 0), "{stats:?}");
    }
}

#[test]
fn ids_that_wait_take_no_room_of_rows() {
    let mut config = settings(0, count(2), MissingRead::Zeros);
    config.host_bytes = settings(0, count(2), MissingRead::Zeros).host_bytes / 1000;
    let (rig, _) = Rig::with_faults(config);
    for step in 0..50 {
        let ids: Vec<Id> = (step * 200..(step + 1) * 200).collect();
        rig.train(&ids, BAG, 1).expect("a step, in which no id gets a row");
    }
    let stats = rig.table.stats().expect("stats");
    assert_eq!((stats.rows, stats.host.rows, stats.admission.map(|a| a.pending)), (0, 0, Some(10_000)));
}

#[test]
fn id_not_admitted_reads_configured_value_and_is_not_trained() {
    for tiers in 0..3 {
        for (not_admitted, expected) in
            [(MissingRead::Zeros, Some(0.0)), (MissingRead::Value(0.25), Some(0.25)), (MissingRead::Initial, None)]
        {
            let (rig, _) = Rig::with_faults(settings(tiers, AdmissionRule::ReadOnly, not_admitted));
            rig.import(&[(5, row_of(5))].into_iter().collect()).expect("imported");
            let births = rig.table.read_rows(&[9]).expect("initial values").vectors;
            for step in 0..3 {
                let out = rig.train(&[5, 9, 9], 1, step).expect("a step");
                for row in [&out[DIM..2 * DIM], &out[2 * DIM..]] {
                    assert_eq!(
                        row,
                        expected.map_or_else(|| births.clone(), |value| vec![value; DIM]),
                        "{not_admitted:?}"
                    );
                }
            }
            let found = rig.table.read_rows(&[5, 9]).expect("rows");
            assert_eq!(found.found, [true, false]);
            assert_eq!((found.headers[0].count, rig.table.len().expect("rows")), (10, 1));
            let mode = PlanMode { missing: MissingMode::NotAdmitted, ..PlanMode::EVALUATE };
            let plan = rig.plan(&[9], mode).expect("a plan");
            rig.place(&plan).expect("a place");
            assert_eq!(rig.forward(&plan, 1, 1).expect("a forward"), out_of(&rig, 9, expected));
        }
    }
}

#[test]
fn device_tensors_without_a_slot_that_a_refused_id_reads_are_refused() {
    let wanted = TableConfig { device_rows: Some(64), ..settings(0, count(2), MissingRead::Initial) };
    let rig = Rig::open(wanted, std::sync::Arc::new(embcache::io::MemoryEngine::default())).expect("a table");
    // Each id occurs once, so none is admitted, and each reads the slot that contains its initial values.
    let ids: Vec<Id> = (0..40).collect();
    let plan = rig.plan(&ids, PlanMode::TRAIN).expect("a plan");
    rig.place(&plan).expect("a place");
    let highest = plan.slots(0).expect("slots").into_iter().max().expect("some") as usize;
    let offsets: Vec<i64> = (0..=40).collect();
    for (slots, is_enough) in [(0, false), (highest, false), (highest + 1, true)] {
        let mut parts = [vec![1.0; slots * DIM], vec![0.0; slots]];
        let [weights, scalars] = &mut parts;
        let mut tensors = [Some(DeviceTensors { weights, vector_slots: Vec::new(), scalars: Some(scalars) })];
        let pooled = plan.forward_pooled(&offsets, None, &[false], &mut [0.0; 40 * DIM], &mut tensors, 1);
        let sequence = plan.forward_sequence(&mut [0.0; 40 * DIM], &mut tensors, 1);
        for forward in [pooled, sequence] {
            assert_eq!(forward.map_err(|error| error.kind()), if is_enough { Ok(()) } else { Err(Kind::Input) });
        }
    }
}

#[test]
fn a_step_that_the_counter_cannot_count_on_from_is_refused() {
    let (rig, _) = Rig::with_faults(settings(0, count(1), MissingRead::Zeros));
    for step in [(1 << 53) + 1, u64::MAX] {
        let error = rig.table.set_step(step).expect_err("it is out of range");
        assert_eq!(error.kind(), Kind::Input);
        assert!(error.to_string().contains(&format!("step={step} is out of range")), "{error}");
    }
    rig.train(&[1], 1, 0).expect("a step");
    assert_eq!(rig.table.step().expect("the step"), 1);
    rig.table.set_step(1 << 53).expect("set");
    rig.train(&[1], 1, 0).expect("a step");
    assert_eq!(rig.table.step().expect("the step"), (1 << 53) + 1);
}

fn out_of(rig: &Rig, id: Id, expected: Option<f32>) -> Vec<f32> {
    expected.map_or_else(|| rig.table.read_rows(&[id]).expect("initial values").vectors, |value| vec![value; DIM])
}

#[test]
fn a_mean_counts_the_ids_that_are_not_admitted() {
    for tiers in 0..3 {
        let (rig, _) = Rig::with_faults(settings(tiers, AdmissionRule::ReadOnly, MissingRead::Value(2.0)));
        rig.import(&[(5, row_of(5))].into_iter().collect()).expect("imported");
        let plan = rig.plan(&[5, 6, 7, 8], PlanMode::TRAIN).expect("a plan");
        rig.place(&plan).expect("a place");
        let mut out = vec![0.0; DIM];
        rig.with_tensors(|tensors| plan.forward_pooled(&[0, 4], None, &[true], &mut out, tensors, 1))
            .expect("a forward");
        let expected: Vec<f32> = (0..DIM).map(|column| (column as f32 + 0.25 + 6.0) / 4.0).collect();
        assert_eq!(out, expected);
    }
}

#[test]
fn coins_are_thrown_alike_for_any_tiers_and_any_lookahead() {
    let admission = AdmissionRule::Probability { p: 0.2 };
    let mut found = Vec::new();
    for (tiers, depth) in [(0, 0), (1, 4), (2, 2)] {
        let (rig, _) = Rig::with_faults(settings(tiers, admission, MissingRead::Zeros));
        let mut dice = Dice(3);
        let mut ahead: Ahead = Ahead::new();
        for step in 0..60 {
            let ids = dice.ids(40);
            let mode = if depth == 0 { PlanMode::TRAIN } else { PlanMode::TRAIN_PREFETCH };
            ahead.push_back((ids.clone(), rig.plan(&ids, mode).expect("a plan")));
            while ahead.len() > depth || step == 59 && !ahead.is_empty() {
                let (ids, plan) = ahead.pop_front().expect("one");
                rig.finish(&plan, ids.len(), BAG, 1).expect("a step");
            }
        }
        found.push(rig.contents().expect("contents"));
    }
    assert!(found[0] == found[1] && found[0] == found[2]);
    // Ids that occur once are most of the 1200 or so: about a fifth of them have rows.
    let once = found[0].keys().filter(|id| **id >= 60).count();
    assert!((170..310).contains(&once), "{once}");
}

#[test]
fn shows_and_clicks_add_up() {
    let admission =
        AdmissionRule::ShowClick { alpha: 0.25, beta: 1.0, threshold: 1.0, window_steps: None, memory: MEMORY };
    let (rig, _) = Rig::with_faults(settings(0, admission, MissingRead::Zeros));
    let step = |ids: &[Id], clicks: &[u32]| {
        let plan = rig.lookup.plan(ids, &[0, ids.len() as i64], PlanMode::TRAIN, clicks).expect("a plan");
        rig.finish(&plan, ids.len(), BAG, 1).expect("a step");
        rig.contents().expect("contents").into_keys().collect::<Vec<Id>>()
    };
    assert_eq!(step(&[1, 1, 2, 3], &[0, 0, 0, 1]), [3]);
    assert_eq!(step(&[1, 2], &[]), [3], "three quarters and a half");
    assert_eq!(step(&[1], &[]), [1, 3]);
    assert_eq!(step(&[2], &[]), [1, 3], "three quarters");
    assert_eq!(step(&[2], &[]), [1, 2, 3]);
    let error = rig.lookup.plan(&[1, 2], &[0, 2], PlanMode::TRAIN, &[1]).expect_err("too few clicks");
    assert_eq!(error.kind(), Kind::Input);
}

#[test]
fn removed_row_counts_from_zero_again() {
    let (rig, _) = Rig::with_faults(settings(1, count(3), MissingRead::Zeros));
    let has = |id: Id| rig.table.read_rows(&[id]).expect("rows").found[0];
    rig.train(&[1, 1, 1], 1, 0).expect("a step");
    assert!(has(1));
    rig.table.remove_rows(&[1]).expect("removed");
    rig.train(&[1, 1], 1, 0).expect("a step");
    assert!(!has(1));
    rig.train(&[1], 1, 0).expect("a step");
    assert!(has(1));
}

#[test]
fn two_batches_in_flight_that_both_admit_an_id_train_one_row() {
    for tiers in 0..3 {
        let (rig, _) = Rig::with_faults(settings(tiers, count(2), MissingRead::Zeros));
        let plans = [(); 3].map(|()| rig.plan(&[1, 1, 2], PlanMode::TRAIN).expect("a plan"));
        // All three are forwarded before the first backward.
        let outs = plans.each_ref().map(|plan| {
            rig.place(plan).expect("a place");
            rig.forward(plan, 3, 1).expect("a forward")
        });
        for (plan, out) in plans.iter().zip(&outs) {
            rig.backward(plan, out.len(), 1).expect("a backward");
        }
        let found = rig.table.read_rows(&[1, 2]).expect("rows");
        assert_eq!((found.found, found.headers[0].count), (vec![true, false], 6), "{tiers}");
        // The three rejections of id 2 were counted, each once.
        assert_eq!(rig.table.stats().expect("stats").admission.map(|a| (a.pending, a.not_admitted)), Some((1, 3)));
        rig.train(&[2], 1, 1).expect("a step");
        assert!(rig.table.read_rows(&[2]).expect("rows").found[0]);
    }
}

#[test]
fn an_id_that_another_batch_gave_its_row_meanwhile_is_not_counted() {
    let (rig, _) = Rig::with_faults(settings(0, count(3), MissingRead::Zeros));
    let refused = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
    rig.place(&refused).expect("a place");
    let out = rig.forward(&refused, 1, 1).expect("a forward");
    rig.train(&[1, 1, 1], 1, 1).expect("a step that admits it");
    rig.backward(&refused, out.len(), 1).expect("a backward");
    assert_eq!(rig.table.stats().expect("stats").admission.map(|a| a.pending), Some(0));
    assert_eq!(rig.table.read_rows(&[1]).expect("rows").headers[0].count, 3);
}

#[test]
fn counts_move_to_shards_in_which_ids_fall_into_other_buckets() {
    let counted = AdmissionRule::Count { threshold: 4, window_steps: NonZeroU64::new(20), memory: MEMORY };
    let open = |total: u32, buckets: std::ops::Range<u32>| {
        let settings = settings(0, counted, MissingRead::Zeros);
        Rig::with_faults(TableConfig { total_num_buckets: total, buckets, ..settings }).0
    };
    let counts = |rig: &Rig| {
        let (mut found, bucketing) = (BTreeMap::new(), rig.table.config().bucketing());
        let mut gather = |counts: embcache::lifecycle::BucketCounts| {
            for each in counts.ids {
                assert_eq!(bucketing.of(each.id), counts.bucket);
                found.insert(each.id, (each.shows, each.is_older));
            }
            Ok(())
        };
        rig.table.for_each_bucket(None, &mut gather).expect("its counts");
        found
    };
    let from = open(13, 0..13);
    let mut dice = Dice(5);
    for _ in 0..30 {
        from.train(&dice.ids(60), BAG, 1).expect("a step");
    }
    let expected = counts(&from);
    assert!(expected.len() > 100);
    assert!(expected.values().any(|(_, is_older)| *is_older) && expected.values().any(|(_, is_older)| !is_older));
    from.table.close().expect("closed");
    let shards = [open(7, 0..3), open(7, 3..7)];
    let mut found = BTreeMap::new();
    for shard in &shards {
        shard.table.take_counts(&from.table).expect("taken over");
        found.extend(counts(shard));
    }
    assert_eq!(found, expected);
    let pending = shards.iter().map(|shard| shard.table.stats().expect("stats").admission.expect("counts").pending);
    assert_eq!(pending.sum::<u64>(), expected.len() as u64);
}

#[test]
fn numbers_out_of_range_are_refused() {
    let show_click =
        |alpha, beta, threshold| AdmissionRule::ShowClick { alpha, beta, threshold, window_steps: None, memory: 1 };
    for admission in [
        count(0),
        count(1 << 24),
        AdmissionRule::Count { threshold: 2, window_steps: NonZeroU64::new(5), memory: 0 },
        AdmissionRule::Probability { p: 0.0 },
        AdmissionRule::Probability { p: 1.5 },
        AdmissionRule::Probability { p: f64::NAN },
        show_click(-1.0, 1.0, 1.0),
        show_click(1.0, f64::INFINITY, 1.0),
        show_click(0.0, 0.0, 1.0),
    ] {
        let engine = std::sync::Arc::new(embcache::io::MemoryEngine::default());
        let opened = Rig::open(settings(0, admission, MissingRead::Zeros), engine);
        assert_eq!(opened.map(|_| ()).expect_err("out of range").kind(), Kind::Config, "{admission:?}");
    }
}

#[test]
fn rejected_ids_train_oov_row_only_after_sums_are_given() {
    for device_rows in [None, Some(64)] {
        let shared = TableConfig {
            admission: AdmissionRule::ReadOnly,
            not_admitted: MissingRead::OovRow,
            device_rows,
            ..config(DIM, OptimizerKind::Sgd, 100)
        };
        let (rig, _) = Rig::with_faults(shared);
        let weights = || bits(rig.table.oov_row().expect("an open table").expect("an OOV row").values());
        let ids = [1, 2, 1, 3];
        let plan = rig.plan(&ids, PlanMode::TRAIN).expect("a plan");
        rig.place(&plan).expect("a place");
        assert_eq!(bits(&rig.forward(&plan, ids.len(), 2).expect("a forward")), [0; 2 * DIM]);
        let grad: Vec<f32> = (0..2 * DIM).map(|at| at as f32).collect();
        let refused = rig.backward_with(&plan, &grad).expect_err("the OOV row would not be trained");
        assert_eq!((refused.kind(), weights(), rig.table.step().expect("a step")), (Kind::State, vec![0; DIM], 0));
        let sums = plan.oov_gradient_sums_pooled(&grad, 1).expect("sums");
        assert_eq!(sums.last(), Some(&3), "distinct ids");
        assert_eq!(plan.train_oov_row(&sums[1..], &[hyperparameters()]).expect_err("too few").kind(), Kind::Input);
        // Like two ranks whose batches were the same.
        let twice: Vec<i64> = sums.iter().map(|sum| 2 * sum).collect();
        plan.train_oov_row(&twice, &[hyperparameters()]).expect("sums of all ranks");
        assert_eq!(weights(), [0; DIM], "before the commit");
        rig.backward_with(&plan, &grad).expect("a backward");
        let lr = hyperparameters().lr as f32;
        let want: Vec<f32> = (0..DIM).map(|at| -lr * (4 * at + 4 * (at + DIM)) as f32).collect();
        assert_eq!((weights(), rig.table.step().expect("a step")), (bits(&want), 1));
        let evaluated = PlanMode { missing: MissingMode::NotAdmitted, ..PlanMode::EVALUATE };
        let plan = rig.plan(&[9], evaluated).expect("a plan");
        rig.place(&plan).expect("a place");
        assert_eq!(bits(&rig.forward(&plan, 1, 1).expect("a forward")), bits(&want));
    }
}
