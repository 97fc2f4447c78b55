//! Sweeps: the rows of a table that expire after a step, as a rule and not as a list of ids.
//!
//! A row expires by its own columns, the sweep's step and the constants of the rule, and by nothing else. So every
//! tier, rank and checkpoint finds the same expired rows at any time.

use serde::{Deserialize, Serialize};

use super::rank_order::{RankKey, stays_below};
use crate::config::EvictionRule;
use crate::rows::{RowHeader, ScoreDecay};

/// The rule of a sweep. Its serde form is part of published states and of manifests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ExpiryRule {
    /// Rows whose last training step is at most this one.
    LastStep(u64),
    /// Rows whose score, decayed to the sweep's step, is below `below`.
    ScoreBelow {
        /// The bound.
        below: f32,
        /// The half life of scores, in steps.
        half_life: u64,
    },
    /// Rows whose weights have an L2 norm below this.
    NormBelow(f64),
    /// Rows below a threshold in eviction order at the sweep's step.
    Below {
        /// The rank key of the lowest row that is kept.
        threshold: RankKey,
        /// The half life of scores, in steps.
        half_life: u64,
    },
    /// Rows that match any of these rules.
    Any(Vec<ExpiryRule>),
    /// Rows that match all of these rules.
    All(Vec<ExpiryRule>),
}

/// A rule, and the step after which it was applied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpirySweep {
    /// Rows that were trained after this step are not evaluated.
    pub step: u64,
    /// The rule that is evaluated for the other rows.
    pub rule: ExpiryRule,
}

impl ExpirySweep {
    /// Creates the sweep of a table's rule after `step`, for scores that halve every `half_life` steps.
    pub fn after(step: u64, rule: &EvictionRule, half_life: u64) -> Self {
        Self { step, rule: ExpiryRule::after(step, rule, half_life) }
    }

    /// The maximum last step of a row that may expire.
    pub fn latest_step(&self) -> u64 {
        self.rule.latest_step().unwrap_or(self.step).min(self.step)
    }

    /// True if a row expires exactly if its last step is at most [`ExpirySweep::latest_step`].
    pub fn is_by_last_step(&self) -> bool {
        matches!(self.rule, ExpiryRule::LastStep(_))
    }

    /// True if a row with weights `[D]` expires. The weights may be empty unless the rule
    /// [needs](ExpirySweep::needs_weights) them.
    pub fn matches(&self, header: &RowHeader, weights: &[f32]) -> bool {
        header.last_step <= self.step && self.rule.matches(self.step, header, weights)
    }

    /// Returns the part of the rule that matches a row with weights `[D]`, or `None` if the row is kept. If rules are
    /// joined by "any", the part contains only the matching ones.
    pub fn matching_rule(&self, header: &RowHeader, weights: &[f32]) -> Option<ExpiryRule> {
        if self.matches(header, weights) { self.rule.matching_rule(self.step, header, weights) } else { None }
    }

    /// The score of a row after the sweep's step, by the half life of `rule`, a part of this sweep's rule. `None` if
    /// that has no half life.
    pub fn score_by(&self, rule: &ExpiryRule, header: &RowHeader) -> Option<f32> {
        match rule {
            ExpiryRule::ScoreBelow { half_life, .. } | ExpiryRule::Below { half_life, .. } => {
                Some(decayed(header, *half_life, self.step))
            }
            ExpiryRule::Any(rules) | ExpiryRule::All(rules) => {
                rules.iter().find_map(|rule| self.score_by(rule, header))
            }
            _ => None,
        }
    }

    /// The name of the rule that matches an expired row; of several, the first. `weights` are `[D]`.
    pub fn reason(&self, header: &RowHeader, weights: &[f32]) -> &'static str {
        self.rule.reason(self.step, header, weights)
    }

    /// Adds the possible results of [`ExpirySweep::reason`] to `names`, without duplicates.
    pub fn add_reasons(&self, names: &mut Vec<&'static str>) {
        self.rule.add_reasons(names);
    }

    /// True if the rule reads weights.
    pub fn needs_weights(&self) -> bool {
        self.rule.needs_weights()
    }

    /// True if every row that expires by `older` also expires by this sweep, unless it was trained or inserted since.
    pub fn covers(&self, older: &Self) -> bool {
        self == older || self.step >= older.step && self.rule.covers(&older.rule)
    }
}

impl ExpiryRule {
    fn after(step: u64, rule: &EvictionRule, half_life: u64) -> Self {
        let each = |rules: &[EvictionRule]| rules.iter().map(|rule| Self::after(step, rule, half_life)).collect();
        match rule {
            EvictionRule::Any(rules) | EvictionRule::All(rules) if rules.len() == 1 => {
                Self::after(step, &rules[0], half_life)
            }
            // No row is that old if the table has made fewer steps.
            EvictionRule::Unused { steps } => step.checked_sub(*steps).map_or(Self::Any(Vec::new()), Self::LastStep),
            EvictionRule::ScoreBelow(below) => Self::ScoreBelow { below: *below, half_life },
            EvictionRule::NormBelow(below) => Self::NormBelow(*below),
            EvictionRule::TrainedUntil { step } => Self::LastStep(*step),
            // The latter two are placeholders for a rule that the caller has substituted.
            EvictionRule::Nothing | EvictionRule::PerSweep | EvictionRule::PerSweepTimed => Self::Any(Vec::new()),
            EvictionRule::Below { score, last_step, id } => {
                Self::Below { threshold: RankKey { score: *score, last_step: *last_step, id: *id }, half_life }
            }
            EvictionRule::Any(rules) => Self::Any(each(rules)),
            EvictionRule::All(rules) => Self::All(each(rules)),
        }
    }

    /// The maximum last step of a row that may match, or `None` if the rule has no limit.
    fn latest_step(&self) -> Option<u64> {
        match self {
            Self::LastStep(last) => Some(*last),
            Self::ScoreBelow { .. } | Self::NormBelow(_) | Self::Below { .. } => None,
            // The maximum of all rules, if each has a limit; without any rule no row matches.
            Self::Any(rules) => {
                rules.iter().try_fold(0, |greatest, rule| rule.latest_step().map(|latest| latest.max(greatest)))
            }
            Self::All(rules) => rules.iter().filter_map(Self::latest_step).min(),
        }
    }

    fn matches(&self, step: u64, header: &RowHeader, weights: &[f32]) -> bool {
        match self {
            Self::LastStep(last) => header.last_step <= *last,
            Self::ScoreBelow { below, half_life } => decayed(header, *half_life, step) < *below,
            Self::NormBelow(below) => {
                let squares = weights.iter().fold(0.0, |sum, &weight| sum + f64::from(weight) * f64::from(weight));
                squares < below * below
            }
            Self::Below { threshold: cut, half_life } => {
                RankKey::with(header, decayed(header, *half_life, step)) < *cut
            }
            Self::Any(rules) => rules.iter().any(|rule| rule.matches(step, header, weights)),
            Self::All(rules) => rules.iter().all(|rule| rule.matches(step, header, weights)),
        }
    }

    fn matching_rule(&self, step: u64, header: &RowHeader, weights: &[f32]) -> Option<Self> {
        if let Self::Any(rules) = self {
            let mut taking: Vec<Self> =
                rules.iter().filter_map(|rule| rule.matching_rule(step, header, weights)).collect();
            return if taking.len() > 1 { Some(Self::Any(taking)) } else { taking.pop() };
        }
        self.matches(step, header, weights).then(|| self.clone())
    }

    fn add_reasons(&self, names: &mut Vec<&'static str>) {
        let name = match self {
            Self::LastStep(_) => "ttl",
            Self::ScoreBelow { .. } => "score",
            Self::NormBelow(_) => "l2_norm",
            Self::Below { .. } => "lowest",
            Self::All(rules) => match &rules[..] {
                [rule, Self::Below { .. }] | [Self::Below { .. }, rule] => return rule.add_reasons(names),
                _ => "all",
            },
            Self::Any(rules) => return rules.iter().for_each(|rule| rule.add_reasons(names)),
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }

    fn reason(&self, step: u64, header: &RowHeader, weights: &[f32]) -> &'static str {
        match self {
            Self::LastStep(_) => "ttl",
            Self::ScoreBelow { .. } => "score",
            Self::NormBelow(_) => "l2_norm",
            Self::Below { .. } => "lowest",
            // A threshold as a floor only protects rows, so the other rule is the reason.
            Self::All(rules) => match &rules[..] {
                [rule, Self::Below { .. }] | [Self::Below { .. }, rule] => rule.reason(step, header, weights),
                _ => "all",
            },
            Self::Any(rules) => {
                let first = rules.iter().find(|rule| rule.matches(step, header, weights));
                first.map_or("", |rule| rule.reason(step, header, weights))
            }
        }
    }

    fn needs_weights(&self) -> bool {
        match self {
            Self::NormBelow(_) => true,
            Self::Any(rules) | Self::All(rules) => rules.iter().any(Self::needs_weights),
            Self::LastStep(_) | Self::ScoreBelow { .. } | Self::Below { .. } => false,
        }
    }

    /// True if every unmodified row that matches `older` also matches this rule at a later step.
    fn covers(&self, older: &Self) -> bool {
        match (self, older) {
            (Self::LastStep(now), Self::LastStep(before)) => now >= before,
            (
                Self::ScoreBelow { below, half_life },
                Self::ScoreBelow { below: before, half_life: half_life_before },
                // A score below 0, from a corrupted file, rises towards 0.
            ) => below >= before && *before > 0.0 && half_life == half_life_before,
            // In `matches`, a bound below 0, from a corrupted file, acts as its absolute value.
            (Self::NormBelow(now), Self::NormBelow(before)) => now * now >= before * before,
            // A score only decreases, down to 0, so a row below the threshold stays below it.
            (
                Self::Below { threshold: cut, half_life },
                Self::Below { threshold: before, half_life: half_life_before },
            ) => cut >= before && half_life == half_life_before && stays_below(before),
            (Self::All(now), Self::All(before)) if now.len() == before.len() => {
                now.iter().zip(before).all(|(now, before)| now.covers(before))
            }
            (now, Self::Any(before)) => before.iter().all(|before| now.covers(before)),
            (Self::Any(now), before) => now.iter().any(|now| now.covers(before)),
            _ => false,
        }
    }
}

fn decayed(header: &RowHeader, half_life: u64, step: u64) -> f32 {
    // A half life out of range, from a corrupted file, causes no decay.
    ScoreDecay::new(half_life).map_or(header.score, |decay| decay.of(header.score, header.last_step, step))
}

#[cfg(test)]
mod tests;
