//! Loom models: all interleavings, up to two preemptions, of a few threads in the table's own code: `make test-loom`.

use std::sync::Arc;

use super::{Lookup, Plan, PlanMode, PreImages, RowBlock, RowChunk, Table};
use crate::config::{OptimizerKind, PolicyKind, ReopenMode, SsdConfig, TableConfig};
use crate::io::{IoEngine, MemoryEngine};
use crate::kernels::Hyperparameters;
use crate::rows::{InitializerSpec, RowHeader};
use crate::ssd::models::{model, read_waiting, spawn};
use crate::types::Id;

mod device;

const DIM: usize = 2;

/// A table with four row slots in RAM.
fn config() -> TableConfig {
    let ssd = SsdConfig { dir: "/t".into(), bytes: 1 << 20, reopen: ReopenMode::Never, resume_commit_id: None };
    let mut config = TableConfig {
        optimizer: OptimizerKind::Sgd,
        initializer: InitializerSpec::Constant { value: 0.0 },
        ssd: Some(ssd),
        policy: PolicyKind::Lru,
        ..super::tests::config(DIM)
    };
    config.host_bytes = 4 * super::host_row_bytes(&config.layout(), config.policy);
    config
}

/// A table with rows 1 and 2 on SSD, in a file, and four row slots in RAM.
fn table() -> (Table, Arc<Lookup>, Arc<dyn IoEngine>) {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let table = Table::open(config(), None, Arc::clone(&engine)).unwrap();
    let ids: [Id; 6] = [11, 12, 13, 14, 1, 2];
    let headers = ids.map(|id| RowHeader { id, ..RowHeader::default() });
    let vectors: Vec<f32> = ids.iter().flat_map(|&id| [id as f32; DIM]).collect();
    // The first four rows take the slots, the others are appended to SSD.
    table.import_rows(RowBlock { headers: &headers, vectors: &vectors }).unwrap();
    table.inner.ssd.as_ref().unwrap().settle();
    let lookup = Arc::new(Lookup::new(std::slice::from_ref(&table), &[0]).unwrap());
    (table, lookup, engine)
}

fn plan(lookup: &Lookup, ids: &[Id]) -> Plan {
    lookup.plan(ids, &[0, ids.len() as i64], PlanMode::TRAIN_PREFETCH, &[]).unwrap()
}

fn forward(plan: &Plan, bags: usize) -> Vec<f32> {
    let offsets: Vec<i64> = (0..=bags as i64).collect();
    let mut out = vec![0.0; bags * DIM];
    plan.forward_pooled(&offsets, None, &[false], &mut out, &mut [], 1).unwrap();
    out
}

fn at_rest(table: &Table) {
    assert_eq!(table.stats().unwrap().pinned_rows, 0, "a pin was not returned");
    table.inner.ssd.as_ref().unwrap().settle();
}

/// A row whose read is in progress is planned again, and the first plan is dropped before, during or after the read.
#[test]
fn loom_row_read_for_a_dropped_plan_is_there_for_another() {
    model(|| {
        let (table, lookup, engine) = table();
        let dropped = plan(&lookup, &[1, 11]);
        let other = {
            let (lookup, reads) = (Arc::clone(&lookup), Arc::clone(&engine));
            spawn(move || {
                let plan = plan(&lookup, &[1, 12]);
                // Serves the read that this plan submits itself if the first plan's read was finished and discarded.
                read_waiting(&*reads);
                plan.wait(&mut []).unwrap();
                forward(&plan, 2)
            })
        };
        let reading = {
            let engine = Arc::clone(&engine);
            spawn(move || read_waiting(&*engine))
        };
        drop(dropped);
        reading.join().unwrap();
        assert_eq!(other.join().unwrap(), [1.0, 1.0, 12.0, 12.0]);
        at_rest(&table);
    });
}

/// An export returns the weights and metadata of a row both from before a training step or both from after it.
#[test]
fn loom_export_during_a_step_is_intact_or_fails() {
    model(|| {
        let (table, lookup, _engine) = table();
        let plan = plan(&lookup, &[11]);
        plan.wait(&mut []).unwrap();
        forward(&plan, 1);
        let training = spawn(move || {
            let numbers = Hyperparameters { lr: 1.0, ..Hyperparameters::default() };
            plan.backward_pooled(&[1.0; DIM], &[numbers], None, &mut [], 1).unwrap();
        });
        let exported = table.for_each_chunk(10, &mut |chunk: RowChunk| {
            let at = chunk.headers.iter().position(|header| header.id == 11);
            if let Some(at) = at {
                let (count, weight) = (chunk.headers[at].count, chunk.vectors[at * DIM]);
                assert!((count, weight) == (0, 11.0) || (count, weight) == (1, 10.0), "{count} steps give {weight}");
            }
            Ok(())
        });
        assert!(exported.is_ok() || exported.is_err_and(|error| error.kind() == crate::Kind::State));
        training.join().unwrap();
        let row = table.read_rows(&[11]).unwrap();
        assert_eq!((row.headers[0].count, row.vectors[0].to_bits()), (1, 10.0_f32.to_bits()));
        at_rest(&table);
    });
}

/// A snapshot has the original value of each row, in any order of the training step, the copy of the row, and its
/// demotion to SSD.
#[test]
fn loom_snapshot_during_steps_and_evictions_has_its_rows() {
    model(|| {
        let (table, lookup, engine) = table();
        let first = plan(&lookup, &[11]);
        first.wait(&mut []).unwrap();
        forward(&first, 1);
        let training = {
            let reads = Arc::clone(&engine);
            spawn(move || {
                let numbers = Hyperparameters { lr: 1.0, ..Hyperparameters::default() };
                first.backward_pooled(&[1.0; DIM], &[numbers], None, &mut [], 1).unwrap();
                // Demotes row 12, the least recently used.
                let second = plan(&lookup, &[1]);
                read_waiting(&*reads);
                second.wait(&mut []).unwrap();
            })
        };
        let images = Arc::new(PreImages::new(Arc::clone(&engine), "/save/images".into(), 1 << 20, 1));
        let snapshot = table.snapshot(&images, 1).unwrap();
        let steps = snapshot.step() as u32;
        let mut rows = Vec::new();
        let sink = &mut |chunk: RowChunk| {
            for (at, header) in chunk.headers.iter().enumerate() {
                rows.push((header.id, header.count, chunk.vectors[at * DIM] as i32));
            }
            Ok(())
        };
        snapshot.for_each_chunk(2, sink).unwrap();
        training.join().unwrap();
        rows.sort_unstable();
        let expected = [(1, 0, 1), (2, 0, 2), (11, steps, 11 - steps as i32), (12, 0, 12), (13, 0, 13), (14, 0, 14)];
        assert_eq!(rows, expected);
        at_rest(&table);
    });
}
