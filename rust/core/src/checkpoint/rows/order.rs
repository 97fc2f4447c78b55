//! Order of a group's rows in their file, by bucket, then by `uint64(id)`; and the rows' metadata in that order.

use std::ops::Range;

use super::bucket_sort::{BucketSort, EXTRA_IDS};
use super::format::ColumnField;
use crate::checkpoint::manifest::names::CHUNK_BYTES;
use crate::prefetch::{prefetch, prefetch_address};
use crate::rows::{RowHeader, RowList};
use crate::simd::InstructionSet;
use crate::types::{BucketMapper, Id};

/// Prefetch distance in rows.
const AHEAD: usize = 16;

/// Number of rows whose metadata are gathered at once. Their part of a column is within one chunk.
pub(crate) const BLOCK_ROWS: usize = 1024;
const _: () = assert!(CHUNK_BYTES.is_multiple_of(BLOCK_ROWS * 8));

/// Metadata of some rows by column, small enough for a core's L1 cache.
#[derive(Debug)]
pub(crate) struct RowMetadataBlock {
    ids: [Id; BLOCK_ROWS],
    last_steps: [u64; BLOCK_ROWS],
    counts: [u32; BLOCK_ROWS],
    scores: [f32; BLOCK_ROWS],
    scalars: [f32; BLOCK_ROWS],
    modified_epochs: [u32; BLOCK_ROWS],
}

impl RowMetadataBlock {
    pub(crate) fn new() -> Self {
        Self {
            ids: [0; BLOCK_ROWS],
            last_steps: [0; BLOCK_ROWS],
            counts: [0; BLOCK_ROWS],
            scores: [0.0; BLOCK_ROWS],
            scalars: [0.0; BLOCK_ROWS],
            modified_epochs: [0; BLOCK_ROWS],
        }
    }

    fn put(&mut self, row: usize, header: &RowHeader) {
        self.ids[row] = header.id;
        self.last_steps[row] = header.last_step;
        self.counts[row] = header.count;
        self.scores[row] = header.score;
        self.scalars[row] = header.scalar;
        self.modified_epochs[row] = header.modified_epoch;
    }

    /// The first `rows` of a column. Empty if the field is not a metadata column.
    pub(crate) fn column(&self, field: ColumnField, rows: usize) -> &[u8] {
        match field {
            ColumnField::Id => bytemuck::cast_slice(&self.ids[..rows]),
            ColumnField::LastStep => bytemuck::cast_slice(&self.last_steps[..rows]),
            ColumnField::Count => bytemuck::cast_slice(&self.counts[..rows]),
            ColumnField::Score => bytemuck::cast_slice(&self.scores[..rows]),
            ColumnField::Scalar => bytemuck::cast_slice(&self.scalars[..rows]),
            ColumnField::ModifiedEpoch => bytemuck::cast_slice(&self.modified_epochs[..rows]),
            ColumnField::BucketOffsets | ColumnField::Tombstone | ColumnField::Vector(_) | ColumnField::Checksums | ColumnField::Pad
            // Fields of counts files.
            | ColumnField::Generation | ColumnField::Shows | ColumnField::Clicks | ColumnField::Age => &[],
        }
    }
}

/// The order of a group. Its memory is reused for the next group.
#[derive(Debug, Default)]
pub(crate) struct GroupOrder {
    /// By file row: the row's number in arrival order.
    pub(crate) rows: Vec<u32>,
    /// By number in arrival order: the file row. The inverse of `rows`.
    pub(crate) file_rows: Vec<u32>,
    /// First row of each bucket, then the number of rows.
    pub(crate) starts: Vec<i64>,
    /// Ids in arrival order.
    arrival_ids: Vec<u64>,
    /// Bucket of each id in `arrival_ids`, relative to the rank's first bucket.
    buckets: Vec<u32>,
    /// Ids sorted by bucket, unordered within a bucket, followed by padding that the sort may read.
    ids: Vec<u64>,
    /// Index in `arrival_ids` of each id in `ids`.
    numbers: Vec<u32>,
    ends: Vec<u32>,
}

/// Reason why rows cannot be ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupOrderError {
    /// A row of another rank's bucket.
    ForeignBucket(Id, u32),
    /// A duplicate row.
    DuplicateId(Id),
    /// A row whose vector part has another length than the table's rows.
    WrongWidth(Id),
}

impl GroupOrder {
    /// Bytes of memory per row.
    pub(crate) const ROW_BYTES: usize = 2 * 8 + 4 * 4;
    /// Bytes of memory per bucket.
    pub(crate) const BUCKET_BYTES: usize = 8 + 4;

    /// Orders `rows`, fewer than 2³², with `floats` each. Runs on one thread: the data fits into a core's caches, and
    /// sorting is much faster than copying the rows.
    pub(crate) fn make(
        &mut self,
        rows: RowList<'_>,
        floats: usize,
        owned: &Range<u32>,
        bucketing: BucketMapper,
    ) -> Result<(), GroupOrderError> {
        let n = rows.len();
        if n > 0 && rows.floats() != floats {
            return Err(GroupOrderError::WrongWidth(rows.get(0).header.id));
        }
        self.arrival_ids.resize(n, 0);
        self.buckets.resize(n, 0);
        self.ids.resize(n + EXTRA_IDS, 0);
        self.numbers.resize(n, 0);
        self.rows.resize(n, 0);
        self.file_rows.resize(n, 0);
        self.ends.clear();
        self.ends.resize(owned.len(), 0);
        let ends = &mut self.ends[..];
        for ((row, came), in_bucket) in rows.iter().zip(&mut self.arrival_ids).zip(&mut self.buckets) {
            let id = row.header.id;
            // A bucket below the first wraps to a number greater than all of them.
            let bucket = bucketing.of(id).wrapping_sub(owned.start);
            let Some(count) = ends.get_mut(bucket as usize) else {
                return Err(GroupOrderError::ForeignBucket(id, bucket.wrapping_add(owned.start)));
            };
            *count += 1;
            (*came, *in_bucket) = (id as u64, bucket);
        }
        self.starts.clear();
        let mut row = 0;
        for end in &mut *ends {
            self.starts.push(i64::from(row));
            // After this, `end` is the position of the next row of the bucket.
            (row, *end) = (row + *end, row);
        }
        self.starts.push(i64::from(row));
        let (ids, numbers) = (&mut self.ids[..], &mut self.numbers[..]);
        for ((number, &id), &bucket) in (0..n).zip(&self.arrival_ids).zip(&self.buckets) {
            // Close to the position of a later row.
            let later = ends[self.buckets[(number + AHEAD).min(n - 1)] as usize] as usize;
            prefetch(ids, later);
            prefetch(numbers, later);
            let next = &mut ends[bucket as usize];
            ids[*next as usize] = id;
            numbers[*next as usize] = number as u32;
            *next += 1;
        }
        let (starts, ids, numbers) = (&self.starts[..], &self.ids[..], &self.numbers[..]);
        let (file_rows, rows) = (&mut self.file_rows[..], &mut self.rows[..]);
        let twice = BucketSort { starts, ids, numbers, file_rows, rows }.run_on(InstructionSet::best());
        twice.map_or(Ok(()), |id| Err(GroupOrderError::DuplicateId(id)))
    }

    /// Gathers the metadata of rows of the file, starting at row `first`. Returns the number of rows.
    pub(crate) fn metadata(&self, rows: RowList<'_>, first: usize, to: &mut RowMetadataBlock) -> usize {
        let count = BLOCK_ROWS.min(self.rows.len() - first);
        for (at, &row) in self.rows[first..][..count].iter().enumerate() {
            if let Some(&later) = self.rows.get(first + at + AHEAD) {
                prefetch_address(rows.get(later as usize).header);
            }
            to.put(at, rows.get(row as usize).header);
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::super::bucket_sort::MAX_COUNTED_ROWS;
    use super::*;

    fn header(id: Id) -> RowHeader {
        let bits = crate::types::hash_id(id);
        let (count, modified_epoch) = (bits as u32, (bits >> 32) as u32);
        RowHeader { id, last_step: bits, count, score: count as f32, scalar: modified_epoch as f32, modified_epoch }
    }

    /// Returns ids and bucket starts in order, after checking the other results.
    fn order_of(ids: &[Id], owned: Range<u32>, total: u32) -> Result<(Vec<Id>, Vec<i64>), GroupOrderError> {
        let headers: Vec<RowHeader> = ids.iter().map(|&id| header(id)).collect();
        let rows = RowList::block(&headers, &[], 0);
        let mut order = GroupOrder::default();
        let (mut block, mut found) = (RowMetadataBlock::new(), Vec::new());
        // Previous use of the order has no effect.
        for n in [rows.len() / 2, rows.len()] {
            order.make(rows.range(0..n), 0, &owned, BucketMapper::new(total))?;
            found.clear();
            while found.len() < n {
                let first = found.len();
                let count = order.metadata(rows.range(0..n), first, &mut block);
                for (at, file_row) in (first..first + count).enumerate() {
                    let written = RowHeader {
                        id: block.ids[at],
                        last_step: block.last_steps[at],
                        count: block.counts[at],
                        score: block.scores[at],
                        scalar: block.scalars[at],
                        modified_epoch: block.modified_epochs[at],
                    };
                    let row = order.rows[file_row];
                    assert_eq!(order.file_rows[row as usize] as usize, file_row);
                    assert_eq!(written, headers[row as usize]);
                    found.push(written.id);
                }
            }
        }
        Ok((found, order.starts))
    }

    #[test]
    fn rows_are_ordered_by_bucket_and_unsigned_id_in_buckets_of_any_size() {
        for (rows, total) in [(0, 3), (1, 1), (1000, 7), (1000, 1), (100_000, 4093), (100_000, 11), (20, 5000)] {
            let ids: Vec<Id> = (0..rows).map(|n| crate::types::hash_id(n) as Id).collect();
            let (found, starts) = order_of(&ids, 0..total, total).unwrap();
            let mut expected = ids.clone();
            let bucketing = BucketMapper::new(total);
            expected.sort_unstable_by_key(|&id| (bucketing.of(id), id as u64));
            assert_eq!(found, expected, "{rows} rows in {total} buckets");
            for (bucket, bounds) in (0..).zip(starts.windows(2)) {
                assert!(found[bounds[0] as usize..bounds[1] as usize].iter().all(|&id| bucketing.of(id) == bucket));
            }
            assert_eq!((starts.len(), starts.last()), (total as usize + 1, Some(&i64::from(rows as u32))));
        }
    }

    #[test]
    fn rows_of_other_buckets_and_rows_given_twice_have_no_order() {
        let bucketing = BucketMapper::new(10);
        let [first, second, third] = [0, 1, 2].map(|bucket| (0..1000).find(|&id| bucketing.of(id) == bucket).unwrap());
        assert_eq!(order_of(&[first, second, third], 0..2, 10), Err(GroupOrderError::ForeignBucket(third, 2)));
        assert_eq!(order_of(&[third, second], 2..3, 10), Err(GroupOrderError::ForeignBucket(second, 1)));
        for rows in [2, 100, MAX_COUNTED_ROWS as Id, 1000] {
            let mut ids: Vec<Id> = (0..rows).map(|n| n * 7 - 3).collect();
            ids.push(ids[rows as usize / 2]);
            let id = ids[rows as usize];
            assert_eq!(order_of(&ids, 0..1, 1), Err(GroupOrderError::DuplicateId(id)), "{rows} rows");
        }
        assert_eq!(order_of(&[-1, 5, -1], 0..1, 1), Err(GroupOrderError::DuplicateId(-1)));
        let headers = [header(7)];
        let row = RowList::block(&headers, &[], 0);
        assert_eq!(
            GroupOrder::default().make(row, 1, &(0..1), BucketMapper::new(1)),
            Err(GroupOrderError::WrongWidth(7))
        );
    }
}
