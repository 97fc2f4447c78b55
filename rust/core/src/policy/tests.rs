use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const KINDS: [PolicyKind; 3] = PolicyKind::ALL;

/// A tier that evicts by a policy when it is full, as the cache does.
struct PolicyTier {
    policy: Box<dyn ReplacementPolicy>,
    slots: BTreeMap<Id, CacheSlot>,
    ids: Vec<Option<Id>>,
}

impl PolicyTier {
    fn new(kind: PolicyKind, capacity: u32) -> Self {
        Self { policy: new_policy(kind, capacity), slots: BTreeMap::new(), ids: vec![None; capacity as usize] }
    }

    /// Uses a row. Returns true if it was in the tier.
    fn touch(&mut self, id: Id) -> bool {
        if let Some(&slot) = self.slots.get(&id) {
            self.policy.accessed(&[slot]);
            return true;
        }
        let free = self.ids.iter().position(Option::is_none).map(|slot| slot as CacheSlot);
        let slot = free.unwrap_or_else(|| {
            let slot = self.policy.victim(&mut |_| true).expect("no slot is in use");
            let left = self.ids[slot as usize].take().expect("victims are resident");
            self.slots.remove(&left);
            self.policy.removed(slot, left, true);
            slot
        });
        self.ids[slot as usize] = Some(id);
        self.slots.insert(id, slot);
        self.policy.inserted(slot, id);
        false
    }
}

#[derive(Clone, Debug)]
enum PolicyStep {
    Touch(CacheSlot),
    TouchMany(CacheSlot),
    Remove(CacheSlot),
    Pin(CacheSlot),
    Unpin(CacheSlot),
    Evict,
    Propose,
}

fn steps(pins: bool) -> impl Strategy<Value = Vec<PolicyStep>> {
    let slot = 0_u32..24;
    let pins = u32::from(pins) * 4;
    let step = prop_oneof![
        8 => slot.clone().prop_map(PolicyStep::Touch),
        1 => slot.clone().prop_map(PolicyStep::TouchMany),
        1 => slot.clone().prop_map(PolicyStep::Remove),
        pins => slot.clone().prop_map(PolicyStep::Pin),
        pins => slot.prop_map(PolicyStep::Unpin),
        4 => Just(PolicyStep::Evict),
        1 => Just(PolicyStep::Propose),
    ];
    prop::collection::vec(step, 0..400)
}

/// Number of uses and time of the last use of each slot with a row.
type ResidentSlots = BTreeMap<CacheSlot, (u32, usize)>;

/// A policy with a model of its state.
struct CheckedPolicy<E> {
    policy: Box<dyn ReplacementPolicy>,
    resident: ResidentSlots,
    pinned: BTreeSet<CacheSlot>,
    now: usize,
    /// The required victim, if only one is valid.
    expected: E,
}

fn id_of(slot: CacheSlot) -> Id {
    i64::from(slot) - 5
}

impl<E: Fn(&ResidentSlots) -> Option<CacheSlot>> CheckedPolicy<E> {
    fn touch(&mut self, slot: CacheSlot) {
        if let Some((uses, last)) = self.resident.get_mut(&slot) {
            self.policy.accessed(&[slot]);
            (*uses, *last) = (*uses + 1, self.now);
        } else {
            self.policy.inserted(slot, id_of(slot));
            self.resident.insert(slot, (1, self.now));
        }
    }

    fn touch_all_from(&mut self, first: CacheSlot) {
        let used: Vec<CacheSlot> = self.resident.range(first..).map(|(slot, _)| *slot).collect();
        self.policy.accessed(&used);
        for slot in used {
            self.now += 1;
            let (uses, _) = self.resident[&slot];
            self.resident.insert(slot, (uses + 1, self.now));
        }
    }

    /// Requests a victim and checks it.
    fn propose(&mut self) -> Result<Option<CacheSlot>, TestCaseError> {
        let Self { policy, resident, pinned, expected, .. } = self;
        let victim = policy.victim(&mut |slot| {
            assert!(resident.contains_key(&slot), "the policy asks about slots that have a row only");
            !pinned.contains(&slot)
        });
        prop_assert_eq!(victim.is_some(), resident.len() > pinned.len(), "there is a victim if a slot is evictable");
        if let Some(victim) = victim {
            prop_assert!(resident.contains_key(&victim) && !pinned.contains(&victim));
            if let Some(expected) = expected(resident) {
                prop_assert_eq!(victim, expected);
            }
        }
        Ok(victim)
    }

    fn evict(&mut self, victim: CacheSlot) {
        self.resident.remove(&victim);
        self.policy.removed(victim, id_of(victim), true);
    }

    fn step(&mut self, step: &PolicyStep) -> Result<(), TestCaseError> {
        self.now += 1;
        match *step {
            PolicyStep::Touch(slot) => self.touch(slot),
            PolicyStep::TouchMany(first) => self.touch_all_from(first),
            PolicyStep::Remove(slot) => {
                if self.resident.remove(&slot).is_some() {
                    self.policy.removed(slot, id_of(slot), false);
                    self.pinned.remove(&slot);
                }
            }
            PolicyStep::Pin(slot) => {
                if self.resident.contains_key(&slot) {
                    self.pinned.insert(slot);
                }
            }
            PolicyStep::Unpin(slot) => {
                self.pinned.remove(&slot);
            }
            PolicyStep::Evict => {
                if let Some(victim) = self.propose()? {
                    self.evict(victim);
                }
            }
            PolicyStep::Propose => drop(self.propose()?),
        }
        Ok(())
    }
}

/// Runs the steps. `expected` returns the required victim, if only one is valid.
fn run(
    kind: PolicyKind,
    steps: &[PolicyStep],
    expected: impl Fn(&ResidentSlots) -> Option<CacheSlot>,
) -> Result<(), TestCaseError> {
    let (policy, pinned) = (new_policy(kind, 8), BTreeSet::new());
    let mut checked = CheckedPolicy { policy, resident: ResidentSlots::new(), pinned, now: 0, expected };
    steps.iter().try_for_each(|step| checked.step(step))?;
    // No slot was lost: all are evictable once none is in use.
    let CheckedPolicy { mut policy, mut resident, .. } = checked;
    while !resident.is_empty() {
        let victim = policy.victim(&mut |_| true).expect("some are left");
        prop_assert!(resident.remove(&victim).is_some());
        policy.removed(victim, id_of(victim), true);
    }
    prop_assert_eq!(policy.victim(&mut |_| true), None);
    Ok(())
}

proptest! {
    #[test]
    fn every_policy_proposes_each_evictable_slot_and_no_other(steps in steps(true)) {
        for kind in KINDS {
            run(kind, &steps, |_| None)?;
        }
    }

    #[test]
    fn lru_proposes_the_slot_used_longest_ago(steps in steps(false)) {
        run(PolicyKind::Lru, &steps, |resident| resident.iter().min_by_key(|(_, (_, last))| *last).map(|(slot, _)| *slot))?;
    }

    #[test]
    fn lfu_proposes_the_slot_used_least_and_of_equals_longest_ago(steps in steps(false)) {
        run(PolicyKind::Lfu, &steps, |resident| resident.iter().min_by_key(|(_, used)| **used).map(|(slot, _)| *slot))?;
    }
}

/// Evicts the next victim, if there is one.
fn evict(policy: &mut dyn ReplacementPolicy, ids: &mut BTreeMap<CacheSlot, Id>) -> Option<(CacheSlot, Id)> {
    let slot = policy.victim(&mut |_| true)?;
    let id = ids.remove(&slot).expect("victims are resident");
    policy.removed(slot, id, true);
    Some((slot, id))
}

proptest! {
    #[test]
    fn rows_inserted_together_are_evicted_as_if_one_by_one(
        batches in prop::collection::vec((1_u32..40, 0_i64..60, any::<bool>(), 0_usize..50), 1..20),
    ) {
        for kind in KINDS {
            let mut policies = [new_policy(kind, 64), new_policy(kind, 64)];
            let mut residents = [BTreeMap::new(), BTreeMap::new()];
            for &(count, first, is_falling, gone) in &batches {
                let here: BTreeSet<Id> = residents[0].values().copied().collect();
                let mut slots: Vec<CacheSlot> = (0..100).filter(|slot| !residents[0].contains_key(slot)).collect();
                let ids: Vec<Id> = (first..).filter(|id| !here.contains(id)).take((count as usize).min(slots.len())).collect();
                if is_falling {
                    slots.reverse();
                }
                slots.truncate(ids.len());
                policies[0].all_inserted(&slots, &ids);
                slots.iter().zip(&ids).for_each(|(&slot, &id)| policies[1].inserted(slot, id));
                for (policy, resident) in policies.iter_mut().zip(&mut residents) {
                    resident.extend(slots.iter().copied().zip(ids.iter().copied()));
                    let used: Vec<CacheSlot> = resident.keys().copied().step_by(3).collect();
                    policy.accessed(&used);
                }
                for _ in 0..gone {
                    let [together, alone] = [0, 1].map(|at: usize| evict(&mut *policies[at], &mut residents[at]));
                    prop_assert_eq!(together, alone);
                }
            }
            while !residents[0].is_empty() {
                let [together, alone] = [0, 1].map(|at: usize| evict(&mut *policies[at], &mut residents[at]));
                prop_assert_eq!(together, alone);
            }
        }
    }
}

#[test]
fn pinned_slots_are_skipped_without_a_check_per_eviction() {
    for kind in KINDS {
        let mut policy = new_policy(kind, 20_000);
        for slot in 0..20_000 {
            policy.inserted(slot, i64::from(slot));
        }
        let mut asked = 0;
        for _ in 0..10_000 {
            let victim = policy.victim(&mut |slot| {
                asked += 1;
                slot >= 10_000
            });
            let victim = victim.expect("half of the slots are free");
            policy.removed(victim, i64::from(victim), true);
        }
        assert!(asked <= 5 * 20_000, "{kind:?} asked {asked} times");
    }
}

#[test]
fn lru_evicts_slots_released_late_first() {
    let mut policy = new_policy(PolicyKind::Lru, 4);
    for slot in 0..4 {
        policy.inserted(slot, 0);
    }
    assert_eq!(policy.victim(&mut |slot| slot > 1), Some(2));
    assert_eq!(policy.victim(&mut |_| true), Some(0));
    policy.accessed(&[0]);
    assert_eq!(policy.victim(&mut |_| true), Some(1));
}

/// Uses hot rows several times, then scans rows that are used once each. Returns the number of hot rows that remain.
fn hot_rows_after_a_scan(kind: PolicyKind) -> usize {
    let mut tier = PolicyTier::new(kind, 100);
    for _ in 0..4 {
        for hot in 0..50 {
            tier.touch(hot);
        }
    }
    for scanned in 1000..2000 {
        tier.touch(scanned);
    }
    (0..50).filter(|hot| tier.slots.contains_key(hot)).count()
}

#[test]
fn a_scan_leaves_the_hot_rows_in_s3_fifo_and_not_in_lru() {
    assert_eq!(hot_rows_after_a_scan(PolicyKind::S3Fifo), 50);
    assert_eq!(hot_rows_after_a_scan(PolicyKind::Lru), 0);
}

#[test]
fn s3_fifo_admits_only_early_returning_rows_to_main() {
    let mut tier = PolicyTier::new(PolicyKind::S3Fifo, 100);
    (0..150).for_each(|id| {
        tier.touch(id);
    });
    // Rows 0 to 49 left through small, 49 last. Inserted again it enters main, and a scan does not evict it.
    assert!(!tier.touch(49));
    (1000..1080).for_each(|id| {
        tier.touch(id);
    });
    assert!(tier.slots.contains_key(&49));
    // Row 7 left more than ninety departures ago, which is the number of slots of main. Inserted again it enters small,
    // and the next scan evicts it.
    assert!(!tier.touch(7));
    (2000..2100).for_each(|id| {
        tier.touch(id);
    });
    assert!(tier.slots.contains_key(&49) && !tier.slots.contains_key(&7));
}

#[test]
fn s3_fifo_gives_each_use_in_main_one_round_more() {
    let mut policy = new_policy(PolicyKind::S3Fifo, 3);
    for slot in 0..3 {
        policy.inserted(slot, i64::from(slot));
        policy.accessed(&[slot]);
        policy.accessed(&[slot]);
    }
    // All move to main. Slot 0 has two more uses there, and slot 1 has one.
    assert_eq!(policy.victim(&mut |_| true), Some(0));
    policy.accessed(&[0]);
    policy.accessed(&[0]);
    policy.accessed(&[1]);
    let order: Vec<CacheSlot> = (0..3)
        .map(|_| {
            let victim = policy.victim(&mut |_| true).expect("some are left");
            policy.removed(victim, 0, false);
            victim
        })
        .collect();
    assert_eq!(order, [2, 1, 0]);
}

#[test]
fn the_ghost_forgets_after_its_length_in_departures() {
    let mut ghost = s3fifo::GhostTable::default();
    for id in -500..500 {
        ghost.remember(id, 100);
    }
    assert!(!ghost.take(399), "one hundred and one departures ago");
    let kept = (400..500).filter(|&id| ghost.take(id)).count();
    assert!(kept >= 80, "{kept} of the last hundred");
    assert!(!ghost.take(450), "taken once");
}
