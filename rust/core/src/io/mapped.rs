//! Files that are mapped into memory to be read.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::ptr;

use crate::error::{Error, Kind, Result};
use crate::mapping::page_bytes;

/// The bytes of a file as they were when it was mapped. They stay readable when the file has lost its name, and no descriptor stays open.
///
/// Touching a page that the system does not hold in memory reads it from the disk, one page at a time. A read that fails there ends the
/// process. So whoever needs many pages calls [`FileMapping::ask_for`] for all of them and then [`FileMapping::bring_in`] for each.
#[derive(Debug)]
pub struct FileMapping {
    path: PathBuf,
    content: Content,
}

#[derive(Debug)]
enum Content {
    /// Pages of the file itself, which all processes share.
    Shared(SharedPages),
    /// A copy, of a file of an engine whose files cannot be mapped.
    Copy(Vec<u8>),
}

/// A read-only mapping of a file, which is unmapped when it is dropped.
#[derive(Debug)]
struct SharedPages {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread, and nobody writes to it.
unsafe impl Send for SharedPages {}
// SAFETY: the mapping is only read.
unsafe impl Sync for SharedPages {}

impl Drop for SharedPages {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping's own, and who dropped it gave up every address in it.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

impl FileMapping {
    /// Map the first `bytes` bytes of an open file, which is never written again. `Kind::Storage` where the system refuses.
    pub(super) fn of_file(path: &Path, file: &File, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Ok(Self::copy(path, Vec::new()));
        }
        // SAFETY: this makes a new mapping at an address of the system's choice, so it replaces no other.
        let start =
            unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(Error::io("map", path, &std::io::Error::last_os_error()));
        }
        let pages = SharedPages { start: start.cast(), bytes };
        // SAFETY: the range is the mapping that was made above. The advice is that pages are needed here and there, so that a fault reads one
        // page; where the system refuses it, this costs only speed.
        unsafe { libc::madvise(pages.start.cast(), bytes, libc::MADV_RANDOM) };
        Ok(Self { path: path.to_owned(), content: Content::Shared(pages) })
    }

    /// Bytes that were read from a file.
    pub(super) fn copy(path: &Path, bytes: Vec<u8>) -> Self {
        Self { path: path.to_owned(), content: Content::Copy(bytes) }
    }

    /// The same under the path that the user knows.
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
            // SAFETY: the mapping has so many bytes from its start, any of which is a valid `u8`. Files that are mapped are never written again.
            Content::Shared(pages) => unsafe { std::slice::from_raw_parts(pages.start, pages.bytes) },
            Content::Copy(bytes) => bytes,
        }
    }

    /// Whether all bytes are in memory that the system cannot take back.
    pub fn is_copy(&self) -> bool {
        matches!(self.content, Content::Copy(_))
    }

    /// Start to read a range of bytes from the disk, as far as it is not in memory, and do not wait.
    pub fn ask_for(&self, range: &Range<usize>) {
        if let Some((start, bytes)) = self.pages(range) {
            // SAFETY: the range is whole pages of this mapping. The advice changes no contents; where the system refuses it, pages are read later.
            unsafe { libc::madvise(start.cast(), bytes, libc::MADV_WILLNEED) };
        }
    }

    /// Wait until a range of bytes is in memory and can be read at once.
    ///
    /// Errors: `Corruption` where the file was cut, `Storage` where the disk does not give the bytes.
    pub fn bring_in(&self, range: &Range<usize>) -> Result<()> {
        let Some((start, bytes)) = self.pages(range) else { return Ok(()) };
        // SAFETY: the range is whole pages of this mapping, and the advice only reads them into memory.
        if unsafe { libc::madvise(start.cast(), bytes, libc::MADV_POPULATE_READ) } == 0 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        match error.raw_os_error() {
            // Kernels before 5.14 have no such advice: the pages are read when they are touched.
            Some(libc::EINVAL) => Ok(()),
            Some(libc::EFAULT | libc::EHWPOISON) => Err(self.unreadable(range)),
            _ => Err(Error::io("read", &self.path, &error)),
        }
    }

    fn unreadable(&self, range: &Range<usize>) -> Error {
        let what = format!(
            "cannot read bytes {range:?} of {}: the file was cut, or the disk does not give them. Make the checkpoint again, or serve \
             another one",
            self.path.display()
        );
        Error::new(Kind::Corruption, what).at(&self.path)
    }

    /// The pages of a range, within the mapping.
    fn pages(&self, range: &Range<usize>) -> Option<(*mut u8, usize)> {
        let Content::Shared(pages) = &self.content else { return None };
        let page = page_bytes();
        let start = range.start / page * page;
        let end = range.end.min(pages.bytes);
        (start < end).then(|| (pages.start.wrapping_add(start), end - start))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn mapped(bytes: &[u8]) -> (tempfile::NamedTempFile, FileMapping) {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(bytes).expect("room");
        let mapping = FileMapping::of_file(file.path(), file.as_file(), bytes.len()).expect("a mapping");
        (file, mapping)
    }

    #[test]
    fn a_file_is_read_by_its_mapping_when_it_has_lost_its_name() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|n| n as u8).collect();
        let (file, mapping) = mapped(&bytes);
        drop(file);
        mapping.ask_for(&(5000..90_000));
        mapping.bring_in(&(5000..90_000)).expect("it is there");
        assert!(mapping.bytes() == bytes && !mapping.is_copy());
    }

    #[test]
    fn a_page_that_was_cut_off_is_an_error_and_not_the_end_of_the_process() {
        let (file, mapping) = mapped(&vec![7; 100_000]);
        file.as_file().set_len(10_000).expect("it is cut");
        mapping.bring_in(&(0..10_000)).expect("these are there");
        let error = mapping.bring_in(&(60_000..60_010)).expect_err("these are gone");
        assert_eq!(error.kind(), Kind::Corruption, "{error}");
    }

    #[test]
    fn ranges_past_the_end_and_empty_files_do_no_harm() {
        let (_file, mapping) = mapped(b"abc");
        mapping.ask_for(&(1_000_000..2_000_000));
        mapping.bring_in(&(0..2_000_000)).expect("what there is");
        let (_file, empty) = mapped(b"");
        assert!(empty.bytes().is_empty());
        empty.bring_in(&(0..1)).expect("nothing to do");
    }
}
