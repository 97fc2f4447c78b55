//! Segments that are pinned while a checkpoint links them.
//!
//! A sealed segment is immutable, so a hard link of its file is a free copy. The tier removes only its own name when it
//! does not need the segment: a file with other links is not reused for another segment (see the drop of [`Segment`]).

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::Result;
use crate::io::{IoEngine, link_or_copy};
use crate::ssd::format::state::SegmentSet;
use crate::ssd::segment::file::Segment;
use crate::ssd::segment::part::SegmentPart;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::work::publish::{make_segments_durable, pause_compaction_with_space};

/// Bytes of a set of files that were linked or copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkedBytes {
    /// Bytes of the files that were linked.
    pub linked: u64,
    /// Bytes of the files that were copied, because the file system does not link them there.
    pub copied: u64,
}

/// The durable segments of a snapshot of a tier's rows. They stay, and are not compacted, until this is dropped.
pub struct PinnedSegments {
    tier: Arc<TierInner>,
    parts: Vec<SegmentPart>,
    set: SegmentSet,
}

impl std::fmt::Debug for PinnedSegments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PinnedSegments").field("set", &self.set).finish_non_exhaustive()
    }
}

/// Pins all rows, with all earlier appends and removals. Published states stay unchanged.
pub(crate) fn pin_segments(tier: &Arc<TierInner>) -> Result<PinnedSegments> {
    let _publishing = tier.publishing();
    tier.check_writable()?;
    let mut held = {
        let _compacting = pause_compaction_with_space(tier)?;
        let mut state = tier.state();
        let (segments, write_seq, rows) = state.seal_current_set();
        let parts = segments.into_iter().map(SegmentPart::of).collect();
        let set = SegmentSet { write_seq, rows, segments: Vec::new() };
        PinnedSegments { tier: Arc::clone(tier), parts, set }
    };
    let segments: Vec<Arc<Segment>> = held.parts.iter().map(|part| Arc::clone(&part.segment)).collect();
    held.set.segments = make_segments_durable(tier, &segments)?;
    Ok(held)
}

impl PinnedSegments {
    /// The segments, for the checkpoint's manifest.
    pub fn set(&self) -> &SegmentSet {
        &self.set
    }

    /// Links or copies each file to the path that `path_of` returns for its serial, which must not exist. The caller
    /// syncs the directory.
    pub fn link_to(&self, engine: &dyn IoEngine, path_of: &dyn Fn(u64) -> PathBuf) -> Result<LinkedBytes> {
        let mut bytes = LinkedBytes::default();
        for (part, named) in self.parts.iter().zip(&self.set.segments) {
            let linked = link_or_copy(engine, &*part.segment.file, &path_of(named.serial))?;
            *(if linked { &mut bytes.linked } else { &mut bytes.copied }) += named.file_bytes;
        }
        Ok(bytes)
    }
}

impl Drop for PinnedSegments {
    fn drop(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        if self.tier.context.workers.check_process().is_err() {
            // A forked child must not touch its parent's files and locks.
            std::mem::forget((parts, Arc::clone(&self.tier)));
            return;
        }
        drop(parts);
        self.tier.state().reap();
        self.tier.context.space.notify_waiters();
    }
}
