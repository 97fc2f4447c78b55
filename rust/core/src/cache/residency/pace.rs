//! Time limits of a sweep's slices on SSD, so that training hardly slows down.

use std::time::{Duration, Instant};

/// A slice may take 1/`SHARE` of the time since the previous slice.
const SHARE: u32 = 16;

/// The end of the last slice; `None` before the first one.
#[derive(Debug, Default)]
pub(super) struct SweepPace {
    ended: Option<Instant>,
}

impl SweepPace {
    /// Time that a slice starting at `now` may take; zero for the first slice. The caller does a minimum of work in any
    /// case, so that the sweep advances however short the steps are.
    pub(super) fn time_for_slice(&self, now: Instant) -> Duration {
        self.ended.map_or(Duration::ZERO, |ended| now.saturating_duration_since(ended) / SHARE)
    }

    /// Records the end of a slice.
    pub(super) fn slice_ended(&mut self, now: Instant) {
        self.ended = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_may_take_a_sixteenth_of_the_time_since_the_last_one() {
        let (begin, milliseconds) = (Instant::now(), Duration::from_millis);
        let mut pace = SweepPace::default();
        assert_eq!(pace.time_for_slice(begin), Duration::ZERO);
        pace.slice_ended(begin + milliseconds(4));
        assert_eq!(pace.time_for_slice(begin + milliseconds(20)), milliseconds(1));
        assert_eq!(pace.time_for_slice(begin), Duration::ZERO, "the clock of another processor may be behind");
        pace.slice_ended(begin + milliseconds(21));
        assert_eq!(pace.time_for_slice(begin + milliseconds(53)), milliseconds(2));
    }
}
