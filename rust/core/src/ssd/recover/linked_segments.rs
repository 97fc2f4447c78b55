//! Segments outside any tier's directory, such as those of a linked checkpoint: read in place, or linked into a tier's
//! directory.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::SsdConfig;
use crate::error::{Error, Result};
use crate::io::{IoEngine, IoOpenMode, link_or_copy};
use crate::rows::{RowHeader, RowLayout, RowRef};
use crate::ssd::directory::ShardIdentity;
use crate::ssd::format::segment_file::{SegmentSchema, segment_path};
use crate::ssd::format::state_file::SegmentSet;
use crate::ssd::index::{TAG_BITS, TagIndex};
use crate::ssd::ops::cursor::{record_chunks, records_per_read};
use crate::ssd::ops::scan::ScanSink;
use crate::ssd::recover::restore::{ExpectedSegments, open_segment, restore};
use crate::ssd::segment::footer_reader::read_entries;
use crate::ssd::segment::{Segment, SegmentContext};
use crate::ssd::space::sizing::SegmentSizing;
use crate::ssd::store::state::TierState;
use crate::types::Id;

/// The cap of a tier that is only read: 16 TiB.
const READ_ONLY_CAP_BYTES: u64 = 1 << 44;

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
        let paths = set.segments.iter().map(|descriptor| path_of(descriptor.serial)).collect();
        let files = Self { engine, identity, layout, set: set.clone(), paths, manifest_path };
        let context = files.segment_context()?;
        for segment in files.segments(&context)? {
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
        let sizing = SegmentSizing::new(READ_ONLY_CAP_BYTES, &schema, None)?;
        let dir = self.manifest_path.parent().unwrap_or(Path::new(".")).to_owned();
        let context = SegmentContext::new(dir, schema, sizing, None, Arc::clone(&self.engine))?;
        // These files belong to another owner and must never be removed.
        context.space.close();
        Ok(context)
    }

    fn segments(&self, context: &SegmentContext) -> Result<Vec<Arc<Segment>>> {
        let descriptors = self.set.segments.iter().zip(&self.paths);
        descriptors.map(|(descriptor, path)| open_segment(context, descriptor, path)).collect()
    }

    fn expected(&self) -> ExpectedSegments<'_> {
        ExpectedSegments { write_seq: self.set.write_seq, rows: self.set.rows, path: &self.manifest_path }
    }

    /// Passes every row to `sink` once, in unspecified order. Verifies every record. Needs about 10 bytes of RAM per
    /// row until it returns.
    pub fn read(&self, sink: &mut ScanSink<'_>) -> Result<()> {
        let context = self.segment_context()?;
        let segments = self.segments(&context)?;
        let state = restore(TagIndex::new(TAG_BITS), &self.expected(), &segments, &context, None)?;
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
        let mut bytes = vec![0; records_per_read(segment).min(records as usize) * record_bytes];
        let mut vector = vec![0.0; self.layout.vector_floats()];
        let mut rows = 0;
        for (first, count) in record_chunks(segment, records) {
            let chunk = &mut bytes[..count as usize * record_bytes];
            segment.file.read_at(segment.offset(first), chunk)?;
            let decoded = (first..).zip(chunk.chunks_exact(record_bytes));
            let decoded = decoded.map(|(number, bytes)| segment.decode(number, bytes)).collect::<Result<Vec<_>>>()?;
            let ids: Vec<Id> = decoded.iter().map(|record| record.head.id).collect();
            let mut locations = vec![None; ids.len()];
            index.get_batch(&ids, &mut locations);
            for ((number, location), record) in (first..).zip(locations).zip(&decoded) {
                if location == Some(segment.location(number)) {
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
        for (descriptor, from) in self.set.segments.iter().zip(&self.paths) {
            let to = segment_path(&context.dir, descriptor.serial);
            link_or_copy(&*context.engine, &*self.engine.open(from, IoOpenMode::Read)?, &to)?;
            // As long as the file also has this name, no other tier considers it unshared and reuses it.
            if !self.engine.exists(from)? {
                return Err(Error::io("link", from, &std::io::Error::from_raw_os_error(libc::ENOENT)));
            }
            segments.push(open_segment(context, descriptor, &to)?);
        }
        restore(index, &self.expected(), &segments, context, threads)
    }
}
