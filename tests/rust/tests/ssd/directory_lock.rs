//! A table keeps its directory locked, also if its lock file is removed.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use embcache::config::ReopenMode;
use embcache::io::{IoEngine, LOCK_FILE, MemoryEngine, default_engine};
use embcache::ssd::{SsdTier, StateCounters};
use embcache::{Error, Kind};
use embcache_tests::ssd::{Versions, append, check, config, open};

const CAP: u64 = 512 << 10;
const DIR: &str = "EMBCACHE_TEST_HELD_TIER";
const CHILD: &str = "directory_lock::child_that_tries_to_open_what_another_process_holds";

/// The ways to open a directory that has a state.
fn ways() -> [ReopenMode; 3] {
    [ReopenMode::Resume, ReopenMode::Discard, ReopenMode::Auto { unfinished: None }]
}

/// The errors of opening and removing the table's files while the table is open elsewhere.
fn refusals(engine: &Arc<dyn IoEngine>, dir: &Path) -> Vec<Error> {
    let mut errors: Vec<Error> =
        ways().into_iter().map(|reopen| open(engine, &config(dir, CAP, reopen)).map(drop).unwrap_err()).collect();
    errors.push(SsdTier::remove_shard(dir, &**engine).unwrap_err());
    errors
}

#[test]
#[ignore = "run by the test below, in a process of its own"]
fn child_that_tries_to_open_what_another_process_holds() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    for error in refusals(&default_engine().unwrap(), Path::new(&dir)) {
        assert_eq!(error.kind(), Kind::InUse, "{error}");
        println!("refused: {error}");
    }
}

#[test]
fn a_table_holds_its_directory_after_its_lock_file_was_removed() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("tier");
    for engine in [default_engine().unwrap(), Arc::new(MemoryEngine::default())] {
        let on_disk = engine.name() != "memory";
        let (tier, _) = open(&engine, &config(&dir, CAP, ReopenMode::Never)).unwrap();
        let mut held = Versions::new();
        append(&tier, &(0..900).collect::<Vec<_>>(), 1, &mut held).unwrap();
        tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
        let files = |engine: &dyn IoEngine| {
            let mut listing = engine.list(&dir).unwrap();
            listing.retain(|path| !path.ends_with(LOCK_FILE));
            listing
        };
        let before = files(&*engine);
        engine.remove_file(&dir.join(LOCK_FILE)).unwrap();
        if on_disk {
            let output = Command::new(std::env::current_exe().unwrap())
                .args([CHILD, "--exact", "--ignored", "--nocapture"])
                .env(DIR, &dir)
                .output()
                .unwrap();
            let said = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
            assert_eq!(said.matches("refused: ").count(), ways().len() + 1, "{said}");
        }
        for error in refusals(&engine, &dir) {
            assert_eq!(error.kind(), Kind::InUse, "{error}");
            let text = error.to_string();
            assert!(text.contains(&*dir.to_string_lossy()), "{text}");
            if on_disk {
                assert!(text.contains("'lock'") && text.contains("Close that table"), "{text}");
            }
        }
        assert_eq!(files(&*engine), before, "nothing was added or removed");
        append(&tier, &(500..1500).collect::<Vec<_>>(), 2, &mut held).unwrap();
        check(&tier, &held, -10..1600);
        tier.publish(Some(2), StateCounters::default(), Vec::new()).unwrap();
        tier.close().unwrap();
        let (tier, _) = open(&engine, &config(&dir, CAP, ReopenMode::Resume)).unwrap();
        check(&tier, &held, -10..1600);
    }
}
