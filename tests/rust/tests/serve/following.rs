//! Events while a server follows a directory: linked checkpoints, checkpoints under each other's names, and corrupted
//! optimizer slots.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use embcache::checkpoint::{CheckpointId, SaveOptions};
use embcache::config::{OptimizerKind, ReopenMode};
use embcache::io::{
    DirLock, DirLockPurpose, FileMapping, IoEngine, IoFile, IoOpenMode, IoReadRequest, MappingAccess, PsyncEngine,
    ReadSink,
};
use embcache::rows::WeightPrecision;
use embcache::serve::{PollOutcome, ServeOptions, TableServer};
use embcache::types::Id;
use embcache::{Kind, Result};
use embcache_tests::checkpoint::{ROOT, Table, compact, kind, load, memory, on, save, save_delta};
use embcache_tests::linked::{save as save_rig, table_config, train};
use embcache_tests::serve::{check, check_rows, opened};
use embcache_tests::{Rig, directory_in};

use crate::conversion::{SERVED, newest, serve};
use crate::faults::wait_for;
use crate::server::{changed, files, saved_on_disk};

// ---- linked checkpoints

/// A table, its full checkpoint that is served, and its rows.
fn served_rig(engine: &Arc<dyn IoEngine>) -> (Rig, embcache_tests::Contents) {
    let rig = Rig::open(table_config(ReopenMode::Discard), Arc::clone(engine)).expect("opened");
    train(&rig, 0..8);
    save_rig(engine, &rig.table, 1, false).expect("saved");
    let rows = rig.contents().expect("exported");
    (rig, rows)
}

/// The previous checkpoint is served until the linked checkpoint is compacted.
#[test]
fn linked_checkpoint_is_served_only_after_compaction() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let (rig, before) = served_rig(&engine);
    let serving = opened(&engine, Path::new(ROOT), ServeOptions::default());
    check_rows(&serving, &before);
    train(&rig, 8..14);
    save_rig(&engine, &rig.table, 2, true).expect("saved");
    let linked = rig.contents().expect("exported");
    assert!(linked != before);
    for looks in 1..=2 {
        let error = serving.poll().expect_err("segments are not served");
        assert_eq!(error.kind(), Kind::Mismatch, "{error}");
        let text = error.to_string();
        assert!(text.contains("linked checkpoint") && text.contains(&format!("`embcache compact {ROOT}`")), "{text}");
        let stats = serving.stats();
        assert_eq!((stats.polls, stats.failed_polls, stats.swaps, stats.version.seq), (looks, looks, 0, 1));
        assert_eq!(stats.last_error, Some(text));
        check_rows(&serving, &before);
    }
    assert_eq!(kind(TableServer::open(directory_in(&engine, ROOT), ServeOptions::default())), Kind::Mismatch);
    let mut follower = serving.follow(Duration::from_millis(1)).expect("a thread");
    wait_for(|| serving.stats().failed_polls >= 4, "the follower meets it too");
    check_rows(&serving, &before);
    // The remedy of the error makes it a checkpoint that can be served.
    compact(&engine, 2, 3).expect("compacted");
    wait_for(|| serving.stats().version.seq == 3, "the compacted checkpoint is served");
    follower.stop();
    check_rows(&serving, &linked);
    assert_eq!(serving.stats().last_error, None);
    assert_eq!(serving.poll().expect("a look"), PollOutcome::UpToDate);
    // The next linked checkpoint is skipped if a full one follows it.
    train(&rig, 14..20);
    save_rig(&engine, &rig.table, 4, true).expect("saved");
    assert_eq!(kind(serving.poll()), Kind::Mismatch);
    check_rows(&serving, &linked);
    save_rig(&engine, &rig.table, 5, false).expect("saved");
    assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(name) if name.seq == 5));
    check_rows(&serving, &rig.contents().expect("exported"));
}

/// The previous conversion is served until the trainer's linked checkpoint is converted.
#[test]
fn linked_source_checkpoint_is_served_only_after_conversion() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let (rig, before) = served_rig(&engine);
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Fp32).expect("made");
    let options = ServeOptions { source: Some(directory_in(&engine, ROOT)), ..ServeOptions::default() };
    let serving = opened(&engine, Path::new(SERVED), options);
    assert_eq!(serving.stats().last_error, None);
    train(&rig, 8..14);
    save_rig(&engine, &rig.table, 2, true).expect("saved");
    let error = serving.poll().expect_err("it was not converted");
    assert_eq!(error.kind(), Kind::Mismatch, "{error}");
    assert!(error.to_string().contains("`embcache convert`"), "{error}");
    assert_eq!((serving.stats().failed_polls, serving.stats().last_error), (1, Some(error.to_string())));
    check_rows(&serving, &before);
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Fp32).expect("made");
    assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(_)));
    check_rows(&serving, &rig.contents().expect("exported"));
}

// ---- names

/// Swaps the names of two checkpoints.
fn swap_names(root: &Path, (one, other): (&str, &str)) {
    for (from, to) in [(one, "aside"), (other, one), ("aside", other)] {
        std::fs::rename(root.join(from), root.join(to)).expect("renamed");
    }
}

/// A server of the checkpoint `name`, which reads the latest one at its next poll.
fn opened_at(engine: &Arc<dyn IoEngine>, root: &Path, name: &str, newest: &str) -> Arc<TableServer> {
    std::fs::write(root.join("LATEST"), format!("{name}\n")).expect("written");
    let serving = opened(engine, root, ServeOptions::default());
    std::fs::write(root.join("LATEST"), format!("{newest}\n")).expect("written");
    serving
}

/// Checkpoints under the names of others are rejected until they have their own names again.
#[test]
fn checkpoints_with_swapped_names_are_rejected() {
    let (dir, engine, full, identity) = saved_on_disk();
    let (root, mut states, mut parents): (_, _, Vec<CheckpointId>) = (dir.path(), vec![full], vec![identity]);
    for number in 1..4 {
        let next = changed(&states[number - 1], number as u64);
        let options = SaveOptions { keep: 9, ..on(&parents[number - 1]) };
        let pair = (&*states[number - 1], &*next);
        parents.push(save_delta(&engine, root, pair, (2, 3000), number as u64 + 1, options).expect("saved").identity);
        states.push(next);
    }
    let names: Vec<&str> = parents.iter().map(|parent| &*parent.name).collect();
    let (mut refused, mut served) = (0, 0);
    for at in 0..3 {
        for (one, other) in (0..4).flat_map(|one| (one + 1..4).map(move |other| (one, other))) {
            let serving = opened_at(&engine, root, names[at], names[3]);
            swap_names(root, (names[one], names[other]));
            let polled = serving.poll();
            if other <= at {
                // Nothing that is served is read again.
                served += 1;
                assert!(matches!(polled.expect("a look"), PollOutcome::Newer(name) if name.to_string() == names[3]));
                check(&serving, &states[3]);
            } else {
                refused += 1;
                let error = polled.expect_err("another checkpoint");
                assert_eq!(error.kind(), Kind::Corruption, "{at}: {one} and {other}: {error}");
                assert!([one, other].iter().any(|n| error.to_string().contains(names[*n])), "{error}");
                let stats = serving.stats();
                assert_eq!((stats.failed_polls, stats.swaps, stats.last_error), (1, 0, Some(error.to_string())));
                check(&serving, &states[at]);
            }
            let anew = TableServer::open(directory_in(&engine, root), ServeOptions::default());
            assert_eq!(kind(anew), Kind::Corruption, "{one} and {other}");
            swap_names(root, (names[one], names[other]));
            serving.poll().expect("a look");
            check(&serving, &states[3]);
            assert_eq!(serving.stats().last_error, None);
        }
    }
    assert_eq!((refused, served), (14, 4));
}

// ---- optimizer slots

/// The bytes of each column of optimizer slots of a data file.
fn slots(path: &Path) -> Vec<Range<usize>> {
    const OTHERS: [&str; 10] = [
        "__metadata__",
        "id",
        "last_step",
        "bucket_offsets",
        "tombstone",
        "weight",
        "count",
        "score",
        "modified_epoch",
        "checksums",
    ];
    let bytes = std::fs::read(path).expect("read");
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..data]).expect("a header");
    let columns = header.as_object().expect("tensors").iter();
    let of_slots = columns.filter(|(name, _)| {
        let column = name.split('.').next().expect("a name");
        !OTHERS.contains(&column) && column != "__pad"
    });
    let offset =
        |tensor: &serde_json::Value, at: usize| tensor["data_offsets"][at].as_u64().expect("a number") as usize;
    let ranges = of_slots.map(|(_, tensor)| data + offset(tensor, 0)..data + offset(tensor, 1));
    ranges.filter(|range| !range.is_empty()).collect()
}

/// Overwrites all optimizer slots of a checkpoint. Returns the number of columns.
fn damage_slots(root: &Path, name: &str) -> usize {
    let mut damaged = 0;
    for path in files(root, name, ".safetensors") {
        let mut bytes = std::fs::read(&path).expect("read");
        for range in slots(&path) {
            bytes[range].fill(0xff);
            damaged += 1;
        }
        std::fs::write(&path, bytes).expect("written");
    }
    damaged
}

fn tables_with_slots(salt: u64) -> Vec<Table> {
    use OptimizerKind::{Adam, PartialRowWiseAdam, RowWiseAdagrad, Sgd};
    let ids: Vec<Id> = (0..900).map(|n| n * n * 31 - 9000).collect();
    let wanted = [("a", Adam, 64), ("b", RowWiseAdagrad, 16), ("c", PartialRowWiseAdam, 5), ("d", Sgd, 3)];
    wanted.into_iter().map(|(name, kind, dim)| Table::new("m", name, kind, dim, &ids, salt)).collect()
}

#[test]
fn damaged_optimizer_slots_do_no_harm_to_a_server() {
    for preload in [false, true] {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, engine): (_, Arc<dyn IoEngine>) = (dir.path(), Arc::new(PsyncEngine::new(false)));
        let options = || ServeOptions { preload, ..ServeOptions::default() };
        let (before, after) = (tables_with_slots(1), tables_with_slots(2));
        let full = save(&engine, root, &before, 2, 100_000, 1).expect("saved").identity;
        let harmless = damage_slots(root, &full.name);
        assert!(harmless >= 2 * 5, "{harmless} columns: Adam has two, and each rank has files of its own");
        let serving = opened(&engine, root, options());
        check(&serving, &before);
        let delta = save_delta(&engine, root, (&before, &after), (2, 100_000), 2, on(&full)).expect("saved").identity;
        let harmless = damage_slots(root, &delta.name);
        assert!(harmless >= 2 * 5, "{harmless} columns");
        assert_eq!(kind(load(&engine, root, 1)), Kind::Corruption, "whoever trains needs them");
        assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(name) if name.to_string() == delta.name));
        check(&serving, &after);
        check(&opened(&engine, root, options()), &after);
        for name in [&full.name, &delta.name] {
            let _ = std::fs::remove_file(root.join(name).join("serve.idx"));
        }
        check(&opened(&engine, root, options()), &after);
        assert_eq!(serving.stats().failed_polls, 0);
    }
}

/// The byte ranges that were read, each with its file.
type Ranges = Arc<Mutex<Vec<(PathBuf, Range<usize>)>>>;

/// An engine that records reads. It does not see mapped reads.
#[derive(Debug)]
struct Noting {
    inner: Arc<dyn IoEngine>,
    read: Ranges,
}

#[derive(Debug)]
struct NotingFile {
    inner: Arc<dyn IoFile>,
    read: Ranges,
}

impl IoFile for NotingFile {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let range = offset as usize..offset as usize + into.len();
        self.read.lock().expect("no panic").push((self.inner.path().to_owned(), range));
        self.inner.read_at(offset, into)
    }
    fn path(&self) -> &Path {
        self.inner.path()
    }
    fn len(&self) -> Result<u64> {
        self.inner.len()
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.inner.write_at(offset, data)
    }
    fn set_len(&self, len: u64) -> Result<()> {
        self.inner.set_len(len)
    }
    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }
    fn links(&self) -> Result<u64> {
        self.inner.links()
    }
    fn map(&self, access: MappingAccess) -> Result<FileMapping> {
        self.inner.map(access)
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self.inner.as_any()
    }
}

impl IoEngine for Noting {
    fn open(&self, path: &Path, how: IoOpenMode) -> Result<Arc<dyn IoFile>> {
        let inner = self.inner.open(path, how)?;
        Ok(Arc::new(NotingFile { inner, read: Arc::clone(&self.read) }))
    }
    fn read_batch(&self, _: &[IoReadRequest], _: &mut ReadSink<'_>) {
        panic!("checkpoints are not read in batches, which are not noted");
    }
    fn name(&self) -> String {
        self.inner.name()
    }
    fn create_dir_all(&self, path: &Path) -> Result<()> {
        self.inner.create_dir_all(path)
    }
    fn list(&self, path: &Path) -> Result<Vec<PathBuf>> {
        self.inner.list(path)
    }
    fn exists(&self, path: &Path) -> Result<bool> {
        self.inner.exists(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.inner.rename(from, to)
    }
    fn link(&self, file: &dyn IoFile, to: &Path) -> Result<()> {
        self.inner.link(file, to)
    }
    fn remove_file(&self, path: &Path) -> Result<()> {
        self.inner.remove_file(path)
    }
    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        self.inner.remove_dir_all(path)
    }
    fn sync_dir(&self, path: &Path) -> Result<()> {
        self.inner.sync_dir(path)
    }
    fn lock_dir(&self, path: &Path) -> Result<DirLock> {
        self.inner.lock_dir(path)
    }
    fn lock_dir_for(&self, path: &Path, how: DirLockPurpose) -> Result<DirLock> {
        self.inner.lock_dir_for(path, how)
    }
}

#[test]
fn a_server_does_not_read_optimizer_slots() {
    const BLOCK: usize = 4096;
    let dir = tempfile::tempdir().expect("a directory");
    let (root, engine): (_, Arc<dyn IoEngine>) = (dir.path(), Arc::new(PsyncEngine::new(false)));
    let read = Ranges::default();
    let noting: Arc<dyn IoEngine> = Arc::new(Noting { inner: Arc::clone(&engine), read: Arc::clone(&read) });
    let (before, after) = (tables_with_slots(1), tables_with_slots(2));
    let full = save(&engine, root, &before, 1, 1 << 20, 1).expect("saved").identity;
    let serving = opened(&noting, root, ServeOptions::default());
    let delta = save_delta(&engine, root, (&before, &after), (1, 1 << 20), 2, on(&full)).expect("saved").identity;
    serving.poll().expect("a look");
    check(&serving, &after);
    check(&opened(&noting, root, ServeOptions::default()), &after);
    let (mut columns, read) = (0, read.lock().expect("no panic").clone());
    for path in [&full.name, &delta.name].iter().flat_map(|name| files(root, name, ".safetensors")) {
        for slot in slots(&path) {
            // Other columns are read in whole blocks, which a slot may share at its ends.
            let inner = slot.start.next_multiple_of(BLOCK)..slot.end / BLOCK * BLOCK;
            let touches = |range: &Range<usize>| range.start < inner.end && inner.start < range.end;
            let of_file = || read.iter().filter(|(of, _)| *of == path);
            assert!(of_file().count() > 2, "the other columns of {} are read", path.display());
            if !inner.is_empty() {
                columns += 1;
                let touching = of_file().find(|(_, range)| touches(range));
                assert!(touching.is_none(), "{touching:?} of {slot:?}");
            }
        }
    }
    assert!(columns >= 4, "{columns} columns of more than a block");
    // Training reads them.
    let loaded = load(&noting, root, 1).expect("loaded");
    assert!(loaded == after);
}
