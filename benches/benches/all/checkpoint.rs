//! Measures full checkpoints of a table of 2 GiB whose rows are all in RAM. They are saved and synced, and loaded into a new table
//! with nothing in the page cache.
//!
//! `EMBCACHE_BENCH_SAVE_ROWS` sets the number of rows (7.5M).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use embcache::cache::{RowBlock, Table};
use embcache::checkpoint::{CheckpointChain, CheckpointDirectory, CheckpointSave, LatestCheckpoint, RankWriter};
use embcache::config::{OptimizerKind, TableConfig};
use embcache::io::{IoEngine, IoOpenMode, default_engine};
use embcache::rows::RowHeader;
use embcache::types::DEFAULT_TOTAL_NUM_BUCKETS;
use embcache_benches::{
    Bench, Better, CountedEngine, DIM, Group, Ids, RawFiles, Rounds, Scale, Scratch, SplitMix64, cpu_seconds,
    forget_cached, scattered_id, setting, table_config,
};

const ROUNDS: usize = 5;
const IMPORT_ROWS: usize = 65_536;
pub(super) const MODULE: &str = "model.ebc";
const OPTIMIZER: OptimizerKind = OptimizerKind::RowWiseAdagrad;
/// The number of ranks that save, and of ranks that load.
const RESHARD: (u32, u32) = (4, 3);

pub(crate) fn group() -> Group {
    let row = |name, unit, better, limit, make| Bench { name, unit, better, limit, make };
    let written = "raw O_DIRECT, four threads, a file each, 8 MiB at a time, fdatasync";
    let read = "raw O_DIRECT, four threads, a file each, 8 MiB at a time";
    Group::Alone(vec![
        row("save_full", "bytes/s", Better::Higher, Some(written), |scale| Saves::make(scale, Figure::Rate)),
        row("save_full_cpu_seconds_per_gib", "s", Better::Lower, None, |scale| Saves::make(scale, Figure::Cpu)),
        row("load_full", "bytes/s", Better::Higher, Some(read), Loads::make),
        row("load_4_to_3_bytes_read_per_owned", "ratio", Better::Lower, None, Reshards::make),
    ])
}

/// A table with room for `rows` rows, with the buckets of `rank` in `world`.
pub(super) fn table(rows: u64, rank: u32, world: u32) -> Table {
    let buckets = share(DEFAULT_TOTAL_NUM_BUCKETS, rank, world);
    let config = TableConfig { buckets, ..table_config(OPTIMIZER, rows + rows / 50 + 4096) };
    Table::open(config, None, default_engine().expect("an engine")).expect("a table")
}

/// The buckets of a rank. The first ranks have one bucket more.
fn share(total: u32, rank: u32, world: u32) -> std::ops::Range<u32> {
    let (each, more) = (total / world, total % world);
    let begin = rank * each + rank.min(more);
    begin..begin + each + u32::from(rank < more)
}

/// Give a table those of `rows` rows that it owns. Values differ from row to row.
pub(super) fn fill(table: &Table, rows: u64) {
    let config = table.config();
    let mut random = SplitMix64(3);
    let values: Vec<f32> = (0..IMPORT_ROWS * DIM + 4096).map(|_| random.next_f64() as f32).collect();
    let owned = (0..rows).map(scattered_id);
    let owned = owned.filter(|&id| config.buckets.contains(&config.bucketing().of(id)));
    let ids: Vec<i64> = owned.collect();
    for (turn, ids) in ids.chunks(IMPORT_ROWS).enumerate() {
        let header = |&id: &i64| RowHeader {
            id,
            last_step: id as u64 % 1000,
            count: id as u32 % 100,
            score: 0.5,
            scalar: 0.25,
            modified_epoch: 0,
        };
        let headers: Vec<RowHeader> = ids.iter().map(header).collect();
        let vectors = &values[turn % 4096..][..ids.len() * DIM];
        table.import_rows(RowBlock { headers: &headers, vectors }).expect("room for all rows");
    }
}

pub(super) fn rows_of(scale: Scale) -> u64 {
    setting("EMBCACHE_BENCH_SAVE_ROWS", scale.pick(7_500_000, 20_000))
}

/// Save the tables of all ranks into a new folder. The result is the bytes of the files with rows.
pub(super) fn save(engine: &Arc<dyn IoEngine>, root: &Path, tables: &[Table]) -> u64 {
    engine.create_dir_all(root).expect("a folder of our own");
    let directory = CheckpointDirectory::with_engine(Arc::clone(engine), root);
    let save = CheckpointSave::begin(&directory, 7).expect("begun");
    let world = tables.len() as u32;
    let digest = |(rank, table)| {
        let mut writer = RankWriter::new(&directory, save.name(), rank, world).expect("made");
        writer.write_rows_of(MODULE, table, BTreeMap::new()).expect("written");
        writer.finish().expect("finished")
    };
    let digests: Vec<_> = (0..).zip(tables).map(digest).collect();
    let published = save.publish(&digests, 1).expect("published");
    let paths = engine.list(&dir_of(root, &published.latest)).expect("a folder");
    paths.iter().map(|path| engine.open(path, IoOpenMode::Read).and_then(|file| file.len()).expect("a file")).sum()
}

/// The folder of the table's files.
fn dir_of(root: &Path, latest: &LatestCheckpoint) -> PathBuf {
    root.join(latest.name.to_string()).join(format!("{MODULE}+rows"))
}

fn files(dir: &Path) -> impl Iterator<Item = std::fs::File> {
    let paths = std::fs::read_dir(dir).expect("a folder").map(|entry| entry.expect("a folder").path());
    paths.map(|path| std::fs::File::open(path).expect("a file"))
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Figure {
    Rate,
    Cpu,
}

struct Saves {
    table: Table,
    rows: u64,
    /// Rivals are told the number of rows, and are given no ids.
    no_ids: Ids,
    engine: Arc<dyn IoEngine>,
    raw: RawFiles,
    figure: Figure,
    done: u32,
    last: BTreeMap<&'static str, f64>,
    scratch: Scratch,
}

impl Saves {
    fn make(scale: Scale, figure: Figure) -> Box<dyn Rounds> {
        let rows = rows_of(scale);
        let bytes = rows * 300;
        let scratch = Scratch::new(2 * bytes + (64 << 20)).unwrap_or_else(|why| panic!("{why}"));
        let table = table(rows, 0, 1);
        fill(&table, rows);
        let engine = default_engine().expect("an engine");
        let raw = RawFiles::new(scratch.path(), rows as usize * 288);
        let no_ids = Ids { values: Vec::new(), batch: 0 };
        Box::new(Self { table, rows, no_ids, engine, raw, figure, done: 0, last: BTreeMap::new(), scratch })
    }
}

impl Rounds for Saves {
    fn ours(&mut self) -> f64 {
        self.done += 1;
        let root = self.scratch.path().join(format!("save-{}", self.done));
        let (cpu, begin) = (cpu_seconds(), Instant::now());
        let bytes = save(&self.engine, &root, std::slice::from_ref(&self.table)) as f64;
        let (seconds, cpu) = (begin.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        std::fs::remove_dir_all(&root).expect("our own folder");
        self.last =
            BTreeMap::from([("rows", self.rows as f64), ("bytes", bytes), ("seconds", seconds), ("cpu_seconds", cpu)]);
        match self.figure {
            Figure::Rate => bytes / seconds,
            Figure::Cpu => cpu / (bytes / f64::from(1 << 30)),
        }
    }

    fn limit(&mut self) -> Option<f64> {
        if self.figure != Figure::Rate {
            return None;
        }
        let seconds = self.raw.write().as_secs_f64();
        self.raw.remove();
        Some(self.raw.bytes() as f64 / seconds)
    }

    fn data(&self) -> Option<(&Ids, u64)> {
        Some((&self.no_ids, self.rows))
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
    no_ids: Ids,
    bytes: u64,
    engine: Arc<dyn IoEngine>,
    root: PathBuf,
    raw: RawFiles,
    cpu: f64,
    _scratch: Scratch,
}

impl Loads {
    fn make(scale: Scale) -> Box<dyn Rounds> {
        let rows = rows_of(scale);
        let scratch = Scratch::new(2 * rows * 300 + (64 << 20)).unwrap_or_else(|why| panic!("{why}"));
        let engine = default_engine().expect("an engine");
        let saved = table(rows, 0, 1);
        fill(&saved, rows);
        let root = scratch.path().join("save");
        let bytes = save(&engine, &root, &[saved]);
        let raw = RawFiles::new(scratch.path(), bytes as usize);
        raw.write();
        let no_ids = Ids { values: Vec::new(), batch: 0 };
        Box::new(Self { rows, no_ids, bytes, engine, root, raw, cpu: 0.0, _scratch: scratch })
    }

    /// Load the checkpoint into a new table. The result is the table and the time that the load took.
    fn load(&mut self) -> (Table, Duration) {
        let table = table(self.rows, 0, 1);
        let directory = CheckpointDirectory::with_engine(Arc::clone(&self.engine), &self.root);
        let latest = LatestCheckpoint::read(&directory).expect("a checkpoint");
        files(&dir_of(&self.root, &latest)).for_each(|file| forget_cached(&file));
        let (cpu, begin) = (cpu_seconds(), Instant::now());
        let checkpoint = CheckpointChain::open(&directory, latest).expect("a checkpoint");
        let reader = checkpoint.table_reader(MODULE, "rows", table.config().buckets.clone()).expect("a table");
        reader.load_into(&table).expect("whole");
        let took = begin.elapsed();
        self.cpu = cpu_seconds() - cpu;
        (table, took)
    }
}

impl Rounds for Loads {
    fn ours(&mut self) -> f64 {
        let (_table, took) = self.load();
        self.bytes as f64 / took.as_secs_f64()
    }

    fn limit(&mut self) -> Option<f64> {
        Some(self.raw.bytes() as f64 / self.raw.read().as_secs_f64())
    }

    fn data(&self) -> Option<(&Ids, u64)> {
        Some((&self.no_ids, self.rows))
    }

    fn rounds(&self) -> usize {
        ROUNDS
    }

    fn figures(&self) -> BTreeMap<&'static str, f64> {
        let gib = self.bytes as f64 / f64::from(1 << 30);
        BTreeMap::from([("rows", self.rows as f64), ("cpu_seconds_per_gib", self.cpu / gib)])
    }

    fn check(&mut self) {
        check_loaded(&self.load().0, self.rows);
    }
}

/// Check that a table that was loaded has the rows that [`fill`] gives to a table of `rows` rows.
pub(super) fn check_loaded(loaded: &Table, rows: u64) {
    let ids: Vec<i64> = (0..1000).map(scattered_id).collect();
    let saved = table(rows, 0, 1);
    fill(&saved, rows);
    let expected = saved.read_rows(&ids).expect("rows");
    let found = loaded.read_rows(&ids).expect("rows");
    assert!(found.found.iter().all(|found| *found) && found.headers == expected.headers);
    assert!(found.vectors == expected.vectors, "rows as they were saved");
}

/// A checkpoint of four ranks that three ranks load. The value is that of the worst rank.
struct Reshards {
    rows: u64,
    root: PathBuf,
    per_rank: Vec<f64>,
    _scratch: Scratch,
}

impl Reshards {
    fn make(scale: Scale) -> Box<dyn Rounds> {
        let rows = rows_of(scale);
        let scratch = Scratch::new(rows * 300 + (64 << 20)).unwrap_or_else(|why| panic!("{why}"));
        let engine = default_engine().expect("an engine");
        let root = scratch.path().join("save");
        let tables: Vec<Table> =
            (0..RESHARD.0).map(|rank| table(rows / u64::from(RESHARD.0), rank, RESHARD.0)).collect();
        for table in &tables {
            fill(table, rows);
        }
        save(&engine, &root, &tables);
        Box::new(Self { rows, root, per_rank: Vec::new(), _scratch: scratch })
    }
}

impl Rounds for Reshards {
    fn ours(&mut self) -> f64 {
        let per_rank = (0..RESHARD.1).map(|rank| {
            let engine = CountedEngine::over(default_engine().expect("an engine"));
            let shared: Arc<dyn IoEngine> = engine.clone();
            let table = table(self.rows / u64::from(RESHARD.1), rank, RESHARD.1);
            let directory = CheckpointDirectory::with_engine(Arc::clone(&shared), &self.root);
            let latest = LatestCheckpoint::read(&directory).expect("a checkpoint");
            let checkpoint = CheckpointChain::open(&directory, latest).expect("a checkpoint");
            let reader = checkpoint.table_reader(MODULE, "rows", table.config().buckets.clone()).expect("a table");
            reader.load_into(&table).expect("whole");
            let row_bytes = OPTIMIZER.layout(DIM).floats() * 4 + 28;
            engine.read_bytes() as f64 / (reader.max_rows() * row_bytes as u64) as f64
        });
        self.per_rank = per_rank.collect();
        self.per_rank.iter().copied().fold(0.0, f64::max)
    }

    // The value is the same each time, so one round is enough.
    fn rounds(&self) -> usize {
        1
    }

    fn figures(&self) -> BTreeMap<&'static str, f64> {
        ["rank_0", "rank_1", "rank_2"].into_iter().zip(self.per_rank.iter().copied()).collect()
    }
}
