//! A plan processes its tables in parallel: with the results of sequential processing, and concurrently with other
//! plans of the same tables.

use std::sync::Arc;

use embcache::Kind;
use embcache::cache::{DeviceTensors, Lookup, PlanMode};
use embcache::config::{OptimizerKind, TableConfig};
use embcache::io::MemoryEngine;
use embcache::types::Id;
use embcache_tests::dice::Dice;
use embcache_tests::{Contents, Rig, config, hyperparameters, three_tiers, watched};

const DIM: usize = 4;
/// Ids of a batch for each table. Enough that each table has a thread.
const IDS: usize = 6000;
const BAG: usize = 10;

/// Tables with all tiers, with a device tier and RAM, and with only RAM and SSD.
fn tables() -> Vec<Rig> {
    let wanted = [
        three_tiers(DIM, Some(1000), 700, 1 << 22),
        TableConfig { device_rows: Some(1000), ..config(DIM, OptimizerKind::Adagrad, 4000) },
        three_tiers(DIM, None, 1500, 1 << 22),
    ];
    let open = |config| Rig::open(config, Arc::new(MemoryEngine::default())).expect("a table");
    wanted.into_iter().map(open).collect()
}

fn lookup<'a>(rigs: impl IntoIterator<Item = &'a Rig>) -> Lookup {
    let rigs: Vec<&Rig> = rigs.into_iter().collect();
    let tables: Vec<_> = rigs.iter().map(|rig| rig.table.clone()).collect();
    Lookup::new(&tables, &(0..rigs.len()).collect::<Vec<usize>>()).expect("one feature of each table")
}

/// The ids of a batch, of `most` different ones starting at `first`, distinct for each table.
fn batch(tables: usize, number: u64, first: Id, most: u64) -> Vec<Id> {
    let mut dice = Dice(number * 1_000_000);
    (0..tables * IDS).map(|_| first + dice.roll(most) as Id).collect()
}

/// Calls `body` with the device tensors of all tables.
fn with_tensors<'a>(
    rigs: &[&Rig],
    mut tensors: Vec<Option<DeviceTensors<'a>>>,
    body: &mut dyn FnMut(&mut [Option<DeviceTensors<'_>>]),
) {
    let Some((rig, rest)) = rigs.split_first() else { return body(&mut tensors) };
    rig.with_tensors(|own| {
        let mut all: Vec<Option<DeviceTensors<'_>>> = tensors.into_iter().collect();
        all.push(own.first_mut().and_then(Option::take));
        with_tensors(rest, all, body);
    });
}

/// Runs a training step of all tables like Python: rows are moved and updated while no other thread uses rows.
fn step(rigs: &[&Rig], lookup: &Lookup, ids: &[Id], threads: usize) -> embcache::Result<()> {
    let splits: Vec<i64> = (0..=rigs.len()).map(|table| (table * IDS) as i64).collect();
    let plan = lookup.plan(ids, &splits, PlanMode { threads, ..PlanMode::TRAIN }, &[])?;
    plan.exclusively(|| {
        plan.wait(&mut [])?;
        rigs.iter().enumerate().try_for_each(|(table, rig)| rig.scatter(&plan, table))?;
        plan.scattered()
    })??;
    let offsets: Vec<i64> = (0..=ids.len()).step_by(BAG).map(|offset| offset as i64).collect();
    let mut out = vec![0.0; IDS / BAG * rigs.len() * DIM];
    let numbers = vec![hyperparameters(); rigs.len()];
    plan.exclusively(|| {
        let mut done = Ok(());
        with_tensors(rigs, Vec::new(), &mut |tensors| {
            done = plan.forward_pooled(&offsets, None, &vec![false; rigs.len()], &mut out, tensors, 1).and_then(|()| {
                let grad: Vec<f32> = out.iter().map(|value| value * 0.01 + 0.02).collect();
                plan.backward_pooled(&grad, &numbers, None, tensors, 1)
            });
        });
        done
    })?
}

fn contents(rigs: &[Rig]) -> Vec<Contents> {
    rigs.iter().map(|rig| rig.contents().expect("contents")).collect()
}

#[test]
fn parallel_tables_have_rows_of_sequential_tables() {
    watched(String::new, || {
        let trained = |threads| {
            let rigs = tables();
            let lookup = lookup(&rigs);
            let all: Vec<&Rig> = rigs.iter().collect();
            for number in 0..10 {
                step(&all, &lookup, &batch(rigs.len(), number, 0, 3000), threads).expect("a step");
            }
            for rig in &rigs {
                assert_eq!(rig.table.stats().expect("counters").pinned_rows, 0);
            }
            contents(&rigs)
        };
        let one_by_one = trained(1);
        assert!(one_by_one.iter().all(|rows| rows.len() > 2000), "each table has more rows than fit its fastest tier");
        assert!(trained(4) == one_by_one);
    });
}

/// If several tables fail, the error is that of the first one, and no row has moved.
#[test]
fn first_failed_table_is_reported_and_no_row_moves() {
    watched(String::new, || {
        let (rigs, oracle) = (tables(), tables());
        let (ours, theirs) = (lookup(&rigs), lookup(&oracle));
        let (all, others): (Vec<&Rig>, Vec<&Rig>) = (rigs.iter().collect(), oracle.iter().collect());
        // Each batch has rows of the previous one, and others that replace evicted rows.
        let ids = |number: u64| batch(rigs.len(), number, number as Id * 400, 900);
        (0..3).for_each(|number| step(&all, &ours, &ids(number), 4).expect("a step"));
        let before = contents(&rigs);
        for threads in [4, 1, 4] {
            // The second table fails sooner.
            rigs[0].amid_device_read(0, || {
                std::thread::sleep(std::time::Duration::from_millis(30));
                Err(Kind::Storage.error("the first table's device is busy"))
            });
            rigs[1].amid_device_read(0, || Err(Kind::Storage.error("the second table's device is busy")));
            let error = step(&all, &ours, &ids(3), threads).expect_err("rows that leave cannot be read");
            assert!(error.to_string().contains("the first table's device is busy"), "{error}");
            let both_failed = rigs[..2].iter().all(Rig::device_read_ended);
            assert!(both_failed, "both have failed, with any number of threads");
            assert!(rigs.iter().all(|rig| rig.table.stats().expect("counters").pinned_rows == 0));
        }
        assert!(contents(&rigs) == before);
        (3..6).for_each(|number| step(&all, &ours, &ids(number), 4).expect("a step"));
        (0..6).for_each(|number| step(&others, &theirs, &ids(number), 1).expect("a step"));
        assert!(contents(&rigs) == contents(&oracle));
    });
}

/// The number of threads of this process that help with calls.
#[cfg(target_os = "linux")]
fn helping_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("the threads").flatten();
    let names = tasks.map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default());
    names.filter(|name| ["embcache-kernel", "embcache-table"].iter().any(|of| name.starts_with(of))).count()
}

#[cfg(target_os = "linux")]
#[test]
fn batches_of_all_sizes_share_as_many_threads_as_one_of_them_asks_for() {
    const THREADS: usize = 48;
    let tables: usize = 3;
    let open =
        |_| Rig::open(config(64, OptimizerKind::Sgd, 60_000), Arc::new(MemoryEngine::default())).expect("a table");
    let rigs: Vec<Rig> = (0..tables).map(open).collect();
    let lookup = lookup(&rigs);
    let mut size: usize = 64;
    while size < 30_000 {
        let ids: Vec<Id> = (0..tables).flat_map(|_| 0..size as Id).collect();
        let splits: Vec<i64> = (0..=tables).map(|table| (table * size) as i64).collect();
        let plan = lookup.plan(&ids, &splits, PlanMode { threads: THREADS, ..PlanMode::TRAIN }, &[]).expect("a plan");
        plan.wait(&mut []).expect("a place");
        let (offsets, mut out) = ((0..=ids.len() as i64).collect::<Vec<i64>>(), vec![0.0; ids.len() * 64]);
        plan.forward_pooled(&offsets, None, &[false; 3], &mut out, &mut [], THREADS).expect("a forward");
        plan.backward_pooled(&out, &[hyperparameters(); 3], None, &mut [], THREADS).expect("a backward");
        size += size / 4;
    }
    // Other tests of this process request fewer. A pool that was replaced by a larger one takes some time to stop.
    let most = THREADS.max(std::thread::available_parallelism().map_or(1, usize::from));
    watched(String::new, || {
        while helping_threads() >= most {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    });
}

/// One of several trainers, which have other ids of the same tables, each in its own order.
fn train_part(rigs: &[Rig], number: u64, threads: usize) {
    let mut all: Vec<&Rig> = rigs.iter().collect();
    all.rotate_left(number as usize);
    let lookup = lookup(all.iter().copied());
    for step_number in 0..8 {
        let ids = batch(rigs.len(), number * 100 + step_number, number as Id * 10_000, 1200);
        step(&all, &lookup, &ids, threads).expect("a step");
    }
}

#[test]
fn concurrent_plans_of_same_tables_all_end() {
    watched(String::new, || {
        let (rigs, oracle) = (tables(), tables());
        std::thread::scope(|scope| {
            for number in 0..3 {
                let rigs = &rigs;
                scope.spawn(move || train_part(rigs, number, 8));
            }
        });
        (0..3).for_each(|number| train_part(&oracle, number, 1));
        let weights = |rigs: &[Rig]| -> Vec<Vec<(Id, Vec<u32>)>> {
            let of = |rows: Contents| rows.into_iter().map(|(id, (_, bits))| (id, bits)).collect();
            contents(rigs).into_iter().map(of).collect()
        };
        assert!(weights(&rigs) == weights(&oracle), "each id was trained by one thread, in the order of its steps");
    });
}
