//! The whole sectors that a read of any alignment needs, and how far they have been read.

/// One read, widened to the alignment of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cover {
    /// First byte of the first sector.
    pub(super) start: u64,
    /// Bytes of all the sectors.
    pub(super) span: usize,
    /// Bytes before the first one wanted.
    pub(super) skip: usize,
    /// Bytes wanted.
    pub(super) len: usize,
    /// Bytes read so far, whole sectors.
    pub(super) got: usize,
    align: usize,
}

/// What to do after a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Every byte wanted is there.
    Done,
    /// Read on at `start + got`.
    More,
    /// The file ends before the last byte wanted, at this offset or a little behind it.
    Short,
}

impl Cover {
    /// The sectors of `align` bytes (1 for buffered I/O) around `len` bytes at `offset`.
    pub(super) fn new(offset: u64, len: usize, align: usize) -> Self {
        let skip = (offset % align as u64) as usize;
        Self { start: offset - skip as u64, span: (skip + len).next_multiple_of(align), skip, len, got: 0, align }
    }

    /// Take note of `count` bytes that a read at `start + got` gave.
    pub(super) fn advance(&mut self, count: usize) -> Step {
        let before = self.got;
        let reached = before + count;
        if reached >= self.skip + self.len {
            return Step::Done;
        }
        // A direct read has to start at a sector: what was read of a part of one is read again.
        self.got = reached - reached % self.align;
        if self.got > before { Step::More } else { Step::Short }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cover_is_the_fewest_whole_sectors() {
        let cover = Cover::new(1000, 308, 512);
        assert_eq!((cover.start, cover.span, cover.skip), (512, 1024, 488));
        let cover = Cover::new(1024, 512, 512);
        assert_eq!((cover.start, cover.span, cover.skip), (1024, 512, 0));
        let cover = Cover::new(7, 3, 1);
        assert_eq!((cover.start, cover.span, cover.skip), (7, 3, 0));
    }

    #[test]
    fn a_read_goes_on_until_the_last_wanted_byte_is_there() {
        let mut cover = Cover::new(1000, 3000, 512);
        assert_eq!(cover.advance(700), Step::More);
        assert_eq!(cover.got, 512, "a part of a sector is read again");
        assert_eq!(cover.advance(512), Step::More);
        assert_eq!(cover.advance(488 + 3000 - 1024), Step::Done, "the rest of the last sector is not needed");
    }

    #[test]
    fn a_read_without_progress_is_past_the_end() {
        let mut cover = Cover::new(0, 1024, 512);
        assert_eq!(cover.advance(600), Step::More);
        assert_eq!(cover.advance(88), Step::Short);
        assert_eq!(Cover::new(0, 1, 1).advance(0), Step::Short);
    }
}
