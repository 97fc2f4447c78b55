//! Measures what a sweep over rows on SSD does to the steps of a training beside it: the median step while the space of dead rows is taken
//! back, divided by the median step before.
//!
//! Half of the rows die. Half of these lie in segments where nothing else is. The others lie between rows that live, so that
//! compaction has something to move. There are two tables: one whose SSD tier has room for three times its rows, and one whose tier is nearly
//! full, where compaction works before the sweep too. The value is the larger ratio of the two.
//!
//! `EMBCACHE_BENCH_SWEEP_SSD_ROWS` sets the number of rows that die in a round (1M). As many live.

use embcache::cache::Table;
use embcache::config::{EvictionConfig, EvictionRule, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::default_engine;
use embcache_benches::{
    BAG, Better, DIM, Group, Ids, ROW_BYTES, Row, Scale, Scratch, Training, give_rows, median, scattered_id, setting,
    table_config, zipf_ranks,
};

const NAME: &str = "sweep_ssd_step_slowdown";
const IMPORT_ROWS: u64 = 16_384;
/// Steps without training after which a row dies, and the step of the tables. Rows that are trained are far from dying.
const STEPS: u64 = 1 << 40;
const NOW: u64 = 1 << 41;
/// Ids of a batch: 4096 bags.
const BATCH: usize = 4096 * BAG;
/// In a segment that has both kept and expired rows, one row of this many is kept.
const MIXED: u64 = 8;
const ROUNDS: usize = 5;

pub(crate) fn group() -> Group {
    Group::rows(&[NAME], |scale, _| measure(scale))
}

fn measure(scale: Scale) {
    let dying = setting("EMBCACHE_BENCH_SWEEP_SSD_ROWS", scale.pick(1_000_000, 40_000));
    let mut sides = [("roomy", 300), ("full", 125)].map(|(name, percent)| (name, Side::make(scale, dying, percent)));
    let mut values = Vec::new();
    for _ in 0..scale.pick(ROUNDS, 1) {
        let ratios = sides.each_mut().map(|(name, side)| {
            let ratio = side.round();
            eprintln!("{name}: {ratio:.3}");
            ratio
        });
        values.push(ratios[0].max(ratios[1]));
    }
    let mut row = Row::new(NAME, "ratio", Better::Lower, values);
    let [(_, roomy), (_, full)] = &sides;
    row.run.extend([
        ("ratio_roomy", median(&roomy.ratios)),
        ("ratio_full", median(&full.ratios)),
        ("step_before_roomy_ms", median(&roomy.before) * 1e3),
        ("step_before_full_ms", median(&full.before) * 1e3),
        ("longest_step_before_ms", longest([&roomy.before, &full.before])),
        ("longest_step_ms", longest([&roomy.during, &full.during])),
        ("steps_a_round", roomy.during.len() as f64 / roomy.ratios.len() as f64),
        ("bytes_taken_back_roomy", median(&roomy.taken_back)),
        ("bytes_taken_back_full", median(&full.taken_back)),
        ("rows", dying as f64),
    ]);
    row.print();
}

fn longest(steps: [&Vec<f64>; 2]) -> f64 {
    steps.into_iter().flatten().copied().fold(0.0, f64::max) * 1e3
}

/// A table in training, and what was measured of it.
struct Side {
    table: Table,
    training: Training,
    /// The numbers of rows: so many live and are trained, so many die, and so many live among these without being trained.
    live: u64,
    dying: u64,
    mixed: u64,
    least_steps: usize,
    ratios: Vec<f64>,
    /// The seconds of each step.
    before: Vec<f64>,
    during: Vec<f64>,
    /// The bytes of files that went in each round.
    taken_back: Vec<f64>,
    _scratch: Scratch,
}

impl Side {
    /// A table whose cap is so many percent of its rows' bytes.
    fn make(scale: Scale, dying: u64, percent: u64) -> Self {
        let (live, mixed) = (dying, dying / 2 / MIXED);
        let cap = (live + dying + mixed) * ROW_BYTES as u64 * percent / 100 + scale.pick(64 << 20, 16 << 20);
        let scratch = Scratch::new(cap).unwrap_or_else(|why| panic!("{why}"));
        let dir = scratch.path().join("tier");
        let ssd = SsdConfig { dir, bytes: cap, reopen: ReopenMode::Never, resume_commit_id: None };
        let eviction = EvictionConfig { rule: EvictionRule::Unused { steps: STEPS }, every_steps: None };
        let batch = scale.pick(BATCH, BATCH / 64);
        // A tenth of the rows that are trained, the two batches under way, and the index.
        let in_ram = live / 10 + 2 * batch as u64 + (live + dying + mixed) / 20;
        let config = TableConfig {
            ssd: Some(ssd),
            eviction: Some(eviction),
            ..table_config(OptimizerKind::RowWiseAdagrad, in_ram)
        };
        let table = Table::open(config, None, default_engine().expect("an engine")).expect("a table");
        table.set_step(NOW).expect("open");
        for first in (0..live).step_by(IMPORT_ROWS as usize) {
            give_rows(&table, DIM, first..(first + IMPORT_ROWS).min(live), NOW);
        }
        let ranks = zipf_ranks(8, batch * 32, live, 1.05);
        let training = Training::new(&table, DIM, Ids::from_ranks(&ranks, batch, scattered_id));
        Self {
            table,
            training,
            live,
            dying,
            mixed,
            least_steps: scale.pick(60, 4),
            ratios: Vec::new(),
            before: Vec::new(),
            during: Vec::new(),
            taken_back: Vec::new(),
            _scratch: scratch,
        }
    }

    /// Put in the rows that will die, and those that lie among them.
    fn give_dying(&self) {
        let (dying, among) = (self.live, self.live + self.dying);
        let alone = dying..dying + self.dying / 2;
        for first in alone.clone().step_by(IMPORT_ROWS as usize) {
            give_rows(&self.table, DIM, first..(first + IMPORT_ROWS).min(alone.end), 0);
        }
        for part in 0..self.dying.div_ceil(2).div_ceil(MIXED * 1024) {
            let begin = part * 1024;
            let some = among + begin..(among + begin + 1024).min(among + self.mixed);
            give_rows(&self.table, DIM, some, NOW);
            let some = alone.end + begin * MIXED..(alone.end + (begin + 1024) * MIXED).min(dying + self.dying);
            give_rows(&self.table, DIM, some, 0);
        }
        assert_eq!(self.table.len().expect("open"), self.live + self.dying + self.mixed);
    }

    /// The result is the median step while space is taken back, divided by the median step before.
    fn round(&mut self) -> f64 {
        self.training.pause();
        self.give_dying();
        // The writes of the import, and of the rows that it demoted from RAM, must not be measured.
        self.training.steps(self.least_steps);
        let before = self.training.steps(self.least_steps);
        let bytes = self.ssd_bytes();
        self.table.sweep().expect("begun");
        let mut during = Vec::new();
        while self.is_under_way() {
            during.push(self.training.step());
        }
        // Files go, and segments are moved, also after the last row was found.
        during.extend(self.training.steps(self.least_steps.saturating_sub(during.len())));
        self.taken_back.push(bytes - self.ssd_bytes());
        let ratio = median(&during) / median(&before);
        self.training.pause();
        assert_eq!(self.table.len().expect("open"), self.live + self.mixed, "those that were to die are gone");
        self.ratios.push(ratio);
        self.before.extend(before);
        self.during.extend(during);
        ratio
    }

    fn is_under_way(&self) -> bool {
        self.table.stats().expect("open").eviction.is_some_and(|stats| stats.is_sweeping)
    }

    fn ssd_bytes(&self) -> f64 {
        self.table.stats().expect("open").ssd.expect("an SSD tier").tier.bytes as f64
    }
}
