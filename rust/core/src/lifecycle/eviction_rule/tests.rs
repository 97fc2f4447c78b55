use super::*;
use crate::lifecycle::rank_order::sortable_score;

fn row(last_step: u64, score: f32, id: crate::types::Id) -> RowHeader {
    RowHeader { id, last_step, score, ..RowHeader::default() }
}

fn sweep(step: u64, rule: ExpiryRule) -> ExpirySweep {
    ExpirySweep { step, rule }
}

#[test]
fn rows_die_by_their_own_columns_and_only_those_that_were_there() {
    let old = sweep(100, ExpiryRule::LastStep(40));
    assert!(old.matches(&row(40, 9.0, 1), &[]) && !old.matches(&row(41, 9.0, 1), &[]));
    let score = sweep(1000, ExpiryRule::ScoreBelow { below: 1.0, half_life: 100 });
    assert!(score.matches(&row(900, 1.9, 1), &[]) && !score.matches(&row(900, 2.0, 1), &[]), "one half life");
    assert!(!score.matches(&row(1001, 0.0, 1), &[]), "it was trained after the sweep");
    let norm = sweep(10, ExpiryRule::NormBelow(5.0));
    assert!(norm.matches(&row(1, 0.0, 1), &[3.0, 3.9]) && !norm.matches(&row(1, 0.0, 1), &[3.0, 4.0]));
}

#[test]
fn rules_are_joined_by_any_and_by_all() {
    let rules = || vec![ExpiryRule::LastStep(10), ExpiryRule::ScoreBelow { below: 2.0, half_life: 1 << 40 }];
    let (any, all) = (sweep(20, ExpiryRule::Any(rules())), sweep(20, ExpiryRule::All(rules())));
    for (last_step, score, some, every) in
        [(10, 1.0, true, true), (10, 3.0, true, false), (11, 1.0, true, false), (11, 3.0, false, false)]
    {
        assert_eq!(
            (any.matches(&row(last_step, score, 1), &[]), all.matches(&row(last_step, score, 1), &[])),
            (some, every)
        );
    }
    assert!(!any.needs_weights() && sweep(1, ExpiryRule::All(vec![ExpiryRule::NormBelow(1.0)])).needs_weights());
}

#[test]
fn the_matching_rules_of_any_are_reported() {
    let score = ExpiryRule::ScoreBelow { below: 2.0, half_life: 10 };
    let all = ExpiryRule::All(vec![ExpiryRule::LastStep(30), score.clone()]);
    let made = sweep(40, ExpiryRule::Any(vec![ExpiryRule::LastStep(10), all.clone(), ExpiryRule::NormBelow(1.0)]));
    let both = ExpiryRule::Any(vec![ExpiryRule::LastStep(10), all.clone()]);
    assert_eq!(made.matching_rule(&row(10, 9.0, 1), &[1.0]), Some(both), "its score is 9/8 after three half lives");
    assert_eq!(made.matching_rule(&row(30, 2.0, 1), &[1.0]), Some(all.clone()));
    assert_eq!(made.matching_rule(&row(31, 0.0, 1), &[1.0]), None);
    assert_eq!(made.matching_rule(&row(41, 0.0, 1), &[0.0]), None, "it was trained after the sweep");
    assert_eq!(made.score_by(&all, &row(30, 2.0, 1)), Some(1.0), "one half life");
    assert_eq!(made.score_by(&ExpiryRule::LastStep(10), &row(30, 2.0, 1)), None);
}

#[test]
fn a_wrapped_single_rule_equals_that_rule() {
    let wrapped = EvictionRule::Any(vec![EvictionRule::All(vec![EvictionRule::Unused { steps: 30 }])]);
    let made = ExpirySweep::after(100, &wrapped, 7);
    assert_eq!(made, sweep(100, ExpiryRule::LastStep(70)));
    assert!(made.is_by_last_step(), "footers alone say which rows on SSD die");
}

#[test]
fn a_sweep_that_covers_another_expires_all_its_rows() {
    let score = |below| ExpiryRule::ScoreBelow { below, half_life: 50 };
    let cut = |score: f32, last_step| ExpiryRule::Below {
        threshold: RankKey { score: sortable_score(score), last_step, id: 900 },
        half_life: 50,
    };
    let rules = [
        cut(0.5, 20),
        cut(0.5, 40),
        cut(1.5, 10),
        cut(-0.25, 10),
        cut(0.0, 30),
        cut(0.0, 50),
        ExpiryRule::LastStep(30),
        ExpiryRule::LastStep(60),
        score(0.5),
        score(1.5),
        score(-0.25),
        score(0.0),
        ExpiryRule::NormBelow(0.5),
        ExpiryRule::NormBelow(1.5),
        ExpiryRule::NormBelow(-0.7),
        ExpiryRule::Any(vec![ExpiryRule::LastStep(30), score(0.5)]),
        ExpiryRule::Any(vec![ExpiryRule::LastStep(60), score(1.5), ExpiryRule::NormBelow(0.5)]),
        ExpiryRule::All(vec![ExpiryRule::LastStep(30), score(0.5)]),
        ExpiryRule::All(vec![ExpiryRule::LastStep(60), score(1.5)]),
    ];
    let sweeps: Vec<ExpirySweep> =
        [70, 90].iter().flat_map(|&step| rules.iter().map(move |rule| sweep(step, rule.clone()))).collect();
    let mut covered = 0;
    for (newer, older) in sweeps.iter().flat_map(|newer| sweeps.iter().map(move |older| (newer, older))) {
        if !newer.covers(older) {
            continue;
        }
        covered += 1;
        for number in 0..2000_u32 {
            let last_step = u64::from(number % 71);
            // The rest of the score below 0 rounds to zero at the later step.
            let score = if number % 13 == 1 { -f32::from_bits(1) } else { (number % 13) as f32 / 4.0 - 0.5 };
            let weight = (number % 7) as f32 / 3.0;
            let header = row(last_step, score, crate::types::Id::from(number));
            assert!(
                !older.matches(&header, &[weight]) || newer.matches(&header, &[weight]),
                "{newer:?} {older:?} {header:?}"
            );
        }
    }
    assert!(covered > 40, "{covered}");
}

#[test]
fn the_json_of_every_rule_is_fixed() {
    let rules = [
        (ExpiryRule::LastStep(7), r#"{"last_step":7}"#),
        (ExpiryRule::ScoreBelow { below: 0.5, half_life: 1000 }, r#"{"score_below":{"below":0.5,"half_life":1000}}"#),
        (ExpiryRule::NormBelow(0.25), r#"{"norm_below":0.25}"#),
        (
            ExpiryRule::Below { threshold: RankKey { score: 1, last_step: 2, id: u64::MAX }, half_life: 3 },
            r#"{"below":{"threshold":{"score":1,"last_step":2,"id":18446744073709551615},"half_life":3}}"#,
        ),
        (ExpiryRule::Any(vec![]), r#"{"any":[]}"#),
        (
            ExpiryRule::All(vec![ExpiryRule::LastStep(1), ExpiryRule::Any(vec![ExpiryRule::NormBelow(2.0)])]),
            r#"{"all":[{"last_step":1},{"any":[{"norm_below":2.0}]}]}"#,
        ),
    ];
    for (rule, text) in rules {
        assert_eq!(serde_json::to_string(&rule).expect("text"), text);
        assert_eq!(serde_json::from_str::<ExpiryRule>(text).expect("a rule"), rule);
        let text = format!(r#"{{"step":9,"rule":{text}}}"#);
        assert_eq!(serde_json::to_string(&sweep(9, rule.clone())).expect("text"), text);
        assert_eq!(serde_json::from_str::<ExpirySweep>(&text).expect("a sweep"), sweep(9, rule));
    }
}

#[test]
fn a_sweep_round_trips_through_text() {
    let rule = ExpiryRule::Any(vec![
        ExpiryRule::All(vec![ExpiryRule::LastStep(u64::MAX >> 2), ExpiryRule::NormBelow(0.1)]),
        ExpiryRule::ScoreBelow { below: 0.3, half_life: 1000 },
        ExpiryRule::Below { threshold: RankKey::HIGHEST, half_life: 1000 },
    ]);
    let text = serde_json::to_string(&sweep(9, rule.clone())).expect("text");
    assert_eq!(serde_json::from_str::<ExpirySweep>(&text).expect("a sweep"), sweep(9, rule), "{text}");
}
