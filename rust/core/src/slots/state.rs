//! State bits of the row in a slot.

/// The state of the row in a slot, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowState(pub(super) u8);

impl RowState {
    /// The slot has a row.
    pub const OCCUPIED: Self = Self(1);
    /// The copy of the row on SSD, if there is one, is older than this one.
    pub const DIRTY: Self = Self(2);
    /// SSD has a copy of the row, current or outdated.
    pub const ON_SSD: Self = Self(4);
    /// The row was planned and never trained. It is discarded with its last pin.
    pub const PROVISIONAL: Self = Self(8);
    /// In a slot of the host tier: the row is being read from SSD. In a slot of the device tier: the row was not
    /// scattered into the device tensors yet, and its current copy is where it was before.
    pub const LOADING: Self = Self(16);
    /// The current copy is on the device. The slot is kept only because a plan has pinned it.
    pub const SHADOW: Self = Self(32);
    /// The read of the row failed. It is discarded with its last pin, and the copy on SSD stays the current one.
    pub const FAILED: Self = Self(64);
    /// This is the newest copy of the row, and it was trained or imported since the last call of
    /// [`SlotMap::clear_marks`](super::SlotMap::clear_marks).
    pub const MODIFIED: Self = Self(128);

    /// The bits of an unsettled row: releasing its last pin, or planning it, requires further work.
    pub(super) const UNSETTLED: Self = Self::PROVISIONAL.with(Self::LOADING).with(Self::SHADOW).with(Self::FAILED);

    /// Returns the union of both sets of bits.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the bits without those of `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns true if any bit of `other` is set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns true if the row is inserted and this copy of it is complete and current.
    pub const fn is_current(self) -> bool {
        self.has(Self::OCCUPIED) && !self.has(Self::UNSETTLED)
    }

    /// Returns true if this is the newest copy of the row: it is current, and no tier below has the same one.
    pub const fn is_newest(self) -> bool {
        self.is_current() && (self.has(Self::DIRTY) || !self.has(Self::ON_SSD))
    }
}
