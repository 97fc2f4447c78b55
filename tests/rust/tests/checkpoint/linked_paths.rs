//! An attacker changes the directories between an SSD tier and its linked checkpoint while files are linked. Nothing is
//! created elsewhere, and nothing else is linked.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::Kind;
use embcache::cache::Table;
use embcache::checkpoint::{CheckpointChain, CheckpointSave, LatestCheckpoint, LinkedTable, RankWriter, SaveOptions};
use embcache::config::{ReopenMode, SsdConfig, TableConfig};
use embcache::io::{ConfinedEngine, FaultEngine, IoOperation, PsyncEngine};
use embcache::paths::{PathChecks, open_to_load, open_to_save};
use embcache::ssd::{LinkedSegments, StateCounters};
use embcache_tests::linked::{table_config, train};
use embcache_tests::{Contents, Rig, directory_in};

use crate::linked::contents;

struct Fixture {
    base: tempfile::TempDir,
    root: PathBuf,
    tier: PathBuf,
    /// A directory of another user, with a file of each segment's name.
    victim: PathBuf,
    engine: FaultEngine,
}

impl Fixture {
    fn new() -> Self {
        let base = tempfile::Builder::new().prefix("embcache").tempdir().expect("made");
        let dir = |name: &str| {
            let path = base.path().join(name);
            fs::create_dir(&path).expect("made");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).expect("set");
            path
        };
        let (root, tier, victim) = (dir("checkpoint"), dir("tier"), dir("victim"));
        Self { base, root, tier, victim, engine: FaultEngine::new(Arc::new(PsyncEngine::new(true))) }
    }

    fn config(&self, tier: &str) -> TableConfig {
        let dir = self.base.path().join(tier);
        let ssd = SsdConfig { dir, bytes: 1 << 20, reopen: ReopenMode::Discard, resume_commit_id: None };
        TableConfig { ssd: Some(ssd), ..table_config(ReopenMode::Discard) }
    }

    fn trained(&self) -> Rig {
        let rig = Rig::open(self.config("tier"), Arc::new(PsyncEngine::new(true))).expect("opened");
        train(&rig, 0..6);
        rig
    }

    /// Saves a linked checkpoint through the checked paths.
    fn save(&self, table: &Table) -> embcache::Result<LinkedTable> {
        let (root, directory) = open_to_save(&self.root)?;
        let engine =
            ConfinedEngine::engine(Arc::new(self.engine.clone()), &root, directory, PathChecks::Strict.entry_check());
        let options = SaveOptions { linked: true, keep: 1, ..SaveOptions::default() };
        let directory = directory_in(&engine, &root);
        let save = CheckpointSave::begin_with(&directory, 1, options)?;
        let mut writer = RankWriter::new(&directory, save.name(), 0, 1)?;
        let linked = writer.link_rows_of("m", table, BTreeMap::new())?;
        save.publish(&[writer.finish()?], 1)?;
        Ok(linked)
    }

    /// The segments of the linked checkpoint, at the present location of its directory.
    fn segments(&self, root: &Path) -> embcache::Result<LinkedSegments> {
        let (root, directory) = open_to_load(root)?;
        let engine =
            ConfinedEngine::engine(Arc::new(self.engine.clone()), &root, directory, PathChecks::Strict.entry_check());
        let directory = directory_in(&engine, &root);
        let chain = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory)?)?;
        Ok(chain.links()[0].segments_of("m", "t", &(0..13))?.expect("a snapshot"))
    }

    fn load(&self, root: &Path) -> Contents {
        let files = self.segments(root).expect("whole");
        let source = Some((&files, StateCounters::default()));
        let table = Table::open_from(self.config("other"), None, Arc::new(PsyncEngine::new(true)), source);
        contents(&table.expect("opened"))
    }

    /// Runs `attack` while `work` is about to link the first file.
    fn amid<T: Send>(&self, work: impl FnOnce() -> T + Send, attack: impl FnOnce()) -> T {
        self.engine.hold(IoOperation::Link);
        std::thread::scope(|scope| {
            let working = scope.spawn(work);
            self.engine.wait_until_held();
            attack();
            self.engine.release();
            working.join().expect("no panic")
        })
    }
}

fn names(dir: &Path) -> Vec<PathBuf> {
    let mut names: Vec<PathBuf> = fs::read_dir(dir).expect("listed").map(|entry| entry.expect("read").path()).collect();
    names.sort();
    names
}

fn segments_in(dir: &Path) -> Vec<PathBuf> {
    names(dir).into_iter().filter(|path| path.extension().is_some_and(|found| found == "seg")).collect()
}

/// The directory of the checkpoint's only table.
fn table_dir(root: &Path) -> PathBuf {
    names(root).into_iter().map(|path| path.join("m+t")).find(|path| path.is_dir()).expect("there")
}

#[test]
fn symlinked_checkpoint_directory_gets_no_segment() {
    let fixture = Fixture::new();
    let rig = fixture.trained();
    let moved = fixture.base.path().join("moved");
    let swap = || {
        fs::rename(&fixture.root, &moved).expect("renamed");
        symlink(&fixture.victim, &fixture.root).expect("linked");
    };
    let linked = fixture.amid(|| fixture.save(&rig.table), swap).expect("saved where it was");
    assert!(linked.bytes.linked > 0 && linked.bytes.copied == 0, "{linked:?}");
    assert!(names(&fixture.victim).is_empty());
    assert_eq!(fixture.load(&moved), rig.contents().expect("exported"));
}

#[test]
fn directory_swapped_for_symlink_while_linking_is_rejected() {
    let fixture = Fixture::new();
    let rig = fixture.trained();
    let swap = || {
        let dir = table_dir(&fixture.root);
        fs::rename(&dir, dir.with_extension("moved")).expect("renamed");
        symlink(&fixture.victim, &dir).expect("linked");
    };
    let error = fixture.amid(|| fixture.save(&rig.table), swap).expect_err("a link is in the way");
    assert_eq!(error.kind(), Kind::Path, "{error}");
    assert!(names(&fixture.victim).is_empty() && !error.to_string().contains("/proc/self/fd"), "{error}");
    // Nothing names the unfinished save.
    assert!(!fixture.root.join("LATEST").exists());
}

#[test]
fn what_takes_the_name_of_a_segment_is_not_linked() {
    for kind in ["link", "file"] {
        let fixture = Fixture::new();
        let rig = fixture.trained();
        let secret = fixture.victim.join("secret");
        fs::write(&secret, b"not a segment").expect("written");
        let swap = || {
            let segments = segments_in(&fixture.tier);
            assert!(segments.len() > 1);
            for path in segments {
                // An attacker could try this to put a file into the checkpoint. The segment stays, under another name.
                fs::rename(&path, path.with_extension("moved")).expect("renamed");
                if kind == "link" {
                    symlink(&secret, &path).expect("linked");
                } else {
                    fs::hard_link(&secret, &path).expect("linked");
                }
            }
        };
        let linked = fixture.amid(|| fixture.save(&rig.table), swap).expect("saved");
        assert!(linked.bytes.linked > 0 && linked.bytes.copied == 0, "{linked:?}");
        assert_eq!(fixture.load(&fixture.root), rig.contents().expect("exported"));
    }
}

#[test]
fn substituted_linked_segment_is_rejected_at_once() {
    let fixture = Fixture::new();
    let rig = fixture.trained();
    fixture.save(&rig.table).expect("saved");
    drop(rig);
    let kept = fixture.base.path().join("kept");
    for path in segments_in(&table_dir(&fixture.root)) {
        for what in ["link", "pipe", "directory", "nothing"] {
            fs::rename(&path, &kept).expect("renamed");
            match what {
                "link" => symlink(&kept, &path).expect("linked"),
                "pipe" => {
                    let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
                    rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).expect("made");
                }
                "directory" => fs::create_dir(&path).expect("made"),
                _ => {}
            }
            let error = fixture.segments(&fixture.root).expect_err("no segment");
            let said = matches!(error.kind(), Kind::Path | Kind::Corruption | Kind::Storage);
            assert!(said && !error.to_string().contains("/proc/self/fd"), "{what}: {error:?}");
            if what == "directory" {
                fs::remove_dir(&path).expect("removed");
            } else if what != "nothing" {
                fs::remove_file(&path).expect("removed");
            }
            fs::rename(&kept, &path).expect("renamed");
        }
    }
    assert!(fixture.segments(&fixture.root).is_ok());
}
