//! The admission counts of pending ids, in every kind of checkpoint and in the states of the SSD tier.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;

use embcache::Kind;
use embcache::cache::{BaseCheckpoint, Table};
use embcache::checkpoint::{
    AsyncSaveOptions, AsyncSaveTable, CheckpointChain, CheckpointId, CheckpointSave, LatestCheckpoint, LoadColumns,
    LoadSegments, RankSnapshot, RankWriter, SaveOptions, TableRequest, TableSource, reshard,
};
use embcache::config::{AdmissionRule, MissingRead, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::{IoEngine, MemoryEngine, read_file, write_atomically};
use embcache::lifecycle::BucketCounts;
use embcache::types::{Id, hash_id};
use embcache_tests::checkpoint::{ROOT, memory, split};
use embcache_tests::ranks::{load, save_as_base};
use embcache_tests::{Rig, config, directory_in};

const DIM: usize = 4;
const BAG: usize = 5;

type Counts = BTreeMap<u32, BucketCounts>;

/// Small memory limits, so that full buckets forget ids.
fn rules() -> [AdmissionRule; 3] {
    let window_steps = NonZeroU64::new(25);
    [
        AdmissionRule::Count { threshold: 4, window_steps: None, memory: 13 * 2 * 12 * 17 },
        AdmissionRule::Count { threshold: 3, window_steps, memory: 1 << 20 },
        AdmissionRule::ShowClick { alpha: 0.5, beta: 1.0, threshold: 2.0, window_steps, memory: 13 * 2 * 15 * 17 },
    ]
}

/// The configuration of `rank` in `world`. The tiers differ between ranks.
fn rank_of(rank: u32, world: u32, admission: AdmissionRule, place: &str) -> TableConfig {
    let has_ssd = (rank + world).is_multiple_of(2);
    let mut config = config(DIM, OptimizerKind::RowWiseAdagrad, if has_ssd { 60 } else { 5000 });
    config.buckets = split(config.total_num_buckets, rank, world);
    config.admission = admission;
    config.not_admitted = MissingRead::Zeros;
    if has_ssd {
        let dir = format!("/ssd/{place}/{rank}-of-{world}").into();
        config.ssd = Some(SsdConfig { dir, bytes: 512 << 20, reopen: ReopenMode::Never, resume_commit_id: None });
    }
    config
}

fn ranks(engine: &Arc<dyn IoEngine>, world: u32, admission: AdmissionRule, place: &str) -> Vec<Rig> {
    let open = |rank| Rig::open(rank_of(rank, world, admission, place), Arc::clone(engine)).expect("opened");
    (0..world).map(open).collect()
}

fn counts_of(table: &Table) -> Counts {
    let mut found = Counts::new();
    let mut add = |counts: BucketCounts| {
        if counts.generation > 0 || !counts.ids.is_empty() {
            found.insert(counts.bucket, counts);
        }
        Ok(())
    };
    table.for_each_bucket(None, &mut add).expect("counts");
    found
}

fn all(ranks: &[Rig]) -> (Counts, embcache_tests::Contents) {
    let counts = ranks.iter().flat_map(|rig| counts_of(&rig.table)).collect();
    (counts, ranks.iter().flat_map(|rig| rig.contents().expect("every row")).collect())
}

/// The counts, and the number of uses of each row.
fn uses(ranks: &[Rig]) -> (Counts, BTreeMap<Id, u32>) {
    let (counts, rows) = all(ranks);
    (counts, rows.into_iter().map(|(id, (header, _))| (id, header.count)).collect())
}

/// A batch of ids of which a few occur often, with the clicks of each.
fn batch(step: u64) -> Vec<(Id, u32)> {
    let one = |at: u64| {
        let random = hash_id((step * 1000 + at) as Id);
        let id = if random.is_multiple_of(4) { (random >> 8) % 40 } else { (random >> 8) % 100_000 };
        (id as Id, u32::from((random >> 40).is_multiple_of(8)))
    };
    (0..80).map(one).collect()
}

/// Trains the ranks on the batches of some steps, each on its own ids.
fn train(ranks: &[Rig], steps: std::ops::Range<u64>) {
    for step in steps {
        for rig in ranks {
            let config = rig.table.config();
            let own = |(id, _): &(Id, u32)| config.buckets.contains(&config.bucketing().of(*id));
            let (ids, clicks): (Vec<Id>, Vec<u32>) = batch(step).into_iter().filter(own).unzip();
            assert!(!ids.is_empty());
            let clicks = if config.admission.counts_clicks() { clicks } else { Vec::new() };
            let plan = rig
                .lookup
                .plan(&ids, &[0, ids.len() as i64], embcache::cache::PlanMode::TRAIN, &clicks)
                .expect("a plan");
            rig.finish(&plan, ids.len(), BAG, step as u32).expect("a step");
        }
    }
}

/// Removes some rows, and inserts a row of a pending id.
fn disturb(ranks: &[Rig], round: usize) {
    for rig in ranks {
        let rows: Vec<Id> = rig.contents().expect("every row").into_keys().collect();
        let gone: Vec<Id> = rows.into_iter().skip(round).step_by(5).collect();
        rig.table.remove_rows(&gone).expect("removed");
        let waits = counts_of(&rig.table).into_values().flat_map(|counts| counts.ids).nth(round);
        if let Some(waits) = waits {
            let header = embcache::rows::RowHeader { id: waits.id, ..Default::default() };
            rig.import(&[(waits.id, (header, vec![0; DIM]))].into_iter().collect()).expect("imported");
        }
    }
}

#[test]
fn counts_of_chain_equal_saved_tables_for_any_ranks() {
    for (number, admission) in rules().into_iter().enumerate() {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let saved = ranks(&engine, 2, admission, "saved");
        let mut step = 1;
        let mut link: Option<BaseCheckpoint> = None;
        for round in 0..5 {
            train(&saved, step..step + 15);
            step += 15;
            disturb(&saved, round);
            train(&saved, step..step + 2);
            step += 2;
            link = Some(save_as_base(&engine, &saved, 20_000, link.as_ref()));
            let expected = all(&saved);
            assert!(expected.0.values().any(|counts| counts.generation > 0) && !expected.1.is_empty());
            for readers in 1..=3 {
                let loaded = ranks(&engine, readers, admission, &format!("{number}-{round}-{readers}"));
                load(&engine, &loaded);
                assert!(all(&loaded) == expected, "rule {number}, {round} deltas, {readers} ranks");
                if round == 3 {
                    // Training continues as without the load.
                    let other = ranks(&engine, 2, admission, &format!("{number}-same-{readers}"));
                    load(&engine, &other);
                    train(&loaded, 500..530);
                    train(&other, 500..530);
                    // The values differ, because the number of ids in a bag differs.
                    assert!(uses(&loaded) == uses(&other), "rule {number}, {readers} ranks go on");
                }
            }
        }
        // Written again by other ranks, and merged.
        let directory = directory_in(&engine, ROOT);
        let chain = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).expect("a checkpoint"))
            .expect("opened");
        engine.create_dir_all(Path::new("/checkpoints/elsewhere")).expect("made");
        let elsewhere = directory_in(&engine, "/checkpoints/elsewhere");
        reshard(&chain, &elsewhere, 3, 3, true).expect("written again");
        let again = ranks(&engine, 1, admission, &format!("{number}-again"));
        let chain = CheckpointChain::open(&elsewhere, LatestCheckpoint::read(&elsewhere).expect("a checkpoint"))
            .expect("opened");
        chain.table_reader("m", "t", 0..13).expect("its files").load_into(&again[0].table).expect("loaded");
        assert!(all(&again) == all(&saved), "rule {number}, written again");
    }
}

#[test]
fn a_table_that_counts_nothing_loads_and_saves_as_before() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let saved = ranks(&engine, 1, rules()[0], "saved");
    train(&saved, 1..20);
    save_as_base(&engine, &saved, 20_000, None);
    let without = ranks(&engine, 1, AdmissionRule::ReadOnly, "without");
    load(&engine, &without);
    assert_eq!(all(&without), (Counts::new(), all(&saved).1));
    save_as_base(&engine, &without, 20_000, None);
    let directory = directory_in(&engine, ROOT);
    let chain =
        CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).expect("a checkpoint")).expect("opened");
    assert_eq!(chain.manifest().tables[0].pending, None);
    let counting = ranks(&engine, 1, rules()[0], "counting");
    train(&counting, 1..5);
    load(&engine, &counting);
    assert_eq!(all(&counting), (Counts::new(), all(&saved).1));
}

#[test]
fn async_save_has_counts_of_its_snapshot() {
    for (number, admission) in rules().into_iter().enumerate() {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let saved = ranks(&engine, 1, admission, "saved");
        let directory = directory_in(&engine, ROOT);
        train(&saved, 1..30);
        let mut base: Option<BaseCheckpoint> = None;
        for round in 0..3 {
            let expected = all(&saved);
            let parent =
                base.as_ref().map(|base| CheckpointId { name: base.name.clone(), manifest_xxh3: base.manifest_xxh3 });
            let options = SaveOptions { parent, ..SaveOptions::default() };
            let save = CheckpointSave::begin_with(&directory, 5, options).expect("begun");
            let next_epoch = saved[0].table.epoch().expect("an epoch") + 1;
            let tables = vec![AsyncSaveTable {
                module: "m".to_owned(),
                table: saved[0].table.clone(),
                hyperparameters: BTreeMap::new(),
                base: base.clone(),
            }];
            let beside =
                AsyncSaveOptions { next_epoch, pre_image_bytes: 1 << 20, bytes_per_second: None, counts: true };
            let mut moment = RankSnapshot::begin(&directory, save.name(), (0, 1), tables, beside).expect("begun");
            train(&saved, 100 * (round + 1)..100 * (round + 1) + 20);
            disturb(&saved, 1);
            assert!(all(&saved) != expected);
            while moment.write_next().expect("written").is_some() {}
            let digest = moment.finish().expect("finished");
            let CheckpointId { name, manifest_xxh3 } = save.publish(&[digest], next_epoch).expect("published").identity;
            let made = BaseCheckpoint { name, manifest_xxh3, next_epoch };
            saved[0].table.finish_background_save(next_epoch, Some(made.clone()));
            base = Some(made);
            let loaded = ranks(&engine, 2, admission, &format!("{number}-{round}"));
            load(&engine, &loaded);
            assert!(all(&loaded) == expected, "rule {number}, round {round}");
        }
    }
}

#[test]
fn a_linked_checkpoint_and_a_resume_have_the_counts() {
    for admission in rules() {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let mut config = rank_of(0, 2, admission, "saved");
        config.buckets = 0..13;
        let table = Rig::open(config.clone(), Arc::clone(&engine)).expect("opened");
        train(std::slice::from_ref(&table), 1..40);
        let expected = all(std::slice::from_ref(&table));

        let directory = directory_in(&engine, ROOT);
        let options = SaveOptions { linked: true, ..SaveOptions::default() };
        let save = CheckpointSave::begin_with(&directory, 5, options).expect("begun");
        let mut writer = RankWriter::new(&directory, save.name(), 0, 1).expect("a writer");
        writer.link_rows_of("m", &table.table, BTreeMap::new()).expect("linked");
        save.publish(&[writer.finish().expect("finished")], 1).expect("published");
        let chain = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).expect("a checkpoint"))
            .expect("opened");
        let mut other = config.clone();
        other.ssd.as_mut().expect("an SSD tier").dir = "/ssd/linked/0-of-1".into();
        let other = Rig::open(other, Arc::clone(&engine)).expect("opened");
        let request = TableRequest {
            module: "m",
            table: "t",
            buckets: 0..13,
            columns: LoadColumns::All,
            segments: LoadSegments::Open,
        };
        match chain.check_table(&other.table, &request).expect("it fits") {
            TableSource::Rows(_) => panic!("it has segments"),
            TableSource::Segments(_, _, counts, _, _) => {
                let counts: Counts = counts.into_iter().map(|counts| (counts.bucket, counts)).collect();
                assert!(counts == expected.0);
            }
        }
        // Loaded row by row, like other ranks do.
        chain.table_reader("m", "t", 0..13).expect("its files").load_into(&other.table).expect("loaded");
        assert!(all(std::slice::from_ref(&other)) == expected);

        table.table.flush(7).expect("flushed");
        train(std::slice::from_ref(&table), 50..60);
        table.table.close().expect("closed");
        let ssd = config.ssd.as_mut().expect("an SSD tier");
        (ssd.reopen, ssd.resume_commit_id) = (ReopenMode::Resume, Some(7));
        let resumed = Rig::open(config, Arc::clone(&engine)).expect("resumed");
        assert!(all(std::slice::from_ref(&resumed)) == expected, "as of the flush");
    }
}

#[test]
fn every_changed_byte_of_a_file_of_counts_is_found() {
    let memory = Arc::new(MemoryEngine::default());
    memory.create_dir_all(Path::new(ROOT)).expect("made");
    let engine: Arc<dyn IoEngine> = Arc::clone(&memory) as _;
    let saved = ranks(&engine, 1, rules()[2], "saved");
    train(&saved, 1..20);
    let made = save_as_base(&engine, &saved, 20_000, None);
    let path = Path::new(ROOT).join(made.name).join("m+t").join("0-of-1.0.counts.safetensors");
    let whole = read_file(&*memory, &path, 1 << 20).expect("the file");
    let loaded = ranks(&engine, 1, rules()[2], "loaded");
    let directory = directory_in(&engine, ROOT);
    let try_to_load = || {
        let chain = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory)?)?;
        chain.table_reader("m", "t", 0..13)?.load_into(&loaded[0].table)
    };
    for at in (0..whole.len()).step_by(7).chain(whole.len() - 1..whole.len()) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        write_atomically(&*memory, &path, &damaged).expect("written");
        assert_eq!(try_to_load().expect_err("damage").kind(), Kind::Corruption, "byte {at}");
    }
    write_atomically(&*memory, &path, &whole[..whole.len() - 1]).expect("written");
    assert_eq!(try_to_load().expect_err("damage").kind(), Kind::Corruption);
    write_atomically(&*memory, &path, &whole).expect("written");
    try_to_load().expect("it is whole again");
    assert!(all(&loaded) == all(&saved));
}
