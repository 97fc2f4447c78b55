//! A process that trains, flushes, compacts and saves (in full, as deltas, and by merging them) is killed at random,
//! hundreds of times, on a real disk. Each time the next process resumes from the flushed state, and saved checkpoints
//! can be loaded.
//!
//! `EMBCACHE_KILLS` sets the number of kills (by default 60 for each I/O engine).

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use embcache::cache::{BaseCheckpoint, Table};
use embcache::checkpoint::{
    ChainCompaction, CheckpointChain, CheckpointId, CheckpointSave, LatestCheckpoint, RankWriter, SaveOptions,
};
use embcache::config::{OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::{IoEngine, MemoryEngine, PsyncEngine, UringEngine};
use embcache::ssd::SsdTier;
use embcache::types::{Id, hash_id};
use embcache_tests::{Contents, Rig, config, directory_in};

const ROOT: &str = "EMBCACHE_TEST_KILL_ROOT";
const ENGINE: &str = "EMBCACHE_TEST_KILL_ENGINE";
const CHILD: &str = "kill::child_that_trains_until_it_is_killed";
const DIM: usize = 32;
/// The cap of the SSD tier. It fits the rows and two states, with temporary leftovers of compaction.
const CAP: u64 = 6 << 20;
/// The steps between saves. A flush, which records the save, follows each.
const FLUSH: u64 = 3;
/// The number of checkpoints of a chain that is merged.
const CHAIN: usize = 3;

fn engine(name: &str) -> Option<Arc<dyn IoEngine>> {
    match name {
        "pread" => Some(Arc::new(PsyncEngine::default())),
        _ => UringEngine::new(true).ok().map(|engine| Arc::new(engine) as Arc<dyn IoEngine>),
    }
}

fn directory(root: &Path) -> PathBuf {
    root.join("ssd").join("t")
}

fn table_config(root: &Path, device: bool, reopen: ReopenMode) -> TableConfig {
    let mut wanted = config(DIM, OptimizerKind::Adagrad, 300);
    wanted.device_rows = device.then_some(100);
    let ssd = SsdConfig { dir: directory(root), bytes: CAP, reopen, resume_commit_id: None };
    wanted.ssd = Some(ssd);
    wanted
}

/// The ids of a step and, in some steps, those that are removed after it.
fn ids_of(step: u64) -> (Vec<Id>, Vec<Id>) {
    let draw = |n: u64| (hash_id((step << 16 | n) as i64) % 4000) as Id - 2000;
    ((0..400).map(draw).collect(), if step % 5 == 4 { (400..440).map(draw).collect() } else { Vec::new() })
}

fn go(rig: &Rig, step: u64) {
    let (ids, gone) = ids_of(step);
    rig.train(&ids, 5, step as u32).unwrap();
    rig.table.remove_rows(&gone).unwrap();
}

/// Saves a delta if the table tracks its changes since the latest checkpoint, else saves in full. Returns the kind.
fn save(engine: &Arc<dyn IoEngine>, root: &Path, table: &Table, random: u64) -> &'static str {
    let directory = directory_in(engine, root);
    let newest =
        LatestCheckpoint::find(&directory).unwrap().map(|latest| CheckpointChain::open(&directory, latest).unwrap());
    let ancestor = newest.as_ref().and_then(|chain| {
        let identities = [Some(chain.identity()), chain.manifest().merged.clone()];
        let known = table.base_checkpoints().unwrap();
        known.into_iter().find(|one| {
            let same =
                |identity: &CheckpointId| identity.name == one.name && identity.manifest_xxh3 == one.manifest_xxh3;
            identities.iter().flatten().any(same) && one.next_epoch == chain.manifest().next_epoch
        })
    });
    let parent = newest.filter(|_| ancestor.is_some()).map(|chain| chain.identity());
    let next_epoch = table.epoch().unwrap() + 1;
    let save =
        CheckpointSave::begin_with(&directory, random, SaveOptions { parent, ..SaveOptions::default() }).unwrap();
    let mut writer = RankWriter::new(&directory, save.name(), 0, 1).unwrap().with_group_bytes(100_000);
    match &ancestor {
        None => writer.write_rows_of("m", table, BTreeMap::new()).map(|_| ()).unwrap(),
        Some(ancestor) => writer.write_changes_of("m", table, BTreeMap::new(), ancestor).map(|_| ()).unwrap(),
    }
    let CheckpointId { name, manifest_xxh3 } = save.publish(&[writer.finish().unwrap()], next_epoch).unwrap().identity;
    table.set_epoch(next_epoch).unwrap();
    table.saved_as(BaseCheckpoint { name, manifest_xxh3, next_epoch }).unwrap();
    if ancestor.is_some() { "delta" } else { "saved" }
}

/// Merges the latest checkpoint with its base checkpoints, if there are many. Returns true if it did.
fn merge(engine: &Arc<dyn IoEngine>, root: &Path, random: u64) -> bool {
    let directory = directory_in(engine, root);
    let latest = LatestCheckpoint::read(&directory).unwrap();
    let Some(chain) = ChainCompaction::open(&directory, latest, true).unwrap() else { return false };
    if chain.chain().links().len() < CHAIN {
        return false;
    }
    let options = SaveOptions { merged: Some(chain.chain().identity()), ..SaveOptions::default() };
    let save = CheckpointSave::begin_with(&directory, random, options).unwrap();
    let digest = chain.write(save.name(), (0, 1), &mut |_| Ok(())).unwrap();
    save.publish(&[digest], chain.chain().manifest().next_epoch).unwrap();
    true
}

#[test]
#[ignore = "run by the tests below, in a process of its own"]
fn child_that_trains_until_it_is_killed() {
    let (Ok(root), Ok(name)) = (std::env::var(ROOT), std::env::var(ENGINE)) else { return };
    let (root, engine) = (Path::new(&root), engine(&name).unwrap());
    let nothing = SsdTier::published_commit_ids(&directory(root), &*engine).unwrap().is_empty();
    let reopen = if nothing { ReopenMode::Discard } else { ReopenMode::Resume };
    // Every other process has a device tier. The files do not depend on it.
    let rig = Rig::open(table_config(root, std::process::id().is_multiple_of(2), reopen), engine.clone()).unwrap();
    let mut out = std::io::stdout();
    for step in rig.table.step().unwrap().. {
        go(&rig, step);
        writeln!(out, "trained {step}").unwrap();
        if step % FLUSH == FLUSH - 1 {
            let saved = root.join("saved");
            writeln!(out, "{} {}", save(&engine, &saved, &rig.table, step), step + 1).unwrap();
            out.flush().unwrap();
            if merge(&engine, &saved, !step) {
                writeln!(out, "merged {}", step + 1).unwrap();
            }
            rig.table.flush(step + 1).unwrap();
            writeln!(out, "flushed {}", step + 1).unwrap();
        }
        out.flush().unwrap();
    }
}

/// Every row without the epoch of its last change, which depends on concurrent saves.
fn contents(rig: &Rig) -> Contents {
    let mut rows = rig.contents().unwrap();
    for (header, _) in rows.values_mut() {
        header.modified_epoch = 0;
    }
    rows
}

/// The table after each number of steps. It is computed on demand.
struct Straight {
    rig: Rig,
    after: Vec<Contents>,
}

impl Straight {
    fn new() -> Self {
        let rig = Rig::open(config(DIM, OptimizerKind::Adagrad, 10_000), Arc::new(MemoryEngine::default())).unwrap();
        Self { rig, after: vec![Contents::new()] }
    }

    fn after(&mut self, steps: u64) -> &Contents {
        while self.after.len() as u64 <= steps {
            go(&self.rig, self.after.len() as u64 - 1);
            self.after.push(contents(&self.rig));
        }
        &self.after[steps as usize]
    }
}

/// The number of steps of the latest checkpoint, after its rows were compared.
fn check_saved(engine: &Arc<dyn IoEngine>, root: &Path, straight: &mut Straight) -> u64 {
    let root = root.join("saved");
    let directory = directory_in(engine, &root);
    let Some(latest) = LatestCheckpoint::find(&directory).unwrap() else { return 0 };
    let checkpoint = CheckpointChain::open(&directory, latest).unwrap();
    let rig = Straight::new().rig;
    checkpoint.table_reader("m", "t", rig.table.config().buckets.clone()).unwrap().load_into(&rig.table).unwrap();
    let steps = rig.table.step().unwrap();
    assert!(contents(&rig) == *straight.after(steps), "the checkpoint of {steps} steps has other rows");
    steps
}

fn kill_again_and_again(name: &str) {
    let Some(engine) = engine(name) else {
        // Nothing to test if the OS rejects io_uring, because that runs on the other engine.
        return;
    };
    let kills: u64 = std::env::var("EMBCACHE_KILLS").map_or(60, |text| text.parse().expect("a number"));
    let place = tempfile::Builder::new().prefix("kill-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let root = place.path();
    std::fs::create_dir(root.join("saved")).unwrap();
    let mut straight = Straight::new();
    let (mut flushed, mut saved, mut resumed) = (0, 0, 0);
    let (mut deltas, mut merges) = (0, 0);
    for round in 0..kills {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([CHILD, "--exact", "--ignored", "--nocapture"])
            .envs([(ROOT, root.as_os_str()), (ENGINE, name.as_ref())])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The kill happens anywhere within the work that follows a line, and in one round of eight as soon as the
        // process has started.
        let lines = if round % 8 == 7 { 0 } else { 1 + hash_id(round as i64) % 12 };
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
        // Returns true if the line is one of the child's own.
        let mut hear = |line: String| {
            let Some((what, number)) = line.split_once(' ') else { return false };
            let Ok(number) = number.parse::<u64>() else { return false };
            deltas += u64::from(what == "delta");
            merges += u64::from(what == "merged");
            match what {
                "flushed" => flushed = number,
                "saved" | "delta" => saved = number,
                "trained" | "merged" => {}
                _ => return false,
            }
            true
        };
        let mut seen = 0;
        while seen < lines {
            seen += u64::from(hear(said.next().expect("the child ended by itself").unwrap()));
        }
        // Wait some way into the following work. The work of a step takes about as long as these iterations of a loop.
        let turns = hash_id(!(round as i64)) % 400_000;
        assert_eq!((0..turns).map(std::hint::black_box).count() as u64, turns);
        child.kill().unwrap();
        child.wait().unwrap();
        // These are lines that it printed before it died, and that were not read yet.
        for line in said.map_while(Result::ok) {
            hear(line);
        }

        let found = check_saved(&engine, root, &mut straight);
        assert!(found >= saved, "round {round}: {saved} steps were saved, {found} are there");
        let tokens = SsdTier::published_commit_ids(&directory(root), &*engine).unwrap();
        let Some(&token) = tokens.last() else {
            assert_eq!(flushed, 0, "round {round}");
            continue;
        };
        assert!(token >= flushed, "round {round}: {flushed} steps were flushed, {token} are there");
        let rig = Rig::open(table_config(root, round % 2 == 0, ReopenMode::Resume), engine.clone()).unwrap();
        assert_eq!(rig.table.step().unwrap(), token, "round {round}");
        assert!(contents(&rig) == *straight.after(token), "round {round}: other rows after {token} steps");
        rig.table.close().unwrap();
        let held: u64 = engine.list(&directory(root)).unwrap().iter().map(|path| path.metadata().unwrap().len()).sum();
        assert!(held <= CAP, "round {round}: {held} bytes");
        resumed += 1;
    }
    let checkpoints = engine.list(&root.join("saved")).unwrap().len();
    // The entries are LATEST, its lock, a chain, and the leftovers of the last process.
    assert!(checkpoints <= CHAIN + 3, "{checkpoints} entries where checkpoints are: orphans stay");
    assert!(
        resumed * 10 >= kills * 8 && saved > 0 && flushed > 20 && deltas > kills / 10 && merges > kills / 30,
        "{resumed} of {kills}, {saved} saved, {flushed} flushed, {deltas} deltas, {merges} merges"
    );
}

#[test]
fn repeated_kills_on_io_uring_keep_last_flush_and_save() {
    kill_again_and_again("uring");
}

#[test]
fn repeated_kills_on_pread_keep_last_flush_and_save() {
    kill_again_and_again("pread");
}
