//! The common loop of all walks: first rows with their newest copy in RAM or on the device, part by part, each part
//! under the table's locks; then rows on SSD, without them.

use std::cell::RefCell;

use crate::cache::lock::{RowUseGuard, TableGuard, TableInner};
use crate::cache::row_blocks::{GroupSink, RowChunk};
use crate::error::{Error, Kind, Result};
use crate::rows::{RowList, RowRef};
use crate::runtime::memory;
use crate::types::Id;

/// Accepts a chunk. Runs without the table's locks.
pub(super) type RowChunkSink<'a> = dyn FnMut(RowChunk) -> Result<()> + 'a;

/// The next rows of a walk in RAM or on the device.
pub(super) enum NextRows {
    /// The rows of this part, if any, were lent.
    Lent,
    /// Copies of the rows. Accepting them needs no lock.
    Copied(RowChunk),
    /// No rows remain.
    End,
}

/// Selects the rows of a walk in RAM or on the device.
pub(super) trait WalkSource {
    /// Takes the locks of the table that this walk needs. Fails if the walk must not continue.
    fn lock<'a>(&self, table: &'a TableInner) -> Result<TableGuard<'a>>;

    /// Lends the next rows, at most `most`, to `consumer`, or returns copies. If rows must be read from the device
    /// first, this is called again.
    fn next(
        &mut self,
        guard: &mut TableGuard<'_>,
        rows: &RowUseGuard<'_>,
        most: usize,
        consumer: &mut dyn WalkConsumer,
    ) -> Result<NextRows>;
}

/// Accepts rows of a walk.
pub(super) trait WalkConsumer {
    /// Returns the maximum number of rows of the next part, at least 1. No lock is held, so this may block.
    fn wait_for_space(&mut self) -> Result<usize>;
    /// Accepts rows in place. The table's locks are held, so this must not block.
    fn lend(&mut self, rows: RowList<'_>) -> Result<()>;
    /// Accepts copied rows. No lock is held.
    fn take_copied(&mut self, chunk: RowChunk) -> Result<()>;
}

/// Passes on all rows of a source. This is the only loop over the rows of a table in RAM and on the device.
pub(super) fn hand_over(
    table: &TableInner,
    source: &mut dyn WalkSource,
    consumer: &mut dyn WalkConsumer,
) -> Result<()> {
    let source = RefCell::new(source);
    loop {
        let most = consumer.wait_for_space()?;
        let next = {
            let rows = table.reading_rows()?;
            let next = |guard: &mut TableGuard<'_>| source.borrow_mut().next(guard, &rows, most, consumer);
            table.with_device_rows(&rows, || source.borrow().lock(table), next)?.1
        };
        match next {
            NextRows::Lent => {}
            NextRows::Copied(chunk) => consumer.take_copied(chunk)?,
            NextRows::End => return Ok(()),
        }
    }
}

/// Passes rows on in groups, lent ones in place.
pub(super) struct GroupConsumer<'a>(pub(super) &'a mut dyn GroupSink);

impl WalkConsumer for GroupConsumer<'_> {
    fn wait_for_space(&mut self) -> Result<usize> {
        self.0.wait_for_space()
    }
    fn lend(&mut self, rows: RowList<'_>) -> Result<()> {
        self.0.take(rows)
    }
    fn take_copied(&mut self, chunk: RowChunk) -> Result<()> {
        self.0.take(RowList::block(&chunk.headers, &chunk.vectors, self.0.vector_floats()))
    }
}

/// Passes rows on in chunks, lent ones as copies.
pub(super) struct ChunkConsumer<'a> {
    most: usize,
    /// Copies of the rows that were lent last.
    lent: RowChunk,
    sink: &'a mut RowChunkSink<'a>,
}

impl<'a> ChunkConsumer<'a> {
    /// Chunks of at most `most` rows.
    pub(super) fn new(most: usize, sink: &'a mut RowChunkSink<'a>) -> Self {
        Self { most, lent: RowChunk::default(), sink }
    }
}

impl WalkConsumer for ChunkConsumer<'_> {
    fn wait_for_space(&mut self) -> Result<usize> {
        if !self.lent.headers.is_empty() {
            (self.sink)(std::mem::take(&mut self.lent))?;
        }
        Ok(self.most)
    }

    fn lend(&mut self, rows: RowList<'_>) -> Result<()> {
        memory::reserve(&mut self.lent.headers, "copy rows", rows.len())?;
        memory::reserve(&mut self.lent.vectors, "copy rows", rows.len() * rows.floats())?;
        rows.iter().for_each(|row| self.lent.push(row));
        Ok(())
    }

    fn take_copied(&mut self, chunk: RowChunk) -> Result<()> {
        (self.sink)(chunk)
    }
}

/// Combines rows that arrive one at a time into chunks, as in a scan of the SSD tier.
pub(super) struct RowChunker<'a> {
    most: usize,
    chunk: RowChunk,
    rows: u64,
    sink: &'a mut RowChunkSink<'a>,
}

impl<'a> RowChunker<'a> {
    /// Chunks of at most `most` rows.
    pub(super) fn new(most: usize, sink: &'a mut RowChunkSink<'a>) -> Self {
        Self { most, chunk: RowChunk::default(), rows: 0, sink }
    }

    /// Adds a row.
    pub(super) fn push(&mut self, row: RowRef<'_>) -> Result<()> {
        self.chunk.push(row);
        self.rows += 1;
        if self.chunk.headers.len() < self.most { Ok(()) } else { (self.sink)(std::mem::take(&mut self.chunk)) }
    }

    /// Passes on the last chunk. Returns the total number of rows.
    pub(super) fn finish(self) -> Result<u64> {
        if !self.chunk.headers.is_empty() {
            (self.sink)(self.chunk)?;
        }
        Ok(self.rows)
    }
}

/// A source of copies of rows by id.
pub(super) struct IdSource<'a> {
    pub(super) version: u64,
    pub(super) ids: &'a [Id],
}

impl WalkSource for IdSource<'_> {
    fn lock<'a>(&self, table: &'a TableInner) -> Result<TableGuard<'a>> {
        lock_unchanged(table, self.version)
    }

    fn next(
        &mut self,
        guard: &mut TableGuard<'_>,
        rows: &RowUseGuard<'_>,
        most: usize,
        _: &mut dyn WalkConsumer,
    ) -> Result<NextRows> {
        if self.ids.is_empty() {
            return Ok(NextRows::End);
        }
        let (now, later) = self.ids.split_at(self.ids.len().min(most));
        let found = guard.placement.read_unswept(now, rows.no_kernel_writes())?;
        debug_assert!(found.found.iter().all(|&found| found));
        self.ids = later;
        Ok(NextRows::Copied(RowChunk { headers: found.headers, vectors: found.vectors }))
    }
}

/// Locks the table if its contents still have this version.
pub(super) fn lock_unchanged(table: &TableInner, version: u64) -> Result<TableGuard<'_>> {
    let guard = table.lock()?;
    check_version(table, version)?;
    Ok(guard)
}

/// Errors: `State` if the contents of the table have another version.
pub(super) fn check_version(table: &TableInner, version: u64) -> Result<()> {
    if table.version() == version { Ok(()) } else { Err(contents_changed_error(table)) }
}

pub(super) fn contents_changed_error(table: &TableInner) -> Error {
    Error::new(
        Kind::State,
        format!(
            "table {:?} changed while it was exported (a training step, an import, a removal or a sweep of eviction): export again, and train \
             only after the last chunk",
            table.config.name
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::RowHeader;

    const FLOATS: usize = 3;

    fn rows(count: usize) -> (Vec<RowHeader>, Vec<f32>) {
        let headers: Vec<RowHeader> = (0..count).map(|id| RowHeader { id: id as Id, ..RowHeader::default() }).collect();
        let vectors = headers.iter().flat_map(|header| [header.id as f32; FLOATS]).collect();
        (headers, vectors)
    }

    /// Returns the ids of the chunks, after checking each against its vector part.
    fn ids(chunks: &[RowChunk]) -> Vec<Vec<Id>> {
        for chunk in chunks {
            assert!(chunk.headers.iter().enumerate().all(|(at, header)| {
                let row = chunk.row(at, FLOATS);
                row.header.id == header.id && row.vector == [header.id as f32; FLOATS]
            }));
        }
        chunks.iter().map(|chunk| chunk.headers.iter().map(|header| header.id).collect()).collect()
    }

    #[test]
    fn chunker_passes_each_row_once_in_chunks_of_the_requested_size() {
        for (count, most, chunks) in
            [(0, 4, vec![]), (3, 4, vec![3]), (4, 4, vec![4]), (9, 4, vec![4, 4, 1]), (2, 1, vec![1, 1])]
        {
            let (headers, vectors) = rows(count);
            let mut taken = Vec::new();
            let mut sink = |chunk| {
                taken.push(chunk);
                Ok(())
            };
            let mut chunker = RowChunker::new(most, &mut sink);
            RowList::block(&headers, &vectors, FLOATS).iter().for_each(|row| chunker.push(row).expect("taken"));
            assert_eq!(chunker.finish().expect("taken"), count as u64);
            let found = ids(&taken);
            assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), chunks, "{count} rows, {most} at a time");
            assert!(found.into_iter().flatten().eq(0..count as Id));
        }
    }

    #[test]
    fn lent_rows_are_passed_on_when_no_lock_is_held() {
        let (headers, vectors) = rows(5);
        let lent = RowList::block(&headers, &vectors, FLOATS);
        let taken = std::cell::RefCell::new(Vec::new());
        let mut sink = |chunk| {
            taken.borrow_mut().push(chunk);
            Ok(())
        };
        let mut chunks = ChunkConsumer::new(3, &mut sink);
        assert_eq!(chunks.wait_for_space().expect("no chunk yet"), 3);
        chunks.lend(lent.range(0..3)).expect("copied");
        assert!(taken.borrow().is_empty(), "the locks are held");
        assert_eq!(chunks.wait_for_space().expect("taken"), 3);
        assert_eq!(ids(&taken.borrow()), [vec![0, 1, 2]]);
        chunks.lend(lent.range(3..5)).expect("copied");
        chunks.wait_for_space().expect("taken");
        chunks.wait_for_space().expect("nothing to take");
        assert_eq!(ids(&taken.borrow()), [vec![0, 1, 2], vec![3, 4]]);
    }
}
