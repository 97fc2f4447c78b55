//! Tests of the arena's resident memory against the budget.

use std::sync::Arc;

use super::{Lookup, PlanMode, RowBlock, Table};
use crate::config::{
    AdmissionRule, MissingRead, OnFull, OptimizerKind, PolicyKind, ReopenMode, SsdConfig, TableConfig,
};
use crate::io::MemoryEngine;
use crate::rows::{InitializerSpec, RowHeader};
use crate::runtime::budget::SharedBudget;
use crate::types::{DEFAULT_SCORE_HALF_LIFE_STEPS, Id};

const HOST_BYTES: u64 = 12 << 20;
/// Both parts of the arena may end within a page, which may be a huge page.
const PAGES_BYTES: u64 = 2 * (2 << 20);

/// A table in RAM and on SSD, with the default of each option.
pub(super) fn config(dim: usize) -> TableConfig {
    TableConfig {
        name: "t".into(),
        key: 1,
        dim,
        optimizer: OptimizerKind::RowWiseAdagrad,
        initializer: InitializerSpec::Constant { value: 1.0 },
        seed: 0,
        total_num_buckets: 1,
        buckets: 0..1,
        host_bytes: HOST_BYTES,
        shared_budget: None,
        device_rows: None,
        ssd: Some(SsdConfig { dir: "/t".into(), bytes: 1 << 28, reopen: ReopenMode::Never, resume_commit_id: None }),
        policy: PolicyKind::S3Fifo,
        on_full: OnFull::Error,
        admission: AdmissionRule::All,
        not_admitted: MissingRead::Initial,
        missing_read: MissingRead::Initial,
        score_half_life_steps: DEFAULT_SCORE_HALF_LIFE_STEPS,
        eviction: None,
    }
}

fn table(dim: usize) -> Table {
    Table::open(config(dim), None, Arc::new(MemoryEngine::default())).unwrap()
}

fn import(table: &Table, ids: std::ops::Range<Id>) {
    let headers: Vec<RowHeader> = ids.map(|id| RowHeader { id, ..RowHeader::default() }).collect();
    let vectors = vec![1.0; headers.len() * table.config().layout().vector_floats()];
    table.import_rows(RowBlock { headers: &headers, vectors: &vectors }).unwrap();
}

/// Resident bytes of rows in RAM and of the SSD index.
fn held_bytes(table: &Table) -> u64 {
    let arena = table.inner.lock().unwrap().placement.host.arena().resident_bytes() as u64;
    arena + table.stats().unwrap().ssd.unwrap().index_bytes
}

#[test]
fn rows_in_ram_and_ssd_index_stay_within_the_budget() {
    for (dim, block) in [(64, 10_000), (1, 60_000)] {
        let table = table(dim);
        for first in (0..12).map(|at| at * block) {
            import(&table, first..first + block);
            let (held, free) = (held_bytes(&table), (64 << 10) + (1 << 20));
            assert!(held <= HOST_BYTES + free + PAGES_BYTES, "dim {dim}, {first} rows: {held} bytes");
        }
        let rows = table.stats().unwrap().ssd.unwrap().tier.rows;
        assert!(rows > 60_000, "{rows} rows on SSD");
    }
}

#[test]
fn overflow_is_freed_with_the_last_pin() {
    let table = table(64);
    let lookup = Lookup::new(std::slice::from_ref(&table), &[0]).unwrap();
    let ids: Vec<Id> = (0..100_000).collect();
    let plan = lookup.plan(&ids, &[0, ids.len() as i64], PlanMode::TRAIN, &[]).unwrap();
    plan.wait(&mut []).unwrap();
    assert!(plan.overflow_rows().unwrap()[0] > 0 && held_bytes(&table) > 2 * HOST_BYTES);
    plan.commit().unwrap();
    drop(plan);
    // The next batch demotes the rows beyond the budget.
    lookup.plan(&ids[..10], &[0, 10], PlanMode::TRAIN, &[]).unwrap().wait(&mut []).unwrap();
    let held = held_bytes(&table);
    assert!(held <= HOST_BYTES + (1 << 20) + PAGES_BYTES, "{held} bytes");
}

#[test]
fn few_rows_in_a_large_shared_budget_use_little_memory() {
    let budget = Arc::new(SharedBudget::new(1 << 36, 1 << 37, 2, 1.0));
    let shared_budget = Some(Arc::clone(&budget));
    let config = TableConfig { host_bytes: 1 << 20, shared_budget, ssd: None, ..config(64) };
    let table = Table::open(config, None, Arc::new(MemoryEngine::default())).unwrap();
    let resident = || table.inner.lock().unwrap().placement.host.arena().resident_bytes() as u64;
    import(&table, 0..100);
    assert!(resident() < 128 << 10, "{} bytes for 100 rows", resident());
    let lookup = Lookup::new(std::slice::from_ref(&table), &[0]).unwrap();
    let ids: Vec<Id> = (0..20_000).collect();
    let plan = lookup.plan(&ids, &[0, ids.len() as i64], PlanMode::EVALUATE, &[]).unwrap();
    plan.wait(&mut []).unwrap();
    // A row inserted while the plan exists is beyond the table's own portion of the budget.
    import(&table, 30_000..30_001);
    assert!(resident() > 5 << 20);
    drop(plan);
    assert_eq!((table.len().unwrap(), budget.free()), (101, 1 << 36));
    assert!(resident() < 2 << 20, "{} bytes once the working set is gone", resident());
    assert!(table.read_rows(&[30_000]).unwrap().found[0]);
}
