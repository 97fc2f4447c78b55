//! Active plans: from activation until it is trained or released, a plan's kernels may use its rows at any time.

use std::collections::HashMap;
use std::sync::Arc;

use crate::types::Id;

/// The ids of the active plans of a table whose rows may expire.
#[derive(Debug, Default)]
pub(crate) struct ActivePlans {
    /// The distinct ids of each plan.
    plans: Vec<Arc<Vec<Id>>>,
    /// All ids with the number of plans that use each. Built at the first query and kept up to date until the sweep
    /// ends, so that the cost of a plan depends only on its own ids.
    ids: Option<HashMap<Id, u32>>,
}

impl ActivePlans {
    /// Adds an active plan with these ids.
    pub(crate) fn add(&mut self, ids: &Arc<Vec<Id>>) {
        self.plans.push(Arc::clone(ids));
        if let Some(counts) = &mut self.ids {
            count(counts, ids);
        }
    }

    /// Removes a plan with these ids, which is trained or released. Returns true if it was active.
    pub(crate) fn remove(&mut self, ids: &Arc<Vec<Id>>) -> bool {
        let Some(at) = self.plans.iter().position(|plan| Arc::ptr_eq(plan, ids)) else { return false };
        self.plans.swap_remove(at);
        for id in ids.iter() {
            let Some(counts) = &mut self.ids else { break };
            if let Some(plans) = counts.get_mut(id) {
                *plans -= 1;
                if *plans == 0 {
                    counts.remove(id);
                }
            }
        }
        true
    }

    /// True if an active plan uses this id.
    pub(crate) fn has(&mut self, id: Id) -> bool {
        self.plans_with(id) > 0
    }

    /// Number of active plans that use this id.
    pub(crate) fn plans_with(&mut self, id: Id) -> u32 {
        if self.plans.is_empty() {
            return 0;
        }
        let plans = &self.plans;
        let counts = self.ids.get_or_insert_with(|| {
            let mut counts = HashMap::new();
            for plan in plans {
                count(&mut counts, plan);
            }
            counts
        });
        counts.get(&id).copied().unwrap_or(0)
    }

    /// Frees the counts, which are not queried until the next sweep.
    pub(crate) fn sweep_has_ended(&mut self) {
        self.ids = None;
    }
}

fn count(counts: &mut HashMap<Id, u32>, ids: &[Id]) {
    for &id in ids {
        *counts.entry(id).or_default() += 1;
    }
}

#[cfg(test)]
mod tests;
