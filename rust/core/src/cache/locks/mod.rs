//! The locks of a table and of a plan, in the order in which they are taken, and the poisoned state of a table.
//!
//! 1. Exclusive access to a plan ([`PlanLock`]).
//! 2. `rows_in_use` of each table ([`RowUseGuard`]), of several tables in the order of their addresses. Locking it for
//!    writing requires exclusive access to a plan, which is an argument of the function.
//! 3. The lock of a table ([`TableGuard`]).
//! 4. Locks inside of the SSD tier.

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
