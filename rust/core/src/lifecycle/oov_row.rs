//! The OOV row of a table, shared by the ids that were not admitted.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::kernels::{OptimizerStep, update_row};
use crate::rows::RowLayout;

/// The OOV row of a table: its weights, its vector slots, and its scalar slot if rows have one.
///
/// It is serialized as text, eight hexadecimal digits for the bits of each float, so that every value is restored
/// exactly.
#[derive(Clone)]
pub struct OovRow(Vec<f32>);

/// Compares bits, so that a row with NaNs is equal to itself.
impl PartialEq for OovRow {
    fn eq(&self, other: &Self) -> bool {
        let bits = |row: &Self| row.0.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
        bits(self) == bits(other)
    }
}

impl std::fmt::Debug for OovRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("OovRow").field(&self.0.len()).finish()
    }
}

impl OovRow {
    /// Creates a row whose weights and optimizer slots are zeros.
    pub fn zeros(layout: RowLayout) -> Self {
        Self(vec![0.0; layout.floats()])
    }

    /// Creates a row from all its values. Returns `None` if their number does not match the layout.
    pub fn from_values(layout: RowLayout, values: Vec<f32>) -> Option<Self> {
        (values.len() == layout.floats()).then_some(Self(values))
    }

    /// All its values.
    pub fn values(&self) -> &[f32] {
        &self.0
    }

    /// Its weights: `[D]`. The row has `layout`, or a layout with other slots.
    pub fn weights(&self, layout: RowLayout) -> &[f32] {
        &self.0[..layout.dim.min(self.0.len())]
    }

    /// Returns a row with these weights and initial slots.
    #[must_use]
    pub fn without_slots(&self, layout: RowLayout) -> Self {
        let mut begun = Self::zeros(layout);
        let weights = self.weights(layout);
        begun.0[..weights.len()].copy_from_slice(weights);
        begun
    }

    /// Updates it by its gradient: `[D]`.
    pub(crate) fn train(&mut self, layout: RowLayout, gradient: &[f32], step: &OptimizerStep) {
        update_row(layout, &mut self.0, gradient, step);
    }
}

impl Serialize for OovRow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use std::fmt::Write;
        let mut text = String::with_capacity(8 * self.0.len());
        for number in &self.0 {
            // Writing to a string does not fail.
            let _ = write!(text, "{:08x}", number.to_bits());
        }
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for OovRow {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let (numbers, rest) = text.as_bytes().as_chunks::<8>();
        let number = |digits: &[u8; 8]| {
            let digits =
                std::str::from_utf8(digits).ok().filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
            digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()).map(f32::from_bits)
        };
        let values: Option<Vec<f32>> = numbers.iter().map(number).collect();
        match values {
            Some(values) if rest.is_empty() => Ok(Self(values)),
            _ => Err(serde::de::Error::custom("an OOV row has eight hexadecimal digits for each of its numbers")),
        }
    }
}

#[cfg(test)]
mod tests;
