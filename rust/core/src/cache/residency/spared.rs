//! Rows that outlive the sweep which has spared them: plans in place use them, and another sweep has begun that does not take all that the
//! one before takes. Each such row is judged by the sweep that has spared it, before later ones judge it, once its plan has ended.

use std::collections::HashSet;
use std::sync::Arc;

use super::Residency;
use super::judge::SweepMatcher;
use super::under_way::SweepProgress;
use crate::error::Result;
use crate::rows::RowHeader;
use crate::types::{Id, NO_SLOT};

/// The rows of so many sweeps are kept at most. They are those of one or two, where each batch ends some day.
const MOST_SWEEPS: usize = 64;

/// The rows that sweeps before the one under way have spared.
#[derive(Debug, Default)]
pub(super) struct DeferredRows {
    /// The oldest sweep first. None is without rows.
    by_sweep: Vec<SweepDeferral>,
}

/// The rows that a sweep has spared.
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
    /// A sweep under way was gone through, but for rows that it spares: keep them, so that another sweep can begin.
    pub(super) fn defer_rest(&mut self) {
        let Some(under_way) = self.sweep.take() else { return };
        self.log_sweep_ended(&under_way);
        let SweepProgress { matcher: judge, deferred: mut later, .. } = under_way;
        // A row dies by the first sweep that takes it. If it is trained before, none of them takes it.
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

    /// The spared rows that are sure to die unless they are trained before.
    fn expiring_ids(&self) -> HashSet<Id> {
        let mut doomed = HashSet::new();
        for SweepDeferral { matcher: judge, ids } in &self.deferred.by_sweep {
            // The weights of a row that kernels may be writing are not looked at.
            if !judge.sweep.needs_weights() {
                let dies = |id: &Id| self.header_in_ram(*id).is_some_and(|header| judge.sweep.matches(&header, &[]));
                doomed.extend(ids.iter().copied().filter(dies));
            }
        }
        doomed
    }

    /// The header of a row whose newest copy is in RAM or on the device.
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

    /// Bury the dead ones among the spared rows whose plans have ended, each as taken by the sweep that has spared it.
    ///
    /// Errors: as [`Residency::finish_sweep`]. Rows that were not judged stay spared, and no later sweep has judged them.
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

    /// As [`Residency::expire_deferred`], of those of these rows that are in RAM.
    pub(super) fn expire_deferred_of(&mut self, ids: &[Id]) -> Result<()> {
        if self.deferred.is_empty() {
            return Ok(());
        }
        let ids: HashSet<Id> = ids.iter().copied().collect();
        (0..self.deferred.by_sweep.len()).try_for_each(|sweep| {
            let spared = &self.deferred.by_sweep[sweep];
            let wanted: Vec<Id> = spared.ids.iter().copied().filter(|id| ids.contains(id)).collect();
            // Those that stay spared are among the sweep's rows already.
            self.expire_in_ram(&wanted, &Arc::clone(&spared.matcher)).map(drop)
        })
    }

    /// The sweeps that rows which a plan brings in are held against, in this order. With each are the rows that it may take, where these are
    /// not all that its rule takes.
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
