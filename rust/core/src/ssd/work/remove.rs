//! Removes rows from the tier by id, with a tombstone each, or all rows.

use std::sync::Arc;

use crate::error::Result;
use crate::ssd::format::segment::SegmentContent;
use crate::ssd::index::PREFETCH_DISTANCE;
use crate::ssd::segment::buffer::WriteBufferPool;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::state::TierState;
use crate::ssd::tier::streams::SegmentStream;
use crate::ssd::work::compact;
use crate::ssd::work::make_room::wait_for_more_space;
use crate::ssd::work::memory::{MAX_RECORDS_PER_LOCK, check_memory, spill_if_short};
use crate::types::Id;

/// See [`SsdTier::remove`](crate::ssd::SsdTier::remove).
pub(crate) fn remove(tier: &Arc<TierInner>, ids: &[Id]) -> Result<()> {
    let mut last = None;
    let removed = remove_where(tier, ids, |_, _| true, |at| last = Some(at));
    if let (Err(_), Some(last), true) = (&removed, last, tier.context.space.has_failed()) {
        // The removed rows cannot be restored, because their records may be gone too. So the others are removed as
        // well.
        remove_without_tombstones(tier, &ids[last + 1..]);
        return Ok(());
    }
    removed
}

/// Removes present ids without tombstones, from a read-only tier: it publishes no further state that would need them.
pub(crate) fn remove_without_tombstones(tier: &TierInner, ids: &[Id]) {
    let mut state = tier.state();
    for &id in ids {
        state.remove_without_tombstone(id);
    }
    state.count_dead();
}

/// Removes those of `ids` that are present and for which `is_current` returns true, with a tombstone each. Calls
/// `on_removed` with the position of each removed id, even if an error follows.
pub(crate) fn remove_where(
    tier: &Arc<TierInner>,
    ids: &[Id],
    is_current: impl Fn(&TierState, usize) -> bool,
    mut on_removed: impl FnMut(usize),
) -> Result<()> {
    tier.check_writable()?;
    check_memory(tier, ids.len(), tier.context.schema.max_record_bytes(SegmentContent::Tombstones))?;
    let mut done = 0;
    while done < ids.len() {
        WriteBufferPool::of_process().throttle();
        let mut state = tier.state();
        if !tier.prepare_stream(&mut state, SegmentStream::Tombstones)? {
            drop(state);
            wait_for_more_space(tier, done > 0)?;
            continue;
        }
        ids[done..].iter().take(PREFETCH_DISTANCE).for_each(|&id| state.index().prefetch(id));
        for (at, &id) in ids.iter().enumerate().skip(done).take(MAX_RECORDS_PER_LOCK) {
            if state.is_full(SegmentStream::Tombstones) {
                break;
            }
            if let Some(&later) = ids.get(at + PREFETCH_DISTANCE) {
                state.index().prefetch(later);
            }
            done += 1;
            if is_current(&state, at) && state.write_tombstone(id) {
                on_removed(at);
            }
        }
        state.count_dead();
        state.reap();
        compact::schedule_if_worthwhile(tier, &state);
    }
    spill_if_short(tier);
    Ok(())
}

/// Removes all rows.
pub(crate) fn clear(tier: &TierInner) -> Result<()> {
    tier.check_writable()?;
    let _publishing = tier.publishing();
    let _compacting = tier.pause_compaction();
    tier.state().clear();
    Ok(())
}
