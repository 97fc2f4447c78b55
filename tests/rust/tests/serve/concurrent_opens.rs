//! Many threads and processes concurrently open a checkpoint without an index: one of them builds the index, and all
//! use it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Barrier};

use embcache::config::OptimizerKind;
use embcache::io::{FaultEngine, IoEngine, IoOperation, PsyncEngine};
use embcache::serve::{ServeOptions, TableServer, make_index};
use embcache::types::Id;
use embcache_tests::checkpoint::{Table, on, save, save_delta};
use embcache_tests::directory_in;
use embcache_tests::serve::check;

use crate::faults::wait_for;

const THREADS: usize = 6;
const PROCESSES: usize = 4;

fn tables(salt: u64) -> Vec<Table> {
    let ids: Vec<Id> = (0..3000).map(|n| n * n * 31 - 9000).collect();
    vec![
        Table::new("m", "a", OptimizerKind::RowWiseAdagrad, 8, &ids, salt),
        Table::new("m", "b", OptimizerKind::Adam, 3, &ids[..400], salt + 1),
    ]
}

/// A chain without an index on the disk, and the directory of its latest checkpoint.
fn chain(root: &Path) -> PathBuf {
    let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::new(false));
    let full = save(&engine, root, &tables(1), 2, 9000, 1).expect("saved").identity;
    let delta = save_delta(&engine, root, (&tables(1), &tables(2)), (2, 9000), 2, on(&full)).expect("saved");
    root.join(delta.identity.name)
}

fn inode(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path).expect("it is there"))
}

/// The files called `serve.idx` below a directory that this process has mapped: their inode numbers, and true if they
/// were deleted.
fn mapped_indexes(root: &Path) -> Vec<(u64, bool)> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("what the system says of this process");
    let below = root.to_str().expect("a path of text");
    let lines = maps.lines().filter(|line| line.contains(below) && line.contains("serve.idx"));
    let number = |line: &str| line.split_whitespace().nth(4).and_then(|number| number.parse().ok());
    lines.map(|line| (number(line).expect("the number of a file"), line.ends_with("(deleted)"))).collect()
}

/// Opens the latest checkpoint, and serves its rows by a shared index. Returns the inode number of the index's file.
fn open(engine: &Arc<dyn IoEngine>, root: &Path, newest: &Path) -> (Arc<TableServer>, u64) {
    let serving = TableServer::open(directory_in(engine, root), ServeOptions::default()).expect("opened");
    let index = inode(&newest.join("serve.idx"));
    check(&serving, &tables(2));
    let stats = serving.stats();
    assert!(stats.shared_index_bytes > 0 && stats.overlay_ids == 0, "{stats:?}");
    (serving, index)
}

#[test]
fn one_of_many_threads_makes_the_index() {
    for is_held in [false, true] {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().canonicalize().expect("a path");
        let newest = chain(&root);
        // Its contents do not depend on the writer.
        let changes = FaultEngine::new(Arc::new(PsyncEngine::new(false)));
        let engine: Arc<dyn IoEngine> = Arc::new(changes.clone());
        // While another process locks the checkpoint all of them wait, and then start together.
        let held = is_held.then(|| engine.lock_dir(&newest).expect("nobody holds it"));
        let begin = Barrier::new(THREADS + 1);
        let opened: Vec<_> = std::thread::scope(|scope| {
            let one = || {
                begin.wait();
                open(&engine, &root, &newest)
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(one)).collect();
            begin.wait();
            if held.is_some() {
                std::thread::sleep(std::time::Duration::from_millis(100));
                assert!(!newest.join("serve.idx").exists(), "it is made by whoever holds the checkpoint");
            }
            drop(held);
            threads.into_iter().map(|thread| thread.join().expect("opened")).collect()
        });
        let index = inode(&newest.join("serve.idx"));
        assert!(opened.iter().all(|(_, found)| *found == index), "its file was never replaced");
        let is_index = |(operation, path): &&(IoOperation, PathBuf)| {
            *operation == IoOperation::Rename && path.to_string_lossy().contains("serve.idx")
        };
        assert_eq!(changes.log().iter().filter(is_index).count(), 1, "one index was made");
    }
}

/// Environment variable with the directory that a process of this test opens.
const OPENED: &str = "EMBCACHE_TEST_OPENED";

/// One of the processes. It reports that it has started, and opens the checkpoint when the file `begin` exists. Then it
/// writes the number of indexes that it built, and the inode number of the one by which it serves.
fn open_when_all_are_ready(root: &Path) {
    let beside = |name: &str| root.with_file_name(format!("{name}-{}", std::process::id()));
    std::fs::write(beside("there"), "").expect("written");
    wait_for(|| root.with_file_name("begin").exists(), "it is told to begin");
    let newest = std::fs::read_to_string(root.join("LATEST")).expect("a checkpoint");
    let newest = root.join(newest.trim());
    let one = |makes: bool| {
        let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::new(false));
        let directory = directory_in(&engine, root);
        let made = makes.then(|| make_index(&directory, None, &mut || Ok(())).expect("an index"));
        (made.is_some_and(|made| !made.existed), open(&engine, root, &newest))
    };
    let opened: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = [true, true].map(|makes| scope.spawn(move || one(makes))).into_iter().collect();
        threads.into_iter().map(|thread| thread.join().expect("opened")).collect()
    });
    let index = opened[0].1.1;
    assert!(mapped_indexes(root).iter().all(|found| *found == (index, false)), "one file, which is still there");
    let made = opened.iter().filter(|(made, _)| *made).count();
    std::fs::write(beside("done"), format!("{made} {index}")).expect("written");
}

#[test]
fn one_of_many_processes_makes_the_index() {
    if let Some(root) = std::env::var_os(OPENED) {
        return open_when_all_are_ready(Path::new(&root));
    }
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().canonicalize().expect("a path").join("checkpoints");
    std::fs::create_dir(&root).expect("made");
    let newest = chain(&root);
    let files = |start: &str| {
        let all = std::fs::read_dir(dir.path()).expect("a directory").map(|entry| entry.expect("an entry").path());
        let is_it = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start));
        all.filter(is_it).collect::<Vec<_>>()
    };
    let start = |_| {
        let mut child = Command::new(std::env::current_exe().expect("this program"));
        let name = "concurrent_opens::one_of_many_processes_makes_the_index";
        child.args(["--exact", name, "--nocapture"]).env(OPENED, &root).spawn().expect("started")
    };
    let mut children: Vec<Child> = (0..PROCESSES).map(start).collect();
    wait_for(|| files("there-").len() == PROCESSES, "all processes are there");
    std::fs::write(root.with_file_name("begin"), "").expect("written");
    for child in &mut children {
        assert!(child.wait().expect("it ends").success(), "see above");
    }
    let said: Vec<Vec<u64>> = files("done-")
        .iter()
        .map(|path| std::fs::read_to_string(path).expect("read"))
        .map(|text| text.split(' ').map(|number| number.parse().expect("a number")).collect())
        .collect();
    let index = inode(&newest.join("serve.idx"));
    assert_eq!(said.len(), PROCESSES);
    assert_eq!(said.iter().map(|said| said[0]).sum::<u64>(), 1, "one index was made: {said:?}");
    assert!(said.iter().all(|said| said[1] == index), "all serve by the file {index}: {said:?}");
}
