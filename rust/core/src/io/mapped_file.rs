//! Read-only memory mappings of files.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::AlignedBuf;
use crate::error::{Error, Kind, Result};
use crate::runtime::mapping::page_bytes;

/// The bytes of a file at the time of the mapping. They stay readable after the file is unlinked, and no descriptor
/// stays open.
///
/// Accessing a page that is not in memory reads it from the disk, one page at a time. If that read fails, the process
/// is killed. So a reader of many pages calls [`FileMapping::prefetch`] for all of them and then
/// [`FileMapping::populate`] for each.
#[derive(Debug)]
pub struct FileMapping {
    path: PathBuf,
    content: MappedContent,
}

#[derive(Debug)]
enum MappedContent {
    /// Pages of the file itself, which all processes share.
    Shared(SharedPages),
    /// A copy, for an engine whose files cannot be mapped. The buffer may be longer than the file.
    Copy(AlignedBuf, usize),
}

/// A read-only mapping of a file, which is unmapped when it is dropped.
#[derive(Debug)]
struct SharedPages {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping is bound to no thread, and is never written.
unsafe impl Send for SharedPages {}
// SAFETY: the mapping is only read.
unsafe impl Sync for SharedPages {}

/// Number of files that this process has mapped.
static MAPPED_FILES: AtomicUsize = AtomicUsize::new(0);

/// Maximum number of mappings per process (`vm.max_map_count`). Unlimited if it cannot be read.
fn max_mappings() -> usize {
    static MAX_MAPPINGS: OnceLock<usize> = OnceLock::new();
    *MAX_MAPPINGS.get_or_init(|| {
        let content = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        content.and_then(|text| text.trim().parse().ok()).unwrap_or(usize::MAX)
    })
}

/// Returns `Capacity` if a process with `mapped` mapped files may map no more. A quarter of the `allowed` mappings is
/// reserved for the rest of the process, whose allocations would fail otherwise.
fn check_mapping_limit(path: &Path, mapped: usize, allowed: usize) -> Result<()> {
    if mapped < allowed / 4 * 3 {
        return Ok(());
    }
    Err(Kind::Capacity.error(format!(
        "{} is not mapped: this process has mapped {mapped} files, of the {allowed} mappings that the system allows it. Allow more, as by \
         `sysctl -w vm.max_map_count={}`, or have fewer files: make one checkpoint of each chain by `embcache compact`",
        path.display(),
        allowed.saturating_mul(4)
    )).at(path))
}

impl SharedPages {
    /// Creates the range of a mapping, and counts it.
    fn new(start: *mut u8, bytes: usize) -> Self {
        MAPPED_FILES.fetch_add(1, Ordering::Relaxed);
        Self { start, bytes }
    }
}

impl Drop for SharedPages {
    fn drop(&mut self) {
        MAPPED_FILES.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: this mapping owns the range, and no address in it is used after the drop.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// Access pattern of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MappingAccess {
    /// Scattered accesses: a read loads only its own page.
    Scattered,
    /// Repeated accesses to all of it: uses huge pages if the file system permits.
    Whole,
}

/// The kernel limits a prefetch to its readahead size, which is this by default.
const PREFETCH_BYTES: usize = 128 << 10;

/// Bytes of a huge page, and its alignment.
const HUGE_PAGE_BYTES: usize = 2 << 20;

impl FileMapping {
    /// Maps the first `bytes` bytes of an open file, which is never written again. `Kind::Storage` if the system call
    /// fails, `Kind::Capacity` if this process has mapped most of the allowed number of files.
    pub(super) fn of_file(path: &Path, file: &File, bytes: usize, access: MappingAccess) -> Result<Self> {
        if bytes == 0 {
            return Self::copied(path, 0, |_| Ok(()));
        }
        check_mapping_limit(path, MAPPED_FILES.load(Ordering::Relaxed), max_mappings())?;
        let failed = || Error::io("map", path, &std::io::Error::last_os_error());
        let reserved_bytes = bytes.next_multiple_of(page_bytes()) + HUGE_PAGE_BYTES;
        // Reserves a range for a mapping that starts at a multiple of a huge page. The file replaces a part of it.
        // SAFETY: this creates a mapping at an address that the kernel chooses, so it replaces no other.
        let at = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            libc::mmap(ptr::null_mut(), reserved_bytes, libc::PROT_NONE, flags, -1, 0)
        };
        if at == libc::MAP_FAILED {
            return Err(failed());
        }
        let mut reserved = SharedPages::new(at.cast(), reserved_bytes);
        let before = reserved.start.addr().next_multiple_of(HUGE_PAGE_BYTES) - reserved.start.addr();
        let start = reserved.start.wrapping_add(before);
        let fixed = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: the range is inside the mapping above, which is unused, and replaces it there.
        let mapped = unsafe { libc::mmap(start.cast(), bytes, libc::PROT_READ, fixed, file.as_raw_fd(), 0) };
        if mapped == libc::MAP_FAILED {
            return Err(failed());
        }
        (reserved.start, reserved.bytes) = (start, bytes);
        let pages = reserved;
        let after = start.wrapping_add(bytes.next_multiple_of(page_bytes()));
        let advice = if access == MappingAccess::Whole { libc::MADV_HUGEPAGE } else { libc::MADV_RANDOM };
        // SAFETY: the unmapped ranges are those before and after the file, whole pages that are unused. The advice
        // changes no contents; if it fails, only speed is lost.
        unsafe {
            if before > 0 {
                libc::munmap(at, before);
            }
            if before < HUGE_PAGE_BYTES {
                libc::munmap(after.cast(), HUGE_PAGE_BYTES - before);
            }
            libc::madvise(start.cast(), bytes, advice);
        }
        Ok(Self { path: path.to_owned(), content: MappedContent::Shared(pages) })
    }

    /// Creates a buffer of `bytes` bytes, which `read` fills from a file.
    pub(super) fn copied(path: &Path, bytes: usize, read: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Self> {
        let mut buffer = AlignedBuf::try_zeroed(bytes)?;
        read(&mut buffer[..bytes])?;
        Ok(Self { path: path.to_owned(), content: MappedContent::Copy(buffer, bytes) })
    }

    /// Replaces the path by the user's path.
    pub(super) fn renamed(self, path: &Path) -> Self {
        Self { path: path.to_owned(), ..self }
    }

    /// The path by which the file was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        match &self.content {
            // SAFETY: the mapping has this many bytes from its start, any of which is a valid `u8`. Mapped files are
            // never written again.
            MappedContent::Shared(pages) => unsafe { std::slice::from_raw_parts(pages.start, pages.bytes) },
            MappedContent::Copy(buffer, bytes) => &buffer[..*bytes],
        }
    }

    /// True if all bytes are in anonymous memory, which the kernel cannot discard.
    pub fn is_copy(&self) -> bool {
        matches!(self.content, MappedContent::Copy(..))
    }

    /// Starts to read a range of bytes from the disk, unless it is in memory, without waiting.
    pub fn prefetch(&self, range: &Range<usize>) {
        let Some((start, bytes)) = self.pages(range) else { return };
        for at in (0..bytes).step_by(PREFETCH_BYTES) {
            let (piece, len) = (start.wrapping_add(at), PREFETCH_BYTES.min(bytes - at));
            // SAFETY: the piece is whole pages of this mapping. The advice changes no contents; if it fails, pages are
            // read later.
            unsafe { libc::madvise(piece.cast(), len, libc::MADV_WILLNEED) };
        }
    }

    /// Waits until a range of bytes is in memory and can be read immediately.
    ///
    /// Errors: `Corruption` if the file was truncated, `Storage` if the disk cannot read the bytes.
    pub fn populate(&self, range: &Range<usize>) -> Result<()> {
        let Some((start, bytes)) = self.pages(range) else { return Ok(()) };
        // SAFETY: the range is whole pages of this mapping, and the advice only reads them into memory.
        if unsafe { libc::madvise(start.cast(), bytes, libc::MADV_POPULATE_READ) } == 0 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        match error.raw_os_error() {
            // Kernels before 5.14 have no such advice: the pages are read when they are accessed.
            Some(libc::EINVAL) => Ok(()),
            Some(libc::EFAULT | libc::EHWPOISON) => Err(self.unreadable_error(range)),
            _ => Err(Error::io("read", &self.path, &error)),
        }
    }

    fn unreadable_error(&self, range: &Range<usize>) -> Error {
        Kind::Corruption.error(format!(
            "cannot read bytes {range:?} of {}: the file was cut, or the disk does not give them. Make the checkpoint again, or serve \
             another one",
            self.path.display()
        )).at(&self.path)
    }

    /// Returns the pages of a range, within the mapping.
    fn pages(&self, range: &Range<usize>) -> Option<(*mut u8, usize)> {
        let MappedContent::Shared(pages) = &self.content else { return None };
        let page = page_bytes();
        let start = range.start / page * page;
        let end = range.end.min(pages.bytes);
        (start < end).then(|| (pages.start.wrapping_add(start), end - start))
    }
}

#[cfg(test)]
mod tests;
