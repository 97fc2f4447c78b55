//! Files and directories of the real file system, for the engines that differ only in how they read a batch.
#![allow(unsafe_code)]

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, CWD, linkat};
use rustix::io::Errno;

use super::cover::{Cover, Step};
use super::{
    ALIGNMENT, BufPool, DirLock, Hold, IoEngine, IoFile, Open, Read, ReadSink, check_aligned, found, open_error,
    short_file,
};
use crate::error::{Error, Kind, Result};

/// Mode of the directories made, cut by the process's umask.
const DIR_MODE: u32 = 0o750;
/// Mode of the files made, cut by the process's umask.
const FILE_MODE: u32 = 0o640;
/// Bytes moved at a time where a copy is needed.
const BOUNCE_BYTES: usize = 1 << 20;

/// How a disk engine reads a batch.
pub trait BatchReader: Send + Sync + fmt::Debug {
    /// The engine's name without its suffix.
    fn name(&self) -> &'static str;
    /// See [`IoEngine::read_batch`].
    fn read_batch(&self, reads: &[Read], sink: &mut ReadSink<'_>);
}

/// Files on disk, with `O_DIRECT` where the file system takes it, and batches read by `R`.
///
/// It belongs to the process that made it: in a child that this process forks, every operation is `Kind::State`.
#[derive(Debug)]
pub struct DiskEngine<R> {
    reader: R,
    process: u32,
    direct: bool,
    /// Some file had to be opened without `O_DIRECT`.
    refused: AtomicBool,
    bounce: Arc<BufPool>,
    /// The most bytes asked for in one system call.
    call_bytes: usize,
}

/// An open file of a [`DiskEngine`].
#[derive(Debug)]
pub(super) struct DiskFile {
    path: PathBuf,
    file: File,
    process: u32,
    /// What offset, length and memory of a read must be multiples of; 1 with the page cache.
    align: usize,
    bounce: Arc<BufPool>,
    call_bytes: usize,
}

/// `Kind::State` unless this is the process that `made` an engine.
pub(super) fn check_process(made: u32) -> Result<()> {
    let here = std::process::id();
    if made == here {
        return Ok(());
    }
    Err(Error::new(
        Kind::State,
        format!(
            "this table's files were opened by process {made} and this is its fork {here}: make the table in this process \
             (multiprocessing start method \"spawn\")"
        ),
    ))
}

/// Do a system call again as long as a signal interrupts it.
fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// `Kind::Corruption` unless `file` is what this package writes: a regular file.
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

/// Take `O_NONBLOCK` off again: `io_uring` would hand back reads that have to wait for the disk.
fn set_blocking(file: &File) -> io::Result<()> {
    // SAFETY: both calls take an open descriptor and plain integers.
    let done = unsafe {
        let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
        flags >= 0 && libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl DiskFile {
    /// Turn `O_DIRECT` on where the file system takes it, and return the alignment that reads need then.
    #[cfg(target_os = "linux")]
    fn turn_direct(file: &File) -> Option<usize> {
        let fd = file.as_raw_fd();
        // SAFETY: an all-zero statx is a valid value of this plain C struct.
        let mut stat: libc::statx = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open, the path is an empty C string as AT_EMPTY_PATH wants, and `stat` outlives the call.
        let known = unsafe { libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut stat) }
            == 0
            && stat.stx_mask & libc::STATX_DIOALIGN != 0;
        let align = if known { stat.stx_dio_offset_align.max(stat.stx_dio_mem_align) as usize } else { ALIGNMENT };
        if align == 0 || align > ALIGNMENT || !align.is_power_of_two() {
            return None;
        }
        // SAFETY: both calls take an open descriptor and plain integers.
        let turned = unsafe {
            let flags = libc::fcntl(fd, libc::F_GETFL);
            flags >= 0 && libc::fcntl(fd, libc::F_SETFL, flags | libc::O_DIRECT) == 0
        };
        turned.then_some(align)
    }

    #[cfg(not(target_os = "linux"))]
    fn turn_direct(_file: &File) -> Option<usize> {
        None
    }

    /// Set blocks aside without changing the length. File systems that cannot do it give the blocks later.
    #[cfg(target_os = "linux")]
    fn preallocate(file: &File, bytes: u64) -> io::Result<()> {
        let done = uninterrupted(|| {
            // SAFETY: an open descriptor and plain integers.
            match unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, bytes as libc::off_t) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        });
        match done {
            Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => Ok(()),
            done => done,
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn preallocate(_file: &File, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    pub(super) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub(super) fn align(&self) -> usize {
        self.align
    }

    pub(super) fn call_bytes(&self) -> usize {
        self.call_bytes
    }

    /// Whether this process made it: cheaper than asking for the process's number at each read.
    pub(super) fn is_of(&self, process: u32) -> bool {
        self.process == process
    }

    fn check_process(&self) -> Result<()> {
        check_process(self.process)
    }

    /// Read a cover into `buffer`, which is aligned and at least its span long.
    pub(super) fn read_cover(&self, cover: &mut Cover, buffer: &mut [u8]) -> Result<()> {
        if cover.len == 0 {
            return Ok(());
        }
        loop {
            let end = cover.span.min(cover.got + self.call_bytes);
            let part = &mut buffer[cover.got..end];
            let count = uninterrupted(|| self.file.read_at(part, cover.start + cover.got as u64))
                .map_err(|e| Error::io("read", &self.path, &e))?;
            match cover.advance(count) {
                Step::Done => return Ok(()),
                Step::More => {}
                Step::Short => return Err(self.short(cover)),
            }
        }
    }

    /// The error of a cover that the file ends in.
    pub(super) fn short(&self, cover: &Cover) -> Error {
        let wanted_end = cover.start + (cover.skip + cover.len) as u64;
        self.len().map_or_else(|e| e, |len| short_file(&self.path, wanted_end, len))
    }

    fn write_all(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            let part = &data[done..data.len().min(done + self.call_bytes)];
            let count = uninterrupted(|| self.file.write_at(part, offset + done as u64))?;
            // A direct write has to start at a sector: what was written of a part of one is written again.
            let reached = done + count - (done + count) % self.align;
            if reached == done {
                return Err(io::ErrorKind::WriteZero.into());
            }
            done = reached;
        }
        Ok(())
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
        let mut cover = Cover::new(offset, into.len(), self.align);
        if cover.skip == 0 && cover.span == into.len() && into.as_ptr().addr().is_multiple_of(self.align) {
            return self.read_cover(&mut cover, into);
        }
        let mut bounce = self.bounce.take()?;
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let room = bounce.len() - (at % self.align as u64) as usize;
            let part = &mut into[done..];
            let part_len = part.len().min(room);
            let mut cover = Cover::new(at, part_len, self.align);
            self.read_cover(&mut cover, &mut bounce)?;
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
        // fdatasync writes the length too. It is not tried again after an error: the kernel may have dropped the pages.
        self.file.sync_data().map_err(|e| Error::io("sync", &self.path, &e))
    }

    fn links(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(|e| Error::io("inspect", &self.path, &e))?.nlink())
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl<R: BatchReader> DiskEngine<R> {
    pub(super) fn with_reader(reader: R, direct: bool) -> Self {
        Self {
            reader,
            process: std::process::id(),
            direct,
            refused: AtomicBool::new(false),
            bounce: Arc::new(BufPool::new(BOUNCE_BYTES, 16)),
            call_bytes: 1 << 30,
        }
    }

    /// Ask for at most `bytes` in one system call, so that everything larger is continued.
    #[cfg(test)]
    pub(super) fn with_call_bytes(mut self, bytes: usize) -> Self {
        self.call_bytes = bytes;
        self
    }

    fn open_file(&self, path: &Path, how: Open) -> Result<DiskFile> {
        let mut options = File::options();
        options.read(true).custom_flags(libc::O_NOFOLLOW);
        let what = match how {
            // A pipe in the file's place would wait for somebody who writes.
            Open::Read => {
                options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
                "open"
            }
            Open::Write => {
                options.write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
                "open"
            }
            Open::Create { .. } => {
                options.write(true).create_new(true).mode(FILE_MODE);
                "make"
            }
        };
        let file = uninterrupted(|| options.open(path)).map_err(|e| open_error(what, path, &e))?;
        if !matches!(how, Open::Create { .. }) {
            check_regular(path, &file)?;
            set_blocking(&file).map_err(|e| open_error(what, path, &e))?;
        }
        let align = if self.direct { DiskFile::turn_direct(&file) } else { None };
        if self.direct && align.is_none() {
            self.refused.store(true, Ordering::Relaxed);
        }
        if let Open::Create { preallocate } = how
            && preallocate > 0
            && let Err(e) = DiskFile::preallocate(&file, preallocate)
        {
            let error = Error::io("set aside room for", path, &e);
            // The first error counts; an empty file that cannot be removed either is the owner's to sweep.
            return Err(std::fs::remove_file(path).err().map_or(error.clone(), |e| error.context(format!("({e})"))));
        }
        Ok(DiskFile {
            path: path.to_owned(),
            file,
            process: self.process,
            align: align.unwrap_or(1),
            bounce: self.bounce.clone(),
            call_bytes: self.call_bytes,
        })
    }

    fn check_process(&self) -> Result<()> {
        check_process(self.process)
    }
}

impl<R: BatchReader> IoEngine for DiskEngine<R> {
    fn name(&self) -> String {
        let direct = self.direct && !self.refused.load(Ordering::Relaxed);
        format!("{}{}", self.reader.name(), if direct { "+direct" } else { "" })
    }

    fn open(&self, path: &Path, how: Open) -> Result<Arc<dyn IoFile>> {
        self.check_process()?;
        Ok(Arc::new(self.open_file(path, how)?))
    }

    fn read_batch(&self, reads: &[Read], sink: &mut ReadSink<'_>) {
        if let Err(error) = self.check_process() {
            (0..reads.len()).for_each(|position| sink(position, Err(error.clone())));
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
        found(path, uninterrupted(|| path.symlink_metadata()))
    }

    fn check_private(&self, path: &Path, allowed_mode: u32) -> Result<()> {
        let found = match path.symlink_metadata() {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(Error::io("inspect", path, &error)),
        };
        let refuse =
            |kind, why: &str| Err(Error::new(kind, format!("the directory {} {why}", path.display())).at(path));
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
        // What the descriptor says of itself is followed to the file; `AT_EMPTY_PATH` would ask for a capability.
        let open = format!("/proc/self/fd/{}", file.fd());
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

    fn hold_dir(&self, path: &Path, how: Hold) -> Result<DirLock> {
        self.check_process()?;
        DirLock::hold(path, how)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{AlignedBuf, PsyncEngine};

    fn pattern(len: usize) -> AlignedBuf {
        let mut data = AlignedBuf::zeroed(len);
        data.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 31 % 251) as u8);
        data
    }

    fn continued<R: BatchReader>(engine: &DiskEngine<R>) {
        let dir = tempfile::tempdir().unwrap();
        let file = engine.open(&dir.path().join("a"), Open::Create { preallocate: 1 << 20 }).unwrap();
        let data = pattern(40 * ALIGNMENT);
        file.write_at(0, &data).unwrap();
        let places = [(0, data.len()), (1, 3 * ALIGNMENT), (5000, 20_000), (data.len() as u64 - 1, 1)];
        for (offset, len) in places {
            let mut found = vec![0; len];
            file.read_at(offset, &mut found).unwrap();
            assert!(found == data[offset as usize..][..len], "{len} bytes at {offset}");
        }
        let reads: Vec<Read> = places.iter().map(|&(offset, len)| Read { file: file.clone(), offset, len }).collect();
        let mut seen = 0;
        engine.read_batch(&reads, &mut |position, outcome| {
            let (offset, len) = places[position];
            assert!(outcome.unwrap() == &data[offset as usize..][..len], "{len} bytes at {offset}");
            seen += 1;
        });
        assert_eq!(seen, places.len());
    }

    #[test]
    fn writes_and_reads_that_the_system_cuts_short_are_continued() {
        for direct in [false, true] {
            continued(&PsyncEngine::new(direct).with_call_bytes(ALIGNMENT));
            #[cfg(target_os = "linux")]
            if let Ok(engine) = crate::io::UringEngine::new(direct) {
                continued(&engine.with_call_bytes(ALIGNMENT));
            }
        }
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let (pipe, inner, file) = (dir.path().join("pipe"), dir.path().join("inner"), dir.path().join("file"));
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        std::fs::create_dir(&inner).unwrap();
        std::fs::write(&file, "x").unwrap();
        for direct in [false, true] {
            let engine = PsyncEngine::new(direct);
            for (path, found) in [(&pipe, "a pipe"), (&inner, "a directory")] {
                let error = engine.open(path, Open::Read).unwrap_err();
                let expected = format!(
                    "{} is damaged at byte 0: what is there should be a regular file and is {found}",
                    path.display()
                );
                assert_eq!((error.kind(), error.to_string()), (Kind::Corruption, expected));
            }
            let locked = dir.path().join("locked").join(direct.to_string());
            std::fs::create_dir_all(&locked).unwrap();
            rustix::fs::mknodat(rustix::fs::CWD, locked.join("lock"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
                .unwrap();
            assert_eq!(engine.lock_dir(&locked).unwrap_err().kind(), Kind::Corruption);
            let flags = rustix::fs::fcntl_getfl(&engine.open_file(&file, Open::Read).unwrap().file).unwrap();
            assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK), "{flags:?}");
        }
    }

    #[test]
    fn an_engine_of_another_process_is_refused_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = PsyncEngine::default();
        let file = engine.open_file(&dir.path().join("a"), Open::Create { preallocate: 0 }).unwrap();
        let file: Arc<dyn IoFile> = Arc::new(DiskFile { process: 1, ..file });
        engine.process = 1;
        let kind = |e: Error| e.kind();
        assert_eq!(engine.open(dir.path(), Open::Read).map_err(kind).unwrap_err(), Kind::State);
        assert_eq!(file.write_at(0, &[]).map_err(kind), Err(Kind::State));
        assert_eq!(file.sync().map_err(kind), Err(Kind::State));
        let mut errors = Vec::new();
        let read = Read { file, offset: 0, len: 1 };
        engine.read_batch(&[read.clone(), read], &mut |_, outcome| errors.push(outcome.unwrap_err().kind()));
        assert_eq!(errors, [Kind::State, Kind::State]);
    }
}
