//! The data files of one table in a chain of checkpoints, mapped, and where a row lies in them.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::pages::Pages;
use crate::checkpoint::{FileOfRows, TableReader};
use crate::error::{Error, Kind, Result};
use crate::io::{FileMapping, IoEngine, Open};
use crate::rows::RowHeader;
use crate::types::Id;

/// Where a row lies: the number of its file, then the number of the row in the file, in as many bits as the table's files need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(pub(super) u32);

impl Place {
    /// No row.
    pub(super) const NONE: Self = Self(u32::MAX);
    /// The id left the table. Only overlays have this.
    pub(super) const TOMBSTONE: Self = Self(u32::MAX - 1);
}

/// One mapped data file.
#[derive(Debug)]
pub(super) struct RowFile {
    mapping: FileMapping,
    rows: usize,
    ids: usize,
    last_steps: usize,
    weights: usize,
    scores: usize,
    pub(super) pages: Pages,
}

impl RowFile {
    fn open(engine: &dyn IoEngine, file: &FileOfRows) -> Result<Self> {
        let mapping = engine.open(&file.path, Open::Read)?.map()?;
        let length = mapping.bytes().len();
        if length as u64 != file.bytes {
            return Err(Error::corruption(&file.path, 0, "the file's length", file.bytes, length));
        }
        let pages = Pages::new(length, mapping.is_copy());
        let FileOfRows { rows, ids, last_steps, weights, scores, .. } = *file;
        Ok(Self { mapping, rows, ids, last_steps, weights, scores, pages })
    }

    #[inline]
    fn eight(&self, start: usize, row: usize) -> [u8; 8] {
        let bytes = &self.mapping.bytes()[start + row * 8..][..8];
        bytes.try_into().expect("eight bytes are eight bytes")
    }

    /// The id of a row.
    #[inline]
    pub(super) fn id(&self, row: usize) -> Id {
        Id::from_le_bytes(self.eight(self.ids, row))
    }

    /// The bytes of the weights of a row of `bytes` bytes.
    #[inline]
    pub(super) fn weights(&self, row: usize, bytes: usize) -> &[u8] {
        &self.mapping.bytes()[self.weights + row * bytes..][..bytes]
    }

    /// What rules of eviction look at, besides the weights.
    pub(super) fn header(&self, row: usize) -> RowHeader {
        let score: [u8; 4] = self.mapping.bytes()[self.scores + row * 4..][..4].try_into().expect("four bytes");
        RowHeader {
            id: self.id(row),
            last_step: u64::from_le_bytes(self.eight(self.last_steps, row)),
            score: f32::from_le_bytes(score),
            ..RowHeader::default()
        }
    }

    /// The byte ranges that a lookup of a row reads. With `rules`, those too that rules of eviction look at.
    pub(super) fn ranges(&self, row: usize, bytes: usize, rules: bool) -> impl Iterator<Item = Range<usize>> + use<> {
        let cell = |start: usize, width: usize| start + row * width..start + (row + 1) * width;
        let ruled = rules.then(|| [cell(self.last_steps, 8), cell(self.scores, 4)]);
        [cell(self.ids, 8), cell(self.weights, bytes)].into_iter().chain(ruled.into_iter().flatten())
    }

    /// Whether all that a lookup of a row reads was seen in memory lately.
    #[inline]
    pub(super) fn is_near(&self, row: usize, bytes: usize, rules: bool, generation: usize) -> bool {
        let id = self.ids + row * 8;
        let weights = self.weights + row * bytes;
        let near = self.pages.are_near(weights, bytes, generation) && self.pages.are_near(id, 8, generation);
        near && (!rules
            || self.pages.are_near(self.last_steps + row * 8, 8, generation)
                && self.pages.are_near(self.scores + row * 4, 4, generation))
    }

    /// The address of the id of a row and of its weights, to be prefetched. They need not be in memory.
    #[inline]
    pub(super) fn addresses(&self, row: usize, bytes: usize) -> (*const u8, *const u8) {
        let start = self.mapping.bytes().as_ptr();
        (start.wrapping_add(self.ids + row * 8), start.wrapping_add(self.weights + row * bytes))
    }

    pub(super) fn mapping(&self) -> &FileMapping {
        &self.mapping
    }
}

/// What one checkpoint of a chain adds to the files of a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LinkOfFiles {
    /// The checkpoint.
    pub(super) name: String,
    /// XXH3 of its manifest.
    pub(super) manifest_xxh3: u64,
    /// Its files end before this number.
    pub(super) files_end: usize,
}

/// The files of a table in a chain, the oldest checkpoint first.
#[derive(Clone, Debug)]
pub(super) struct Files {
    all: Vec<Arc<RowFile>>,
    links: Vec<LinkOfFiles>,
    /// Bits of a place that are the number of a row.
    row_bits: u32,
    /// Bytes of the weights of a row.
    row_bytes: usize,
}

impl Files {
    /// No files, of a table whose files have at most so many rows of so many bytes.
    pub(super) fn new(most_rows: usize, row_bytes: usize) -> Self {
        let row_bits = usize::BITS - most_rows.saturating_sub(1).leading_zeros();
        Self { all: Vec::new(), links: Vec::new(), row_bits: row_bits.max(1), row_bytes }
    }

    /// Map the files of one more checkpoint of the chain. With an error nothing was added.
    pub(super) fn push(&mut self, engine: &dyn IoEngine, link: LinkOfFiles, reader: &TableReader) -> Result<()> {
        let files = reader.files_of_rows();
        let end = self.all.len() + files.len();
        if let Some(file) = files.iter().find(|file| file.rows > 1 << self.row_bits) {
            let most = 1_u64 << self.row_bits;
            return Err(Error::corruption(&file.path, 0, "the number of rows", format!("at most {most}"), file.rows));
        }
        if end as u64 >= (1_u64 << (32 - self.row_bits)) {
            let what = format!(
                "a table of {end} data files has more rows than one process can serve: train it in several tables, or save it by compact"
            );
            return Err(Error::new(Kind::Unsupported, what));
        }
        let files = files.iter().map(|file| Ok(Arc::new(RowFile::open(engine, file)?)));
        let files = files.collect::<Result<Vec<_>>>()?;
        self.all.extend(files);
        self.links.push(LinkOfFiles { files_end: end, ..link });
        Ok(())
    }

    /// The first `links` checkpoints alone.
    pub(super) fn truncated(&self, links: usize) -> Self {
        let mut kept = self.clone();
        kept.links.truncate(links);
        kept.all.truncate(kept.links.last().map_or(0, |link| link.files_end));
        kept
    }

    /// The checkpoints, the oldest first.
    pub(super) fn links(&self) -> &[LinkOfFiles] {
        &self.links
    }

    pub(super) fn row_bits(&self) -> u32 {
        self.row_bits
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    pub(super) fn all(&self) -> &[Arc<RowFile>] {
        &self.all
    }

    /// The place of a row of a file.
    pub(super) fn place(&self, file: usize, row: usize) -> Place {
        Place((file as u32) << self.row_bits | row as u32)
    }

    /// The file of a place, its number, and the row in it; `None` where a place is none, or was damaged.
    #[inline]
    pub(super) fn find(&self, place: Place) -> Option<(&RowFile, usize, usize)> {
        let number = (place.0 >> self.row_bits) as usize;
        let row = (place.0 & ((1 << self.row_bits) - 1)) as usize;
        let file = self.all.get(number)?;
        (row < file.rows).then_some((&**file, number, row))
    }

    /// The number of the first file of a checkpoint.
    pub(super) fn first_of(&self, link: usize) -> usize {
        link.checked_sub(1).map_or(0, |before| self.links[before].files_end)
    }

    /// The number of the checkpoint that a file belongs to, from 0 for the oldest.
    pub(super) fn link_of(&self, file: usize) -> usize {
        self.links.partition_point(|link| link.files_end <= file)
    }
}
