//! Plans whose rows are in place: from then on until it is trained or released, a plan's kernels may use its rows at any time.

use std::collections::HashMap;
use std::sync::Arc;

use crate::types::Id;

/// The ids of the plans that are in place, of a table whose rows may die.
#[derive(Debug, Default)]
pub(super) struct ActivePlans {
    /// The distinct ids of each plan.
    plans: Vec<Arc<Vec<Id>>>,
    /// All of them, each with the number of plans that have it. It is made when somebody asks for one, and kept up from then on until the
    /// sweep ends, so that a plan costs as much as its own ids however many others are in place.
    ids: Option<HashMap<Id, u32>>,
}

impl ActivePlans {
    /// A plan with these ids is in place.
    pub(super) fn add(&mut self, ids: &Arc<Vec<Id>>) {
        self.plans.push(Arc::clone(ids));
        if let Some(counts) = &mut self.ids {
            count(counts, ids);
        }
    }

    /// A plan with these ids is trained or released. Returns whether it was in place.
    pub(super) fn remove(&mut self, ids: &Arc<Vec<Id>>) -> bool {
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

    /// Whether a plan that is in place has this id.
    pub(super) fn has(&mut self, id: Id) -> bool {
        self.plans_with(id) > 0
    }

    /// How many of the plans that are in place have this id.
    pub(super) fn plans_with(&mut self, id: Id) -> u32 {
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

    /// Nobody will ask for ids until the next sweep.
    pub(super) fn sweep_has_ended(&mut self) {
        self.ids = None;
    }
}

fn count(counts: &mut HashMap<Id, u32>, ids: &[Id]) {
    for &id in ids {
        *counts.entry(id).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_in_place_as_long_as_one_of_its_plans_is() {
        let mut in_place = ActivePlans::default();
        let (first, second, never) = (Arc::new(vec![1, 2]), Arc::new(vec![2, 3]), Arc::new(vec![2, 3]));
        in_place.add(&first);
        in_place.add(&second);
        assert_eq!([1, 2, 3, 4].map(|id| in_place.plans_with(id)), [1, 2, 1, 0]);
        assert!(in_place.remove(&first) && !in_place.remove(&first) && !in_place.remove(&never));
        assert_eq!([1, 2, 3, 4].map(|id| in_place.has(id)), [false, true, true, false]);
        in_place.add(&never);
        assert_eq!([1, 2, 3, 4].map(|id| in_place.plans_with(id)), [0, 2, 2, 0]);
        in_place.sweep_has_ended();
        assert_eq!([1, 2, 3, 4].map(|id| in_place.plans_with(id)), [0, 2, 2, 0]);
        assert!(in_place.remove(&second) && in_place.remove(&never));
        assert!(!in_place.has(2));
    }
}
