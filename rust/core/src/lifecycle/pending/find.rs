//! Lookups of the counts of many ids.

use super::lines::CounterLookup;
use super::pool::CounterSpot;
use super::{AdmissionCounters, FoundCounter};
use crate::types::Id;

/// Ids of a block. While one block makes a step, prefetches for the next steps of the other blocks complete.
const BLOCK: usize = 16;
/// Steps of a block: the five that prefetch, and the last.
const STEPS: usize = 6;

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
