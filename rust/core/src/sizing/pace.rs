//! How much of the traffic is looked at, so that the measurement stays within a share of a step's time.
//!
//! Where few ids make up a table's traffic, most of them are in the sample, and to simulate each of their uses would cost more than the
//! lookups themselves. So the measurement works in bursts. Between them it rests, and the caches that it simulates stand still.

/// Uses of sampled ids that are simulated in any case.
const FREE: u64 = 1 << 16;
/// Beyond them one use is simulated for so many lookups.
const LOOKUPS_A_USE: u64 = 512;
/// A burst ends when it has simulated so many uses more than were due. It covers the sample many times over, so that what happens
/// where two bursts meet weighs little.
const BURST: u64 = 1 << 18;

/// What was looked at so far.
#[derive(Debug, Default)]
pub(super) struct SamplingPace {
    lookups: u64,
    simulated: u64,
    is_resting: bool,
}

impl SamplingPace {
    /// Count lookups. Whether they are to be looked at.
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

    /// Count uses that were simulated.
    pub(super) fn sampled(&mut self, uses: u64) {
        self.simulated += uses;
    }
}
