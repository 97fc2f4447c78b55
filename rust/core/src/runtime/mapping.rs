//! Memory that is mapped directly from the OS.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr;

use crate::error::{Error, Result};

/// Mappings of at least this size use huge pages. A smaller one would mostly waste the end of its last page, unless it
/// ends at a huge page boundary.
const HUGE_PAGES_FROM_BYTES: usize = 8 << 20;
/// The size of a huge page in bytes, and its alignment.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The page size of the OS in bytes.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: sysconf reads a constant and touches no memory of this process.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Requests huge pages for unused memory, if it is large. The parts that do not fill a huge page stay in small pages.
pub(crate) fn ask_for_huge_pages<T>(unused: &mut [MaybeUninit<T>]) {
    let start = unused.as_mut_ptr();
    let before = start.addr().next_multiple_of(HUGE_PAGE_BYTES) - start.addr();
    let bytes = size_of_val(unused).saturating_sub(before) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if bytes >= HUGE_PAGES_FROM_BYTES {
        // SAFETY: the range is within the borrowed memory, and the advice does not change its contents. Without huge
        // pages it fails, which costs only speed.
        unsafe { libc::madvise(start.cast::<u8>().wrapping_add(before).cast(), bytes, libc::MADV_HUGEPAGE) };
    }
}

/// An anonymous private mapping, which is unmapped when it is dropped. Its pages read as zeros, use memory only after
/// they are written, and do not count against the commit limit if the OS permits that. A large mapping uses huge pages.
#[derive(Debug)]
pub(crate) struct AnonymousMapping {
    start: *mut u8,
    bytes: usize,
}

impl AnonymousMapping {
    /// Maps at least `bytes` zero bytes. Returns `Kind::Memory` if the allocation fails.
    pub(crate) fn new(bytes: usize) -> Result<Self> {
        Self::map(bytes, bytes >= HUGE_PAGES_FROM_BYTES || bytes > 0 && bytes.is_multiple_of(HUGE_PAGE_BYTES))
    }

    /// Like [`AnonymousMapping::new`], but uses huge pages for any size.
    pub(crate) fn huge(bytes: usize) -> Result<Self> {
        Self::map(bytes, true)
    }

    fn map(bytes: usize, huge: bool) -> Result<Self> {
        let bytes = Self::rounded(bytes);
        // The OS chooses the address. One additional huge page allows the start to move to a multiple of a huge page.
        // The memory before and after is unmapped again.
        let asked = if huge { bytes + HUGE_PAGE_BYTES } else { bytes };
        // SAFETY: this creates an anonymous mapping at an address that the OS chooses, so it replaces no other mapping.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                asked,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(Error::memory("map rows", asked, &std::io::Error::last_os_error()));
        }
        let at: *mut u8 = at.cast();
        if !huge {
            return Ok(Self { start: at, bytes });
        }
        let before = at.addr().next_multiple_of(HUGE_PAGE_BYTES) - at.addr();
        let start = at.wrapping_add(before);
        // SAFETY: both ranges are whole pages of the mapping created above, and no other code has their address.
        // Without huge pages the advice fails, which costs only speed.
        unsafe {
            if before > 0 {
                libc::munmap(at.cast(), before);
            }
            if HUGE_PAGE_BYTES > before {
                libc::munmap(start.wrapping_add(bytes).cast(), HUGE_PAGE_BYTES - before);
            }
            libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE);
        }
        Ok(Self { start, bytes })
    }

    /// Keeps [`HUGE_PAGES_FROM_BYTES`] in small pages, starting at the address `from`.
    pub(crate) fn keep_small(&self, from: usize) {
        let from = from / page_bytes() * page_bytes();
        let bytes = HUGE_PAGES_FROM_BYTES.min(self.start.addr() + self.bytes - from);
        // SAFETY: the range is whole pages of this mapping, and the advice does not change its contents. If it fails,
        // the pages may be huge.
        unsafe { libc::madvise(self.start.with_addr(from).cast(), bytes, libc::MADV_NOHUGEPAGE) };
    }

    /// Address of the first byte, which is at the start of a page.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Takes ownership of the mapping of `bytes` at `start`, and unmaps it when it is dropped.
    ///
    /// # Safety
    /// [`AnonymousMapping::new`] created a mapping of `bytes` at `start`, it was forgotten and not dropped, and no
    /// other code takes it back.
    pub(crate) unsafe fn from_start(start: *mut u8, bytes: usize) -> Self {
        Self { start, bytes: Self::rounded(bytes) }
    }

    fn rounded(bytes: usize) -> usize {
        bytes.max(1).next_multiple_of(page_bytes())
    }
}

// SAFETY: the mapping belongs to no thread, and this type never reads or writes it.
unsafe impl Send for AnonymousMapping {}
// SAFETY: a shared mapping only returns its address.
unsafe impl Sync for AnonymousMapping {}

impl Drop for AnonymousMapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the range, and the code that dropped it has discarded every address in it.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// A zero-initialized slice in its own mapping. Parts that were never written use no memory, and a large slice uses
/// huge pages.
#[derive(Debug)]
pub(crate) struct ZeroedSlice<T> {
    mapping: Option<AnonymousMapping>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: bytemuck::Zeroable + Copy> ZeroedSlice<T> {
    /// Allocates `len` zeros for `purpose` (in the infinitive). Returns `Kind::Memory` if the allocation fails.
    pub(crate) fn new(purpose: &str, len: usize) -> Result<Self> {
        const { assert!(align_of::<T>() <= 4096, "a mapping starts at a page") };
        let bytes = len.saturating_mul(size_of::<T>());
        let refused = || Error::memory(purpose, bytes, &io::Error::from_raw_os_error(libc::ENOMEM));
        if bytes > isize::MAX as usize {
            return Err(refused());
        }
        Ok(Self { mapping: Some(AnonymousMapping::new(bytes).map_err(|_| refused())?), len, elements: PhantomData })
    }
}

impl<T> Default for ZeroedSlice<T> {
    /// An empty slice without a mapping.
    fn default() -> Self {
        Self { mapping: None, len: 0, elements: PhantomData }
    }
}

impl<T> Deref for ZeroedSlice<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        let Some(mapping) = &self.mapping else { return &[] };
        // SAFETY: the mapping starts at a page, which aligns every `T`, and fits `len` of them. Only `new` creates a
        // slice with a mapping: it permits only types for which zeros are valid, which is the initial state of the
        // mapping, and only `deref_mut` writes to it.
        unsafe { std::slice::from_raw_parts(mapping.start().cast(), self.len) }
    }
}

impl<T> DerefMut for ZeroedSlice<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        let Some(mapping) = &self.mapping else { return &mut [] };
        // SAFETY: as for `deref`, the mapping contains `len` aligned and valid `T`. Only this slice owns it, which is
        // borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(mapping.start().cast(), self.len) }
    }
}

#[cfg(test)]
mod tests;
