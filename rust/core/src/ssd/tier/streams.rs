//! The open segments of a tier: one per hotness group, and one for tombstones.

use std::sync::Arc;

use crate::ssd::classes::MAX_HOTNESS_CLASSES;
use crate::ssd::format::segment::SegmentContent;
use crate::ssd::segment::file::Segment;
use crate::ssd::segment::open::OpenSegment;

/// The destination of a record: the open segment of its hotness group (see `classes`), or that of tombstones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SegmentStream {
    Rows(u8),
    Tombstones,
}

impl SegmentStream {
    const COUNT: usize = MAX_HOTNESS_CLASSES as usize + 1;

    /// Iterates over every stream.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        Self::of_rows().chain([Self::Tombstones])
    }

    /// The streams of rows, by hotness group.
    pub(crate) fn of_rows() -> impl DoubleEndedIterator<Item = Self> {
        (0..MAX_HOTNESS_CLASSES).map(Self::Rows)
    }

    #[inline]
    fn index(self) -> usize {
        match self {
            Self::Rows(class) => class as usize,
            Self::Tombstones => MAX_HOTNESS_CLASSES as usize,
        }
    }

    pub(crate) fn content(self) -> SegmentContent {
        match self {
            Self::Rows(_) => SegmentContent::Rows,
            Self::Tombstones => SegmentContent::Tombstones,
        }
    }

    pub(crate) fn hotness(self) -> u8 {
        match self {
            Self::Rows(class) => class,
            Self::Tombstones => 0,
        }
    }
}

/// The open segments, each of one stream.
#[derive(Debug, Default)]
pub(crate) struct OpenSegments([Option<OpenSegment>; SegmentStream::COUNT]);

impl OpenSegments {
    #[inline]
    pub(crate) fn get(&self, stream: SegmentStream) -> Option<&OpenSegment> {
        self.0[stream.index()].as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, stream: SegmentStream) -> Option<&mut OpenSegment> {
        self.0[stream.index()].as_mut()
    }

    pub(crate) fn put(&mut self, stream: SegmentStream, open: OpenSegment) {
        self.0[stream.index()] = Some(open);
    }

    pub(crate) fn take(&mut self, stream: SegmentStream) -> Option<OpenSegment> {
        self.0[stream.index()].take()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &OpenSegment> {
        self.0.iter().flatten()
    }

    /// The open segments of rows.
    pub(crate) fn of_rows(&self) -> impl Iterator<Item = &OpenSegment> {
        self.0[..MAX_HOTNESS_CLASSES as usize].iter().flatten()
    }

    /// The open segment that is `segment`, if that is open.
    pub(crate) fn find(&self, segment: &Arc<Segment>) -> Option<&OpenSegment> {
        self.iter().find(|open| Arc::ptr_eq(open.segment(), segment))
    }

    /// Submits their buffers, so that no half-filled one is kept.
    pub(crate) fn spill(&mut self) {
        self.0.iter_mut().flatten().for_each(OpenSegment::spill);
    }
}
