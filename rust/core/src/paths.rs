//! Checks on paths before anything is read or written.
