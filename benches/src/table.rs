//! The configuration of a table to measure.

use embcache::cache::host_row_bytes;
use embcache::config::{AdmissionRule, MissingRead, OnFull, OptimizerKind, PolicyKind, TableConfig};
use embcache::rows::InitializerSpec;
use embcache::types::{DEFAULT_SCORE_HALF_LIFE_STEPS, DEFAULT_TOTAL_NUM_BUCKETS};

use crate::plain_kernels::DIM;

/// The configuration of a table whose rows of [`DIM`] float32 are all in RAM. It fits `rows` of them, with the slots of
/// `optimizer`. New rows are zeros.
pub fn table_config(optimizer: OptimizerKind, rows: u64) -> TableConfig {
    let policy = PolicyKind::S3Fifo;
    TableConfig {
        name: "rows".into(),
        key: 1,
        dim: DIM,
        optimizer,
        initializer: InitializerSpec::Constant { value: 0.0 },
        seed: 0,
        total_num_buckets: DEFAULT_TOTAL_NUM_BUCKETS,
        buckets: 0..DEFAULT_TOTAL_NUM_BUCKETS,
        host_bytes: rows * host_row_bytes(&optimizer.layout(DIM), policy),
        shared_budget: None,
        device_rows: None,
        ssd: None,
        policy,
        on_full: OnFull::Error,
        admission: AdmissionRule::All,
        not_admitted: MissingRead::Initial,
        missing_read: MissingRead::Initial,
        score_half_life_steps: DEFAULT_SCORE_HALF_LIFE_STEPS,
        eviction: None,
    }
}
