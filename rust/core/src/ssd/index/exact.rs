//! Stores in full the ids whose fingerprints other ids have too. They are few as long as there are many fingerprints.
//!
//! Up to [`SINGLE_MAP_IDS`] of them are stored in one map, more in [`MAPS`] maps, so that growing a map blocks the
//! table only briefly. The map of an id and its position there depend on a secret, so that colliding ids cannot be
//! chosen. Nearly all searched ids are in no map, and a bit filter decides that without a lookup.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

use super::RecordLocation;
use super::fingerprint::secret;
use crate::error::Result;
use crate::runtime::memory;
use crate::types::{Id, hash_id};

/// Number of maps if there are more ids than [`SINGLE_MAP_IDS`].
const MAPS: usize = 1024;
/// Maximum number of ids in a single map.
const SINGLE_MAP_IDS: usize = 1 << 15;

#[derive(Debug)]
pub(super) struct ExactMap {
    maps: Vec<ExactMapShard>,
    len: usize,
    /// Every map has capacity for at least this many more ids.
    spare_capacity: usize,
    secret: IdHashSecret,
}

/// A subset of the ids.
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
            // If the filter has no memory for bits, this stops at the first id.
            let _all = self.ids.keys().all(|&id| self.filter.add(hash_id(id)));
        }
    }

    /// Reserves capacity for `more` ids. Returns `Memory`, without any change, if the allocation fails.
    fn reserve(&mut self, more: usize) -> Result<()> {
        let bytes = (self.ids.len() + more) * (size_of::<(Id, RecordLocation)>() + 1);
        self.ids.try_reserve(more).map_err(|_| memory::refused_error(MEMORY_PURPOSE, bytes))
    }
}

/// A bit per hash, of which at most one in eight is set (Bloom, "Space/time trade-offs in hash coding with allowable
/// errors", 1970, with one hash). Bits of removed ids stay until it is rebuilt.
#[derive(Debug, Default)]
struct ExactMapFilter {
    /// The length is a power of two. If it is empty, every id may be present.
    words: Vec<u64>,
    added: usize,
}

impl ExactMapFilter {
    const MIN_BITS: usize = 1 << 9;

    /// True if an id with this hash may have been added.
    #[inline]
    fn may_contain(&self, hash: u64) -> bool {
        let (word, bit) = self.bit_of(hash);
        self.words.get(word).is_none_or(|word| word >> bit & 1 != 0)
    }

    /// Word and bit of a hash. Not of its low bits, which are similar for all ids of a rank: they determine the bucket.
    fn bit_of(&self, hash: u64) -> (usize, u64) {
        let bits = hash >> 32;
        ((bits / 64) as usize & self.words.len().wrapping_sub(1), bits % 64)
    }

    /// Adds an id with this hash. Returns false, without adding it, if there are too few bits.
    fn add(&mut self, hash: u64) -> bool {
        if self.words.is_empty() || self.added >= self.words.len() * 8 {
            return false;
        }
        let (word, bit) = self.bit_of(hash);
        self.words[word] |= 1 << bit;
        self.added += 1;
        true
    }

    /// Clears the filter, with bits for `2 * ids` ids. If the allocation fails there are none, which only costs time.
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
        // hashbrown has a control byte per bucket and fills seven eighths of them.
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

    /// Returns the map of an id that may be present; `None` if it certainly is not.
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

    /// Adds an absent id. Returns `Memory`, without any change, if it has no capacity and the allocation fails.
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

    /// Reserves capacity for `more` ids, which are distributed over the maps.
    ///
    /// Errors: `Memory`. No id has moved.
    pub(super) fn reserve(&mut self, more: usize) -> Result<()> {
        if self.maps.len() == 1 && self.len + more > SINGLE_MAP_IDS {
            self.split_map()?;
        }
        // No map gets four times its expected number plus 16 by chance.
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

    /// Splits the single map into many.
    fn split_map(&mut self) -> Result<()> {
        let mut maps = Vec::new();
        memory::reserve(&mut maps, MEMORY_PURPOSE, MAPS)?;
        for _ in 0..MAPS {
            let mut map = ExactMapShard::new(self.secret);
            // No map gets that many by chance.
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

/// Hashes ids with a secret.
#[derive(Clone, Copy, Debug)]
struct IdHashSecret(u64);

impl IdHashSecret {
    #[inline]
    fn hash(self, id: Id) -> u64 {
        hash_id((hash_id(id) ^ self.0) as Id)
    }
}

/// Hasher of one id.
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
