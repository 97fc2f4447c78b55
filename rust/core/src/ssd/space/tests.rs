//! Tests decisions about free space: by tables, by properties of every view, and in a model of a tier that executes
//! them.

mod model;

use proptest::prelude::*;

use super::compaction_choice::{CompactionChoice, CompactionView, SegmentView, choose};
use super::wait::{self, SpaceWaitStep, next_space_wait_step};
use crate::ssd::workers::COMPACTORS;

/// Bytes of a full segment in these tests, which has 100 rows.
const UNIT: u64 = 1000;
const ROWS: u32 = 100;

/// A tier with a cap of 100 segments, of which `free` are free. It was never published.
fn tier(free: u64) -> CompactionView {
    CompactionView {
        can_write: true,
        cap_bytes: 100 * UNIT,
        segment_bytes: UNIT,
        full_bytes: UNIT,
        rows_per_segment: ROWS,
        free_bytes: free * UNIT,
        moving: 0,
        rows_to_move: 1000,
        was_published: false,
        states: 0,
        retained_bytes: 0,
        tombstone_segments: 0,
        tombstone_bytes: 0,
        tombstones_before: 0,
        next_seq: 1000,
    }
}

/// Like [`tier`], with two published states.
fn published(free: u64) -> CompactionView {
    CompactionView { was_published: true, states: 2, ..tier(free) }
}

/// A full segment with `live` live records, created when the record with number `made_seq` was written.
fn full(slot: u32, live: u32, made_seq: u64) -> SegmentView {
    SegmentView {
        slot,
        serial: u64::from(slot),
        can_move: true,
        sealed: true,
        records: ROWS,
        live,
        held_bytes: UNIT,
        ref_count: 1,
        made_seq,
    }
}

/// A segment that was sealed with `records` records, all of them live.
fn short(slot: u32, records: u32) -> SegmentView {
    let held_bytes = UNIT * u64::from(records) / u64::from(ROWS);
    SegmentView { records, live: records, held_bytes, ..full(slot, 0, 0) }
}

fn referenced_twice(segment: SegmentView) -> SegmentView {
    SegmentView { ref_count: 2, ..segment }
}

#[test]
fn compaction_choice_by_case() {
    let many_short = |count: u32| (0..count).map(|slot| short(slot, 20 - slot.min(10))).collect::<Vec<_>>();
    let tombs = |view: CompactionView| CompactionView {
        tombstone_segments: 9,
        tombstone_bytes: 900,
        tombstones_before: 50,
        ..view
    };
    let cases: Vec<(&str, CompactionView, Vec<SegmentView>, CompactionChoice)> = vec![
        ("there is room", tier(50), vec![full(1, 1, 0)], CompactionChoice::Nothing),
        ("room is short and a segment has dead records", tier(4), vec![full(1, 99, 0)], CompactionChoice::FreeSpace(1)),
        ("five free segments are enough", tier(5), vec![full(1, 1, 0)], CompactionChoice::Nothing),
        ("room is short and nothing is dead", tier(4), vec![full(1, 100, 0)], CompactionChoice::Nothing),
        (
            "a segment with room that was never filled counts as if the rest were dead",
            tier(1),
            { vec![SegmentView { held_bytes: UNIT, ..short(1, 60) }] },
            CompactionChoice::FreeSpace(1),
        ),
        (
            "of two equally old the emptier",
            tier(4),
            vec![full(1, 60, 0), full(2, 40, 0)],
            CompactionChoice::FreeSpace(2),
        ),
        ("an older one may be fuller", tier(4), vec![full(1, 60, 0), full(2, 40, 999)], CompactionChoice::FreeSpace(1)),
        (
            "nothing is written any more",
            CompactionView { can_write: false, ..tier(1) },
            vec![full(1, 1, 0)],
            CompactionChoice::Nothing,
        ),
        (
            "a scan, a mover or damage has it",
            tier(1),
            { vec![SegmentView { can_move: false, ..full(1, 1, 0) }] },
            CompactionChoice::Nothing,
        ),
        (
            "its live rows do not fit",
            CompactionView { rows_to_move: 9, ..tier(1) },
            { vec![full(1, 10, 0), full(2, 50, 0)] },
            CompactionChoice::Nothing,
        ),
        ("the one that fits", CompactionView { rows_to_move: 50, ..tier(1) }, vec![full(1, 60, 0), full(2, 50, 0)], {
            CompactionChoice::FreeSpace(2)
        }),
        (
            "as many are moved as there are threads",
            CompactionView { moving: COMPACTORS, ..tier(4) },
            { vec![full(1, 1, 0)] },
            CompactionChoice::Nothing,
        ),
        ("two are moved and a third has its room", CompactionView { moving: 2, ..tier(3) }, vec![full(1, 1, 0)], {
            CompactionChoice::FreeSpace(1)
        }),
        (
            "two are moved and a third has none",
            CompactionView { moving: 2, ..tier(2) },
            vec![full(1, 1, 0)],
            CompactionChoice::Nothing,
        ),
        (
            "a published tier keeps an eighth of the cap",
            published(12),
            vec![full(1, 50, 0)],
            CompactionChoice::FreeSpace(1),
        ),
        ("where more is free it takes none", published(13), vec![full(1, 50, 0)], CompactionChoice::Nothing),
        (
            "of a small cap it keeps four segments",
            CompactionView { cap_bytes: 16 * UNIT, ..published(3) },
            { vec![full(1, 50, 0)] },
            CompactionChoice::FreeSpace(1),
        ),
        (
            "and no fifth",
            CompactionView { cap_bytes: 16 * UNIT, ..published(4) },
            vec![full(1, 50, 0)],
            CompactionChoice::Nothing,
        ),
        (
            "it leaves a segment that is more than half live",
            published(12),
            vec![full(1, 51, 0)],
            CompactionChoice::Nothing,
        ),
        ("also where three segments are free", published(3), vec![full(1, 51, 0)], CompactionChoice::Nothing),
        ("but takes it where rows wait", published(2), vec![full(1, 99, 0)], CompactionChoice::FreeSpace(1)),
        (
            "but not above three quarters where giving up states makes room",
            { CompactionView { retained_bytes: UNIT, ..published(2) } },
            vec![full(1, 76, 0)],
            CompactionChoice::Nothing,
        ),
        (
            "and up to three quarters then",
            CompactionView { retained_bytes: UNIT, ..published(2) },
            vec![full(1, 75, 0)],
            { CompactionChoice::FreeSpace(1) },
        ),
        (
            "a named segment makes no room",
            published(1),
            vec![referenced_twice(full(1, 1, 0))],
            CompactionChoice::Nothing,
        ),
        (
            "tombstones pile up",
            tombs(tier(50)),
            vec![full(9, 99, 0), full(4, 99, 0)],
            CompactionChoice::FreeTombstones(4),
        ),
        (
            "tombstones hold a sixteenth",
            CompactionView { tombstone_bytes: 6251, tombstones_before: 50, ..tier(50) },
            { vec![full(4, 99, 0)] },
            CompactionChoice::FreeTombstones(4),
        ),
        (
            "up to a sixteenth, in up to eight segments, they stay",
            CompactionView { tombstone_segments: 8, tombstone_bytes: 6250, tombstones_before: 50, ..tier(50) },
            { vec![full(4, 99, 0)] },
            CompactionChoice::Nothing,
        ),
        ("later segments keep no tombstones", tombs(tier(50)), vec![full(50, 1, 0)], CompactionChoice::Nothing),
        ("full segments keep no tombstones", tombs(tier(50)), vec![full(4, 100, 0)], CompactionChoice::Nothing),
        (
            "there is no room to free tombstones",
            tombs(published(1)),
            vec![referenced_twice(full(4, 1, 0))],
            CompactionChoice::Nothing,
        ),
        (
            "there is just room for it",
            tombs(published(2)),
            vec![referenced_twice(full(4, 1, 0))],
            CompactionChoice::FreeTombstones(4),
        ),
        (
            "named segments with dead records are thinned out",
            published(30),
            { vec![referenced_twice(full(1, 59, 0)), referenced_twice(full(2, 20, 0))] },
            CompactionChoice::Thin(2),
        ),
        (
            "also one that is 0.59 live",
            published(30),
            vec![referenced_twice(full(1, 59, 0))],
            CompactionChoice::Thin(1),
        ),
        ("above 0.6 live they stay", published(30), vec![referenced_twice(full(1, 60, 0))], CompactionChoice::Nothing),
        (
            "where much is retained they stay",
            CompactionView { retained_bytes: 25 * UNIT, ..published(30) },
            { vec![referenced_twice(full(1, 1, 0))] },
            CompactionChoice::Nothing,
        ),
        (
            "where a little less is retained they do not",
            CompactionView { retained_bytes: 24 * UNIT, ..published(30) },
            { vec![referenced_twice(full(1, 1, 0))] },
            CompactionChoice::Thin(1),
        ),
        (
            "where less than a third is free they do not",
            published(33),
            vec![referenced_twice(full(1, 1, 0))],
            CompactionChoice::Thin(1),
        ),
        (
            "four free segments are enough for that",
            published(4),
            vec![referenced_twice(full(1, 1, 0))],
            CompactionChoice::Thin(1),
        ),
        ("three are not", published(3), vec![referenced_twice(full(1, 1, 0))], CompactionChoice::Nothing),
        (
            "where a third is free they stay",
            published(34),
            vec![referenced_twice(full(1, 1, 0))],
            CompactionChoice::Nothing,
        ),
        ("many small ones", published(50), many_short(13), CompactionChoice::Merge(10)),
        ("a few small ones", published(50), many_short(12), CompactionChoice::Nothing),
        (
            "a large cap bears sixteen small ones",
            CompactionView { cap_bytes: 1000 * UNIT, ..published(500) },
            { (0..16).map(|slot| short(slot, 20)).collect() },
            CompactionChoice::Nothing,
        ),
        (
            "and no seventeenth",
            CompactionView { cap_bytes: 1000 * UNIT, ..published(500) },
            { (0..17).map(|slot| short(slot, 20)).collect() },
            CompactionChoice::Merge(0),
        ),
        (
            "a quarter full is small",
            published(50),
            (0..13).map(|slot| short(slot, 25)).collect(),
            CompactionChoice::Merge(0),
        ),
        (
            "fuller is not small",
            published(50),
            (0..40).map(|slot| short(slot, 26)).collect(),
            CompactionChoice::Nothing,
        ),
    ];
    for (case, view, segments, expected) in cases {
        assert_eq!(choose(&view, segments.into_iter()), expected, "{case}");
    }
}

/// Changes the view of a thread that waits for free space.
type SpaceViewChange = fn(&mut wait::SpaceWaitView);

#[test]
fn wait_step_by_priority() {
    let nothing =
        wait::SpaceWaitView { free_bytes: 2 * UNIT, needed_bytes: 3 * UNIT, ..wait::SpaceWaitView::default() };
    let all = wait::SpaceWaitView {
        is_compacting: true,
        has_changed: true,
        has_failed: true,
        open_segment_holds_space: true,
        snapshot_is_unread: true,
        scan_consumers: 1,
        states_hold_space: true,
        space_is_pending: true,
        file_removal_failed: true,
        segment_is_unreadable: true,
        ..nothing
    };
    // Each row removes the condition of the previous step.
    let steps: [(SpaceViewChange, SpaceWaitStep); 12] = [
        (|view| view.free_bytes = view.needed_bytes, SpaceWaitStep::Proceed),
        (|view| view.free_bytes -= 1, SpaceWaitStep::Compact),
        (|view| view.is_compacting = false, SpaceWaitStep::Retry),
        (|view| view.has_changed = false, SpaceWaitStep::ReadOnly),
        (|view| view.has_failed = false, SpaceWaitStep::SealOpen),
        (|view| view.open_segment_holds_space = false, SpaceWaitStep::ReadForSnapshot),
        (|view| view.snapshot_is_unread = false, SpaceWaitStep::CancelScans),
        (|view| view.scan_consumers = 0, SpaceWaitStep::DropState),
        (|view| view.states_hold_space = false, SpaceWaitStep::Wait),
        (|view| view.space_is_pending = false, SpaceWaitStep::FileRemovalFailed),
        (|view| view.file_removal_failed = false, SpaceWaitStep::SegmentUnreadable),
        (|view| view.segment_is_unreadable = false, SpaceWaitStep::Full),
    ];
    let mut view = all;
    for (change, expected) in steps {
        change(&mut view);
        assert_eq!(next_space_wait_step(&view), expected, "{view:?}");
    }
    assert_eq!(next_space_wait_step(&nothing), SpaceWaitStep::Full);
}

prop_compose! {
    fn any_view()(
        free in 0..40_u64,
        moving in 0..=COMPACTORS + 1,
        rows_to_move in 0..300_u64,
        (can_write, was_published) in any::<(bool, bool)>(),
        states in 0..3_usize,
        retained in 0..40_u64,
        (tombstone_segments, tombstones_before) in (0..12_usize, 0..12_u64),
    ) -> CompactionView {
        let states = if was_published { states } else { 0 };
        CompactionView {
            can_write,
            moving,
            rows_to_move,
            was_published,
            states,
            retained_bytes: if states == 0 { 0 } else { retained * UNIT },
            tombstone_segments,
            tombstone_bytes: tombstone_segments as u64 * UNIT,
            tombstones_before,
            ..tier(free)
        }
    }
}

prop_compose! {
    fn any_segment()(
        records in 0..=ROWS,
        live in 0..=ROWS,
        more_bytes in 0..=UNIT,
        names in 1..4_u32,
        (can_move, sealed) in any::<(bool, bool)>(),
        made_seq in 0..1000_u64,
    ) -> SegmentView {
        let least = UNIT * u64::from(records) / u64::from(ROWS);
        SegmentView {
            can_move: can_move && sealed,
            sealed,
            live: live.min(records),
            held_bytes: (least + more_bytes).min(UNIT),
            ref_count: names,
            made_seq,
            ..short(0, records)
        }
    }
}

fn any_segments() -> impl Strategy<Value = Vec<SegmentView>> {
    prop::collection::vec(any_segment(), 0..30).prop_map(|mut segments| {
        for (number, segment) in segments.iter_mut().enumerate() {
            (segment.slot, segment.serial) = (number as u32, number as u64);
        }
        segments
    })
}

fn any_waiting() -> impl Strategy<Value = wait::SpaceWaitView> {
    let flags = any::<[bool; 9]>();
    (flags, 0..3_usize, 0..6_u64, 3..6_u64).prop_map(|(flags, takers, free, needed)| wait::SpaceWaitView {
        free_bytes: free * UNIT,
        needed_bytes: needed * UNIT,
        is_compacting: flags[0],
        has_changed: flags[1],
        has_failed: flags[2],
        open_segment_holds_space: flags[3],
        snapshot_is_unread: flags[4],
        scan_consumers: takers,
        states_hold_space: flags[5],
        space_is_pending: flags[6],
        file_removal_failed: flags[7],
        segment_is_unreadable: flags[8],
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Property C1: the chosen segment exists and can be moved completely.
    #[test]
    fn a_choice_can_be_finished(view in any_view(), segments in any_segments()) {
        let choice = choose(&view, segments.iter().copied());
        let Some(slot) = choice.slot() else { return Ok(()) };
        let chosen = segments[slot as usize];
        prop_assert!(view.can_write && chosen.can_move && chosen.sealed);
        prop_assert!(u64::from(chosen.live) <= view.rows_to_move);
        prop_assert!(view.moving == 0 || view.moving < COMPACTORS && view.free_bytes >= u64::from(view.moving + 1) * UNIT);
    }

    /// Property C2: a `FreeSpace` choice immediately frees more than its live rows occupy in full segments.
    #[test]
    fn freeing_space_frees_space(view in any_view(), segments in any_segments()) {
        if let CompactionChoice::FreeSpace(slot) = choose(&view, segments.iter().copied()) {
            let chosen = segments[slot as usize];
            prop_assert_eq!(chosen.ref_count, 1, "no published state keeps the file");
            let taken = u64::from(chosen.live) * UNIT;
            let dead = chosen.live < chosen.records;
            prop_assert!(dead || taken < chosen.held_bytes * u64::from(ROWS));
        }
    }

    /// Property C3: while rows wait and no state could be discarded for them, any segment is chosen that can be moved
    /// and frees space.
    #[test]
    fn no_reclaimable_space_is_left(view in any_view(), segments in any_segments()) {
        let view = CompactionView { free_bytes: view.free_bytes % (3 * UNIT), moving: 0, can_write: true, ..view };
        let makes_room = |s: &SegmentView| s.can_move && s.ref_count == 1 && s.utilization(&view) < 1.0;
        let fits = |s: &SegmentView| u64::from(s.live) <= view.rows_to_move;
        let could = segments.iter().any(|s| makes_room(s) && fits(s));
        let choice = choose(&view, segments.iter().copied());
        if could && !view.states_hold_space(segments.iter().copied()) {
            prop_assert!(matches!(choice, CompactionChoice::FreeSpace(_)), "{:?}", choice);
        }
        if !could {
            prop_assert!(!matches!(choice, CompactionChoice::FreeSpace(_)), "{:?}", choice);
        }
    }

    /// Property C4: a move for a reason other than space leaves a segment free in addition to the one that it may need.
    #[test]
    fn other_choices_leave_enough_space(view in any_view(), segments in any_segments()) {
        let choice = choose(&view, segments.iter().copied());
        if matches!(choice, CompactionChoice::FreeTombstones(_) | CompactionChoice::Thin(_) | CompactionChoice::Merge(_)) {
            prop_assert!(view.free_bytes >= 2 * UNIT);
        }
    }

    /// Property W1: the preconditions of a step hold.
    #[test]
    fn a_step_can_be_done(view in any_waiting()) {
        let there = match next_space_wait_step(&view) {
            SpaceWaitStep::Proceed => view.free_bytes >= view.needed_bytes,
            SpaceWaitStep::Compact => view.is_compacting,
            SpaceWaitStep::Retry => view.has_changed,
            SpaceWaitStep::ReadOnly => view.has_failed,
            SpaceWaitStep::SealOpen => view.open_segment_holds_space,
            SpaceWaitStep::ReadForSnapshot => view.snapshot_is_unread,
            SpaceWaitStep::CancelScans => view.scan_consumers > 0,
            SpaceWaitStep::DropState => view.states_hold_space,
            SpaceWaitStep::Wait => view.space_is_pending,
            SpaceWaitStep::FileRemovalFailed => view.file_removal_failed,
            SpaceWaitStep::SegmentUnreadable => view.segment_is_unreadable,
            SpaceWaitStep::Full => true,
        };
        prop_assert!(there);
    }

    /// Property W2: an error with a reason occurs only if nothing is left that could free space.
    #[test]
    fn no_error_while_space_can_be_freed(view in any_waiting()) {
        if matches!(next_space_wait_step(&view), SpaceWaitStep::FileRemovalFailed | SpaceWaitStep::SegmentUnreadable | SpaceWaitStep::Full) {
            prop_assert!(view.free_bytes < view.needed_bytes && view.scan_consumers == 0);
            prop_assert!(!view.is_compacting && !view.has_changed && !view.open_segment_holds_space && !view.snapshot_is_unread);
            prop_assert!(!view.states_hold_space && !view.space_is_pending);
        }
    }

    /// Property W3: no thread waits for a change that cannot happen, and no state is discarded while anything else
    /// could free space.
    #[test]
    fn states_are_dropped_last(view in any_waiting()) {
        let step = next_space_wait_step(&view);
        if step == SpaceWaitStep::Wait {
            prop_assert!(view.space_is_pending);
        }
        if step == SpaceWaitStep::DropState {
            prop_assert!(!view.is_compacting && !view.open_segment_holds_space && !view.snapshot_is_unread && view.scan_consumers == 0);
        }
    }
}
