//! Progress of a sweep, and the time limits of its slices on SSD, so that training hardly slows down.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cache::placement::SweepMatcher;
use crate::ssd::SsdExpiryCursor;
use crate::types::{CacheSlot, Id};

/// A slice may take 1/`SHARE` of the time since the previous slice.
const SHARE: u32 = 16;

/// A sweep that has not removed all of its expired rows yet.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own, and all combinations occur")]
pub(crate) struct SweepProgress {
    pub(super) matcher: Arc<SweepMatcher>,
    pub(super) host: SlotRound,
    pub(super) device: SlotRound,
    pub(super) ssd: SsdExpiryCursor,
    pub(super) pace: SweepPace,
    /// True if the sweep replaced an unfinished one and continues from its position. With very frequent sweeps none
    /// would finish RAM, and the SSD tier would never be visited. Such a sweep therefore visits SSD in parallel with
    /// RAM, and once more after RAM.
    pub(super) is_carried: bool,
    /// True if the sweep has visited all slots of the tiers in RAM.
    pub(super) ram_passed: bool,
    /// True if the sweep has visited all tiers. Then only rows of `deferred` may be expired.
    pub(super) passed: bool,
    /// Rows that could not be matched when their slot was visited, or that moved since: rows of active plans and rows
    /// that are being read.
    pub(super) deferred: Vec<Id>,
    /// True if rows were added to the table since the start. The sweep does not match them.
    pub(super) rows_added: bool,
    /// Number of expired rows of the table at the start.
    pub(super) expired_before: u64,
}

impl SweepProgress {
    /// A sweep that continues from the position of `before`, which it replaces, in tiers with `(host_slots,
    /// device_slots)` slots.
    pub(super) fn after(
        before: Option<Self>,
        matcher: SweepMatcher,
        (host_slots, device_slots): (u32, u32),
        expired_before: u64,
    ) -> Self {
        let is_carried = before.as_ref().is_some_and(|before| !before.passed);
        let (host, device, ssd, pace) =
            before.map_or_else(Default::default, |before| (before.host, before.device, before.ssd, before.pace));
        Self {
            matcher: Arc::new(matcher),
            host: host.around(host_slots),
            device: device.around(device_slots),
            ssd: if is_carried { ssd } else { SsdExpiryCursor::default() },
            pace,
            is_carried,
            ram_passed: false,
            passed: false,
            deferred: Vec::new(),
            rows_added: false,
            expired_before,
        }
    }

    /// True if slots of tiers in RAM remain.
    pub(super) fn is_in_ram(&self) -> bool {
        self.host.remaining > 0 || self.device.remaining > 0
    }
}

/// One pass over the slots of a tier.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SlotRound {
    pub(super) next: CacheSlot,
    /// Number of slots of the tier when the round started. Rows in slots added later are matched elsewhere.
    slots: u32,
    /// Number of slots that the round has not visited yet.
    pub(super) remaining: u32,
}

impl SlotRound {
    /// A round over all of `slots` slots that starts where the previous round has stopped.
    pub(super) fn around(self, slots: u32) -> Self {
        Self { next: self.next, slots, remaining: slots }
    }

    /// The next slots, at most `most`, of a tier that has `slots` at present.
    pub(super) fn part(self, most: usize, slots: u32) -> std::ops::Range<CacheSlot> {
        let slots = slots.min(self.slots);
        let first = if self.next >= slots { 0 } else { self.next };
        let most = (most as u32).min(self.remaining);
        first..first.saturating_add(most).min(slots)
    }

    /// The round after the slots of `part` were visited.
    pub(super) fn after(self, part: &std::ops::Range<CacheSlot>) -> Self {
        let seen = part.end - part.start;
        // If the tier has become empty, no slots remain.
        Self { next: part.end, remaining: if seen == 0 { 0 } else { self.remaining - seen }, ..self }
    }
}

impl SweepProgress {
    /// The subset of `ids` whose rows the sweep may match. After all tiers were visited these are the deferred rows:
    /// rows added since do not belong to the sweep.
    fn may_match<'i>(&self, ids: &'i [Id]) -> Cow<'i, [Id]> {
        if self.passed { self.deferred_among(ids) } else { Cow::Borrowed(ids) }
    }

    /// The subset of `ids` whose rows the sweep may match if they are in RAM. After RAM was visited these are the
    /// deferred rows, because a row loaded from SSD is deferred too.
    pub(super) fn may_match_in_ram<'i>(&self, ids: &'i [Id]) -> Cow<'i, [Id]> {
        if self.ram_passed { self.deferred_among(ids) } else { self.may_match(ids) }
    }

    fn deferred_among<'i>(&self, ids: &'i [Id]) -> Cow<'i, [Id]> {
        let deferred: HashSet<Id> = self.deferred.iter().copied().collect();
        Cow::Owned(ids.iter().copied().filter(|id| deferred.contains(id)).collect())
    }
}

/// The end of the last slice; `None` before the first one.
#[derive(Debug, Default)]
pub(super) struct SweepPace {
    ended: Option<Instant>,
}

impl SweepPace {
    /// Time that a slice starting at `now` may take; zero for the first slice. The caller does a minimum of work in any
    /// case, so that the sweep advances however short the steps are.
    pub(super) fn time_for_slice(&self, now: Instant) -> Duration {
        self.ended.map_or(Duration::ZERO, |ended| now.saturating_duration_since(ended) / SHARE)
    }

    /// Records the end of a slice.
    pub(super) fn slice_ended(&mut self, now: Instant) {
        self.ended = Some(now);
    }
}

#[cfg(test)]
mod tests;
