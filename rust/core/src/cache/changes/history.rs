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
mod tests {
    use super::*;

    fn base(next_epoch: u32) -> BaseCheckpoint {
        BaseCheckpoint { name: format!("c{next_epoch}"), manifest_xxh3: u64::from(next_epoch) << 40, next_epoch }
    }

    #[test]
    fn tombstones_are_known_since_each_of_the_last_checkpoints() {
        let mut history = CheckpointHistory::new(1 << 10);
        history.record_tombstones(0, &[1, 2]);
        assert_eq!((history.bytes(), history.tombstones_since(&base(1))), (0, None), "nothing is asked for");
        for epoch in 1..=5 {
            history.saved_as(base(epoch));
            history.record_tombstones(epoch, &[10, i64::from(epoch)]);
            history.record_tombstones(epoch, &[-i64::from(epoch)]);
        }
        assert_eq!(history.tombstones_since(&base(1)), None, "too long ago");
        assert_eq!(history.tombstones_since(&base(4)), Some(vec![-5, -4, 4, 5, 10]));
        assert_eq!(history.tombstones_since(&base(5)), Some(vec![-5, 5, 10]));
        assert_eq!(history.tombstones_since(&BaseCheckpoint { manifest_xxh3: 1, ..base(5) }), None, "another's");
        assert_eq!(history.bytes(), 12 * 8, "those of epoch 1 are forgotten");
        history.forget();
        assert_eq!((history.bytes(), history.tombstones_since(&base(5))), (0, None));
    }

    #[test]
    fn too_many_tombstones_drop_the_oldest_checkpoints_and_then_all() {
        let mut history = CheckpointHistory::new(10 * 8);
        history.saved_as(base(1));
        history.record_tombstones(1, &[0, 1, 2, 3, 4, 5]);
        history.saved_as(base(2));
        history.record_tombstones(2, &[6, 7, 8, 9, 10, 11]);
        assert_eq!(history.tombstones_since(&base(1)), None);
        assert_eq!(history.tombstones_since(&base(2)), Some((6..12).collect()));
        history.record_tombstones(2, &[0; 11]);
        assert_eq!((history.bases().len(), history.bytes()), (0, 0));
    }

    #[test]
    fn too_many_uncovered_sweeps_drop_the_oldest_checkpoints() {
        use crate::lifecycle::ExpiryRule;

        let ever_less =
            |step: usize| ExpirySweep { step: step as u64, rule: ExpiryRule::NormBelow(1.0 / (1 + step) as f64) };
        let mut history = CheckpointHistory::new(1 << 10);
        assert_eq!(history.record_sweep(0, &ever_less(0)), None);
        assert!(history.sweeps.is_empty(), "nothing is asked for");
        history.saved_as(base(1));
        for step in 0..MOST_SWEEPS - 1 {
            assert_eq!(history.record_sweep(1, &ever_less(step)), None);
        }
        history.saved_as(base(2));
        assert_eq!(history.record_sweep(2, &ever_less(MOST_SWEEPS)), None);
        assert_eq!(history.sweeps_since(&base(1)).len(), MOST_SWEEPS);
        let bytes = history.encode(1 << 20);
        assert_eq!(history.record_sweep(2, &ever_less(MOST_SWEEPS + 1)), Some("c1".into()));
        assert_eq!((history.tombstones_since(&base(1)), history.tombstones_since(&base(2))), (None, Some(vec![])));
        assert_eq!(history.sweeps_since(&base(2)).len(), 2);
        // A sweep that covers all others replaces them.
        history.record_sweep(2, &ExpirySweep { step: 1000, rule: ExpiryRule::NormBelow(9.0) });
        assert_eq!((history.sweeps.len(), history.bases().len()), (1, 1));
        // An asynchronous save that is awaited.
        history.await_save(3);
        for step in 0..MOST_SWEEPS {
            let forgotten = history.record_sweep(3, &ever_less(step));
            assert_eq!(forgotten, (step + 1 == MOST_SWEEPS).then(|| "c2".into()));
        }
        assert_eq!(history.record_sweep(3, &ever_less(MOST_SWEEPS)), None);
        assert!(!history.is_needed() && history.sweeps.is_empty());
        history.finish_background_save(3, Some(base(3)));
        assert!(history.bases().is_empty(), "its sweeps are not known");
        // A file of a release that kept more.
        let mut back = CheckpointHistory::new(1 << 10);
        back.decode(&bytes);
        assert_eq!((back.bases().len(), back.sweeps.len()), (2, MOST_SWEEPS));
        back.sweeps.push((2, ever_less(MOST_SWEEPS + 1)));
        let bytes = back.encode(1 << 20);
        back.decode(&bytes);
        assert_eq!((back.bases(), back.sweeps.len()), (&[base(2)][..], 2));
    }

    #[test]
    fn expired_rows_are_counted_since_each_checkpoint() {
        let mut history = CheckpointHistory::new(1 << 10);
        history.record_expired(0, 5);
        for epoch in 1..=3 {
            history.saved_as(base(epoch));
            history.record_expired(epoch, 10);
            history.record_expired(epoch, u64::from(epoch));
        }
        let since = |history: &CheckpointHistory| [1, 2, 3].map(|epoch| history.expired_since(&base(epoch)));
        assert_eq!(since(&history), [36, 25, 13]);
        let mut back = CheckpointHistory::new(1 << 10);
        back.decode(&history.encode(1 << 20));
        assert_eq!(since(&back), [36, 25, 13]);
        history.saved_as(base(4));
        history.saved_as(base(5));
        assert_eq!(since(&history), [25, 25, 13], "what came before the oldest checkpoint is forgotten");
    }

    #[test]
    fn tombstones_during_a_save_are_kept_if_it_succeeds() {
        let mut history = CheckpointHistory::new(4 * 8);
        history.await_save(1);
        history.record_tombstones(1, &[7, 8]);
        history.finish_background_save(2, Some(base(2)));
        assert!(history.bases().is_empty(), "another save");
        history.finish_background_save(1, Some(base(1)));
        assert_eq!(history.tombstones_since(&base(1)), Some(vec![7, 8]));
        // A failed save keeps the entries that older ones need.
        history.await_save(2);
        history.record_tombstones(2, &[9]);
        history.finish_background_save(2, None);
        history.finish_background_save(2, Some(base(2)));
        assert_eq!(history.tombstones_since(&base(1)), Some(vec![7, 8, 9]));
        // Too many during the save: first the oldest checkpoint is forgotten, then this save.
        history.await_save(3);
        history.record_tombstones(3, &[1, 2, 3]);
        assert_eq!((history.bases().len(), history.bytes()), (0, 24));
        history.record_tombstones(3, &[4, 5]);
        history.finish_background_save(3, Some(base(3)));
        assert_eq!((history.bases().len(), history.bytes()), (0, 0));
        history.await_save(4);
        history.forget();
        history.finish_background_save(4, Some(base(4)));
        assert!(history.bases().is_empty(), "other contents");
    }

    #[test]
    fn the_encoded_bytes_are_fixed() {
        use crate::lifecycle::ExpiryRule;

        let mut history = CheckpointHistory::new(1 << 10);
        history.saved_as(BaseCheckpoint { name: "7-ab".into(), manifest_xxh3: 12, next_epoch: 3 });
        let head = r#"{"bases":[{"name":"7-ab","manifest_xxh3":12,"next_epoch":3}],"tombstones":[]}"#;
        assert_eq!(history.encode(1 << 20), [head.as_bytes(), b"\n"].concat(), "empty lists are omitted");
        history.record_tombstones(3, &[1, -2]);
        history.record_tombstones(4, &[5]);
        history.record_sweep(4, &ExpirySweep { step: 9, rule: ExpiryRule::LastStep(8) });
        history.record_expired(4, 6);
        let head = concat!(
            r#"{"bases":[{"name":"7-ab","manifest_xxh3":12,"next_epoch":3}],"tombstones":[[3,2],[4,1]],"#,
            r#""sweeps":[[4,{"step":9,"rule":{"last_step":8}}]],"expired":[[4,6]]}"#,
        );
        let ids = [1, -2, 5].map(i64::to_le_bytes).concat();
        assert_eq!(history.encode(1 << 20), [head.as_bytes(), b"\n", &ids].concat());
    }

    #[test]
    fn history_round_trips_and_corruption_clears_it() {
        let mut history = CheckpointHistory::new(1 << 10);
        for epoch in 1..=3 {
            history.saved_as(base(epoch));
            history.record_tombstones(epoch, &[i64::MIN, i64::from(epoch)]);
        }
        let bytes = history.encode(1 << 20);
        let mut back = CheckpointHistory::new(1 << 10);
        back.decode(&bytes);
        assert_eq!((back.bases(), &back.tombstones, back.tombstone_count), (history.bases(), &history.tombstones, 6));
        assert!(history.encode(bytes.len()) == bytes && history.encode(bytes.len() - 1).is_empty());
        for damaged in [&bytes[..bytes.len() - 1], &bytes[1..], b"", b"{}\n", &[b'\n'; 40]] {
            back.decode(damaged);
            assert!(back.bases().is_empty() && back.tombstones.is_empty());
        }
        let mut smaller = CheckpointHistory::new(5 * 8);
        smaller.decode(&bytes);
        assert!(smaller.bases().is_empty(), "more than it may hold");
    }
}
