//! The live records found in a segment are compared with the tier's count for it. A row that cannot be found is
//! corruption, and is never treated as a row that was not trained.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::config::ReopenMode;
use embcache::io::{AlignedBuf, IoEngine, IoOpenMode, MemoryEngine, read_file};
use embcache::ssd::{LinkedSegments, SsdTier, StateCounters};
use embcache::types::Id;
use embcache::{Error, Kind, Result};
use embcache_tests::ssd::{Versions, append, check, config, fetch, identity, layout, open};
use embcache_tests::{tells_of_damage, watched};

const DIR: &str = "/embcache-counts/tier";
const CAP: u64 = 1 << 20;

fn segments(engine: &dyn IoEngine) -> Vec<PathBuf> {
    let mut files = engine.list(Path::new(DIR)).unwrap();
    files.retain(|path| path.extension().is_some_and(|suffix| suffix == "seg"));
    files.sort();
    files
}

fn word(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

/// The position of the latest record of `id`: its file, and its bytes in it. The row must have been written once.
fn place_of(engine: &dyn IoEngine, id: Id) -> (PathBuf, std::ops::Range<usize>) {
    for path in segments(engine) {
        let bytes = read_file(engine, &path, 8 << 20).unwrap();
        let (header, record) = (word(&bytes, 8), word(&bytes, 16));
        // The trailer is the last 72 bytes of a sealed segment, and contains the number of records.
        let trailer = bytes.len().saturating_sub(72);
        let count =
            if bytes[trailer..].starts_with(b"EMBCFOOT") { word(&bytes, trailer + 8) & 0xff_ffff } else { usize::MAX };
        let records = (header..).step_by(record).take(count).take_while(|at| at + record <= bytes.len());
        let holds_rows = bytes[12] == 1;
        let found = records.into_iter().find(|at| holds_rows && bytes[at + 4..at + 12] == id.to_le_bytes());
        if let Some(at) = found {
            return (path, at..at + record);
        }
    }
    panic!("row {id} is in no segment");
}

/// Changes a file without the engine's knowledge, like a failing disk.
fn change(engine: &dyn IoEngine, path: &Path, with: impl FnOnce(&mut [u8])) {
    let mut bytes = read_file(engine, path, 8 << 20).unwrap();
    with(&mut bytes);
    let mut whole = AlignedBuf::zeroed(bytes.len());
    whole.copy_from_slice(&bytes);
    engine.open(path, IoOpenMode::Write).unwrap().write_at(0, &whole).unwrap();
}

/// Flips one bit of the id in the record of `id`. Returns the file.
fn flip_id(engine: &dyn IoEngine, id: Id) -> PathBuf {
    let (path, place) = place_of(engine, id);
    change(engine, &path, |bytes| bytes[place.start + 5] ^= 0x40);
    path
}

/// Replaces the record of `id` by the record of `other`, like a write to a wrong position. Returns the file.
fn replace(engine: &dyn IoEngine, id: Id, other: Id) -> PathBuf {
    let (from, record) = place_of(engine, other);
    let whole = read_file(engine, &from, 8 << 20).unwrap()[record].to_vec();
    let (path, place) = place_of(engine, id);
    change(engine, &path, |bytes| bytes[place].copy_from_slice(&whole));
    path
}

/// A published tier, each row of which was written once, and `unread` rows that are not in files yet.
fn tier(engine: &Arc<dyn IoEngine>, rows: Id, unread: Id) -> (SsdTier, Versions) {
    let (tier, _) = open(engine, &config(Path::new(DIR), CAP, ReopenMode::Never)).unwrap();
    let mut held = Versions::new();
    append(&tier, &(0..rows).collect::<Vec<Id>>(), 1, &mut held).unwrap();
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    append(&tier, &(rows..rows + unread).collect::<Vec<Id>>(), 2, &mut held).unwrap();
    (tier, held)
}

/// A way to read all rows. Returns their number.
type ReadAll = fn(&SsdTier, &Arc<dyn IoEngine>) -> Result<usize>;

/// Every way to read all rows of a tier.
const WAYS: [(&str, ReadAll); 4] = [
    ("scan", |tier, _| {
        let mut rows = 0;
        tier.scan(&mut |_| {
            rows += 1;
            Ok(())
        })?;
        Ok(rows)
    }),
    ("scan_since", |tier, _| {
        let mut rows = 0;
        tier.scan_since(1, &mut |_| {
            rows += 1;
            Ok(())
        })?;
        Ok(rows)
    }),
    ("moment", |tier, _| {
        let moment = tier.snapshot(&mut std::iter::empty(), 0, Box::new(|_| {}))?;
        let mut rows = 0;
        moment.for_each_row(&mut |_| {
            rows += 1;
            Ok(())
        })?;
        Ok(rows)
    }),
    ("segments", |tier, engine| {
        let held = tier.pin_segments()?;
        let dir = PathBuf::from(format!("/linked/{}", engine.list(Path::new("/linked")).map_or(0, |made| made.len())));
        let path_of = |serial: u64| dir.join(format!("{serial}.seg"));
        engine.create_dir_all(&dir)?;
        held.link_to(&**engine, &path_of)?;
        let table = (identity(), layout());
        let files = LinkedSegments::open(Arc::clone(engine), table, held.set(), path_of, dir.join("names"))?;
        let mut rows = 0;
        files.read(&mut |_| {
            rows += 1;
            Ok(())
        })?;
        Ok(rows)
    }),
];

fn check_refused(error: &Error, path: &Path, what: &str) {
    assert_eq!(error.kind(), Kind::Corruption, "{what}: {error}");
    assert!(tells_of_damage(error) && error.path() == Some(path), "{what}: {error}");
}

/// A kind of corruption of row 77 on disk. Returns the corrupted file.
type Damage = fn(&dyn IoEngine) -> PathBuf;

const DAMAGE: [(&str, Damage); 2] =
    [("an id that lost a bit", |engine| flip_id(engine, 77)), ("another record", |engine| replace(engine, 77, 1234))];

#[test]
fn no_way_to_read_all_rows_leaves_one_out_whose_record_is_damaged() {
    for (damage, harm) in DAMAGE {
        for (way, read) in WAYS {
            let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
            let (tier, held) = tier(&engine, 2000, 30);
            assert_eq!(read(&tier, &engine).unwrap(), held.len(), "{way}");
            let path = harm(&*engine);
            let what = format!("{way} with {damage}");
            let error = read(&tier, &engine).map(|_| ()).unwrap_err();
            let named = if way == "segments" { error.path().expect("a path").to_owned() } else { path.clone() };
            check_refused(&error, &named, &what);
            check_refused(&fetch(&tier, &[77]).unwrap_err(), &path, &what);
        }
    }
}

#[test]
fn corrupt_obsolete_record_has_no_effect() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, mut held) = tier(&engine, 2000, 30);
    flip_id(&*engine, 77);
    append(&tier, &[77], 3, &mut held).unwrap();
    for (way, read) in WAYS.into_iter().filter(|(way, _)| *way != "segments") {
        assert_eq!(read(&tier, &engine).unwrap(), held.len(), "{way}");
    }
}

#[test]
fn rows_changed_during_scan_are_not_corruption() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, mut held) = tier(&engine, 3000, 30);
    let (mut met, mut version) = (0, 3);
    tier.scan(&mut |row| {
        met += 1;
        if met % 300 == 0 {
            // Rows are removed from segments that were read, that are being read, and that are not read yet.
            let ids: Vec<Id> = (0..3000).filter(|id| (id + met) % 41 == 0 && held.contains_key(id)).collect();
            append(&tier, &ids, version, &mut held)?;
            let gone: Vec<Id> = (0..3000).filter(|id| (id + met) % 503 == 0 && held.contains_key(id)).collect();
            tier.remove(&gone)?;
            held.retain(|id, _| !gone.contains(id));
            version += 1;
        }
        let _ = row;
        Ok(())
    })
    .unwrap();
    assert!(version > 5);
    check(&tier, &held, 0..3040);
    let mut cleared = false;
    tier.scan(&mut |_| if std::mem::replace(&mut cleared, true) { Ok(()) } else { tier.clear() }).unwrap();
    assert_eq!(tier.rows(), 0);
}

/// Compaction leaves a segment with corrupted ids in place. The error of the full tier names that segment.
#[test]
fn compaction_skips_segment_with_corrupt_ids() {
    watched(String::new, || {
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let (tier, _) = open(&engine, &config(Path::new(DIR), CAP, ReopenMode::Never)).unwrap();
        let rows = tier.capacity_rows() as Id;
        let mut held = Versions::new();
        append(&tier, &(0..rows).collect::<Vec<Id>>(), 1, &mut held).unwrap();
        tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
        // One row in each segment of the first half is corrupted.
        let mut damaged: Vec<PathBuf> = Vec::new();
        let mut lost: Vec<Id> = Vec::new();
        for id in (0..rows / 2).step_by(20) {
            let (path, _) = place_of(&*engine, id);
            if !damaged.contains(&path) {
                damaged.push(flip_id(&*engine, id));
                lost.push(id);
            }
        }
        assert!(damaged.len() > 3, "{damaged:?}");
        let mut refused = None;
        for version in 2..400 {
            let some: Vec<Id> =
                (0..rows).filter(|id| (id + i64::from(version)) % 9 != 0 && !lost.contains(id)).collect();
            if let Err(error) = append(&tier, &some, version, &mut held.clone()) {
                refused = Some(error);
                break;
            }
            held.extend(some.into_iter().map(|id| (id, version)));
        }
        if let Some(error) = refused {
            let path = error.path().expect("a path").to_owned();
            assert!(damaged.contains(&path) && error.to_string().contains("cannot be read"), "{error}");
        }
        for id in &lost {
            let error = fetch(&tier, &[*id]).expect_err("its record is damaged");
            assert_eq!(error.kind(), Kind::Corruption);
        }
        let whole: Vec<Id> = (0..rows).filter(|id| !lost.contains(id)).collect();
        let found = fetch(&tier, &whole).unwrap();
        assert!(whole.iter().zip(found).all(|(id, found)| found.is_some_and(|found| found >= held[id])));
        tier.scan(&mut |_| Ok(())).expect_err("rows cannot be found");
    });
}
