//! The locks of a table and of a plan, the order in which they are taken, and what makes a table refuse them.
//!
//! 1. The turn of a plan ([`PlanLock`]).
//! 2. `rows_in_use` of each table ([`RowUseGuard`]), of several tables in the order of their addresses. Whoever takes it for writing has the
//!    turn of a plan, which the function asks for.
//! 3. The lock of a table's residency ([`Held`]).
//! 4. What the SSD tier locks inside.

mod device_rows;
mod guards;
mod inner;
mod left;
mod torn;
mod turn;

pub(super) use guards::{RowUseGuard, TableGuard};
pub(super) use inner::TableInner;
pub(super) use torn::PoisonCause;
pub(super) use turn::{PlanGuard, PlanLock};
