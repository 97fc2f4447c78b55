//! Reuse distances: the number of other members of the sample that were used since the last use of a member.

/// Marks a number that no member has.
const NEVER: u32 = u32::MAX;
const WORD: u32 = u64::BITS;

/// The order of the last uses of all members.
///
/// Each use takes the next tick. A bit for each tick is set if it is the last use of some member, and a Fenwick tree
/// (Fenwick, "A new data structure for cumulative frequency tables", 1994) sums the bits of entire words. When the
/// ticks are used up, the last uses are renumbered in their order.
#[derive(Debug)]
pub(super) struct ReuseTracker {
    words: Vec<u64>,
    /// The tree over the bits of each word.
    sums: Vec<u32>,
    /// The tick of each member's last use, or [`NEVER`] for a number that no member has.
    last: Vec<u32>,
    now: u32,
    members: u32,
}

impl ReuseTracker {
    /// Creates a tracker for members below `members`, which is at least 1.
    pub(super) fn new(members: usize) -> Self {
        let words = (members * 4).div_ceil(WORD as usize);
        Self { words: vec![0; words], sums: vec![0; words + 1], last: vec![NEVER; members], now: 0, members: 0 }
    }

    /// Records a use. Returns the number of other members that were used since the last use, or `None` for the first
    /// use.
    pub(super) fn used(&mut self, member: u32) -> Option<u32> {
        if self.now as usize == self.words.len() * WORD as usize {
            self.renumber();
        }
        let before = self.last[member as usize];
        let distance = (before != NEVER).then(|| self.members - 1 - self.before(before));
        self.forget(member);
        self.last[member as usize] = self.now;
        self.flip(self.now, true);
        self.now += 1;
        self.members += 1;
        distance
    }

    /// Removes a member. Its number may be reused.
    pub(super) fn forget(&mut self, member: u32) {
        let last = std::mem::replace(&mut self.last[member as usize], NEVER);
        if last != NEVER {
            self.flip(last, false);
            self.members -= 1;
        }
    }

    /// The number of last uses before a tick.
    fn before(&self, tick: u32) -> u32 {
        let mut word = (tick / WORD) as usize;
        let bits = self.words[word] & ((1 << (tick % WORD)) - 1);
        let mut sum = bits.count_ones();
        while word > 0 {
            sum += self.sums[word];
            word &= word - 1;
        }
        sum
    }

    fn flip(&mut self, tick: u32, on: bool) {
        self.words[(tick / WORD) as usize] ^= 1 << (tick % WORD);
        let mut word = (tick / WORD) as usize + 1;
        while word < self.sums.len() {
            self.sums[word] = if on { self.sums[word] + 1 } else { self.sums[word] - 1 };
            word += word & word.wrapping_neg();
        }
    }

    fn renumber(&mut self) {
        let numbered: Vec<u32> =
            self.last.iter().map(|&last| if last == NEVER { NEVER } else { self.before(last) }).collect();
        self.last = numbered;
        self.words.fill(0);
        self.sums.fill(0);
        for position in 0..self.members {
            self.flip(position, true);
        }
        self.now = self.members;
    }

    /// Bytes of RAM.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.words.len() * 8 + self.sums.len() * 4 + self.last.len() * 4
    }
}
