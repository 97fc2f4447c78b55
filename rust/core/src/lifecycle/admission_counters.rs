//! Admission counts: the occurrences of ids that have no row yet.
//!
//! The counts are exact. Forgetting depends only on the batches and the settings, and not on the number of ranks, on
//! budgets, on threads, or on the order of the ids within a batch: every bucket of ids forgets separately, and only
//! between two batches.
//!
//! A bucket has two generations. An id that occurs moves to the current one. When a batch ends and the current
//! generation has half of the ids that a bucket may have, or when its window ends, the older generation is forgotten,
//! and the current one becomes the older one. So an id is remembered for one to two windows after its last occurrence.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::ops::Range;

use super::counter_map::{CounterEntry, CounterLookup, CounterMap, CounterPool, CounterSpot, MOST_COUNT, MOST_TAG};
use crate::error::Result;
use crate::index::IdHash;
use crate::types::{BucketMapper, Id};

/// The largest threshold: counts saturate at it.
pub(crate) const MOST_THRESHOLD: u32 = MOST_COUNT;
/// Maximum bytes of RAM per id.
pub(crate) const BYTES_PER_ID: u64 = 17;
/// A bucket that may have more ids than this uses several maps, because a map that grows moves all its ids.
const IDS_PER_MAP: u64 = 1 << 14;
/// Maximum number of maps of a shard with few buckets, for any memory budget. A map takes a page with its first id.
const MOST_MAPS: u64 = 1 << 16;
/// Number of latest epochs that keep distinct tags when the tags are exhausted.
const EPOCHS_KEPT: u32 = MOST_TAG / 2;

/// Ids of a block. While one block makes a step, prefetches for the next steps of the other blocks complete.
const BLOCK: usize = 16;

/// Steps of a block: the five that prefetch, and the last.
const STEPS: usize = 6;

/// A pending id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountedId {
    /// The id.
    pub id: Id,
    /// Its occurrences.
    pub shows: u32,
    /// Its clicks.
    pub clicks: u32,
    /// True if it belongs to the older generation of its bucket, which is forgotten next.
    pub is_older: bool,
}

/// The pending ids of a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BucketCounts {
    /// The bucket.
    pub bucket: u32,
    /// Number of generations of the bucket that have ended, modulo 2³².
    pub generation: u32,
    /// The ids, in ascending order as unsigned integers.
    pub ids: Vec<CountedId>,
}

impl BucketCounts {
    /// Returns the ids that are still remembered when the bucket is at this `generation`, in their state at that time.
    #[must_use]
    pub fn aged_to(mut self, generation: u32) -> Self {
        match generation.wrapping_sub(self.generation) {
            0 => {}
            1 => {
                self.ids.retain(|pending| !pending.is_older);
                self.ids.iter_mut().for_each(|pending| pending.is_older = true);
            }
            _ => self.ids.clear(),
        }
        self.generation = generation;
        self
    }
}

/// A snapshot of the counts that an asynchronous save has not written yet. Before the counts of such a bucket change,
/// they are copied here.
#[derive(Debug)]
pub(crate) struct SnapshotCounts {
    /// Only ids that were counted in this epoch or later; `None` for all.
    pub(crate) since: Option<u32>,
    first: u32,
    is_pending: Vec<bool>,
    copies: HashMap<u32, BucketCounts>,
}

impl SnapshotCounts {
    /// Creates a snapshot of the buckets `first..first + buckets`.
    pub(crate) fn new(first: u32, buckets: usize, since: Option<u32>) -> Self {
        Self { since, first, is_pending: vec![true; buckets], copies: HashMap::new() }
    }

    /// True if the counts of a bucket are not copied yet.
    pub(crate) fn is_pending(&self, bucket: u32) -> bool {
        self.is_pending[(bucket - self.first) as usize]
    }

    /// Stores a copy of a bucket's counts.
    pub(crate) fn keep(&mut self, counts: BucketCounts) {
        self.is_pending[(counts.bucket - self.first) as usize] = false;
        self.copies.insert(counts.bucket, counts);
    }

    /// Takes the counts of a bucket: the copy, or the current counts from `current` if there is no copy.
    pub(crate) fn take(&mut self, bucket: u32, current: impl FnOnce(Option<u32>) -> BucketCounts) -> BucketCounts {
        if std::mem::take(&mut self.is_pending[(bucket - self.first) as usize]) {
            return current(self.since);
        }
        self.copies.remove(&bucket).unwrap_or(BucketCounts { bucket, ..BucketCounts::default() })
    }
}

/// The count of a pending id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdmissionCount {
    /// The id.
    pub(crate) id: Id,
    /// Its occurrences, at most 2²⁴ − 1.
    pub(crate) count: u32,
    /// True if it belongs to the older generation of its bucket.
    pub(crate) is_older: bool,
}

/// The result of a lookup: the count of an id, and its location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FoundCounter {
    /// 0 if the id has no count.
    pub(crate) count: u32,
    /// The location that [`AdmissionCounters::add`] tries first.
    pub(crate) spot: CounterSpot,
}

/// The two generations of a bucket.
#[derive(Clone, Copy, Debug, Default)]
struct BucketGenerations {
    /// The bit of the ids of the current generation.
    current: bool,
    /// Number of ids in each generation, indexed by that bit.
    ids: [u32; 2],
    /// Number of generations that have ended.
    ended: u64,
}

/// The counts of the ids of one table shard.
#[derive(Debug)]
pub(crate) struct AdmissionCounters {
    buckets: Range<u32>,
    bucketing: BucketMapper,
    hash: IdHash,
    pool: CounterPool,
    /// The maps: `parts` for each bucket.
    maps: Vec<CounterMap>,
    parts: u64,
    generations: Vec<BucketGenerations>,
    /// Maximum number of ids in a generation of a bucket.
    generation_ids: u32,
    window: Option<NonZeroU64>,
    /// The epoch of tag 0. Ids with this tag were last counted in this epoch or before.
    first_epoch: u32,
    forgotten: u64,
    /// True if ids were forgotten because a bucket was full.
    ran_full: bool,
    /// Buckets whose current generation may have become full in this batch.
    full: Vec<u32>,
    /// Maximum number of pages of a map.
    most_pages: usize,
}

/// State of the search for one id.
#[derive(Clone, Copy)]
struct CounterSearch {
    map: u32,
    /// The next line of the map to search.
    at: u32,
    /// The index of that line in the pool.
    line: usize,
    goes_on: bool,
    /// The result, once the search has finished.
    found: FoundCounter,
}

const NOT_FOUND: FoundCounter = FoundCounter { count: 0, spot: CounterSpot::NOWHERE };

const ENDED: CounterSearch = CounterSearch { map: 0, at: 0, line: 0, goes_on: false, found: NOT_FOUND };

impl AdmissionCounters {
    /// Creates empty counts of a shard with these buckets. `window` is in steps.
    ///
    /// All shards of the table together use at most `memory` bytes, plus the memory for the ids of one batch.
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

    /// Number of ids that have counts.
    pub(crate) fn len(&self) -> u64 {
        self.generations.iter().map(|bucket| u64::from(bucket.ids[0]) + u64::from(bucket.ids[1])).sum()
    }

    /// Number of ids that were forgotten because a bucket was full or a window ended.
    pub(crate) fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// True if ids were forgotten because a bucket was full, and not only because a window ended.
    pub(crate) fn ran_full(&self) -> bool {
        self.ran_full
    }

    /// Bytes of RAM in use by the counts.
    pub(crate) fn bytes(&self) -> u64 {
        self.pool.bytes()
    }

    /// Writes the counts of `ids` `[n]`, 0 if an id has none, to `counts` `[n]`.
    pub(crate) fn get_batch(&self, ids: &[Id], counts: &mut [u32]) {
        let mut pairs: Vec<(Id, u32)> = ids.iter().map(|&id| (id, 0)).collect();
        self.find_batch(&mut pairs, |pair| pair.0, |pair, found| pair.1 = found.count);
        counts.iter_mut().zip(pairs).for_each(|(count, pair)| *count = pair.1);
    }

    /// Prefetches the memory that [`AdmissionCounters::add`] accesses.
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

    /// Allocates memory for this number of additional ids.
    ///
    /// Errors: `Memory`.
    pub(crate) fn reserve(&mut self, ids: usize) -> Result<()> {
        // Any of the maps may grow, including the largest.
        let growing = ids.min(self.maps.len());
        self.pool.reserve(growing * self.most_pages / 8 + ids + 2 * growing + self.most_pages)
    }

    /// Adds `occurrences` to the count of an id, in `epoch`. Memory must have been reserved. `spot` is the location
    /// from an earlier search; since then the id may have been counted, moved or forgotten.
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

    /// Ends a counted batch with this step. Returns the buckets whose [generation must
    /// end](AdmissionCounters::end_generation): those that are full, and those whose window is over. A bucket for which
    /// both is true ends one generation, so that the counts of the step are remembered.
    ///
    /// Windows end for some buckets in each step, which spreads the work.
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
            // The windows of bucket b end at the steps s at which the line from (0, 0) to (window, total) passes b.
            let within = step % window;
            let of = |within: u64| (u128::from(within) * u128::from(total) / u128::from(window.get())) as u32;
            ending.extend((of(within)..of(within + 1)).filter(|bucket| self.buckets.contains(bucket)));
        }
        ending.sort_unstable();
        ending.dedup();
        ending
    }

    /// Disables the limit of ids per bucket. Generations end together with those of other counters.
    #[must_use]
    pub(crate) fn never_full(mut self) -> Self {
        self.generation_ids = u32::MAX;
        self
    }

    /// Forgets the count of an id that got a row.
    pub(crate) fn remove(&mut self, id: Id) {
        let bucket = self.bucket(id);
        if let Some((spot, entry)) = self.search(bucket, id) {
            let map = self.map(bucket, self.hash.of(id));
            self.maps[map].remove(&mut self.pool, spot);
            self.generations[bucket].ids[usize::from(entry.generation)] -= 1;
        }
    }

    /// Forgets all counts.
    pub(crate) fn clear(&mut self) {
        for map in &mut self.maps {
            map.clear(&mut self.pool);
        }
        self.generations.fill(BucketGenerations::default());
        self.full.clear();
        self.first_epoch = 0;
    }

    /// Number of generations of a bucket that have ended, modulo 2³².
    pub(crate) fn generation(&self, bucket: u32) -> u32 {
        self.generations[(bucket - self.buckets.start) as usize].ended as u32
    }

    /// Restores the counts of an empty bucket, in `epoch`. `generation` is the number of generations of the bucket that
    /// have ended.
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
                // The counts added up to this point belong to the older generation.
                let generations = &mut self.generations[(bucket - self.buckets.start) as usize];
                generations.current = !generations.current;
            }
        }
        Ok(())
    }

    /// The counts of a bucket of this shard, in ascending order of the ids as unsigned integers.
    pub(crate) fn of_bucket(&self, bucket: u32) -> Vec<AdmissionCount> {
        self.listed(bucket, |_| true)
    }

    /// Like [`AdmissionCounters::of_bucket`], for the ids that were counted in epoch `since` or later. May include a
    /// few others.
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

    /// Forgets the older generation of a bucket. Its current generation becomes the older one.
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

    /// The tag of `epoch`. If the tags are exhausted, older epochs are merged into one tag.
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

    /// Calls `found` for each of `all` `[n]`, in order, with the counter of its id, which `id` returns.
    ///
    /// The directory entry of a line must be in the CPU cache before the line can be prefetched, and the home line
    /// before the next line, which contains many of the ids. So blocks of ids go through their steps in a pipeline.
    pub(crate) fn find_batch<T>(
        &self,
        all: &mut [T],
        id: impl Fn(&T) -> Id,
        mut found: impl FnMut(&mut T, FoundCounter),
    ) {
        let mut searches = [[ENDED; BLOCK]; STEPS];
        for round in 0..all.len().div_ceil(BLOCK) + STEPS - 1 {
            for step in (0..STEPS).rev() {
                let Some(begin) = round.checked_sub(step).map(|block| block * BLOCK).filter(|&at| at < all.len())
                else {
                    continue;
                };
                let end = (begin + BLOCK).min(all.len());
                let block = all[begin..end].iter_mut().zip(&mut searches[(round - step) % STEPS]);
                match step {
                    0 => block.for_each(|(each, search)| *search = self.begin_search(id(each))),
                    1 => block.for_each(|(_, search)| self.prefetch_home(search)),
                    // CPUs drop some of many prefetches. Another prefetch of a cached line costs nearly nothing.
                    2 => block.for_each(|(_, search)| self.pool.prefetch_line(search.line)),
                    3 | 4 => block.for_each(|(each, search)| self.look(search, id(each))),
                    _ => block.for_each(|(each, search)| {
                        let known = self.end_search(search, id(each));
                        found(each, known);
                    }),
                }
            }
        }
    }

    /// Starts the search for an id, and prefetches the directory entry of its first line.
    #[inline]
    fn begin_search(&self, id: Id) -> CounterSearch {
        let hash = self.hash.of(id);
        let map = self.map(self.bucket(id), hash);
        let Some(at) = self.maps[map].home(hash) else { return ENDED };
        self.maps[map].prefetch_page(&self.pool, at);
        CounterSearch { map: map as u32, at, goes_on: true, ..ENDED }
    }

    #[inline]
    fn prefetch_home(&self, search: &mut CounterSearch) {
        if search.goes_on {
            search.line = self.maps[search.map as usize].line_of(&self.pool, search.at);
            self.pool.prefetch_line(search.line);
        }
    }

    /// Searches one line. Prefetches the next line if the search continues there.
    #[inline]
    fn look(&self, search: &mut CounterSearch, id: Id) {
        if !search.goes_on {
            return;
        }
        let map = &self.maps[search.map as usize];
        match map.look_at(&self.pool, search.line, search.at, id) {
            CounterLookup::Found(spot, entry) => {
                (search.found, search.goes_on) = (FoundCounter { count: entry.count, spot }, false);
            }
            CounterLookup::Absent => search.goes_on = false,
            CounterLookup::Further(next) => {
                search.at = next;
                search.line = map.line_of(&self.pool, next);
                self.pool.prefetch_line(search.line);
            }
        }
    }

    #[inline]
    fn end_search(&self, search: &CounterSearch, id: Id) -> FoundCounter {
        if !search.goes_on {
            return search.found;
        }
        let found = self.maps[search.map as usize].find_from(&self.pool, search.at, id);
        found.map_or(NOT_FOUND, |(spot, entry)| FoundCounter { count: entry.count, spot })
    }
}
