//! The starts of buckets are read in windows, so the number of buckets, which comes from a file, allocates no memory.
//!
//! The case runs in its own process, so that only its own memory is measured.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use embcache::checkpoint::{LatestCheckpoint, OpenCheckpoint};
use embcache::config::OptimizerKind;
use embcache::io::IoEngine;
use embcache::types::Id;
use embcache_tests::checkpoint::{ROOT, Table, memory, save};
use embcache_tests::directory_in;

/// A number of KiB in `/proc/self/status`, in bytes.
fn status(field: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// Environment variable of the process that measures its memory.
const ALONE: &str = "EMBCACHE_TEST_ALONE";

#[test]
fn a_load_takes_no_memory_for_buckets_that_it_does_not_hold() {
    if std::env::var_os(ALONE).is_some() {
        return load_parts_of_many_buckets();
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let name = "many_buckets::a_load_takes_no_memory_for_buckets_that_it_does_not_hold";
    let status = child.args(["--exact", name, "--nocapture"]).env(ALONE, "1").status().unwrap();
    assert!(status.success(), "see above");
}

fn load_parts_of_many_buckets() {
    const BUCKETS: u32 = 16 << 20;
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let ids: Vec<Id> = (0..50).collect();
    let mut table = Table::new("m", "a", OptimizerKind::Sgd, 2, &ids, 1);
    table.spec.total_num_buckets = BUCKETS;
    save(&engine, Path::new(ROOT), &[table], 1, 16 << 20, 7).unwrap();
    let directory = directory_in(&engine, ROOT);
    let latest = LatestCheckpoint::read(&directory).unwrap();
    let checkpoint = OpenCheckpoint::open(&directory, latest).unwrap();
    // The peak counts from here.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS");
    for (buckets, share) in [(0..BUCKETS, 1), (0..BUCKETS / 2, 2), (BUCKETS / 2..BUCKETS, 2)] {
        let reader = checkpoint.table_reader("m", "a", buckets).unwrap();
        let mut rows = 0;
        reader
            .read(&mut |headers, _| {
                rows += headers.len();
                Ok(())
            })
            .unwrap();
        assert_eq!(rows as u64, reader.rows());
        assert!(share == 1 && rows == 50 || share == 2 && (10..40).contains(&rows), "{rows} rows");
    }
    let taken = status("VmHWM") - before;
    assert!(
        taken < BUCKETS as usize,
        "{taken} bytes for {BUCKETS} buckets, whose starts are {} bytes",
        BUCKETS as usize * 8
    );
}
