//! Resources of a server that follows a trainer for a long time.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use embcache::checkpoint::SaveOptions;
use embcache::config::OptimizerKind;
use embcache::io::{IoEngine, PsyncEngine};
use embcache::serve::{PollOutcome, ServeOptions, TableServer};
use embcache::types::Id;
use embcache_tests::checkpoint::{Table, on, save_delta, save_with};
use embcache_tests::directory_in;
use embcache_tests::serve::check;

const DELTAS: u64 = 1000;
/// A full checkpoint follows after this number of deltas.
const FULL_EVERY: u64 = 20;

/// The files below a directory that the process has open or mapped, and its own memory in bytes.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) mappings: usize,
    pub(crate) descriptors: usize,
    pub(crate) private_bytes: u64,
    pub(crate) versions: u64,
    pub(crate) anonymous: u64,
}

pub(crate) fn held(serving: &TableServer, root: &Path) -> Held {
    let text = |path: &str| std::fs::read_to_string(path).expect("what the system says of this process");
    let below = root.to_str().expect("a path of text");
    let anonymous = text("/proc/self/status");
    let anonymous = anonymous.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a size");
    let files = std::fs::read_dir("/proc/self/fd").expect("open files").filter_map(Result::ok);
    let stats = serving.stats();
    Held {
        mappings: text("/proc/self/maps").lines().filter(|line| line.contains(below)).count(),
        descriptors: files.filter(|file| std::fs::read_link(file.path()).is_ok_and(|to| to.starts_with(root))).count(),
        private_bytes: stats.private_bytes,
        versions: stats.versions,
        anonymous: anonymous.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10,
    }
}

/// Environment variable of a test that has its own process.
const ALONE: &str = "EMBCACHE_TEST_ALONE";

#[test]
fn memory_stays_the_same_over_a_thousand_deltas() {
    if std::env::var_os(ALONE).is_some() {
        return follow_a_thousand_deltas();
    }
    // Other tests may share this process, and its memory is measured.
    let mut child = std::process::Command::new(std::env::current_exe().expect("this program"));
    let name = "memory::memory_stays_the_same_over_a_thousand_deltas";
    let status = child.args(["--exact", name, "--nocapture"]).env(ALONE, "1").status().expect("started");
    assert!(status.success(), "see above");
}

fn follow_a_thousand_deltas() {
    // A disk in memory, if there is one: a thousand saves wait many times for a real one.
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a folder");
    let root = folder.path().canonicalize().expect("the folder").join("checkpoints");
    std::fs::create_dir(&root).expect("room");
    let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::new(false));
    let ids: Vec<Id> = (0..300).map(|n| n * 31 + 5000).collect();
    let mut now = vec![Table::new("m", "a", OptimizerKind::Sgd, 4, &ids, 1)];
    let full = SaveOptions { keep: 2, ..SaveOptions::default() };
    let mut parent = save_with(&engine, &root, &now, (1, 2000), 1, full.clone()).expect("saved").identity;
    let serving = TableServer::open(directory_in(&engine, &root), ServeOptions::default()).expect("opened");
    let mut most: BTreeMap<u64, Held> = BTreeMap::new();
    for delta in 1..=DELTAS {
        let before = now.clone();
        let changed: Vec<Id> = ids.iter().copied().skip(delta as usize % 7).step_by(7).collect();
        let fresh = Table::new("m", "a", OptimizerKind::Sgd, 4, &changed, delta + 1);
        now[0].rows.extend(fresh.rows);
        // Some rows are removed, and inserted again later.
        now[0].rows.remove(&ids[delta as usize % 300]);
        parent = if delta % FULL_EVERY == 0 {
            save_with(&engine, &root, &now, (1, 2000), delta + 1, full.clone()).expect("saved").identity
        } else {
            let options = SaveOptions { keep: 2, ..on(&parent) };
            save_delta(&engine, &root, (&before, &now), (1, 2000), delta + 1, options).expect("saved").identity
        };
        assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(_)));
        if delta % 10 == 9 {
            check(&serving, &now);
        }
        if delta % FULL_EVERY == FULL_EVERY - 1 {
            most.insert(delta, held(&serving, &root));
        }
    }
    let mut all = most.into_values();
    let (_, first) = (all.next(), all.next().expect("more than forty deltas"));
    let last = all.last().expect("a thousand deltas");
    let kept = |held: &Held| (held.mappings, held.descriptors, held.private_bytes, held.versions);
    assert_eq!(kept(&first), kept(&last), "what is mapped, open and kept is that of one chain");
    assert!(last.anonymous < first.anonymous + (16 << 20), "{first:?} {last:?}");
}
