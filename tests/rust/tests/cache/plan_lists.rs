//! The lists of a plan for kernels outside of this crate: the same for one table, and for several tables together.

use std::sync::Arc;

use embcache::cache::{Lookup, Plan, PlanMode, RowLists};
use embcache::config::{AdmissionRule, MissingRead, OptimizerKind, TableConfig};
use embcache::io::MemoryEngine;
use embcache::types::{CacheSlot, Id, NO_SLOT};
use embcache::{Kind, Result};
use embcache_tests::dice::Dice;
use embcache_tests::{Rig, config};

const DIM: usize = 4;
/// The features of three tables: the first one has two.
const FEATURE_TABLES: [usize; 4] = [0, 0, 1, 2];
const SPLITS: [i64; 5] = [0, 30, 50, 50, 90];

struct Lists {
    tables: Vec<i32>,
    slots: Vec<i32>,
    starts: Vec<i32>,
    occurrences: Vec<i32>,
}

impl Lists {
    fn of(rows: usize, occurrences: usize) -> Self {
        Self {
            tables: vec![9; rows],
            slots: vec![9; rows],
            starts: vec![9; rows + 1],
            occurrences: vec![9; occurrences],
        }
    }

    fn fill(&mut self, plan: &Plan, of: &[usize]) -> Result<()> {
        let Self { tables, slots, starts, occurrences } = self;
        plan.fill_rows(of, &mut RowLists { tables, slots, starts, occurrences })
    }
}

fn signed(slots: &[CacheSlot]) -> Vec<i32> {
    slots.iter().map(|&slot| if slot == NO_SLOT { -1 } else { slot as i32 }).collect()
}

fn rigs() -> Vec<Rig> {
    let open = |number: u32| {
        let refuses =
            (number == 2).then_some(AdmissionRule::Count { threshold: 2, window_steps: None, memory: 1 << 20 });
        let wanted = TableConfig {
            device_rows: Some(200),
            admission: refuses.unwrap_or_default(),
            not_admitted: MissingRead::Zeros,
            ..config(DIM, OptimizerKind::Adagrad, 500)
        };
        Rig::open(wanted, Arc::new(MemoryEngine::default())).expect("a table")
    };
    (0..3).map(open).collect()
}

#[test]
fn the_lists_of_several_tables_are_those_of_each_one_after_another() {
    let rigs = rigs();
    let tables: Vec<_> = rigs.iter().map(|rig| rig.table.clone()).collect();
    let lookup = Lookup::new(&tables, &FEATURE_TABLES).expect("features of three tables");
    let mut dice = Dice(3);
    let ids: Vec<Id> = (0..90).map(|_| dice.roll(40) as Id).collect();
    let plan = lookup.plan(&ids, &SPLITS, PlanMode::TRAIN, &[]).expect("a plan");
    assert_eq!(plan.fill_slots(&mut [0; 90]).expect_err("its rows have no slots yet").kind(), Kind::State);
    assert_eq!(Lists::of(0, 0).fill(&plan, &[]).expect_err("its rows have no slots yet").kind(), Kind::State);
    plan.exclusively(|| {
        plan.wait(&mut [])?;
        rigs.iter().enumerate().try_for_each(|(table, rig)| rig.scatter(&plan, table))?;
        plan.scattered()
    })
    .expect("nobody else uses the tables")
    .expect("rows on the device");

    let mut slots = vec![9; 90];
    plan.fill_slots(&mut slots).expect("room for all slots");
    let by_feature: Vec<i32> = (0..4).flat_map(|feature| signed(&plan.slots(feature).expect("slots"))).collect();
    assert_eq!(slots, by_feature);
    assert_eq!(plan.splits(), [0, 30, 50, 50, 90]);
    let counts = plan.row_counts().expect("a plan in place");
    let occurrences = [50, 0, 40];
    for of in [&[0, 1, 2][..], &[2, 0], &[1], &[]] {
        let rows = of.iter().map(|&table| counts[table]).sum();
        let mut lists = Lists::of(rows, of.iter().map(|&table| occurrences[table]).sum());
        lists.fill(&plan, of).expect("room for all rows");
        let (mut row, mut first) = (0, 0);
        for (number, &table) in of.iter().enumerate() {
            let (slots, starts, occurrences) = plan.transposed(table).expect("a plan in place");
            let these = row..row + slots.len();
            assert!(lists.tables[these.clone()].iter().all(|&table| table == number as i32));
            assert_eq!(lists.slots[these.clone()], signed(&slots));
            let moved: Vec<i32> = starts.iter().map(|&start| start as i32 + first).collect();
            assert_eq!(lists.starts[these.start..=these.end], moved);
            let wanted: Vec<i32> = occurrences.iter().map(|&position| position as i32).collect();
            assert_eq!(lists.occurrences[first as usize..][..wanted.len()], wanted);
            (row, first) = (these.end, first + wanted.len() as i32);
        }
        assert_eq!(lists.starts[row], first);
    }
    let refused = plan.transposed(2).expect("a plan in place").0.contains(&NO_SLOT);
    assert!(refused && slots.contains(&-1), "ids that occurred once get no row");
    assert!(counts[1] == 0 && counts[0] < 50);
}

#[test]
fn lists_of_another_length_are_refused() {
    let rigs = rigs();
    let plan = rigs[0].plan(&[1, 2, 1], PlanMode::TRAIN).expect("a plan");
    rigs[0].place(&plan).expect("rows in their slots");
    let is_refused = |filled: Result<()>| assert_eq!(filled.expect_err("too long or too short").kind(), Kind::Input);
    is_refused(plan.fill_slots(&mut [0; 2]));
    is_refused(plan.fill_slots(&mut [0; 4]));
    is_refused(Lists::of(1, 3).fill(&plan, &[0]));
    is_refused(Lists::of(3, 3).fill(&plan, &[0]));
    is_refused(Lists::of(2, 2).fill(&plan, &[0]));
    is_refused(Lists { starts: vec![0; 2], ..Lists::of(2, 3) }.fill(&plan, &[0]));
    is_refused(Lists { slots: vec![0; 3], ..Lists::of(2, 3) }.fill(&plan, &[0]));
    is_refused(Lists::of(2, 3).fill(&plan, &[1]));
    Lists::of(2, 3).fill(&plan, &[0]).expect("the right lengths");
    let plan = rigs[0].plan(&[1, 2, 1], PlanMode::EVALUATE).expect("a plan");
    rigs[0].place(&plan).expect("rows in their slots");
    let error = Lists::of(2, 0).fill(&plan, &[0]).expect_err("it keeps no occurrences");
    assert_eq!(error.kind(), Kind::State, "{error}");
}
