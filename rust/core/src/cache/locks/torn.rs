//! A table that something left half-way changed.

use crate::sync::{AtomicU32, Ordering};

/// What ended half-way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tear {
    /// A panic, amid a change of the table's residency or of its rows.
    Panic,
    /// A training step, whose rows are updated in part.
    Update,
}

impl Tear {
    /// What to say of it after "the table cannot be used since".
    pub(crate) fn what_happened(self) -> &'static str {
        match self {
            Self::Panic => "a panic interrupted a change of it, a bug of torchrec-embcache to report",
            Self::Update => {
                "the update of a training step failed half-way (its own error says why): some of the batch's rows are updated and \
                 others are not"
            }
        }
    }
}

/// Whether a table refuses all use because something ended half-way. It never gets over that.
#[derive(Debug)]
pub(crate) struct Torn(AtomicU32);

impl Default for Torn {
    fn default() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl Torn {
    pub(crate) fn set(&self, tear: Tear) {
        let number = match tear {
            Tear::Panic => 1,
            Tear::Update => 2,
        };
        self.0.store(number, Ordering::Release);
    }

    pub(crate) fn get(&self) -> Option<Tear> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            1 => Some(Tear::Panic),
            _ => Some(Tear::Update),
        }
    }
}
