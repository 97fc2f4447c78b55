//! Measures ours and the limit in alternating rounds. The result is the median with its range.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;

use crate::store::StoreWork;
use crate::workload::Ids;

/// The better direction of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Higher values are better, as for rates.
    Higher,
    /// Lower values are better, as for costs.
    Lower,
}

/// The size of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// As large as the bench's name states.
    Full,
    /// At most a hundredth of that, which only shows that the bench runs.
    Smoke,
}

impl Scale {
    /// Returns `full`, or `smoke` under [`Scale::Smoke`].
    pub fn pick<T>(self, full: T, smoke: T) -> T {
        match self {
            Self::Full => full,
            Self::Smoke => smoke,
        }
    }
}

/// The two sides of a bench, with their data. A round runs over at least 20 batches, which is long enough to measure.
pub trait Rounds {
    /// Measures one round of ours, in the bench's unit.
    fn ours(&mut self) -> f64;

    /// Measures one round of the limit, in the bench's unit. Returns `None` if the bench has no limit.
    fn limit(&mut self) -> Option<f64> {
        None
    }

    /// The number of rounds of a full run.
    fn rounds(&self) -> usize {
        7
    }

    /// Further figures of the previous rounds, by name. They are not compared.
    fn figures(&self) -> BTreeMap<&'static str, f64> {
        BTreeMap::new()
    }

    /// The batches for rivals, and the number of rows of the table that they index (0 for none).
    fn data(&self) -> Option<(&Ids, u64)> {
        None
    }

    /// The work for other stores, if rivals are stores. `StoreWork::Fetch` is done on the batches of `data`.
    fn store(&self) -> Option<StoreWork> {
        None
    }

    /// Checks, before the first round, that the two sides have the same results, without which the figures would be
    /// meaningless.
    fn check(&mut self) {}
}

/// A bench.
pub struct Bench {
    /// The name in `results.json`.
    pub name: &'static str,
    /// The unit of the value.
    pub unit: &'static str,
    /// The better direction of the value.
    pub better: Better,
    /// Description of the limit, or `None` if there is none.
    pub limit: Option<&'static str>,
    /// Creates the data and both sides.
    pub make: fn(Scale) -> Box<dyn Rounds>,
}

/// A row of `results.json`, without rivals.
#[derive(Serialize)]
pub struct Row<'a> {
    /// The name of the bench.
    pub name: &'a str,
    /// The unit of the values.
    pub unit: &'a str,
    /// The better direction of the values.
    pub better: Better,
    /// The median of the rounds.
    pub value: f64,
    /// The minimum of the rounds.
    pub low: f64,
    /// The maximum of the rounds.
    pub high: f64,
    /// The limit, measured in the same run.
    pub limit: Option<Limit<'a>>,
    /// The rivals, which are empty. (A driver adds them.)
    pub rivals: [(); 0],
    /// The number of rounds.
    pub rounds: usize,
    /// Further figures, by name. They are not compared.
    pub run: BTreeMap<&'static str, f64>,
}

impl<'a> Row<'a> {
    /// Creates the row of a bench without a limit.
    ///
    /// # Panics
    /// Panics without a round.
    pub fn new(name: &'a str, unit: &'a str, better: Better, mut rounds: Vec<f64>) -> Self {
        let (low, value, high) = spread(&mut rounds);
        let run = BTreeMap::new();
        Self { name, unit, better, value, low, high, limit: None, rivals: [], rounds: rounds.len(), run }
    }
}

impl Row<'_> {
    /// Prints the row for the program that reads this one's output.
    ///
    /// # Panics
    /// Panics if the reader has closed the pipe.
    pub fn print(&self) {
        let text = serde_json::to_string(self).expect("a row of numbers and names");
        writeln!(std::io::stdout(), "{text}").expect("the driver listens");
    }
}

/// The results of a limit.
#[derive(Serialize)]
pub struct Limit<'a> {
    /// Description of the limit.
    pub what: &'a str,
    /// The median of its rounds.
    pub value: f64,
}

/// Measures a bench, prints its figures, and writes them to `target/bench/<name>.json`.
pub(crate) fn measure(bench: &Bench, scale: Scale) {
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
    // A reader such as `head` may have closed the pipe.
    let _ = writeln!(
        std::io::stdout(),
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

/// The median. For an even number of values it is the upper one of the middle two.
///
/// # Panics
/// Panics without values.
pub fn median(values: &[f64]) -> f64 {
    spread(&mut values.to_vec()).1
}

/// The value that this fraction of all values (0 to 1) does not exceed.
///
/// # Panics
/// Panics without values.
pub fn quantile(values: &[f64], share: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let rank = (values.len() as f64 * share).ceil() as usize;
    values[rank.clamp(1, values.len()) - 1]
}

/// The minimum, the median and the maximum.
fn spread(values: &mut [f64]) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    (values[0], values[values.len() / 2], values[values.len() - 1])
}
