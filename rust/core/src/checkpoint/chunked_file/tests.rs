use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::{WriterThreads, for_each_piece};
use crate::error::Kind;

#[test]
fn the_error_is_that_of_the_earliest_failed_piece() {
    for first_to_end in [0, 1] {
        let (barrier, has_failed) = (Barrier::new(2), AtomicBool::new(false));
        let failed = for_each_piece(2, vec![0, 1], |piece| {
            // Both pieces have started before either fails.
            barrier.wait();
            while piece != first_to_end && !has_failed.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            let error = Kind::Corruption.error(format!("piece {piece}"));
            has_failed.store(true, Ordering::Release);
            Err(error)
        });
        assert_eq!(failed.unwrap_err().to_string(), "piece 0", "{first_to_end} ended first");
    }
}

#[test]
fn no_piece_starts_after_an_error() {
    let started = AtomicUsize::new(0);
    let failed = for_each_piece(1, (0..10).collect(), |piece: usize| {
        started.fetch_add(1, Ordering::Relaxed);
        if piece == 3 { Err(Kind::Storage.error("full")) } else { Ok(()) }
    });
    assert_eq!((failed.unwrap_err().kind(), started.into_inner()), (Kind::Storage, 4));
}

#[test]
fn panic_of_a_task_is_an_error_and_ends_the_writing() {
    let mut threads = WriterThreads::start(2, 4);
    threads.run(|| panic!("asked to")).expect("a thread runs it");
    let error = threads.end().expect_err("a panic");
    assert_eq!(error.kind(), Kind::State);
    assert!(error.to_string().contains("asked to"), "{error}");
}
