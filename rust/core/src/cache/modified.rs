//! What changed in a table since a checkpoint: the rows modified since, and the ids that left.

use super::export::Chunk;
use super::lineage::Ancestor;
use super::table::{Held, Shared, State, Table};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::RowHeader;
use crate::slots::SlotMap;
use crate::types::{CacheSlot, Id, NO_SLOT};

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

    /// Ids that left the table since `ancestor`, each once, in rising order; some may be back, as rows modified since. `State` where
    /// that is not known: a full save is wanted.
    pub fn left_since(&self, ancestor: &Ancestor) -> Result<Vec<Id>> {
        self.shared.lock()?.lineage.left_since(ancestor).ok_or_else(|| {
            Error::new(
                Kind::State,
                format!(
                    "table {:?}: what changed since the checkpoint {} is not known (it was saved too long ago or by another run, or \
                     more rows left since than are remembered): save a full checkpoint",
                    self.shared.config.name, ancestor.name
                ),
            )
        })
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

impl Shared {
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
        let Some(ssd) = &self.ssd else { return Ok(()) };
        in_ram.sort_unstable();
        let mut chunk = Chunk::default();
        let mut later = Vec::new();
        ssd.scan_since(since, &mut |row| {
            if in_ram.binary_search(&row.header.id).is_ok() {
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
        self.finish_loads(&mut state)?;
        let all = since < state.marked_since;
        let mut ids: Vec<Id> = Vec::new();
        collect(&mut ids, &state.host.slots, all, since, |slot| state.host.header(slot))?;
        if let Some(device) = &state.device {
            collect(&mut ids, &device.slots, all, since, |slot| device.header(slot))?;
        }
        Ok(ids)
    }
}

/// Add the ids of rows of one tier, modified in epoch `since` or later, that are the newest copies; `all` where their marks do not tell.
fn collect<'a>(
    ids: &mut Vec<Id>,
    slots: &SlotMap,
    all: bool,
    since: u32,
    header: impl Fn(CacheSlot) -> &'a RowHeader,
) -> Result<()> {
    let mut add = |slot: CacheSlot| {
        let (state, header) = (slots.state(slot), header(slot));
        if state.is_newest() && header.modified_epoch >= since {
            if ids.len() == ids.capacity() {
                memory::reserve(ids, "list the rows that were modified", ids.len().max(1024))?;
            }
            ids.push(header.id);
        }
        Ok(())
    };
    if all { slots.occupied_from(0).try_for_each(&mut add) } else { slots.modified().try_for_each(&mut add) }
}
