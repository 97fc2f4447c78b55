//! Waiting for room: does what [`next_for_room`] decides, until there is room or an error says why there is none.

use std::sync::Arc;

use crate::error::Result;
use crate::ssd::room::compaction::Choice;
use crate::ssd::room::waiting::{Step, View, next_for_room};
use crate::ssd::tier::inner::{TierInner, read_only};
use crate::ssd::tier::moment::Moment;
use crate::ssd::tier::state::TierState;
use crate::ssd::work::compact;
use crate::ssd::work::moment::read_before_turn;
use crate::ssd::work::states::give_up_oldest;

/// Wait until rows from RAM can be taken: for compaction, for readers of files that are gone, and when neither helps by giving up what only
/// published states need. To be called without any lock.
pub(crate) fn wait_for_room(tier: &Arc<TierInner>) -> Result<()> {
    // A disk that failed to read for compaction may read again: whoever waits has it tried once more.
    tier.view().segments().iter().filter(|segment| segment.is_damaged()).for_each(|segment| segment.forgive());
    let (mut last, mut waits) = (None, false);
    loop {
        let generation = tier.home.space.generation();
        tier.check_writable()?;
        // A fetch keeps the files that it reads, and nobody else may be there to submit it.
        tier.reads.submit();
        let mut state = tier.state();
        let view = look(tier, &mut state, generation);
        let mut step = next_for_room(&view);
        if step == Step::EndScans && !tier.takers.give_way() {
            step = next_for_room(&View { takers: 0, ..view });
        }
        if last.replace(step) != Some(step) {
            tracing::debug!(table = tier.identity.table, ?step, ?view, "somebody waits for room in an SSD tier");
        }
        match step {
            Step::Go => return Ok(()),
            Step::LookAgain => continue,
            Step::CloseOpen => {
                if let Some(stream) = state.open_in_the_way() {
                    state.seal(stream);
                }
                continue;
            }
            Step::GiveUpState => {
                give_up_oldest(tier, &mut state)?;
                continue;
            }
            Step::Compact => {
                drop(state);
                compact::schedule(tier);
            }
            Step::ReadForMoment => {
                drop(state);
                if read_before_turn(tier) {
                    continue;
                }
            }
            // Scans that were asked to end do so as soon as they notice.
            Step::EndScans | Step::Wait => drop(state),
            Step::ReadOnly | Step::FilesAreStuck | Step::SegmentIsUnreadable | Step::Full => {
                return Err(refusal(tier, &state, step));
            }
        }
        if !std::mem::replace(&mut waits, true) {
            say_wait(tier, &view);
        }
        tier.home.space.wait_change(generation);
    }
}

/// Count a wait, and say it where that was not said lately.
fn say_wait(tier: &TierInner, view: &View) {
    let waits = &tier.counters.room_waits;
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

/// Wait for room for a call of which a part may be `begun`. Where there is none then, not all of the call can be done, and the tier only
/// reads from now on. Only damaged segments that cannot be compacted lead there.
pub(crate) fn wait_for_more_room(tier: &Arc<TierInner>, begun: bool) -> Result<()> {
    wait_for_room(tier).inspect_err(|error| {
        if begun {
            tier.home.space.fail(error.clone());
        }
    })
}

/// The tier as [`next_for_room`] sees it, where `generation` was read before.
///
/// The order matters, because files go and scans end without the tier's lock. Whether room is coming is looked at first, and again after
/// all that could make room: what comes to its end between two other looks would be missed by both. Whether a file could not be removed is
/// looked at after that, because then it is known of every file that was going.
fn look(tier: &TierInner, state: &mut TierState, generation: u64) -> View {
    let space = &tier.home.space;
    let was_coming = room_is_coming(tier, state);
    state.reap();
    state.prune_tombstones();
    let (free_bytes, needed_bytes) = (space.free_bytes(), tier.bytes_needed(state));
    let is_compacting =
        free_bytes < needed_bytes && (state.moving() > 0 || compact::next(tier, state) != Choice::Nothing);
    // Files that went since the look at the free bytes make fewer segments worth moving.
    let has_changed = space.generation() != generation;
    let first = View { free_bytes, needed_bytes, is_compacting, has_changed, ..View::default() };
    if next_for_room(&first) != Step::Full {
        // This is decided already, as it mostly is. What follows walks over all segments several times under the tier's lock.
        return first;
    }
    let compaction = compact::view_of(tier, state);
    let is_unreadable = |slot| state.segments().in_slot(slot).is_some_and(|segment| segment.damage().is_some());
    View {
        has_failed: space.has_failed(),
        open_in_the_way: state.open_in_the_way().is_some(),
        moment_is_unread: state.moment().is_some_and(Moment::is_unread),
        takers: tier.takers.len(),
        states_are_in_the_way: compaction.states_are_in_the_way(compact::segments_of(state)),
        room_is_coming: was_coming || room_is_coming(tier, state),
        file_is_stuck: space.lost().is_some(),
        segment_is_unreadable: compact::segments_of(state).any(|s| s.share(&compaction) < 1.0 && is_unreadable(s.slot)),
        ..first
    }
}

/// Whether something is under way that makes room, or lets compaction make some: scans, footers on their way to disk, files that go.
fn room_is_coming(tier: &TierInner, state: &TierState) -> bool {
    let segments = || state.segments().iter();
    let held: u64 = segments().map(|segment| segment.held_bytes()).sum();
    let scanning = segments().any(|segment| segment.is_to_be_scanned());
    let sealing = segments().any(|segment| segment.sealed().is_none() && state.open().of(segment).is_none());
    scanning || sealing || tier.home.space.leaving_bytes(held) > 0
}

/// The error that a step says.
fn refusal(tier: &TierInner, state: &TierState, step: Step) -> crate::Error {
    let space = &tier.home.space;
    let full = || tier.full(state.rows(), 0);
    match step {
        Step::ReadOnly => space.failed().map_or_else(full, |cause| read_only(&cause)),
        Step::FilesAreStuck => {
            let stuck = "the SSD tier has no room left, because files it no longer needs could not be removed";
            space.lost().map_or_else(full, |cause| cause.context(stuck))
        }
        Step::SegmentIsUnreadable => {
            let unread = "the SSD tier has no room left, because a segment with dead records cannot be read";
            let view = compact::view_of(tier, state);
            let wasteful = compact::segments_of(state).filter(|s| s.share(&view) < 1.0);
            let mut segments = wasteful.filter_map(|s| state.segments().in_slot(s.slot));
            segments.find_map(|segment| segment.damage()).map_or_else(full, |cause| cause.context(unread))
        }
        _ => full(),
    }
}
