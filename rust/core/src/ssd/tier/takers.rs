//! Scans that end for others. Whoever takes the rows of a scan may keep it waiting, and then the files that it keeps make no room.

use std::sync::Arc;

use crate::sync::{Mutex, lock};

/// Takes the rows of a scan, and may keep it waiting for as long as it likes.
pub trait GiveWay: std::fmt::Debug + Send + Sync {
    /// End the scan if it is kept waiting now; whether it is. It waits for nobody, because the tier's lock is held.
    fn give_way(&self) -> bool;
}

/// Who takes the rows of scans that are under way.
#[derive(Debug, Default)]
pub(crate) struct Takers(Mutex<Vec<Arc<dyn GiveWay>>>);

/// A taker on the list. Dropping it takes it off.
pub(crate) struct Listed<'a> {
    takers: &'a Takers,
    taker: &'a Arc<dyn GiveWay>,
}

impl Takers {
    /// Add a taker for as long as its scan is under way.
    pub(crate) fn list<'a>(&'a self, taker: &'a Arc<dyn GiveWay>) -> Listed<'a> {
        lock(&self.0).push(Arc::clone(taker));
        Listed { takers: self, taker }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        lock(&self.0).len()
    }

    /// End the scans that are kept waiting; whether there are any. They let go of their files soon.
    pub(crate) fn give_way(&self) -> bool {
        let takers = lock(&self.0).clone();
        // Every one is asked: `any` would stop at the first.
        takers.iter().filter(|taker| taker.give_way()).count() > 0
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        let mut takers = lock(&self.takers.0);
        let own = takers.iter().position(|other| Arc::ptr_eq(other, self.taker));
        own.map(|at| takers.swap_remove(at));
    }
}
