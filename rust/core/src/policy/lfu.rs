//! The policy `lfu`: evicts the least frequently used row first, and among equals the one with the oldest last use.
//! Every step takes constant time, by a list of levels with one level per occurring use count. Source: Shah, Mitra,
//! Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme", 2010.

use std::collections::TryReserveError;

use super::linked_list::{PerSlot, SlotLinks, SlotList};
use super::{AHEAD, RECHECKED, ReplacementPolicy};
use crate::types::{CacheSlot, Id};

const NO_LEVEL: u32 = u32::MAX;

/// The levels, lowest count first, and the level of each slot. Slots that were in use when they were due are parked in
/// their level.
#[derive(Clone, Debug)]
pub(super) struct LfuPolicy {
    links: SlotLinks,
    positions: PerSlot<LfuPosition>,
    levels: Vec<LfuLevel>,
    /// Unused indexes of `levels`.
    free: Vec<u32>,
    /// The level with the lowest count.
    lowest: u32,
}

/// The slots whose rows were used `count` times. No level is empty.
#[derive(Clone, Debug)]
struct LfuLevel {
    count: u32,
    above: u32,
    below: u32,
    ready: SlotList,
    parked: SlotList,
}

/// The level of a slot, and whether it is parked there.
#[derive(Clone, Copy, Debug)]
struct LfuPosition {
    level: u32,
    parked: bool,
}

impl Default for LfuPosition {
    fn default() -> Self {
        Self { level: NO_LEVEL, parked: false }
    }
}

impl LfuPolicy {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            links: SlotLinks::with_capacity(capacity),
            positions: PerSlot::with_capacity(capacity),
            levels: Vec::new(),
            free: Vec::new(),
            lowest: NO_LEVEL,
        }
    }

    /// The index of the level for `count`: the next level above `below`, created there if missing. With `NO_LEVEL` for
    /// `below` it is the lowest.
    fn level_above(&mut self, below: u32, count: u32) -> u32 {
        let above = if below == NO_LEVEL { self.lowest } else { self.levels[below as usize].above };
        if above != NO_LEVEL && self.levels[above as usize].count == count {
            return above;
        }
        let level = LfuLevel { count, above, below, ready: SlotList::default(), parked: SlotList::default() };
        let index = if let Some(free) = self.free.pop() {
            self.levels[free as usize] = level;
            free
        } else {
            self.levels.push(level);
            self.levels.len() as u32 - 1
        };
        self.join(below, index);
        if above != NO_LEVEL {
            self.join(index, above);
        }
        index
    }

    fn join(&mut self, below: u32, above: u32) {
        match below {
            NO_LEVEL => self.lowest = above,
            below => self.levels[below as usize].above = above,
        }
        if above != NO_LEVEL {
            self.levels[above as usize].below = below;
        }
    }

    fn put(&mut self, slot: CacheSlot, position: LfuPosition) {
        let level = &mut self.levels[position.level as usize];
        let list = if position.parked { &mut level.parked } else { &mut level.ready };
        self.links.push_front(list, slot);
        self.positions.set(slot, position);
    }

    /// Removes a slot from its list. Keeps its level, even if it is empty.
    fn take_out(&mut self, slot: CacheSlot) -> LfuPosition {
        let place = self.positions.get(slot);
        if place.level != NO_LEVEL {
            let level = &mut self.levels[place.level as usize];
            self.links.unlink(if place.parked { &mut level.parked } else { &mut level.ready }, slot);
            self.positions.set(slot, LfuPosition::default());
        }
        place
    }

    fn drop_if_empty(&mut self, index: u32) {
        if index == NO_LEVEL {
            return;
        }
        let level = &self.levels[index as usize];
        if level.ready.is_empty() && level.parked.is_empty() {
            let (below, above) = (level.below, level.above);
            self.join(below, above);
            self.free.push(index);
        }
    }

    fn recheck(&mut self, level: u32, count: u32, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Option<CacheSlot> {
        let parked = &mut self.levels[level as usize].parked;
        for _ in 0..count.min(parked.len()) {
            let slot = parked.back()?;
            if evictable(slot) {
                return Some(slot);
            }
            self.links.move_to_front(parked, slot);
        }
        None
    }
}

impl ReplacementPolicy for LfuPolicy {
    fn inserted(&mut self, slot: CacheSlot, id: Id) {
        self.removed(slot, id, false);
        let level = self.level_above(NO_LEVEL, 1);
        self.put(slot, LfuPosition { level, parked: false });
    }

    fn accessed(&mut self, slots: &[CacheSlot]) {
        for (at, &slot) in slots.iter().enumerate() {
            if let Some(&ahead) = slots.get(at + AHEAD) {
                self.positions.prefetch(ahead);
                self.links.prefetch(ahead);
            }
            let place = self.take_out(slot);
            if place.level == NO_LEVEL {
                continue;
            }
            let count = self.levels[place.level as usize].count;
            let level = if count == u32::MAX { place.level } else { self.level_above(place.level, count + 1) };
            self.put(slot, LfuPosition { level, parked: false });
            self.drop_if_empty(place.level);
        }
    }

    fn victim(&mut self, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Option<CacheSlot> {
        let mut level = self.lowest;
        while level != NO_LEVEL {
            if let Some(slot) = self.recheck(level, RECHECKED, evictable) {
                return Some(slot);
            }
            while let Some(slot) = self.levels[level as usize].ready.back() {
                if evictable(slot) {
                    return Some(slot);
                }
                self.take_out(slot);
                self.put(slot, LfuPosition { level, parked: true });
            }
            level = self.levels[level as usize].above;
        }
        let mut level = self.lowest;
        while level != NO_LEVEL {
            if let Some(slot) = self.recheck(level, u32::MAX, evictable) {
                return Some(slot);
            }
            level = self.levels[level as usize].above;
        }
        None
    }

    fn reserve(&mut self, slots: usize) -> Result<(), TryReserveError> {
        self.links.reserve(slots)?;
        self.positions.reserve(slots)
    }

    fn removed(&mut self, slot: CacheSlot, _id: Id, _evicted: bool) {
        let place = self.take_out(slot);
        self.drop_if_empty(place.level);
    }

    fn all_removed(&mut self, slots: &[CacheSlot]) {
        for (at, &slot) in slots.iter().enumerate() {
            if let Some(&ahead) = slots.get(at + AHEAD) {
                self.positions.prefetch(ahead);
                self.links.prefetch_neighbours(ahead);
            }
            let place = self.take_out(slot);
            self.drop_if_empty(place.level);
        }
    }

    fn bytes_per_slot(&self) -> usize {
        // Levels are not counted: they are few compared to the slots, because d different counts require at least d²/2
        // uses.
        SlotLinks::BYTES_PER_SLOT + size_of::<LfuPosition>()
    }

    fn boxed_clone(&self) -> Box<dyn ReplacementPolicy> {
        Box::new(self.clone())
    }
}
