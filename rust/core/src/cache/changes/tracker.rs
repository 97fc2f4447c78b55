//! Position of a table in its history of steps and epochs, and the watchers of its rows.

use super::history::CheckpointHistory;
use super::marks::{ExportSet, SnapshotRows};
use crate::ssd::StateCounters;
use crate::types::Id;

/// Bytes of tombstones that the host budget does not count: they are part of a table's fixed overhead.
pub(crate) const FREE_HISTORY_BYTES: u64 = 64 << 10;

/// The steps and epochs of a table, and the watchers of its rows. The placement notifies them before a
/// row changes or leaves its slot, and records moves after them.
pub(crate) struct ChangeTracker {
    /// Number of training steps.
    pub(crate) step: u64,
    /// The epoch of rows that are trained at present.
    pub(crate) epoch: u32,
    /// Rows modified in this epoch or later whose newest copy is in RAM are marked `MODIFIED`.
    pub(crate) marked_since: u32,
    pub(crate) history: CheckpointHistory,
    pub(crate) exports: ExportSet,
    pub(crate) snapshot: Option<Box<SnapshotRows>>,
    pub(crate) moved: MovedRows,
}

impl ChangeTracker {
    /// The tracker of a table that was just opened, with at most `history_bytes` bytes of tombstones.
    pub(crate) fn new(counters: StateCounters, history_bytes: u64) -> Self {
        Self {
            step: counters.step,
            epoch: counters.epoch,
            marked_since: counters.epoch,
            history: CheckpointHistory::new(history_bytes),
            exports: ExportSet::default(),
            snapshot: None,
            moved: MovedRows::default(),
        }
    }

    /// The training step and the epoch, as stored in the SSD tier's state and in checkpoints.
    pub(crate) fn counters(&self) -> StateCounters {
        StateCounters { step: self.step, epoch: self.epoch }
    }

    /// Bytes of the host budget that tombstones use. Only a table with an SSD tier can free space for them, from its
    /// rows in RAM.
    pub(crate) fn charged_history_bytes(&self) -> u64 {
        self.history.bytes().saturating_sub(FREE_HISTORY_BYTES)
    }
}

/// Rows that moved to slots that the sweep in progress may have visited already.
#[derive(Debug, Default)]
pub(crate) struct MovedRows {
    ids: Vec<Id>,
    is_recording: bool,
}

impl MovedRows {
    /// Starts recording for a sweep that starts. Drops the rows recorded for the previous one.
    pub(crate) fn start(&mut self) {
        *self = Self { ids: Vec::new(), is_recording: true };
    }

    /// Ends recording, because the sweep has visited all tiers. Keeps the recorded rows.
    pub(crate) fn stop(&mut self) {
        self.is_recording = false;
    }

    /// Records rows that move.
    #[inline]
    pub(crate) fn record(&mut self, ids: impl Iterator<Item = Id>) {
        if self.is_recording {
            self.ids.extend(ids);
        }
    }

    /// Moves the recorded rows to `ids`, and frees their memory here.
    pub(crate) fn append_to(&mut self, ids: &mut Vec<Id>) {
        ids.append(&mut std::mem::take(&mut self.ids));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

#[cfg(test)]
mod tests;
