//! Writes blocks that share files. Blocks grow concurrently, each sequentially.

use std::sync::{Arc, Mutex};

use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::extents::writer::{MAX_QUEUED_PIECES, PieceTarget, PieceWriteTask, PieceWriterPool};
use crate::checkpoint::manifest::dense::{DENSE_PIECE_BYTES, DENSE_THREADS};
use crate::checkpoint::output::for_each_piece;
use crate::error::{Error, Kind, Result};
use crate::io::{ALIGNMENT, AlignedBuf, BufPool, IoFile, IoOpenMode, PooledBuf};
use crate::sync::lock;

/// A file to create.
#[derive(Clone, Debug)]
pub struct RecisFileSpec {
    /// Name in the directory.
    pub name: String,
    /// First bytes of the file, in whole pages.
    pub header: Vec<u8>,
    /// Length of the file, in whole pages.
    pub bytes: u64,
}

/// Byte range of a block in a file. Zeros follow it up to the next multiple of [`ALIGNMENT`].
#[derive(Clone, Copy, Debug)]
pub struct RecisBlockRange {
    /// Index of the file.
    pub file: usize,
    /// Offset in the file, a multiple of [`ALIGNMENT`].
    pub start: u64,
    /// Length of the block.
    pub bytes: u64,
}

/// Writes blocks to files. In memory are a piece of 4 MiB per started and incomplete block, and at most eight pieces
/// that are being written.
#[derive(Debug)]
pub struct RecisBlockWriter {
    files: Vec<Arc<dyn IoFile>>,
    blocks: Vec<Mutex<RecisOpenBlock>>,
    buffers: Arc<BufPool>,
    pool: PieceWriterPool,
}

#[derive(Debug)]
struct RecisOpenBlock {
    to: Arc<RecisBlockOutput>,
    bytes: u64,
    filled: u64,
    /// The last piece, if it is not full.
    piece: Option<PooledBuf>,
}

#[derive(Debug)]
struct RecisBlockOutput {
    io: Arc<dyn IoFile>,
    start: u64,
    chunk_bytes: usize,
    checksums: Mutex<Vec<u32>>,
}

impl PieceTarget for RecisBlockOutput {
    fn write(&self, at: u64, data: &[u8]) -> Result<()> {
        let found: Vec<u32> = data.chunks(self.chunk_bytes).map(crc32c::crc32c).collect();
        let first = (at / self.chunk_bytes as u64) as usize;
        lock(&self.checksums)[first..first + found.len()].copy_from_slice(&found);
        self.io.write_at(self.start + at, data)
    }
}

impl RecisBlockWriter {
    /// Creates the files, which must not exist, in `directory`, and starts up to `threads` threads. Each checksum
    /// covers `chunk_bytes`, which must divide 4 MiB.
    pub fn new(
        directory: &CheckpointDirectory,
        files: &[RecisFileSpec],
        blocks: &[RecisBlockRange],
        chunk_bytes: usize,
        threads: usize,
    ) -> Result<Self> {
        directory.check_to_save()?;
        let whole = |bytes: u64| bytes.is_multiple_of(ALIGNMENT as u64);
        if chunk_bytes == 0 || !DENSE_PIECE_BYTES.is_multiple_of(chunk_bytes) {
            return Err(Error::new(
                Kind::Input,
                format!("chunks of {chunk_bytes} bytes do not divide {DENSE_PIECE_BYTES}"),
            ));
        }
        let outside = |range: &&RecisBlockRange| {
            let end = range.start.checked_add(range.bytes);
            let within = |file: &RecisFileSpec| whole(range.start) && end.is_some_and(|end| end <= file.bytes);
            !files.get(range.file).is_some_and(within)
        };
        if let Some(range) = blocks.iter().find(outside) {
            return Err(Error::new(Kind::Input, format!("{range:?} is not at whole pages of a file")));
        }
        let made = files.iter().map(|file| {
            let io =
                directory.engine().open(&directory.join(&file.name), IoOpenMode::Create { preallocate: file.bytes })?;
            // The length is set first because writes that extend a file are serialized.
            io.set_len(file.bytes)?;
            let mut header = AlignedBuf::try_zeroed(file.header.len())?;
            header.copy_from_slice(&file.header);
            io.write_at(0, &header)?;
            Ok(io)
        });
        let made = made.collect::<Result<Vec<_>>>()?;
        let block = |range: &RecisBlockRange| {
            let chunks = range.bytes.next_multiple_of(ALIGNMENT as u64).div_ceil(chunk_bytes as u64);
            let checksums = Mutex::new(vec![0; chunks as usize]);
            let to = RecisBlockOutput { io: Arc::clone(&made[range.file]), start: range.start, chunk_bytes, checksums };
            Mutex::new(RecisOpenBlock { to: Arc::new(to), bytes: range.bytes, filled: 0, piece: None })
        };
        let total: u64 = blocks.iter().map(|block| block.bytes).sum();
        let threads = if total > DENSE_PIECE_BYTES as u64 { threads.min(DENSE_THREADS) } else { 0 };
        Ok(Self {
            blocks: blocks.iter().map(block).collect(),
            files: made,
            buffers: Arc::new(BufPool::new(DENSE_PIECE_BYTES, DENSE_THREADS + MAX_QUEUED_PIECES + 1)),
            pool: PieceWriterPool::start(threads),
        })
    }

    /// Appends `bytes` to a block. `copy(at, into)` fills `into` with the bytes from offset `at`. Any thread may call
    /// this, but calls for one block must not overlap.
    ///
    /// Errors: `Storage` of this write or of an earlier one; `Memory`; `Input` past the block's end. After an error
    /// nothing can be finished.
    pub fn append(&self, block: usize, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> Result<()> {
        let result = self.fill(block, bytes, copy);
        result.inspect_err(|error| self.pool.fail(error))
    }

    fn fill(&self, block: usize, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> Result<()> {
        let known = self.blocks.get(block);
        let mut block = lock(known.ok_or_else(|| Error::new(Kind::Input, format!("there is no block {block}")))?);
        if bytes as u64 > block.bytes - block.filled {
            return Err(Error::new(
                Kind::Input,
                format!("{bytes} bytes do not fit a block that has {} of {}", block.filled, block.bytes),
            ));
        }
        let mut at = 0;
        while at < bytes {
            let mut piece = match block.piece.take() {
                Some(piece) => piece,
                None => self.buffers.take_at_least(DENSE_PIECE_BYTES)?,
            };
            let filled = (block.filled % DENSE_PIECE_BYTES as u64) as usize;
            let count = (DENSE_PIECE_BYTES - filled).min(bytes - at);
            copy(at, &mut piece[filled..filled + count]);
            at += count;
            let end = filled + count;
            block.filled += count as u64;
            if end < DENSE_PIECE_BYTES && block.filled < block.bytes {
                block.piece = Some(piece);
                continue;
            }
            let len = end.next_multiple_of(ALIGNMENT);
            piece[end..len].fill(0);
            self.pool.run(PieceWriteTask { to: block.to.clone(), piece, len, at: block.filled - end as u64 })?;
        }
        Ok(())
    }

    /// Syncs all files, but not their names. Returns the CRC-32C of each chunk of each block, including zeros up to a
    /// whole page.
    ///
    /// Errors: `State` if a block is incomplete.
    pub fn finish(mut self) -> Result<Vec<Vec<u32>>> {
        for block in &self.blocks {
            let block = lock(block);
            if block.filled < block.bytes {
                let path = block.to.io.path().display();
                let message = format!("a block of {path} has {} of {} bytes", block.filled, block.bytes);
                return Err(Error::new(Kind::State, message));
            }
        }
        self.pool.end()?;
        for_each_piece(DENSE_THREADS, self.files.iter().collect(), |file| file.sync())?;
        Ok(self.blocks.iter().map(|block| std::mem::take(&mut *lock(&lock(block).to.checksums))).collect())
    }
}
