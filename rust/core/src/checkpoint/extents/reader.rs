//! Reads dense extents into the caller's memory and verifies them.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use super::verify::verify_chunks;
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::dense::{
    CHECKSUM_PAGE_BYTES, DENSE_CHUNK_BYTES, DENSE_DIR, DENSE_PIECE_BYTES, DENSE_THREADS, DenseExtent, DenseFile,
    DenseShare, dense_data_file,
};
use crate::checkpoint::output::for_each_piece;
use crate::error::{Error, Kind, Result};
use crate::io::{ALIGNMENT, BufPool, IoEngine, IoFile, IoOpenMode, PooledBuf};
use crate::sync::lock;

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
