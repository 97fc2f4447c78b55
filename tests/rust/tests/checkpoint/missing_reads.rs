//! Every kind of checkpoint contains the values that an evaluation reads for a missing id, so that a reader without the
//! table's configuration reads the same.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use embcache::Kind;
use embcache::checkpoint::{
    AsyncSaveOptions, AsyncSaveTable, ChainCompaction, CheckpointChain, CheckpointSave, LatestCheckpoint, RankSnapshot,
    RankWriter, SaveOptions, reshard,
};
use embcache::config::MissingRead::{self, Initial, OovRow, Value, Zeros};
use embcache::config::{AdmissionRule, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::IoEngine;
use embcache::rows::RowHeader;
use embcache::types::Id;
use embcache_tests::checkpoint::{ROOT, Table, kind, memory, save};
use embcache_tests::ranks::save_as_base;
use embcache_tests::{Rig, config, directory_in};

/// True for a table with an OOV row, and the values that an evaluation reads.
const CASES: [(bool, MissingRead); 8] = [
    (false, Initial),
    (false, Zeros),
    (false, Value(0.1)),
    (false, Value(f32::from_bits(1))),
    (false, Value(f32::MIN)),
    (true, OovRow),
    (true, Initial),
    (true, Zeros),
];

fn settings(shares: bool, missing_read: MissingRead) -> TableConfig {
    let not_admitted = if shares { OovRow } else { Zeros };
    let admission = AdmissionRule::ReadOnly;
    TableConfig { admission, not_admitted, missing_read, ..config(4, OptimizerKind::RowWiseAdagrad, 500) }
}

fn import(rig: &Rig, ids: std::ops::Range<Id>) {
    let row_of = |id| (RowHeader { id, ..RowHeader::default() }, vec![0.5_f32.to_bits(); 4]);
    rig.import(&ids.map(|id| (id, row_of(id))).collect()).expect("imported");
}

fn newest(engine: &Arc<dyn IoEngine>, root: &str) -> CheckpointChain {
    let directory = directory_in(engine, root);
    CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).expect("a checkpoint")).expect("opened")
}

/// Checks that an evaluation reads `said` according to the latest checkpoint.
fn check(chain: &CheckpointChain, said: MissingRead, what: &str) {
    assert_eq!(chain.manifest().tables[0].spec.missing_read, said, "{what}");
    let reader = chain.table_reader("m", "t", 0..13).expect("its files");
    assert_eq!(reader.spec().missing_read, said, "{what}");
}

fn save_async(engine: &Arc<dyn IoEngine>, rig: &Rig) {
    let directory = directory_in(engine, ROOT);
    let save = CheckpointSave::begin(&directory, 9).expect("begun");
    let next_epoch = rig.table.epoch().expect("an epoch") + 1;
    let tables = vec![AsyncSaveTable {
        module: "m".into(),
        table: rig.table.clone(),
        hyperparameters: BTreeMap::new(),
        base: None,
    }];
    let beside = AsyncSaveOptions { next_epoch, pre_image_bytes: 1 << 20, bytes_per_second: None, counts: true };
    let mut moment = RankSnapshot::begin(&directory, save.name(), (0, 1), tables, beside).expect("begun");
    while moment.write_next().expect("written").is_some() {}
    save.publish(&[moment.finish().expect("finished")], next_epoch).expect("published");
}

#[test]
fn every_checkpoint_of_a_table_says_what_an_evaluation_reads() {
    for (shares, said) in CASES {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let rig = Rig::open(settings(shares, said), Arc::clone(&engine)).expect("opened");
        import(&rig, 1..4);
        let full = save_as_base(&engine, std::slice::from_ref(&rig), 20_000, None);
        check(&newest(&engine, ROOT), said, "a full one");
        import(&rig, 3..5);
        save_as_base(&engine, std::slice::from_ref(&rig), 20_000, Some(&full));
        check(&newest(&engine, ROOT), said, "a delta");
        engine.create_dir_all(Path::new("/checkpoints/elsewhere")).expect("made");
        let elsewhere = directory_in(&engine, "/checkpoints/elsewhere");
        reshard(&newest(&engine, ROOT), &elsewhere, 3, 2, true).expect("written again");
        check(&newest(&engine, "/checkpoints/elsewhere"), said, "written again for two ranks");
        merge(&engine);
        check(&newest(&engine, ROOT), said, "merged");
        save_async(&engine, &rig);
        check(&newest(&engine, ROOT), said, "beside training");
    }
}

fn merge(engine: &Arc<dyn IoEngine>) {
    let directory = directory_in(engine, ROOT);
    let latest = LatestCheckpoint::read(&directory).expect("a checkpoint");
    let compaction = ChainCompaction::open(&directory, latest, true).expect("opened").expect("a delta");
    let merged = Some(compaction.chain().identity());
    let save =
        CheckpointSave::begin_with(&directory, 4, SaveOptions { merged, ..SaveOptions::default() }).expect("begun");
    let digest = compaction.write(save.name(), (0, 1), &mut |_| Ok(())).expect("written");
    save.publish(&[digest], compaction.chain().manifest().next_epoch).expect("published");
}

#[test]
fn a_linked_checkpoint_says_it_too() {
    for (shares, said) in CASES {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let ssd =
            SsdConfig { dir: "/tier/t".into(), bytes: 1 << 20, reopen: ReopenMode::Never, resume_commit_id: None };
        let settings = TableConfig { ssd: Some(ssd), ..settings(shares, said) };
        let rig = Rig::open(settings, Arc::clone(&engine)).expect("opened");
        import(&rig, 1..4);
        let directory = directory_in(&engine, ROOT);
        let options = SaveOptions { linked: true, ..SaveOptions::default() };
        let save = CheckpointSave::begin_with(&directory, 3, options).expect("begun");
        let mut writer = RankWriter::new(&directory, save.name(), 0, 1).expect("a writer");
        writer.link_rows_of("m", &rig.table, BTreeMap::new()).expect("linked");
        save.publish(&[writer.finish().expect("finished")], 2).expect("published");
        check(&newest(&engine, ROOT), said, "a linked one");
    }
}

#[test]
fn loaded_table_keeps_its_own_configuration() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let saved = Rig::open(settings(false, Zeros), Arc::clone(&engine)).expect("opened");
    save_as_base(&engine, std::slice::from_ref(&saved), 20_000, None);
    let other = Rig::open(settings(false, Value(2.0)), Arc::clone(&engine)).expect("opened");
    let reader = newest(&engine, ROOT).table_reader("m", "t", 0..13).expect("its files");
    reader.load_into(&other.table).expect("loaded");
    save_as_base(&engine, std::slice::from_ref(&other), 20_000, None);
    check(&newest(&engine, ROOT), Value(2.0), "saved again");
}

#[test]
fn a_save_refuses_what_cannot_be_read() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    for said in [Value(f32::NAN), Value(f32::INFINITY), Value(f32::NEG_INFINITY), OovRow] {
        let mut table = Table::new("m", "t", OptimizerKind::Sgd, 2, &[1, 2], 1);
        table.spec.missing_read = said;
        assert_eq!(kind(save(&engine, Path::new(ROOT), &[table], 1, 1000, 7)), Kind::Input, "{said:?}");
    }
}
