//! Measures the memory that an id takes while it waits for a row.

use std::ops::Range;

use embcache::cache::{Lookup, PlanMode, Table};
use embcache::config::{AdmissionRule, MissingRead, OptimizerKind, TableConfig};
use embcache::io::default_engine;
use embcache_benches::{BATCH_IDS, Better, Group, Row, Scale, resident, scattered_id, table_config};

const BYTES: &str = "pending_bytes_per_id";

pub(crate) fn group() -> Group {
    Group::rows(&[BYTES], |scale, _| measure(scale))
}

/// A batch is counted so often before the growth is measured. By then what batches take is resident, whatever waits.
const WARM_UP: usize = 8;

/// Print the worst growth of resident bytes for each id that waits, from a tenth of the ids on.
fn measure(scale: Scale) {
    let most = scale.pick(10_000_000_u64, 100_000);
    // Enough for all ids, so that nothing is forgotten.
    let admission = AdmissionRule::Count { threshold: 1 << 20, window_steps: None, memory: 1 << 30 };
    let config = TableConfig { admission, not_admitted: MissingRead::Zeros, ..table_config(OptimizerKind::Sgd, 1000) };
    let engine = default_engine().expect("an engine for files, which are not used");
    let table = Table::open(config, None, engine).expect("a table in RAM");
    let lookup = Lookup::new(&[table], &[0]).expect("one feature of one table");
    let first = (BATCH_IDS as u64).min(most / 10);
    for _ in 0..WARM_UP {
        wait_for_rows(&lookup, 0..first);
    }
    let base = resident().now;
    let (mut worst, mut waiting) = (0.0_f64, first);
    while waiting < most {
        let end = (waiting + first).min(most);
        wait_for_rows(&lookup, waiting..end);
        waiting = end;
        if waiting >= most / 10 {
            worst = worst.max(resident().now.saturating_sub(base) as f64 / (waiting - first) as f64);
        }
    }
    Row::new(BYTES, "bytes", Better::Lower, vec![worst]).print();
}

/// Make a step with the ids of these ranks, none of which gets a row.
fn wait_for_rows(lookup: &Lookup, ranks: Range<u64>) {
    let ids: Vec<i64> = ranks.map(scattered_id).collect();
    let plan = lookup.plan(&ids, &[0, ids.len() as i64], PlanMode::TRAIN, &[]).expect("ids");
    plan.wait(&mut []).expect("nothing to read");
    plan.begin_update().expect("nobody else trains");
    plan.commit().expect("counted");
}
