//! What every segment of a table shares, and where their files come from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::background::Background;
use super::buffer::BLOCK_BYTES;
use super::format::Schema;
use super::space::{Geometry, Space};
use crate::error::Result;
use crate::io::{ALIGNMENT, IoEngine, IoFile, Open, descriptors};

/// What every segment of a table shares.
#[derive(Clone, Debug)]
pub(super) struct Home {
    pub(super) dir: PathBuf,
    pub(super) schema: Schema,
    pub(super) geometry: Geometry,
    /// Bytes of a write buffer.
    pub(super) block_bytes: usize,
    pub(super) engine: Arc<dyn IoEngine>,
    pub(super) space: Arc<Space>,
    pub(super) background: &'static Background,
}

impl Home {
    /// Make the file of a segment, of at most `room` bytes, or take a spare one; `None` where files that could not be removed are in the way.
    pub(super) fn make_file(&self, path: &Path, room: u64) -> Result<Option<Arc<dyn IoFile>>> {
        descriptors::check_reserve(&self.dir)?;
        let spare = if room == self.geometry.segment_bytes { self.space.take_spare() } else { None };
        if let Some(spare) = spare {
            // Its old records are named by no state and read by nobody; nothing of the new segment is believed before it is synced.
            self.engine.rename(&spare, path)?;
            let file = self.engine.open(path, Open::Write)?;
            if file.links()? == 1 {
                return Ok(Some(file));
            }
            self.engine.remove_file(path)?;
        }
        if !self.space.remove_spares(Some(room), |path| self.engine.remove_file(path)) {
            return Ok(None);
        }
        self.engine.open(path, Open::Create { preallocate: room }).map(Some)
    }

    /// Bytes of a write buffer for this geometry: a whole segment where it is small, several records where they are large.
    pub(super) fn usual_block_bytes(geometry: &Geometry) -> usize {
        let least = 2 * (geometry.row_bytes + ALIGNMENT);
        let usual = if 8 * least > BLOCK_BYTES { 4 * least } else { BLOCK_BYTES };
        usual.min(geometry.segment_bytes as usize).max(least).next_multiple_of(ALIGNMENT)
    }
}
