//! Bytes from disk are hostile. Flipped, truncated and missing bytes are detected, and never served.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::config::ReopenMode;
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, MemoryEngine, read_file, write_atomically};
use embcache::ssd::StateCounters;
use embcache::types::Id;
use embcache::{Error, Kind};

use embcache_tests::ssd::{Versions, append, config, fetch, open};
use embcache_tests::{flips, tells_of_damage};

const DIR: &str = "/embcache-damage/tier";
const CAP: u64 = 512 << 10;

/// A closed tier with one state of rows, removals and dead records.
fn made() -> (MemoryEngine, Versions) {
    let memory = MemoryEngine::default();
    let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
    let (tier, _) = open(&engine, &config(Path::new(DIR), CAP, ReopenMode::Never)).unwrap();
    let mut held = Versions::new();
    append(&tier, &(0..120).collect::<Vec<Id>>(), 1, &mut held).unwrap();
    append(&tier, &(30..60).collect::<Vec<Id>>(), 2, &mut held).unwrap();
    tier.remove(&[3, 4, 5]).unwrap();
    held.retain(|id, _| !(3..6).contains(id));
    tier.publish(Some(9), StateCounters { step: 5, epoch: 2 }, Vec::new()).unwrap();
    tier.close().unwrap();
    (memory, held)
}

fn files(engine: &dyn IoEngine) -> Vec<PathBuf> {
    let all = engine.list(Path::new(DIR)).unwrap();
    all.into_iter().filter(|path| path.extension().is_some()).collect()
}

/// Opens the directory and reads every id. The result is right, or an error that states the location of the corruption.
fn survives(engine: &Arc<dyn IoEngine>, held: &Versions) -> Result<(), Error> {
    let (tier, _) = open(engine, &config(Path::new(DIR), CAP, ReopenMode::Resume))?;
    let mut damaged = Ok(());
    for id in -1..130 {
        match fetch(&tier, &[id]) {
            Ok(found) => assert_eq!(found[0], held.get(&id).copied(), "id {id}"),
            Err(error) => damaged = Err(error),
        }
    }
    damaged
}

#[test]
fn a_flipped_bit_anywhere_is_found_or_does_no_harm() {
    let (memory, held) = made();
    let mut found = 0;
    let original: Arc<dyn IoEngine> = Arc::new(memory.clone());
    survives(&original, &held).unwrap();
    for path in files(&*original) {
        let bytes = read_file(&*original, &path, 1 << 20).unwrap();
        let is_state = path.extension().is_some_and(|extension| extension == "state");
        for at in (0..bytes.len()).step_by(if is_state { 1 } else { flips(11) }) {
            let engine: Arc<dyn IoEngine> = Arc::new(memory.kill());
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            write_atomically(&*engine, &path, &flipped).unwrap();
            match survives(&engine, &held) {
                Ok(()) => assert!(!is_state, "byte {at} of {}", path.display()),
                Err(error) => {
                    found += 1;
                    // A flip in a state's format version requests another version.
                    let expected = error.kind() == Kind::Corruption || (is_state && error.kind() == Kind::Mismatch);
                    assert!(expected, "byte {at} of {}: {error:?}", path.display());
                    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
                    assert!(error.kind() != Kind::Corruption || tells_of_damage(&error), "{error}");
                }
            }
        }
    }
    assert!(found > 500, "{found} flips were found");
}

#[test]
fn a_file_that_is_cut_longer_or_missing_is_found_on_opening() {
    let (memory, held) = made();
    for path in files(&memory) {
        let bytes = read_file(&memory, &path, 1 << 20).unwrap();
        let changed = [0, 1, bytes.len() / 2, bytes.len() - 1].map(|len| Some(bytes[..len].to_vec()));
        let longer = Some([&bytes[..], &[0]].concat());
        for content in changed.into_iter().chain([longer, None]) {
            let engine: Arc<dyn IoEngine> = Arc::new(memory.kill());
            match &content {
                Some(bytes) => write_atomically(&*engine, &path, bytes).unwrap(),
                None => engine.remove_file(&path).unwrap(),
            }
            let error = survives(&engine, &held).unwrap_err();
            let missing_state = content.is_none() && path.extension().is_some_and(|extension| extension == "state");
            let kind = if missing_state { Kind::State } else { Kind::Corruption };
            assert_eq!(error.kind(), kind, "{}: {error}", path.display());
        }
    }
}

#[test]
fn record_corrupted_in_transfer_is_error_with_location() {
    let fault = FaultEngine::new(Arc::new(MemoryEngine::default()));
    let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
    let (tier, _) = open(&engine, &config(Path::new(DIR), CAP, ReopenMode::Never)).unwrap();
    let mut held = Versions::new();
    append(&tier, &[1, 2, 3], 1, &mut held).unwrap();
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    for (broken, kind) in [
        (IoFault::Flip, Kind::Corruption),
        (IoFault::Tear(libc::EIO), Kind::Corruption),
        (IoFault::Fail(libc::EIO), Kind::Storage),
    ] {
        fault.hit_once(IoOperation::Read, 0, broken);
        let error = fetch(&tier, &[1, 2, 3]).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(DIR), "{error}");
        assert_eq!(fetch(&tier, &[1, 2, 3]).unwrap(), [Some(1); 3], "the next read is fine");
    }
}
