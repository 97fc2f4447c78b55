//! Rows as the rivals store them, and the threads that fetch them.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};

use embcache_benches::scattered_id;

/// A row but for its id, which is the key: 64 floats, rowwise Adagrad's scalar, 20 bytes of metadata.
pub(crate) const VALUE_BYTES: usize = 280;
/// Fetches of a batch under way: the stores read synchronously, so this is the depth of the disk's queue.
pub(crate) const THREADS: usize = 64;
/// Keys that a thread takes at a time.
const SHARD: usize = 256;

/// The bytes of a row: a pattern that the id starts.
pub(crate) fn value(id: i64) -> [u8; VALUE_BYTES] {
    let mut bytes = [0; VALUE_BYTES];
    for (at, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        chunk.copy_from_slice(&(id.wrapping_mul(2 * at as i64 + 1)).to_le_bytes());
    }
    bytes
}

/// The key of an id: ids in the order of their keys are in unsigned order.
pub(crate) fn key(id: i64) -> [u8; 8] {
    id.to_be_bytes()
}

/// The ids that are loaded, in the order of their keys.
pub(crate) fn sorted_ids(rows: u64) -> Vec<i64> {
    let mut ids: Vec<i64> = (0..rows).map(scattered_id).collect();
    ids.sort_unstable_by_key(|id| *id as u64);
    ids
}

/// Where the values of a batch go: several threads write, each to places of its own.
pub(crate) struct Places(*mut u8);

// SAFETY: `put` writes to places that one thread has each, as its caller promises.
unsafe impl Sync for Places {}

impl Places {
    /// Write the value at a position of the batch.
    ///
    /// # Safety
    /// `position` is in the batch, and no other thread writes to it meanwhile.
    pub(crate) unsafe fn put(&self, position: u32, value: &[u8]) {
        assert_eq!(value.len(), VALUE_BYTES, "a row as it was loaded");
        // SAFETY: `out` of `sharded` has room for every position's value, and this position is the caller's.
        unsafe {
            std::ptr::copy_nonoverlapping(value.as_ptr(), self.0.add(position as usize * VALUE_BYTES), VALUE_BYTES);
        };
    }
}

/// Sort `keys`, then have many threads work on shards of neighbouring ones: `run` makes a thread's worker, which is called with a
/// shard of (key, position) and the places that its positions have in `out`.
pub(crate) fn sharded<W: FnMut(&[(u64, u32)], &Places)>(
    keys: impl Iterator<Item = u64>,
    out: &mut [u8],
    worker: impl Fn() -> W + Sync,
) {
    let mut sorted: Vec<(u64, u32)> = keys.zip(0..).collect();
    sorted.sort_unstable();
    assert!(out.len() >= sorted.len() * VALUE_BYTES, "a place for each row");
    let places = Places(out.as_mut_ptr());
    let next = AtomicUsize::new(0);
    let shards: Vec<&[(u64, u32)]> = sorted.chunks(SHARD).collect();
    std::thread::scope(|scope| {
        for _ in 0..THREADS.min(shards.len()) {
            scope.spawn(|| {
                let mut work = worker();
                while let Some(shard) = shards.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(shard, &places);
                }
            });
        }
    });
}
