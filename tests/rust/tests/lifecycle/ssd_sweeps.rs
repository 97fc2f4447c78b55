//! Sweeps that start faster than a pass over the SSD tier takes: each record is still evaluated.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use embcache::config::{EvictionConfig, EvictionRule, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::rows::{RowHeader, ScoreDecay};
use embcache::types::Id;
use embcache_tests::{Rig, config};

const DIM: usize = 4;
const HALF_LIFE: u64 = 16;
/// Rows that never expire. They are in the first segments.
const OLD: Id = 20_000;
/// Rows that expire, some with each step.
const DYING: Id = 12_000;
/// Records of the SSD tier that are evaluated before a batch, however short the steps are.
const RECORDS: u64 = 1 << 10;
/// Slots in RAM that are evaluated before a batch, in addition.
const SLOTS: u64 = 1 << 14;

/// A row with this score at step 0, or with a last step.
fn row(id: Id, score: f32, last_step: u64) -> (RowHeader, Vec<u32>) {
    (RowHeader { id, count: 7, score, last_step, ..Default::default() }, vec![0; DIM])
}

/// A table with a sweep after each step.
fn table(rule: EvictionRule, host_bytes: u64) -> Rig {
    let ssd = SsdConfig { dir: "/t".into(), bytes: 64 << 20, reopen: ReopenMode::Never, resume_commit_id: None };
    let eviction = Some(EvictionConfig { rule, every_steps: NonZeroU64::new(1) });
    let base = config(DIM, OptimizerKind::RowWiseAdagrad, 60);
    let wanted = TableConfig { ssd: Some(ssd), eviction, score_half_life_steps: HALF_LIFE, host_bytes, ..base };
    Rig::with_faults(wanted).0
}

fn import(rig: &Rig, rows: &BTreeMap<Id, (RowHeader, Vec<u32>)>) {
    let rows: Vec<_> = rows.iter().collect();
    for part in rows.chunks(1000) {
        rig.import(&part.iter().map(|(id, row)| (**id, (*row).clone())).collect()).expect("imported");
    }
}

/// Trains `steps` batches. After each, only few rows have expired and are not removed yet: those that expired in the
/// last steps, as many as it takes to pass the SSD tier twice and RAM once. No call is made that needs all rows.
fn expired_rows_stay_few(rig: &Rig, steps: u64, is_dead: impl Fn(Id, u64) -> bool) {
    let stats = rig.table.stats().expect("stats");
    let (slots, on_ssd, others) = (stats.host.rows, stats.ssd.expect("a tier").tier.rows, stats.rows);
    // A segment's footer counts as a 16th of its records, and the last slice of a walk may be partial.
    let steps_of_a_walk = on_ssd.div_ceil(RECORDS) + on_ssd.div_ceil(16 * RECORDS) + 1;
    let behind = 2 * steps_of_a_walk + slots.div_ceil(SLOTS) + 1;
    let mut dead_after = Vec::new();
    for step in 1..=steps {
        rig.train(&[-1], 1, 0).expect("a step");
        dead_after.push((0..OLD + DYING).filter(|&id| is_dead(id, step)).count() as u64);
        let evicted = rig.table.stats().expect("stats").eviction.expect("a rule").evicted;
        let due = step.checked_sub(behind + 1).map_or(0, |at| dead_after[at as usize]);
        assert!(evicted >= due, "step {step}: {evicted} of {due} rows left, which were dead {behind} steps ago");
    }
    let dead = dead_after.last().copied().expect("a step");
    assert!(dead_after[(steps - behind - 1) as usize] > 1000, "so many rows were due: {dead_after:?}");
    assert_eq!(rig.table.len().expect("rows"), others + 1 - dead);
}

#[test]
fn sweep_after_each_step_reaches_last_ssd_segments() {
    // Each row is read, because the rule depends on its score.
    let rig = table(EvictionRule::ScoreBelow(1.0), 600_000);
    let score = |id: Id| if id < OLD { 1e30 } else { 1.0 + (id - OLD) as f32 / 1000.0 };
    import(&rig, &(0..OLD + DYING).map(|id| (id, row(id, score(id), 0))).collect());
    assert!(rig.table.stats().expect("stats").host.rows < 10_000, "most rows are on SSD");
    let decay = ScoreDecay::new(HALF_LIFE).expect("in range");
    expired_rows_stay_few(&rig, 150, |id, step| decay.of(score(id), 0, step) < 1.0);
}

/// A sweep after every step reaches the SSD tier, although it never completes a pass over RAM.
#[test]
fn sweep_after_each_step_reaches_ssd_before_ram_is_done() {
    let rig = table(EvictionRule::Unused { steps: 10 }, 6 << 20);
    // Rows that never expire fill RAM, which has more slots than a slice evaluates. All later rows are on SSD.
    import(&rig, &(1_000_000..1_100_000).map(|id| (id, row(id, 0.0, 1_000_000))).collect());
    let last_step = |id: Id| if id < OLD { 1_000_000 } else { 1 + (id - OLD) as u64 / 40 };
    import(&rig, &(0..OLD + DYING).map(|id| (id, row(id, 0.0, last_step(id)))).collect());
    let in_ram = rig.table.stats().expect("stats").host.rows;
    assert!((2 * SLOTS..100_000).contains(&in_ram), "{in_ram} rows are in RAM");
    expired_rows_stay_few(&rig, 400, |id, step| last_step(id) + 10 <= step);
}
