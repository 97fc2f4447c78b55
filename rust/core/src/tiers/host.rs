//! The host tier: rows in an arena in RAM, within a byte budget that is shared with the index of the rows on SSD.
//!
//! The table's lock excludes all code except kernels, which use the rows of pinned slots of their plan without that
//! lock. So a row of the arena is read through a [`ReadAccess`] and written through a [`WriteAccess`], and there are
//! few ways to get either.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use crate::config::PolicyKind;
use crate::error::{Kind, Result};
use crate::rows::{RowArena, RowHeader, RowLayout, RowList, RowRef, ScoreDecayTo};
use crate::runtime::budget::HostBudget;
use crate::runtime::simd::{prefetch_address, prefetch_range};
use crate::slots::{RowState, SlotMap};
use crate::types::{CacheSlot, Id};

/// Bytes of the SSD index that the host budget does not count: they are part of a table's fixed overhead.
const FREE_INDEX_BYTES: u64 = 64 * 1024;
/// Maximum bytes of the SSD index that the host budget counts per id. An index of a million ids or more uses at most
/// this; a smaller one has empty pages, which are part of a table's fixed overhead.
pub const INDEX_BYTES_PER_ROW: u64 = 12;

/// Maximum number of slots of the budget of a tier.
const MOST_ROWS: u64 = (u32::MAX / 4) as u64;
/// Distance, in slots, at which [`HostTier::trained_until`] prefetches headers into the CPU cache.
const HEADERS_AHEAD: usize = 64;

/// Distance, in rows, at which copies of rows prefetch into the CPU cache.
pub(crate) const ROWS_AHEAD: usize = 8;

/// The rows of one table in RAM. Used under the lock of its table. Kernels read and write the rows that their plan has
/// pinned without that lock; see [`ReadAccess`] and [`WriteAccess`] for access by other code.
#[derive(Debug)]
pub(crate) struct HostTier {
    pub(crate) slots: SlotMap,
    arena: Arc<RowArena>,
    layout: RowLayout,
    bytes_per_row: u64,
    budget: HostBudget,
    budget_rows: u32,
    /// True if the table's kernels run on the device tier, so that none uses a row here.
    kernels_on_device: bool,
}

impl HostTier {
    /// Bytes of the budget per row.
    pub(crate) fn bytes_per_row(layout: &RowLayout, policy: PolicyKind) -> u64 {
        (RowArena::bytes_per_row(layout) + SlotMap::bytes_per_slot(policy)) as u64
    }

    /// A tier of as many rows as `budget` fits. Maps addresses for its maximum size.
    ///
    /// Errors: `Config` if it fits no row.
    pub(crate) fn new(
        table: &str,
        layout: RowLayout,
        policy: PolicyKind,
        budget: HostBudget,
        kernels_on_device: bool,
    ) -> Result<Self> {
        let bytes_per_row = Self::bytes_per_row(&layout, policy);
        let [now, most] = [budget.bytes(), budget.most()].map(|bytes| (bytes / bytes_per_row).min(MOST_ROWS) as u32);
        if most == 0 {
            return Err(Kind::Config.error(format!(
                "table {table:?}: host_bytes={} holds no row: a row of dim {} takes {bytes_per_row} bytes \
                 with its slots, metadata and index; set host_bytes to at least that, better to a batch's working set",
                budget.most(),
                layout.dim
            )));
        }
        let arena = RowArena::growing(layout, now, most)?;
        Ok(Self {
            slots: SlotMap::growing(arena.capacity(), now, policy),
            arena: Arc::new(arena),
            layout,
            bytes_per_row,
            budget,
            budget_rows: now,
            kernels_on_device,
        })
    }

    pub(crate) fn arena(&self) -> &Arc<RowArena> {
        &self.arena
    }
    pub(crate) fn row_bytes(&self) -> u64 {
        self.bytes_per_row
    }

    /// Number of rows in slots of the budget and of the overflow.
    pub(crate) fn row_count(&self) -> u64 {
        u64::from(self.slots.used()) + u64::from(self.slots.overflow_used())
    }

    /// Bytes of the budget charged for an index of `index_bytes` for `indexed_rows` rows on SSD.
    pub(crate) fn charged_bytes(index_bytes: u64, indexed_rows: u64) -> u64 {
        index_bytes.min(indexed_rows * INDEX_BYTES_PER_ROW).saturating_sub(FREE_INDEX_BYTES)
    }

    /// Number of rows that fit the budget next to such an index.
    pub(crate) fn rows_after_index(&self, index_bytes: u64, indexed_rows: u64) -> u64 {
        let charged = Self::charged_bytes(index_bytes, indexed_rows);
        (self.budget.bytes().saturating_sub(charged) / self.bytes_per_row).min(u64::from(self.slots.capacity()))
    }

    /// Prefetches the header of a row into the CPU cache.
    #[inline]
    pub(crate) fn prefetch_header(&self, slot: CacheSlot) {
        prefetch_address(self.arena.row(slot).header);
    }

    /// Prefetches an entire row into the CPU cache.
    #[inline]
    pub(crate) fn prefetch_row(&self, slot: CacheSlot) {
        let row = self.arena.row(slot);
        prefetch_address(row.header);
        prefetch_range(row.vector.cast(), self.layout.vector_floats() * size_of::<f32>());
    }

    /// The token for a table whose kernels run on the device tier; `None` for other tables.
    pub(crate) fn no_kernel_writes(&self) -> Option<NoKernelWrites<'static>> {
        // SAFETY: such a table's kernels use the device's tensors and never this arena, for the lifetime of the table.
        self.kernels_on_device.then(|| unsafe { NoKernelWrites::promise() })
    }

    /// Write access to an unpinned slot; `None` if a plan has pinned it.
    pub(crate) fn unpinned(&mut self, slot: CacheSlot) -> Option<WriteAccess> {
        (!self.slots.is_pinned(slot)).then(|| WriteAccess::new(slot))
    }

    /// Write access to a slot that plans have pinned and none of them uses yet.
    ///
    /// # Safety
    /// No plan that has pinned the slot is active, so that no kernel reads or writes its row. That must hold as long as
    /// the result is used.
    pub(crate) unsafe fn pinned_unused(&self, slot: CacheSlot) -> WriteAccess {
        debug_assert!(slot < self.slots.high_water(), "slot {slot} was never taken");
        WriteAccess::new(slot)
    }

    /// Write access to a slot of a table whose kernels run on the device tier, pinned or not; `None` for other tables.
    pub(crate) fn unused_by_kernels(&self, slot: CacheSlot) -> Option<WriteAccess> {
        self.kernels_on_device.then(|| WriteAccess::new(slot))
    }

    /// The next rows to evict by policy, up to `requested`. Follow with [`HostTier::remove_victims`] or
    /// [`HostTier::keep_victim`].
    pub(crate) fn victims(&mut self, requested: usize) -> Vec<WriteAccess> {
        let arena = &self.arena;
        let prefetch = |slot| prefetch_address(arena.row(slot).header);
        self.slots.victims(requested, |slot| id_in(arena, slot), prefetch).into_iter().map(WriteAccess::new).collect()
    }

    /// Keeps a victim.
    pub(crate) fn keep_victim(&mut self, victim: &WriteAccess) {
        let id = self.id(victim.slot());
        self.slots.keep_victim(victim.slot(), id);
    }

    /// Header and vector part of a row.
    #[inline]
    pub(crate) fn row<'a>(&'a self, access: ReadAccess<'a>) -> RowRef<'a> {
        debug_assert!(access.slot() < self.slots.high_water(), "slot {} was never taken", access.slot());
        let row = self.arena.row(access.slot());
        // SAFETY: slots that were taken are valid in the arena, whose rows have this layout. `access` guarantees that
        // no kernel writes this row. Other writes go only through `&mut self`, or are reads into slots that are
        // LOADING, which are never requested here.
        unsafe {
            RowRef { header: &*row.header, vector: std::slice::from_raw_parts(row.vector, self.layout.vector_floats()) }
        }
    }

    /// Rows of several slots in place.
    pub(crate) fn rows<'a>(&'a self, slots: &'a [CacheSlot], _no_writes: NoKernelWrites<'a>) -> RowList<'a> {
        // SAFETY: as in `row` for each slot, with a token for all of them.
        unsafe { RowList::in_slots(&self.arena, slots, self.layout.vector_floats()) }
    }

    /// Mutable header and vector part of a row.
    fn row_mut(&mut self, access: &WriteAccess) -> (&mut RowHeader, &mut [f32]) {
        let row = self.arena.row(access.slot());
        // SAFETY: the slot was taken, so it is valid in the arena, whose rows have this layout. `access` guarantees
        // that no kernel uses the row, and `self` is borrowed exclusively, so that no other thread reads or writes it
        // either.
        unsafe { (&mut *row.header, std::slice::from_raw_parts_mut(row.vector, self.layout.vector_floats())) }
    }

    /// Replaces the header and the vector part of a row.
    pub(crate) fn overwrite(&mut self, access: &WriteAccess, row: RowRef<'_>) {
        let (header, vector) = self.row_mut(access);
        *header = *row.header;
        vector.copy_from_slice(row.vector);
    }

    /// The id of a row. A kernel may be writing the row's values concurrently.
    #[inline]
    pub(crate) fn id(&self, slot: CacheSlot) -> Id {
        id_in(&self.arena, slot)
    }

    /// The epoch of a row's last training step. A kernel may be writing the row's values concurrently.
    #[inline]
    pub(crate) fn modified_epoch(&self, slot: CacheSlot) -> u32 {
        // SAFETY: the slot is valid in the arena. Only this field is read, and no reference to the entire header is
        // created, because a kernel may be writing the scalar slot next to it. The field itself is written only through
        // `&mut self`.
        unsafe { (&raw const (*self.arena.row(slot).header).modified_epoch).read() }
    }

    /// The id and the metadata of a row. A kernel may be writing the row's values concurrently. Its scalar slot is not
    /// read.
    #[inline]
    pub(crate) fn metadata(&self, slot: CacheSlot) -> RowHeader {
        let header = self.arena.row(slot).header;
        // SAFETY: the slot is valid in the arena. The fields are read one by one, and are written only through `&mut
        // self`; the scalar slot, which a kernel may be writing, is not touched, and no reference to the entire header
        // is created.
        unsafe {
            RowHeader {
                id: (&raw const (*header).id).read(),
                last_step: (&raw const (*header).last_step).read(),
                count: (&raw const (*header).count).read(),
                score: (&raw const (*header).score).read(),
                modified_epoch: (&raw const (*header).modified_epoch).read(),
                scalar: 0.0,
            }
        }
    }

    /// The occupied slots of a range, in order, whose row is not current or was last trained at step `latest` or
    /// before.
    pub(crate) fn trained_until(&self, latest: u64, slots: Range<CacheSlot>) -> Vec<CacheSlot> {
        let mut found = vec![0; slots.len()];
        let mut count = 0;
        for (slot, state) in slots.clone().zip(self.slots.states(slots)) {
            let header = self.arena.row(slot).header;
            prefetch_address(header.wrapping_add(HEADERS_AHEAD));
            let is_wanted = if state.is_current() {
                // SAFETY: the slot has a row, so it is valid in the arena. Only this field is read, as in `metadata`.
                (unsafe { (&raw const (*header).last_step).read() }) <= latest
            } else {
                state.has(RowState::OCCUPIED)
            };
            // Branchless, because the age of rows is unpredictable.
            found[count] = slot;
            count += usize::from(is_wanted);
        }
        found.truncate(count);
        found
    }

    /// Records a training step on a row, see [`RowHeader::touch`]. A kernel of another plan may be writing the row's
    /// values concurrently.
    #[inline]
    pub(crate) fn touch(&mut self, slot: CacheSlot, occurrences: u32, epoch: u32, decay: &mut ScoreDecayTo) {
        let header = self.arena.row(slot).header;
        // SAFETY: the slot is valid in the arena. The metadata is read and written field by field, only through `&mut
        // self`; the scalar slot, which a kernel may be writing, is not touched, and no reference to the entire header
        // is created.
        unsafe {
            let mut meta = RowHeader {
                last_step: (&raw const (*header).last_step).read(),
                count: (&raw const (*header).count).read(),
                score: (&raw const (*header).score).read(),
                ..RowHeader::default()
            };
            meta.touch(occurrences, epoch, decay);
            (&raw mut (*header).last_step).write(meta.last_step);
            (&raw mut (*header).count).write(meta.count);
            (&raw mut (*header).score).write(meta.score);
            (&raw mut (*header).modified_epoch).write(meta.modified_epoch);
        }
    }

    /// Takes an empty slot of the budget; if it has none, one of the overflow if `overflow` is true. Follow with an
    /// insert, or with [`SlotMap::give_back`].
    pub(crate) fn take(&mut self, overflow: bool) -> Result<Option<WriteAccess>> {
        if let Some(slot) = self.slots.take() {
            return Ok(Some(WriteAccess::new(slot)));
        }
        if !overflow {
            return Ok(None);
        }
        self.arena.reserve_overflow(self.slots.overflow_used() + 1)?;
        Ok(Some(WriteAccess::new(self.slots.take_overflow())))
    }

    /// Allocates memory for `rows` more rows: in free slots of the budget, and beyond those in the overflow.
    ///
    /// Errors: `Memory` if the allocation fails. Nothing has changed then.
    pub(crate) fn reserve(&mut self, rows: usize) -> Result<()> {
        let rows = rows.min(u32::MAX as usize) as u32;
        self.open_slots(rows);
        let past = rows.saturating_sub(self.slots.free_slots());
        if past > 0 {
            self.arena.reserve_overflow(self.slots.overflow_used().saturating_add(past))?;
        }
        self.slots.reserve(rows)
    }

    /// Copies a row into a taken slot and adds its id to the index.
    pub(crate) fn insert_row(&mut self, taken: &WriteAccess, row: RowRef<'_>, state: RowState) {
        self.overwrite(taken, row);
        self.slots.insert(taken.slot(), row.header.id, state);
    }

    /// Prepares a taken slot for a row that is about to be read from SSD.
    pub(crate) fn insert_loading(&mut self, taken: &WriteAccess, id: Id) -> CacheSlot {
        let slot = taken.slot();
        self.row_mut(taken).0.id = id;
        self.slots.insert(slot, id, RowState::LOADING.with(RowState::ON_SSD));
        slot
    }

    /// Removes a row and frees its slot. `evicted` is true if the row left to free space; it is passed to the policy.
    pub(crate) fn remove(&mut self, slot: CacheSlot, evicted: bool) {
        let id = self.id(slot);
        self.slots.remove(slot, id, evicted);
        self.shrink_overflow();
    }

    /// Releases the memory of the overflow once no row is in it.
    pub(crate) fn shrink_overflow(&self) {
        if self.slots.overflow_used() == 0 {
            self.arena.shrink_overflow(0);
        }
    }

    /// Removes every row, and releases their memory and shared bytes. Requires that none is pinned or being read.
    pub(crate) fn clear(&mut self, policy: PolicyKind) {
        let capacity = self.slots.capacity();
        self.slots = self.empty_slots(policy);
        self.arena.shrink_overflow(0);
        self.arena.discard(0..capacity);
    }

    /// Moves a row to a taken slot.
    pub(crate) fn relocate(&mut self, from: &WriteAccess, to: &WriteAccess) {
        let (source, target) = (self.arena.row(from.slot()), self.arena.row(to.slot()));
        debug_assert_ne!(from, to);
        // SAFETY: both slots were taken, so they are valid, and they are distinct, because one has a row and the other
        // was empty. No kernel uses either, and `self` is borrowed exclusively.
        unsafe {
            std::ptr::copy_nonoverlapping(source.vector, target.vector, self.layout.vector_floats());
            *target.header = *source.header;
        }
        let id = self.id(to.slot());
        self.slots.relocate(from.slot(), to.slot(), id);
    }

    /// Takes slots for rows and adds the ids to the index: slots of the budget, then of the overflow if `overflow` is
    /// true. Rows that are on SSD are LOADING, and are to be read. The others are PROVISIONAL, and are to be
    /// initialized. `ids` and `on_ssd` are `[n]`, and the tier has none of the ids. Memory for the rows that get slots
    /// must be reserved.
    ///
    /// The slots belong to the first ids; the others get none. The result is an error if an overflow slot could not be
    /// allocated.
    pub(crate) fn admit(&mut self, ids: &[Id], on_ssd: &[bool], overflow: bool) -> (Vec<CacheSlot>, Result<()>) {
        let mut slots = Vec::with_capacity(ids.len());
        self.slots.take_many(ids.len(), &mut slots);
        let mut refused = Ok(());
        while overflow && slots.len() < ids.len() {
            match self.arena.reserve_overflow(self.slots.overflow_used() + 1) {
                Ok(()) => slots.push(self.slots.take_overflow()),
                Err(error) => {
                    refused = Err(error);
                    break;
                }
            }
        }
        let put = self.slots.insert_all_new(&slots, &ids[..slots.len()], RowState::PROVISIONAL);
        assert_eq!(put, slots.len(), "the ids are new to the tier");
        for ((&slot, &id), _) in slots.iter().zip(ids).zip(on_ssd).filter(|(_, there)| **there) {
            self.row_mut(&WriteAccess::new(slot)).0.id = id;
            self.slots.set_state(slot, RowState::LOADING.with(RowState::ON_SSD).with(RowState::OCCUPIED));
        }
        (slots, refused)
    }

    /// Copies rows into slots of the tier and adds the ids to the index: slots of the budget, then of the overflow. The
    /// tier has none of the ids, and memory for all of the rows was [reserved](HostTier::reserve).
    pub(crate) fn insert_rows(&mut self, rows: &[(RowRef<'_>, RowState)]) {
        let slots = self.slots.take_with_overflow(rows.len());
        for (at, (&slot, (row, _))) in slots.iter().zip(rows).enumerate() {
            if let Some(&later) = slots.get(at + ROWS_AHEAD) {
                self.prefetch_row(later);
            }
            self.overwrite(&WriteAccess::new(slot), *row);
        }
        let ids: Vec<Id> = rows.iter().map(|(row, _)| row.header.id).collect();
        let put = self.slots.insert_all_new(&slots, &ids, RowState::default());
        assert_eq!(put, slots.len(), "the ids are new to the tier");
        for (&slot, (_, state)) in slots.iter().zip(rows) {
            self.slots.set_state(slot, state.with(RowState::OCCUPIED));
        }
    }

    /// Removes rows without eviction, and frees their slots. `slots` and `ids` are `[n]`.
    pub(crate) fn remove_batch(&mut self, slots: &[CacheSlot], ids: &[Id]) {
        self.slots.remove_batch(slots, ids);
        self.shrink_overflow();
    }

    /// Removes victims.
    pub(crate) fn remove_victims(&mut self, victims: &[WriteAccess]) {
        let slots: Vec<CacheSlot> = victims.iter().map(WriteAccess::slot).collect();
        let ids: Vec<Id> = slots.iter().map(|&slot| self.id(slot)).collect();
        self.slots.remove_victims(&slots, &ids);
    }

    pub(crate) fn budget(&self) -> &HostBudget {
        &self.budget
    }

    /// Capacity of the budget in rows.
    pub(crate) fn budget_rows(&self) -> u32 {
        self.budget_rows
    }

    fn follow_budget(&mut self) {
        let rows = self.budget.bytes() / self.bytes_per_row;
        self.budget_rows = rows.min(u64::from(self.slots.capacity())) as u32;
    }

    /// Takes missing shared bytes so that the budget fits `rows` rows. Returns true on success; otherwise nothing has
    /// changed.
    pub(crate) fn grow_to(&mut self, rows: u64) -> bool {
        let fits = self.budget.shared().is_some() && rows <= u64::from(self.slots.capacity());
        if !fits || !self.budget.grow(rows * self.bytes_per_row) {
            return false;
        }
        self.follow_budget();
        self.slots.set_limit(self.budget_rows.max(self.slots.limit()));
        true
    }

    /// Returns shared bytes that `rows` rows do not need. Once the slots in use fit the budget, closes the slots beyond
    /// it and returns true: the caller must then move rows from slots above the limit.
    pub(crate) fn shrink_to(&mut self, rows: u64) -> bool {
        self.budget.shrink(rows * self.bytes_per_row);
        self.follow_budget();
        let closes = self.slots.limit() > self.budget_rows && self.slots.used() <= self.budget_rows;
        if closes {
            self.slots.set_limit(self.budget_rows);
        }
        closes
    }

    /// Returns all shared bytes, and empty slots for the tier.
    fn empty_slots(&mut self, policy: PolicyKind) -> SlotMap {
        self.budget.shrink(0);
        self.follow_budget();
        SlotMap::growing(self.slots.capacity(), self.budget_rows, policy)
    }

    /// Opens slots for `rows` more rows, in the budget or beyond it: ids without a row have slots while a batch reads
    /// them. Takes no shared bytes for these.
    fn open_slots(&mut self, rows: u32) {
        if self.budget.shared().is_some() && rows > self.slots.free_slots() {
            self.slots.set_limit(self.slots.used().saturating_add(rows));
        }
    }

    /// Number of rows that could be added, if no other table took shared bytes.
    pub(crate) fn free_rows(&self) -> u64 {
        let used = u64::from(self.slots.used());
        let within_reach = || (self.budget.within_reach() / self.bytes_per_row).min(u64::from(self.slots.capacity()));
        self.budget.shared().map_or(u64::from(self.slots.free_slots()), |_| within_reach().saturating_sub(used))
    }

    /// Number of rows in slots that exceed both the budget and the free shared bytes.
    pub(crate) fn rows_past_budget(&self) -> u32 {
        let past =
            |_| u64::from(self.slots.used()).saturating_sub(self.budget.within_reach() / self.bytes_per_row) as u32;
        self.budget.shared().map_or(0, past)
    }
}

/// Proof that no kernel writes a row of the host tier during `'a`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoKernelWrites<'a>(PhantomData<&'a ()>);

impl<'a> NoKernelWrites<'a> {
    /// Creates the token on the caller's guarantee.
    ///
    /// # Safety
    /// During `'a` no kernel writes a row of the host tier that the token is used with.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn promise() -> Self {
        Self(PhantomData)
    }

    /// Read access to the row in a slot.
    #[inline]
    pub(crate) fn read_access(self, slot: CacheSlot) -> ReadAccess<'a> {
        ReadAccess { slot, proof: self.0 }
    }
}

/// A slot of the host tier whose row no kernel writes during `'a`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadAccess<'a> {
    slot: CacheSlot,
    proof: PhantomData<&'a ()>,
}

impl ReadAccess<'_> {
    #[inline]
    pub(crate) fn slot(self) -> CacheSlot {
        self.slot
    }
}

/// A slot of the host tier whose row no kernel reads or writes: it is empty, or no plan has pinned it, or the table's
/// kernels run on the device tier. It is created under the table's lock and used before that lock is released, because
/// only a plan that has the lock can pin. So it never leaves the operation of the placement that created it:
/// `tools/lint/layers.py` rejects it in any other module.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WriteAccess(CacheSlot);

impl WriteAccess {
    /// Only the host tier creates these, after checking.
    fn new(slot: CacheSlot) -> Self {
        Self(slot)
    }

    #[inline]
    pub(crate) fn slot(&self) -> CacheSlot {
        self.0
    }

    /// Unused rows may be read.
    #[inline]
    pub(crate) fn read_access(&self) -> ReadAccess<'_> {
        ReadAccess { slot: self.0, proof: PhantomData }
    }
}

/// The id of the row in a slot of an arena.
#[inline]
fn id_in(arena: &RowArena, slot: CacheSlot) -> Id {
    // SAFETY: the slot has a row, so it is valid. Only this field is read, and no reference to the entire header is
    // created, because a kernel may be writing the scalar slot next to it. Ids are written under the table's lock,
    // which every user of the tier holds.
    unsafe { (&raw const (*arena.row(slot).header).id).read() }
}

#[cfg(test)]
mod tests;
