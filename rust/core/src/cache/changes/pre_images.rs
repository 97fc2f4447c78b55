//! Copy-on-write copies of rows for a snapshot, made before the rows change. They have a memory limit, and a file for
//! the excess.
//!
//! All tables of one save share them. Rows are copied into blocks. When the blocks use more than half of the memory, a
//! background thread writes full blocks to the file, starting with those that will be needed last. When they use all of
//! it, a thread that copies a row waits for the background thread, which needs no table lock.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use crate::cache::row_blocks::RowChunk;
use crate::error::{Error, Result};
use crate::io::{ALIGNMENT, BufPool, IoEngine, IoFile, IoOpenMode, PooledBuf};
use crate::rows::{RowHeader, RowLayout};
use crate::runtime::memory::can_start_threads;
use crate::runtime::sync::{Condvar, Mutex, MutexGuard, lock, wait};

/// Bytes of a block. Blocks are smaller for many tables with little memory.
const BLOCK_BYTES: usize = 1 << 20;
const HEADER_BYTES: usize = size_of::<RowHeader>();

/// The copy-on-write copies of one save. Dropping it removes the file.
#[derive(Debug)]
pub struct PreImages {
    shared: Arc<SharedPreImages>,
    writer: Mutex<Option<JoinHandle<()>>>,
    pid: u32,
}

#[derive(Debug)]
struct SharedPreImages {
    engine: Arc<dyn IoEngine>,
    path: PathBuf,
    limit_bytes: usize,
    blocks: Arc<BufPool>,
    state: Mutex<PreImageState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct PreImageState {
    tables: Vec<TablePreImages>,
    /// Number of bytes of the blocks in memory.
    held_bytes: usize,
    file: Option<Arc<dyn IoFile>>,
    file_bytes: u64,
    blocks_made: u64,
    failed: Option<Error>,
    /// True if a background thread writes blocks to the file. `None` before the first block is to be written. If no
    /// thread could be started, threads that copy rows write the blocks.
    has_writer: Option<bool>,
    /// True if a block is being written. Only one is written at a time.
    writing: bool,
    closed: bool,
}

#[derive(Debug)]
struct TablePreImages {
    floats: usize,
    open: Option<ImageBlock>,
    full: VecDeque<FullImageBlock>,
    /// Number of callers that are copying rows. Each may have taken the open block, and returns it.
    writers: usize,
}

/// Some rows, each a header followed by its vector part.
#[derive(Debug)]
struct ImageBlock {
    bytes: PooledBuf,
    rows: usize,
}

#[derive(Debug)]
struct FullImageBlock {
    number: u64,
    rows: usize,
    at: ImageLocation,
}

#[derive(Debug)]
enum ImageLocation {
    Memory(Arc<ImageBlock>),
    File { offset: u64, bytes: usize },
}

impl PreImages {
    /// Creates space for the rows of `tables` tables: `limit_bytes` of memory, and beyond that a new file at `path`,
    /// created on demand.
    pub fn new(engine: Arc<dyn IoEngine>, path: PathBuf, limit_bytes: usize, tables: usize) -> Self {
        let block_bytes = (limit_bytes / (4 * tables.max(1))).clamp(ALIGNMENT, BLOCK_BYTES).next_multiple_of(ALIGNMENT);
        let kept = SharedPreImages {
            engine,
            path,
            limit_bytes,
            blocks: Arc::new(BufPool::new(block_bytes, limit_bytes / block_bytes)),
            state: Mutex::default(),
            changed: Condvar::new(),
        };
        Self { shared: Arc::new(kept), writer: Mutex::new(None), pid: std::process::id() }
    }

    /// Adds a table. Returns its number.
    pub(crate) fn add(&self, layout: &RowLayout) -> usize {
        let mut state = lock(&self.shared.state);
        let floats = layout.vector_floats();
        state.tables.push(TablePreImages { floats, open: None, full: VecDeque::new(), writers: 0 });
        state.tables.len() - 1
    }

    /// Returns the error if a row could not be copied.
    pub(crate) fn check(&self) -> Result<()> {
        lock(&self.shared.state).failed.clone().map_or(Ok(()), Err)
    }

    /// Records that a row could not be copied, so that the save fails.
    pub(crate) fn fail(&self, error: Error) {
        lock(&self.shared.state).failed.get_or_insert(error);
        self.shared.changed.notify_all();
    }

    /// Returns a writer for rows of a table, one at a time.
    pub(crate) fn writer(&self, table: usize) -> PreImageWriter<'_> {
        let mut state = lock(&self.shared.state);
        let has_failed = state.failed.is_some();
        let images = &mut state.tables[table];
        images.writers += 1;
        PreImageWriter { images: self, table, floats: images.floats, block: images.open.take(), has_failed }
    }

    /// Takes some copied rows of a table, after those that are being copied; `None` when none remain. Errors: as
    /// [`PreImages::check`].
    pub(crate) fn take(&self, table: usize) -> Result<Option<RowChunk>> {
        let kept = &self.shared;
        let (floats, found) = {
            let mut state = lock(&kept.state);
            let found = loop {
                if let Some(error) = &state.failed {
                    return Err(error.clone());
                }
                let images = &mut state.tables[table];
                if let Some(full) = images.full.pop_front() {
                    break full;
                }
                if images.writers == 0 {
                    let Some(open) = images.open.take() else { return Ok(None) };
                    break FullImageBlock {
                        number: u64::MAX,
                        rows: open.rows,
                        at: ImageLocation::Memory(Arc::new(open)),
                    };
                }
                // Threads that copy rows wait for no lock that this caller holds.
                state = wait(&kept.changed, state);
            };
            let floats = state.tables[table].floats;
            if let ImageLocation::Memory(block) = &found.at {
                state.held_bytes -= block.bytes.len();
                kept.changed.notify_all();
            }
            (floats, found)
        };
        match found.at {
            ImageLocation::Memory(block) => Ok(Some(chunk_of(&block.bytes, found.rows, floats))),
            ImageLocation::File { offset, bytes } => {
                let file = lock(&kept.state).file.clone().expect("it was written to");
                let mut buffer = kept.blocks.take_at_least(bytes)?;
                file.read_at(offset, &mut buffer[..bytes])?;
                Ok(Some(chunk_of(&buffer, found.rows, floats)))
            }
        }
    }

    /// Drops all rows and removes the file, if there is one.
    pub fn close(&self) -> Result<()> {
        if self.pid != std::process::id() {
            return Ok(());
        }
        {
            let mut state = lock(&self.shared.state);
            state.closed = true;
            self.shared.changed.notify_all();
        }
        if let Some(writer) = lock(&self.writer).take() {
            let _ = writer.join();
        }
        let mut state = lock(&self.shared.state);
        state.tables.iter_mut().for_each(|table| {
            table.open = None;
            table.full.clear();
        });
        match state.file.take() {
            Some(_) => self.shared.engine.remove_file(&self.shared.path),
            None => Ok(()),
        }
    }

    /// Returns the number of bytes written to the file.
    pub fn file_bytes(&self) -> u64 {
        lock(&self.shared.state).file_bytes
    }

    /// Adds a full block, and waits while the blocks use more than the memory limit.
    fn put(&self, table: usize, block: ImageBlock) {
        let kept = &self.shared;
        let mut state = lock(&kept.state);
        if state.failed.is_some() || state.closed {
            return;
        }
        let number = state.blocks_made;
        state.blocks_made += 1;
        let full = FullImageBlock { number, rows: block.rows, at: ImageLocation::Memory(Arc::new(block)) };
        state.tables[table].full.push_back(full);
        if state.held_bytes <= kept.limit_bytes / 2 {
            return;
        }
        if state.has_writer.is_none() {
            let writes = Arc::clone(kept);
            let begin = || Builder::new().name("embcache-spill".into()).spawn(move || writes.run_writer()).ok();
            let writer = if can_start_threads() { begin() } else { None };
            state.has_writer = Some(writer.is_some());
            *lock(&self.writer) = writer;
        }
        kept.changed.notify_all();
        while state.held_bytes > kept.limit_bytes && state.failed.is_none() && !state.closed && state.may_shrink() {
            state = match state.has_writer {
                Some(false) if !state.writing => kept.write_one(state),
                _ => wait(&kept.changed, state),
            };
        }
    }
}

impl Drop for PreImages {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // A file that cannot be removed is removed with its directory.
            let _ = self.close();
        } else {
            // In a forked child there is no thread to wait for, and the file belongs to the parent.
            std::mem::forget(lock(&self.writer).take());
        }
    }
}

impl PreImageState {
    /// The full block in memory that will be needed last: the latest one of the table that is saved last.
    fn last_in_memory(&self) -> Option<(usize, u64, Arc<ImageBlock>)> {
        self.tables.iter().enumerate().rev().find_map(|(table, images)| {
            images.full.iter().rev().find_map(|full| match &full.at {
                ImageLocation::Memory(block) => Some((table, full.number, Arc::clone(block))),
                ImageLocation::File { .. } => None,
            })
        })
    }

    fn may_shrink(&self) -> bool {
        self.last_in_memory().is_some()
    }
}

impl SharedPreImages {
    fn run_writer(&self) {
        let mut state = lock(&self.state);
        loop {
            if state.closed || state.failed.is_some() {
                return;
            }
            let enough = state.held_bytes <= self.limit_bytes / 2 || !state.may_shrink();
            state = if enough { wait(&self.changed, state) } else { self.write_one(state) };
        }
    }

    /// Writes one block to the file. The lock is not held during the write.
    fn write_one<'a>(&'a self, mut state: MutexGuard<'a, PreImageState>) -> MutexGuard<'a, PreImageState> {
        let Some((table, number, block)) = state.last_in_memory() else { return state };
        let (file, offset) = (state.file.clone(), state.file_bytes);
        state.writing = true;
        drop(state);
        let written = file
            .map_or_else(|| self.engine.open(&self.path, IoOpenMode::Create { preallocate: 0 }), Ok)
            .and_then(|file| file.write_at(offset, &block.bytes).map(|()| file));
        let mut state = lock(&self.state);
        state.writing = false;
        match written {
            Ok(file) => {
                let bytes = block.bytes.len();
                state.file = Some(file);
                state.file_bytes += bytes as u64;
                let found = state.tables[table].full.iter_mut().find(|full| full.number == number);
                // A missing block was taken while it was written.
                if let Some(full) = found {
                    full.at = ImageLocation::File { offset, bytes };
                    state.held_bytes -= bytes;
                }
            }
            Err(error) => {
                let error = error.context("keeping rows that training changed while they were saved");
                state.failed.get_or_insert(error);
            }
        }
        drop(block);
        self.changed.notify_all();
        state
    }
}

fn chunk_of(bytes: &[u8], rows: usize, floats: usize) -> RowChunk {
    let mut chunk = RowChunk { headers: Vec::with_capacity(rows), vectors: Vec::with_capacity(rows * floats) };
    for row in bytes.chunks_exact(HEADER_BYTES + floats * 4).take(rows) {
        let (header, vector) = row.split_at(HEADER_BYTES);
        chunk.headers.push(bytemuck::pod_read_unaligned(header));
        chunk.vectors.extend_from_slice(bytemuck::cast_slice(vector));
    }
    chunk
}

/// Copies rows of one table.
pub(crate) struct PreImageWriter<'a> {
    images: &'a PreImages,
    table: usize,
    floats: usize,
    block: Option<ImageBlock>,
    has_failed: bool,
}

impl PreImageWriter<'_> {
    /// Copies a row: its header is `header`, and `fill` writes its vector part.
    pub(crate) fn copy_row(&mut self, header: &RowHeader, fill: impl FnOnce(&mut [f32])) {
        if self.has_failed {
            return;
        }
        let row_bytes = HEADER_BYTES + self.floats * 4;
        let full = self.block.as_ref().is_none_or(|block| (block.rows + 1) * row_bytes > block.bytes.len());
        if full && !self.next_block(row_bytes) {
            return;
        }
        let Some(block) = &mut self.block else { return };
        let (head, vector) = block.bytes[block.rows * row_bytes..][..row_bytes].split_at_mut(HEADER_BYTES);
        head.copy_from_slice(bytemuck::bytes_of(header));
        fill(bytemuck::cast_slice_mut(vector));
        block.rows += 1;
    }

    /// Starts another block. Returns false if there is no memory for it.
    #[cold]
    fn next_block(&mut self, row_bytes: usize) -> bool {
        if let Some(full) = self.block.take() {
            self.images.put(self.table, full);
        }
        let kept = &self.images.shared;
        match kept.blocks.take_at_least(row_bytes.next_multiple_of(ALIGNMENT)) {
            Ok(bytes) => {
                lock(&kept.state).held_bytes += bytes.len();
                self.block = Some(ImageBlock { bytes, rows: 0 });
            }
            Err(error) => {
                self.images.fail(error);
                self.has_failed = true;
            }
        }
        !self.has_failed
    }
}

impl Drop for PreImageWriter<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.images.shared.state);
        let open = &mut state.tables[self.table].open;
        if let Some(block) = self.block.take() {
            if open.is_none() {
                *open = Some(block);
            } else {
                drop(state);
                self.images.put(self.table, block);
                state = lock(&self.images.shared.state);
            }
        }
        state.tables[self.table].writers -= 1;
        drop(state);
        self.images.shared.changed.notify_all();
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
