//! Miss ratio of a table as a function of its rows in RAM, measured on live traffic.
//!
//! A `TableSizing` receives the distinct ids of every plan and keeps a fixed number of them, chosen by a hash. On
//! these it simulates, in miniature, caches of many sizes. Sources: SHARDS with a fixed size, for `lru` (Waldspurger,
//! Park, Garthwaite, Ahmad, "Efficient MRC construction with SHARDS", FAST 2015); miniature simulations on the same
//! sample for the other policies (Waldspurger, Saemundsson, Ahmad, Park, "Cache modeling and optimization using
//! miniature simulations", ATC 2017). It stores no rows, and does not affect the table.

mod curve;
mod reuse_distance;
mod sample;
mod simulation;
#[cfg(test)]
mod tests;

pub use curve::MissRatioCurve;

use sample::{IdSample, SamplingPace, sampled_ids};

use crate::config::PolicyKind;
use crate::runtime::sync::{AtomicU64, Mutex, Ordering, lock};
use crate::types::Id;

/// No id has a hash below this, so nothing is sampled.
const OFF: u64 = 0;

/// The measurement of one table, which is off until it is started.
#[derive(Debug, Default)]
pub(crate) struct TableSizing {
    /// Ids whose hash is below this are in the sample. [`OFF`] while no measurement runs.
    hash_bound: AtomicU64,
    measured: Mutex<Option<SizingMeasurement>>,
}

/// Uses are simulated in batches of this size. The state of the simulated caches then stays in the CPU cache, which the
/// training between two plans would have evicted.
const USES_AT_ONCE: usize = 4096;

#[derive(Debug)]
struct SizingMeasurement {
    sample: IdSample,
    pace: SamplingPace,
    /// Hashes and ids of uses that are not simulated yet.
    waiting: Vec<(u64, Id)>,
}

impl SizingMeasurement {
    /// Records the lookups of a plan and its new rows, and the uses of sampled ids among them.
    fn record(&mut self, (lookups, new_rows): (u64, u64), uses: impl Iterator<Item = (u64, Id)>) {
        self.sample.looked_up(lookups, new_rows);
        let waited = self.waiting.len();
        self.waiting.extend(uses);
        self.pace.sampled((self.waiting.len() - waited) as u64);
        if self.waiting.len() >= USES_AT_ONCE {
            self.simulate();
        }
    }

    fn simulate(&mut self) {
        self.sample.used(&self.waiting);
        self.waiting.clear();
    }
}

impl TableSizing {
    /// Starts a measurement, for a table whose tiers in RAM fit `rows` rows, and whose policy is `policy`. A running
    /// measurement continues.
    pub(crate) fn begin(&self, policy: PolicyKind, rows: u64) {
        let mut measured = lock(&self.measured);
        if measured.is_none() {
            let sample = IdSample::new(policy, rows);
            self.hash_bound.store(sample.hash_bound(), Ordering::Relaxed);
            *measured = Some(SizingMeasurement { sample, pace: SamplingPace::default(), waiting: Vec::new() });
        }
    }

    /// True while a measurement runs.
    pub(crate) fn is_on(&self) -> bool {
        self.hash_bound.load(Ordering::Relaxed) != OFF
    }

    /// Records that a plan uses the rows of these distinct ids `[U]`, except those at the positions `without_row`, in
    /// ascending order: they have no row and are not admitted. `new_rows` of the rows are inserted by this plan.
    pub(crate) fn record(&self, ids: &[Id], without_row: &[u32], new_rows: u64) {
        let below = self.hash_bound.load(Ordering::Relaxed);
        if below == OFF {
            return;
        }
        let lookups = (ids.len() - without_row.len()) as u64;
        // While the measurement pauses, no id is hashed.
        if !lock(&self.measured).as_mut().is_some_and(|measured| measured.pace.should_sample(lookups)) {
            return;
        }
        let mut found = sampled_ids(ids, below);
        found.retain(|&(_, position)| without_row.binary_search(&position).is_err());
        if let Some(measured) = &mut *lock(&self.measured) {
            measured.record((lookups, new_rows), found.iter().map(|&(hash, position)| (hash, ids[position as usize])));
            self.hash_bound.store(measured.sample.hash_bound(), Ordering::Relaxed);
        }
    }

    /// The results since the start of the measurement, or since the last call with `reset`; `None` if no measurement
    /// runs. `reset` resets the counts, and leaves the simulated caches as full as they are.
    pub(crate) fn curves(&self, reset: bool) -> Option<Vec<MissRatioCurve>> {
        let mut measured = lock(&self.measured);
        let measured = measured.as_mut()?;
        measured.simulate();
        let curves = measured.sample.curves();
        if reset {
            measured.sample.reset_counts();
        }
        Some(curves)
    }
}
