//! The order of a group's rows in their file: by bucket, then by `uint64(id)`.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::kernels::threads::for_each;
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

/// An id, and which row it is of those that came.
#[derive(Clone, Copy, Debug, Default)]
struct Placed {
    id: u64,
    position: u32,
}

/// The order of a group, and memory for that of the next one.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The rows' headers as they came: read once, in one go.
    pub(super) headers: Vec<Header>,
    /// By row of the file, which row that is of those that came.
    pub(super) rows: Vec<u32>,
    /// The inverse.
    pub(super) places: Vec<AtomicU32>,
    /// Where the rows of each bucket start, and the last one's end.
    pub(super) starts: Vec<i64>,
    buckets: Vec<u32>,
    /// By bucket, not ordered within.
    placed: Vec<Placed>,
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
    pub(super) const ROW_BYTES: usize = size_of::<Header>() + size_of::<Placed>() + 3 * 4;

    /// Order `rows`, fewer than 2³², of `floats` each.
    pub(super) fn make(
        &mut self,
        rows: &[RowRef<'_>],
        floats: usize,
        owned: &Range<u32>,
        total_num_buckets: u32,
    ) -> Result<(), Misplaced> {
        let n = rows.len();
        self.headers.resize(n, Header::default());
        self.buckets.resize(n, 0);
        self.rows.resize(n, 0);
        self.places.resize_with(n, AtomicU32::default);
        self.placed.resize(n, Placed::default());
        let misplaced = Mutex::new(None);
        let tasks = self.headers.chunks_mut(ROWS_PER_TASK).zip(self.buckets.chunks_mut(ROWS_PER_TASK));
        for_each(tasks.zip(rows.chunks(ROWS_PER_TASK)), |((headers, buckets), rows)| {
            for ((header, bucket), row) in headers.iter_mut().zip(buckets).zip(rows) {
                *header = Header(*row.header);
                // Below the first bucket it wraps, past all of them.
                *bucket = bucket_of(row.header.id, total_num_buckets).wrapping_sub(owned.start);
                if row.vector.len() != floats {
                    *lock(&misplaced) = Some(Misplaced::Floats(row.header.id));
                }
            }
        });
        misplaced.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)?;
        self.count(owned)?;
        self.order_buckets()
    }

    /// Rows counted into their buckets.
    fn count(&mut self, owned: &Range<u32>) -> Result<(), Misplaced> {
        self.ends.clear();
        self.ends.resize(owned.len(), 0);
        for (row, &bucket) in self.buckets.iter().enumerate() {
            let Some(count) = self.ends.get_mut(bucket as usize) else {
                return Err(Misplaced::Foreign(self.headers[row].0.id, bucket.wrapping_add(owned.start)));
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
        for ((position, &bucket), header) in (0..).zip(&self.buckets).zip(&self.headers) {
            let place = &mut self.ends[bucket as usize];
            self.placed[*place as usize] = Placed { id: header.0.id as u64, position };
            *place += 1;
        }
        Ok(())
    }

    /// The order within each bucket.
    fn order_buckets(&mut self) -> Result<(), Misplaced> {
        let (starts, placed, places) = (&self.starts, &self.placed, &self.places);
        let mut tasks = Vec::new();
        let (mut begin, mut rest) = (0, &mut self.rows[..]);
        for end in 1..starts.len() {
            let count = (starts[end] - starts[begin]) as usize;
            if count >= ROWS_PER_TASK || end + 1 == starts.len() {
                let (rows, later) = rest.split_at_mut(count);
                tasks.push(BucketsJob { starts: &starts[begin..=end], placed, rows, places });
                (begin, rest) = (end, later);
            }
        }
        let twice = Mutex::new(None);
        let isa = Isa::best();
        for_each(tasks.into_iter(), |task| {
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
    placed: &'a [Placed],
    /// Of these buckets.
    rows: &'a mut [u32],
    places: &'a [AtomicU32],
}

impl Job for BucketsJob<'_> {
    type Output = Option<Id>;

    #[allow(clippy::inline_always)] // Compiled for each instruction set.
    #[inline(always)]
    fn run(self) -> Option<Id> {
        let first = self.starts[0] as usize;
        let (mut ids, mut ranks) = ([0; COUNTED], [0; COUNTED]);
        for bounds in self.starts.windows(2) {
            let bucket = bounds[0] as usize..bounds[1] as usize;
            let placed = &self.placed[bucket.clone()];
            let rows = &mut self.rows[bucket.start - first..bucket.end - first];
            // Two rows of one id take one place, so that another is left.
            rows.fill(u32::MAX);
            if placed.len() <= COUNTED {
                rank(placed, &mut ids, &mut ranks);
                for (&rank, row) in ranks.iter().zip(placed) {
                    rows[rank as usize] = row.position;
                }
            } else {
                sort(placed, rows);
            }
            for (place, &row) in (bucket.start..).zip(&*rows) {
                let Some(to) = self.places.get(row as usize) else {
                    return Some(twice(placed));
                };
                to.store(place as u32, Ordering::Relaxed);
            }
        }
        None
    }
}

/// How many rows have ids below each; whole blocks of `ids` and `ranks` are written.
#[allow(clippy::inline_always, clippy::needless_range_loop)] // Compiled for each instruction set; plain loops over lanes.
#[inline(always)]
fn rank(placed: &[Placed], ids: &mut [u64; COUNTED], ranks: &mut [u64; COUNTED]) {
    let count = placed.len();
    for (id, row) in ids.iter_mut().zip(placed) {
        *id = row.id;
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
fn sort(placed: &[Placed], rows: &mut [u32]) {
    let mut sorted = placed.to_vec();
    sorted.sort_unstable_by_key(|row| row.id);
    sorted.dedup_by_key(|row| row.id);
    for (row, Placed { position, .. }) in rows.iter_mut().zip(sorted) {
        *row = position;
    }
}

/// An id that is there twice.
fn twice(placed: &[Placed]) -> Id {
    let mut sorted: Vec<u64> = placed.iter().map(|row| row.id).collect();
    sorted.sort_unstable();
    sorted.windows(2).find(|pair| pair[0] == pair[1]).map_or(0, |pair| pair[0]) as Id
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(id: Id) -> RowHeader {
        RowHeader { id, ..RowHeader::default() }
    }

    fn order_of(ids: &[Id], owned: Range<u32>, total: u32) -> Result<(Vec<Id>, Vec<i64>), Misplaced> {
        let headers: Vec<RowHeader> = ids.iter().map(|&id| header(id)).collect();
        let rows: Vec<RowRef<'_>> = headers.iter().map(|header| RowRef { header, vector: &[] }).collect();
        let mut order = Order::default();
        // What it was used for before changes nothing.
        order.make(&rows[..rows.len() / 2], 0, &owned, total)?;
        order.make(&rows, 0, &owned, total)?;
        for (place, &row) in (0..).zip(&order.rows) {
            assert_eq!(order.places[row as usize].load(Ordering::Relaxed), place);
            assert_eq!(order.headers[row as usize].0.id, ids[row as usize]);
        }
        Ok((order.rows.iter().map(|&row| ids[row as usize]).collect(), order.starts))
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
        assert_eq!(Order::default().make(&[row], 1, &(0..1), 1), Err(Misplaced::Floats(7)));
    }
}
