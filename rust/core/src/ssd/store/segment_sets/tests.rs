use super::*;

#[test]
fn dead_records_are_those_added() {
    let mut dead = DeadRecords::default();
    let added = [0, 63, 64, 5000];
    for record in added {
        dead.add(record);
    }
    let found: Vec<u32> = (0..10_000).filter(|record| dead.contains(*record)).collect();
    assert_eq!(found, added);
}
