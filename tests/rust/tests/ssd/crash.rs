//! The SSD tier is stopped, or fails, at every operation on its files. Published states are intact, and rows passed to
//! the tier can be read while the process lives.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use embcache::config::{ReopenMode, SsdConfig};
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, MemoryEngine};
use embcache::ssd::{SsdExpiryCursor, SsdExpiryRule, SsdTier, StateCounters};
use embcache::types::{Id, hash_id};
use embcache::{Error, Kind, Result};
use embcache_tests::ssd::{Versions, append, config, fetch, header};

const DIR: &str = "/embcache-crash/module/item/0-of-1";
/// The cap is small enough that the workload needs compaction, and large enough that two states fit in addition to the
/// rows.
const CAP: u64 = 352 << 10;
/// The rows fit, but published states may have to be discarded.
const TIGHT_CAP: u64 = 208 << 10;
const IDS: Id = 700;
const STEPS: u32 = 30;
/// Rows whose last step is at most this one expire. Last steps are random 64-bit numbers, so one row in 16 expires, and
/// as often as not they decrease when a row is written again.
const CUT: u64 = u64::MAX / 16;

#[derive(Clone, Debug)]
struct State {
    token: u64,
    rows: Versions,
    counters: StateCounters,
}

fn open(
    engine: &Arc<dyn IoEngine>,
    bytes: u64,
    reopen: ReopenMode,
    resume_token: Option<u64>,
) -> Result<(SsdTier, Option<StateCounters>)> {
    let config = SsdConfig { resume_commit_id: resume_token, ..config(Path::new(DIR), bytes, reopen) };
    embcache_tests::ssd::open(engine, &config)
}

/// A run of the workload: the contents of the tier, and the states that it reported as published.
#[derive(Debug, Default)]
struct Run {
    rows: Versions,
    /// The ids of the call that failed, if any. Each of them may or may not have been changed.
    doubtful: Vec<Id>,
    published: Vec<State>,
    /// The state that was being published when the publish failed.
    unfinished: Option<State>,
}

/// The ids of a step. They are scattered, so that no segment ever becomes entirely dead.
fn ids_of(step: u32) -> Vec<Id> {
    (0..IDS).filter(|id| hash_id(id ^ (i64::from(step) << 40)).is_multiple_of(6)).map(|id| id - IDS / 2).collect()
}

impl Run {
    /// Appends, removes, expires, publishes and clears until an operation fails.
    fn go(&mut self, tier: &SsdTier) -> Result<()> {
        let mut burial = SsdExpiryCursor::default();
        for step in 0..STEPS {
            let ids = ids_of(step);
            self.doubtful.clone_from(&ids);
            append(tier, &ids, step + 1, &mut self.rows)?;
            self.doubtful.clear();
            if step % 4 == 1 {
                let gone: Vec<Id> = self.rows.keys().copied().filter(|id| id % 23 == i64::from(step) % 23).collect();
                self.doubtful.clone_from(&gone);
                tier.remove(&gone)?;
                self.rows.retain(|id, _| !gone.contains(id));
                self.doubtful.clear();
            }
            // Slices, with publishes between them, and then the rest.
            self.bury(tier, &mut burial, step, if step % 5 == 4 { usize::MAX } else { 90 })?;
            if step == STEPS - 4 {
                self.doubtful = self.rows.keys().copied().collect();
                tier.clear()?;
                self.rows.clear();
                self.doubtful.clear();
            }
            if step % 2 == 1 {
                self.publish(tier, u64::from(step))?;
            }
        }
        Ok(())
    }

    /// Runs a slice of an expiry, whose rule also reads rows in some steps. A call that fails has expired no row.
    fn bury(&mut self, tier: &SsdTier, burial: &mut SsdExpiryCursor, step: u32, most: usize) -> Result<()> {
        let by_row: &embcache::ssd::RowExpiryPredicate<'_> = &|header, _| header.last_step <= CUT;
        let dying = SsdExpiryRule { last_step: CUT, row_predicate: (step >= STEPS / 2).then_some(by_row) };
        loop {
            let buried = tier.expire(burial, &dying, &|_| false, most, None)?;
            for (id, _) in buried.rows {
                let version = self.rows.remove(&id).expect("a row that is here");
                assert!(header(id, version).last_step <= CUT, "row {id} was not to die");
            }
            if buried.finished {
                let left = self.rows.iter().find(|(id, version)| header(**id, **version).last_step <= CUT);
                assert_eq!(left, None, "it was to die");
                *burial = SsdExpiryCursor::default();
            }
            if buried.finished || most < usize::MAX {
                return Ok(());
            }
        }
    }

    fn publish(&mut self, tier: &SsdTier, token: u64) -> Result<()> {
        let counters = StateCounters { step: token * 10, epoch: token as u32 };
        let state = State { token, rows: self.rows.clone(), counters };
        self.unfinished = Some(state.clone());
        tier.publish(Some(token), counters, Vec::new())?;
        self.unfinished = None;
        self.published.push(state);
        Ok(())
    }

    /// Opens the files on `engine`: the last published state or the one whose publish was not finished, and the
    /// previous one if the tier still has it. Each must be intact. Then continues from there.
    fn check_resumes(&self, bytes: u64, image: &MemoryEngine, given_up: bool, context: &str) {
        let engine: Arc<dyn IoEngine> = Arc::new(image.clone());
        let tokens =
            SsdTier::published_commit_ids(Path::new(DIR), &*engine).unwrap_or_else(|e| panic!("{context}: {e}"));
        let known: Vec<&State> = self.published.iter().chain(&self.unfinished).collect();
        let Some(newest) = tokens.last() else {
            assert!(self.published.is_empty() || given_up, "{context}: a published state is gone");
            return;
        };
        let acknowledged = self.published.last().map_or(0, |state| state.token);
        assert!(*newest >= acknowledged, "{context}: state {acknowledged} was published, {newest} is the newest there");
        for token in &tokens {
            let state = known.iter().find(|state| state.token == *token).expect("no state that was never published");
            // Each state is resumed on its own copy, because a resume drops the later ones.
            let copy = image.kill();
            let engine: Arc<dyn IoEngine> = Arc::new(copy.clone());
            let (tier, counters) = open(&engine, bytes, ReopenMode::Resume, Some(*token))
                .unwrap_or_else(|e| panic!("{context}: state {token} of {tokens:?}: {e}"));
            assert_eq!(counters, Some(state.counters), "{context}");
            check_rows(&tier, &state.rows, &[], context);
            let mut rows = state.rows.clone();
            let ids: Vec<Id> = (0..60).collect();
            append(&tier, &ids, 900, &mut rows).unwrap();
            tier.publish(Some(1000), StateCounters::default(), Vec::new()).unwrap();
            drop(tier);
            let engine: Arc<dyn IoEngine> = Arc::new(copy.crash());
            let (tier, _) = open(&engine, bytes, ReopenMode::Resume, None).unwrap();
            check_rows(&tier, &rows, &[], context);
        }
    }
}

/// Checks that every id is as in `rows`, and that there is no other. Ids in `doubtful` may have any version.
fn check_rows(tier: &SsdTier, rows: &Versions, doubtful: &[Id], context: &str) {
    let ids: Vec<Id> = (-IDS..IDS).collect();
    let found = fetch(tier, &ids).unwrap_or_else(|e| panic!("{context}: {e}"));
    for (id, found) in ids.iter().zip(found) {
        assert!(found == rows.get(id).copied() || doubtful.contains(id), "{context}: id {id} is {found:?}");
    }
    if doubtful.is_empty() {
        assert_eq!(tier.rows(), rows.len() as u64, "{context}");
        let mut scanned = Versions::new();
        tier.scan(&mut |row| {
            assert!(scanned.insert(row.header.id, row.header.count).is_none(), "{context}: scanned twice");
            Ok(())
        })
        .unwrap();
        assert!(&scanned == rows, "{context}");
    }
}

fn engines() -> (MemoryEngine, FaultEngine, Arc<dyn IoEngine>) {
    let memory = MemoryEngine::default();
    let fault = FaultEngine::new(Arc::new(memory.clone()));
    (memory, fault.clone(), Arc::new(fault))
}

/// Runs the workload in a new directory, with any failures.
fn run(engine: &Arc<dyn IoEngine>, bytes: u64) -> (Run, Option<SsdTier>, Result<()>) {
    let mut run = Run::default();
    match open(engine, bytes, ReopenMode::Never, None) {
        Ok((tier, _)) => {
            let outcome = run.go(&tier);
            (run, Some(tier), outcome)
        }
        Err(error) => (run, None, Err(error)),
    }
}

fn is_of_storage(error: &Error) -> bool {
    matches!(error.kind(), Kind::Storage | Kind::ReadOnly)
}

/// Runs the workload to its end and checks the results. Returns true if compaction moved rows.
fn run_undisturbed() -> bool {
    let (memory, fault, engine) = engines();
    let (run, tier, outcome) = run(&engine, CAP);
    outcome.unwrap();
    let tier = tier.unwrap();
    check_rows(&tier, &run.rows, &[], "at the end");
    let stats = tier.stats();
    assert!(!stats.has_lost_flush, "{stats:?}");
    let removed = fault.log().iter().filter(|(operation, _)| *operation == IoOperation::RemoveFile).count();
    assert!(removed > 20, "{removed} files removed");
    assert!(fault.changes() > 200, "{} changes", fault.changes());
    drop(tier);
    run.check_resumes(CAP, &memory.crash(), false, "at the end");
    stats.compaction_bytes > 0
}

#[test]
fn the_workload_compacts_and_gives_no_state_up() {
    // Compaction runs in the background. If the machine gives its thread no time, there may be nothing left for it.
    assert!((0..100).any(|_| run_undisturbed()), "no run of the workload compacted");
}

/// Stops everything after 0, `step`, 2 `step`, … changes, until the workload finishes.
fn cut_power(bytes: u64, step: usize) {
    for passing in (0..).step_by(step) {
        let (memory, fault, engine) = engines();
        fault.hit_change(passing, IoFault::Stop);
        let (run, tier, outcome) = run(&engine, bytes);
        let given_up = tier.as_ref().is_some_and(|tier| tier.stats().has_lost_flush);
        assert!(outcome.as_ref().err().is_none_or(is_of_storage), "{outcome:?}");
        let images = [memory.crash(), memory.crash_torn(passing), memory.crash_torn(!passing), memory.kill()];
        drop(tier);
        for (number, image) in images.iter().enumerate() {
            run.check_resumes(bytes, image, given_up, &format!("stopped after {passing} changes, image {number}"));
        }
        if !fault.is_stopped() {
            assert!(passing > 200);
            break;
        }
    }
}

#[test]
fn a_power_cut_at_every_operation_leaves_the_published_states_whole() {
    cut_power(CAP, 1);
}

/// The power is cut while the tier removes states for their space. The remaining states are intact.
#[test]
fn power_cut_during_state_removal_keeps_other_states() {
    cut_power(TIGHT_CAP, 3);
}

#[test]
fn error_at_any_operation_keeps_rows_and_states() {
    let mut read_only = 0;
    for passing in 0.. {
        let (memory, fault, engine) = engines();
        let errno = [libc::ENOSPC, libc::EIO][passing as usize % 2];
        fault.hit_change(passing, if passing % 3 == 0 { IoFault::Tear(errno) } else { IoFault::Fail(errno) });
        let (run, tier, outcome) = run(&engine, CAP);
        let context = format!("errno {errno} after {passing} changes");
        let Some(tier) = tier else {
            assert_eq!(outcome.unwrap_err().errno(), Some(errno), "{context}");
            continue;
        };
        check_rows(&tier, &run.rows, &run.doubtful, &context);
        if let Err(error) = outcome {
            assert!(is_of_storage(&error) && error.errno() == Some(errno), "{context}: {error:?}");
            // Failures are permanent. No later write may pretend that the store is intact.
            for outcome in [
                append(&tier, &[1], 99, &mut run.rows.clone()),
                tier.remove(&[1]),
                tier.publish(Some(500), StateCounters::default(), Vec::new()),
            ] {
                let error = outcome.expect_err(&context);
                assert_eq!((error.kind(), error.errno()), (Kind::ReadOnly, Some(errno)), "{context}: {error}");
            }
            check_rows(&tier, &run.rows, &run.doubtful, &context);
            read_only += 1;
        }
        let given_up = tier.stats().has_lost_flush;
        drop(tier);
        for (number, image) in [memory.crash(), memory.crash_torn(passing), memory.kill()].iter().enumerate() {
            run.check_resumes(CAP, image, given_up, &format!("{context}, image {number}"));
        }
        if fault.changes() <= passing {
            break;
        }
    }
    assert!(read_only > 100, "{read_only} errors reached a caller");
}

#[test]
fn a_bit_flipped_in_any_write_is_never_taken_for_data() {
    let mut noticed = 0;
    for passing in 0.. {
        let (memory, fault, engine) = engines();
        fault.hit_once(IoOperation::Write, passing, IoFault::Flip);
        let (run, tier, outcome) = run(&engine, CAP);
        assert!(outcome.as_ref().err().is_none_or(|e| e.kind() == Kind::Corruption), "{outcome:?}");
        drop(tier);
        let engine: Arc<dyn IoEngine> = Arc::new(memory.kill());
        let found = open(&engine, CAP, ReopenMode::Resume, None).map_err(|error| error.kind()).and_then(|(tier, _)| {
            let last = run.published.last().unwrap();
            for id in -IDS..IDS {
                let found = fetch(&tier, &[id]).map_err(|error| error.kind())?;
                assert_eq!(found[0], last.rows.get(&id).copied(), "id {id}, write {passing} flipped");
            }
            Ok(())
        });
        match found {
            Ok(()) => {}
            Err(Kind::Corruption) => noticed += 1,
            Err(other) => panic!("write {passing} flipped: {other:?}"),
        }
        let writes = fault.log().iter().filter(|(operation, _)| *operation == IoOperation::Write).count();
        if writes as u64 <= passing {
            break;
        }
    }
    assert!(noticed > 0);
}
