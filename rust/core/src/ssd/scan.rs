//! Scans: every row once, segment by segment, in bounded memory.
//!
//! A scan lists the segments as they are and keeps compaction off those it has not come to yet, so that no row moves from one it
//! has to read to one it does not know of.

use std::sync::Arc;

use super::ScanSink;
use super::format::Content;
use super::record::{decode, le_u64};
use super::segment::{Place, Segment};
use super::shared::Shared;
use super::space::Space;
use crate::error::Result;
use crate::rows::{RowHeader, RowRef};
use crate::sync::Ordering;

const CHUNK_BYTES: usize = 1 << 20;

/// A segment to scan: its records up to `records`, those from `buffer_start` on in `buffer`.
struct Part {
    segment: Arc<Segment>,
    records: u32,
    buffer_start: u64,
    buffer: Vec<u8>,
}

/// Lets those who wait for compaction look again, however a scan ends: dropped after its parts.
struct Poke<'a>(&'a Space);

impl Drop for Poke<'_> {
    fn drop(&mut self) {
        self.0.poke();
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.segment.scans.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared {
    pub(super) fn scan(self: &Arc<Self>, sink: &mut ScanSink<'_>) -> Result<()> {
        self.check_usable()?;
        let _poke = Poke(&self.home.space);
        for part in self.parts() {
            self.scan_part(&part, sink)?;
            drop(part);
            self.home.space.poke();
        }
        Ok(())
    }

    fn parts(&self) -> Vec<Part> {
        let _compacting = self.not_compacting();
        let state = self.view();
        let rows = state.current().filter(|segment| segment.content == Content::Rows);
        rows.map(|segment| {
            segment.scans.fetch_add(1, Ordering::Relaxed);
            let open = state.open.iter().flatten().find(|open| Arc::ptr_eq(&open.segment, segment));
            let (buffer_start, buffer) = match open {
                Some(open) => {
                    let (start, bytes) = open.buffered();
                    (start, bytes.to_vec())
                }
                None => (u64::MAX, Vec::new()),
            };
            Part { segment: segment.clone(), records: segment.records.load(Ordering::Relaxed), buffer_start, buffer }
        })
        .collect()
    }

    fn scan_part(&self, part: &Part, sink: &mut ScanSink<'_>) -> Result<()> {
        let segment = &part.segment;
        let record_bytes = segment.record_bytes;
        let at_once = (CHUNK_BYTES / record_bytes).max(1) as u32;
        let mut bytes = vec![0; at_once as usize * record_bytes];
        let mut vector = vec![0.0; self.layout.vector_floats()];
        let (mut ids, mut here) = (Vec::new(), Vec::new());
        for first in (0..part.records).step_by(at_once as usize) {
            let count = at_once.min(part.records - first);
            let chunk = &mut bytes[..count as usize * record_bytes];
            part.read(first, chunk)?;
            ids.clear();
            ids.extend(chunk.chunks_exact(record_bytes).map(|record| le_u64(record, 8) as i64));
            here.clear();
            here.resize(ids.len(), None);
            self.view().index.get_batch(&ids, &mut here);
            for (at, record) in chunk.chunks_exact(record_bytes).enumerate() {
                let number = first + at as u32;
                if here[at] != Some(segment.location(number)) {
                    continue;
                }
                let record = decode(record, segment.path(), segment.offset(number))?;
                let header: RowHeader = record.unpack(&self.layout, &mut vector);
                sink(RowRef { header: &header, vector: &vector })?;
            }
        }
        Ok(())
    }
}

impl Part {
    /// The records from number `first` on.
    fn read(&self, first: u32, into: &mut [u8]) -> Result<()> {
        let segment = &self.segment;
        let start = segment.offset(first);
        if segment.locate(start, into.len(), &mut |_| {}) == Place::File {
            return segment.file.read_at(start, into);
        }
        for (at, record) in into.chunks_exact_mut(segment.record_bytes).enumerate() {
            let offset = segment.offset(first + at as u32);
            match segment.locate(offset, record.len(), &mut |bytes| record.copy_from_slice(bytes)) {
                Place::Block => {}
                Place::File => segment.file.read_at(offset, record)?,
                Place::Buffer => {
                    let from = (offset - self.buffer_start) as usize;
                    record.copy_from_slice(&self.buffer[from..from + record.len()]);
                }
            }
        }
        Ok(())
    }
}
