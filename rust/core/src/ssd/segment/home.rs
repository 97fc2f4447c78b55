//! What all segments of a table share, and where their files come from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Result;
use crate::io::{ALIGNMENT, IoEngine, IoFile, Open, descriptors};
use crate::ssd::format::segment::Schema;
use crate::ssd::room::geometry::Geometry;
use crate::ssd::room::space::Space;
use crate::ssd::segment::buffer::BLOCK_BYTES;
use crate::ssd::workers::Workers;

/// What all segments of a table share.
#[derive(Clone, Debug)]
pub(crate) struct Home {
    pub(crate) dir: PathBuf,
    pub(crate) schema: Schema,
    pub(crate) geometry: Geometry,
    /// Bytes of a write buffer.
    pub(crate) block_bytes: usize,
    pub(crate) engine: Arc<dyn IoEngine>,
    pub(crate) space: Arc<Space>,
    pub(crate) workers: &'static Workers,
}

impl Home {
    /// The home of segments below `dir`. `block_bytes` takes the place of the usual size of a write buffer, for tests.
    pub(crate) fn new(
        dir: PathBuf,
        schema: Schema,
        geometry: Geometry,
        block_bytes: Option<usize>,
        engine: Arc<dyn IoEngine>,
    ) -> Result<Self> {
        Ok(Self {
            dir,
            schema,
            geometry,
            block_bytes: block_bytes.unwrap_or_else(|| usual_block_bytes(&geometry)),
            engine,
            space: Arc::new(Space::new(geometry.cap_bytes, geometry.segment_bytes)),
            workers: Workers::of_process()?,
        })
    }

    /// Make the file of a segment, of at most `room` bytes, or take one that is kept. `None` where files that could not be removed are in
    /// the way.
    pub(crate) fn make_file(&self, path: &Path, room: u64) -> Result<Option<Arc<dyn IoFile>>> {
        descriptors::check_reserve(&self.dir)?;
        let spare = if room == self.geometry.segment_bytes { self.space.take_spare() } else { None };
        if let Some(spare) = spare {
            // No state names its old records and nobody reads them. Nothing of the new segment is believed before it is synced.
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
}

/// Bytes of a write buffer: those of a whole segment where that is small, those of several records where they are large.
fn usual_block_bytes(geometry: &Geometry) -> usize {
    let least = 2 * (geometry.row_bytes + ALIGNMENT);
    let usual = if 8 * least > BLOCK_BYTES { 4 * least } else { BLOCK_BYTES };
    usual.min(geometry.segment_bytes as usize).max(least).next_multiple_of(ALIGNMENT)
}
