//! Linked checkpoints that are linked back into tables. A table is intact after every stop of a load, and has no file
//! that another process may write.

use std::path::Path;
use std::sync::Arc;

use embcache::Kind;
use embcache::config::ReopenMode;
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, read_file};
use embcache_tests::Rig;
use embcache_tests::checkpoint::memory;
use embcache_tests::linked::{TIER, save, table_config, train};

use crate::linked::{contents, open, read, segments, snapshot_dir};

/// After a stop at every operation of a load, the linked checkpoint is intact, and the tier has one state or none.
#[test]
fn stopped_linked_load_leaves_checkpoint_and_tier_intact() {
    let (mut stops, mut before, mut loaded, mut none) = (0, 0, 0, 0);
    loop {
        let memory = memory();
        let engine = FaultEngine::new(Arc::new(memory.clone()));
        let shared: Arc<dyn IoEngine> = Arc::new(engine.clone());
        let rig = Rig::open(table_config(ReopenMode::Discard), Arc::clone(&shared)).expect("opened");
        train(&rig, 0..8);
        let moment = rig.contents().expect("exported");
        let (published, _) = save(&shared, &rig.table, 1, true).expect("saved");
        let dir = snapshot_dir(&published);
        let bytes_in = |engine: &dyn IoEngine| -> Vec<Vec<u8>> {
            segments(engine, &dir).iter().map(|path| read_file(engine, path, 1 << 20).expect("read")).collect()
        };
        let bytes = bytes_in(&memory);
        // The load replaces these rows.
        train(&rig, 8..12);
        rig.table.flush(1).expect("flushed");
        let replaced = rig.contents().expect("exported");
        drop(rig);
        engine.hit_change(stops, IoFault::Stop);
        let result = open(&shared).and_then(|table| table.flush(2).map(|()| contents(&table)));
        let stopped = engine.is_stopped();
        if !stopped {
            assert_eq!(result.expect("loaded"), moment);
        }
        for image in [memory.crash(), memory.kill(), memory.crash_torn(stops), memory.crash_torn(stops + 1000)] {
            let image: Arc<dyn IoEngine> = Arc::new(image);
            assert_eq!(read(&image).expect("the snapshot"), moment, "after {stops} changes");
            let is_empty = image.list(Path::new(TIER)).expect("listed").iter().all(|path| path.ends_with("lock"));
            match Rig::open(table_config(ReopenMode::Resume), Arc::clone(&image)) {
                Ok(rig) => {
                    let found = rig.contents().expect("exported");
                    if found == moment {
                        loaded += 1;
                    } else if found == replaced {
                        before += 1;
                    } else {
                        assert!(is_empty && found.is_empty(), "neither, after {stops} changes");
                    }
                }
                Err(error) => {
                    assert_eq!(error.kind(), Kind::State, "{error}");
                    none += 1;
                }
            }
            assert_eq!(contents(&open(&image).expect("loaded again")), moment, "after {stops} changes");
            assert!(bytes_in(&*image) == bytes, "a file of the snapshot was written");
        }
        if !stopped {
            break;
        }
        stops += 1;
    }
    let all = (stops, before, loaded, none);
    assert!(stops > 10 && before > 3 && loaded > 3 && none > 10, "{all:?}: stops, before, loaded, none");
}

#[test]
fn a_snapshot_that_is_removed_while_it_is_loaded_is_missed() {
    let memory = memory();
    let engine = FaultEngine::new(Arc::new(memory.clone()));
    let shared: Arc<dyn IoEngine> = Arc::new(engine.clone());
    let rig = Rig::open(table_config(ReopenMode::Discard), Arc::clone(&shared)).expect("opened");
    train(&rig, 0..8);
    let (published, _) = save(&shared, &rig.table, 1, true).expect("saved");
    drop(rig);
    let paths = segments(&memory, &snapshot_dir(&published));
    engine.hold(IoOperation::Link);
    let error = std::thread::scope(|scope| {
        let loading = scope.spawn(|| open(&shared).map(drop));
        engine.wait_until_held();
        // The files are open at this point, and have no name that keeps a tier from writing them again.
        for path in &paths {
            memory.remove_file(path).expect("removed");
        }
        engine.release();
        loading.join().expect("no panic").expect_err("what is loaded is gone")
    });
    assert_eq!((error.kind(), error.errno()), (Kind::Storage, Some(libc::ENOENT)));
    assert!(paths.iter().any(|path| error.path() == Some(path)) && error.to_string().contains("link"), "{error}");
}
