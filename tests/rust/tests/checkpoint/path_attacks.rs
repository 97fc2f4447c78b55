//! An attacker changes the path of a checkpoint, or its contents, between the check and the use. Nothing is written or
//! read elsewhere.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use embcache::Kind;
use embcache::checkpoint::{
    AsyncSaveOptions, ChainCompaction, CheckpointChain, CheckpointDirectory, CheckpointPart, CheckpointSave,
    LatestCheckpoint, RankSnapshot, RankWriter, RecisJoinMode, RecisSave, RecisShard, SaveOptions, remove_stale_parts,
    reshard,
};
use embcache::config::OptimizerKind::RowWiseAdagrad;
use embcache::io::{ConfinedEngine, IoEngine, IoOpenMode, PsyncEngine};
use embcache::paths::{PathChecks, open_to_load, open_to_save};
use embcache::types::Id;
use embcache_tests::checkpoint::{Table, load, load_from, save, save_to};

/// A directory for a checkpoint, and a victim's directory in which nothing may appear.
struct Fixture {
    base: tempfile::TempDir,
    root: PathBuf,
    victim: PathBuf,
}

impl Fixture {
    fn new() -> Self {
        let base = tempfile::Builder::new().prefix("embcache").tempdir().unwrap();
        let (root, victim) = (base.path().join("checkpoint"), base.path().join("victim"));
        for dir in [&root, &victim] {
            fs::create_dir(dir).unwrap();
            fs::set_permissions(dir, fs::Permissions::from_mode(0o750)).unwrap();
        }
        Self { base, root, victim }
    }

    /// An engine for the checkpoint's present directory.
    fn engine(&self) -> Arc<dyn IoEngine> {
        let (path, directory) = open_to_save(&self.root).unwrap();
        ConfinedEngine::engine(Arc::new(PsyncEngine::new(true)), &path, directory, PathChecks::Strict.entry_check())
    }

    /// The checkpoint's present directory, held open.
    fn directory(&self) -> CheckpointDirectory {
        CheckpointDirectory::open_to_save(&self.root, PathChecks::Strict).unwrap()
    }

    /// Replaces the directory by a link to the victim. Returns the directory's new path.
    fn swap(&self) -> PathBuf {
        let moved = self.base.path().join("moved");
        fs::rename(&self.root, &moved).unwrap();
        symlink(&self.victim, &self.root).unwrap();
        moved
    }

    fn assert_victim_untouched(&self) {
        assert_eq!(fs::read_dir(&self.victim).unwrap().count(), 0);
    }
}

fn table() -> Table {
    let ids: Vec<Id> = (-40..40).collect();
    Table::new("m", "a", RowWiseAdagrad, 4, &ids, 1)
}

/// Every file below `root`, by its path.
fn files(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut todo = vec![root.to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                todo.push(path);
            } else {
                found.insert(path.clone(), fs::read(path).unwrap());
            }
        }
    }
    found
}

#[test]
fn save_stays_in_checked_directory_after_symlink_swap() {
    for stage in 0..4 {
        let fixture = Fixture::new();
        let directory = fixture.directory();
        let mut now = fixture.root.clone();
        let mut swap_at = |reached: u32| {
            if reached == stage {
                now = fixture.swap();
            }
        };
        swap_at(0);
        let begun = CheckpointSave::begin(&directory, 5).unwrap();
        swap_at(1);
        let mut writer = RankWriter::new(&directory, begun.name(), 0, 1).unwrap();
        let table = table();
        let rows: Vec<_> = table.rows.values().cloned().collect();
        writer
            .write_table(table.spec.clone(), 0..7, &mut |sink: &mut embcache::checkpoint::RowSink<'_>| {
                rows.iter().try_for_each(|(header, vector)| sink(std::slice::from_ref(header), vector))
            })
            .unwrap();
        swap_at(2);
        let digest = writer.finish().unwrap();
        swap_at(3);
        begun.publish(&[digest], 1).unwrap();
        fixture.assert_victim_untouched();
        // A caller that checked the directory earlier can load it, and a caller that uses the path cannot.
        assert_eq!(load_from(&directory, 1).unwrap(), vec![table]);
        assert_eq!(open_to_load(&fixture.root).unwrap_err().kind(), Kind::Path);
        assert!(now.join("LATEST").exists());
    }
}

#[test]
fn part_is_read_from_checked_directory_after_symlink_swap() {
    // If each rank saves separately, its checkpoints are stored in the directory of the parts.
    for lies_in_it in [false, true] {
        let fixture = Fixture::new();
        let parts = fixture.directory();
        let to = if lies_in_it { fixture.root.join("rank-0") } else { fixture.base.path().join("other") };
        let to = CheckpointDirectory::open_to_save(&to, PathChecks::Strict).unwrap();
        let mut part = CheckpointPart::begin(&parts, 1, 0).unwrap();
        let table = table();
        part.rank_writer().unwrap().write_table(table.spec.clone(), 0..7, &mut table.source(&(0..7), 5)).unwrap();
        let digest = part.finish().unwrap();
        // The victim has the same part.
        for (path, bytes) in files(&fixture.root.join(part.name().to_string())) {
            let copy = fixture.victim.join(path.strip_prefix(&fixture.root).unwrap());
            fs::create_dir_all(copy.parent().unwrap()).unwrap();
            fs::write(copy, bytes).unwrap();
        }
        let before = files(&fixture.victim);
        assert!(before.len() >= 2, "{:?}", before.keys());
        let mut save = CheckpointSave::begin(&to, 5).unwrap();
        let held = save.directory_of_parts(parts.path()).unwrap();
        let moved = fixture.swap();
        assert_eq!(save.directory_of_parts(parts.path()).unwrap_err().kind(), Kind::Path);
        let adopted = save.adopt(0, 1, &[(held, part.name(), digest)]).unwrap();
        save.write_dense_metadata(b"{}").unwrap();
        save.publish(&[adopted], 1).unwrap();
        assert!(files(&fixture.victim) == before, "the victim's part was touched");
        assert!(!moved.join(part.name().to_string()).exists(), "the part was taken over");
        assert_eq!(load_from(&to, 1).unwrap(), vec![table]);
    }
}

#[test]
fn nothing_is_changed_in_a_directory_that_was_checked_for_a_load() {
    let fixture = Fixture::new();
    let saved = save_to(&fixture.directory(), &[table()], (1, 1000), 1, SaveOptions::default()).unwrap();
    let mut part = CheckpointPart::begin(&fixture.directory(), 1, 0).unwrap();
    let digest = part.finish().unwrap();
    let before = files(&fixture.root);
    let directory = CheckpointDirectory::open_to_load(&fixture.root, PathChecks::Strict).unwrap();
    let moment = AsyncSaveOptions { next_epoch: 2, pre_image_bytes: 1 << 20, bytes_per_second: None, counts: true };
    let (name, shard) = (saved.latest.name, RecisShard { index: 0, count: 1 });
    let errors = [
        CheckpointSave::begin(&directory, 2).map(drop).unwrap_err(),
        RankWriter::new(&directory, name, 0, 1).map(drop).unwrap_err(),
        RankSnapshot::begin(&directory, name, (0, 1), Vec::new(), moment).map(drop).unwrap_err(),
        CheckpointPart::begin(&directory, 2, 0).map(drop).unwrap_err(),
        remove_stale_parts(&directory).map(drop).unwrap_err(),
        ChainCompaction::open(&directory, saved.latest, true).map(drop).unwrap_err(),
        reshard(&CheckpointChain::open(&directory, saved.latest).unwrap(), &directory, 2, 1, true)
            .map(drop)
            .unwrap_err(),
        RecisSave::begin(&directory, shard, &[], &RecisJoinMode::New, 2, &mut || Ok(())).map(drop).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), Kind::State, "{error}");
        assert!(error.to_string().contains("was opened to load from"), "{error}");
    }
    assert!(files(&fixture.root) == before, "something was changed");
    assert_eq!(load_from(&directory, 1).unwrap(), vec![table()]);
    // Parts are not read from there either, before anything else is done.
    let save = CheckpointSave::begin(&fixture.directory(), 3).unwrap();
    let error = save.adopt(0, 1, &[(directory, part.name(), digest)]).unwrap_err();
    assert_eq!(error.kind(), Kind::State, "{error}");
}

#[test]
fn exchanging_the_directory_all_the_time_never_leads_a_save_elsewhere() {
    let fixture = Fixture::new();
    let tables = [table()];
    let (root, link) = (fixture.root.clone(), fixture.base.path().join("link"));
    symlink(&fixture.victim, &link).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(rustix::fs::CWD, &root, rustix::fs::CWD, &link, flags).unwrap();
            }
        });
        let (mut saved, mut refused) = (0, 0);
        for random in 0.. {
            // The other thread alternates, so both happen.
            if saved >= 4 && refused >= 4 {
                break;
            }
            match CheckpointDirectory::open_to_save(&root, PathChecks::Strict) {
                Ok(directory) => {
                    save_to(&directory, &tables, (2, 1000), random, SaveOptions::default()).unwrap();
                    saved += 1;
                }
                Err(error) => {
                    assert_eq!(error.kind(), Kind::Path, "{error}");
                    refused += 1;
                    std::thread::yield_now();
                }
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    fixture.assert_victim_untouched();
}

/// A symbolic link in a checkpoint is not followed, and a pipe is not waited for.
#[test]
fn links_and_pipes_in_checkpoint_are_not_opened() {
    let fixture = Fixture::new();
    let tables = [table()];
    save(&fixture.engine(), &fixture.root, &tables, 1, 1000, 1).unwrap();
    let mut good = files(&fixture.root);
    // The lock belongs to savers. A load reads the other files.
    good.retain(|path, _| path.file_name().is_some_and(|name| name != "lock"));
    let kept = fixture.base.path().join("kept");
    let mut directories: Vec<PathBuf> = good.keys().filter_map(|path| Some(path.parent()?.to_owned())).collect();
    directories.sort();
    directories.dedup();
    directories.retain(|path| path != &fixture.root);
    for path in good.keys().chain(&directories) {
        for what in ["link", "pipe", "device", "directory", "nothing"] {
            fs::rename(path, &kept).unwrap();
            match what {
                "link" => symlink(&kept, path).unwrap(),
                "pipe" => {
                    let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
                    rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, 0).unwrap();
                }
                "device" => {
                    let device = rustix::fs::makedev(1, 5); // a device of endless zeros
                    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
                    let kind = rustix::fs::FileType::CharacterDevice;
                    if rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, device).is_err() {
                        fs::rename(&kept, path).unwrap(); // only root can make devices
                        continue;
                    }
                }
                "directory" => fs::create_dir(path).unwrap(),
                _ => {}
            }
            let error = load(&fixture.engine(), &fixture.root, 1).unwrap_err();
            let said = matches!(error.kind(), Kind::Path | Kind::Corruption | Kind::Storage);
            assert!(said, "{what} at {}: {error:?}", path.display());
            assert!(!error.to_string().contains("/proc/self/fd"), "{error}");
            if what == "directory" {
                fs::remove_dir(path).unwrap();
            } else if what != "nothing" {
                fs::remove_file(path).unwrap();
            }
            fs::rename(&kept, path).unwrap();
        }
    }
    assert_eq!(load(&fixture.engine(), &fixture.root, 1).unwrap(), tables);
}

#[test]
fn a_save_removes_links_and_never_what_they_point_to() {
    let fixture = Fixture::new();
    let tables = [table()];
    let engine = fixture.engine();
    save(&engine, &fixture.root, &tables, 1, 1000, 1).unwrap();
    let treasure = fixture.base.path().join("treasure");
    fs::create_dir(&treasure).unwrap();
    fs::write(treasure.join("gold"), "gold").unwrap();
    // An attacker replaced a leftover of a save, and a file in another one, by links.
    symlink(&treasure, fixture.root.join("0000000007-00000000000000aa")).unwrap();
    let leftover = fixture.root.join("0000000008-00000000000000bb");
    fs::create_dir(&leftover).unwrap();
    symlink(&treasure, leftover.join("m+a")).unwrap();
    let published = save(&engine, &fixture.root, &tables, 1, 1000, 2).unwrap();
    assert_eq!(fs::read_to_string(treasure.join("gold")).unwrap(), "gold");
    assert!(!leftover.exists(), "{:?}", published.cleanup_errors);
    assert_eq!(load(&engine, &fixture.root, 1).unwrap(), tables);
}

#[test]
fn the_lock_of_a_save_is_not_taken_through_a_link() {
    let fixture = Fixture::new();
    let engine = fixture.engine();
    let leftover = fixture.root.join("0000000008-00000000000000bb");
    fs::create_dir(&leftover).unwrap();
    let outside = fixture.victim.join("lock");
    symlink(&outside, leftover.join("lock")).unwrap();
    save(&engine, &fixture.root, &[table()], 1, 1000, 2).unwrap();
    assert!(!outside.exists());
}

#[test]
fn every_operation_rejects_links_out_of_directory() {
    let fixture = Fixture::new();
    let engine = fixture.engine();
    fs::write(fixture.victim.join("file"), "here").unwrap();
    symlink(&fixture.victim, fixture.root.join("link")).unwrap();
    let (inside, file) = (fixture.root.join("link"), fixture.root.join("link/file"));
    let errors = [
        engine.open(&file, IoOpenMode::Read).unwrap_err(),
        engine.open(&file, IoOpenMode::Write).unwrap_err(),
        engine.open(&inside.join("new"), IoOpenMode::Create { preallocate: 0 }).unwrap_err(),
        engine.create_dir_all(&inside).unwrap_err(),
        engine.create_dir_all(&inside.join("new")).unwrap_err(),
        engine.list(&inside).unwrap_err(),
        engine.rename(&file, &fixture.root.join("taken")).unwrap_err(),
        engine.remove_file(&file).unwrap_err(),
        engine.remove_dir_all(&inside.join("file")).unwrap_err(),
        engine.sync_dir(&inside).unwrap_err(),
        engine.lock_dir(&inside).unwrap_err(),
        engine.exists(&file).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), Kind::Path, "{error}");
        assert!(error.to_string().contains(inside.to_str().unwrap()), "{error}");
    }
    assert_eq!(files(&fixture.victim).len(), 1);
    assert_eq!(fs::read_to_string(fixture.victim.join("file")).unwrap(), "here");
}

#[test]
fn errors_speak_of_the_path_that_was_given() {
    let fixture = Fixture::new();
    let engine = fixture.engine();
    save(&engine, &fixture.root, &[table()], 1, 1000, 1).unwrap();
    let latest = LatestCheckpoint::read(&fixture.directory()).unwrap();
    let data =
        files(&fixture.root).into_keys().find(|path| path.extension().is_some_and(|end| end == "safetensors")).unwrap();
    let mut bytes = fs::read(&data).unwrap();
    bytes[4096] ^= 1; // a byte of the first id
    fs::write(&data, bytes).unwrap();
    let error = load(&engine, &fixture.root, 1).unwrap_err();
    assert_eq!(error.kind(), Kind::Corruption);
    assert_eq!(error.path(), Some(data.as_path()), "{error}");
    assert!(error.to_string().contains(data.to_str().unwrap()), "{error} of {latest}");
}
