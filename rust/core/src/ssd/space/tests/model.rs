//! A model of a tier with numbers only that executes the decisions, one step after the other: every row of its capacity
//! fits, for any writes, removals and publishes (property R).

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::compaction_choice::{CompactionView, SegmentView, choose};
use super::super::wait::{self, SpaceWaitStep, next_space_wait_step};

const UNIT: u64 = 1000;
const ROWS: u32 = 10;
/// Hotness groups, each with an open segment.
const CLASSES: usize = 2;
/// Segments that rows from RAM leave free.
const RESERVED: u64 = 2;

#[derive(Clone, Debug)]
enum SpaceModelOp {
    /// Writes rows `first, first + step, …`, each to its group.
    Write { first: u32, step: u32, count: u32, class: usize },
    /// Seals the open segments and references all segments.
    Publish,
}

#[derive(Clone, Debug)]
struct SpaceModelSegment {
    rows: Vec<u32>,
    live: u32,
    held: u64,
    sealed: bool,
    in_use: bool,
    ref_count: u32,
    made_seq: u64,
}

#[derive(Debug)]
struct SpaceModelTier {
    cap: u64,
    /// By slot, which is also the serial.
    segments: BTreeMap<u32, SpaceModelSegment>,
    open: [Option<u32>; CLASSES],
    /// Slots that each published state references, oldest first.
    states: Vec<Vec<u32>>,
    was_published: bool,
    /// The segment of each row.
    rows: BTreeMap<u32, u32>,
    next_slot: u32,
    next_seq: u64,
}

impl SpaceModelTier {
    fn new(segments: u64) -> Self {
        Self {
            cap: segments * UNIT,
            segments: BTreeMap::new(),
            open: [None; CLASSES],
            states: Vec::new(),
            was_published: false,
            rows: BTreeMap::new(),
            next_slot: 0,
            next_seq: 1,
        }
    }

    /// Number of rows that fit: the cap minus the open, reserved and overhead segments, minus a segment or a sixteenth.
    fn capacity(&self) -> u32 {
        let usable = self.cap - (CLASSES as u64 + 3) * UNIT;
        ((usable - UNIT.max(usable / 16)) / UNIT) as u32 * ROWS
    }

    fn free(&self) -> u64 {
        self.cap - self.segments.values().map(|segment| segment.held).sum::<u64>()
    }

    fn view(&self) -> CompactionView {
        let left: u32 = self.open.iter().flatten().map(|slot| ROWS - self.segments[slot].rows.len() as u32).sum();
        let retained = self.segments.values().filter(|segment| !segment.in_use).map(|segment| segment.held).sum();
        CompactionView {
            can_write: true,
            cap_bytes: self.cap,
            segment_bytes: UNIT,
            full_bytes: UNIT,
            rows_per_segment: ROWS,
            free_bytes: self.free(),
            moving: 0,
            rows_to_move: u64::from(left) + self.free() / UNIT * u64::from(ROWS),
            was_published: self.was_published,
            states: self.states.len(),
            retained_bytes: retained,
            tombstone_segments: 0,
            tombstone_bytes: 0,
            tombstones_before: 0,
            next_seq: self.next_seq,
        }
    }

    fn segment_views(&self) -> Vec<SegmentView> {
        let current = self.segments.iter().filter(|(_, segment)| segment.in_use);
        let view = |(&slot, segment): (&u32, &SpaceModelSegment)| SegmentView {
            slot,
            serial: u64::from(slot),
            can_move: segment.sealed,
            sealed: segment.sealed,
            records: segment.rows.len() as u32,
            live: segment.live,
            held_bytes: segment.held,
            ref_count: segment.ref_count,
            made_seq: segment.made_seq,
        };
        current.map(view).collect()
    }

    fn remove_ref(&mut self, slot: u32) {
        let segment = self.segments.get_mut(&slot).unwrap();
        segment.ref_count -= 1;
        if segment.ref_count == 0 {
            self.segments.remove(&slot);
        }
    }

    /// Releases sealed segments without live rows.
    fn reap(&mut self) {
        let empty: Vec<u32> = self
            .segments
            .iter()
            .filter(|(_, segment)| segment.in_use && segment.sealed && segment.live == 0)
            .map(|(slot, _)| *slot)
            .collect();
        for slot in empty {
            self.segments.get_mut(&slot).unwrap().in_use = false;
            self.remove_ref(slot);
        }
    }

    fn seal(&mut self, class: usize) {
        let Some(slot) = self.open[class].take() else { return };
        let segment = self.segments.get_mut(&slot).unwrap();
        segment.sealed = true;
        // A file has at least a sector.
        segment.held = (UNIT * segment.rows.len() as u64 / u64::from(ROWS)).max(UNIT / 8);
    }

    /// Opens a segment of `class` if needed, provided that its bytes and `kept` more segments are free. Returns true if
    /// a segment with free space is open.
    fn prepare(&mut self, class: usize, kept: u64) -> bool {
        if self.open[class].is_some_and(|slot| self.segments[&slot].rows.len() as u32 == ROWS) {
            self.seal(class);
        }
        if self.open[class].is_none() && self.free() >= (kept + 1) * UNIT {
            let made_seq = self.next_seq;
            let segment = SpaceModelSegment {
                rows: Vec::new(),
                live: 0,
                held: UNIT,
                sealed: false,
                in_use: true,
                ref_count: 1,
                made_seq,
            };
            self.segments.insert(self.next_slot, segment);
            self.open[class] = Some(self.next_slot);
            self.next_slot += 1;
        }
        self.open[class].is_some()
    }

    /// Appends a row to the open segment of `class`, and replaces its older record.
    fn put(&mut self, row: u32, class: usize) {
        let slot = self.open[class].unwrap();
        let segment = self.segments.get_mut(&slot).unwrap();
        segment.rows.push(row);
        segment.live += 1;
        self.next_seq += 1;
        if let Some(older) = self.rows.insert(row, slot) {
            self.segments.get_mut(&older).unwrap().live -= 1;
        }
    }

    /// Moves the live rows of a segment. They fit by property C1.
    fn compact(&mut self, slot: u32) {
        let mut seen = std::collections::BTreeSet::new();
        let rows: Vec<u32> = self.segments[&slot].rows.iter().copied().filter(|row| seen.insert(*row)).collect();
        for row in rows {
            if self.rows[&row] != slot {
                continue;
            }
            let own = row as usize % CLASSES;
            let class = (own..CLASSES).chain(0..own).find(|class| self.prepare(*class, 0));
            let Some(class) = class else { panic!("a segment was chosen whose rows do not fit: {self:?}") };
            self.put(row, class);
        }
        assert_eq!(self.segments[&slot].live, 0);
        self.reap();
    }

    /// Waits for free space like `ops::make_space::wait_for_space`. Returns the number of steps.
    fn wait_for_space(&mut self) -> usize {
        for steps in 0..10_000 {
            self.reap();
            let (view, segments) = (self.view(), self.segment_views());
            let choice = choose(&view, segments.iter().copied());
            let open_in_the_way = (0..CLASSES).rev().find(|class| {
                self.open[*class].is_some_and(|slot| self.segments[&slot].live < self.segments[&slot].rows.len() as u32)
            });
            let step = next_space_wait_step(&wait::SpaceWaitView {
                free_bytes: self.free(),
                needed_bytes: (RESERVED + 1) * UNIT,
                is_compacting: choice.slot().is_some(),
                open_segment_holds_space: open_in_the_way.is_some(),
                states_hold_space: view.states_hold_space(segments.iter().copied()),
                ..wait::SpaceWaitView::default()
            });
            match step {
                SpaceWaitStep::Proceed => return steps,
                SpaceWaitStep::Compact => self.compact(choice.slot().unwrap()),
                SpaceWaitStep::SealOpen => self.seal(open_in_the_way.unwrap()),
                SpaceWaitStep::DropState => {
                    for slot in self.states.remove(0) {
                        self.remove_ref(slot);
                    }
                }
                step => panic!("{step:?} with {} of {} rows: {self:?}", self.rows.len(), self.capacity()),
            }
        }
        panic!("no end: {self:?}");
    }

    fn write(&mut self, row: u32, class: usize) {
        while self.free() < RESERVED * UNIT || !self.prepare(class, RESERVED) {
            self.wait_for_space();
        }
        self.put(row, class);
    }

    fn publish(&mut self) {
        while self.free() < RESERVED * UNIT {
            self.wait_for_space();
        }
        (0..CLASSES).for_each(|class| self.seal(class));
        self.reap();
        let named: Vec<u32> =
            self.segments.iter().filter(|(_, segment)| segment.in_use).map(|(slot, _)| *slot).collect();
        for slot in &named {
            self.segments.get_mut(slot).unwrap().ref_count += 1;
        }
        self.states.push(named);
        self.was_published = true;
        if self.states.len() > 2 {
            for slot in self.states.remove(0) {
                self.remove_ref(slot);
            }
        }
    }
}

fn op() -> impl Strategy<Value = SpaceModelOp> {
    let write = (0..1000_u32, 1..7_u32, 1..60_u32, 0..CLASSES);
    prop_oneof![
        5 => write.prop_map(|(first, step, count, class)| SpaceModelOp::Write { first, step, count, class }),
        1 => Just(SpaceModelOp::Publish),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, max_shrink_iters: 4000, ..ProptestConfig::default() })]

    /// Property R: a row of the capacity fits after a finite number of steps.
    #[test]
    fn every_row_of_the_capacity_fits(segments in 8..40_u64, ops in prop::collection::vec(op(), 1..150)) {
        let mut tier = SpaceModelTier::new(segments);
        let capacity = tier.capacity();
        // All rows of the capacity exist from the start, so that free space is minimal.
        (0..capacity).for_each(|row| tier.write(row, row as usize % CLASSES));
        for op in ops {
            match op {
                SpaceModelOp::Write { first, step, count, class } => {
                    (0..count).for_each(|number| tier.write((first + number * step) % capacity, class));
                }
                SpaceModelOp::Publish => tier.publish(),
            }
        }
        prop_assert_eq!(tier.rows.len() as u32, capacity);
    }
}
