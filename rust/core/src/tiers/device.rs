//! The device tier: headers, slots, pins and policy of the rows on a device. The values of the rows are in torch
//! tensors, which only Python accesses.

use crate::config::PolicyKind;
use crate::error::Result;
use crate::rows::RowHeader;
use crate::runtime::memory;
use crate::runtime::simd::prefetch;
use crate::slots::{RowState, SlotMap};
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Reads rows of the device tier into RAM. Called without the table's lock, by a caller that prevents kernels from
/// changing the rows. So an implementation may use the table, but not its rows (`State`), and may drop plans and
/// snapshots.
pub trait DeviceRowReader: Send + Sync {
    /// Copies the rows in `slots` (`[n]`) to `vectors` (`[n, V]`) and their scalar slots to `scalars` (`[n]`, zeros if
    /// the layout has none).
    fn gather(&self, slots: &[CacheSlot], vectors: &mut [f32], scalars: &mut [f32]) -> Result<()>;
}

/// The state of one table's rows on a device, without their values. Used under the lock of the table.
#[derive(Debug)]
pub(crate) struct DeviceTier {
    pub(crate) slots: SlotMap,
    headers: Vec<RowHeader>,
    /// Victims whose rows are being read for their demotion, ascending. They are claimed, and the policy has forgotten
    /// them. Each is still the current copy of its row: an operation that requires the row before the demotion removes
    /// it from this list.
    leaving: Vec<CacheSlot>,
}

impl DeviceTier {
    pub(crate) fn new(rows: u32, policy: PolicyKind) -> Self {
        Self { slots: SlotMap::new(rows, policy), headers: Vec::new(), leaving: Vec::new() }
    }

    pub(crate) fn header(&self, slot: CacheSlot) -> &RowHeader {
        &self.headers[slot as usize]
    }

    pub(crate) fn header_mut(&mut self, slot: CacheSlot) -> &mut RowHeader {
        let needed = slot as usize + 1;
        if self.headers.len() < needed {
            self.headers.resize(needed, RowHeader::default());
        }
        &mut self.headers[slot as usize]
    }

    /// Number of rows in slots of the budget and of the overflow.
    pub(crate) fn row_count(&self) -> u64 {
        u64::from(self.slots.used()) + u64::from(self.slots.overflow_used())
    }

    /// Allocates memory for the metadata of `rows` more rows.
    pub(crate) fn reserve(&mut self, rows: usize) -> Result<()> {
        self.slots.reserve(rows.min(u32::MAX as usize) as u32)?;
        let slots = self.slots.high_water() as usize + rows;
        let more = slots.saturating_sub(self.headers.len());
        memory::reserve(&mut self.headers, "keep track of device rows", more)
    }

    pub(crate) fn id(&self, slot: CacheSlot) -> Id {
        self.header(slot).id
    }

    /// The slot of a row that is on the device. `NO_SLOT` also for a row that has a slot here and was not scattered
    /// into it yet.
    pub(crate) fn slot_with_row(&self, id: Id) -> CacheSlot {
        let slot = self.slots.get(id);
        if slot != NO_SLOT && self.slots.state(slot).has(RowState::LOADING) { NO_SLOT } else { slot }
    }

    /// The rows to evict next, up to `requested`; see [`SlotMap::victims`].
    pub(crate) fn victims(&mut self, requested: usize) -> Vec<CacheSlot> {
        let headers = &self.headers;
        self.slots.victims(requested, |slot| headers[slot as usize].id, |slot| prefetch(headers, slot as usize))
    }

    /// Marks victims that stay until they were read. [`DeviceTier::take_leaving`] returns them then.
    pub(crate) fn mark_leaving(&mut self, victims: &[CacheSlot]) {
        self.leaving.extend(victims);
        self.leaving.sort_unstable();
    }

    /// Takes the victims that were to leave and were not requested since, ascending. Follow as after
    /// [`DeviceTier::victims`].
    pub(crate) fn take_leaving(&mut self) -> Vec<CacheSlot> {
        std::mem::take(&mut self.leaving)
    }

    /// Keeps a row that was to leave, if it is one.
    #[inline]
    pub(crate) fn keep_leaving(&mut self, slot: CacheSlot) {
        if !self.leaving.is_empty()
            && let Ok(at) = self.leaving.binary_search(&slot)
        {
            self.leaving.remove(at);
            self.keep_victim(slot);
        }
    }

    /// Keeps a victim.
    pub(crate) fn keep_victim(&mut self, slot: CacheSlot) {
        self.slots.keep_victim(slot, self.id(slot));
    }

    /// Removes the row of `id` from its slot, which no plan has pinned.
    pub(crate) fn remove(&mut self, slot: CacheSlot, id: Id) {
        self.keep_leaving(slot);
        self.slots.remove(slot, id, false);
    }

    /// Removes every row. Requires that none is pinned.
    pub(crate) fn clear(&mut self, policy: PolicyKind) {
        *self = Self::new(self.slots.capacity(), policy);
    }

    /// Prefetches the header of a row into the CPU cache.
    #[inline]
    pub(crate) fn prefetch_header(&self, slot: CacheSlot) {
        prefetch(&self.headers, slot as usize);
    }

    /// Number of slots that the tensors must have: those of the budget, and those of the overflow in use.
    pub(crate) fn required_slots(&self) -> u32 {
        if self.slots.overflow_used() == 0 { self.slots.capacity() } else { self.slots.high_water() }
    }
}
