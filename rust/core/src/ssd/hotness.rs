//! Assigns rows to hotness groups: rows that are expected to be rewritten at about the same rate share segments.
//!
//! A segment whose records become dead together costs compaction little: compaction waits until most of them are dead,
//! or leaves the segment alone. A segment has a group, and a row's group is that of its segment, so no byte per row is
//! needed. Group `c` is for rows that are rewritten once per `2^(c - INITIAL_CLASS) * n` writes, where `n` is the
//! number of rows in the tier.
//!
//! - A rewritten row moves from its group towards the group of the observed interval, by exponential smoothing. Only
//!   whole steps between groups can be stored, so a fraction of a step is taken in that fraction of the calls.
//! - A row that compaction finds long after its expected rewrite moves to the next group.
//! - Rows that were written together twice are used together. They take fewer reads if they are stored next to each
//!   other. So they, and the rows between them, go to one group.
//!
//! Intervals predict the next rewrite: Wang et al., Separating data via block invalidation time inference for write
//! amplification reduction in log-structured storage, FAST 2022.

use crate::ssd::index::RecordLocation;

/// Maximum number of hotness groups of a tier.
pub(crate) const MAX_HOTNESS_CLASSES: u8 = 4;
/// Hotness group of a row without history.
const INITIAL_CLASS: u8 = 1;
/// The expected group moves a quarter of the way to the observed group.
const SMOOTHING: f32 = 0.25;
/// Two rows of a call are neighbours if their positions in it differ by at most 8.
const NEIGHBOURS: usize = 8;
/// Two rows were neighbours before if their older versions are in one segment, at most 32 records apart.
const NEIGHBOUR_RECORDS: u32 = 32;
/// A row stays in its group until twice the group's interval has passed.
const PATIENCE: f64 = 2.0;

/// The hotness groups of one tier: numbers below `count`, which is 2 to [`MAX_HOTNESS_CLASSES`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct HotnessClasses {
    pub(crate) count: u8,
    /// Rows in the tier.
    pub(crate) rows: u64,
}

impl HotnessClasses {
    /// Hotness group of a row that is new to the tier.
    pub(crate) fn for_new_row() -> u8 {
        INITIAL_CLASS
    }

    /// Hotness group of a row that is written again `interval` writes after its older version, which was in `hotness`.
    /// `dither`, from 0 to 1, rounds a fractional step. It is the same for rows that are written together, so that they
    /// stay together.
    #[inline]
    pub(crate) fn after_rewrite(self, hotness: u8, interval: u64, dither: f32) -> u8 {
        let relative = (interval.max(1) as f32 / self.rows.max(1) as f32).log2();
        let seen = (relative + f32::from(INITIAL_CLASS)).clamp(0.0, f32::from(self.count - 1));
        let expected = f32::from(hotness) + SMOOTHING * (seen - f32::from(hotness));
        ((expected + dither) as u8).min(self.count - 1)
    }

    /// Hotness group of a row of group `hotness` that is still live `age` writes after its own.
    #[inline]
    pub(crate) fn after_move(self, hotness: u8, age: u64) -> u8 {
        let interval = self.rows as f64 * f64::from(i32::from(hotness) - i32::from(INITIAL_CLASS)).exp2();
        (hotness + u8::from(age as f64 > PATIENCE * interval)).min(self.count - 1)
    }
}

/// Finds the rows of a call that are neighbours in it and were neighbours before, by the locations of their `older`
/// versions. Assigns to them, and to the rows between them, the median of their hotness groups.
pub(crate) fn keep_neighbours_together(classes: &mut [u8], older: &[Option<RecordLocation>]) {
    // Rows are near each other if these numbers are: a segment has fewer than 2³² records. A row without an older
    // version is near none.
    let far = NEIGHBOUR_RECORDS as usize + 1;
    let place = |(at, older): (usize, &Option<RecordLocation>)| match older {
        Some(older) => u64::from(older.segment) << 32 | u64::from(older.record),
        None => 1 << 63 | (at * far) as u64,
    };
    let places: Vec<u64> = older.iter().enumerate().map(place).collect();
    let mut first = 0;
    while first < classes.len() {
        if has_no_neighbour_ahead(&places[first..]) {
            first += 1;
            continue;
        }
        let (mut last, mut at) = (first, first);
        while at <= last {
            let ahead = &places[..(at + NEIGHBOURS + 1).min(places.len())];
            // Rows that are already joined are skipped.
            let ahead = &ahead[last.max(at) + 1..];
            let is_near = |place: &u64| place.abs_diff(places[at]) <= u64::from(NEIGHBOUR_RECORDS);
            if ahead.iter().fold(false, |any, place| any | is_near(place)) {
                last = last.max(at) + 1 + ahead.iter().rposition(is_near).unwrap_or(0);
            }
            at += 1;
        }
        let run = &mut classes[first..=last];
        let mut counts = [0_usize; MAX_HOTNESS_CLASSES as usize];
        for &class in &*run {
            counts[class as usize] += 1;
        }
        let mut below = 0;
        let middle = counts.iter().position(|count| {
            below += count;
            2 * below >= run.len()
        });
        run.fill(middle.map_or(INITIAL_CLASS, |class| class as u8));
        first = last + 1;
    }
}

/// True if the first of `places` has no neighbour among the following. This is nearly always so, and is decided without
/// branches.
#[inline]
fn has_no_neighbour_ahead(places: &[u64]) -> bool {
    let Some((place, ahead)) = places.split_first() else { return true };
    let Some(ahead) = ahead.first_chunk::<NEIGHBOURS>() else { return false };
    let least = place.wrapping_sub(NEIGHBOUR_RECORDS.into());
    let is_near = |other: &u64| other.wrapping_sub(least) <= 2 * u64::from(NEIGHBOUR_RECORDS);
    !ahead.iter().fold(false, |any, other| any | is_near(other))
}

#[cfg(test)]
mod tests;
