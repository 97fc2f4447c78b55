//! The lineage of a table: which checkpoints its contents descend from, and which ids left it, and by which sweeps, since the oldest of
//! them was saved. From it a delta knows what to write.

use serde::{Deserialize, Serialize};

use crate::lifecycle::Sweep;
use crate::types::Id;

/// How many checkpoints are remembered. There are several so that saves to a few directories in turn each find their own last one.
const MOST_ANCESTORS: usize = 4;

/// How many sweeps are remembered of which none takes all that another one takes. A delta says each of them, and whoever reads it holds each
/// row of the checkpoints before against all of them.
pub(crate) const MOST_SWEEPS: usize = 64;

/// A checkpoint whose rows were this table's when it was saved or loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ancestor {
    /// The checkpoint's directory.
    pub name: String,
    /// XXH3 of its manifest.
    pub manifest_xxh3: u64,
    /// The epoch that followed it: what was modified, or left, in this epoch or later is not in the checkpoint as it is now.
    pub next_epoch: u32,
}

/// The lineage of one table.
#[derive(Debug)]
pub(crate) struct Lineage {
    /// Oldest first.
    ancestors: Vec<Ancestor>,
    /// The ids that left, by the epoch in which they did, epochs ascending. From the oldest ancestor's `next_epoch` on none is missing.
    left: Vec<(u32, Vec<Id>)>,
    left_ids: usize,
    /// The sweeps, each with its epoch, epochs ascending. What a later one takes too is not kept twice.
    sweeps: Vec<(u32, Sweep)>,
    /// How many rows sweeps took that are not among the ids that left, by epoch, epochs ascending.
    swept: Vec<(u32, u64)>,
    most_ids: usize,
    /// The `next_epoch` of a save beside training that is not published yet. Ids that leave from then on are kept, since the save may
    /// become an ancestor.
    awaited: Option<u32>,
}

/// The head of a lineage in a file. The ids follow it.
#[derive(Serialize, Deserialize)]
struct Head {
    ancestors: Vec<Ancestor>,
    /// Each epoch, and how many ids left in it.
    left: Vec<(u32, usize)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    sweeps: Vec<(u32, Sweep)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    swept: Vec<(u32, u64)>,
}

impl Lineage {
    /// The lineage of a table that descends from no checkpoint. It will remember ids of at most `bytes` bytes.
    pub(crate) fn new(bytes: u64) -> Self {
        let most_ids = bytes as usize / size_of::<Id>();
        let (ancestors, left, sweeps, swept) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { ancestors, left, left_ids: 0, sweeps, swept, most_ids, awaited: None }
    }

    pub(crate) fn ancestors(&self) -> &[Ancestor] {
        &self.ancestors
    }

    /// Bytes that the ids take.
    pub(crate) fn bytes(&self) -> u64 {
        (self.left_ids * size_of::<Id>()) as u64
    }

    /// Note that the contents descend from no known checkpoint any more.
    pub(crate) fn forget(&mut self) {
        *self = Self::new((self.most_ids * size_of::<Id>()) as u64);
    }

    /// Note that the table was saved as this checkpoint, or loaded from it.
    pub(crate) fn saved_as(&mut self, ancestor: Ancestor) {
        self.ancestors.retain(|other| *other != ancestor);
        self.ancestors.push(ancestor);
        let most = self.ancestors.len().saturating_sub(MOST_ANCESTORS);
        self.ancestors.drain(..most);
        self.prune();
    }

    /// Note that the contents of now are being saved beside training, until [`Lineage::saved_beside`]. Only the last such save is awaited.
    pub(crate) fn await_save(&mut self, next_epoch: u32) {
        self.awaited = Some(next_epoch);
        self.prune();
    }

    /// Note that the awaited save is over: the table was saved as `ancestor`, or the save failed (`None`). Nothing happens where that save
    /// is no longer awaited, because another one is, or too many ids left or sweeps came since, or the contents were replaced.
    pub(crate) fn saved_beside(&mut self, next_epoch: u32, ancestor: Option<Ancestor>) {
        if self.awaited != Some(next_epoch) {
            return;
        }
        self.awaited = None;
        match ancestor {
            Some(ancestor) => self.saved_as(ancestor),
            None => self.prune(),
        }
    }

    /// Whether there is a checkpoint, or may be one soon, that a delta can build on. Only then ids that leave are kept, and imported rows
    /// count as modified.
    pub(crate) fn is_wanted(&self) -> bool {
        self.awaited.is_some() || !self.ancestors.is_empty()
    }

    /// Note that ids left the table in `epoch`, which is the table's. When there are too many ids, the oldest ancestors are forgotten.
    pub(crate) fn note_left(&mut self, epoch: u32, ids: &[Id]) {
        while self.is_wanted() && self.left_ids + ids.len() > self.most_ids {
            self.forget_oldest();
        }
        if !self.is_wanted() || ids.is_empty() {
            return;
        }
        self.left_ids += ids.len();
        match self.left.last_mut() {
            Some((last, left)) if *last == epoch => left.extend_from_slice(ids),
            _ => self.left.push((epoch, ids.to_vec())),
        }
    }

    /// Note a sweep in `epoch`, which is the table's. A delta says the sweep and not what it took, except for rows that were modified since
    /// the delta's parent: see [`Lineage::must_list`]. When there are too many sweeps, the oldest ancestors are forgotten. Returns the name of
    /// the newest of those.
    pub(crate) fn note_sweep(&mut self, epoch: u32, sweep: &Sweep) -> Option<String> {
        if self.is_wanted() {
            self.sweeps.retain(|(_, before)| !sweep.covers(before));
            self.sweeps.push((epoch, sweep.clone()));
        }
        self.forget_beyond_most_sweeps()
    }

    /// Note how many rows a sweep took in `epoch`, which is the table's, besides those whose ids were [noted](Lineage::note_left).
    pub(crate) fn note_swept(&mut self, epoch: u32, rows: u64) {
        if !self.is_wanted() || rows == 0 {
            return;
        }
        match self.swept.last_mut() {
            Some((last, swept)) if *last == epoch => *swept += rows,
            _ => self.swept.push((epoch, rows)),
        }
    }

    /// How many rows sweeps took since `ancestor` whose ids are not among [`Lineage::left_since`].
    pub(crate) fn swept_since(&self, ancestor: &Ancestor) -> u64 {
        self.swept.iter().filter(|(epoch, _)| *epoch >= ancestor.next_epoch).map(|(_, rows)| rows).sum()
    }

    fn forget_beyond_most_sweeps(&mut self) -> Option<String> {
        let mut forgotten = None;
        while self.sweeps.len() > MOST_SWEEPS {
            forgotten = self.forget_oldest().or(forgotten);
        }
        forgotten
    }

    /// Forget the oldest ancestor, or the awaited save where there is none, with what only that one needs. Returns the ancestor's name.
    fn forget_oldest(&mut self) -> Option<String> {
        let oldest = if self.ancestors.is_empty() { None } else { Some(self.ancestors.remove(0).name) };
        if oldest.is_none() {
            self.awaited = None;
        }
        self.prune();
        oldest
    }

    /// Whether a row that a sweep takes, and that was modified last in this epoch, is to be [noted](Lineage::note_left) by its id. The
    /// checkpoints that deltas build on may have it with other columns, which the sweep does not take.
    pub(crate) fn must_list(&self, modified_epoch: u32) -> bool {
        modified_epoch >= self.oldest()
    }

    /// The sweeps since `ancestor`.
    pub(crate) fn sweeps_since(&self, ancestor: &Ancestor) -> Vec<Sweep> {
        let since = self.sweeps.iter().filter(|(epoch, _)| *epoch >= ancestor.next_epoch);
        since.map(|(_, sweep)| sweep.clone()).collect()
    }

    /// The `next_epoch` of the oldest checkpoint that a delta can build on; more than every epoch where there is none.
    fn oldest(&self) -> u32 {
        let wanted = self.ancestors.iter().map(|ancestor| ancestor.next_epoch).chain(self.awaited);
        wanted.min().unwrap_or(u32::MAX)
    }

    /// Forget the ids that left, and the sweeps, before the oldest ancestor.
    fn prune(&mut self) {
        let oldest = self.oldest();
        self.sweeps.retain(|(epoch, _)| *epoch >= oldest);
        self.swept.retain(|(epoch, _)| *epoch >= oldest);
        self.left.retain(|(epoch, _)| *epoch >= oldest);
        self.left_ids = self.left.iter().map(|(_, ids)| ids.len()).sum();
    }

    /// The ids that left since `ancestor`, each once, in rising order. Some of them may be back. `None` where that is not known.
    pub(crate) fn left_since(&self, ancestor: &Ancestor) -> Option<Vec<Id>> {
        if !self.ancestors.contains(ancestor) {
            return None;
        }
        let since = self.left.iter().filter(|(epoch, _)| *epoch >= ancestor.next_epoch);
        let mut ids: Vec<Id> = since.flat_map(|(_, ids)| ids.iter().copied()).collect();
        ids.sort_unstable();
        ids.dedup();
        Some(ids)
    }

    /// The lineage as bytes for a file. Where it takes more than `most` bytes they are those of a table that descends from no checkpoint.
    pub(crate) fn encode(&self, most: usize) -> Vec<u8> {
        let head = Head {
            ancestors: self.ancestors.clone(),
            left: self.left.iter().map(|(e, ids)| (*e, ids.len())).collect(),
            sweeps: self.sweeps.clone(),
            swept: self.swept.clone(),
        };
        let Ok(mut bytes) = serde_json::to_vec(&head) else { return Vec::new() };
        if self.ancestors.is_empty() || bytes.len() + 1 + self.left_ids * size_of::<Id>() > most {
            return Vec::new();
        }
        bytes.push(b'\n');
        for id in self.left.iter().flat_map(|(_, ids)| ids) {
            bytes.extend_from_slice(&id.to_le_bytes());
        }
        bytes
    }

    /// Replace this lineage by the one that [`Lineage::encode`] wrote. Where the bytes are damaged, it is that of a table that descends
    /// from no checkpoint.
    pub(crate) fn decode(&mut self, bytes: &[u8]) {
        self.forget();
        let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else { return };
        let Ok(head) = serde_json::from_slice::<Head>(&bytes[..end]) else { return };
        let ids = bytes[end + 1..].chunks_exact(size_of::<Id>());
        let counted = head.left.iter().try_fold(0_usize, |sum, (_, count)| sum.checked_add(*count));
        let ascending = head.left.windows(2).all(|pair| pair[0].0 < pair[1].0);
        if counted != Some(ids.len()) || !ids.remainder().is_empty() || !ascending {
            return;
        }
        let mut ids = ids.map(|bytes| Id::from_le_bytes(bytes.try_into().unwrap_or_default()));
        self.left = head.left.iter().map(|(epoch, count)| (*epoch, ids.by_ref().take(*count).collect())).collect();
        self.ancestors = head.ancestors;
        self.sweeps = head.sweeps;
        self.swept = head.swept;
        self.prune();
        self.forget_beyond_most_sweeps();
        if self.left_ids > self.most_ids {
            self.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ancestor(next_epoch: u32) -> Ancestor {
        Ancestor { name: format!("c{next_epoch}"), manifest_xxh3: u64::from(next_epoch) << 40, next_epoch }
    }

    #[test]
    fn what_left_is_known_since_each_of_the_last_checkpoints() {
        let mut lineage = Lineage::new(1 << 10);
        lineage.note_left(0, &[1, 2]);
        assert_eq!((lineage.bytes(), lineage.left_since(&ancestor(1))), (0, None), "nothing is asked for");
        for epoch in 1..=5 {
            lineage.saved_as(ancestor(epoch));
            lineage.note_left(epoch, &[10, i64::from(epoch)]);
            lineage.note_left(epoch, &[-i64::from(epoch)]);
        }
        assert_eq!(lineage.left_since(&ancestor(1)), None, "too long ago");
        assert_eq!(lineage.left_since(&ancestor(4)), Some(vec![-5, -4, 4, 5, 10]));
        assert_eq!(lineage.left_since(&ancestor(5)), Some(vec![-5, 5, 10]));
        assert_eq!(lineage.left_since(&Ancestor { manifest_xxh3: 1, ..ancestor(5) }), None, "another's");
        assert_eq!(lineage.bytes(), 12 * 8, "those of epoch 1 are forgotten");
        lineage.forget();
        assert_eq!((lineage.bytes(), lineage.left_since(&ancestor(5))), (0, None));
    }

    #[test]
    fn too_many_ids_push_out_the_oldest_checkpoints_and_then_all() {
        let mut lineage = Lineage::new(10 * 8);
        lineage.saved_as(ancestor(1));
        lineage.note_left(1, &[0, 1, 2, 3, 4, 5]);
        lineage.saved_as(ancestor(2));
        lineage.note_left(2, &[6, 7, 8, 9, 10, 11]);
        assert_eq!(lineage.left_since(&ancestor(1)), None);
        assert_eq!(lineage.left_since(&ancestor(2)), Some((6..12).collect()));
        lineage.note_left(2, &[0; 11]);
        assert_eq!((lineage.ancestors().len(), lineage.bytes()), (0, 0));
    }

    #[test]
    fn too_many_sweeps_that_do_not_cover_each_other_push_out_the_oldest_checkpoints() {
        use crate::lifecycle::Rule;

        let ever_less = |step: usize| Sweep { step: step as u64, rule: Rule::NormBelow(1.0 / (1 + step) as f64) };
        let mut lineage = Lineage::new(1 << 10);
        assert_eq!(lineage.note_sweep(0, &ever_less(0)), None);
        assert!(lineage.sweeps.is_empty(), "nothing is asked for");
        lineage.saved_as(ancestor(1));
        for step in 0..MOST_SWEEPS - 1 {
            assert_eq!(lineage.note_sweep(1, &ever_less(step)), None);
        }
        lineage.saved_as(ancestor(2));
        assert_eq!(lineage.note_sweep(2, &ever_less(MOST_SWEEPS)), None);
        assert_eq!(lineage.sweeps_since(&ancestor(1)).len(), MOST_SWEEPS);
        let bytes = lineage.encode(1 << 20);
        assert_eq!(lineage.note_sweep(2, &ever_less(MOST_SWEEPS + 1)), Some("c1".into()));
        assert_eq!((lineage.left_since(&ancestor(1)), lineage.left_since(&ancestor(2))), (None, Some(vec![])));
        assert_eq!(lineage.sweeps_since(&ancestor(2)).len(), 2);
        // One that takes all that the others took stands for all of them.
        lineage.note_sweep(2, &Sweep { step: 1000, rule: Rule::NormBelow(9.0) });
        assert_eq!((lineage.sweeps.len(), lineage.ancestors().len()), (1, 1));
        // A save beside training that is awaited.
        lineage.await_save(3);
        for step in 0..MOST_SWEEPS {
            let forgotten = lineage.note_sweep(3, &ever_less(step));
            assert_eq!(forgotten, (step + 1 == MOST_SWEEPS).then(|| "c2".into()));
        }
        assert_eq!(lineage.note_sweep(3, &ever_less(MOST_SWEEPS)), None);
        assert!(!lineage.is_wanted() && lineage.sweeps.is_empty());
        lineage.saved_beside(3, Some(ancestor(3)));
        assert!(lineage.ancestors().is_empty(), "its sweeps are not known");
        // A file of a release that kept more.
        let mut back = Lineage::new(1 << 10);
        back.decode(&bytes);
        assert_eq!((back.ancestors().len(), back.sweeps.len()), (2, MOST_SWEEPS));
        back.sweeps.push((2, ever_less(MOST_SWEEPS + 1)));
        let bytes = back.encode(1 << 20);
        back.decode(&bytes);
        assert_eq!((back.ancestors(), back.sweeps.len()), (&[ancestor(2)][..], 2));
    }

    #[test]
    fn rows_that_sweeps_took_are_counted_since_each_checkpoint() {
        let mut lineage = Lineage::new(1 << 10);
        lineage.note_swept(0, 5);
        for epoch in 1..=3 {
            lineage.saved_as(ancestor(epoch));
            lineage.note_swept(epoch, 10);
            lineage.note_swept(epoch, u64::from(epoch));
        }
        let since = |lineage: &Lineage| [1, 2, 3].map(|epoch| lineage.swept_since(&ancestor(epoch)));
        assert_eq!(since(&lineage), [36, 25, 13]);
        let mut back = Lineage::new(1 << 10);
        back.decode(&lineage.encode(1 << 20));
        assert_eq!(since(&back), [36, 25, 13]);
        lineage.saved_as(ancestor(4));
        lineage.saved_as(ancestor(5));
        assert_eq!(since(&lineage), [25, 25, 13], "what came before the oldest checkpoint is forgotten");
    }

    #[test]
    fn ids_that_leave_while_a_save_runs_are_kept_for_it_if_it_succeeds() {
        let mut lineage = Lineage::new(4 * 8);
        lineage.await_save(1);
        lineage.note_left(1, &[7, 8]);
        lineage.saved_beside(2, Some(ancestor(2)));
        assert!(lineage.ancestors().is_empty(), "another save");
        lineage.saved_beside(1, Some(ancestor(1)));
        assert_eq!(lineage.left_since(&ancestor(1)), Some(vec![7, 8]));
        // One that failed leaves what older ones need.
        lineage.await_save(2);
        lineage.note_left(2, &[9]);
        lineage.saved_beside(2, None);
        lineage.saved_beside(2, Some(ancestor(2)));
        assert_eq!(lineage.left_since(&ancestor(1)), Some(vec![7, 8, 9]));
        // Too many while it ran: first the oldest checkpoint is given up, then this save.
        lineage.await_save(3);
        lineage.note_left(3, &[1, 2, 3]);
        assert_eq!((lineage.ancestors().len(), lineage.bytes()), (0, 24));
        lineage.note_left(3, &[4, 5]);
        lineage.saved_beside(3, Some(ancestor(3)));
        assert_eq!((lineage.ancestors().len(), lineage.bytes()), (0, 0));
        lineage.await_save(4);
        lineage.forget();
        lineage.saved_beside(4, Some(ancestor(4)));
        assert!(lineage.ancestors().is_empty(), "other contents");
    }

    #[test]
    fn it_comes_back_from_a_file_and_damage_makes_it_forget() {
        let mut lineage = Lineage::new(1 << 10);
        for epoch in 1..=3 {
            lineage.saved_as(ancestor(epoch));
            lineage.note_left(epoch, &[i64::MIN, i64::from(epoch)]);
        }
        let bytes = lineage.encode(1 << 20);
        let mut back = Lineage::new(1 << 10);
        back.decode(&bytes);
        assert_eq!((back.ancestors(), &back.left, back.left_ids), (lineage.ancestors(), &lineage.left, 6));
        assert!(lineage.encode(bytes.len()) == bytes && lineage.encode(bytes.len() - 1).is_empty());
        for damaged in [&bytes[..bytes.len() - 1], &bytes[1..], b"", b"{}\n", &[b'\n'; 40]] {
            back.decode(damaged);
            assert!(back.ancestors().is_empty() && back.left.is_empty());
        }
        let mut smaller = Lineage::new(5 * 8);
        smaller.decode(&bytes);
        assert!(smaller.ancestors().is_empty(), "more than it may hold");
    }
}
