//! Keeps in full the ids that share their print with another. They are few as long as there are many prints.
//!
//! While they are few they are in one map, and later in [`MAPS`] maps, so that a map that grows holds the table up only briefly. Which map
//! an id is in, and where, depends on a secret, so that nobody can choose ids that meet there. Nearly all ids that are asked for are in no
//! map, and a filter of bits says so at once.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

use super::location::RecordLocation;
use super::prints::secret;
use crate::error::Result;
use crate::memory;
use crate::types::{Id, hash_id};

/// Maps, once there are more ids than [`SINGLE_MAP_IDS`].
const MAPS: usize = 1024;
/// As many ids are kept in one map.
const SINGLE_MAP_IDS: usize = 1 << 15;

#[derive(Debug)]
pub(super) struct ExactMap {
    maps: Vec<ExactMapShard>,
    len: usize,
    /// Every map has room for so many more at least.
    spare_capacity: usize,
    secret: IdHashSecret,
}

/// Some of the ids.
#[derive(Debug)]
struct ExactMapShard {
    ids: HashMap<Id, RecordLocation, IdHashSecret>,
    filter: ExactMapFilter,
}

impl ExactMapShard {
    fn new(secret: IdHashSecret) -> Self {
        Self { ids: HashMap::with_hasher(secret), filter: ExactMapFilter::default() }
    }

    fn insert(&mut self, id: Id, location: RecordLocation) {
        self.ids.insert(id, location);
        if !self.filter.add(hash_id(id)) {
            self.filter.reset(2 * self.ids.len());
            // Without memory for bits this ends at the first id.
            let _all = self.ids.keys().all(|&id| self.filter.add(hash_id(id)));
        }
    }

    /// Have room for `more` ids. `Memory`, and nothing has changed, where the system refuses.
    fn reserve(&mut self, more: usize) -> Result<()> {
        let bytes = (self.ids.len() + more) * (size_of::<(Id, RecordLocation)>() + 1);
        self.ids.try_reserve(more).map_err(|_| memory::refused_error(MEMORY_PURPOSE, bytes))
    }
}

/// A bit for each of some hashes, of which at most one in eight is set (Bloom, "Space/time trade-offs in hash coding with allowable errors",
/// 1970, with one hash). Bits of ids that are gone stay until it is made again.
#[derive(Debug, Default)]
struct ExactMapFilter {
    /// A power of two. Where there are none, every id may be here.
    words: Vec<u64>,
    added: usize,
}

impl ExactMapFilter {
    const MIN_BITS: usize = 1 << 9;

    /// Whether an id of this hash may have been added.
    #[inline]
    fn may_contain(&self, hash: u64) -> bool {
        let word = (hash / 64) as usize & self.words.len().wrapping_sub(1);
        self.words.get(word).is_none_or(|word| word >> (hash % 64) & 1 != 0)
    }

    /// Add an id of this hash; false where there are too few bits, and it was not added.
    fn add(&mut self, hash: u64) -> bool {
        if self.words.is_empty() || self.added >= self.words.len() * 8 {
            return false;
        }
        let word = (hash / 64) as usize & (self.words.len() - 1);
        self.words[word] |= 1 << (hash % 64);
        self.added += 1;
        true
    }

    /// Begin anew, with bits for twice so many ids. Where the system refuses the memory there are none, which costs only time.
    fn reset(&mut self, ids: usize) {
        let words = (ids * 16).next_power_of_two().max(Self::MIN_BITS) / 64;
        *self = Self::default();
        if self.words.try_reserve_exact(words).is_ok() {
            self.words.resize(words, 0);
        }
    }
}

impl Default for ExactMap {
    fn default() -> Self {
        let secret = IdHashSecret(secret());
        Self { maps: vec![ExactMapShard::new(secret)], len: 0, spare_capacity: 0, secret }
    }
}

impl ExactMap {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> usize {
        // hashbrown keeps a control byte a bucket and fills seven eighths of them.
        let buckets: usize = self.maps.iter().map(|map| map.ids.capacity() / 7 * 8).sum();
        let words: usize = self.maps.iter().map(|map| map.filter.words.capacity()).sum();
        buckets * (size_of::<(Id, RecordLocation)>() + 1)
            + self.maps.capacity() * size_of::<ExactMapShard>()
            + words * size_of::<u64>()
    }

    #[inline]
    fn map_of(&self, id: Id) -> usize {
        if self.maps.len() == 1 { 0 } else { (self.secret.hash(id) >> 32) as usize % MAPS }
    }

    /// The map of an id that may be here; `None` where it surely is not.
    #[inline]
    fn map_with(&self, id: Id) -> Option<usize> {
        if self.len == 0 {
            return None;
        }
        let map = self.map_of(id);
        self.maps[map].filter.may_contain(hash_id(id)).then_some(map)
    }

    #[inline]
    pub(super) fn get(&self, id: Id) -> Option<RecordLocation> {
        self.maps[self.map_with(id)?].ids.get(&id).copied()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: Id) -> Option<&mut RecordLocation> {
        let map = self.map_with(id)?;
        self.maps[map].ids.get_mut(&id)
    }

    #[inline]
    pub(super) fn remove(&mut self, id: Id) -> Option<RecordLocation> {
        let map = self.map_with(id)?;
        let removed = self.maps[map].ids.remove(&id);
        self.len -= usize::from(removed.is_some());
        removed
    }

    pub(super) fn locations(&self) -> impl Iterator<Item = RecordLocation> + '_ {
        self.maps.iter().flat_map(|map| map.ids.values()).copied()
    }

    /// Add an id that is known to be absent. `Memory`, and nothing has changed, where it has no room and the system gives none.
    pub(super) fn insert(&mut self, id: Id, location: RecordLocation) -> Result<()> {
        let map = self.map_of(id);
        if self.spare_capacity == 0 {
            self.maps[map].reserve(1)?;
        }
        self.maps[map].insert(id, location);
        self.spare_capacity = self.spare_capacity.saturating_sub(1);
        self.len += 1;
        Ok(())
    }

    /// Have room for `more` ids to come, of which a map gets its share.
    ///
    /// Errors: `Memory`, and no id is elsewhere than before.
    pub(super) fn reserve(&mut self, more: usize) -> Result<()> {
        if self.maps.len() == 1 && self.len + more > SINGLE_MAP_IDS {
            self.split_map()?;
        }
        // Chance gives no map four times its share and 16 more.
        let each = if self.maps.len() == 1 { more } else { more.min(more * 4 / MAPS + 16) };
        if self.spare_capacity >= each {
            return Ok(());
        }
        for map in &mut self.maps {
            map.reserve(each)?;
        }
        self.spare_capacity = self.maps.iter().map(|map| map.ids.capacity() - map.ids.len()).min().unwrap_or(0);
        Ok(())
    }

    /// Go over to many maps.
    fn split_map(&mut self) -> Result<()> {
        let mut maps = Vec::new();
        memory::reserve(&mut maps, MEMORY_PURPOSE, MAPS)?;
        for _ in 0..MAPS {
            let mut map = ExactMapShard::new(self.secret);
            // Chance gives no map as much.
            map.reserve(4 * self.len / MAPS + 64)?;
            maps.push(map);
        }
        let few = std::mem::replace(&mut self.maps, maps);
        self.spare_capacity = 0;
        for (id, location) in few.into_iter().flat_map(|map| map.ids) {
            let map = self.map_of(id);
            self.maps[map].insert(id, location);
        }
        Ok(())
    }
}

const MEMORY_PURPOSE: &str = "hold the index of the rows on SSD";

/// Hashes ids in a way that nobody knows.
#[derive(Clone, Copy, Debug)]
struct IdHashSecret(u64);

impl IdHashSecret {
    #[inline]
    fn hash(self, id: Id) -> u64 {
        hash_id((hash_id(id) ^ self.0) as Id)
    }
}

/// The hash of one id.
#[derive(Clone, Copy, Debug)]
struct IdHasher {
    secret: IdHashSecret,
    hash: u64,
}

impl BuildHasher for IdHashSecret {
    type Hasher = IdHasher;
    fn build_hasher(&self) -> IdHasher {
        IdHasher { secret: *self, hash: 0 }
    }
}

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.hash
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("ids are hashed as i64")
    }
    fn write_i64(&mut self, id: Id) {
        self.hash = self.secret.hash(id);
    }
}
