//! Compares the tier with a `BTreeMap`, through random operations and random ends of the process.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::error::Kind;
use crate::io::MemoryEngine;
use crate::ssd::ops::compaction;
use crate::ssd::{RowExpiryPredicate, SsdExpiryCursor, SsdExpiryRule};

const IDS: Id = 400;

#[derive(Clone, Debug)]
enum SsdModelOp {
    /// Appends rows with the ids `first, first + step, …`.
    Append {
        first: Id,
        step: Id,
        count: usize,
    },
    Remove {
        first: Id,
        step: Id,
        count: usize,
    },
    Fetch {
        first: Id,
        count: usize,
    },
    Publish,
    Compact,
    Scan,
    /// Does the same as the end of an append when the process's buffers are scarce.
    Spill,
    Evict {
        rows: u64,
        keep_multiples_of: Id,
    },
    /// Starts an expiry pass if none is in progress, and runs a slice of it. A pass in progress may continue with a
    /// newer step and repeat.
    Expire {
        /// Number of versions since the expired rows were trained last.
        back: u32,
        by_row: bool,
        keep_multiples_of: Id,
        most: usize,
        newer: bool,
    },
    Clear,
    /// Ends the process, and with `power` also the machine.
    Crash {
        power: Option<u64>,
        older: bool,
    },
    Discard,
    Close,
}

fn op() -> impl Strategy<Value = SsdModelOp> {
    let ids = || (-IDS / 2..IDS / 2, 1..4_i64, 1..300_usize);
    prop_oneof![
        12 => ids().prop_map(|(first, step, count)| SsdModelOp::Append { first, step, count }),
        3 => ids().prop_map(|(first, step, count)| SsdModelOp::Remove { first, step, count: count / 4 }),
        4 => (-IDS..IDS, 1..200_usize).prop_map(|(first, count)| SsdModelOp::Fetch { first, count }),
        3 => Just(SsdModelOp::Publish),
        3 => Just(SsdModelOp::Compact),
        1 => Just(SsdModelOp::Scan),
        2 => Just(SsdModelOp::Spill),
        1 => (1..100_u64, 2..5_i64).prop_map(|(rows, keep_multiples_of)| SsdModelOp::Evict { rows, keep_multiples_of }),
        3 => (0..6_u32, any::<bool>(), 2..9_i64, 1..400_usize, any::<bool>()).prop_map(
            |(back, by_row, keep_multiples_of, most, newer)| SsdModelOp::Expire { back, by_row, keep_multiples_of, most, newer }),
        1 => Just(SsdModelOp::Clear),
        2 => (proptest::option::of(any::<u64>()), any::<bool>()).prop_map(|(power, older)| SsdModelOp::Crash { power, older }),
        1 => Just(SsdModelOp::Discard),
        1 => Just(SsdModelOp::Close),
    ]
}

type SsdModelRows = BTreeMap<Id, SsdTestRow>;

struct SsdModel {
    cap: u64,
    tuning: SsdTuning,
    memory: MemoryEngine,
    engine: Arc<dyn IoEngine>,
    tier: Option<SsdTier>,
    rows: SsdModelRows,
    /// Commit ids, rows and counters of published states, oldest first.
    states: Vec<(u64, SsdModelRows, StateCounters)>,
    commit_id: u64,
    version: u32,
    expiry: Option<SsdModelExpiry>,
}

/// An expiry pass in progress, and its rule.
struct SsdModelExpiry {
    cursor: SsdExpiryCursor,
    last_step: u64,
    by_row: bool,
    keep_multiples_of: Id,
}

impl SsdModelExpiry {
    fn expires(&self, row: &SsdTestRow) -> bool {
        let by_rule = !self.by_row || is_expired_by_rule(&row.header, &row.vector);
        row.header.last_step <= self.last_step && by_rule && row.header.id % self.keep_multiples_of != 0
    }
}

fn is_expired_by_rule(header: &RowHeader, vector: &[f32]) -> bool {
    header.count.is_multiple_of(2) || vector[0] > 50.0
}

impl SsdModel {
    fn new(cap: u64, tuning: SsdTuning) -> Self {
        let memory = MemoryEngine::default();
        let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
        let (tier, counters) = open_tuned(&engine, &config(cap, ReopenMode::Never), tuning).unwrap();
        assert_eq!(counters, None);
        let rows = SsdModelRows::new();
        Self {
            cap,
            tuning,
            memory,
            engine,
            tier: Some(tier),
            rows,
            states: Vec::new(),
            commit_id: 0,
            version: 0,
            expiry: None,
        }
    }

    fn tier(&self) -> &SsdTier {
        self.tier.as_ref().unwrap()
    }

    fn ids(first: Id, step: Id, count: usize) -> Vec<Id> {
        let wrap = |id: Id| (id + IDS / 2).rem_euclid(IDS) - IDS / 2;
        let mut ids: Vec<Id> = (0..count as Id).map(|at| wrap(first + at * step)).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    fn run(&mut self, op: &SsdModelOp) {
        match *op {
            SsdModelOp::Append { first, step, count } => self.append(&Self::ids(first, step, count)),
            SsdModelOp::Remove { first, step, count } => {
                let mut ids = Self::ids(first, step, count);
                ids.retain(|id| self.rows.contains_key(id));
                self.tier().remove(&ids).unwrap();
                self.rows.retain(|id, _| !ids.contains(id));
            }
            SsdModelOp::Fetch { first, count } => self.check_fetch(&(first..first + count as Id).collect::<Vec<_>>()),
            SsdModelOp::Publish => {
                self.commit_id += 1 + self.commit_id % 3;
                let counters = StateCounters { step: self.commit_id * 10, epoch: self.version };
                self.tier().publish(Some(self.commit_id), counters, Vec::new()).unwrap();
                self.states.push((self.commit_id, self.rows.clone(), counters));
            }
            SsdModelOp::Compact => while compaction::compact_one(&self.tier().inner) {},
            SsdModelOp::Scan => {
                let expected: Vec<SsdTestRow> = self.rows.values().cloned().collect();
                assert_eq!(scan(self.tier()).unwrap(), expected);
            }
            SsdModelOp::Spill => {
                self.tier().inner.state().spill();
                self.check_fetch(&(-IDS..IDS).collect::<Vec<_>>());
            }
            SsdModelOp::Evict { rows, keep_multiples_of } => {
                let keep = |id: Id| id % keep_multiples_of == 0;
                let gone = self.tier().evict(rows, &keep, None).unwrap();
                let could = self.rows.keys().filter(|id| !keep(**id)).count() as u64;
                assert_eq!(gone.len() as u64, rows.min(could));
                for id in gone {
                    assert!(!keep(id) && self.rows.remove(&id).is_some(), "{id} was not to go");
                }
            }
            SsdModelOp::Expire { back, by_row, keep_multiples_of, most, newer } => {
                let cut = u64::from(self.version.saturating_sub(back)) * 8;
                let begun =
                    SsdModelExpiry { cursor: SsdExpiryCursor::default(), last_step: cut, by_row, keep_multiples_of };
                let mut under_way = self.expiry.take().unwrap_or(begun);
                if newer && cut >= under_way.last_step {
                    under_way.last_step = cut;
                    under_way.cursor.repeat_pass();
                }
                if !self.expire(&mut under_way, most) {
                    self.expiry = Some(under_way);
                }
            }
            SsdModelOp::Clear => {
                self.tier().clear().unwrap();
                self.rows.clear();
            }
            SsdModelOp::Crash { power, older } => self.crash(power, older),
            SsdModelOp::Discard => {
                self.tier = None;
                self.expiry = None;
                let (tier, counters) =
                    open_tuned(&self.engine, &config(self.cap, ReopenMode::Discard), self.tuning).unwrap();
                assert_eq!(counters, None);
                self.tier = Some(tier);
                self.rows.clear();
                self.states.clear();
                self.commit_id = 0;
            }
            SsdModelOp::Close => {
                self.tier().close().unwrap();
                assert_eq!(append(self.tier(), &[SsdTestRow::new(1, 1)], |_| false).unwrap_err().kind(), Kind::State);
                self.reopen(false);
            }
        }
        self.check();
    }

    fn append(&mut self, ids: &[Id]) {
        self.version += 1;
        let rows: Vec<SsdTestRow> = ids.iter().map(|id| SsdTestRow::new(*id, self.version)).collect();
        append(self.tier(), &rows, |id| self.rows.contains_key(&id)).unwrap();
        self.rows.extend(rows.into_iter().map(|row| (row.header.id, row)));
    }

    /// Runs a slice of an expiry pass. Returns true if it is finished.
    fn expire(&mut self, under_way: &mut SsdModelExpiry, most: usize) -> bool {
        let (cut, keep_multiples_of) = (under_way.last_step, under_way.keep_multiples_of);
        let rule: Option<&RowExpiryPredicate<'_>> = under_way.by_row.then_some(&is_expired_by_rule);
        let rule = SsdExpiryRule { last_step: cut, row_predicate: rule };
        let keep = |id: Id| id % keep_multiples_of == 0;
        let expired = self.tier().expire(&mut under_way.cursor, &rule, &keep, most, None).unwrap();
        assert!(expired.rows.len() <= most);
        for (id, epoch) in expired.rows {
            let row = self.rows.remove(&id).expect("a row goes once");
            assert!(under_way.expires(&row) && row.header.modified_epoch == epoch, "{row:?} was not to go");
        }
        if expired.finished {
            let left: Vec<&SsdTestRow> = self.rows.values().filter(|row| under_way.expires(row)).collect();
            assert!(left.is_empty(), "{left:?} were to go");
        }
        expired.finished
    }

    fn crash(&mut self, power: Option<u64>, older: bool) {
        // A power cut may happen while the writers work. Random sectors of the unsynced writes persist.
        self.memory = match power {
            Some(seed) => self.memory.crash_torn(seed),
            None => self.memory.kill(),
        };
        self.reopen(older);
    }

    /// Resumes the last published state, or the previous one.
    fn reopen(&mut self, older: bool) {
        let given_up = self.tier().stats().has_lost_flush;
        // The old tier was closed, or continues with its own copy of the files.
        self.tier = None;
        self.expiry = None;
        self.engine = Arc::new(self.memory.clone());
        let dir = config(self.cap, ReopenMode::Resume).dir;
        let tokens = SsdTier::published_commit_ids(&dir, &*self.engine).unwrap();
        assert!(given_up == tokens.is_empty() || self.states.is_empty(), "{tokens:?}, given up: {given_up}");
        let mut resume = config(self.cap, ReopenMode::Resume);
        if older && tokens.len() == 2 {
            resume.resume_commit_id = Some(tokens[0]);
            self.states.retain(|(token, _, _)| *token <= tokens[0]);
        }
        if tokens.is_empty() {
            let error = open_tuned(&self.engine, &resume, self.tuning).err();
            assert!(error.is_none_or(|error| error.kind() == Kind::State));
            let (tier, _) = open_tuned(&self.engine, &config(self.cap, ReopenMode::Discard), self.tuning).unwrap();
            (self.tier, self.rows) = (Some(tier), SsdModelRows::new());
            self.states.clear();
            self.commit_id = 0;
            return;
        }
        let (tier, counters) = open_tuned(&self.engine, &resume, self.tuning).unwrap();
        let (token, rows, expected) = self.states.last().cloned().unwrap();
        assert_eq!(tokens[tokens.len() - 1 - usize::from(resume.resume_commit_id.is_some())], token);
        assert_eq!(counters, Some(expected));
        (self.tier, self.rows) = (Some(tier), rows);
        self.check_fetch(&(-IDS..IDS).collect::<Vec<_>>());
    }

    fn check_fetch(&self, ids: &[Id]) {
        let found = fetch(self.tier(), ids).unwrap();
        let mut maybe = vec![false; ids.len()];
        self.tier().maybe_contains(ids, &mut maybe);
        for ((id, found), maybe) in ids.iter().zip(found).zip(maybe) {
            assert_eq!(found.as_ref(), self.rows.get(id), "id {id}");
            assert!(maybe || found.is_none(), "id {id} is here and denied");
        }
    }

    fn check(&self) {
        let tier = self.tier();
        assert_eq!(tier.rows(), self.rows.len() as u64);
        let state = tier.inner.view();
        let live: u32 = state.segments().iter().map(|s| s.live()).sum();
        assert_eq!(u64::from(live), self.rows.len() as u64, "live counts");
        drop(state);
        assert!(self.memory.live_bytes() <= self.cap, "{} bytes in files", self.memory.live_bytes());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, max_shrink_iters: 4000, ..ProptestConfig::default() })]

    #[test]
    fn tier_behaves_as_a_map_through_operations_and_crashes(ops in prop::collection::vec(op(), 1..60)) {
        let mut world = SsdModel::new(640 << 10, SMALL);
        for op in &ops {
            world.run(op);
        }
        world.check_fetch(&(-IDS..IDS).collect::<Vec<_>>());
    }

    #[test]
    fn a_tier_that_is_nearly_full_behaves_as_a_map(ops in prop::collection::vec(op(), 1..60)) {
        let mut world = SsdModel::new(128 << 10, TINY);
        for op in &ops {
            world.run(op);
        }
        world.check_fetch(&(-IDS..IDS).collect::<Vec<_>>());
    }
}
