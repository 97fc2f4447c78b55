//! Measures linked checkpoints of a table of which nine tenths are on SSD. Full checkpoints of the same table are measured in the
//! same round. They are saved and synced after half of the rows in RAM were modified, and loaded into a new table with the same
//! budgets and nothing in the page cache. The values are shares of the full checkpoint's time.
//!
//! `EMBCACHE_BENCH_LINKED_ROWS` sets the number of rows (4M, which are 1.1 GiB).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use embcache::cache::{RowBlock, Table};
use embcache::checkpoint::{
    CheckpointChain, CheckpointDirectory, CheckpointSave, LatestCheckpoint, LinkedTable, RankWriter, SaveOptions,
};
use embcache::config::{OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::{IoEngine, default_engine};
use embcache::rows::RowHeader;
use embcache::ssd::{LinkedBytes, StateCounters};
use embcache_benches::{
    Bench, Better, DIM, Group, Rounds, Scale, Scratch, forget_cached, scattered_id, setting, table_config,
};

const OPTIMIZER: OptimizerKind = OptimizerKind::RowWiseAdagrad;
const MODULE: &str = "m";
const IMPORT_ROWS: u64 = 65_536;
/// One row in so many is modified between saves. It is always the same ones, so they stay in RAM.
const HOT: u64 = 20;
const ROUNDS: usize = 5;

pub(crate) fn group() -> Group {
    let row = |name, make| Bench { name, unit: "ratio", better: Better::Lower, limit: None, make };
    Group::Alone(vec![row("save_linked_of_full_time", Saves::make), row("load_linked_of_full_time", Loads::make)])
}

fn rows_of(scale: Scale) -> u64 {
    setting("EMBCACHE_BENCH_LINKED_ROWS", scale.pick(4_000_000, 20_000))
}

/// A folder with room for a table on SSD, a full checkpoint of it, and another such table.
fn scratch_for(rows: u64) -> Scratch {
    Scratch::new(rows * 300 * 4 + (256 << 20)).unwrap_or_else(|why| panic!("{why}"))
}

fn config(rows: u64, dir: &Path) -> TableConfig {
    // RAM for a tenth of the rows, and for the index.
    let in_ram = table_config(OPTIMIZER, rows / 10);
    let ssd = SsdConfig {
        dir: dir.to_owned(),
        bytes: rows * 300 * 3 / 2 + (64 << 20),
        reopen: ReopenMode::Never,
        resume_commit_id: None,
    };
    TableConfig { host_bytes: in_ram.host_bytes + rows * 16 + (1 << 20), ssd: Some(ssd), ..in_ram }
}

/// Write the rows of `numbers`. Their values follow from the number and `salt`.
fn give(table: &Table, numbers: impl Iterator<Item = u64>, salt: u64) {
    let header = |number| RowHeader { id: scattered_id(number), scalar: 0.25, ..RowHeader::default() };
    let headers: Vec<RowHeader> = numbers.map(header).collect();
    for (turn, headers) in headers.chunks(IMPORT_ROWS as usize).enumerate() {
        let first = turn as u64 * IMPORT_ROWS + salt;
        let vectors: Vec<f32> = (0..headers.len() * DIM).map(|at| (at as u64 + first) as f32).collect();
        table.import_rows(RowBlock { headers, vectors: &vectors }).expect("room for all rows");
    }
}

fn filled(rows: u64, dir: &Path) -> Table {
    let engine = default_engine().expect("an engine");
    let table = Table::open(config(rows, dir), None, engine).expect("a table");
    for first in (0..rows).step_by(IMPORT_ROWS as usize) {
        give(&table, first..(first + IMPORT_ROWS).min(rows), first);
    }
    table
}

/// Save into a new folder. The result is the seconds, and what was linked.
fn save(engine: &Arc<dyn IoEngine>, root: &Path, table: &Table, linked: bool) -> (f64, LinkedTable) {
    std::fs::create_dir(root).expect("a folder of our own");
    let begin = Instant::now();
    let options = SaveOptions { linked, ..SaveOptions::default() };
    let directory = CheckpointDirectory::with_engine(Arc::clone(engine), root);
    let save = CheckpointSave::begin_with(&directory, 7, options).expect("begun");
    let mut writer = RankWriter::new(&directory, save.name(), 0, 1).expect("made");
    let saved = if linked {
        writer.link_rows_of(MODULE, table, BTreeMap::new()).expect("linked")
    } else {
        let rows = writer.write_rows_of(MODULE, table, BTreeMap::new()).expect("written");
        LinkedTable { rows, bytes: LinkedBytes::default() }
    };
    let next_epoch = table.epoch().expect("open") + 1;
    save.publish(&[writer.finish().expect("finished")], next_epoch).expect("published");
    table.set_epoch(next_epoch).expect("open");
    (begin.elapsed().as_secs_f64(), saved)
}

struct Saves {
    table: Table,
    rows: u64,
    engine: Arc<dyn IoEngine>,
    done: u64,
    last: BTreeMap<&'static str, f64>,
    scratch: Scratch,
}

impl Saves {
    fn make(scale: Scale) -> Box<dyn Rounds> {
        let rows = rows_of(scale);
        let scratch = scratch_for(rows);
        let table = filled(rows, &scratch.path().join("tier"));
        for salt in 0..4 {
            give(&table, 0..rows / HOT, salt);
        }
        let engine = default_engine().expect("an engine");
        Box::new(Self { table, rows, engine, done: 0, last: BTreeMap::new(), scratch })
    }
}

impl Rounds for Saves {
    fn ours(&mut self) -> f64 {
        self.done += 1;
        give(&self.table, 0..self.rows / HOT, self.done);
        let root = |kind: &str| self.scratch.path().join(format!("{kind}-{}", self.done));
        let (seconds, saved) = save(&self.engine, &root("linked"), &self.table, true);
        assert!(saved.rows == self.rows && saved.bytes.linked > 0 && saved.bytes.copied == 0, "{saved:?}");
        let (full, written) = save(&self.engine, &root("full"), &self.table, false);
        assert_eq!(written.rows, self.rows);
        for kind in ["linked", "full"] {
            std::fs::remove_dir_all(root(kind)).expect("our own folder");
        }
        self.last = BTreeMap::from([
            ("rows", self.rows as f64),
            ("save_linked_seconds", seconds),
            ("save_full_seconds", full),
            ("linked_bytes", saved.bytes.linked as f64),
        ]);
        seconds / full
    }

    fn rounds(&self) -> usize {
        ROUNDS
    }

    fn figures(&self) -> BTreeMap<&'static str, f64> {
        self.last.clone()
    }
}

struct Loads {
    rows: u64,
    engine: Arc<dyn IoEngine>,
    last: BTreeMap<&'static str, f64>,
    scratch: Scratch,
}

impl Loads {
    fn make(scale: Scale) -> Box<dyn Rounds> {
        let rows = rows_of(scale);
        let scratch = scratch_for(rows);
        let engine = default_engine().expect("an engine");
        let tier = scratch.path().join("tier");
        let table = filled(rows, &tier);
        for (kind, linked) in [("linked", true), ("full", false)] {
            save(&engine, &scratch.path().join(kind), &table, linked);
        }
        drop(table);
        std::fs::remove_dir_all(tier).expect("our own folder");
        Box::new(Self { rows, engine, last: BTreeMap::new(), scratch })
    }

    fn tier(&self) -> PathBuf {
        self.scratch.path().join("restarted")
    }

    /// Make a table from a checkpoint. The result is the seconds and the table.
    fn load(&self, kind: &str) -> (f64, Table) {
        let root = self.scratch.path().join(kind);
        let directory = CheckpointDirectory::with_engine(Arc::clone(&self.engine), &root);
        let latest = LatestCheckpoint::read(&directory).expect("a checkpoint");
        let dir = root.join(latest.name.to_string()).join(format!("{MODULE}+rows"));
        for entry in std::fs::read_dir(dir).expect("a folder") {
            forget_cached(&std::fs::File::open(entry.expect("a folder").path()).expect("a file"));
        }
        let config = config(self.rows, &self.tier());
        let begin = Instant::now();
        let checkpoint = CheckpointChain::open(&directory, latest).expect("a checkpoint");
        let found = checkpoint.links()[0].segments_of(MODULE, "rows", &config.buckets).expect("whole");
        let table = if let Some(found) = found {
            let counters = StateCounters { step: 0, epoch: checkpoint.manifest().next_epoch };
            let source = Some((&found, counters));
            Table::open_from(config, None, self.engine.clone(), source).expect("a table")
        } else {
            let buckets = config.buckets.clone();
            let table = Table::open(config, None, self.engine.clone()).expect("a table");
            checkpoint.table_reader(MODULE, "rows", buckets).expect("whole").load_into(&table).expect("whole");
            table
        };
        (begin.elapsed().as_secs_f64(), table)
    }

    fn forget(&self, table: Table) {
        drop(table);
        std::fs::remove_dir_all(self.tier()).expect("our own folder");
    }
}

impl Rounds for Loads {
    fn ours(&mut self) -> f64 {
        let [linked, full] = ["linked", "full"].map(|kind| {
            let (seconds, table) = self.load(kind);
            assert_eq!(table.stats().expect("open").rows, self.rows);
            self.forget(table);
            seconds
        });
        self.last =
            BTreeMap::from([("rows", self.rows as f64), ("load_linked_seconds", linked), ("load_full_seconds", full)]);
        linked / full
    }

    fn rounds(&self) -> usize {
        ROUNDS
    }

    fn figures(&self) -> BTreeMap<&'static str, f64> {
        self.last.clone()
    }

    fn check(&mut self) {
        let ids: Vec<i64> = (0..1000).map(scattered_id).collect();
        let [linked, full] = ["linked", "full"].map(|kind| {
            let (_, table) = self.load(kind);
            let rows = table.read_rows(&ids).expect("rows");
            self.forget(table);
            rows
        });
        assert!(linked.found.iter().all(|found| *found) && linked.headers == full.headers);
        assert!(linked.vectors == full.vectors, "the same rows by either");
    }
}
