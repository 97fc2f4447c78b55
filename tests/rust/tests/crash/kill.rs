//! A process that trains, flushes, compacts and saves is killed at random, hundreds of times, on a real disk; each time the next one
//! goes on from what was flushed, and what was saved loads.
//!
//! `EMBCACHE_KILLS` sets how often (by default 60 for each way to do I/O).

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use embcache::cache::Table;
use embcache::checkpoint::{Chain, Latest, RankWriter, Save};
use embcache::config::{OptimizerKind, Reopen, SsdConfig, TableConfig};
use embcache::io::{IoEngine, MemoryEngine, PsyncEngine, UringEngine};
use embcache::ssd::SsdTier;
use embcache::types::{Id, hash_id};
use embcache_tests::{Contents, Rig, config};

const ROOT: &str = "EMBCACHE_TEST_KILL_ROOT";
const ENGINE: &str = "EMBCACHE_TEST_KILL_ENGINE";
const CHILD: &str = "kill::child_that_trains_until_it_is_killed";
const DIM: usize = 32;
/// Of the SSD tier: rows and two states fit, and what compaction leaves behind for a while.
const CAP: u64 = 6 << 20;
/// Steps between flushes.
const FLUSH: u64 = 3;
/// Flushes between saves.
const SAVE: u64 = 4;

fn engine(name: &str) -> Option<Arc<dyn IoEngine>> {
    match name {
        "pread" => Some(Arc::new(PsyncEngine::default())),
        _ => UringEngine::new(true).ok().map(|engine| Arc::new(engine) as Arc<dyn IoEngine>),
    }
}

fn directory(root: &Path) -> PathBuf {
    root.join("ssd").join("t")
}

fn table_config(root: &Path, device: bool, reopen: Reopen) -> TableConfig {
    let mut wanted = config(DIM, OptimizerKind::Adagrad, 300);
    wanted.device_rows = device.then_some(100);
    let ssd = SsdConfig { dir: directory(root), bytes: CAP, reopen, resume_token: None };
    wanted.ssd = Some(ssd);
    wanted
}

/// The ids of a step, and in some steps those that are forgotten after it.
fn ids_of(step: u64) -> (Vec<Id>, Vec<Id>) {
    let draw = |n: u64| (hash_id((step << 16 | n) as i64) % 4000) as Id - 2000;
    ((0..400).map(draw).collect(), if step % 5 == 4 { (400..440).map(draw).collect() } else { Vec::new() })
}

fn go(rig: &Rig, step: u64) {
    let (ids, gone) = ids_of(step);
    rig.train(&ids, 5, step as u32).unwrap();
    rig.table.remove_rows(&gone).unwrap();
}

fn save(engine: &Arc<dyn IoEngine>, root: &Path, table: &Table, random: u64) {
    let save = Save::begin(engine.clone(), root, random).unwrap();
    let mut writer = RankWriter::new(engine.clone(), root, save.name(), 0, 1).unwrap().with_group_bytes(100_000);
    writer.write_rows_of("m", table, std::collections::BTreeMap::new()).unwrap();
    save.publish(&[writer.finish().unwrap()], 1).unwrap();
}

#[test]
#[ignore = "run by the tests below, in a process of its own"]
fn child_that_trains_until_it_is_killed() {
    let (Ok(root), Ok(name)) = (std::env::var(ROOT), std::env::var(ENGINE)) else { return };
    let (root, engine) = (Path::new(&root), engine(&name).unwrap());
    let nothing = SsdTier::published(&directory(root), &*engine).unwrap().is_empty();
    let reopen = if nothing { Reopen::Discard } else { Reopen::Resume };
    // Every other process has a device tier: what is on disk knows nothing of it.
    let rig = Rig::open(table_config(root, std::process::id().is_multiple_of(2), reopen), engine.clone()).unwrap();
    let mut out = std::io::stdout();
    for step in rig.table.step().unwrap().. {
        go(&rig, step);
        writeln!(out, "trained {step}").unwrap();
        if step % FLUSH == FLUSH - 1 {
            rig.table.flush(step + 1).unwrap();
            writeln!(out, "flushed {}", step + 1).unwrap();
            if step / FLUSH % SAVE == SAVE - 1 {
                save(&engine, &root.join("saved"), &rig.table, step);
                writeln!(out, "saved {}", step + 1).unwrap();
            }
        }
        out.flush().unwrap();
    }
}

/// The table as it is after each number of steps, made as far as it is asked for.
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
            self.after.push(self.rig.contents().unwrap());
        }
        &self.after[steps as usize]
    }
}

/// The steps of the checkpoint that is there, its rows compared.
fn check_saved(engine: &Arc<dyn IoEngine>, root: &Path, straight: &mut Straight) -> u64 {
    let root = root.join("saved");
    let Some(latest) = Latest::find(&**engine, &root).unwrap() else { return 0 };
    let checkpoint = Chain::open(engine, &root, latest).unwrap();
    let rig = Straight::new().rig;
    checkpoint.table_reader("m", "t", rig.table.config().buckets.clone()).unwrap().load_into(&rig.table).unwrap();
    let steps = rig.table.step().unwrap();
    assert!(rig.contents().unwrap() == *straight.after(steps), "the checkpoint of {steps} steps has other rows");
    steps
}

fn kill_again_and_again(name: &str) {
    let Some(engine) = engine(name) else {
        // Nothing to be shown where the system refuses io_uring: the other engine is what it runs on.
        return;
    };
    let kills: u64 = std::env::var("EMBCACHE_KILLS").map_or(60, |text| text.parse().expect("a number"));
    let place = tempfile::Builder::new().prefix("kill-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let root = place.path();
    std::fs::create_dir(root.join("saved")).unwrap();
    let mut straight = Straight::new();
    let (mut flushed, mut saved, mut resumed) = (0, 0, 0);
    for round in 0..kills {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([CHILD, "--exact", "--ignored", "--nocapture"])
            .envs([(ROOT, root.as_os_str()), (ENGINE, name.as_ref())])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Anywhere within the work that follows a line; in one round of eight as soon as it is there.
        let lines = if round % 8 == 7 { 0 } else { 1 + hash_id(round as i64) % 12 };
        let mut seen = 0;
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
        while seen < lines {
            let line = said.next().expect("the child ended by itself").unwrap();
            let (what, number) = line.split_once(' ').unwrap_or_default();
            match (what, number.parse::<u64>()) {
                ("flushed", Ok(number)) => flushed = number,
                ("saved", Ok(number)) => saved = number,
                ("trained", Ok(_)) => {}
                _ => continue,
            }
            seen += 1;
        }
        // Some way into what comes next: the work of a step takes about as long as these turns of a loop.
        let turns = hash_id(!(round as i64)) % 400_000;
        assert_eq!((0..turns).map(std::hint::black_box).count() as u64, turns);
        child.kill().unwrap();
        child.wait().unwrap();
        for line in said {
            // What it said before it died, and was not read.
            match line.unwrap().split_once(' ') {
                Some(("flushed", number)) => flushed = number.parse().unwrap_or(flushed),
                Some(("saved", number)) => saved = number.parse().unwrap_or(saved),
                _ => {}
            }
        }

        let found = check_saved(&engine, root, &mut straight);
        assert!(found >= saved, "round {round}: {saved} steps were saved, {found} are there");
        let tokens = SsdTier::published(&directory(root), &*engine).unwrap();
        let Some(&token) = tokens.last() else {
            assert_eq!(flushed, 0, "round {round}");
            continue;
        };
        assert!(token >= flushed, "round {round}: {flushed} steps were flushed, {token} are there");
        let rig = Rig::open(table_config(root, round % 2 == 0, Reopen::Resume), engine.clone()).unwrap();
        assert_eq!(rig.table.step().unwrap(), token, "round {round}");
        assert!(rig.contents().unwrap() == *straight.after(token), "round {round}: other rows after {token} steps");
        rig.table.close().unwrap();
        let held: u64 = engine.list(&directory(root)).unwrap().iter().map(|path| path.metadata().unwrap().len()).sum();
        assert!(held <= CAP, "round {round}: {held} bytes");
        resumed += 1;
    }
    let checkpoints = engine.list(&root.join("saved")).unwrap().len();
    assert!(checkpoints <= 3, "{checkpoints} entries where checkpoints are: orphans stay");
    assert!(
        resumed * 10 >= kills * 8 && saved > 0 && flushed > 20,
        "{resumed} of {kills}, {saved} saved, {flushed} flushed"
    );
}

#[test]
fn killed_again_and_again_on_io_uring_the_last_flush_and_the_last_save_are_whole() {
    kill_again_and_again("uring");
}

#[test]
fn killed_again_and_again_on_pread_the_last_flush_and_the_last_save_are_whole() {
    kill_again_and_again("pread");
}
