//! Merges the changes of deltas into a new index on a background thread, while lookups and polls continue.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::Builder;

use super::open::{has_large_overlay, load_or_build_indexes};
use super::source::ServingSource;
use super::version::{ChainIndexes, ServedVersion, with_indexes};
use crate::checkpoint::WaitCallback;
use crate::error::{Kind, Result};
use crate::runtime::process::lower_priority;

/// Builds indexes that cover an entire version.
#[derive(Clone, Debug)]
pub(super) struct IndexMerger {
    source: ServingSource,
    /// Maximum bytes of an index in this process's own memory; `None` for no limit.
    host_bytes: Option<u64>,
    /// True while a merge thread runs.
    is_busy: Arc<AtomicBool>,
}

impl IndexMerger {
    pub(super) fn new(source: ServingSource, host_bytes: Option<u64>) -> Self {
        Self { source, host_bytes, is_busy: Arc::new(AtomicBool::new(false)) }
    }

    /// Returns the same version with indexes of all its checkpoints, and so without overlays. `wait` is called
    /// repeatedly; an error from it aborts the work.
    pub(super) fn merge(&self, version: &ServedVersion, wait: &mut WaitCallback<'_>) -> Result<ServedVersion> {
        self.adopt(version, &self.make_indexes(version, wait)?)
    }

    /// Builds indexes of all checkpoints of a version.
    fn make_indexes(&self, version: &ServedVersion, wait: &mut WaitCallback<'_>) -> Result<ChainIndexes> {
        let links = self.source.links_of(version)?;
        let files: Vec<_> = version.tables.iter().map(|table| table.files.clone()).collect();
        // Nothing is written to a trainer's directory, and the index file of the served checkpoint covers only that
        // checkpoint.
        let writable = self.source.writable.as_ref().filter(|_| links.are_all_served());
        Ok(load_or_build_indexes(&links.opened()?, &files, (writable, self.host_bytes), wait)?.0)
    }

    /// Returns a version with indexes of it, or of one of its base checkpoints: its overlays then contain only the
    /// later deltas.
    pub(super) fn adopt(&self, version: &ServedVersion, indexed: &ChainIndexes) -> Result<ServedVersion> {
        if indexed.links == version.links.len() {
            return with_indexes(version, indexed, &[]);
        }
        with_indexes(version, indexed, &self.source.links_of(version)?.opened()?)
    }

    /// Starts to merge the overlays of a served version, if one of them is large and no merge is running. The result is
    /// passed to the server, if it still exists.
    pub(super) fn begin(&self, version: &Arc<ServedVersion>, server: Weak<dyn IndexConsumer>) {
        let is_needed = version.tables.iter().any(|table| has_large_overlay(table));
        if !is_needed || self.is_busy.swap(true, Ordering::AcqRel) {
            return;
        }
        let busy = MergeBusyGuard(Arc::clone(&self.is_busy));
        let (merger, version) = (self.clone(), Arc::clone(version));
        let work = move || {
            let _busy = busy;
            // Requests have priority.
            lower_priority();
            let mut wait = || {
                let dropped = || Kind::State.error("no server serves the checkpoint");
                if server.strong_count() == 0 { Err(dropped()) } else { Ok(()) }
            };
            let indexed = merger.make_indexes(&version, &mut wait);
            let Some(server) = server.upgrade() else { return };
            // Without the index the version is still served, using more memory.
            if let Err(error) = indexed.and_then(|indexed| server.install_indexes(&version, &indexed)) {
                tracing::warn!("the changes since the index of {} are not merged: {error}", version.name());
            }
        };
        if let Err(error) = Builder::new().name("embcache-merge".into()).spawn(work) {
            tracing::warn!("the changes since the index are not merged, because the system starts no thread: {error}");
        }
    }
}

/// A server that receives merged indexes.
pub(super) trait IndexConsumer: Send + Sync {
    /// Installs indexes built from the version `of`, if the current version is the same or based on it.
    fn install_indexes(&self, of: &ServedVersion, indexed: &ChainIndexes) -> Result<()>;
}

/// Marks a merge as running while it lives.
struct MergeBusyGuard(Arc<AtomicBool>);

impl Drop for MergeBusyGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
