//! Writes whole files in the background. A file is built as an image in memory; several threads write an image, and it is synced once.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, Scope, ScopedJoinHandle};

use crate::error::{Error, Kind, Result};
use crate::io::{AlignedBuf, IoEngine, IoOpenMode};
use crate::memory::can_start_threads;
use crate::process::{BackgroundFlag, works_in_background};
use crate::sync::lock;

/// How many images exist at once. The caller fills one while threads write the others. At any time some of the others are being synced,
/// and the disk is free for the rest.
const IMAGES: usize = 6;
/// The same for a save beside training, which must leave memory and the disk to training.
const IMAGES_IN_BACKGROUND: usize = 4;
/// How many threads write one file.
const WRITER_THREADS: usize = 4;
/// How many bytes one write request has.
const WRITE_BYTES: usize = 1 << 20;

/// A file to write. Its bytes are the first `len` of `buffer`.
struct FileImage {
    path: PathBuf,
    buffer: AlignedBuf,
    len: usize,
}

/// Writes images in the background until its scope ends.
pub(crate) struct BackgroundFileWriter<'s> {
    engine: &'s dyn IoEngine,
    images: Sender<FileImage>,
    /// For each image that a thread has finished: its buffer, or the error of writing it.
    written: Receiver<Result<AlignedBuf>>,
    free: Vec<AlignedBuf>,
    /// How many images may exist at once.
    max_images: usize,
    in_flight: usize,
    threads: Vec<ScopedJoinHandle<'s, ()>>,
}

impl<'s> BackgroundFileWriter<'s> {
    /// Start the threads, which write until the output is dropped. They take images from `queue`, which outlives them.
    pub(crate) fn new<'e>(scope: &'s Scope<'s, 'e>, engine: &'s dyn IoEngine, queue: &'s ImageQueue) -> Self {
        let (images, receiver) = channel();
        let (done, written) = channel();
        *lock(&queue.0) = Some(receiver);
        let start = |number: usize| {
            let done = done.clone();
            let write = move || {
                while let Some(FileImage { path, buffer, len }) = queue.next() {
                    let outcome = catch_unwind(AssertUnwindSafe(|| write_file(engine, &path, &buffer[..len])));
                    // After a failed save nobody receives this.
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
        // Without threads the caller writes each image itself.
        let most = if works_in_background() { IMAGES_IN_BACKGROUND } else { IMAGES };
        let threads = (1..if can_start_threads() { most } else { 1 }).map_while(start).collect();
        Self { engine, images, written, free: Vec::new(), max_images: most, in_flight: 0, threads }
    }

    /// Wait until there is a buffer for an image of `len` bytes. The next call of [`Output::buffer`] returns it.
    ///
    /// Errors: `Memory` where the system gives no memory for one and no image is being written whose buffer could be used.
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

    /// A buffer for an image of `len` bytes.
    pub(crate) fn buffer(&mut self, len: usize) -> Result<AlignedBuf> {
        self.wait_for_buffer(len)?;
        Ok(self.free.pop().expect("waited for"))
    }

    /// Give back a buffer that was not used.
    pub(crate) fn give_back(&mut self, buffer: AlignedBuf) {
        self.free.push(buffer);
    }

    /// Write a file of the first `len` bytes of `buffer`.
    pub(crate) fn write(&mut self, path: PathBuf, buffer: AlignedBuf, len: usize) -> Result<()> {
        if self.threads.is_empty() {
            write_file(self.engine, &path, &buffer[..len])?;
            self.free.push(buffer);
            return Ok(());
        }
        self.in_flight += 1;
        self.images.send(FileImage { path, buffer, len }).map_err(|_| writers_ended_error())
    }

    /// Wait until an image is written and return its buffer.
    fn wait_for_image(&self) -> Result<AlignedBuf> {
        self.written.recv().unwrap_or_else(|_| Err(writers_ended_error()))
    }

    /// Wait until every image is written and synced.
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

/// Where the writing threads find their next image.
#[derive(Default)]
pub(crate) struct ImageQueue(Mutex<Option<Receiver<FileImage>>>);

impl ImageQueue {
    fn next(&self) -> Option<FileImage> {
        let receiver = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        receiver.as_ref()?.recv().ok()
    }
}

/// Make a file and sync its contents. The file's name is not durable yet.
pub(crate) fn write_file(engine: &dyn IoEngine, path: &Path, bytes: &[u8]) -> Result<()> {
    let file = engine.open(path, IoOpenMode::Create { preallocate: bytes.len() as u64 })?;
    // The length is set first, because writes that make a file longer wait for one another.
    file.set_len(bytes.len() as u64)?;
    let pieces = bytes.chunks(WRITE_BYTES).enumerate();
    for_each_piece(WRITER_THREADS, pieces.collect(), |(number, piece)| {
        file.write_at((number * WRITE_BYTES) as u64, piece)
    })?;
    file.sync()
}

/// Do `work` with every piece, on up to `threads` threads including this one. The first error ends it. Where several pieces fail, the error is
/// that of the earliest piece: pieces are begun in order, so it is always met, and the same damage is told by the same words each time.
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
            // Without more threads the work only takes longer.
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
