//! Reads the segments of an SSD tier in a linked checkpoint row by row, and converts the rows to columns, like those that
//! readers of data files deliver.

use std::ops::Range;

use crate::cache::RowColumns;
use crate::error::Result;
use crate::rows::RowRef;
use crate::ssd::LinkedSegments;
use crate::types::{BucketMapper, Id};

/// Rows that are being collected into columns.
#[derive(Debug, Default)]
struct SegmentColumns {
    ids: Vec<Id>,
    last_steps: Vec<u64>,
    counts: Vec<u32>,
    scores: Vec<f32>,
    scalars: Vec<f32>,
    modified_epochs: Vec<u32>,
    parts: Vec<Vec<f32>>,
}

impl SegmentColumns {
    fn push(&mut self, row: RowRef<'_>) {
        let header = row.header;
        self.ids.push(header.id);
        self.last_steps.push(header.last_step);
        self.counts.push(header.count);
        self.scores.push(header.score);
        self.scalars.push(header.scalar);
        self.modified_epochs.push(header.modified_epoch);
        let dim = row.vector.len() / self.parts.len();
        self.parts.iter_mut().zip(row.vector.chunks_exact(dim)).for_each(|(part, from)| part.extend_from_slice(from));
    }

    fn clear(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        *self = Self { parts, ..Self::default() };
        self.parts.iter_mut().for_each(Vec::clear);
    }

    fn columns(&self, has_scalars: bool) -> RowColumns<'_> {
        RowColumns {
            ids: &self.ids,
            last_steps: &self.last_steps,
            counts: &self.counts,
            scores: &self.scores,
            scalars: has_scalars.then_some(&self.scalars),
            modified_epochs: &self.modified_epochs,
            parts: self.parts.iter().map(Vec::as_slice).collect(),
        }
    }
}

/// Passes the rows of `buckets` in segments to `sink`, as columns of about `bytes`.
pub(crate) fn read_segments(
    files: &LinkedSegments,
    buckets: &Range<u32>,
    bucketing: BucketMapper,
    bytes: usize,
    sink: &mut dyn FnMut(&RowColumns<'_>) -> Result<()>,
) -> Result<()> {
    let layout = files.layout();
    let max_rows = (bytes / (layout.floats() * 4 + 32)).max(1);
    let mut collected =
        SegmentColumns { parts: vec![Vec::new(); 1 + layout.vector_slots], ..SegmentColumns::default() };
    files.read(&mut |row| {
        if buckets.contains(&bucketing.of(row.header.id)) {
            collected.push(row);
        }
        if collected.ids.len() < max_rows {
            return Ok(());
        }
        sink(&collected.columns(layout.scalar_slot))?;
        collected.clear();
        Ok(())
    })?;
    if collected.ids.is_empty() { Ok(()) } else { sink(&collected.columns(layout.scalar_slot)) }
}
