//! What changed in a table since a checkpoint: the rows modified since, and the ids that left.

use super::export::{COPIED_BYTES, Chunk, Walk};
use super::groups::{Gather, GroupSink};
use super::lineage::Ancestor;
use super::locks::Held;
use super::table::{Shared, State, Table};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::RowHeader;
use crate::slots::{RowState, SlotMap};
use crate::sync::lock;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// How many rows ahead a walk asks for headers.
const HEADERS_AHEAD: usize = 16;

impl Table {
    /// The checkpoints that a delta of this table can build on, oldest first.
    pub fn ancestors(&self) -> Result<Vec<Ancestor>> {
        Ok(self.shared.lock()?.lineage.ancestors().to_vec())
    }

    /// The table's contents, as of the end of the epoch before `ancestor.next_epoch`, are those of this checkpoint: it was saved so, or
    /// loaded. To be called once the checkpoint is published on all ranks. Rows modified from now on are to be of `next_epoch` or a later
    /// one (see [`Table::set_epoch`]).
    pub fn saved_as(&self, ancestor: Ancestor) -> Result<()> {
        self.shared.lock_any()?.lineage.saved_as(ancestor);
        Ok(())
    }

    /// As [`Table::saved_as`], of the rows of a [`Table::moment`] whose rows trained later are of `next_epoch`; `None` where its save
    /// failed. Where ids left meanwhile that are not all remembered, the checkpoint is no ancestor. A closed table has no use for it.
    pub fn saved_beside(&self, next_epoch: u32, ancestor: Option<Ancestor>) {
        if let Ok(mut state) = self.shared.lock_any() {
            state.lineage.saved_beside(next_epoch, ancestor);
        }
    }

    /// Ids that left the table since `ancestor`, each once, in rising order; some may be back, as rows modified since. `State` where
    /// that is not known: a full save is wanted.
    pub fn left_since(&self, ancestor: &Ancestor) -> Result<Vec<Id>> {
        self.shared.left_since(&*self.shared.lock()?, ancestor)
    }

    /// As [`Table::for_each_chunk`], of the rows whose `modified_epoch` is at least `since`, at the cost of those rows: in RAM a byte
    /// a row is looked at where `since` is this epoch, else a header; on SSD the footers of segments that have such rows.
    pub fn for_each_modified(
        &self,
        since: u32,
        chunk_rows: usize,
        sink: &mut dyn FnMut(Chunk) -> Result<()>,
    ) -> Result<()> {
        let version = self.shared.version();
        self.shared.export_modified(version, since, chunk_rows.max(1), sink)
    }

    /// The same in groups, rows in RAM where they lie, as [`Table::for_each_group`] hands over all.
    pub fn for_each_modified_group(&self, since: u32, sink: &mut dyn GroupSink) -> Result<()> {
        let shared = &*self.shared;
        let version = shared.version();
        let chunk_rows = (COPIED_BYTES / (shared.layout.vector_floats() * 4 + size_of::<RowHeader>())).max(1);
        if shared.config.device_rows.is_some() {
            let mut gather = Gather::new(sink);
            let all = &mut |chunk: Chunk| gather.add(&chunk.headers, &chunk.vectors);
            shared.export_modified(version, since, chunk_rows, all)?;
            return gather.finish();
        }
        let mut walk = shared.begin_export(version)?;
        let slots = shared.modified_slots(since)?;
        sink.expect(slots.len());
        let mut rest = slots.as_slice();
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(sink.room()?));
            walk.modified_rows(now, since, sink)?;
            rest = later;
        }
        drop(slots);
        sink.expect(usize::MAX);
        let mut gather = Gather::new(sink);
        walk.outdated.sort_unstable();
        let (outdated, written_down) = (&walk.outdated, &walk.written_down);
        let were_handed_over = |id| outdated.binary_search(&id).is_ok() || lock(written_down).contains(&id);
        shared.modified_on_ssd(version, since, chunk_rows, &were_handed_over, &mut |chunk| {
            gather.add(&chunk.headers, &chunk.vectors)
        })?;
        gather.finish()
    }
}

impl State {
    /// Begin another epoch. Rows are marked anew from here on.
    pub(crate) fn begin_epoch(&mut self, epoch: u32) {
        if epoch == self.epoch {
            return;
        }
        if epoch < self.epoch {
            self.lineage.forget();
        }
        self.epoch = epoch;
        self.marked_since = epoch;
        self.host.slots.clear_marks();
        if let Some(device) = &mut self.device {
            device.slots.clear_marks();
        }
    }
}

impl Walk<'_> {
    /// Hand over those of the rows in these slots, which are above all before, that were modified in epoch `since` or later and have
    /// their newest copy there. (Of the others the newest copy went to SSD since the slots were listed.)
    fn modified_rows(&mut self, slots: &[CacheSlot], since: u32, sink: &mut dyn GroupSink) -> Result<()> {
        let _rows = self.shared.reading_rows()?;
        let mut state = self.shared.lock()?;
        self.shared.check_version(self.version)?;
        let mut modified = Vec::new();
        memory::reserve(&mut modified, "list the rows that were modified", slots.len())?;
        if self.shared.ssd.is_some() {
            memory::reserve(&mut self.outdated, "list the rows that were modified", slots.len())?;
        }
        let host = &state.host;
        for (at, &slot) in slots.iter().enumerate() {
            if let Some(&later) = slots.get(at + HEADERS_AHEAD)
                && host.slots.state(later).is_newest()
            {
                host.prefetch_header(later);
            }
            let found = host.slots.state(slot);
            if !found.is_newest() || host.modified_epoch(slot) < since {
                continue;
            }
            if found.has(RowState::ON_SSD) {
                self.outdated.push(host.id(slot));
            }
            modified.push(slot);
        }
        if !modified.is_empty() {
            sink.take(host.rows(&modified))?;
        }
        self.handed_over(&mut state, slots.last().map_or(0, |&slot| slot + 1));
        Ok(())
    }
}

impl Shared {
    /// See [`Table::left_since`].
    pub(super) fn left_since(&self, state: &State, ancestor: &Ancestor) -> Result<Vec<Id>> {
        state.lineage.left_since(ancestor).ok_or_else(|| {
            Error::new(
                Kind::State,
                format!(
                    "table {:?}: what changed since the checkpoint {} is not known (it was saved too long ago or by another run, or \
                     more rows left since than are remembered): save a full checkpoint",
                    self.config.name, ancestor.name
                ),
            )
        })
    }

    fn export_modified(
        &self,
        version: u64,
        since: u32,
        chunk_rows: usize,
        sink: &mut dyn FnMut(Chunk) -> Result<()>,
    ) -> Result<()> {
        let mut in_ram = self.modified_in_ram(since)?;
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
        self.modified_on_ssd(version, since, chunk_rows, &|id| in_ram.binary_search(&id).is_ok(), sink)
    }

    /// Hand over the rows on SSD, modified in epoch `since` or later, but those that `were_handed_over` before.
    fn modified_on_ssd(
        &self,
        version: u64,
        since: u32,
        chunk_rows: usize,
        were_handed_over: &dyn Fn(Id) -> bool,
        sink: &mut dyn FnMut(Chunk) -> Result<()>,
    ) -> Result<()> {
        let Some(ssd) = &self.ssd else { return Ok(()) };
        let mut chunk = Chunk::default();
        let mut later = Vec::new();
        ssd.scan_since(since, &mut |row| {
            if were_handed_over(row.header.id) {
                return Ok(());
            }
            chunk.headers.push(*row.header);
            chunk.vectors.extend_from_slice(row.vector);
            if chunk.headers.len() == chunk_rows {
                self.check_version(version)?;
                let chunk = std::mem::take(&mut chunk);
                // Whoever holds the lock may wait for room on SSD, and so for this scan's end.
                match self.try_lock()? {
                    Some(state) => sink(self.newest_on_ssd(state, chunk))?,
                    None => later.push(chunk),
                }
            }
            Ok(())
        })?;
        later.push(chunk);
        for chunk in later.into_iter().filter(|chunk| !chunk.headers.is_empty()) {
            self.check_version(version)?;
            sink(self.newest_on_ssd(self.lock()?, chunk))?;
        }
        self.check_version(version)
    }

    /// Those of rows read from SSD that no other tier has newer. (An imported row may say that it was modified later than its training.)
    fn newest_on_ssd(&self, state: Held<'_>, mut chunk: Chunk) -> Chunk {
        let newer = |slots: &SlotMap, id: Id| {
            let slot = slots.get(id);
            slot != NO_SLOT && slots.state(slot).is_newest()
        };
        let is_newer = |header: &RowHeader| {
            newer(&state.host.slots, header.id)
                || state.device.as_ref().is_some_and(|device| newer(&device.slots, header.id))
        };
        let newer: Vec<bool> = chunk.headers.iter().map(is_newer).collect();
        drop(state);
        if newer.contains(&true) {
            let floats = self.layout.vector_floats();
            let mut at = newer.iter().flat_map(|&newer| std::iter::repeat_n(newer, floats));
            chunk.vectors.retain(|_| !at.next().unwrap_or(false));
            let mut at = newer.iter();
            chunk.headers.retain(|_| !at.next().copied().unwrap_or(false));
        }
        chunk
    }

    /// Ids of rows modified in epoch `since` or later whose newest copy is in RAM or on the device.
    fn modified_in_ram(&self, since: u32) -> Result<Vec<Id>> {
        let mut state = self.lock()?;
        self.finish_loads(&mut state);
        let all = since < state.marked_since;
        let mut ids: Vec<Id> = Vec::new();
        let host = |slot| (state.host.modified_epoch(slot) >= since).then(|| state.host.id(slot));
        collect(&mut ids, &state.host.slots, all, host)?;
        if let Some(device) = &state.device {
            let on_device = |slot| (device.header(slot).modified_epoch >= since).then(|| device.id(slot));
            collect(&mut ids, &device.slots, all, on_device)?;
        }
        Ok(ids)
    }

    /// Slots of the host tier, lowest first, with the newest copies of rows: of all that were modified in epoch `since` or later, and
    /// maybe of others.
    fn modified_slots(&self, since: u32) -> Result<Vec<CacheSlot>> {
        let mut state = self.lock()?;
        self.finish_loads(&mut state);
        let mut slots: Vec<CacheSlot> = Vec::new();
        collect(&mut slots, &state.host.slots, since < state.marked_since, Some)?;
        Ok(slots)
    }
}

/// Add what `of` gives for the slots of one tier that are marked as modified and have the newest copies; for `all` such where their marks
/// do not tell.
pub(super) fn collect<T>(
    found: &mut Vec<T>,
    slots: &SlotMap,
    all: bool,
    of: impl Fn(CacheSlot) -> Option<T>,
) -> Result<()> {
    let mut add = |slot: CacheSlot| {
        if slots.state(slot).is_newest()
            && let Some(one) = of(slot)
        {
            if found.len() == found.capacity() {
                memory::reserve(found, "list the rows that were modified", found.len().max(1024))?;
            }
            found.push(one);
        }
        Ok(())
    };
    if all { slots.occupied_from(0).try_for_each(&mut add) } else { slots.modified().try_for_each(&mut add) }
}
