//! History of one id in the checkpoints of a chain: when its row was inserted, and when and why it was removed.

use super::chain::CheckpointChain;
use crate::checkpoint::rows::reader::TableReader;
use crate::error::{Kind, Result};
use crate::lifecycle::{BucketCounts, CountedId, ExpiryRule, ExpirySweep};
use crate::rows::RowHeader;
use crate::types::Id;

/// The state of an id in one checkpoint of a chain.
#[derive(Clone, Debug)]
pub struct IdHistoryEntry {
    /// The row, if this checkpoint has one: its header, and its weights `[D]`.
    pub row: Option<(RowHeader, Vec<f32>)>,
    /// True if the row was removed since the parent of this delta. If there is a row too, the id was inserted again.
    pub has_tombstone: bool,
    /// The admission count of the id, if this checkpoint has one.
    pub count: Option<CountedId>,
    /// The sweeps of this delta that match the row of the base checkpoints.
    pub expired_by: Vec<IdExpiry>,
    /// State of the id as of this checkpoint.
    pub state: IdState,
}

/// A sweep that expired a row.
#[derive(Clone, Debug, PartialEq)]
pub struct IdExpiry {
    /// Index of the sweep in the delta.
    pub sweep: usize,
    /// The part of its rule that matched the row.
    pub rule: ExpiryRule,
    /// The row's score after the sweep's step, if the rule uses scores.
    pub score: Option<f32>,
}

impl IdExpiry {
    /// The rule as JSON, in the format of manifests.
    pub fn rule_json(&self) -> Result<String> {
        let text = serde_json::to_string(&self.rule);
        text.map_err(|error| Kind::State.error(format!("a rule cannot be written down: {error}")))
    }
}

/// State of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdState {
    /// It has no row and no count.
    Absent,
    /// It is counted but has no row yet.
    Pending(CountedId),
    /// It has a row.
    HasRow,
}

impl CheckpointChain {
    /// Returns the entry of each checkpoint of the chain for an id of a table, latest first.
    ///
    /// Reads only the id's bucket of data files and count files. In a linked checkpoint, reads all segments of the rank
    /// that owns the bucket.
    ///
    /// Errors: `Mismatch` if there is no such table; as [`TableReader::read`].
    pub fn id_history(&self, module: &str, table: &str, id: Id) -> Result<Vec<IdHistoryEntry>> {
        let bucket = self.table(module, table)?.spec.bucketing().of(id);
        let mut life = Vec::new();
        let mut state = IdHistoryState { state: IdState::Absent, row: None, generation: 0 };
        for link in self.links().iter().rev() {
            let reader = link.table_reader(module, table, bucket..bucket + 1)?.without_slots();
            let (own, generation) = read_link(&reader, id)?;
            let sweeps = &link.table(module, table)?.sweeps;
            life.push(state.apply(own, sweeps, generation));
        }
        life.reverse();
        Ok(life)
    }
}

/// Reads the entry of one checkpoint for an id, and the generation of its bucket if the checkpoint has counts of the
/// bucket.
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

/// State of an id as of the checkpoints that were read.
struct IdHistoryState {
    state: IdState,
    /// Its row, if it has one.
    row: Option<(RowHeader, Vec<f32>)>,
    /// Generation of its bucket when it was counted, if it is pending.
    generation: u32,
}

impl IdHistoryState {
    /// Applies a checkpoint with its entry `own` for the id and its sweeps. `generation` is the bucket's generation in
    /// it.
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
