//! Batches of reads through `io_uring`: one system call submits and completes many reads.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};

use super::disk::{BatchReader, DiskEngine, DiskFile, SectorRead, SectorReadStep};
use super::psync::read_serially;
use super::{ALIGNMENT, AlignedBuf, IoReadRequest, ReadSink};
use crate::error::{Error, Kind, Result};
use crate::runtime::memory;
use crate::runtime::sync::lock;

/// Reads in flight on one ring. A block device's queue usually has 256 entries, so two rings fill it.
const DEPTH: usize = 128;
/// Rings of an engine, so that several tables read at the same time.
const RINGS: usize = 4;
/// Number of completions to wait for in one system call. It is small enough to keep the device's queue full.
const MIN_COMPLETIONS: usize = 16;
/// Bytes of a ring's memory for reads in flight: 32 KiB for each of [`DEPTH`] reads.
const ARENA_BYTES: usize = 4 << 20;
/// A read whose sectors have at most this many bytes uses the ring's memory. A larger one gets its own buffer.
const LARGEST_PIECE: usize = 256 << 10;
/// Maximum total bytes of a batch's large reads in flight. A single large read may exceed it.
const LARGE_BYTES: usize = 16 << 20;
/// Maximum bytes of large buffers that a ring keeps for the next batch.
const KEPT_BYTES: usize = 4 << 20;

/// The engine that reads batches through `io_uring`, and does everything else by plain system calls.
pub type UringEngine = DiskEngine<UringReader>;

impl UringEngine {
    /// Creates an engine that requests `O_DIRECT` if `direct` is true. `Kind::Unsupported` if `io_uring` or a read
    /// through it is not permitted.
    pub fn new(direct: bool) -> Result<Self> {
        Ok(Self::with_reader(UringReader::new()?, direct))
    }
}

/// Reads batches through one of a few rings.
#[derive(Debug)]
pub struct UringReader {
    /// Each ring is created on first use. A ring that failed is dropped, and created again.
    rings: [Mutex<Option<UringRing>>; RINGS],
    next_ring: AtomicUsize,
    /// True if a ring has failed, which is logged once.
    has_failed: AtomicBool,
}

/// One ring, and the memory that its requests read into.
struct UringRing {
    queues: IoUring,
    arena: ReadArena,
    kept_buffers: Vec<AlignedBuf>,
}

/// A request in flight.
struct InFlightRead<'a> {
    position: usize,
    file: &'a DiskFile,
    cover: SectorRead,
    memory: InFlightMemory,
    /// Time of submission.
    submitted_at: Instant,
}

/// The memory that a request reads into.
enum InFlightMemory {
    /// The ring's memory from this byte on.
    Piece(usize),
    Large(AlignedBuf),
}

opaque_debug!(UringRing, self);

impl UringRing {
    fn new() -> io::Result<Self> {
        let entries = DEPTH as u32;
        let queues = IoUring::builder()
            .dontfork()
            .setup_coop_taskrun()
            .build(entries)
            // Kernels before 5.19 have no cooperative task running.
            .or_else(|_| IoUring::builder().dontfork().build(entries))?;
        let arena = ReadArena::new(ARENA_BYTES).map_err(io::Error::other)?;
        Ok(Self { queues, arena, kept_buffers: Vec::new() })
    }

    /// Returns a buffer of at least `bytes`. `Kind::Memory` if the allocation of a new one fails, even after releasing
    /// the memory reserve.
    fn large_buffer(&mut self, bytes: usize) -> Result<AlignedBuf> {
        match self.kept_buffers.iter().position(|buffer| buffer.len() >= bytes) {
            Some(found) => Ok(self.kept_buffers.swap_remove(found)),
            None => memory::or_from_reserve(|| AlignedBuf::try_zeroed(bytes.next_power_of_two())),
        }
    }

    fn keep_buffer(&mut self, buffer: AlignedBuf) {
        let kept: usize = self.kept_buffers.iter().map(|spare| spare.len()).sum();
        if kept + buffer.len() <= KEPT_BYTES {
            self.kept_buffers.push(buffer);
        }
    }
}

/// A batch on one ring. Dropping it waits for the reads in flight, because the kernel writes to the ring's memory until
/// they complete. (Reads are in flight at the drop if the sink panics.)
struct UringBatch<'a, 'r> {
    ring: &'r mut UringRing,
    flights: Vec<Option<InFlightRead<'a>>>,
    free: Vec<u32>,
    /// Pushed requests whose completion has not been taken.
    pending: usize,
    process: u32,
    large_bytes: usize,
    /// Completions taken from the ring: slot and result.
    taken: Vec<(u32, i32)>,
    /// Time at the end of the last system call. The clock is read once per call, because a read costs little more than
    /// that.
    now: Instant,
}

impl<'a, 'r> UringBatch<'a, 'r> {
    fn new(ring: &'r mut UringRing, reads: usize) -> Self {
        let depth = reads.min(DEPTH) as u32;
        // After a batch whose sink panicked, pieces are still marked as taken. None of them is in flight.
        ring.arena.clear();
        Self {
            ring,
            flights: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            pending: 0,
            process: std::process::id(),
            large_bytes: 0,
            taken: Vec::with_capacity(DEPTH),
            now: Instant::now(),
        }
    }

    /// The memory that the sectors of a flight are read into.
    fn memory(ring: &UringRing, flight: &InFlightRead<'_>) -> *mut u8 {
        match &flight.memory {
            InFlightMemory::Piece(start) => ring.arena.ptr_at(*start),
            InFlightMemory::Large(buffer) => buffer.start_ptr(),
        }
    }

    /// Adds the unread part of a flight to the submission queue.
    fn push(&mut self, slot: u32) {
        let Some(flight) = &mut self.flights[slot as usize] else { return };
        let memory = Self::memory(self.ring, flight).wrapping_add(flight.cover.bytes_read);
        let bytes = (flight.cover.span - flight.cover.bytes_read).min(flight.file.call_bytes());
        let entry = opcode::Read::new(types::Fd(flight.file.as_fd().as_raw_fd()), memory, bytes as u32)
            .offset(flight.cover.start + flight.cover.bytes_read as u64)
            .build()
            .user_data(u64::from(slot));
        // SAFETY: `memory` has space for `bytes`. It belongs to the ring or to this flight and stays there until the
        // completion, because the drop of `UringBatch` waits for that. The descriptor stays open because the batch's
        // `IoReadRequest`, which outlives the `UringBatch`, owns the file.
        let pushed = unsafe { self.ring.queues.submission().push(&entry) };
        debug_assert!(pushed.is_ok(), "the queue has an entry a slot");
        self.pending += 1;
    }

    /// Submits the queue, and waits for at least `want` completions. After an error the ring is unusable.
    fn enter(&mut self, want: usize) -> io::Result<()> {
        loop {
            let Err(error) = self.ring.queues.submit_and_wait(want) else { return Ok(()) };
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // The kernel is short of memory, or it needs completions to be taken first.
                Some(libc::EAGAIN | libc::EBUSY) => {
                    if !self.ring.queues.completion().is_empty() {
                        return Ok(());
                    }
                    std::thread::yield_now();
                }
                _ => return Err(error),
            }
        }
    }

    /// Takes the completions that have arrived.
    fn take_completions(&mut self) {
        self.taken.clear();
        self.taken.extend(self.ring.queues.completion().map(|done| (done.user_data() as u32, done.result())));
        self.pending -= self.taken.len();
    }

    /// Starts reads until the slots or the ring's memory are exhausted, or large buffers have too many bytes.
    fn fill(&mut self, reads: &'a [IoReadRequest], next: &mut usize, sink: &mut ReadSink<'_>) {
        while let (Some(&slot), Some(read)) = (self.free.last(), reads.get(*next)) {
            let Some(file) =
                read.file.as_any().downcast_ref::<DiskFile>().filter(|file| file.is_opened_by(self.process))
            else {
                // A file of another engine is read separately. A file of the process that this one was forked from is
                // too; it returns an error.
                let mut data = vec![0; read.len];
                let done = read.file.read_at(read.offset, &mut data);
                sink(*next, done.map(|()| &data[..]), Duration::ZERO);
                *next += 1;
                continue;
            };
            if read.len == 0 {
                sink(*next, Ok(&[]), Duration::ZERO);
                *next += 1;
                continue;
            }
            let cover = SectorRead::new(read.offset, read.len, file.align());
            let memory = if cover.span > LARGEST_PIECE {
                if self.large_bytes > 0 && self.large_bytes + cover.span > LARGE_BYTES {
                    return;
                }
                let buffer = match self.ring.large_buffer(cover.span) {
                    Ok(buffer) => buffer,
                    // A large buffer that is in flight becomes available later.
                    Err(_) if self.large_bytes > 0 => return,
                    Err(refused) => {
                        sink(*next, Err(refused), Duration::ZERO);
                        *next += 1;
                        continue;
                    }
                };
                self.large_bytes += buffer.len();
                InFlightMemory::Large(buffer)
            } else {
                // While nothing is in flight there is space for at least one piece.
                let Some(start) = self.ring.arena.take(cover.span) else { return };
                InFlightMemory::Piece(start)
            };
            self.flights[slot as usize] =
                Some(InFlightRead { position: *next, file, cover, memory, submitted_at: self.now });
            self.free.pop();
            self.push(slot);
            *next += 1;
        }
    }

    /// Handles the completion, with `result`, of the flight in `slot`: continues reading, or passes the read to the
    /// sink.
    fn complete(&mut self, slot: u32, result: i32, sink: &mut ReadSink<'_>) {
        let Some(flight) = &mut self.flights[slot as usize] else { return };
        let step = match result {
            result if result >= 0 => flight.cover.advance(result as usize),
            result if result == -libc::EINTR || result == -libc::EAGAIN => SectorReadStep::More,
            _ => SectorReadStep::Short,
        };
        if step == SectorReadStep::More {
            self.push(slot);
            return;
        }
        let Some(flight) = self.flights[slot as usize].take() else { return };
        self.free.push(slot);
        let cover = &flight.cover;
        let outcome = if step == SectorReadStep::Done {
            let (skip, len) = (cover.skip, cover.len);
            let memory = Self::memory(self.ring, &flight).wrapping_add(skip).cast_const();
            // SAFETY: the kernel has written these bytes and completed the request. They are not written again until
            // this piece or buffer is reused, which happens after the sink has returned.
            Ok(unsafe { std::slice::from_raw_parts(memory, len) })
        } else if result < 0 {
            Err(Error::io("read", super::IoFile::path(flight.file), &io::Error::from_raw_os_error(-result)))
        } else {
            Err(flight.file.short_read_error(cover))
        };
        sink(flight.position, outcome, self.now - flight.submitted_at);
        match flight.memory {
            InFlightMemory::Piece(start) => self.ring.arena.give_back(start),
            InFlightMemory::Large(buffer) => {
                self.large_bytes -= buffer.len();
                self.ring.keep_buffer(buffer);
            }
        }
    }

    /// Passes every read of the batch to the sink. After an error some reads were skipped, and the ring is unusable.
    fn read_all(&mut self, reads: &'a [IoReadRequest], sink: &mut ReadSink<'_>) -> io::Result<()> {
        let mut next = 0;
        loop {
            self.fill(reads, &mut next, sink);
            if self.pending == 0 {
                // Reads are left over only if the ring's memory had to be leaked before.
                return if next == reads.len() { Ok(()) } else { Err(io::ErrorKind::OutOfMemory.into()) };
            }
            self.enter(self.pending.min(MIN_COMPLETIONS))?;
            self.now = Instant::now();
            self.take_completions();
            let mut taken = std::mem::take(&mut self.taken);
            for (slot, result) in taken.drain(..) {
                self.complete(slot, result, sink);
            }
            self.taken = taken;
        }
    }
}

impl Drop for UringBatch<'_, '_> {
    fn drop(&mut self) {
        while self.pending > 0 {
            if self.enter(self.pending).is_err() {
                // It is unknown when the kernel is done with this memory, so it is leaked.
                self.ring.arena.leak();
                std::mem::take(&mut self.flights)
                    .into_iter()
                    .flatten()
                    .for_each(|flight| std::mem::forget(flight.memory));
                return;
            }
            self.take_completions();
        }
    }
}

impl UringReader {
    fn new() -> Result<Self> {
        let refused = |e: &io::Error| {
            Kind::Unsupported.error(format!(
                "this system refuses io_uring ({e}): set EMBCACHE_IO=pread, or allow the io_uring system calls"
            ))
        };
        let mut ring = UringRing::new().map_err(|e| refused(&e))?;
        probe(&mut ring).map_err(|e| refused(&e))?;
        let rings = std::array::from_fn(|_| Mutex::new(None));
        *lock(&rings[0]) = Some(ring);
        Ok(Self { rings, next_ring: AtomicUsize::new(0), has_failed: AtomicBool::new(false) })
    }

    /// Calls `run` with an unused ring. If all are in use, waits for one of them, round-robin.
    fn with_ring<T>(&self, run: impl FnOnce(&mut Option<UringRing>) -> T) -> T {
        let first = self.next_ring.fetch_add(1, Ordering::Relaxed);
        for ahead in 0..RINGS {
            match self.rings[(first + ahead) % RINGS].try_lock() {
                Ok(mut ring) => return run(&mut ring),
                Err(TryLockError::Poisoned(poisoned)) => return run(&mut poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        run(&mut lock(&self.rings[first % RINGS]))
    }
}

/// Runs a read through the ring. A sandbox may permit creating a ring and reject using it.
fn probe(ring: &mut UringRing) -> io::Result<()> {
    let zeros = std::fs::File::open("/dev/zero")?;
    let entry = opcode::Read::new(types::Fd(zeros.as_raw_fd()), ring.arena.ptr_at(0), 8).build();
    // SAFETY: the memory and the descriptor live until the completion is taken below. (A read of /dev/zero completes as
    // it is submitted, so none is in flight after an error.)
    unsafe { ring.queues.submission().push(&entry) }.map_err(io::Error::other)?;
    while let Err(e) = ring.queues.submit_and_wait(1) {
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
    match ring.queues.completion().next().map(|done| done.result()) {
        Some(8) => Ok(()),
        Some(result) if result < 0 => Err(io::Error::from_raw_os_error(-result)),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

impl BatchReader for UringReader {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>) {
        self.with_ring(|slot| {
            // Completions arrive in any order. After a failure of the ring, each remaining read uses plain calls.
            let mut handed = vec![false; reads.len()];
            let mut marking = |position: usize, outcome: Result<&[u8]>, took: Duration| {
                handed[position] = true;
                sink(position, outcome, took);
            };
            let ran = match slot.as_mut() {
                Some(ring) => Ok(ring),
                None => UringRing::new().map(|made| slot.insert(made)),
            }
            .and_then(|ring| {
                let mut run = UringBatch::new(ring, reads.len());
                run.read_all(reads, &mut marking)
            });
            let Err(error) = ran else { return };
            if !self.has_failed.swap(true, Ordering::Relaxed) {
                tracing::warn!("reads go through pread as long as a ring of io_uring cannot be had or used: {error}");
            }
            // Creating or using the ring failed, for lack of memory or descriptors, or because of a sandbox. The
            // remaining reads use plain calls.
            *slot = None;
            read_serially(reads.iter().enumerate().filter(|(position, _)| !handed[*position]), sink);
        });
    }
}

/// A piece of the buffer that is in use, or that was released before an older one.
#[derive(Debug)]
struct ArenaPiece {
    start: usize,
    taken: bool,
}

/// A ring buffer whose pieces are allocated consecutively. Disks complete reads approximately in the order of their
/// submission, so pieces are released in about this order. Space becomes free when the oldest piece is released.
///
/// The buffer uses huge pages, because a read into physically contiguous memory is a single transfer for the device.
/// Such a read was measured to cost 0.9 µs per KiB, and 1.4 µs per KiB when scattered over pages of 4 KiB.
#[derive(Debug)]
struct ReadArena {
    memory: AlignedBuf,
    /// Byte at which the next piece starts, if there is space.
    head: usize,
    /// Pieces in the order of allocation, oldest first.
    pieces: VecDeque<ArenaPiece>,
}

impl ReadArena {
    /// Creates an arena of `bytes`, a multiple of the alignment. `Kind::Memory` if the allocation fails.
    fn new(bytes: usize) -> Result<Self> {
        Ok(Self { memory: AlignedBuf::try_contiguous(bytes)?, head: 0, pieces: VecDeque::new() })
    }

    /// Allocates a piece of at least `bytes`, and returns the aligned byte at which it starts. `None` while there is no
    /// space.
    fn take(&mut self, bytes: usize) -> Option<usize> {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        let whole = self.memory.len();
        let start = match self.pieces.front() {
            None => (bytes <= whole).then_some(0),
            Some(oldest) if self.head > oldest.start => {
                let at_end = (bytes <= whole - self.head).then_some(self.head);
                at_end.or_else(|| (bytes <= oldest.start).then_some(0))
            }
            Some(oldest) => (bytes <= oldest.start - self.head).then_some(self.head),
        }?;
        self.head = start + bytes;
        self.pieces.push_back(ArenaPiece { start, taken: true });
        Some(start)
    }

    /// Releases the piece that starts at byte `start`.
    fn give_back(&mut self, start: usize) {
        if let Some(piece) = self.pieces.iter_mut().find(|piece| piece.start == start) {
            piece.taken = false;
        }
        while self.pieces.front().is_some_and(|oldest| !oldest.taken) {
            self.pieces.pop_front();
        }
    }

    /// Releases all pieces.
    fn clear(&mut self) {
        self.pieces.clear();
    }

    /// Returns a pointer to byte `start`. This does not borrow the bytes, because the kernel may be writing to some of
    /// them.
    fn ptr_at(&self, start: usize) -> *mut u8 {
        self.memory.start_ptr().wrapping_add(start)
    }

    /// Leaks the memory, because the kernel may still write to it.
    fn leak(&mut self) {
        std::mem::forget(std::mem::replace(&mut self.memory, AlignedBuf::zeroed(0)));
        self.clear();
    }
}

#[cfg(test)]
mod tests;
