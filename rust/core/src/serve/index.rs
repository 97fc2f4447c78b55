//! The index of a served table: maps each id to the location of its row in the checkpoint's files.
//!
//! It is an index like those of the RAM tiers, with locations instead of slots: lines of five complete ids, in about 17
//! bytes per row.

use std::ops::Range;
use std::sync::Arc;

use super::data_files::RowFileLocation;
use crate::error::Result;
use crate::index::{IdHash, IndexLine, SlotIndex, slots_of};
use crate::io::FileMapping;
use crate::types::{CacheSlot, Id, NO_SLOT};

const _: () = assert!(NO_SLOT == RowFileLocation::NONE.0, "an index says NO_SLOT where it has no place");

/// Maps ids to locations.
#[derive(Debug)]
pub(super) struct ServeIndex {
    lines: ServeIndexLines,
    len: u64,
}

/// Storage of the lines of an index.
#[derive(Debug)]
enum ServeIndexLines {
    /// In memory of this process.
    Private(SlotIndex),
    /// In a file that all processes share, at these bytes.
    Shared(Arc<FileMapping>, Range<usize>, IdHash),
}

impl ServeIndex {
    /// Creates an empty index that fits `ids` ids. Returns `Kind::Memory` if the allocation fails.
    pub(super) fn with_capacity(ids: u64) -> Result<Self> {
        let mut index = SlotIndex::new(ids as usize);
        index.reserve(ids.max(1) as usize)?;
        Ok(Self { lines: ServeIndexLines::Private(index), len: 0 })
    }

    /// Opens an index of `len` ids in the lines at `range` of a file.
    pub(super) fn shared(file: Arc<FileMapping>, range: Range<usize>, hash: IdHash, len: u64) -> Self {
        Self { lines: ServeIndexLines::Shared(file, range, hash), len }
    }

    /// The lines, and the hash by which ids are in them.
    pub(super) fn parts(&self) -> (&[IndexLine], IdHash) {
        match &self.lines {
            ServeIndexLines::Private(index) => index.parts(),
            ServeIndexLines::Shared(file, range, hash) => (bytemuck::cast_slice(&file.bytes()[range.clone()]), *hash),
        }
    }

    /// Adds an id, unless it exists. Returns true if it was added. The index must have been created with sufficient
    /// capacity.
    pub(super) fn insert_new(&mut self, id: Id, place: RowFileLocation) -> bool {
        let ServeIndexLines::Private(index) = &mut self.lines else { return false };
        let is_new = index.insert_new(id, place.0);
        self.len += u64::from(is_new);
        is_new
    }

    /// Prefetches the line of an id into the CPU cache.
    pub(super) fn prefetch(&self, id: Id) {
        if let ServeIndexLines::Private(index) = &self.lines {
            index.prefetch(id);
        }
    }

    /// Location of an id.
    pub(super) fn get(&self, id: Id) -> RowFileLocation {
        let mut slot = [NO_SLOT];
        self.get_batch(&[id], &mut slot);
        RowFileLocation(slot[0])
    }

    /// Writes the location of each id to `slots`, which is as long as `ids`; `NO_SLOT` for a missing id.
    pub(super) fn get_batch(&self, ids: &[Id], slots: &mut [CacheSlot]) {
        let (lines, hash) = self.parts();
        if self.len == 0 || ids.is_empty() {
            return slots.fill(NO_SLOT);
        }
        slots_of(hash, lines, ids, slots);
    }

    /// The ids in its lines.
    pub(super) fn ids(&self) -> impl Iterator<Item = Id> {
        self.parts().0.iter().flat_map(IndexLine::ids_in_use)
    }

    /// Number of ids.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Bytes of its lines.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(self.parts().0)
    }

    /// True if it is in a file that all processes share.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self.lines, ServeIndexLines::Shared(..))
    }
}
