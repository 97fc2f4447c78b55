//! Keeps in full the ids that share their print with another. They are few as long as there are many prints.
//!
//! While they are few they are in one map, and later in [`MAPS`] maps, so that a map that grows holds the table up only briefly. Which map
//! an id is in, and where, depends on a secret, so that nobody can choose ids that meet there.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

use super::location::Location;
use super::prints::secret;
use crate::error::Result;
use crate::types::{Id, hash_id};

/// Maps, once there are more ids than [`FEW`].
const MAPS: usize = 1024;
/// As many ids are kept in one map.
const FEW: usize = 1 << 15;

#[derive(Debug)]
pub(super) struct Exact {
    maps: Vec<HashMap<Id, Location, Secret>>,
    len: usize,
    /// Every map has room for so many more at least.
    room: usize,
    secret: Secret,
}

impl Default for Exact {
    fn default() -> Self {
        let secret = Secret(secret());
        Self { maps: vec![HashMap::with_hasher(secret)], len: 0, room: 0, secret }
    }
}

impl Exact {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> usize {
        // hashbrown keeps a control byte a bucket and fills seven eighths of them.
        let buckets: usize = self.maps.iter().map(|map| map.capacity() / 7 * 8).sum();
        buckets * (size_of::<(Id, Location)>() + 1) + self.maps.capacity() * size_of_val(&self.maps[0])
    }

    #[inline]
    fn map_of(&self, id: Id) -> usize {
        if self.maps.len() == 1 { 0 } else { (self.secret.spread(id) >> 32) as usize % MAPS }
    }

    #[inline]
    pub(super) fn get(&self, id: Id) -> Option<Location> {
        if self.len == 0 {
            return None;
        }
        self.maps[self.map_of(id)].get(&id).copied()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: Id) -> Option<&mut Location> {
        if self.len == 0 {
            return None;
        }
        let map = self.map_of(id);
        self.maps[map].get_mut(&id)
    }

    #[inline]
    pub(super) fn remove(&mut self, id: Id) -> Option<Location> {
        if self.len == 0 {
            return None;
        }
        let map = self.map_of(id);
        let removed = self.maps[map].remove(&id);
        self.len -= usize::from(removed.is_some());
        removed
    }

    pub(super) fn locations(&self) -> impl Iterator<Item = Location> + '_ {
        self.maps.iter().flat_map(HashMap::values).copied()
    }

    /// Add an id that is known to be absent. `Memory`, and nothing has changed, where it has no room and the system gives none.
    pub(super) fn insert(&mut self, id: Id, location: Location) -> Result<()> {
        let map = self.map_of(id);
        if self.room == 0 {
            make_room(&mut self.maps[map], 1)?;
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
            make_room(map, each)?;
        }
        self.room = self.maps.iter().map(|map| map.capacity() - map.len()).min().unwrap_or(0);
        Ok(())
    }

    /// Go over to many maps.
    fn spread(&mut self) -> Result<()> {
        let mut maps = Vec::new();
        crate::memory::reserve(&mut maps, WHAT, MAPS)?;
        for _ in 0..MAPS {
            let mut map = HashMap::with_hasher(self.secret);
            // Chance gives no map as much.
            make_room(&mut map, 4 * self.len / MAPS + 64)?;
            maps.push(map);
        }
        let few = std::mem::replace(&mut self.maps, maps);
        self.room = 0;
        for (id, location) in few.into_iter().flatten() {
            let map = self.map_of(id);
            self.maps[map].insert(id, location);
        }
        Ok(())
    }
}

const WHAT: &str = "hold the index of the rows on SSD";

fn make_room(map: &mut HashMap<Id, Location, Secret>, more: usize) -> Result<()> {
    map.try_reserve(more)
        .map_err(|_| crate::memory::refused(WHAT, (map.len() + more) * (size_of::<(Id, Location)>() + 1)))
}

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
