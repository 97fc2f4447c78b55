//! Pre-images: rows as they were at a moment, copied before they change, in bounded memory and past that in a file.
//!
//! The tables of one save share them. Rows are copied into blocks; past half of the memory a thread writes full blocks to the file,
//! those that are wanted last first, and past all of it whoever copies waits for that thread, which needs no lock of a table.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use super::export::Chunk;
use crate::error::{Error, Result};
use crate::io::{ALIGNMENT, BufPool, IoEngine, IoFile, Open, PooledBuf};
use crate::memory::room_for_threads;
use crate::rows::{RowHeader, RowLayout};
use crate::sync::{Condvar, Mutex, MutexGuard, lock, wait};

/// Bytes of a block, unless there are many tables for little memory.
const BLOCK_BYTES: usize = 1 << 20;
const HEADER_BYTES: usize = size_of::<RowHeader>();

/// See the module. Dropping it removes the file.
#[derive(Debug)]
pub struct PreImages {
    shared: Arc<Kept>,
    writer: Mutex<Option<JoinHandle<()>>>,
    pid: u32,
}

#[derive(Debug)]
struct Kept {
    engine: Arc<dyn IoEngine>,
    path: PathBuf,
    limit_bytes: usize,
    blocks: Arc<BufPool>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    tables: Vec<TableImages>,
    /// Of blocks in memory.
    held_bytes: usize,
    file: Option<Arc<dyn IoFile>>,
    file_bytes: u64,
    blocks_made: u64,
    failed: Option<Error>,
    /// Whether blocks are written beside; otherwise whoever copies writes them.
    has_writer: Option<bool>,
    /// Whether a block is being written: one at a time is.
    writing: bool,
    closed: bool,
}

#[derive(Debug)]
struct TableImages {
    floats: usize,
    open: Option<Block>,
    full: VecDeque<Full>,
}

/// Rows, each a header and its vector part.
#[derive(Debug)]
struct Block {
    bytes: PooledBuf,
    rows: usize,
}

#[derive(Debug)]
struct Full {
    number: u64,
    rows: usize,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Memory(Arc<Block>),
    File { offset: u64, bytes: usize },
}

impl PreImages {
    /// Of `tables` tables, with `limit_bytes` of memory; the rest goes to a new file at `path`, made when it is needed.
    pub fn new(engine: Arc<dyn IoEngine>, path: PathBuf, limit_bytes: usize, tables: usize) -> Self {
        let block_bytes = (limit_bytes / (4 * tables.max(1))).clamp(ALIGNMENT, BLOCK_BYTES).next_multiple_of(ALIGNMENT);
        let shared = Kept {
            engine,
            path,
            limit_bytes,
            blocks: Arc::new(BufPool::new(block_bytes, limit_bytes / block_bytes)),
            state: Mutex::default(),
            changed: Condvar::new(),
        };
        Self { shared: Arc::new(shared), writer: Mutex::new(None), pid: std::process::id() }
    }

    /// One table more; its number.
    pub(crate) fn add(&self, layout: &RowLayout) -> usize {
        let mut state = lock(&self.shared.state);
        state.tables.push(TableImages { floats: layout.vector_floats(), open: None, full: VecDeque::new() });
        state.tables.len() - 1
    }

    /// Why not every row could be kept, if so.
    pub(crate) fn check(&self) -> Result<()> {
        lock(&self.shared.state).failed.clone().map_or(Ok(()), Err)
    }

    /// What was kept is of no use.
    pub(crate) fn fail(&self, error: Error) {
        lock(&self.shared.state).failed.get_or_insert(error);
        self.shared.changed.notify_all();
    }

    /// Begin to copy rows of a table.
    pub(crate) fn keep(&self, table: usize) -> Keeping<'_> {
        let mut state = lock(&self.shared.state);
        let block = state.tables[table].open.take();
        Keeping { images: self, table, floats: state.tables[table].floats, block, refused: state.failed.is_some() }
    }

    /// Rows of a table that nobody took yet; `None` when there are none. The error is why not every row was kept.
    pub(crate) fn take(&self, table: usize) -> Result<Option<Chunk>> {
        let shared = &self.shared;
        let (floats, found) = {
            let mut state = lock(&shared.state);
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            let images = &mut state.tables[table];
            let found = match images.full.pop_front() {
                Some(full) => full,
                None => match images.open.take() {
                    Some(open) => Full { number: u64::MAX, rows: open.rows, place: Place::Memory(Arc::new(open)) },
                    None => return Ok(None),
                },
            };
            let floats = images.floats;
            if let Place::Memory(block) = &found.place {
                state.held_bytes -= block.bytes.len();
                shared.changed.notify_all();
            }
            (floats, found)
        };
        match found.place {
            Place::Memory(block) => Ok(Some(chunk_of(&block.bytes, found.rows, floats))),
            Place::File { offset, bytes } => {
                let file = lock(&shared.state).file.clone().expect("it was written to");
                let mut buffer = shared.blocks.take_at_least(bytes)?;
                file.read_at(offset, &mut buffer[..bytes])?;
                Ok(Some(chunk_of(&buffer, found.rows, floats)))
            }
        }
    }

    /// Let go of everything and remove the file, if there is one.
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

    /// Bytes that went to the file.
    pub fn file_bytes(&self) -> u64 {
        lock(&self.shared.state).file_bytes
    }

    /// Put a full block away; waits where too many are in memory.
    fn put(&self, table: usize, block: Block) {
        let shared = &self.shared;
        let mut state = lock(&shared.state);
        if state.failed.is_some() || state.closed {
            return;
        }
        let number = state.blocks_made;
        state.blocks_made += 1;
        let full = Full { number, rows: block.rows, place: Place::Memory(Arc::new(block)) };
        state.tables[table].full.push_back(full);
        if state.held_bytes <= shared.limit_bytes / 2 {
            return;
        }
        if state.has_writer.is_none() {
            let kept = Arc::clone(shared);
            let begin = || Builder::new().name("embcache-spill".into()).spawn(move || kept.write_beside()).ok();
            let writer = if room_for_threads() { begin() } else { None };
            state.has_writer = Some(writer.is_some());
            *lock(&self.writer) = writer;
        }
        shared.changed.notify_all();
        while state.held_bytes > shared.limit_bytes && state.failed.is_none() && !state.closed && state.may_shrink() {
            state = match state.has_writer {
                Some(false) if !state.writing => shared.write_one(state),
                _ => wait(&shared.changed, state),
            };
        }
    }
}

impl Drop for PreImages {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // A file that stays goes with its directory.
            let _ = self.close();
        } else {
            // In a forked child there is no thread to wait for, and the file is its parent's.
            std::mem::forget(lock(&self.writer).take());
        }
    }
}

impl State {
    /// A full block in memory: of the table whose turn comes last, the newest.
    fn last_in_memory(&self) -> Option<(usize, u64, Arc<Block>)> {
        self.tables.iter().enumerate().rev().find_map(|(table, images)| {
            images.full.iter().rev().find_map(|full| match &full.place {
                Place::Memory(block) => Some((table, full.number, Arc::clone(block))),
                Place::File { .. } => None,
            })
        })
    }

    fn may_shrink(&self) -> bool {
        self.last_in_memory().is_some()
    }
}

impl Kept {
    fn write_beside(&self) {
        let mut state = lock(&self.state);
        loop {
            if state.closed || state.failed.is_some() {
                return;
            }
            let enough = state.held_bytes <= self.limit_bytes / 2 || !state.may_shrink();
            state = if enough { wait(&self.changed, state) } else { self.write_one(state) };
        }
    }

    /// Write one block to the file, without the lock.
    fn write_one<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let Some((table, number, block)) = state.last_in_memory() else { return state };
        let (file, offset) = (state.file.clone(), state.file_bytes);
        state.writing = true;
        drop(state);
        let written = file
            .map_or_else(|| self.engine.open(&self.path, Open::Create { preallocate: 0 }), Ok)
            .and_then(|file| file.write_at(offset, &block.bytes).map(|()| file));
        let mut state = lock(&self.state);
        state.writing = false;
        match written {
            Ok(file) => {
                let bytes = block.bytes.len();
                state.file = Some(file);
                state.file_bytes += bytes as u64;
                let found = state.tables[table].full.iter_mut().find(|full| full.number == number);
                // Otherwise it was taken meanwhile.
                if let Some(full) = found {
                    full.place = Place::File { offset, bytes };
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

fn chunk_of(bytes: &[u8], rows: usize, floats: usize) -> Chunk {
    let mut chunk = Chunk { headers: Vec::with_capacity(rows), vectors: Vec::with_capacity(rows * floats) };
    for row in bytes.chunks_exact(HEADER_BYTES + floats * 4).take(rows) {
        let (header, vector) = row.split_at(HEADER_BYTES);
        chunk.headers.push(bytemuck::pod_read_unaligned(header));
        chunk.vectors.extend_from_slice(bytemuck::cast_slice(vector));
    }
    chunk
}

/// Rows of one table being copied.
pub(crate) struct Keeping<'a> {
    images: &'a PreImages,
    table: usize,
    floats: usize,
    block: Option<Block>,
    refused: bool,
}

impl Keeping<'_> {
    /// Copy a row, whose vector part `fill` writes.
    pub(crate) fn row(&mut self, header: &RowHeader, fill: impl FnOnce(&mut [f32])) {
        if self.refused {
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

    /// Whether there is a block for the next row.
    #[cold]
    fn next_block(&mut self, row_bytes: usize) -> bool {
        if let Some(full) = self.block.take() {
            self.images.put(self.table, full);
        }
        let shared = &self.images.shared;
        match shared.blocks.take_at_least(row_bytes.next_multiple_of(ALIGNMENT)) {
            Ok(bytes) => {
                lock(&shared.state).held_bytes += bytes.len();
                self.block = Some(Block { bytes, rows: 0 });
            }
            Err(error) => {
                self.images.fail(error);
                self.refused = true;
            }
        }
        !self.refused
    }
}

impl Drop for Keeping<'_> {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        let mut state = lock(&self.images.shared.state);
        let open = &mut state.tables[self.table].open;
        if open.is_none() {
            *open = Some(block);
        } else {
            drop(state);
            self.images.put(self.table, block);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::io::MemoryEngine;

    #[test]
    fn where_there_is_no_thread_to_write_blocks_those_who_copy_write_each_of_them_once() {
        const ROWS: i64 = 3000;
        let layout = RowLayout { dim: 16, vector_slots: 0, scalar_slot: false };
        let engine = MemoryEngine::default();
        engine.create_dir_all(Path::new("/made")).unwrap();
        let images = PreImages::new(Arc::new(engine), "/made/images".into(), 16 * ALIGNMENT, 4);
        lock(&images.shared.state).has_writer = Some(false);
        let tables: Vec<usize> = (0..4).map(|_| images.add(&layout)).collect();
        std::thread::scope(|scope| {
            for &table in &tables {
                let images = &images;
                scope.spawn(move || {
                    for id in 0..ROWS {
                        let header = RowHeader { id, ..RowHeader::default() };
                        images.keep(table).row(&header, |to| to.fill((id * 4 + table as i64) as f32));
                    }
                });
            }
        });
        assert!(images.file_bytes() > 0);
        for table in tables {
            let mut ids = Vec::new();
            while let Some(chunk) = images.take(table).unwrap() {
                for (header, vector) in chunk.headers.iter().zip(chunk.vectors.chunks(16)) {
                    assert_eq!(vector, [(header.id * 4 + table as i64) as f32; 16]);
                    ids.push(header.id);
                }
            }
            ids.sort_unstable();
            assert!(ids.into_iter().eq(0..ROWS), "table {table}");
        }
    }
}
