//! Files and directories of the real file system, for the engines that differ only in reading batches. A file is read
//! in whole sectors where it bypasses the page cache.

#[cfg(test)]
mod tests;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use std::{fmt, io};

use rustix::fs::{AtFlags, CWD, OFlags, fcntl_getfl, fcntl_setfl, linkat};
use rustix::io::Errno;

use super::{
    ALIGNMENT, BufPool, DirLock, DirLockPurpose, FileMapping, IoEngine, IoFile, IoOpenMode, IoReadRequest,
    MappingAccess, ReadSink, check_aligned, exists_result, open_error, short_file_error,
};
use crate::error::{Error, Kind, Result};

/// Mode of new directories, before the process's umask.
const DIR_MODE: u32 = 0o750;

/// Mode of new files, before the process's umask.
const FILE_MODE: u32 = 0o640;

/// Bytes of a bounce buffer: the maximum that is copied at a time if the caller's memory is not aligned.
const BOUNCE_BYTES: usize = 1 << 20;

/// Maximum number of unused bounce buffers.
const BOUNCE_BUFFERS: usize = 16;

/// Batched reads of a disk engine.
pub trait BatchReader: Send + Sync + fmt::Debug {
    /// The engine's name without `+direct`.
    fn name(&self) -> &'static str;
    /// See [`IoEngine::read_batch`].
    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>);
}

/// Files on disk. They are opened with `O_DIRECT` if the file system supports it, and `R` reads their batches.
///
/// An engine belongs to the process that created it. In a child that this process forks, every operation returns
/// `Kind::State`.
#[derive(Debug)]
pub struct DiskEngine<R> {
    reader: R,
    files: FileSettings,
    /// True if some file was opened without `O_DIRECT` although the engine requested it.
    direct_refused: AtomicBool,
}

impl<R: BatchReader> DiskEngine<R> {
    pub(super) fn with_reader(reader: R, direct: bool) -> Self {
        Self { reader, files: FileSettings::new(direct), direct_refused: AtomicBool::new(false) }
    }

    fn check_process(&self) -> Result<()> {
        check_process(self.files.process)
    }
}

impl<R: BatchReader> IoEngine for DiskEngine<R> {
    fn name(&self) -> String {
        let direct = self.files.direct && !self.direct_refused.load(Ordering::Relaxed);
        format!("{}{}", self.reader.name(), if direct { "+direct" } else { "" })
    }

    fn open(&self, path: &Path, mode: IoOpenMode) -> Result<Arc<dyn IoFile>> {
        self.check_process()?;
        let file = DiskFile::open(path, mode, &self.files)?;
        if self.files.direct && !file.is_direct() {
            self.direct_refused.store(true, Ordering::Relaxed);
        }
        Ok(Arc::new(file))
    }

    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>) {
        if let Err(error) = self.check_process() {
            (0..reads.len()).for_each(|position| sink(position, Err(error.clone()), Duration::ZERO));
            return;
        }
        self.reader.read_batch(reads, sink);
    }

    fn create_dir_all(&self, path: &Path) -> Result<()> {
        self.check_process()?;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(DIR_MODE)
            .create(path)
            .map_err(|e| Error::io("make the directory", path, &e))
    }

    fn list(&self, path: &Path) -> Result<Vec<PathBuf>> {
        self.check_process()?;
        let mut entries = std::fs::read_dir(path)
            .and_then(|dir| dir.map(|entry| entry.map(|e| e.path())).collect::<io::Result<Vec<_>>>())
            .map_err(|e| Error::io("list", path, &e))?;
        entries.sort();
        Ok(entries)
    }

    fn exists(&self, path: &Path) -> Result<bool> {
        exists_result(path, uninterrupted(|| path.symlink_metadata()))
    }

    fn check_private(&self, path: &Path, allowed_mode: u32) -> Result<()> {
        let found = match path.symlink_metadata() {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(Error::io("inspect", path, &error)),
        };
        let refuse =
            |kind: Kind, why: &str| Err(kind.error(format!("the directory {} {why}", path.display())).at(path));
        if found.is_symlink() {
            return refuse(Kind::Path, "is a symbolic link: name its target");
        }
        if !found.is_dir() {
            return refuse(Kind::Path, "is a file: name a directory");
        }
        let caller = rustix::process::geteuid().as_raw();
        if found.uid() != caller {
            let owner = found.uid();
            let why = format!("belongs to user {owner} and this process runs as {caller}: use a directory of your own");
            return refuse(Kind::Permission, &why);
        }
        let mode = found.mode() & 0o777;
        if mode & !allowed_mode != 0 {
            let why = format!("has mode {mode:04o}: chmod {:o} {}", mode & allowed_mode, path.display());
            return refuse(Kind::Permission, &why);
        }
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.check_process()?;
        std::fs::rename(from, to).map_err(|e| Error::io("rename", from, &e))
    }

    fn link(&self, file: &dyn IoFile, to: &Path) -> Result<()> {
        self.check_process()?;
        let fail = |errno: Errno| Error::io("link", to, &errno.into());
        let file = file.as_any().downcast_ref::<DiskFile>().ok_or_else(|| fail(Errno::XDEV))?;
        // The entry in /proc refers to the open file itself. `AT_EMPTY_PATH` would do the same, but needs a capability.
        let open = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        linkat(CWD, open, CWD, to, AtFlags::SYMLINK_FOLLOW).map_err(fail)
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        self.check_process()?;
        std::fs::remove_file(path).map_err(|e| Error::io("remove", path, &e))
    }

    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        self.check_process()?;
        std::fs::remove_dir_all(path).map_err(|e| Error::io("remove", path, &e))
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        self.check_process()?;
        File::open(path).and_then(|dir| dir.sync_all()).map_err(|e| Error::io("sync the directory", path, &e))
    }

    fn lock_dir(&self, path: &Path) -> Result<DirLock> {
        self.check_process()?;
        DirLock::acquire(path)
    }

    fn lock_file(&self, path: &Path) -> Result<DirLock> {
        self.check_process()?;
        DirLock::acquire_file(path, path)
    }

    fn lock_dir_for(&self, path: &Path, purpose: DirLockPurpose) -> Result<DirLock> {
        self.check_process()?;
        DirLock::acquire_for(path, purpose)
    }
}

/// Settings that all files of one engine share.
#[derive(Clone, Debug)]
struct FileSettings {
    /// The process that created the engine. No other may use the files.
    process: u32,
    /// If true, requests `O_DIRECT`.
    direct: bool,
    /// Maximum bytes of one system call. A longer transfer needs several calls.
    call_bytes: usize,
    bounce: Arc<BufPool>,
}

impl FileSettings {
    /// Creates settings for files of this process.
    fn new(direct: bool) -> Self {
        let bounce = Arc::new(BufPool::new(BOUNCE_BYTES, BOUNCE_BUFFERS));
        Self { process: std::process::id(), direct, call_bytes: 1 << 30, bounce }
    }
}

/// An open file of a [`DiskEngine`].
#[derive(Debug)]
pub(super) struct DiskFile {
    path: PathBuf,
    file: File,
    process: u32,
    /// Alignment of the offset, length and memory address of reads and writes. It is 1 with the page cache.
    align: usize,
    bounce: Arc<BufPool>,
    call_bytes: usize,
}

impl DiskFile {
    /// Opens or creates a regular file. A symbolic link is `Kind::Path`, anything else that is not a regular file
    /// `Kind::Corruption`.
    fn open(path: &Path, mode: IoOpenMode, settings: &FileSettings) -> Result<Self> {
        let mut options = File::options();
        options.read(true).custom_flags(libc::O_NOFOLLOW);
        let what = match mode {
            // Without O_NONBLOCK, opening a pipe in the file's place would wait for a writer.
            IoOpenMode::Read => {
                options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
                "open"
            }
            IoOpenMode::Write => {
                options.write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
                "open"
            }
            IoOpenMode::Create { .. } => {
                options.write(true).create_new(true).mode(FILE_MODE);
                "make"
            }
        };
        let file = uninterrupted(|| options.open(path)).map_err(|e| open_error(what, path, &e))?;
        if !matches!(mode, IoOpenMode::Create { .. }) {
            check_regular(path, &file)?;
            set_blocking(&file).map_err(|e| open_error(what, path, &e))?;
        }
        let align = if settings.direct { enable_direct(&file) } else { None };
        if let IoOpenMode::Create { preallocate: bytes } = mode
            && bytes > 0
            && let Err(e) = preallocate(&file, bytes)
        {
            let error = Error::io("preallocate space for", path, &e);
            // The caller gets the first error. If the empty file cannot be removed, the directory's owner removes it
            // later.
            return Err(std::fs::remove_file(path).err().map_or(error.clone(), |e| error.context(format!("({e})"))));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            process: settings.process,
            align: align.unwrap_or(1),
            bounce: settings.bounce.clone(),
            call_bytes: settings.call_bytes,
        })
    }

    /// Alignment of the offset, length and memory address of a read; 1 with the page cache.
    pub(crate) fn align(&self) -> usize {
        self.align
    }

    /// Maximum bytes of one system call.
    pub(crate) fn call_bytes(&self) -> usize {
        self.call_bytes
    }

    /// True if `process` opened this file. A batch reads its own process id once, and compares it with that of each
    /// file here.
    pub(crate) fn is_opened_by(&self, process: u32) -> bool {
        self.process == process
    }

    fn check_process(&self) -> Result<()> {
        check_process(self.process)
    }

    /// Reads the sectors of a cover into `buffer`, whose start is aligned and which has at least the cover's span.
    pub(crate) fn read_sectors(&self, cover: &mut SectorRead, buffer: &mut [u8]) -> Result<()> {
        if cover.len == 0 {
            return Ok(());
        }
        loop {
            let end = cover.span.min(cover.bytes_read + self.call_bytes);
            let part = &mut buffer[cover.bytes_read..end];
            let count = uninterrupted(|| self.file.read_at(part, cover.start + cover.bytes_read as u64))
                .map_err(|e| Error::io("read", &self.path, &e))?;
            match cover.advance(count) {
                SectorReadStep::Done => return Ok(()),
                SectorReadStep::More => {}
                SectorReadStep::Short => return Err(self.short_read_error(cover)),
            }
        }
    }

    /// The error of a read that extends past the file's end.
    pub(crate) fn short_read_error(&self, cover: &SectorRead) -> Error {
        let wanted_end = cover.start + (cover.skip + cover.len) as u64;
        self.len().map_or_else(|e| e, |len| short_file_error(&self.path, wanted_end, len))
    }

    fn write_all(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            let part = &data[done..data.len().min(done + self.call_bytes)];
            let count = uninterrupted(|| self.file.write_at(part, offset + done as u64))?;
            // A direct write must start at a sector. A partially written sector is written again.
            let reached = done + count - (done + count) % self.align;
            if reached == done {
                return Err(io::ErrorKind::WriteZero.into());
            }
            done = reached;
        }
        Ok(())
    }
}

impl AsFd for DiskFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl IoFile for DiskFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn len(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(|e| Error::io("read the size of", &self.path, &e))?.len())
    }

    fn is_direct(&self) -> bool {
        self.align > 1
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.check_process()?;
        check_aligned(&self.path, offset, data.len())?;
        let written = if data.as_ptr().addr().is_multiple_of(self.align) {
            self.write_all(offset, data)
        } else {
            let mut bounce = self.bounce.take()?;
            data.chunks(bounce.len()).enumerate().try_for_each(|(chunk, part)| {
                bounce[..part.len()].copy_from_slice(part);
                self.write_all(offset + (chunk * BOUNCE_BYTES) as u64, &bounce[..part.len()])
            })
        };
        written.map_err(|e| Error::io("write", &self.path, &e))
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.check_process()?;
        let mut cover = SectorRead::new(offset, into.len(), self.align);
        if cover.skip == 0 && cover.span == into.len() && into.as_ptr().addr().is_multiple_of(self.align) {
            return self.read_sectors(&mut cover, into);
        }
        let mut bounce = self.bounce.take()?;
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let space = bounce.len() - (at % self.align as u64) as usize;
            let part = &mut into[done..];
            let part_len = part.len().min(space);
            let mut cover = SectorRead::new(at, part_len, self.align);
            self.read_sectors(&mut cover, &mut bounce)?;
            part[..part_len].copy_from_slice(&bounce[cover.skip..cover.skip + part_len]);
            done += part_len;
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.check_process()?;
        uninterrupted(|| self.file.set_len(len)).map_err(|e| Error::io("resize", &self.path, &e))
    }

    fn sync(&self) -> Result<()> {
        self.check_process()?;
        // fdatasync makes the length durable too. It is not retried after an error, because the kernel may have dropped
        // the pages.
        self.file.sync_data().map_err(|e| Error::io("sync", &self.path, &e))
    }

    fn links(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(|e| Error::io("inspect", &self.path, &e))?.nlink())
    }

    fn modified(&self) -> Result<SystemTime> {
        let inspected = self.file.metadata().and_then(|metadata| metadata.modified());
        inspected.map_err(|e| Error::io("inspect", &self.path, &e))
    }

    fn map(&self, access: MappingAccess) -> Result<FileMapping> {
        self.check_process()?;
        FileMapping::of_file(&self.path, &self.file, self.len()? as usize, access)
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

/// A read that is widened to whole sectors of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SectorRead {
    /// Byte in the file at which the first sector starts.
    pub(super) start: u64,
    /// Bytes of all the sectors.
    pub(super) span: usize,
    /// Bytes of the first sector before the first requested byte.
    pub(super) skip: usize,
    /// Requested bytes.
    pub(super) len: usize,
    /// Bytes that were read, in whole sectors.
    pub(super) bytes_read: usize,
    align: usize,
}

/// The next step after a partial read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SectorReadStep {
    /// Every requested byte was read.
    Done,
    /// Continues at byte `start + bytes_read`.
    More,
    /// The file ends before the last requested byte.
    Short,
}

impl SectorRead {
    /// Returns the sectors of `align` bytes around `len` bytes at byte `offset`. Buffered I/O has an `align` of 1.
    pub(super) fn new(offset: u64, len: usize, align: usize) -> Self {
        let skip = (offset % align as u64) as usize;
        Self {
            start: offset - skip as u64,
            span: (skip + len).next_multiple_of(align),
            skip,
            len,
            bytes_read: 0,
            align,
        }
    }

    /// Records that a read at byte `start + bytes_read` returned `count` bytes.
    pub(super) fn advance(&mut self, count: usize) -> SectorReadStep {
        let before = self.bytes_read;
        let reached = before + count;
        if reached >= self.skip + self.len {
            return SectorReadStep::Done;
        }
        // A direct read must start at a sector. A partially read sector is read again.
        self.bytes_read = reached - reached % self.align;
        if self.bytes_read > before { SectorReadStep::More } else { SectorReadStep::Short }
    }
}

/// Returns `Kind::State` unless this process is the one with the id `made`, which created the engine.
fn check_process(made: u32) -> Result<()> {
    let current = std::process::id();
    if made == current {
        return Ok(());
    }
    Err(Kind::State.error(format!(
        "this table's files were opened by process {made}, and this is process {current}, which was forked from it: make the table \
         in this process (multiprocessing start method \"spawn\")"
    )))
}

/// Retries a system call while signals interrupt it.
fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// Returns `Kind::Corruption` unless `file` is a regular file. This package writes no others.
pub(super) fn check_regular(path: &Path, file: &File) -> Result<()> {
    let kind = file.metadata().map_err(|e| Error::io("inspect", path, &e))?.file_type();
    if kind.is_file() {
        return Ok(());
    }
    let found = if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else {
        "a device"
    };
    Err(Error::corruption(path, 0, "what is there", "a regular file", found))
}

/// Clears `O_NONBLOCK`. With it `io_uring` would fail reads that have to wait for the disk.
fn set_blocking(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)? - OFlags::NONBLOCK)?)
}

/// Sets `O_DIRECT` if the file system supports it. Returns the alignment in bytes that reads and writes then need.
#[cfg(target_os = "linux")]
fn enable_direct(file: &File) -> Option<usize> {
    use rustix::fs::{AtFlags, StatxFlags, statx};
    // Kernels before 6.1 do not report the alignment. Every device accepts multiples of a page.
    let align = match statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(stat) if stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => {
            stat.stx_dio_offset_align.max(stat.stx_dio_mem_align) as usize
        }
        _ => ALIGNMENT,
    };
    if align == 0 || align > ALIGNMENT || !align.is_power_of_two() {
        return None;
    }
    let turned = fcntl_getfl(file).and_then(|flags| fcntl_setfl(file, flags | OFlags::DIRECT));
    turned.is_ok().then_some(align)
}

#[cfg(not(target_os = "linux"))]
fn enable_direct(_file: &File) -> Option<usize> {
    None
}

/// Allocates blocks without changing the file's length. A file system that cannot do this allocates them when they are
/// written.
#[cfg(target_os = "linux")]
fn preallocate(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    match uninterrupted(|| Ok(fallocate(file, FallocateFlags::KEEP_SIZE, 0, bytes)?)) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => Ok(()),
        done => done,
    }
}

#[cfg(not(target_os = "linux"))]
fn preallocate(_file: &File, _bytes: u64) -> io::Result<()> {
    Ok(())
}
