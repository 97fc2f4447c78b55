//! Expiry of rows by a rule.

use std::collections::BTreeMap;

use super::*;
use crate::error::Kind;
use crate::io::{FaultEngine, IoFault, IoOperation, MemoryEngine};
use crate::ssd::ops::compaction;
use crate::ssd::segment::Segment;
use crate::ssd::{SsdExpiredRows, SsdExpiryCursor, SsdExpiryRule};

/// Rows that were trained last in `step`.
fn rows(ids: std::ops::Range<Id>, step: u64) -> Vec<SsdTestRow> {
    let row = |id| {
        let mut row = SsdTestRow::new(id, 1);
        row.header.last_step = step;
        row
    };
    ids.map(row).collect()
}

fn by_step(last_step: u64) -> SsdExpiryRule<'static> {
    SsdExpiryRule { last_step, row_predicate: None }
}

/// Continues an expiry pass to its end, `most` records per call. Returns the ids of the removed rows, sorted.
fn expire(tier: &SsdTier, cursor: &mut SsdExpiryCursor, rule: &SsdExpiryRule<'_>, most: usize) -> Vec<Id> {
    let mut gone = Vec::new();
    loop {
        let SsdExpiredRows { rows, finished } = tier.expire(cursor, rule, &|_| false, most, None).unwrap();
        gone.extend(rows.into_iter().map(|(id, _)| id));
        if finished {
            gone.sort_unstable();
            return gone;
        }
    }
}

fn ids_left(tier: &SsdTier) -> Vec<Id> {
    scan(tier).unwrap().into_iter().map(|row| row.header.id).collect()
}

#[test]
fn rows_expire_by_step_in_buffers_open_and_sealed_segments() {
    for (settles, publishes, most) in [(false, false, 7), (true, false, 100), (true, true, 10_000)] {
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let (tier, _) = open(&engine, &config(1 << 20, ReopenMode::Never)).unwrap();
        append(&tier, &rows(0..900, 5), |_| false).unwrap();
        append(&tier, &rows(900..1000, 7), |_| false).unwrap();
        append(&tier, &rows(300..400, 8), |_| true).unwrap();
        if settles {
            settle(&tier);
        }
        if publishes {
            tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
        }
        let gone = expire(&tier, &mut SsdExpiryCursor::default(), &by_step(6), most);
        assert_eq!(gone, (0..300).chain(400..900).collect::<Vec<Id>>());
        assert_eq!(ids_left(&tier), (300..400).chain(900..1000).collect::<Vec<Id>>());
        assert_eq!(expire(&tier, &mut SsdExpiryCursor::default(), &by_step(6), most), [0; 0], "nobody dies twice");
    }
}

/// Rows expire by their step in segments whose footers have no steps, also after a resume.
#[test]
fn rows_expire_by_step_without_footer_steps() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, _) = open(&engine, &config(1 << 20, ReopenMode::Never)).unwrap();
    // The largest step counts as unknown, and then a footer has no steps.
    append(&tier, &[rows(0..100, 5), rows(100..200, 7), rows(200..201, u64::MAX)].concat(), |_| false).unwrap();
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    assert!(tier.inner.state().segments().iter().all(|segment| segment.step_range().is_none()));
    assert_eq!(expire(&tier, &mut SsdExpiryCursor::default(), &by_step(5), 30), (0..100).collect::<Vec<Id>>());
    tier.publish(Some(2), StateCounters::default(), Vec::new()).unwrap();
    tier.close().unwrap();
    let (tier, _) = open(&engine, &config(1 << 20, ReopenMode::Resume)).unwrap();
    let even = |header: &RowHeader, _: &[f32]| header.id % 2 == 0;
    let rule = SsdExpiryRule { last_step: 7, row_predicate: Some(&even) };
    assert_eq!(expire(&tier, &mut SsdExpiryCursor::default(), &rule, 30), (100..200).step_by(2).collect::<Vec<Id>>());
    assert_eq!(ids_left(&tier), (101..200).step_by(2).chain([200]).collect::<Vec<Id>>());
}

#[test]
fn predicate_sees_unkept_rows_up_to_the_step() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, _) = open(&engine, &config(1 << 20, ReopenMode::Never)).unwrap();
    let (old, new) = (rows(0..500, 5), rows(500..600, 9));
    append(&tier, &old, |_| false).unwrap();
    append(&tier, &new, |_| false).unwrap();
    let seen = std::cell::RefCell::new(Vec::new());
    let rule = |header: &RowHeader, vector: &[f32]| {
        let row = SsdTestRow { header: *header, vector: vector.to_vec() };
        assert_eq!(row, old[header.id as usize]);
        seen.borrow_mut().push(header.id);
        header.id % 3 == 0
    };
    let rule = SsdExpiryRule { last_step: 5, row_predicate: Some(&rule) };
    let keep = |id: Id| id % 2 == 0;
    let expired = tier.expire(&mut SsdExpiryCursor::default(), &rule, &keep, usize::MAX, None).unwrap();
    assert!(expired.finished);
    assert_eq!(expired.rows, (0..500).filter(|id| id % 6 == 3).map(|id| (id, 1)).collect::<Vec<_>>());
    assert_eq!(seen.into_inner(), (0..500).filter(|id| id % 2 == 1).collect::<Vec<Id>>());
}

#[test]
fn rows_written_behind_the_cursor_are_found() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, _) = open(&engine, &config(4 << 20, ReopenMode::Never)).unwrap();
    append(&tier, &rows(0..1000, 5), |_| false).unwrap();
    let mut cursor = SsdExpiryCursor::default();
    while !tier.expire(&mut cursor, &by_step(5), &|_| true, 1000, None).unwrap().finished {}
    // The pass has visited all records, including those of the open segment, which gets more here.
    append(&tier, &rows(2000..2030, 5), |_| false).unwrap();
    append(&tier, &rows(2030..2060, 6), |_| false).unwrap();
    assert_eq!(expire(&tier, &mut cursor, &by_step(5), 7), (2000..2030).collect::<Vec<Id>>());
    assert_eq!(tier.rows(), 1030);
}

#[test]
fn rows_moved_by_compaction_during_expiry_are_found() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let mut moved_bytes = 0;
    for most in [1, 10, 60, 300] {
        let (tier, _) = open_tuned(&engine, &config(176 << 10, ReopenMode::Discard), TINY).unwrap();
        append(&tier, &rows(0..700, 5), |_| false).unwrap();
        let (mut cursor, mut gone, mut step) = (SsdExpiryCursor::default(), Vec::new(), 0);
        let mut written = std::collections::HashSet::new();
        loop {
            let keep = |id: Id| id % 2 == 0;
            let expired = tier.expire(&mut cursor, &by_step(5), &keep, most, None).unwrap();
            gone.extend(expired.rows.into_iter().map(|(id, _)| id));
            if expired.finished {
                break;
            }
            // Some of the other rows are written repeatedly, so that segments have to be moved.
            step += 1;
            if step < 60 {
                let first = 1000 + step % 7 * 40;
                append(&tier, &rows(first..first + 100, 6), |id| written.contains(&id)).unwrap();
                written.extend(first..first + 100);
                while step % 5 == 0 && compaction::compact_one(&tier.inner) {}
            }
        }
        gone.sort_unstable();
        assert_eq!(gone, (0..700).filter(|id| id % 2 == 1).collect::<Vec<Id>>(), "{most} records a call");
        moved_bytes += tier.stats().compaction_bytes;
        tier.close().unwrap();
    }
    assert!(moved_bytes > 0);
}

#[test]
fn expiry_resumes_after_an_unreadable_row() {
    let faults = FaultEngine::new(Arc::new(MemoryEngine::default()));
    let engine: Arc<dyn IoEngine> = Arc::new(faults.clone());
    let (tier, _) = open(&engine, &config(1 << 20, ReopenMode::Never)).unwrap();
    append(&tier, &rows(0..1500, 5), |_| false).unwrap();
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    let rule = |_: &RowHeader, _: &[f32]| true;
    let rule = SsdExpiryRule { last_step: 5, row_predicate: Some(&rule) };
    let mut cursor = SsdExpiryCursor::default();
    let first = tier.expire(&mut cursor, &rule, &|_| false, 10, None).unwrap();
    assert!((1..=10).contains(&first.rows.len()) && !first.finished, "{first:?}");
    faults.hit_once(IoOperation::Read, 0, IoFault::Flip);
    let error = tier.expire(&mut cursor, &rule, &|_| false, 10, None).unwrap_err();
    assert_eq!(error.kind(), Kind::Corruption, "{error}");
    faults.hit_once(IoOperation::Read, 1, IoFault::Fail(libc::EIO));
    let some = tier.expire(&mut cursor, &rule, &|_| false, 1500, None).unwrap();
    let gone = first.rows.len() + some.rows.len();
    assert!(!some.finished && gone < 1500, "{gone} rows are gone");
    assert_eq!(expire(&tier, &mut cursor, &rule, 10).len(), 1500 - gone);
    assert_eq!(tier.rows(), 0);
}

#[test]
fn read_only_tier_expires_nothing() {
    let faults = FaultEngine::new(Arc::new(MemoryEngine::default()));
    let engine: Arc<dyn IoEngine> = Arc::new(faults.clone());
    let (tier, _) = open(&engine, &config(1 << 20, ReopenMode::Never)).unwrap();
    append(&tier, &rows(0..300, 5), |_| false).unwrap();
    faults.hit_once(IoOperation::Sync, 0, IoFault::Fail(libc::EIO));
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap_err();
    let error = tier.expire(&mut SsdExpiryCursor::default(), &by_step(5), &|_| false, 10, None).unwrap_err();
    assert_eq!(error.kind(), Kind::ReadOnly, "{error}");
    assert_eq!(tier.rows(), 300);
}

#[test]
fn step_rule_reads_no_records() {
    let memory = MemoryEngine::default();
    let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
    let (tier, _) = open(&engine, &config(1 << 20, ReopenMode::Never)).unwrap();
    append(&tier, &rows(0..1000, 5), |_| false).unwrap();
    append(&tier, &rows(1000..1100, 6), |_| false).unwrap();
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    append(&tier, &rows(1100..2000, 7), |_| false).unwrap();
    tier.publish(Some(2), StateCounters::default(), Vec::new()).unwrap();
    tier.close().unwrap();
    let segments = memory.list(&config(1 << 20, ReopenMode::Resume).dir).unwrap();
    for path in segments.iter().filter(|path| path.extension().is_some_and(|suffix| suffix == "seg")) {
        let mut bytes = crate::io::read_file(&memory, path, 1 << 20).unwrap();
        // In the first record, after the header.
        bytes[150] ^= 1;
        crate::io::write_atomically(&memory, path, &bytes).unwrap();
    }
    let (tier, _) = open(&engine, &config(1 << 20, ReopenMode::Resume)).unwrap();
    assert_eq!(scan(&tier).unwrap_err().kind(), Kind::Corruption);
    let cut = by_step(5);
    assert_eq!(expire(&tier, &mut SsdExpiryCursor::default(), &cut, 1000), (0..1000).collect::<Vec<Id>>());
    let rule = |_: &RowHeader, _: &[f32]| true;
    // Only the segment where such rows were stored with others still has a row up to this step.
    let rule = SsdExpiryRule { last_step: 5, row_predicate: Some(&rule) };
    assert_eq!(expire(&tier, &mut SsdExpiryCursor::default(), &rule, 1000), [0; 0]);
    let kept = |_: &RowHeader, _: &[f32]| false;
    let rule = SsdExpiryRule { last_step: 7, row_predicate: Some(&kept) };
    let error = tier.expire(&mut SsdExpiryCursor::default(), &rule, &|_| false, 1_000_000, None).unwrap_err();
    assert_eq!(error.kind(), Kind::Corruption, "{error}");
}

#[test]
fn expiry_slice_reads_few_footers_without_expired_rows() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, _) = open_tuned(&engine, &config(1 << 20, ReopenMode::Never), TINY).unwrap();
    append(&tier, &rows(0..2000, 9), |_| false).unwrap();
    let some = |step| -> Vec<SsdTestRow> { (0..200).flat_map(|at| rows(at * 10..at * 10 + 1, step)).collect() };
    // Each segment has records of the step that expires, and none of them is live.
    append(&tier, &some(5), |_| true).unwrap();
    append(&tier, &some(9), |_| true).unwrap();
    append(&tier, &rows(3000..4000, 5), |_| false).unwrap();
    append(&tier, &rows(3000..4000, 9), |_| true).unwrap();
    settle(&tier);
    let with_footers = {
        let state = tier.inner.view();
        let expires =
            |segment: &&Arc<Segment>| segment.live() > 0 && segment.step_range().is_some_and(|s| s.lowest <= 5);
        state.segments().iter().filter(expires).count()
    };
    let (mut cursor, mut slices) = (SsdExpiryCursor::default(), 1);
    while !tier.expire(&mut cursor, &by_step(5), &|_| false, 1, None).unwrap().finished {
        slices += 1;
    }
    assert!(with_footers > 2 && slices > with_footers, "{slices} slices for {with_footers} segments");
    let (mut cursor, mut slices) = (SsdExpiryCursor::default(), 1);
    while !tier.expire(&mut cursor, &by_step(5), &|_| false, 1 << 20, None).unwrap().finished {
        slices += 1;
    }
    assert_eq!(slices, 1);
}

#[test]
fn repeated_pass_reaches_every_record() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, _) = open(&engine, &config(4 << 20, ReopenMode::Never)).unwrap();
    append(&tier, &rows(0..3000, 5), |_| false).unwrap();
    append(&tier, &rows(3000..3100, 6), |_| false).unwrap();
    settle(&tier);
    let lives = |_: &RowHeader, _: &[f32]| false;
    let (mut cursor, mut gone) = (SsdExpiryCursor::default(), Vec::new());
    // The newer rule matches more rows than the older one, and the pass has already started.
    tier.expire(&mut cursor, &SsdExpiryRule { last_step: 5, row_predicate: Some(&lives) }, &|_| false, 1500, None)
        .unwrap();
    for _ in 0..3100 / 50 * 2 {
        cursor.repeat_pass();
        let expired = tier.expire(&mut cursor, &by_step(5), &|_| false, 200, None).unwrap();
        gone.extend(expired.rows.into_iter().map(|(id, _)| id));
    }
    gone.sort_unstable();
    assert_eq!(gone, (0..3000).collect::<Vec<Id>>());
    assert_eq!(expire(&tier, &mut cursor, &by_step(5), 100), [0; 0]);
}

#[test]
fn fully_expired_segments_go_first() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, _) = open(&engine, &config(4 << 20, ReopenMode::Never)).unwrap();
    // Each publish seals the open segment. Only some of the first segments' rows expire.
    for (at, ids) in [0..700, 700..1400].into_iter().enumerate() {
        let mixed: Vec<SsdTestRow> = ids.flat_map(|id| rows(id..id + 1, if id % 2 == 0 { 5 } else { 9 })).collect();
        append(&tier, &mixed, |_| false).unwrap();
        tier.publish(Some(at as u64 + 1), StateCounters::default(), Vec::new()).unwrap();
    }
    append(&tier, &rows(2000..3000, 5), |_| false).unwrap();
    tier.publish(Some(3), StateCounters::default(), Vec::new()).unwrap();
    append(&tier, &rows(3000..3100, 5), |_| false).unwrap();
    let (mut cursor, mut gone) = (SsdExpiryCursor::default(), Vec::new());
    let keep = |id: Id| id == 2500;
    loop {
        let expired = tier.expire(&mut cursor, &by_step(5), &keep, 100, None).unwrap();
        gone.extend(expired.rows.into_iter().map(|(id, _)| id));
        if expired.finished {
            break;
        }
    }
    assert!(gone[..999].iter().all(|id| (2000..3000).contains(id)), "they lie behind the others: {gone:?}");
    gone.sort_unstable();
    let expected = (0..1400).step_by(2).chain(2000..2500).chain(2501..3100);
    assert_eq!(gone, expected.collect::<Vec<Id>>());
    // The additional pass finds the row that stayed.
    cursor.repeat_pass();
    assert_eq!(expire(&tier, &mut cursor, &by_step(5), 100), [2500]);
}

/// The rows that a tier has, and those that were passed to a sink since the last check.
struct SinkCheck {
    rows: BTreeMap<Id, SsdTestRow>,
    taken: Vec<SsdTestRow>,
}

impl SinkCheck {
    fn new(rows: &[SsdTestRow]) -> Self {
        Self { rows: rows.iter().map(|row| (row.header.id, row.clone())).collect(), taken: Vec::new() }
    }

    fn evict(&mut self, tier: &SsdTier, rows: u64) -> Vec<Id> {
        let ids = tier.evict(rows, &settle_and_remove(tier), Some(&mut take_into(&mut self.taken))).unwrap();
        self.check(&ids);
        ids
    }

    fn expire(&mut self, tier: &SsdTier, cursor: &mut SsdExpiryCursor, most: usize) -> SsdExpiredRows {
        let (rule, keep) = (by_step(5), settle_and_remove(tier));
        let expired = tier.expire(cursor, &rule, &keep, most, Some(&mut take_into(&mut self.taken))).unwrap();
        self.check(&expired.rows.iter().map(|(id, _)| *id).collect::<Vec<Id>>());
        expired
    }

    /// Checks that the sink got the current rows of exactly `ids`, each once, and removes them from the rows.
    fn check(&mut self, ids: &[Id]) {
        assert_eq!(self.taken.iter().map(|row| row.header.id).collect::<Vec<Id>>(), ids);
        for row in self.taken.drain(..) {
            assert_eq!(self.rows.remove(&row.header.id), Some(row), "once, with its current contents");
        }
    }
}

/// Keeps no row. Waits for tombstones of the previous segments to be written, so that a failed write ends the removal.
fn settle_and_remove(tier: &SsdTier) -> impl Fn(Id) -> bool {
    |_| {
        settle(tier);
        false
    }
}

/// A sink that adds the rows to `taken`.
fn take_into(taken: &mut Vec<SsdTestRow>) -> impl FnMut(Vec<RowHeader>, Vec<f32>) {
    |headers, vectors| {
        assert_eq!(vectors.len(), headers.len() * DIM);
        let rows = headers.into_iter().zip(vectors.chunks_exact(DIM));
        taken.extend(rows.map(|(header, vector)| SsdTestRow { header, vector: vector.to_vec() }));
    }
}

#[test]
fn sink_gets_current_rows_of_entered_segments() {
    for publishes in [false, true] {
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let (tier, _) = open(&engine, &config(4 << 20, ReopenMode::Never)).unwrap();
        let first = rows(0..3000, 5);
        append(&tier, &first, |_| false).unwrap();
        if publishes {
            tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
        }
        let mut check = SinkCheck::new(&first);
        let mut cursor = SsdExpiryCursor::default();
        assert_eq!(check.evict(&tier, 10).len(), 10);
        check.expire(&tier, &mut cursor, 20);
        // Both have entered the first segment, in which these rows are next.
        let next: Vec<Id> = check.rows.keys().copied().take(120).collect();
        let newer = |ids: &[Id], last_step| -> Vec<SsdTestRow> {
            let mut newer: Vec<SsdTestRow> = ids.iter().map(|&id| SsdTestRow::new(id, 2)).collect();
            for row in &mut newer {
                row.header.last_step = last_step;
            }
            newer
        };
        for overwritten in [newer(&next[..40], 5), newer(&next[40..80], 9)] {
            append(&tier, &overwritten, |_| true).unwrap();
            check.rows.extend(overwritten.into_iter().map(|row| (row.header.id, row)));
        }
        tier.remove(&next[80..]).unwrap();
        next[80..].iter().for_each(|id| assert!(check.rows.remove(id).is_some()));
        assert_eq!(check.evict(&tier, 60).len(), 60);
        while !check.expire(&tier, &mut cursor, 70).finished {}
        assert_eq!(check.rows.keys().copied().collect::<Vec<Id>>(), next[40..80]);
        assert_eq!(ids_left(&tier), next[40..80]);
        assert_eq!(check.evict(&tier, 1000).len(), 40);
        assert_eq!(tier.rows(), 0);
    }
}

#[test]
fn sink_gets_exactly_the_removed_rows_if_a_write_fails() {
    // Either tombstones fail to be written, or their second segment fails to be created, amid a segment's rows.
    for (operation, passing) in [(IoOperation::Write, 0), (IoOperation::Create, 1)] {
        for evicts in [false, true] {
            let faults = FaultEngine::new(Arc::new(MemoryEngine::default()));
            let engine: Arc<dyn IoEngine> = Arc::new(faults.clone());
            let (tier, _) = open(&engine, &config(4 << 20, ReopenMode::Never)).unwrap();
            let all = rows(0..6000, 5);
            append(&tier, &all, |_| false).unwrap();
            tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
            settle(&tier);
            let mut check = SinkCheck::new(&all);
            faults.hit_once(operation, passing, IoFault::Fail(libc::EIO));
            if evicts {
                check.evict(&tier, 6000);
            } else {
                assert!(!check.expire(&tier, &mut SsdExpiryCursor::default(), 6000).finished);
            }
            assert!(!faults.will_hit());
            assert!((1..6000).contains(&check.rows.len()), "{} of 6000 rows are left", check.rows.len());
            assert_eq!(ids_left(&tier), check.rows.keys().copied().collect::<Vec<Id>>());
            let mut sink = |_, _| panic!("no row is removed");
            let error = tier.evict(10, &|_| false, Some(&mut sink)).unwrap_err();
            assert_eq!(error.kind(), Kind::ReadOnly, "{error}");
            let error = tier.expire(&mut SsdExpiryCursor::default(), &by_step(5), &|_| false, 10, Some(&mut sink));
            assert_eq!(error.unwrap_err().kind(), Kind::ReadOnly);
        }
    }
}
