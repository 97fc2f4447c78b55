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
//! The files, from the bottom up: `pages`, `faults` and `near` track the pages in memory; `files` maps data files;
//! `index` finds locations; `build` builds an index; `overlay` has later changes; `missing` has the values of missing
//! ids; `answer` is the output of a lookup; `gather` and `table` look up ids; `version` and `opening` open checkpoints;
//! `check` verifies an index file against the rows; `source` finds the next checkpoint; `serving` replaces versions,
//! `follow` does so regularly, and `merge` rebuilds their indexes.

mod answer;
mod build;
mod check;
mod faults;
mod files;
mod follow;
mod gather;
mod index;
mod merge;
mod missing;
mod near;
mod opening;
mod overlay;
mod pages;
mod serving;
mod source;
mod stats;
mod table;
mod version;

pub use crate::config::MissingRead;
pub use check::check_index;
pub use follow::ServingFollower;
pub use opening::{ServeIndexReport, make_index};
pub use serving::{PollOutcome, ServeOptions, TableServer};
pub use stats::ServingStats;
pub use table::{PoolingMode, ServedTable};
pub use version::ServedVersion;
