//! Rounds of ours and of the limit, alternating; median and spread.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;

use crate::process::die_with_parent;
use crate::serve;
use crate::store::StoreWork;
use crate::workload::Ids;

/// Which way is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Rates.
    Higher,
    /// Costs.
    Lower,
}

/// How large the data are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// As the bench's name says.
    Full,
    /// A hundredth or less: shows that it runs.
    Smoke,
}

impl Scale {
    /// `full`, or `smoke` under [`Scale::Smoke`].
    pub fn pick<T>(self, full: T, smoke: T) -> T {
        match self {
            Self::Full => full,
            Self::Smoke => smoke,
        }
    }
}

/// The two sides of a bench, made ready. A round is one run over at least 20 batches, long enough to time.
pub trait Rounds {
    /// One round of ours: the value in the bench's unit.
    fn ours(&mut self) -> f64;

    /// One round of the limit, in the same unit; `None` where the bench has none.
    fn limit(&mut self) -> Option<f64>;

    /// How many rounds a full run has.
    fn rounds(&self) -> usize {
        7
    }

    /// Figures of the rounds so far that are not compared with anything, by name.
    fn figures(&self) -> BTreeMap<&'static str, f64> {
        BTreeMap::new()
    }

    /// The batches that rivals are given, and the rows of the table they index (0: none).
    fn data(&self) -> Option<(&Ids, u64)> {
        None
    }

    /// What other stores are given to do; with `StoreWork::Fetch`, on the batches of `data`.
    fn store(&self) -> Option<StoreWork> {
        None
    }

    /// A claim about the two sides' results that must hold for the figures to mean anything, checked before the first round.
    fn check(&mut self) {}
}

/// A bench by name.
pub struct Bench {
    /// As in `results.json`.
    pub name: &'static str,
    /// Of the value.
    pub unit: &'static str,
    /// Which way is good.
    pub better: Better,
    /// What the limit is; `None` where there is none.
    pub limit: Option<&'static str>,
    /// Makes the data and both sides.
    pub make: fn(Scale) -> Box<dyn Rounds>,
}

/// A row of `results.json` without rivals.
#[derive(Serialize)]
pub struct Row<'a> {
    /// As in `results.json`.
    pub name: &'a str,
    /// Of the values.
    pub unit: &'a str,
    /// Which way is good.
    pub better: Better,
    /// Median of the rounds.
    pub value: f64,
    /// Least of them.
    pub low: f64,
    /// Greatest of them.
    pub high: f64,
    /// Beside ours, in the same run.
    pub limit: Option<Limit<'a>>,
    /// None.
    pub rivals: [(); 0],
    /// How many rounds.
    pub rounds: usize,
    /// Figures that are not compared with anything, by name.
    pub run: BTreeMap<&'static str, f64>,
}

impl<'a> Row<'a> {
    /// The row of a bench without limit.
    ///
    /// # Panics
    /// Without a round.
    pub fn new(name: &'a str, unit: &'a str, better: Better, mut rounds: Vec<f64>) -> Self {
        let (low, value, high) = spread(&mut rounds);
        let run = BTreeMap::new();
        Self { name, unit, better, value, low, high, limit: None, rivals: [], rounds: rounds.len(), run }
    }
}

impl Row<'_> {
    /// Hand the row to who reads this program's output.
    ///
    /// # Panics
    /// When nobody does.
    pub fn print(&self) {
        let text = serde_json::to_string(self).expect("a row of numbers and names");
        writeln!(std::io::stdout(), "{text}").expect("the driver listens");
    }
}

/// What a limit reached.
#[derive(Serialize)]
pub struct Limit<'a> {
    /// What it is.
    pub what: &'a str,
    /// Median of its rounds.
    pub value: f64,
}

/// The main of a bench program; see the crate. Names of other programs' benches, and flags of other harnesses, mean nothing to it.
///
/// # Panics
/// When the results cannot be written.
pub fn run(benches: &[Bench]) {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let flag = |name: &str| arguments.iter().any(|argument| argument == name);
    let scale = scale(&arguments);
    if flag("--list") {
        for bench in benches {
            println!("{}", bench.name);
        }
        return;
    }
    let names = names(&arguments);
    for bench in benches.iter().filter(|bench| names.is_empty() || names.contains(&bench.name)) {
        if flag("--serve") {
            return serve::serve(bench, scale);
        }
        measure(bench, scale);
    }
}

/// The main of a program that prints the rows called `names`: `measure` is told how large the data are to be and which rows are
/// wanted. Without `--rows` (as `cargo bench` runs it) it measures them all, too.
pub fn run_rows(names: &[&str], measure: impl FnOnce(Scale, &dyn Fn(&str) -> bool)) {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        for name in names {
            println!("{name} rows");
        }
        return;
    }
    if arguments.iter().any(|argument| argument == "--rows") {
        die_with_parent();
    }
    let wanted = self::names(&arguments);
    if wanted.is_empty() || wanted.iter().any(|name| names.contains(name)) {
        measure(scale(&arguments), &|name| wanted.is_empty() || wanted.contains(&name));
    }
}

fn scale(arguments: &[String]) -> Scale {
    let smoke = arguments.iter().any(|argument| argument == "--smoke");
    if smoke || std::env::var("EMBCACHE_BENCH").is_ok_and(|how| how == "smoke") { Scale::Smoke } else { Scale::Full }
}

/// What is no flag, nor the value of a flag that criterion has.
fn names(arguments: &[String]) -> Vec<&str> {
    let takes_value = ["--save-baseline", "--baseline", "--sample-size", "--measurement-time", "--warm-up-time"];
    let mut names = Vec::new();
    let mut rest = arguments.iter().map(String::as_str);
    while let Some(argument) = rest.next() {
        if takes_value.contains(&argument) {
            rest.next();
        } else if !argument.starts_with('-') {
            names.push(argument);
        }
    }
    names
}

fn measure(bench: &Bench, scale: Scale) {
    let begin = Instant::now();
    let mut sides = (bench.make)(scale);
    sides.check();
    let rounds = scale.pick(sides.rounds(), 2);
    let (mut ours, mut limits) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        ours.push(sides.ours());
        limits.extend(sides.limit());
    }
    let run = sides.figures();
    let row = Row { run, ..Row::new(bench.name, bench.unit, bench.better, ours) };
    let limit = bench.limit.filter(|_| !limits.is_empty()).map(|what| Limit { what, value: spread(&mut limits).1 });
    let beside = limit.as_ref().map_or(String::new(), |limit| {
        let ratio = if bench.better == Better::Higher { row.value / limit.value } else { limit.value / row.value };
        format!("  {ratio:.2} of the limit {:.4e} ({})", limit.value, limit.what)
    });
    println!(
        "{:<40} {:.4e} {} [{:.4e} .. {:.4e}]{beside}  {:.1} s",
        row.name,
        row.value,
        row.unit,
        row.low,
        row.high,
        begin.elapsed().as_secs_f64()
    );
    if scale == Scale::Full {
        let row = Row { limit, ..row };
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/bench");
        std::fs::create_dir_all(&folder).expect("target/bench can be made");
        let text = serde_json::to_string(&row).expect("a row of numbers and names");
        std::fs::write(folder.join(format!("{}.json", bench.name)), text).expect("target/bench can be written");
    }
}

/// The value in the middle, the upper one of two.
///
/// # Panics
/// Without values.
pub fn median(values: &[f64]) -> f64 {
    spread(&mut values.to_vec()).1
}

/// Least, median and greatest.
fn spread(values: &mut [f64]) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    (values[0], values[values.len() / 2], values[values.len() - 1])
}
