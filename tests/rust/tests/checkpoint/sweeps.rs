//! Sweeps in deltas: a chain of checkpoints with rows that expired by a rule equals the tables that saved it.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;

use embcache::cache::{BaseCheckpoint, PlanMode, RowBlock};
use embcache::checkpoint::{
    AsyncSaveOptions, AsyncSaveTable, CheckpointChain, CheckpointId, CheckpointKind, CheckpointSave, IdState,
    LatestCheckpoint, RankSnapshot, SaveOptions, reshard,
};
use embcache::config::{EvictionConfig, EvictionRule, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::IoEngine;
use embcache::lifecycle::{RankKey, sortable_score};
use embcache::rows::{RowHeader, ScoreDecay};
use embcache::types::Id;
use embcache_tests::checkpoint::{ROOT, compact, memory, split};
use embcache_tests::dice::Dice;
use embcache_tests::ranks::{load, save_as_base};
use embcache_tests::serve::check_contents;
use embcache_tests::{Contents, Rig, config, directory_in};

const DIM: usize = 4;
const BAG: usize = 5;

fn rules() -> [EvictionRule; 6] {
    use EvictionRule::{All, Any, Below, NormBelow, ScoreBelow, Unused};
    [
        Unused { steps: 12 },
        ScoreBelow(0.7),
        Any(vec![Unused { steps: 25 }, NormBelow(1.0)]),
        All(vec![Unused { steps: 5 }, ScoreBelow(1.2), NormBelow(1.6)]),
        Below { score: sortable_score(0.7), last_step: 9, id: 500 },
        All(vec![
            Any(vec![Unused { steps: 9 }, NormBelow(1.0)]),
            Below { score: sortable_score(1.5), last_step: 0, id: 0 },
        ]),
    ]
}

/// The configuration of `rank` in `world`. The tiers differ between ranks.
pub(crate) fn rank_of(rank: u32, world: u32, rule: &EvictionRule, every: u64, place: &str) -> TableConfig {
    let has_ssd = (rank + world).is_multiple_of(2);
    let mut config = config(DIM, OptimizerKind::RowWiseAdagrad, if has_ssd { 60 } else { 5000 });
    config.buckets = split(config.total_num_buckets, rank, world);
    config.score_half_life_steps = 16;
    config.eviction = Some(EvictionConfig { rule: rule.clone(), every_steps: NonZeroU64::new(every) });
    if has_ssd {
        let dir = format!("/ssd/{place}/{rank}-of-{world}").into();
        config.ssd = Some(SsdConfig { dir, bytes: 512 << 20, reopen: ReopenMode::Never, resume_commit_id: None });
    }
    config
}

fn ranks(engine: &Arc<dyn IoEngine>, world: u32, rule: &EvictionRule, every: u64, place: &str) -> Vec<Rig> {
    let open = |rank| Rig::open(rank_of(rank, world, rule, every, place), Arc::clone(engine)).expect("opened");
    (0..world).map(open).collect()
}

pub(crate) fn rows_of(ranks: &[Rig]) -> Contents {
    ranks.iter().flat_map(|rig| rig.contents().expect("every row")).collect()
}

/// Trains the ranks on batches, each on its own ids.
pub(crate) fn train(ranks: &[Rig], dice: &mut Dice, steps: usize) {
    for _ in 0..steps {
        let batch = dice.ids(60);
        for rig in ranks {
            let config = rig.table.config();
            let own = |id: &&Id| config.buckets.contains(&config.bucketing().of(**id));
            let ids: Vec<Id> = batch.iter().filter(own).copied().collect();
            rig.train(&ids, BAG, 3).expect("a step");
        }
    }
}

/// Compares the chain's history of some of these ids with the current rows. Returns the number of rows that expired by
/// sweeps in the history.
fn check_lives(chain: &CheckpointChain, ids: &BTreeSet<Id>, rows: &Contents) -> usize {
    let mut taken = 0;
    for &id in ids.iter().step_by(31).chain([&Id::MIN]) {
        let life = chain.id_history("m", "t", id).expect("its bucket is whole");
        assert_eq!(life.len(), chain.links().len());
        assert_eq!(life[0].state == IdState::HasRow, rows.contains_key(&id), "id {id}");
        let newest = life.iter().find_map(|link| link.row.as_ref());
        if let Some((header, vector)) = rows.get(&id) {
            let (found, weights) = newest.expect("a row of now lies in some checkpoint");
            assert_eq!(found.last_step, header.last_step, "id {id}");
            assert!(weights.iter().map(|weight| weight.to_bits()).eq(vector[..DIM].iter().copied()), "id {id}");
        }
        taken += life.iter().filter(|link| link.row.is_none() && !link.expired_by.is_empty()).count();
    }
    taken
}

#[test]
fn chain_with_sweeps_equals_saved_tables_for_any_ranks() {
    for (number, rule) in rules().iter().enumerate() {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let saved = ranks(&engine, 2, rule, 4, "saved");
        let mut dice = Dice((number as u64) << 32);
        let mut link: Option<BaseCheckpoint> = None;
        let (mut with_sweeps, mut taken, mut ever) = (0, 0, BTreeSet::new());
        for round in 0..6 {
            train(&saved, &mut dice, if round == 3 { 2 } else { 15 });
            if round == 4 {
                // An imported row with an old last step does not match an earlier sweep.
                for rig in &saved {
                    let config = rig.table.config();
                    let id = (0..1000).find(|id| config.buckets.contains(&config.bucketing().of(*id)));
                    let id = id.expect("an id of the shard");
                    let header = RowHeader { id, score: 9.0, ..Default::default() };
                    let row = (header, vec![1.0_f32.to_bits(); DIM]);
                    rig.import(&[(id, row)].into_iter().collect()).expect("imported");
                }
            }
            link = Some(save_as_base(&engine, &saved, 20_000, link.as_ref()));
            let expected = rows_of(&saved);
            let directory = directory_in(&engine, ROOT);
            let chain = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).expect("a checkpoint"))
                .expect("opened");
            let sweeps = &chain.manifest().tables[0].sweeps;
            assert!(sweeps.len() <= 1, "a later sweep of the same rule takes what the others took");
            with_sweeps += sweeps.len();
            ever.extend(expected.keys().copied());
            taken = check_lives(&chain, &ever, &expected);
            for readers in 1..=3 {
                let loaded = ranks(&engine, readers, rule, 4, &format!("{number}-{round}-{readers}"));
                load(&engine, &loaded);
                assert!(rows_of(&loaded) == expected, "rule {number}, {round} deltas, {readers} ranks");
            }
            check_contents(&engine, &expected, round % 3 == 2);
        }
        assert!(with_sweeps >= 4, "{with_sweeps}");
        assert!(taken > 3, "rule {number}: sweeps took {taken}");
        let evicted = saved.iter().map(|rig| rig.table.stats().expect("stats").eviction.expect("a rule").evicted);
        assert!(evicted.sum::<u64>() > 100, "rule {number}");
        // Written again by other ranks, and merged.
        let directory = directory_in(&engine, ROOT);
        let chain = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).expect("a checkpoint"))
            .expect("opened");
        engine.create_dir_all(Path::new("/checkpoints/elsewhere")).expect("made");
        let elsewhere = directory_in(&engine, "/checkpoints/elsewhere");
        reshard(&chain, &elsewhere, 3, 3, true).expect("written again");
        let chain = CheckpointChain::open(&elsewhere, LatestCheckpoint::read(&elsewhere).expect("a checkpoint"))
            .expect("opened");
        let again = ranks(&engine, 1, rule, 4, &format!("{number}-again"));
        chain.table_reader("m", "t", 0..13).expect("its files").load_into(&again[0].table).expect("loaded");
        assert!(rows_of(&again) == rows_of(&saved), "rule {number}, written again");
        drop(chain);
        compact(&engine, 3, 9).expect("merged");
        let chain = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).expect("a checkpoint"))
            .expect("opened");
        assert_eq!(chain.manifest().kind, CheckpointKind::Full);
        assert!(chain.manifest().tables[0].sweeps.is_empty(), "what a sweep took is not there");
        let merged = ranks(&engine, 2, rule, 4, &format!("{number}-merged"));
        load(&engine, &merged);
        assert!(rows_of(&merged) == rows_of(&saved), "rule {number}, merged");
    }
}

/// Each sweep of the chain has its own threshold.
#[test]
fn chain_with_different_thresholds_equals_saved_tables() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let saved = ranks(&engine, 2, &EvictionRule::PerSweep, 0, "saved");
    let decay = ScoreDecay::new(16).expect("in range");
    let (mut dice, mut step) = (Dice(77), 0);
    let mut link: Option<BaseCheckpoint> = None;
    let mut most = 0;
    for round in 0..8 {
        for _ in 0..3 {
            train(&saved, &mut dice, 5);
            step += 5;
            let rows = rows_of(&saved);
            let mut standings: Vec<RankKey> =
                rows.values().map(|(header, _)| RankKey::of(header, &decay, step)).collect();
            standings.sort_unstable();
            // More and fewer expire, so that a later threshold does not match all rows of an earlier one.
            let cut = standings[standings.len() / [4, 30, 9][dice.roll(3) as usize]];
            let below = EvictionRule::Below { score: cut.score, last_step: cut.last_step, id: cut.id };
            for rig in &saved {
                rig.table.sweep_with_rule(&below).expect("a sweep");
            }
            let expected: Contents =
                rows.into_iter().filter(|(_, (header, _))| RankKey::of(header, &decay, step) >= cut).collect();
            assert!(rows_of(&saved) == expected, "{round}");
        }
        link = Some(save_as_base(&engine, &saved, 20_000, link.as_ref()));
        let expected = rows_of(&saved);
        let directory = directory_in(&engine, ROOT);
        let chain = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).expect("a checkpoint"))
            .expect("opened");
        most = most.max(chain.manifest().tables[0].sweeps.len());
        for readers in 1..=3 {
            let loaded = ranks(&engine, readers, &EvictionRule::PerSweep, 0, &format!("cuts-{round}-{readers}"));
            load(&engine, &loaded);
            assert!(rows_of(&loaded) == expected, "{round} deltas, {readers} ranks");
        }
        check_contents(&engine, &expected, round % 3 == 2);
    }
    assert!((2..=3).contains(&most), "{most} sweeps of a delta");
}

#[test]
fn rows_that_a_sweep_takes_cost_a_delta_nothing_each() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let rule = EvictionRule::Unused { steps: 2 };
    let wide = |place: &str| TableConfig {
        host_bytes: 10 * rank_of(0, 1, &rule, 1_000_000, place).host_bytes,
        ..rank_of(0, 1, &rule, 1_000_000, place)
    };
    let open = |place: &str| vec![Rig::open(wide(place), Arc::clone(&engine)).expect("opened")];
    let saved = open("saved");
    // More than the number of ids that a table of this size remembers.
    let ids: Vec<Id> = (0..40_000).collect();
    let headers: Vec<RowHeader> = ids.iter().map(|&id| RowHeader { id, ..RowHeader::default() }).collect();
    let rows = RowBlock { headers: &headers, vectors: &vec![0.5; ids.len() * (DIM)] };
    saved[0].table.import_rows(rows).expect("imported");
    let link = save_as_base(&engine, &saved, 20_000, None);
    for id in -3..0 {
        saved[0].train(&[id], BAG, 1).expect("a step");
    }
    saved[0].table.sweep().expect("a sweep");
    save_as_base(&engine, &saved, 20_000, Some(&link));
    let directory = directory_in(&engine, ROOT);
    let chain =
        CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).expect("a checkpoint")).expect("opened");
    let entry = &chain.manifest().tables[0];
    assert_eq!((entry.tombstones, entry.sweeps.len(), entry.rows), (1, 1, 2), "id -3 was trained since the parent");
    assert_eq!(entry.total_rows, 2);
    let loaded = open("loaded");
    load(&engine, &loaded);
    assert!(rows_of(&loaded) == rows_of(&saved));
}

#[test]
fn delta_has_no_base_while_sweep_defers_rows_of_batch() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let saved = ranks(&engine, 1, &EvictionRule::Unused { steps: 2 }, 1, "saved");
    let rig = &saved[0];
    rig.train(&[1, 2], BAG, 1).expect("a step");
    let link = save_as_base(&engine, &saved, 20_000, None);
    // This batch is forwarded, and sweeps run before its backward.
    let plan = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
    rig.place(&plan).expect("a place");
    for id in 10..13 {
        rig.train(&[id], BAG, 1).expect("a step");
    }
    assert!(rig.table.base_checkpoints().expect("an open table").is_empty());
    assert_eq!(rig.table.tombstones_since(&link).expect_err("not known").kind(), embcache::Kind::State);
    assert_eq!(rows_of(&saved).into_keys().collect::<Vec<Id>>(), [1, 11, 12]);
    let full = save_as_base(&engine, &saved, 20_000, None);
    drop(plan);
    assert_eq!(rows_of(&saved).into_keys().collect::<Vec<Id>>(), [11, 12]);
    assert_eq!(rig.table.base_checkpoints().expect("an open table").last(), Some(&full));
    save_as_base(&engine, &saved, 20_000, Some(&full));
    let loaded = ranks(&engine, 1, &EvictionRule::Unused { steps: 2 }, 1, "loaded");
    load(&engine, &loaded);
    assert!(rows_of(&loaded) == rows_of(&saved), "the row that was spared has a tombstone");
    check_contents(&engine, &rows_of(&saved), true);
}

#[test]
fn chain_with_sweeps_during_batch_equals_saved_tables() {
    for is_trained in [false, true] {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let open = |place: &str| ranks(&engine, 1, &EvictionRule::PerSweep, 0, place);
        let saved = open("saved");
        let rig = &saved[0];
        for ids in [[1, 2], [3, 4], [5, 6]] {
            rig.train(&ids, BAG, 1).expect("a step");
        }
        let link = save_as_base(&engine, &saved, 20_000, None);
        // Two sweeps run between the forward of this batch and its end. The first matches the rows 1 and 2, and the
        // second fewer.
        let plan = rig.plan(&[1, 5], PlanMode::TRAIN).expect("a plan");
        rig.place(&plan).expect("a place");
        for rule in [EvictionRule::TrainedUntil { step: 1 }, EvictionRule::Nothing] {
            rig.table.sweep_with_rule(&rule).expect("a sweep");
        }
        assert!(rig.table.base_checkpoints().expect("an open table").is_empty(), "row 1 may still die");
        if is_trained {
            let out = rig.forward(&plan, 2, BAG).expect("a forward");
            rig.backward(&plan, out.len(), 1).expect("a backward");
        }
        drop(plan);
        let left: &[Id] = if is_trained { &[1, 3, 4, 5, 6] } else { &[3, 4, 5, 6] };
        assert_eq!(rows_of(&saved).into_keys().collect::<Vec<Id>>(), left);
        let link = save_as_base(&engine, &saved, 20_000, Some(&link));
        // Once more, with a save during the batch, and with sweeps before it and after it.
        let plan = rig.plan(&[3, 6], PlanMode::TRAIN).expect("a plan");
        rig.place(&plan).expect("a place");
        rig.table.sweep_with_rule(&EvictionRule::TrainedUntil { step: 2 }).expect("a sweep");
        assert_eq!(rig.table.tombstones_since(&link).expect_err("not known").kind(), embcache::Kind::State);
        let full = save_as_base(&engine, &saved, 20_000, None);
        rig.table.sweep_with_rule(&EvictionRule::Nothing).expect("a sweep");
        drop(plan);
        save_as_base(&engine, &saved, 20_000, Some(&full));
        let loaded = open(&format!("loaded {is_trained}"));
        load(&engine, &loaded);
        assert!(rows_of(&loaded) == rows_of(&saved), "row 3 died after the checkpoint, by a sweep before it");
        check_contents(&engine, &rows_of(&saved), true);
        assert!(!rows_of(&saved).contains_key(&3));
    }
}

#[test]
fn async_delta_and_delta_after_resume_have_the_sweeps() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let rule = EvictionRule::Any(vec![EvictionRule::Unused { steps: 10 }, EvictionRule::NormBelow(1.0)]);
    let mut config = TableConfig { buckets: 0..13, ..rank_of(0, 2, &rule, 3, "saved") };
    let mut saved = vec![Rig::open(config.clone(), Arc::clone(&engine)).expect("opened")];
    let directory = directory_in(&engine, ROOT);
    let mut dice = Dice(77);
    train(&saved, &mut dice, 30);
    let link = save_as_base(&engine, &saved, 20_000, None);
    train(&saved, &mut dice, 12);
    // An asynchronous save.
    let parent = Some(CheckpointId { name: link.name.clone(), manifest_xxh3: link.manifest_xxh3 });
    let save =
        CheckpointSave::begin_with(&directory, 5, SaveOptions { parent, ..SaveOptions::default() }).expect("begun");
    let next_epoch = saved[0].table.epoch().expect("an epoch") + 1;
    let options = AsyncSaveOptions { next_epoch, pre_image_bytes: 1 << 20, bytes_per_second: None, counts: true };
    let tables = vec![AsyncSaveTable {
        module: "m".into(),
        table: saved[0].table.clone(),
        hyperparameters: std::collections::BTreeMap::new(),
        base: Some(link.clone()),
    }];
    let expected = rows_of(&saved);
    let mut moment = RankSnapshot::begin(&directory, save.name(), (0, 1), tables, options).expect("held");
    train(&saved, &mut dice, 9);
    while moment.write_next().expect("written").is_some() {}
    let digest = moment.finish().expect("durable");
    let published = save.publish(&[digest], next_epoch).expect("published");
    let CheckpointId { name, manifest_xxh3 } = published.identity;
    let beside = BaseCheckpoint { name, manifest_xxh3, next_epoch };
    saved[0].table.finish_background_save(next_epoch, Some(beside.clone()));
    let loaded = ranks(&engine, 1, &rule, 3, "loaded");
    load(&engine, &loaded);
    assert!(rows_of(&loaded) == expected, "as of the moment");
    // The next delta, after the table was flushed and opened again.
    train(&saved, &mut dice, 9);
    saved[0].table.flush_next().expect("a flush");
    saved.clear();
    config.ssd.as_mut().expect("an SSD tier").reopen = ReopenMode::Resume;
    saved.push(Rig::open(config, Arc::clone(&engine)).expect("resumed"));
    train(&saved, &mut dice, 5);
    save_as_base(&engine, &saved, 20_000, Some(&beside));
    let again = ranks(&engine, 1, &rule, 3, "again");
    load(&engine, &again);
    assert!(rows_of(&again) == rows_of(&saved), "after a resume");
}
