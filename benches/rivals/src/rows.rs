//! Rows as the rivals store them, and the threads that fetch them.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};

use embcache_benches::{scattered_id, served_row};

/// Bytes of a row without its id, which is the key: 64 float32, rowwise Adagrad's scalar, and 20 bytes of metadata.
pub(crate) const VALUE_BYTES: usize = 280;
/// Bytes of a row of weights: 64 float32.
pub(crate) const WEIGHT_BYTES: usize = 256;
/// The number of threads that fetch a batch. The stores read synchronously, so this is also the depth of the disk's queue.
pub(crate) const THREADS: usize = 64;
/// The number of keys that a thread takes at a time.
const SHARD: usize = 256;

/// The bytes of a row: a pattern that starts with the id.
pub(crate) fn value(id: i64) -> [u8; VALUE_BYTES] {
    let mut bytes = [0; VALUE_BYTES];
    for (at, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        chunk.copy_from_slice(&(id.wrapping_mul(2 * at as i64 + 1)).to_le_bytes());
    }
    bytes
}

/// The bytes of a row of weights alone, as a checkpoint holds them.
pub(crate) fn weights(id: i64) -> [u8; WEIGHT_BYTES] {
    let mut bytes = [0; WEIGHT_BYTES];
    for (chunk, weight) in bytes.chunks_exact_mut(4).zip(served_row(id, 0)) {
        chunk.copy_from_slice(&weight.to_le_bytes());
    }
    bytes
}

/// The key of an id. In the order of their keys, ids are sorted as unsigned numbers.
pub(crate) fn key(id: i64) -> [u8; 8] {
    id.to_be_bytes()
}

/// The ids to load, in the order of their keys.
pub(crate) fn sorted_ids(rows: u64) -> Vec<i64> {
    let mut ids: Vec<i64> = (0..rows).map(scattered_id).collect();
    ids.sort_unstable_by_key(|id| *id as u64);
    ids
}

/// The memory for a batch's values. Several threads write, each at positions of its own.
pub(crate) struct Values(*mut u8);

// SAFETY: by the promise of `put`'s callers, each position is written by one thread.
unsafe impl Sync for Values {}

impl Values {
    /// Write the value at a position of the batch.
    ///
    /// # Safety
    /// `position` is in the batch, and no other thread writes this position meanwhile.
    pub(crate) unsafe fn put(&self, position: u32, value: &[u8]) {
        assert_eq!(value.len(), VALUE_BYTES, "a row as it was loaded");
        // SAFETY: `out` of `sharded` has room for the value of every position, and the caller alone writes this one.
        unsafe {
            std::ptr::copy_nonoverlapping(value.as_ptr(), self.0.add(position as usize * VALUE_BYTES), VALUE_BYTES);
        };
    }
}

/// Sort `keys`, and let many threads work on shards of neighbouring ones. `worker` makes a thread's worker, which is called with a
/// shard of (key, position) and the memory for the values, which is `out`.
pub(crate) fn sharded<W: FnMut(&[(u64, u32)], &Values)>(
    keys: impl Iterator<Item = u64>,
    out: &mut [u8],
    worker: impl Fn() -> W + Sync,
) {
    let mut sorted: Vec<(u64, u32)> = keys.zip(0..).collect();
    sorted.sort_unstable();
    assert!(out.len() >= sorted.len() * VALUE_BYTES, "a place for each row");
    let values_out = Values(out.as_mut_ptr());
    let next = AtomicUsize::new(0);
    let shards: Vec<&[(u64, u32)]> = sorted.chunks(SHARD).collect();
    std::thread::scope(|scope| {
        for _ in 0..THREADS.min(shards.len()) {
            scope.spawn(|| {
                let mut work = worker();
                while let Some(shard) = shards.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(shard, &values_out);
                }
            });
        }
    });
}
