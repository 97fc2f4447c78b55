//! Memory for records that are about to be written.

use crate::error::Result;
use crate::memory;
use crate::ssd::classes::MOST_CLASSES;
use crate::ssd::format::end::end_bytes;
use crate::ssd::segment::buffer::{Pool, WAITING};
use crate::ssd::tier::inner::TierInner;

/// The most records that are written while the tier's lock is held once.
pub(crate) const AT_ONCE: usize = 2048;

/// `Memory` unless the system has what so many records of `record_bytes` may take: write buffers, those that wait for the disk included,
/// and room for the footer's entries. It is asked here, because once some of the records are written nobody can be told any more.
pub(crate) fn check_memory(tier: &TierInner, records: usize, record_bytes: usize) -> Result<()> {
    let block_bytes = tier.home.block_bytes;
    // Each stream has a buffer that is not full at the beginning, and one at the end.
    let begun = 2 * (usize::from(MOST_CLASSES) + 1);
    let filled = (records.saturating_mul(record_bytes) / block_bytes).min(WAITING);
    let blocks = Pool::of_process().missing_bytes(records.min(filled + begun), block_bytes);
    let state = tier.view();
    let rows_in = tier.home.geometry.rows_in(&state.highest()) as usize;
    let ends = if filled == 0 { 0 } else { end_bytes(rows_in, block_bytes) };
    let entries: usize = state.open().iter().map(|open| open.entries_to_come(records)).sum();
    drop(state);
    memory::room_or_reserve("write rows to the SSD tier", blocks + ends + entries)
}

/// Where buffers are scarce, keep none that is half filled.
pub(crate) fn spill_if_short(tier: &TierInner) {
    if Pool::of_process().is_short() {
        tier.state().spill();
    }
}
