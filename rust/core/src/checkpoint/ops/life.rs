//! What the checkpoints of a chain have of one id: when it got its row, when the row left, and why.

use super::chain::CheckpointChain;
use crate::checkpoint::rows::reader::TableReader;
use crate::error::{Error, Kind, Result};
use crate::lifecycle::{BucketCounts, CountedId, ExpiryRule, ExpirySweep};
use crate::rows::RowHeader;
use crate::types::Id;

/// What one checkpoint of a chain says of an id.
#[derive(Clone, Debug)]
pub struct IdHistoryEntry {
    /// The row, where this checkpoint has one: its header, and its weights `[D]`.
    pub row: Option<(RowHeader, Vec<f32>)>,
    /// Whether this delta says that the id left since its parent. If there is a row too, the id is back.
    pub has_tombstone: bool,
    /// The count of the id, where this checkpoint has one.
    pub count: Option<CountedId>,
    /// The sweeps of this delta that take the row which the checkpoints before it have.
    pub expired_by: Vec<IdExpiry>,
    /// What the id is as of this checkpoint.
    pub state: IdState,
}

/// A sweep that took a row.
#[derive(Clone, Debug, PartialEq)]
pub struct IdExpiry {
    /// Which of the sweeps of the delta it is.
    pub sweep: usize,
    /// What of its rule took the row.
    pub rule: ExpiryRule,
    /// The row's score after the sweep's step, where the rule looks at scores.
    pub score: Option<f32>,
}

impl IdExpiry {
    /// The rule, as manifests have rules.
    pub fn rule_json(&self) -> Result<String> {
        let text = serde_json::to_string(&self.rule);
        text.map_err(|error| Error::new(Kind::State, format!("a rule cannot be written down: {error}")))
    }
}

/// What an id is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdState {
    /// It has no row and no count.
    Absent,
    /// It waits for a row.
    Pending(CountedId),
    /// It has a row.
    HasRow,
}

impl CheckpointChain {
    /// What each checkpoint of the chain says of an id of a table, newest first.
    ///
    /// Of files of rows and counts only the bucket of the id is read. Of a linked checkpoint the segments of the rank that has the bucket
    /// are read as a whole.
    ///
    /// Errors: `Mismatch` where there is no such table; those of [`TableReader::read`].
    pub fn id_history(&self, module: &str, table: &str, id: Id) -> Result<Vec<IdHistoryEntry>> {
        let bucket = self.table(module, table)?.spec.bucketing().of(id);
        let mut life = Vec::new();
        let mut so_far = IdHistoryState { state: IdState::Absent, row: None, generation: 0 };
        for link in self.links().iter().rev() {
            let reader = link.table_reader(module, table, bucket..bucket + 1)?.without_slots();
            let (own, generation) = read_link(&reader, id)?;
            let sweeps = &link.table(module, table)?.sweeps;
            life.push(so_far.apply(own, sweeps, generation));
        }
        life.reverse();
        Ok(life)
    }
}

type HistoryRow = (RowHeader, Vec<f32>);

/// What one checkpoint has of an id by itself, and how many generations of its bucket have ended, where it has counts of the bucket.
fn read_link(reader: &TableReader, id: Id) -> Result<(IdHistoryEntry, Option<u32>)> {
    let (mut row, mut has_tombstone, mut count, mut generation) = (None, false, None, None);
    reader.read_columns(&mut |rows| {
        if let Some(at) = rows.ids.iter().position(|each| *each == id) {
            let dim = rows.parts[0].len() / rows.len();
            row = Some((rows.header(at), rows.parts[0][at * dim..][..dim].to_vec()));
        }
        Ok(())
    })?;
    reader.read_tombstones(&mut |ids| {
        has_tombstone |= ids.contains(&id);
        Ok(())
    })?;
    reader.read_counts(&mut |counts| {
        generation = Some(counts.generation);
        count = count.or(counts.ids.into_iter().find(|each| each.id == id));
        Ok(())
    })?;
    Ok((IdHistoryEntry { row, has_tombstone, count, expired_by: Vec::new(), state: IdState::Absent }, generation))
}

/// What an id is as of the checkpoints that were read so far.
struct IdHistoryState {
    state: IdState,
    /// Its row, if it has one.
    row: Option<HistoryRow>,
    /// How many generations of its bucket had ended when it was counted, if it waits.
    generation: u32,
}

impl IdHistoryState {
    /// Go on to a checkpoint which has `own` of the id, and these sweeps. `generation`: how many generations of the bucket have ended in it.
    fn apply(&mut self, own: IdHistoryEntry, sweeps: &[ExpirySweep], generation: Option<u32>) -> IdHistoryEntry {
        let row = self.row.take();
        let taken: Vec<IdExpiry> =
            row.iter().flat_map(|(header, weights)| find_expiries(sweeps, header, weights)).collect();
        if own.row.is_some() {
            (self.state, self.row) = (IdState::HasRow, own.row.clone());
        } else if let Some(count) = own.count {
            self.state = IdState::Pending(count);
            self.generation = generation.unwrap_or_default();
        } else if own.has_tombstone || !taken.is_empty() {
            self.state = IdState::Absent;
        } else if let (IdState::Pending(count), Some(generation)) = (self.state, generation) {
            let counts = BucketCounts { bucket: 0, generation: self.generation, ids: vec![count] };
            let still = counts.aged_to(generation).ids.pop();
            (self.state, self.generation) = (still.map_or(IdState::Absent, IdState::Pending), generation);
        } else {
            self.row = row;
        }
        IdHistoryEntry { expired_by: taken, state: self.state, ..own }
    }
}

fn find_expiries<'a>(
    sweeps: &'a [ExpirySweep],
    header: &'a RowHeader,
    weights: &'a [f32],
) -> impl Iterator<Item = IdExpiry> + use<'a> {
    sweeps.iter().enumerate().filter_map(move |(sweep, each)| {
        let rule = each.matching_rule(header, weights)?;
        let score = each.score_by(&rule, header);
        Some(IdExpiry { sweep, rule, score })
    })
}
