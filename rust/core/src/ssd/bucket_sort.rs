//! Sorts items whose keys are evenly distributed, such as hashes: nearly all of the work is putting each item into its
//! bucket.

use std::cmp::Ordering;

/// Sorts `items`, each with the number of its bucket, into `sorted`, which has their length. Buckets are in ascending
/// order; `compare` orders the items of one bucket. `ends` has a 0 per bucket.
#[inline]
pub(crate) fn bucket_sort<T: Copy>(
    items: impl Iterator<Item = (usize, T)> + Clone,
    ends: &mut [u32],
    sorted: &mut [T],
    mut compare: impl FnMut(&T, &T) -> Ordering,
) {
    for (bucket, _) in items.clone() {
        ends[bucket] += 1;
    }
    let mut before = 0;
    for end in ends.iter_mut() {
        before += std::mem::replace(end, before);
    }
    // At first these are starts. Each moves to its end as the bucket fills.
    for (bucket, item) in items {
        sorted[ends[bucket] as usize] = item;
        ends[bucket] += 1;
    }
    let mut start = 0;
    for &end in ends.iter() {
        let in_bucket = &mut sorted[start..end as usize];
        if in_bucket.len() > 1 {
            in_bucket.sort_unstable_by(&mut compare);
        }
        start = end as usize;
    }
}

#[cfg(test)]
mod tests;
