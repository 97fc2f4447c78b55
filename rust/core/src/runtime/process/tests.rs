use std::sync::Barrier;
use std::sync::atomic::AtomicU32;

use super::*;
use crate::error::Kind;

#[test]
fn of_threads_that_ask_at_once_one_makes_the_value() {
    static ONE: PerProcess<u32> = PerProcess::new();
    static MADE: AtomicU32 = AtomicU32::new(0);
    let asking = Barrier::new(8);
    let ask = || {
        asking.wait();
        *ONE.get(|| {
            std::thread::yield_now();
            Ok(MADE.fetch_add(1, Ordering::Relaxed))
        })
        .unwrap()
    };
    let values: Vec<u32> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!((values, MADE.load(Ordering::Relaxed)), (vec![0; 8], 1));
}

#[cfg(target_os = "linux")]
#[test]
fn background_thread_passes_low_priority_to_its_threads() {
    let nice = || rustix::process::getpriority_process(None).unwrap();
    let before = nice();
    let started = move |behind: BackgroundFlag| {
        let theirs = move || {
            behind.apply();
            (nice(), works_in_background())
        };
        std::thread::spawn(theirs).join().unwrap()
    };
    let of_thread = std::thread::spawn(move || {
        lower_priority();
        (nice(), works_in_background(), started(BackgroundFlag::of_this_thread()))
    });
    let expected = LOW_PRIORITY.max(before);
    assert_eq!(of_thread.join().unwrap(), (expected, true, (expected, true)));
    assert_eq!((nice(), works_in_background()), (before, false), "other threads are as they were");
}

#[test]
fn what_could_not_be_made_is_tried_again() {
    static ONE: PerProcess<u32> = PerProcess::new();
    assert!(ONE.get(|| Err(Kind::Storage.error("no threads"))).is_err());
    assert_eq!(*ONE.get(|| Ok(7)).unwrap(), 7);
}
