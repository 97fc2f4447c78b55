//! Serves one bench, a round at a time, to a driver that measures rivals in between.
//!
//! 1. The program creates its data, checks the two sides and prints one line of JSON: name, unit, better, limit (its
//!    description, or null), batch (ids per batch, 0 without data), rows, rounds (the number of rounds to request),
//!    store (the work for other stores, or null: see [`crate::StoreWork`]).
//! 2. The driver writes `ours` or `limit`; the program runs one round of it and prints the value, or `null`.
//! 3. The driver writes `data PATH`; the program writes the batches there as little-endian int64 and prints `null`.
//! 4. The driver writes `figures`; the program prints the other figures of its rounds, see [`crate::Rounds::figures`].
//! 5. The driver closes stdin; the program exits. It also exits when the driver dies.

use std::io::{BufRead, Write};

use serde_json::{Value, json};

use crate::measure::{Bench, Scale};
use crate::process::die_with_parent;

pub(crate) fn serve(bench: &Bench, scale: Scale) {
    die_with_parent();
    let mut sides = (bench.make)(scale);
    sides.check();
    let (batch, rows) = sides.data().map_or((0, 0), |(ids, rows)| (ids.batch, rows));
    let ready = json!({
        "name": bench.name, "unit": bench.unit, "better": bench.better, "limit": bench.limit, "batch": batch, "rows": rows,
        "rounds": sides.rounds(), "store": sides.store(),
    });
    let mut out = std::io::stdout().lock();
    writeln!(out, "{ready}").expect("the driver listens");
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("the driver writes text");
        let answer = match line.split_once(' ') {
            None if line == "ours" => json!(sides.ours()),
            None if line == "limit" => json!(sides.limit()),
            None if line == "figures" => json!(sides.figures()),
            Some(("data", path)) => {
                let (ids, _) = sides.data().expect("the driver asks for data only where batch is not 0");
                let bytes: Vec<u8> = ids.values.iter().flat_map(|id| id.to_le_bytes()).collect();
                std::fs::write(path, bytes).expect("the driver's path can be written");
                Value::Null
            }
            _ => panic!("the driver asked for {line:?}"),
        };
        writeln!(out, "{answer}").expect("the driver listens");
    }
}
