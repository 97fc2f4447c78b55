//! Writes and reads the dense state of a checkpoint: one stream of bytes per rank, whose meaning only the caller knows.
//! See [`DenseShare`] for the layout of its files.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::background_file::for_each_piece;
use super::directory::CheckpointDirectory;
use crate::checkpoint::manifest::dense_data_file;
use crate::checkpoint::manifest::manifests::{
    CHECKSUM_PAGE_BYTES, DENSE_CHUNK_BYTES, DENSE_DIR, DENSE_FILE_BYTES, DenseExtent, DenseFile, DenseShare,
};
use crate::error::{Error, Kind, Result};
use crate::io::{ALIGNMENT, AlignedBuf, BufPool, IoEngine, IoFile, IoOpenMode, PooledBuf};
use crate::runtime::memory::can_start_threads;
use crate::runtime::sync::lock;

/// Size of one I/O request, in whole chunks.
pub(crate) const DENSE_PIECE_BYTES: usize = 16 * DENSE_CHUNK_BYTES;
/// Number of threads that write or read pieces.
pub(crate) const DENSE_THREADS: usize = 4;
/// Maximum number of full pieces queued for the threads.
pub(crate) const MAX_QUEUED_PIECES: usize = 3;

/// Writes one rank's stream. At most eight pieces of 4 MiB are in memory: one being filled, three queued, four being
/// written.
#[derive(Debug)]
pub struct DenseWriter {
    directory: CheckpointDirectory,
    rank: u32,
    world: u32,
    /// Maximum bytes of the stream per file.
    file_bytes: u64,
    /// Number of bytes that the caller expects to write. Used only to preallocate disk space, so a wrong value is
    /// harmless otherwise.
    expected_bytes: u64,
    buffers: Arc<BufPool>,
    pool: PieceWriterPool,
    files: Vec<Arc<DenseOutputFile>>,
    /// The piece of the last file that is being filled; `None` if the next byte starts a file.
    open: Option<DenseOpenPiece>,
    position: u64,
    extent_start: u64,
}

#[derive(Debug)]
struct DenseOpenPiece {
    piece: PooledBuf,
    /// Number of bytes filled.
    filled: usize,
    /// Offset of the piece in the file.
    at: u64,
}

impl DenseWriter {
    /// Creates a stream in `dir`, the directory of a checkpoint or of a checkpoint part.
    pub(crate) fn new(dir: &CheckpointDirectory, rank: u32, world: u32, expected_bytes: u64) -> Self {
        Self {
            directory: dir.subdirectory(DENSE_DIR),
            rank,
            world,
            file_bytes: DENSE_FILE_BYTES,
            expected_bytes,
            buffers: Arc::new(BufPool::new(DENSE_PIECE_BYTES, DENSE_THREADS + MAX_QUEUED_PIECES + 1)),
            pool: PieceWriterPool::start(if expected_bytes > DENSE_PIECE_BYTES as u64 { DENSE_THREADS } else { 0 }),
            files: Vec::new(),
            open: None,
            position: 0,
            extent_start: 0,
        }
    }

    /// Limits a file to `bytes` of the stream, rounded up to a multiple of [`ALIGNMENT`]. The default and maximum is
    /// 256 MiB.
    #[must_use]
    pub fn with_file_bytes(mut self, bytes: u64) -> Self {
        self.file_bytes = bytes.clamp(1, DENSE_FILE_BYTES).next_multiple_of(ALIGNMENT as u64);
        self
    }

    /// Appends to the extent that is being written.
    ///
    /// Errors: `Storage` of this write or of an earlier one; `Memory`. After an error the stream cannot be finished.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.fill(bytes.len(), |at, into| into.copy_from_slice(&bytes[at..at + into.len()]))
    }

    /// Ends the extent. The next one starts at the next multiple of [`ALIGNMENT`].
    pub fn end_extent(&mut self) -> Result<DenseExtent> {
        let extent = DenseExtent { offset: self.extent_start, bytes: self.position - self.extent_start };
        let pad = self.position.next_multiple_of(ALIGNMENT as u64) - self.position;
        self.fill(pad as usize, |_, into| into.fill(0))?;
        self.extent_start = self.position;
        Ok(extent)
    }

    /// Makes the stream durable.
    pub fn finish(mut self) -> Result<DenseShare> {
        self.end_extent()?;
        if let Some(open) = self.open.take() {
            let end = open.at + open.filled as u64;
            self.submit_piece(open)?;
            self.pool.seal(self.file(), end)?;
        }
        self.pool.end()?;
        let files = self.files.iter().map(|file| file.sealed()).collect::<Result<Vec<_>>>()?;
        if !files.is_empty() {
            self.directory.sync()?;
        }
        Ok(DenseShare { files })
    }

    /// Appends `bytes` to the stream. `copy(at, into)` fills `into` with the bytes from offset `at`.
    fn fill(&mut self, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> Result<()> {
        let mut at = 0;
        while at < bytes {
            let filled = self.take_open().and_then(|mut open| {
                let end = self.piece_bytes(&open);
                let count = (end - open.filled).min(bytes - at);
                copy(at, &mut open.piece[open.filled..open.filled + count]);
                open.filled += count;
                self.position += count as u64;
                if open.filled < end {
                    self.open = Some(open);
                } else {
                    self.submit_full_piece(open)?;
                }
                Ok(count)
            });
            at += filled.inspect_err(|error| self.pool.fail(error))?;
        }
        Ok(())
    }

    /// Takes the piece that receives the next byte.
    fn take_open(&mut self) -> Result<DenseOpenPiece> {
        if let Some(open) = self.open.take() {
            return Ok(open);
        }
        self.open_file()?;
        Ok(DenseOpenPiece { piece: self.buffers.take_at_least(DENSE_PIECE_BYTES)?, filled: 0, at: 0 })
    }

    /// Size of the piece when it is full: a multiple of [`ALIGNMENT`].
    fn piece_bytes(&self, open: &DenseOpenPiece) -> usize {
        (self.file_bytes - open.at).min(DENSE_PIECE_BYTES as u64) as usize
    }

    /// Submits a full piece.
    fn submit_full_piece(&mut self, open: DenseOpenPiece) -> Result<()> {
        let at = open.at + open.filled as u64;
        self.submit_piece(open)?;
        if at == self.file_bytes {
            return self.pool.seal(self.file(), at);
        }
        self.open = Some(DenseOpenPiece { piece: self.buffers.take_at_least(DENSE_PIECE_BYTES)?, filled: 0, at });
        Ok(())
    }

    fn file(&self) -> &Arc<DenseOutputFile> {
        self.files.last().expect("a piece is open in a file")
    }

    fn open_file(&mut self) -> Result<()> {
        if self.files.is_empty() {
            self.directory.make()?;
        }
        let path = self.directory.join(dense_data_file(self.rank, self.world, self.files.len()));
        let expected = self.expected_bytes.saturating_sub(self.position).min(self.file_bytes);
        let bytes = expected.next_multiple_of(ALIGNMENT as u64) + CHECKSUM_PAGE_BYTES as u64;
        let io = self.directory.engine().open(&path, IoOpenMode::Create { preallocate: bytes })?;
        if expected > DENSE_PIECE_BYTES as u64 {
            // The length is set first because writes that extend a file are serialized.
            io.set_len(bytes)?;
        }
        self.files.push(Arc::new(DenseOutputFile { io, state: Mutex::default() }));
        Ok(())
    }

    fn submit_piece(&mut self, open: DenseOpenPiece) -> Result<()> {
        // The piece is empty if the last file ends exactly where the stream ends.
        if open.filled == 0 {
            return Ok(());
        }
        let file = Arc::clone(self.file());
        lock(&file.state).pending += 1;
        self.pool.run(PieceWriteTask { to: file, piece: open.piece, len: open.filled, at: open.at })
    }
}

/// A file whose pieces are written in any order.
#[derive(Debug)]
struct DenseOutputFile {
    io: Arc<dyn IoFile>,
    state: Mutex<DenseOutputState>,
}

#[derive(Debug, Default)]
struct DenseOutputState {
    checksums: Vec<u32>,
    /// Number of pieces submitted but not written yet.
    pending: usize,
    /// Number of stream bytes in the file, set after its last piece.
    data_bytes: Option<u64>,
    sealed: Option<DenseFile>,
}

impl PieceTarget for DenseOutputFile {
    fn write(&self, at: u64, data: &[u8]) -> Result<()> {
        self.io.write_at(at, data)?;
        let first = (at / DENSE_CHUNK_BYTES as u64) as usize;
        let checksums: Vec<u32> = data.chunks(DENSE_CHUNK_BYTES).map(crc32c::crc32c).collect();
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
}

impl DenseOutputFile {
    /// Writes the checksum page and syncs, if this was the last piece.
    fn seal_if_complete(&self) -> Result<()> {
        let mut state = lock(&self.state);
        let Some(data_bytes) = state.data_bytes.filter(|_| state.pending == 0 && state.sealed.is_none()) else {
            return Ok(());
        };
        let mut page = AlignedBuf::zeroed(CHECKSUM_PAGE_BYTES);
        let checksums: &[u8] = bytemuck::cast_slice(&state.checksums);
        page[..checksums.len()].copy_from_slice(checksums);
        self.io.write_at(data_bytes, &page)?;
        let bytes = data_bytes + CHECKSUM_PAGE_BYTES as u64;
        // The file was created with the expected length, which may be wrong.
        self.io.set_len(bytes)?;
        self.io.sync()?;
        state.sealed = Some(DenseFile { bytes, checksums_crc32c: crc32c::crc32c(&page) });
        Ok(())
    }

    fn sealed(&self) -> Result<DenseFile> {
        let sealed = lock(&self.state).sealed.clone();
        sealed
            .ok_or_else(|| Error::new(Kind::State, format!("{} was not written to its end", self.io.path().display())))
    }
}

/// Destination of pieces, which arrive in any order.
pub(crate) trait PieceTarget: Send + Sync + std::fmt::Debug {
    /// Writes whole pages at `at` and records their checksums.
    fn write(&self, at: u64, data: &[u8]) -> Result<()>;
}

#[derive(Debug)]
pub(crate) struct PieceWriteTask {
    pub(crate) to: Arc<dyn PieceTarget>,
    pub(crate) piece: PooledBuf,
    pub(crate) len: usize,
    pub(crate) at: u64,
}

impl PieceWriteTask {
    fn write(&self) -> Result<()> {
        self.to.write(self.at, &self.piece[..self.len])
    }
}

/// Threads that write pieces. Without threads the caller writes them.
#[derive(Debug)]
pub(crate) struct PieceWriterPool {
    send: Option<SyncSender<PieceWriteTask>>,
    threads: Vec<JoinHandle<()>>,
    /// The first error. Nothing is written after it.
    error: Arc<Mutex<Option<Error>>>,
}

impl PieceWriterPool {
    pub(crate) fn start(threads: usize) -> Self {
        let (send, receive) = sync_channel(MAX_QUEUED_PIECES);
        let receive = Arc::new(Mutex::new(receive));
        let error = Arc::new(Mutex::new(None));
        let threads = if threads > 0 && can_start_threads() { threads } else { 0 };
        let threads: Vec<_> = (0..threads)
            .filter_map(|_| {
                let (receive, error) = (Arc::clone(&receive), Arc::clone(&error));
                let named = std::thread::Builder::new().name("embcache-save".into());
                named.spawn(move || run_piece_writer(&receive, &error)).ok()
            })
            .collect();
        let send = (!threads.is_empty()).then_some(send);
        Self { send, threads, error }
    }

    pub(crate) fn fail(&self, error: &Error) {
        lock(&self.error).get_or_insert_with(|| error.clone());
    }

    fn check(&self) -> Result<()> {
        lock(&self.error).clone().map_or(Ok(()), Err)
    }

    pub(crate) fn run(&self, task: PieceWriteTask) -> Result<()> {
        self.check()?;
        match &self.send {
            // Fails only if every thread has panicked, which `end()` reports.
            Some(send) => send.send(task).map_err(|_| Error::new(Kind::Storage, "the writing threads ended")),
            None => task.write(),
        }
    }

    /// Marks `file` as complete with `data_bytes` of the stream.
    fn seal(&self, file: &Arc<DenseOutputFile>, data_bytes: u64) -> Result<()> {
        lock(&file.state).data_bytes = Some(data_bytes);
        file.seal_if_complete()?;
        self.check()
    }

    /// Waits until everything is written.
    pub(crate) fn end(&mut self) -> Result<()> {
        drop(self.send.take());
        for thread in self.threads.drain(..) {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
        self.check()
    }
}

impl Drop for PieceWriterPool {
    fn drop(&mut self) {
        // Nothing may be written after the writer is dropped, because its directory may be removed.
        drop(self.send.take());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn run_piece_writer(receive: &Mutex<Receiver<PieceWriteTask>>, error: &Mutex<Option<Error>>) {
    loop {
        let received = lock(receive).recv();
        let Ok(task) = received else { return };
        if lock(error).is_some() {
            continue;
        }
        if let Err(failed) = task.write() {
            lock(error).get_or_insert(failed);
        }
    }
}

/// Reads the streams of all ranks of a checkpoint.
#[derive(Debug)]
pub struct DenseReader {
    directory: CheckpointDirectory,
    streams: Vec<DenseStream>,
    open: Mutex<HashMap<(usize, usize), Arc<DenseInputFile>>>,
    buffers: Arc<BufPool>,
    /// The last chunk that was read in part. The next small extent is often in the same chunk.
    last: Mutex<Option<DenseLastChunk>>,
}

#[derive(Debug)]
struct DenseStream {
    files: Vec<DenseFile>,
    /// Offset of each file in the stream, then the length of the stream.
    starts: Vec<u64>,
}

#[derive(Debug)]
struct DenseLastChunk {
    file: (usize, usize),
    start: u64,
    len: usize,
    bytes: PooledBuf,
}

/// The part of a read that is in one file.
struct DenseReadPiece<'a> {
    rank: usize,
    file: usize,
    /// Byte range in the file.
    range: Range<u64>,
    into: &'a mut [u8],
}

impl DenseReader {
    /// Opens the streams of the checkpoint in `dir`. `shares` has one entry per rank, in rank order, already checked.
    pub(crate) fn new<'a>(dir: &CheckpointDirectory, shares: impl Iterator<Item = Option<&'a DenseShare>>) -> Self {
        let streams = shares.map(|share| DenseStream::new(share.map_or_else(Vec::new, |share| share.files.clone())));
        Self {
            directory: dir.subdirectory(DENSE_DIR),
            streams: streams.collect(),
            open: Mutex::default(),
            buffers: Arc::new(BufPool::new(DENSE_PIECE_BYTES, DENSE_THREADS)),
            last: Mutex::default(),
        }
    }

    /// Length of each rank's stream in bytes.
    pub fn stream_bytes(&self) -> Vec<u64> {
        self.streams.iter().map(DenseStream::bytes).collect()
    }

    /// Reads `extent`, or a part of one, of `rank`'s stream into `into`, which has the same length. At most four pieces
    /// of 4 MiB are in memory.
    ///
    /// Errors: `Corruption` with file and byte offset, also if the extent is outside the stream; `Storage`.
    pub fn read(&self, rank: u32, extent: DenseExtent, into: &mut [u8]) -> Result<()> {
        let outside = || {
            let what = format!("the extent at {} of rank {rank}", extent.offset);
            let end = self.streams.get(rank as usize).map_or(0, DenseStream::bytes);
            Error::corruption(
                self.directory.path(),
                0,
                &what,
                format!("within {end} bytes"),
                format!("{} long", extent.bytes),
            )
        };
        let stream = self.streams.get(rank as usize).ok_or_else(outside)?;
        let end = extent.offset.checked_add(extent.bytes).filter(|&end| end <= stream.bytes()).ok_or_else(outside)?;
        if into.len() as u64 != extent.bytes {
            let what = format!("{} bytes are to be read into {}", extent.bytes, into.len());
            return Err(Error::new(Kind::Input, what));
        }
        for_each_piece(DENSE_THREADS, stream.pieces(rank as usize, extent.offset..end, into), |piece| {
            self.read_piece(piece)
        })
    }

    fn read_piece(&self, piece: DenseReadPiece<'_>) -> Result<()> {
        let DenseReadPiece { rank, file, range, into } = piece;
        let opened = self.file(rank, file)?;
        let chunk = DENSE_CHUNK_BYTES as u64;
        let cover = range.start / chunk * chunk..range.end.next_multiple_of(chunk).min(opened.data_bytes);
        if cover == range && into.as_ptr().addr().is_multiple_of(ALIGNMENT) {
            opened.io.read_at(range.start, into)?;
            return opened.verify(range.start, into);
        }
        let len = (cover.end - cover.start) as usize;
        let within = (range.start - cover.start) as usize..(range.end - cover.start) as usize;
        let mut last = if len <= DENSE_CHUNK_BYTES { Some(lock(&self.last)) } else { None };
        if let Some(found) = last.as_ref().and_then(|last| last.as_ref())
            && (found.file, found.start, found.len) == ((rank, file), cover.start, len)
        {
            into.copy_from_slice(&found.bytes[within]);
            return Ok(());
        }
        let mut bytes = self.buffers.take_at_least(len)?;
        opened.io.read_at(cover.start, &mut bytes[..len])?;
        opened.verify(cover.start, &bytes[..len])?;
        into.copy_from_slice(&bytes[within]);
        if let Some(last) = &mut last {
            **last = Some(DenseLastChunk { file: (rank, file), start: cover.start, len, bytes });
        }
        Ok(())
    }

    fn file(&self, rank: usize, n: usize) -> Result<Arc<DenseInputFile>> {
        if let Some(file) = lock(&self.open).get(&(rank, n)) {
            return Ok(Arc::clone(file));
        }
        let name = dense_data_file(rank as u32, self.streams.len() as u32, n);
        let path = self.directory.join(name);
        let file = Arc::new(DenseInputFile::open(self.directory.engine(), path, &self.streams[rank].files[n])?);
        lock(&self.open).insert((rank, n), Arc::clone(&file));
        Ok(file)
    }
}

impl DenseStream {
    fn new(files: Vec<DenseFile>) -> Self {
        let ends = files.iter().scan(0_u64, |end, file| {
            *end += file.data_bytes();
            Some(*end)
        });
        let starts = std::iter::once(0).chain(ends).collect();
        Self { files, starts }
    }

    fn bytes(&self) -> u64 {
        self.starts[self.files.len()]
    }

    /// Splits a range of the stream at file boundaries, and within files into pieces of [`DENSE_PIECE_BYTES`].
    fn pieces<'a>(&self, rank: usize, range: Range<u64>, into: &'a mut [u8]) -> Vec<DenseReadPiece<'a>> {
        let mut file = self.starts.partition_point(|&start| start <= range.start).saturating_sub(1);
        let (mut at, mut rest, mut pieces) = (range.start, into, Vec::new());
        while at < range.end {
            if at == self.starts[file + 1] {
                file += 1;
                continue;
            }
            let start = at - self.starts[file];
            let piece_end = (start / DENSE_PIECE_BYTES as u64 + 1) * DENSE_PIECE_BYTES as u64;
            let end = piece_end.min(self.starts[file + 1] - self.starts[file]).min(range.end - self.starts[file]);
            let (head, tail) = rest.split_at_mut((end - start) as usize);
            pieces.push(DenseReadPiece { rank, file, range: start..end, into: head });
            (at, rest) = (self.starts[file] + end, tail);
        }
        pieces
    }
}

/// A dense data file whose length and checksum page are verified.
#[derive(Debug)]
struct DenseInputFile {
    path: PathBuf,
    io: Arc<dyn IoFile>,
    data_bytes: u64,
    checksums: Vec<u32>,
}

impl DenseInputFile {
    fn open(engine: &dyn IoEngine, path: PathBuf, file: &DenseFile) -> Result<Self> {
        let io = engine.open(&path, IoOpenMode::Read)?;
        let len = io.len()?;
        if len != file.bytes {
            return Err(Error::corruption(&path, 0, "the file's length", file.bytes, len));
        }
        let data_bytes = file.data_bytes();
        let mut page = vec![0_u32; CHECKSUM_PAGE_BYTES / 4];
        io.read_at(data_bytes, bytemuck::cast_slice_mut(&mut page))?;
        let found = crc32c::crc32c(bytemuck::cast_slice(&page));
        if found != file.checksums_crc32c {
            let what = "the checksum of the checksums";
            return Err(Error::corruption(&path, data_bytes, what, file.checksums_crc32c, found));
        }
        page.truncate(data_bytes.div_ceil(DENSE_CHUNK_BYTES as u64) as usize);
        Ok(Self { path, io, data_bytes, checksums: page })
    }

    /// Verifies the chunks at byte `start`, a multiple of the chunk size.
    fn verify(&self, start: u64, bytes: &[u8]) -> Result<()> {
        let first = (start / DENSE_CHUNK_BYTES as u64) as usize;
        let what = |len: usize| format!("the checksum of {len} bytes");
        verify_chunks(&self.path, start, &self.checksums[first..], bytes, &what)
    }
}

/// Returns `Corruption` if the CRC-32C of a chunk of `bytes` differs from `checksums`. `bytes` are at offset `start` of
/// the file `path`; `label` names the checksum of a chunk of a given length.
pub(crate) fn verify_chunks(
    path: &Path,
    start: u64,
    checksums: &[u32],
    bytes: &[u8],
    label: &dyn Fn(usize) -> String,
) -> Result<()> {
    assert!(checksums.len() * DENSE_CHUNK_BYTES >= bytes.len(), "each chunk has a checksum");
    for (n, (chunk, &expected)) in bytes.chunks(DENSE_CHUNK_BYTES).zip(checksums).enumerate() {
        let found = crc32c::crc32c(chunk);
        if expected != found {
            let at = start + (n * DENSE_CHUNK_BYTES) as u64;
            return Err(Error::corruption(path, at, &label(chunk.len()), expected, found));
        }
    }
    Ok(())
}
