//! A map from ids to small counts, in as few bytes as an exact one takes.
//!
//! It is an open-addressing table of lines. A line is as long as a line of the processor's cache and has five entries, so most look-ups
//! touch one. A line that is full is marked when an id goes past it, and a search ends at the first line without the mark. The table grows
//! by a tenth when nine tenths of its entries are taken, so that an entry takes 14 to 16 bytes. Marks of lines from which ids were removed
//! stay, so the table is made anew, in the size that its ids need, before an eighth of its entries have been removed. Lines come in pages
//! of one pool, because growing by copies would leave holes in the heap.

use crate::error::Result;
use crate::memory::zeros;
use crate::prefetch::prefetch_address;
use crate::types::Id;

/// Entries of a line.
const ENTRIES: usize = 5;
/// Lines of a page.
const PAGE: usize = 4;
/// Pages that are asked from the system at once: 33 MiB. That is more than any allocator keeps in its heap. It comes untouched from the
/// system, so that what is not used costs no memory.
const PAGES_PER_CHUNK: usize = (33 << 20) / (PAGE * size_of::<Line>());
/// Bits of a count.
const COUNT_BITS: u32 = 24;
/// Bits of a tag.
const TAG_BITS: u32 = 7;

/// The largest count. A larger one stays at it.
pub(super) const MOST_COUNT: u32 = (1 << COUNT_BITS) - 1;
/// The largest tag.
pub(super) const MOST_TAG: u32 = (1 << TAG_BITS) - 1;

/// What the map knows of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// At most [`MOST_COUNT`].
    pub(super) count: u32,
    /// Which of two generations the entry belongs to.
    pub(super) generation: bool,
    /// At most [`MOST_TAG`].
    pub(super) tag: u32,
}

impl Entry {
    fn bits(self) -> u32 {
        self.count | u32::from(self.generation) << COUNT_BITS | self.tag << (COUNT_BITS + 1)
    }

    fn of(bits: u32) -> Self {
        Self { count: bits & MOST_COUNT, generation: bits >> COUNT_BITS & 1 == 1, tag: bits >> (COUNT_BITS + 1) }
    }
}

#[derive(Clone, Copy, Debug, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line {
    ids: [Id; ENTRIES],
    entries: [u32; ENTRIES],
    /// The entries that are taken, as bits.
    taken: u8,
    /// Whether an id went past this line because it was full.
    passed: u8,
}

const _: () = assert!(size_of::<Line>() == 64);

impl Line {
    #[inline]
    fn find(&self, id: Id) -> Option<usize> {
        (0..ENTRIES).find(|&at| self.ids[at] == id && self.taken >> at & 1 == 1)
    }

    #[inline]
    fn free(&self) -> Option<usize> {
        let at = self.taken.trailing_ones() as usize;
        (at < ENTRIES).then_some(at)
    }

    fn put(&mut self, at: usize, id: Id, entry: Entry) {
        (self.ids[at], self.entries[at]) = (id, entry.bits());
        self.taken |= 1 << at;
    }

    fn all(&self) -> impl Iterator<Item = (Id, Entry)> + '_ {
        (0..ENTRIES).filter(|at| self.taken >> at & 1 == 1).map(|at| (self.ids[at], Entry::of(self.entries[at])))
    }
}

/// The memory of many tables.
#[derive(Debug, Default)]
pub(super) struct Pool {
    chunks: Vec<Box<[Line]>>,
    /// Pages that were ever taken.
    taken: u32,
    /// Pages that were given back.
    free: Vec<u32>,
}

impl Pool {
    /// Bytes of the pages that are in use.
    pub(super) fn bytes(&self) -> u64 {
        (self.taken as usize - self.free.len()) as u64 * (PAGE * size_of::<Line>()) as u64
    }

    /// Have memory for `pages` more to be taken.
    ///
    /// Errors: `Memory`, and nothing has changed.
    pub(super) fn reserve(&mut self, pages: usize) -> Result<()> {
        while self.chunks.len() * PAGES_PER_CHUNK + self.free.len() < self.taken as usize + pages {
            let chunk = zeros("count the occurrences of ids without a row", PAGES_PER_CHUNK * PAGE)?;
            self.chunks.push(chunk.into_boxed_slice());
        }
        Ok(())
    }

    /// Take a page of empty lines.
    ///
    /// # Panics
    /// Where no memory was reserved for it and there is none.
    fn take(&mut self) -> u32 {
        self.reserve(1).unwrap_or_else(|refused| panic!("{refused}"));
        if let Some(page) = self.free.pop() {
            self.lines_mut(page).fill(bytemuck::Zeroable::zeroed());
            return page;
        }
        self.taken += 1;
        self.taken - 1
    }

    #[inline]
    fn lines(&self, page: u32) -> &[Line] {
        let start = page as usize % PAGES_PER_CHUNK * PAGE;
        &self.chunks[page as usize / PAGES_PER_CHUNK][start..start + PAGE]
    }

    #[inline]
    fn lines_mut(&mut self, page: u32) -> &mut [Line] {
        let start = page as usize % PAGES_PER_CHUNK * PAGE;
        &mut self.chunks[page as usize / PAGES_PER_CHUNK][start..start + PAGE]
    }
}

/// A map from ids to entries, whose memory is in a pool. The caller hashes the ids, always in the same way.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pages: Vec<u32>,
    lines: u32,
    len: u32,
    /// How many ids were removed since the table was made.
    removed: u32,
}

impl Counts {
    /// How many ids it has.
    #[cfg(test)]
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Fetch what a search for the id with this hash touches first into the processor's cache.
    #[inline]
    pub(super) fn prefetch(&self, pool: &Pool, hash: u64) {
        if self.lines > 0 {
            prefetch_address(self.line(pool, self.home(hash)));
        }
    }

    /// The entry of an id.
    #[inline]
    pub(super) fn get(&self, pool: &Pool, id: Id, hash: u64) -> Option<Entry> {
        let (at, place) = self.find(pool, id, hash)?;
        Some(Entry::of(self.line(pool, at).entries[place]))
    }

    /// How many pages it has.
    pub(super) fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Replace the entry of an id, or add it.
    pub(super) fn put(&mut self, pool: &mut Pool, id: Id, hash: u64, entry: Entry, rehash: impl Fn(Id) -> u64) {
        if let Some((at, place)) = self.find(pool, id, hash) {
            self.line_mut(pool, at).entries[place] = entry.bits();
            return;
        }
        let entries = u64::from(self.lines) * ENTRIES as u64;
        if u64::from(self.removed) * 8 > entries {
            // Room for the ids, and for some more before it grows.
            self.make_anew(pool, self.len / ENTRIES as u32 * 5 / 4 + 1, rehash);
        } else if u64::from(self.len + 1) * 10 > entries * 9 {
            self.make_anew(pool, self.lines + self.lines / 10 + 1, rehash);
        }
        self.add(pool, id, hash, entry);
    }

    /// Remove an id; whether it was there.
    pub(super) fn remove(&mut self, pool: &mut Pool, id: Id, hash: u64) -> bool {
        let Some((at, place)) = self.find(pool, id, hash) else { return false };
        self.line_mut(pool, at).taken &= !(1 << place);
        self.len -= 1;
        self.removed += 1;
        true
    }

    /// Every id and its entry, in no order.
    pub(super) fn all<'a>(&'a self, pool: &'a Pool) -> impl Iterator<Item = (Id, Entry)> + 'a {
        (0..self.lines).flat_map(|at| self.line(pool, at).all())
    }

    /// Keep the entries for which `keep` says so, which may change them.
    pub(super) fn retain(&mut self, pool: &mut Pool, mut keep: impl FnMut(Id, &mut Entry) -> bool) {
        for at in 0..self.lines {
            let line = self.line_mut(pool, at);
            let mut gone = 0;
            for place in (0..ENTRIES).filter(|place| line.taken >> place & 1 == 1) {
                let mut entry = Entry::of(line.entries[place]);
                if keep(line.ids[place], &mut entry) {
                    line.entries[place] = entry.bits();
                } else {
                    gone |= 1 << place;
                }
            }
            line.taken &= !gone;
            self.len -= gone.count_ones();
            self.removed += gone.count_ones();
        }
    }

    /// Give all memory back.
    pub(super) fn clear(&mut self, pool: &mut Pool) {
        pool.free.append(&mut self.pages);
        *self = Self::default();
    }

    #[inline]
    fn home(&self, hash: u64) -> u32 {
        (((hash >> 32) * u64::from(self.lines)) >> 32) as u32
    }

    #[inline]
    fn after(&self, at: u32) -> u32 {
        if at + 1 == self.lines { 0 } else { at + 1 }
    }

    #[inline]
    fn line<'a>(&self, pool: &'a Pool, at: u32) -> &'a Line {
        &pool.lines(self.pages[at as usize / PAGE])[at as usize % PAGE]
    }

    #[inline]
    fn line_mut<'a>(&self, pool: &'a mut Pool, at: u32) -> &'a mut Line {
        &mut pool.lines_mut(self.pages[at as usize / PAGE])[at as usize % PAGE]
    }

    /// The line of an id, and its place there.
    #[inline]
    fn find(&self, pool: &Pool, id: Id, hash: u64) -> Option<(u32, usize)> {
        if self.lines == 0 {
            return None;
        }
        let mut at = self.home(hash);
        for _ in 0..self.lines {
            let line = self.line(pool, at);
            if let Some(place) = line.find(id) {
                return Some((at, place));
            }
            if line.passed == 0 {
                return None;
            }
            at = self.after(at);
        }
        None
    }

    /// Add an id that is not there. There is a free entry.
    fn add(&mut self, pool: &mut Pool, id: Id, hash: u64, entry: Entry) {
        let mut at = self.home(hash);
        loop {
            let line = self.line_mut(pool, at);
            if let Some(place) = line.free() {
                line.put(place, id, entry);
                self.len += 1;
                return;
            }
            line.passed = 1;
            at = self.after(at);
        }
    }

    /// Make the table anew with so many lines, or some more.
    fn make_anew(&mut self, pool: &mut Pool, lines: u32, rehash: impl Fn(Id) -> u64) {
        let lines = lines.next_multiple_of(PAGE as u32);
        let pages = lines as usize / PAGE;
        let mut grown = Self { pages: (0..pages).map(|_| pool.take()).collect(), lines, len: 0, removed: 0 };
        for at in 0..self.lines {
            let line = *self.line(pool, at);
            for (id, entry) in line.all() {
                grown.add(pool, id, rehash(id), entry);
            }
        }
        self.clear(pool);
        *self = grown;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::types::hash_id;

    fn entry(count: u32) -> Entry {
        Entry { count, generation: count % 2 == 1, tag: count % (MOST_TAG + 1) }
    }

    #[test]
    fn it_is_a_map_through_any_puts_and_removals() {
        // Few hashes, so that lines overflow, and all of them.
        for hashes in [1, 7, u64::MAX] {
            let hash = |id: Id| (hash_id(id) % hashes).wrapping_mul(u64::MAX / hashes);
            let (mut pool, mut map, mut model) = (Pool::default(), Counts::default(), HashMap::new());
            let mut random = 1_u64;
            for round in 0..20_000_u32 {
                random = hash_id(random as Id);
                let id = (random % 700) as Id - 350;
                if (random >> 32).is_multiple_of(4) {
                    assert_eq!(map.remove(&mut pool, id, hash(id)), model.remove(&id).is_some());
                } else {
                    map.put(&mut pool, id, hash(id), entry(round), hash);
                    model.insert(id, entry(round));
                }
                let asked = (random >> 40) as Id % 700 - 350;
                assert_eq!(map.get(&pool, asked, hash(asked)), model.get(&asked).copied());
            }
            assert_eq!(map.len() as usize, model.len());
            assert_eq!(map.all(&pool).collect::<HashMap<_, _>>(), model);
            map.retain(&mut pool, |_, entry| {
                entry.tag = 3;
                entry.generation
            });
            model.retain(|_, entry| entry.generation);
            assert!(map.all(&pool).all(|(id, found)| found == Entry { tag: 3, ..model[&id] }));
            assert_eq!(map.len() as usize, model.len());
        }
    }

    #[test]
    fn a_search_stays_short_however_many_ids_came_and_went() {
        let (mut pool, mut map) = (Pool::default(), Counts::default());
        for id in 0..300_000 {
            map.put(&mut pool, id, hash_id(id), entry(1), hash_id);
            if id >= 2000 {
                assert!(map.remove(&mut pool, id - 2000, hash_id(id - 2000)));
            }
        }
        let lines_to = |id: Id| {
            let mut at = map.home(hash_id(id));
            let passed = (0..map.lines).take_while(|_| {
                let has_passed = map.line(&pool, at).passed == 1;
                at = map.after(at);
                has_passed
            });
            passed.count() + 1
        };
        let lines: usize = (0..2000).map(lines_to).sum();
        assert!(lines < 2000 * 4, "{lines} lines for 2000 ids that are not there");
        assert!(map.lines < 2000, "{} lines for 2000 ids", map.lines);
    }

    #[test]
    fn an_entry_keeps_all_its_bits() {
        for found in [(0, false, 0), (MOST_COUNT, true, MOST_TAG), (1, true, 0), (MOST_COUNT, false, 1)] {
            let (count, generation, tag) = found;
            let entry = Entry { count, generation, tag };
            assert_eq!(Entry::of(entry.bits()), entry);
        }
    }

    #[test]
    fn an_entry_takes_at_most_sixteen_bytes_and_what_is_cleared_is_used_again() {
        let (mut pool, mut map) = (Pool::default(), Counts::default());
        for round in 0..3 {
            for id in 0..100_000_u32 {
                map.put(&mut pool, Id::from(id), hash_id(Id::from(id)), entry(id), hash_id);
                let bytes = pool.bytes() as f64 / f64::from(map.len());
                assert!(id < 2000 || bytes < 16.0, "{bytes} with {id}");
            }
            let taken = pool.taken;
            map.clear(&mut pool);
            assert_eq!((pool.bytes(), map.len()), (0, 0));
            assert!(round == 0 || taken == pool.taken);
        }
    }
}
