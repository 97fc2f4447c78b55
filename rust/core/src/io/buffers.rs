//! Buffers aligned for `O_DIRECT`.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use crate::error::Result;
use crate::runtime::mapping::AnonymousMapping;
use crate::runtime::memory;
use crate::runtime::sync::lock;

/// The alignment of direct I/O in bytes, for offsets, lengths and memory addresses.
pub const ALIGNMENT: usize = 4096;

/// Buffers of at least this many bytes are mapped individually. The allocator's heap would request more than the block
/// to align it; aligned blocks of changing sizes would leave holes that the next one does not fit, and the heap would
/// grow to several times their size.
const MAPPED_FROM_BYTES: usize = 1 << 20;

/// A byte buffer that starts at a multiple of [`ALIGNMENT`].
#[derive(Debug)]
pub struct AlignedBuf {
    start: NonNull<u8>,
    len: usize,
    /// The memory, if it was mapped. `None` if it belongs to the allocator.
    mapping: Option<AnonymousMapping>,
}

impl AlignedBuf {
    /// Allocates `len` zero bytes. If the allocation fails, retries it after releasing the [`memory`] reserve, and
    /// aborts the process only if that fails too.
    pub fn zeroed(len: usize) -> Self {
        memory::or_from_reserve(|| Self::try_zeroed(len)).unwrap_or_else(|_| handle_alloc_error(Self::layout(len)))
    }

    /// Allocates `len` zero bytes; `Kind::Memory` if the allocation fails.
    pub fn try_zeroed(len: usize) -> Result<Self> {
        let memory_error = || memory::refused_error("make a buffer", len);
        let mapping =
            if len < MAPPED_FROM_BYTES { None } else { Some(AnonymousMapping::new(len).map_err(|_| memory_error())?) };
        let start = match &mapping {
            Some(mapping) => mapping.start(),
            // SAFETY: the size of the layout is at least ALIGNMENT, so it is not zero.
            None => unsafe { alloc_zeroed(Self::layout(len)) },
        };
        NonNull::new(start).map(|start| Self { start, len, mapping }).ok_or_else(memory_error)
    }

    /// Allocates `len` zero bytes, in huge pages if available, so that long ranges are physically contiguous for
    /// devices. `Kind::Memory` if the allocation fails.
    pub fn try_contiguous(len: usize) -> Result<Self> {
        let memory_error = || memory::refused_error("make a buffer", len);
        let mapping = AnonymousMapping::huge(len).map_err(|_| memory_error())?;
        let start = NonNull::new(mapping.start()).ok_or_else(memory_error)?;
        Ok(Self { start, len, mapping: Some(mapping) })
    }

    /// Returns a pointer to the first byte. This does not borrow the bytes, because the kernel may be writing to some
    /// of them.
    pub(super) fn start_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len.max(1).next_multiple_of(ALIGNMENT), ALIGNMENT)
            .expect("a buffer fits the address space")
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.mapping.is_none() {
            // SAFETY: without a mapping, the memory was allocated in `try_zeroed` with this layout.
            unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len)) }
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `start` points to `len` initialized bytes, which live as long as self, and the borrow of self forbids
        // writes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `start` points to `len` initialized bytes, which live as long as self, and self is borrowed
        // exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

// SAFETY: the buffer owns its memory, which is bound to no thread.
unsafe impl Send for AlignedBuf {}
// SAFETY: a shared buffer is only read.
unsafe impl Sync for AlignedBuf {}

/// A pool of buffers of one size, which are reused instead of being mapped and zeroed each time.
#[derive(Debug)]
pub struct BufPool {
    buf_len: usize,
    kept: usize,
    free: Mutex<Vec<AlignedBuf>>,
}

/// A buffer of a [`BufPool`]. It contains the bytes of its last user. Dropping it returns it to the pool.
#[derive(Debug)]
pub struct PooledBuf {
    /// `None` only while it is dropped.
    buf: Option<AlignedBuf>,
    pool: Arc<BufPool>,
}

impl BufPool {
    /// Creates a pool of buffers of `buf_len` bytes, which are allocated on demand. It keeps at most `kept` unused
    /// buffers.
    pub fn new(buf_len: usize, kept: usize) -> Self {
        Self { buf_len, kept, free: Mutex::default() }
    }

    /// Bytes of each buffer.
    pub fn buf_len(&self) -> usize {
        self.buf_len
    }

    /// Takes a buffer. This never waits. `Kind::Memory` if the allocation of a new one fails, even after releasing the
    /// [`memory`] reserve.
    pub fn take(self: &Arc<Self>) -> Result<PooledBuf> {
        memory::or_from_reserve(|| self.take_at_least(self.buf_len))
    }

    /// Takes a buffer of the pool if that has `len` bytes, else a new one of `len` bytes that the pool will not keep.
    /// `Kind::Memory` if the allocation of a new one fails.
    pub fn take_at_least(self: &Arc<Self>, len: usize) -> Result<PooledBuf> {
        let free = if len <= self.buf_len { lock(&self.free).pop() } else { None };
        let buf = match free {
            Some(buf) => buf,
            None => AlignedBuf::try_zeroed(len.max(self.buf_len))?,
        };
        Ok(PooledBuf { buf: Some(buf), pool: self.clone() })
    }
}

impl Drop for PooledBuf {
    fn drop(&mut self) {
        let Some(buf) = self.buf.take() else { return };
        let mut free = lock(&self.pool.free);
        if buf.len() == self.pool.buf_len && free.len() < self.pool.kept {
            free.push(buf);
        }
    }
}

impl Deref for PooledBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.buf.as_deref().unwrap_or_default()
    }
}

impl DerefMut for PooledBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buf.as_deref_mut().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
