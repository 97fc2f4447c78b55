//! Panics in the tier's threads, at any use of the disk, become a permanent typed error. No thread waits forever, and
//! rows passed to the tier can be read.

use std::path::Path;
use std::sync::Arc;

use embcache::Kind;
use embcache::config::ReopenMode;
use embcache::io::{FaultEngine, IoEngine, IoOperation, MemoryEngine};
use embcache::ssd::{SsdTier, StateCounters};
use embcache::types::{Id, hash_id};
use embcache_tests::ssd::{Versions, append, check, config, fetch, open};
use embcache_tests::watched;

const IDS: Id = 400;

fn tier() -> (SsdTier, FaultEngine) {
    let faults = FaultEngine::new(Arc::new(MemoryEngine::default()));
    let engine: Arc<dyn IoEngine> = Arc::new(faults.clone());
    (open(&engine, &config(Path::new("/t"), 160 << 10, ReopenMode::Never)).unwrap().0, faults)
}

/// Appends until that fails (or the watchdog ends the test), so that segments are full of live and dead records. With
/// `publish` it also publishes from time to time.
fn write_until_refused(tier: &SsdTier, publish: bool, held: &mut Versions) -> embcache::Error {
    let all: Vec<Id> = (0..IDS).collect();
    if let Err(error) = append(tier, &all, 1, held) {
        return error;
    }
    for version in 2.. {
        let some: Vec<Id> =
            all.iter().copied().filter(|id| hash_id(id ^ i64::from(version) << 20).is_multiple_of(4)).collect();
        if let Err(error) = append(tier, &some, version, held) {
            return error;
        }
        if publish && let Err(error) = tier.publish(Some(u64::from(version)), StateCounters::default(), Vec::new()) {
            return error;
        }
    }
    unreachable!("versions do not end")
}

fn a_tier_only_reads_after_a_panic(operation: IoOperation) {
    for passing in 0..12 {
        let (tier, faults) = tier();
        let mut held = Versions::new();
        faults.panic_at(operation, passing);
        // Only a publish syncs.
        let error = write_until_refused(&tier, operation == IoOperation::Sync, &mut held);
        assert!(!faults.will_panic());
        assert_eq!(error.kind(), Kind::ReadOnly, "{error}");
        assert!(error.to_string().contains("panic"), "{error}");
        assert_eq!(append(&tier, &[1], 1000, &mut held).unwrap_err().kind(), Kind::ReadOnly);
        assert_eq!(tier.remove(&[1]).unwrap_err().kind(), Kind::ReadOnly);
        assert_eq!(tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap_err().kind(), Kind::ReadOnly);
        // Some rows of the failed append may have been stored.
        let ids: Vec<Id> = (0..IDS).collect();
        for (id, found) in ids.iter().zip(fetch(&tier, &ids).unwrap()) {
            assert!(found >= held.get(id).copied(), "{id}: {found:?}");
        }
        assert_eq!(tier.close().unwrap_err().kind(), Kind::ReadOnly);
    }
}

#[test]
fn a_panic_of_a_flusher_leaves_a_tier_that_reads() {
    watched(String::new, || {
        a_tier_only_reads_after_a_panic(IoOperation::Write);
        a_tier_only_reads_after_a_panic(IoOperation::Sync);
    });
}

#[test]
fn a_panic_of_compaction_leaves_a_tier_that_reads() {
    // Only compaction reads here.
    watched(String::new, || a_tier_only_reads_after_a_panic(IoOperation::Read));
}

#[test]
fn a_panic_of_a_fetch_is_its_error_and_the_next_one_reads() {
    watched(String::new, || {
        let (tier, faults) = tier();
        let mut held = Versions::new();
        let ids: Vec<Id> = (0..200).collect();
        append(&tier, &ids, 1, &mut held).unwrap();
        tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
        for passing in 0..2 {
            faults.panic_at(IoOperation::Read, passing);
            let error = fetch(&tier, &ids).expect_err("its thread panicked");
            assert_eq!(error.kind(), Kind::State, "{error}");
        }
        check(&tier, &held, 0..IDS);
        append(&tier, &ids, 2, &mut held).unwrap();
        check(&tier, &held, 0..IDS);
    });
}

#[test]
fn panic_during_change_poisons_tier() {
    watched(String::new, || {
        let (tier, faults) = tier();
        let mut held = Versions::new();
        let ids: Vec<Id> = (0..100).collect();
        append(&tier, &ids, 1, &mut held).unwrap();
        // A segment's file is created under the lock of the state.
        faults.panic_at(IoOperation::Create, 0);
        let all: Vec<Id> = (100..IDS).collect();
        let appended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| append(&tier, &all, 1, &mut held)));
        assert!(appended.is_err());
        let mut maybe = [false; 2];
        tier.maybe_contains(&[1, IDS], &mut maybe);
        assert_eq!(maybe, [true; 2], "nobody may take a row for unborn");
        assert_eq!(fetch(&tier, &ids).unwrap_err().kind(), Kind::State);
        assert_eq!(append(&tier, &ids, 2, &mut held).unwrap_err().kind(), Kind::State);
        assert_eq!(tier.scan(&mut |_| Ok(())).unwrap_err().kind(), Kind::State);
        assert_eq!(tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap_err().kind(), Kind::State);
    });
}
