//! The cap: rows that fit, rows that do not fit, and a full disk.

use std::path::Path;
use std::sync::Arc;

use embcache::Kind;
use embcache::config::{OptimizerKind, ReopenMode};
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, MemoryEngine};
use embcache::rows::{RowHeader, RowRef};
use embcache::ssd::{FetchBatch, ShardIdentity, SsdTier, StateCounters};
use embcache::types::{Id, hash_id};
use embcache_tests::ssd::{DIM, Versions, append, check, config, fetch, header, open, place, vector};
use embcache_tests::watched;

const DIR: &str = "/embcache-room/tier";

/// Every row of the capacity fits and can be rewritten. One more row is rejected before any row of its batch is stored.
#[test]
fn capacity_fits_exactly_and_one_more_row_is_rejected() {
    for cap in [256 << 10, 1 << 20] {
        let memory = MemoryEngine::default();
        let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
        let (tier, _) = open(&engine, &config(Path::new(DIR), cap, ReopenMode::Never)).unwrap();
        let rows = tier.capacity_rows() as Id;
        let mut held = Versions::new();
        let ids: Vec<Id> = (0..rows).collect();
        append(&tier, &ids, 1, &mut held).unwrap();
        let error = append(&tier, &[rows, rows + 1], 1, &mut held.clone()).unwrap_err();
        assert_eq!(error.kind(), Kind::Capacity);
        assert!(error.to_string().contains("item") && error.to_string().contains(&rows.to_string()), "{error}");
        assert_eq!(tier.rows(), rows as u64);
        for version in 2..8 {
            let some: Vec<Id> = ids.iter().copied().filter(|id| id % 7 != i64::from(version)).collect();
            append(&tier, &some, version, &mut held).unwrap();
            assert!(memory.live_bytes() <= cap);
        }
        tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
        append(&tier, &ids, 9, &mut held).unwrap();
        assert!(tier.stats().has_lost_flush, "a full table has no room for a state and its successor");
        check(&tier, &held, -5..rows + 5);
        tier.remove(&[0]).unwrap();
        append(&tier, &[rows], 1, &mut Versions::new()).unwrap();
    }
}

/// Every row of the capacity fits, for any size of the segments that publishes left.
#[test]
fn capacity_fits_with_small_published_segments() {
    for (cap, dim, most_at_once) in [
        (144 << 10, 8, 7),
        (144 << 10, 8, 1),
        (208 << 10, 8, 7),
        (512 << 10, 100, 3),
        (1 << 20, 8, 61),
        (1 << 20, 740, 3),
        (1 << 20, 740, 2),
        (1 << 20, 2000, 1),
        (3 << 20, 8, 190),
        (3 << 20, 1000, 4),
    ] {
        let what = |at: &dyn std::fmt::Display| format!("{at}, {cap} bytes for rows of {dim}, {most_at_once} at once");
        let memory = MemoryEngine::default();
        let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
        let kind = OptimizerKind::RowWiseAdagrad;
        let identity = ShardIdentity::of(&embcache_tests::config(dim, kind, 1));
        let config = config(Path::new(DIR), cap, ReopenMode::Never);
        let (tier, _) = SsdTier::open(&config, &identity, kind.layout(dim), engine.clone()).unwrap();
        let rows = tier.capacity_rows() as Id;
        let (mut held, mut token) = (Versions::new(), 0);
        let mut write = |ids: &[Id], version: u32| {
            let vector: Vec<Vec<f32>> = ids.iter().map(|id| vec![(*id * 1000) as f32 + version as f32; dim]).collect();
            let headers: Vec<RowHeader> = ids.iter().map(|id| header(*id, version)).collect();
            let rows: Vec<RowRef<'_>> =
                headers.iter().zip(&vector).map(|(header, vector)| RowRef { header, vector }).collect();
            let known: Vec<bool> = ids.iter().map(|id| held.contains_key(id)).collect();
            tier.append(&rows, &known).unwrap_or_else(|error| panic!("{}: {error}", what(&held.len())));
            held.extend(ids.iter().map(|id| (*id, version)));
            token += 1;
            tier.publish(Some(token), StateCounters::default(), Vec::new()).unwrap();
            assert!(memory.live_bytes() <= cap, "{}: {} bytes", what(&token), memory.live_bytes());
        };
        let mut next = 0;
        while next < rows {
            let many = (1 + (hash_id(next) % most_at_once) as Id).min(rows - next);
            write(&(next..next + many).collect::<Vec<_>>(), 1);
            next += many;
        }
        for version in 2..60 {
            let chosen = |id: &Id| hash_id(id ^ (version << 20)).is_multiple_of(40);
            write(&(0..rows).filter(chosen).collect::<Vec<_>>(), version as u32);
        }
        drop(tier);
        let config = embcache_tests::ssd::config(Path::new(DIR), cap, ReopenMode::Resume);
        let (tier, _) = SsdTier::open(&config, &identity, kind.layout(dim), engine.clone()).unwrap();
        let mut scanned = Versions::new();
        tier.scan(&mut |row| {
            let (id, version) = (row.header.id, row.header.count);
            let expected = vec![(id * 1000) as f32 + version as f32; dim];
            assert!(row.vector == expected, "{}", what(&id));
            scanned.insert(id, version);
            Ok(())
        })
        .unwrap();
        assert!(scanned == held && tier.rows() == rows as u64, "{}", what(&rows));
    }
}

#[test]
fn states_that_are_in_the_way_are_given_up_and_cannot_be_resumed() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let dir = Path::new(DIR);
    let (tier, _) = open(&engine, &config(dir, 512 << 10, ReopenMode::Never)).unwrap();
    let mut held = Versions::new();
    let ids: Vec<Id> = (0..tier.capacity_rows() as Id * 2 / 3).collect();
    append(&tier, &ids, 1, &mut held).unwrap();
    tier.publish(Some(4), StateCounters::default(), Vec::new()).unwrap();
    assert!(!tier.stats().has_lost_flush);
    for version in 2..5 {
        append(&tier, &ids, version, &mut held).unwrap();
    }
    assert!(tier.stats().has_lost_flush);
    assert!(SsdTier::published_commit_ids(dir, &*engine).unwrap().is_empty());
    tier.publish(Some(5), StateCounters::default(), Vec::new()).unwrap();
    assert!(!tier.stats().has_lost_flush);
    drop(tier);
    let (tier, _) = open(&engine, &config(dir, 512 << 10, ReopenMode::Resume)).unwrap();
    check(&tier, &held, -5..ids.len() as Id + 5);
}

#[test]
fn evicted_rows_make_room_and_never_come_back() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let dir = Path::new(DIR);
    let (tier, _) = open(&engine, &config(dir, 512 << 10, ReopenMode::Never)).unwrap();
    let mut held = Versions::new();
    let rows = tier.capacity_rows() as Id;
    append(&tier, &(0..rows).collect::<Vec<_>>(), 1, &mut held).unwrap();
    for round in 0..20 {
        let gone = tier.evict(300, &|id| id % 5 == 0, None).unwrap();
        assert_eq!(gone.len(), 300);
        for id in gone {
            assert!(id % 5 != 0 && held.remove(&id).is_some());
        }
        let first = rows + round * 300;
        append(&tier, &(first..first + 300).collect::<Vec<_>>(), 2, &mut held).unwrap();
        if round % 6 == 5 {
            tier.publish(Some(round as u64), StateCounters::default(), Vec::new()).unwrap();
        }
    }
    check(&tier, &held, -5..rows + 6000);
    assert_eq!(tier.stats().dropped_rows, 6000);
    tier.publish(Some(99), StateCounters::default(), Vec::new()).unwrap();
    drop(tier);
    let (tier, _) = open(&engine, &config(dir, 512 << 10, ReopenMode::Resume)).unwrap();
    check(&tier, &held, -5..rows + 6000);
}

#[test]
fn full_disk_rejects_writes_and_serves_stored_rows() {
    for operation in [IoOperation::Create, IoOperation::Write, IoOperation::Sync] {
        let fault = FaultEngine::new(Arc::new(MemoryEngine::default()));
        let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
        let (tier, _) = open(&engine, &config(Path::new(DIR), 1 << 20, ReopenMode::Never)).unwrap();
        let mut held = Versions::new();
        append(&tier, &(0..500).collect::<Vec<_>>(), 1, &mut held).unwrap();
        tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
        let published = held.clone();
        fault.hit_every(operation, IoFault::Fail(libc::ENOSPC));
        let mut version = 1;
        let error = loop {
            version += 1;
            let ids: Vec<Id> = (0..100).map(|at| i64::from(version) * 40 + at).collect();
            let before = held.clone();
            let mut done = append(&tier, &ids, version, &mut held);
            if operation == IoOperation::Sync {
                // Only a publish syncs.
                done = done.and_then(|()| tier.publish(Some(u64::from(version)), StateCounters::default(), Vec::new()));
            }
            if let Err(error) = done {
                held = before;
                break error;
            }
            assert!(version < 10_000, "{operation:?} never failed");
        };
        assert!(matches!(error.kind(), Kind::ReadOnly | Kind::Storage), "{error:?}");
        assert_eq!(error.errno(), Some(libc::ENOSPC), "{error:?}");
        fault.clear();
        for refused in [
            append(&tier, &[1], 1, &mut held.clone()),
            tier.remove(&[1]),
            tier.publish(Some(99_999), StateCounters::default(), Vec::new()),
            tier.clear(),
        ] {
            assert_eq!(refused.unwrap_err().kind(), Kind::ReadOnly, "{operation:?}");
        }
        // Rows of the call that failed may be the newer ones. All others are unchanged.
        let ids: Vec<Id> = held.keys().copied().collect();
        for (id, found) in ids.iter().zip(fetch(&tier, &ids).unwrap()) {
            assert!(found == Some(held[id]) || found == Some(version), "id {id}: {found:?}");
        }
        drop(tier);
        let (tier, _) = open(&engine, &config(Path::new(DIR), 1 << 20, ReopenMode::Resume)).unwrap();
        check(&tier, &published, -5..600);
    }
}

#[test]
fn fetches_appends_and_scans_of_many_tables_at_once_are_right() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    std::thread::scope(|scope| {
        for table in 0..24 {
            let engine = &engine;
            scope.spawn(move || {
                let dir = format!("/embcache-room/{table}");
                let (tier, _) = open(engine, &config(Path::new(&dir), 512 << 10, ReopenMode::Never)).unwrap();
                let mut held = Versions::new();
                for version in 1..12 {
                    let ids: Vec<Id> = (0..400).map(|at| (at * 7 + i64::from(version) * 91) % 900).collect();
                    append(&tier, &ids, version, &mut held).unwrap();
                    if version % 4 == 0 {
                        tier.publish(Some(u64::from(version)), StateCounters::default(), Vec::new()).unwrap();
                    }
                    check(&tier, &held, -5..905);
                }
            });
        }
    });
    // This applies to any number of tables. The threads of the scope above may still be stopping.
    let of_ours = |task: &std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("embcache-"))
    };
    let threads = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok).filter(of_ours).count();
    assert!(threads < 16, "{threads} threads");
}

#[test]
fn partial_eviction_reports_and_counts_evicted_rows() {
    let mut halfway = 0;
    for passing in 0.. {
        let fault = FaultEngine::new(Arc::new(MemoryEngine::default()));
        let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
        let (tier, _) = open(&engine, &config(Path::new(DIR), 512 << 10, ReopenMode::Never)).unwrap();
        let mut held = Versions::new();
        append(&tier, &(0..1000).collect::<Vec<_>>(), 1, &mut held).unwrap();
        tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
        // The eviction reads the footer of one segment after the other, and drops the rows of each.
        fault.hit_once(IoOperation::Read, passing, IoFault::Fail(libc::EIO));
        let gone = match tier.evict(600, &|_| false, None) {
            Ok(gone) => gone,
            Err(error) => {
                assert_eq!(error.errno(), Some(libc::EIO), "{error}");
                Vec::new()
            }
        };
        fault.clear();
        for id in &gone {
            held.remove(id).expect("dropped once");
        }
        assert_eq!(tier.stats().dropped_rows, gone.len() as u64);
        assert_eq!(tier.rows(), held.len() as u64, "rows are gone that nobody was told of");
        check(&tier, &held, -5..1005);
        if gone.len() == 600 {
            break;
        }
        halfway += u64::from(!gone.is_empty());
    }
    assert!(halfway > 3, "{halfway}");
}

#[test]
fn waiting_for_space_submits_reads_that_keep_files() {
    watched(String::new, || {
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let (tier, _) = open(&engine, &config(Path::new(DIR), 1 << 20, ReopenMode::Never)).unwrap();
        let ids: Vec<Id> = (0..tier.capacity_rows() as Id).collect();
        let mut held = Versions::new();
        append(&tier, &ids, 1, &mut held).unwrap();
        let mut found: Vec<(RowHeader, Vec<f32>)> = vec![(RowHeader::default(), vec![f32::NAN; DIM]); ids.len()];
        let places = found.iter_mut().map(place);
        let mut batch = FetchBatch::default();
        let fetch = tier.fetch_in(ids.iter().copied().zip(places).collect(), Some(Arc::new(())), &mut batch);
        assert!(!fetch.is_done(), "most rows are in files");
        for version in 2..6 {
            append(&tier, &ids, version, &mut held).unwrap();
        }
        assert!(fetch.wait().unwrap().is_empty());
        batch.submit();
        for (id, (header_read, vector_read)) in found.iter().enumerate() {
            let id = id as Id;
            assert_eq!((header_read, vector_read), (&header(id, 1), &vector(id, 1)), "as of the fetch");
        }
        check(&tier, &held, -5..ids.len() as Id + 5);
    });
}

#[test]
fn a_fetch_can_be_waited_for_whether_or_not_its_batch_is_submitted() {
    watched(String::new, || {
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let (tier, _) = open(&engine, &config(Path::new(DIR), 1 << 20, ReopenMode::Never)).unwrap();
        let ids: Vec<Id> = (0..2000).collect();
        append(&tier, &ids, 1, &mut Versions::new()).unwrap();
        tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
        let mut found: Vec<(RowHeader, Vec<f32>)> = vec![(RowHeader::default(), vec![f32::NAN; DIM]); 2];
        let mut places = found.iter_mut().map(place);
        let mut batch = FetchBatch::default();
        let waited_for = tier.fetch_in(vec![(7, places.next().unwrap())], Some(Arc::new(())), &mut batch);
        assert!(waited_for.wait().unwrap().is_empty());
        let dropped = tier.fetch_in(vec![(9, places.next().unwrap())], Some(Arc::new(())), &mut batch);
        drop(batch);
        assert!(dropped.wait().unwrap().is_empty());
        assert_eq!((found[0].0.id, found[1].0.id), (7, 9));
    });
}

/// Rows are evicted in the order of writing. A footer is read once for all rows that leave.
#[test]
fn rows_are_evicted_in_write_order() {
    let faults = FaultEngine::new(Arc::new(MemoryEngine::default()));
    let engine: Arc<dyn IoEngine> = Arc::new(faults.clone());
    let (tier, _) = open(&engine, &config(Path::new(DIR), 4 << 20, ReopenMode::Never)).unwrap();
    let mut held = Versions::new();
    let ids: Vec<Id> = (0..6000).map(|id| id * 7919 % 6007).collect();
    append(&tier, &ids, 1, &mut held).unwrap();
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    let kept = |id: Id| id % 10 == 3;
    let expected: Vec<Id> = ids.iter().copied().filter(|id| !kept(*id)).collect();
    let mut gone = tier.evict(5, &kept, None).unwrap();
    faults.hit_every(IoOperation::Read, IoFault::Fail(libc::EIO));
    for _ in 0..40 {
        gone.extend(tier.evict(5, &kept, None).expect("nothing more is read"));
    }
    faults.clear();
    assert_eq!(gone, expected[..205], "oldest first");
    // Protected rows are candidates again after the others have been evicted.
    gone.extend(tier.evict(10_000, &kept, None).unwrap());
    assert_eq!(gone.len(), expected.len());
    assert!(tier.evict(10_000, &kept, None).unwrap().is_empty());
    let rest = tier.evict(10_000, &|_| false, None).unwrap();
    assert_eq!((rest.len() + gone.len(), tier.rows()), (ids.len(), 0));
}
