//! Keeps in full the ids that share their print with another. They are few as long as there are many prints.
//!
//! While they are few they are in one map, and later in [`MAPS`] maps, so that a map that grows holds the table up only briefly. Which map
//! an id is in, and where, depends on a secret, so that nobody can choose ids that meet there. Nearly all ids that are asked for are in no
//! map, and a filter of bits says so at once.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

use super::location::Location;
use super::prints::secret;
use crate::error::Result;
use crate::memory;
use crate::types::{Id, hash_id};

/// Maps, once there are more ids than [`FEW`].
const MAPS: usize = 1024;
/// As many ids are kept in one map.
const FEW: usize = 1 << 15;

#[derive(Debug)]
pub(super) struct Exact {
    maps: Vec<Map>,
    len: usize,
    /// Every map has room for so many more at least.
    room: usize,
    secret: Secret,
}

/// Some of the ids.
#[derive(Debug)]
struct Map {
    ids: HashMap<Id, Location, Secret>,
    filter: Filter,
}

impl Map {
    fn new(secret: Secret) -> Self {
        Self { ids: HashMap::with_hasher(secret), filter: Filter::default() }
    }

    fn insert(&mut self, id: Id, location: Location) {
        self.ids.insert(id, location);
        if !self.filter.add(hash_id(id)) {
            self.filter.begin(2 * self.ids.len());
            // Without memory for bits this ends at the first id.
            let _all = self.ids.keys().all(|&id| self.filter.add(hash_id(id)));
        }
    }

    /// Have room for `more` ids. `Memory`, and nothing has changed, where the system refuses.
    fn make_room(&mut self, more: usize) -> Result<()> {
        let bytes = (self.ids.len() + more) * (size_of::<(Id, Location)>() + 1);
        self.ids.try_reserve(more).map_err(|_| memory::refused(WHAT, bytes))
    }
}

/// A bit for each of some hashes, of which at most one in eight is set (Bloom, "Space/time trade-offs in hash coding with allowable errors",
/// 1970, with one hash). Bits of ids that are gone stay until it is made again.
#[derive(Debug, Default)]
struct Filter {
    /// A power of two. Where there are none, every id may be here.
    words: Vec<u64>,
    added: usize,
}

impl Filter {
    const LEAST_BITS: usize = 1 << 9;

    /// Whether an id of this hash may have been added.
    #[inline]
    fn may_have(&self, hash: u64) -> bool {
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
    fn begin(&mut self, ids: usize) {
        let words = (ids * 16).next_power_of_two().max(Self::LEAST_BITS) / 64;
        *self = Self::default();
        if self.words.try_reserve_exact(words).is_ok() {
            self.words.resize(words, 0);
        }
    }
}

impl Default for Exact {
    fn default() -> Self {
        let secret = Secret(secret());
        Self { maps: vec![Map::new(secret)], len: 0, room: 0, secret }
    }
}

impl Exact {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> usize {
        // hashbrown keeps a control byte a bucket and fills seven eighths of them.
        let buckets: usize = self.maps.iter().map(|map| map.ids.capacity() / 7 * 8).sum();
        let words: usize = self.maps.iter().map(|map| map.filter.words.capacity()).sum();
        buckets * (size_of::<(Id, Location)>() + 1) + self.maps.capacity() * size_of::<Map>() + words * size_of::<u64>()
    }

    #[inline]
    fn map_of(&self, id: Id) -> usize {
        if self.maps.len() == 1 { 0 } else { (self.secret.spread(id) >> 32) as usize % MAPS }
    }

    /// The map of an id that may be here; `None` where it surely is not.
    #[inline]
    fn map_with(&self, id: Id) -> Option<usize> {
        if self.len == 0 {
            return None;
        }
        let map = self.map_of(id);
        self.maps[map].filter.may_have(hash_id(id)).then_some(map)
    }

    #[inline]
    pub(super) fn get(&self, id: Id) -> Option<Location> {
        self.maps[self.map_with(id)?].ids.get(&id).copied()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: Id) -> Option<&mut Location> {
        let map = self.map_with(id)?;
        self.maps[map].ids.get_mut(&id)
    }

    #[inline]
    pub(super) fn remove(&mut self, id: Id) -> Option<Location> {
        let map = self.map_with(id)?;
        let removed = self.maps[map].ids.remove(&id);
        self.len -= usize::from(removed.is_some());
        removed
    }

    pub(super) fn locations(&self) -> impl Iterator<Item = Location> + '_ {
        self.maps.iter().flat_map(|map| map.ids.values()).copied()
    }

    /// Add an id that is known to be absent. `Memory`, and nothing has changed, where it has no room and the system gives none.
    pub(super) fn insert(&mut self, id: Id, location: Location) -> Result<()> {
        let map = self.map_of(id);
        if self.room == 0 {
            self.maps[map].make_room(1)?;
        }
        self.maps[map].insert(id, location);
        self.room = self.room.saturating_sub(1);
        self.len += 1;
        Ok(())
    }

    /// Have room for `more` ids to come, of which a map gets its share.
    ///
    /// Errors: `Memory`, and no id is elsewhere than before.
    pub(super) fn reserve(&mut self, more: usize) -> Result<()> {
        if self.maps.len() == 1 && self.len + more > FEW {
            self.spread()?;
        }
        // Chance gives no map four times its share and 16 more.
        let each = if self.maps.len() == 1 { more } else { more.min(more * 4 / MAPS + 16) };
        if self.room >= each {
            return Ok(());
        }
        for map in &mut self.maps {
            map.make_room(each)?;
        }
        self.room = self.maps.iter().map(|map| map.ids.capacity() - map.ids.len()).min().unwrap_or(0);
        Ok(())
    }

    /// Go over to many maps.
    fn spread(&mut self) -> Result<()> {
        let mut maps = Vec::new();
        memory::reserve(&mut maps, WHAT, MAPS)?;
        for _ in 0..MAPS {
            let mut map = Map::new(self.secret);
            // Chance gives no map as much.
            map.make_room(4 * self.len / MAPS + 64)?;
            maps.push(map);
        }
        let few = std::mem::replace(&mut self.maps, maps);
        self.room = 0;
        for (id, location) in few.into_iter().flat_map(|map| map.ids) {
            let map = self.map_of(id);
            self.maps[map].insert(id, location);
        }
        Ok(())
    }
}

const WHAT: &str = "hold the index of the rows on SSD";

/// Hashes ids in a way that nobody knows.
#[derive(Clone, Copy, Debug)]
struct Secret(u64);

impl Secret {
    #[inline]
    fn spread(self, id: Id) -> u64 {
        hash_id((hash_id(id) ^ self.0) as Id)
    }
}

/// The hash of one id.
#[derive(Clone, Copy, Debug)]
struct IdHasher {
    secret: Secret,
    hash: u64,
}

impl BuildHasher for Secret {
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
        self.hash = self.secret.spread(id);
    }
}
