//! Some ranks save tables of the cache, and others load them. Every row, slot and metadata is the same, for any tiers
//! of both.

use std::sync::Arc;

use embcache::Result;
use embcache::cache::GroupSink;
use embcache::config::{OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::IoEngine;
use embcache::rows::RowList;
use embcache::types::{Id, hash_id};
use embcache_tests::checkpoint::{memory, split};
use embcache_tests::ranks::{load, save_as_base, save_on};
use embcache_tests::{Contents, Rig, config};

const ROWS: Id = 3000;

fn ids() -> Vec<Id> {
    (0..ROWS).map(|n| hash_id(n) as Id).collect()
}

/// The configuration of `rank` in `world`. The tiers differ between ranks: RAM; RAM and SSD; all three.
fn rank_of(rank: u32, world: u32, dim: usize, optimizer: OptimizerKind, place: &str) -> TableConfig {
    let kind = (rank + world) % 3;
    let mut config = config(dim, optimizer, if kind == 0 { 2 * ROWS as u64 } else { 150 });
    config.buckets = split(config.total_num_buckets, rank, world);
    if kind > 0 {
        let dir = format!("/ssd/{place}/{rank}-of-{world}").into();
        config.ssd = Some(SsdConfig { dir, bytes: 8 << 20, reopen: ReopenMode::Never, resume_commit_id: None });
    }
    config.device_rows = (kind == 2).then_some(40);
    config
}

fn ranks(engine: &Arc<dyn IoEngine>, world: u32, dim: usize, optimizer: OptimizerKind, place: &str) -> Vec<Rig> {
    let open = |rank| Rig::open(rank_of(rank, world, dim, optimizer, place), Arc::clone(engine)).expect("opened");
    (0..world).map(open).collect()
}

/// Trains the own ids of every rank in batches, and some of them twice.
fn train(ranks: &[Rig]) -> Contents {
    for rig in ranks {
        let config = rig.table.config();
        let own = |id: &Id| config.buckets.contains(&config.bucketing().of(*id));
        let mine: Vec<Id> = ids().into_iter().filter(own).collect();
        for (salt, batch) in mine.chunks(30).chain(mine.chunks(30).step_by(3)).enumerate() {
            rig.train(batch, 2, salt as u32).expect("trained");
        }
        rig.table.set_step(77).expect("set");
    }
    all(ranks)
}

fn all(ranks: &[Rig]) -> Contents {
    ranks.iter().flat_map(|rig| rig.contents().expect("every row")).collect()
}

fn save(engine: &Arc<dyn IoEngine>, ranks: &[Rig], group_bytes: usize) {
    save_on(engine, ranks, group_bytes, None);
}

#[test]
fn chain_loads_tables_of_its_last_save_into_any_tiers() {
    for (dim, optimizer) in
        [(16, OptimizerKind::Adam), (5, OptimizerKind::RowWiseAdagrad), (7, OptimizerKind::PartialRowWiseAdam)]
    {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let saved = ranks(&engine, 2, dim, optimizer, "saved");
        train(&saved);
        let mut link = save_as_base(&engine, &saved, 20_000, None);
        for round in 1..=3 {
            for rig in &saved {
                let own: Vec<Id> = rig.contents().expect("every row").keys().copied().collect();
                let some: Vec<Id> = own.iter().copied().skip(round).step_by(7).take(25).collect();
                rig.train(&some, 1, round as u32).expect("trained");
                let gone: Vec<Id> = own.iter().copied().skip(round + 1).step_by(40).collect();
                assert_eq!(rig.table.remove_rows(&gone).expect("removed"), gone.len() as u64);
                rig.table.set_step(77).expect("set");
            }
            link = save_as_base(&engine, &saved, 2_000, Some(&link));
            let expected = all(&saved);
            assert!(expected.len() < ROWS as usize);
            for readers in 1..=4 {
                let loaded = ranks(&engine, readers, dim, optimizer, &format!("loaded-{round}"));
                load(&engine, &loaded);
                assert!(all(&loaded) == expected, "{round} deltas to {readers} ranks, dim {dim}");
            }
        }
    }
}

#[test]
fn any_number_of_ranks_loads_the_tables_of_any_other_into_any_tiers() {
    // Rows of 64 bytes are copied with non-temporal stores, and those of 20 bytes are not.
    for (dim, optimizer) in
        [(16, OptimizerKind::Adam), (5, OptimizerKind::RowWiseAdagrad), (7, OptimizerKind::PartialRowWiseAdam)]
    {
        for writers in 1..=4 {
            let engine: Arc<dyn IoEngine> = Arc::new(memory());
            let saved = ranks(&engine, writers, dim, optimizer, "saved");
            let expected = train(&saved);
            assert_eq!(expected.len(), ROWS as usize);
            save(&engine, &saved, 20_000);
            for readers in 1..=4 {
                let loaded = ranks(&engine, readers, dim, optimizer, &format!("loaded-{writers}"));
                // Rows that existed before are removed.
                loaded[0].train(&[loaded_id(&loaded[0])], 1, 5).expect("trained");
                load(&engine, &loaded);
                assert!(all(&loaded) == expected, "{writers} to {readers} ranks, dim {dim}");
                assert!(loaded.iter().all(|rig| rig.table.step().expect("counted") == 77));
            }
        }
    }
}

/// An id that belongs to a rank, and that no test saves.
fn loaded_id(rig: &Rig) -> Id {
    let config = rig.table.config();
    let own = |id: &Id| config.buckets.contains(&config.bucketing().of(*id));
    (1..1000).find(own).expect("one of some buckets")
}

#[test]
fn a_loaded_table_trains_on_as_the_one_that_was_saved() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let saved = ranks(&engine, 1, 16, OptimizerKind::Adam, "saved");
    train(&saved);
    save(&engine, &saved, 64 << 20);
    let loaded = ranks(&engine, 2, 16, OptimizerKind::Adam, "loaded");
    load(&engine, &loaded);
    let batch: Vec<Id> = ids().into_iter().step_by(7).take(100).collect();
    for rig in saved.iter().chain(&loaded) {
        let config = rig.table.config();
        for (salt, id) in batch.iter().enumerate() {
            if config.buckets.contains(&config.bucketing().of(*id)) {
                rig.table.set_step(100 + salt as u64).expect("set");
                rig.train(&[*id], 1, salt as u32).expect("trained");
            }
        }
    }
    assert!(all(&loaded) == all(&saved));
}

/// Looks rows up whenever an export checks for space, so that other rows are demoted to the SSD tier.
struct Reading<'a> {
    rig: &'a Rig,
    turn: i64,
    found: Contents,
}

impl GroupSink for Reading<'_> {
    fn vector_floats(&self) -> usize {
        self.rig.table.config().layout().vector_floats()
    }

    fn wait_for_space(&mut self) -> Result<usize> {
        self.turn += 1;
        let wanted: Vec<Id> = (0..60).map(|n| hash_id((self.turn * 97 + n * 31) % ROWS) as Id).collect();
        self.rig.evaluate(&wanted, 1, false)?;
        if self.turn % 50 == 0 {
            self.rig.table.flush(self.turn as u64)?;
        }
        Ok(23)
    }

    fn take(&mut self, rows: RowList<'_>) -> Result<()> {
        assert!((1..=23).contains(&rows.len()), "{} rows", rows.len());
        for row in rows.iter() {
            let bits = row.vector.iter().map(|value| value.to_bits()).collect();
            assert!(self.found.insert(row.header.id, (*row.header, bits)).is_none(), "row {} twice", row.header.id);
        }
        Ok(())
    }
}

#[test]
fn export_has_every_row_once_while_rows_change_tiers() {
    for kind in 0..3 {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        // The tiers are those of rank `kind` of three.
        let mut config = rank_of(kind, 3, 16, OptimizerKind::Adam, "tiers");
        config.buckets = 0..config.total_num_buckets;
        let rigs = [Rig::open(config, engine).expect("opened")];
        let expected = train(&rigs);
        let before = rigs[0].table.stats().expect("counted").host.evictions;
        let mut sink = Reading { rig: &rigs[0], turn: 0, found: Contents::new() };
        rigs[0].table.for_each_group(&mut sink).expect("every row");
        assert!(sink.found == expected, "tiers {kind}");
        let evicted = rigs[0].table.stats().expect("counted").host.evictions - before;
        assert!((evicted > 100) == (kind > 0), "{evicted} rows left RAM");
    }
}
