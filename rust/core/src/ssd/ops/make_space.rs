//! Space for records that are about to be written. Waits for free space on disk: executes the steps of
//! [`next_space_wait_step`] until there is some, or returns an error with the reason. Discards published states, and
//! checks the memory that writing needs.

use std::sync::Arc;

use crate::error::Result;
use crate::runtime::memory;
use crate::ssd::format::segment_file::{max_tail_bytes, state_path};
use crate::ssd::hotness::MAX_HOTNESS_CLASSES;
use crate::ssd::ops::compaction;
use crate::ssd::ops::scan::read_segment_early;
use crate::ssd::segment::write_buffer::{MAX_WAITING_BUFFERS, WriteBufferPool};
use crate::ssd::space::compaction_choice::CompactionChoice;
use crate::ssd::space::wait::{SpaceWaitStep, SpaceWaitView, next_space_wait_step};
use crate::ssd::store::snapshot::SsdSnapshotState;
use crate::ssd::store::state::TierState;
use crate::ssd::store::{TierInner, read_only_error};

/// Waits until rows from RAM can be appended: for compaction, for readers of removed files, and if neither helps by
/// discarding published states. Must be called without any lock.
pub(crate) fn wait_for_space(tier: &Arc<TierInner>) -> Result<()> {
    // A disk that failed to read for compaction may have recovered: a thread that waits retries it.
    tier.view().segments().iter().filter(|segment| segment.is_damaged()).for_each(|segment| segment.retry_damaged());
    let (mut last, mut waits) = (None, false);
    loop {
        let generation = tier.context.space.generation();
        tier.check_writable()?;
        // A fetch pins the files that it reads, and possibly no other thread submits it.
        tier.reads.submit();
        let mut state = tier.state();
        let view = space_wait_view(tier, &mut state, generation);
        let mut step = next_space_wait_step(&view);
        if step == SpaceWaitStep::CancelScans && !tier.scan_consumers.cancel_waiting() {
            step = next_space_wait_step(&SpaceWaitView { scan_consumers: 0, ..view });
        }
        if last.replace(step) != Some(step) {
            tracing::debug!(table = tier.identity.table, ?step, ?view, "somebody waits for room in an SSD tier");
        }
        match step {
            SpaceWaitStep::Proceed => return Ok(()),
            SpaceWaitStep::Retry => continue,
            SpaceWaitStep::SealOpen => {
                if let Some(stream) = state.open_stream_holding_space() {
                    state.seal(stream);
                }
                continue;
            }
            SpaceWaitStep::DropState => {
                drop_oldest_state(tier, &mut state)?;
                continue;
            }
            SpaceWaitStep::Compact => {
                drop(state);
                compaction::schedule(tier);
            }
            SpaceWaitStep::ReadForSnapshot => {
                drop(state);
                if read_segment_early(tier) {
                    continue;
                }
            }
            // Cancelled scans stop as soon as they notice.
            SpaceWaitStep::CancelScans | SpaceWaitStep::Wait => drop(state),
            SpaceWaitStep::ReadOnly
            | SpaceWaitStep::FileRemovalFailed
            | SpaceWaitStep::SegmentUnreadable
            | SpaceWaitStep::Full => {
                return Err(space_error(tier, &state, step));
            }
        }
        if !std::mem::replace(&mut waits, true) {
            log_wait(tier, &view);
        }
        tier.context.space.wait_change(generation);
    }
}

/// Counts a wait, and logs it unless a wait was logged recently.
fn log_wait(tier: &TierInner, view: &SpaceWaitView) {
    let waits = &tier.counters.space_waits;
    if waits.begin() {
        tracing::warn!(
            table = tier.identity.table,
            waits = waits.count(),
            free_bytes = view.free_bytes,
            needed_bytes = view.needed_bytes,
            "a table waits until its SSD tier has room: raise ssd_bytes where this is often so"
        );
    }
}

/// Waits for free space in the middle of a call that is partially done if `is_partial`. If there is none then, the call
/// cannot be completed, and the tier becomes read-only. Only corrupted segments that cannot be compacted lead there.
pub(crate) fn wait_for_more_space(tier: &Arc<TierInner>, is_partial: bool) -> Result<()> {
    wait_for_space(tier).inspect_err(|error| {
        if is_partial {
            tier.context.space.fail(error.clone());
        }
    })
}

/// Returns the view of the tier for [`next_space_wait_step`]. `generation` was read before.
///
/// The order matters, because files are removed and scans end without the tier's lock. Pending space is checked first,
/// and again after every other source of space: an operation that ends between two other checks would be missed by
/// both. Failed removals are checked afterwards, because then the result of every removal in progress is known.
fn space_wait_view(tier: &TierInner, state: &mut TierState, generation: u64) -> SpaceWaitView {
    let space = &tier.context.space;
    let was_coming = is_space_pending(tier, state);
    state.reap();
    state.prune_tombstones();
    let (free_bytes, needed_bytes) = (space.free_bytes(), tier.bytes_needed(state));
    let is_compacting = free_bytes < needed_bytes
        && (state.moving() > 0 || compaction::next_choice(tier, state) != CompactionChoice::Nothing);
    // Files that were removed since the check of the free bytes make fewer segments worth moving.
    let has_changed = space.generation() != generation;
    let first = SpaceWaitView { free_bytes, needed_bytes, is_compacting, has_changed, ..SpaceWaitView::default() };
    if next_space_wait_step(&first) != SpaceWaitStep::Full {
        // Usually this decides. The rest iterates over all segments several times under the tier's lock.
        return first;
    }
    let compaction = compaction::compaction_view(tier, state);
    let is_unreadable = |slot| state.segments().in_slot(slot).is_some_and(|segment| segment.damage().is_some());
    SpaceWaitView {
        has_failed: space.has_failed(),
        open_segment_holds_space: state.open_stream_holding_space().is_some(),
        snapshot_is_unread: state.snapshot().is_some_and(SsdSnapshotState::has_unread),
        scan_consumers: tier.scan_consumers.len(),
        states_hold_space: compaction.states_hold_space(compaction::segment_views(state)),
        space_is_pending: was_coming || is_space_pending(tier, state),
        file_removal_failed: space.removal_error().is_some(),
        segment_is_unreadable: compaction::segment_views(state)
            .any(|s| s.utilization(&compaction) < 1.0 && is_unreadable(s.slot)),
        ..first
    }
}

/// True if an operation is in progress that frees space or enables compaction to free some: scans, footers being
/// written, files being removed.
fn is_space_pending(tier: &TierInner, state: &TierState) -> bool {
    let segments = || state.segments().iter();
    let held: u64 = segments().map(|segment| segment.held_bytes()).sum();
    let scanning = segments().any(|segment| segment.has_pending_scans());
    let sealing = segments().any(|segment| segment.sealed().is_none() && state.open().find(segment).is_none());
    scanning || sealing || tier.context.space.pending_free_bytes(held) > 0
}

/// Returns the error of a step.
fn space_error(tier: &TierInner, state: &TierState, step: SpaceWaitStep) -> crate::Error {
    let space = &tier.context.space;
    let full = || tier.capacity_error(state.rows(), 0);
    match step {
        SpaceWaitStep::ReadOnly => space.failed().map_or_else(full, |cause| read_only_error(&cause)),
        SpaceWaitStep::FileRemovalFailed => {
            let stuck = "the SSD tier has no room left, because files it no longer needs could not be removed";
            space.removal_error().map_or_else(full, |cause| cause.context(stuck))
        }
        SpaceWaitStep::SegmentUnreadable => {
            let unread = "the SSD tier has no room left, because a segment with dead records cannot be read";
            let view = compaction::compaction_view(tier, state);
            let wasteful = compaction::segment_views(state).filter(|s| s.utilization(&view) < 1.0);
            let mut segments = wasteful.filter_map(|s| state.segments().in_slot(s.slot));
            segments.find_map(|segment| segment.damage()).map_or_else(full, |cause| cause.context(unread))
        }
        _ => full(),
    }
}

/// Removes the file of the state at `position` (oldest first), durably, then releases its segments.
pub(crate) fn remove_state_at(tier: &TierInner, state: &mut TierState, position: usize) -> Result<()> {
    let Some(commit_id) = state.states().commit_id_at(position) else { return Ok(()) };
    let path = state_path(&tier.context.dir, commit_id);
    let removed = tier.context.engine.remove_file(&path).and_then(|()| tier.context.engine.sync_dir(&tier.context.dir));
    if let Err(error) = removed {
        tier.context.space.fail(error.clone());
        return Err(error);
    }
    state.states_mut().remove(position);
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
fn drop_oldest_state(tier: &TierInner, state: &mut TierState) -> Result<()> {
    tracing::warn!(
        table = tier.identity.table,
        commit_id = state.states().commit_id_at(0),
        states = state.states().len(),
        free_bytes = tier.context.space.free_bytes(),
        retained_bytes = state.retained_bytes(),
        "an SSD tier drops its oldest published state to free space: raise ssd_bytes, or the last flush may not be resumed"
    );
    state.states_mut().mark_oldest_dropped();
    remove_state_at(tier, state, 0)
}

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
