//! A process is forked while other threads of its parent are inside the table. The child gets typed errors and does not
//! hang, the parent is not affected, and the child can create its own tables.
#![allow(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use embcache::Kind;
use embcache::cache::{ExportStream, Plan, PlanMode, RowBlock};
use embcache::config::{OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::{FaultEngine, IoEngine, IoOperation, PsyncEngine};
use embcache::types::Id;
use embcache_tests::{Rig, config, watched};

const DIM: usize = 16;
/// Seconds after which a child that hangs is killed.
const CHILD_S: u32 = 120;

fn tiers(dir: PathBuf) -> TableConfig {
    let mut wanted = config(DIM, OptimizerKind::Adagrad, 100);
    wanted.ssd = Some(SsdConfig { dir, bytes: 4 << 20, reopen: ReopenMode::Never, resume_commit_id: None });
    wanted
}

fn ids(batch: i64) -> Vec<Id> {
    (0..50).map(|id| batch * 50 + id).collect()
}

/// Uses `rig`, which comes from the parent, in every way. Returns the calls that did not end in a typed error.
fn uses_that_pass(rig: Rig, plan: Plan, mut stream: ExportStream) -> Vec<&'static str> {
    let state = |error: embcache::Error| error.kind() == Kind::State && error.to_string().contains("fork");
    let refused = [
        ("plan", rig.plan(&ids(0), PlanMode::TRAIN).is_err_and(state)),
        ("wait", plan.wait(&mut []).is_err_and(state)),
        ("wait_for_reads", plan.wait_for_reads().is_err_and(state)),
        ("is_placed", plan.is_placed().is_err_and(state)),
        ("reading", plan.reading().is_err_and(state)),
        ("is_ready", plan.is_ready().is_err_and(state)),
        ("commit", plan.commit().is_err_and(state)),
        ("read_rows", rig.table.read_rows(&ids(0)).is_err_and(state)),
        ("import_rows", rig.table.import_rows(RowBlock { headers: &[], vectors: &[] }).is_err_and(state)),
        ("remove_rows", rig.table.remove_rows(&ids(0)).is_err_and(state)),
        ("clear", rig.table.clear().is_err_and(state)),
        ("flush", rig.table.flush(9).is_err_and(state)),
        ("stats", rig.table.stats().is_err_and(state)),
        ("len", rig.table.len().is_err_and(state)),
        ("export", rig.table.export(10).is_err_and(state)),
        ("the next chunk of an export", stream.next().is_some_and(|chunk| chunk.is_err_and(state))),
        ("close", rig.table.close().is_ok()),
    ];
    drop((plan, stream));
    drop(rig);
    refused.iter().filter(|(_, refused)| !refused).map(|(what, _)| *what).collect()
}

/// The process forks while threads are inside the table.
#[test]
fn forked_child_gets_typed_errors_and_can_open_own_table() {
    watched(String::new, || {
        let dir = tempfile::tempdir().expect("a directory");
        let faults = FaultEngine::new(Arc::new(PsyncEngine::default()));
        let rig = Rig::open(tiers(dir.path().join("parent")), Arc::new(faults.clone())).expect("a table");
        for batch in 0..8 {
            rig.train(&ids(batch), 4, batch as u32).expect("a step");
        }
        rig.table.flush(1).expect("a flush");
        let expected = rig.table.read_rows(&ids(0)).expect("rows").vectors;

        let stream = rig.table.export(10).expect("a stream");
        // One thread holds a plan's lock, another one the table's, and both wait for reads that never end.
        faults.hold(IoOperation::Read);
        let stuck = rig.plan(&ids(0), PlanMode { is_prefetch: true, ..PlanMode::EVALUATE }).expect("a plan");
        let child = std::thread::scope(|scope| {
            scope.spawn(|| stuck.wait(&mut []).expect("its rows, once they are let go"));
            scope.spawn(|| rig.table.read_rows(&ids(2)).expect("rows, once they are let go"));
            faults.wait_until_held();
            // SAFETY: the child calls the code under test and exits by _exit.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: alarm touches no memory. It kills a child that hangs.
                unsafe { libc::alarm(CHILD_S) };
                // SAFETY: the child drops the copies that are read here, and uses no original again.
                let (rig, plan, stream) = unsafe {
                    (
                        std::ptr::read(&raw const rig),
                        std::ptr::read(&raw const stuck),
                        std::ptr::read(&raw const stream),
                    )
                };
                let mut passed = uses_that_pass(rig, plan, stream);
                let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::default());
                let own = Rig::open(tiers(dir.path().join("child")), engine).and_then(|own| {
                    (0..8).try_for_each(|batch| own.train(&ids(batch), 4, batch as u32).map(|_| ()))?;
                    own.table.flush(1)?;
                    own.table.read_rows(&ids(0))
                });
                if own.is_err() || own.is_ok_and(|rows| rows.vectors != expected) {
                    passed.push("a table of its own");
                }
                if !passed.is_empty() {
                    eprintln!("did not do what it should in the child: {passed:?}");
                }
                // SAFETY: _exit terminates this process without the test harness's exit handlers.
                unsafe { libc::_exit(if passed.is_empty() { 42 } else { 1 }) };
            }
            faults.release();
            child
        });
        assert!(child > 0, "fork failed");
        let mut status = 0;
        // SAFETY: this waits for the child that was created above, and `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 42, "the child ended with status {status}");
        assert_eq!(rig.table.read_rows(&ids(0)).expect("rows").vectors, expected);
        rig.train(&ids(0), 4, 100).expect("the parent trains on");
        rig.table.flush(2).expect("and flushes");
    });
}
