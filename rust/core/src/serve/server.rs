//! A server's tables: the current version, and its replacement by newer ones.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;

use super::merge::{IndexConsumer, IndexMerger};
use super::open::{INDEX_LOCK_RETRY_INTERVAL, open_first_version, writable_directory};
use super::source::ServingSource;
use super::table::{LookupCounts, ServedTable};
use super::version::{ChainIndexes, ServeContext, ServedVersion};
use crate::checkpoint::{CheckpointDirectory, CheckpointName, LatestCheckpoint, WaitCallback};
use crate::config::MissingRead;
use crate::error::{Error, Kind, Result};
use crate::runtime::sync::lock;

/// Options of a table server.
#[derive(Clone, Debug, Default)]
pub struct ServeOptions {
    /// The checkpoint to serve, by name or by the digits of its sequence number; newer ones are then ignored. `None`:
    /// the latest one.
    pub at: Option<String>,
    /// Maximum bytes of indexes and overlays in this process's own memory; `None` for no limit.
    pub host_bytes: Option<u64>,
    /// Maximum time since the served checkpoint was published.
    pub max_staleness: Option<Duration>,
    /// If true, [`TableServer::pin`] returns an error for a version that is older than that.
    pub raise_when_stale: bool,
    /// The trainer's directory, if it is not the served one. Its deltas based on the checkpoint from which the served
    /// one was made are applied, rounded to the precision of the served weights. Nothing is written there.
    pub source: Option<CheckpointDirectory>,
    /// Value read for a missing id. `None`: the value that evaluation reads during training.
    pub missing: Option<MissingRead>,
    /// If true, the weights of all rows are read into memory before a checkpoint is served, in huge pages if the OS has
    /// them.
    pub preload: bool,
    /// If true, all rows are read and verified against their checksums before a checkpoint is served. Otherwise they
    /// are verified when an index is built, as are deltas that the index does not cover.
    pub verify: bool,
}

/// Result of polling for a newer checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollOutcome {
    /// The latest checkpoint is already served.
    UpToDate,
    /// This newer checkpoint is served after the call.
    Newer(CheckpointName),
}

/// The latest checkpoints of a server's directories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NewestCheckpoints {
    /// In the followed directory.
    pub(super) followed: CheckpointName,
    /// In the served directory, which may be the same. `None` if it cannot be read.
    pub(super) served: Option<CheckpointName>,
}

#[derive(Debug, Default)]
struct ServingState {
    /// The version before the current one.
    previous: Option<Arc<ServedVersion>>,
    /// The checkpoint that was rolled back. A poll does not serve it again.
    rolled_back_from: Option<CheckpointName>,
    last_error: Option<String>,
}

/// The tables of a directory of checkpoints, for lookups.
#[derive(Debug)]
pub struct TableServer {
    source: ServingSource,
    options: ServeOptions,
    opening: ServeContext,
    merger: IndexMerger,
    /// This server, for threads that do not keep it alive.
    weak_self: Weak<Self>,
    current: ArcSwap<ServedVersion>,
    state: Mutex<ServingState>,
    /// Held while polling for a newer version.
    polling: Mutex<()>,
    polls: PollCounts,
    /// The process that opened it. A forked process can only look up rows: a lock may be held by a thread that it
    /// lacks.
    process: u32,
}

impl TableServer {
    /// Opens a checkpoint of a directory. If it has no index, one is built, and written to the checkpoint's directory
    /// if that is allowed.
    ///
    /// Errors: `Path` if there is no checkpoint; `Mismatch` if it is a linked one; `Corruption`, `Storage`; `Capacity`
    /// if indexes use more of this process's memory than `host_bytes`, or the data files most of the mappings that the
    /// OS allows per process.
    pub fn open(root: CheckpointDirectory, options: ServeOptions) -> Result<Arc<Self>> {
        Self::open_while(root, options, &mut || Ok(()))
    }

    /// Like [`Self::open`]. `wait` is called while an index is built, or waited for, and while rows are read. An error
    /// from it aborts this.
    ///
    /// Errors: as [`Self::open`], and errors of `wait`.
    pub fn open_while(
        root: CheckpointDirectory,
        options: ServeOptions,
        wait: &mut WaitCallback<'_>,
    ) -> Result<Arc<Self>> {
        if options.at.is_some() && options.source.is_some() {
            let what = "one checkpoint is served for good with `at`, and newer ones with `source`: give one of them";
            return Err(Kind::Config.error(what));
        }
        let source = ServingSource { writable: writable_directory(&root), root, trainer: options.source.clone() };
        let opening = ServeContext {
            host_bytes: options.host_bytes,
            missing: options.missing,
            preload: options.preload,
            verify: options.verify,
            counts: Arc::new(LookupCounts::default()),
            alive: Arc::new(()),
        };
        let version =
            open_first_version(&source.root, source.writable.as_ref(), options.at.as_deref(), &opening, wait)?;
        check_memory(&version, options.host_bytes)?;
        tracing::info!(checkpoint = %version.name, tables = version.tables.len(), "a checkpoint is served");
        let serving = Arc::new_cyclic(|this| Self {
            merger: IndexMerger::new(source.clone(), options.host_bytes),
            weak_self: Weak::clone(this),
            source,
            options,
            opening,
            current: ArcSwap::from_pointee(version),
            state: Mutex::default(),
            polling: Mutex::new(()),
            polls: PollCounts::default(),
            process: std::process::id(),
        });
        if serving.options.source.is_some() {
            // If the trainer's checkpoints cannot be served, this is counted and logged, and this checkpoint is served.
            let mut ended = Ok(());
            let _ = serving.poll_while(&mut || {
                ended = wait();
                ended.clone()
            });
            ended?;
        }
        Ok(serving)
    }

    /// Returns the current version, which is immutable and stays readable while it is held.
    ///
    /// Errors: `Stale` if it was published too long ago and `raise_when_stale` is set.
    pub fn pin(&self) -> Result<Arc<ServedVersion>> {
        let version = self.current.load_full();
        if let Some(limit) = self.options.max_staleness.filter(|_| self.options.raise_when_stale) {
            let age = staleness(&version);
            if age > limit {
                return Err(Kind::Stale.error(format!(
                    "checkpoint {} was published {:.1} s ago, and at most {:.1} s are allowed: see whether the trainer saves, and whether \
                     its checkpoints can be read (`last_error` of the statistics says)",
                    version.name,
                    age.as_secs_f64(),
                    limit.as_secs_f64()
                )));
            }
        }
        Ok(version)
    }

    /// Polls for a newer checkpoint, and serves it after this call if there is one. Its deltas are read and verified
    /// first.
    ///
    /// Errors: as [`Self::open`], and `State` in a forked process. The previous version remains current; the error is
    /// counted and logged.
    pub fn poll(&self) -> Result<PollOutcome> {
        self.poll_while(&mut || Ok(()))
    }

    /// Like [`Self::poll`]. `wait` is called while an index is built, or waited for, while rows are read, and while
    /// another thread polls. An error from it aborts this.
    ///
    /// Errors: as [`Self::poll`], and errors of `wait`, which are neither counted nor logged.
    pub fn poll_while(&self, wait: &mut WaitCallback<'_>) -> Result<PollOutcome> {
        self.check_process()?;
        let _alone = lock_while(&self.polling, wait)?;
        self.polls.polls.fetch_add(1, Ordering::Relaxed);
        if self.options.at.is_some() {
            return Ok(PollOutcome::UpToDate);
        }
        let mut ended = false;
        let polled = self.check_for_newer(&mut || wait().inspect_err(|_| ended = true));
        if ended {
            return polled;
        }
        self.record_poll(polled.as_ref().err());
        polled
    }

    /// Counts and logs the result of a poll, and stores its error for the statistics.
    fn record_poll(&self, error: Option<&Error>) {
        let error = error.map(ToString::to_string);
        if let Some(error) = &error {
            self.polls.failed.fetch_add(1, Ordering::Relaxed);
            if lock(&self.state).last_error.as_ref() != Some(error) {
                let name = self.current.load().name;
                tracing::warn!("a newer checkpoint cannot be served, and {name} serves on: {error}");
            }
        }
        lock(&self.state).last_error = error;
    }

    /// Records that a poll panicked, which is a bug of this package.
    pub(super) fn record_panic(&self, message: &str) {
        self.record_poll(Some(&Kind::State.error(format!(
            "polling for a newer checkpoint panicked: {message}. This is a bug of torchrec-embcache: report this bug"
        ))));
    }

    /// Returns the checkpoints that a poll would find, if they can be read.
    pub(super) fn newest(&self) -> Option<NewestCheckpoints> {
        let followed = LatestCheckpoint::read(self.source.followed()).ok()?.name;
        let served = LatestCheckpoint::read(&self.source.root).ok().map(|latest| latest.name);
        Some(NewestCheckpoints { followed, served })
    }

    fn check_for_newer(&self, wait: &mut WaitCallback<'_>) -> Result<PollOutcome> {
        let latest = LatestCheckpoint::read(self.source.followed())?;
        let before = self.current.load_full();
        let served = self.source.checkpoint_of(&before)?;
        if latest.name == served || lock(&self.state).rolled_back_from == Some(latest.name) {
            return Ok(PollOutcome::UpToDate);
        }
        if latest.name.seq <= served.seq && !self.source.is_built_on(latest, served)? {
            return Err(Kind::Mismatch.error(format!(
                "LATEST names {}, which is not after {served}, which is served: open the directory again to serve it",
                latest.name
            )).at(self.source.followed().path()));
        }
        let next = Arc::new(self.source.next(&self.opening, &before, latest, wait)?);
        let fits = check_memory(&next, self.options.host_bytes).is_ok();
        if !fits {
            let merged = Arc::new(self.merger.merge(&next, wait)?);
            check_memory(&merged, self.options.host_bytes)?;
            return Ok(self.replace(&before, &merged));
        }
        let polled = self.replace(&before, &next);
        if polled != PollOutcome::UpToDate {
            let this: Weak<Self> = Weak::clone(&self.weak_self);
            self.merger.begin(&next, this);
        }
        Ok(polled)
    }

    /// Replaces `before` by `next`, unless another thread replaced `before` first.
    fn replace(&self, before: &Arc<ServedVersion>, next: &Arc<ServedVersion>) -> PollOutcome {
        let mut state = lock(&self.state);
        if !Arc::ptr_eq(&self.current.load(), before) {
            return PollOutcome::UpToDate;
        }
        let mut dropped = None;
        if before.name != next.name {
            dropped = state.previous.replace(Arc::clone(before));
            state.rolled_back_from = None;
            self.polls.swaps.fetch_add(1, Ordering::Relaxed);
        }
        self.current.store(Arc::clone(next));
        drop(state);
        // If no caller holds it, this unmaps its files, which takes a while.
        drop(dropped);
        tracing::debug!(checkpoint = %next.name, "a newer version is served");
        PollOutcome::Newer(next.name)
    }

    /// Serves the previous version again. The checkpoint that is rolled back is not served again until a newer
    /// checkpoint is published.
    ///
    /// Errors: `State` if there is no previous version, and in a forked process.
    pub fn rollback(&self) -> Result<CheckpointName> {
        self.check_process()?;
        let mut state = lock(&self.state);
        let Some(previous) = state.previous.take() else {
            let what = "there is no version before the one that is served: open the directory with `at` to serve an older checkpoint";
            return Err(Kind::State.error(what));
        };
        let replaced = self.current.swap(Arc::clone(&previous));
        // A version has the name of a checkpoint that was read, so the name is valid.
        state.rolled_back_from = self.source.checkpoint_of(&replaced).ok();
        self.polls.swaps.fetch_add(1, Ordering::Relaxed);
        tracing::warn!("checkpoint {} is served again, and {} no longer", previous.name, replaced.name);
        Ok(previous.name)
    }

    fn check_process(&self) -> Result<()> {
        let current = std::process::id();
        if current == self.process {
            return Ok(());
        }
        Err(Kind::State.error(format!(
            "these tables were opened by process {}, and this is process {current}, which was forked from it: open them again in this process \
             to follow the trainer",
            self.process
        )))
    }

    /// Returns current statistics.
    pub fn stats(&self) -> ServingStats {
        let version = self.current.load_full();
        let last_error = self
            .check_process()
            .map_or_else(|error| Some(error.to_string()), |()| lock(&self.state).last_error.clone());
        let sum = |of: &dyn Fn(&ServedTable) -> u64| version.tables.iter().map(|table| of(table)).sum();
        let (polls, counts) = (&self.polls, &self.opening.counts);
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ServingStats {
            version: version.name,
            staleness_seconds: staleness(&version).as_secs_f64(),
            polls: get(&polls.polls),
            swaps: get(&polls.swaps),
            failed_polls: get(&polls.failed),
            last_error,
            versions: Arc::strong_count(&self.opening.alive) as u64 - 1,
            lookups: get(&counts.lookups),
            ids: get(&counts.ids),
            missing: get(&counts.missing),
            cold_rows: get(&counts.cold),
            rows: sum(&|table| table.rows),
            overlay_ids: sum(&|table| table.overlay.len() as u64),
            shared_index_bytes: sum(&|table| if table.index.is_shared() { table.index.bytes() as u64 } else { 0 }),
            private_bytes: private_bytes(&version),
        }
    }
}

impl IndexConsumer for TableServer {
    fn install_indexes(&self, of: &ServedVersion, indexed: &ChainIndexes) -> Result<()> {
        // While this is held, only a rollback can replace the current version.
        let _alone = lock(&self.polling);
        let current = self.current.load_full();
        if current.links.starts_with(&of.links) {
            let next = self.merger.adopt(&current, indexed)?;
            check_memory(&next, self.options.host_bytes)?;
            self.replace(&current, &Arc::new(next));
        }
        Ok(())
    }
}

fn private_bytes(version: &ServedVersion) -> u64 {
    let of = |table: &Arc<ServedTable>| {
        let index = if table.index.is_shared() { 0 } else { table.index.bytes() };
        (index + table.overlay.bytes()) as u64
    };
    version.tables.iter().map(of).sum()
}

fn check_memory(version: &ServedVersion, limit: Option<u64>) -> Result<()> {
    let needed = private_bytes(version);
    match limit {
        Some(limit) if needed > limit => {
            Err(Kind::Capacity.error(format!(
                "the indexes of checkpoint {} take {needed} bytes of this process's memory, and host_bytes allows {limit}: run `embcache index` \
                 as a user who may write to the checkpoint, so that all processes share them, convert the newest checkpoint where a \
                 trainer's deltas are followed, or allow more",
                version.name
            )))
        }
        _ => Ok(()),
    }
}

/// Takes a lock. While another thread holds it, `wait` is called repeatedly; an error from it aborts the wait.
fn lock_while<'a>(mutex: &'a Mutex<()>, wait: &mut WaitCallback<'_>) -> Result<MutexGuard<'a, ()>> {
    loop {
        match mutex.try_lock() {
            Ok(held) => return Ok(held),
            // A version interrupted by a panic is not served yet.
            Err(TryLockError::Poisoned(held)) => return Ok(held.into_inner()),
            Err(TryLockError::WouldBlock) => {
                wait()?;
                std::thread::sleep(INDEX_LOCK_RETRY_INTERVAL);
            }
        }
    }
}

fn staleness(version: &ServedVersion) -> Duration {
    // A clock that was set back makes no version stale.
    SystemTime::now().duration_since(version.published).unwrap_or_default()
}

/// Statistics of a server at the time of the call.
#[derive(Clone, Debug, PartialEq)]
pub struct ServingStats {
    /// The served checkpoint.
    pub version: CheckpointName,
    /// Seconds since the checkpoint was published.
    pub staleness_seconds: f64,
    /// Number of polls for a newer checkpoint.
    pub polls: u64,
    /// Number of times that the served checkpoint was replaced by another, including rollbacks. The same one with a new
    /// index does not count.
    pub swaps: u64,
    /// Number of polls that failed. The previous version remains served.
    pub failed_polls: u64,
    /// The error of the last poll, if it failed.
    pub last_error: Option<String>,
    /// Number of versions that a request or the server holds.
    pub versions: u64,
    /// Number of lookup calls.
    pub lookups: u64,
    /// Number of ids looked up.
    pub ids: u64,
    /// Number of these ids that are missing.
    pub missing: u64,
    /// Number of rows whose pages were not recently seen in memory, and were prefetched.
    pub cold_rows: u64,
    /// Number of rows of all tables.
    pub rows: u64,
    /// Number of ids that the deltas after the indexes changed.
    pub overlay_ids: u64,
    /// Bytes of indexes that all processes of the machine share.
    pub shared_index_bytes: u64,
    /// Bytes of indexes and overlays in this process's own memory.
    pub private_bytes: u64,
}

/// Counters of polls for newer checkpoints.
#[derive(Debug, Default)]
pub(super) struct PollCounts {
    pub(super) polls: AtomicU64,
    pub(super) swaps: AtomicU64,
    pub(super) failed: AtomicU64,
}
