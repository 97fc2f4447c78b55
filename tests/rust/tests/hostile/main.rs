//! Bytes from disk are hostile. Files that the code has written are changed at random, in bytes and in structure. In
//! most of them every checksum is fixed, so that the code after the checksums runs too.
//!
//! For any contents of the files, there must be no panic, no hang, no allocation that the size of the files does not
//! explain, and only errors whose kind states the problem. `EMBCACHE_FUZZ_S=600` (`make fuzz FOR=600`) runs for that
//! many seconds instead of a fixed number of cases.
#![allow(clippy::unwrap_used)]

mod allocations;
mod allocator;
mod checkpoint;
mod clocks;
mod conversion;
mod false_deltas;
mod findings;
mod missing_reads;
mod mutate;
mod recis;
mod segments;
mod serving;
mod ssd;

use std::time::{Duration, Instant};

use embcache::{Error, Kind};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseError, TestCaseResult, TestRunner};

/// The number of cases per target if no time is set.
const CASES: u32 = 400;
/// Maximum size of a single allocation. The largest legal one is a piece of the SSD index, which has 33 MiB for any
/// files. (A reader stages one group at a time, and the groups of these files are smaller.)
const LARGEST_ALLOCATION: usize = 33 << 20;

/// Runs `test` on many values of `strategy`.
fn fuzz<S: Strategy>(strategy: &S, test: impl Fn(S::Value) -> TestCaseResult) {
    let seconds = std::env::var("EMBCACHE_FUZZ_S").ok().and_then(|seconds| seconds.parse().ok());
    let end = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    loop {
        let config = Config { cases: CASES, max_shrink_iters: 2000, failure_persistence: None, ..Config::default() };
        let tested = TestRunner::new(config).run(strategy, |value| {
            test(value)?;
            let largest = allocator::largest();
            if largest > LARGEST_ALLOCATION {
                return Err(TestCaseError::fail(format!("{largest} bytes were allocated at once")));
            }
            Ok(())
        });
        if let Err(failure) = tested {
            panic!("{failure}");
        }
        if end.is_none_or(|end| Instant::now() > end) {
            return;
        }
    }
}

/// Checks that an error is one that corrupted files may cause, and states the location of the corruption.
fn check_error(error: &Error) -> TestCaseResult {
    let expected = matches!(
        error.kind(),
        Kind::Corruption
            | Kind::Mismatch
            | Kind::Unsupported
            | Kind::Config
            | Kind::State
            | Kind::Path
            | Kind::Capacity
            | Kind::ReadOnly
            | Kind::Storage
            | Kind::Input
    );
    if !expected || (error.kind() == Kind::Corruption && error.path().is_none()) {
        return Err(TestCaseError::fail(format!("{error:?}")));
    }
    Ok(())
}
