use super::*;

#[cfg(loom)]
mod loom;
#[cfg(not(loom))]
mod worker_set;

#[test]
fn every_item_is_assigned_once_for_any_costs() {
    for threads in [1, 2, 3, 8] {
        for items in [0, 1, 2, 7, 1000] {
            for cost in [|_| 1, |item: usize| item as u64, |item: usize| if item == 3 { 1_000_000 } else { 1 }] {
                let mut before = vec![0];
                before.extend((0..items).scan(0, |sum, item| {
                    *sum += cost(item);
                    Some(*sum)
                }));
                let taken: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                parallel_ranges(
                    threads,
                    items,
                    |item| before[item],
                    |range| {
                        for item in range {
                            taken[item].fetch_add(1, Ordering::Relaxed);
                        }
                    },
                );
                assert!(
                    taken.iter().all(|count| count.load(Ordering::Relaxed) == 1),
                    "{threads} threads {items} items"
                );
            }
        }
    }
}

#[test]
fn pieces_that_are_handed_over_are_done_once_each_by_all_threads() {
    for (threads, cost) in [(1, 1000), (2, 1000), (4, 1000), (4, 0)] {
        let done: Vec<AtomicUsize> = (0..300).map(|_| AtomicUsize::new(0)).collect();
        let given = parallel_pipeline(
            threads,
            cost,
            |piece: usize| {
                done[piece].fetch_add(1, Ordering::Relaxed);
            },
            |give| {
                (0..done.len()).for_each(&mut *give);
                done.len()
            },
        );
        assert_eq!(given, done.len());
        assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads} threads");
    }
    let inside = std::sync::Barrier::new(2);
    // The other thread runs one of the pieces while this one waits in another, or in its own work.
    parallel_pipeline(
        2,
        1000,
        |()| {
            inside.wait();
        },
        |give| {
            give(());
            inside.wait();
        },
    );
}

#[test]
fn a_call_ends_while_workers_wait_for_its_caller() {
    let mutex = Mutex::new(0);
    let held = lock(&mutex);
    let waiting = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for_each_that_waits(4, 0..8, |_| {
                    waiting.fetch_add(1, Ordering::Relaxed);
                    *lock(&mutex) += 1;
                });
            });
        }
        // Wait for every caller and a worker. Tests that run in parallel may need the other workers at the same
        // time.
        while waiting.load(Ordering::Relaxed) < 4 + 1 {
            std::thread::yield_now();
        }
        let done = AtomicUsize::new(0);
        let count = |range: std::ops::Range<usize>| {
            done.fetch_add(range.len(), Ordering::Relaxed);
        };
        parallel_ranges(4, 100, |item| item as u64, count);
        for_each_that_waits(4, 0..100, |item| count(item..item + 1));
        for_each_alongside(0..100, |item| count(item..item + 1), || ());
        assert_eq!(done.into_inner(), 300);
        drop(held);
    });
    assert_eq!(mutex.into_inner().expect("no panic"), 4 * 8);
}

#[test]
fn tasks_of_one_thread_are_done_in_their_order() {
    let order = Mutex::new(Vec::new());
    for_each_that_waits(1, 0..5, |task| lock(&order).push(task));
    assert_eq!(order.into_inner().expect("no panic"), [0, 1, 2, 3, 4]);
}

#[test]
fn a_thread_does_no_other_task_while_its_task_waits_for_kernels() {
    thread_local! {
        static IS_INSIDE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }
    for _ in 0..300 {
        for_each_that_waits(4, 0..12, |_| {
            assert!(!IS_INSIDE.replace(true), "a task began within another one on the same thread");
            let spin =
                |range: std::ops::Range<usize>| range.for_each(|_| (0..200).for_each(|_| std::hint::spin_loop()));
            parallel_ranges(2, 8, |item| item as u64, spin);
            IS_INSIDE.set(false);
        });
    }
}

#[test]
fn one_pool_serves_calls_of_all_sizes() {
    for threads in (2..40).chain((2..40).rev()) {
        parallel_ranges(threads, 100, |item| item as u64, |_| {});
        for_each_that_waits(threads, 0..threads, |_| {});
    }
    let size = workers(38, 38).expect("threads").size();
    assert_eq!(workers(1, 1).expect("threads").size(), size, "the pool is kept");
    assert!(size >= 38, "{size} threads for a call that asked for 38 helpers");
}

#[test]
fn work_runs_on_as_many_threads_as_asked() {
    let inside = std::sync::Barrier::new(3);
    // No thread passes the barrier before all three have reached it.
    parallel_ranges(
        3,
        3,
        |item| item as u64,
        |range| {
            for _ in range {
                inside.wait();
            }
        },
    );
}
