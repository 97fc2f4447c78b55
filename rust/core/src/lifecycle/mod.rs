//! The life of a row, as far as it is decided by numbers alone: which ids get a row, how the ids that wait for one are counted, and which
//! rows die.
//!
//! Nothing here knows where rows are. The cache asks, and carries out what is decided.

pub(crate) mod admission;
mod bucket;
mod clock;
mod order;
mod pending;
mod shared;
mod sweep;

pub use bucket::{BucketCounts, PendingId};
pub use clock::StepClock;
pub use order::{Census, Counted, DigitPart, Span, SpanContents, Standing, rising};
pub(crate) use pending::Pending;
pub use shared::SharedRow;
pub use sweep::{Rule, Sweep};
