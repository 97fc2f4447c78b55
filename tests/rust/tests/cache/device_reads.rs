//! Tests of events during device reads: the table's lock is free for other threads, and no failure or interruption
//! loses a row.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use embcache::Kind;
use embcache::cache::{Plan, PlanMode, PreImages, TableStats};
use embcache::config::{EvictionConfig, EvictionRule, OptimizerKind, TableConfig};
use embcache::io::{IoFault, IoOperation, MemoryEngine};
use embcache::rows::RowHeader;
use embcache::types::Id;
use embcache_tests::dice::Dice;
use embcache_tests::{Contents, Rig, config, three_tiers, watched};

const DIM: usize = 4;
const BAG: usize = 3;

fn open(wanted: TableConfig) -> Arc<Rig> {
    Arc::new(Rig::open(wanted, Arc::new(MemoryEngine::default())).expect("a table"))
}

/// Tables whose device tier has a part of the rows: with the others in RAM, and with the others in RAM and on SSD.
fn tiers() -> [TableConfig; 2] {
    let in_ram = TableConfig { device_rows: Some(12), ..config(DIM, OptimizerKind::Adagrad, 200) };
    [in_ram, three_tiers(DIM, Some(12), 60, 1 << 20)]
}

fn stats(rig: &Rig) -> TableStats {
    rig.table.stats().expect("counters")
}

fn device_rows(rig: &Rig) -> u64 {
    stats(rig).device.expect("a device tier").rows
}

/// True if the row of an id is read from the device.
fn is_on_device(rig: &Rig, id: Id) -> bool {
    rig.amid_device_read(0, || Ok(()));
    rig.table.read_rows(&[id]).expect("a row");
    rig.device_read_ended()
}

/// Runs `work` on another thread during the next read from the device, which waits for it.
fn amid_on_another_thread(rig: &Arc<Rig>, work: impl FnOnce(&Rig) + Send + 'static) {
    let theirs = Arc::clone(rig);
    rig.amid_device_read(0, move || {
        std::thread::spawn(move || work(&theirs)).join().expect("no panic");
        Ok(())
    });
}

/// While victims are read from the device, other threads use the table, and a victim that one of them needs stays.
#[test]
fn table_stays_usable_while_victims_are_read() {
    watched(String::new, || {
        let rig = open(TableConfig { device_rows: Some(6), ..config(DIM, OptimizerKind::Adagrad, 100) });
        let oracle = open(config(DIM, OptimizerKind::Adagrad, 100));
        rig.train(&[1, 2, 3, 4, 5, 6], BAG, 0).expect("a step");
        let wanted: Arc<Mutex<Option<Plan>>> = Arc::default();
        let planned = Arc::clone(&wanted);
        amid_on_another_thread(&rig, move |rig| {
            assert_eq!((rig.table.len().expect("a length"), stats(rig).rows), (6, 6));
            let plan = rig.plan(&[1, 50], PlanMode::TRAIN).expect("a plan of a row that leaves");
            *planned.lock().expect("no panic") = Some(plan);
        });
        rig.train(&[7, 8, 9], BAG, 1).expect("a step");
        assert!(rig.device_read_ended());
        assert_eq!((device_rows(&rig), stats(&rig).device.expect("a device tier").evictions), (6, 3));
        assert!(is_on_device(&rig, 1), "another plan wanted it before it had left");
        assert!(![2, 3, 4].into_iter().any(|id| is_on_device(&rig, id)), "others left in its place");
        let plan = wanted.lock().expect("no panic").take().expect("a plan");
        rig.finish(&plan, 2, BAG, 2).expect("a step");
        drop(plan);
        for (salt, batch) in [&[1, 2, 3, 4, 5, 6][..], &[7, 8, 9], &[1, 50]].into_iter().enumerate() {
            oracle.train(batch, BAG, salt as u32).expect("a step");
        }
        assert_eq!(rig.contents().expect("contents"), oracle.contents().expect("contents"));
        assert_eq!(stats(&rig).pinned_rows, 0);
    });
}

/// Runs one operation on a table, selected by `number`.
fn do_something(rig: &Rig, number: u64, is_oracle: bool) -> embcache::Result<()> {
    let mut dice = Dice(number * 31 + 5);
    let ids: Vec<Id> = (0..9).map(|_| dice.roll(70) as Id).collect();
    match number % 11 {
        4 if !is_oracle => rig.table.flush(number + 1),
        5 if !is_oracle => rig.table.read_rows(&ids).map(drop),
        6 if !is_oracle => rig.contents().map(drop),
        7 if !is_oracle => saved(rig, number as u32).and_then(|saved| {
            assert_eq!(saved, rig.contents()?, "the save has each row as it was");
            Ok(())
        }),
        8 => {
            let rows: Contents = ids
                .iter()
                .map(|&id| (id, (RowHeader { id, count: 3, ..RowHeader::default() }, vec![id as u32; 2 * DIM])))
                .collect();
            rig.import(&rows)
        }
        9 => rig.table.remove_rows(&ids[..3]).map(drop),
        4..=7 => Ok(()),
        _ => rig.train(&ids, BAG, number as u32).map(drop),
    }
}

/// The rows of a snapshot, as in an asynchronous save.
fn saved(rig: &Rig, next_epoch: u32) -> embcache::Result<Contents> {
    let images = Arc::new(PreImages::new(Arc::new(MemoryEngine::default()), "/images".into(), 1 << 20, 1));
    let mut rows = Contents::new();
    rig.table.snapshot(&images, next_epoch)?.for_each_chunk(5, &mut |chunk| {
        for (at, header) in chunk.headers.iter().enumerate() {
            let vector = &chunk.vectors[at * 2 * DIM..][..2 * DIM];
            rows.insert(header.id, (*header, vector.iter().map(|value| value.to_bits()).collect()));
        }
        Ok(())
    })?;
    rig.table.finish_background_save(next_epoch, None);
    Ok(rows)
}

/// Headers without the epoch, which differs after a retried save.
fn without_epochs(rig: &Rig) -> Contents {
    let mut rows = rig.contents().expect("contents");
    for (header, _) in rows.values_mut() {
        header.modified_epoch = 0;
    }
    rows
}

const THINGS: u64 = 88;

/// Runs all operations, each until it succeeds. Runs `amid` before the read from the device of this number.
fn all_with(wanted: &TableConfig, read: u32, amid: impl FnOnce() -> embcache::Result<()> + Send + 'static) -> Arc<Rig> {
    let rig = open(wanted.clone());
    rig.amid_device_read(read, amid);
    for number in 0..THINGS {
        let mut tries = 0;
        while let Err(error) = do_something(&rig, number, false) {
            assert_eq!(error.kind(), Kind::Storage, "{error}");
            tries += 1;
            assert!(tries < 2, "one read has failed: {error}");
        }
    }
    rig
}

fn oracle() -> Contents {
    let oracle = open(config(DIM, OptimizerKind::Adagrad, 200));
    (0..THINGS).for_each(|number| do_something(&oracle, number, true).expect("in RAM"));
    without_epochs(&oracle)
}

/// A device read that fails leaves every row, for each purpose of the read.
#[test]
fn failed_device_read_leaves_every_row() {
    watched(String::new, || {
        let expected = oracle();
        for wanted in tiers() {
            let mut failed = 0;
            loop {
                let busy = || Err(Kind::Storage.error("the device is busy"));
                let rig = all_with(&wanted, failed, busy);
                if !rig.device_read_ended() {
                    break;
                }
                assert_eq!(without_epochs(&rig), expected, "read {failed} has failed");
                assert_eq!(stats(&rig).pinned_rows, 0);
                failed += 1;
            }
            assert!(failed > 30, "{failed} reads");
        }
    });
}

#[test]
fn plans_during_device_reads_change_no_row() {
    watched(String::new, || {
        let expected = oracle();
        for wanted in tiers() {
            for read in (0..30).step_by(2) {
                let rig: Arc<Mutex<Option<Arc<Rig>>>> = Arc::default();
                let theirs = Arc::clone(&rig);
                let begun = Arc::new(AtomicU32::new(0));
                let count = Arc::clone(&begun);
                let all = open(wanted.clone());
                *rig.lock().expect("no panic") = Some(Arc::clone(&all));
                all.amid_device_read(read, move || {
                    let rig = theirs.lock().expect("no panic").take().expect("a table");
                    std::thread::spawn(move || {
                        for ahead in [true, false] {
                            let ids: Vec<Id> = (0..70).collect();
                            let plan =
                                rig.plan(&ids, PlanMode { is_prefetch: ahead, ..PlanMode::TRAIN }).expect("a plan");
                            count.fetch_add(1, Ordering::Relaxed);
                            drop(plan);
                        }
                    })
                    .join()
                    .expect("no panic");
                    Ok(())
                });
                for number in 0..THINGS {
                    do_something(&all, number, false).expect("nothing fails");
                }
                assert_eq!((all.device_read_ended(), begun.load(Ordering::Relaxed)), (true, 2), "read {read}");
                assert_eq!(without_epochs(&all), expected, "plans came and went amid read {read}");
                assert_eq!((stats(&all).pinned_rows, device_rows(&all) <= 12), (0, true));
            }
        }
    });
}

#[test]
fn panic_in_device_read_ends_plan_and_leaves_every_row() {
    watched(String::new, || {
        for wanted in tiers() {
            let (rig, oracle) = (open(wanted), open(config(DIM, OptimizerKind::Adagrad, 200)));
            let batches: Vec<Vec<Id>> =
                (0..8).map(|batch| (0..9).map(|at| (batch * 7 + at * 3) % 40).collect()).collect();
            for (salt, batch) in batches.iter().enumerate() {
                if salt == 5 {
                    rig.amid_device_read(0, || panic!("asked to panic"));
                    let panicked = catch_unwind(AssertUnwindSafe(|| rig.train(&[91, 92, 93], BAG, 0)));
                    assert!(panicked.is_err(), "room for it is made by reading the device");
                    assert_eq!((stats(&rig).pinned_rows, device_rows(&rig)), (0, 12));
                }
                rig.train(batch, BAG, salt as u32).expect("a step");
                oracle.train(batch, BAG, salt as u32).expect("a step");
            }
            assert_eq!(rig.contents().expect("contents"), oracle.contents().expect("contents"));
        }
    });
}

#[test]
fn table_closed_during_device_read_rejects_batch() {
    watched(String::new, || {
        let rig = open(TableConfig { device_rows: Some(6), ..config(DIM, OptimizerKind::Adagrad, 100) });
        rig.train(&[1, 2, 3, 4, 5, 6], BAG, 0).expect("a step");
        amid_on_another_thread(&rig, |rig| rig.table.close().expect("closed"));
        let error = rig.train(&[7, 8, 9], BAG, 1).expect_err("the table is closed");
        assert!(rig.device_read_ended());
        assert!(error.kind() == Kind::State && error.to_string().contains("is closed"), "{error}");
    });
}

/// The rule reads weights, which are on the device. Each batch evaluates a part of the slots, and the lock is free
/// while these are read.
#[test]
fn sweep_by_weights_expires_same_rows_on_device_as_in_ram() {
    watched(String::new, || {
        let rule = |every: u64| EvictionConfig {
            rule: EvictionRule::NormBelow(1.2),
            every_steps: std::num::NonZeroU64::new(every),
        };
        for every in [1, 4] {
            let eviction = Some(rule(every));
            let rig = open(TableConfig { eviction: eviction.clone(), ..tiers()[0].clone() });
            let oracle = open(TableConfig { eviction, ..config(DIM, OptimizerKind::Adagrad, 200) });
            let queue = rig.table.start_evicted_queue().expect("a queue");
            let others = Arc::new(AtomicU32::new(0));
            for step in 0..60 {
                let mut dice = Dice(step);
                let ids: Vec<Id> = (0..9).map(|_| dice.roll(40) as Id).collect();
                let count = Arc::clone(&others);
                amid_on_another_thread(&rig, move |rig| {
                    assert!(stats(rig).step <= 60);
                    count.fetch_add(1, Ordering::Relaxed);
                });
                rig.train(&ids, BAG, step as u32).expect("a step");
                oracle.train(&ids, BAG, step as u32).expect("a step");
                while queue.take().is_some() {}
                if step % 7 == 0 {
                    assert_eq!(rig.contents().expect("contents"), oracle.contents().expect("contents"), "step {step}");
                }
            }
            assert!(others.load(Ordering::Relaxed) > 20);
            let [swept, expected] = [&rig, &oracle].map(|rig| stats(rig).eviction.expect("a rule").evicted);
            assert!(swept == expected && swept > 50, "{swept} of {expected}");
            rig.table.sweep().expect("a sweep");
            rig.table.end_evicted_queue().expect("told of all that it takes");
            assert!(
                queue.wait().is_some() && !rig.contents().expect("contents").is_empty(),
                "rows are told of, and some live"
            );
            while queue.take().is_some() {}
            assert!(queue.wait().is_none(), "nobody waits for more");
        }
    });
}

/// A row cannot leave the device if the SSD tier accepts no writes. The batch then reads in slots past the budget, and
/// does not search for other rows to demote.
#[test]
fn evaluation_after_failed_write_reads_few_device_rows() {
    watched(String::new, || {
        let (rig, faults) = Rig::with_faults(three_tiers(DIM, Some(12), 60, 1 << 20));
        for step in 0..30 {
            let ids: Vec<Id> = (0..9).map(|at| step * 5 + at).collect();
            rig.train(&ids, BAG, step as u32).expect("a step");
        }
        faults.hit_every(IoOperation::Write, IoFault::Fail(libc::EIO));
        let error_of = |step: Id| rig.train(&(0..9).map(|at| 900 + step * 9 + at).collect::<Vec<Id>>(), BAG, 0).err();
        let error = (0..3000).find_map(error_of).expect("no row can be written");
        assert_eq!(error.kind(), Kind::ReadOnly, "{error}");
        let before = rig.table.stats().expect("counters").device.expect("a device tier").read_bytes;
        rig.evaluate(&[0, 1, 2, 3], BAG, true).expect("an evaluation");
        let read = rig.table.stats().expect("counters").device.expect("a device tier").read_bytes - before;
        assert!(read <= 16 * (2 * DIM as u64 * 4), "{read} bytes");
    });
}
