//! The limits of disk benches: raw system calls on the same files.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use embcache::io::{ALIGNMENT, AlignedBuf};
use io_uring::{IoUring, opcode, types};

/// What direct reads are aligned to.
const SECTOR: usize = 512;

/// A ring with `O_DIRECT` on one file or several.
pub struct RawReads {
    ring: IoUring,
    files: Vec<File>,
    memory: AlignedBuf,
    depth: usize,
    slot_bytes: usize,
}

impl RawReads {
    /// Reads of up to `largest` bytes of any alignment, `depth` in flight.
    ///
    /// # Panics
    /// When the system refuses `io_uring` or `O_DIRECT`.
    pub fn new(path: &Path, largest: usize, depth: usize) -> Self {
        Self::over(&[path.to_owned()], largest, depth)
    }

    /// As [`RawReads::new`], over several files.
    ///
    /// # Panics
    /// When the system refuses `io_uring` or `O_DIRECT`.
    pub fn over(paths: &[PathBuf], largest: usize, depth: usize) -> Self {
        let open = |path: &PathBuf| File::options().read(true).custom_flags(libc::O_DIRECT).open(path);
        let files = paths.iter().map(|path| open(path).expect("O_DIRECT is permitted")).collect();
        let slot_bytes = largest.next_multiple_of(SECTOR) + SECTOR;
        Self {
            ring: IoUring::new(depth as u32).expect("io_uring is permitted"),
            files,
            memory: AlignedBuf::zeroed(depth * slot_bytes),
            depth,
            slot_bytes,
        }
    }

    /// Read the sectors of `len` bytes at each offset; the sum of the first byte wanted of each, so that nothing is left out.
    ///
    /// # Panics
    /// When a read fails or is short.
    pub fn read(&mut self, offsets: &[u64], len: usize) -> u64 {
        self.read_from(offsets.len(), |at| (0, offsets[at]), len)
    }

    /// As [`RawReads::read`], `count` reads, each of the file and at the offset that `place` says.
    ///
    /// # Panics
    /// When a read fails or is short.
    pub fn read_from(&mut self, count: usize, place: impl Fn(usize) -> (usize, u64), len: usize) -> u64 {
        let mut next = 0;
        let mut done = 0;
        let mut sum = 0;
        let mut free: Vec<usize> = (0..self.depth).collect();
        let mut skips = vec![0; self.depth];
        while done < count {
            while let (Some(&slot), true) = (free.last(), next < count) {
                let (file, offset) = place(next);
                let skip = (offset % SECTOR as u64) as usize;
                let bytes = (skip + len).next_multiple_of(SECTOR);
                let memory = self.memory.as_mut_ptr().wrapping_add(slot * self.slot_bytes);
                let entry = opcode::Read::new(types::Fd(self.files[file].as_raw_fd()), memory, bytes as u32)
                    .offset(offset - skip as u64)
                    .build()
                    .user_data(slot as u64);
                // SAFETY: the slot's memory and the files live as long as self, and every completion is awaited below.
                unsafe { self.ring.submission().push(&entry) }.expect("an entry a slot");
                skips[slot] = skip;
                free.pop();
                next += 1;
            }
            self.ring.submit_and_wait(1).expect("io_uring_enter");
            for completion in self.ring.completion() {
                let slot = completion.user_data() as usize;
                assert!(completion.result() >= (skips[slot] + len) as i32, "short read: {}", completion.result());
                sum += u64::from(self.memory[slot * self.slot_bytes + skips[slot]]);
                free.push(slot);
                done += 1;
            }
        }
        sum
    }
}

/// Write a new file of `bytes`, `chunk` at a time, with `O_DIRECT`, and make it durable.
///
/// # Panics
/// When the system refuses `O_DIRECT` or the disk is full.
pub fn write_sequentially(path: &Path, bytes: usize, chunk: usize) {
    assert!(chunk.is_multiple_of(ALIGNMENT) && bytes.is_multiple_of(chunk));
    let data = AlignedBuf::zeroed(chunk);
    let file = File::options().write(true).create_new(true).custom_flags(libc::O_DIRECT).open(path).expect("O_DIRECT");
    // SAFETY: an open descriptor and plain integers.
    let set_aside = unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, bytes as libc::off_t) };
    assert_eq!(set_aside, 0, "fallocate");
    for offset in (0..bytes).step_by(chunk) {
        file.write_all_at(&data, offset as u64).expect("room on the disk");
    }
    file.sync_data().expect("fdatasync");
}
