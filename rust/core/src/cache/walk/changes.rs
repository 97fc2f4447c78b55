//! The rows of a table that were modified since a checkpoint, for a delta.

use super::chunker::{
    ChunkConsumer, GroupConsumer, IdSource, NextRows, RowChunkSink, RowChunker, WalkConsumer, WalkSource,
    check_version, hand_over, lock_unchanged,
};
use super::export::{SlotSource, rows_copied_at_once};
use crate::cache::groups::{GroupGatherer, GroupSink};
use crate::cache::locks::{RowUseGuard, TableGuard, TableInner};
use crate::cache::rows::RowChunk;
use crate::error::Result;
use crate::types::{CacheSlot, Id};

/// Passes on the rows that were modified in epoch `since` or later, in chunks of at most `chunk_rows`.
pub(crate) fn modified_chunks(
    table: &TableInner,
    since: u32,
    chunk_rows: usize,
    sink: &mut RowChunkSink<'_>,
) -> Result<()> {
    let version = table.version();
    let mut in_ram = table.lock()?.modified_in_ram(since)?;
    let ids = in_ram.as_slice();
    hand_over(table, &mut IdSource { version, ids }, &mut ChunkConsumer::new(chunk_rows, &mut *sink))?;
    in_ram.sort_unstable();
    modified_on_ssd(table, version, since, chunk_rows, |id| in_ram.binary_search(&id).is_ok(), sink)
}

/// Like [`modified_chunks`], but in groups. Rows in RAM of a table without a device tier are passed in place.
pub(crate) fn modified_groups(table: &TableInner, since: u32, sink: &mut dyn GroupSink) -> Result<()> {
    let chunk_rows = rows_copied_at_once(table);
    if table.has_device() {
        let mut gather = GroupGatherer::new(sink);
        modified_chunks(table, since, chunk_rows, &mut |chunk| gather.add(&chunk.headers, &chunk.vectors))?;
        return gather.finish();
    }
    let version = table.version();
    let mut export = SlotSource::begin(table, version)?;
    let slots = table.lock()?.modified_slots(since)?;
    sink.expect_rows(slots.len());
    let mut modified = ModifiedSource { export: &mut export, version, since, slots: &slots };
    hand_over(table, &mut modified, &mut GroupConsumer(sink))?;
    drop(slots);
    sink.expect_rows(usize::MAX);
    let mut gather = GroupGatherer::new(sink);
    modified_on_ssd(table, version, since, chunk_rows, export.were_handed_over(), &mut |chunk| {
        gather.add(&chunk.headers, &chunk.vectors)
    })?;
    gather.finish()
}

/// The rows in some slots, in ascending order, that were modified and whose newest copy is still there.
struct ModifiedSource<'s, 't> {
    export: &'s mut SlotSource<'t>,
    version: u64,
    since: u32,
    slots: &'s [CacheSlot],
}

impl WalkSource for ModifiedSource<'_, '_> {
    fn lock<'a>(&self, table: &'a TableInner) -> Result<TableGuard<'a>> {
        lock_unchanged(table, self.version)
    }

    fn next(
        &mut self,
        guard: &mut TableGuard<'_>,
        rows: &RowUseGuard<'_>,
        most: usize,
        consumer: &mut dyn WalkConsumer,
    ) -> Result<NextRows> {
        if self.slots.is_empty() {
            return Ok(NextRows::End);
        }
        let (now, later) = self.slots.split_at(self.slots.len().min(most));
        let (number, no_writes) = (self.export.number(), rows.no_kernel_writes());
        let outdated = self.export.outdated_mut();
        guard.lend_modified(number, now, self.since, no_writes, outdated, &mut |rows| consumer.lend(rows))?;
        self.slots = later;
        Ok(NextRows::Lent)
    }
}

/// Passes on the rows on SSD that were modified in epoch `since` or later, except those that `were_handed_over` from
/// RAM.
fn modified_on_ssd(
    table: &TableInner,
    version: u64,
    since: u32,
    chunk_rows: usize,
    were_handed_over: impl Fn(Id) -> bool,
    sink: &mut RowChunkSink<'_>,
) -> Result<()> {
    let Some(ssd) = &table.ssd else { return Ok(()) };
    let mut later = Vec::new();
    let mut now_or_later = |chunk: RowChunk| {
        check_version(table, version)?;
        // The holder of the lock may wait for free space on SSD, and so for the end of this scan.
        if let Some(held) = table.try_lock()? {
            return sink(newest_on_ssd(table, held, chunk));
        }
        later.push(chunk);
        Ok(())
    };
    let mut chunker = RowChunker::new(chunk_rows, &mut now_or_later);
    ssd.scan_since(since, &mut |row| if were_handed_over(row.header.id) { Ok(()) } else { chunker.push(row) })?;
    chunker.finish()?;
    for chunk in later {
        check_version(table, version)?;
        sink(newest_on_ssd(table, table.lock()?, chunk))?;
    }
    check_version(table, version)
}

/// Keeps the rows read from SSD that have no newer copy in another tier. (The modified epoch of an imported row may be
/// later than its training.)
fn newest_on_ssd(table: &TableInner, guard: TableGuard<'_>, mut chunk: RowChunk) -> RowChunk {
    let newer: Vec<bool> = chunk.headers.iter().map(|header| guard.is_newer_than_on_ssd(header.id)).collect();
    drop(guard);
    if newer.contains(&true) {
        let floats = table.floats();
        let mut at = newer.iter().flat_map(|&newer| std::iter::repeat_n(newer, floats));
        chunk.vectors.retain(|_| !at.next().unwrap_or(false));
        let mut at = newer.iter();
        chunk.headers.retain(|_| !at.next().copied().unwrap_or(false));
    }
    chunk
}
