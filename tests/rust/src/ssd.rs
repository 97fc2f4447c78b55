//! An SSD tier with rows that are a function of their id and a version.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use embcache::Result;
use embcache::config::{OptimizerKind, ReopenMode, SsdConfig};
use embcache::io::IoEngine;
use embcache::rows::{RowAddress, RowHeader, RowLayout, RowMut, RowRef};
use embcache::ssd::{ShardIdentity, SsdTier, StateCounters};
use embcache::types::{Id, hash_id};

/// The width of a row.
pub const DIM: usize = 8;

/// The contents of a tier: the version of each id. Id and version determine the row.
pub type Versions = BTreeMap<Id, u32>;

/// The layout under rowwise Adagrad: a scalar slot, and no vector slot.
pub fn layout() -> RowLayout {
    OptimizerKind::RowWiseAdagrad.layout(DIM)
}

/// The identity of the table to which the tier belongs.
pub fn identity() -> ShardIdentity {
    ShardIdentity { table: "item".into(), ..ShardIdentity::of(&crate::config(DIM, OptimizerKind::RowWiseAdagrad, 1)) }
}

/// The configuration of a tier of `bytes` bytes in `dir`. A resume loads the latest state.
pub fn config(dir: &Path, bytes: u64, reopen: ReopenMode) -> SsdConfig {
    SsdConfig { dir: dir.to_owned(), bytes, reopen, resume_commit_id: None }
}

/// Opens or creates the tier.
pub fn open(engine: &Arc<dyn IoEngine>, config: &SsdConfig) -> Result<(SsdTier, Option<StateCounters>)> {
    SsdTier::open(config, &identity(), layout(), engine.clone())
}

/// The header of a row.
pub fn header(id: Id, version: u32) -> RowHeader {
    let bits = hash_id(id ^ (i64::from(version) << 32));
    RowHeader {
        id,
        last_step: bits,
        count: version,
        score: (bits >> 40) as f32,
        scalar: f32::from((bits >> 20) as u16),
        modified_epoch: version % 5,
    }
}

/// The vector part of a row: `[DIM]`.
pub fn vector(id: Id, version: u32) -> Vec<f32> {
    (0..DIM as i64).map(|at| f32::from((hash_id(id.wrapping_mul(64) + at) >> (version % 32)) as u16)).collect()
}

/// Appends version `version` of `ids`, and records that in `held`.
pub fn append(tier: &SsdTier, ids: &[Id], version: u32, held: &mut Versions) -> Result<()> {
    let made: Vec<(RowHeader, Vec<f32>)> = ids.iter().map(|&id| (header(id, version), vector(id, version))).collect();
    let rows: Vec<RowRef<'_>> = made.iter().map(|(header, vector)| RowRef { header, vector }).collect();
    let known: Vec<bool> = ids.iter().map(|id| held.contains_key(id)).collect();
    tier.append(&rows, &known)?;
    held.extend(ids.iter().map(|id| (*id, version)));
    Ok(())
}

/// The memory to which a fetch writes a row. The test owns it, and reads it only after the fetch.
#[allow(unsafe_code)]
pub fn place((header, vector): &mut (RowHeader, Vec<f32>)) -> RowMut {
    // SAFETY: a test owns both, and does not access them before the fetch is complete. The vector has the layout's
    // floats.
    unsafe { RowMut::new(RowAddress { header: &raw mut *header, vector: vector.as_mut_ptr() }) }
}

/// Returns the version of each id in the tier, after a check of every bit of the row.
///
/// # Panics
/// Panics if a row does not match its id and version.
pub fn fetch(tier: &SsdTier, ids: &[Id]) -> Result<Vec<Option<u32>>> {
    let mut found: Vec<(RowHeader, Vec<f32>)> = vec![(RowHeader::default(), vec![f32::NAN; DIM]); ids.len()];
    let places = found.iter_mut().map(place);
    let missing = tier.fetch(ids.iter().copied().zip(places).collect()).wait()?;
    let versions = found.into_iter().enumerate().map(|(at, (found, floats))| {
        if missing.binary_search(&(at as u32)).is_ok() {
            return None;
        }
        let version = found.count;
        assert_eq!((found, floats), (header(ids[at], version), vector(ids[at], version)), "id {}", ids[at]);
        Some(version)
    });
    Ok(versions.collect())
}

/// Checks that the contents of the tier are exactly `held`, by a fetch of `ids` and by a scan.
///
/// # Panics
/// Panics if they are not.
pub fn check(tier: &SsdTier, held: &Versions, ids: std::ops::Range<Id>) {
    let ids: Vec<Id> = ids.collect();
    let expected: Vec<Option<u32>> = ids.iter().map(|id| held.get(id).copied()).collect();
    assert_eq!(fetch(tier, &ids).expect("rows that can be read"), expected);
    let mut scanned = Versions::new();
    tier.scan(&mut |row| {
        assert_eq!(row.vector, vector(row.header.id, row.header.count));
        assert_eq!(scanned.insert(row.header.id, row.header.count), None, "id {} twice", row.header.id);
        Ok(())
    })
    .expect("rows that can be read");
    assert_eq!(&scanned, held);
    assert_eq!(tier.rows(), held.len() as u64);
}
