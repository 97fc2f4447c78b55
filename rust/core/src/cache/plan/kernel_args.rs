//! Parts of a plan that kernels outside of the Rust core use: the slots of its rows, and the occurrences of each row.

use super::handle::{Plan, check_index, check_len, placed_state};
use crate::error::{Kind, Result};
use crate::types::{CacheSlot, NO_SLOT};

/// Memory for the distinct rows of some tables, one table after another: see [`Plan::fill_rows`].
#[derive(Debug)]
pub struct RowLists<'a> {
    /// The table of each row, as its position among these tables: `[U]`.
    pub tables: &'a mut [i32],
    /// The slot of each row, -1 for a row that is not updated: `[U]`.
    pub slots: &'a mut [i32],
    /// Start of the occurrences of each row, and the end of the last one: `[U + 1]`.
    pub starts: &'a mut [i32],
    /// The occurrences, as positions in the batch's ids: `[N']`.
    pub occurrences: &'a mut [i32],
}

impl Plan {
    /// Returns the value that ids of a table read if they have no row and are not admitted: `[D]`, or `None` for zeros.
    pub fn absent_row(&self, table: usize) -> Result<Option<Vec<f32>>> {
        self.table(table)?;
        let plan_guard = self.lock_plan()?;
        let state = placed_state(&plan_guard, "absent_row")?;
        Ok(state.tables[table].absent().map(<[f32]>::to_vec))
    }

    /// Start of the ids of each feature in the batch's ids, and the end of the last one: `[F + 1]`.
    #[must_use]
    pub fn splits(&self) -> &[usize] {
        &self.splits
    }

    /// Returns the slot of each occurrence of a feature, `NO_SLOT` for one that reads the absent row: `[N_f]`.
    pub fn slots(&self, feature: usize) -> Result<Vec<CacheSlot>> {
        let plan_guard = self.lock_plan()?;
        let state = placed_state(&plan_guard, "slots")?;
        check_index("feature", feature, self.shape.features())?;
        Ok(self.feature_slots(&state, feature).to_vec())
    }

    /// Writes the slot of each occurrence to `out`, -1 for one that reads the absent row, in the order of the batch's
    /// ids: `[N]`.
    ///
    /// Errors: `Input` unless `out` is as long as the batch.
    pub fn fill_slots(&self, out: &mut [i32]) -> Result<()> {
        let plan_guard = self.lock_plan()?;
        let state = placed_state(&plan_guard, "fill_slots")?;
        check_len("out", out.len(), self.occurrences()?)?;
        for (table, features) in state.tables.iter().zip(&self.shape.table_features) {
            let of_table = self.splits[features.start]..self.splits[features.end];
            fill(&mut out[of_table], &table.occurrence_slots, |&slot| signed(slot));
        }
        Ok(())
    }

    /// Returns the number of distinct rows of the batch for each table.
    pub fn row_counts(&self) -> Result<Vec<usize>> {
        let plan_guard = self.lock_plan()?;
        let state = placed_state(&plan_guard, "row_counts")?;
        Ok(state.tables.iter().map(|table| table.index.slots.len()).collect())
    }

    /// Fills lists with the distinct rows of `tables`, one table after another. [`Plan::row_counts`] returns their
    /// numbers.
    ///
    /// Errors: `Input` for lists of other lengths; `State` for a plan that does not train, because it keeps no
    /// occurrences.
    pub fn fill_rows(&self, tables: &[usize], lists: &mut RowLists<'_>) -> Result<()> {
        tables.iter().try_for_each(|&table| self.table(table).map(drop))?;
        let plan_guard = self.lock_plan()?;
        let state = self.trainable(&plan_guard)?;
        self.occurrences()?;
        let of_tables = || tables.iter().map(|&table| &state.tables[table].index);
        let rows = of_tables().map(|index| index.slots.len()).sum();
        check_len("tables", lists.tables.len(), rows)?;
        check_len("slots", lists.slots.len(), rows)?;
        check_len("starts", lists.starts.len(), rows + 1)?;
        check_len("occurrences", lists.occurrences.len(), of_tables().map(|index| index.occurrences.len()).sum())?;
        let (mut row, mut occurrence) = (0, 0);
        for (number, (&table, index)) in tables.iter().zip(of_tables()).enumerate() {
            let rows = row..row + index.slots.len();
            let occurrences = occurrence..occurrence + index.occurrences.len();
            let begin = self.splits[self.shape.table_features[table].start] as i32;
            lists.tables[rows.clone()].fill(number as i32);
            fill(&mut lists.slots[rows.clone()], &index.slots, |&slot| signed(slot));
            fill(&mut lists.starts[rows.clone()], &index.starts, |&start| start as i32 + occurrence as i32);
            fill(&mut lists.occurrences[occurrences.clone()], &index.occurrences, |&position| position as i32 + begin);
            (row, occurrence) = (rows.end, occurrences.end);
        }
        lists.starts[row] = occurrence as i32;
        Ok(())
    }

    /// Returns the number of occurrences of the batch.
    ///
    /// Errors: `Input` if it does not fit `i32`.
    fn occurrences(&self) -> Result<usize> {
        let count = self.splits.last().copied().unwrap_or(0);
        if i32::try_from(count).is_ok() {
            return Ok(count);
        }
        Err(Kind::Input.error(format!(
            "a batch has {count} ids, and lists of int32 have room for fewer than 2^31: use smaller batches"
        )))
    }

    /// Returns a table's transposed index: slots `[U]`, starts `[U + 1]`, and occurrences as positions in the batch's
    /// ids.
    pub fn transposed(&self, table: usize) -> Result<(Vec<CacheSlot>, Vec<u32>, Vec<u32>)> {
        self.table(table)?;
        let plan_guard = self.lock_plan()?;
        let state = placed_state(&plan_guard, "transposed")?;
        let begin = self.splits[self.shape.table_features[table].start] as u32;
        let index = &state.tables[table].index;
        let occurrences = index.occurrences.iter().map(|&position| position + begin).collect();
        Ok((index.slots.clone(), index.starts.clone(), occurrences))
    }
}

/// A slot in the form that kernels use: -1 for none.
fn signed(slot: CacheSlot) -> i32 {
    const { assert!(NO_SLOT as i32 == -1) };
    slot as i32
}

fn fill<T>(out: &mut [i32], values: &[T], number: impl Fn(&T) -> i32) {
    out.iter_mut().zip(values).for_each(|(out, value)| *out = number(value));
}
