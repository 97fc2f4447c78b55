//! Removes published states: durably removes their files, then releases their segments.

use crate::error::Result;
use crate::ssd::format::names::state_path;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::state::TierState;

/// Removes the file of the state at `position` (oldest first), durably, then releases its segments.
pub(crate) fn remove_state_at(tier: &TierInner, state: &mut TierState, position: usize) -> Result<()> {
    let Some(token) = state.states().commit_id_at(position) else { return Ok(()) };
    let path = state_path(&tier.context.dir, token);
    let removed = tier.context.engine.remove_file(&path).and_then(|()| tier.context.engine.sync_dir(&tier.context.dir));
    if let Err(error) = removed {
        tier.context.space.fail(error.clone());
        return Err(error);
    }
    state.remove_state(position);
    Ok(())
}

/// Discards the state named `commit_id`, if it is published.
pub(crate) fn forget_published(tier: &TierInner, commit_id: u64) -> Result<()> {
    let _publishing = tier.publishing();
    tier.check_writable()?;
    let mut state = tier.state();
    match state.states().position(commit_id) {
        Some(position) => remove_state_at(tier, &mut state, position),
        None => Ok(()),
    }
}

/// Frees space by discarding the oldest state. If it is the last one, there is nothing to resume until the next
/// publish.
pub(crate) fn drop_oldest_state(tier: &TierInner, state: &mut TierState) -> Result<()> {
    tracing::warn!(
        table = tier.identity.table,
        token = state.states().commit_id_at(0),
        states = state.states().len(),
        free_bytes = tier.context.space.free_bytes(),
        retained_bytes = state.retained_bytes(),
        "an SSD tier gives up its oldest published state, because room is short: raise ssd_bytes, or what was flushed last may not be resumed"
    );
    state.mark_oldest_dropped();
    remove_state_at(tier, state, 0)
}
