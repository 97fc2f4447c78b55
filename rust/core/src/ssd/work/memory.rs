//! Memory for records that are about to be written.

use crate::error::Result;
use crate::memory;
use crate::ssd::classes::MAX_HOTNESS_CLASSES;
use crate::ssd::format::end::max_tail_bytes;
use crate::ssd::segment::buffer::{MAX_WAITING_BUFFERS, WriteBufferPool};
use crate::ssd::tier::inner::TierInner;

/// Maximum number of records that are written while the tier's lock is held once.
pub(crate) const MAX_RECORDS_PER_LOCK: usize = 2048;

/// Returns `Memory` unless memory is available for writing `records` records of `record_bytes`: write buffers,
/// including those being written, and footer entries. It is checked here, because errors cannot be reported after some
/// records are written.
pub(crate) fn check_memory(tier: &TierInner, records: usize, record_bytes: usize) -> Result<()> {
    let block_bytes = tier.context.block_bytes;
    // Each stream has a partially filled buffer at the start, and one at the end.
    let begun = 2 * (usize::from(MAX_HOTNESS_CLASSES) + 1);
    let filled = (records.saturating_mul(record_bytes) / block_bytes).min(MAX_WAITING_BUFFERS);
    let blocks = WriteBufferPool::of_process().missing_bytes(records.min(filled + begun), block_bytes);
    let state = tier.view();
    let rows_in = tier.context.sizing.min_rows_per_segment(&state.highest()) as usize;
    let ends = if filled == 0 { 0 } else { max_tail_bytes(rows_in, block_bytes) };
    let entries: usize = state.open().iter().map(|open| open.added_entries_bytes(records)).sum();
    drop(state);
    memory::check_system_memory_or_reserve("write rows to the SSD tier", blocks + ends + entries)
}

/// Submits half-filled buffers if buffers are scarce.
pub(crate) fn spill_if_short(tier: &TierInner) {
    if WriteBufferPool::of_process().is_short() {
        tier.state().spill();
    }
}
