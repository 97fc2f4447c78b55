//! A process that appends and publishes is killed. The directory resumes from its published state.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use embcache::config::ReopenMode;
use embcache::io::default_engine;
use embcache::ssd::{SsdTier, StateCounters};
use embcache::types::{Id, hash_id};
use embcache_tests::ssd::{Versions, append, check, config, open};

const CAP: u64 = 4 << 20;
const IDS: Id = 6000;
const DIR: &str = "EMBCACHE_TEST_KILL_DIR";
const CHILD: &str = "kill::child_that_appends_and_publishes_until_it_is_killed";

/// The ids that a step writes, and those that it removes.
fn ids_of(step: u32) -> (Vec<Id>, Vec<Id>) {
    let draw = |id: &Id| hash_id(*id ^ (i64::from(step) << 40)) % 16;
    (
        (0..IDS).filter(|id| draw(id) < 4).map(|id| id - IDS / 2).collect(),
        (0..IDS).filter(|id| draw(id) == 15).map(|id| id - IDS / 2).collect(),
    )
}

/// Applies step `step` to `held`, and to the tier if there is one.
fn go(step: u32, held: &mut Versions, tier: Option<&SsdTier>) {
    let (written, mut removed) = ids_of(step);
    match tier {
        Some(tier) => append(tier, &written, step + 1, held).unwrap(),
        None => held.extend(written.iter().map(|id| (*id, step + 1))),
    }
    removed.retain(|id| held.remove(id).is_some());
    if let Some(tier) = tier {
        tier.remove(&removed).unwrap();
    }
}

fn counters(step: u32) -> StateCounters {
    StateCounters { step: u64::from(step), epoch: step / 2 }
}

#[test]
#[ignore = "run by the test below, in a process of its own"]
fn child_that_appends_and_publishes_until_it_is_killed() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let engine = default_engine().unwrap();
    let dir = Path::new(&dir);
    let nothing = SsdTier::published_commit_ids(dir, &*engine).unwrap().is_empty();
    let reopen = if nothing { ReopenMode::Discard } else { ReopenMode::Resume };
    let (tier, resumed) = open(&engine, &config(dir, CAP, reopen)).unwrap();
    let first = resumed.map_or(0, |counters| counters.step as u32 + 1);
    let mut held = Versions::new();
    (0..first).for_each(|step| go(step, &mut held, None));
    let mut out = std::io::stdout();
    for step in first.. {
        go(step, &mut held, Some(&tier));
        writeln!(out, "appended").unwrap();
        if step % 2 == 1 {
            tier.publish(Some(u64::from(step)), counters(step), Vec::new()).unwrap();
            writeln!(out, "published {step}").unwrap();
        }
        out.flush().unwrap();
    }
}

#[test]
fn a_killed_process_leaves_the_last_published_state_whole() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("tier");
    let engine = default_engine().unwrap();
    let mut published: Option<u32> = None;
    for round in 0..8_u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([CHILD, "--exact", "--ignored", "--nocapture"])
            .env(DIR, &dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The kill happens anywhere within the work that follows a line, also in the first lines, when the process has
        // just resumed.
        let lines = 1 + hash_id(round as i64) % 40;
        let mut seen = 0;
        for line in BufReader::new(child.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            if let Some(step) = line.strip_prefix("published ") {
                published = Some(step.parse().unwrap());
            }
            seen += u64::from(line.starts_with("appended") || line.starts_with("published"));
            if seen >= lines {
                break;
            }
        }
        assert_eq!(seen, lines, "the child ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();

        let tokens = SsdTier::published_commit_ids(&dir, &*engine).unwrap();
        let Some(&token) = tokens.last() else {
            assert_eq!(published, None);
            continue;
        };
        let step = token as u32;
        // It is the last state that the process reported, or one that was published later.
        assert!(published.is_none_or(|published| step >= published), "{step} < {published:?}");
        let mut held = Versions::new();
        (0..=step).for_each(|step| go(step, &mut held, None));
        let (tier, resumed) = open(&engine, &config(&dir, CAP, ReopenMode::Resume)).unwrap();
        assert_eq!(resumed, Some(counters(step)));
        check(&tier, &held, -IDS..IDS);
        tier.close().unwrap();
    }
    assert!(published.is_some(), "nothing was published in any round");
}
