//! Deferred rows: they matched a sweep while an active plan was using them, and another sweep has started since that
//! does not cover that sweep. Once the plan of such a row ends, the row is matched against the sweep that deferred it,
//! before later sweeps are matched.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use super::Residency;
use super::progress::SweepProgress;
use crate::cache::placement::{Placement, PlanPins, StagedRows, SweepMatcher};
use crate::error::Result;
use crate::rows::{RowHeader, RowRef};
use crate::slots::RowState;
use crate::types::{Id, NO_SLOT};

/// Maximum number of sweeps with deferred rows. In practice there are one or two, because every batch ends eventually.
const MOST_SWEEPS: usize = 64;

/// Rows deferred by sweeps before the one in progress.
#[derive(Debug, Default)]
pub(crate) struct DeferredRows {
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
        self.collect_moved();
        self.placement.changes.moved.stop();
        let Some(progress) = self.lifecycle.sweep.take() else { return };
        self.placement.log_sweep_ended(&progress);
        let SweepProgress { matcher, mut deferred, .. } = progress;
        // A row expires by the first sweep that matches it. If it is trained before, no sweep matches it.
        let expiring: HashSet<Id> = self.expiring_ids();
        deferred.retain(|id| !expiring.contains(id));
        if deferred.is_empty() {
            return;
        }
        let by_sweep = &mut self.lifecycle.deferred.by_sweep;
        by_sweep.push(SweepDeferral { matcher, ids: deferred });
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
        self.placement.changes.history.forget();
        tracing::warn!(
            "table {:?}: more than {MOST_SWEEPS} sweeps came between the forward of a batch and its backward, and {} rows that the \
             sweep after step {} deferred are kept; drop what holds the batch, such as its loss",
            self.placement.context.config.name,
            oldest.ids.len(),
            oldest.matcher.sweep.step
        );
    }

    /// The deferred rows that are certain to expire unless they are trained before.
    fn expiring_ids(&self) -> HashSet<Id> {
        let mut expiring = HashSet::new();
        for SweepDeferral { matcher, ids } in &self.lifecycle.deferred.by_sweep {
            // Kernels may be writing the weights of these rows, so the weights are not read.
            if !matcher.sweep.needs_weights() {
                let is_expired = |id: &Id| {
                    self.placement.header_in_ram(*id).is_some_and(|header| matcher.sweep.matches(&header, &[]))
                };
                expiring.extend(ids.iter().copied().filter(is_expired));
            }
        }
        expiring
    }

    /// Expires the matching deferred rows whose plans have ended, each by the sweep that deferred it.
    ///
    /// Errors: as [`Residency::finish_sweep`]. Rows that were not matched stay deferred, and no later sweep has matched
    /// them.
    pub(super) fn expire_deferred(&mut self) -> Result<()> {
        let outcome = (0..self.lifecycle.deferred.by_sweep.len()).try_for_each(|sweep| {
            let SweepDeferral { matcher, ids } = &self.lifecycle.deferred.by_sweep[sweep];
            let (matcher, ids) = (Arc::clone(matcher), ids.clone());
            self.lifecycle.deferred.by_sweep[sweep].ids = self.expire_deferred_ids(ids, &matcher)?;
            Ok(())
        });
        self.lifecycle.deferred.by_sweep.retain(|deferral| !deferral.ids.is_empty());
        outcome
    }

    /// Like [`Residency::expire_deferred`], but only for rows of `ids` that are in RAM.
    pub(super) fn expire_deferred_of(&mut self, ids: &[Id]) -> Result<()> {
        if self.lifecycle.deferred.is_empty() {
            return Ok(());
        }
        let ids: HashSet<Id> = ids.iter().copied().collect();
        (0..self.lifecycle.deferred.by_sweep.len()).try_for_each(|sweep| {
            let deferral = &self.lifecycle.deferred.by_sweep[sweep];
            let wanted: Vec<Id> = deferral.ids.iter().copied().filter(|id| ids.contains(id)).collect();
            // The rows that stay deferred are in `deferral.ids` already.
            self.expire_in_ram(&wanted, &Arc::clone(&deferral.matcher)).map(drop)
        })
    }

    /// The sweeps against which rows that a plan loads are matched, in this order. Each has the set of rows that it may
    /// match, or `None` for all rows.
    fn matchers_of_arrivals(&self) -> Vec<(Arc<SweepMatcher>, Option<HashSet<Id>>)> {
        let deferrals = self.lifecycle.deferred.by_sweep.iter();
        let mut matchers: Vec<_> = deferrals.map(|SweepDeferral { matcher, ids }| (matcher, Some(ids))).collect();
        if let Some(SweepProgress { matcher, passed, deferred, .. }) = &self.lifecycle.sweep
            && !(*passed && deferred.is_empty())
        {
            matchers.push((matcher, passed.then_some(deferred)));
        }
        let set = |ids: &Vec<Id>| ids.iter().copied().collect();
        matchers.into_iter().map(|(matcher, ids)| (Arc::clone(matcher), ids.map(set))).collect()
    }

    /// Removes staged rows that were just read from SSD and that sweeps match: they become provisional, like absent
    /// rows.
    pub(crate) fn expire_staged_reads(&mut self, pins: &PlanPins, staged: &mut StagedRows<'_>) -> Result<()> {
        if staged.ssd_hits == 0 {
            return Ok(());
        }
        let started = Instant::now();
        let (dim, floats) = (self.placement.context.layout.dim, self.placement.context.floats());
        for (matcher, only) in self.matchers_of_arrivals() {
            let id = |index: usize| pins.ids[staged.rows[index].position as usize];
            let is_expired = |&index: &usize| {
                staged.rows[index].state.has(RowState::ON_SSD)
                    && only.as_ref().is_none_or(|only| only.contains(&id(index)))
                    && matcher.sweep.matches(&staged.headers[index], &staged.vectors[index * floats..][..dim])
            };
            let mut expired: Vec<usize> = (staged.from_host..staged.rows.len()).filter(is_expired).collect();
            // Another active plan may be about to load the row too.
            expired.retain(|&index| self.placement.active_plans.plans_with(id(index)) <= 1);
            let row = |&index: &usize| RowRef {
                header: &staged.headers[index],
                vector: &staged.vectors[index * floats..][..floats],
            };
            self.expire_read_rows(&expired.iter().map(row).collect::<Vec<RowRef<'_>>>(), &matcher)?;
            for &index in &expired {
                staged.rows[index].state = RowState::PROVISIONAL;
            }
            staged.ssd_hits -= expired.len() as u64;
            staged.ssd_misses += expired.len() as u64;
        }
        self.placement.traffic.ssd_time_ns += started.elapsed().as_nanos() as u64;
        Ok(())
    }
}

impl Placement {
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
}
