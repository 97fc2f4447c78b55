//! Metadata of checkpoints: names, digests, manifests, and `LATEST`.

pub(crate) mod dense;
pub(crate) mod digest;
pub(crate) mod holds;
pub(crate) mod json;
pub(crate) mod latest;
pub(crate) mod manifests;
pub(crate) mod merge;
pub(crate) mod names;
pub(crate) mod read;
pub(crate) mod spec;
