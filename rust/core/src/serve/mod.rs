//! Serving: read-only tables from checkpoints, which can follow a trainer's deltas. They have no pins, no optimizer,
//! and no tiers.
//!
//! Rows are read from the checkpoint's own files, which are memory-mapped, so that all processes of a machine share
//! them. An index of about 17 bytes per row maps ids to locations. It is stored in a file in the checkpoint's
//! directory, built by the first process that opens it.
//!
//! A [`ServedVersion`] is the contents of one checkpoint: for each table an index, and an *overlay* with the changes of
//! the deltas after the index. A version is immutable. [`TableServer::poll`] builds the next one in the background and
//! replaces the current one atomically, so that a request that holds a version sees one checkpoint in all tables. The
//! files of a version stay mapped while it is held, even if a trainer removes them.
//!
//! The files, from the bottom up: `resident_pages` and `page_age` track the pages in memory; `data_files` maps data
//! files; `index` finds locations, and `index_file` stores it; `build` builds an index; `overlay` has later changes;
//! `lookup` and `table` look up ids; `version` and `open` open checkpoints; `source` finds the next checkpoint; `server`
//! replaces versions, `follow` does so regularly, and `merge` rebuilds their indexes.

mod build;
mod data_files;
mod follow;
mod index;
mod index_file;
mod lookup;
mod merge;
mod open;
mod overlay;
mod page_age;
mod resident_pages;
mod server;
mod source;
mod table;
mod version;

pub use crate::config::MissingRead;
pub use follow::ServingFollower;
pub use open::{ServeIndexReport, check_index, make_index};
pub use server::ServingStats;
pub use server::{PollOutcome, ServeOptions, TableServer};
pub use table::{PoolingMode, ServedTable};
pub use version::ServedVersion;
