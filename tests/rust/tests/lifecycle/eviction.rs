//! Tests of eviction by rule: the expired rows, compared with a model that removes them by id, for any tiers and any
//! number of batches planned ahead.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;

use embcache::cache::{EvictedQueue, Plan, PlanMode};
use embcache::config::{
    AdmissionRule, EvictionConfig, EvictionRule, MissingRead, OptimizerKind, ReopenMode, SsdConfig, TableConfig,
};
use embcache::lifecycle::sortable_score;
use embcache::rows::{RowHeader, ScoreDecay};
use embcache::types::Id;
use embcache_tests::dice::{Dice, bits};
use embcache_tests::{Contents, Rig, config, three_tiers};

const DIM: usize = 4;
const BAG: usize = 5;
const HALF_LIFE: u64 = 16;

fn settings(tiers: usize, eviction: Option<EvictionConfig>) -> TableConfig {
    let ssd = SsdConfig { dir: "/t".into(), bytes: 64 << 20, reopen: ReopenMode::Never, resume_commit_id: None };
    let made = match tiers {
        0 => config(DIM, OptimizerKind::RowWiseAdagrad, 100_000),
        1 => TableConfig { ssd: Some(ssd), ..config(DIM, OptimizerKind::RowWiseAdagrad, 60) },
        _ => TableConfig { optimizer: OptimizerKind::RowWiseAdagrad, ..three_tiers(DIM, Some(45), 60, 64 << 20) },
    };
    TableConfig { score_half_life_steps: HALF_LIFE, seed: 0, key: 0, eviction, ..made }
}

/// True if the rule matches a row after step `s`: written from the definition of the rules, and not from their
/// implementation.
fn takes(rule: &EvictionRule, s: u64, header: &RowHeader, weights: &[f32]) -> bool {
    match rule {
        EvictionRule::Unused { steps } => s >= *steps && header.last_step <= s - steps,
        EvictionRule::ScoreBelow(below) => {
            ScoreDecay::new(HALF_LIFE).expect("in range").of(header.score, header.last_step, s) < *below
        }
        EvictionRule::NormBelow(below) => {
            weights.iter().map(|&weight| f64::from(weight).powi(2)).sum::<f64>() < below * below
        }
        EvictionRule::TrainedUntil { step } => header.last_step <= *step,
        EvictionRule::Nothing | EvictionRule::PerSweep | EvictionRule::PerSweepTimed => false,
        EvictionRule::Below { score, last_step, id } => {
            let now = ScoreDecay::new(HALF_LIFE).expect("in range").of(header.score, header.last_step, s);
            (sortable_score(now), header.last_step, header.id.cast_unsigned()) < (*score, *last_step, *id)
        }
        EvictionRule::Any(rules) => rules.iter().any(|rule| takes(rule, s, header, weights)),
        EvictionRule::All(rules) => rules.iter().all(|rule| takes(rule, s, header, weights)),
    }
}

/// The name of the first rule that matches a row.
fn reason(rule: &EvictionRule, s: u64, header: &RowHeader, weights: &[f32]) -> &'static str {
    match rule {
        EvictionRule::Unused { .. } | EvictionRule::TrainedUntil { .. } => "ttl",
        EvictionRule::ScoreBelow(_) => "score",
        EvictionRule::NormBelow(_) => "l2_norm",
        EvictionRule::Below { .. } => "lowest",
        EvictionRule::Nothing | EvictionRule::PerSweep | EvictionRule::PerSweepTimed => "",
        EvictionRule::All(rules) => match &rules[..] {
            [rule, EvictionRule::Below { .. }] => reason(rule, s, header, weights),
            _ => "all",
        },
        EvictionRule::Any(rules) => {
            let first = rules.iter().find(|rule| takes(rule, s, header, weights)).expect("one of them takes it");
            reason(first, s, header, weights)
        }
    }
}

/// An evicted row: its id, the step after which it expired, the reason, its header as text, and the bits of its vector
/// part.
type Gone = (Id, u64, &'static str, String, Vec<u32>);

/// A table without eviction: rows that match the rule are removed by id.
struct Model {
    rig: Rig,
    rule: EvictionRule,
    every: Option<u64>,
    step: u64,
    /// Ids of batches between forward and backward. A sweep defers their rows until the batch ends.
    in_place: BTreeSet<Id>,
    /// The deferred rows that match a sweep, with the step and the reason of the first sweep that they match.
    spared: BTreeMap<Id, (u64, &'static str)>,
    /// The rows removed since the last check.
    gone: Vec<Gone>,
}

impl Model {
    fn remove(&mut self, dead: &BTreeMap<Id, (u64, &'static str)>) {
        let mut rows = self.rig.contents().expect("contents");
        for (&id, &(step, reason)) in dead {
            let (header, bits) = rows.remove(&id).expect("it is there");
            self.gone.push((id, step, reason, format!("{header:?}"), bits));
        }
        self.rig.table.remove_rows(&dead.keys().copied().collect::<Vec<Id>>()).expect("removed");
    }

    fn sweep(&mut self) {
        let rows = self.rig.contents().expect("contents");
        let is_dead = |(id, (header, bits)): (Id, (RowHeader, Vec<u32>))| {
            let weights: Vec<f32> = bits[..DIM].iter().map(|&bits| f32::from_bits(bits)).collect();
            let dies = takes(&self.rule, self.step, &header, &weights);
            dies.then(|| (id, (self.step, reason(&self.rule, self.step, &header, &weights))))
        };
        let mut dead: BTreeMap<Id, (u64, &'static str)> = rows.into_iter().filter_map(is_dead).collect();
        for id in &self.in_place {
            if let Some(why) = dead.remove(id) {
                self.spared.entry(*id).or_insert(why);
            }
        }
        self.remove(&dead);
    }

    fn step_ends(&mut self) {
        self.step += 1;
        if self.every.is_some_and(|every| self.step.is_multiple_of(every)) {
            self.sweep();
        }
    }
}

/// Batches that are planned and not trained yet.
type Ahead = VecDeque<(Vec<Id>, Plan)>;

/// A table with a rule, and its model.
struct Pair {
    rig: Rig,
    model: Model,
    ahead: Ahead,
    salt: u32,
    /// The queue of the table's evicted rows, and the rows that were taken from it.
    kept: Option<Arc<EvictedQueue>>,
    told: Vec<Gone>,
}

impl Pair {
    fn new(tiers: usize, rule: &EvictionRule, every: Option<u64>, keeps: bool) -> Self {
        let every_steps = every.and_then(NonZeroU64::new);
        let eviction = Some(EvictionConfig { rule: rule.clone(), every_steps });
        let model = Model {
            rig: Rig::with_faults(settings(0, None)).0,
            rule: rule.clone(),
            every,
            step: 0,
            in_place: BTreeSet::new(),
            spared: BTreeMap::new(),
            gone: Vec::new(),
        };
        let (rig, _) = Rig::with_faults(settings(tiers, eviction));
        let kept = keeps.then(|| rig.table.start_evicted_queue().expect("a queue"));
        Self { rig, model, ahead: Ahead::new(), salt: 0, kept, told: Vec::new() }
    }

    fn train_next(&mut self) {
        let (ids, plan) = self.ahead.pop_front().expect("a planned batch");
        self.salt += 1;
        let out = self.rig.finish(&plan, ids.len(), BAG, self.salt).expect("a step");
        let expected = self.model.rig.train(&ids, BAG, self.salt).expect("a step");
        self.model.spared.retain(|id, _| !ids.contains(id));
        self.model.step_ends();
        assert_eq!(bits(&out), bits(&expected), "step {}", self.model.step);
    }

    fn finish(&mut self) {
        while !self.ahead.is_empty() {
            self.train_next();
        }
    }

    fn check(&self) {
        let expected = self.model.rig.contents().expect("contents");
        assert_eq!(self.rig.table.len().expect("rows"), expected.len() as u64, "step {}", self.model.step);
        assert!(self.rig.contents().expect("contents") == expected, "step {}", self.model.step);
    }

    /// Takes the next evicted rows, if the table has any. Returns true if it had.
    fn take_evicted(&mut self) -> bool {
        let Some(chunk) = self.rig.table.next_evicted().expect("evicted rows") else { return false };
        let vectors = chunk.rows.vectors.chunks(self.rig.table.config().layout().vector_floats());
        for (header, vector) in chunk.rows.headers.iter().zip(vectors) {
            let bits = vector.iter().map(|value| value.to_bits()).collect();
            self.told.push((header.id, chunk.step, chunk.reason, format!("{header:?}"), bits));
        }
        true
    }

    /// Checks that each row that the model removed was delivered once, with its bits, its step and its reason.
    fn check_told(&mut self) {
        if self.kept.is_none() {
            return;
        }
        while self.take_evicted() {}
        let (mut told, mut gone) = (std::mem::take(&mut self.told), std::mem::take(&mut self.model.gone));
        told.sort();
        gone.sort();
        let (only_told, only_gone): (Vec<_>, Vec<_>) = (
            told.iter().filter(|row| !gone.contains(row)).collect(),
            gone.iter().filter(|row| !told.contains(row)).collect(),
        );
        assert!(told == gone, "step {}: {only_told:?} but {only_gone:?}", self.model.step);
        assert_eq!(self.rig.table.stats().expect("stats").eviction.expect("a rule").undelivered, 0);
    }

    /// Runs a sweep by the table's rule, or by any rule if one is passed to each sweep.
    fn sweep(&mut self, dice: &mut Dice) {
        if self.rig.table.config().eviction.as_ref().expect("a rule").rule == EvictionRule::PerSweep {
            let step = self.model.step.saturating_sub(dice.roll(8));
            let mut rules = rules();
            rules.extend([EvictionRule::Nothing, EvictionRule::TrainedUntil { step }]);
            self.model.rule = rules.swap_remove(dice.roll(rules.len() as u64) as usize);
            self.rig.table.sweep_with_rule(&self.model.rule).expect("a sweep");
        } else {
            self.rig.table.sweep().expect("a sweep");
        }
        self.model.sweep();
    }

    /// Imports rows, but none of a batch between forward and backward.
    fn import(&mut self, dice: &mut Dice) {
        let new = dice.ids(5).into_iter().filter(|id| !self.model.in_place.contains(id));
        let rows: Contents = new.map(|id| (id, row_of(id))).collect();
        self.rig.import(&rows).expect("imported");
        self.model.rig.import(&rows).expect("imported");
    }

    /// Forwards a batch, runs sweeps by other batches, and then trains or releases it.
    fn train_around_others(&mut self, dice: &mut Dice) {
        self.finish();
        let ids = dice.ids(30);
        let mine = self.rig.plan(&ids, PlanMode::TRAIN).expect("a plan");
        let models = self.model.rig.plan(&ids, PlanMode::TRAIN).expect("a plan");
        self.rig.place(&mine).expect("a place");
        self.model.rig.place(&models).expect("a place");
        let out = self.rig.forward(&mine, ids.len(), BAG).expect("a forward");
        let expected = self.model.rig.forward(&models, ids.len(), BAG).expect("a forward");
        assert_eq!(bits(&out), bits(&expected));
        self.model.in_place = ids.iter().copied().collect();
        for _ in 0..dice.roll(5) {
            match dice.roll(6) {
                0 | 1 => self.sweep(dice),
                2 => self.import(dice),
                3 => self.check(),
                _ => {
                    let ids = dice.ids(20);
                    self.ahead.push_back((ids.clone(), self.rig.plan(&ids, PlanMode::TRAIN).expect("a plan")));
                    self.train_next();
                }
            }
        }
        if dice.roll(2) == 0 {
            self.rig.backward(&mine, out.len(), 5).expect("a backward");
            self.model.rig.backward(&models, out.len(), 5).expect("a backward");
            self.model.in_place.clear();
            self.model.spared.clear();
            self.model.step_ends();
        } else {
            drop((mine, models));
            self.model.in_place.clear();
            let spared = std::mem::take(&mut self.model.spared);
            self.model.remove(&spared);
        }
    }

    fn random_step(&mut self, dice: &mut Dice, depth: usize) {
        while self.ahead.len() < depth {
            let ids = dice.ids(40);
            let plan = self.rig.plan(&ids, PlanMode::TRAIN_PREFETCH).expect("a plan ahead");
            self.ahead.push_back((ids, plan));
        }
        match dice.roll(16) {
            0 => {
                // A forward that no backward follows.
                let ids = dice.ids(30);
                let plan = self.rig.plan(&ids, PlanMode::TRAIN).expect("a plan");
                self.rig.place(&plan).expect("a place");
                self.rig.forward(&plan, ids.len(), BAG).expect("a forward");
            }
            1 | 2 => {
                let (ids, zeros) = (dice.ids(30), dice.roll(2) == 0);
                let out = self.rig.evaluate(&ids, BAG, zeros).expect("an evaluation");
                assert_eq!(bits(&out), bits(&self.model.rig.evaluate(&ids, BAG, zeros).expect("an evaluation")));
            }
            3 => self.sweep(dice),
            4 => self.check(),
            5 => {
                self.finish();
                self.import(dice);
            }
            6 => {
                let ids = dice.ids(20);
                let (found, expected) = (self.rig.table.read_rows(&ids), self.model.rig.table.read_rows(&ids));
                let (found, expected) = (found.expect("rows"), expected.expect("rows"));
                assert_eq!((found.found, found.headers), (expected.found, expected.headers));
            }
            7 => {
                let _ = self.ahead.pop_back();
            }
            8 => self.train_around_others(dice),
            10 if self.kept.is_some() => {
                self.take_evicted();
            }
            11 => self.check_told(),
            9 if self.rig.table.config().ssd.is_some() => self.rig.table.flush_next().expect("a flush"),
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

/// A row that was trained last at step 0.
fn row_of(id: Id) -> (RowHeader, Vec<u32>) {
    let header = RowHeader { id, count: 7, score: 2.0, scalar: 0.5, ..Default::default() };
    (header, (0..DIM as u32).map(|column| (column as f32 / 8.0).to_bits()).collect())
}

fn rules() -> Vec<EvictionRule> {
    use EvictionRule::{All, Any, Below, NormBelow, ScoreBelow, Unused};
    vec![
        Unused { steps: 6 },
        ScoreBelow(0.8),
        NormBelow(1.0),
        Any(vec![Unused { steps: 9 }, NormBelow(0.7)]),
        All(vec![Unused { steps: 3 }, ScoreBelow(1.5), NormBelow(1.4)]),
        Below { score: sortable_score(1.0), last_step: 40, id: 9 },
        All(vec![
            Any(vec![Unused { steps: 4 }, NormBelow(0.9)]),
            Below { score: sortable_score(1.5), last_step: 0, id: 0 },
        ]),
    ]
}

#[test]
fn same_rows_expire_for_any_tiers_and_lookahead() {
    let every = [None, Some(1), Some(3), Some(7)];
    for (number, (tiers, depth)) in
        [(0, 0), (0, 3), (1, 0), (1, 1), (1, 8), (2, 0), (2, 1), (2, 4)].into_iter().enumerate()
    {
        for (which, rule) in rules().iter().enumerate() {
            // Every other table queues its evicted rows; the others do not deliver them.
            let mut pair = Pair::new(tiers, rule, every[(number + which) % every.len()], (number + which / 2) % 2 == 0);
            let mut dice = Dice(((number * 10 + which) as u64) << 32);
            for _ in 0..150 * embcache_tests::times() {
                pair.random_step(&mut dice, depth);
            }
            pair.finish();
            pair.check_told();
            pair.check();
            let evicted = pair.rig.table.stats().expect("stats").eviction.expect("a rule").evicted;
            assert!(evicted > 20, "{tiers} {depth} {rule:?}: {evicted}");
        }
    }
}

/// A row that a batch pins expires by the first sweep that selects it, for any sweeps that follow.
#[test]
fn pinned_row_expires_by_first_sweep_that_selects_it() {
    for number in 0..18 {
        let (tiers, depth) = (number % 3, [0, 1, 4][number / 3 % 3]);
        let mut pair = Pair::new(tiers, &EvictionRule::PerSweep, None, number % 2 == 0);
        let mut dice = Dice((number as u64 + 500) << 32);
        for _ in 0..60 * embcache_tests::times() {
            for _ in 0..dice.roll(3) {
                pair.random_step(&mut dice, depth);
            }
            pair.train_around_others(&mut dice);
        }
        pair.finish();
        pair.check_told();
        pair.check();
    }
}

/// Rows expire in parts before each batch, and all at once for a call that counts the rows.
#[test]
fn rows_expire_gradually_but_counts_are_exact() {
    let rows = 200_000_u64;
    let eviction = EvictionConfig { rule: EvictionRule::Unused { steps: 1 }, every_steps: None };
    let wanted = TableConfig { eviction: Some(eviction), ..config(DIM, OptimizerKind::Sgd, 2 * rows) };
    let (rig, _) = Rig::with_faults(wanted);
    let ids: Vec<Id> = (0..rows as Id).collect();
    rig.train(&ids, BAG, 1).expect("a step");
    rig.train(&[-1], BAG, 1).expect("a step");
    rig.table.sweep().expect("a sweep");
    let stats = || rig.table.stats().expect("stats");
    assert_eq!((stats().rows, stats().eviction.map(|e| (e.evicted, e.is_sweeping))), (rows + 1, Some((0, true))));
    rig.train(&[5], BAG, 1).expect("a step");
    let after = stats().eviction.expect("a rule");
    assert!(after.is_sweeping && (1..20_000).contains(&after.evicted), "{after:?}");
    assert_eq!(rig.table.read_rows(&[5]).expect("rows").headers[0].count, 1, "the row was born anew");
    assert_eq!(rig.table.len().expect("rows"), 2);
    assert_eq!(stats().eviction.map(|e| (e.evicted, e.is_sweeping)), Some((rows, false)));
}

#[test]
fn expired_row_counts_from_zero_before_readmission() {
    for tiers in 0..3 {
        let eviction = EvictionConfig { rule: EvictionRule::Unused { steps: 2 }, every_steps: NonZeroU64::new(1) };
        let admission = AdmissionRule::Count { threshold: 3, window_steps: None, memory: 1 << 20 };
        let wanted = TableConfig { admission, not_admitted: MissingRead::Zeros, ..settings(tiers, Some(eviction)) };
        let (rig, _) = Rig::with_faults(wanted);
        let has = |id: Id| rig.table.read_rows(&[id]).expect("rows").found[0];
        rig.train(&[1, 1, 1], 1, 0).expect("a step");
        // This plan has pinned the row, which expires before the plan is used.
        let ahead = rig.plan(&[1, 1], PlanMode::TRAIN_PREFETCH).expect("a plan ahead");
        for id in 2..5 {
            rig.train(&[id], 1, 0).expect("a step");
        }
        assert!(!has(1));
        let out = rig.finish(&ahead, 2, 1, 0).expect("a step");
        assert_eq!((out, has(1)), (vec![0.0; 2 * DIM], false), "two of three");
        rig.train(&[1], 1, 0).expect("a step");
        assert!(has(1), "tiers {tiers}");
    }
}

/// A batch pins a row while a sweep passes its record. The row expires when the batch has ended.
#[test]
fn row_pinned_when_sweep_passed_expires_after_batch() {
    let eviction = EvictionConfig { rule: EvictionRule::Unused { steps: 1 }, every_steps: None };
    // Space for the index of these rows, and for several hundred of them.
    let wanted = TableConfig { host_bytes: 800_000, ..settings(1, Some(eviction)) };
    let (rig, _) = Rig::with_faults(wanted);
    for first in (0..60_000).step_by(1000) {
        rig.import(&(first..first + 1000).map(|id| (id, row_of(id))).collect()).expect("imported");
    }
    rig.train(&[-1], BAG, 0).expect("a step");
    rig.train(&[-2], BAG, 0).expect("a step");
    let held = rig.plan(&[5], PlanMode::EVALUATE).expect("a plan");
    rig.place(&held).expect("a place");
    rig.table.sweep().expect("a sweep");
    // Each batch continues the sweep, which has passed some of the records on SSD by then. A batch passes at most
    // 16,384 of them.
    for _ in 0..3 {
        rig.evaluate(&[-2], BAG, true).expect("an evaluation");
    }
    assert!(rig.table.stats().expect("stats").eviction.expect("a rule").is_sweeping);
    drop(held);
    // Others evict the row from RAM. It is not written, because SSD has it.
    rig.evaluate(&(100_000..103_000).collect::<Vec<Id>>(), BAG, false).expect("an evaluation");
    assert_eq!(rig.table.len().expect("rows"), 1);
    assert_eq!(rig.contents().expect("contents").into_keys().collect::<Vec<Id>>(), [-2]);
}
