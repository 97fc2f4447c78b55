//! Measures the memory that an id takes while it waits for a row.

use embcache::cache::{Lookup, PlanMode, Table};
use embcache::config::{Admission, NotAdmitted, OptimizerKind, TableConfig};
use embcache::io::default_engine;
use embcache_benches::{BATCH_IDS, Better, Row, Scale, resident, run_rows, scattered_id, table_config};

const BYTES: &str = "pending_bytes_per_id";

fn main() {
    run_rows(&[BYTES], |scale, _| measure(scale));
}

/// Print the worst growth of resident bytes for each id that waits, from a tenth of the ids on.
fn measure(scale: Scale) {
    let most = scale.pick(10_000_000_u64, 100_000);
    // Enough for all ids, so that nothing is forgotten.
    let admission = Admission::Count { threshold: 1 << 20, window_steps: None, memory: 1 << 30 };
    let config = TableConfig { admission, not_admitted: NotAdmitted::Zeros, ..table_config(OptimizerKind::Sgd, 1000) };
    let engine = default_engine().expect("an engine for files, which are not used");
    let table = Table::open(config, None, engine).expect("a table in RAM");
    let lookup = Lookup::new(&[table], &[0]).expect("one feature of one table");
    let (mut base, mut worst, mut waiting) = (0, 0.0_f64, 0);
    while waiting < most {
        let end = (waiting + BATCH_IDS as u64).min(most);
        let ids: Vec<i64> = (waiting..end).map(scattered_id).collect();
        let plan = lookup.plan(&ids, &[0, ids.len() as i64], PlanMode::TRAIN).expect("ids");
        plan.wait().expect("nothing to read");
        plan.begin_update().expect("nobody else trains");
        plan.commit().expect("counted");
        drop(plan);
        waiting = end;
        if base == 0 {
            // What a batch takes, whatever waits.
            base = resident().now;
        } else if waiting >= most / 10 {
            worst = worst.max(resident().now.saturating_sub(base) as f64 / waiting as f64);
        }
    }
    Row::new(BYTES, "bytes", Better::Lower, vec![worst]).print();
}
