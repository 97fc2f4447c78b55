//! A server's tables: which version is current, and how the next one takes its place.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;

use super::index::read_index;
use super::stats::{PollCounts, ServingStats};
use super::table::{LookupCounts, ServedTable};
use super::version::{
    Indexed, OpenedLink, Opening, Version, build_indexes, extended, files_of, find_indexes, indexes_of_file, merged,
    open_version, write_indexes,
};
use crate::checkpoint::{Chain, Checkpoint, CheckpointName, Directory, Latest, MANIFEST_FILE, open_parent};
use crate::config::MissingRead;
use crate::error::{Error, Kind, Result};
use crate::io::DirLock;
use crate::paths::Checks;
use crate::sync::lock;

/// An overlay is merged into an index where it has more ids than this share of the index's,
const OVERLAY_SHARE: u64 = 4;
/// and more than so many.
const SMALL_OVERLAY: u64 = 1 << 16;
/// How often a process looks whether another one has made the index that both need.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How often an open begins again because a save removed the checkpoint that `LATEST` named.
const OPENS: usize = 10;

/// How tables are served.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServeOptions {
    /// The checkpoint to serve: its name, or the digits of its number. It is not followed then. `None`: the newest one.
    pub at: Option<String>,
    /// Bytes that indexes and overlays may take of this process's own memory. `None`: any number.
    pub host_bytes: Option<u64>,
    /// How long ago the checkpoint that is served may have been published.
    pub max_staleness: Option<Duration>,
    /// Whether [`Serving::pin`] refuses a version that is older than that.
    pub raise_when_stale: bool,
    /// What an id without a row reads. `None`: what it reads in training's evaluation.
    pub missing: Option<MissingRead>,
}

/// What a look for a newer checkpoint found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// What is served is the newest.
    Same,
    /// This checkpoint is served from now on.
    Newer(CheckpointName),
}

/// What [`make_index`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexMade {
    /// The checkpoint.
    pub checkpoint: CheckpointName,
    /// Rows of all its tables.
    pub rows: u64,
    /// Bytes of the lines of all indexes.
    pub bytes: u64,
    /// Whether the file was there already.
    pub was_there: bool,
}

#[derive(Debug, Default)]
struct State {
    /// The version before the current one.
    previous: Option<Arc<Version>>,
    /// The checkpoint that was rolled back from. It is not served again by itself.
    refused: Option<CheckpointName>,
    last_error: Option<String>,
}

/// The tables of a directory of checkpoints, for lookups.
#[derive(Debug)]
pub struct Serving {
    root: Directory,
    /// The same directory, where indexes may be written to it.
    writable: Option<Directory>,
    options: ServeOptions,
    opening: Opening,
    current: ArcSwap<Version>,
    state: Mutex<State>,
    /// Held by whoever looks for a newer version.
    polling: Mutex<()>,
    polls: PollCounts,
    /// The process that opened it. One that was forked from it looks up rows, and nothing more: a lock may be held by a thread that it lacks.
    process: u32,
}

impl Serving {
    /// Open a checkpoint of a directory. Where it has no index, one is made, and written beside it if that is allowed.
    ///
    /// Errors: `Path` where there is no checkpoint; `Mismatch` where it is linked to an SSD tier; `Corruption`, `Storage`; `Capacity` where
    /// indexes take more of this process's memory than `host_bytes`.
    pub fn open(root: Directory, options: ServeOptions) -> Result<Arc<Self>> {
        let writable = writable(&root);
        let opening =
            Opening { missing: options.missing, counts: Arc::new(LookupCounts::default()), alive: Arc::new(()) };
        let version = first_version(&root, writable.as_ref(), &options, &opening)?;
        check_memory(&version, options.host_bytes)?;
        tracing::info!(checkpoint = %version.name, tables = version.tables.len(), "a checkpoint is served");
        Ok(Arc::new(Self {
            root,
            writable,
            options,
            opening,
            current: ArcSwap::from_pointee(version),
            state: Mutex::default(),
            polling: Mutex::new(()),
            polls: PollCounts::default(),
            process: std::process::id(),
        }))
    }

    /// The current version. It stays as it is for as long as it is held.
    ///
    /// Errors: `Stale` where it was published too long ago and the options say to refuse it then.
    pub fn pin(&self) -> Result<Arc<Version>> {
        let version = self.current.load_full();
        if let Some(most) = self.options.max_staleness.filter(|_| self.options.raise_when_stale) {
            let age = staleness(&version);
            if age > most {
                let what = format!(
                    "checkpoint {} was published {:.1} s ago, and at most {:.1} s are allowed: see whether the trainer saves, and whether \
                     its checkpoints can be read (`last_error` of the statistics says)",
                    version.name,
                    age.as_secs_f64(),
                    most.as_secs_f64()
                );
                return Err(Error::new(Kind::Stale, what));
            }
        }
        Ok(version)
    }

    /// Look for a newer checkpoint, and serve it from now on if there is one. Its deltas are read and verified before.
    ///
    /// Errors: those of [`Serving::open`], and `State` in a forked process. The version before serves on; the error is counted and logged.
    pub fn poll(&self) -> Result<Polled> {
        self.check_process()?;
        let _alone = lock(&self.polling);
        self.polls.polls.fetch_add(1, Ordering::Relaxed);
        let polled = if self.options.at.is_some() { Ok(Polled::Same) } else { self.look() };
        let error = polled.as_ref().err().map(ToString::to_string);
        if let Some(error) = &error {
            self.polls.failed.fetch_add(1, Ordering::Relaxed);
            if lock(&self.state).last_error.as_ref() != Some(error) {
                let name = self.current.load().name;
                tracing::warn!("a newer checkpoint cannot be served, and {name} serves on: {error}");
            }
        }
        lock(&self.state).last_error = error;
        polled
    }

    fn look(&self) -> Result<Polled> {
        let latest = Latest::read(&self.root)?;
        let before = self.current.load_full();
        if latest.name == before.name || lock(&self.state).refused == Some(latest.name) {
            return Ok(Polled::Same);
        }
        if latest.name.seq <= before.name.seq {
            let what = format!(
                "LATEST names {}, which is not after {}, which is served: open the directory anew to serve it",
                latest.name, before.name
            );
            return Err(Error::new(Kind::Mismatch, what).at(self.root.path()));
        }
        let mut next = Arc::new(self.next(&before, latest)?);
        let is_too_large = check_memory(&next, self.options.host_bytes).is_err();
        if !is_too_large && !self.replace(&before, &next) {
            return Ok(Polled::Same);
        }
        if is_too_large || next.tables.iter().any(|table| is_large(table)) {
            let with_index = Arc::new(self.with_new_index(&next)?);
            check_memory(&with_index, self.options.host_bytes)?;
            let expected = if is_too_large { &before } else { &next };
            if !self.replace(expected, &with_index) {
                return Ok(Polled::Same);
            }
            next = with_index;
        }
        tracing::debug!(checkpoint = %next.name, "a newer checkpoint is served");
        Ok(Polled::Newer(next.name))
    }

    /// Put `next` in the place of `before`, unless something else took that place meanwhile.
    fn replace(&self, before: &Arc<Version>, next: &Arc<Version>) -> bool {
        let mut state = lock(&self.state);
        if !Arc::ptr_eq(&self.current.load(), before) {
            return false;
        }
        if before.name != next.name {
            state.previous = Some(Arc::clone(before));
            state.refused = None;
        }
        self.current.store(Arc::clone(next));
        self.polls.swaps.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// The version of a newer checkpoint: the current one with the deltas after it, where the newer one builds on it.
    fn next(&self, before: &Version, latest: Latest) -> Result<Version> {
        let mut links = vec![Checkpoint::open(&self.root, latest)?];
        while let Some(parent) = links[links.len() - 1].manifest().parent.clone() {
            let child = &links[links.len() - 1];
            let served = before.links.last().expect("a version is of a checkpoint");
            if (&parent.name, parent.manifest_xxh3) == (&served.name, served.manifest_xxh3) {
                let fits = child.manifest().check_fits_parent(&before.manifest);
                let path = child.directory().path();
                fits.map_err(|what| {
                    Error::corruption(path, 0, "what it holds", format!("changes of {}", parent.name), what)
                })?;
                return extended(&self.opening, before, &opened(links.iter().rev())?);
            }
            let next = open_parent(&self.root, child, &parent)?;
            links.push(next);
        }
        let opened = opened(links.iter().rev())?;
        open_links(&opened, self.writable.as_ref(), &self.opening)
    }

    /// The same version with indexes that cover all of its deltas.
    fn with_new_index(&self, version: &Version) -> Result<Version> {
        let chain = Chain::open(&self.root, Latest { name: version.name })?;
        let opened = opened(chain.links().iter().rev())?;
        let files: Vec<_> = version.tables.iter().map(|table| table.files.clone()).collect();
        let indexed = make_or_take(&opened, &files, self.writable.as_ref())?.0;
        Ok(merged(version, &indexed))
    }

    /// Serve the version before the current one again. What was rolled back from is not served again until a newer checkpoint is published.
    ///
    /// Errors: `State` where there is no version before, and in a forked process.
    pub fn rollback(&self) -> Result<CheckpointName> {
        self.check_process()?;
        let mut state = lock(&self.state);
        let Some(previous) = state.previous.take() else {
            let what = "there is no version before the one that is served: open the directory with `at` to serve an older checkpoint";
            return Err(Error::new(Kind::State, what));
        };
        let left = self.current.swap(Arc::clone(&previous));
        state.refused = Some(left.name);
        self.polls.swaps.fetch_add(1, Ordering::Relaxed);
        tracing::warn!("checkpoint {} is served again, and {} no longer", previous.name, left.name);
        Ok(previous.name)
    }

    fn check_process(&self) -> Result<()> {
        let here = std::process::id();
        if here == self.process {
            return Ok(());
        }
        let what = format!(
            "these tables were opened by process {}, and this is process {here}, which was forked from it: open them again in this process \
             to follow the trainer",
            self.process
        );
        Err(Error::new(Kind::State, what))
    }

    /// Figures as of now.
    pub fn stats(&self) -> ServingStats {
        let version = self.current.load_full();
        let last_error = self
            .check_process()
            .map_or_else(|error| Some(error.to_string()), |()| lock(&self.state).last_error.clone());
        let sum = |of: &dyn Fn(&ServedTable) -> u64| version.tables.iter().map(|table| of(table)).sum();
        let (polls, counts) = (&self.polls, &self.opening.counts);
        let get = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
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
            far_rows: get(&counts.far),
            rows: sum(&|table| table.rows),
            overlay_ids: sum(&|table| table.overlay.len() as u64),
            shared_index_bytes: sum(&|table| if table.index.is_shared() { table.index.bytes() as u64 } else { 0 }),
            private_bytes: private_bytes(&version),
        }
    }
}

/// Make the index of a checkpoint beside it, unless it is there: of the newest one, or of the one that `at` names.
///
/// Errors: those of [`Serving::open`]; `State` where `root` was opened to load from.
pub fn make_index(root: &Directory, at: Option<&str>) -> Result<IndexMade> {
    root.check_to_save()?;
    let name = name_of(root, at)?;
    let chain = Chain::open(root, Latest { name })?;
    let opened = opened(chain.links().iter().rev())?;
    let files = files_of(&opened)?;
    let (indexed, was_there) = make_or_take(&opened, &files, Some(root))?;
    Ok(IndexMade {
        checkpoint: name,
        rows: indexed.indexes.iter().map(|index| index.len()).sum(),
        bytes: indexed.indexes.iter().map(|index| index.bytes() as u64).sum(),
        was_there,
    })
}

/// The directory, where something may be written to it.
fn writable(root: &Directory) -> Option<Directory> {
    if root.check_to_save().is_ok() {
        return Some(root.clone());
    }
    match Directory::to_save(root.path(), Checks::Basic) {
        Ok(directory) => Some(directory),
        Err(error) => {
            tracing::info!("indexes are made in this process's own memory, because none can be written: {error}");
            None
        }
    }
}

fn name_of(root: &Directory, at: Option<&str>) -> Result<CheckpointName> {
    let Some(at) = at else { return Ok(Latest::read(root)?.name) };
    let mut there = root.named::<CheckpointName>()?;
    there.sort_unstable();
    let is_it = |name: &&CheckpointName| name.to_string() == at || at.parse() == Ok(name.seq);
    let mut complete = there.iter().filter(|name| root.below(name).has(MANIFEST_FILE).unwrap_or(false));
    complete.by_ref().find(is_it).copied().ok_or_else(|| {
        let all: Vec<String> = there.iter().map(ToString::to_string).collect();
        let what = format!("{} has no checkpoint {at:?}; it has [{}]", root.path().display(), all.join(", "));
        Error::new(Kind::Path, what).at(root.path())
    })
}

fn first_version(
    root: &Directory,
    writable: Option<&Directory>,
    options: &ServeOptions,
    opening: &Opening,
) -> Result<Version> {
    let mut name = name_of(root, options.at.as_deref())?;
    for _ in 1..OPENS {
        match open_named(root, name, writable, opening) {
            // A save may have removed it since its name was read.
            Err(error) if error.is_damage_or_absence() && options.at.is_none() => {
                let newest = Latest::read(root)?.name;
                if newest == name {
                    return Err(error);
                }
                name = newest;
            }
            opened => return opened,
        }
    }
    open_named(root, name, writable, opening)
}

fn open_named(
    root: &Directory,
    name: CheckpointName,
    writable: Option<&Directory>,
    opening: &Opening,
) -> Result<Version> {
    let chain = Chain::open(root, Latest { name })?;
    open_links(&opened(chain.links().iter().rev())?, writable, opening)
}

fn opened<'a>(links: impl Iterator<Item = &'a Checkpoint>) -> Result<Vec<OpenedLink<'a>>> {
    links.map(OpenedLink::new).collect()
}

/// Open a version from a chain, whose checkpoints come with the oldest first.
fn open_links(opened: &[OpenedLink<'_>], writable: Option<&Directory>, opening: &Opening) -> Result<Version> {
    let files = files_of(opened)?;
    if let Some(indexed) = find_indexes(opened, &files)? {
        let version = open_version(opening, opened, files.clone(), &indexed)?;
        if !version.tables.iter().any(|table| is_large(table)) {
            return Ok(version);
        }
    }
    let indexed = make_or_take(opened, &files, writable)?.0;
    open_version(opening, opened, files, &indexed)
}

/// The indexes of all of a chain: those of the file beside the newest checkpoint, which is made if it is not there. The second is whether it was.
fn make_or_take(
    opened: &[OpenedLink<'_>],
    files: &[super::files::Files],
    writable: Option<&Directory>,
) -> Result<(Indexed, bool)> {
    let newest = opened.last().expect("a chain has a checkpoint").link;
    let Some(directory) = writable.map(|root| root.below(&newest.manifest().name)) else {
        return Ok((build_indexes(opened, files)?, false));
    };
    let _alone = match wait_for_lock(&directory, || take(&directory, opened, files))? {
        Waited::Taken(indexed) => return Ok((indexed, true)),
        Waited::Locked(held) => held,
    };
    let indexed = build_indexes(opened, files)?;
    let written = write_indexes(&directory, newest.manifest(), files, &indexed);
    let taken = written.and_then(|_| take(&directory, opened, files));
    match taken {
        Ok(Some(shared)) => Ok((shared, false)),
        // It serves as well from this process's own memory.
        other => {
            let why = other.err().map_or_else(|| "it was not as it was written".into(), |error| error.to_string());
            tracing::warn!("the index of {} is not shared: {why}", newest.manifest().name);
            Ok((indexed, false))
        }
    }
}

fn take(directory: &Directory, opened: &[OpenedLink<'_>], files: &[super::files::Files]) -> Result<Option<Indexed>> {
    match read_index(directory) {
        Ok(found) => Ok(found.and_then(|found| indexes_of_file(found, opened, files))),
        Err(error) if error.kind() == Kind::Corruption => Ok(None),
        Err(error) => Err(error),
    }
}

enum Waited {
    Taken(Indexed),
    Locked(Option<DirLock>),
}

/// Take what another process made, or hold the directory to make it.
fn wait_for_lock(directory: &Directory, mut take: impl FnMut() -> Result<Option<Indexed>>) -> Result<Waited> {
    let began = Instant::now();
    loop {
        if let Some(indexed) = take()? {
            return Ok(Waited::Taken(indexed));
        }
        match directory.lock() {
            Ok(held) => {
                // Whoever held it before may have made the file meanwhile.
                return Ok(take()?.map_or(Waited::Locked(Some(held)), Waited::Taken));
            }
            Err(error) if error.kind() == Kind::InUse => {
                tracing::debug!(waited = ?began.elapsed(), "another process makes the index");
                std::thread::sleep(LOOK_AGAIN);
            }
            // Without a lock several processes may make the file, which is right though not quick.
            Err(_) => return Ok(Waited::Locked(None)),
        }
    }
}

fn is_large(table: &ServedTable) -> bool {
    let changed = table.overlay.len() as u64;
    changed > SMALL_OVERLAY && changed > table.index.len() / OVERLAY_SHARE
}

fn private_bytes(version: &Version) -> u64 {
    let of = |table: &Arc<ServedTable>| {
        let index = if table.index.is_shared() { 0 } else { table.index.bytes() };
        (index + table.overlay.bytes()) as u64
    };
    version.tables.iter().map(of).sum()
}

fn check_memory(version: &Version, most: Option<u64>) -> Result<()> {
    let needed = private_bytes(version);
    match most {
        Some(most) if needed > most => {
            let what = format!(
                "the indexes of checkpoint {} take {needed} bytes of this process's memory, and host_bytes allows {most}: run `embcache index` \
                 as a user who may write to the checkpoint, so that all processes share them, or allow more",
                version.name
            );
            Err(Error::new(Kind::Capacity, what))
        }
        _ => Ok(()),
    }
}

fn staleness(version: &Version) -> Duration {
    // A clock that was set back makes no version stale.
    SystemTime::now().duration_since(version.published).unwrap_or_default()
}
