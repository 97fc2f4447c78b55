//! Measures a full load from a disk that costs nothing: the processor's share of it.
//!
//! `EMBCACHE_BENCH_SAVE_ROWS` sets the number of rows (7.5M).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use embcache::cache::Table;
use embcache::checkpoint::{CheckpointChain, CheckpointDirectory, LatestCheckpoint};
use embcache::io::IoEngine;
use embcache_benches::{Bench, Better, Group, NullDisk, PlainLoad, Rounds, Scale, cpu_seconds, scattered_id};

use super::checkpoint::{MODULE, check_loaded, fill, rows_of, save, table};

const ROOT: &str = "/checkpoints";
const LIMIT: &str =
    "plain loop: rows from columns in memory into fresh memory, ids into an open-addressing table of the final size";

pub(crate) fn group() -> Group {
    let (name, unit, limit) = ("load_null_disk", "bytes/s", Some(LIMIT));
    Group::Alone(vec![Bench { name, unit, better: Better::Higher, limit, make: Loads::make }])
}

struct Loads {
    rows: u64,
    bytes: u64,
    engine: Arc<dyn IoEngine>,
    plain: PlainLoad,
    cpu: f64,
}

impl Loads {
    fn make(scale: Scale) -> Box<dyn Rounds> {
        let rows = rows_of(scale);
        let engine: Arc<dyn IoEngine> = NullDisk::new();
        let saved = table(rows, 0, 1);
        fill(&saved, rows);
        let bytes = save(&engine, Path::new(ROOT), &[saved]);
        let plain = PlainLoad::new((0..rows).map(scattered_id));
        Box::new(Self { rows, bytes, engine, plain, cpu: 0.0 })
    }

    /// Load the checkpoint into a new table. The result is the table and the seconds that the load took.
    fn load(&mut self) -> (Table, f64) {
        let table = table(self.rows, 0, 1);
        let directory = CheckpointDirectory::with_engine(Arc::clone(&self.engine), Path::new(ROOT));
        let (cpu, begin) = (cpu_seconds(), Instant::now());
        let checkpoint = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).expect("a checkpoint"))
            .expect("manifests");
        let reader = checkpoint.table_reader(MODULE, "rows", table.config().buckets.clone()).expect("a table");
        reader.load_into(&table).expect("whole");
        let seconds = begin.elapsed().as_secs_f64();
        self.cpu = cpu_seconds() - cpu;
        (table, seconds)
    }
}

impl Rounds for Loads {
    fn ours(&mut self) -> f64 {
        let (_table, seconds) = self.load();
        self.bytes as f64 / seconds
    }

    fn limit(&mut self) -> Option<f64> {
        let begin = Instant::now();
        assert_eq!(self.plain.load() as u64, self.rows);
        Some(self.bytes as f64 / begin.elapsed().as_secs_f64())
    }

    fn figures(&self) -> BTreeMap<&'static str, f64> {
        let rows = self.rows as f64;
        BTreeMap::from([("rows", rows), ("cpu_us_per_row", self.cpu / rows * 1e6)])
    }

    fn check(&mut self) {
        let (table, _) = self.load();
        check_loaded(&table, self.rows);
    }
}
