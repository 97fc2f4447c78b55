//! Admission of the ids of a training batch. It is decided when the batch is forwarded, and counted when it is
//! committed.

use super::Residency;
use super::demand::NotAdmittedIds;
use super::hold::PlanPins;
use crate::error::Result;
use crate::lifecycle::BucketCounts;
use crate::lifecycle::admission::{AdmissionCandidate, RowAdmitter};
use crate::types::Id;

/// Ids inserted while plans with an admission decision are in flight.
#[derive(Debug, Default)]
pub(super) struct NewRowLog {
    /// Number of such plans.
    plans: u32,
    /// Each id with the table's version at its insertion.
    ids: Vec<(u64, Id)>,
}

impl NewRowLog {
    fn since(&self, version: u64) -> impl Iterator<Item = Id> + '_ {
        self.ids.iter().filter(move |(born, _)| *born > version).map(|(_, id)| *id)
    }
}

impl Residency {
    /// Returns the admission candidates of the ids of a training plan at `positions`, which have no row: `[n]`, and
    /// whether each is admitted at present: `[n]`.
    pub(super) fn admits(
        &self,
        pins: &PlanPins,
        positions: impl Iterator<Item = u32> + Clone,
    ) -> (Vec<AdmissionCandidate>, Vec<bool>) {
        // Reserves exactly, because the allocator may not return excess memory.
        let mut candidates: Vec<AdmissionCandidate> = Vec::with_capacity(positions.clone().count());
        candidates.extend(positions.map(|at| pins.demand.candidate(&pins.ids, at)));
        let admitted = match &self.admitter {
            None => vec![true; candidates.len()],
            Some(admitter) => admitter.decide(&mut candidates, self.step + 1),
        };
        (candidates, admitted)
    }

    /// Makes the final decision which ids of a training plan are not admitted, among those at `positions`, which have
    /// no row, and the waiting ids. The waiting ids are decided again only if something was counted since. Returns the
    /// number of admitted ids.
    ///
    /// Errors: `Memory` if the others cannot be counted. Nothing has changed then.
    pub(super) fn decide_admission(&mut self, pins: &mut PlanPins, positions: &[u32]) -> Result<u64> {
        let still_wait = pins.waiting.still_wait(self.admitter.as_ref().map_or(0, RowAdmitter::changes));
        let decided_anew = if still_wait { &[][..] } else { &pins.waiting.positions };
        let unborn = positions.iter().chain(decided_anew).copied();
        let (candidates, admitted) = self.admits(pins, unborn.clone());
        let births = admitted.iter().filter(|admitted| **admitted).count();
        let (mut refused_at, mut refused) = (Vec::new(), Vec::new());
        for ((position, candidate), _) in unborn.zip(candidates).zip(admitted).filter(|(_, admitted)| !*admitted) {
            refused_at.push(position);
            refused.push(candidate);
        }
        if let Some(admitter) = &mut self.admitter {
            admitter.reserve(refused.len() + if still_wait { pins.waiting.positions.len() } else { 0 })?;
        }
        let mut waiting = std::mem::take(&mut pins.waiting);
        if still_wait {
            waiting.positions.append(&mut refused_at);
            waiting.candidates.append(&mut refused);
            (refused_at, refused) = (waiting.positions, waiting.candidates);
        }
        if pins.not_admitted.is_none() {
            self.new_rows.plans += 1;
        }
        pins.not_admitted_positions = refused_at;
        pins.not_admitted = Some(NotAdmittedIds { candidates: refused, version: self.context.version() });
        Ok(births as u64)
    }

    /// Like [`Residency::decide_admission`], but for all ids of a plan whose rows are in the host tier. Reduces the
    /// plan's pledge to the rows that it may insert.
    pub(crate) fn decide_admission_in_host(&mut self, pins: &mut PlanPins) -> Result<()> {
        let waiting = pins.waiting.positions.len() as u64;
        let mut unborn: Vec<u32> = Vec::new();
        // A plan has pledged all of its provisional rows that it is to train.
        if pins.pledged > 0 {
            let all = 0..pins.ids.len() as u32;
            unborn.extend(all.filter(|&position| Self::is_provisional(&self.host.slots, pins.host[position as usize])));
        }
        let births = self.decide_admission(pins, &unborn)?;
        self.traffic.host.misses += waiting;
        self.traffic.ssd_misses += waiting;
        self.counts.take_back_pledge(pins.pledged);
        pins.pledged = 0;
        self.pledge(pins, births);
        Ok(())
    }

    /// Counts the ids that were not admitted in a batch that is being committed. Skips ids inserted by another batch
    /// since.
    pub(super) fn count_not_admitted(&mut self, pins: &PlanPins) {
        let (Some(refused), Some(admitter)) = (&pins.not_admitted, &mut self.admitter) else { return };
        let mut born: Vec<Id> = self.new_rows.since(refused.version).collect();
        born.sort_unstable();
        admitter.count(&refused.candidates, &born, self.epoch);
        self.traffic.not_admitted += refused.candidates.len() as u64;
    }

    /// Ends the counting of a step. Warns once if counts are forgotten because the memory for admission counts is full.
    pub(super) fn end_counting(&mut self, step: u64) {
        if self.admitter.as_mut().is_some_and(|admitter| admitter.end_step(step)) {
            let config = &self.context.config;
            let memory = config.admission.memory().unwrap_or_default();
            tracing::warn!(
                "table {:?}: the memory of its admission, {memory} bytes for the counts of ids that wait for rows, is full: after step \
                 {step} ids are forgotten that did not occur for long, and begin at 0 when they come again; raise memory, or give \
                 window_steps or a lower threshold; it is said once, and stats().admission.forgotten goes on counting",
                config.name
            );
        }
    }

    /// Records inserted ids.
    pub(super) fn record_new_rows(&mut self, ids: impl Iterator<Item = Id>) {
        let Some(admitter) = &mut self.admitter else { return };
        let version = self.context.version();
        for id in ids {
            admitter.forget(id);
            if self.new_rows.plans > 0 {
                self.new_rows.ids.push((version, id));
            }
        }
    }

    /// Ends a plan with an admission decision, committed or not.
    pub(super) fn end_admission_decision(&mut self, pins: &mut PlanPins) {
        if pins.not_admitted.take().is_some() {
            self.new_rows.plans -= 1;
            if self.new_rows.plans == 0 {
                self.new_rows.ids.clear();
            }
        }
    }

    /// True if pending ids are counted.
    pub(crate) fn keeps_counts(&self) -> bool {
        self.admitter.as_ref().is_some_and(|admitter| admitter.counters().is_some())
    }

    /// For each bucket of the shard, the number of generations of its counts that have ended. `None` if the table
    /// counts nothing.
    pub(crate) fn generations(&self) -> Option<Vec<u32>> {
        let pending = self.admitter.as_ref()?.counters()?;
        Some(self.context.config.buckets.clone().map(|bucket| pending.generation(bucket)).collect())
    }

    /// The counts of a bucket, or only those of ids counted in epoch `since` or later if it is set.
    pub(crate) fn counts_of(&self, bucket: u32, since: Option<u32>) -> BucketCounts {
        let none = || BucketCounts { bucket, ..BucketCounts::default() };
        self.admitter.as_ref().map_or_else(none, |admitter| admitter.of_bucket(bucket, since))
    }

    /// Takes the counts that a bucket had at the start of the snapshot.
    pub(crate) fn take_snapshot_counts(&mut self, bucket: u32) -> BucketCounts {
        let none = || BucketCounts { bucket, ..BucketCounts::default() };
        self.admitter.as_mut().map_or_else(none, |admitter| admitter.take_snapshot_counts(bucket))
    }

    /// Adds counts to a bucket that has none.
    ///
    /// Errors: `Memory`; the bucket then has some of the counts.
    pub(crate) fn restore_counts(&mut self, counts: &BucketCounts, epoch: u32) -> Result<()> {
        self.admitter.as_mut().map_or(Ok(()), |admitter| admitter.restore(counts, epoch))
    }
}
