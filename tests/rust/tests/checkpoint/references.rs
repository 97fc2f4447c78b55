//! Checkpoints that are referenced by files elsewhere.

use std::path::Path;
use std::sync::Arc;

use embcache::checkpoint::{LatestCheckpoint, REFERENCE_FILE, SaveOptions, prune};
use embcache::config::OptimizerKind::RowWiseAdagrad;
use embcache::io::{IoEngine, write_atomically};
use embcache_tests::checkpoint::{ROOT, Table, load_chain, memory, on, save, save_delta};
use embcache_tests::directory_in;

#[test]
fn a_checkpoint_that_a_file_refers_to_stays_with_what_it_builds_on() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let root = Path::new(ROOT);
    let tables = |salt| vec![Table::new("m", "a", RowWiseAdagrad, 4, &[1, 2, 3], salt)];
    let full = save(&engine, root, &tables(0), 1, 4096, 1).expect("saved");
    let options = SaveOptions { keep: 1, ..on(&full.identity) };
    let delta = save_delta(&engine, root, (&tables(0), &tables(1)), (1, 4096), 2, options).expect("saved");
    let there = |latest: &LatestCheckpoint| {
        engine.exists(&root.join(latest.to_string()).join("manifest.json")).expect("looked at")
    };
    let reference = root.join(delta.latest.to_string()).join(REFERENCE_FILE);
    write_atomically(engine.as_ref(), &reference, b"../best.ckpt").expect("written");
    let third = save(&engine, root, &tables(2), 1, 4096, 3).expect("saved");
    let fourth = save(&engine, root, &tables(3), 1, 4096, 4).expect("saved");
    assert!(there(&full.latest) && there(&delta.latest), "a file refers to the delta");
    assert!(!there(&third.latest) && there(&fourth.latest), "one of the others stays");
    assert_eq!(load_chain(&engine, root, 1, delta.latest, None).expect("loaded"), tables(1));

    engine.remove_file(&reference).expect("removed");
    assert!(prune(&directory_in(&engine, root), 1).expect("pruned").errors.is_empty());
    assert!(!there(&full.latest) && !there(&delta.latest) && there(&fourth.latest));
}
