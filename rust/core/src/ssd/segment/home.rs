//! What all segments of a table share, and where their files come from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Result;
use crate::io::{ALIGNMENT, IoEngine, IoFile, IoOpenMode, descriptors};
use crate::ssd::format::segment::SegmentSchema;
use crate::ssd::room::geometry::SegmentSizing;
use crate::ssd::room::space::SpaceTracker;
use crate::ssd::segment::buffer::BLOCK_BYTES;
use crate::ssd::workers::SsdWorkers;

/// What all segments of a table share.
#[derive(Clone, Debug)]
pub(crate) struct SegmentContext {
    pub(crate) dir: PathBuf,
    pub(crate) schema: SegmentSchema,
    pub(crate) sizing: SegmentSizing,
    /// Bytes of a write buffer.
    pub(crate) block_bytes: usize,
    pub(crate) engine: Arc<dyn IoEngine>,
    pub(crate) space: Arc<SpaceTracker>,
    pub(crate) workers: &'static SsdWorkers,
}

impl SegmentContext {
    /// The home of segments below `dir`. `block_bytes` takes the place of the usual size of a write buffer, for tests.
    pub(crate) fn new(
        dir: PathBuf,
        schema: SegmentSchema,
        sizing: SegmentSizing,
        block_bytes: Option<usize>,
        engine: Arc<dyn IoEngine>,
    ) -> Result<Self> {
        Ok(Self {
            dir,
            schema,
            sizing,
            block_bytes: block_bytes.unwrap_or_else(|| default_block_bytes(&sizing)),
            engine,
            space: Arc::new(SpaceTracker::new(sizing.cap_bytes, sizing.segment_bytes)),
            workers: SsdWorkers::of_process()?,
        })
    }

    /// Make the file of a segment, of at most `capacity_bytes` bytes, or take one that is kept. `None` where files that could not be removed are in
    /// the way.
    pub(crate) fn make_file(&self, path: &Path, capacity_bytes: u64) -> Result<Option<Arc<dyn IoFile>>> {
        descriptors::check_reserve(&self.dir)?;
        let spare = if capacity_bytes == self.sizing.segment_bytes { self.space.take_reusable_file() } else { None };
        if let Some(spare) = spare {
            // No state names its old records and nobody reads them. Nothing of the new segment is believed before it is synced.
            self.engine.rename(&spare, path)?;
            let file = self.engine.open(path, IoOpenMode::Write)?;
            if file.links()? == 1 {
                return Ok(Some(file));
            }
            self.engine.remove_file(path)?;
        }
        if !self.space.remove_reusable_files(Some(capacity_bytes), |path| self.engine.remove_file(path)) {
            return Ok(None);
        }
        self.engine.open(path, IoOpenMode::Create { preallocate: capacity_bytes }).map(Some)
    }
}

/// Bytes of a write buffer: those of a whole segment where that is small, those of several records where they are large.
fn default_block_bytes(sizing: &SegmentSizing) -> usize {
    let least = 2 * (sizing.row_bytes + ALIGNMENT);
    let usual = if 8 * least > BLOCK_BYTES { 4 * least } else { BLOCK_BYTES };
    usual.min(sizing.segment_bytes as usize).max(least).next_multiple_of(ALIGNMENT)
}
