//! Embedding tables that are larger than memory. Rows are stored on SSD and in RAM, and are planned for tensors on any
//! device.
//!
//! The crate depends on neither Python nor torch nor device memory. A [`cache::Table`] owns the rows of one table shard
//! in its host and SSD tiers, and decides where each row is placed. A [`cache::Lookup`] plans a batch over several
//! tables.

/// Implements `Debug` for a type by some fields, because others have no `Debug` or are too long.
macro_rules! opaque_debug {
    ($name:ident $(<$life:lifetime>)?, $this:ident $(, $field:ident = $value:expr)*) => {
        impl std::fmt::Debug for $name $(<$life>)? {
            fn fmt(&$this, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name))$(.field(stringify!($field), &$value))*.finish_non_exhaustive()
            }
        }
    };
}

pub mod cache;
pub mod checkpoint;
pub mod config;
pub mod error;
pub mod index;
pub mod io;
pub mod kernels;
pub mod lifecycle;
pub mod paths;
pub mod policy;
pub mod rows;
pub mod runtime;
pub mod serve;
pub mod sizing;
pub mod slots;
pub mod ssd;
pub mod stats;
pub mod types;

mod tiers;

pub use error::{Error, Kind, Result};
pub use runtime::process::{PerProcess, work_alone};
