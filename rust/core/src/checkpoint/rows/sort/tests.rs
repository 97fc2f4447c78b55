use super::*;
use crate::types::hash_id;

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
fn foreign_and_duplicate_rows_have_no_order() {
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
    assert_eq!(GroupOrder::default().make(row, 1, &(0..1), BucketMapper::new(1)), Err(GroupOrderError::WrongWidth(7)));
}

#[test]
fn instruction_sets_order_buckets_alike_and_find_duplicate_ids() {
    let sizes = [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, MAX_COUNTED_ROWS, MAX_COUNTED_ROWS + 1, 500];
    let n: usize = sizes.iter().sum();
    let starts: Vec<i64> =
        sizes.iter().scan(0, |end, size| Some(std::mem::replace(end, *end + *size as i64))).chain([n as i64]).collect();
    let ids: Vec<u64> = (0..n + EXTRA_IDS).map(|row| hash_id(row as i64)).collect();
    let numbers: Vec<u32> = (0..n).map(|row| (row * 601 % n) as u32).collect();
    assert_ne!(n % 601, 0, "a permutation");
    for isa in InstructionSet::all() {
        for duplicate in [None, Some((3, 9)), Some((60, 74)), Some((300, 350)), Some((n - 1, n - 300))] {
            let mut ids = ids.clone();
            if let Some((one, other)) = duplicate {
                ids[one] = ids[other];
            }
            let (mut file_rows, mut rows) = (vec![0; n], vec![0; n]);
            let sort = BucketSort {
                starts: &starts,
                ids: &ids,
                numbers: &numbers,
                file_rows: &mut file_rows,
                rows: &mut rows,
            };
            let found = sort.run_on(isa);
            if let Some((one, _)) = duplicate {
                assert_eq!(found, Some(ids[one] as Id), "{isa:?}");
                continue;
            }
            assert_eq!(found, None, "{isa:?}");
            for bounds in starts.windows(2) {
                let bucket = bounds[0] as usize..bounds[1] as usize;
                let mut expected: Vec<(u64, u32)> = bucket.clone().map(|row| (ids[row], numbers[row])).collect();
                expected.sort_unstable();
                for (file_row, (_, number)) in bucket.zip(expected) {
                    assert_eq!((rows[file_row], file_rows[number as usize] as usize), (number, file_row), "{isa:?}");
                }
            }
        }
    }
}
