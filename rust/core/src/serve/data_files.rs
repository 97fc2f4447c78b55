//! The mapped data files of one table in a chain of checkpoints, and locations of rows in them.
#![allow(unsafe_code)]

use std::ops::Range;
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use serde::{Deserialize, Serialize};

use super::resident_pages::{PAGE_BITS, ResidentPages};
use crate::checkpoint::{CheckpointId, RowFileOffsets, TableReader, WaitCallback};
use crate::error::{Error, Kind, Result};
use crate::io::{FileMapping, IoEngine, IoOpenMode, MappingAccess};
use crate::rows::{RowHeader, WeightPrecision};
use crate::runtime::simd::prefetch_address;
use crate::types::Id;

/// Location of a row: the number of its group, then its row number in the group, in as many bits as the table's groups
/// need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowFileLocation(pub(super) u32);

impl RowFileLocation {
    /// No row.
    pub(super) const NONE: Self = Self(u32::MAX);
    /// The id was removed. Used only in overlays.
    pub(super) const TOMBSTONE: Self = Self(u32::MAX - 1);
}

/// One group of a mapped data file. Offsets are relative to `base`.
#[derive(Debug)]
pub(super) struct RowFile {
    mapping: Arc<FileMapping>,
    /// Offset of its first page in the file.
    base: usize,
    /// Bytes from there to the end of the group.
    bytes: usize,
    pub(super) rows: usize,
    pub(super) ids: usize,
    last_steps: usize,
    weights: usize,
    scores: usize,
    /// Bytes of a row's weights.
    row_bytes: usize,
    pub(super) pages: ResidentPages,
}

impl RowFile {
    /// Maps a data file.
    fn map(engine: &dyn IoEngine, file: &RowFileOffsets, access: MappingAccess) -> Result<Arc<FileMapping>> {
        let mapping = engine.open(&file.path, IoOpenMode::Read)?.map(access)?;
        let length = mapping.bytes().len();
        if length as u64 == file.bytes {
            return Ok(Arc::new(mapping));
        }
        Err(Error::corruption(&file.path, 0, "the file's length", file.bytes, length))
    }

    /// Returns a group of a mapped file.
    fn new(mapping: Arc<FileMapping>, group: &RowFileOffsets, row_bytes: usize) -> Result<Self> {
        let RowFileOffsets { rows, end, .. } = *group;
        let base = group.ids >> PAGE_BITS << PAGE_BITS;
        let relative = |start: usize| start.saturating_sub(base);
        let (ids, last_steps) = (relative(group.ids), relative(group.last_steps));
        let (weights, scores) = (relative(group.weights), relative(group.scores));
        let bytes = end.min(mapping.bytes().len()).saturating_sub(base);
        // The file's header states that the columns fit. Lookups rely on this check.
        let ends = [(ids, 8), (last_steps, 8), (weights, row_bytes), (scores, 4)];
        let fits =
            |(start, width): (usize, usize)| rows.checked_mul(width)?.checked_add(start).filter(|&end| end <= bytes);
        if ends.into_iter().any(|column| fits(column).is_none()) {
            return Err(Error::corruption(&group.path, 0, "the columns", format!("within {bytes} bytes"), "longer"));
        }
        let pages = ResidentPages::new(bytes, &(weights..weights + rows * row_bytes), mapping.is_copy());
        Ok(Self { mapping, base, bytes, rows, ids, last_steps, weights, scores, row_bytes, pages })
    }

    #[inline]
    fn content(&self) -> &[u8] {
        &self.mapping.bytes()[self.base..][..self.bytes]
    }

    /// Path of the file.
    pub(super) fn path(&self) -> &Path {
        self.mapping.path()
    }

    fn in_file(&self, range: &Range<usize>) -> Range<usize> {
        self.base + range.start..self.base + range.end
    }

    /// Starts to read a range of bytes; see [`FileMapping::prefetch`].
    pub(super) fn prefetch(&self, range: &Range<usize>) {
        self.mapping.prefetch(&self.in_file(range));
    }

    /// Waits until a range of bytes is in memory; see [`FileMapping::populate`].
    pub(super) fn populate(&self, range: &Range<usize>) -> Result<()> {
        self.mapping.populate(&self.in_file(range))
    }

    #[inline]
    fn read_eight_bytes(&self, start: usize, row: usize) -> [u8; 8] {
        let bytes = &self.content()[start + row * 8..][..8];
        bytes.try_into().expect("eight bytes are eight bytes")
    }

    /// Id of a row.
    #[inline]
    pub(super) fn id(&self, row: usize) -> Id {
        Id::from_le_bytes(self.read_eight_bytes(self.ids, row))
    }

    /// Bytes of a row's weights.
    #[inline]
    pub(super) fn weights(&self, row: usize) -> &[u8] {
        &self.content()[self.weights + row * self.row_bytes..][..self.row_bytes]
    }

    /// Fields that eviction rules evaluate, other than the weights.
    pub(super) fn header(&self, row: usize) -> RowHeader {
        let score: [u8; 4] = self.content()[self.scores + row * 4..][..4].try_into().expect("four bytes");
        RowHeader {
            id: self.id(row),
            last_step: u64::from_le_bytes(self.read_eight_bytes(self.last_steps, row)),
            score: f32::from_le_bytes(score),
            ..RowHeader::default()
        }
    }

    /// Byte ranges that a lookup of a row reads. With `has_rules`, also those that eviction rules evaluate.
    pub(super) fn ranges(&self, row: usize, has_rules: bool) -> impl Iterator<Item = Range<usize>> + use<> {
        let cell = |start: usize, width: usize| start + row * width..start + (row + 1) * width;
        let ruled = has_rules.then(|| [cell(self.ids, 8), cell(self.last_steps, 8), cell(self.scores, 4)]);
        [cell(self.weights, self.row_bytes)].into_iter().chain(ruled.into_iter().flatten())
    }

    /// True if everything that a lookup of a row reads was recently seen in memory.
    #[inline]
    pub(super) fn is_resident(&self, row: usize, has_rules: bool, generation: usize) -> bool {
        let seen = |start: usize, width: usize| self.pages.are_resident(start + row * width, width, generation);
        seen(self.weights, self.row_bytes)
            && (!has_rules || seen(self.ids, 8) && seen(self.last_steps, 8) && seen(self.scores, 4))
    }

    /// Byte range of the weights of all rows.
    fn all_weights(&self) -> Range<usize> {
        self.weights..self.weights + self.rows * self.row_bytes
    }

    /// Waits until the weights of all rows are in memory.
    fn load_weights(&self, generation: usize) -> Result<()> {
        let range = self.all_weights();
        self.populate(&range)?;
        self.pages.mark_resident(range.start, range.len(), generation);
        Ok(())
    }
}

/// The fields of a group that a lookup needs, stored compactly: a table has hundreds of groups, and lookups need all of
/// them.
#[derive(Clone, Copy, Debug)]
struct RowFileView {
    start: *const u8,
    weights: usize,
    rows: usize,
    row_bytes: u32,
    /// Bitmaps of resident pages in both generations; null if all bytes are always resident.
    seen: [*const AtomicU64; 2],
}

// SAFETY: these are addresses in a `RowFile`, which may be shared between threads and outlives the view.
unsafe impl Send for RowFileView {}
// SAFETY: as above; the bytes are only read, and the words are atomic.
unsafe impl Sync for RowFileView {}

impl RowFileView {
    fn of(file: &RowFile) -> Self {
        let (start, seen) = (file.content().as_ptr(), file.pages.words());
        Self { start, weights: file.weights, rows: file.rows, row_bytes: file.row_bytes as u32, seen }
    }
}

/// Address of a row's weights, which may have to be read from disk first.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowFilePointer {
    weights: *const u8,
    /// Number of the group.
    pub(super) file: u32,
    /// Bytes of the weights.
    bytes: u32,
}

impl RowFilePointer {
    /// No row.
    pub(super) const NONE: Self = Self { weights: ptr::null(), file: 0, bytes: 0 };

    #[inline]
    pub(super) fn is_none(&self) -> bool {
        self.weights.is_null()
    }

    /// Prefetches the cache line of a byte of the row. Harmless for `NONE`.
    #[inline]
    pub(super) fn prefetch(&self, byte: usize) {
        prefetch_address(self.weights.wrapping_add(byte));
    }
}

/// The groups that one checkpoint of a chain adds to a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RowFileLink {
    /// Name of the checkpoint.
    pub(super) name: String,
    /// XXH3 of its manifest.
    pub(super) manifest_xxh3: u64,
    /// Number after that of its last group.
    pub(super) files_end: usize,
}

impl RowFileLink {
    /// Identity of the checkpoint.
    pub(super) fn identity(&self) -> CheckpointId {
        CheckpointId { name: self.name.clone(), manifest_xxh3: self.manifest_xxh3 }
    }
}

/// The groups of a table's files in a chain, oldest checkpoint first.
#[derive(Clone, Debug)]
pub(super) struct RowFileSet {
    all: Vec<Arc<RowFile>>,
    /// A view of each file.
    views: Vec<RowFileView>,
    links: Vec<RowFileLink>,
    /// Number of bits of the row number in a location.
    row_bits: u32,
    /// Precision of the weights. A trainer's deltas of a serving checkpoint have float32 weights, which are rounded
    /// when read.
    precision: WeightPrecision,
    /// Bytes of a row's weights, in files other than such deltas.
    row_bytes: usize,
    /// Width of a row.
    dim: usize,
    /// Access pattern of the mappings.
    access: MappingAccess,
    /// The last page generation in which all of these files were resident, plus one.
    all_resident_in: Arc<AtomicUsize>,
}

impl RowFileSet {
    /// Creates an empty set for a table of width `dim` whose groups have at most `max_rows_per_group` rows.
    pub(super) fn new(
        max_rows_per_group: usize,
        precision: WeightPrecision,
        dim: usize,
        access: MappingAccess,
    ) -> Self {
        let row_bits = usize::BITS - max_rows_per_group.saturating_sub(1).leading_zeros();
        let (all, views, links) = (Vec::new(), Vec::new(), Vec::new());
        let row_bytes = precision.row_bytes(dim);
        Self {
            all,
            views,
            links,
            row_bits: row_bits.max(1),
            precision,
            row_bytes,
            dim,
            access,
            all_resident_in: Arc::default(),
        }
    }

    /// Maps the files of one more checkpoint of the chain. On an error the set is unchanged.
    pub(super) fn push(&mut self, engine: &dyn IoEngine, link: RowFileLink, reader: &TableReader) -> Result<()> {
        let stored = reader.spec().precision.unwrap_or(WeightPrecision::Fp32);
        let is_rounded = stored == WeightPrecision::Fp32 && !self.links.is_empty();
        if stored != self.precision && !is_rounded {
            return Err(Kind::Mismatch.error(format!(
                "checkpoint {} has weights in {} and the one before it in {}: serve the trainer's own checkpoints, or convert the newest one",
                link.name,
                stored.name(),
                self.precision.name()
            )));
        }
        let files = reader.row_file_offsets();
        let end = self.all.len() + files.len();
        if let Some(file) = files.iter().find(|file| file.rows > 1 << self.row_bits) {
            let max_rows = 1_u64 << self.row_bits;
            return Err(Error::corruption(
                &file.path,
                0,
                "the number of rows",
                format!("at most {max_rows}"),
                file.rows,
            ));
        }
        if end as u64 >= (1_u64 << (32 - self.row_bits)) {
            return Err(Kind::Unsupported.error(format!(
                "a table has {end} groups of rows in the {} checkpoints of its chain, with up to {} rows each, and one process serves fewer: save a \
                 full checkpoint, or make one of the chain by `embcache compact`, and convert it where a trainer's deltas are followed",
                self.links.len() + 1,
                1_u64 << self.row_bits
            )));
        }
        let mut mapped: Option<Arc<FileMapping>> = None;
        let files = files.iter().map(|group| {
            let mapping = match &mapped {
                Some(mapping) if mapping.path() == &*group.path => Arc::clone(mapping),
                _ => Arc::clone(mapped.insert(RowFile::map(engine, group, self.access)?)),
            };
            RowFile::new(mapping, group, stored.row_bytes(self.dim)).map(Arc::new)
        });
        let files = files.collect::<Result<Vec<_>>>()?;
        self.views.extend(files.iter().map(|file| RowFileView::of(file)));
        self.all.extend(files);
        self.links.push(RowFileLink { files_end: end, ..link });
        self.all_resident_in = Arc::default();
        Ok(())
    }

    /// Reads the weights of the latest checkpoint's files into memory, so that lookups do not wait for them.
    ///
    /// Errors: `Corruption`, `Storage` if they cannot be read.
    pub(super) fn preload_newest(&self, generation: usize) -> Result<()> {
        let newest = &self.all[self.first_file_of(self.links.len() - 1)..];
        // Prefetched pages are small.
        if self.access == MappingAccess::Scattered {
            for file in newest {
                file.prefetch(&file.all_weights());
            }
        }
        newest.iter().try_for_each(|file| file.load_weights(generation))
    }

    /// Reads the weights of all files into memory. They are not prefetched, so that the OS can use huge pages. `wait`
    /// is called for each file; an error from it aborts the work.
    ///
    /// Errors: `Corruption`, `Storage` if they cannot be read; errors of `wait`.
    pub(super) fn preload_all(&self, generation: usize, wait: &mut WaitCallback<'_>) -> Result<()> {
        self.all.iter().try_for_each(|file| {
            wait()?;
            file.load_weights(generation)
        })
    }

    /// Returns the set of the first `links` checkpoints.
    pub(super) fn truncated(&self, links: usize) -> Self {
        let mut kept = self.clone();
        kept.links.truncate(links);
        kept.all_resident_in = Arc::default();
        let files = kept.links.last().map_or(0, |link| link.files_end);
        kept.all.truncate(files);
        kept.views.truncate(files);
        kept
    }

    /// The checkpoints, oldest first.
    pub(super) fn links(&self) -> &[RowFileLink] {
        &self.links
    }

    pub(super) fn row_bits(&self) -> u32 {
        self.row_bits
    }

    /// Precision of the weights.
    pub(super) fn precision(&self) -> WeightPrecision {
        self.precision
    }

    /// Decodes a row's weights from its bytes in a file. A file has weights in the served precision or, in a trainer's
    /// delta of weights that are served in a smaller precision, in float32. The precisions differ from float32 in their
    /// bytes per row, so the length identifies the precision.
    #[inline]
    pub(super) fn read(&self, row: &[u8], into: &mut [f32]) {
        if row.len() == self.row_bytes {
            self.precision.load(row, into);
        } else {
            self.read_rounded(row, into);
        }
    }

    /// Decodes a row of a trainer's delta and rounds it as a conversion of the delta would.
    #[cold]
    fn read_rounded(&self, row: &[u8], into: &mut [f32]) {
        WeightPrecision::Fp32.load(row, into);
        self.precision.round(into);
    }

    /// Checks that all rows of weights, `[n, D]`, can be stored in the precision of these files. The error is the index
    /// of the first that cannot.
    pub(super) fn check_weights(&self, weights: &[f32]) -> Result<(), usize> {
        if self.precision == WeightPrecision::Fp32 {
            return Ok(());
        }
        let mut stored = vec![0; self.row_bytes];
        let cannot = |row: &[f32]| self.precision.store(row, self.dim, &mut stored).is_err();
        weights.chunks_exact(self.dim).position(cannot).map_or(Ok(()), Err)
    }

    /// Bytes of the weights of most rows.
    pub(super) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    pub(super) fn all(&self) -> &[Arc<RowFile>] {
        &self.all
    }

    /// Location of a row of a file.
    pub(super) fn location(&self, file: usize, row: usize) -> RowFileLocation {
        RowFileLocation((file as u32) << self.row_bits | row as u32)
    }

    /// Returns the file of a location, its number, and the row in it; `None` if the location is none or invalid.
    #[inline]
    pub(super) fn find(&self, place: RowFileLocation) -> Option<(&RowFile, usize, usize)> {
        let number = (place.0 >> self.row_bits) as usize;
        let row = (place.0 & ((1 << self.row_bits) - 1)) as usize;
        let file = self.all.get(number)?;
        (row < file.rows).then_some((&**file, number, row))
    }

    /// Returns a pointer to the row at a location; [`RowFilePointer::NONE`] if the location is none or invalid.
    #[inline(always)]
    #[allow(clippy::inline_always)] // Compiled for every instruction set; see `simd`.
    pub(super) fn pointer(&self, place: RowFileLocation) -> RowFilePointer {
        let (file, row) = (place.0 >> self.row_bits, (place.0 & ((1 << self.row_bits) - 1)) as usize);
        match self.views.get(file as usize) {
            Some(view) if row < view.rows => {
                let weights = view.start.wrapping_add(view.weights + row * view.row_bytes as usize);
                RowFilePointer { weights, file, bytes: view.row_bytes }
            }
            _ => RowFilePointer::NONE,
        }
    }

    /// True if the weights of all rows are served in float32.
    pub(super) fn are_float32(&self) -> bool {
        self.precision == WeightPrecision::Fp32
    }

    /// True if [`Self::resident_files`] has found all files resident in this generation. This remains valid until the
    /// generation ends, and checking hundreds of files takes longer.
    pub(super) fn are_known_resident(&self, generation: usize) -> bool {
        self.all_resident_in.load(Ordering::Relaxed) == generation.wrapping_add(1)
    }

    /// For each file, true if the pages of all its weights were seen in memory in this generation; `None` if this holds
    /// for all files.
    pub(super) fn resident_files(&self, generation: usize) -> Option<Vec<bool>> {
        if self.are_known_resident(generation) {
            return None;
        }
        let which: Vec<bool> = self.all.iter().map(|file| file.pages.have_all_weights(generation)).collect();
        if which.iter().all(|is_resident| *is_resident) {
            self.all_resident_in.store(generation.wrapping_add(1), Ordering::Relaxed);
            return None;
        }
        Some(which)
    }

    /// True if the pages of a row were seen in memory in this generation. May be false for a row for which
    /// [`RowFile::is_resident`] is true.
    #[inline]
    pub(super) fn is_resident(&self, spot: &RowFilePointer, generation: usize) -> bool {
        let view = &self.views[spot.file as usize];
        let seen = view.seen[generation & 1];
        if seen.is_null() {
            return true;
        }
        let start = spot.weights.addr() - view.start.addr();
        let is_seen = |byte: usize| {
            let page = byte >> PAGE_BITS;
            // SAFETY: the bitmap has a bit for each page of the file, which contains these bytes: `RowFile::new`
            // checked the columns.
            let word = unsafe { (*seen.add(page / 64)).load(Ordering::Relaxed) };
            word >> (page % 64) & 1 != 0
        };
        // A row of more than two pages has pages in between, which only the slower check covers.
        let bytes = spot.bytes as usize;
        (bytes <= 1 << PAGE_BITS) & is_seen(start) & is_seen(start + bytes - 1)
    }

    /// Bytes of the weights at a pointer, which must not be `NONE`.
    #[inline]
    pub(super) fn row_at(&self, spot: &RowFilePointer) -> &[u8] {
        assert!(!spot.is_none() && (spot.file as usize) < self.views.len(), "a row of these files");
        // SAFETY: the pointer came from a view of one of these files, which live as long as `self`, with a row of the
        // file. `RowFile::new` checked that the columns of all rows are within the mapping.
        unsafe { std::slice::from_raw_parts(spot.weights, spot.bytes as usize) }
    }

    /// Number of the first file of a checkpoint.
    pub(super) fn first_file_of(&self, link: usize) -> usize {
        link.checked_sub(1).map_or(0, |before| self.links[before].files_end)
    }

    /// Index of the checkpoint that a file belongs to, 0 for the oldest.
    pub(super) fn link_of(&self, file: usize) -> usize {
        self.links.partition_point(|link| link.files_end <= file)
    }
}
