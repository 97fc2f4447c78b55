//! The limits of disk benches: raw system calls on the same files.
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

/// Bytes that direct reads are aligned to.
const SECTOR: usize = 512;
/// Reads that the limits have in flight: as many as a ring of the project's engine.
pub const RAW_DEPTH: usize = 128;
/// Completions waited for with one system call.
const REAP: usize = 16;
/// Bytes of a block, by which the distance between records is counted.
const BLOCK: u64 = 4096;
/// Records are read together when their blocks are no further apart than this: about what the disk transfers in the time of one request.
const MERGED_GAP: u64 = 16 << 10;
/// The most bytes of records that are read together.
const LARGEST_MERGED: usize = 128 << 10;
/// What a segment's footer takes for a record, at most.
const FOOTER_ENTRY_BYTES: u64 = 14;

/// A ring with `O_DIRECT` on one file or several, which are registered, as is the memory where that is permitted.
pub struct RawReads {
    ring: IoUring,
    _files: Vec<File>,
    memory: AlignedBuf,
    /// Whether the slots are registered.
    fixed: bool,
    depth: usize,
    slot_bytes: usize,
}

impl RawReads {
    /// Reads of up to `largest` bytes of any alignment, `depth` in flight.
    ///
    /// # Panics
    /// When the system refuses `io_uring` or `O_DIRECT`.
    pub fn new(path: &Path, largest: usize, depth: usize) -> Self {
        Self::over(vec![open_direct(path).expect("O_DIRECT is permitted")], largest, depth)
    }

    /// As [`RawReads::new`], over several files, which [`open_direct`] opened.
    fn over(files: Vec<File>, largest: usize, depth: usize) -> Self {
        let slot_bytes = largest.next_multiple_of(SECTOR) + SECTOR;
        let ring = IoUring::builder().setup_coop_taskrun().build(depth as u32);
        let ring = ring.or_else(|_| IoUring::new(depth as u32)).expect("io_uring is permitted");
        let mut memory = AlignedBuf::try_contiguous(depth * slot_bytes).expect("memory");
        let slots: Vec<libc::iovec> = memory
            .chunks_exact_mut(slot_bytes)
            .map(|slot| libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot_bytes })
            .collect();
        // SAFETY: the memory lives as long as the ring, and only completed reads of it are looked at.
        let fixed = unsafe { ring.submitter().register_buffers(&slots) }.is_ok();
        let descriptors: Vec<i32> = files.iter().map(AsRawFd::as_raw_fd).collect();
        ring.submitter().register_files(&descriptors).expect("files can be registered");
        Self { ring, _files: files, memory, fixed, depth, slot_bytes }
    }

    /// Read the sectors of `len` bytes at each offset; the sum of the first byte wanted of each, so that nothing is left out.
    ///
    /// # Panics
    /// When a read fails or is short.
    pub fn read(&mut self, offsets: &[u64], len: usize) -> u64 {
        self.read_from(offsets.len(), |at| (0, offsets[at], len))
    }

    /// As [`RawReads::read`], `count` reads, each of the file, at the offset and of the length that `place` says.
    ///
    /// # Panics
    /// When a read fails or is short.
    pub fn read_from(&mut self, count: usize, place: impl Fn(usize) -> (usize, u64, usize)) -> u64 {
        let mut next = 0;
        let mut done = 0;
        let mut sum = 0;
        let mut free: Vec<usize> = (0..self.depth).collect();
        // Where in its slot what is wanted of a read begins and ends.
        let mut wanted = vec![(0, 0); self.depth];
        while done < count {
            while let (Some(&slot), true) = (free.last(), next < count) {
                let (file, offset, len) = place(next);
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

/// A place of a record: the number of its file, and its offset there.
pub type RecordPlace = (usize, u64);

/// Open a file whose reads leave the page cache out.
fn open_direct(path: &Path) -> std::io::Result<File> {
    File::options().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// Reads of batches of records at random places of a tier's files: the limit of fetches. A batch is sorted, and records that lie
/// close together are one read.
pub struct RawRecords {
    reads: RawReads,
    /// Bytes of the records of each file.
    lengths: Vec<u64>,
    random: SplitMix64,
    record_bytes: usize,
}

impl RawRecords {
    /// Over the segments in a directory of files, `depth` reads in flight.
    ///
    /// # Panics
    /// When there are none, or as [`RawReads::new`].
    pub fn over(dir: &Path, record_bytes: usize, depth: usize) -> Self {
        let (mut files, mut lengths) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(dir).expect("a directory of files") {
            let path = entry.expect("a directory of files").path();
            if path.extension().is_none_or(|extension| extension != "seg") {
                continue;
            }
            let file = match open_direct(&path) {
                Ok(file) => file,
                // Compaction has removed it since.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => panic!("O_DIRECT is permitted: {error}"),
            };
            let bytes = file.metadata().expect("an open file").len();
            let records = bytes * record_bytes as u64 / (record_bytes as u64 + FOOTER_ENTRY_BYTES);
            // Otherwise it is not written yet.
            if records > record_bytes as u64 {
                files.push(file);
                lengths.push(records);
            }
        }
        assert!(!files.is_empty(), "no segments in {}", dir.display());
        let reads = RawReads::over(files, LARGEST_MERGED, depth);
        Self { reads, lengths, random: SplitMix64(9), record_bytes }
    }

    /// `count` places, each record of the files as likely, dead ones too.
    ///
    /// # Panics
    /// Never: `over` has seen to it that there is a file.
    pub fn draw(&mut self, count: usize) -> Vec<RecordPlace> {
        let total = self.lengths.iter().sum();
        let mut place = || {
            let mut at = self.random.next_below(total);
            let file = self.lengths.iter().position(|len| at.checked_sub(*len).map(|rest| at = rest).is_none());
            let file = file.expect("inside a file");
            let at = at - at % self.record_bytes as u64;
            (file, at.min(self.lengths[file] - self.record_bytes as u64))
        };
        (0..count).map(|_| place()).collect()
    }

    /// Read batches, each sorted and merged by itself, the next one's reads following the last of the one before; how long it took.
    ///
    /// # Panics
    /// As [`RawReads::read`].
    pub fn read(&mut self, batches: &mut [Vec<RecordPlace>]) -> Duration {
        let begin = Instant::now();
        let mut merged: Vec<(usize, u64, usize)> = Vec::with_capacity(batches.iter().map(Vec::len).sum());
        for places in batches {
            places.sort_unstable();
            let first = merged.len();
            for &mut (file, offset) in places {
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

/// Bytes of a request of the limits of whole files.
const REQUEST_BYTES: usize = 8 << 20;
/// Threads that they have, each with a file of its own.
const WRITERS: usize = 4;

/// The limits of whole files: four threads, each of which writes and syncs, or reads, its quarter of `bytes`, 8 MiB at a time, with
/// `O_DIRECT`.
#[derive(Debug)]
pub struct RawFiles {
    paths: Vec<PathBuf>,
    file_bytes: usize,
}

impl RawFiles {
    /// In a folder that is there, of `bytes` or a little more.
    pub fn new(dir: &Path, bytes: usize) -> Self {
        let paths = (0..WRITERS).map(|number| dir.join(format!("raw-{number}"))).collect();
        Self { paths, file_bytes: bytes.div_ceil(WRITERS).next_multiple_of(ALIGNMENT) }
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> usize {
        self.file_bytes * WRITERS
    }

    /// Write the files, which are not there yet; how long it took.
    ///
    /// # Panics
    /// When the system refuses `O_DIRECT` or the disk is full.
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
            // SAFETY: an open descriptor and plain integers.
            let set_aside = unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, bytes) };
            assert_eq!(set_aside, 0, "fallocate");
            for offset in (0..self.file_bytes).step_by(REQUEST_BYTES) {
                let part = &buffer[..REQUEST_BYTES.min(self.file_bytes - offset)];
                file.write_all_at(part, offset as u64).expect("room on the disk");
            }
            file.sync_data().expect("fdatasync");
        })
    }

    /// Read the files; how long it took.
    ///
    /// # Panics
    /// When they are not there.
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

    /// Remove the files.
    ///
    /// # Panics
    /// When they are not there.
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
