//! A plan fails, is released or is dropped at any point between its planning and its commit. Then every row of every
//! table is unchanged and in its previous tier, or the tables reject all use.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use embcache::cache::{DeviceTensors, Lookup, Plan, PlanMode, PreImages, RowBlock};
use embcache::config::{OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, MemoryEngine};
use embcache::rows::RowHeader;
use embcache::types::Id;
use embcache::{Error, Kind};
use embcache_tests::{Contents, Rig, config, hyperparameters, watched};

const DIM: usize = 4;

fn settings(name: &str, device_rows: Option<u32>, host_rows: u64, ssd: bool) -> TableConfig {
    let mut wanted = config(DIM, OptimizerKind::RowWiseAdagrad, host_rows);
    wanted.name = name.into();
    wanted.key = embcache::types::table_key(name);
    wanted.device_rows = device_rows;
    wanted.ssd = ssd.then(|| SsdConfig {
        dir: PathBuf::from("/base").join(name).join("t/0-of-1"),
        bytes: 1 << 20,
        reopen: ReopenMode::Never,
        resume_commit_id: None,
    });
    wanted
}

/// The tiers of both tables, each too small for the rows of the test.
const TIERS: [(Option<u32>, u64, bool); 4] =
    [(None, 30, true), (Some(14), 400, false), (Some(14), 12, true), (Some(5), 4, true)];

/// Two tables under one lookup, with a feature each.
struct Pair {
    rigs: [Rig; 2],
    lookup: Lookup,
    faults: FaultEngine,
}

/// A batch: the ids of both tables.
type Batch = [Vec<Id>; 2];

impl Pair {
    fn open((device_rows, host_rows, ssd): (Option<u32>, u64, bool)) -> Self {
        let faults = FaultEngine::new(Arc::new(MemoryEngine::default()));
        let rigs = ["a", "b"].map(|name| {
            Rig::open(settings(name, device_rows, host_rows, ssd), Arc::new(faults.clone())).expect("a table")
        });
        let lookup = Lookup::new(&[rigs[0].table.clone(), rigs[1].table.clone()], &[0, 1]).expect("a lookup");
        Self { rigs, lookup, faults }
    }

    fn plan(&self, batch: &Batch, ahead: bool) -> embcache::Result<Plan> {
        let splits = [0, batch[0].len() as i64, (batch[0].len() + batch[1].len()) as i64];
        self.lookup.plan(&batch.concat(), &splits, PlanMode { is_prefetch: ahead, ..PlanMode::TRAIN }, &[])
    }

    fn has_device(&self) -> bool {
        self.rigs[0].table.config().device_rows.is_some()
    }

    fn with_tensors<T>(&self, body: impl FnOnce(&mut [Option<DeviceTensors<'_>>]) -> T) -> T {
        self.rigs[0].with_tensors(|first| {
            self.rigs[1].with_tensors(|second| {
                let mut both = [first.first_mut().and_then(Option::take), second.first_mut().and_then(Option::take)];
                body(&mut both)
            })
        })
    }

    /// Runs the steps of a batch after its plan, in order. Each may fail.
    fn step(&self, plan: &Plan, batch: &Batch, salt: u32, until: Until) -> embcache::Result<()> {
        plan.wait(&mut [])?;
        let nothing_to_scatter = !self.has_device() && matches!(until, Until::ScatteredInPart | Until::Scattered);
        if until == Until::Waited || nothing_to_scatter {
            return Ok(());
        }
        if self.has_device() {
            self.rigs[0].scatter(plan, 0)?;
            if until == Until::ScatteredInPart {
                return Ok(());
            }
            self.rigs[1].scatter(plan, 1)?;
            if until == Until::Scattered {
                return Ok(());
            }
            plan.scattered()?;
        }
        if until == Until::Placed {
            return Ok(());
        }
        let bags = batch[0].len();
        let offsets: Vec<i64> = (0..=2 * bags as i64).collect();
        let mut out = vec![0.0; bags * 2 * DIM];
        self.with_tensors(|device| plan.forward_pooled(&offsets, None, &[false; 2], &mut out, device, 1))?;
        assert!(out.iter().all(|value| value.is_finite()), "a row was read that was never put on the device");
        if until == Until::Forward {
            return Ok(());
        }
        let grad: Vec<f32> =
            (0..out.len() as u32).map(|place| ((place * 37 + salt * 11) % 101) as f32 / 50.0 - 1.0).collect();
        self.with_tensors(|device| plan.backward_pooled(&grad, &[hyperparameters(); 2], None, device, 1))
    }

    fn train(&self, batch: &Batch, salt: u32) -> embcache::Result<()> {
        let plan = self.plan(batch, false)?;
        self.step(&plan, batch, salt, Until::Trained)
    }

    fn contents(&self) -> [Contents; 2] {
        [0, 1].map(|table| self.rigs[table].contents().expect("every row can be read"))
    }

    /// Checks that both ways of reading return exactly `expected`, and that nothing is pinned.
    fn check(&self, expected: &[Contents; 2], what: &str) {
        for (rig, expected) in self.rigs.iter().zip(expected) {
            assert_eq!(rig.table.stats().expect("counters").pinned_rows, 0, "{what}: a pin leaked");
            assert!(rig.contents().expect("every row can be read") == *expected, "{what}: other rows");
            let ids: Vec<Id> = (-5..ALL_IDS).collect();
            let read = rig.table.read_rows(&ids).expect("every row can be read");
            let floats = rig.table.config().layout().vector_floats();
            let found: Contents = (0..ids.len())
                .filter(|&at| read.found[at])
                .map(|at| {
                    let bits = read.vectors[at * floats..][..floats].iter().map(|value| value.to_bits()).collect();
                    (ids[at], (read.headers[at], bits))
                })
                .collect();
            assert!(found == *expected, "{what}: other rows by id");
            assert_eq!(rig.table.len().expect("a length"), expected.len() as u64, "{what}");
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    Planned,
    Waited,
    ScatteredInPart,
    Scattered,
    Placed,
    Forward,
    Trained,
}

const ALL_IDS: Id = 70;

fn batches() -> Vec<Batch> {
    let ids = |batch: Id, table: Id| (0..10).map(|id| (batch * 7 + id * (3 + table) + table) % 60).collect::<Vec<Id>>();
    let mut all: Vec<Batch> = (0..8).map(|batch| [ids(batch, 0), ids(batch, 1)]).collect();
    all.iter_mut().flatten().for_each(|ids| {
        let distinct: BTreeSet<Id> = ids.iter().copied().collect();
        *ids = distinct.into_iter().chain(60..).take(10).collect();
    });
    all
}

/// A trained pair, and its rows. Everything on SSD is in files.
fn trained(tiers: (Option<u32>, u64, bool)) -> (Pair, [Contents; 2]) {
    let pair = Pair::open(tiers);
    for (salt, batch) in batches().iter().enumerate() {
        pair.train(batch, salt as u32).expect("a step");
    }
    for rig in &pair.rigs {
        rig.table.flush(1).expect("a flush");
    }
    let rows = pair.contents();
    (pair, rows)
}

/// The batch that is released. It has rows of all tiers, and ids without a row.
fn given_up() -> Batch {
    [[1, 8, 15, 22, 29, 61, 62, 63, 4, 7].to_vec(), [2, 9, 16, 23, 30, 61, 62, 63, 5, 11].to_vec()]
}

/// Checks that the batch can be trained again, with results that are bitwise identical to a table without the failure.
fn check_trains_on(pair: &Pair, tiers: (Option<u32>, u64, bool), what: &str) {
    let (other, _) = trained(tiers);
    for each in [pair, &other] {
        each.train(&given_up(), 99).unwrap_or_else(|error| panic!("{what}: {error}"));
        each.train(&batches()[0], 100).unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    pair.check(&other.contents(), what);
}

#[test]
fn plan_dropped_after_any_step_changes_no_row() {
    for tiers in TIERS {
        for ahead in [false, true] {
            for until in
                [Until::Planned, Until::Waited, Until::ScatteredInPart, Until::Scattered, Until::Placed, Until::Forward]
            {
                let what = format!("{tiers:?} ahead {ahead} until {until:?}");
                let (pair, before) = trained(tiers);
                let batch = given_up();
                let plan = pair.plan(&batch, ahead).expect("a plan");
                if until != Until::Planned {
                    pair.step(&plan, &batch, 0, until).expect("its steps");
                }
                drop(plan);
                pair.check(&before, &what);
                check_trains_on(&pair, tiers, &what);
            }
        }
    }
}

/// The position of the fault.
#[derive(Clone, Copy, Debug)]
enum At {
    Read,
    Write,
    DeviceRead(usize),
}

#[test]
fn fault_between_plan_and_commit_changes_no_row() {
    for tiers in TIERS {
        for at in [At::Read, At::Write, At::DeviceRead(0), At::DeviceRead(1)] {
            let there = match at {
                At::Read | At::Write => tiers.2,
                At::DeviceRead(_) => tiers.0.is_some(),
            };
            if !there {
                continue;
            }
            let mut failures = 0;
            for passing in 0.. {
                let what = format!("{tiers:?} {at:?} after {passing}");
                let (pair, before) = trained(tiers);
                match at {
                    At::Read => pair.faults.hit_once(IoOperation::Read, passing, IoFault::Fail(libc::EIO)),
                    At::Write => pair.faults.hit_once(IoOperation::Write, passing, IoFault::Fail(libc::ENOSPC)),
                    At::DeviceRead(table) => {
                        pair.rigs[table].amid_device_read(passing as u32, || Err(Kind::Memory.error("asked to fail")));
                    }
                }
                let result = pair.train(&given_up(), 99);
                pair.faults.clear();
                let hit = match at {
                    At::Read | At::Write => result.is_err(),
                    At::DeviceRead(table) => pair.rigs[table].device_read_ended(),
                };
                if !hit {
                    assert!(result.is_ok(), "{what}: nothing failed and the step did: {result:?}");
                    break;
                }
                assert!(result.is_err(), "{what}: a fault that nobody says");
                failures += 1;
                pair.check(&before, &what);
                let read_only = pair.rigs.iter().any(|rig| rig.table.is_read_only());
                if !read_only {
                    check_trains_on(&pair, tiers, &what);
                }
            }
            let written_later = matches!(at, At::Write);
            assert!(failures > 0 || written_later, "{tiers:?} {at:?}: the batch does nothing that could fail");
        }
    }
}

#[test]
fn table_without_space_leaves_rows_of_other_tables() {
    let engine = || Arc::new(MemoryEngine::default());
    let rows = |rig: &Rig, count: i64| {
        let headers: Vec<RowHeader> = (0..count).map(|id| RowHeader { id, ..RowHeader::default() }).collect();
        let vectors: Vec<f32> = (0..count * DIM as i64).map(|place| place as f32 + 100.0).collect();
        rig.table.import_rows(RowBlock { headers: &headers, vectors: &vectors }).expect("an import");
    };
    let a = Rig::open(settings("a", Some(4), 100, false), engine()).expect("a table");
    let b = Rig::open(settings("b", Some(4), 10, false), engine()).expect("a table");
    rows(&a, 8);
    rows(&b, 10);
    let before = [a.contents().expect("rows"), b.contents().expect("rows")];
    let lookup = Lookup::new(&[a.table.clone(), b.table.clone()], &[0, 1]).expect("a lookup");
    for mode in [PlanMode::TRAIN, PlanMode::TRAIN_PREFETCH] {
        let placed = lookup.plan(&[0, 1, 2, 3, 77], &[0, 4, 5], mode, &[]).and_then(|plan| plan.wait(&mut []));
        assert_eq!(placed.expect_err("b is full, and 77 is new to it").kind(), Kind::Capacity);
        assert_eq!([a.contents().expect("rows"), b.contents().expect("rows")], before);
    }
    let read = a.table.read_rows(&[0, 1, 2, 3]).expect("rows");
    assert_eq!(read.vectors, (0..4 * DIM).map(|place| place as f32 + 100.0).collect::<Vec<f32>>());
}

#[test]
fn kernels_wait_for_the_word_that_what_was_fetched_is_scattered() {
    let (pair, before) = trained(TIERS[2]);
    let batch = given_up();
    let plan = pair.plan(&batch, false).expect("a plan");
    assert_eq!(plan.scattered().expect_err("before wait").kind(), Kind::State);
    plan.wait(&mut []).expect("its rows");
    let too_early = plan.slots(0).expect_err("rows are not on the device yet");
    assert!(too_early.kind() == Kind::State && too_early.to_string().contains("Plan.scattered"), "{too_early}");
    assert_eq!(plan.commit().expect_err("nothing was trained").kind(), Kind::State);
    drop(plan);
    pair.check(&before, "dropped");
}

#[test]
fn rows_not_scattered_in_exclusive_change_stay_in_place() {
    let (pair, before) = trained(TIERS[2]);
    let batch = given_up();
    let plan = pair.plan(&batch, false).expect("a plan");
    plan.exclusively(|| {
        plan.wait(&mut []).expect("its rows");
        pair.rigs[0].scatter(&plan, 0).expect("the first table's");
        // An allocation of the second table's scatter fails.
    })
    .expect("nobody else is there");
    assert_eq!(plan.slots(0).expect_err("the plan is released").kind(), Kind::State);
    pair.check(&before, "not scattered");
    check_trains_on(&pair, TIERS[2], "not scattered");
}

#[test]
fn an_update_that_is_not_committed_makes_its_tables_refuse_all_use() {
    for how in ["work ends", "the plan is dropped", "the plan is released"] {
        let (pair, _) = trained(TIERS[2]);
        let batch = given_up();
        let plan = pair.plan(&batch, false).expect("a plan");
        pair.step(&plan, &batch, 0, Until::Placed).expect("its rows");
        match how {
            "work ends" => plan.exclusively(|| plan.begin_update().expect("rows in their slots")).expect("nobody else"),
            "the plan is dropped" => {
                plan.begin_update().expect("rows in their slots");
                drop(plan);
            }
            _ => {
                plan.begin_update().expect("rows in their slots");
                plan.release();
            }
        }
        for rig in &pair.rigs {
            let error = rig.table.read_rows(&[1]).expect_err("rows may be updated in part");
            assert!(error.kind() == Kind::State && error.to_string().contains("failed half-way"), "{how}: {error}");
            assert!(rig.table.flush(2).is_err() && rig.table.len().is_err(), "{how}");
        }
    }
    let (pair, _) = trained(TIERS[2]);
    let batch = given_up();
    let plan = pair.plan(&batch, false).expect("a plan");
    pair.step(&plan, &batch, 0, Until::Placed).expect("its rows");
    plan.exclusively(|| plan.begin_update().and_then(|()| plan.commit())).expect("nobody else").expect("a step");
    drop(plan);
    assert!(pair.rigs[0].table.len().is_ok(), "a step that was committed tears nothing");
}

fn images() -> Arc<PreImages> {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    engine.create_dir_all(Path::new("/save")).expect("a directory");
    Arc::new(PreImages::new(engine, "/save/images".into(), 1 << 20, 1))
}

/// Two plans use one row. The first never promotes it to the device.
#[test]
fn row_with_unfilled_slot_is_fetched_by_next_plan() {
    for tiers in [TIERS[1], TIERS[2]] {
        for first_released in [false, true] {
            let what = format!("{tiers:?} {first_released}");
            let (pair, _) = trained(tiers);
            let batch = given_up();
            let first = pair.plan(&batch, false).expect("a plan");
            first.wait(&mut []).expect("its rows");
            let second = pair.plan(&batch, false).expect("a plan");
            if first_released {
                first.release();
            }
            pair.step(&second, &batch, 99, Until::Trained).expect("a step");
            drop((first, second));
            pair.train(&batches()[0], 100).expect("a step");
            let (other, _) = trained(tiers);
            other.train(&batch, 99).expect("a step");
            other.train(&batches()[0], 100).expect("a step");
            pair.check(&other.contents(), &what);
        }
    }
}

/// Two plans use one row. The second promotes it to the device and trains it before the first arrives.
#[test]
fn a_row_that_was_trained_meanwhile_is_not_scattered_again() {
    let (pair, _) = trained(TIERS[1]);
    let (other, _) = trained(TIERS[1]);
    let batch = given_up();
    let late = pair.plan(&batch, false).expect("a plan");
    late.wait(&mut []).expect("its rows");
    pair.train(&batch, 99).expect("a step");
    pair.step(&late, &batch, 98, Until::Trained).expect("a step");
    other.train(&batch, 99).expect("a step");
    other.train(&batch, 98).expect("a step");
    pair.check(&other.contents(), "trained in turn");
}

#[test]
fn plan_dropped_during_device_read_is_released() {
    watched(String::new, || {
        for explicitly in [false, true] {
            let rig =
                Rig::open(settings("t", Some(6), 100, false), Arc::new(MemoryEngine::default())).expect("a table");
            rig.train(&[1, 2, 3, 4], 1, 0).expect("a step");
            let garbage = rig.plan(&[1, 77], PlanMode::TRAIN).expect("a plan");
            rig.place(&garbage).expect("its rows");
            rig.amid_device_read(0, move || {
                if explicitly {
                    garbage.release();
                }
                drop(garbage);
                Ok(())
            });
            let read = rig.table.read_rows(&[1, 2]).expect("rows");
            assert!(rig.device_read_ended() && read.found == [true, true]);
            let stats = rig.table.stats().expect("counters");
            assert_eq!((stats.pinned_rows, stats.rows), (0, 4), "the plan's pins are back, its unborn row is gone");
            rig.train(&[1, 77], 1, 1).expect("a step");
        }
    });
}

#[test]
fn snapshot_dropped_during_device_read_is_released() {
    watched(String::new, || {
        let rig = Rig::open(settings("t", Some(6), 100, false), Arc::new(MemoryEngine::default())).expect("a table");
        rig.train(&[1, 2, 3, 4], 1, 0).expect("a step");
        let garbage = rig.table.snapshot(&images(), 1).expect("a moment");
        rig.amid_device_read(0, move || {
            drop(garbage);
            Ok(())
        });
        rig.table.read_rows(&[1, 2]).expect("rows");
        assert!(rig.device_read_ended());
        // Both calls wait for an open snapshot.
        rig.table.clear().expect("no moment is held");
        drop(rig.table.snapshot(&images(), 2).expect("another moment"));
        rig.table.close().expect("no moment is held");
    });
}

#[test]
fn row_uses_during_device_read_get_typed_error() {
    watched(String::new, || {
        let rig = Rig::open(settings("t", Some(6), 100, true), Arc::new(MemoryEngine::default())).expect("a table");
        rig.train(&[1, 2, 3, 4], 1, 0).expect("a step");
        let waiting = Arc::new(rig.plan(&[1, 9], PlanMode::TRAIN).expect("a plan"));
        let (table, refused) = (rig.table.clone(), Arc::new(AtomicUsize::new(0)));
        let (count, plan) = (Arc::clone(&refused), Arc::clone(&waiting));
        rig.amid_device_read(0, move || {
            let is_refused =
                |error: Error| error.kind() == Kind::State && error.to_string().contains("wait for itself");
            let read = std::thread::scope(|scope| scope.spawn(|| table.read_rows(&[1]).is_ok()).join());
            assert!(read.expect("no panic"), "another thread reads rows meanwhile");
            let works = [table.len().is_ok_and(|rows| rows == 4), table.stats().is_ok_and(|stats| stats.rows == 4)];
            let all = [
                table.read_rows(&[1]).is_err_and(is_refused),
                table.flush(7).is_err_and(is_refused),
                table.clear().is_err_and(is_refused),
                table.close().is_err_and(is_refused),
                table.remove_rows(&[1]).is_err_and(is_refused),
                table.import_rows(RowBlock { headers: &[], vectors: &[] }).is_err_and(is_refused),
                plan.wait(&mut []).is_err_and(is_refused),
                plan.exclusively(|| ()).is_err_and(is_refused),
            ];
            let as_wanted = works.iter().chain(&all).filter(|as_wanted| **as_wanted).count();
            count.store(as_wanted, Ordering::SeqCst);
            Ok(())
        });
        let read = rig.table.read_rows(&[1, 2]).expect("rows");
        assert_eq!((read.found, refused.load(Ordering::SeqCst)), (vec![true, true], 10));
        rig.place(&waiting).expect("the plan is as it was");
    });
}

#[test]
fn copies_during_exclusive_change_get_typed_error() {
    watched(String::new, || {
        let rig = Rig::open(settings("t", Some(6), 100, true), Arc::new(MemoryEngine::default())).expect("a table");
        rig.train(&[1, 2, 3, 4], 1, 0).expect("a step");
        let plan = rig.plan(&[1, 9], PlanMode::TRAIN).expect("a plan");
        let amid = || (rig.table.read_rows(&[1]).err(), rig.table.flush(7).err(), rig.table.len().ok());
        let (read, flushed, rows) = plan.exclusively(amid).expect("nobody else is there");
        for error in [read, flushed] {
            let error = error.expect("it would wait for itself");
            assert!(error.kind() == Kind::State && error.to_string().contains("wait for itself"), "{error}");
        }
        assert_eq!(rows, Some(4));
        rig.table.flush(7).expect("a flush afterwards");
    });
}

/// An asynchronous save copies rows to which such code has exclusive access.
#[test]
fn exclusive_code_waiting_for_save_gets_typed_error() {
    watched(String::new, || {
        let rig = Rig::open(config(4, OptimizerKind::Sgd, 8), Arc::new(MemoryEngine::default())).expect("opened");
        rig.train(&[1, 2], 1, 0).expect("a step");
        let moment = rig.table.snapshot(&images(), 1).expect("a moment");
        let plan = rig.plan(&[1, 3], PlanMode::TRAIN).expect("a plan");
        plan.wait(&mut []).expect("its rows");
        let waits = || {
            let for_a_while = rig.table.wait_for_save(Duration::from_millis(1)).err();
            [for_a_while, rig.table.clear().err(), rig.table.close().err()]
        };
        for error in plan.exclusively(waits).expect("nobody else is there") {
            let error = error.expect("it would wait for itself");
            assert!(error.kind() == Kind::State && error.to_string().contains("wait for itself"), "{error}");
        }
        drop((plan, moment));
        assert_eq!(rig.table.len().expect("it is still open"), 2);
        rig.table.close().expect("no moment is held");
    });
}

/// The thread of an export copies rows to which such code has exclusive access.
#[test]
fn wait_for_export_blocked_by_caller_gets_typed_error() {
    watched(String::new, || {
        let rig = Rig::open(settings("t", Some(6), 100, false), Arc::new(MemoryEngine::default())).expect("a table");
        rig.train(&[1, 2, 3, 4], 1, 0).expect("a step");
        let plan = rig.plan(&[1], PlanMode::TRAIN).expect("a plan");
        rig.place(&plan).expect("its rows");
        let is_refused = |error: Error| error.kind() == Kind::State && error.to_string().contains("wait for itself");
        let [mut first, mut second] = [0, 1].map(|_| rig.table.export(1).expect("a stream"));
        let (next, begun) = plan.exclusively(|| (first.next(), rig.table.export(1))).expect("nobody else is there");
        assert!(next.expect("no end").is_err_and(is_refused) && begun.is_err_and(is_refused));
        assert!(first.next().is_none(), "it ends after its first error");
        let refused = Arc::new(AtomicBool::new(false));
        let noted = Arc::clone(&refused);
        rig.amid_device_read(0, move || {
            noted.store(second.next().is_some_and(|item| item.is_err_and(is_refused)), Ordering::SeqCst);
            Ok(())
        });
        rig.table.read_rows(&[1, 2]).expect("rows");
        assert!(rig.device_read_ended() && refused.load(Ordering::SeqCst));
    });
}

#[test]
fn a_table_that_is_given_twice_to_a_lookup_is_refused() {
    let (pair, _) = trained(TIERS[1]);
    let [a, b] = [&pair.rigs[0].table, &pair.rigs[1].table];
    let error = Lookup::new(&[a.clone(), b.clone(), a.clone()], &[0, 1, 2]).expect_err("a is given twice");
    assert!(error.kind() == Kind::Input && error.to_string().contains("tables[0] and tables[2]"), "{error}");
}

/// While one thread changes rows exclusively and also uses the plan, another thread uses the same plan. Each waits for
/// the other at most as long as that one works.
#[test]
fn shared_and_exclusive_use_of_one_plan_do_not_deadlock() {
    watched(String::new, || {
        let rig = Rig::open(config(4, OptimizerKind::Sgd, 8), Arc::new(MemoryEngine::default())).expect("opened");
        let plan = rig.lookup.plan(&[1, 2, 3], &[0, 3], PlanMode::TRAIN, &[]).expect("planned");
        plan.wait(&mut []).expect("rows in their slots");
        let (begun, forwards) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            let exclusive = || {
                begun.store(true, Ordering::SeqCst);
                // The other thread is in its forward for most of these calls.
                for _ in 0..1000 {
                    plan.slots(0).expect("this thread's own plan");
                    std::thread::yield_now();
                }
            };
            scope.spawn(|| {
                while !begun.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                let mut out = [0.0; 12];
                plan.forward_sequence(&mut out, &mut [], 1).expect("after the other thread's work");
                forwards.fetch_add(1, Ordering::SeqCst);
            });
            plan.exclusively(exclusive).expect("nobody else");
        });
        assert_eq!(forwards.load(Ordering::SeqCst), 1);
        plan.release();
        assert_eq!(rig.table.stats().expect("open").pinned_rows, 0);
    });
}

/// Another plan of the same tables would wait for rows to which its own caller has exclusive access.
#[test]
fn exclusive_code_gets_no_second_plan_and_may_drop_one() {
    watched(String::new, || {
        let rig = Rig::open(config(4, OptimizerKind::Sgd, 8), Arc::new(MemoryEngine::default())).expect("opened");
        let plan = |ids: &[Id]| rig.lookup.plan(ids, &[0, ids.len() as i64], PlanMode::TRAIN, &[]).expect("planned");
        let (mine, other) = (plan(&[1, 2]), plan(&[2, 3]));
        mine.wait(&mut []).expect("rows in their slots");
        other.wait(&mut []).expect("rows in their slots");
        mine.exclusively(|| {
            assert!(other.slots(0).is_err_and(|error| error.kind() == Kind::State));
            other.release();
            mine.slots(0).expect("this thread's own plan");
        })
        .expect("nobody else");
        mine.release();
        assert_eq!(rig.table.stats().expect("open").pinned_rows, 0);
    });
}
