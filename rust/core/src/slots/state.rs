//! What a slot says of its row.

/// The state of the row in a slot, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowState(pub(super) u8);

impl RowState {
    /// A row is here.
    pub const OCCUPIED: Self = Self(1);
    /// The copy on SSD, if any, is older than this one.
    pub const DIRTY: Self = Self(2);
    /// A copy, current or stale, is on SSD.
    pub const ON_SSD: Self = Self(4);
    /// Planned but never trained: it vanishes with its last pin.
    pub const PROVISIONAL: Self = Self(8);
    /// Its bytes are still being read; in a device slot: they were not scattered yet, and the newest copy is where it was.
    pub const LOADING: Self = Self(16);
    /// The newest copy is on the device; this slot is kept for a pin only.
    pub const SHADOW: Self = Self(32);
    /// Its read failed: it vanishes with its last pin, and the copy on SSD stays the newest.
    pub const FAILED: Self = Self(64);
    /// Trained or imported since the marks were cleared last, where this is the newest copy: see
    /// [`SlotMap::clear_marks`](super::SlotMap::clear_marks).
    pub const MODIFIED: Self = Self(128);

    /// States of a row that is not simply there: its last unpin, or its next plan, has work to do.
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

    /// Whether the row belongs to the table: born, here, and current.
    pub const fn is_current(self) -> bool {
        self.has(Self::OCCUPIED) && !self.has(Self::UNSETTLED)
    }

    /// Whether the row is current and no tier below has it as it is here.
    pub const fn is_newest(self) -> bool {
        self.is_current() && (self.has(Self::DIRTY) || !self.has(Self::ON_SSD))
    }
}
