use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::ThreadPoolBuilder;

use super::super::*;

fn workers(threads: usize) -> WorkerSet {
    WorkerSet::new(ThreadPoolBuilder::new().num_threads(threads).build().expect("threads"))
}

#[test]
fn a_call_waits_only_for_workers_that_have_started() {
    let workers = workers(1);
    let (begun, rest) = (Barrier::new(2), Barrier::new(2));
    // The only thread of the set is busy with one call, so the other call is served only by its caller.
    workers.run_with_helpers(
        1,
        &|| {
            begun.wait();
            rest.wait();
        },
        |ask| {
            ask();
            begun.wait();
            let helped = AtomicUsize::new(0);
            let help = || {
                helped.fetch_add(1, Ordering::Relaxed);
            };
            workers.run_with_helpers(1, &help, |ask| (0..5).for_each(|_| ask()));
            assert_eq!(helped.into_inner(), 0, "nobody was free");
            rest.wait();
        },
    );
    let ended = AtomicUsize::new(0);
    for _ in 0..2000 {
        let entered = AtomicUsize::new(0);
        let help = || {
            entered.fetch_add(1, Ordering::Relaxed);
            std::hint::spin_loop();
            ended.fetch_add(1, Ordering::Relaxed);
        };
        let before = ended.load(Ordering::Relaxed);
        workers.run_with_helpers(1, &help, |ask| ask());
        assert_eq!(ended.load(Ordering::Relaxed) - before, entered.into_inner());
    }
}

#[test]
fn a_call_limits_its_helpers() {
    let workers = workers(8);
    for _ in 0..200 {
        let (came, inside, highest) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        let all = Barrier::new(3);
        let help = || {
            highest.fetch_max(inside.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            // The first two and the caller meet here. The other threads are rejected in the meantime.
            if came.fetch_add(1, Ordering::Relaxed) < 2 {
                all.wait();
            }
            inside.fetch_sub(1, Ordering::Relaxed);
        };
        workers.run_with_helpers(2, &help, |ask| {
            (0..20).for_each(|_| ask());
            all.wait();
        });
        assert_eq!(highest.into_inner(), 2);
    }
}

#[test]
fn panics_of_helpers_and_caller_propagate() {
    let workers = workers(2);
    let message = |panic: Box<dyn Any + Send>| panic.downcast_ref::<&str>().copied().unwrap_or_default().to_owned();
    let begun = Barrier::new(2);
    let helping = || {
        workers.run_with_helpers(
            1,
            &|| {
                begun.wait();
                panic!("of who helps")
            },
            |ask| {
                ask();
                begun.wait();
            },
        );
    };
    assert_eq!(message(catch_unwind(AssertUnwindSafe(helping)).expect_err("a panic")), "of who helps");
    let calling = || workers.run_with_helpers(1, &|| {}, |_| panic!("of the caller"));
    assert_eq!(message(catch_unwind(AssertUnwindSafe(calling)).expect_err("a panic")), "of the caller");
}
