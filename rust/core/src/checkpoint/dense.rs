//! Writes and reads the dense state of a checkpoint: one stream of bytes per rank, whose meaning only the caller knows.
//! See [`DenseShare`] for the layout of its files.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use super::chunked_file::{
    ChunkedInput, ChunkedStream, STREAM_PIECE_BYTES, STREAM_THREADS, StreamWriter, check_crc32c, check_length,
    for_each_piece,
};
use super::directory::CheckpointDirectory;
use crate::checkpoint::manifest::dense_data_file;
use crate::checkpoint::manifest::manifests::{
    CHECKSUM_PAGE_BYTES, CheckpointManifests, DENSE_DIR, DENSE_FILE_BYTES, DenseExtent, DenseFile, DenseShare,
    STREAM_CHUNK_BYTES,
};
use crate::error::{Error, Kind, Result};
use crate::io::{ALIGNMENT, BufPool, IoOpenMode, PooledBuf};
use crate::runtime::sync::lock;

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
    writer: StreamWriter,
    /// The files. Each is sealed when it is full, and the last one at the end.
    files: Vec<ChunkedStream>,
    position: u64,
    extent_start: u64,
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
            writer: StreamWriter::start(STREAM_THREADS, expected_bytes),
            files: Vec::new(),
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
        if let Some(file) = self.files.last_mut().filter(|file| file.room() > 0) {
            self.writer.seal(file)?;
        }
        self.writer.threads.end()?;
        let files = self.files.iter().map(ChunkedStream::sealed).collect::<Result<Vec<_>>>()?;
        if !files.is_empty() {
            self.directory.sync()?;
        }
        Ok(DenseShare { files })
    }

    /// Appends `bytes` to the stream. `copy(at, into)` fills `into` with the bytes from offset `at`.
    fn fill(&mut self, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> Result<()> {
        let mut at = 0;
        while at < bytes {
            let filled = self.fill_file(bytes - at, |offset, into| copy(at + offset, into));
            at += filled.inspect_err(|error| self.writer.threads.fail(error))?;
        }
        Ok(())
    }

    /// Appends at most `bytes` to the last file, or to a new one if it is full. Returns their number.
    fn fill_file(&mut self, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> Result<usize> {
        if self.files.last().is_none_or(|file| file.room() == 0) {
            self.open_file()?;
        }
        let file = self.files.last_mut().expect("a file was opened");
        let count = file.room().min(bytes as u64) as usize;
        self.writer.append(file, count, copy)?;
        self.position += count as u64;
        if file.room() == 0 {
            self.writer.seal(file)?;
        }
        Ok(count)
    }

    fn open_file(&mut self) -> Result<()> {
        if self.files.is_empty() {
            self.directory.make()?;
        }
        let path = self.directory.join(dense_data_file(self.rank, self.world, self.files.len()));
        let expected = self.expected_bytes.saturating_sub(self.position).min(self.file_bytes);
        let bytes = expected.next_multiple_of(ALIGNMENT as u64) + CHECKSUM_PAGE_BYTES as u64;
        let io = self.directory.engine().open(&path, IoOpenMode::Create { preallocate: bytes })?;
        if expected > STREAM_PIECE_BYTES as u64 {
            // The length is set first because writes that extend a file are serialized.
            io.set_len(bytes)?;
        }
        self.files.push(ChunkedStream::new(io, 0, self.file_bytes));
        Ok(())
    }
}

/// Reads the streams of all ranks of a checkpoint.
#[derive(Debug)]
pub struct DenseReader {
    directory: CheckpointDirectory,
    manifests: Arc<CheckpointManifests>,
    /// The ranks' streams that were needed.
    streams: Vec<OnceLock<DenseStream>>,
    open: Mutex<HashMap<(usize, usize), Arc<ChunkedInput>>>,
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
    range: Range<u64>,
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
    /// Returns a reader of a checkpoint's streams.
    pub(crate) fn new(manifests: &Arc<CheckpointManifests>) -> Self {
        Self {
            directory: manifests.directory.subdirectory(DENSE_DIR),
            manifests: Arc::clone(manifests),
            streams: manifests.coordinator.ranks.iter().map(|_| OnceLock::new()).collect(),
            open: Mutex::default(),
            buffers: Arc::new(BufPool::new(STREAM_PIECE_BYTES, STREAM_THREADS)),
            last: Mutex::default(),
        }
    }

    /// Returns the stream of `rank`, whose manifest is read. `None` if there is no such rank.
    fn stream(&self, rank: u32) -> Result<Option<&DenseStream>> {
        let Some(stream) = self.streams.get(rank as usize) else { return Ok(None) };
        if let Some(stream) = stream.get() {
            return Ok(Some(stream));
        }
        let share = &self.manifests.rank(rank)?.dense;
        let files = share.as_ref().map_or_else(Vec::new, |share| share.files.clone());
        Ok(Some(stream.get_or_init(|| DenseStream::new(files))))
    }

    /// Length of each rank's stream in bytes. Reads the manifests of all ranks.
    pub fn stream_bytes(&self) -> Result<Vec<u64>> {
        let ranks = 0..self.streams.len() as u32;
        ranks.map(|rank| Ok(self.stream(rank)?.map_or(0, DenseStream::bytes))).collect()
    }

    /// Reads `extent`, or a part of one, of `rank`'s stream into `into`, which has the same length. At most four pieces
    /// of 4 MiB are in memory.
    ///
    /// Errors: `Corruption` with file and byte offset, also if the extent is outside the stream; `Storage`.
    pub fn read(&self, rank: u32, extent: DenseExtent, into: &mut [u8]) -> Result<()> {
        let stream = self.stream(rank)?;
        let outside = || {
            let what = format!("the extent at {} of rank {rank}", extent.offset);
            let end = stream.map_or(0, DenseStream::bytes);
            Error::corruption(
                self.directory.path(),
                0,
                &what,
                format!("within {end} bytes"),
                format!("{} long", extent.bytes),
            )
        };
        let stream = stream.ok_or_else(outside)?;
        let end = extent.offset.checked_add(extent.bytes).filter(|&end| end <= stream.bytes()).ok_or_else(outside)?;
        if into.len() as u64 != extent.bytes {
            let what = format!("{} bytes are to be read into {}", extent.bytes, into.len());
            return Err(Kind::Input.error(what));
        }
        for_each_piece(STREAM_THREADS, stream.pieces(rank as usize, extent.offset..end, into), |piece| {
            self.read_piece(piece)
        })
    }

    fn read_piece(&self, DenseReadPiece { rank, file, range, into }: DenseReadPiece<'_>) -> Result<()> {
        let opened = self.file(rank, file)?;
        let cover = opened.cover(&range);
        let is_part = cover != range && cover.end - cover.start <= STREAM_CHUNK_BYTES as u64;
        let mut last = is_part.then(|| lock(&self.last));
        if let Some(found) = last.as_ref().and_then(|last| last.as_ref())
            && (found.file, &found.range) == ((rank, file), &cover)
        {
            into.copy_from_slice(&found.bytes[(range.start - cover.start) as usize..][..into.len()]);
            return Ok(());
        }
        let read = opened.read(&range, into, &self.buffers)?;
        if let (Some(last), Some(bytes)) = (&mut last, read) {
            **last = Some(DenseLastChunk { file: (rank, file), range: cover, bytes });
        }
        Ok(())
    }

    /// Opens a file, and verifies its length and its page of checksums.
    fn file(&self, rank: usize, n: usize) -> Result<Arc<ChunkedInput>> {
        if let Some(file) = lock(&self.open).get(&(rank, n)) {
            return Ok(Arc::clone(file));
        }
        let file =
            self.streams[rank].get().and_then(|stream| stream.files.get(n)).expect("a piece of an opened stream");
        let path = self.directory.join(dense_data_file(rank as u32, self.streams.len() as u32, n));
        let io = self.directory.engine().open(&path, IoOpenMode::Read)?;
        check_length(&*io, file.bytes)?;
        let bytes = file.data_bytes();
        let mut checksums = vec![0_u32; CHECKSUM_PAGE_BYTES / 4];
        let page: &mut [u8] = bytemuck::cast_slice_mut(&mut checksums);
        io.read_at(bytes, page)?;
        check_crc32c(&path, bytes, || "the checksum of the checksums", page, file.checksums_crc32c)?;
        checksums.truncate(bytes.div_ceil(STREAM_CHUNK_BYTES as u64) as usize);
        let input = Arc::new(ChunkedInput { io, start: 0, bytes, checksums, label: String::new() });
        lock(&self.open).insert((rank, n), Arc::clone(&input));
        Ok(input)
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

    /// Splits a range of the stream at file boundaries, and within files into pieces of [`STREAM_PIECE_BYTES`].
    fn pieces<'a>(&self, rank: usize, range: Range<u64>, into: &'a mut [u8]) -> Vec<DenseReadPiece<'a>> {
        let mut file = self.starts.partition_point(|&start| start <= range.start).saturating_sub(1);
        let (mut at, mut rest, mut pieces) = (range.start, into, Vec::new());
        while at < range.end {
            if at == self.starts[file + 1] {
                file += 1;
                continue;
            }
            let start = at - self.starts[file];
            let piece_end = (start / STREAM_PIECE_BYTES as u64 + 1) * STREAM_PIECE_BYTES as u64;
            let end = piece_end.min(self.starts[file + 1] - self.starts[file]).min(range.end - self.starts[file]);
            let (head, tail) = rest.split_at_mut((end - start) as usize);
            pieces.push(DenseReadPiece { rank, file, range: start..end, into: head });
            (at, rest) = (self.starts[file] + end, tail);
        }
        pieces
    }
}
