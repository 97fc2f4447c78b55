//! Writes complete files in the background. A file is built as an image in memory; several threads write it, and it is
//! synced once.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, Scope, ScopedJoinHandle};

use crate::error::{Error, Kind, Result};
use crate::io::{AlignedBuf, IoEngine, IoOpenMode};
use crate::runtime::memory::can_start_threads;
use crate::runtime::process::{BackgroundFlag, works_in_background};
use crate::runtime::sync::lock;

/// Number of images that exist at once. The caller fills one while threads write the others. Some of these are being
/// synced at any time, which leaves the disk to the rest.
const IMAGES: usize = 6;
/// The same for an asynchronous save, which must leave memory and disk bandwidth to training.
const IMAGES_IN_BACKGROUND: usize = 4;
/// Number of threads that write one file.
const WRITER_THREADS: usize = 4;
/// Size of one write request.
const WRITE_BYTES: usize = 1 << 20;

/// A file to write: the first `len` bytes of `buffer`.
struct FileImage {
    path: PathBuf,
    buffer: AlignedBuf,
    len: usize,
}

/// Writes images in the background until its scope ends.
pub(crate) struct BackgroundFileWriter<'s> {
    engine: &'s dyn IoEngine,
    images: Sender<FileImage>,
    /// For each image that a thread has finished: its buffer, or the write error.
    written: Receiver<Result<AlignedBuf>>,
    free: Vec<AlignedBuf>,
    /// Maximum number of images that exist at once.
    max_images: usize,
    in_flight: usize,
    threads: Vec<ScopedJoinHandle<'s, ()>>,
}

impl<'s> BackgroundFileWriter<'s> {
    /// Starts the threads, which write images from `queue` until this writer is dropped. `queue` outlives them.
    pub(crate) fn new<'e>(scope: &'s Scope<'s, 'e>, engine: &'s dyn IoEngine, queue: &'s ImageQueue) -> Self {
        let (images, receiver) = channel();
        let (done, written) = channel();
        *lock(&queue.0) = Some(receiver);
        let start = |number: usize| {
            let done = done.clone();
            let write = move || {
                while let Some(FileImage { path, buffer, len }) = queue.next() {
                    let outcome = catch_unwind(AssertUnwindSafe(|| write_file(engine, &path, &buffer[..len])));
                    // After a failed save there is no receiver.
                    let _ = match outcome {
                        Ok(outcome) => done.send(outcome.map(|()| buffer)),
                        Err(panic) => {
                            let _ = done.send(Err(writers_ended_error()));
                            resume_unwind(panic)
                        }
                    };
                }
            };
            Builder::new().name(format!("embcache-save-{number}")).spawn_scoped(scope, write).ok()
        };
        // If no thread can be started, the caller writes each image itself.
        let max_images = if works_in_background() { IMAGES_IN_BACKGROUND } else { IMAGES };
        let threads = (1..if can_start_threads() { max_images } else { 1 }).map_while(start).collect();
        Self { engine, images, written, free: Vec::new(), max_images, in_flight: 0, threads }
    }

    /// Waits until a buffer for an image of `len` bytes is available. The next call of [`Self::buffer`] returns it.
    ///
    /// Errors: `Memory` if the allocation fails and no image is being written whose buffer could be reused.
    pub(crate) fn wait_for_buffer(&mut self, len: usize) -> Result<()> {
        self.free.retain(|buffer| buffer.len() >= len);
        while self.free.is_empty() {
            let written = match self.written.try_recv() {
                Ok(written) => written,
                Err(_) if self.in_flight < self.max_images => match AlignedBuf::try_zeroed(len) {
                    Ok(buffer) => {
                        self.free.push(buffer);
                        continue;
                    }
                    Err(refused) if self.in_flight == 0 => return Err(refused),
                    Err(_) => self.wait_for_image(),
                },
                Err(_) => self.wait_for_image(),
            };
            self.in_flight -= 1;
            self.free.extend(Some(written?).filter(|buffer| buffer.len() >= len));
        }
        Ok(())
    }

    /// Returns a buffer for an image of `len` bytes.
    pub(crate) fn buffer(&mut self, len: usize) -> Result<AlignedBuf> {
        self.wait_for_buffer(len)?;
        Ok(self.free.pop().expect("waited for"))
    }

    /// Returns an unused buffer to the free list.
    pub(crate) fn give_back(&mut self, buffer: AlignedBuf) {
        self.free.push(buffer);
    }

    /// Writes the first `len` bytes of `buffer` to the file `path`.
    pub(crate) fn write(&mut self, path: PathBuf, buffer: AlignedBuf, len: usize) -> Result<()> {
        if self.threads.is_empty() {
            write_file(self.engine, &path, &buffer[..len])?;
            self.free.push(buffer);
            return Ok(());
        }
        self.in_flight += 1;
        self.images.send(FileImage { path, buffer, len }).map_err(|_| writers_ended_error())
    }

    /// Waits until an image is written and returns its buffer.
    fn wait_for_image(&self) -> Result<AlignedBuf> {
        self.written.recv().unwrap_or_else(|_| Err(writers_ended_error()))
    }

    /// Waits until every image is written and synced.
    pub(crate) fn finish(mut self) -> Result<()> {
        while self.in_flight > 0 {
            self.in_flight -= 1;
            drop(self.wait_for_image()?);
        }
        Ok(())
    }
}

fn writers_ended_error() -> Error {
    Error::new(Kind::Storage, "the writing threads ended")
}

/// Queue from which the writer threads take images.
#[derive(Default)]
pub(crate) struct ImageQueue(Mutex<Option<Receiver<FileImage>>>);

impl ImageQueue {
    fn next(&self) -> Option<FileImage> {
        let receiver = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        receiver.as_ref()?.recv().ok()
    }
}

/// Creates a file and syncs its contents. Its name is not durable yet.
pub(crate) fn write_file(engine: &dyn IoEngine, path: &Path, bytes: &[u8]) -> Result<()> {
    let file = engine.open(path, IoOpenMode::Create { preallocate: bytes.len() as u64 })?;
    // The length is set first because writes that extend a file are serialized.
    file.set_len(bytes.len() as u64)?;
    let pieces = bytes.chunks(WRITE_BYTES).enumerate();
    for_each_piece(WRITER_THREADS, pieces.collect(), |(number, piece)| {
        file.write_at((number * WRITE_BYTES) as u64, piece)
    })?;
    file.sync()
}

/// Runs `work` on every piece, on up to `threads` threads including the caller. Stops at the first error. If several
/// pieces fail, returns the error of the earliest piece. Pieces are started in order, so the earliest failing piece
/// always runs and the same corruption gives the same error each time.
pub(crate) fn for_each_piece<T: Send>(
    threads: usize,
    pieces: Vec<T>,
    work: impl Fn(T) -> Result<()> + Sync,
) -> Result<()> {
    let helpers = threads.min(pieces.len()).saturating_sub(1);
    let helpers = if helpers > 0 && can_start_threads() { helpers } else { 0 };
    let pieces = Mutex::new(pieces.into_iter().enumerate());
    let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    let behind = BackgroundFlag::of_this_thread();
    let run = || {
        behind.apply();
        loop {
            let next = lock(&pieces).next();
            let Some((number, piece)) = next else { return };
            if let Err(error) = work(piece) {
                lock(&pieces).by_ref().for_each(drop);
                let mut failed = lock(&failed);
                if failed.as_ref().is_none_or(|(earliest, _)| number < *earliest) {
                    *failed = Some((number, error));
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..helpers {
            // With fewer threads the work only takes longer.
            if Builder::new().name("embcache-piece".into()).spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.map_or(Ok(()), |(_, error)| Err(error))
}

#[cfg(test)]
mod tests;
