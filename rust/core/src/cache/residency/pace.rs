//! How long the slices of a sweep may take on SSD, so that training hardly becomes slower.

use std::time::{Duration, Instant};

/// A slice takes this part of the time that has passed since the slice before: 1/16.
const SHARE: u32 = 16;

/// When the last slice ended. The default is that there was none.
#[derive(Debug, Default)]
pub(super) struct SweepPace {
    ended: Option<Instant>,
}

impl SweepPace {
    /// How long a slice may take that begins now. It is nothing for the first one. Whoever keeps to it does a least part all the same, so
    /// that the sweep goes on however short the steps are.
    pub(super) fn time_for_slice(&self, now: Instant) -> Duration {
        self.ended.map_or(Duration::ZERO, |ended| now.saturating_duration_since(ended) / SHARE)
    }

    /// A slice has ended.
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
