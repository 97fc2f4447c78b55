//! Segments that are held while a checkpoint links them.
//!
//! A sealed segment is never written again, so a second name of its file is a copy that costs nothing. The tier only removes its own name
//! when it needs the segment no more: a file with other names is not written again for another segment (see the drop of [`Segment`]).

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::Result;
use crate::io::{IoEngine, link_or_copy};
use crate::ssd::format::state::SegmentSet;
use crate::ssd::segment::file::Segment;
use crate::ssd::segment::part::SegmentPart;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::work::publish::{make_segments_durable, pause_compaction_with_space};

/// How a set of files got its second names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkedBytes {
    /// Bytes of the files that were linked.
    pub linked: u64,
    /// Bytes of the files that were copied, because the file system does not link them there.
    pub copied: u64,
}

/// The segments that hold a tier's rows as of one moment, durable. They stay, and are not compacted, until this is dropped.
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

/// Hold the rows of now, appended and removed so far. Published states stay as they are.
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
    /// The segments, as a checkpoint names them.
    pub fn set(&self) -> &SegmentSet {
        &self.set
    }

    /// Give each file a second name, or copy it there: `path_of` says which for a serial, and nothing has that name. It is the caller who
    /// syncs the names.
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
            // In a forked child its parent's files and locks are not to be touched.
            std::mem::forget((parts, Arc::clone(&self.tier)));
            return;
        }
        drop(parts);
        self.tier.state().reap();
        self.tier.context.space.notify_waiters();
    }
}
