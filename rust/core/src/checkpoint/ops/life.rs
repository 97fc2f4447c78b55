//! What the checkpoints of a chain have of one id: when it got its row, when the row left, and why.

use super::chain::Chain;
use crate::checkpoint::rows::reader::TableReader;
use crate::error::{Error, Kind, Result};
use crate::lifecycle::{BucketCounts, PendingId, Rule, Sweep};
use crate::rows::RowHeader;
use crate::types::Id;

/// What one checkpoint of a chain says of an id.
#[derive(Clone, Debug)]
pub struct LinkOfId {
    /// The row, where this checkpoint has one: its header, and its weights `[D]`.
    pub row: Option<(RowHeader, Vec<f32>)>,
    /// Whether this delta says that the id left since its parent. If there is a row too, the id is back.
    pub has_tombstone: bool,
    /// The count of the id, where this checkpoint has one.
    pub count: Option<PendingId>,
    /// The sweeps of this delta that take the row which the checkpoints before it have.
    pub taken: Vec<Taken>,
    /// What the id is as of this checkpoint.
    pub now: IdState,
}

/// A sweep that took a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Taken {
    /// Which of the sweeps of the delta it is.
    pub sweep: usize,
    /// What of its rule took the row.
    pub rule: Rule,
    /// The row's score after the sweep's step, where the rule looks at scores.
    pub score: Option<f32>,
}

impl Taken {
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
    Nothing,
    /// It waits for a row.
    Waits(PendingId),
    /// It has a row.
    HasRow,
}

impl Chain {
    /// What each checkpoint of the chain says of an id of a table, newest first.
    ///
    /// Of files of rows and counts only the bucket of the id is read. Of a linked checkpoint the segments of the rank that has the bucket
    /// are read as a whole.
    ///
    /// Errors: `Mismatch` where there is no such table; those of [`TableReader::read`].
    pub fn life_of(&self, module: &str, table: &str, id: Id) -> Result<Vec<LinkOfId>> {
        let bucket = self.table(module, table)?.spec.bucketing().of(id);
        let mut life = Vec::new();
        let mut so_far = SoFar { now: IdState::Nothing, row: None, generation: 0 };
        for link in self.links().iter().rev() {
            let reader = link.table_reader(module, table, bucket..bucket + 1)?.without_slots();
            let (own, generation) = read_link(&reader, id)?;
            let sweeps = &link.table(module, table)?.sweeps;
            life.push(so_far.follow(own, sweeps, generation));
        }
        life.reverse();
        Ok(life)
    }
}

type Row = (RowHeader, Vec<f32>);

/// What one checkpoint has of an id by itself, and how many generations of its bucket have ended, where it has counts of the bucket.
fn read_link(reader: &TableReader, id: Id) -> Result<(LinkOfId, Option<u32>)> {
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
        count = count.or(counts.pending.into_iter().find(|each| each.id == id));
        Ok(())
    })?;
    Ok((LinkOfId { row, has_tombstone, count, taken: Vec::new(), now: IdState::Nothing }, generation))
}

/// What an id is as of the checkpoints that were read so far.
struct SoFar {
    now: IdState,
    /// Its row, if it has one.
    row: Option<Row>,
    /// How many generations of its bucket had ended when it was counted, if it waits.
    generation: u32,
}

impl SoFar {
    /// Go on to a checkpoint which has `own` of the id, and these sweeps. `generation`: how many generations of the bucket have ended in it.
    fn follow(&mut self, own: LinkOfId, sweeps: &[Sweep], generation: Option<u32>) -> LinkOfId {
        let row = self.row.take();
        let taken: Vec<Taken> = row.iter().flat_map(|(header, weights)| taken_by(sweeps, header, weights)).collect();
        if own.row.is_some() {
            (self.now, self.row) = (IdState::HasRow, own.row.clone());
        } else if let Some(count) = own.count {
            self.now = IdState::Waits(count);
            self.generation = generation.unwrap_or_default();
        } else if own.has_tombstone || !taken.is_empty() {
            self.now = IdState::Nothing;
        } else if let (IdState::Waits(count), Some(generation)) = (self.now, generation) {
            let counts = BucketCounts { bucket: 0, generation: self.generation, pending: vec![count] };
            let still = counts.aged_to(generation).pending.pop();
            (self.now, self.generation) = (still.map_or(IdState::Nothing, IdState::Waits), generation);
        } else {
            self.row = row;
        }
        LinkOfId { taken, now: self.now, ..own }
    }
}

fn taken_by<'a>(
    sweeps: &'a [Sweep],
    header: &'a RowHeader,
    weights: &'a [f32],
) -> impl Iterator<Item = Taken> + use<'a> {
    sweeps.iter().enumerate().filter_map(move |(sweep, each)| {
        let rule = each.taking(header, weights)?;
        let score = each.score_by(&rule, header);
        Some(Taken { sweep, rule, score })
    })
}
