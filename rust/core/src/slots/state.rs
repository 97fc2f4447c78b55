//! What a tier knows of the row in a slot.

/// The state of the row in a slot, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowState(pub(super) u8);

impl RowState {
    /// A row is here.
    pub const OCCUPIED: Self = Self(1);
    /// The copy of the row on SSD, if there is one, is older than this one.
    pub const DIRTY: Self = Self(2);
    /// There is a copy of the row on SSD, current or older.
    pub const ON_SSD: Self = Self(4);
    /// The row was planned and never trained. It vanishes with its last pin.
    pub const PROVISIONAL: Self = Self(8);
    /// In a slot of the host tier: the row is being read from SSD. In a slot of the device tier: the row was not scattered into the
    /// device tensors yet, and its newest copy is where it was before.
    pub const LOADING: Self = Self(16);
    /// The newest copy is on the device. The slot is kept only because a plan has pinned it.
    pub const SHADOW: Self = Self(32);
    /// The read of the row failed. It vanishes with its last pin, and the copy on SSD stays the newest.
    pub const FAILED: Self = Self(64);
    /// This is the newest copy of the row, and it was trained or imported since
    /// [`SlotMap::clear_marks`](super::SlotMap::clear_marks) was called last.
    pub const MODIFIED: Self = Self(128);

    /// The bits of a row that is not simply there: whoever takes its last pin back, or plans it next, has work to do.
    pub(super) const UNSETTLED: Self = Self::PROVISIONAL.with(Self::LOADING).with(Self::SHADOW).with(Self::FAILED);

    /// Both sets of bits.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Without the bits of `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether any bit of `other` is set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether the row belongs to the table (it is born) and this copy of it is complete and current.
    pub const fn is_current(self) -> bool {
        self.has(Self::OCCUPIED) && !self.has(Self::UNSETTLED)
    }

    /// Whether this is the newest copy of the row, and no tier below has the same one.
    pub const fn is_newest(self) -> bool {
        self.is_current() && (self.has(Self::DIRTY) || !self.has(Self::ON_SSD))
    }
}
