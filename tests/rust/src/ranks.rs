//! Saves and loads of tables of the cache by several ranks.
#![allow(clippy::missing_panics_doc)] // a helper of tests panics when a check fails

use std::collections::BTreeMap;
use std::sync::Arc;

use embcache::Result;
use embcache::cache::BaseCheckpoint;
use embcache::checkpoint::{CheckpointChain, CheckpointId, CheckpointSave, LatestCheckpoint, RankWriter, SaveOptions};
use embcache::io::IoEngine;

use crate::checkpoint::ROOT;
use crate::{Rig, directory_in};

/// Saves all rows, or the changes since a base. Returns the base of the next delta.
pub fn save_on(
    engine: &Arc<dyn IoEngine>,
    ranks: &[Rig],
    group_bytes: usize,
    on: Option<&BaseCheckpoint>,
) -> BaseCheckpoint {
    try_save_on(engine, ranks, group_bytes, on).expect("saved")
}

/// Like `save_on`, on a disk that may fail.
pub fn try_save_on(
    engine: &Arc<dyn IoEngine>,
    ranks: &[Rig],
    group_bytes: usize,
    on: Option<&BaseCheckpoint>,
) -> Result<BaseCheckpoint> {
    let parent = on.map(|on| CheckpointId { name: on.name.clone(), manifest_xxh3: on.manifest_xxh3 });
    let options = SaveOptions { parent, ..SaveOptions::default() };
    let directory = directory_in(engine, ROOT);
    let save = CheckpointSave::begin_with(&directory, 7, options)?;
    let digest = |(rank, rig): (u32, &Rig)| {
        let world = ranks.len() as u32;
        let writer = RankWriter::new(&directory, save.name(), rank, world)?;
        let mut writer = writer.with_group_bytes(group_bytes);
        match on {
            None => drop(writer.write_rows_of("m", &rig.table, BTreeMap::new())?),
            Some(on) => drop(writer.write_changes_of("m", &rig.table, BTreeMap::new(), on)?),
        }
        writer.finish()
    };
    let digests: Result<Vec<_>> = (0..).zip(ranks).map(digest).collect();
    let next_epoch = on.map_or(3, |on| on.next_epoch + 1);
    let CheckpointId { name, manifest_xxh3 } = save.publish(&digests?, next_epoch)?.identity;
    Ok(BaseCheckpoint { name, manifest_xxh3, next_epoch })
}

/// Like `save_on`, and sets the checkpoint as the base of the ranks.
pub fn save_as_base(
    engine: &Arc<dyn IoEngine>,
    ranks: &[Rig],
    group_bytes: usize,
    on: Option<&BaseCheckpoint>,
) -> BaseCheckpoint {
    let made = save_on(engine, ranks, group_bytes, on);
    for rig in ranks {
        rig.table.set_epoch(made.next_epoch).expect("set");
        rig.table.saved_as(made.clone()).expect("noted");
    }
    made
}

/// Loads the latest checkpoint into the tables of all ranks.
pub fn load(engine: &Arc<dyn IoEngine>, ranks: &[Rig]) {
    let directory = directory_in(engine, ROOT);
    let latest = LatestCheckpoint::read(&directory).expect("a checkpoint");
    for rig in ranks {
        let checkpoint = CheckpointChain::open(&directory, latest).expect("opened");
        let reader = checkpoint.table_reader("m", "t", rig.table.config().buckets.clone()).expect("its files");
        reader.load_into(&rig.table).expect("loaded");
        let rows = rig.table.len().expect("counted");
        assert!(rows == reader.max_rows() || rows < reader.max_rows() && checkpoint.links().len() > 1);
    }
}
