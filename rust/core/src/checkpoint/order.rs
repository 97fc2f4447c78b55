//! The order of a group's rows in their file, by bucket, then by `uint64(id)`; and their metadata in that order.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::kernels::threads::for_each_on_half;
use crate::rows::{RowHeader, RowRef};
use crate::simd::{Isa, Job};
use crate::sync::lock;
use crate::types::{Id, bucket_of};

/// Rows that one thread handles at a time.
const ROWS_PER_TASK: usize = 8192;
/// In buckets of at most this many rows a row's place is counted, in larger ones found by sorting.
const COUNTED: usize = 128;
/// Rows that are counted at once.
const LANES: usize = 8;

/// A header that lies within one cache line.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(32))]
pub(super) struct Header(pub(super) RowHeader);

/// Columns of metadata of some rows; no scalars where the optimizer has none.
#[derive(Debug, Default)]
pub(super) struct Metadata<'a> {
    pub(super) ids: &'a mut [Id],
    pub(super) last_steps: &'a mut [u64],
    pub(super) counts: &'a mut [u32],
    pub(super) scores: &'a mut [f32],
    pub(super) scalars: &'a mut [f32],
    pub(super) modified_epochs: &'a mut [u32],
}

impl Metadata<'_> {
    /// Those of the first `rows` rows, and of the rest.
    fn split(self, rows: usize) -> (Self, Self) {
        let (ids, later_ids) = self.ids.split_at_mut(rows);
        let (last_steps, later_steps) = self.last_steps.split_at_mut(rows);
        let (counts, later_counts) = self.counts.split_at_mut(rows);
        let (scores, later_scores) = self.scores.split_at_mut(rows);
        let (scalars, later_scalars) = self.scalars.split_at_mut(rows.min(self.scalars.len()));
        let (modified_epochs, later_epochs) = self.modified_epochs.split_at_mut(rows);
        let later = Self {
            ids: later_ids,
            last_steps: later_steps,
            counts: later_counts,
            scores: later_scores,
            scalars: later_scalars,
            modified_epochs: later_epochs,
        };
        (Self { ids, last_steps, counts, scores, scalars, modified_epochs }, later)
    }

    #[allow(clippy::inline_always)] // Compiled for each instruction set.
    #[inline(always)]
    fn write(&mut self, row: usize, header: &RowHeader) {
        self.ids[row] = header.id;
        self.last_steps[row] = header.last_step;
        self.counts[row] = header.count;
        self.scores[row] = header.score;
        if let Some(scalar) = self.scalars.get_mut(row) {
            *scalar = header.scalar;
        }
        self.modified_epochs[row] = header.modified_epoch;
    }
}

/// The order of a group, and memory for that of the next one.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// By row of the file, which row that is of those that came.
    pub(super) rows: Vec<u32>,
    /// The inverse.
    pub(super) places: Vec<AtomicU32>,
    /// Where the rows of each bucket start, and the last one's end.
    pub(super) starts: Vec<i64>,
    buckets: Vec<u32>,
    /// Headers by bucket, not ordered within,
    headers: Vec<Header>,
    /// and which row each is of those that came.
    positions: Vec<u32>,
    ends: Vec<u32>,
}

/// Why rows have no order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Misplaced {
    /// A row of another rank's bucket.
    Foreign(Id, u32),
    /// A row that is there twice.
    Twice(Id),
    /// A row whose vector part is not as long as all others.
    Floats(Id),
}

impl Order {
    /// Bytes of memory that a row takes.
    pub(super) const ROW_BYTES: usize = size_of::<Header>() + 4 * 4;

    /// Order `rows`, fewer than 2³², of `floats` each, and fill in their metadata.
    pub(super) fn make(
        &mut self,
        rows: &[RowRef<'_>],
        floats: usize,
        owned: &Range<u32>,
        total_num_buckets: u32,
        metadata: Metadata<'_>,
    ) -> Result<(), Misplaced> {
        let n = rows.len();
        self.headers.resize(n, Header::default());
        self.positions.resize(n, 0);
        self.buckets.resize(n, 0);
        self.rows.resize(n, 0);
        self.places.resize_with(n, AtomicU32::default);
        let misplaced = Mutex::new(None);
        let tasks = self.buckets.chunks_mut(ROWS_PER_TASK).zip(rows.chunks(ROWS_PER_TASK));
        for_each_on_half(tasks, |(buckets, rows)| {
            for (bucket, row) in buckets.iter_mut().zip(rows) {
                // Below the first bucket it wraps, past all of them.
                *bucket = bucket_of(row.header.id, total_num_buckets).wrapping_sub(owned.start);
                if row.vector.len() != floats {
                    *lock(&misplaced) = Some(Misplaced::Floats(row.header.id));
                }
            }
        });
        misplaced.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)?;
        self.count(rows, owned)?;
        self.order_buckets(metadata)
    }

    /// Rows counted into their buckets.
    fn count(&mut self, rows: &[RowRef<'_>], owned: &Range<u32>) -> Result<(), Misplaced> {
        self.ends.clear();
        self.ends.resize(owned.len(), 0);
        for (row, &bucket) in self.buckets.iter().enumerate() {
            let Some(count) = self.ends.get_mut(bucket as usize) else {
                return Err(Misplaced::Foreign(rows[row].header.id, bucket.wrapping_add(owned.start)));
            };
            *count += 1;
        }
        self.starts.clear();
        let mut row = 0;
        for end in &mut self.ends {
            self.starts.push(i64::from(row));
            // For now where the bucket's next row goes.
            (row, *end) = (row + *end, row);
        }
        self.starts.push(i64::from(row));
        for ((position, &bucket), row) in (0..).zip(&self.buckets).zip(rows) {
            let place = &mut self.ends[bucket as usize];
            self.headers[*place as usize] = Header(*row.header);
            self.positions[*place as usize] = position;
            *place += 1;
        }
        Ok(())
    }

    /// The order within each bucket.
    fn order_buckets(&mut self, mut metadata: Metadata<'_>) -> Result<(), Misplaced> {
        let (starts, headers, positions, places) = (&self.starts, &self.headers, &self.positions, &self.places);
        let mut tasks = Vec::new();
        let (mut begin, mut rest) = (0, &mut self.rows[..]);
        for end in 1..starts.len() {
            let count = (starts[end] - starts[begin]) as usize;
            if count >= ROWS_PER_TASK || end + 1 == starts.len() {
                let (rows, later) = rest.split_at_mut(count);
                let (mine, later_metadata) = metadata.split(count);
                let starts = &starts[begin..=end];
                tasks.push(BucketsJob { starts, headers, positions, places, rows, metadata: mine });
                (begin, rest, metadata) = (end, later, later_metadata);
            }
        }
        let twice = Mutex::new(None);
        let isa = Isa::best();
        for_each_on_half(tasks.into_iter(), |task| {
            if let Some(id) = isa.run(task) {
                *lock(&twice) = Some(id);
            }
        });
        match twice.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(id) => Err(Misplaced::Twice(id)),
            None => Ok(()),
        }
    }
}

/// The order within some buckets; gives an id that is there twice, if any.
struct BucketsJob<'a> {
    /// Of the buckets, and the end of the last.
    starts: &'a [i64],
    /// Of all buckets.
    headers: &'a [Header],
    positions: &'a [u32],
    places: &'a [AtomicU32],
    /// Of these buckets.
    rows: &'a mut [u32],
    metadata: Metadata<'a>,
}

impl Job for BucketsJob<'_> {
    type Output = Option<Id>;

    #[allow(clippy::inline_always)] // Compiled for each instruction set.
    #[inline(always)]
    fn run(mut self) -> Option<Id> {
        let first = self.starts[0] as usize;
        let (mut ids, mut ranks) = ([0; COUNTED], [0; COUNTED]);
        let mut order: Vec<u32> = Vec::new();
        for bounds in self.starts.windows(2) {
            let bucket = bounds[0] as usize..bounds[1] as usize;
            let (headers, positions) = (&self.headers[bucket.clone()], &self.positions[bucket.clone()]);
            // Two rows of one id take one place, so that another is left.
            order.clear();
            order.resize(headers.len(), u32::MAX);
            if headers.len() <= COUNTED {
                rank(headers, &mut ids, &mut ranks);
                for (at, &rank) in (0..headers.len() as u32).zip(&ranks) {
                    order[rank as usize] = at;
                }
            } else {
                sort(headers, &mut order);
            }
            for (place, &at) in (bucket.start..).zip(&order) {
                let Some(header) = headers.get(at as usize) else {
                    return Some(twice(headers));
                };
                let position = positions[at as usize];
                self.places[position as usize].store(place as u32, Ordering::Relaxed);
                self.rows[place - first] = position;
                self.metadata.write(place - first, &header.0);
            }
        }
        None
    }
}

/// How many rows have ids below each; whole blocks of `ids` and `ranks` are written.
#[allow(clippy::inline_always, clippy::needless_range_loop)] // Compiled for each instruction set; plain loops over lanes.
#[inline(always)]
fn rank(headers: &[Header], ids: &mut [u64; COUNTED], ranks: &mut [u64; COUNTED]) {
    let count = headers.len();
    for (id, header) in ids.iter_mut().zip(headers) {
        *id = header.0.id as u64;
    }
    ids[count..count.next_multiple_of(LANES)].fill(u64::MAX);
    let blocks = ids.chunks_exact(LANES).zip(ranks.chunks_exact_mut(LANES));
    for (block, ranks) in blocks.take(count.div_ceil(LANES)) {
        let mut below = [0_u64; LANES];
        for &id in &ids[..count] {
            for lane in 0..LANES {
                below[lane] += u64::from(id < block[lane]);
            }
        }
        ranks.copy_from_slice(&below);
    }
}

/// Of two rows with one id the second is left out.
fn sort(headers: &[Header], order: &mut [u32]) {
    let mut sorted: Vec<(u64, u32)> = (0..).zip(headers).map(|(at, header)| (header.0.id as u64, at)).collect();
    sorted.sort_unstable();
    sorted.dedup_by_key(|row| row.0);
    for (to, (_, at)) in order.iter_mut().zip(sorted) {
        *to = at;
    }
}

/// An id that is there twice.
fn twice(headers: &[Header]) -> Id {
    let mut sorted: Vec<u64> = headers.iter().map(|header| header.0.id as u64).collect();
    sorted.sort_unstable();
    sorted.windows(2).find(|pair| pair[0] == pair[1]).map_or(0, |pair| pair[0]) as Id
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(id: Id) -> RowHeader {
        let bits = crate::types::hash_id(id);
        let (count, modified_epoch) = (bits as u32, (bits >> 32) as u32);
        RowHeader { id, last_step: bits, count, score: count as f32, scalar: modified_epoch as f32, modified_epoch }
    }

    /// Ids and bucket starts in order, once whatever else is ordered with them is as it should be.
    fn order_of(ids: &[Id], owned: Range<u32>, total: u32) -> Result<(Vec<Id>, Vec<i64>), Misplaced> {
        let headers: Vec<RowHeader> = ids.iter().map(|&id| header(id)).collect();
        let rows: Vec<RowRef<'_>> = headers.iter().map(|header| RowRef { header, vector: &[] }).collect();
        let mut order = Order::default();
        let (mut found, mut last_steps, mut epochs) = (Vec::new(), Vec::new(), Vec::new());
        let (mut counts, mut scores, mut scalars) = (Vec::new(), Vec::new(), Vec::new());
        // What it was used for before changes nothing.
        for n in [rows.len() / 2, rows.len()] {
            found.resize(n, 0);
            last_steps.resize(n, 0);
            epochs.resize(n, 0);
            counts.resize(n, 0);
            scores.resize(n, 0.0);
            scalars.resize(n, 0.0);
            let metadata = Metadata {
                ids: &mut found,
                last_steps: &mut last_steps,
                counts: &mut counts,
                scores: &mut scores,
                scalars: &mut scalars,
                modified_epochs: &mut epochs,
            };
            order.make(&rows[..n], 0, &owned, total, metadata)?;
        }
        for (place, &row) in order.rows.iter().enumerate() {
            assert_eq!(order.places[row as usize].load(Ordering::Relaxed) as usize, place);
            let written = RowHeader {
                id: found[place],
                last_step: last_steps[place],
                count: counts[place],
                score: scores[place],
                scalar: scalars[place],
                modified_epoch: epochs[place],
            };
            assert_eq!(written, headers[row as usize]);
        }
        Ok((found, order.starts))
    }

    #[test]
    fn rows_are_ordered_by_bucket_and_unsigned_id_in_buckets_of_any_size() {
        for (rows, total) in [(0, 3), (1, 1), (1000, 7), (1000, 1), (100_000, 4093), (100_000, 11), (20, 5000)] {
            let ids: Vec<Id> = (0..rows).map(|n| crate::types::hash_id(n) as Id).collect();
            let (found, starts) = order_of(&ids, 0..total, total).unwrap();
            let mut expected = ids.clone();
            expected.sort_unstable_by_key(|&id| (bucket_of(id, total), id as u64));
            assert_eq!(found, expected, "{rows} rows in {total} buckets");
            for (bucket, bounds) in (0..).zip(starts.windows(2)) {
                assert!(found[bounds[0] as usize..bounds[1] as usize].iter().all(|&id| bucket_of(id, total) == bucket));
            }
            assert_eq!((starts.len(), starts.last()), (total as usize + 1, Some(&i64::from(rows as u32))));
        }
    }

    #[test]
    fn rows_of_other_buckets_and_rows_given_twice_have_no_order() {
        assert_eq!(order_of(&[10, 11, 22], 0..2, 10), Err(Misplaced::Foreign(22, 2)));
        assert_eq!(order_of(&[12, 11], 2..3, 10), Err(Misplaced::Foreign(11, 1)));
        for rows in [2, 100, COUNTED as Id, 1000] {
            let mut ids: Vec<Id> = (0..rows).map(|n| n * 7 - 3).collect();
            ids.push(ids[rows as usize / 2]);
            let id = ids[rows as usize];
            assert_eq!(order_of(&ids, 0..1, 1), Err(Misplaced::Twice(id)), "{rows} rows");
        }
        assert_eq!(order_of(&[-1, 5, -1], 0..1, 1), Err(Misplaced::Twice(-1)));
        let row = RowRef { header: &header(7), vector: &[] };
        assert_eq!(Order::default().make(&[row], 1, &(0..1), 1, Metadata::default()), Err(Misplaced::Floats(7)));
    }
}
