//! A flat file of rows that is mapped into memory, beside an index in RAM. This is what one writes without a store.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::Path;

use embcache_benches::{PlainIndex, forget_cached, scattered_id};

use crate::FetchStore;
use crate::rows::{THREADS, VALUE_BYTES, sharded, value};

pub(crate) struct Flat {
    file: File,
    map: *const u8,
    bytes: usize,
    index: PlainIndex,
}

/// A mapping that several threads read.
struct Map(*const u8);

// SAFETY: the mapping is read-only, and nobody writes its file.
unsafe impl Sync for Map {}

impl Map {
    /// # Safety
    /// The mapping has row `slot`, and outlives the slice.
    unsafe fn row(&self, slot: u64) -> &[u8] {
        // SAFETY: by the caller's promise the mapping has this row.
        unsafe { std::slice::from_raw_parts(self.0.add(slot as usize * VALUE_BYTES), VALUE_BYTES) }
    }
}

impl Flat {
    pub(crate) fn load(dir: &Path, rows: u64) -> Self {
        let path = dir.join("rows");
        let ids: Vec<i64> = (0..rows).map(scattered_id).collect();
        let mut writer = BufWriter::with_capacity(1 << 20, File::create_new(&path).expect("our own directory"));
        for id in &ids {
            writer.write_all(&value(*id)).expect("room on the disk");
        }
        writer.into_inner().expect("room on the disk").sync_all().expect("fsync");
        let file = File::open(&path).expect("our own file");
        let bytes = ids.len() * VALUE_BYTES;
        // SAFETY: this makes a new read-only mapping of an open file, with the file's length.
        let map =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(map, libc::MAP_FAILED, "mmap");
        // SAFETY: the mapping is this store's own. The advice only turns read-ahead off, which slows random reads down.
        assert_eq!(unsafe { libc::madvise(map, bytes, libc::MADV_RANDOM) }, 0, "madvise");
        Self { file, map: map.cast(), bytes, index: PlainIndex::new(&ids) }
    }
}

impl Drop for Flat {
    fn drop(&mut self) {
        // SAFETY: the mapping is this store's own, and nobody reads it any more.
        unsafe { libc::munmap(self.map.cast_mut().cast(), self.bytes) };
    }
}

impl FetchStore for Flat {
    fn what(&self) -> String {
        format!("mmap of a flat file ({THREADS} threads, MADV_RANDOM, index in RAM)")
    }

    fn cool(&mut self) {
        // SAFETY: the mapping is this store's own, and pages that are dropped are read again from the file.
        assert_eq!(unsafe { libc::madvise(self.map.cast_mut().cast(), self.bytes, libc::MADV_DONTNEED) }, 0, "madvise");
        forget_cached(&self.file);
    }

    fn fetch(&mut self, ids: &[i64], out: &mut [u8]) {
        let mut slots = vec![0; ids.len()];
        self.index.get(ids, &mut slots);
        let map = &Map(self.map);
        sharded(slots.iter().map(|slot| u64::from(*slot)), out, || {
            move |shard, values_out| {
                for &(slot, position) in shard {
                    // SAFETY: the index holds slots of rows that are in the file, and this position is in this shard alone.
                    unsafe { values_out.put(position, map.row(slot)) };
                }
            }
        });
    }
}
