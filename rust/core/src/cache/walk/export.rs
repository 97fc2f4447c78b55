//! Walk over every row of a table, once. The table may be read, planned and evicted concurrently; a change of its
//! contents ends the walk.

use std::sync::Arc;

use super::chunker::{
    ChunkConsumer, GroupConsumer, IdSource, NextRows, RowChunkSink, RowChunker, WalkConsumer, WalkSource,
    check_version, hand_over, lock_unchanged,
};
use crate::cache::groups::{GroupGatherer, GroupSink};
use crate::cache::locks::{RowUseGuard, TableGuard, TableInner};
use crate::cache::residency::ExportStart;
use crate::cache::rows::RowChunk;
use crate::error::{Error, Kind, Result};
use crate::rows::RowHeader;
use crate::ssd::{ScanConsumer, ScanSink};
use crate::types::Id;

/// Bytes of the rows that are copied at a time for a group (at least one row). They stay in the CPU cache until they
/// are copied again.
const COPIED_BYTES: usize = 512 << 10;

/// Number of rows that are copied at a time for a group.
pub(super) fn rows_copied_at_once(table: &TableInner) -> usize {
    (COPIED_BYTES / (table.floats() * 4 + size_of::<RowHeader>())).max(1)
}

/// Passes on every row of the contents of this version, in chunks of at most `chunk_rows`. `consumer` is set if `sink`
/// may wait for a consumer of the chunks.
pub(crate) fn all_chunks(
    table: &TableInner,
    version: u64,
    chunk_rows: usize,
    consumer: Option<&Arc<dyn ScanConsumer>>,
    sink: &mut RowChunkSink<'_>,
) -> Result<()> {
    if table.has_device() {
        return all_by_id(table, version, chunk_rows, consumer, sink);
    }
    let mut slots = SlotSource::begin(table, version)?;
    hand_over(table, &mut slots, &mut ChunkConsumer::new(chunk_rows, &mut *sink))?;
    slots.rows_on_ssd(chunk_rows, consumer, sink)
}

/// Like [`all_chunks`], but in groups. Rows in RAM of a table without a device tier are passed in place.
pub(crate) fn all_groups(table: &TableInner, sink: &mut dyn GroupSink) -> Result<()> {
    let version = table.version();
    let chunk_rows = rows_copied_at_once(table);
    if table.has_device() {
        let mut gather = GroupGatherer::new(sink);
        all_by_id(table, version, chunk_rows, None, &mut |chunk| gather.add(&chunk.headers, &chunk.vectors))?;
        return gather.finish();
    }
    let mut slots = SlotSource::begin(table, version)?;
    hand_over(table, &mut slots, &mut GroupConsumer(sink))?;
    let mut gather = GroupGatherer::new(sink);
    slots.rows_on_ssd(chunk_rows, None, &mut |chunk| gather.add(&chunk.headers, &chunk.vectors))?;
    gather.finish()
}

/// An export in progress of a table without a device tier. It visits the host tier slot by slot, and no row moves to
/// another slot during it.
pub(super) struct SlotSource<'t> {
    table: &'t TableInner,
    version: u64,
    start: ExportStart,
    /// Number of rows passed on from RAM.
    handed_over: u64,
    /// Ids of rows that were passed on and have an outdated copy on SSD.
    outdated: Vec<Id>,
}

impl Drop for SlotSource<'_> {
    fn drop(&mut self) {
        self.table.end_export(self.start.number);
    }
}

impl<'t> SlotSource<'t> {
    pub(super) fn begin(table: &'t TableInner, version: u64) -> Result<Self> {
        let begun = table.lock()?.begin_export(version);
        Ok(Self { table, version, start: begun, handed_over: 0, outdated: Vec::new() })
    }

    pub(super) fn number(&self) -> u64 {
        self.start.number
    }

    pub(super) fn outdated_mut(&mut self) -> &mut Vec<Id> {
        &mut self.outdated
    }

    /// Returns a predicate for ids on SSD: true if the row was passed on from RAM.
    pub(super) fn were_handed_over(&mut self) -> impl Fn(Id) -> bool + '_ {
        self.outdated.sort_unstable();
        let (outdated, written_down) = (&self.outdated, &self.start.written_back);
        move |id| outdated.binary_search(&id).is_ok() || written_down.contains(id)
    }

    /// Passes on the rows that were on SSD after those in RAM were passed on, and checks that no row is missing.
    fn rows_on_ssd(
        &mut self,
        chunk_rows: usize,
        consumer: Option<&Arc<dyn ScanConsumer>>,
        sink: &mut RowChunkSink<'_>,
    ) -> Result<()> {
        let (table, version, rows, from_ram) = (self.table, self.version, self.start.rows, self.handed_over);
        let were_handed_over = self.were_handed_over();
        let from_ssd = rows_on_ssd(table, version, chunk_rows, consumer, were_handed_over, sink)?;
        check_all_handed_over(table, rows, from_ram + from_ssd)
    }
}

impl WalkSource for SlotSource<'_> {
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
        let no_writes = rows.no_kernel_writes();
        let lent =
            guard.lend_next(self.start.number, most, no_writes, &mut self.outdated, &mut |rows| consumer.lend(rows))?;
        self.handed_over += lent as u64;
        Ok(if lent == 0 { NextRows::End } else { NextRows::Lent })
    }
}

/// Like [`all_chunks`], for a table with a device tier. Rows move between it and the host tier in both directions, so
/// the rows that were passed on are tracked by id.
fn all_by_id(
    table: &TableInner,
    version: u64,
    chunk_rows: usize,
    consumer: Option<&Arc<dyn ScanConsumer>>,
    sink: &mut RowChunkSink<'_>,
) -> Result<()> {
    let _wanted = table.lock()?.pin_contents(version);
    let (mut in_ram, rows) = table.lock()?.newest_in_ram()?;
    let ids = in_ram.as_slice();
    hand_over(table, &mut IdSource { version, ids }, &mut ChunkConsumer::new(chunk_rows, &mut *sink))?;
    in_ram.sort_unstable();
    let were_handed_over = |id| in_ram.binary_search(&id).is_ok();
    let from_ssd = rows_on_ssd(table, version, chunk_rows, consumer, were_handed_over, sink)?;
    check_all_handed_over(table, rows, in_ram.len() as u64 + from_ssd)
}

/// Passes on the rows on SSD, except those that `were_handed_over` from RAM. Returns their number.
fn rows_on_ssd(
    table: &TableInner,
    version: u64,
    chunk_rows: usize,
    taker: Option<&Arc<dyn ScanConsumer>>,
    were_handed_over: impl Fn(Id) -> bool,
    sink: &mut RowChunkSink<'_>,
) -> Result<u64> {
    let mut unchanged = |chunk: RowChunk| {
        check_version(table, version)?;
        sink(chunk)
    };
    let mut chunker = RowChunker::new(chunk_rows, &mut unchanged);
    scan(table, taker, &mut |row| if were_handed_over(row.header.id) { Ok(()) } else { chunker.push(row) })?;
    let rows = chunker.finish()?;
    check_version(table, version)?;
    Ok(rows)
}

/// Passes every row on SSD to `sink`, which waits for `consumer`, if there is one.
fn scan(table: &TableInner, consumer: Option<&Arc<dyn ScanConsumer>>, sink: &mut ScanSink<'_>) -> Result<()> {
    match (&table.ssd, consumer) {
        (None, _) => Ok(()),
        (Some(ssd), None) => ssd.scan(sink),
        (Some(ssd), Some(taker)) => ssd.scan_cancellable(taker, sink),
    }
}

/// Errors: `State` if rows are missing.
fn check_all_handed_over(table: &TableInner, rows: u64, handed_over: u64) -> Result<()> {
    if handed_over >= rows {
        return Ok(());
    }
    Err(Error::new(
        Kind::State,
        format!(
            "table {:?} has {rows} rows and {handed_over} were found: a bug of torchrec-embcache to report",
            table.config.name
        ),
    ))
}
