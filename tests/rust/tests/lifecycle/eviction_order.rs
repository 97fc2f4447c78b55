//! Tests of the eviction order: a score histogram of a table's rows, and sweeps that evict the rows below a threshold,
//! compared with a sorted list.

use std::collections::BTreeSet;

use embcache::Kind;
use embcache::cache::PlanMode;
use embcache::config::{EvictionConfig, EvictionRule, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::lifecycle::{RankKey, RankKeyRange, RankRangeContents};
use embcache::rows::{RowHeader, ScoreDecay};
use embcache::types::Id;
use embcache_tests::dice::Dice;
use embcache_tests::{Contents, Rig, config, three_tiers};

const DIM: usize = 4;
const BAG: usize = 5;
const HALF_LIFE: u64 = 16;
const ALL: RankKeyRange = RankKeyRange { low: RankKey::LOWEST, high: RankKey::HIGHEST, is_listed: true };

fn settings(tiers: usize) -> TableConfig {
    let ssd = SsdConfig { dir: "/t".into(), bytes: 64 << 20, reopen: ReopenMode::Never, resume_commit_id: None };
    let made = match tiers {
        0 => config(DIM, OptimizerKind::RowWiseAdagrad, 100_000),
        1 => TableConfig { ssd: Some(ssd), ..config(DIM, OptimizerKind::RowWiseAdagrad, 60) },
        _ => TableConfig { optimizer: OptimizerKind::RowWiseAdagrad, ..three_tiers(DIM, Some(45), 60, 64 << 20) },
    };
    let eviction = Some(EvictionConfig { rule: EvictionRule::PerSweep, every_steps: None });
    TableConfig { score_half_life_steps: HALF_LIFE, seed: 0, key: 0, eviction, ..made }
}

/// The rank key of a row after step `step`, with its id: written from the definition of the order.
fn expected(contents: &Contents, step: u64) -> Vec<(RankKey, Id)> {
    let decay = ScoreDecay::new(HALF_LIFE).expect("in range");
    let looked_at = contents.iter().filter(|(_, (header, _))| header.last_step <= step);
    let mut rows: Vec<(f32, u64, u64, Id)> = looked_at
        .map(|(&id, (header, _))| {
            (decay.of(header.score, header.last_step, step), header.last_step, id.cast_unsigned(), id)
        })
        .collect();
    rows.sort_by(|left, right| {
        left.0.partial_cmp(&right.0).expect("numbers").then((left.1, left.2).cmp(&(right.1, right.2)))
    });
    let standing = |(score, last_step, id, key): (f32, u64, u64, Id)| {
        (RankKey { score: embcache::lifecycle::sortable_score(score), last_step, id }, key)
    };
    rows.into_iter().map(standing).collect()
}

fn listed(rig: &Rig, step: u64, spans: &[RankKeyRange]) -> Vec<RankKey> {
    let (_, counted) = rig.table.score_histogram(step, spans, None).expect("a census").expect("any version");
    let Some(RankRangeContents::Listed(mut standings)) = counted.ranges.into_iter().next() else {
        panic!("it is listed")
    };
    standings.sort_unstable();
    standings
}

fn import(rig: &Rig, dice: &mut Dice) {
    let ids: BTreeSet<Id> = dice.ids(10).into_iter().collect();
    let row = |id: Id| {
        let score = [0.0, -0.0, -1.5, 3.0, 3.0][id.rem_euclid(5) as usize];
        let header = RowHeader { id, count: 7, score, last_step: id.rem_euclid(3) as u64, ..Default::default() };
        (id, (header, vec![1.0_f32.to_bits(); DIM]))
    };
    rig.import(&ids.into_iter().map(row).collect()).expect("imported");
}

#[test]
fn sweeps_take_exactly_the_rows_below_a_place_for_any_tiers() {
    for tiers in 0..3 {
        let rig = Rig::with_faults(settings(tiers)).0;
        let mut dice = Dice(tiers as u64);
        let (mut step, mut cuts) = (0, 0);
        for _ in 0..120 * embcache_tests::times() {
            match dice.roll(8) {
                0 => import(&rig, &mut dice),
                1 if rig.table.config().ssd.is_some() => rig.table.flush_next().expect("a flush"),
                2 | 3 => {
                    let rows = rig.contents().expect("contents");
                    let standings = expected(&rows, step);
                    // A batch whose rows are prefetched moves some of them concurrently.
                    let ids = dice.ids(20);
                    let ahead = rig.plan(&ids, PlanMode::TRAIN_PREFETCH).expect("a plan ahead");
                    assert!(
                        listed(&rig, step, &[ALL]).iter().eq(standings.iter().map(|(standing, _)| standing)),
                        "{tiers}"
                    );
                    if standings.is_empty() {
                        continue;
                    }
                    let at = dice.roll(standings.len() as u64) as usize;
                    let RankKey { score, last_step, id } = standings[at].0;
                    let rule = EvictionRule::Below { score, last_step, id };
                    rig.table.sweep_with_rule(&rule).expect("a sweep");
                    drop(ahead);
                    let dead: BTreeSet<Id> = standings[..at].iter().map(|(_, id)| *id).collect();
                    // Includes the rows with a later last step, which a sweep does not evaluate.
                    let stay: BTreeSet<Id> = rows.into_keys().filter(|id| !dead.contains(id)).collect();
                    let left: BTreeSet<Id> = rig.contents().expect("contents").into_keys().collect();
                    let differ: Vec<&Id> = left.symmetric_difference(&stay).collect();
                    assert!(differ.is_empty(), "{tiers}: {differ:?} of {at} dead rows and {} others", stay.len());
                    assert!(rig.table.is_unchanged_since_sweep().expect("known"));
                    cuts += 1;
                }
                _ => {
                    rig.train(&dice.ids(40), BAG, 1).expect("a step");
                    assert!(!rig.table.is_unchanged_since_sweep().expect("known"));
                    step += 1;
                }
            }
        }
        assert!(cuts > 10 && step > 30, "{cuts} {step}");
    }
}

#[test]
fn score_histogram_counts_ranges_of_one_version_and_step() {
    for tiers in 0..3 {
        let rig = Rig::with_faults(settings(tiers)).0;
        let ids: Vec<Id> = (-400..400).collect();
        rig.train(&ids, BAG, 1).expect("a step");
        rig.train(&ids[..100], BAG, 1).expect("a step");
        let counted = RankKeyRange { is_listed: false, ..ALL };
        let (version, census) =
            rig.table.score_histogram(2, &[counted, ALL], None).expect("a census").expect("any version");
        assert_eq!((census.rows, census.newest), (800, 100));
        let [RankRangeContents::Counted(parts), RankRangeContents::Listed(standings)] = &census.ranges[..] else {
            panic!("{census:?}")
        };
        assert_eq!((parts.len(), standings.len()), (2, 800));
        assert_eq!(parts.iter().map(|(_, part)| part.rows).collect::<Vec<u64>>(), [700, 100]);
        // Rows of one score and one step differ by their ids, of which the negative ones are the largest.
        let (low, high) = (parts[0].1.low, parts[0].1.high);
        assert_eq!((low.id, high.id), (0, (-1_i64).cast_unsigned()));
        let narrower = RankKeyRange { low, high, is_listed: false };
        let same = rig.table.score_histogram(2, &[narrower], Some(version)).expect("a census");
        let RankRangeContents::Counted(parts) = &same.expect("nothing has changed").1.ranges[0] else {
            panic!("counted")
        };
        assert_eq!(parts.iter().map(|(_, part)| part.rows).collect::<Vec<u64>>(), [400, 300]);
        assert_eq!(rig.table.score_histogram(1, &[ALL], None).expect_err("another step").kind(), Kind::State);
        rig.table.remove_rows(&[5]).expect("removed");
        assert!(
            rig.table.score_histogram(2, &[narrower], Some(version)).expect("a census").is_none(),
            "a row has gone"
        );
    }
}
