//! Writes and reads files in pieces. Threads write images, which are built in memory, and streams of bytes, each to a range
//! of a file, with a checksum of each chunk. Reads verify every chunk that they touch.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use super::manifest::manifests::{CHECKSUM_PAGE_BYTES, DenseFile, STREAM_CHUNK_BYTES};
use crate::error::{Error, Kind, Result};
use crate::io::{ALIGNMENT, AlignedBuf, BufPool, IoEngine, IoFile, IoOpenMode, PooledBuf};
use crate::runtime::memory::can_start_threads;
use crate::runtime::process::{BackgroundFlag, works_in_background};
use crate::runtime::sync::lock;

/// Number of images that exist at once. The caller fills one while threads write the others.
const IMAGES: usize = 6;
/// The same for an asynchronous save, which must leave memory and disk bandwidth to training.
const IMAGES_IN_BACKGROUND: usize = 4;
/// Number of threads that write one image.
const IMAGE_THREADS: usize = 4;
/// Maximum number of threads that write images.
pub(crate) const IMAGE_WRITERS: usize = IMAGES - 1;
/// Size of one write request of an image.
const WRITE_BYTES: usize = 1 << 20;
/// Size of one I/O request of a stream, in whole chunks.
pub(crate) const STREAM_PIECE_BYTES: usize = 16 * STREAM_CHUNK_BYTES;
/// Number of threads that write or read pieces of streams.
pub(crate) const STREAM_THREADS: usize = 4;
/// Maximum number of full pieces queued for the threads.
const MAX_QUEUED: usize = 3;

/// Threads that write. Without threads the caller writes.
#[derive(Debug)]
pub(crate) struct WriterThreads {
    send: Option<SyncSender<WriteTask>>,
    threads: Vec<JoinHandle<()>>,
    /// The first error. Nothing is written after it.
    error: Arc<Mutex<Option<Error>>>,
}

type WriteTask = Box<dyn FnOnce() -> Result<()> + Send>;

impl WriterThreads {
    /// Starts up to `threads` threads. [`Self::run`] waits while `queued` tasks wait for a thread.
    pub(crate) fn start(threads: usize, queued: usize) -> Self {
        let (send, receive) = sync_channel::<WriteTask>(queued);
        let receive = Arc::new(Mutex::new(receive));
        let error = Arc::new(Mutex::new(None));
        let start = |_| {
            let (receive, error) = (Arc::clone(&receive), Arc::clone(&error));
            let write = move || {
                loop {
                    let received = lock(&receive).recv();
                    let Ok(task) = received else { return };
                    if lock(&error).is_some() {
                        continue;
                    }
                    let done = catch_unwind(AssertUnwindSafe(task));
                    if let Err(failed) = done.unwrap_or_else(|panic| Err(Error::panicked("write", &*panic))) {
                        lock(&error).get_or_insert(failed);
                    }
                }
            };
            Builder::new().name("embcache-save".into()).spawn(write).ok()
        };
        let threads: Vec<_> = (0..if can_start_threads() { threads } else { 0 }).map_while(start).collect();
        let send = (!threads.is_empty()).then_some(send);
        Self { send, threads, error }
    }

    /// Ends the writing with an error. Nothing is written after it.
    pub(crate) fn fail(&self, error: &Error) {
        lock(&self.error).get_or_insert_with(|| error.clone());
    }

    /// Returns the first error, if there is one.
    fn check(&self) -> Result<()> {
        lock(&self.error).clone().map_or(Ok(()), Err)
    }

    /// Runs `task` on a thread.
    ///
    /// Errors: those of earlier tasks, and without threads that of the task.
    pub(crate) fn run(&self, task: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        self.check()?;
        match &self.send {
            Some(send) => send.send(Box::new(task)).map_err(|_| Kind::Storage.error("the writing threads ended")),
            None => task().inspect_err(|error| self.fail(error)),
        }
    }

    /// Ends the threads when the queued tasks have run. No task can follow.
    pub(crate) fn close(&mut self) {
        drop(self.send.take());
    }

    /// Waits until every task has run.
    pub(crate) fn end(&mut self) -> Result<()> {
        self.close();
        for thread in self.threads.drain(..) {
            // Panics of tasks are caught, and are errors.
            let _ = thread.join();
        }
        self.check()
    }
}

impl Drop for WriterThreads {
    fn drop(&mut self) {
        // Nothing may be written after the writer is dropped, because its directory may be removed.
        let _ = self.end();
    }
}

/// Writes files as images, each built in memory.
#[derive(Debug)]
pub(crate) struct ImageWriter {
    engine: Arc<dyn IoEngine>,
    pub(crate) threads: WriterThreads,
    /// Returns the buffers of images that are not in use by a thread.
    returned: (Sender<AlignedBuf>, Receiver<AlignedBuf>),
    /// The unused buffers.
    pub(crate) free: Vec<AlignedBuf>,
    /// Maximum number of images that exist at once.
    max_images: usize,
    in_flight: usize,
}

/// The buffer of an image that is being written. Dropping it returns it to the writer.
struct ImageBuffer(Option<AlignedBuf>, Sender<AlignedBuf>);

impl Drop for ImageBuffer {
    fn drop(&mut self) {
        // After a failed save there is no receiver.
        let _ = self.0.take().map(|buffer| self.1.send(buffer));
    }
}

/// A file whose images are written in any order. It is created by the first of them, and synced after the last one.
#[derive(Debug)]
pub(crate) struct ImageFile {
    path: PathBuf,
    /// Bytes to preallocate.
    expected_bytes: u64,
    state: Mutex<ImageFileState>,
}

#[derive(Debug, Default)]
struct ImageFileState {
    io: Option<Arc<dyn IoFile>>,
    /// Length of the file.
    bytes: u64,
    /// Number of images that were submitted and are not written yet.
    pending: usize,
    /// Set when no image follows: the start of the file, whole pages, unless an image has it; and the file's length.
    end: Option<(Option<AlignedBuf>, u64)>,
}

impl ImageFile {
    pub(crate) fn new(path: PathBuf, expected_bytes: u64) -> Self {
        Self { path, expected_bytes, state: Mutex::default() }
    }

    /// Returns the file, which is at least `bytes` long. The length is set first because writes that extend a file are
    /// serialized.
    fn open(&self, engine: &dyn IoEngine, bytes: u64) -> Result<Arc<dyn IoFile>> {
        let mut state = lock(&self.state);
        let io = match &state.io {
            Some(io) => Arc::clone(io),
            None => engine.open(&self.path, IoOpenMode::Create { preallocate: self.expected_bytes })?,
        };
        if state.bytes < bytes {
            io.set_len(bytes)?;
            state.bytes = bytes;
        }
        state.io = Some(Arc::clone(&io));
        Ok(io)
    }

    /// Writes an image at byte `at`. Syncs the file if it was the last one.
    fn write(&self, engine: &dyn IoEngine, at: u64, image: &[u8]) -> Result<()> {
        let io = self.open(engine, at + image.len() as u64)?;
        let pieces = image.chunks(WRITE_BYTES).enumerate();
        for_each_piece(IMAGE_THREADS, pieces.collect(), |(number, piece)| {
            io.write_at(at + (number * WRITE_BYTES) as u64, piece)
        })?;
        if !io.is_direct() {
            // Otherwise up to a file of dirty pages would be written at its end.
            io.sync()?;
        }
        self.end_one(engine)
    }

    /// Ends an image, or the file.
    fn end_one(&self, engine: &dyn IoEngine) -> Result<()> {
        let mut state = lock(&self.state);
        state.pending -= 1;
        let Some((head, bytes)) = (if state.pending == 0 { state.end.take() } else { None }) else { return Ok(()) };
        drop(state);
        let io = self.open(engine, 0)?;
        if let Some(head) = head {
            io.write_at(0, &head)?;
        }
        if lock(&self.state).bytes != bytes || self.expected_bytes > bytes {
            // Also releases preallocated space.
            io.set_len(bytes)?;
        }
        io.sync()
    }
}

impl ImageWriter {
    /// Starts up to `threads` threads; with none the caller writes.
    pub(crate) fn start(engine: Arc<dyn IoEngine>, threads: usize) -> Self {
        let max_images = if works_in_background() { IMAGES_IN_BACKGROUND } else { IMAGES };
        // A caller that holds a table's lock never waits: there is at most one end of a file for each image, and one more.
        let threads = WriterThreads::start(threads.min(max_images - 1), 2 * max_images + 1);
        Self { engine, threads, returned: channel(), free: Vec::new(), max_images, in_flight: 0 }
    }

    /// Waits until a buffer for an image of `len` bytes is available. The next call of [`Self::buffer`] returns it.
    ///
    /// Errors: `Memory` if the allocation fails and no image is being written whose buffer could be reused; those of
    /// writing earlier images.
    pub(crate) fn wait_for_buffer(&mut self, len: usize) -> Result<()> {
        self.free.retain(|buffer| buffer.len() >= len);
        while self.free.is_empty() {
            self.threads.check()?;
            let returned = self.returned.1.try_recv().ok();
            if returned.is_none() && self.in_flight < self.max_images {
                match AlignedBuf::try_zeroed(len) {
                    Ok(buffer) => {
                        self.free.push(buffer);
                        break;
                    }
                    Err(refused) if self.in_flight == 0 => return Err(refused),
                    Err(_) => {}
                }
            }
            let buffer = returned.or_else(|| self.returned.1.recv().ok());
            self.in_flight -= 1;
            self.free.extend(buffer.filter(|buffer| buffer.len() >= len));
        }
        Ok(())
    }

    /// Returns a buffer for an image of `len` bytes.
    pub(crate) fn buffer(&mut self, len: usize) -> Result<AlignedBuf> {
        self.wait_for_buffer(len)?;
        Ok(self.free.pop().expect("waited for"))
    }

    /// Writes the first `len` bytes of `buffer` to byte `at` of `file`.
    pub(crate) fn write(&mut self, file: &Arc<ImageFile>, at: u64, buffer: AlignedBuf, len: usize) -> Result<()> {
        let (file, engine) = (Arc::clone(file), Arc::clone(&self.engine));
        let image = ImageBuffer(Some(buffer), self.returned.0.clone());
        self.in_flight += 1;
        lock(&file.state).pending += 1;
        self.threads.run(move || file.write(&*engine, at, &image.0.as_deref().unwrap_or_default()[..len]))
    }

    /// Like [`Self::write`], for the only image of a file, which has its first page.
    pub(crate) fn write_alone(&mut self, file: &Arc<ImageFile>, buffer: AlignedBuf, len: usize) -> Result<()> {
        lock(&file.state).end = Some((None, len as u64));
        self.write(file, 0, buffer, len)
    }

    /// Ends a file of `bytes` bytes, after its last image: writes its first pages, `head`, and syncs it.
    pub(crate) fn end_file(&mut self, file: &Arc<ImageFile>, head: AlignedBuf, bytes: u64) -> Result<()> {
        let (file, engine) = (Arc::clone(file), Arc::clone(&self.engine));
        let mut state = lock(&file.state);
        state.end = Some((Some(head), bytes));
        state.pending += 1;
        drop(state);
        self.threads.run(move || file.end_one(&*engine))
    }
}

/// A stream of bytes that is written to a range of a file.
#[derive(Debug)]
pub(crate) struct ChunkedStream {
    output: Arc<StreamOutput>,
    /// Maximum length.
    limit: u64,
    filled: u64,
    /// The last piece, if it is not full.
    piece: Option<PooledBuf>,
}

/// The range of a stream, whose pieces are written in any order.
#[derive(Debug)]
struct StreamOutput {
    io: Arc<dyn IoFile>,
    start: u64,
    state: Mutex<StreamState>,
}

#[derive(Debug, Default)]
struct StreamState {
    checksums: Vec<u32>,
    /// Number of pieces submitted but not written yet.
    pending: usize,
    /// Length of the stream, set when a page of checksums is to follow it.
    end: Option<u64>,
    sealed: Option<DenseFile>,
}

impl ChunkedStream {
    /// Creates a stream of at most `limit` bytes at byte `start` of a file. Zeros follow it up to a whole page.
    pub(crate) fn new(io: Arc<dyn IoFile>, start: u64, limit: u64) -> Self {
        let output = StreamOutput { io, start, state: Mutex::default() };
        Self { output: Arc::new(output), limit, filled: 0, piece: None }
    }

    /// Number of bytes that can be appended.
    pub(crate) fn room(&self) -> u64 {
        self.limit - self.filled
    }

    pub(crate) fn path(&self) -> &Path {
        self.output.io.path()
    }

    /// Takes the checksums of the chunks, after everything is written.
    pub(crate) fn take_checksums(&self) -> Vec<u32> {
        std::mem::take(&mut lock(&self.output.state).checksums)
    }

    /// Returns the manifest entry of the file of a sealed stream.
    pub(crate) fn sealed(&self) -> Result<DenseFile> {
        let sealed = lock(&self.output.state).sealed.clone();
        sealed.ok_or_else(|| Kind::State.error(format!("{} was not written to its end", self.path().display())))
    }
}

impl StreamOutput {
    /// Writes whole pages at byte `at` of the stream.
    fn write(&self, at: u64, data: &[u8]) -> Result<()> {
        self.io.write_at(self.start + at, data)?;
        let first = (at / STREAM_CHUNK_BYTES as u64) as usize;
        let checksums: Vec<u32> = data.chunks(STREAM_CHUNK_BYTES).map(crc32c::crc32c).collect();
        let mut state = lock(&self.state);
        let end = first + checksums.len();
        if state.checksums.len() < end {
            state.checksums.resize(end, 0);
        }
        state.checksums[first..end].copy_from_slice(&checksums);
        state.pending -= 1;
        drop(state);
        self.seal_if_complete()
    }

    /// Writes the page of checksums and syncs the file, if the last piece of a sealed stream was written.
    fn seal_if_complete(&self) -> Result<()> {
        let mut state = lock(&self.state);
        let Some(end) = state.end.filter(|_| state.pending == 0 && state.sealed.is_none()) else { return Ok(()) };
        let mut page = AlignedBuf::zeroed(CHECKSUM_PAGE_BYTES);
        let checksums: &[u8] = bytemuck::cast_slice(&state.checksums);
        page[..checksums.len()].copy_from_slice(checksums);
        self.io.write_at(end, &page)?;
        let bytes = end + CHECKSUM_PAGE_BYTES as u64;
        // The file was created with the expected length, which may be wrong.
        self.io.set_len(bytes)?;
        self.io.sync()?;
        state.sealed = Some(DenseFile { bytes, checksums_crc32c: crc32c::crc32c(&page) });
        Ok(())
    }
}

/// Writes streams. In memory are a piece of 4 MiB per stream that is being filled, and at most seven pieces that are
/// queued or being written.
#[derive(Debug)]
pub(crate) struct StreamWriter {
    buffers: Arc<BufPool>,
    pub(crate) threads: WriterThreads,
}

impl StreamWriter {
    /// Starts up to `threads` threads, or none for streams of one piece in total.
    pub(crate) fn start(threads: usize, total_bytes: u64) -> Self {
        let threads = if total_bytes > STREAM_PIECE_BYTES as u64 { threads.min(STREAM_THREADS) } else { 0 };
        let buffers = Arc::new(BufPool::new(STREAM_PIECE_BYTES, STREAM_THREADS + MAX_QUEUED + 1));
        Self { buffers, threads: WriterThreads::start(threads, MAX_QUEUED) }
    }

    /// Appends `bytes`, at most as many as there is room for. `copy(at, into)` fills `into` with the bytes from offset
    /// `at`.
    pub(crate) fn append(
        &self,
        stream: &mut ChunkedStream,
        bytes: usize,
        copy: impl Fn(usize, &mut [u8]),
    ) -> Result<()> {
        let mut at = 0;
        while at < bytes {
            let mut piece = match stream.piece.take() {
                Some(piece) => piece,
                None => self.buffers.take_at_least(STREAM_PIECE_BYTES)?,
            };
            let filled = (stream.filled % STREAM_PIECE_BYTES as u64) as usize;
            let count = (STREAM_PIECE_BYTES - filled).min(bytes - at);
            copy(at, &mut piece[filled..filled + count]);
            at += count;
            stream.filled += count as u64;
            stream.piece = Some(piece);
            if filled + count == STREAM_PIECE_BYTES || stream.room() == 0 {
                self.submit_piece(stream)?;
            }
        }
        Ok(())
    }

    /// Submits the last piece, if there is one.
    fn submit_piece(&self, stream: &mut ChunkedStream) -> Result<()> {
        let Some(mut piece) = stream.piece.take() else { return Ok(()) };
        let at = (stream.filled - 1) / STREAM_PIECE_BYTES as u64 * STREAM_PIECE_BYTES as u64;
        let end = (stream.filled - at) as usize;
        let len = end.next_multiple_of(ALIGNMENT);
        piece[end..len].fill(0);
        let output = Arc::clone(&stream.output);
        lock(&output.state).pending += 1;
        self.threads.run(move || output.write(at, &piece[..len]))
    }

    /// Ends a stream, which is alone in its file. When its last piece is written, writes a page of its checksums and
    /// syncs the file.
    pub(crate) fn seal(&self, stream: &mut ChunkedStream) -> Result<()> {
        self.submit_piece(stream)?;
        lock(&stream.output.state).end = Some(stream.filled);
        stream.output.seal_if_complete()?;
        self.threads.check()
    }
}

/// A range of a file, with the checksum of each chunk.
#[derive(Debug)]
pub(crate) struct ChunkedInput {
    pub(crate) io: Arc<dyn IoFile>,
    /// Offset of the range in the file.
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) checksums: Vec<u32>,
    /// Names the range in errors, after a number of bytes.
    pub(crate) label: String,
}

impl ChunkedInput {
    /// Extends a byte range to whole chunks.
    pub(crate) fn cover(&self, range: &Range<u64>) -> Range<u64> {
        let chunk = STREAM_CHUNK_BYTES as u64;
        range.start / chunk * chunk..range.end.next_multiple_of(chunk).min(self.bytes)
    }

    /// Reads and verifies the bytes of `range` into memory of the same length. Returns the buffer that received the
    /// whole chunks, unless they were read directly.
    pub(crate) fn read(
        &self,
        range: &Range<u64>,
        into: &mut [u8],
        buffers: &Arc<BufPool>,
    ) -> Result<Option<PooledBuf>> {
        let cover = self.cover(range);
        if cover == *range && into.as_ptr().addr().is_multiple_of(ALIGNMENT) {
            return self.read_chunks(cover.start, into).map(|()| None);
        }
        let len = (cover.end - cover.start) as usize;
        let mut bytes = buffers.take_at_least(len)?;
        self.read_chunks(cover.start, &mut bytes[..len])?;
        into.copy_from_slice(&bytes[(range.start - cover.start) as usize..][..into.len()]);
        Ok(Some(bytes))
    }

    /// Reads and verifies whole chunks at byte `at`.
    fn read_chunks(&self, at: u64, into: &mut [u8]) -> Result<()> {
        self.io.read_at(self.start + at, into)?;
        let checksums = &self.checksums[(at / STREAM_CHUNK_BYTES as u64) as usize..];
        assert!(checksums.len() * STREAM_CHUNK_BYTES >= into.len(), "each chunk has a checksum");
        for (n, (chunk, &expected)) in into.chunks(STREAM_CHUNK_BYTES).zip(checksums).enumerate() {
            let what = || format!("the checksum of {} bytes{}", chunk.len(), self.label);
            let offset = self.start + at + (n * STREAM_CHUNK_BYTES) as u64;
            check_crc32c(self.io.path(), offset, what, chunk, expected)?;
        }
        Ok(())
    }
}

/// Returns `Corruption` if the CRC-32C of `bytes`, at `offset` of the file `path`, is not `expected`. `what` names it.
pub(crate) fn check_crc32c<S: AsRef<str>>(
    path: &Path,
    offset: u64,
    what: impl FnOnce() -> S,
    bytes: &[u8],
    expected: u32,
) -> Result<()> {
    let found = crc32c::crc32c(bytes);
    if found == expected { Ok(()) } else { Err(Error::corruption(path, offset, what().as_ref(), expected, found)) }
}

/// Returns `Corruption` if the length of `file` is not `expected`.
pub(crate) fn check_length(file: &dyn IoFile, expected: u64) -> Result<()> {
    let len = file.len()?;
    if len == expected {
        return Ok(());
    }
    Err(Error::corruption(file.path(), 0, "the file's length", expected, len))
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
