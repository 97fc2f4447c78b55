//! Rows that leave the tier by id, each with a tombstone, and all rows at once.

use std::sync::Arc;

use crate::error::Result;
use crate::ssd::format::segment::Content;
use crate::ssd::index::AHEAD;
use crate::ssd::segment::buffer::Pool;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::state::TierState;
use crate::ssd::tier::streams::Stream;
use crate::ssd::work::compact;
use crate::ssd::work::make_room::wait_for_more_room;
use crate::ssd::work::memory::{AT_ONCE, check_memory, spill_if_short};
use crate::types::Id;

/// See [`SsdTier::remove`](crate::ssd::SsdTier::remove).
pub(crate) fn remove(tier: &Arc<TierInner>, ids: &[Id]) -> Result<()> {
    let mut last = None;
    let removed = forget(tier, ids, |_, _| true, |at| last = Some(at));
    if let (Err(_), Some(last), true) = (&removed, last, tier.home.space.has_failed()) {
        // Those that are gone cannot come back, because their records may be gone too. So the others go as well.
        remove_unwritten(tier, &ids[last + 1..]);
        return Ok(());
    }
    removed
}

/// Remove ids that are here without tombstones, from a tier that only reads: it publishes no state any more that would need them.
pub(crate) fn remove_unwritten(tier: &TierInner, ids: &[Id]) {
    let mut state = tier.state();
    for &id in ids {
        state.remove_unwritten(id);
    }
    state.count_buried();
}

/// Remove those of `ids` that are here and for which `still` says true, each with a tombstone. `gone` is told the position of each that is
/// gone, also where an error follows.
pub(crate) fn forget(
    tier: &Arc<TierInner>,
    ids: &[Id],
    still: impl Fn(&TierState, usize) -> bool,
    mut gone: impl FnMut(usize),
) -> Result<()> {
    tier.check_writable()?;
    check_memory(tier, ids.len(), tier.home.schema.most_record_bytes(Content::Tombstones))?;
    let mut done = 0;
    while done < ids.len() {
        Pool::of_process().throttle();
        let mut state = tier.state();
        if !tier.ready(&mut state, Stream::Tombstones)? {
            drop(state);
            wait_for_more_room(tier, done > 0)?;
            continue;
        }
        ids[done..].iter().take(AHEAD).for_each(|&id| state.index().prefetch(id));
        for (at, &id) in ids.iter().enumerate().skip(done).take(AT_ONCE) {
            if state.is_full(Stream::Tombstones) {
                break;
            }
            if let Some(&later) = ids.get(at + AHEAD) {
                state.index().prefetch(later);
            }
            done += 1;
            if still(&state, at) && state.write_tombstone(id) {
                gone(at);
            }
        }
        state.count_buried();
        state.reap();
        compact::if_worthwhile(tier, &state);
    }
    spill_if_short(tier);
    Ok(())
}

/// Forget all rows.
pub(crate) fn clear(tier: &TierInner) -> Result<()> {
    tier.check_writable()?;
    let _publishing = tier.publishing();
    let _compacting = tier.not_compacting();
    tier.state().clear();
    Ok(())
}
