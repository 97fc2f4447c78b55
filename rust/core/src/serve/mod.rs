//! Serving: read-only tables from checkpoints, which follow a trainer's deltas. There is no table of training here: no pins, no optimizer, and
//! no tiers.
//!
//! Rows are read from the checkpoint's own files, which are mapped, so that all processes of a machine share them. An index of about 17 bytes a
//! row says where the row of an id lies. It lies in a file beside the checkpoint, which whoever comes first makes.
//!
//! A [`Version`] is what one checkpoint holds: for each table an index, and an *overlay*, which has the changes of the deltas after the index.
//! Nothing in a version changes. [`Serving::poll`] builds the next one beside and puts it in the place of the current one in one step, so that a
//! request that holds a version sees one checkpoint in all tables. The files of a version stay mapped as long as somebody holds it, whatever
//! a trainer removes.
//!
//! The files, from the bottom up: `pages`, `faults` and `near` know which pages are in memory; `files` maps data files; `index` finds places; `build`
//! makes an index; `overlay` has what changed since; `missing` says what an id without a row reads; `answer` is what a lookup writes; `gather` and `table` look ids up; `version` and
//! `opening` open checkpoints; `check` holds an index file against the rows; `source` says which is the next one; `serving` replaces versions, `follow`
//! does so regularly, and `merge` makes their indexes anew.

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
