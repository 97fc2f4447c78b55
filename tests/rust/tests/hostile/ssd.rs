//! The files of an SSD tier: segments and states.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use embcache::Kind;
use embcache::config::{ReopenMode, SsdConfig};
use embcache::io::{IoEngine, MemoryEngine};
use embcache::rows::RowHeader;
use embcache::ssd::{RowExpiryPredicate, SsdExpiryCursor, SsdExpiryRule, SsdTier, StateCounters};
use embcache::types::{Id, hash_id};
use embcache_tests::ssd::{DIM, Versions, append, config, header, place, vector};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use serde_json::Value;

use crate::mutate::{Files, apply, engine_of, files, steps};
use crate::{check_error, fuzz};

pub(crate) const IDS: Id = 300;
const DIR: &str = "/t";

fn open(engine: &Arc<dyn IoEngine>, reopen: ReopenMode, resume_token: Option<u64>) -> embcache::Result<SsdTier> {
    let config = SsdConfig { resume_commit_id: resume_token, ..config(Path::new(DIR), 512 << 10, reopen) };
    embcache_tests::ssd::open(engine, &config).map(|(tier, _)| tier)
}

/// The files of a tier with two states, dead records and tombstones.
pub(crate) fn seed() -> &'static Files {
    static SEED: OnceLock<Files> = OnceLock::new();
    SEED.get_or_init(|| {
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let tier = open(&engine, ReopenMode::Never, None).unwrap();
        let mut held = Versions::new();
        append(&tier, &(0..IDS).collect::<Vec<Id>>(), 1, &mut held).unwrap();
        tier.publish(Some(1), StateCounters { step: 3, epoch: 1 }, Vec::new()).unwrap();
        append(&tier, &(0..IDS).step_by(3).collect::<Vec<Id>>(), 2, &mut held).unwrap();
        tier.remove(&(0..IDS).step_by(7).collect::<Vec<Id>>()).unwrap();
        tier.publish(Some(2), StateCounters { step: 5, epoch: 2 }, Vec::new()).unwrap();
        tier.close().unwrap();
        let mut files = files(&*engine, Path::new(DIR));
        files.retain(|path, _| path.file_name().is_some_and(|name| name != "lock"));
        assert!(files.len() >= 5, "{:?}", files.keys());
        files
    })
}

fn is(path: &Path, suffix: &str) -> bool {
    path.extension().is_some_and(|found| found == suffix)
}

/// Returns the start and the end of the JSON in a state file.
fn json(bytes: &[u8]) -> Option<(usize, usize)> {
    let start = bytes.iter().position(|&byte| byte == b'\n')? + 1;
    bytes.starts_with(b"embcache").then_some((start, bytes.len()))
}

pub(crate) fn le(bytes: &[u8], at: usize) -> usize {
    bytes.get(at..at + 4).map_or(0, |word| u32::from_le_bytes(word.try_into().unwrap()) as usize)
}

fn set_crc(bytes: &mut [u8], over: std::ops::Range<usize>, at: usize) {
    if over.start <= over.end && over.end <= bytes.len() && at + 4 <= bytes.len() {
        let crc = crc32c::crc32c(&bytes[over]);
        bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Binds a record, whose checksum was just computed, to its position, by the table and the segment in the header.
fn bind(bytes: &mut [u8], at: usize, number: u32) {
    let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let first = hash_id((long(28) ^ long(20).rotate_left(32)) as Id) as u32;
    let bound = le(bytes, at) as u32 ^ first.wrapping_add(number.wrapping_mul(0x9e37_79b1));
    bytes[at..at + 4].copy_from_slice(&bound.to_le_bytes());
}

/// The layout of a segment's file.
struct Layout {
    header: usize,
    record: usize,
    /// Bytes of an entry of the footer.
    entry: usize,
    /// Bytes of an entry's `write_seq`.
    seq: usize,
    count: usize,
    trailer: usize,
}

impl Layout {
    fn of(bytes: &[u8]) -> Option<Self> {
        const TRAILER: usize = 72;
        let (header, record) = (le(bytes, 8), le(bytes, 16).max(12));
        if header < 4 || header + TRAILER > bytes.len() {
            return None;
        }
        let trailer = bytes.len() - TRAILER;
        let width = |value: u64| (u64::BITS - value.leading_zeros()).div_ceil(8) as usize;
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let count = le(bytes, trailer + 8) & 0xff_ffff;
        let seq = width(long(trailer + 24).saturating_sub(long(trailer + 16)));
        let entry = 8 + seq + usize::from(bytes[trailer + 11]) + width(count.saturating_sub(1) as u64);
        // 255 means that entries have no bytes of last steps.
        let step = usize::from(bytes[trailer + 56]);
        let entry = entry + if step == 255 { 0 } else { step };
        let count = count.min((trailer - header) / (record + entry));
        Some(Self { header, record, entry, seq, count, trailer })
    }

    fn entries(&self) -> std::ops::Range<usize> {
        let begin = self.header + self.count * self.record;
        begin..begin + self.count * self.entry
    }
}

/// Fixes the checksums of a segment and, with `sorted`, the order of its entries too.
pub(crate) fn reseal_segment(bytes: &mut [u8], sorted: bool) {
    let Some(layout) = Layout::of(bytes) else { return };
    let Layout { header, record, entry, seq, trailer, .. } = layout;
    set_crc(bytes, 0..header - 4, header - 4);
    for number in 0..layout.count {
        let at = header + number * record;
        set_crc(bytes, at + 4..at + record, at);
        bind(bytes, at, number as u32);
    }
    let entries = layout.entries();
    if sorted {
        let mut all: Vec<Vec<u8>> = bytes[entries.clone()].chunks(entry).map(<[u8]>::to_vec).collect();
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        all.sort_by_key(|entry| (hash_id(number(&entry[..8]) as Id), number(&entry[8..8 + seq])));
        bytes[entries.clone()].copy_from_slice(&all.concat());
    }
    set_crc(bytes, entries, trailer + 64);
    set_crc(bytes, trailer..trailer + 68, trailer + 68);
}

/// A state file around this JSON.
pub(crate) fn state_file(body: &[u8]) -> Vec<u8> {
    let line = format!("embcache-ssd-state 1 {:08x} {} 0\n", crc32c::crc32c(body), body.len());
    [line.as_bytes(), body].concat()
}

/// Fixes every checksum that covers bytes of another file.
fn reseal(files: &mut Files, changed: &[std::path::PathBuf], sorted: bool) {
    for path in changed.iter().filter(|path| is(path, "seg")) {
        if let Some(bytes) = files.get_mut(path) {
            reseal_segment(bytes, sorted);
        }
    }
    let segments: Vec<(u64, usize, usize)> = files
        .iter()
        .filter(|(path, bytes)| is(path, "seg") && bytes.len() >= 4)
        .filter_map(|(path, bytes)| {
            let serial = u64::from_str_radix(path.file_stem()?.to_str()?, 16).ok()?;
            Some((serial, bytes.len(), le(bytes, bytes.len() - 4)))
        })
        .collect();
    for (_, bytes) in files.iter_mut().filter(|(path, _)| is(path, "state")) {
        let Some((start, end)) = json(bytes) else { continue };
        let Ok(mut state) = serde_json::from_slice::<Value>(&bytes[start..end]) else { continue };
        if let Some(named) = state.get_mut("segments").and_then(Value::as_array_mut) {
            for segment in named {
                let serial = segment.get("n").and_then(Value::as_u64);
                if let Some((_, len, crc)) = segments.iter().find(|known| Some(known.0) == serial)
                    && changed.iter().any(|path| is(path, "seg"))
                {
                    segment["b"] = (*len).into();
                    segment["c"] = (*crc).into();
                }
            }
        }
        *bytes = state_file(&serde_json::to_vec(&state).unwrap());
    }
}

/// Opens the tier of these files, and uses it in every way. A row that was never written fails unless `resealed`.
pub(crate) fn use_it(files: &Files, token: Option<u64>, resealed: bool) -> TestCaseResult {
    let engine = engine_of(files);
    if let Err(error) = SsdTier::published_commit_ids(Path::new(DIR), &*engine) {
        check_error(&error)?;
    }
    let tier = match open(&engine, ReopenMode::Resume, token) {
        Ok(tier) => tier,
        Err(error) => {
            check_error(&error)?;
            // A rejected directory can always be discarded.
            let again = open(&engine, ReopenMode::Discard, None);
            prop_assert!(again.is_ok(), "{:?}", again.err());
            return Ok(());
        }
    };
    let ids: Vec<Id> = (-5..IDS + 5).chain([i64::MIN, i64::MAX]).collect();
    for &id in &ids {
        let mut row = (RowHeader::default(), vec![f32::NAN; DIM]);
        let fetched = tier.fetch(vec![(id, place(&mut row))]).wait();
        let (found, floats) = row;
        match fetched {
            Ok(missing) if missing.is_empty() => {
                prop_assert_eq!(found.id, id);
                if !resealed {
                    let written = (header(id, found.count), vector(id, found.count));
                    prop_assert_eq!((found, floats), written, "a row that was never written is served");
                }
            }
            Ok(_) => {}
            Err(error) => check_error(&error)?,
        }
    }
    let mut rows = 0;
    let scanned = tier.scan(&mut |_| {
        rows += 1;
        Ok(())
    });
    match scanned {
        Ok(()) => prop_assert!(rows <= tier.rows()),
        Err(error) => check_error(&error)?,
    }
    let mut maybe = vec![false; ids.len()];
    tier.maybe_contains(&ids, &mut maybe);
    let mut held: Versions = ids.iter().zip(maybe).filter(|(_, maybe)| *maybe).map(|(id, _)| (*id, 1)).collect();
    for &id in &ids {
        if let Err(error) = append(&tier, &[id], 9, &mut held) {
            check_error(&error)?;
        }
    }
    let spare = |header: &RowHeader, _: &[f32]| header.id % 2 == 0;
    let bury = |last_step, by_row: Option<&RowExpiryPredicate<'_>>| {
        tier.expire(
            &mut SsdExpiryCursor::default(),
            &SsdExpiryRule { last_step, row_predicate: by_row },
            &|id| id < 50,
            usize::MAX,
            None,
        )
        .map(|_| ())
    };
    let steps: [embcache::Result<()>; 6] = [
        bury(u64::MAX / 2, None),
        bury(u64::MAX, Some(&spare)),
        tier.evict(50, &|_| false, None).map(|_| ()),
        tier.remove(&ids[..20]),
        tier.publish(Some(u64::MAX), StateCounters::default(), Vec::new()),
        tier.close(),
    ];
    for error in steps.into_iter().filter_map(Result::err) {
        check_error(&error)?;
    }
    drop(tier);
    match open(&engine, ReopenMode::Resume, None) {
        Ok(_) => {}
        Err(error) => check_error(&error)?,
    }
    Ok(())
}

/// The kind of error of a resume of these files.
pub(crate) fn refusal(files: &Files) -> Option<Kind> {
    open(&engine_of(files), ReopenMode::Resume, None).err().map(|error| error.kind())
}

/// The files after a resume.
pub(crate) fn files_after_use(before: &Files) -> Files {
    let engine = engine_of(before);
    open(&engine, ReopenMode::Resume, None).unwrap().close().unwrap();
    files(&*engine, Path::new(DIR))
}

#[test]
fn changed_tier_is_rejected_or_serves_written_rows() {
    fuzz(&(steps(), prop::option::of(0..4_u64)), |(steps, token)| {
        let mut files = seed().clone();
        apply(&mut files, &steps, json);
        use_it(&files, token, false)
    });
}

/// The files are changed, and their checksums are fixed.
#[test]
fn resealed_tier_is_rejected_or_works_without_panic() {
    fuzz(&(steps(), prop::option::of(0..4_u64), any::<bool>()), |(steps, token, sorted)| {
        let mut files = seed().clone();
        let changed = apply(&mut files, &steps, json);
        reseal(&mut files, &changed, sorted);
        use_it(&files, token, true)
    });
}

#[test]
fn a_sweep_of_a_tier_whose_footers_name_a_record_twice_is_refused() {
    let segments: Vec<_> = seed().keys().filter(|path| is(path, "seg")).cloned().collect();
    let mut refused = 0;
    for path in segments {
        let mut files = seed().clone();
        let bytes = files.get_mut(&path).unwrap();
        let layout = Layout::of(bytes).unwrap();
        let (entries, entry) = (layout.entries(), layout.entry);
        // The number of the record is the last byte of an entry if there are fewer than 257 records, or the last two.
        let number = if layout.count > 256 { 2 } else { 1 };
        for at in (entries.start + entry..entries.end).step_by(entry) {
            bytes.copy_within(at - number..at, at + entry - number);
        }
        reseal(&mut files, &[path], false);
        let Ok(tier) = open(&engine_of(&files), ReopenMode::Resume, None) else { continue };
        let dies = |_: &RowHeader, _: &[f32]| true;
        let dying = SsdExpiryRule { last_step: u64::MAX, row_predicate: Some(&dies) };
        if let Err(error) = tier.expire(&mut SsdExpiryCursor::default(), &dying, &|_| false, usize::MAX, None) {
            let of_another = error.to_string().contains("the record's id");
            assert!(error.kind() == Kind::Corruption && of_another, "{error}");
            refused += 1;
        }
    }
    assert!(refused > 0);
}

#[test]
fn a_field_that_no_state_has_is_refused() {
    for object in ["", "/identity", "/counters", "/segments/0"] {
        let mut files = seed().clone();
        for bytes in files.iter_mut().filter(|(path, _)| is(path, "state")).map(|(_, bytes)| bytes) {
            let (start, end) = json(bytes).unwrap();
            let mut value: Value = serde_json::from_slice(&bytes[start..end]).unwrap();
            value.pointer_mut(object).unwrap()["other"] = 1.into();
            *bytes = state_file(&serde_json::to_vec(&value).unwrap());
        }
        assert_eq!(refusal(&files), Some(Kind::Corruption), "{object}");
    }
}

#[test]
fn the_seed_is_resumed_and_resealing_changes_nothing() {
    let mut files = seed().clone();
    let all: Vec<_> = files.keys().cloned().collect();
    reseal(&mut files, &all, true);
    for token in [1, 2] {
        let tier = open(&engine_of(&files), ReopenMode::Resume, Some(token)).unwrap();
        assert!(tier.rows() > 200);
    }
    let segments: Vec<_> = seed().iter().filter(|(path, _)| is(path, "seg")).collect();
    assert!(segments.iter().all(|(path, bytes)| files[*path] == **bytes));
    assert_eq!(
        open(&engine_of(&Files::new()), ReopenMode::Resume, Some(1)).err().map(|error| error.kind()),
        Some(Kind::State)
    );
}
