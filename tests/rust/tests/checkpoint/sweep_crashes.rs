//! After any stop of a chain of saves during sweeps, a load finds the last save: each sweep is completely in it, or not
//! at all.

use std::sync::Arc;

use embcache::Result;
use embcache::cache::BaseCheckpoint;
use embcache::checkpoint::LatestCheckpoint;
use embcache::config::{EvictionRule, TableConfig};
use embcache::io::{FaultEngine, IoEngine, IoFault, MemoryEngine};
use embcache_tests::checkpoint::{ROOT, memory};
use embcache_tests::dice::Dice;
use embcache_tests::ranks::{load, try_save_on};
use embcache_tests::{Contents, Rig, directory_in};

use crate::sweeps::{rank_of, rows_of, train};

/// A full save, and deltas on it.
const SAVES: usize = 4;

/// A table of all buckets, mostly on SSD or in RAM.
fn table(engine: &Arc<dyn IoEngine>, on_ssd: bool, place: &str) -> Result<Rig> {
    use EvictionRule::{All, Any, ScoreBelow, Unused};
    let rule = Any(vec![Unused { steps: 12 }, All(vec![Unused { steps: 4 }, ScoreBelow(1.3)])]);
    let config = TableConfig { buckets: 0..13, ..rank_of(0, if on_ssd { 2 } else { 1 }, &rule, 4, place) };
    Rig::open(config, Arc::clone(engine))
}

/// The results of a run before it was stopped.
#[derive(Default)]
struct Run {
    saved: usize,
    /// Number of saves that started during a sweep.
    amid_sweeps: usize,
}

impl Run {
    /// Trains and saves. A save runs during a sweep that is started for it, or during the sweep of a step.
    fn go(&mut self, engine: &Arc<dyn IoEngine>, rig: Rig) -> Result<()> {
        let (ranks, mut dice, mut link) = ([rig], Dice(5), None::<BaseCheckpoint>);
        for save in 0..SAVES {
            advance(&ranks, &mut dice, save)?;
            let stats = ranks[0].table.stats()?;
            self.amid_sweeps += usize::from(stats.eviction.is_some_and(|eviction| eviction.is_sweeping));
            let made = try_save_on(engine, &ranks, 2000, link.as_ref())?;
            self.saved += 1;
            ranks[0].table.set_epoch(made.next_epoch)?;
            ranks[0].table.saved_as(made.clone())?;
            ranks[0].table.flush_next()?;
            link = Some(made);
        }
        Ok(())
    }
}

/// The operations before the save of this number.
fn advance(ranks: &[Rig], dice: &mut Dice, save: usize) -> Result<()> {
    for _ in 0..if save == 2 { 8 } else { 11 } {
        let batch = dice.ids(40);
        ranks[0].train(&batch, 5, 3)?;
    }
    // The other saves follow directly after a step with a sweep.
    if save.is_multiple_of(2) { Ok(()) } else { ranks[0].table.sweep() }
}

/// The rows at each save, from a table in RAM that is never stopped.
fn expected() -> Vec<Contents> {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let (ranks, mut dice) = ([table(&engine, false, "").expect("opened")], Dice(5));
    let mut at = |save| {
        advance(&ranks, &mut dice, save).expect("nothing fails");
        let rows = rows_of(&ranks);
        // Like a save of this number.
        ranks[0].table.set_epoch(3 + save as u32).expect("set");
        rows
    };
    (0..SAVES).map(&mut at).collect()
}

fn check(image: MemoryEngine, run: &Run, expected: &[Contents], context: &str) {
    let engine: Arc<dyn IoEngine> = Arc::new(image);
    let loaded = [table(&engine, false, "").expect("opened")];
    if run.saved == 0 && LatestCheckpoint::read(&directory_in(&engine, ROOT)).is_err() {
        return;
    }
    load(&engine, &loaded);
    let rows = rows_of(&loaded);
    let of_last = run.saved.checked_sub(1).map(|last| &expected[last]);
    let under_way = expected.get(run.saved);
    assert!(of_last == Some(&rows) || under_way == Some(&rows), "{context}: rows of no save");
    // Training continues.
    train(&loaded, &mut Dice(9), 9);
    loaded[0].table.sweep().expect("a sweep");
    try_save_on(&engine, &loaded, 2000, None).expect("saved");
    let again = [table(&engine, false, "").expect("opened")];
    load(&engine, &again);
    assert!(rows_of(&again) == rows_of(&loaded), "{context}: other rows in the next save");
}

#[test]
fn stopped_save_during_sweeps_leaves_old_or_new_save() {
    let every = std::env::var("EMBCACHE_CRASH_EVERY").map_or(3, |text| text.parse().expect("a number"));
    let expected = expected();
    assert!(expected.windows(2).all(|saves| saves[0].keys().any(|id| !saves[1].contains_key(id))), "rows leave");
    let mut saves_seen = 0;
    for passing in (0..).step_by(every) {
        let disk = memory();
        let faults = FaultEngine::new(Arc::new(disk.clone()));
        faults.hit_change(passing, IoFault::Stop);
        let engine: Arc<dyn IoEngine> = Arc::new(faults.clone());
        let mut run = Run::default();
        let outcome = table(&engine, true, "stopped").and_then(|rig| run.go(&engine, rig));
        for (number, image) in [disk.kill(), disk.crash(), disk.crash_torn(passing)].into_iter().enumerate() {
            check(image, &run, &expected, &format!("stopped after {passing} changes, image {number}"));
        }
        saves_seen = saves_seen.max(run.saved);
        if !faults.is_stopped() {
            outcome.expect("nothing stopped it");
            assert!(run.amid_sweeps > 1, "{} saves came amid a sweep", run.amid_sweeps);
            assert!(passing > 60, "{passing} changes");
            break;
        }
    }
    assert_eq!(saves_seen, SAVES);
}
