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
    Kind::State.error(format!(
        "table {:?} changed while it was exported (a training step, an import, a removal or a sweep of eviction): export again, and train \
         only after the last chunk",
        table.config.name
    ))
}

#[cfg(test)]
mod tests;
