use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::for_each_piece;
use crate::error::{Error, Kind};

#[test]
fn error_of_earlier_piece_wins_for_any_order_of_ends() {
    for first_to_end in [0, 1] {
        let (both, has_failed) = (Barrier::new(2), AtomicBool::new(false));
        let failed = for_each_piece(2, vec![0, 1], |piece| {
            // Both pieces have started before either fails.
            both.wait();
            while piece != first_to_end && !has_failed.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            let error = Error::new(Kind::Corruption, format!("piece {piece}"));
            has_failed.store(true, Ordering::Release);
            Err(error)
        });
        assert_eq!(failed.unwrap_err().to_string(), "piece 0", "{first_to_end} ended first");
    }
}

#[test]
fn no_piece_is_begun_after_an_error() {
    let begun = AtomicUsize::new(0);
    let failed = for_each_piece(1, (0..10).collect(), |piece: usize| {
        begun.fetch_add(1, Ordering::Relaxed);
        if piece == 3 { Err(Error::new(Kind::Storage, "full")) } else { Ok(()) }
    });
    assert_eq!((failed.unwrap_err().kind(), begun.into_inner()), (Kind::Storage, 4));
}
