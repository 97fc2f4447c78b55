//! Tests of sweeps by a rule that is passed to each of them, because ranks agree on it.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::sync::Arc;

use embcache::Kind;
use embcache::config::{EvictionConfig, EvictionRule, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::MemoryEngine;
use embcache::types::Id;
use embcache_tests::{Rig, config, three_tiers};

const DIM: usize = 4;
const BAG: usize = 5;

fn settings(tiers: usize, rule: EvictionRule) -> TableConfig {
    let ssd = SsdConfig { dir: "/t".into(), bytes: 64 << 20, reopen: ReopenMode::Never, resume_commit_id: None };
    let made = match tiers {
        0 => config(DIM, OptimizerKind::RowWiseAdagrad, 100_000),
        1 => TableConfig { ssd: Some(ssd), ..config(DIM, OptimizerKind::RowWiseAdagrad, 60) },
        _ => TableConfig { optimizer: OptimizerKind::RowWiseAdagrad, ..three_tiers(DIM, Some(45), 60, 64 << 20) },
    };
    TableConfig { eviction: Some(EvictionConfig { rule, every_steps: NonZeroU64::new(1) }), ..made }
}

/// A table that has trained ids 10 s to 10 s + 9 in step s, starting at step 1.
fn trained(tiers: usize, rule: EvictionRule, steps: Id) -> Rig {
    let (rig, _) = Rig::with_faults(settings(tiers, rule));
    for step in 1..=steps {
        rig.train(&(10 * step..10 * step + 10).collect::<Vec<Id>>(), BAG, step as u32).expect("a step");
    }
    rig
}

fn ids(rig: &Rig) -> BTreeSet<Id> {
    rig.contents().expect("contents").into_keys().collect()
}

/// A sweep applies the rule that is passed to it. The table sweeps by no other rule.
#[test]
fn sweep_applies_only_the_given_rule() {
    for tiers in 0..3 {
        let rig = trained(tiers, EvictionRule::PerSweep, 20);
        assert_eq!(ids(&rig).len(), 200, "no sweep is due by itself");
        // Twice after one step, by rules that match more and more, then fewer, then no rows.
        for (until, first) in [(4, 50), (9, 100), (7, 100)] {
            rig.table.sweep_with_rule(&EvictionRule::TrainedUntil { step: until }).expect("a sweep");
            assert_eq!(ids(&rig), (first..210).collect(), "tiers {tiers}");
        }
        rig.table.sweep_with_rule(&EvictionRule::Nothing).expect("a sweep");
        // A sweep that is running when the next one starts, with other rows.
        let joined =
            |step, below| EvictionRule::All(vec![EvictionRule::TrainedUntil { step }, EvictionRule::ScoreBelow(below)]);
        rig.table.sweep_with_rule(&joined(12, 1e9)).expect("a sweep");
        rig.table.sweep_with_rule(&joined(15, 1e-9)).expect("a sweep");
        assert_eq!(ids(&rig), (130..210).collect(), "tiers {tiers}");
        let stats = rig.table.stats().expect("stats").eviction.expect("the table has eviction");
        assert_eq!((stats.evicted, stats.is_sweeping), (120, false));
        rig.train(&[1], BAG, 0).expect("a step");
        assert!(ids(&rig).contains(&1));
    }
}

#[test]
fn what_was_prefetched_before_the_sweep_is_unseen_after_it() {
    use embcache::cache::PlanMode;

    let rig = trained(1, EvictionRule::PerSweep, 3);
    let ahead = rig.plan(&[10, 30], PlanMode::TRAIN_PREFETCH).expect("a plan ahead");
    rig.table.sweep_with_rule(&EvictionRule::TrainedUntil { step: 2 }).expect("a sweep");
    rig.finish(&ahead, 2, 1, 0).expect("a step");
    let rows = rig.table.read_rows(&[10, 30]).expect("rows");
    assert_eq!((rows.headers[0].count, rows.headers[1].count), (1, 2), "one was born anew");
}

/// A rule that is missing, not expected or out of range is rejected, and no row expires.
#[test]
fn missing_unexpected_or_invalid_rule_is_rejected() {
    let given = trained(0, EvictionRule::PerSweep, 3);
    let own = trained(0, EvictionRule::Unused { steps: 50 }, 3);
    let none = Rig::with_faults(config(DIM, OptimizerKind::RowWiseAdagrad, 100)).0;
    let until = EvictionRule::TrainedUntil { step: 2 };
    for (rig, rule, kind) in [
        (&given, None, Kind::State),
        (&given, Some(&EvictionRule::PerSweep), Kind::State),
        (&given, Some(&EvictionRule::ScoreBelow(-1.0)), Kind::Config),
        (&own, Some(&until), Kind::State),
        (&none, Some(&until), Kind::State),
    ] {
        let before = ids(rig);
        let swept = rule.map_or_else(|| rig.table.sweep(), |rule| rig.table.sweep_with_rule(rule));
        assert_eq!(swept.expect_err("refused").kind(), kind, "{rule:?}");
        assert_eq!(rig.table.prepare_sweep(rule).expect_err("refused").kind(), kind, "{rule:?}");
        assert_eq!(ids(rig), before);
    }
    none.table.sweep().expect("nothing to do");
}

#[test]
fn rules_out_of_range_are_refused() {
    use EvictionRule::{All, Any, NormBelow, ScoreBelow, Unused};
    for rule in [
        Unused { steps: 0 },
        ScoreBelow(0.0),
        ScoreBelow(f32::NAN),
        NormBelow(-1.0),
        NormBelow(f64::INFINITY),
        Any(vec![]),
        All(vec![Unused { steps: 3 }, Any(vec![ScoreBelow(-1.0)])]),
        All(vec![Unused { steps: 3 }, EvictionRule::PerSweep]),
    ] {
        let engine = Arc::new(MemoryEngine::default());
        let opened = Rig::open(settings(0, rule.clone()), engine);
        assert_eq!(opened.map(|_| ()).expect_err("out of range").kind(), Kind::Config, "{rule:?}");
    }
}
