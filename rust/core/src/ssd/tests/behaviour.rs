//! One test a behaviour.

use super::*;
use crate::io::MemoryEngine;

#[test]
fn rows_are_found_before_and_after_they_are_written() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, _) = open(&engine, &config(1 << 20, Reopen::Never)).unwrap();
    let rows: Vec<Row> = (0..1000).map(|id| Row::new(id - 500, 1)).collect();
    append(&tier, &rows, |_| false).unwrap();
    let ids: Vec<Id> = (-600..600).collect();
    for _ in 0..2 {
        for (id, found) in ids.iter().zip(fetch(&tier, &ids).unwrap()) {
            assert_eq!(found, (-500..500).contains(id).then(|| Row::new(*id, 1)), "{id}");
        }
        settle(&tier);
    }
    assert_eq!(tier.stats().tier.rows, 1000);
}
