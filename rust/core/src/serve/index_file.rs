//! The file `serve.idx` of a checkpoint: the indexes of all its tables, shared by all processes of a machine.
//!
//! It starts with the length of its header in 8 bytes, and the header: sealed JSON, like manifests. The lines of each
//! table follow, each table at a multiple of 4096. The file can be rebuilt from the checkpoint, so it is not part of
//! the checkpoint's format: a file of another version is rebuilt.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::data_files::RowFileLink;
use super::index::ServeIndex;
use crate::checkpoint::{CheckpointDirectory, seal_text, unseal_text};
use crate::error::{Error, Kind, Result};
use crate::index::{IdHash, IndexLine};
use crate::io::{ALIGNMENT, AlignedBuf, FileMapping, IoFile, IoOpenMode, MappingAccess};

/// Name of the file in the directory of a checkpoint.
pub(super) const INDEX_FILE: &str = "serve.idx";
/// Version of the file format.
const VERSION: u32 = 1;
/// A larger header is rejected before it is read.
const MAX_HEADER_BYTES: u64 = 64 << 20;
/// Bytes that are written, read or verified at a time.
const PIECE_BYTES: usize = 4 << 20;

/// One table of the file, and the checkpoints from which it was built.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ServeIndexTable {
    pub(super) module: String,
    pub(super) table: String,
    /// The chain, oldest checkpoint first.
    pub(super) links: Vec<RowFileLink>,
    pub(super) row_bits: u32,
    seed: u64,
    len: u64,
    start: u64,
    lines: u64,
    /// CRC-32C of the lines.
    crc32c: u32,
}

impl ServeIndexTable {
    /// Describes an index that is about to be written.
    pub(super) fn new(module: &str, table: &str, links: &[RowFileLink], row_bits: u32) -> Self {
        let (module, table, links) = (module.to_owned(), table.to_owned(), links.to_vec());
        Self { module, table, links, row_bits, seed: 0, len: 0, start: 0, lines: 0, crc32c: 0 }
    }

    fn range(&self) -> Option<Range<usize>> {
        let start = usize::try_from(self.start).ok()?;
        let bytes = usize::try_from(self.lines).ok()?.checked_mul(size_of::<IndexLine>())?;
        Some(start..start.checked_add(bytes)?)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ServeIndexHeader {
    version: u32,
    tables: Vec<ServeIndexTable>,
}

/// Writes the index file of a checkpoint atomically.
pub(super) fn write_index(directory: &CheckpointDirectory, tables: &[(ServeIndexTable, &ServeIndex)]) -> Result<u64> {
    let temporary = directory.join(format!("{INDEX_FILE}.tmp"));
    let engine = directory.engine();
    if engine.exists(&temporary)? {
        engine.remove_file(&temporary)?;
    }
    let file = engine.open(&temporary, IoOpenMode::Create { preallocate: 0 })?;
    let written = write_all(&*file, tables).and_then(|bytes| {
        file.sync()?;
        engine.rename(&temporary, &directory.join(INDEX_FILE))?;
        directory.sync()?;
        Ok(bytes)
    });
    if written.is_err() {
        // A partially written file must not use disk space. If it cannot be removed either, the first error is
        // returned.
        let _ = engine.remove_file(&temporary);
    }
    written
}

fn write_all(file: &dyn IoFile, tables: &[(ServeIndexTable, &ServeIndex)]) -> Result<u64> {
    let mut header =
        ServeIndexHeader { version: VERSION, tables: tables.iter().map(|(table, _)| table.clone()).collect() };
    // Larger numbers have longer text. With the largest values the header has its maximum length.
    for table in &mut header.tables {
        (table.seed, table.len, table.start, table.lines) = (u64::MAX, u64::MAX, u64::MAX, u64::MAX);
        table.crc32c = u32::MAX;
    }
    let mut at = (8 + seal_text(&header)?.len() as u64).next_multiple_of(ALIGNMENT as u64);
    let header_bytes = at as usize;
    for (entry, (_, index)) in header.tables.iter_mut().zip(tables) {
        let (lines, hash) = index.parts();
        let bytes: &[u8] = bytemuck::cast_slice(lines);
        (entry.seed, entry.len, entry.start) = (hash.seed(), index.len(), at);
        (entry.lines, entry.crc32c) = (lines.len() as u64, 0);
        for piece in bytes.chunks(PIECE_BYTES) {
            entry.crc32c = crc32c::crc32c_append(entry.crc32c, piece);
            write_padded(file, at, piece)?;
            at += (piece.len() as u64).next_multiple_of(ALIGNMENT as u64);
        }
    }
    let text = seal_text(&header)?;
    let mut first = AlignedBuf::try_zeroed(header_bytes)?;
    first[..8].copy_from_slice(&(text.len() as u64).to_le_bytes());
    first[8..8 + text.len()].copy_from_slice(&text);
    file.write_at(0, &first)?;
    Ok(at)
}

fn write_padded(file: &dyn IoFile, at: u64, bytes: &[u8]) -> Result<()> {
    if bytes.len().is_multiple_of(ALIGNMENT) {
        return file.write_at(at, bytes);
    }
    let mut padded = AlignedBuf::try_zeroed(bytes.len().next_multiple_of(ALIGNMENT))?;
    padded[..bytes.len()].copy_from_slice(bytes);
    file.write_at(at, &padded)
}

/// Reads the index file of a checkpoint; returns `None` if there is none, or one of another version.
///
/// Errors: `Corruption` if it is corrupted, `Storage`.
pub(super) fn read_index(directory: &CheckpointDirectory) -> Result<Option<Vec<(ServeIndexTable, ServeIndex)>>> {
    let path = directory.join(INDEX_FILE);
    if !directory.has(INDEX_FILE)? {
        return Ok(None);
    }
    let file = directory.engine().open(&path, IoOpenMode::Read)?;
    let damaged = |what: &str| Error::corruption(&path, 0, what, "as it was written", "something else");
    let mut length = [0; 8];
    file.read_at(0, &mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES || 8 + length > file.len()? {
        return Err(damaged("the length of the header"));
    }
    let mut text = crate::runtime::memory::zeros("read the header of an index", length as usize)?;
    file.read_at(8, &mut text)?;
    let Some(header) = header_of(&text, &path)? else { return Ok(None) };
    let mapping = Arc::new(file.map(MappingAccess::Whole)?);
    let open = |table: ServeIndexTable| {
        let index = open_table(&mapping, &table)?.ok_or_else(|| damaged("the lines of a table"))?;
        Ok((table, index))
    };
    header.tables.into_iter().map(open).collect::<Result<_>>().map(Some)
}

fn header_of(text: &[u8], path: &Path) -> Result<Option<ServeIndexHeader>> {
    #[derive(Deserialize)]
    struct ServeIndexVersion {
        version: u32,
    }
    let text = unseal_text(text, path)?;
    let damaged = |error: serde_json::Error| Error::corruption(path, 8, "the header", "valid", error);
    let head: ServeIndexVersion = serde_json::from_slice(&text).map_err(damaged)?;
    if head.version != VERSION {
        return Ok(None);
    }
    serde_json::from_slice(&text).map_err(damaged).map(Some)
}

/// Opens and verifies the index of a table; returns `None` if the file does not match its header.
fn open_table(file: &Arc<FileMapping>, table: &ServeIndexTable) -> Result<Option<ServeIndex>> {
    let Some(range) = table.range() else { return Ok(None) };
    let fits = range.end <= file.bytes().len() && range.start.is_multiple_of(ALIGNMENT) && table.lines > 0;
    if !fits || table.len >= table.lines.saturating_mul(5) || !(1..32).contains(&table.row_bits) {
        return Ok(None);
    }
    // The range is not prefetched: the OS would read it in small pages, and it does not map pages that are cached as
    // small ones in huge ones.
    let mut found = 0;
    for start in range.clone().step_by(PIECE_BYTES) {
        let piece = start..range.end.min(start + PIECE_BYTES);
        file.populate(&piece)?;
        found = crc32c::crc32c_append(found, &file.bytes()[piece]);
    }
    if found != table.crc32c {
        return Err(Kind::Corruption
            .error(format!("{} is corrupted: remove it, and the server builds it again", file.path().display()))
            .at(file.path()));
    }
    let lines: &[IndexLine] = bytemuck::try_cast_slice(&file.bytes()[range.clone()]).unwrap_or_default();
    // A search continues past lines with passed ids, so at least one line must end it.
    let ends = lines.iter().any(|line| line.passed() == 0);
    Ok(ends.then(|| ServeIndex::shared(Arc::clone(file), range, IdHash::new(table.seed), table.len)))
}
