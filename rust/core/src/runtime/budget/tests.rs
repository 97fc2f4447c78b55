use super::*;

#[test]
fn threads_share_budget_exactly_and_returned_bytes_are_free() {
    let budget = SharedBudget::new(10_003, 30_000, 4, 1.0);
    let taken = || (0..1000).filter(|_| budget.take(7)).count() as u64 * 7;
    let all: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(taken)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    });
    assert_eq!((all, budget.free()), (10_003, 0));
    assert!(!budget.take(1) && budget.take(0));
    budget.give_back(all);
    assert!(!budget.take(10_004) && budget.free() == 10_003, "all or none");
    assert!(budget.take(10_003) && budget.untaken().free() == 10_003);
}

#[test]
fn the_budget_with_more_bytes_counts_what_other_tables_get_of_them() {
    assert_eq!(SharedBudget::new(10, 1000, 2, 1.0).host_bytes_with(100), 1100);
    assert_eq!(SharedBudget::new(10, 1000, 2, 0.5).host_bytes_with(100), 1204);
}
