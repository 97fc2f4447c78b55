//! The open segments of a tier: one for each class of rows, and one for tombstones.

use std::sync::Arc;

use crate::ssd::classes::MOST_CLASSES;
use crate::ssd::format::segment::Content;
use crate::ssd::segment::file::Segment;
use crate::ssd::segment::open::OpenSegment;

/// Which open segment a record goes to: that of its class of rows (see `classes`), or that of tombstones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Rows(u8),
    Tombstones,
}

impl Stream {
    const COUNT: usize = MOST_CLASSES as usize + 1;

    /// Every stream.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        Self::of_rows().chain([Self::Tombstones])
    }

    /// The streams of rows, by class.
    pub(crate) fn of_rows() -> impl DoubleEndedIterator<Item = Self> {
        (0..MOST_CLASSES).map(Self::Rows)
    }

    #[inline]
    fn index(self) -> usize {
        match self {
            Self::Rows(class) => class as usize,
            Self::Tombstones => MOST_CLASSES as usize,
        }
    }

    pub(crate) fn content(self) -> Content {
        match self {
            Self::Rows(_) => Content::Rows,
            Self::Tombstones => Content::Tombstones,
        }
    }

    pub(crate) fn class(self) -> u8 {
        match self {
            Self::Rows(class) => class,
            Self::Tombstones => 0,
        }
    }
}

/// The open segments, each of one stream.
#[derive(Debug, Default)]
pub(crate) struct OpenSegments([Option<OpenSegment>; Stream::COUNT]);

impl OpenSegments {
    #[inline]
    pub(crate) fn get(&self, stream: Stream) -> Option<&OpenSegment> {
        self.0[stream.index()].as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, stream: Stream) -> Option<&mut OpenSegment> {
        self.0[stream.index()].as_mut()
    }

    pub(crate) fn put(&mut self, stream: Stream, open: OpenSegment) {
        self.0[stream.index()] = Some(open);
    }

    pub(crate) fn take(&mut self, stream: Stream) -> Option<OpenSegment> {
        self.0[stream.index()].take()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &OpenSegment> {
        self.0.iter().flatten()
    }

    /// The open segments of rows.
    pub(crate) fn of_rows(&self) -> impl Iterator<Item = &OpenSegment> {
        self.0[..MOST_CLASSES as usize].iter().flatten()
    }

    /// The one that is `segment`, if that is open.
    pub(crate) fn of(&self, segment: &Arc<Segment>) -> Option<&OpenSegment> {
        self.iter().find(|open| Arc::ptr_eq(open.segment(), segment))
    }

    /// Hand in their buffers, so that none that is half filled is kept.
    pub(crate) fn spill(&mut self) {
        self.0.iter_mut().flatten().for_each(OpenSegment::spill);
    }
}
