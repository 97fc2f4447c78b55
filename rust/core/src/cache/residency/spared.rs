//! Deferred rows: they matched a sweep while an active plan was using them, and another sweep has started since that
//! does not cover that sweep. Once the plan of such a row ends, the row is matched against the sweep that deferred it,
//! before later sweeps are matched.

use std::collections::HashSet;
use std::sync::Arc;

use super::Residency;
use super::judge::SweepMatcher;
use super::under_way::SweepProgress;
use crate::error::Result;
use crate::rows::RowHeader;
use crate::types::{Id, NO_SLOT};

/// Maximum number of sweeps with deferred rows. In practice there are one or two, because every batch ends eventually.
const MOST_SWEEPS: usize = 64;

/// Rows deferred by sweeps before the one in progress.
#[derive(Debug, Default)]
pub(super) struct DeferredRows {
    /// Oldest sweep first. Every sweep has rows.
    by_sweep: Vec<SweepDeferral>,
}

/// The rows deferred by one sweep.
#[derive(Debug)]
struct SweepDeferral {
    matcher: Arc<SweepMatcher>,
    ids: Vec<Id>,
}

impl DeferredRows {
    pub(super) fn is_empty(&self) -> bool {
        self.by_sweep.is_empty()
    }
}

impl Residency {
    /// Moves the deferred rows of a sweep that has passed all tiers out of it, so that another sweep can start.
    pub(super) fn defer_rest(&mut self) {
        let Some(under_way) = self.sweep.take() else { return };
        self.log_sweep_ended(&under_way);
        let SweepProgress { matcher: judge, deferred: mut later, .. } = under_way;
        // A row expires by the first sweep that matches it. If it is trained before, no sweep matches it.
        let doomed: HashSet<Id> = self.expiring_ids();
        later.retain(|id| !doomed.contains(id));
        if later.is_empty() {
            return;
        }
        let by_sweep = &mut self.deferred.by_sweep;
        by_sweep.push(SweepDeferral { matcher: judge, ids: later });
        if by_sweep.len() <= MOST_SWEEPS {
            return;
        }
        let oldest = by_sweep.remove(0);
        let takes_all = |newer: &&mut SweepDeferral| newer.matcher.sweep.covers(&oldest.matcher.sweep);
        if let Some(newer) = by_sweep.iter_mut().find(takes_all) {
            newer.ids.extend(oldest.ids);
            newer.ids.sort_unstable();
            newer.ids.dedup();
            return;
        }
        self.history.forget();
        tracing::warn!(
            "table {:?}: more than {MOST_SWEEPS} sweeps came between the forward of a batch and its backward, and {} rows that the \
             sweep after step {} spared live on; drop what holds the batch, such as its loss",
            self.context.config.name,
            oldest.ids.len(),
            oldest.matcher.sweep.step
        );
    }

    /// The deferred rows that are certain to expire unless they are trained before.
    fn expiring_ids(&self) -> HashSet<Id> {
        let mut doomed = HashSet::new();
        for SweepDeferral { matcher: judge, ids } in &self.deferred.by_sweep {
            // Kernels may be writing the weights of these rows, so the weights are not read.
            if !judge.sweep.needs_weights() {
                let dies = |id: &Id| self.header_in_ram(*id).is_some_and(|header| judge.sweep.matches(&header, &[]));
                doomed.extend(ids.iter().copied().filter(dies));
            }
        }
        doomed
    }

    /// The header of a row whose current copy is in RAM or on the device.
    fn header_in_ram(&self, id: Id) -> Option<RowHeader> {
        if let Some(tier) = &self.device {
            let slot = tier.slots.get(id);
            if slot != NO_SLOT && tier.slots.state(slot).is_current() {
                return Some(*tier.header(slot));
            }
        }
        let slot = self.host.slots.get(id);
        (slot != NO_SLOT && self.host.slots.state(slot).is_current()).then(|| self.host.metadata(slot))
    }

    /// Expires the matching deferred rows whose plans have ended, each by the sweep that deferred it.
    ///
    /// Errors: as [`Residency::finish_sweep`]. Rows that were not matched stay deferred, and no later sweep has matched
    /// them.
    pub(super) fn expire_deferred(&mut self) -> Result<()> {
        let buried = (0..self.deferred.by_sweep.len()).try_for_each(|sweep| {
            let SweepDeferral { matcher: judge, ids } = &self.deferred.by_sweep[sweep];
            let (judge, ids) = (Arc::clone(judge), ids.clone());
            self.deferred.by_sweep[sweep].ids = self.expire_deferred_ids(ids, &judge)?;
            Ok(())
        });
        self.deferred.by_sweep.retain(|spared| !spared.ids.is_empty());
        buried
    }

    /// Like [`Residency::expire_deferred`], but only for rows of `ids` that are in RAM.
    pub(super) fn expire_deferred_of(&mut self, ids: &[Id]) -> Result<()> {
        if self.deferred.is_empty() {
            return Ok(());
        }
        let ids: HashSet<Id> = ids.iter().copied().collect();
        (0..self.deferred.by_sweep.len()).try_for_each(|sweep| {
            let spared = &self.deferred.by_sweep[sweep];
            let wanted: Vec<Id> = spared.ids.iter().copied().filter(|id| ids.contains(id)).collect();
            // The sweep has the remaining deferred rows already.
            self.expire_in_ram(&wanted, &Arc::clone(&spared.matcher)).map(drop)
        })
    }

    /// The sweeps against which rows that a plan loads are matched, in this order. Each has the set of rows that it may
    /// match, or `None` for all rows.
    pub(super) fn matchers_of_arrivals(&self) -> Vec<(Arc<SweepMatcher>, Option<HashSet<Id>>)> {
        let spared = self.deferred.by_sweep.iter();
        let mut judges: Vec<_> = spared.map(|SweepDeferral { matcher: judge, ids }| (judge, Some(ids))).collect();
        if let Some(SweepProgress { matcher: judge, passed, deferred: later, .. }) = &self.sweep
            && !(*passed && later.is_empty())
        {
            judges.push((judge, passed.then_some(later)));
        }
        let set = |ids: &Vec<Id>| ids.iter().copied().collect();
        judges.into_iter().map(|(judge, ids)| (Arc::clone(judge), ids.map(set))).collect()
    }
}
