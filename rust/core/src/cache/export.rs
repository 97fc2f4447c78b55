//! Every row of a table, as of one moment: in groups where they lie, or copied in chunks.

use std::collections::HashSet;
use std::sync::Arc;

use super::groups::{Gather, GroupSink};
use super::table::{Shared, State, Table};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::{RowHeader, RowList, RowRef};
use crate::slots::RowState;
use crate::ssd::{GiveWay, ScanSink};
use crate::sync::{Mutex, lock};
use crate::types::{CacheSlot, Id};

/// Bytes of the rows that are copied at a time for a group (one row at least): they stay in a core's cache until they are copied again.
pub(super) const COPIED_BYTES: usize = 512 << 10;

/// Some rows of an export, in memory of their own.
#[derive(Clone, Debug, Default)]
pub struct Chunk {
    /// `[n]`: id, metadata, scalar slot.
    pub headers: Vec<RowHeader>,
    /// `[n, V]`
    pub vectors: Vec<f32>,
}

impl Chunk {
    fn push(&mut self, row: RowRef<'_>) {
        self.headers.push(*row.header);
        self.vectors.extend_from_slice(row.vector);
    }
}

/// An export under way of a table without a device tier, as the table's state knows of it. Its rows in RAM are handed over by slot: while
/// there is one, none moves from slot to slot, and of those that are written down is noted which were handed over.
#[derive(Debug)]
pub(crate) struct Export {
    number: u64,
    /// Of the table's contents. Once it is another's, the export will end with an error.
    version: u64,
    /// Newest rows in slots below were handed over.
    cursor: CacheSlot,
    written_down: WrittenDown,
}

/// Ids of rows that were handed over and have their newest copy on SSD since. Its lock is taken with or without the table's, which nobody
/// may wait for amid a scan of the SSD tier: the holder may wait for room there, and so for the scan's end.
type WrittenDown = Arc<Mutex<HashSet<Id>>>;

/// Keeps an [`Export`] among the table's.
pub(super) struct Walk<'a> {
    pub(super) shared: &'a Shared,
    pub(super) version: u64,
    number: u64,
    /// Rows that the table had when the export began.
    rows: u64,
    /// Rows that the export has handed over since.
    handed_over: u64,
    /// Ids of rows that were handed over with an older copy on SSD.
    pub(super) outdated: Vec<Id>,
    pub(super) written_down: WrittenDown,
}

impl Drop for Walk<'_> {
    fn drop(&mut self) {
        lock(&self.shared.state).exports.retain(|export| export.number != self.number);
    }
}

impl Table {
    /// Hand every row of every tier to `sink` once, in chunks of at most `chunk_rows`. The table may be read meanwhile; a training
    /// step, an import or a removal ends it with `State`.
    pub fn for_each_chunk(&self, chunk_rows: usize, sink: &mut dyn FnMut(Chunk) -> Result<()>) -> Result<()> {
        let version = self.shared.version();
        self.shared.export(version, chunk_rows.max(1), None, sink)
    }

    /// The same in groups, rows in RAM where they lie: the table waits while the sink takes a group, and not while it makes room for one.
    pub fn for_each_group(&self, sink: &mut dyn GroupSink) -> Result<()> {
        let version = self.shared.version();
        let row_bytes = self.shared.layout.vector_floats() * 4 + size_of::<RowHeader>();
        let chunk_rows = (COPIED_BYTES / row_bytes).max(1);
        if self.shared.config.device_rows.is_some() {
            let mut gather = Gather::new(sink);
            let all = &mut |chunk: Chunk| gather.add(&chunk.headers, &chunk.vectors);
            self.shared.export(version, chunk_rows, None, all)?;
            return gather.finish();
        }
        let mut walk = self.shared.begin_export(version)?;
        loop {
            let most = sink.room()?;
            if !walk.next_rows(most, &mut |rows| sink.take(rows))? {
                break;
            }
        }
        let mut gather = Gather::new(sink);
        walk.rows_on_ssd(chunk_rows, None, &mut |chunk| gather.add(&chunk.headers, &chunk.vectors))?;
        gather.finish()
    }
}

impl Walk<'_> {
    /// Hand over the next rows in RAM, at most `most`; false when there was none left.
    fn next_rows(&mut self, most: usize, take: &mut dyn FnMut(RowList<'_>) -> Result<()>) -> Result<bool> {
        let _rows = self.shared.reading_rows()?;
        let mut state = self.shared.lock()?;
        self.shared.check_version(self.version)?;
        let number = self.number;
        let cursor = state.exports.iter().find(|export| export.number == number).map_or(0, |export| export.cursor);
        let slots = &state.host.slots;
        let mut found = Vec::new();
        memory::reserve(
            &mut found,
            "list rows",
            most.min((slots.high_water() - cursor.min(slots.high_water())) as usize),
        )?;
        if self.shared.ssd.is_some() {
            memory::reserve(&mut self.outdated, "list rows", found.capacity())?;
        }
        let after = slots.newest_from(cursor, most, &mut found);
        if self.shared.ssd.is_some() {
            let on_ssd = found.iter().filter(|&&slot| slots.state(slot).has(RowState::ON_SSD));
            self.outdated.extend(on_ssd.map(|&slot| state.host.id(slot)));
        }
        let any = !found.is_empty();
        if any {
            take(state.host.rows(&found))?;
        }
        self.handed_over += found.len() as u64;
        self.handed_over(&mut state, after);
        Ok(any)
    }

    /// What is to be handed over of the rows in slots below `after` was.
    pub(super) fn handed_over(&self, state: &mut State, after: CacheSlot) {
        if let Some(export) = state.exports.iter_mut().find(|export| export.number == self.number) {
            export.cursor = after;
        }
    }

    /// Hand over the rows that were on SSD when those in RAM had been handed over, and see that none is missing.
    fn rows_on_ssd(
        &mut self,
        chunk_rows: usize,
        taker: Option<&Arc<dyn GiveWay>>,
        sink: &mut dyn FnMut(Chunk) -> Result<()>,
    ) -> Result<()> {
        self.outdated.sort_unstable();
        let mut chunk = Chunk::default();
        self.shared.scan_ssd(taker, &mut |row| {
            let id = row.header.id;
            if self.outdated.binary_search(&id).is_ok() || lock(&self.written_down).contains(&id) {
                return Ok(());
            }
            chunk.push(row);
            self.handed_over += 1;
            if chunk.headers.len() == chunk_rows {
                self.shared.check_version(self.version)?;
                sink(std::mem::take(&mut chunk))?;
            }
            Ok(())
        })?;
        self.shared.check_version(self.version)?;
        if !chunk.headers.is_empty() {
            sink(chunk)?;
        }
        self.shared.check_rows_handed_over(self.rows, self.handed_over)
    }
}

impl Shared {
    pub(super) fn changed_meanwhile(&self) -> Error {
        Error::new(
            Kind::State,
            format!(
                "table {:?} changed while it was exported (a training step, an import or a removal): export again, and train \
                 only after the last chunk",
                self.config.name
            ),
        )
    }

    pub(super) fn export_gave_way(&self) -> Error {
        Error::new(
            Kind::State,
            format!(
                "the export of table {:?} was ended before its last chunk, because the files that it was still to read on SSD took the \
                 room of rows that are written there: export again and take the chunks one after the other, or raise ssd_bytes",
                self.config.name
            ),
        )
    }

    /// Hand every row on SSD to `sink`, which `taker`, if any, may keep waiting.
    fn scan_ssd(&self, taker: Option<&Arc<dyn GiveWay>>, sink: &mut ScanSink<'_>) -> Result<()> {
        match (&self.ssd, taker) {
            (None, _) => Ok(()),
            (Some(ssd), None) => ssd.scan(sink),
            (Some(ssd), Some(taker)) => ssd.scan_giving_way(taker, sink),
        }
    }

    pub(super) fn check_version(&self, version: u64) -> Result<()> {
        if self.version() == version { Ok(()) } else { Err(self.changed_meanwhile()) }
    }

    /// Whoever wants all rows is told where some are missing.
    fn check_rows_handed_over(&self, rows: u64, handed_over: u64) -> Result<()> {
        if handed_over >= rows {
            return Ok(());
        }
        Err(Error::new(
            Kind::State,
            format!(
                "table {:?} has {rows} rows and {handed_over} were found: a bug of torchrec-embcache to report",
                self.config.name
            ),
        ))
    }

    /// A free slot for a row to move to; none while an export is under way.
    pub(crate) fn free_slot_to_move_to(&self, state: &mut State) -> Option<CacheSlot> {
        let version = self.version();
        if state.exports.iter().any(|export| export.version == version) { None } else { state.host.slots.take() }
    }

    /// Note for the exports under way that the newest copies of the rows in these slots are to be on SSD: before a scan can meet them.
    pub(crate) fn note_written_down(&self, state: &State, slots: &[CacheSlot]) {
        let version = self.version();
        for export in state.exports.iter().filter(|export| export.version == version) {
            let handed_over = slots.iter().filter(|&&slot| slot < export.cursor);
            lock(&export.written_down).extend(handed_over.map(|&slot| state.host.id(slot)));
        }
    }

    pub(super) fn begin_export(&self, version: u64) -> Result<Walk<'_>> {
        let mut state = self.lock()?;
        state.next_export += 1;
        let number = state.next_export;
        let written_down = WrittenDown::default();
        state.exports.push(Export { number, version, cursor: 0, written_down: Arc::clone(&written_down) });
        let rows = state.rows;
        Ok(Walk { shared: self, version, number, rows, handed_over: 0, outdated: Vec::new(), written_down })
    }

    /// See [`Table::for_each_chunk`]. Where the sink may wait for somebody who takes the chunks, that is `taker`.
    pub(super) fn export(
        &self,
        version: u64,
        chunk_rows: usize,
        taker: Option<&Arc<dyn GiveWay>>,
        sink: &mut dyn FnMut(Chunk) -> Result<()>,
    ) -> Result<()> {
        if self.device_rows.is_some() {
            return self.export_with_device(version, chunk_rows, taker, sink);
        }
        let mut walk = self.begin_export(version)?;
        loop {
            let mut chunk = Chunk::default();
            let copy = &mut |rows: RowList<'_>| {
                memory::reserve(&mut chunk.headers, "copy rows", rows.len())?;
                memory::reserve(&mut chunk.vectors, "copy rows", rows.len() * self.layout.vector_floats())?;
                for row in rows.iter() {
                    chunk.push(row);
                }
                Ok(())
            };
            if !walk.next_rows(chunk_rows, copy)? {
                break;
            }
            sink(chunk)?;
        }
        walk.rows_on_ssd(chunk_rows, taker, sink)
    }

    /// Rows move between a device and the host tier in both directions, so what was handed over of them is known by id.
    fn export_with_device(
        &self,
        version: u64,
        chunk_rows: usize,
        taker: Option<&Arc<dyn GiveWay>>,
        sink: &mut dyn FnMut(Chunk) -> Result<()>,
    ) -> Result<()> {
        let (mut in_ram, rows) = self.newest_in_ram()?;
        let mut handed_over = in_ram.len() as u64;
        for ids in in_ram.chunks(chunk_rows) {
            let rows = {
                let _rows = self.reading_rows()?;
                let mut state = self.lock()?;
                self.check_version(version)?;
                self.read_now(&mut state, ids)?
            };
            debug_assert!(rows.found.iter().all(|&found| found));
            sink(Chunk { headers: rows.headers, vectors: rows.vectors })?;
        }
        in_ram.sort_unstable();
        let mut chunk = Chunk::default();
        self.scan_ssd(taker, &mut |row| {
            if in_ram.binary_search(&row.header.id).is_ok() {
                return Ok(());
            }
            chunk.push(row);
            handed_over += 1;
            if chunk.headers.len() == chunk_rows {
                self.check_version(version)?;
                sink(std::mem::take(&mut chunk))?;
            }
            Ok(())
        })?;
        self.check_version(version)?;
        if !chunk.headers.is_empty() {
            sink(chunk)?;
        }
        self.check_rows_handed_over(rows, handed_over)
    }

    /// Ids of rows whose newest copy is in RAM or on the device, and how many rows there are: all others are on SSD, current.
    fn newest_in_ram(&self) -> Result<(Vec<Id>, u64)> {
        let mut state = self.lock()?;
        self.finish_loads(&mut state);
        let host = &state.host;
        let most = (host.slots.used() + host.slots.overflow_used()) as usize;
        let on_device =
            state.device.as_ref().map_or(0, |tier| (tier.slots.used() + tier.slots.overflow_used()) as usize);
        let mut ids: Vec<Id> = Vec::new();
        memory::reserve(&mut ids, "list the rows in RAM", most + on_device)?;
        ids.extend(
            host.slots
                .occupied_from(0)
                .filter(|&slot: &CacheSlot| host.slots.state(slot).is_newest())
                .map(|slot| host.id(slot)),
        );
        if let Some(device) = &state.device {
            ids.extend(
                device
                    .slots
                    .occupied_from(0)
                    .filter(|&slot| device.slots.state(slot).is_newest())
                    .map(|slot| device.id(slot)),
            );
        }
        Ok((ids, state.rows))
    }
}
