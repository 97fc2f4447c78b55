//! Poisoned tables: an interrupted operation left them partly changed.

use crate::sync::{AtomicU32, Ordering};

/// The interrupted operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoisonCause {
    /// A panic during a change of the table's placement or rows.
    Panic,
    /// A training step that has updated only some of its rows.
    Update,
}

impl PoisonCause {
    /// Continuation of the message "the table cannot be used since".
    pub(crate) fn description(self) -> &'static str {
        match self {
            Self::Panic => "a panic interrupted a change of it, a bug of torchrec-embcache to report",
            Self::Update => {
                "the update of a training step failed half-way (its own error says why): some of the batch's rows are updated and \
                 others are not"
            }
        }
    }
}

/// Set if a table rejects all use because an operation was interrupted. It is permanent.
#[derive(Debug)]
pub(crate) struct TablePoison(AtomicU32);

impl Default for TablePoison {
    fn default() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl TablePoison {
    pub(crate) fn set(&self, cause: PoisonCause) {
        let number = match cause {
            PoisonCause::Panic => 1,
            PoisonCause::Update => 2,
        };
        self.0.store(number, Ordering::Release);
    }

    pub(crate) fn cause(&self) -> Option<PoisonCause> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            1 => Some(PoisonCause::Panic),
            _ => Some(PoisonCause::Update),
        }
    }
}
