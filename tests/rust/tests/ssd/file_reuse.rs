//! Files of obsolete segments are reused. They stay within the cap, and none outlives the tier or its process.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use embcache::config::ReopenMode;
use embcache::io::{FaultEngine, IoEngine, IoOpenMode, IoOperation, MemoryEngine};
use embcache::ssd::{SsdTier, StateCounters};
use embcache::types::Id;
use embcache_tests::ssd::{Versions, append, check, config, open};

const DIR: &str = "/embcache-reuse/tier";

fn is_segment(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "seg")
}

fn segments(engine: &dyn IoEngine) -> BTreeSet<PathBuf> {
    engine.list(Path::new(DIR)).unwrap().into_iter().filter(|path| is_segment(path)).collect()
}

fn segment_bytes(engine: &dyn IoEngine) -> u64 {
    // Compaction continues concurrently. A file that is removed between the list and this has no bytes.
    let there = segments(engine).into_iter().filter_map(|path| engine.open(&path, IoOpenMode::Read).ok());
    there.map(|file| file.len().unwrap()).sum()
}

/// The number of segments created by renaming an older one's file, and by creating a file.
fn made(fault: &FaultEngine) -> (usize, usize) {
    let log = fault.log();
    let of = |wanted| log.iter().filter(|(operation, path)| *operation == wanted && is_segment(path)).count();
    (of(IoOperation::Rename), of(IoOperation::Create))
}

/// A tier of `cap` bytes, and half of the ids that fit it.
fn tier(cap: u64) -> (MemoryEngine, FaultEngine, SsdTier, Vec<Id>) {
    let memory = MemoryEngine::default();
    let fault = FaultEngine::new(Arc::new(memory.clone()));
    let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
    let (tier, _) = open(&engine, &config(Path::new(DIR), cap, ReopenMode::Never)).unwrap();
    let ids = (0..tier.capacity_rows() as Id / 2).collect();
    (memory, fault, tier, ids)
}

#[test]
fn rewritten_segments_reuse_files_of_obsolete_ones() {
    const CAP: u64 = 1 << 20;
    let (memory, fault, tier, ids) = tier(CAP);
    let mut held = Versions::new();
    for version in 1..30 {
        append(&tier, &ids, version, &mut held).unwrap();
        assert!(memory.live_bytes() <= CAP, "{} bytes", memory.live_bytes());
    }
    let (renamed, created) = made(&fault);
    // In each round the table keeps eight files, or as many as fit.
    assert!(renamed > 100, "{renamed} files written again, {created} made");
    check(&tier, &held, -5..ids.len() as Id + 5);
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    tier.close().unwrap();
    drop(tier);
    let engine: Arc<dyn IoEngine> = Arc::new(memory.crash());
    let (resumed, _) = open(&engine, &config(Path::new(DIR), CAP, ReopenMode::Resume)).unwrap();
    check(&resumed, &held, -5..ids.len() as Id + 5);
}

#[test]
fn kept_files_are_removed_at_close_and_after_kill() {
    const CAP: u64 = 1 << 20;
    let (memory, _, tier, ids) = tier(CAP);
    let mut held = Versions::new();
    append(&tier, &ids, 1, &mut held).unwrap();
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    let named = segments(&memory);
    // Rows written from here belong to no state, so their files are kept.
    for version in 2..6 {
        append(&tier, &ids, version, &mut held.clone()).unwrap();
    }
    tier.remove(&ids).unwrap();
    let killed = memory.kill();
    assert!(segments(&killed).len() > named.len(), "a kill leaves files that nothing names");
    // Segments without live rows are released in the background.
    let deadline = Instant::now() + Duration::from_secs(60);
    while segment_bytes(&memory) <= tier.stats().tier.bytes {
        assert!(Instant::now() < deadline, "no file is kept");
        std::thread::yield_now();
    }
    let used = tier.stats().tier.bytes;
    tier.close().unwrap();
    assert!(segment_bytes(&memory) <= used, "kept files stay");

    let engine: Arc<dyn IoEngine> = Arc::new(killed.clone());
    let (resumed, _) = open(&engine, &config(Path::new(DIR), CAP, ReopenMode::Resume)).unwrap();
    assert_eq!(segments(&killed), named, "what no state names is swept");
    check(&resumed, &held, -5..ids.len() as Id + 5);
    for version in 10..20 {
        append(&resumed, &ids, version, &mut held).unwrap();
        assert!(killed.live_bytes() <= CAP, "{} bytes", killed.live_bytes());
    }
    check(&resumed, &held, -5..ids.len() as Id + 5);
}

#[test]
fn kept_files_leave_the_cap_intact_where_all_of_it_is_in_use() {
    for cap in [160 << 10, 208 << 10, 352 << 10] {
        let (memory, fault, tier, _) = tier(cap);
        let ids: Vec<Id> = (0..tier.capacity_rows() as Id).collect();
        let mut held = Versions::new();
        for version in 1..60 {
            let some: Vec<Id> = ids.iter().copied().filter(|id| (id * 7 + i64::from(version)) % 3 > 0).collect();
            append(&tier, &some, version, &mut held).unwrap();
            assert!(memory.live_bytes() <= cap, "{} bytes of {cap}", memory.live_bytes());
            if version % 10 == 0 {
                tier.publish(Some(u64::from(version)), StateCounters::default(), Vec::new()).unwrap();
                assert!(memory.live_bytes() <= cap, "{} bytes of {cap}", memory.live_bytes());
            }
        }
        check(&tier, &held, -5..ids.len() as Id + 5);
        assert!(made(&fault).0 > 0, "no file was written again");
    }
}
