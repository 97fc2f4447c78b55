//! Measures what it costs a training to measure its miss ratios.

use embcache::config::OptimizerKind;
use embcache_benches::{Bench, Better, Group, Rounds, Scale, TrainedInTurn, table_config, table_in_ram};

pub(crate) fn group() -> Group {
    Group::Alone(vec![Bench { name: "train_with_sizing", unit: "ratio", better: Better::Higher, limit: None, make }])
}

fn make(scale: Scale) -> Box<dyn Rounds> {
    let rows = scale.pick(10_000_000, 100_000);
    let open = || table_in_ram(table_config(OptimizerKind::RowWiseAdagrad, rows + rows / 100), rows);
    let tables = [open(), open()];
    tables[0].begin_sizing().expect("it is open");
    Box::new(TrainedInTurn::new(scale, rows, tables))
}
