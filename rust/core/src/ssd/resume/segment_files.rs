//! Segments outside any tier's directory, such as those of a linked checkpoint: read in place, or linked into a tier's
//! directory.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::SsdConfig;
use crate::error::{Error, Result};
use crate::io::{IoEngine, IoOpenMode, link_or_copy};
use crate::rows::{RowHeader, RowLayout, RowRef};
use crate::ssd::format::names::segment_path;
use crate::ssd::format::segment::SegmentSchema;
use crate::ssd::format::state::SegmentSet;
use crate::ssd::identity::ShardIdentity;
use crate::ssd::index::{TAG_BITS, TagIndex};
use crate::ssd::resume::restore::{ExpectedSegments, open_segment, restore};
use crate::ssd::room::geometry::SegmentSizing;
use crate::ssd::segment::file::Segment;
use crate::ssd::segment::footers::read_entries;
use crate::ssd::segment::home::SegmentContext;
use crate::ssd::tier::state::TierState;
use crate::ssd::work::scan::ScanSink;
use crate::types::Id;

/// The cap of a tier that is only read: 16 TiB.
const READ_ONLY_CAP_BYTES: u64 = 1 << 44;
/// Bytes per read.
const CHUNK_BYTES: usize = 1 << 20;

/// Segments outside any tier's directory. Their headers, footers and lengths were checked.
#[derive(Clone, Debug)]
pub struct LinkedSegments {
    engine: Arc<dyn IoEngine>,
    identity: ShardIdentity,
    layout: RowLayout,
    set: SegmentSet,
    /// Their paths, in the set's order.
    paths: Vec<PathBuf>,
    /// The file that lists the set.
    manifest_path: PathBuf,
}

impl LinkedSegments {
    /// Opens the segments `set` of the table `identity`, as the file `manifest_path` lists them. `path_of` returns the
    /// path for a serial.
    ///
    /// Errors: `Corruption` if a file is missing, has another length, belongs to another table or state, or has a
    /// corrupted footer.
    pub fn open(
        engine: Arc<dyn IoEngine>,
        (identity, layout): (ShardIdentity, RowLayout),
        set: &SegmentSet,
        path_of: impl Fn(u64) -> PathBuf,
        manifest_path: PathBuf,
    ) -> Result<Self> {
        let paths = set.segments.iter().map(|named| path_of(named.serial)).collect();
        let files = Self { engine, identity, layout, set: set.clone(), paths, manifest_path };
        let home = files.segment_context()?;
        for segment in files.segments(&home)? {
            read_entries(&*files.engine, &segment)?;
        }
        Ok(files)
    }

    /// Number of their rows.
    pub fn rows(&self) -> u64 {
        self.set.rows
    }

    /// Bytes of the files.
    pub fn bytes(&self) -> u64 {
        self.set.bytes()
    }

    /// The layout of their rows.
    pub fn layout(&self) -> RowLayout {
        self.layout
    }

    fn segment_context(&self) -> Result<SegmentContext> {
        let schema = SegmentSchema::new(self.identity.key, &self.identity.optimizer, &self.layout);
        let geometry = SegmentSizing::new(READ_ONLY_CAP_BYTES, &schema, None)?;
        let dir = self.manifest_path.parent().unwrap_or(Path::new(".")).to_owned();
        let home = SegmentContext::new(dir, schema, geometry, None, Arc::clone(&self.engine))?;
        // These files belong to another owner and must never be removed.
        home.space.close();
        Ok(home)
    }

    fn segments(&self, context: &SegmentContext) -> Result<Vec<Arc<Segment>>> {
        let named = self.set.segments.iter().zip(&self.paths);
        named.map(|(named, path)| open_segment(context, named, path)).collect()
    }

    fn expected(&self) -> ExpectedSegments<'_> {
        ExpectedSegments { write_seq: self.set.write_seq, rows: self.set.rows, path: &self.manifest_path }
    }

    /// Passes every row to `sink` once, in unspecified order. Verifies every record. Needs about 10 bytes of RAM per
    /// row until it returns.
    pub fn read(&self, sink: &mut ScanSink<'_>) -> Result<()> {
        let home = self.segment_context()?;
        let segments = self.segments(&home)?;
        let state = restore(TagIndex::new(TAG_BITS), &self.expected(), &segments, &home, None)?;
        let mut rows = 0;
        for segment in &segments {
            rows += self.read_segment(segment, state.index(), sink)?;
        }
        if rows == self.set.rows {
            return Ok(());
        }
        Err(Error::corruption(&self.manifest_path, 0, "the rows that the segments hold", self.set.rows, rows))
    }

    /// Passes the rows of a segment that `index` points to to `sink`. Returns their number.
    fn read_segment(&self, segment: &Segment, index: &TagIndex, sink: &mut ScanSink<'_>) -> Result<u64> {
        let record_bytes = segment.record_bytes;
        let records = segment.records();
        let at_once = (CHUNK_BYTES / record_bytes).max(1) as u32;
        let mut bytes = vec![0; at_once.min(records) as usize * record_bytes];
        let mut vector = vec![0.0; self.layout.vector_floats()];
        let mut rows = 0;
        for first in (0..records).step_by(at_once as usize) {
            let count = at_once.min(records - first);
            let chunk = &mut bytes[..count as usize * record_bytes];
            segment.file.read_at(segment.offset(first), chunk)?;
            let decoded = (first..).zip(chunk.chunks_exact(record_bytes));
            let decoded = decoded.map(|(number, bytes)| segment.decode(number, bytes)).collect::<Result<Vec<_>>>()?;
            let ids: Vec<Id> = decoded.iter().map(|record| record.head.id).collect();
            let mut here = vec![None; ids.len()];
            index.get_batch(&ids, &mut here);
            for ((number, here), record) in (first..).zip(here).zip(&decoded) {
                if here == Some(segment.location(number)) {
                    let header: RowHeader = record.unpack(&self.layout, &mut vector);
                    sink(RowRef { header: &header, vector: &vector })?;
                    rows += 1;
                }
            }
        }
        Ok(rows)
    }

    /// Makes them the contents of the tier at `context`, whose directory has no segment.
    pub(crate) fn install(
        &self,
        config: &SsdConfig,
        context: &SegmentContext,
        index: TagIndex,
        threads: Option<usize>,
    ) -> Result<TierState> {
        context.sizing.check_space(config, self.rows(), self.bytes())?;
        let mut segments = Vec::with_capacity(self.paths.len());
        for (named, from) in self.set.segments.iter().zip(&self.paths) {
            let to = segment_path(&context.dir, named.serial);
            link_or_copy(&*context.engine, &*self.engine.open(from, IoOpenMode::Read)?, &to)?;
            // As long as the file also has this name, no other tier considers it unshared and reuses it.
            if !self.engine.exists(from)? {
                return Err(Error::io("link", from, &std::io::Error::from_raw_os_error(libc::ENOENT)));
            }
            segments.push(open_segment(context, named, &to)?);
        }
        restore(index, &self.expected(), &segments, context, threads)
    }
}
