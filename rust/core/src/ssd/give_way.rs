//! Scans that end for others: whoever takes their rows may keep them waiting, and the files of a scan that waits make no room.

use std::sync::Arc;

use super::shared::Shared;
use super::{ScanSink, SsdTier};
use crate::error::Result;
use crate::sync::lock;

/// Takes the rows of a scan, and may keep it waiting for as long as it likes.
pub trait GiveWay: std::fmt::Debug + Send + Sync {
    /// End the scan if it is kept waiting now; whether it is. Called under the tier's lock: it waits for nobody.
    fn give_way(&self) -> bool;
}

impl SsdTier {
    /// As [`SsdTier::scan`], for a `sink` that keeps the scan waiting. Where somebody needs the room of files that the scan keeps, `taker`
    /// is asked to end it. It calls [`SsdTier::look_again`] whenever it begins to keep the scan waiting.
    pub fn scan_giving_way(&self, taker: &Arc<dyn GiveWay>, sink: &mut ScanSink<'_>) -> Result<()> {
        lock(&self.shared.takers).push(Arc::clone(taker));
        // Dropped after the scan, which has let go of its files by then.
        let _listed = Listed { tier: &self.shared, taker };
        self.scan(sink)
    }

    /// Let those who wait for room look again what stands in their way.
    pub fn look_again(&self) {
        self.shared.home.space.poke();
    }
}

/// Takes a taker off the tier's list when its scan is over.
struct Listed<'a> {
    tier: &'a Shared,
    taker: &'a Arc<dyn GiveWay>,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        let mut takers = lock(&self.tier.takers);
        let own = takers.iter().position(|other| Arc::ptr_eq(other, self.taker));
        own.map(|at| takers.swap_remove(at));
    }
}

impl Shared {
    /// End the scans that are kept waiting; whether there are any. They let go of their files soon.
    pub(super) fn waiting_scans_give_way(&self) -> bool {
        let takers = lock(&self.takers).clone();
        // Every one is asked: `any` would stop at the first.
        takers.iter().filter(|taker| taker.give_way()).count() > 0
    }
}
