//! Deltas that are saved asynchronously. No stop loses their base checkpoints, and the next delta is right, in the same
//! run and in another.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use embcache::cache::BaseCheckpoint;
use embcache::checkpoint::{CheckpointChain, LatestCheckpoint, PublishedCheckpoint};
use embcache::io::{FaultEngine, IoEngine, IoFault, MemoryEngine};
use embcache::types::Id;
use embcache_tests::checkpoint::{ROOT, memory};
use embcache_tests::{Rig, directory_in};

use crate::async_saves::{loaded, next_epoch, rigs, rows_of, save_async, save_blocking, train_all};

/// Changes rows, removes some, and inserts some again.
fn change(rigs: &[Rig], salt: Id) {
    for rig in rigs {
        let gone: Vec<Id> = (0..190).filter(|id| (id + salt) % 11 == 0).collect();
        rig.table.remove_rows(&gone).unwrap();
    }
    train_all(rigs, salt);
}

fn ancestor(saved: &PublishedCheckpoint, next_epoch: u32) -> BaseCheckpoint {
    BaseCheckpoint { name: saved.identity.name.clone(), manifest_xxh3: saved.identity.manifest_xxh3, next_epoch }
}

/// Saves every row. The checkpoint becomes the base of the tables.
fn save_full(engine: &Arc<dyn IoEngine>, rigs: &[Rig]) -> BaseCheckpoint {
    let next_epoch = next_epoch(rigs);
    let made = ancestor(&save_blocking(engine, rigs).unwrap(), next_epoch);
    for rig in rigs {
        rig.table.set_epoch(next_epoch).unwrap();
        rig.table.saved_as(made.clone()).unwrap();
    }
    made
}

/// Saves the changes since `base` while rows change, and reports the result to the tables.
fn save_changes(engine: &Arc<dyn IoEngine>, rigs: &[Rig], base: &BaseCheckpoint) -> embcache::Result<BaseCheckpoint> {
    let next_epoch = next_epoch(rigs);
    let result = save_async(engine, rigs, Some(base), || change(rigs, 4), || change(rigs, 5), 1);
    let result = result.map(|saved| ancestor(&saved, next_epoch));
    for rig in rigs {
        rig.table.finish_background_save(next_epoch, result.as_ref().ok().cloned());
    }
    result
}

/// Saves the next delta on `base`, and checks the checkpoints that it removes.
fn goes_on(image: &MemoryEngine, rigs: &[Rig], base: &BaseCheckpoint) {
    let engine: Arc<dyn IoEngine> = Arc::new(image.clone());
    let now = rows_of(rigs);
    save_changes(&engine, rigs, base).unwrap();
    assert!(loaded(image.clone()) == now, "the next delta is wrong");
    let directory = directory_in(&engine, ROOT);
    let chain = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).unwrap()).unwrap();
    assert!(chain.names().any(|name| name == base.name));
    assert_eq!(image.list(Path::new(ROOT)).unwrap().len(), 2 + chain.names().count(), "orphans are swept");
}

/// Starts a run with the checkpoint that `LATEST` names.
fn resumed(image: &MemoryEngine) -> (Vec<Rig>, BaseCheckpoint) {
    let engine: Arc<dyn IoEngine> = Arc::new(image.clone());
    let directory = directory_in(&engine, ROOT);
    let chain = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).unwrap()).unwrap();
    let (identity, next_epoch) = (chain.identity(), chain.manifest().next_epoch);
    let base = BaseCheckpoint { name: identity.name, manifest_xxh3: identity.manifest_xxh3, next_epoch };
    let rigs = rigs();
    for rig in &rigs {
        let config = rig.table.config();
        chain.table_reader("m", &config.name, config.buckets.clone()).unwrap().load_into(&rig.table).unwrap();
        rig.table.set_epoch(next_epoch).unwrap();
        rig.table.saved_as(base.clone()).unwrap();
    }
    (rigs, base)
}

/// A delta is stopped at every operation, while the tables train.
#[test]
fn stopped_async_delta_keeps_chain_and_next_delta_is_right() {
    let all = rigs();
    train_all(&all, 0);
    let (mut stops, mut kept, mut replaced) = (0, 0, 0);
    loop {
        let memory = memory();
        let plain: Arc<dyn IoEngine> = Arc::new(memory.clone());
        let base = save_full(&plain, &all);
        let old = rows_of(&all);
        change(&all, 3);
        let new = rows_of(&all);
        let faults = FaultEngine::new(Arc::new(memory.clone()));
        faults.hit_change(stops, IoFault::Stop);
        let result = save_changes(&(Arc::new(faults.clone()) as Arc<dyn IoEngine>), &all, &base);
        change(&all, 6);
        if !faults.is_stopped() {
            assert!(loaded(memory.clone()) == new);
            goes_on(&memory, &all, &result.unwrap());
            break;
        }
        for image in [memory.crash(), memory.kill(), memory.crash_torn(stops)] {
            let found = loaded(image.clone());
            assert!(found == old || found == new, "neither, after {stops} changes");
            assert!(result.is_err() || found == new, "a save that succeeded is lost after {stops} changes");
            if found == old {
                kept += 1;
            } else {
                replaced += 1;
            }
            // Another process loads the checkpoint.
            let (others, latest) = resumed(&image);
            assert!(rows_of(&others) == found);
            assert_eq!(latest == base, found == old);
            change(&others, 7);
            goes_on(&image, &others, &latest);
        }
        // The same process saves again after its disk is repaired.
        let image = memory.kill();
        if result.is_err() && loaded(image.clone()) == old {
            goes_on(&image, &all, &base);
        }
        stops += 1;
    }
    assert!(stops > 30 && kept > 60 && replaced > 0, "{stops} stops, {kept} kept, {replaced} replaced");
}
