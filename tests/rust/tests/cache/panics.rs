//! Panics below the cache: the current step fails, incomplete state is rejected afterwards, and nothing waits forever.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use embcache::Kind;
use embcache::cache::{GroupSink, Lookup, PlanMode, Table};
use embcache::config::{OptimizerKind, TableConfig};
use embcache::io::{FaultEngine, IoOperation, MemoryEngine};
use embcache::rows::RowList;
use embcache::types::Id;
use embcache_tests::{Rig, config, three_tiers, watched};

const DIM: usize = 16;

fn tiers(host_rows: u64) -> TableConfig {
    three_tiers(DIM, None, host_rows, 1 << 20)
}

fn rig() -> (Rig, FaultEngine) {
    Rig::with_faults(tiers(60))
}

fn ids(batch: i64) -> Vec<Id> {
    (0..50).map(|id| (batch * 37 + id * 13) % 600).collect()
}

/// Trains until that fails.
fn error_of_training(rig: &Rig) -> embcache::Error {
    for batch in 0.. {
        if let Err(error) = rig.train(&ids(batch), 4, batch as u32) {
            return error;
        }
    }
    unreachable!("batches do not end")
}

/// After a panic while rows are written to the SSD tier, training is rejected, and every row can be read.
#[test]
fn panic_during_demotion_poisons_training_but_not_reads() {
    watched(String::new, || {
        let (rig, faults) = rig();
        for batch in 0..40 {
            rig.train(&ids(batch), 4, batch as u32).expect("a step");
        }
        faults.panic_at(IoOperation::Write, 0);
        let error = error_of_training(&rig);
        assert_eq!(error.kind(), Kind::ReadOnly, "{error}");
        assert!(error.to_string().contains("panic"), "{error}");
        assert_eq!(rig.table.stats().expect("counters").pinned_rows, 0);
        let mut rows = 0;
        let count = &mut |chunk: embcache::cache::RowChunk| {
            rows += chunk.headers.len() as u64;
            Ok(())
        };
        rig.table.for_each_chunk(100, count).expect("every row can be exported");
        assert_eq!(rows, rig.table.len().expect("a length"));
        assert!(rig.table.flush(1).is_err_and(|error| error.kind() == Kind::ReadOnly));
        assert!(rig.table.close().is_err_and(|error| error.kind() == Kind::ReadOnly));
    });
}

#[test]
fn panic_in_read_fails_its_plan_and_batch_can_retry() {
    watched(String::new, || {
        let (rig, faults) = rig();
        for batch in 0..40 {
            rig.train(&ids(batch), 4, batch as u32).expect("a step");
        }
        rig.table.flush(1).expect("a flush, so that rows are read from disk");
        faults.panic_at(IoOperation::Read, 0);
        let error = rig.train(&ids(0), 4, 0).expect_err("its reads panicked");
        assert_eq!(error.kind(), Kind::State, "{error}");
        assert_eq!(rig.table.stats().expect("counters").pinned_rows, 0);
        rig.train(&ids(0), 4, 0).expect("the same batch again");
    });
}

/// Receives rows of a table under its locks, and panics.
struct Panics;

impl GroupSink for Panics {
    fn vector_floats(&self) -> usize {
        config(4, OptimizerKind::Sgd, 1).layout().vector_floats()
    }

    fn wait_for_space(&mut self) -> embcache::Result<usize> {
        Ok(10)
    }

    fn take(&mut self, _: RowList<'_>) -> embcache::Result<()> {
        panic!("asked to panic")
    }
}

#[test]
fn a_panic_under_the_tables_lock_makes_the_table_refuse_all_use() {
    watched(String::new, || {
        let rig = Rig::open(config(4, OptimizerKind::Sgd, 200), Arc::new(MemoryEngine::default())).expect("a table");
        let queue = rig.table.start_evicted_queue().expect("a queue");
        rig.train(&ids(0), 4, 0).expect("a step");
        let second = rig.plan(&ids(1), PlanMode::TRAIN).expect("a plan");
        let panicked = catch_unwind(AssertUnwindSafe(|| rig.table.for_each_group(&mut Panics)));
        assert!(panicked.is_err(), "rows are taken under the lock");
        let refused = |error: embcache::Error| error.kind() == Kind::State && error.to_string().contains("panic");
        assert!(rig.table.len().is_err_and(refused));
        assert!(rig.plan(&ids(1), PlanMode::TRAIN).is_err_and(refused));
        assert!(rig.table.flush(1).is_ok(), "there is nothing to flush without an SSD tier");
        assert!(rig.table.read_rows(&ids(0)).is_err_and(refused));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| queue.wait().is_none());
            assert!(rig.table.end_evicted_queue().is_err_and(refused));
            assert!(waits.join().expect("no panic"), "whoever waits to be told of evicted rows does not wait for ever");
        });
        drop(second);
        rig.table.close().expect("closing needs no state");
    });
}

#[test]
fn table_lookup_and_plans_drop_in_any_order_during_reads() {
    watched(String::new, || {
        // The orders in which the three are dropped, and true if the reads end before the last of them.
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            for end_after in 0..4 {
                let faults = FaultEngine::new(Arc::new(MemoryEngine::default()));
                let engine = Arc::new(faults.clone());
                let table = Table::open(tiers(60), None, engine).expect("a table");
                let lookup = Lookup::new(std::slice::from_ref(&table), &[0]).expect("a lookup");
                for batch in 0..12 {
                    let plan = lookup.plan(&ids(batch), &[0, 50], PlanMode::TRAIN, &[]).expect("a plan");
                    plan.wait(&mut []).expect("its rows");
                    plan.commit().expect("a step");
                }
                table.flush(1).expect("a flush");
                faults.hold(IoOperation::Read);
                let plan = lookup.plan(&ids(0), &[0, 50], PlanMode::TRAIN_PREFETCH, &[]).expect("a plan");
                faults.wait_until_held();
                let mut parts = [Some(Part::Table(table)), Some(Part::Lookup(lookup)), Some(Part::Plan(plan))];
                for (number, part) in order.into_iter().enumerate() {
                    if number == end_after {
                        faults.release();
                    }
                    parts[part] = None;
                }
                faults.release();
                // The directory is released once the last of them is dropped, however late that is.
                loop {
                    match Table::open(tiers(60), None, Arc::new(faults.clone())) {
                        Err(error) if error.kind() == Kind::InUse => std::thread::yield_now(),
                        Err(error) => {
                            break assert_eq!(error.kind(), Kind::State, "the directory is not empty: {error}");
                        }
                        Ok(_) => panic!("a directory with files must be refused"),
                    }
                }
            }
        }
    });
}

#[expect(dead_code, reason = "held until dropped")]
enum Part {
    Table(Table),
    Lookup(Lookup),
    Plan(embcache::cache::Plan),
}
