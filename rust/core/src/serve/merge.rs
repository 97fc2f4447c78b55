//! Merges the changes of deltas into a new index, on a thread of its own: lookups, and looks for newer checkpoints, go on meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::Builder;

use super::opening::{has_large_overlay, load_or_build_indexes};
use super::source::ServingSource;
use super::version::{ChainIndexes, ServedVersion, with_indexes};
use crate::checkpoint::WaitCallback;
use crate::error::{Error, Kind, Result};
use crate::process::lower_priority;

/// Makes indexes that cover all of a version.
#[derive(Clone, Debug)]
pub(super) struct IndexMerger {
    source: ServingSource,
    /// Bytes that an index may take of this process's own memory. `None`: any number.
    host_bytes: Option<u64>,
    /// Whether a thread is at work.
    is_busy: Arc<AtomicBool>,
}

impl IndexMerger {
    pub(super) fn new(source: ServingSource, host_bytes: Option<u64>) -> Self {
        Self { source, host_bytes, is_busy: Arc::new(AtomicBool::new(false)) }
    }

    /// The same version with indexes of all its checkpoints, and so without overlays. `wait` is called now and then, and its error ends the work.
    pub(super) fn merge(&self, version: &ServedVersion, wait: &mut WaitCallback<'_>) -> Result<ServedVersion> {
        self.adopt(version, &self.make_indexes(version, wait)?)
    }

    /// Make indexes of all checkpoints of a version.
    fn make_indexes(&self, version: &ServedVersion, wait: &mut WaitCallback<'_>) -> Result<ChainIndexes> {
        let links = self.source.links_of(version)?;
        let files: Vec<_> = version.tables.iter().map(|table| table.files.clone()).collect();
        // In a trainer's directory nothing is written, and the index beside the served checkpoint is of that alone.
        let writable = self.source.writable.as_ref().filter(|_| links.are_all_served());
        Ok(load_or_build_indexes(&links.opened()?, &files, (writable, self.host_bytes), wait)?.0)
    }

    /// A version with indexes of it, or of a checkpoint that it builds on: its overlays have the deltas after that alone.
    pub(super) fn adopt(&self, version: &ServedVersion, indexed: &ChainIndexes) -> Result<ServedVersion> {
        if indexed.links == version.links.len() {
            return with_indexes(version, indexed, &[]);
        }
        with_indexes(version, indexed, &self.source.links_of(version)?.opened()?)
    }

    /// Begin to merge the overlays of a version that is served, where one of them is large and no thread is at work. What comes of it is handed
    /// to the server, if it is still there.
    pub(super) fn begin(&self, version: &Arc<ServedVersion>, server: Weak<dyn IndexConsumer>) {
        let is_needed = version.tables.iter().any(|table| has_large_overlay(table));
        if !is_needed || self.is_busy.swap(true, Ordering::AcqRel) {
            return;
        }
        let busy = MergeBusyGuard(Arc::clone(&self.is_busy));
        let (merger, version) = (self.clone(), Arc::clone(version));
        let work = move || {
            let _busy = busy;
            // Requests come first.
            lower_priority();
            let mut wait = || {
                let left = || Error::new(Kind::State, "nobody serves it any more");
                if server.strong_count() == 0 { Err(left()) } else { Ok(()) }
            };
            let indexed = merger.make_indexes(&version, &mut wait);
            let Some(server) = server.upgrade() else { return };
            // Without the index it is served as well, with more memory.
            if let Err(error) = indexed.and_then(|indexed| server.install_indexes(&version, &indexed)) {
                tracing::warn!("the changes since the index of {} are not merged: {error}", version.name());
            }
        };
        if let Err(error) = Builder::new().name("embcache-merge".into()).spawn(work) {
            tracing::warn!("the changes since the index are not merged, because the system starts no thread: {error}");
        }
    }
}

/// A server that is handed what was merged.
pub(super) trait IndexConsumer: Send + Sync {
    /// Put indexes that were made of a version into what is served, where it is that version or builds on it.
    fn install_indexes(&self, of: &ServedVersion, indexed: &ChainIndexes) -> Result<()>;
}

/// Says that a thread is at work for as long as it lives.
struct MergeBusyGuard(Arc<AtomicBool>);

impl Drop for MergeBusyGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
