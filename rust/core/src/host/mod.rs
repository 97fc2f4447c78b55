//! The host tier: rows in an arena in RAM, within a budget of bytes that the index of the rows on SSD shares.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::config::PolicyKind;
use crate::error::{Error, Kind, Result};
use crate::prefetch::prefetch_address;
use crate::rows::{Arena, RowHeader, RowLayout, RowList, RowRef};
use crate::slots::{RowState, SlotMap};
use crate::types::{CacheSlot, Id};

/// The part of the SSD index that belongs to a table's fixed overhead, which its budget does not count.
const FREE_INDEX_BYTES: u64 = 64 * 1024;
/// What an id on SSD costs at most once there are a million. Below, the index's empty pages are fixed overhead.
const INDEX_BYTES_PER_ROW: u64 = 12;

/// See the module. Used under the table's lock; kernels read and write pinned rows through the arena without it.
#[derive(Debug)]
pub(crate) struct HostTier {
    pub(crate) slots: SlotMap,
    arena: Arc<Arena>,
    layout: RowLayout,
    bytes_per_row: u64,
    budget_bytes: u64,
}

impl HostTier {
    /// Bytes of the budget a row costs.
    pub(crate) fn bytes_per_row(layout: &RowLayout, policy: PolicyKind) -> u64 {
        (Arena::bytes_per_row(layout) + SlotMap::bytes_per_slot(policy)) as u64
    }

    /// A tier of as many rows as `budget_bytes` holds. `Kind::Config` when that is none.
    pub(crate) fn new(table: &str, layout: RowLayout, policy: PolicyKind, budget_bytes: u64) -> Result<Self> {
        let bytes_per_row = Self::bytes_per_row(&layout, policy);
        let rows = budget_bytes / bytes_per_row;
        if rows == 0 {
            return Err(Error::new(
                Kind::Config,
                format!(
                    "table {table:?}: host_bytes={budget_bytes} holds no row: a row of dim {} takes {bytes_per_row} bytes \
                     with its slots, metadata and index; set host_bytes to at least that, better to a batch's working set",
                    layout.dim
                ),
            ));
        }
        let rows = rows.min(u64::from(u32::MAX / 4)) as u32;
        Ok(Self {
            slots: SlotMap::new(rows, policy),
            arena: Arc::new(Arena::new(layout, rows)?),
            layout,
            bytes_per_row,
            budget_bytes,
        })
    }

    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }
    pub(crate) fn budget_bytes(&self) -> u64 {
        self.budget_bytes
    }
    pub(crate) fn row_bytes(&self) -> u64 {
        self.bytes_per_row
    }

    /// What the budget counts of the `index_bytes` of an index of `indexed_rows` on SSD.
    pub(crate) fn charged_bytes(index_bytes: u64, indexed_rows: u64) -> u64 {
        index_bytes.min(indexed_rows * INDEX_BYTES_PER_ROW).saturating_sub(FREE_INDEX_BYTES)
    }

    /// How many rows the budget holds beside the `index_bytes` of an index of `indexed_rows` on SSD.
    pub(crate) fn rows_beside_index(&self, index_bytes: u64, indexed_rows: u64) -> u64 {
        let charged = Self::charged_bytes(index_bytes, indexed_rows);
        (self.budget_bytes.saturating_sub(charged) / self.bytes_per_row).min(u64::from(self.slots.capacity()))
    }

    /// Start loading the header of a row.
    #[inline]
    pub(crate) fn prefetch_header(&self, slot: CacheSlot) {
        prefetch_address(self.arena.row(slot).header);
    }

    /// The header of a row that no kernel writes now.
    fn header(&self, slot: CacheSlot) -> &RowHeader {
        // SAFETY: the slot is valid in the arena. Headers are written only under the table's lock, which the caller holds, by the fetch
        // of a LOADING row, which nobody reads, and, the scalar slot alone, by kernels, which the caller keeps out.
        unsafe { &*self.arena.row(slot).header }
    }

    /// The header of a row that no kernel writes now, to change it. The caller holds the table's lock.
    pub(crate) fn header_mut(&mut self, slot: CacheSlot) -> &mut RowHeader {
        // SAFETY: as in `header`, and `self` is borrowed exclusively.
        unsafe { &mut *self.arena.row(slot).header }
    }

    /// The vector part of a row that no kernel writes now.
    pub(crate) fn vector(&self, slot: CacheSlot) -> &[f32] {
        // SAFETY: the slot is valid; the caller holds the table's lock and either the row is unpinned or the rows lock keeps
        // kernels out.
        unsafe { std::slice::from_raw_parts(self.arena.row(slot).vector, self.layout.vector_floats()) }
    }

    /// The vector part of a row that nobody else uses, to fill it.
    pub(crate) fn vector_mut(&mut self, slot: CacheSlot) -> &mut [f32] {
        // SAFETY: as in `vector`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.arena.row(slot).vector, self.layout.vector_floats()) }
    }

    /// Header and vector part together.
    pub(crate) fn row(&self, slot: CacheSlot) -> RowRef<'_> {
        RowRef { header: self.header(slot), vector: self.vector(slot) }
    }

    /// Rows that no kernel writes now.
    pub(crate) fn rows<'a>(&'a self, slots: &'a [CacheSlot]) -> RowList<'a> {
        // SAFETY: as in `header` and `vector`, of each.
        unsafe { RowList::in_slots(&self.arena, slots, self.layout.vector_floats()) }
    }

    /// The id of a row. A kernel may be writing the row's values.
    pub(crate) fn id(&self, slot: CacheSlot) -> Id {
        // SAFETY: the slot is valid in the arena. Of the header only this field is read, and no reference to the whole is made: a kernel
        // may be writing the scalar slot. The id is written under the table's lock, which the caller holds.
        unsafe { (&raw const (*self.arena.row(slot).header).id).read() }
    }

    /// The epoch of a row's last training step. A kernel may be writing the row's values.
    pub(crate) fn modified_epoch(&self, slot: CacheSlot) -> u32 {
        // SAFETY: as in `id`.
        unsafe { (&raw const (*self.arena.row(slot).header).modified_epoch).read() }
    }

    /// Record a training step on a row; see [`RowHeader::touch`]. Another plan's kernel may be writing the row's values.
    #[inline]
    pub(crate) fn touch(&mut self, slot: CacheSlot, occurrences: u32, step: u64, epoch: u32) {
        let header = self.arena.row(slot).header;
        // SAFETY: the slot is valid in the arena and `self` is borrowed exclusively. Metadata is read and written field by field, under
        // the table's lock, which the caller holds; the scalar slot, which a kernel may be writing, is not touched.
        unsafe {
            let mut meta = RowHeader {
                last_step: (&raw const (*header).last_step).read(),
                count: (&raw const (*header).count).read(),
                score: (&raw const (*header).score).read(),
                ..RowHeader::default()
            };
            meta.touch(occurrences, step, epoch);
            (&raw mut (*header).last_step).write(meta.last_step);
            (&raw mut (*header).count).write(meta.count);
            (&raw mut (*header).score).write(meta.score);
            (&raw mut (*header).modified_epoch).write(meta.modified_epoch);
        }
    }

    /// Take an empty slot of the budget, or of the overflow where `overflow` allows it.
    pub(crate) fn take(&mut self, overflow: bool) -> Result<Option<CacheSlot>> {
        if let Some(slot) = self.slots.take() {
            return Ok(Some(slot));
        }
        if !overflow {
            return Ok(None);
        }
        self.arena.reserve_overflow(self.slots.overflow_used() + 1)?;
        Ok(Some(self.slots.take_overflow()))
    }

    /// Make sure that `rows` slots can be taken, past the budget where it has no free ones, and filled without more memory.
    /// `Kind::Memory`, and nothing changed, where the system refuses.
    pub(crate) fn reserve(&mut self, rows: usize) -> Result<()> {
        let rows = rows.min(u32::MAX as usize) as u32;
        let past = rows.saturating_sub(self.slots.free_slots());
        if past > 0 {
            self.arena.reserve_overflow(self.slots.overflow_used().saturating_add(past))?;
        }
        self.slots.reserve(rows)
    }

    /// Copy a row into a taken slot and make it findable.
    pub(crate) fn insert_row(&mut self, slot: CacheSlot, row: RowRef<'_>, state: RowState) {
        *self.header_mut(slot) = *row.header;
        self.vector_mut(slot).copy_from_slice(row.vector);
        self.slots.insert(slot, row.header.id, state);
    }

    /// Remove a row and free its slot.
    pub(crate) fn remove(&mut self, slot: CacheSlot, evicted: bool) {
        let id = self.id(slot);
        self.slots.remove(slot, id, evicted);
        self.shrink_overflow();
    }

    /// Give the overflow's memory back once nothing is in it.
    pub(crate) fn shrink_overflow(&self) {
        if self.slots.overflow_used() == 0 {
            self.arena.shrink_overflow(0);
        }
    }

    /// Forget every row; none is pinned or being read.
    pub(crate) fn clear(&mut self, policy: PolicyKind) {
        let capacity = self.slots.capacity();
        self.slots = SlotMap::new(capacity, policy);
        self.arena.shrink_overflow(0);
        self.arena.discard(0..capacity);
    }

    /// Copy an unpinned row from one slot to another, taken one.
    pub(crate) fn relocate(&mut self, from: CacheSlot, to: CacheSlot) {
        let (source, target) = (self.arena.row(from), self.arena.row(to));
        // SAFETY: both slots are valid and distinct, unpinned, and the caller holds the table's lock.
        unsafe {
            std::ptr::copy_nonoverlapping(source.vector, target.vector, self.layout.vector_floats());
            *target.header = *source.header;
        }
        let id = self.id(to);
        self.slots.relocate(from, to, id);
    }
}
