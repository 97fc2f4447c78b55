//! Measures a delta of a table whose rows are all in RAM, of which one in a hundred was modified since the delta's parent. A full
//! save of the same table is measured in the same round, and both are synced. The value is the delta's time divided by the full
//! save's.
//!
//! `EMBCACHE_BENCH_SAVE_ROWS` sets the number of rows (7.5M, which are 2 GiB).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use embcache::cache::{BaseCheckpoint, RowBlock, Table};
use embcache::checkpoint::{CheckpointDirectory, CheckpointSave, RankDigest, RankWriter, SaveOptions};
use embcache::config::OptimizerKind;
use embcache::io::{IoEngine, default_engine};
use embcache::rows::RowHeader;
use embcache_benches::{Bench, Better, DIM, Group, Rounds, Scale, Scratch, scattered_id, setting, table_config};

const OPTIMIZER: OptimizerKind = OptimizerKind::RowWiseAdagrad;
const IMPORT_ROWS: u64 = 65_536;
/// One row in so many is modified.
const MODIFIED: u64 = 100;
const ROUNDS: usize = 5;

pub(crate) fn group() -> Group {
    Group::Alone(vec![Bench {
        name: "save_delta_1pct_of_full_time",
        unit: "ratio",
        better: Better::Lower,
        limit: None,
        make: Deltas::make,
    }])
}

struct Deltas {
    table: Table,
    rows: u64,
    engine: Arc<dyn IoEngine>,
    rounds: u64,
    last: BTreeMap<&'static str, f64>,
    scratch: Scratch,
}

impl Deltas {
    fn make(scale: Scale) -> Box<dyn Rounds> {
        let rows = setting("EMBCACHE_BENCH_SAVE_ROWS", scale.pick(7_500_000, 20_000));
        let scratch = Scratch::new(2 * rows * 300 + (64 << 20)).unwrap_or_else(|why| panic!("{why}"));
        let config = table_config(OPTIMIZER, rows + rows / 50 + 4096);
        let engine = default_engine().expect("an engine");
        let table = Table::open(config, None, engine.clone()).expect("a table in RAM");
        let deltas = Self { table, rows, engine, rounds: 0, last: BTreeMap::new(), scratch };
        for first in (0..rows).step_by(IMPORT_ROWS as usize) {
            deltas.give(first..(first + IMPORT_ROWS).min(rows));
        }
        Box::new(deltas)
    }

    /// Write the rows of `numbers`.
    fn give(&self, numbers: impl Iterator<Item = u64>) {
        let header = |number| RowHeader { id: scattered_id(number), scalar: 0.25, ..RowHeader::default() };
        let headers: Vec<RowHeader> = numbers.map(header).collect();
        let vectors: Vec<f32> = (0..headers.len() * DIM).map(|at| (at as u64 + self.rounds) as f32).collect();
        self.table.import_rows(RowBlock { headers: &headers, vectors: &vectors }).expect("room for all rows");
    }

    /// Save, and make the checkpoint the newest ancestor. The result is the seconds, the number of rows written, and the ancestor.
    fn save(&self, root: &Path, ancestor: Option<&BaseCheckpoint>) -> (f64, u64, BaseCheckpoint) {
        let begin = Instant::now();
        let parent = ancestor
            .map(|one| embcache::checkpoint::CheckpointId { name: one.name.clone(), manifest_xxh3: one.manifest_xxh3 });
        let options = SaveOptions { parent, ..SaveOptions::default() };
        let directory = CheckpointDirectory::with_engine(Arc::clone(&self.engine), root);
        let save = CheckpointSave::begin_with(&directory, 7, options).expect("begun");
        let mut writer = RankWriter::new(&directory, save.name(), 0, 1).expect("made");
        let rows = match ancestor {
            None => writer.write_rows_of("m", &self.table, BTreeMap::new()).expect("written"),
            Some(one) => writer.write_changes_of("m", &self.table, BTreeMap::new(), one).expect("written").0,
        };
        let digests: [RankDigest; 1] = [writer.finish().expect("finished")];
        let next_epoch = self.table.epoch().expect("open") + 1;
        let published = save.publish(&digests, next_epoch).expect("published");
        let identity = published.identity;
        let ancestor = BaseCheckpoint { name: identity.name, manifest_xxh3: identity.manifest_xxh3, next_epoch };
        self.table.set_epoch(next_epoch).expect("open");
        self.table.saved_as(ancestor.clone()).expect("open");
        (begin.elapsed().as_secs_f64(), rows, ancestor)
    }
}

impl Rounds for Deltas {
    fn ours(&mut self) -> f64 {
        self.rounds += 1;
        let root = self.scratch.path().join(self.rounds.to_string());
        std::fs::create_dir(&root).expect("a folder of our own");
        let (full, all, parent) = self.save(&root, None);
        assert_eq!(all, self.rows);
        self.give((self.rounds % MODIFIED..self.rows).step_by(MODIFIED as usize));
        let (delta, some, _) = self.save(&root, Some(&parent));
        assert_eq!(some, (self.rows - self.rounds % MODIFIED).div_ceil(MODIFIED), "the modified rows and no others");
        std::fs::remove_dir_all(&root).expect("removed");
        self.last = BTreeMap::from([("save_full_seconds", full), ("save_delta_seconds", delta), ("rows", all as f64)]);
        delta / full
    }

    fn rounds(&self) -> usize {
        ROUNDS
    }

    fn figures(&self) -> BTreeMap<&'static str, f64> {
        self.last.clone()
    }
}
