//! All interleavings of planners and evictors: `RUSTFLAGS="--cfg loom" cargo test -p embcache --lib loom`.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::PinTable;

/// A slot's pins and its row. Loom fails the model when a write of the row overlaps any other access.
struct Slot {
    pins: PinTable,
    row: UnsafeCell<u64>,
}

impl Slot {
    fn new() -> Arc<Self> {
        Arc::new(Self { pins: PinTable::new(1), row: UnsafeCell::new(0) })
    }

    /// Reads the row under a pin.
    fn plan(&self) -> bool {
        let pinned = self.pins.pin(0);
        if pinned {
            self.row.with(|row| assert!(!row.is_null()));
            self.pins.unpin(0);
        }
        pinned
    }

    /// Writes the row under a claim.
    fn evict(&self) -> bool {
        let claimed = self.pins.try_claim(0);
        if claimed {
            self.row.with_mut(|row| assert!(!row.is_null()));
            self.pins.unclaim(0);
        }
        claimed
    }

    fn assert_free(&self) {
        assert!(!self.pins.is_pinned(0));
        assert!(self.pins.try_claim(0), "a pin or a claim leaked");
    }
}

#[test]
fn loom_no_row_is_taken_out_while_planners_use_it() {
    loom::model(|| {
        let slot = Slot::new();
        let planners = [0, 1].map(|_| {
            let slot = Arc::clone(&slot);
            thread::spawn(move || slot.plan())
        });
        slot.evict();
        for planner in planners {
            planner.join().unwrap();
        }
        slot.assert_free();
    });
}

/// A planner and an evictor that keep the slot they won never both win it.
#[test]
fn loom_a_planner_and_an_evictor_never_both_win() {
    loom::model(|| {
        let slot = Slot::new();
        let planner = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || slot.pins.pin(0))
        };
        let claimed = slot.pins.try_claim(0);
        let pinned = planner.join().unwrap();
        assert!(pinned != claimed, "exactly one wins");
    });
}

#[test]
fn loom_two_evictors_never_hold_one_slot() {
    loom::model(|| {
        let slot = Slot::new();
        let other = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || slot.evict())
        };
        let mine = slot.evict();
        let theirs = other.join().unwrap();
        assert!(mine || theirs);
        slot.assert_free();
    });
}

#[test]
fn loom_exactly_one_of_two_unpins_is_the_last() {
    loom::model(|| {
        let slot = Slot::new();
        assert!(slot.pins.pin(0) && slot.pins.pin(0));
        let other = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || slot.pins.unpin(0))
        };
        let mine = slot.pins.unpin(0);
        assert!(mine != other.join().unwrap());
        slot.assert_free();
    });
}
