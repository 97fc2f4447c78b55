//! The limits of serving: plain loops and raw system calls over the files of a checkpoint.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use embcache::types::Id;
use io_uring::{IoUring, opcode, types};
use serde_json::Value;

use crate::plain::{PlainIndex, prefetch};
use crate::plain_kernels::DIM;

/// Number of ids that are looked up together.
const BLOCK: usize = 64;
const ROW_BYTES: usize = DIM * 4;
const LINE_FLOATS: usize = 16;
const PAGE: usize = 4096;

/// A group of a file of rows, mapped read-only.
#[derive(Debug)]
struct Mapped {
    file: File,
    start: *mut u8,
    bytes: usize,
    /// The ids of its rows.
    ids: Vec<Id>,
    /// The start of the weights, in bytes.
    weights: usize,
}

impl Mapped {
    /// Maps a file for one of its groups. Returns `None` if it has fewer.
    fn open(path: &Path, group: usize) -> Option<Self> {
        let file = File::open(path).expect("a file of rows");
        let bytes = file.metadata().expect("an open file").len() as usize;
        // SAFETY: this creates a read-only mapping of an open file, with the file's length.
        let start = unsafe { libc::mmap(null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(start, libc::MAP_FAILED, "mmap");
        // SAFETY: this value owns the mapping, and the advice only turns read-ahead off.
        assert_eq!(unsafe { libc::madvise(start, bytes, libc::MADV_RANDOM) }, 0, "madvise");
        // SAFETY: the call touches no memory of this process. Reads of a row then only load its own pages.
        assert_eq!(unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) }, 0, "fadvise");
        let mut this = Self { file, start: start.cast(), bytes, ids: Vec::new(), weights: 0 };
        let length = u64::from_le_bytes(this.slice(0, 8).try_into().expect("eight bytes")) as usize;
        let header: Value = serde_json::from_slice(this.slice(8, length)).expect("a safetensors header");
        let range = |name: &str| {
            let name = if group == 0 { name.to_owned() } else { format!("{name}.{group}") };
            let bound = |at: usize| header[&name]["data_offsets"][at].as_u64().map(|bound| bound as usize);
            Some((8 + length + bound(0)?, bound(1)? - bound(0)?))
        };
        let (ids, id_bytes) = range("id")?;
        let id = |bytes: &[u8]| Id::from_le_bytes(bytes.try_into().expect("eight bytes"));
        this.ids = this.slice(ids, id_bytes).chunks_exact(8).map(id).collect();
        this.weights = range("weight")?.0;
        Some(this)
    }

    fn slice(&self, begin: usize, bytes: usize) -> &[u8] {
        assert!(begin + bytes <= self.bytes, "inside the file");
        // SAFETY: the range is in the mapping, which lives as long as self, and no process writes the file.
        unsafe { std::slice::from_raw_parts(self.start.add(begin), bytes) }
    }

    /// The byte range of the pages of some rows' weights.
    fn pages(&self, first_row: usize, rows: usize) -> (usize, usize) {
        let begin = self.weights + first_row * ROW_BYTES;
        let end = (begin + rows * ROW_BYTES).next_multiple_of(PAGE).min(self.bytes.next_multiple_of(PAGE));
        (begin / PAGE * PAGE, end - begin / PAGE * PAGE)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no code reads it afterwards.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// Adjacent rows of one group.
#[derive(Clone, Copy, Debug)]
pub struct RowRun {
    /// The index of the group.
    pub file: usize,
    /// The first row's index in the group.
    pub first: usize,
    /// The number of rows.
    pub rows: usize,
}

/// The rows of a checkpoint in its mapped files, and an index of their addresses.
#[derive(Debug)]
pub struct PlainServing {
    files: Vec<Mapped>,
    index: PlainIndex,
}

impl PlainServing {
    /// Maps the files in a folder, which are those of one table of a full checkpoint.
    ///
    /// # Panics
    /// Panics when a file is not one of a checkpoint.
    pub fn open(folder: &Path) -> Self {
        let entries = std::fs::read_dir(folder).expect("a folder of rows");
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a folder of rows").path()).collect();
        paths.sort_unstable();
        let groups = paths.iter().flat_map(|path| (0..).map_while(move |group| Mapped::open(path, group)));
        let files: Vec<Mapped> = groups.collect();
        let mut index = PlainIndex::with_room(files.iter().map(|file| file.ids.len()).sum());
        for file in &files {
            let first = file.start.wrapping_add(file.weights);
            for (row, id) in file.ids.iter().enumerate() {
                index.put(*id, first.wrapping_add(row * ROW_BYTES).expose_provenance() as u64);
            }
        }
        Self { files, index }
    }

    /// Maps the pages of all rows into this process, so that no loop waits for one.
    ///
    /// # Panics
    /// Panics when a file cannot be read.
    pub fn bring_all_in(&self) {
        for file in 0..self.files.len() {
            self.bring_in(RowRun { file, first: 0, rows: self.files[file].ids.len() });
        }
    }

    /// Maps the pages of some rows into this process.
    ///
    /// # Panics
    /// Panics when the file cannot be read.
    pub fn bring_in(&self, run: RowRun) {
        let file = &self.files[run.file];
        let (begin, bytes) = file.pages(run.first, run.rows);
        let start = file.start.wrapping_add(begin).cast();
        // The first advice reads them all together. Without it each page would be waited for separately.
        for advice in [libc::MADV_WILLNEED, libc::MADV_POPULATE_READ] {
            // SAFETY: these pages are in the mapping, and are only read.
            assert_eq!(unsafe { libc::madvise(start, bytes, advice) }, 0, "pages of the file");
        }
    }

    /// All rows, as runs of `rows` of one file. The rest of a file after its last complete run is skipped.
    pub fn runs(&self, rows: usize) -> Vec<RowRun> {
        let of_file = |(file, mapped): (usize, &Mapped)| {
            (0..mapped.ids.len() / rows).map(move |number| RowRun { file, first: number * rows, rows })
        };
        self.files.iter().enumerate().flat_map(of_file).collect()
    }

    /// The ids of some rows.
    pub fn ids(&self, run: RowRun) -> &[Id] {
        &self.files[run.file].ids[run.first..][..run.rows]
    }

    /// Number of these rows with a page that is not in the page cache.
    ///
    /// # Panics
    /// Panics if the OS does not report it.
    pub fn not_cached(&self, rows: &[RowRun]) -> usize {
        let is_out = |run: &&RowRun| {
            let file = &self.files[run.file];
            let (begin, bytes) = file.pages(run.first, run.rows);
            let mut pages = vec![0_u8; bytes / PAGE];
            let start = file.start.wrapping_add(begin).cast();
            // SAFETY: these pages are in the mapping, and there is a byte for each of them.
            assert_eq!(unsafe { libc::mincore(start, bytes, pages.as_mut_ptr()) }, 0, "mincore");
            pages.iter().any(|page| page & 1 == 0)
        };
        rows.iter().filter(is_out).count()
    }

    /// Writes the row of each id to `out`, which is `[ids, DIM]`, and zeros for an id without a row; `found` is true
    /// for ids with a row. The ids are processed in blocks: the entries of the next block are prefetched, then the rows
    /// of this one, before any of them is copied.
    ///
    /// # Panics
    /// Panics if an output is too short.
    pub fn lookup(&self, ids: &[Id], out: &mut [f32], found: &mut [bool]) {
        let places = out.as_chunks_mut::<DIM>().0;
        assert!(places.len() >= ids.len() && found.len() >= ids.len(), "a place for each row");
        let mut addresses = [0_usize; BLOCK];
        ids.iter().take(BLOCK).for_each(|id| self.index.prefetch(*id));
        let outputs = places.chunks_mut(BLOCK).zip(found.chunks_mut(BLOCK));
        for (number, (ids_of_block, (places, found))) in ids.chunks(BLOCK).zip(outputs).enumerate() {
            let next = ids.iter().skip((number + 1) * BLOCK).take(BLOCK);
            next.for_each(|id| self.index.prefetch(*id));
            for (id, address) in ids_of_block.iter().zip(&mut addresses) {
                *address = self.index.value(*id) as usize;
                let row = std::ptr::with_exposed_provenance::<f32>(*address);
                (0..DIM / LINE_FLOATS).for_each(|line| prefetch(row.wrapping_add(line * LINE_FLOATS)));
            }
            for ((address, place), found) in addresses[..ids_of_block.len()].iter().zip(places).zip(found) {
                *found = *address != 0;
                if *address == 0 {
                    place.fill(0.0);
                } else {
                    let row = std::ptr::with_exposed_provenance::<[f32; DIM]>(*address);
                    // SAFETY: the index has addresses of whole rows in mappings that live as long as self and do not
                    // overlap `out`.
                    unsafe { std::ptr::copy_nonoverlapping(row, place, 1) };
                }
            }
        }
    }

    /// Creates a ring that reads rows of these files through the page cache, `depth` at a time.
    ///
    /// # Panics
    /// Panics if the OS rejects `io_uring`.
    pub fn reads(&self, depth: u32) -> BufferedReads {
        let ring = IoUring::builder().setup_coop_taskrun().build(depth);
        let ring = ring.or_else(|_| IoUring::new(depth)).expect("io_uring is permitted");
        let descriptors: Vec<i32> = self.files.iter().map(|file| file.file.as_raw_fd()).collect();
        ring.submitter().register_files(&descriptors).expect("files can be registered");
        BufferedReads { ring, depth: depth as usize }
    }

    /// Looks up `ids`, whose pages are in memory, while `reads` reads the `cold` rows, each into its own memory.
    ///
    /// # Panics
    /// Panics when a read fails or is short, and if an output is too short.
    pub fn lookup_and_read(
        &self,
        ids: &[Id],
        (out, found): (&mut [f32], &mut [bool]),
        reads: &mut BufferedReads,
        (cold, cold_out): (&[RowRun], &mut [f32]),
    ) {
        let cold_out = cold_out.as_chunks_mut::<DIM>().0;
        assert!(cold.len() <= reads.depth && cold.len() <= cold_out.len(), "a place for each row");
        for (run, place) in cold.iter().zip(cold_out) {
            let offset = self.files[run.file].weights + run.first * ROW_BYTES;
            let read = opcode::Read::new(types::Fixed(run.file as u32), place.as_mut_ptr().cast(), ROW_BYTES as u32)
                .offset(offset as u64);
            // SAFETY: the memory outlives the read, because every completion is awaited below, and no code reads it
            // before.
            unsafe { reads.ring.submission().push(&read.build()) }.expect("an entry a row");
        }
        reads.ring.submit().expect("io_uring_enter");
        self.lookup(ids, out, found);
        reads.ring.submit_and_wait(cold.len()).expect("io_uring_enter");
        let done = reads.ring.completion().inspect(|done| assert_eq!(done.result(), ROW_BYTES as i32, "a whole row"));
        assert_eq!(done.count(), cold.len(), "all reads are done");
    }
}

/// See [`PlainServing::reads`].
pub struct BufferedReads {
    ring: IoUring,
    depth: usize,
}
