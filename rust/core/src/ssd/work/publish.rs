//! Publishing: everything so far, durable as one state. And the end of a tier, which publishes nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::ssd::format::state::{SegmentDescriptor, StateFile};
use crate::ssd::identity::StateCounters;
use crate::ssd::segment::file::Segment;
use crate::ssd::tier::inner::{TierInner, read_only_error};
use crate::ssd::tier::states::PublishedState;
use crate::ssd::work::compact;
use crate::ssd::work::make_room::wait_for_space;
use crate::ssd::work::states::remove_state_at;
use crate::sync::RwLockWriteGuard;

/// States that are kept.
const MAX_STATES: usize = 2;

/// The token of a state: `requested`, or the next even one. `Input` where `last`, the newest state's, is not smaller.
fn choose_commit_id(requested: Option<u64>, last: Option<u64>) -> Result<u64> {
    let next = || last.unwrap_or(0).checked_add(2).map(|next| next & !1);
    let refused = |token: String| {
        let last = last.unwrap_or(0);
        Error::new(Kind::Input, format!("token = {token}: a state has the token {last} already, give a larger one"))
    };
    let token = requested.or_else(next).ok_or_else(|| refused("the next one".to_owned()))?;
    if last.is_some_and(|last| token <= last) { Err(refused(token.to_string())) } else { Ok(token) }
}

/// Publish everything so far:
///
/// 1. Close the open segments and name the current set, which fixes the state.
/// 2. Wait until the writers have written all of it, and sync it.
/// 3. Sync the directory, then publish the state's file.
/// 4. Remove the file of the state before the one before, then let go of its segments.
pub(crate) fn publish(
    tier: &Arc<TierInner>,
    commit_id: Option<u64>,
    counters: StateCounters,
    metadata: Vec<u8>,
) -> Result<()> {
    let _publishing = tier.publishing();
    tier.check_writable()?;
    let (token, published, write_seq, rows) = {
        // No state names a segment that is being emptied beside the copies of its rows.
        let _compacting = pause_compaction_with_space(tier)?;
        let mut state = tier.state();
        let token = choose_commit_id(commit_id, state.states().last_commit_id())?;
        let (segments, write_seq, rows) = state.seal_current_set();
        (token, PublishedState::pin(token, segments), write_seq, rows)
    };
    let durable =
        catch_unwind(AssertUnwindSafe(|| make_durable(tier, &published, (write_seq, rows), counters, metadata)));
    let failed = match durable {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some((error.clone(), error)),
        Err(panic) => {
            let cause = Error::panicked("publishing", &*panic);
            Some((read_only_error(&cause), cause))
        }
    };
    if let Some((error, cause)) = failed {
        // The state's file may be there and may last, as after a rename whose sync failed. So what it names stays held, and on disk.
        tier.context.space.fail(cause);
        return Err(error);
    }
    tracing::debug!(
        table = tier.identity.table,
        token,
        rows,
        segments = published.segments.len(),
        "published a state of an SSD tier"
    );
    let mut state = tier.state();
    state.add_state(published);
    state.reap();
    state.prune_tombstones();
    while state.states().len() > MAX_STATES {
        remove_state_at(tier, &mut state, 0)?;
    }
    compact::schedule_if_worthwhile(tier, &state);
    Ok(())
}

/// Wait until no segment's rows are being moved, and until compaction does not count on the room in open segments, which closing them gives
/// up. No rows are moved as long as the guard is held.
pub(crate) fn pause_compaction_with_space(tier: &Arc<TierInner>) -> Result<RwLockWriteGuard<'_, ()>> {
    loop {
        let still = tier.pause_compaction();
        if tier.context.space.free_bytes() >= tier.reserved_bytes(&tier.view()) {
            return Ok(still);
        }
        drop(still);
        if wait_for_space(tier).is_err() {
            tier.check_writable()?;
            // What keeps the room, a segment that cannot be read, stands in the way of no state.
            return Ok(tier.pause_compaction());
        }
    }
}

/// Wait until the writers have written these segments, which are closed and held, and sync them; how a state names them.
pub(crate) fn make_segments_durable(tier: &TierInner, segments: &[Arc<Segment>]) -> Result<Vec<SegmentDescriptor>> {
    let mut named = Vec::with_capacity(segments.len());
    for segment in segments {
        named.push(wait_for_writers(tier, || segment.descriptor())?);
        segment.sync(tier.context.workers);
    }
    for segment in segments {
        wait_for_writers(tier, || segment.is_synced().then_some(()))?;
    }
    Ok(named)
}

fn make_durable(
    tier: &TierInner,
    published: &PublishedState,
    (write_seq, rows): (u64, u64),
    counters: StateCounters,
    metadata: Vec<u8>,
) -> Result<()> {
    let segments = make_segments_durable(tier, &published.segments)?;
    tier.context.engine.sync_dir(&tier.context.dir)?;
    let file = StateFile {
        token: published.commit_id,
        identity: tier.identity.clone(),
        vector_floats: tier.layout.vector_floats() as u64,
        scalar_slot: tier.layout.scalar_slot,
        counters,
        write_seq,
        rows,
        segments,
        metadata,
    };
    file.write(&*tier.context.engine, &tier.context.dir)
}

/// Wait for something that the writers do.
fn wait_for_writers<T>(tier: &TierInner, done: impl Fn() -> Option<T>) -> Result<T> {
    loop {
        let generation = tier.context.space.generation();
        if let Some(done) = done() {
            return Ok(done);
        }
        if let Some(cause) = tier.context.space.failed() {
            return Err(read_only_error(&cause));
        }
        tier.context.space.wait_change(generation);
    }
}

/// Stop writing. What is in buffers is written out, and nothing is published. A forked child does nothing: the tier is its parent's, and
/// threads that the child has not may hold its locks for ever.
pub(crate) fn close(tier: &TierInner) -> Result<()> {
    if tier.context.workers.check_process().is_err() {
        return Ok(());
    }
    let _publishing = tier.publishing();
    {
        let mut state = tier.state();
        if state.is_closed() {
            return Ok(());
        }
        state.close();
    }
    drop(tier.pause_compaction());
    tier.context.space.wait_idle();
    tier.context.space.remove_reusable_files(None, |path| tier.context.engine.remove_file(path));
    tier.context.space.close();
    tier.unlock_directory();
    tier.context.space.failed().map_or(Ok(()), |cause| Err(read_only_error(&cause)))
}
