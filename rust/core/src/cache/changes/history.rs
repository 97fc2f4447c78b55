//! The checkpoint history of a table: the base checkpoints of its contents, and the tombstones and sweeps since the
//! oldest of them. It determines the contents of a delta.

use serde::{Deserialize, Serialize};

use crate::lifecycle::ExpirySweep;
use crate::types::Id;

/// Maximum number of base checkpoints. There are several so that saves that alternate between a few directories each
/// find their own last one.
const MOST_BASES: usize = 4;
/// Maximum number of sweeps of which none covers another. A delta contains each of them, and a load matches each row of
/// the earlier checkpoints against all of them.
pub(crate) const MOST_SWEEPS: usize = 64;

/// A checkpoint whose rows were this table's when it was saved or loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseCheckpoint {
    /// The checkpoint's directory.
    pub name: String,
    /// XXH3 of its manifest.
    pub manifest_xxh3: u64,
    /// The epoch after it: changes and removals in this epoch or later are not in the checkpoint.
    pub next_epoch: u32,
}

/// The checkpoint history of one table.
#[derive(Debug)]
pub(crate) struct CheckpointHistory {
    /// Oldest first.
    bases: Vec<BaseCheckpoint>,
    /// The removed ids by epoch, epochs ascending. Complete from the oldest base checkpoint's `next_epoch` on.
    tombstones: Vec<(u32, Vec<Id>)>,
    tombstone_count: usize,
    /// The sweeps, each with its epoch, epochs ascending. Excludes sweeps that a later one covers.
    sweeps: Vec<(u32, ExpirySweep)>,
    /// Number of rows expired by sweeps that are not among the tombstones, by epoch, epochs ascending.
    expired: Vec<(u32, u64)>,
    most_ids: usize,
    /// The `next_epoch` of an asynchronous save that is not published yet. Tombstones are kept from then on, because
    /// the save may become a base checkpoint.
    pending_save: Option<u32>,
}

/// The head of a checkpoint history in a file. The ids follow it.
#[derive(Serialize, Deserialize)]
struct HistoryHeader {
    bases: Vec<BaseCheckpoint>,
    /// Each epoch, and its number of tombstones.
    tombstones: Vec<(u32, usize)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    sweeps: Vec<(u32, ExpirySweep)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    expired: Vec<(u32, u64)>,
}

impl CheckpointHistory {
    /// The history of a table without a base checkpoint. It will keep ids of at most `bytes` bytes.
    pub(crate) fn new(bytes: u64) -> Self {
        let most_ids = bytes as usize / size_of::<Id>();
        let (bases, left, sweeps, swept) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { bases, tombstones: left, tombstone_count: 0, sweeps, expired: swept, most_ids, pending_save: None }
    }

    pub(crate) fn bases(&self) -> &[BaseCheckpoint] {
        &self.bases
    }

    /// Number of bytes of the ids.
    pub(crate) fn bytes(&self) -> u64 {
        (self.tombstone_count * size_of::<Id>()) as u64
    }

    /// Records that the contents have no known base checkpoint.
    pub(crate) fn forget(&mut self) {
        *self = Self::new((self.most_ids * size_of::<Id>()) as u64);
    }

    /// Records that the table was saved as this checkpoint, or loaded from it.
    pub(crate) fn saved_as(&mut self, base: BaseCheckpoint) {
        self.bases.retain(|other| *other != base);
        self.bases.push(base);
        let most = self.bases.len().saturating_sub(MOST_BASES);
        self.bases.drain(..most);
        self.prune();
    }

    /// Records that the current contents are being saved asynchronously, until
    /// [`CheckpointHistory::finish_background_save`]. Only the last such save is awaited.
    pub(crate) fn await_save(&mut self, next_epoch: u32) {
        self.pending_save = Some(next_epoch);
        self.prune();
    }

    /// Records the end of the awaited save: the table was saved as `base`, or the save failed (`None`). Does nothing if
    /// that save is not awaited, because another one is, or too many tombstones or sweeps followed, or the contents
    /// were replaced.
    pub(crate) fn finish_background_save(&mut self, next_epoch: u32, base: Option<BaseCheckpoint>) {
        if self.pending_save != Some(next_epoch) {
            return;
        }
        self.pending_save = None;
        match base {
            Some(base) => self.saved_as(base),
            None => self.prune(),
        }
    }

    /// True if there is a base checkpoint for a delta, or may be one soon. Only then tombstones are kept, and imported
    /// rows count as modified.
    pub(crate) fn is_needed(&self) -> bool {
        self.pending_save.is_some() || !self.bases.is_empty()
    }

    /// Records tombstones in `epoch`, which is the table's. If there are too many ids, forgets the oldest base
    /// checkpoints.
    pub(crate) fn record_tombstones(&mut self, epoch: u32, ids: &[Id]) {
        while self.is_needed() && self.tombstone_count + ids.len() > self.most_ids {
            self.forget_oldest();
        }
        if !self.is_needed() || ids.is_empty() {
            return;
        }
        self.tombstone_count += ids.len();
        match self.tombstones.last_mut() {
            Some((last, left)) if *last == epoch => left.extend_from_slice(ids),
            _ => self.tombstones.push((epoch, ids.to_vec())),
        }
    }

    /// Records a sweep in `epoch`, which is the table's. A delta contains the sweep and not its rows, except rows that
    /// were modified since the delta's base: see [`CheckpointHistory::needs_tombstone`]. If there are too many sweeps,
    /// forgets the oldest base checkpoints. Returns the name of the latest forgotten one.
    pub(crate) fn record_sweep(&mut self, epoch: u32, sweep: &ExpirySweep) -> Option<String> {
        if self.is_needed() {
            self.sweeps.retain(|(_, before)| !sweep.covers(before));
            self.sweeps.push((epoch, sweep.clone()));
        }
        self.forget_beyond_most_sweeps()
    }

    /// Records the number of rows that a sweep expired in `epoch`, which is the table's, without those passed to
    /// [`CheckpointHistory::record_tombstones`].
    pub(crate) fn record_expired(&mut self, epoch: u32, rows: u64) {
        if !self.is_needed() || rows == 0 {
            return;
        }
        match self.expired.last_mut() {
            Some((last, swept)) if *last == epoch => *swept += rows,
            _ => self.expired.push((epoch, rows)),
        }
    }

    /// Number of rows expired by sweeps since `base` whose ids are not in [`CheckpointHistory::tombstones_since`].
    pub(crate) fn expired_since(&self, base: &BaseCheckpoint) -> u64 {
        self.expired.iter().filter(|(epoch, _)| *epoch >= base.next_epoch).map(|(_, rows)| rows).sum()
    }

    fn forget_beyond_most_sweeps(&mut self) -> Option<String> {
        let mut forgotten = None;
        while self.sweeps.len() > MOST_SWEEPS {
            forgotten = self.forget_oldest().or(forgotten);
        }
        forgotten
    }

    /// Forgets the oldest base checkpoint, or the awaited save if there is none, with the entries that only it needs.
    /// Returns the checkpoint's name.
    fn forget_oldest(&mut self) -> Option<String> {
        let oldest = if self.bases.is_empty() { None } else { Some(self.bases.remove(0).name) };
        if oldest.is_none() {
            self.pending_save = None;
        }
        self.prune();
        oldest
    }

    /// True if a row that a sweep expires, and that was last modified in this epoch, needs a
    /// [tombstone](CheckpointHistory::record_tombstones). The base checkpoints may have it with other columns, which
    /// the sweep does not match.
    pub(crate) fn needs_tombstone(&self, modified_epoch: u32) -> bool {
        modified_epoch >= self.oldest_epoch()
    }

    /// The sweeps since `base`.
    pub(crate) fn sweeps_since(&self, base: &BaseCheckpoint) -> Vec<ExpirySweep> {
        let since = self.sweeps.iter().filter(|(epoch, _)| *epoch >= base.next_epoch);
        since.map(|(_, sweep)| sweep.clone()).collect()
    }

    /// The `next_epoch` of the oldest base checkpoint; larger than every epoch if there is none.
    fn oldest_epoch(&self) -> u32 {
        let wanted = self.bases.iter().map(|base| base.next_epoch).chain(self.pending_save);
        wanted.min().unwrap_or(u32::MAX)
    }

    /// Forgets the tombstones and sweeps before the oldest base checkpoint.
    fn prune(&mut self) {
        let oldest = self.oldest_epoch();
        self.sweeps.retain(|(epoch, _)| *epoch >= oldest);
        self.expired.retain(|(epoch, _)| *epoch >= oldest);
        self.tombstones.retain(|(epoch, _)| *epoch >= oldest);
        self.tombstone_count = self.tombstones.iter().map(|(_, ids)| ids.len()).sum();
    }

    /// The distinct ids removed since `base`, in ascending order. Some of them may have been inserted again. `None` if
    /// they are not known.
    pub(crate) fn tombstones_since(&self, base: &BaseCheckpoint) -> Option<Vec<Id>> {
        if !self.bases.contains(base) {
            return None;
        }
        let since = self.tombstones.iter().filter(|(epoch, _)| *epoch >= base.next_epoch);
        let mut ids: Vec<Id> = since.flat_map(|(_, ids)| ids.iter().copied()).collect();
        ids.sort_unstable();
        ids.dedup();
        Some(ids)
    }

    /// Encodes the history for a file. If it needs more than `most` bytes, encodes that of a table without a base
    /// checkpoint.
    pub(crate) fn encode(&self, most: usize) -> Vec<u8> {
        let head = HistoryHeader {
            bases: self.bases.clone(),
            tombstones: self.tombstones.iter().map(|(e, ids)| (*e, ids.len())).collect(),
            sweeps: self.sweeps.clone(),
            expired: self.expired.clone(),
        };
        let Ok(mut bytes) = serde_json::to_vec(&head) else { return Vec::new() };
        if self.bases.is_empty() || bytes.len() + 1 + self.tombstone_count * size_of::<Id>() > most {
            return Vec::new();
        }
        bytes.push(b'\n');
        for id in self.tombstones.iter().flat_map(|(_, ids)| ids) {
            bytes.extend_from_slice(&id.to_le_bytes());
        }
        bytes
    }

    /// Replaces this history with one that [`CheckpointHistory::encode`] wrote. Corrupted bytes give the history of a
    /// table without a base checkpoint.
    pub(crate) fn decode(&mut self, bytes: &[u8]) {
        self.forget();
        let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else { return };
        let Ok(head) = serde_json::from_slice::<HistoryHeader>(&bytes[..end]) else { return };
        let ids = bytes[end + 1..].chunks_exact(size_of::<Id>());
        let counted = head.tombstones.iter().try_fold(0_usize, |sum, (_, count)| sum.checked_add(*count));
        let ascending = head.tombstones.windows(2).all(|pair| pair[0].0 < pair[1].0);
        if counted != Some(ids.len()) || !ids.remainder().is_empty() || !ascending {
            return;
        }
        let mut ids = ids.map(|bytes| Id::from_le_bytes(bytes.try_into().unwrap_or_default()));
        self.tombstones =
            head.tombstones.iter().map(|(epoch, count)| (*epoch, ids.by_ref().take(*count).collect())).collect();
        self.bases = head.bases;
        self.sweeps = head.sweeps;
        self.expired = head.expired;
        self.prune();
        self.forget_beyond_most_sweeps();
        if self.tombstone_count > self.most_ids {
            self.forget();
        }
    }
}

#[cfg(test)]
mod tests;
