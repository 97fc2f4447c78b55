//! Eviction rules in a trainer's deltas, which expire the same rows of an earlier conversion that a conversion of the
//! latest checkpoint lacks.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::Kind;
use embcache::config::OptimizerKind;
use embcache::io::IoEngine;
use embcache::lifecycle::{ExpiryRule, ExpirySweep, RankKey, sortable_score};
use embcache::rows::WeightPrecision;
use embcache::serve::{PollOutcome, ServeOptions, TableServer};
use embcache::types::Id;
use embcache_tests::checkpoint::{ROOT, Table, memory, save};
use embcache_tests::directory_in;

use crate::conversion::{newest, serve};
use crate::faults::wait_for;
use crate::server::save_sweep;
use crate::source::open;
use crate::source_faults::convert;

fn root() -> &'static Path {
    Path::new(ROOT)
}

/// Rows with distributed scores and last steps, so that rules by score match some of them.
fn scored(ids: &[Id], step: u64, weight: f32) -> Table {
    let mut table = Table::new("m", "t", OptimizerKind::RowWiseAdagrad, 3, ids, step);
    for (header, vector) in table.rows.values_mut() {
        header.last_step = step - header.id as u64 % 4;
        header.score = (header.id % 11) as f32 * 0.5;
        for (column, value) in vector.iter_mut().enumerate() {
            *value = weight + 0.01 * header.id as f32 + 0.3 * column as f32;
        }
    }
    table
}

/// The rules that a trainer without a rule by norm can apply after a step, none of which covers another.
fn rules(step: u64) -> Vec<ExpiryRule> {
    let score = |below: f32, half_life: u64| ExpiryRule::ScoreBelow { below, half_life };
    let cut = RankKey { score: sortable_score(1.1), last_step: step - 2, id: 40 };
    vec![
        score(0.4, 5),
        score(1.1, 1000),
        ExpiryRule::Below { threshold: cut, half_life: 50 },
        ExpiryRule::Any(vec![score(0.3, 2), ExpiryRule::LastStep(step - 9)]),
        ExpiryRule::All(vec![score(2.2, 3), ExpiryRule::Below { threshold: RankKey::HIGHEST, half_life: 3 }]),
    ]
}

/// The bits that each id reads, and a flag for the ids that have a row.
fn answers(serving: &TableServer, ids: &[Id]) -> (Vec<u32>, Vec<bool>, u64) {
    let version = serving.pin().expect("a version");
    let table = version.table("t").expect("the table");
    let (mut out, mut found) = (vec![f32::NAN; ids.len() * table.dim()], vec![false; ids.len()]);
    table.lookup(ids, &mut out, &mut found).expect("served");
    (out.iter().map(|weight| weight.to_bits()).collect(), found, table.rows())
}

#[test]
fn rules_by_score_take_the_rows_that_a_conversion_lacks() {
    let every: Vec<Id> = (0..120).collect();
    for precision in WeightPrecision::ALL {
        for rule in 0..rules(20).len() {
            let engine: Arc<dyn IoEngine> = Arc::new(memory());
            let first = scored(&every[..100], 10, 0.5);
            let mut parent = save(&engine, root(), std::slice::from_ref(&first), 1, 1000, 1).expect("saved").identity;
            serve(&engine, &newest(&engine, ROOT).expect("opened"), precision).expect("made");
            let serving = open(&engine);
            let mut now = first.rows.clone();
            for step in [20, 30, 40] {
                // Expired ids are inserted again, remaining rows change, and new ids are inserted.
                let fresh = scored(&every[step as usize..step as usize + 9], step, 7.0);
                let sweep = ExpirySweep { step: step - 1, rule: rules(step).swap_remove(rule) };
                now.retain(|_, (header, vector)| !sweep.matches(header, &vector[..3]));
                now.extend(fresh.rows.clone());
                let total = now.len() as u64;
                parent = save_sweep(&engine, &parent, &fresh, &[sweep], total, step);
                assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(_)), "{precision:?} {rule}");
                let to = PathBuf::from(format!("/checkpoints/converted{step}"));
                convert(&engine, root(), &to, precision);
                let again = TableServer::open(directory_in(&engine, &to), ServeOptions::default()).expect("opened");
                let wanted = answers(&again, &every);
                assert_eq!(wanted.1, every.iter().map(|id| now.contains_key(id)).collect::<Vec<_>>());
                assert!(total < 100 && wanted.2 == total, "{total} rows");
                assert!(answers(&serving, &every) == wanted, "{precision:?}, rule {rule}, step {step}");
                assert!(answers(&open(&engine), &every) == wanted, "{precision:?}, rule {rule}, step {step}, opened");
            }
        }
    }
}

#[test]
fn rules_by_score_that_are_many_are_merged_and_take_the_same_rows() {
    let every: Vec<Id> = (0..120).collect();
    for precision in WeightPrecision::ALL {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let first = scored(&every[..100], 10, 0.5);
        let mut parent = save(&engine, root(), std::slice::from_ref(&first), 1, 1000, 1).expect("saved").identity;
        serve(&engine, &newest(&engine, ROOT).expect("opened"), precision).expect("made");
        let serving = open(&engine);
        let mut now = first.rows.clone();
        for step in (20..70).step_by(5) {
            let fresh = scored(&every[step as usize..step as usize + 5], step, 7.0);
            // Each has its own half life, so that none covers another.
            let rule = ExpiryRule::ScoreBelow { below: 0.4, half_life: 1 + step * 3 };
            let sweep = ExpirySweep { step: step - 1, rule };
            now.retain(|_, (header, vector)| !sweep.matches(header, &vector[..3]));
            now.extend(fresh.rows.clone());
            parent = save_sweep(&engine, &parent, &fresh, &[sweep], now.len() as u64, step);
            serving.poll().expect("a look");
        }
        wait_for(|| serving.stats().shared_index_bytes == 0, "many rules are merged");
        convert(&engine, root(), Path::new("/checkpoints/converted"), precision);
        let converted = directory_in(&engine, "/checkpoints/converted");
        let again = TableServer::open(converted, ServeOptions::default()).expect("opened");
        let wanted = answers(&again, &every);
        assert!(answers(&serving, &every) == wanted, "{precision:?}");
        assert!(answers(&open(&engine), &every) == wanted, "{precision:?}, opened");
    }
}

/// A rule by norm is rejected in any position, and served when the checkpoint was converted.
#[test]
fn norm_rule_is_rejected_until_converted() {
    let every: Vec<Id> = (0..60).collect();
    let norm = || ExpiryRule::NormBelow(1.6);
    let score = || ExpiryRule::ScoreBelow { below: 1.1, half_life: 10 };
    let wanted = [norm(), ExpiryRule::Any(vec![score(), norm()]), ExpiryRule::All(vec![norm(), score()])];
    for precision in WeightPrecision::ALL {
        for rule in &wanted {
            let engine: Arc<dyn IoEngine> = Arc::new(memory());
            let first = scored(&every[..50], 10, 0.5);
            let full = save(&engine, root(), std::slice::from_ref(&first), 1, 1000, 1).expect("saved").identity;
            serve(&engine, &newest(&engine, ROOT).expect("opened"), precision).expect("made");
            let serving = open(&engine);
            let before = answers(&serving, &every);
            let sweep = ExpirySweep { step: 12, rule: rule.clone() };
            let mut now = first.rows.clone();
            now.retain(|_, (header, vector)| !sweep.matches(header, &vector[..3]));
            let fresh = scored(&every[45..], 20, 7.0);
            now.extend(fresh.rows.clone());
            let second = save_sweep(&engine, &full, &fresh, &[sweep], now.len() as u64, 2);
            let third = scored(&every[..1], 30, 9.0);
            now.extend(third.rows.clone());
            let polled = serving.poll();
            if precision == WeightPrecision::Fp32 {
                assert!(matches!(polled.expect("the trainer's own weights"), PollOutcome::Newer(_)));
            } else {
                let error = polled.expect_err("its weights are others");
                let text = error.to_string();
                assert!(error.kind() == Kind::Mismatch && text.contains(&second.name), "{text}");
                assert!(text.contains("embcache convert") && text.contains(precision.name()), "{text}");
                assert!(answers(&serving, &every) == before);
                // The next delta is rejected for the same reason, and the error names the checkpoint that must be
                // converted.
                save_sweep(&engine, &second, &third, &[], now.len() as u64, 3);
                let later = serving.poll().expect_err("its parent's rule");
                assert!(later.to_string().contains(&second.name), "{later}");
                assert!(answers(&serving, &every) == before);
                serve(&engine, &newest(&engine, ROOT).expect("opened"), precision).expect("made");
                assert!(matches!(serving.poll().expect("it was converted"), PollOutcome::Newer(_)));
            }
            let found: Vec<bool> = every.iter().map(|id| now.contains_key(id)).collect();
            assert!(found.iter().any(|found| !found), "the rule takes rows");
            assert_eq!(answers(&serving, &every).1[1..], found[1..], "{precision:?} {rule:?}");
        }
    }
}
