//! Tests of the tier with small segments, buffers and tags, over engines in memory.

mod behaviour;
mod expiry;
mod model;

use std::sync::Arc;

use super::recover::open::{self as opening, SsdTuning};
use super::{ShardIdentity, SsdTier, StateCounters};
use crate::config::{OptimizerKind, ReopenMode, SsdConfig};
use crate::error::Result;
use crate::io::IoEngine;
use crate::rows::{RowAddress, RowHeader, RowLayout, RowMut, RowRef};
use crate::types::{Id, hash_id};

const DIM: usize = 4;

fn layout() -> RowLayout {
    OptimizerKind::RowWiseAdagrad.layout(DIM)
}

fn identity() -> ShardIdentity {
    ShardIdentity {
        table: "item".into(),
        key: 7,
        dim: DIM as u64,
        optimizer: "rowwise_adagrad".into(),
        seed: 1,
        initializer: "Uniform(-1, 1)".into(),
        total_num_buckets: 10,
        bucket_begin: 0,
        bucket_end: 10,
    }
}

pub(super) fn config(bytes: u64, reopen: ReopenMode) -> SsdConfig {
    SsdConfig { dir: "/embcache-test/item".into(), bytes, reopen, resume_commit_id: None }
}

/// Segments of 32 KiB, which are filled through buffers of 12 KiB, and tags that collide.
pub(super) const SMALL: SsdTuning = SsdTuning {
    segment_bytes: Some(32 << 10),
    block_bytes: Some(12 << 10),
    index_bits: Some((1, 5)),
    threads: Some(2),
};

/// Segments of 8 KiB, each of which is one buffer, so that the cap is reached soon.
pub(super) const TINY: SsdTuning =
    SsdTuning { segment_bytes: Some(8 << 10), block_bytes: None, index_bits: Some((1, 5)), threads: Some(2) };

fn open(engine: &Arc<dyn IoEngine>, config: &SsdConfig) -> Result<(SsdTier, Option<StateCounters>)> {
    open_tuned(engine, config, SMALL)
}

pub(super) fn open_tuned(
    engine: &Arc<dyn IoEngine>,
    config: &SsdConfig,
    tuning: SsdTuning,
) -> Result<(SsdTier, Option<StateCounters>)> {
    let (inner, counters) = opening::open(config, &identity(), layout(), engine.clone(), tuning, None)?;
    Ok((SsdTier { inner }, counters))
}

/// The last step of a row: it increases with the version, except that one row in five has any 64-bit number.
fn step_of(id: Id, version: u32) -> u64 {
    let bits = hash_id(id ^ (i64::from(version) << 32));
    if id % 5 == 0 { bits } else { u64::from(version) * 8 + bits % 8 }
}

/// A row whose contents are a function of its id and version.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SsdTestRow {
    pub(super) header: RowHeader,
    vector: Vec<f32>,
}

impl SsdTestRow {
    pub(super) fn new(id: Id, version: u32) -> Self {
        let bits = hash_id(id ^ (i64::from(version) << 32));
        let vector = (0..DIM).map(|at| f32::from((bits >> (at * 8)) as u8) - 100.0).collect();
        let header = RowHeader {
            id,
            last_step: step_of(id, version),
            count: version,
            score: (bits >> 40) as f32,
            scalar: f32::from((bits >> 20) as u16),
            modified_epoch: version % 5,
        };
        Self { header, vector }
    }

    pub(super) fn empty() -> Self {
        Self { header: RowHeader::default(), vector: vec![f32::NAN; DIM] }
    }

    fn as_ref(&self) -> RowRef<'_> {
        RowRef { header: &self.header, vector: &self.vector }
    }

    #[allow(unsafe_code)]
    pub(super) fn as_mut(&mut self) -> RowMut {
        // SAFETY: tests keep the row, and read it only when the fetch is done.
        unsafe { RowMut::new(RowAddress { header: &raw mut self.header, vector: self.vector.as_mut_ptr() }) }
    }
}

pub(super) fn append(tier: &SsdTier, rows: &[SsdTestRow], known: impl Fn(Id) -> bool) -> Result<()> {
    let refs: Vec<RowRef<'_>> = rows.iter().map(SsdTestRow::as_ref).collect();
    let known: Vec<bool> = rows.iter().map(|row| known(row.header.id)).collect();
    tier.append(&refs, &known)
}

/// Fetches the rows of `ids`, with `None` for absent ones.
fn fetch(tier: &SsdTier, ids: &[Id]) -> Result<Vec<Option<SsdTestRow>>> {
    let mut rows: Vec<SsdTestRow> = ids.iter().map(|_| SsdTestRow::empty()).collect();
    let wanted = ids.iter().copied().zip(rows.iter_mut().map(SsdTestRow::as_mut)).collect();
    let missing = tier.fetch(wanted).wait()?;
    assert!(missing.is_sorted(), "{missing:?}");
    let mut rows: Vec<Option<SsdTestRow>> = rows.into_iter().map(Some).collect();
    for at in missing {
        rows[at as usize] = None;
    }
    Ok(rows)
}

fn scan(tier: &SsdTier) -> Result<Vec<SsdTestRow>> {
    let mut rows = Vec::new();
    tier.scan(&mut |row| {
        rows.push(SsdTestRow { header: *row.header, vector: row.vector.to_vec() });
        Ok(())
    })?;
    rows.sort_by_key(|row| row.header.id);
    Ok(rows)
}

/// Waits until the writers have written everything.
fn settle(tier: &SsdTier) {
    tier.inner.context.space.wait_idle();
}
