//! Limits the measurement to a fraction of a step's time.
//!
//! If few ids make up a table's traffic, most of them are in the sample, and to simulate each of their uses would cost
//! more than the lookups themselves. So the measurement works in bursts. Between them it pauses, and the simulated
//! caches do not change.

/// Uses of sampled ids that are always simulated.
const FREE: u64 = 1 << 16;
/// Beyond those, one use is simulated per this number of lookups.
const LOOKUPS_A_USE: u64 = 512;
/// A burst ends when it has simulated this many uses more than were due. It covers the sample many times, so that the
/// boundary between two bursts has little weight.
const BURST: u64 = 1 << 18;

/// Progress of the measurement.
#[derive(Debug, Default)]
pub(super) struct SamplingPace {
    lookups: u64,
    simulated: u64,
    is_resting: bool,
}

impl SamplingPace {
    /// Counts lookups. Returns true if they are to be measured.
    pub(super) fn should_sample(&mut self, lookups: u64) -> bool {
        self.lookups += lookups;
        let due = FREE + self.lookups / LOOKUPS_A_USE;
        if self.is_resting {
            self.is_resting = self.simulated > due;
        } else {
            self.is_resting = self.simulated > due + BURST;
        }
        !self.is_resting
    }

    /// Counts simulated uses.
    pub(super) fn sampled(&mut self, uses: u64) {
        self.simulated += uses;
    }
}
