//! A memory allocation fails during a batch. The batch returns an error, no row is partially moved, and each row can be
//! read and trained again.
//!
//! Each case runs in its own process, because the limit applies to the entire process.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used)]

use std::process::Command;
use std::sync::Arc;

use embcache::cache::PlanMode;
use embcache::config::{AdmissionRule, MissingRead, OptimizerKind, ReopenMode, TableConfig};
use embcache::io::{MemoryEngine, default_engine};
use embcache::runtime::memory::ReservingAllocator;
use embcache::ssd::{SsdTier, StateCounters};
use embcache::types::Id;
use embcache::{Error, Kind};
use embcache_tests::ssd::{self, Versions};
use embcache_tests::{Contents, Rig, config, watched};

const CASE: &str = "EMBCACHE_TEST_REFUSED_MEMORY_CASE";
const MIB: u64 = 1 << 20;
const BAG: usize = 8;

/// Limits this process to mapping `more` additional bytes, or removes the limit.
fn limit(more: Option<u64>) {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
    // SAFETY: sysconf reads a constant and touches no memory of this process.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
    let most = more.map_or(libc::RLIM_INFINITY, |more| pages * page + more);
    let wanted = libc::rlimit { rlim_cur: most, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the call reads a struct that outlives it.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const wanted) }, 0);
}

fn three_tiers(dim: usize, device_rows: Option<u32>, host_rows: u64) -> TableConfig {
    embcache_tests::three_tiers(dim, device_rows, host_rows, 256 * MIB)
}

fn rig(wanted: TableConfig) -> Rig {
    Rig::open(wanted, Arc::new(MemoryEngine::default())).unwrap()
}

/// The table after these batches if RAM fits all of it.
fn straight(dim: usize, batches: &[Vec<Id>]) -> (Rig, Contents) {
    let oracle = rig(config(dim, OptimizerKind::Adagrad, 400_000));
    for (salt, ids) in batches.iter().enumerate() {
        oracle.train(ids, BAG, salt as u32).unwrap();
    }
    let contents = oracle.contents().unwrap();
    (oracle, contents)
}

fn is_of_memory(error: &Error) -> bool {
    error.kind() == Kind::Memory && error.errno() == Some(libc::ENOMEM)
}

/// A batch has more rows on SSD than fit the budget. Allocations for the rows past the budget fail while the others are
/// being read.
fn amid_reads() {
    const DIM: usize = 256;
    let rig = rig(three_tiers(DIM, None, 4300));
    let mut done: Vec<Vec<Id>> = (0..4).map(|batch| (batch * 3000..(batch + 1) * 3000).collect()).collect();
    for (salt, ids) in done.iter().enumerate() {
        rig.train(ids, BAG, salt as u32).unwrap();
    }
    // The rows are clean, so nothing is written when they are evicted.
    rig.table.flush(1).unwrap();
    let (oracle, before) = straight(DIM, &done);
    let wanted: Vec<Id> = (0..8192).collect();
    rig.evaluate(&wanted[..4000], BAG, false).unwrap();

    // Overflow is allocated in chunks of 2 MiB and more.
    limit(Some(MIB * 7 / 4));
    for train in [true, false] {
        let Err(error) = rig.plan(&wanted, PlanMode { train, ..PlanMode::TRAIN }) else {
            panic!("there is memory for the rows past the budget");
        };
        assert!(is_of_memory(&error), "{error:?}");
        for ids in wanted.chunks(1024) {
            let read = rig.evaluate(ids, BAG, false).unwrap();
            assert!(read == oracle.evaluate(ids, BAG, false).unwrap(), "a row whose read was begun is another one now");
        }
    }
    limit(None);
    assert_eq!(rig.table.stats().unwrap().pinned_rows, 0);
    assert!(rig.contents().unwrap() == before, "the batch that was refused changed something");

    done.push(wanted);
    rig.train(&done[4], BAG, 4).unwrap();
    assert!(rig.contents().unwrap() == straight(DIM, &done).1);
}

/// Allocations for rows that leave the device fail in the host tier, whose index has to grow.
fn below_the_device() {
    const DIM: usize = 2;
    const ROWS: Id = 400;
    let rig = rig(three_tiers(DIM, Some(ROWS as u32), 300_000));
    let batch = |number: Id| (number * ROWS..(number + 1) * ROWS).collect::<Vec<Id>>();
    let mut done: Vec<Vec<Id>> = (0..100).map(batch).collect();
    for (salt, ids) in done.iter().enumerate() {
        rig.train(ids, BAG, salt as u32).unwrap();
    }
    // The index grows on the way to 300,000 rows, and uses several MiB in the end.
    limit(Some(MIB * 5 / 4));
    let refused = loop {
        let ids = batch(done.len() as Id);
        match rig.train(&ids, BAG, done.len() as u32) {
            Ok(_) => done.push(ids),
            Err(error) => break error,
        }
        assert!(done.len() < 700, "no limit was met");
    };
    limit(None);
    assert!(is_of_memory(&refused), "{refused:?}");
    assert_eq!(rig.table.stats().unwrap().pinned_rows, 0);
    assert!(rig.contents().unwrap() == straight(DIM, &done).1, "a row was lost on its way down");
    for _ in 0..3 {
        let ids = batch(done.len() as Id);
        rig.train(&ids, BAG, done.len() as u32).unwrap();
        done.push(ids);
    }
    assert!(rig.contents().unwrap() == straight(DIM, &done).1);
}

/// Rows are prefetched for the device into a host tier whose index has to grow, because it is empty after a resume.
fn ahead_of_the_device() {
    const DIM: usize = 2;
    const ROWS: Id = 400;
    let engine = Arc::new(MemoryEngine::default());
    let mut wanted = three_tiers(DIM, Some(ROWS as u32), 300_000);
    let batches: Vec<Vec<Id>> = (0..300).map(|number| (number * ROWS..(number + 1) * ROWS).collect()).collect();
    let first = Rig::open(wanted.clone(), engine.clone()).unwrap();
    for (salt, ids) in batches.iter().enumerate() {
        first.train(ids, BAG, salt as u32).unwrap();
    }
    first.table.flush(1).unwrap();
    first.table.close().unwrap();
    drop(first);
    let (_, before) = straight(DIM, &batches);
    wanted.ssd.as_mut().unwrap().reopen = ReopenMode::Resume;
    let rig = Rig::open(wanted, engine).unwrap();
    let mut plans: Vec<_> = batches[..50].iter().map(|ids| rig.plan(ids, PlanMode::TRAIN_PREFETCH).unwrap()).collect();
    limit(Some(MIB * 5 / 4));
    let refused =
        batches[50..].iter().find_map(|ids| rig.plan(ids, PlanMode::TRAIN_PREFETCH).map(|plan| plans.push(plan)).err());
    limit(None);
    let refused = refused.expect("no limit was met");
    assert!(is_of_memory(&refused), "{refused:?}");
    drop(plans);
    assert_eq!(rig.table.stats().unwrap().pinned_rows, 0);
    assert!(rig.contents().unwrap() == before, "a plan that was refused changed something");
}

/// Many tables write to SSD, each with a buffer, in less memory than all buffers need. Each call succeeds, or fails and
/// changes nothing.
fn onto_ssd() {
    const TABLES: usize = 80;
    ReservingAllocator::keep_reserve();
    let root = tempfile::tempdir().unwrap();
    let engine = default_engine().unwrap();
    let at = |number: usize, reopen| ssd::config(&root.path().join(number.to_string()), 128 * MIB, reopen);
    let mut tables: Vec<(SsdTier, Versions)> =
        (0..TABLES).map(|n| (ssd::open(&engine, &at(n, ReopenMode::Never)).unwrap().0, Versions::new())).collect();
    let ids: Vec<Id> = (0..400).collect();
    let mut refused = Vec::new();
    // The indexes have all ids, and no segment is open. From here tables only allocate write buffers.
    for (tier, held) in &mut tables {
        ssd::append(tier, &ids, 1, held).unwrap();
        tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    }
    limit(Some(MIB));
    for (number, (tier, held)) in tables.iter_mut().enumerate() {
        // The first table writes much more than its buffers hold.
        let versions = if number == 0 { 600 } else { 1 };
        for version in 2..=versions + 1 {
            if let Err(error) = ssd::append(tier, &ids, version, held) {
                assert!(is_of_memory(&error), "{error:?}");
                refused.push(number);
                break;
            }
        }
    }
    assert!(refused.len() > 5 && refused.len() < TABLES, "{refused:?} were refused");
    for (tier, held) in &mut tables {
        let half: Vec<Id> = ids.iter().copied().filter(|id| id % 2 == 0).collect();
        match tier.remove(&half) {
            Ok(()) => held.retain(|id, _| id % 2 == 1),
            Err(error) => assert!(is_of_memory(&error), "{error:?}"),
        }
    }
    limit(None);
    for (tier, held) in &mut tables {
        ssd::check(tier, held, -10..500);
        ssd::append(tier, &ids[100..300], 1000, held).unwrap();
        tier.publish(Some(7), StateCounters::default(), Vec::new()).unwrap();
        tier.close().unwrap();
    }
    for (number, (_, held)) in tables.iter().enumerate() {
        ssd::check(&ssd::open(&engine, &at(number, ReopenMode::Resume)).unwrap().0, held, -10..500);
    }
}

/// The memory of an admission rule is a limit, and none is allocated before ids are counted.
fn for_counts() {
    limit(Some(512 * MIB));
    for (memory, buckets) in [(1 << 30, 4096), (1 << 62, 13), (1 << 62, 4096), (1 << 62, 1 << 15), (u64::MAX, 1 << 20)]
    {
        let wanted = TableConfig {
            admission: AdmissionRule::Count { threshold: 2, window_steps: None, memory },
            not_admitted: MissingRead::Zeros,
            total_num_buckets: buckets,
            buckets: 0..buckets,
            ..config(4, OptimizerKind::Sgd, 50_000)
        };
        let rig = rig(wanted);
        rig.train(&[1, 2, 3], 1, 0).unwrap();
        rig.train(&[1, 2, 4], 1, 0).unwrap();
        assert_eq!(rig.table.len().unwrap(), 2, "memory={memory} with {buckets} buckets");
    }
}

/// The other process of the tests below. Without the variable it does nothing.
#[test]
fn child() {
    let Some(case) = std::env::var_os(CASE) else { return };
    watched(String::new, || match case.to_str().unwrap() {
        "reads" => amid_reads(),
        "device" => below_the_device(),
        "ahead" => ahead_of_the_device(),
        "onto" => onto_ssd(),
        "counts" => for_counts(),
        other => panic!("no case {other}"),
    });
}

fn run(case: &str) {
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "out_of_memory::child", "--nocapture"])
        .env(CASE, case)
        .output()
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{said}");
}

#[test]
fn rows_whose_read_was_begun_when_memory_was_refused_are_read() {
    run("reads");
}

#[test]
fn rows_that_leave_the_device_when_memory_is_refused_stay_there() {
    run("device");
}

#[test]
fn prefetched_rows_stay_on_ssd_when_allocation_fails() {
    run("ahead");
}

#[test]
fn admission_counts_take_no_memory_before_there_are_ids() {
    run("counts");
}

#[test]
fn rows_stay_in_place_when_write_buffer_allocation_fails() {
    run("onto");
}
