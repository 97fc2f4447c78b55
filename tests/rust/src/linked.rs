//! A table whose SSD tier is linked into checkpoints.
#![allow(clippy::missing_panics_doc)] // a helper of tests panics when a check fails

use std::collections::BTreeMap;
use std::sync::Arc;

use embcache::Result;
use embcache::cache::Table;
use embcache::checkpoint::{CheckpointSave, LinkedTable, PublishedCheckpoint, RankWriter, SaveOptions};
use embcache::config::{OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::IoEngine;
use embcache::types::{Id, hash_id};

use crate::checkpoint::ROOT;
use crate::{Rig, config, directory_in};

/// The directory of the SSD tier.
pub const TIER: &str = "/tier/t";
const IDS: u64 = 500;

/// The configuration of the table: RAM and SSD.
pub fn table_config(reopen: ReopenMode) -> TableConfig {
    let ssd = SsdConfig { dir: TIER.into(), bytes: 1 << 20, reopen, resume_commit_id: None };
    TableConfig { ssd: Some(ssd), ..config(4, OptimizerKind::RowWiseAdagrad, 30) }
}

fn ids(salt: u32) -> Vec<Id> {
    let mut ids: Vec<Id> = (0..60).map(|n| (hash_id(i64::from(salt) << 20 | n) % IDS) as Id - 17).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Trains these steps.
pub fn train(rig: &Rig, steps: std::ops::Range<u32>) {
    for salt in steps {
        rig.train(&ids(salt), 3, salt).expect("trained");
    }
}

/// Saves the table, with linked segments or with all rows.
pub fn save(
    engine: &Arc<dyn IoEngine>,
    table: &Table,
    random: u64,
    linked: bool,
) -> Result<(PublishedCheckpoint, LinkedTable)> {
    let options = SaveOptions { linked, keep: 1, ..SaveOptions::default() };
    let directory = directory_in(engine, ROOT);
    let save = CheckpointSave::begin_with(&directory, random, options)?;
    let mut writer = RankWriter::new(&directory, save.name(), 0, 1)?;
    let written = if linked {
        writer.link_rows_of("m", table, BTreeMap::new())?
    } else {
        let rows = writer.write_rows_of("m", table, BTreeMap::new())?;
        LinkedTable { rows, ..LinkedTable::default() }
    };
    let epoch = table.epoch()? + 1;
    let published = save.publish(&[writer.finish()?], epoch)?;
    table.set_epoch(epoch)?;
    Ok((published, written))
}
