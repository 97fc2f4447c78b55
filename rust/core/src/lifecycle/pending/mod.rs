//! How often ids occurred that have no row yet.
//!
//! The counts are exact. What is forgotten depends on the batches and the settings alone, and not on the number of ranks, on budgets, on
//! threads, or on the order of the ids within a batch: every bucket of ids forgets by itself, and only between two batches.
//!
//! A bucket has two generations. An id belongs to the current one once it occurs. When a batch ends and the current one has half of the ids
//! that a bucket may have, or when its window ends, the older one is forgotten, and the current one becomes the older one. So an id is
//! remembered for one to two windows after its last occurrence.

mod find;
mod lines;
mod pool;

use std::num::NonZeroU64;
use std::ops::Range;

use lines::CounterMap;
pub(crate) use pool::CounterSpot;
use pool::{CounterEntry, CounterPool, MOST_COUNT, MOST_TAG};

use crate::error::Result;
use crate::index::IdHash;
use crate::types::{BucketMapper, Id};

/// The largest count that is told apart from larger ones.
pub(crate) const MOST_THRESHOLD: u32 = MOST_COUNT;
/// Bytes of RAM that an id takes at most.
pub(crate) const BYTES_PER_ID: u64 = 17;
/// A bucket's ids are in several maps where there may be more than this, because a map that grows moves all its ids at once.
const IDS_PER_MAP: u64 = 1 << 14;
/// A shard of few buckets has no more maps than this, whatever number of ids its memory has room for. A map takes a page with its first id.
const MOST_MAPS: u64 = 1 << 16;
/// When epochs pass the last tag, this many of the newest ones keep tags of their own.
const EPOCHS_KEPT: u32 = MOST_TAG / 2;

/// The count of an id that waits for a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdmissionCount {
    /// The id.
    pub(crate) id: Id,
    /// Its occurrences, at most 2²⁴ − 1.
    pub(crate) count: u32,
    /// Whether it belongs to the older generation of its bucket.
    pub(crate) is_older: bool,
}

/// What is known of an id: its count, and where that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FoundCounter {
    /// 0 where the id has none.
    pub(crate) count: u32,
    /// [`Pending::add`] looks there first.
    pub(crate) spot: CounterSpot,
}

/// The two generations of a bucket.
#[derive(Clone, Copy, Debug, Default)]
struct BucketGenerations {
    /// The bit that ids of the current one have.
    current: bool,
    /// How many ids each of them has, by that bit.
    ids: [u32; 2],
    /// How many generations have ended.
    ended: u64,
}

/// The counts of the ids of one table shard.
#[derive(Debug)]
pub(crate) struct AdmissionCounters {
    buckets: Range<u32>,
    bucketing: BucketMapper,
    hash: IdHash,
    pool: CounterPool,
    /// `parts` for each bucket.
    maps: Vec<CounterMap>,
    parts: u64,
    generations: Vec<BucketGenerations>,
    /// Ids that a generation of a bucket may have.
    generation_ids: u32,
    window: Option<NonZeroU64>,
    /// The epoch of tag 0. Ids with it were last counted then or before.
    first_epoch: u32,
    forgotten: u64,
    /// Whether ids were forgotten because a bucket was full.
    ran_full: bool,
    /// Buckets whose current generation may have become full in this batch.
    full: Vec<u32>,
    /// No map has more pages.
    most_pages: usize,
}

impl AdmissionCounters {
    /// No counts, of a shard with these buckets. `window` is in steps.
    ///
    /// All shards of the table together take at most `memory` bytes, and what the ids of one batch take.
    pub(crate) fn new(buckets: Range<u32>, bucketing: BucketMapper, memory: u64, window: Option<NonZeroU64>) -> Self {
        let generation_ids = (memory / BYTES_PER_ID / u64::from(bucketing.total()) / 2).clamp(1, 1 << 30);
        let count = buckets.len();
        let parts = (2 * generation_ids).div_ceil(IDS_PER_MAP).min((MOST_MAPS / count.max(1) as u64).max(1));
        let maps = count * parts as usize;
        Self {
            buckets,
            bucketing,
            hash: IdHash::random(),
            pool: CounterPool::new(maps),
            maps: (0..maps as u32).map(CounterMap::new).collect(),
            parts,
            generations: vec![BucketGenerations::default(); count],
            generation_ids: generation_ids as u32,
            window,
            first_epoch: 0,
            forgotten: 0,
            ran_full: false,
            full: Vec::new(),
            most_pages: 0,
        }
    }

    /// How many ids have counts.
    pub(crate) fn len(&self) -> u64 {
        self.generations.iter().map(|bucket| u64::from(bucket.ids[0]) + u64::from(bucket.ids[1])).sum()
    }

    /// Ids that were forgotten because a bucket was full or a window ended.
    pub(crate) fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// Whether ids were forgotten because a bucket was full, and not only because a window ended.
    pub(crate) fn ran_full(&self) -> bool {
        self.ran_full
    }

    /// Bytes of RAM that the counts take.
    pub(crate) fn bytes(&self) -> u64 {
        self.pool.bytes()
    }

    /// The counts of `ids` `[n]`, 0 where there is none: into `counts` `[n]`.
    pub(crate) fn get_batch(&self, ids: &[Id], counts: &mut [u32]) {
        let mut pairs: Vec<(Id, u32)> = ids.iter().map(|&id| (id, 0)).collect();
        self.find_batch(&mut pairs, |pair| pair.0, |pair, found| pair.1 = found.count);
        counts.iter_mut().zip(pairs).for_each(|(count, pair)| *count = pair.1);
    }

    /// Fetch what [`Pending::add`] will touch into the processor's cache.
    #[inline]
    pub(crate) fn prefetch(&self, id: Id, spot: CounterSpot) {
        if spot != CounterSpot::NOWHERE {
            return self.pool.prefetch(spot);
        }
        let hash = self.hash.of(id);
        let map = &self.maps[self.map(self.bucket(id), hash)];
        if let Some(home) = map.home(hash) {
            map.prefetch(&self.pool, home);
        }
    }

    /// Have memory for so many more ids.
    ///
    /// Errors: `Memory`.
    pub(crate) fn reserve(&mut self, ids: usize) -> Result<()> {
        // Each of the maps may grow, the largest of them too.
        let growing = ids.min(self.maps.len());
        self.pool.reserve(growing * self.most_pages / 8 + ids + 2 * growing + self.most_pages)
    }

    /// Count `occurrences` more of an id, in `epoch`, once there is memory for it. `spot` is where it was found, if it was; it may have
    /// been counted, moved or forgotten since.
    #[inline]
    pub(crate) fn add(&mut self, id: Id, spot: CounterSpot, occurrences: u32, epoch: u32) {
        let bucket = self.bucket(id);
        let generation = self.generations[bucket].current;
        let tag = self.tag(epoch);
        let entry =
            |before: u32| CounterEntry { count: before.saturating_add(occurrences).min(MOST_COUNT), generation, tag };
        let again = self.pool.find_again(spot, id).map(|before| (spot, before));
        let found = again.or_else(|| self.search(bucket, id));
        match found {
            Some((spot, before)) => {
                self.pool.replace(spot, entry(before.count));
                if before.generation == generation {
                    return;
                }
                self.generations[bucket].ids[usize::from(before.generation)] -= 1;
            }
            None => self.insert(bucket, id, entry(0)),
        }
        let ids = &mut self.generations[bucket].ids[usize::from(generation)];
        *ids += 1;
        if *ids == self.generation_ids {
            self.full.push(self.buckets.start + bucket as u32);
        }
    }

    fn search(&self, bucket: usize, id: Id) -> Option<(CounterSpot, CounterEntry)> {
        let hash = self.hash.of(id);
        self.maps[self.map(bucket, hash)].find(&self.pool, id, hash)
    }

    fn insert(&mut self, bucket: usize, id: Id, entry: CounterEntry) {
        let (hasher, hash) = (self.hash, self.hash.of(id));
        let map = self.map(bucket, hash);
        self.maps[map].insert(&mut self.pool, id, hash, entry, |id| hasher.of(id));
        self.most_pages = self.most_pages.max(self.maps[map].pages());
    }

    /// A batch was counted, and made this step. Returns the buckets whose generations are to [end](Pending::end_generation): those that are
    /// full, and those whose window is over. A bucket for which both is true ends one generation, so that what the step counted is remembered.
    ///
    /// Windows end for some buckets in each step, so that no step has much to do.
    pub(crate) fn ending(&mut self, step: u64) -> Vec<u32> {
        let mut ending = std::mem::take(&mut self.full);
        ending.retain(|&bucket| {
            let generations = &self.generations[(bucket - self.buckets.start) as usize];
            let is_full = generations.ids[usize::from(generations.current)] >= self.generation_ids;
            self.ran_full |= is_full && generations.ids[usize::from(!generations.current)] > 0;
            is_full
        });
        if let Some(window) = self.window {
            let total = u64::from(self.bucketing.total());
            // Bucket b's windows end at the steps s at which the line from (0, 0) to (window, total) passes b.
            let within = step % window;
            let of = |within: u64| (u128::from(within) * u128::from(total) / u128::from(window.get())) as u32;
            ending.extend((of(within)..of(within + 1)).filter(|bucket| self.buckets.contains(bucket)));
        }
        ending.sort_unstable();
        ending.dedup();
        ending
    }

    /// Let no bucket be full. Its generations end with those of other counts.
    #[must_use]
    pub(crate) fn never_full(mut self) -> Self {
        self.generation_ids = u32::MAX;
        self
    }

    /// Forget the count of an id, which has a row now.
    pub(crate) fn remove(&mut self, id: Id) {
        let bucket = self.bucket(id);
        if let Some((spot, entry)) = self.search(bucket, id) {
            let map = self.map(bucket, self.hash.of(id));
            self.maps[map].remove(&mut self.pool, spot);
            self.generations[bucket].ids[usize::from(entry.generation)] -= 1;
        }
    }

    /// Forget everything.
    pub(crate) fn clear(&mut self) {
        for map in &mut self.maps {
            map.clear(&mut self.pool);
        }
        self.generations.fill(BucketGenerations::default());
        self.full.clear();
        self.first_epoch = 0;
    }

    /// How many generations of a bucket have ended, modulo 2³².
    pub(crate) fn generation(&self, bucket: u32) -> u32 {
        self.generations[(bucket - self.buckets.start) as usize].ended as u32
    }

    /// Put counts into a bucket that has none. `generation` is how many generations of the bucket have ended. They count as counted in
    /// `epoch`.
    ///
    /// Errors: `Memory`, and the bucket has some of the counts.
    pub(crate) fn restore(
        &mut self,
        (bucket, generation): (u32, u32),
        counts: &[AdmissionCount],
        epoch: u32,
    ) -> Result<()> {
        self.reserve(counts.len())?;
        self.generations[(bucket - self.buckets.start) as usize].ended = u64::from(generation);
        for older in [true, false] {
            for count in counts.iter().filter(|count| count.is_older == older) {
                self.add(count.id, CounterSpot::NOWHERE, count.count, epoch);
            }
            if older {
                // What was counted so far is of the generation before.
                let generations = &mut self.generations[(bucket - self.buckets.start) as usize];
                generations.current = !generations.current;
            }
        }
        Ok(())
    }

    /// The counts of a bucket of this shard, ids rising as unsigned numbers.
    pub(crate) fn of_bucket(&self, bucket: u32) -> Vec<AdmissionCount> {
        self.listed(bucket, |_| true)
    }

    /// As [`Pending::of_bucket`], of the ids that were counted in epoch `since` or later. A few others may be among them.
    pub(crate) fn of_bucket_since(&self, bucket: u32, since: u32) -> Vec<AdmissionCount> {
        self.listed(bucket, |entry| self.first_epoch + entry.tag >= since)
    }

    fn listed(&self, bucket: u32, wanted: impl Fn(&CounterEntry) -> bool) -> Vec<AdmissionCount> {
        let bucket = (bucket - self.buckets.start) as usize;
        let current = self.generations[bucket].current;
        let found = self.maps_of(bucket).flat_map(|map| self.maps[map].all(&self.pool));
        let mut counts: Vec<AdmissionCount> = found
            .filter(|(_, entry)| wanted(entry))
            .map(|(id, entry)| AdmissionCount { id, count: entry.count, is_older: entry.generation != current })
            .collect();
        counts.sort_unstable_by_key(|count| count.id as u64);
        counts
    }

    /// Forget the older generation of a bucket. Its current one becomes the older one.
    pub(crate) fn end_generation(&mut self, bucket: u32) {
        let bucket = (bucket - self.buckets.start) as usize;
        let generations = &mut self.generations[bucket];
        let older = !generations.current;
        generations.current = older;
        generations.ended += 1;
        let forgotten = std::mem::take(&mut generations.ids[usize::from(older)]);
        if forgotten == 0 {
            return;
        }
        self.forgotten += u64::from(forgotten);
        for map in self.maps_of(bucket) {
            self.maps[map].retain(&mut self.pool, |_, entry| entry.generation != older);
        }
    }

    /// The tag of `epoch`. Where it is past the last tag, older epochs are told apart no more.
    #[inline]
    fn tag(&mut self, epoch: u32) -> u32 {
        let tag = epoch.saturating_sub(self.first_epoch);
        if tag <= MOST_TAG {
            return tag;
        }
        let first = epoch - EPOCHS_KEPT;
        let moved = first - self.first_epoch;
        for map in &mut self.maps {
            map.retain(&mut self.pool, |_, entry| {
                entry.tag = entry.tag.saturating_sub(moved);
                true
            });
        }
        self.first_epoch = first;
        EPOCHS_KEPT
    }

    #[inline]
    fn bucket(&self, id: Id) -> usize {
        let bucket = self.bucketing.of(id);
        debug_assert!(self.buckets.contains(&bucket), "{id} is another shard's");
        (bucket - self.buckets.start) as usize
    }

    #[inline]
    fn map(&self, bucket: usize, hash: u64) -> usize {
        let part = if self.parts == 1 { 0 } else { ((hash >> 16 & 0xffff) * self.parts) >> 16 };
        bucket * self.parts as usize + part as usize
    }

    fn maps_of(&self, bucket: usize) -> Range<usize> {
        let parts = self.parts as usize;
        bucket * parts..(bucket + 1) * parts
    }
}

#[cfg(test)]
mod tests;
