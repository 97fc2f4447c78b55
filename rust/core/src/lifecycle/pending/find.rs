//! Looking for the counts of many ids at once.

use super::lines::CounterLookup;
use super::pool::CounterSpot;
use super::{AdmissionCounters, FoundCounter};
use crate::types::Id;

/// Ids of a block. While a block makes a step, what the next step of the others will look at arrives.
const BLOCK: usize = 16;
/// Steps of a block: the five in which something is asked for, and the last.
const STEPS: usize = 6;

/// How far the search for one id has come.
#[derive(Clone, Copy)]
struct CounterSearch {
    map: u32,
    /// The line of the map that is to be looked at, where the search goes on.
    at: u32,
    /// The number in the pool of that line.
    line: usize,
    goes_on: bool,
    /// What is known where the search has ended.
    found: FoundCounter,
}

const NOT_FOUND: FoundCounter = FoundCounter { count: 0, spot: CounterSpot::NOWHERE };
const ENDED: CounterSearch = CounterSearch { map: 0, at: 0, line: 0, goes_on: false, found: NOT_FOUND };

impl AdmissionCounters {
    /// Hand to `found` each of `all` `[n]`, whose ids `id` tells, and what is known of it. It goes from the first to the last.
    ///
    /// The memory that says where a line is must be there before the line can be asked for, and the home line before the line that follows,
    /// which many ids are in. So blocks of ids go through their steps one behind the other.
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
                    // A processor drops some of many prefetches. Of a line that is there another one costs nearly nothing.
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

    /// Where the search for an id begins. What says where that line is gets fetched.
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

    /// Look at one line. The one that follows gets fetched where the search goes on.
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
