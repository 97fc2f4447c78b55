//! Copies of rows that are about to leave the table, for whoever is told of evicted rows.

use std::sync::Arc;

use crate::error::Result;
use crate::memory;
use crate::rows::RowHeader;
use crate::ssd::segment::file::Segment;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::walk::Ahead;
use crate::ssd::work::by_entry::{Wanted, decode_wanted, live_of, read_wanted};

/// Is handed rows that have left: headers `[n]` and vector parts `[n, V]`.
pub type Tell<'a> = dyn FnMut(Vec<RowHeader>, Vec<f32>) + 'a;

/// Copies of the rows of some records.
pub(crate) struct Copies {
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
    /// For each of the records the position of its row. Records that were not live when they were read have none.
    positions: Vec<Option<usize>>,
    /// Whether each row has left.
    gone: Vec<bool>,
}

impl Copies {
    /// Read the rows of these records of a segment, which are in the order of the file.
    ///
    /// Errors: those of reads, `Corruption`, `Memory`.
    pub(crate) fn read(tier: &TierInner, segment: &Arc<Segment>, records: &[Ahead]) -> Result<Self> {
        let wanted: Vec<Wanted> = records.iter().map(|at| (at.id, at.record)).collect();
        let live = live_of(tier, segment, &wanted);
        let floats = tier.layout.vector_floats();
        let mut vectors = memory::zeros("copy evicted rows", live.len() * floats)?;
        let bytes = read_wanted(tier, segment, &live)?;
        let mut headers = Vec::with_capacity(live.len());
        let rows = vectors.chunks_exact_mut(floats).zip(bytes.chunks_exact(segment.record_bytes));
        for (wanted, (vector, bytes)) in live.iter().zip(rows) {
            headers.push(decode_wanted(segment, *wanted, bytes)?.unpack(&tier.layout, vector));
        }
        let mut next = live.iter().enumerate().peekable();
        let position = |wanted: &Wanted| next.next_if(|(_, live)| *live == wanted).map(|(position, _)| position);
        let positions = wanted.iter().map(position).collect();
        Ok(Self { gone: vec![false; headers.len()], headers, vectors, positions })
    }

    /// The row of this one of the records has left.
    pub(crate) fn left(&mut self, record: usize) {
        // What the index points to now, it pointed to when the records were read.
        if let Some(position) = self.positions[record] {
            self.gone[position] = true;
        }
    }

    /// Hand over the rows that have left.
    pub(crate) fn hand_over(mut self, floats: usize, tell: &mut Tell<'_>) {
        let mut kept = 0;
        for at in 0..self.gone.len() {
            if self.gone[at] {
                self.headers[kept] = self.headers[at];
                self.vectors.copy_within(at * floats..(at + 1) * floats, kept * floats);
                kept += 1;
            }
        }
        self.headers.truncate(kept);
        self.vectors.truncate(kept * floats);
        if kept > 0 {
            tell(self.headers, self.vectors);
        }
    }
}
