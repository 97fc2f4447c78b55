//! The workloads. They are seeded, so they are the same in every run.

use embcache::types::{Id, hash_id};

/// Ids of a batch: 8192 bags of 20.
pub const BATCH_IDS: usize = 163_840;

/// Batches of ids or of slots, one after another.
#[derive(Clone, Debug)]
pub struct Ids {
    /// `[batches * batch]`.
    pub values: Vec<i64>,
    /// The number of ids of a batch.
    pub batch: usize,
}

impl Ids {
    /// Creates batches whose ids or slots are `map` of the ranks.
    pub fn from_ranks(ranks: &[u64], batch: usize, map: impl Fn(u64) -> i64) -> Self {
        Self { values: ranks.iter().map(|&rank| map(rank)).collect(), batch }
    }

    /// The batches, in order.
    pub fn batches(&self) -> impl ExactSizeIterator<Item = &[i64]> {
        self.values.chunks_exact(self.batch)
    }
}

/// A stream of pseudo-random numbers: the `SplitMix64` generator (Steele, Lea, Flood, OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        hash_id(self.0 as i64)
    }

    /// The next number, uniform in `[0, 1)`, of 53 bits.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// The next integer, uniform in `[0, below)`.
    pub fn next_below(&mut self, below: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(below)) >> 64) as u64
    }
}

/// Zipf's law on the ranks `0..rows`. Rank r is drawn in proportion to `(r + 1)^-exponent`, by inversion of the exact
/// distribution.
#[derive(Clone, Debug)]
pub struct Zipf {
    /// The cumulative weights of the ranks.
    cumulative: Vec<f64>,
    /// The unit interval is divided into one equal part per rank. For each part, this is the rank at its start.
    guide: Vec<u32>,
}

impl Zipf {
    /// The law on `rows` ranks: at least 1, and fewer than 2³².
    pub fn new(rows: u64, exponent: f64) -> Self {
        let mut total = 0.0;
        let cumulative: Vec<f64> = (1..=rows)
            .map(|rank| {
                total += (rank as f64).powf(-exponent);
                total
            })
            .collect();
        let mut rank = 0;
        let mut guide = Vec::with_capacity(cumulative.len());
        for part in 0..rows {
            while cumulative[rank] <= total * part as f64 / rows as f64 {
                rank += 1;
            }
            guide.push(rank as u32);
        }
        Self { cumulative, guide }
    }

    /// Draws a rank.
    pub fn draw(&self, random: &mut SplitMix64) -> u64 {
        let unit = random.next_f64();
        let last = self.cumulative.len() - 1;
        let point = unit * self.cumulative[last];
        let mut rank = self.guide[(unit * self.guide.len() as f64) as usize] as usize;
        while rank < last && self.cumulative[rank] <= point {
            rank += 1;
        }
        rank as u64
    }
}

/// Draws `count` ranks from [`Zipf`].
pub fn zipf_ranks(seed: u64, count: usize, rows: u64, exponent: f64) -> Vec<u64> {
    let zipf = Zipf::new(rows, exponent);
    let mut random = SplitMix64(seed);
    (0..count).map(|_| zipf.draw(&mut random)).collect()
}

/// Draws `count` ranks in `0..rows`, each with the same probability.
pub fn uniform_ranks(seed: u64, count: usize, rows: u64) -> Vec<u64> {
    let mut random = SplitMix64(seed);
    (0..count).map(|_| random.next_below(rows)).collect()
}

/// The id of a rank. It is a 64-bit hash, so neither adjacent ids nor low bits depend on the rank.
pub fn scattered_id(rank: u64) -> Id {
    hash_id((rank ^ 0x5851_f42d_4c95_7f2d) as i64) as i64
}

/// The slot of a rank in a table of `rows` rows, by a permutation that moves adjacent ranks far apart.
pub fn scattered_slot(rank: u64, rows: u64) -> i64 {
    // This prime divides no table size in use, so the map is a bijection.
    const STRIDE: u128 = 2_654_435_761;
    ((u128::from(rank) * STRIDE + 12_345) % u128::from(rows)) as i64
}
