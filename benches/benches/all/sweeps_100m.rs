//! Measures a sweep that takes 100M rows on SSD from a table while it is trained: the time until all are gone, the most bytes that are
//! resident meanwhile beside those before, the bytes of disk that are given back, and what the sweep adds to a delta.
//!
//! The rows are small, so that it is their number that counts. 1M rows besides live, and are trained. The same batches are trained over
//! and over, so that two deltas, one with the sweep and one after it, have the same rows.
//!
//! `EMBCACHE_BENCH_BIG_ROWS` sets another number of rows.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use embcache::cache::{Table, host_row_bytes};
use embcache::config::{EvictionConfig, EvictionRule, OptimizerKind, PolicyKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::default_engine;
use embcache_benches::{
    BAG, Better, Group, Ids, Row, Saved, Scale, Scratch, Training, disk_bytes_of, forget_peak, give_rows, median,
    resident, save, scattered_id, setting, table_config, zipf_ranks,
};

const SECONDS: &str = "sweep_100m_rows_seconds";
const RAM: &str = "sweep_100m_rows_peak_ram_of_before";
const DISK: &str = "sweep_100m_rows_disk_of_before";
const DELTA: &str = "sweep_100m_rows_delta_bytes";

const DIM: usize = 4;
/// Bytes of disk for each row: the most that a record and its entry in a footer take, and a margin for the headroom of the cap.
const SSD_BYTES_A_ROW: u64 = 40 + 4 * DIM as u64 + 23 + 16;
/// Bytes of a row in a checkpoint, and a margin.
const SAVED_BYTES_A_ROW: u64 = 48 + 4 * DIM as u64;
/// Bytes of RAM of an entry in the index of the rows on SSD.
const INDEX_BYTES_A_ROW: u64 = 12;
const IMPORT_ROWS: u64 = 65_536;
/// Steps without training after which a row dies, and the step of the table. Rows that are trained are far from dying.
const STEPS: u64 = 1 << 40;
const NOW: u64 = 1 << 41;
/// Batches that are trained in turn.
const BATCHES: usize = 64;

pub(crate) fn group() -> Group {
    Group::rows(&[SECONDS, RAM, DISK, DELTA], |scale, wanted| {
        for row in measure(scale) {
            if wanted(row.name) {
                row.print();
            }
        }
    })
}

fn print(text: &str, begin: Instant) {
    eprintln!("{:.0} s: {text}, {} MiB resident", begin.elapsed().as_secs_f64(), resident().now >> 20);
}

/// The table, with `dying` rows that will die and `live` ones that are trained.
fn loaded(dir: PathBuf, dying: u64, live: u64, batch: u64) -> Table {
    let bytes = (dying + live) * SSD_BYTES_A_ROW + (128 << 20);
    let ssd = SsdConfig { dir, bytes, reopen: ReopenMode::Never, resume_commit_id: None };
    let eviction = EvictionConfig { rule: EvictionRule::Unused { steps: STEPS }, every_steps: None };
    let row_bytes = host_row_bytes(&OptimizerKind::Sgd.layout(DIM), PolicyKind::S3Fifo);
    let config = TableConfig {
        dim: DIM,
        host_bytes: (live / 10 + 4 * batch) * row_bytes + (dying + live) * INDEX_BYTES_A_ROW,
        ssd: Some(ssd),
        eviction: Some(eviction),
        ..table_config(OptimizerKind::Sgd, 0)
    };
    let table = Table::open(config, None, default_engine().expect("an engine")).expect("a table");
    table.set_step(NOW).expect("open");
    for first in (0..dying + live).step_by(IMPORT_ROWS as usize) {
        // The older a row is, the earlier it was written. The last rows live.
        let numbers = first..(first + IMPORT_ROWS).min(dying + live);
        let cut = numbers.end.min(dying).max(first);
        give_rows(&table, DIM, first..cut, first / IMPORT_ROWS);
        give_rows(&table, DIM, cut..numbers.end, NOW);
    }
    assert_eq!(table.len().expect("open"), dying + live);
    table
}

/// Train until the sweep that was begun is done, and until the disk gives back no more. The result is the seconds of each step, the seconds
/// until all rows were gone, and those until the last file was.
fn swept(table: &Table, training: &mut Training, dir: &Path) -> (Vec<f64>, f64, f64) {
    let begin = Instant::now();
    let mut steps = Vec::new();
    while table.stats().expect("open").eviction.is_some_and(|stats| stats.is_sweeping) {
        steps.push(training.step());
    }
    let gone = begin.elapsed().as_secs_f64();
    let (mut least, mut since) = (disk_bytes_of(dir), Instant::now());
    let mut last = gone;
    while since.elapsed() < Duration::from_secs(2) {
        steps.push(training.step());
        let now = disk_bytes_of(dir);
        if now < least {
            (least, since, last) = (now, Instant::now(), begin.elapsed().as_secs_f64());
        }
    }
    (steps, gone, last)
}

fn measure(scale: Scale) -> [Row<'static>; 4] {
    let dying = setting("EMBCACHE_BENCH_BIG_ROWS", scale.pick(100_000_000, 200_000));
    let (live, bags) = (dying / 100, scale.pick(400, 20));
    let batch = bags * BAG;
    let disk = (dying + live) * (SSD_BYTES_A_ROW + SAVED_BYTES_A_ROW) + (512 << 20);
    let scratch = Scratch::new(disk).unwrap_or_else(|why| panic!("{why}"));
    let (dir, root) = (scratch.path().join("tier"), scratch.path().join("checkpoints"));
    std::fs::create_dir(&root).expect("a folder of our own");
    let begin = Instant::now();
    let table = loaded(dir.clone(), dying, live, batch as u64);
    print("loaded", begin);
    let engine = default_engine().expect("an engine");
    let full = save(&table, &engine, &root, None);
    print("saved", begin);
    let ranks = zipf_ranks(11, batch * BATCHES, live, 1.05);
    let mut training = Training::new(&table, DIM, Ids::from_ranks(&ranks, batch, |rank| scattered_id(dying + rank)));
    training.steps(2 * BATCHES);
    training.pause();
    let before = save(&table, &engine, &root, Some(&full.ancestor));

    forget_peak();
    let steps_before = training.steps(scale.pick(2000, BATCHES));
    let (ram_before, disk_before) = (resident().peak, disk_bytes_of(&dir));
    print("trained without a sweep", begin);
    forget_peak();
    table.sweep().expect("begun");
    let (steps, gone, last_file) = swept(&table, &mut training, &dir);
    let (ram, disk_after) = (resident(), disk_bytes_of(&dir));
    print("swept", begin);
    let mut delta_since = |ancestor: &Saved| {
        training.steps(2 * BATCHES);
        training.pause();
        save(&table, &engine, &root, Some(&ancestor.ancestor))
    };
    let with = delta_since(&before);
    let without = delta_since(&with);
    assert_eq!(table.len().expect("open"), live, "the others are gone");
    assert_eq!(with.rows, without.rows, "the batches are the same");

    let row = |name, unit, value| Row::new(name, unit, Better::Lower, vec![value]);
    let mut seconds = row(SECONDS, "s", gone);
    seconds.run.extend([
        ("rows", dying as f64),
        ("steps", steps.len() as f64),
        ("seconds_to_last_file", last_file),
        ("step_ms", median(&steps) * 1e3),
        ("step_before_ms", median(&steps_before) * 1e3),
        ("longest_step_ms", steps.iter().copied().fold(0.0, f64::max) * 1e3),
        ("longest_step_before_ms", steps_before.iter().copied().fold(0.0, f64::max) * 1e3),
    ]);
    let mut most = row(RAM, "ratio", ram.peak as f64 / ram_before as f64);
    most.run.extend([
        ("most_resident_before", ram_before as f64),
        ("most_resident", ram.peak as f64),
        ("resident_after", ram.now as f64),
    ]);
    let mut kept = row(DISK, "ratio", disk_after as f64 / disk_before as f64);
    kept.run.extend([
        ("disk_bytes_before", disk_before as f64),
        ("disk_bytes_after", disk_after as f64),
        ("disk_bytes_given_back", disk_before as f64 - disk_after as f64),
    ]);
    let mut added = row(DELTA, "bytes", with.bytes as f64 - without.bytes as f64);
    added.run.extend([
        ("delta_bytes", with.bytes as f64),
        ("delta_bytes_without_sweep", without.bytes as f64),
        ("delta_rows", with.rows as f64),
        ("full_bytes", full.bytes as f64),
    ]);
    [seconds, most, kept, added]
}
