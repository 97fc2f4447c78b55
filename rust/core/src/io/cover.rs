//! The whole sectors that a read of any alignment needs, and the progress of reading them.

/// A read that is widened to whole sectors of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SectorRead {
    /// Byte in the file at which the first sector starts.
    pub(super) start: u64,
    /// Bytes of all the sectors.
    pub(super) span: usize,
    /// Bytes of the first sector before the first requested byte.
    pub(super) skip: usize,
    /// Requested bytes.
    pub(super) len: usize,
    /// Bytes that were read, in whole sectors.
    pub(super) bytes_read: usize,
    align: usize,
}

/// The next step after a partial read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SectorReadStep {
    /// Every requested byte was read.
    Done,
    /// Continues at byte `start + bytes_read`.
    More,
    /// The file ends before the last requested byte.
    Short,
}

impl SectorRead {
    /// Returns the sectors of `align` bytes around `len` bytes at byte `offset`. Buffered I/O has an `align` of 1.
    pub(super) fn new(offset: u64, len: usize, align: usize) -> Self {
        let skip = (offset % align as u64) as usize;
        Self {
            start: offset - skip as u64,
            span: (skip + len).next_multiple_of(align),
            skip,
            len,
            bytes_read: 0,
            align,
        }
    }

    /// Records that a read at byte `start + bytes_read` returned `count` bytes.
    pub(super) fn advance(&mut self, count: usize) -> SectorReadStep {
        let before = self.bytes_read;
        let reached = before + count;
        if reached >= self.skip + self.len {
            return SectorReadStep::Done;
        }
        // A direct read must start at a sector. A partially read sector is read again.
        self.bytes_read = reached - reached % self.align;
        if self.bytes_read > before { SectorReadStep::More } else { SectorReadStep::Short }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cover_is_the_fewest_whole_sectors() {
        let cover = SectorRead::new(1000, 308, 512);
        assert_eq!((cover.start, cover.span, cover.skip), (512, 1024, 488));
        let cover = SectorRead::new(1024, 512, 512);
        assert_eq!((cover.start, cover.span, cover.skip), (1024, 512, 0));
        let cover = SectorRead::new(7, 3, 1);
        assert_eq!((cover.start, cover.span, cover.skip), (7, 3, 0));
    }

    #[test]
    fn a_read_goes_on_until_the_last_wanted_byte_is_there() {
        let mut cover = SectorRead::new(1000, 3000, 512);
        assert_eq!(cover.advance(700), SectorReadStep::More);
        assert_eq!(cover.bytes_read, 512, "a part of a sector is read again");
        assert_eq!(cover.advance(512), SectorReadStep::More);
        assert_eq!(cover.advance(488 + 3000 - 1024), SectorReadStep::Done, "the rest of the last sector is not needed");
    }

    #[test]
    fn a_read_without_progress_is_past_the_end() {
        let mut cover = SectorRead::new(0, 1024, 512);
        assert_eq!(cover.advance(600), SectorReadStep::More);
        assert_eq!(cover.advance(88), SectorReadStep::Short);
        assert_eq!(SectorRead::new(0, 1, 1).advance(0), SectorReadStep::Short);
    }
}
