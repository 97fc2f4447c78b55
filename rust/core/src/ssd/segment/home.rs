//! The context that all segments of a table share, and the creation of their files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Result;
use crate::io::{ALIGNMENT, IoEngine, IoFile, IoOpenMode, descriptors};
use crate::ssd::format::segment::SegmentSchema;
use crate::ssd::room::geometry::SegmentSizing;
use crate::ssd::room::space::SpaceTracker;
use crate::ssd::segment::buffer::BLOCK_BYTES;
use crate::ssd::workers::SsdWorkers;

/// The context that all segments of a table share.
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
    /// Creates the context of segments in `dir`. Tests pass `block_bytes` to override the usual size of a write buffer.
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

    /// Creates the file of a segment, of at most `capacity_bytes` bytes, or reuses a kept file. Returns `None` if files
    /// that could not be removed occupy the space.
    pub(crate) fn make_file(&self, path: &Path, capacity_bytes: u64) -> Result<Option<Arc<dyn IoFile>>> {
        descriptors::check_reserve(&self.dir)?;
        let spare = if capacity_bytes == self.sizing.segment_bytes { self.space.take_reusable_file() } else { None };
        if let Some(spare) = spare {
            // No state references its old records and no reader uses them. A resume ignores the new segment until it is
            // synced.
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

/// Bytes of a write buffer: those of a full segment if that is small, those of several records if they are large.
fn default_block_bytes(sizing: &SegmentSizing) -> usize {
    let least = 2 * (sizing.row_bytes + ALIGNMENT);
    let usual = if 8 * least > BLOCK_BYTES { 4 * least } else { BLOCK_BYTES };
    usual.min(sizing.segment_bytes as usize).max(least).next_multiple_of(ALIGNMENT)
}
