//! Copies of rows that are about to be evicted from the table, for `on_evict`.

use std::sync::Arc;

use crate::error::Result;
use crate::memory;
use crate::rows::RowHeader;
use crate::ssd::segment::file::Segment;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::walk::CursorRecord;
use crate::ssd::work::by_entry::{RequestedRecord, decode_requested, live_requests, read_requested};

/// Receives evicted rows: headers `[n]` and vector parts `[n, V]`.
pub type EvictedRowsSink<'a> = dyn FnMut(Vec<RowHeader>, Vec<f32>) + 'a;

/// Copies of the rows of some records.
pub(crate) struct EvictedRowCopies {
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
    /// For each of the records the position of its row. Records that were not live when they were read have none.
    positions: Vec<Option<usize>>,
    /// True for each evicted row.
    removed: Vec<bool>,
}

impl EvictedRowCopies {
    /// Reads the rows of these records of a segment, which are in the order of the file.
    ///
    /// Errors: those of reads, `Corruption`, `Memory`.
    pub(crate) fn read(tier: &TierInner, segment: &Arc<Segment>, records: &[CursorRecord]) -> Result<Self> {
        let wanted: Vec<RequestedRecord> = records.iter().map(|at| (at.id, at.record)).collect();
        let live = live_requests(tier, segment, &wanted);
        let floats = tier.layout.vector_floats();
        let mut vectors = memory::zeros("copy evicted rows", live.len() * floats)?;
        let bytes = read_requested(tier, segment, &live)?;
        let mut headers = Vec::with_capacity(live.len());
        let rows = vectors.chunks_exact_mut(floats).zip(bytes.chunks_exact(segment.record_bytes));
        for (wanted, (vector, bytes)) in live.iter().zip(rows) {
            headers.push(decode_requested(segment, *wanted, bytes)?.unpack(&tier.layout, vector));
        }
        let mut next = live.iter().enumerate().peekable();
        let position =
            |wanted: &RequestedRecord| next.next_if(|(_, live)| *live == wanted).map(|(position, _)| position);
        let positions = wanted.iter().map(position).collect();
        Ok(Self { removed: vec![false; headers.len()], headers, vectors, positions })
    }

    /// Marks the row of this one of the records as evicted.
    pub(crate) fn mark_removed(&mut self, record: usize) {
        // A record that the index points to was also live when the records were read.
        if let Some(position) = self.positions[record] {
            self.removed[position] = true;
        }
    }

    /// Passes the evicted rows to `on_evicted`.
    pub(crate) fn deliver(mut self, floats: usize, on_evicted: &mut EvictedRowsSink<'_>) {
        let mut kept = 0;
        for at in 0..self.removed.len() {
            if self.removed[at] {
                self.headers[kept] = self.headers[at];
                self.vectors.copy_within(at * floats..(at + 1) * floats, kept * floats);
                kept += 1;
            }
        }
        self.headers.truncate(kept);
        self.vectors.truncate(kept * floats);
        if kept > 0 {
            on_evicted(self.headers, self.vectors);
        }
    }
}
