//! Rows on their way to the device are stored in a buffer supplied by the caller.

use std::sync::Arc;

use embcache::Kind;
use embcache::cache::PlanMode;
use embcache::config::{OptimizerKind, TableConfig};
use embcache::io::MemoryEngine;
use embcache::types::Id;
use embcache_tests::dice::Dice;
use embcache_tests::{Rig, config, three_tiers};

const DIM: usize = 4;
/// Adagrad has one more vector than the weights.
const FLOATS: usize = 2 * DIM;
const BAG: usize = 3;

fn open(wanted: &TableConfig) -> Rig {
    Rig::open(wanted.clone(), Arc::new(MemoryEngine::default())).expect("a table")
}

#[test]
fn rows_of_any_tier_reach_device_through_caller_buffer() {
    let in_ram = TableConfig { device_rows: Some(24), ..config(DIM, OptimizerKind::Adagrad, 300) };
    for wanted in [in_ram, three_tiers(DIM, Some(24), 60, 1 << 20)] {
        let (rig, oracle) = (open(&wanted), open(&wanted));
        let mut in_lent = 0;
        for number in 0..30_u32 {
            let mut dice = Dice(u64::from(number) * 1000);
            let ids: Vec<Id> = (0..18).map(|_| dice.roll(200) as Id).collect();
            let plan = rig.plan(&ids, PlanMode::TRAIN).expect("a plan");
            let most = plan.max_arriving_rows().expect("a plan")[0];
            // If the buffer is too small for all rows, they are stored elsewhere.
            let is_enough = number % 5 != 4;
            let mut lent = vec![f32::NAN; if is_enough { most + 2 } else { most.saturating_sub(1) } * FLOATS];
            let from_lent = rig.place_from(&plan, &mut lent).expect("rows in their slots");
            assert!(!is_enough || from_lent.is_some_and(|rows| rows <= most));
            assert!(is_enough || from_lent.is_none() || from_lent < Some(most));
            let rows = from_lent.unwrap_or(0);
            assert!(lent[rows * FLOATS..].iter().all(|value| value.is_nan()), "nothing is written behind the rows");
            in_lent += rows;
            rig.finish(&plan, ids.len(), BAG, number).expect("a step");
            oracle.train(&ids, BAG, number).expect("a step");
            assert_eq!(rig.contents().expect("contents"), oracle.contents().expect("contents"));
        }
        let stats = rig.table.stats().expect("counters");
        assert!(in_lent > 100 && stats.device.expect("a device tier").evictions > 100);
        assert!(wanted.ssd.is_none() || stats.ssd.expect("an SSD tier").tier.hits > 20, "rows came from SSD too");
    }
}

#[test]
fn rows_in_caller_buffer_are_returned_only_with_that_buffer() {
    let rig = open(&TableConfig { device_rows: Some(24), ..config(DIM, OptimizerKind::Adagrad, 300) });
    let plan = rig.plan(&[1, 2, 3], PlanMode::TRAIN).expect("a plan");
    let mut lent = vec![0.0; 3 * FLOATS];
    plan.wait(&mut [Some(&mut lent)]).expect("rows to scatter");
    for mut other in [Vec::new(), vec![0.0; 3 * FLOATS - 1], vec![0.0; 9 * FLOATS]] {
        let error = plan.fetched(0, &mut other).expect_err("the rows are elsewhere");
        assert_eq!(error.kind(), Kind::Input, "{error}");
    }
    assert_eq!(plan.fetched(0, &mut []).expect_err("as before").kind(), Kind::Input);
    let rows = plan.fetched(0, &mut lent).expect("the rows");
    assert_eq!((rows.slots.len(), rows.vectors), (3, None));
    assert!(plan.fetched(0, &mut []).expect("they are handed out once").slots.is_empty());
}
