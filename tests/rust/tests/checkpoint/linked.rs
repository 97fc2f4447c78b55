//! Linked checkpoints: the segments of a table's SSD tier are hard-linked and not written again. They are intact after
//! every stop, do not change when the table continues, and can be opened as a table again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::Kind;
use embcache::cache::Table;
use embcache::checkpoint::{
    ChainCompaction, CheckpointChain, CheckpointKind, CheckpointSave, LatestCheckpoint, PublishedCheckpoint,
    RankWriter, SaveOptions, reshard,
};
use embcache::config::{OptimizerKind, ReopenMode, TableConfig};
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOpenMode, IoOperation, read_file, write_atomically};
use embcache::ssd::StateCounters;
use embcache_tests::checkpoint::{ROOT, memory};
use embcache_tests::linked::{save, table_config, train};
use embcache_tests::{Contents, Rig, config, directory_in};

pub(crate) fn chain(engine: &Arc<dyn IoEngine>) -> embcache::Result<CheckpointChain> {
    let directory = directory_in(engine, ROOT);
    CheckpointChain::open(&directory, LatestCheckpoint::read(&directory)?)
}

/// The rows of the latest checkpoint, read like those of any checkpoint.
pub(crate) fn read(engine: &Arc<dyn IoEngine>) -> embcache::Result<Contents> {
    let mut rows = Contents::new();
    // They are read in two parts, each of which skips the rows of the other.
    for buckets in [0..5, 5..13] {
        chain(engine)?.table_reader("m", "t", buckets)?.read(&mut |headers, vectors| {
            let floats = vectors.len() / headers.len();
            for (header, vector) in headers.iter().zip(vectors.chunks(floats)) {
                let bits = vector.iter().map(|value| value.to_bits()).collect();
                assert!(rows.insert(header.id, (*header, bits)).is_none(), "row {} is there twice", header.id);
            }
            Ok(())
        })?;
    }
    Ok(rows)
}

/// The table that is opened from the latest checkpoint, which is a linked one.
pub(crate) fn open(engine: &Arc<dyn IoEngine>) -> embcache::Result<Table> {
    let chain = chain(engine)?;
    let files = chain.links()[0].segments_of("m", "t", &(0..13))?.expect("a snapshot's segments");
    let spec = &chain.table("m", "t")?.spec;
    let counters = StateCounters { step: spec.step, epoch: chain.manifest().next_epoch };
    Table::open_from(table_config(ReopenMode::Discard), None, Arc::clone(engine), Some((&files, counters)))
}

pub(crate) fn contents(table: &Table) -> Contents {
    let mut rows = Contents::new();
    table
        .for_each_chunk(50, &mut |chunk| {
            let floats = chunk.vectors.len() / chunk.headers.len();
            for (header, vector) in chunk.headers.iter().zip(chunk.vectors.chunks(floats)) {
                rows.insert(header.id, (*header, vector.iter().map(|value| value.to_bits()).collect()));
            }
            Ok(())
        })
        .expect("exported");
    rows
}

pub(crate) fn segments(engine: &dyn IoEngine, dir: &Path) -> Vec<PathBuf> {
    let mut paths = engine.list(dir).expect("listed");
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "seg"));
    paths
}

pub(crate) fn snapshot_dir(published: &PublishedCheckpoint) -> PathBuf {
    Path::new(ROOT).join(published.latest.to_string()).join("m+t")
}

/// After a stop at every operation, there is the previous checkpoint or the linked one, and the tier has its flush.
#[test]
fn stopped_linked_save_leaves_old_or_new_checkpoint() {
    let (mut stops, mut kept, mut replaced) = (0, 0, 0);
    loop {
        let memory = memory();
        let engine = FaultEngine::new(Arc::new(memory.clone()));
        let shared: Arc<dyn IoEngine> = Arc::new(engine.clone());
        let rig = Rig::open(table_config(ReopenMode::Discard), Arc::clone(&shared)).expect("opened");
        train(&rig, 0..8);
        rig.table.flush(1).expect("flushed");
        let old = rig.contents().expect("exported");
        save(&shared, &rig.table, 1, false).expect("saved");
        train(&rig, 8..14);
        let new = rig.contents().expect("exported");
        engine.hit_change(stops, IoFault::Stop);
        let result = save(&shared, &rig.table, 2, true);
        let stopped = engine.is_stopped();
        if !stopped {
            assert!(result.as_ref().is_ok_and(|(_, linked)| linked.bytes.linked > 0 && linked.bytes.copied == 0));
        }
        for image in [memory.crash(), memory.kill(), memory.crash_torn(stops), memory.crash_torn(stops + 1000)] {
            let image: Arc<dyn IoEngine> = Arc::new(image);
            let found = read(&image).unwrap_or_else(|error| panic!("after {stops} changes: {error}"));
            assert!(found == old || found == new, "neither, after {stops} changes");
            assert!(found == new || result.is_err(), "a save that succeeded is lost after {stops} changes");
            if found == new {
                replaced += 1;
                assert_eq!(contents(&open(&image).expect("opened")), new);
            } else {
                kept += 1;
                let resumed = Rig::open(table_config(ReopenMode::Resume), Arc::clone(&image)).expect("resumed");
                assert_eq!(resumed.contents().expect("exported"), old, "after {stops} changes");
                // A further save succeeds.
                save(&image, &resumed.table, 3, true).expect("saved");
                assert_eq!(read(&image).expect("read"), old);
            }
        }
        if !stopped {
            break;
        }
        stops += 1;
    }
    assert!(stops > 25 && kept > 50 && replaced > 3, "{stops} stops, {kept} kept, {replaced} replaced");
}

/// Later changes of the table change no bit of its linked checkpoint, also after the table is resumed.
#[test]
fn later_table_changes_leave_linked_checkpoint_intact() {
    let memory = memory();
    let engine = FaultEngine::new(Arc::new(memory));
    let shared: Arc<dyn IoEngine> = Arc::new(engine.clone());
    let mut rig = Rig::open(table_config(ReopenMode::Discard), Arc::clone(&shared)).expect("opened");
    train(&rig, 0..30);
    let moment = rig.contents().expect("exported");
    let (published, linked) = save(&shared, &rig.table, 1, true).expect("saved");
    assert_eq!(linked.rows, moment.len() as u64);
    let dir = snapshot_dir(&published);
    let bytes = || -> Vec<Vec<u8>> {
        segments(&engine, &dir).iter().map(|path| read_file(&engine, path, 1 << 20).expect("read")).collect()
    };
    let before = bytes();
    assert!(before.len() > 2);
    for round in 0..6 {
        train(&rig, 100 * (round + 1)..100 * (round + 1) + 60);
        rig.table.flush(u64::from(round) + 1).expect("flushed");
        if round % 2 == 1 {
            drop(rig);
            rig = Rig::open(table_config(ReopenMode::Resume), Arc::clone(&shared)).expect("resumed");
        }
        assert!(bytes() == before, "round {round}: a file of the snapshot was written");
    }
    let reused = |(operation, path): &(IoOperation, PathBuf)| {
        *operation == IoOperation::Rename && path.extension().is_some_and(|extension| extension == "seg")
    };
    assert!(engine.log().iter().any(reused), "no file of a segment was written again: the test shows nothing");
    let is_shared = |path: &PathBuf| engine.open(path, IoOpenMode::Read).expect("opened").links().expect("counted") > 1;
    let still = segments(&engine, &dir).iter().filter(|path| is_shared(path)).count();
    assert!(still < before.len(), "the tier let go of none of the {still} segments");
    assert_eq!(read(&shared).expect("read"), moment);
    drop(rig);
    let table = open(&shared).expect("opened");
    assert_eq!((contents(&table), table.step().expect("open")), (moment, 30));
}

#[test]
fn table_from_snapshot_continues_without_difference() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let rig = Rig::open(table_config(ReopenMode::Discard), Arc::clone(&engine)).expect("opened");
    train(&rig, 0..10);
    rig.table.remove_rows(&[1, 2, 3]).expect("removed");
    save(&engine, &rig.table, 1, true).expect("saved");
    let epoch = rig.table.epoch().expect("open");
    train(&rig, 10..20);
    let straight = rig.contents().expect("exported");
    drop(rig);
    let table = open(&engine).expect("opened");
    assert_eq!((table.step().expect("open"), table.epoch().expect("open")), (10, epoch));
    // A flush of this table is resumed.
    table.flush(1).expect("flushed");
    drop(table);
    let rig = Rig::open(table_config(ReopenMode::Resume), Arc::clone(&engine)).expect("resumed");
    train(&rig, 10..20);
    assert_eq!(rig.contents().expect("exported"), straight);
}

#[test]
fn another_file_system_gets_copies_and_the_report_says_so() {
    let memory = memory();
    let engine = FaultEngine::new(Arc::new(memory.clone()));
    let shared: Arc<dyn IoEngine> = Arc::new(engine.clone());
    let rig = Rig::open(table_config(ReopenMode::Discard), Arc::clone(&shared)).expect("opened");
    train(&rig, 0..10);
    let moment = rig.contents().expect("exported");
    engine.hit_every(IoOperation::Link, IoFault::Fail(libc::EXDEV));
    let (published, linked) = save(&shared, &rig.table, 1, true).expect("saved");
    assert!(linked.bytes.linked == 0 && linked.bytes.copied > 0, "{linked:?}");
    for path in segments(&engine, &snapshot_dir(&published)) {
        assert_eq!(engine.open(&path, IoOpenMode::Read).expect("opened").links().expect("counted"), 1);
    }
    drop(rig);
    // The rows are durable.
    let crashed: Arc<dyn IoEngine> = Arc::new(memory.crash());
    assert_eq!(read(&crashed).expect("read"), moment);
    assert_eq!(contents(&open(&shared).expect("opened")), moment);
}

#[test]
fn other_links_failures_fail_the_save_and_the_table_trains_on() {
    let engine = FaultEngine::new(Arc::new(memory()));
    let shared: Arc<dyn IoEngine> = Arc::new(engine.clone());
    let rig = Rig::open(table_config(ReopenMode::Discard), Arc::clone(&shared)).expect("opened");
    train(&rig, 0..10);
    engine.hit_once(IoOperation::Link, 1, IoFault::Fail(libc::ENOSPC));
    let error = save(&shared, &rig.table, 1, true).expect_err("a full disk");
    assert_eq!((error.kind(), error.errno()), (Kind::Storage, Some(libc::ENOSPC)));
    train(&rig, 10..40);
    save(&shared, &rig.table, 2, true).expect("saved");
    assert_eq!(read(&shared).expect("read"), rig.contents().expect("exported"));
}

#[test]
fn flipped_bit_is_detected_at_open_or_record_read() {
    let memory = memory();
    let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
    let rig = Rig::open(table_config(ReopenMode::Discard), Arc::clone(&engine)).expect("opened");
    train(&rig, 0..4);
    let (published, _) = save(&engine, &rig.table, 1, true).expect("saved");
    drop(rig);
    let paths = segments(&memory, &snapshot_dir(&published));
    let (mut flips, mut at_once) = (0, 0);
    for (number, path) in paths.iter().enumerate() {
        let whole = read_file(&memory, path, 1 << 20).expect("read");
        for at in (number % 7..whole.len()).step_by(embcache_tests::flips(331)) {
            let image: Arc<dyn IoEngine> = Arc::new(memory.kill());
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            write_atomically(&*image, path, &damaged).expect("written");
            let error = read(&image).expect_err("damage");
            assert!(error.kind() == Kind::Corruption && embcache_tests::tells_of_damage(&error), "byte {at}: {error}");
            let checked = chain(&image).and_then(|chain| chain.links()[0].segments_of("m", "t", &(0..13)));
            at_once += usize::from(checked.is_err());
            flips += 1;
        }
        let image: Arc<dyn IoEngine> = Arc::new(memory.kill());
        image.remove_file(path).expect("removed");
        assert_eq!(open(&image).expect_err("a file is missing").kind(), Kind::Corruption);
    }
    assert!(flips > 30 && at_once > 5, "{flips} flips, {at_once} found at once");
}

#[test]
fn other_ranks_are_rejected_with_remedy() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let rig = Rig::open(table_config(ReopenMode::Discard), Arc::clone(&engine)).expect("opened");
    train(&rig, 0..10);
    let moment = rig.contents().expect("exported");
    save(&engine, &rig.table, 1, true).expect("saved");
    let snapshot = chain(&engine).expect("opened");
    assert_eq!(snapshot.manifest().kind, CheckpointKind::Linked);
    let error = snapshot.links()[0].segments_of("m", "t", &(0..7)).expect_err("other buckets");
    assert_eq!(error.kind(), Kind::Mismatch);
    assert!(error.to_string().contains(&format!("`embcache compact {ROOT}`")), "{error}");
    // The checkpoint is resharded, once elsewhere and once in its own directory.
    let elsewhere = Path::new("/checkpoints/elsewhere");
    engine.create_dir_all(elsewhere).expect("made");
    let elsewhere = directory_in(&engine, elsewhere);
    reshard(&snapshot, &elsewhere, 5, 3, true).expect("written");
    let divided =
        CheckpointChain::open(&elsewhere, LatestCheckpoint::read(&elsewhere).expect("there")).expect("opened");
    assert_eq!((divided.manifest().kind, divided.manifest().ranks.len()), (CheckpointKind::Full, 3));
    assert_eq!(divided.table("m", "t").expect("there").rows, moment.len() as u64);
    let directory = directory_in(&engine, ROOT);
    let merged =
        ChainCompaction::open(&directory, LatestCheckpoint::read(&directory).expect("there"), true).expect("opened");
    let merged = merged.expect("a snapshot is no checkpoint yet");
    let options = SaveOptions { merged: Some(merged.chain().identity()), ..SaveOptions::default() };
    let save = CheckpointSave::begin_with(&directory, 6, options).expect("begun");
    let digests: Vec<_> =
        (0..2).map(|rank| merged.write(save.name(), (rank, 2), &mut |_| Ok(())).expect("written")).collect();
    save.publish(&digests, merged.chain().manifest().next_epoch).expect("published");
    assert_eq!(chain(&engine).expect("opened").manifest().kind, CheckpointKind::Full);
    assert_eq!(read(&engine).expect("read"), moment);
}

#[test]
fn a_delta_on_a_snapshot_is_not_published() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let rig = Rig::open(table_config(ReopenMode::Discard), Arc::clone(&engine)).expect("opened");
    train(&rig, 0..5);
    let moment = rig.contents().expect("exported");
    let (snapshot, _) = save(&engine, &rig.table, 1, true).expect("saved");
    let options = SaveOptions { parent: Some(snapshot.identity.clone()), ..SaveOptions::default() };
    let directory = directory_in(&engine, ROOT);
    let save = CheckpointSave::begin_with(&directory, 2, options).expect("begun");
    let mut writer = RankWriter::new(&directory, save.name(), 0, 1).expect("made");
    writer.write_rows_of("m", &rig.table, BTreeMap::new()).expect("written");
    let epoch = rig.table.epoch().expect("open") + 1;
    let error = save.publish(&[writer.finish().expect("finished")], epoch).expect_err("on a linked checkpoint");
    assert!(error.kind() == Kind::State && error.to_string().contains("on a linked checkpoint"), "{error}");
    assert_eq!(chain(&engine).expect("opened").manifest().name, snapshot.identity.name);
    assert_eq!(read(&engine).expect("read"), moment);
}

#[test]
fn a_table_without_an_ssd_tier_is_in_a_snapshot_as_in_any_checkpoint() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let config = TableConfig { ssd: None, ..config(4, OptimizerKind::RowWiseAdagrad, 1000) };
    let rig = Rig::open(config, Arc::clone(&engine)).expect("opened");
    train(&rig, 0..5);
    let (_, linked) = save(&engine, &rig.table, 1, true).expect("saved");
    assert_eq!(linked.bytes, embcache::ssd::LinkedBytes::default());
    assert!(chain(&engine).expect("opened").links()[0].segments_of("m", "t", &(0..13)).expect("checked").is_none());
    assert_eq!(read(&engine).expect("read"), rig.contents().expect("exported"));
}
