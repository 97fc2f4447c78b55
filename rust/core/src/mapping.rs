//! Memory straight from the system.
#![allow(unsafe_code)]

use std::ptr;

use crate::error::{Error, Result};

/// Mappings from this size on ask for huge pages; a smaller one would mostly round its memory up.
const HUGE_PAGES_FROM_BYTES: usize = 8 << 20;
/// Huge pages need this alignment.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Bytes of a page of the system.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: sysconf only reads a constant of the system.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// An anonymous private mapping, unmapped on drop. Lazily backed by zero pages, never counted against the commit limit where
/// the system permits that, in huge pages where it is large.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: *mut u8,
    bytes: usize,
}

impl Mapping {
    /// `bytes` zeros, or more. `Kind::Memory` where the system refuses.
    pub(crate) fn new(bytes: usize) -> Result<Self> {
        Self::map(bytes, bytes >= HUGE_PAGES_FROM_BYTES)
    }

    /// As [`Mapping::new`], in huge pages whatever its size.
    pub(crate) fn huge(bytes: usize) -> Result<Self> {
        Self::map(bytes, true)
    }

    fn map(bytes: usize, huge: bool) -> Result<Self> {
        let bytes = Self::rounded(bytes);
        // With room to move the start onto a huge page; what is before and after it is unmapped again.
        let asked = if huge { bytes + HUGE_PAGE_BYTES } else { bytes };
        // SAFETY: a fresh anonymous mapping at an address of the system's choice.
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
        // SAFETY: both ranges are whole pages of the mapping just made that nobody has the address of. The advice may fail on
        // systems without huge pages, which only costs speed.
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

    /// Bytes of it that are in memory now.
    #[cfg(test)]
    pub(crate) fn resident_bytes(&self) -> usize {
        let mut pages = vec![0_u8; self.bytes / page_bytes()];
        // SAFETY: the range is this mapping, and there is a byte for each of its pages.
        let asked = unsafe { libc::mincore(self.start.cast(), self.bytes, pages.as_mut_ptr().cast()) };
        assert_eq!(asked, 0, "{}", std::io::Error::last_os_error());
        pages.iter().filter(|page| **page & 1 == 1).count() * page_bytes()
    }

    /// Its first byte, at the start of a page.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    /// The mapping that [`Mapping::new`] made for `bytes` at `start`.
    pub(crate) fn from_start(start: *mut u8, bytes: usize) -> Self {
        Self { start, bytes: Self::rounded(bytes) }
    }

    fn rounded(bytes: usize) -> usize {
        bytes.max(1).next_multiple_of(page_bytes())
    }
}

// SAFETY: the mapping owns its memory and never reads or writes it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping's own, and its owner gave up every address in it.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}
