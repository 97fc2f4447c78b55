//! The limits of the disk benches: raw system calls on the same files.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use embcache::io::{ALIGNMENT, AlignedBuf};
use io_uring::{IoUring, opcode, types};

use crate::workload::SplitMix64;

/// The alignment of direct reads in bytes.
const SECTOR: usize = 512;
/// Reads that the limits have in flight, the same number as a ring of this project's engine.
pub const RAW_DEPTH: usize = 128;
/// Completions to wait for in one system call.
const REAP: usize = 16;
/// Bytes of a block, in which the distance between records is counted.
const BLOCK: u64 = 4096;
/// Records are read together if their blocks are at most this number of bytes apart. The disk transfers about that much
/// in the time of a request.
const MERGED_GAP: u64 = 16 << 10;
/// Maximum bytes of records that are read together.
const LARGEST_MERGED: usize = 128 << 10;
/// Maximum bytes of a segment's footer per record.
const FOOTER_ENTRY_BYTES: u64 = 14;

/// A ring that reads one or several files with `O_DIRECT`. The files are registered with the ring, and so is its memory
/// if that is permitted.
pub struct RawReads {
    ring: IoUring,
    _files: Vec<File>,
    memory: AlignedBuf,
    /// True if the memory is registered.
    fixed: bool,
    depth: usize,
    slot_bytes: usize,
}

impl RawReads {
    /// Creates a ring for one file, with `depth` reads of up to `largest` bytes in flight. Reads may have any
    /// alignment.
    ///
    /// # Panics
    /// Panics if the OS rejects `io_uring` or `O_DIRECT`.
    pub fn new(path: &Path, largest: usize, depth: usize) -> Self {
        Self::over(vec![open_direct(path).expect("O_DIRECT is permitted")], largest, depth)
    }

    /// Like [`RawReads::new`], for several files that [`open_direct`] opened.
    fn over(files: Vec<File>, largest: usize, depth: usize) -> Self {
        let slot_bytes = largest.next_multiple_of(SECTOR) + SECTOR;
        let ring = IoUring::builder().setup_coop_taskrun().build(depth as u32);
        let ring = ring.or_else(|_| IoUring::new(depth as u32)).expect("io_uring is permitted");
        let mut memory = AlignedBuf::try_contiguous(depth * slot_bytes).expect("memory");
        let slots: Vec<libc::iovec> = memory
            .chunks_exact_mut(slot_bytes)
            .map(|slot| libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot_bytes })
            .collect();
        // SAFETY: the memory lives as long as the ring, and only the memory of completed reads is accessed.
        let fixed = unsafe { ring.submitter().register_buffers(&slots) }.is_ok();
        let descriptors: Vec<i32> = files.iter().map(AsRawFd::as_raw_fd).collect();
        ring.submitter().register_files(&descriptors).expect("files can be registered");
        Self { ring, _files: files, memory, fixed, depth, slot_bytes }
    }

    /// Reads the sectors of `len` bytes at each offset. Returns the sum of the first requested byte of each, so that no
    /// read can be optimized away.
    ///
    /// # Panics
    /// Panics when a read fails or is short.
    pub fn read(&mut self, offsets: &[u64], len: usize) -> u64 {
        self.read_from(offsets.len(), |at| (0, offsets[at], len))
    }

    /// Like [`RawReads::read`], for `count` reads. `read_at` returns the index of the file, the offset and the length
    /// of each read.
    ///
    /// # Panics
    /// Panics when a read fails or is short.
    pub fn read_from(&mut self, count: usize, read_at: impl Fn(usize) -> (usize, u64, usize)) -> u64 {
        let mut next = 0;
        let mut done = 0;
        let mut sum = 0;
        let mut free: Vec<usize> = (0..self.depth).collect();
        // For each slot of the memory, the range of the requested bytes of its read.
        let mut wanted = vec![(0, 0); self.depth];
        while done < count {
            while let (Some(&slot), true) = (free.last(), next < count) {
                let (file, offset, len) = read_at(next);
                let skip = (offset % SECTOR as u64) as usize;
                let bytes = (skip + len).next_multiple_of(SECTOR) as u32;
                let memory = self.memory.as_mut_ptr().wrapping_add(slot * self.slot_bytes);
                let (file, offset) = (types::Fixed(file as u32), offset - skip as u64);
                let entry = if self.fixed {
                    opcode::ReadFixed::new(file, memory, bytes, slot as u16).offset(offset).build()
                } else {
                    opcode::Read::new(file, memory, bytes).offset(offset).build()
                };
                // SAFETY: the slot's memory and the files live as long as self, and every completion is awaited below.
                unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) }.expect("an entry a slot");
                wanted[slot] = (skip, skip + len);
                free.pop();
                next += 1;
            }
            self.ring.submit_and_wait(REAP.min(next - done)).expect("io_uring_enter");
            for completion in self.ring.completion() {
                let slot = completion.user_data() as usize;
                let (begin, end) = wanted[slot];
                assert!(completion.result() >= end as i32, "short read: {}", completion.result());
                sum += u64::from(self.memory[slot * self.slot_bytes + begin]);
                free.push(slot);
                done += 1;
            }
        }
        sum
    }
}

/// The position of a record: the index of its file, and its offset in it.
pub type RecordPosition = (usize, u64);

/// Opens a file for reads that bypass the page cache.
fn open_direct(path: &Path) -> std::io::Result<File> {
    File::options().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// Reads batches of records at random positions of a tier's files, as the limit of fetches. Each batch is sorted, and
/// records that are close together are one read.
pub struct RawRecords {
    reads: RawReads,
    /// Bytes of the records of each file.
    lengths: Vec<u64>,
    random: SplitMix64,
    record_bytes: usize,
}

impl RawRecords {
    /// Creates a reader of the segments in a directory, with `depth` reads in flight.
    ///
    /// # Panics
    /// Panics if there are no segments, and like [`RawReads::new`].
    pub fn over(dir: &Path, record_bytes: usize, depth: usize) -> Self {
        let (mut files, mut lengths) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(dir).expect("a directory of files") {
            let path = entry.expect("a directory of files").path();
            if path.extension().is_none_or(|extension| extension != "seg") {
                continue;
            }
            let file = match open_direct(&path) {
                Ok(file) => file,
                // Compaction has removed it concurrently.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => panic!("O_DIRECT is permitted: {error}"),
            };
            let bytes = file.metadata().expect("an open file").len();
            let records = bytes * record_bytes as u64 / (record_bytes as u64 + FOOTER_ENTRY_BYTES);
            // Smaller segments are not written yet.
            if records > record_bytes as u64 {
                files.push(file);
                lengths.push(records);
            }
        }
        assert!(!files.is_empty(), "no segments in {}", dir.display());
        let reads = RawReads::over(files, LARGEST_MERGED, depth);
        Self { reads, lengths, random: SplitMix64(9), record_bytes }
    }

    /// Draws `count` records. Each record of the files has the same probability, including dead ones.
    ///
    /// # Panics
    /// Never, because `over` has checked that there is a file.
    pub fn draw(&mut self, count: usize) -> Vec<RecordPosition> {
        let total = self.lengths.iter().sum();
        let mut draw = || {
            let mut at = self.random.next_below(total);
            let file = self.lengths.iter().position(|len| at.checked_sub(*len).map(|rest| at = rest).is_none());
            let file = file.expect("inside a file");
            let at = at - at % self.record_bytes as u64;
            (file, at.min(self.lengths[file] - self.record_bytes as u64))
        };
        (0..count).map(|_| draw()).collect()
    }

    /// Reads batches and returns the duration. Each batch is sorted and merged separately, and its reads directly
    /// follow the previous ones.
    ///
    /// # Panics
    /// Panics like [`RawReads::read`].
    pub fn read(&mut self, batches: &mut [Vec<RecordPosition>]) -> Duration {
        let begin = Instant::now();
        let mut merged: Vec<(usize, u64, usize)> = Vec::with_capacity(batches.iter().map(Vec::len).sum());
        for records in batches {
            records.sort_unstable();
            let first = merged.len();
            for &mut (file, offset) in records {
                let end = offset + self.record_bytes as u64;
                if let Some((last, begin, len)) = merged[first..].last_mut()
                    && *last == file
                    && offset - offset % BLOCK <= (*begin + *len as u64).next_multiple_of(BLOCK) + MERGED_GAP
                    && end - *begin <= LARGEST_MERGED as u64
                {
                    *len = (*len).max((end - *begin) as usize);
                } else {
                    merged.push((file, offset, self.record_bytes));
                }
            }
        }
        self.reads.read_from(merged.len(), |at| merged[at]);
        begin.elapsed()
    }
}

/// Writes a new file of `bytes` bytes with `O_DIRECT`, `chunk` bytes at a time, and makes it durable.
///
/// # Panics
/// Panics if the OS rejects `O_DIRECT`, and when the disk is full.
pub fn write_sequentially(path: &Path, bytes: usize, chunk: usize) {
    assert!(chunk.is_multiple_of(ALIGNMENT) && bytes.is_multiple_of(chunk));
    let data = AlignedBuf::zeroed(chunk);
    let file = File::options().write(true).create_new(true).custom_flags(libc::O_DIRECT).open(path).expect("O_DIRECT");
    // SAFETY: the descriptor is open, and the call touches no memory of this process.
    let set_aside = unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, bytes as libc::off_t) };
    assert_eq!(set_aside, 0, "fallocate");
    for offset in (0..bytes).step_by(chunk) {
        file.write_all_at(&data, offset as u64).expect("room on the disk");
    }
    file.sync_data().expect("fdatasync");
}

/// Bytes of a request on whole files.
const REQUEST_BYTES: usize = 8 << 20;
/// The threads that work on whole files, each on its own file.
const WRITERS: usize = 4;

/// The limits of whole files. Each of four threads writes and syncs a quarter of the bytes, or reads it, 8 MiB at a
/// time with `O_DIRECT`.
#[derive(Debug)]
pub struct RawFiles {
    paths: Vec<PathBuf>,
    file_bytes: usize,
}

impl RawFiles {
    /// Files in an existing folder, with a total of `bytes` bytes or a little more.
    pub fn new(dir: &Path, bytes: usize) -> Self {
        let paths = (0..WRITERS).map(|number| dir.join(format!("raw-{number}"))).collect();
        Self { paths, file_bytes: bytes.div_ceil(WRITERS).next_multiple_of(ALIGNMENT) }
    }

    /// Total bytes of all files.
    pub fn bytes(&self) -> usize {
        self.file_bytes * WRITERS
    }

    /// Creates and writes the files. Returns the duration.
    ///
    /// # Panics
    /// Panics if the OS rejects `O_DIRECT`, and when the disk is full.
    pub fn write(&self) -> Duration {
        let mut buffers: Vec<AlignedBuf> = self.paths.iter().map(|_| AlignedBuf::zeroed(REQUEST_BYTES)).collect();
        let mut random = SplitMix64(5);
        for bytes in buffers.iter_mut().flat_map(|buffer| buffer.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&random.next_u64().to_le_bytes());
        }
        self.at_once(buffers, |path, buffer| {
            let file = File::options().write(true).create_new(true).custom_flags(libc::O_DIRECT).open(path);
            let file = file.expect("O_DIRECT is permitted");
            let bytes = self.file_bytes as libc::off_t;
            // SAFETY: the descriptor is open, and the call touches no memory of this process.
            let set_aside = unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, bytes) };
            assert_eq!(set_aside, 0, "fallocate");
            for offset in (0..self.file_bytes).step_by(REQUEST_BYTES) {
                let part = &buffer[..REQUEST_BYTES.min(self.file_bytes - offset)];
                file.write_all_at(part, offset as u64).expect("room on the disk");
            }
            file.sync_data().expect("fdatasync");
        })
    }

    /// Reads the files. Returns the duration.
    ///
    /// # Panics
    /// Panics when the files do not exist.
    pub fn read(&self) -> Duration {
        let buffers = self.paths.iter().map(|_| AlignedBuf::zeroed(REQUEST_BYTES)).collect();
        self.at_once(buffers, |path, buffer| {
            let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path);
            let file = file.expect("O_DIRECT is permitted");
            for offset in (0..self.file_bytes).step_by(REQUEST_BYTES) {
                let part = &mut buffer[..REQUEST_BYTES.min(self.file_bytes - offset)];
                file.read_exact_at(part, offset as u64).expect("the file is whole");
            }
        })
    }

    /// Removes the files.
    ///
    /// # Panics
    /// Panics when the files do not exist.
    pub fn remove(&self) {
        self.paths.iter().for_each(|path| std::fs::remove_file(path).expect("our own file"));
    }

    fn at_once(&self, buffers: Vec<AlignedBuf>, work: impl Fn(&Path, &mut AlignedBuf) + Sync) -> Duration {
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for (path, mut buffer) in self.paths.iter().zip(buffers) {
                let work = &work;
                scope.spawn(move || work(path, &mut buffer));
            }
        });
        begin.elapsed()
    }
}
