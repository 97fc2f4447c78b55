//! Records whose heads grow with the values in them: nothing is lost if a tier has segments of several widths.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::config::ReopenMode;
use embcache::io::{IoEngine, MemoryEngine, read_file};
use embcache::rows::{RowHeader, RowRef};
use embcache::ssd::{SsdTier, StateCounters};
use embcache::types::Id;
use embcache::{Kind, Result};
use embcache_tests::ssd::{DIM, config, open};
use embcache_tests::watched;

const DIR: &str = "/embcache-heads/tier";
const CAP: u64 = 1 << 20;
/// The stages of a tier: the last step, the epoch, the count and the score of rows in each stage.
const STAGES: [(u64, u32, u32, f32); 6] = [
    (0, 0, 0, 0.0),
    (1, 1, 1, 0.0),
    ((1 << 24) - 1, 255, 256, 0.0),
    (1 << 24, 256, 1 << 16, -0.0),
    (1 << 32, 1 << 16, u32::MAX, 0.5),
    (u64::MAX, u32::MAX, 0, f32::MAX),
];

fn header(id: Id, stage: usize) -> RowHeader {
    let (last_step, modified_epoch, count, score) = STAGES[stage];
    RowHeader { id, last_step, count, score, scalar: id as f32, modified_epoch }
}

/// Writes rows as they are in a stage. `held` has the existing rows, and the stage in which each was written.
fn write(tier: &SsdTier, ids: &[Id], stage: usize, held: &mut BTreeMap<Id, usize>) -> Result<()> {
    let known: Vec<bool> = ids.iter().map(|id| held.contains_key(id)).collect();
    append(tier, ids, &known, stage)?;
    held.extend(ids.iter().map(|id| (*id, stage)));
    Ok(())
}

fn append(tier: &SsdTier, ids: &[Id], known: &[bool], stage: usize) -> Result<()> {
    let made: Vec<(RowHeader, [f32; DIM])> =
        ids.iter().map(|&id| (header(id, stage), [(id + stage as Id) as f32; DIM])).collect();
    let rows: Vec<RowRef<'_>> = made.iter().map(|(header, vector)| RowRef { header, vector }).collect();
    tier.append(&rows, known)
}

/// Checks that a tier has these rows, bitwise identical.
fn check(tier: &SsdTier, held: &BTreeMap<Id, usize>) {
    let mut found = BTreeMap::new();
    tier.scan(&mut |row| {
        let stage = held[&row.header.id];
        assert_eq!(bytemuck::bytes_of(row.header), bytemuck::bytes_of(&header(row.header.id, stage)));
        assert_eq!(row.vector, [(row.header.id + stage as Id) as f32; DIM]);
        assert_eq!(found.insert(row.header.id, stage), None);
        Ok(())
    })
    .unwrap();
    assert_eq!(&found, held);
}

fn segments(engine: &dyn IoEngine) -> Vec<PathBuf> {
    let mut files = engine.list(Path::new(DIR)).unwrap();
    files.retain(|path| path.extension().is_some_and(|suffix| suffix == "seg"));
    files
}

/// Bytes of the records of each segment of rows, from its header.
fn record_bytes(engine: &dyn IoEngine) -> Vec<u32> {
    let headers = segments(engine).into_iter().map(|path| read_file(engine, &path, 8 << 20).unwrap());
    let rows = headers.filter(|bytes| bytes[12] == 1);
    let mut all: Vec<u32> = rows.map(|bytes| u32::from_le_bytes(bytes[16..20].try_into().unwrap())).collect();
    all.sort_unstable();
    all.dedup();
    all
}

#[test]
fn rows_of_each_width_are_there_after_moves_and_resumes() {
    watched(String::new, || {
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let (mut tier, _) = open(&engine, &config(Path::new(DIR), CAP, ReopenMode::Never)).unwrap();
        let mut held = BTreeMap::new();
        let (mut widths, mut moved) = (Vec::new(), 0);
        for stage in 0..STAGES.len() {
            // Some rows of each stage are never written again. Compaction moves them, because those around them are.
            let first = 10_000 * stage as Id;
            write(&tier, &(first..first + 1200).collect::<Vec<Id>>(), stage, &mut held).unwrap();
            check(&tier, &held);
            for _ in 0..8 {
                let busy: Vec<Id> = held.keys().copied().filter(|id| id % 2 == 1).collect();
                write(&tier, &busy, stage, &mut held).unwrap();
            }
            moved += tier.stats().compaction_bytes;
            check(&tier, &held);
            tier.publish(Some(1 + stage as u64), StateCounters::default(), Vec::new()).unwrap();
            tier.close().unwrap();
            widths.push(record_bytes(&*engine));
            (tier, _) = open(&engine, &config(Path::new(DIR), CAP, ReopenMode::Resume)).unwrap();
            check(&tier, &held);
        }
        let payload = DIM as u32 * 4 + 4;
        assert_eq!(widths[0], [16 + payload]);
        let last = widths[5].iter().max();
        assert_eq!(last, Some(&(36 + payload)), "{widths:?}");
        assert!(moved > 0, "compaction moved rows");
        assert!(widths.iter().any(|widths| widths.len() > 1), "segments of several widths: {widths:?}");
    });
}

#[test]
fn tier_full_of_narrow_records_fits_all_rows_when_wide() {
    watched(String::new, || {
        for publishes in [false, true] {
            let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
            let (tier, _) = open(&engine, &config(Path::new(DIR), CAP, ReopenMode::Never)).unwrap();
            let (mut held, capacity) = (BTreeMap::new(), tier.capacity_rows() as Id);
            write(&tier, &(0..capacity).collect::<Vec<Id>>(), 0, &mut held).unwrap();
            let refused = append(&tier, &[capacity], &[false], 0).unwrap_err();
            assert_eq!(refused.kind(), Kind::Capacity);
            for stage in 1..STAGES.len() {
                for round in 0..3 {
                    let some: Vec<Id> = (0..capacity).filter(|id| id % 3 == round).collect();
                    write(&tier, &some, stage, &mut held).unwrap();
                    if publishes {
                        tier.publish(Some(10 * stage as u64 + round as u64), StateCounters::default(), Vec::new())
                            .unwrap();
                    }
                }
                check(&tier, &held);
            }
        }
    });
}

#[test]
fn concurrent_calls_widen_records_of_each_other() {
    watched(String::new, || {
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        for _ in 0..20 {
            let (tier, _) = open(&engine, &config(Path::new(DIR), CAP, ReopenMode::Discard)).unwrap();
            std::thread::scope(|scope| {
                for thread in 0..3 {
                    let tier = &tier;
                    scope.spawn(move || {
                        for stage in 0..STAGES.len() {
                            let ids: Vec<Id> = (0..500).map(|id| 1000 * thread + id).collect();
                            append(tier, &ids, &vec![stage > 0; ids.len()], stage).unwrap();
                        }
                    });
                }
            });
            let ids = (0..3).flat_map(|thread| (0..500).map(move |id| 1000 * thread + id));
            check(&tier, &ids.map(|id| (id, STAGES.len() - 1)).collect());
            tier.close().unwrap();
        }
    });
}
