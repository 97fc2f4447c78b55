//! A tier's segments outside its directory: held while a checkpoint links them, read where they lie there, and linked back.
//!
//! A sealed segment is never written again, so a second name of its file is a copy that costs nothing. The tier only unlinks its own
//! name when it needs the segment no more: a file with other names is not written again in its place (see [`Segment`]'s drop).

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::background::Background;
use super::footers::read_entries;
use super::format::{Content, Schema};
use super::home::Home;
use super::index::TagIndex;
use super::manifest::{MAX_COUNT, Named};
use super::open::{TAG_BITS, check_room};
use super::record::RecordKind;
use super::recover::{Wanted, open_segment, restore};
use super::scan::Part;
use super::segment::{Segment, segment_path};
use super::shared::{Shared, State};
use super::space::{Geometry, Space};
use super::{Identity, ScanSink, SsdTier};
use crate::config::SsdConfig;
use crate::error::{Error, Result};
use crate::io::{IoEngine, Open, link_or_copy};
use crate::rows::{RowHeader, RowLayout, RowRef};
use crate::sync::{Ordering, lock};
use crate::types::Id;

/// The cap of a tier that is only read.
const READ_ONLY_CAP_BYTES: u64 = 1 << 44;
/// Bytes read at once.
const CHUNK_BYTES: usize = 1 << 20;

/// Sealed segments that together hold a tier's rows, as whoever keeps them names them.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentSet {
    /// No record has a larger `write_seq`.
    pub write_seq: u64,
    /// Rows, each counted once.
    pub rows: u64,
    /// The segments.
    pub segments: Vec<Named>,
}

impl SegmentSet {
    /// Bytes of the files.
    pub fn bytes(&self) -> u64 {
        self.segments.iter().map(|named| named.file_bytes).sum()
    }

    /// What is wrong with its numbers, if anything.
    pub fn check(&self) -> Result<(), String> {
        let highest = self.segments.iter().map(|named| named.serial).max().unwrap_or(0);
        let longest = self.segments.iter().map(|named| named.file_bytes).max().unwrap_or(0);
        if [self.write_seq, highest].into_iter().any(|number| number > MAX_COUNT)
            || [self.rows, longest].into_iter().any(|number| number > 1 << 44)
            || self.segments.len() > 1 << 20
        {
            return Err("the numbers of its segments are out of range".into());
        }
        let serials: HashSet<u64> = self.segments.iter().map(|named| named.serial).collect();
        if serials.len() == self.segments.len() { Ok(()) } else { Err("a segment is there twice".into()) }
    }
}

/// How a set of files got its second names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkedBytes {
    /// Bytes of the files that were linked.
    pub linked: u64,
    /// Bytes of the files that were copied, because the file system does not link them there.
    pub copied: u64,
}

/// The segments that hold a tier's rows as of one moment, durable. They stay, and are not compacted, until this is dropped.
pub struct HeldSegments {
    tier: Arc<Shared>,
    parts: Vec<Part>,
    set: SegmentSet,
}

impl std::fmt::Debug for HeldSegments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldSegments").field("set", &self.set).finish_non_exhaustive()
    }
}

impl HeldSegments {
    /// What they are.
    pub fn set(&self) -> &SegmentSet {
        &self.set
    }

    /// Give each the second name that `path_of` its serial is, which nothing has, or copy it there. The names are the caller's to sync.
    pub fn link_to(&self, engine: &dyn IoEngine, path_of: &dyn Fn(u64) -> PathBuf) -> Result<LinkedBytes> {
        let mut bytes = LinkedBytes::default();
        for (part, named) in self.parts.iter().zip(&self.set.segments) {
            let segment = &part.segment;
            let linked = link_or_copy(engine, &*segment.file, &path_of(named.serial))?;
            *(if linked { &mut bytes.linked } else { &mut bytes.copied }) += named.file_bytes;
        }
        Ok(bytes)
    }
}

impl Drop for HeldSegments {
    fn drop(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        if self.tier.home.background.check_process().is_err() {
            // In a forked child its parent's files and locks are not to be touched.
            std::mem::forget((parts, Arc::clone(&self.tier)));
            return;
        }
        drop(parts);
        self.tier.state().reap();
        self.tier.home.space.poke();
    }
}

impl SsdTier {
    /// Hold the rows of now, appended and removed so far, as durable segments. Published states stay as they are.
    pub fn hold_segments(&self) -> Result<HeldSegments> {
        let tier = &self.shared;
        let _publishing = lock(&tier.publishing);
        tier.check_writable()?;
        let mut held = {
            let _compacting = tier.not_amid_compaction()?;
            let mut state = tier.state();
            let (segments, write_seq, rows) = Shared::name_current(&mut state);
            let parts = segments.into_iter().map(Part::of).collect();
            let set = SegmentSet { write_seq, rows, segments: Vec::new() };
            HeldSegments { tier: Arc::clone(tier), parts, set }
        };
        let segments: Vec<Arc<Segment>> = held.parts.iter().map(|part| Arc::clone(&part.segment)).collect();
        held.set.segments = tier.make_segments_durable(&segments)?;
        Ok(held)
    }

    /// `Config` unless `rows` in segments of `bytes` fit a tier of this configuration.
    pub fn check_room(&self, config: &SsdConfig, rows: u64, bytes: u64) -> Result<()> {
        check_room(config, &self.shared.home.geometry, rows, bytes)
    }
}

/// Segments outside any tier's directory, whose headers, footers and lengths are checked.
#[derive(Clone, Debug)]
pub struct SegmentFiles {
    engine: Arc<dyn IoEngine>,
    identity: Identity,
    layout: RowLayout,
    set: SegmentSet,
    /// In the set's order.
    paths: Vec<PathBuf>,
    /// The file that names them.
    named_in: PathBuf,
}

impl SegmentFiles {
    /// The segments `set` of the table `identity`, each at `path_of` its serial, as `named_in` names them.
    ///
    /// Errors: `Corruption` where a file is missing, of another length, table or state, or its footer is damaged.
    pub fn open(
        engine: Arc<dyn IoEngine>,
        (identity, layout): (Identity, RowLayout),
        set: &SegmentSet,
        path_of: impl Fn(u64) -> PathBuf,
        named_in: PathBuf,
    ) -> Result<Self> {
        let paths = set.segments.iter().map(|named| path_of(named.serial)).collect();
        let files = Self { engine, identity, layout, set: set.clone(), paths, named_in };
        let home = files.home()?;
        for segment in files.segments(&home)? {
            read_entries(&*files.engine, &segment)?;
        }
        Ok(files)
    }

    /// Rows in them.
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

    fn home(&self) -> Result<Home> {
        let schema = Schema::new(self.identity.key, &self.identity.optimizer, &self.layout);
        let geometry = Geometry::new(READ_ONLY_CAP_BYTES, &schema, None)?;
        let space = Arc::new(Space::new(geometry.cap_bytes, geometry.segment_bytes));
        // Whatever happens, these files are somebody's.
        space.close();
        Ok(Home {
            dir: self.named_in.parent().unwrap_or(Path::new(".")).to_owned(),
            schema,
            geometry,
            block_bytes: Home::usual_block_bytes(&geometry),
            engine: Arc::clone(&self.engine),
            space,
            background: Background::shared()?,
        })
    }

    fn segments(&self, home: &Home) -> Result<Vec<Arc<Segment>>> {
        let named = self.set.segments.iter().zip(&self.paths);
        named.map(|(named, path)| open_segment(home, named, path)).collect()
    }

    fn wanted(&self) -> Wanted<'_> {
        Wanted { write_seq: self.set.write_seq, rows: self.set.rows, path: &self.named_in }
    }

    /// Hand every row to `sink` once, in no particular order, every record verified. It takes 10 bytes of RAM a row, about, until it ends.
    pub fn read(&self, sink: &mut ScanSink<'_>) -> Result<()> {
        let home = self.home()?;
        let segments = self.segments(&home)?;
        let mut state = State::new(TagIndex::new(TAG_BITS));
        restore(&mut state, &self.wanted(), &segments, &home, None)?;
        let mut rows = 0;
        let mut vector = vec![0.0; self.layout.vector_floats()];
        for segment in &segments {
            let record_bytes = segment.record_bytes;
            let records = segment.records.load(Ordering::Relaxed);
            let at_once = (CHUNK_BYTES / record_bytes).max(1) as u32;
            let mut bytes = vec![0; at_once.min(records) as usize * record_bytes];
            for first in (0..records).step_by(at_once as usize) {
                let count = at_once.min(records - first);
                let chunk = &mut bytes[..count as usize * record_bytes];
                segment.file.read_at(segment.offset(first), chunk)?;
                let decoded = (first..).zip(chunk.chunks_exact(record_bytes));
                let decoded = decoded.map(|(number, bytes)| segment.decode(number, bytes));
                let decoded = decoded.collect::<Result<Vec<_>>>()?;
                let kind = if segment.content == Content::Rows { RecordKind::Row } else { RecordKind::Tombstone };
                if let Some(at) = decoded.iter().position(|record| record.kind != kind) {
                    let offset = segment.offset(first + at as u32) + 5;
                    let got = format!("{:?}", decoded[at].kind);
                    return Err(Error::corruption(
                        segment.path(),
                        offset,
                        "the record's kind",
                        format!("{kind:?}"),
                        got,
                    ));
                }
                let ids: Vec<Id> = decoded.iter().map(|record| record.id).collect();
                let mut here = vec![None; ids.len()];
                state.index.get_batch(&ids, &mut here);
                for ((number, here), record) in (first..).zip(here).zip(&decoded) {
                    if here == Some(segment.location(number)) {
                        let header: RowHeader = record.unpack(&self.layout, &mut vector);
                        sink(RowRef { header: &header, vector: &vector })?;
                        rows += 1;
                    }
                }
            }
        }
        if rows == self.set.rows {
            return Ok(());
        }
        Err(Error::corruption(&self.named_in, 0, "the rows that the segments hold", self.set.rows, rows))
    }

    /// Make them the contents of the tier at `home`, whose directory has no segment.
    pub(super) fn install(
        &self,
        config: &SsdConfig,
        home: &Home,
        threads: Option<usize>,
        state: &mut State,
    ) -> Result<()> {
        check_room(config, &home.geometry, self.rows(), self.bytes())?;
        let mut segments = Vec::with_capacity(self.paths.len());
        for (named, from) in self.set.segments.iter().zip(&self.paths) {
            let to = segment_path(&home.dir, named.serial);
            link_or_copy(&*home.engine, &*self.engine.open(from, Open::Read)?, &to)?;
            // For as long as it has this name no other tier takes the file for its own alone, and writes it again.
            if !self.engine.exists(from)? {
                return Err(Error::io("link", from, &std::io::Error::from_raw_os_error(libc::ENOENT)));
            }
            segments.push(open_segment(home, named, &to)?);
        }
        restore(state, &self.wanted(), &segments, home, threads)
    }
}
