//! Admission of the ids of a training batch, which is decided when the batch is forwarded and counted when it is
//! committed, and the OOV row, which ids that are not admitted share.

use std::sync::Arc;

use super::plan_pins::{NotAdmittedIds, PlanPins};
use crate::cache::table_context::TableContext;
use crate::error::Result;
use crate::kernels::OptimizerStep;
use crate::lifecycle::admission::{AdmissionCandidate, RowAdmitter};
use crate::lifecycle::{BucketCounts, OovRow};
use crate::types::Id;

/// Ids inserted while plans with an admission decision are in flight.
#[derive(Debug, Default)]
struct NewRowLog {
    /// Number of such plans.
    plans: u32,
    /// Each id with the table's version at its insertion.
    ids: Vec<(u64, Id)>,
}

impl NewRowLog {
    fn since(&self, version: u64) -> impl Iterator<Item = Id> + '_ {
        self.ids.iter().filter(move |(inserted, _)| *inserted > version).map(|(_, id)| *id)
    }
}

/// Admission of the ids of one table, and its OOV row.
pub(crate) struct TableAdmission {
    context: Arc<TableContext>,
    /// Decides which ids are admitted and counts the others. `None` if every id is admitted.
    pub(crate) admitter: Option<RowAdmitter>,
    new_rows: NewRowLog,
    /// The OOV row: the row shared by ids that are not admitted, if the table has one.
    oov_row: Option<OovRow>,
}

impl TableAdmission {
    /// The admission of a table that was just opened.
    pub(crate) fn new(context: Arc<TableContext>, admitter: Option<RowAdmitter>) -> Self {
        let oov_row = context.has_oov_row().then(|| OovRow::zeros(context.layout));
        Self { context, admitter, new_rows: NewRowLog::default(), oov_row }
    }

    /// Returns the admission candidates of the ids of a training plan at `positions`, which have no row: `[n]`, and
    /// whether each is admitted in the step after `step`: `[n]`.
    pub(crate) fn admits(
        &self,
        pins: &PlanPins,
        positions: impl Iterator<Item = u32> + Clone,
        step: u64,
    ) -> (Vec<AdmissionCandidate>, Vec<bool>) {
        // Reserves exactly, because the allocator may not return excess memory.
        let mut candidates: Vec<AdmissionCandidate> = Vec::with_capacity(positions.clone().count());
        candidates.extend(positions.map(|at| pins.demand.candidate(&pins.ids, at)));
        let admitted = match &self.admitter {
            None => vec![true; candidates.len()],
            Some(admitter) => admitter.decide(&mut candidates, step + 1),
        };
        (candidates, admitted)
    }

    /// Makes the final decision which ids of a training plan are not admitted, among those at `positions`, which have
    /// no row, and the waiting ids. The waiting ids are decided again only if something was counted since. Returns the
    /// number of admitted ids.
    ///
    /// Errors: `Memory` if the others cannot be counted. Nothing has changed then.
    pub(crate) fn decide(&mut self, pins: &mut PlanPins, positions: &[u32], step: u64) -> Result<u64> {
        let still_wait = pins.waiting.still_wait(self.admitter.as_ref().map_or(0, RowAdmitter::changes));
        let decided_anew = if still_wait { &[][..] } else { &pins.waiting.positions };
        let provisional = positions.iter().chain(decided_anew).copied();
        let (candidates, admitted) = self.admits(pins, provisional.clone(), step);
        let new_row_count = admitted.iter().filter(|admitted| **admitted).count();
        let (mut refused_at, mut not_admitted) = (Vec::new(), Vec::new());
        for ((position, candidate), _) in provisional.zip(candidates).zip(admitted).filter(|(_, admitted)| !*admitted) {
            refused_at.push(position);
            not_admitted.push(candidate);
        }
        if let Some(admitter) = &mut self.admitter {
            admitter.reserve(not_admitted.len() + if still_wait { pins.waiting.positions.len() } else { 0 })?;
        }
        let mut waiting = std::mem::take(&mut pins.waiting);
        if still_wait {
            waiting.positions.append(&mut refused_at);
            waiting.candidates.append(&mut not_admitted);
            (refused_at, not_admitted) = (waiting.positions, waiting.candidates);
        }
        if pins.not_admitted.is_none() {
            self.new_rows.plans += 1;
        }
        pins.not_admitted_positions = refused_at;
        pins.not_admitted = Some(NotAdmittedIds { candidates: not_admitted, version: self.context.version() });
        Ok(new_row_count as u64)
    }

    /// Counts the ids that were not admitted in a batch that is being committed. Skips ids inserted by another batch
    /// since. Returns their number.
    pub(crate) fn count_not_admitted(&mut self, pins: &PlanPins, epoch: u32) -> u64 {
        let (Some(not_admitted), Some(admitter)) = (&pins.not_admitted, &mut self.admitter) else { return 0 };
        let mut inserted: Vec<Id> = self.new_rows.since(not_admitted.version).collect();
        inserted.sort_unstable();
        admitter.count(&not_admitted.candidates, &inserted, epoch);
        not_admitted.candidates.len() as u64
    }

    /// Ends the counting of a step. Warns once if counts are forgotten because the memory for admission counts is full.
    pub(crate) fn end_counting(&mut self, step: u64) {
        if self.admitter.as_mut().is_some_and(|admitter| admitter.end_step(step)) {
            let config = &self.context.config;
            let memory = config.admission.memory().unwrap_or_default();
            tracing::warn!(
                "table {:?}: the memory of its admission, {memory} bytes for the counts of ids that wait for rows, is full: after step \
                 {step} ids are forgotten that did not occur for long, and begin at 0 when they come again; raise memory, or give \
                 window_steps or a lower threshold; it is said once, and stats().admission.forgotten continues to count",
                config.name
            );
        }
    }

    /// Records inserted ids.
    pub(crate) fn record_new_rows(&mut self, ids: impl Iterator<Item = Id>) {
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
    pub(crate) fn end_decision(&mut self, pins: &mut PlanPins) {
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

    /// The OOV row; `None` if the table has none.
    pub(crate) fn oov_row(&self) -> Option<&OovRow> {
        self.oov_row.as_ref()
    }

    /// Replaces the OOV row with a saved one. Its optimizer slots are reset if they do not fit this table's optimizer.
    /// `None` resets the row to zeros. Does nothing if the table has no OOV row.
    pub(crate) fn set_oov_row(&mut self, saved: Option<&OovRow>) {
        let layout = self.context.layout;
        let Some(oov_row) = &mut self.oov_row else { return };
        *oov_row = match saved {
            Some(saved) => {
                OovRow::from_values(layout, saved.values().to_vec()).unwrap_or_else(|| saved.without_slots(layout))
            }
            None => OovRow::zeros(layout),
        };
        self.context.bump_version();
    }

    /// Updates the OOV row by its gradient: `[D]`.
    pub(crate) fn train_oov_row(&mut self, gradient: &[f32], step: &OptimizerStep) {
        if let Some(oov_row) = &mut self.oov_row {
            oov_row.train(self.context.layout, gradient, step);
        }
    }

    /// Logs that the table adopts trained contents that have no OOV row.
    pub(crate) fn log_new_oov_row(&self, step: u64, from: &str) {
        if self.oov_row.is_none() || step == 0 {
            return;
        }
        tracing::info!(
            "table {:?} has not_admitted=\"oov\" and {from} has no OOV row: it begins with zeros",
            self.context.config.name
        );
    }

    /// Clears the admission counts of all pending ids.
    pub(crate) fn clear_counts(&mut self) {
        if let Some(admitter) = &mut self.admitter {
            admitter.clear();
        }
    }
}
