//! Merges the changes of deltas into a new index, on a thread of its own: lookups, and looks for newer checkpoints, go on meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::Builder;

use super::opening::{is_large, make_or_take};
use super::source::Source;
use super::version::{Indexed, Version, with_indexes};
use crate::checkpoint::Wait;
use crate::error::{Error, Kind, Result};
use crate::process::give_way;

/// Makes indexes that cover all of a version.
#[derive(Clone, Debug)]
pub(super) struct Merger {
    source: Source,
    /// Bytes that an index may take of this process's own memory. `None`: any number.
    host_bytes: Option<u64>,
    /// Whether a thread is at work.
    is_busy: Arc<AtomicBool>,
}

impl Merger {
    pub(super) fn new(source: Source, host_bytes: Option<u64>) -> Self {
        Self { source, host_bytes, is_busy: Arc::new(AtomicBool::new(false)) }
    }

    /// The same version with indexes of all its checkpoints, and so without overlays. `wait` is called now and then, and its error ends the work.
    pub(super) fn merged(&self, version: &Version, wait: &mut Wait<'_>) -> Result<Version> {
        self.adopt(version, &self.indexed(version, wait)?)
    }

    /// Make indexes of all checkpoints of a version.
    fn indexed(&self, version: &Version, wait: &mut Wait<'_>) -> Result<Indexed> {
        let links = self.source.links_of(version)?;
        let files: Vec<_> = version.tables.iter().map(|table| table.files.clone()).collect();
        // In a trainer's directory nothing is written, and the index beside the served checkpoint is of that alone.
        let writable = self.source.writable.as_ref().filter(|_| links.are_own());
        Ok(make_or_take(&links.opened()?, &files, (writable, self.host_bytes), wait)?.0)
    }

    /// A version with indexes of it, or of a checkpoint that it builds on: its overlays have the deltas after that alone.
    pub(super) fn adopt(&self, version: &Version, indexed: &Indexed) -> Result<Version> {
        if indexed.links == version.links.len() {
            return with_indexes(version, indexed, &[]);
        }
        with_indexes(version, indexed, &self.source.links_of(version)?.opened()?)
    }

    /// Begin to merge the overlays of a version that is served, where one of them is large and no thread is at work. What comes of it is handed
    /// to the server, if it is still there.
    pub(super) fn begin(&self, version: &Arc<Version>, server: Weak<dyn TakesIndexes>) {
        let is_needed = version.tables.iter().any(|table| is_large(table));
        if !is_needed || self.is_busy.swap(true, Ordering::AcqRel) {
            return;
        }
        let busy = Busy(Arc::clone(&self.is_busy));
        let (merger, version) = (self.clone(), Arc::clone(version));
        let work = move || {
            let _busy = busy;
            // Requests come first.
            give_way();
            let mut wait = || {
                let left = || Error::new(Kind::State, "nobody serves it any more");
                if server.strong_count() == 0 { Err(left()) } else { Ok(()) }
            };
            let indexed = merger.indexed(&version, &mut wait);
            let Some(server) = server.upgrade() else { return };
            // Without the index it is served as well, with more memory.
            if let Err(error) = indexed.and_then(|indexed| server.take_indexes(&version, &indexed)) {
                tracing::warn!("the changes since the index of {} are not merged: {error}", version.name());
            }
        };
        if let Err(error) = Builder::new().name("embcache-merge".into()).spawn(work) {
            tracing::warn!("the changes since the index are not merged, because the system starts no thread: {error}");
        }
    }
}

/// A server that is handed what was merged.
pub(super) trait TakesIndexes: Send + Sync {
    /// Put indexes that were made of a version into what is served, where it is that version or builds on it.
    fn take_indexes(&self, of: &Version, indexed: &Indexed) -> Result<()>;
}

/// Says that a thread is at work for as long as it lives.
struct Busy(Arc<AtomicBool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
