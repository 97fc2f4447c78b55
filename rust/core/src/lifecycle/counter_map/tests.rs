use std::collections::HashMap;

use super::*;
use crate::types::hash_id;

impl CounterPool {
    fn pages_ever_taken(&self) -> u32 {
        self.taken
    }
}

impl CounterMap {
    /// Number of ids.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Inserts or replaces the entry of an id.
    fn put(&mut self, pool: &mut CounterPool, id: Id, entry: CounterEntry, hash: impl Fn(Id) -> u64) {
        match self.find(pool, id, hash(id)) {
            Some((spot, _)) => pool.replace(spot, entry),
            None => self.insert(pool, id, hash(id), entry, hash),
        }
    }

    /// Removes an id. Returns true if it was in the map.
    fn take(&mut self, pool: &mut CounterPool, id: Id, hash: u64) -> bool {
        let found = self.find(pool, id, hash);
        found.inspect(|(spot, _)| self.remove(pool, *spot)).is_some()
    }
}

fn entry(count: u32) -> CounterEntry {
    CounterEntry { count, generation: count % 2 == 1, tag: count % (MOST_TAG + 1) }
}

#[test]
fn it_is_a_map_through_any_puts_and_removals() {
    // Few hashes, so that lines overflow, and all hashes.
    for hashes in [1, 7, u64::MAX] {
        let hash = |id: Id| (hash_id(id) % hashes).wrapping_mul(u64::MAX / hashes);
        let (mut pool, mut map, mut model) = (CounterPool::new(1), CounterMap::new(0), HashMap::new());
        let mut random = 1_u64;
        for round in 0..20_000_u32 {
            random = hash_id(random as Id);
            let id = (random % 700) as Id - 350;
            if (random >> 32).is_multiple_of(4) {
                assert_eq!(map.take(&mut pool, id, hash(id)), model.remove(&id).is_some());
            } else {
                map.put(&mut pool, id, entry(round), hash);
                model.insert(id, entry(round));
            }
            let asked = (random >> 40) as Id % 700 - 350;
            assert_eq!(map.find(&pool, asked, hash(asked)).map(|(_, entry)| entry), model.get(&asked).copied());
        }
        assert_eq!(map.len() as usize, model.len());
        assert_eq!(map.all(&pool).collect::<HashMap<_, _>>(), model);
        map.retain(&mut pool, |_, entry| {
            entry.tag = 3;
            entry.generation
        });
        model.retain(|_, entry| entry.generation);
        assert!(map.all(&pool).all(|(id, found)| found == CounterEntry { tag: 3, ..model[&id] }));
        assert_eq!(map.len() as usize, model.len());
    }
}

#[test]
fn searches_stay_short_after_many_insertions_and_removals() {
    let (mut pool, mut map) = (CounterPool::new(1), CounterMap::new(0));
    for id in 0..300_000 {
        map.put(&mut pool, id, entry(1), hash_id);
        if id >= 2000 {
            assert!(map.take(&mut pool, id - 2000, hash_id(id - 2000)));
        }
    }
    let lines_to = |id: Id| {
        let mut at = map.home(hash_id(id)).expect("it has lines");
        let passed = (0..map.lines).take_while(|_| {
            let has_passed = pool.line(pool.line_of(0, at)).passed == 1;
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
fn an_entry_uses_at_most_sixteen_bytes_and_cleared_pages_are_reused() {
    let (mut pool, mut map) = (CounterPool::new(1), CounterMap::new(0));
    for round in 0..3 {
        for id in 0..100_000_u32 {
            map.put(&mut pool, Id::from(id), entry(id), hash_id);
            let bytes = pool.bytes() as f64 / f64::from(map.len());
            assert!(id < 2000 || bytes < 16.0, "{bytes} with {id}");
        }
        let taken = pool.pages_ever_taken();
        map.clear(&mut pool);
        assert_eq!((pool.bytes(), map.len()), (0, 0));
        assert!(round == 0 || taken == pool.pages_ever_taken());
    }
}

#[test]
fn an_entry_keeps_all_its_bits() {
    for found in [(0, false, 0), (MOST_COUNT, true, MOST_TAG), (1, true, 0), (MOST_COUNT, false, 1)] {
        let (count, generation, tag) = found;
        let entry = CounterEntry { count, generation, tag };
        assert_eq!(CounterEntry::of(entry.bits()), entry);
    }
}
