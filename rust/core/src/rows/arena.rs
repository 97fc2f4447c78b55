//! A fixed-size arena of rows in anonymous memory, with an overflow area for batches that do not fit it.
#![allow(unsafe_code)]

use std::ops::Range;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::layout::{RowAddress, RowHeader, RowLayout, RowRef};
use crate::error::{Kind, Result};
use crate::runtime::mapping::{AnonymousMapping, page_bytes};
use crate::runtime::sync::lock;
use crate::types::CacheSlot;

/// Bytes of a cache line. Both parts of a mapping (vector parts, headers) start on one.
const LINE_BYTES: usize = 64;
/// Rows of overflow chunk 0. Chunk `k` has `FIRST_CHUNK_ROWS << k` rows.
const FIRST_CHUNK_ROWS: usize = 1024;
/// The number of chunks that covers every `u32` slot.
const CHUNKS: usize = 23;

/// Memory for rows. Rows `0..capacity` are in one mapping (in huge pages if the OS provides them), and rows from
/// `capacity` on in overflow chunks. A row that was never written uses no memory and reads as zeros. The arena only
/// returns addresses: its users synchronize access to rows by pins and locks.
#[derive(Debug)]
pub struct RowArena {
    vectors: *mut u8,
    headers: *mut RowHeader,
    stride: usize,
    capacity: u32,
    /// The starts of the overflow chunks; null for chunks that are not reserved. Written only under `growth`.
    chunks: [AtomicPtr<u8>; CHUNKS],
    /// Held to add or remove chunks.
    growth: Mutex<()>,
    mapping: AnonymousMapping,
}

// SAFETY: the arena owns its mappings until it is dropped, returns addresses in them, and dereferences none.
unsafe impl Send for RowArena {}
// SAFETY: every shared method computes addresses, reads atomics, or changes chunks under the lock `growth`.
unsafe impl Sync for RowArena {}

impl RowArena {
    /// Creates an arena of `capacity` rows. Returns `Kind::Memory` if the mapping fails.
    pub fn new(layout: RowLayout, capacity: u32) -> Result<Self> {
        let stride = layout.stride_bytes();
        let vector_bytes = part_bytes(stride, capacity as usize);
        let mapping = AnonymousMapping::new(vector_bytes + part_bytes(size_of::<RowHeader>(), capacity as usize))?;
        let vectors = mapping.start();
        Ok(Self {
            vectors,
            headers: vectors.wrapping_add(vector_bytes).cast(),
            stride,
            capacity,
            chunks: [const { AtomicPtr::new(ptr::null_mut()) }; CHUNKS],
            growth: Mutex::new(()),
            mapping,
        })
    }

    /// Creates an arena of `most` rows for a table that initially fits `now` of them. If the OS cannot map that much,
    /// the arena has fewer rows, and at least `now`. If `now` is less than `most`, its first bytes are in small pages,
    /// so that a table that stays small does not use an entire huge page.
    pub fn growing(layout: RowLayout, now: u32, most: u32) -> Result<Self> {
        let mut capacity = most;
        loop {
            match Self::new(layout, capacity) {
                Err(error) if error.kind() == Kind::Memory && capacity > now => capacity = now.max(capacity / 2),
                Ok(arena) if now < most => {
                    arena.mapping.keep_small(arena.vectors.addr());
                    arena.mapping.keep_small(arena.headers.addr());
                    return Ok(arena);
                }
                made => return made,
            }
        }
    }

    /// The number of rows in the main mapping.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Makes overflow slots `capacity..capacity + rows` valid. They stay valid, at the same addresses, until they are
    /// shrunk. Other slots may be in use concurrently. Returns `Kind::Memory` if the mapping fails, and
    /// `Kind::Capacity` if the slots would not fit `u32`.
    pub fn reserve_overflow(&self, rows: u32) -> Result<()> {
        // The slot number u32::MAX is NO_SLOT.
        if u64::from(self.capacity) + u64::from(rows) > u64::from(u32::MAX) {
            return Err(Kind::Capacity.error(format!(
                "{} slots and {rows} overflow slots are more than the 2^32 - 1 slot numbers: use smaller batches",
                self.capacity
            )));
        }
        if rows == 0 {
            return Ok(());
        }
        let _growing = lock(&self.growth);
        for chunk in 0..=chunk_of(rows as usize - 1).0 {
            if self.chunks[chunk].load(Ordering::Relaxed).is_null() {
                let mapping = AnonymousMapping::new(self.chunk_bytes(chunk))?;
                // Release pairs with the Acquire in `overflow_row`: a thread that received a slot of this chunk from
                // another thread sees its address.
                self.chunks[chunk].store(mapping.start(), Ordering::Release);
                std::mem::forget(mapping);
            }
        }
        Ok(())
    }

    /// Unmaps the overflow chunks past `capacity + rows`; all of them if `rows == 0`. None of their slots may be in
    /// use.
    pub fn shrink_overflow(&self, rows: u32) {
        let first = if rows == 0 { 0 } else { chunk_of(rows as usize - 1).0 + 1 };
        // This is called after every row that is removed, and there is rarely anything to unmap.
        if self.chunks.get(first).is_none_or(|chunk| chunk.load(Ordering::Relaxed).is_null()) {
            return;
        }
        let _growing = lock(&self.growth);
        self.unmap_chunks(first);
    }

    fn unmap_chunks(&self, first: usize) {
        for chunk in first..CHUNKS {
            let start = self.chunks[chunk].swap(ptr::null_mut(), Ordering::AcqRel);
            if !start.is_null() {
                // SAFETY: `reserve_overflow` created and forgot a mapping of this size, and the swap returned its
                // address to this call only.
                drop(unsafe { AnonymousMapping::from_start(start, self.chunk_bytes(chunk)) });
            }
        }
    }

    /// Returns the pages that contain only rows of `slots` to the OS. Those rows lose their contents. Overflow slots
    /// are kept.
    pub fn discard(&self, slots: Range<u32>) {
        let (start, end) = (slots.start as usize, slots.end.min(self.capacity) as usize);
        if start >= end {
            return;
        }
        let headers: *mut u8 = self.headers.cast();
        for (base, width) in [(self.vectors, self.stride), (headers, size_of::<RowHeader>())] {
            let page = page_bytes();
            let from = (base.addr() + start * width).next_multiple_of(page);
            let to = (base.addr() + end * width) / page * page;
            if from < to {
                // SAFETY: the pages are within the arena's own mapping, and contain only rows that the caller discards.
                // If this fails (for locked memory) the pages stay resident.
                unsafe { libc::madvise(base.with_addr(from).cast(), to - from, libc::MADV_DONTNEED) };
            }
        }
    }

    /// Bytes of a row in the arena: its stride and its header.
    pub fn bytes_per_row(layout: &RowLayout) -> usize {
        layout.stride_bytes() + size_of::<RowHeader>()
    }

    /// The address of a row. It is valid while the arena exists and, for an overflow slot, while that is reserved.
    #[allow(clippy::inline_always)] // The innermost loop of every kernel.
    #[inline(always)]
    pub fn row(&self, slot: u32) -> RowAddress {
        if slot < self.capacity {
            RowAddress {
                header: self.headers.wrapping_add(slot as usize),
                vector: self.vectors.wrapping_add(slot as usize * self.stride).cast(),
            }
        } else {
            self.overflow_row((slot - self.capacity) as usize)
        }
    }

    #[cold]
    fn overflow_row(&self, row: usize) -> RowAddress {
        let (chunk, row) = chunk_of(row);
        let start = self.chunks[chunk].load(Ordering::Acquire);
        debug_assert!(!start.is_null(), "overflow row {row} of chunk {chunk} is not reserved");
        let headers = start.wrapping_add(part_bytes(self.stride, FIRST_CHUNK_ROWS << chunk));
        #[allow(clippy::cast_ptr_alignment)] // A chunk and its parts start on cache lines.
        RowAddress {
            header: headers.cast::<RowHeader>().wrapping_add(row),
            vector: start.wrapping_add(row * self.stride).cast(),
        }
    }

    fn chunk_bytes(&self, chunk: usize) -> usize {
        let rows = FIRST_CHUNK_ROWS << chunk;
        part_bytes(self.stride, rows) + part_bytes(size_of::<RowHeader>(), rows)
    }
}

impl Drop for RowArena {
    fn drop(&mut self) {
        // This does not take the lock. No other thread uses the arena at this point, and in a forked child another
        // thread may hold the lock indefinitely.
        self.unmap_chunks(0);
        debug_assert_eq!(self.vectors, self.mapping.start());
    }
}

/// Rows, by index. They are in slots of an arena, or contiguous. A list is two slices, for any size of rows.
#[derive(Clone, Copy, Debug)]
pub struct RowList<'a> {
    rows: ListedRows<'a>,
    floats: usize,
}

#[derive(Clone, Copy, Debug)]
enum ListedRows<'a> {
    Slots(&'a RowArena, &'a [CacheSlot]),
    Block(&'a [RowHeader], &'a [f32]),
}

impl<'a> RowList<'a> {
    /// Creates a list of rows with headers `[n]` and vector parts `[n, floats]`.
    ///
    /// # Panics
    /// Panics if `vectors` has another length.
    pub fn block(headers: &'a [RowHeader], vectors: &'a [f32], floats: usize) -> Self {
        assert_eq!(vectors.len(), headers.len() * floats, "vectors must have floats for each header");
        Self { rows: ListedRows::Block(headers, vectors), floats }
    }

    /// Creates a list of rows in the slots of an arena, with vector parts of `floats` floats.
    ///
    /// # Safety
    /// The slots are valid in the arena, whose rows have vector parts of `floats` floats, and no thread writes these
    /// rows during `'a`.
    pub(crate) unsafe fn in_slots(arena: &'a RowArena, slots: &'a [CacheSlot], floats: usize) -> Self {
        Self { rows: ListedRows::Slots(arena, slots), floats }
    }

    /// The number of rows.
    #[inline]
    pub fn len(&self) -> usize {
        match self.rows {
            ListedRows::Slots(_, slots) => slots.len(),
            ListedRows::Block(headers, _) => headers.len(),
        }
    }

    /// True if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of floats of a row's vector part.
    #[inline]
    pub fn floats(&self) -> usize {
        self.floats
    }

    /// The row at an index.
    ///
    /// # Panics
    /// Panics if there is no such row.
    #[allow(clippy::inline_always)] // Called for each row.
    #[inline(always)]
    pub fn get(&self, row: usize) -> RowRef<'a> {
        match self.rows {
            ListedRows::Slots(arena, slots) => {
                let row = arena.row(slots[row]);
                // SAFETY: the caller of `in_slots` guaranteed that the slot is valid and that no thread writes the row
                // during `'a`.
                unsafe { RowRef { header: &*row.header, vector: std::slice::from_raw_parts(row.vector, self.floats) } }
            }
            ListedRows::Block(headers, vectors) => {
                RowRef { header: &headers[row], vector: &vectors[row * self.floats..][..self.floats] }
            }
        }
    }

    /// The rows of a range of indexes.
    ///
    /// # Panics
    /// Panics if some of them do not exist.
    #[must_use]
    pub fn range(&self, rows: Range<usize>) -> Self {
        let rows = match self.rows {
            ListedRows::Slots(arena, slots) => ListedRows::Slots(arena, &slots[rows]),
            ListedRows::Block(headers, vectors) => {
                let floats = rows.start * self.floats..rows.end * self.floats;
                ListedRows::Block(&headers[rows], &vectors[floats])
            }
        };
        Self { rows, ..*self }
    }

    /// All rows, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = RowRef<'a>> + use<'a> {
        let all = *self;
        (0..all.len()).map(move |row| all.get(row))
    }
}

/// The chunk of an overflow row, and the row's index in it. Chunk `k` contains rows `FIRST_CHUNK_ROWS × (2^k − 1)` to
/// `FIRST_CHUNK_ROWS × (2^(k+1) − 1)`.
fn chunk_of(row: usize) -> (usize, usize) {
    let chunk = (row / FIRST_CHUNK_ROWS + 1).ilog2() as usize;
    (chunk, row - FIRST_CHUNK_ROWS * ((1 << chunk) - 1))
}

/// Bytes of `rows` elements of `width` bytes, rounded up to whole cache lines.
fn part_bytes(width: usize, rows: usize) -> usize {
    (width * rows).next_multiple_of(LINE_BYTES)
}

#[cfg(test)]
mod tests;
