//! OS errors while a directory is opened. Files that cannot be read at the time are not treated as corrupted or
//! missing, and are not removed.

use std::path::Path;
use std::sync::Arc;

use embcache::config::ReopenMode;
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, MemoryEngine};
use embcache::ssd::{SsdTier, StateCounters};
use embcache::{Kind, Result};
use embcache_tests::ssd::{Versions, append, check, config, open};

const DIR: &str = "/embcache-resume-errors/tier";
const CAP: u64 = 1 << 20;
const TOKENS: [u64; 2] = [5, 8];

/// Two states with their own segments, and the contents of each.
fn two_states(memory: &MemoryEngine) -> [Versions; 2] {
    let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
    let (tier, _) = open(&engine, &config(Path::new(DIR), CAP, ReopenMode::Never)).unwrap();
    let mut held = Versions::new();
    let states = TOKENS.map(|token| {
        append(&tier, &(0..3000).collect::<Vec<_>>(), token as u32, &mut held).unwrap();
        append(&tier, &[token as i64 * 10_000], 1, &mut held).unwrap();
        tier.publish(Some(token), StateCounters::default(), Vec::new()).unwrap();
        held.clone()
    });
    tier.close().unwrap();
    states
}

/// Opens the directory with its latest state.
fn resume(engine: &Arc<dyn IoEngine>) -> Result<SsdTier> {
    open(engine, &config(Path::new(DIR), CAP, ReopenMode::Resume)).map(|(tier, _)| tier)
}

#[test]
fn no_error_of_the_system_costs_the_older_state() {
    let memory = MemoryEngine::default();
    let states = two_states(&memory);
    let files = |engine: &MemoryEngine| engine.list(Path::new(DIR)).unwrap();
    let whole = files(&memory);
    let mut of_the_older = 0;
    let faults = [
        (IoOperation::Exists, libc::EIO),
        (IoOperation::Exists, libc::EACCES),
        (IoOperation::Open, libc::EMFILE),
        (IoOperation::Open, libc::EACCES),
        (IoOperation::Read, libc::EIO),
        (IoOperation::List, libc::EIO),
    ];
    for (operation, errno) in faults {
        for passing in 0.. {
            let disk = memory.kill();
            let fault = FaultEngine::new(Arc::new(disk.clone()));
            fault.hit_once(operation, passing, IoFault::Fail(errno));
            let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
            let context = format!("{operation:?} {passing} fails with {errno}");
            let resumed = resume(&engine);
            let is_over = fault.will_hit();
            fault.clear();
            if is_over {
                // There are no further operations of this kind.
                check(&resumed.unwrap(), &states[1], 0..100);
                assert!(passing > 0, "{context}: the kind is not used");
                break;
            }
            if let Err(error) = resumed {
                let expected = if errno == libc::EACCES { Kind::Permission } else { Kind::Storage };
                assert_eq!((error.kind(), error.errno()), (expected, Some(errno)), "{context}: {error}");
                of_the_older += u32::from(error.to_string().contains("cannot read the older one of the two states"));
            }
            assert_eq!(files(&disk), whole, "{context}");
            let engine: Arc<dyn IoEngine> = Arc::new(disk.clone());
            for (token, held) in TOKENS.into_iter().zip(&states).rev() {
                let wanted = embcache::config::SsdConfig {
                    resume_commit_id: Some(token),
                    ..config(Path::new(DIR), CAP, ReopenMode::Resume)
                };
                check(&open(&engine, &wanted).unwrap().0, held, 0..100);
            }
        }
    }
    assert!(of_the_older > 8, "{of_the_older} faults met the older state");
}
