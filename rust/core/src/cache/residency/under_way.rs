//! How far a sweep under way has come.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

use super::judge::SweepMatcher;
use super::pace::SweepPace;
use crate::ssd::SsdExpiryCursor;
use crate::types::{CacheSlot, Id};

/// A sweep whose dead rows are not all buried yet.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own, and all combinations occur")]
pub(super) struct SweepProgress {
    pub(super) matcher: Arc<SweepMatcher>,
    pub(super) host: SlotRound,
    pub(super) device: SlotRound,
    pub(super) ssd: SsdExpiryCursor,
    pub(super) pace: SweepPace,
    /// Whether the sweep came while another one was under way, and goes on where that one was. If sweeps come so often that RAM is never
    /// passed, the SSD tier would never have its turn. So it is gone through beside RAM then, and once more after it.
    pub(super) is_carried: bool,
    /// Whether the tiers in RAM were gone through.
    pub(super) ram_passed: bool,
    /// Whether all tiers were gone through. Then only rows of `later` may be dead.
    pub(super) passed: bool,
    /// Rows that could not be judged when their slot was passed, or that moved meanwhile: rows of plans that are in place, rows that are
    /// being read.
    pub(super) deferred: Vec<Id>,
    /// Whether rows were put into the table since this began, which it does not take.
    pub(super) rows_added: bool,
    /// So many rows had been evicted when it began.
    pub(super) expired_before: u64,
}

impl SweepProgress {
    /// A sweep that goes on where `before` is, which it takes the place of, in tiers with so many `(host, device)` slots.
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

    /// Whether slots of tiers in RAM are left.
    pub(super) fn is_in_ram(&self) -> bool {
        self.host.remaining > 0 || self.device.remaining > 0
    }
}

/// A way once around the slots of a tier.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SlotRound {
    pub(super) next: CacheSlot,
    /// Slots that the tier had when the round began. What came into later ones since is looked at elsewhere.
    slots: u32,
    /// Slots that are still to be looked at.
    pub(super) remaining: u32,
}

impl SlotRound {
    /// All of `slots` slots, from where another round has stopped.
    pub(super) fn around(self, slots: u32) -> Self {
        Self { next: self.next, slots, remaining: slots }
    }

    /// The next slots, at most `most`, of a tier that has `slots` by now.
    pub(super) fn part(self, most: usize, slots: u32) -> std::ops::Range<CacheSlot> {
        let slots = slots.min(self.slots);
        let first = if self.next >= slots { 0 } else { self.next };
        let most = (most as u32).min(self.remaining);
        first..first.saturating_add(most).min(slots)
    }

    /// The slots of a part were looked at.
    pub(super) fn after(self, part: &std::ops::Range<CacheSlot>) -> Self {
        let seen = part.end - part.start;
        // Where a tier has become empty, there is nothing left to see.
        Self { next: part.end, remaining: if seen == 0 { 0 } else { self.remaining - seen }, ..self }
    }
}

impl SweepProgress {
    /// Those of these ids whose rows the sweep may take. Once all tiers were gone through these are rows that were left for later: what
    /// came in since is not the sweep's.
    pub(super) fn may_match<'i>(&self, ids: &'i [Id]) -> Cow<'i, [Id]> {
        if self.passed { self.deferred_among(ids) } else { Cow::Borrowed(ids) }
    }

    /// Those of these ids whose rows the sweep may take if they are in RAM. Once the tiers there were gone through these are rows that were
    /// left for later, because a row that comes from SSD is left for later too.
    pub(super) fn may_match_in_ram<'i>(&self, ids: &'i [Id]) -> Cow<'i, [Id]> {
        if self.ram_passed { self.deferred_among(ids) } else { self.may_match(ids) }
    }

    fn deferred_among<'i>(&self, ids: &'i [Id]) -> Cow<'i, [Id]> {
        let later: HashSet<Id> = self.deferred.iter().copied().collect();
        Cow::Owned(ids.iter().copied().filter(|id| later.contains(id)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EvictionRule;
    use crate::lifecycle::ExpirySweep;

    #[test]
    fn once_ram_was_passed_only_rows_that_were_left_for_later_may_die_there() {
        let judge = SweepMatcher::new(ExpirySweep::after(9, &EvictionRule::Unused { steps: 2 }, 1), 0);
        let mut under_way = SweepProgress::after(None, judge, (4, 0), 0);
        let ids = [3, 1, 2];
        assert_eq!((&*under_way.may_match_in_ram(&ids), &*under_way.may_match(&ids)), (&ids[..], &ids[..]));
        under_way.deferred = vec![2, 7, 3];
        under_way.ram_passed = true;
        assert_eq!((&*under_way.may_match_in_ram(&ids), &*under_way.may_match(&ids)), (&[3, 2][..], &ids[..]));
        under_way.passed = true;
        assert_eq!((&*under_way.may_match_in_ram(&ids), &*under_way.may_match(&ids)), (&[3, 2][..], &[3, 2][..]));
    }

    #[test]
    fn a_round_looks_at_each_slot_once_from_where_the_last_one_stopped() {
        let mut round = SlotRound::default().around(10);
        let mut seen = Vec::new();
        for _ in 0..2 {
            let part = round.part(4, 10);
            seen.extend(part.clone());
            round = round.after(&part);
        }
        round = round.around(10);
        while round.remaining > 0 {
            let part = round.part(4, 10);
            seen.extend(part.clone());
            round = round.after(&part);
        }
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7]);
        let mut empty = SlotRound { next: 7, slots: 10, remaining: 3 };
        let part = empty.part(4, 0);
        empty = empty.after(&part);
        assert_eq!((part.len(), empty.remaining), (0, 0));
    }

    #[test]
    fn a_round_of_a_tier_that_grows_meanwhile_looks_at_each_slot_that_was_there() {
        let mut round = SlotRound::default().around(10);
        let part = round.part(6, 10);
        round = round.after(&part).around(10);
        let mut seen = Vec::new();
        for slots in [10, 14, 14, 17, 17] {
            let part = round.part(3, slots);
            seen.extend(part.clone());
            round = round.after(&part);
        }
        seen.sort_unstable();
        assert_eq!((seen, round.remaining), ((0..10).collect::<Vec<CacheSlot>>(), 0));
    }
}
