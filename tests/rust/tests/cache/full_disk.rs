//! The disk fills up during a call. The call is completed or has no effect, and all ways to read the table return the
//! same rows.

use std::path::PathBuf;
use std::sync::Arc;

use embcache::Kind;
use embcache::cache::PreImages;
use embcache::config::{OnFull, TableConfig};
use embcache::io::{FaultEngine, IoFault, IoOperation, MemoryEngine};
use embcache::rows::RowHeader;
use embcache::types::Id;
use embcache_tests::{Contents, Rig};

const DIM: usize = 16;
const FLOATS: usize = 2 * DIM;

fn three_tiers(device_rows: Option<u32>, ssd_bytes: u64) -> TableConfig {
    embcache_tests::three_tiers(DIM, device_rows, 1200, ssd_bytes)
}

fn made(ids: impl Iterator<Item = Id>, version: u32) -> Contents {
    let header = |id| RowHeader { id, count: version, ..RowHeader::default() };
    ids.map(|id| (id, (header(id), vec![(id as f32 + version as f32 / 8.0).to_bits(); FLOATS]))).collect()
}

/// Returns every row in an asynchronous save.
fn saved_async(rig: &Rig) -> Contents {
    let engine = Arc::new(MemoryEngine::default());
    let images = Arc::new(PreImages::new(engine, PathBuf::from("/save/images"), 1 << 20, 1));
    let epoch = rig.table.epoch().expect("an epoch");
    let mut rows = Contents::new();
    let moment = rig.table.snapshot(&images, epoch + 1).expect("no other save");
    moment
        .for_each_chunk(1000, &mut |chunk| {
            for (header, vector) in chunk.headers.iter().zip(chunk.vectors.chunks(FLOATS)) {
                let bits = vector.iter().map(|value| value.to_bits()).collect();
                assert!(rows.insert(header.id, (*header, bits)).is_none(), "row {} is there twice", header.id);
            }
            Ok(())
        })
        .expect("every row");
    rows
}

/// Returns every row, after a check that all ways to read them agree.
fn seen_alike(rig: &Rig) -> Contents {
    let mut rows = rig.contents().expect("every row");
    assert_eq!(rig.table.len().expect("a length"), rows.len() as u64, "len() and an export");
    assert_eq!(rig.table.stats().expect("counters").rows, rows.len() as u64);
    assert!(saved_async(rig) == rows, "a save beside training has other rows than an export");
    let ids: Vec<Id> = rows.keys().copied().collect();
    let read = rig.table.read_rows(&ids).expect("every row");
    for (at, (header, bits)) in rows.values().enumerate() {
        assert!(read.found[at], "id {}", header.id);
        let vector = read.vectors[at * FLOATS..][..FLOATS].iter().map(|value| value.to_bits());
        assert!(vector.eq(bits.iter().copied()), "id {}", header.id);
    }
    // Only an import after a save has an epoch, so epochs are not compared.
    for (header, _) in rows.values_mut() {
        header.modified_epoch = 0;
    }
    rows
}

/// Runs `change` while the disk is full from some operation on, for each kind of operation and for many positions.
/// Checks that the table then has `after` if the call succeeded, and is unchanged otherwise. Returns the number of
/// calls that failed, and that succeeded although the disk failed during them.
fn is_whole_or_not_done(
    prepare: &dyn Fn() -> (Rig, FaultEngine),
    change: &dyn Fn(&Rig) -> embcache::Result<()>,
    after: &Contents,
) -> (u64, u64) {
    let (mut failed, mut went_on) = (0, 0);
    for operation in [IoOperation::Create, IoOperation::Write] {
        for passing in 0..12 {
            let (rig, faults) = prepare();
            let before = seen_alike(&rig);
            faults.hit_once(operation, passing, IoFault::Fail(libc::ENOSPC));
            let changed = change(&rig);
            let what = format!("{operation:?} {passing}: {changed:?}");
            let rows = seen_alike(&rig);
            if let Err(error) = &changed {
                assert!(matches!(error.kind(), Kind::Storage | Kind::ReadOnly), "{what}");
                assert!(rows == before, "{what}: {} rows of {}", rows.len(), before.len());
                failed += 1;
            } else {
                assert!(rows == *after, "{what}: {} rows, and {} wanted", rows.len(), after.len());
            }
            // After the tier has seen the disk fail, every write fails, and changes nothing.
            if rig.table.is_read_only() {
                went_on += u64::from(changed.is_ok());
                let refused = rig.import(&made(0..10, 9)).expect_err("nothing can be written");
                assert_eq!(refused.kind(), Kind::ReadOnly, "{refused}");
                assert_eq!(rig.table.remove_rows(&[1]).expect_err("nothing can be written").kind(), Kind::ReadOnly);
                assert_eq!(rig.table.flush(9).expect_err("nothing can be written").kind(), Kind::ReadOnly);
                assert!(seen_alike(&rig) == rows);
            }
        }
    }
    (failed, went_on)
}

fn filled(device_rows: Option<u32>, ids: std::ops::Range<Id>) -> (Rig, FaultEngine) {
    let (rig, faults) = Rig::with_faults(three_tiers(device_rows, 4 << 20));
    rig.import(&made(ids, 1)).expect("room for all");
    if device_rows.is_some() {
        rig.evaluate(&(0..30).collect::<Vec<Id>>(), 1, false).expect("rows on the device");
    }
    rig.table.flush(1).expect("a flush");
    (rig, faults)
}

fn an_import(device_rows: Option<u32>) {
    let rows = made(2000..11_000, 2);
    let mut after = made(0..4000, 1);
    after.extend(rows.clone());
    let (_, went_on) = is_whole_or_not_done(&|| filled(device_rows, 0..4000), &|rig| rig.import(&rows), &after);
    assert!(went_on > 0, "the faults came too late");
}

#[test]
fn an_import_that_meets_a_full_disk_is_whole_or_not_done() {
    an_import(None);
}

#[test]
fn import_on_full_disk_is_atomic_with_device_tier() {
    an_import(Some(40));
}

#[test]
fn an_import_of_new_rows_that_meets_a_full_disk_is_whole_or_not_done() {
    let rows = made(4000..11_000, 2);
    let mut after = made(0..4000, 1);
    after.extend(rows.clone());
    let (failed, went_on) = is_whole_or_not_done(&|| filled(None, 0..4000), &|rig| rig.import(&rows), &after);
    assert!(failed > 0 && went_on > 0, "{failed} failed and {went_on} went on: the faults came too late");
}

fn a_removal(device_rows: Option<u32>) {
    let ids: Vec<Id> = (0..16_000).filter(|id| id % 10 != 3).collect();
    let after = made((0..16_000).filter(|id| id % 10 == 3), 1);
    let remove = |rig: &Rig| {
        let removed = rig.table.remove_rows(&ids)?;
        assert_eq!(removed, ids.len() as u64);
        Ok(())
    };
    let (failed, went_on) = is_whole_or_not_done(&|| filled(device_rows, 0..16_000), &remove, &after);
    assert!(failed > 0 && went_on > 0, "{failed} failed and {went_on} went on: the faults came too late");
}

#[test]
fn a_removal_that_meets_a_full_disk_is_whole_or_not_done() {
    a_removal(None);
}

#[test]
fn removal_on_full_disk_is_atomic_with_device_tier() {
    a_removal(Some(40));
}

/// Training that evicts rows and meets a full disk leaves a table whose rows are the same in all ways to read it.
#[test]
fn evicting_training_on_full_disk_leaves_consistent_table() {
    for device_rows in [None, Some(40)] {
        for passing in [0, 1, 2, 5] {
            let mut wanted = three_tiers(device_rows, 1 << 20);
            wanted.on_full = OnFull::Evict;
            let (rig, faults) = Rig::with_faults(wanted);
            let step = |at: Id| rig.train(&(at * 500..at * 500 + 500).collect::<Vec<Id>>(), 1, at as u32);
            for at in 0..20 {
                step(at).expect("a step");
            }
            let dropped = rig.table.stats().expect("counters").dropped_rows;
            assert!(dropped > 0, "it is full");
            faults.hit_once(IoOperation::Write, passing, IoFault::Fail(libc::ENOSPC));
            let failed = (20..400).find_map(|at| step(at).err()).expect("the disk is full");
            assert!(matches!(failed.kind(), Kind::Storage | Kind::ReadOnly), "{failed}");
            let rows = seen_alike(&rig);
            let stats = rig.table.stats().expect("counters");
            assert_eq!(stats.pinned_rows, 0);
            assert_eq!(stats.rows + stats.dropped_rows, stats.step * 500, "rows that were born and not dropped");
            assert!(rows.len() as u64 <= stats.rows);
        }
    }
}

/// An import over rows that cannot be read changes nothing, for any number of rows.
#[test]
fn import_over_unreadable_rows_changes_nothing() {
    let (rig, faults) = filled(None, 0..12_000);
    let before = seen_alike(&rig);
    // The rows of the first parts can be read.
    for passing in [0, 3, 30, 60] {
        faults.hit_once(IoOperation::Read, passing, IoFault::Fail(libc::EIO));
        let imported = rig.import(&made(0..12_000, 2));
        let removed = if imported.is_ok() { Ok(0) } else { rig.table.remove_rows(&[]) };
        faults.clear();
        match imported {
            Ok(()) => {
                assert!(seen_alike(&rig) == made(0..12_000, 2));
                rig.import(&made(0..12_000, 1)).expect("as before");
            }
            Err(error) => {
                assert_eq!(error.kind(), Kind::Storage, "{error}");
                assert_eq!(removed.expect("nothing was asked for"), 0);
            }
        }
        assert!(seen_alike(&rig) == before, "{passing}");
    }
}
