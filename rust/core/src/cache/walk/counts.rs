//! Walks over the admission counts of pending ids, bucket by bucket.

use std::ops::Range;

use crate::cache::locks::{TableGuard, TableInner};
use crate::error::Result;
use crate::lifecycle::BucketCounts;

/// Number of buckets copied under one hold of the table's lock.
const BUCKETS_AT_ONCE: u32 = 64;

/// Passes the counts of each of `buckets` to `sink`, in ascending order. `sink` runs without the lock that `lock`
/// takes. Does nothing if the table counts nothing.
pub(super) fn each_bucket<'a>(
    buckets: &Range<u32>,
    lock: &mut dyn FnMut() -> Result<TableGuard<'a>>,
    counts: &dyn Fn(&mut TableGuard<'a>, u32) -> BucketCounts,
    sink: &mut dyn FnMut(BucketCounts) -> Result<()>,
) -> Result<()> {
    let mut next = buckets.start;
    while next < buckets.end {
        let end = next.saturating_add(BUCKETS_AT_ONCE).min(buckets.end);
        let mut held = lock()?;
        if !held.keeps_counts() {
            return Ok(());
        }
        let copied: Vec<BucketCounts> = (next..end).map(|bucket| counts(&mut held, bucket)).collect();
        drop(held);
        copied.into_iter().try_for_each(&mut *sink)?;
        next = end;
    }
    Ok(())
}

/// Passes the current counts of every bucket to `sink`; with `since` those of the ids counted in that epoch or later.
pub(crate) fn current_counts(
    table: &TableInner,
    since: Option<u32>,
    sink: &mut dyn FnMut(BucketCounts) -> Result<()>,
) -> Result<()> {
    each_bucket(&table.config.buckets, &mut || table.lock(), &|held, bucket| held.counts_of(bucket, since), sink)
}

/// Like [`current_counts`], but for all counts of a table that may be closed.
pub(crate) fn remaining_counts(table: &TableInner, sink: &mut dyn FnMut(BucketCounts) -> Result<()>) -> Result<()> {
    each_bucket(
        &table.config.buckets,
        &mut || Ok(table.lock_always()),
        &|held, bucket| held.counts_of(bucket, None),
        sink,
    )
}
