//! Decides which rows lie together: those that are expected to be rewritten at about the same rate.
//!
//! A segment whose records die together costs compaction little: it waits until most of them are dead, or it is left alone. A segment has a
//! class, and a row's class is that of the segment it lies in, so that no byte is kept for each row. Class `c` is for rows that are
//! rewritten once in `2^(c - INITIAL_CLASS)` times as many writes as the tier has rows.
//!
//! - A rewritten row moves from its class towards the class of the interval that was seen, by exponential smoothing. Only whole steps
//!   between classes can be kept, so a fraction of a step is made in that share of the calls.
//! - A row that compaction meets long after it should have been rewritten moves to the next class.
//! - Rows that were written together before, and are again, are used together. They take fewer reads where they lie together. So they, and
//!   the rows between them, go to one class.
//!
//! Intervals predict the next rewrite: Wang et al., Separating data via block invalidation time inference for write amplification reduction
//! in log-structured storage, FAST 2022.

use crate::ssd::index::RecordLocation;

/// The most classes that a tier has.
pub(crate) const MAX_HOTNESS_CLASSES: u8 = 4;
/// The class of a row of which nothing is known.
const INITIAL_CLASS: u8 = 1;
/// The expected class changes by a quarter of its difference from the class that was seen.
const SMOOTHING: f32 = 0.25;
/// Two rows of a call are neighbours where their positions in it differ by at most 8.
const NEIGHBOURS: usize = 8;
/// Two rows were neighbours before where their older versions are in one segment, at most 32 records apart.
const NEIGHBOUR_RECORDS: u32 = 32;
/// A row stays in its class until twice the class's interval has passed.
const PATIENCE: f64 = 2.0;

/// The classes of one tier: numbers below `count`, which is 2 to [`MAX_HOTNESS_CLASSES`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct HotnessClasses {
    pub(crate) count: u8,
    /// Rows in the tier.
    pub(crate) rows: u64,
}

impl HotnessClasses {
    /// The class of a row that the tier did not have.
    pub(crate) fn for_new_row() -> u8 {
        INITIAL_CLASS
    }

    /// The class of a row that is written again `interval` writes after its older version, which was in `hotness`. Where the step is not
    /// whole, `dither`, from 0 to 1, decides. It is the same for rows that are written together, so that they stay together.
    #[inline]
    pub(crate) fn after_rewrite(self, hotness: u8, interval: u64, dither: f32) -> u8 {
        let relative = (interval.max(1) as f32 / self.rows.max(1) as f32).log2();
        let seen = (relative + f32::from(INITIAL_CLASS)).clamp(0.0, f32::from(self.count - 1));
        let expected = f32::from(hotness) + SMOOTHING * (seen - f32::from(hotness));
        ((expected + dither) as u8).min(self.count - 1)
    }

    /// The class of a row of `hotness` that is still alive `age` writes after its own.
    #[inline]
    pub(crate) fn after_move(self, hotness: u8, age: u64) -> u8 {
        let interval = self.rows as f64 * f64::from(i32::from(hotness) - i32::from(INITIAL_CLASS)).exp2();
        (hotness + u8::from(age as f64 > PATIENCE * interval)).min(self.count - 1)
    }
}

/// Find the neighbours among the rows of a call that were neighbours before, by where their `older` versions lie. Give them, and the rows
/// between them, the median of their classes.
pub(crate) fn keep_neighbours_together(classes: &mut [u8], older: &[Option<RecordLocation>]) {
    // Rows are near each other where these numbers are: a segment has fewer records than 2³². A row without an older version is near none.
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
            // Rows that are joined already need not be looked at again.
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

/// Whether the first of these places has no neighbour among those that follow. Nearly always it has none, which is seen without branches.
#[inline]
fn has_no_neighbour_ahead(places: &[u64]) -> bool {
    let Some((place, ahead)) = places.split_first() else { return true };
    let Some(ahead) = ahead.first_chunk::<NEIGHBOURS>() else { return false };
    let least = place.wrapping_sub(NEIGHBOUR_RECORDS.into());
    let is_near = |other: &u64| other.wrapping_sub(least) <= 2 * u64::from(NEIGHBOUR_RECORDS);
    !ahead.iter().fold(false, |any, other| any | is_near(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASSES: HotnessClasses = HotnessClasses { count: MAX_HOTNESS_CLASSES, rows: 1000 };

    /// The share of calls that send a row to each class, where dithers are spread evenly.
    fn shares(hotness: u8, interval: u64) -> [f32; MAX_HOTNESS_CLASSES as usize] {
        let mut shares = [0.0; MAX_HOTNESS_CLASSES as usize];
        for dither in 0..100 {
            shares[CLASSES.after_rewrite(hotness, interval, dither as f32 / 100.0) as usize] += 0.01;
        }
        shares
    }

    #[test]
    fn a_row_rewritten_as_expected_stays() {
        for (class, interval) in [(0, 500), (1, 1000), (2, 2000), (3, 4000)] {
            assert!(shares(class, interval)[class as usize] > 0.98, "{class}");
        }
    }

    #[test]
    fn early_or_late_rewrite_moves_a_fraction_of_a_class() {
        let early = shares(3, 500);
        assert!(early[2] > 0.7 && early[3] > 0.2, "{early:?}");
        let late = shares(0, 1 << 40);
        assert!(late[0] > 0.2 && late[1] > 0.7, "{late:?}");
        assert!(shares(0, 0)[0] > 0.98);
    }

    #[test]
    fn long_lived_row_moves_one_class_and_stops_at_the_last() {
        assert_eq!(CLASSES.after_move(0, 1000), 0);
        assert_eq!(CLASSES.after_move(0, 1001), 1);
        assert_eq!(CLASSES.after_move(1, 1500), 1);
        assert_eq!(CLASSES.after_move(3, u64::MAX), 3);
        assert_eq!(HotnessClasses { count: 2, rows: 10 }.after_move(1, u64::MAX), 1);
        assert_eq!(HotnessClasses { count: 2, rows: 0 }.after_rewrite(1, u64::MAX, 0.99), 1);
    }

    #[test]
    fn rows_rewritten_together_share_a_class() {
        let at = |segment, record| Some(RecordLocation { segment, record });
        // First two of a group, one between them, and another of the group. Then rows that nothing links. Then two far apart in one
        // segment.
        let older = [at(1, 10), at(2, 7), at(1, 12), at(1, 30), None, at(3, 1), at(4, 0), at(4, 1000)];
        let mut classes = [0, 3, 0, 1, 1, 2, 0, 3];
        keep_neighbours_together(&mut classes, &older);
        assert_eq!(classes, [0, 0, 0, 0, 1, 2, 0, 3]);
        // Links that overlap join. A neighbour too many rows later does not.
        let older = [at(1, 0), at(2, 0), at(1, 5), at(2, 5), None, None, None, None, None, None, None, None, at(2, 6)];
        let mut classes = [1, 2, 3, 2, 0, 0, 0, 0, 0, 0, 0, 0, 3];
        keep_neighbours_together(&mut classes, &older);
        assert_eq!(classes, [2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
        keep_neighbours_together(&mut [], &[]);
    }
}
