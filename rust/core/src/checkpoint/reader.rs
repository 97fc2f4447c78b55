//! Loading: manifests and headers first, then the rows of the buckets that a rank owns.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use super::RowSink;
use super::format::{CHUNK_BYTES, Column, Field, FileLayout, GROUP_BYTES, MAX_HEADER_BYTES, data_file, table_dir};
use super::latest::Latest;
use super::manifest::{
    DataFile, MAX_MANIFEST_BYTES, Manifest, RankManifest, Share, TableEntry, TableSpec, parse, unseal,
};
use super::save::{MANIFEST_FILE, read_ranks};
use crate::config::OptimizerKind;
use crate::error::{Error, Kind, Result};
use crate::io::{BufPool, IoEngine, IoFile, Open, PooledBuf, Read, read_file};
use crate::rows::RowHeader;
use crate::types::{Id, bucket_of};

/// Bytes of one read request: whole chunks.
const READ_BYTES: usize = 16 * CHUNK_BYTES;
/// Bytes of the chunks that a sink is given (one row at least).
const EMIT_BYTES: usize = 4 << 20;

/// A checkpoint whose manifests are checked.
#[derive(Debug)]
pub struct Checkpoint {
    engine: Arc<dyn IoEngine>,
    dir: PathBuf,
    manifest: Manifest,
    ranks: Vec<RankManifest>,
}

impl Checkpoint {
    /// Read and check the manifests of the checkpoint that `latest` names in `root`.
    ///
    /// Errors: `Corruption` (damaged, or manifests that contradict each other), `Unsupported` (a newer format), `Storage`.
    pub fn open(engine: Arc<dyn IoEngine>, root: &Path, latest: Latest) -> Result<Self> {
        let dir = latest.dir(root);
        let path = dir.join(MANIFEST_FILE);
        if !engine.exists(&path) {
            let what = format!("LATEST of {}", root.display());
            return Err(Error::corruption(root, 0, &what, "the name of a checkpoint that is there", latest.name));
        }
        let bytes = unseal(&read_file(&*engine, &path, MAX_MANIFEST_BYTES)?, &path)?;
        let damaged = |what: String| Error::corruption(&path, 0, "the manifest", "consistent", format!("not: {what}"));
        let manifest: Manifest = parse(&bytes, &path)?;
        manifest.check(latest.name).map_err(damaged)?;
        let ranks = read_ranks(&*engine, &dir, &manifest.ranks)?;
        manifest.check_ranks(&ranks).map_err(damaged)?;
        Ok(Self { engine, dir, manifest, ranks })
    }

    /// The coordinator's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// A table, or `Kind::Mismatch` with the names of those that are there.
    pub fn table(&self, module: &str, table: &str) -> Result<&TableEntry> {
        self.manifest.tables.iter().find(|entry| entry.spec.module == module && entry.spec.table == table).ok_or_else(
            || {
                let there: Vec<String> = self
                    .manifest
                    .tables
                    .iter()
                    .map(|entry| format!("{}/{}", entry.spec.module, entry.spec.table))
                    .collect();
                Error::new(
                    Kind::Mismatch,
                    format!(
                        "{} has no table {table:?} of module {module:?}; it has [{}]",
                        self.dir.display(),
                        there.join(", ")
                    ),
                )
            },
        )
    }

    /// The rank that had the whole of a table alone, where there were several ranks.
    pub(super) fn only_rank(&self, module: &str, table: &str) -> Option<u32> {
        let has = |rank: &&RankManifest| {
            rank.tables.iter().any(|share| share.spec.module == module && share.spec.table == table)
        };
        let mut owners = self.ranks.iter().filter(has);
        match (owners.next(), owners.next()) {
            (Some(owner), None) if owner.world > 1 => Some(owner.rank),
            _ => None,
        }
    }

    /// Check the headers and sizes of the files that hold rows of `buckets`, and get ready to read them.
    pub fn table_reader(&self, module: &str, table: &str, buckets: Range<u32>) -> Result<TableReader> {
        let spec = self.table(module, table)?.spec.clone();
        let optimizer = spec.optimizer_kind()?;
        if buckets.start > buckets.end || buckets.end > spec.total_num_buckets {
            return Err(Error::new(
                Kind::Input,
                format!("table {table:?}: buckets {buckets:?} are not within 0..{}", spec.total_num_buckets),
            ));
        }
        let dir = self.dir.join(table_dir(module, table));
        let mut groups = Vec::new();
        for rank in &self.ranks {
            for share in rank.tables.iter().filter(|share| share.spec.module == module && share.spec.table == table) {
                let owned = buckets.start.max(share.bucket_begin)..buckets.end.min(share.bucket_end);
                if owned.is_empty() {
                    continue;
                }
                for (n, file) in share.files.iter().enumerate() {
                    let path = dir.join(data_file(rank.rank, rank.world, n));
                    groups.push(GroupReader::open(&*self.engine, path, share, file, owned.clone())?);
                }
            }
        }
        Ok(TableReader { engine: Arc::clone(&self.engine), spec, optimizer, buckets, groups })
    }
}

/// Reads the rows of some buckets of one table.
#[derive(Debug)]
pub struct TableReader {
    engine: Arc<dyn IoEngine>,
    spec: TableSpec,
    optimizer: OptimizerKind,
    buckets: Range<u32>,
    groups: Vec<GroupReader>,
}

impl TableReader {
    /// The table as it was saved.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// The buckets it reads.
    pub fn buckets(&self) -> &Range<u32> {
        &self.buckets
    }

    /// Rows that [`TableReader::read`] will hand over.
    pub fn rows(&self) -> u64 {
        self.groups.iter().map(|group| group.rows.len() as u64).sum()
    }

    /// Read every row of the buckets, verify it, and hand it to `sink`, in chunks of about 4 MiB. A thread reads ahead: three groups
    /// are held at most (192 MiB).
    ///
    /// Errors: `Corruption` with file and place (what came before has been handed over), `Storage`, and the sink's own.
    pub fn read(&self, sink: &mut RowSink<'_>) -> Result<()> {
        let largest = self.groups.iter().map(|group| staged_bytes(&group.wanted())).max();
        let staging = Arc::new(BufPool::new(largest.unwrap_or(0), 3));
        std::thread::scope(|scope| {
            let (send, receive) = mpsc::sync_channel(1);
            let groups = || self.groups.iter().filter(|group| !group.rows.is_empty());
            let ahead = staging.clone();
            let reading = std::thread::Builder::new().name("embcache-load".into()).spawn_scoped(scope, move || {
                for group in groups() {
                    let staged = group.read_rows(&*self.engine, &ahead);
                    // Nobody listens any more when the sink failed.
                    if send.send((group, staged)).is_err() {
                        return;
                    }
                }
            });
            if reading.is_err() {
                // Without a thread nothing is read ahead.
                return groups()
                    .try_for_each(|group| self.emit(group, &group.read_rows(&*self.engine, &staging)?, sink));
            }
            receive.into_iter().try_for_each(|(group, staged)| self.emit(group, &staged?, sink))
        })
    }

    fn emit(&self, group: &GroupReader, staged: &Staged<'_>, sink: &mut RowSink<'_>) -> Result<()> {
        let dim = self.spec.dim as usize;
        let layout = self.optimizer.layout(dim);
        let floats = layout.vector_floats();
        let chunk_rows = (EMIT_BYTES / (floats * 4 + size_of::<RowHeader>())).max(1);
        let ids: &[Id] = staged.values(Field::Id);
        group.check_order(ids, self.spec.total_num_buckets)?;
        let last_steps: &[u64] = staged.values(Field::LastStep);
        let counts: &[u32] = staged.values(Field::Count);
        let scores: &[f32] = staged.values(Field::Score);
        let epochs: &[u32] = staged.values(Field::ModifiedEpoch);
        let scalars: Option<&[f32]> = layout.scalar_slot.then(|| staged.values(Field::Scalar));
        let parts: Vec<&[f32]> = (0..=layout.vector_slots).map(|part| staged.values(Field::Vector(part))).collect();
        let mut headers = Vec::with_capacity(chunk_rows.min(ids.len()));
        let mut vectors = Vec::with_capacity(chunk_rows.min(ids.len()) * floats);
        for start in (0..ids.len()).step_by(chunk_rows) {
            headers.clear();
            vectors.clear();
            for row in start..(start + chunk_rows).min(ids.len()) {
                headers.push(RowHeader {
                    id: ids[row],
                    last_step: last_steps[row],
                    count: counts[row],
                    score: scores[row],
                    scalar: scalars.map_or(0.0, |scalars| scalars[row]),
                    modified_epoch: epochs[row],
                });
                for part in &parts {
                    vectors.extend_from_slice(&part[row * dim..(row + 1) * dim]);
                }
            }
            sink(&headers, &vectors)?;
        }
        Ok(())
    }
}

/// One data file whose header, checksums and bucket offsets are checked.
#[derive(Debug)]
struct GroupReader {
    path: PathBuf,
    file_bytes: u64,
    header_bytes: usize,
    layout: FileLayout,
    checksums: Vec<u32>,
    /// The buckets wanted of this file.
    buckets: Range<u32>,
    /// Their rows.
    rows: Range<usize>,
}

impl GroupReader {
    fn open(engine: &dyn IoEngine, path: PathBuf, share: &Share, file: &DataFile, buckets: Range<u32>) -> Result<Self> {
        let shape = share.shape(file);
        let layout = FileLayout::new(share.spec.optimizer_kind()?, share.spec.dim as usize, shape)
            .filter(|layout| layout.data_bytes as u64 <= file.bytes)
            .ok_or_else(|| Error::corruption(&path, 0, "the file's length", "as long as its rows", file.bytes))?;
        let row_bytes: usize =
            layout.columns.iter().filter(|column| column.field.is_of_rows()).map(Column::bytes_per_row).sum();
        if shape.rows > 1 && shape.rows.saturating_mul(row_bytes) > GROUP_BYTES {
            return Err(Error::corruption(
                &path,
                0,
                "the number of rows",
                format!("within {GROUP_BYTES} bytes"),
                shape.rows,
            ));
        }
        let mut group = Self {
            path,
            file_bytes: file.bytes,
            header_bytes: (file.bytes - layout.data_bytes as u64) as usize,
            layout,
            checksums: Vec::new(),
            buckets,
            rows: 0..0,
        };
        let io = group.reopen(engine)?;
        group.check_header(&*io, file.header_crc32c)?;
        group.read_checksums(&*io, file.checksums_crc32c)?;
        group.check_padding(&*io)?;
        group.rows = group.read_rows_of_buckets(engine, &io, share, shape.rows)?;
        Ok(group)
    }

    fn reopen(&self, engine: &dyn IoEngine) -> Result<Arc<dyn IoFile>> {
        let file = engine.open(&self.path, Open::Read)?;
        let len = file.len()?;
        if len != self.file_bytes {
            return Err(Error::corruption(&self.path, 0, "the file's length", self.file_bytes, len));
        }
        Ok(file)
    }

    fn check_header(&self, file: &dyn IoFile, crc32c: u32) -> Result<()> {
        if self.header_bytes < 8 || self.header_bytes > MAX_HEADER_BYTES {
            return Err(Error::corruption(
                &self.path,
                0,
                "the header's length",
                format!("within {MAX_HEADER_BYTES}"),
                self.header_bytes,
            ));
        }
        let mut header = vec![0; self.header_bytes];
        file.read_at(0, &mut header)?;
        let found = crc32c::crc32c(&header);
        if found != crc32c {
            return Err(Error::corruption(&self.path, 0, "the header's checksum", crc32c, found));
        }
        let (length, text) = header.split_at(8);
        if length != (text.len() as u64).to_le_bytes() {
            return Err(Error::corruption(
                &self.path,
                0,
                "the header's length field",
                text.len(),
                format!("{length:?}"),
            ));
        }
        self.layout
            .check_header(text)
            .map_err(|what| Error::corruption(&self.path, 8, "the header", "that of the manifest's counts", what))
    }

    fn read_checksums(&mut self, file: &dyn IoFile, crc32c: u32) -> Result<()> {
        let column = self.layout.column(Field::Checksums);
        let offset = (self.header_bytes + column.start) as u64;
        self.checksums = vec![0; column.shape[0]];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.checksums);
        file.read_at(offset, bytes)?;
        let found = crc32c::crc32c(bytes);
        if found != crc32c {
            return Err(Error::corruption(&self.path, offset, "the checksum of the checksums", crc32c, found));
        }
        Ok(())
    }

    /// No byte of a file may change unseen, those that hold nothing included.
    fn check_padding(&self, file: &dyn IoFile) -> Result<()> {
        let column = self.layout.column(Field::Pad);
        let offset = (self.header_bytes + column.start) as u64;
        let mut bytes = vec![0; column.bytes];
        file.read_at(offset, &mut bytes)?;
        match bytes.iter().position(|&byte| byte != 0) {
            Some(at) => Err(Error::corruption(&self.path, offset + at as u64, "the padding", 0, bytes[at])),
            None => Ok(()),
        }
    }

    fn read_rows_of_buckets(
        &self,
        engine: &dyn IoEngine,
        file: &Arc<dyn IoFile>,
        share: &Share,
        rows: usize,
    ) -> Result<Range<usize>> {
        let column = self.layout.column(Field::BucketOffsets);
        let once = Arc::new(BufPool::new(0, 0));
        let staged = self.read_columns(engine, &once, file, &[(column, 0..column.bytes)])?;
        let starts: &[i64] = staged.values(Field::BucketOffsets);
        let ascending = starts.first() == Some(&0) && starts.is_sorted() && starts.last() == Some(&(rows as i64));
        if !ascending {
            let offset = (self.header_bytes + column.start) as u64;
            return Err(Error::corruption(
                &self.path,
                offset,
                "bucket_offsets",
                format!("ascending from 0 to {rows}"),
                "not",
            ));
        }
        let start_of = |bucket: u32| starts[(bucket - share.bucket_begin) as usize] as usize;
        Ok(start_of(self.buckets.start)..start_of(self.buckets.end))
    }

    /// The bytes of the wanted rows in each of their columns.
    fn wanted(&self) -> Vec<(&Column, Range<usize>)> {
        let columns = self.layout.columns.iter().filter(|column| column.field.is_of_rows());
        columns
            .map(|column| {
                let row = column.bytes_per_row();
                (column, self.rows.start * row..self.rows.end * row)
            })
            .collect()
    }

    /// Read every column of the wanted rows.
    fn read_rows(&self, engine: &dyn IoEngine, staging: &Arc<BufPool>) -> Result<Staged<'_>> {
        let file = self.reopen(engine)?;
        self.read_columns(engine, staging, &file, &self.wanted())
    }

    /// Read byte ranges of columns, with the rest of the chunks they begin and end in, and verify every chunk.
    fn read_columns<'a>(
        &self,
        engine: &dyn IoEngine,
        staging: &Arc<BufPool>,
        file: &Arc<dyn IoFile>,
        wanted: &[(&'a Column, Range<usize>)],
    ) -> Result<Staged<'a>> {
        let mut parts = Vec::with_capacity(wanted.len());
        // Per request: its column, where in the column it starts, and where it goes.
        let mut places: Vec<(&Column, usize, usize)> = Vec::new();
        let mut reads = Vec::new();
        let mut place = 0_usize;
        for (column, range) in wanted {
            let Range { start: begin, end } = chunks_of(column, range);
            parts.push(StagedColumn { column, start: place + (range.start - begin), bytes: range.len() });
            for start in (begin..end).step_by(READ_BYTES) {
                let len = READ_BYTES.min(end - start);
                let offset = (self.header_bytes + column.start + start) as u64;
                reads.push(Read { file: Arc::clone(file), offset, len });
                places.push((column, start, place + (start - begin)));
            }
            place += (end - begin).next_multiple_of(8);
        }
        let mut staging = staging.take_at_least(place)?;
        let mut outcome = Ok(());
        engine.read_batch(&reads, &mut |position, result| {
            let (column, start, to) = places[position];
            let verified = result.and_then(|bytes| {
                self.verify(column, start, bytes)?;
                staging[to..to + bytes.len()].copy_from_slice(bytes);
                Ok(())
            });
            if outcome.is_ok() {
                outcome = verified;
            }
        });
        outcome?;
        Ok(Staged { staging, parts })
    }

    /// Whether the chunks of `column` from byte `start` on, a multiple of a chunk, are as they were written.
    fn verify(&self, column: &Column, start: usize, bytes: &[u8]) -> Result<()> {
        let first = column.first_checksum + start / CHUNK_BYTES;
        for (n, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
            let (expected, found) = (self.checksums[first + n], crc32c::crc32c(chunk));
            if expected != found {
                let offset = self.header_bytes + column.start + start + n * CHUNK_BYTES;
                let what = format!("the checksum of {} bytes of {:?}", chunk.len(), column.name);
                return Err(Error::corruption(&self.path, offset as u64, &what, expected, found));
            }
        }
        Ok(())
    }

    /// Whether the ids are those of the wanted buckets, sorted, each once.
    fn check_order(&self, ids: &[Id], total_num_buckets: u32) -> Result<()> {
        let mut before = None;
        for (row, &id) in ids.iter().enumerate() {
            let place = (bucket_of(id, total_num_buckets), id as u64);
            if !self.buckets.contains(&place.0) || before.is_some_and(|before| before >= place) {
                let column = self.layout.column(Field::Id);
                let offset = self.header_bytes + column.start + (self.rows.start + row) * 8;
                return Err(Error::corruption(
                    &self.path,
                    offset as u64,
                    "the id",
                    format!("of buckets {:?} and in order", self.buckets),
                    id,
                ));
            }
            before = Some(place);
        }
        Ok(())
    }
}

/// A byte range of a column with the rest of the chunks that it begins and ends in.
fn chunks_of(column: &Column, range: &Range<usize>) -> Range<usize> {
    range.start / CHUNK_BYTES * CHUNK_BYTES..range.end.next_multiple_of(CHUNK_BYTES).min(column.bytes)
}

/// How much room byte ranges of columns take when they are read.
fn staged_bytes(wanted: &[(&Column, Range<usize>)]) -> usize {
    wanted.iter().map(|(column, range)| chunks_of(column, range).len().next_multiple_of(8)).sum()
}

/// Verified bytes of some columns of one group.
struct Staged<'a> {
    staging: PooledBuf,
    parts: Vec<StagedColumn<'a>>,
}

struct StagedColumn<'a> {
    column: &'a Column,
    start: usize,
    bytes: usize,
}

impl Staged<'_> {
    /// The values of a column that was read.
    fn values<T: bytemuck::Pod>(&self, field: Field) -> &[T] {
        let part = self.parts.iter().find(|part| part.column.field == field).expect("the column was read");
        // Aligned: columns are staged at multiples of 8, chunks are multiples of 8, and ranges start at whole rows.
        bytemuck::cast_slice(&self.staging[part.start..part.start + part.bytes])
    }
}
