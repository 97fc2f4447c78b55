//! Directories that earlier versions wrote: they are resumed, and their rows die by rules as those of this version.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::Result;
use embcache::config::Reopen;
use embcache::io::{IoEngine, MemoryEngine, publish, read_file};
use embcache::rows::{RowHeader, RowLayout};
use embcache::ssd::{Burial, Dying, Identity, RowRule, SsdTier, StateCounters};
use embcache::types::{BucketHash, Id};
use embcache_tests::ssd::config;

const CAP: u64 = 2 << 20;
const DIR: &str = "/embcache-versions/tier";
const LAYOUT: RowLayout = RowLayout { dim: 8, vector_slots: 0, scalar_slot: false };

/// The directory of `tests/fixtures/<version>/ssd_tier`, in memory. Rows 0 to 119 were trained in step 1. Then each third was trained in
/// step 2, and each tenth removed.
fn directory_of(version: &str) -> MemoryEngine {
    let memory = MemoryEngine::default();
    memory.create_dir_all(Path::new(DIR)).unwrap();
    let fixture: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "../fixtures", version, "ssd_tier/ssd/item/item/0-of-1"].iter().collect();
    for entry in std::fs::read_dir(fixture).unwrap() {
        let path = entry.unwrap().path();
        publish(&memory, &Path::new(DIR).join(path.file_name().unwrap()), &std::fs::read(&path).unwrap()).unwrap();
    }
    memory
}

fn resume(memory: &MemoryEngine, version: &str) -> SsdTier {
    let identity = Identity {
        table: "item".into(),
        key: 7_829_780_291_500_613_185,
        dim: 8,
        optimizer: "sgd".into(),
        seed: 7,
        initializer: "Constant { value: 7.0 }".into(),
        total_num_buckets: 4093,
        bucket_hash: if version == "v1" { BucketHash::Plain } else { BucketHash::SplitMix64 },
        bucket_begin: 0,
        bucket_end: 4093,
    };
    let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
    let config = config(Path::new(DIR), CAP, Reopen::Resume);
    SsdTier::open(&config, &identity, LAYOUT, engine).unwrap().0
}

/// The last step of each row.
fn steps(tier: &SsdTier) -> BTreeMap<Id, u64> {
    let mut steps = BTreeMap::new();
    let each = &mut |row: embcache::rows::RowRef<'_>| -> Result<()> {
        let weight = if row.header.id % 3 == 0 { 6.0 } else { 6.5 };
        assert_eq!(row.vector, [weight; 8]);
        assert_eq!(steps.insert(row.header.id, row.header.last_step), None);
        Ok(())
    };
    tier.scan(each).unwrap();
    steps
}

fn expected(left: impl Fn(Id) -> bool) -> BTreeMap<Id, u64> {
    let rows = (0..120).filter(|id| id % 10 != 0 && left(*id));
    rows.map(|id| (id, if id % 3 == 0 { 2 } else { 1 })).collect()
}

#[test]
fn rows_in_segments_of_each_version_die_by_step_and_by_their_values() {
    for version in ["v1", "v2", "v3"] {
        let memory = directory_of(version);
        let tier = resume(&memory, version);
        assert_eq!(steps(&tier), expected(|_| true), "{version}");
        let rule: &RowRule<'_> = &|header: &RowHeader, vector: &[f32]| header.id % 2 == 0 && vector[0] > 6.0;
        let by_value = tier.bury(&mut Burial::default(), &Dying { last_step: 1, by_row: Some(rule) }, &|_| false, 1000);
        assert_eq!(by_value.unwrap().rows.len(), expected(|id| id % 3 != 0 && id % 2 == 0).len());
        assert_eq!(steps(&tier), expected(|id| id % 3 == 0 || id % 2 == 1), "{version}");
        let by_step = tier.bury(&mut Burial::default(), &Dying { last_step: 1, by_row: None }, &|id| id == 1, 1000);
        assert!(by_step.unwrap().finished);
        let left = expected(|id| id % 3 == 0 || id == 1);
        assert_eq!(steps(&tier), left, "{version}");
        tier.publish(1 << 62, StateCounters::default()).unwrap();
        tier.close().unwrap();
        assert_eq!(steps(&resume(&memory, version)), left, "{version}");
    }
}

#[test]
fn a_segment_that_is_written_now_is_of_version_4() {
    let memory = directory_of("v2");
    let tier = resume(&memory, "v2");
    tier.remove(&[1]).unwrap();
    tier.publish(1 << 62, StateCounters::default()).unwrap();
    let files = memory.list(Path::new(DIR)).unwrap();
    let segments = files.iter().filter(|path| path.extension().is_some_and(|suffix| suffix == "seg"));
    let mut magics: Vec<Vec<u8>> =
        segments.map(|path| read_file(&memory, path, 1 << 20).unwrap()[..8].to_vec()).collect();
    magics.sort();
    magics.dedup();
    assert_eq!(magics, [b"EMBCSEG2".to_vec(), b"EMBCSEG4".to_vec()]);
}
