//! Opens a checkpoint for serving: its files, and its index, which is loaded, waited for, or built.

use std::time::{Duration, Instant};

use super::data_files::{RowFileLocation, RowFileSet};
use super::index::ServeIndex;
use super::index_file::{INDEX_FILE, read_index};
use super::table::ServedTable;
use super::version::{
    ChainIndexes, OpenedLink, ServeContext, ServedVersion, build_indexes, files_of, find_indexes, indexes_of_file,
    open_version, write_indexes,
};
use crate::checkpoint::{
    CheckpointChain, CheckpointDirectory, CheckpointName, LatestCheckpoint, MANIFEST_FILE, OpenCheckpoint, WaitCallback,
};
use crate::error::{Error, Kind, Result};
use crate::io::{DirLock, MappingAccess};
use crate::types::Id;

/// An overlay is merged into an index if it has more than one in `OVERLAY_FRACTION` of the index's ids, and more than
/// [`SMALL_OVERLAY`].
const OVERLAY_FRACTION: u64 = 4;
/// Number of ids up to which an overlay is not merged, for any size of the index.
const SMALL_OVERLAY: u64 = 1 << 16;
/// Number of sweeps, evaluated for each row, up to which an overlay is not merged.
const MAX_OVERLAY_SWEEPS: usize = 8;
/// Lower bound of the bytes of an index per row.
const INDEX_BYTES_PER_ROW: u64 = 17;
/// Interval at which a process checks if another one has built the index that both need.
pub(super) const INDEX_LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Number of attempts to open a checkpoint, repeated if a save removed the checkpoint that `LATEST` named.
const OPEN_ATTEMPTS: usize = 10;
/// Number of ids that are compared together.
const IDS_AT_ONCE: usize = 4096;

/// Result of [`make_index`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServeIndexReport {
    /// The checkpoint.
    pub checkpoint: CheckpointName,
    /// Number of rows of all its tables.
    pub rows: u64,
    /// Bytes of the lines of all indexes.
    pub bytes: u64,
    /// True if the file existed.
    pub existed: bool,
}

/// Builds the index file of a checkpoint, unless it exists: of the latest one, or of the one that `at` names. `wait` is
/// called while the index is built, or waited for; an error from it aborts this, and nothing is written.
///
/// Errors: as [`TableServer::open`](super::TableServer::open); `State` if `root` was opened for loading; errors of
/// `wait`; `Storage` if the file cannot be written.
pub fn make_index(
    root: &CheckpointDirectory,
    at: Option<&str>,
    wait: &mut WaitCallback<'_>,
) -> Result<ServeIndexReport> {
    root.check_to_save()?;
    let name = resolve_name(root, at)?;
    let chain = CheckpointChain::open(root, LatestCheckpoint { name })?;
    let opened = open_readers(chain.links().iter().rev())?;
    let files = files_of(&opened, MappingAccess::Scattered)?;
    let (indexed, kept) = load_or_build_indexes(&opened, &files, (Some(root), None), wait)?;
    let existed = match kept {
        ServeIndexOutcome::Existing => true,
        ServeIndexOutcome::Written => false,
        // A server would use the index in memory. A caller that requested only the file has no result.
        ServeIndexOutcome::NotWritten(error) => {
            return Err(error.context(format!("{INDEX_FILE} of checkpoint {name} was not written")));
        }
    };
    Ok(ServeIndexReport {
        checkpoint: name,
        rows: indexed.indexes.iter().map(|index| index.len()).sum(),
        bytes: indexed.indexes.iter().map(|index| index.bytes() as u64).sum(),
        existed,
    })
}

/// Verifies the index file of a checkpoint against its rows: of the latest checkpoint, or of the one that `at` names.
/// Returns its number of rows; `None` if there is no such file, or one that servers rebuild because it has another
/// version or belongs to other files. Reads and verifies all rows, and builds an index in this process's memory. `wait`
/// is called during the work; an error from it aborts it.
///
/// Errors: as [`TableServer::open`](super::TableServer::open), `Corruption` if the file is corrupted or contradicts the
/// rows; errors of `wait`.
pub fn check_index(root: &CheckpointDirectory, at: Option<&str>, wait: &mut WaitCallback<'_>) -> Result<Option<u64>> {
    let name = resolve_name(root, at)?;
    let directory = root.subdirectory(name);
    let Some(found) = read_index(&directory)? else { return Ok(None) };
    let chain = CheckpointChain::open(root, LatestCheckpoint { name })?;
    let opened = open_readers(chain.links().iter().rev())?;
    let files = files_of(&opened, MappingAccess::Scattered)?;
    let Some(found) = indexes_of_file(found, &opened, &files) else { return Ok(None) };
    let right = build_indexes(&opened, &files, wait)?;
    let mut rows = 0;
    let path = directory.join(INDEX_FILE);
    for ((found, right), files) in found.indexes.iter().zip(&right.indexes).zip(&files) {
        if found.len() != right.len() {
            return Err(Error::corruption(&path, 0, "the number of ids", right.len(), found.len()));
        }
        if let Some(id) = first_difference(found, right, files, wait)? {
            let what = format!("the place of id {id}");
            return Err(Error::corruption(&path, 0, &what, "that of the rows", "another one"));
        }
        rows += found.len();
    }
    Ok(Some(rows))
}

/// Returns the directory if it is writable.
pub(super) fn writable_directory(root: &CheckpointDirectory) -> Option<CheckpointDirectory> {
    if root.check_to_save().is_ok() {
        return Some(root.clone());
    }
    match root.reopen_to_save(root.path()) {
        Ok(directory) => Some(directory),
        Err(error) => {
            tracing::info!(
                "indexes are built in this process's own memory, because no index file can be written: {error}"
            );
            None
        }
    }
}

fn resolve_name(root: &CheckpointDirectory, at: Option<&str>) -> Result<CheckpointName> {
    let Some(at) = at else { return Ok(LatestCheckpoint::read(root)?.name) };
    let mut names = root.list_names::<CheckpointName>()?;
    names.sort_unstable();
    for name in &names {
        let is_it = name.to_string() == at || at.parse() == Ok(name.seq);
        if is_it && root.subdirectory(name).has(MANIFEST_FILE)? {
            return Ok(*name);
        }
    }
    let all: Vec<String> = names.iter().map(ToString::to_string).collect();
    Err(Kind::Path
        .error(format!(
            "{} has no checkpoint {at:?}; it has [{}]: give one of these names, or its number",
            root.path().display(),
            all.join(", ")
        ))
        .at(root.path()))
}

pub(super) fn open_first_version(
    root: &CheckpointDirectory,
    writable: Option<&CheckpointDirectory>,
    at: Option<&str>,
    opening: &ServeContext,
    wait: &mut WaitCallback<'_>,
) -> Result<ServedVersion> {
    let mut name = resolve_name(root, at)?;
    for _ in 1..OPEN_ATTEMPTS {
        match open_named(root, name, writable, opening, wait) {
            // A save may have removed it since its name was read.
            Err(error) if error.is_damage_or_absence() && at.is_none() => {
                let newest = LatestCheckpoint::read(root)?.name;
                if newest == name {
                    return Err(error);
                }
                name = newest;
            }
            opened => return opened,
        }
    }
    open_named(root, name, writable, opening, wait)
}

fn open_named(
    root: &CheckpointDirectory,
    name: CheckpointName,
    writable: Option<&CheckpointDirectory>,
    opening: &ServeContext,
    wait: &mut WaitCallback<'_>,
) -> Result<ServedVersion> {
    let chain = CheckpointChain::open(root, LatestCheckpoint { name })?;
    open_links(&open_readers(chain.links().iter().rev())?, writable, opening, wait)
}

pub(super) fn open_readers<'a>(links: impl Iterator<Item = &'a OpenCheckpoint>) -> Result<Vec<OpenedLink<'a>>> {
    links.map(OpenedLink::new).collect()
}

/// Opens a version from a chain, whose checkpoints are passed oldest first.
pub(super) fn open_links(
    opened: &[OpenedLink<'_>],
    writable: Option<&CheckpointDirectory>,
    opening: &ServeContext,
    wait: &mut WaitCallback<'_>,
) -> Result<ServedVersion> {
    let files = files_of(opened, if opening.preload { MappingAccess::Whole } else { MappingAccess::Scattered })?;
    if let Some(indexed) = find_indexes(opened, &files) {
        let version = open_version(opening, opened, files.clone(), &indexed, wait)?;
        if !version.tables.iter().any(|table| has_large_overlay(table)) {
            // The deltas after the index were verified when they were added to the overlays.
            verify_rows(&opened[..indexed.links], opening, wait)?;
            return Ok(version);
        }
    }
    let (indexed, kept) = load_or_build_indexes(opened, &files, (writable, opening.host_bytes), wait)?;
    if kept.is_existing() {
        verify_rows(opened, opening, wait)?;
    }
    open_version(opening, opened, files, &indexed, wait)
}

/// If requested, reads the rows of checkpoints, without slots, and verifies their checksums. `wait` is called for each
/// file; an error from it aborts the work.
fn verify_rows(opened: &[OpenedLink<'_>], opening: &ServeContext, wait: &mut WaitCallback<'_>) -> Result<()> {
    if !opening.verify {
        return Ok(());
    }
    for reader in opened.iter().flat_map(|link| &link.readers) {
        reader.read_columns(&mut |_| wait())?;
        reader.read_tombstones(&mut |_| Ok(()))?;
    }
    Ok(())
}

/// State of the index file.
#[derive(Debug)]
pub(super) enum ServeIndexOutcome {
    /// It existed, and its indexes are used.
    Existing,
    /// It was written.
    Written,
    /// It could not be written, with the error. The indexes are in this process's own memory.
    NotWritten(Error),
}

impl ServeIndexOutcome {
    fn is_existing(&self) -> bool {
        matches!(self, Self::Existing)
    }
}

/// Returns the indexes of the entire chain: from the index file of the latest checkpoint, which is built if missing. If
/// no file may be written, they use at most `max_bytes` bytes of this process's memory.
pub(super) fn load_or_build_indexes(
    opened: &[OpenedLink<'_>],
    files: &[RowFileSet],
    (writable, max_bytes): (Option<&CheckpointDirectory>, Option<u64>),
    wait: &mut WaitCallback<'_>,
) -> Result<(ChainIndexes, ServeIndexOutcome)> {
    let newest = opened.last().expect("a chain has a checkpoint").link;
    let name = &newest.manifest().name;
    let Some(directory) = writable.map(|root| root.subdirectory(name)) else {
        check_private_bytes(newest, max_bytes)?;
        let error = Kind::Path
            .error(format!("no file may be written in the directory of checkpoint {name}"))
            .at(newest.directory().path());
        return Ok((build_indexes(opened, files, wait)?, ServeIndexOutcome::NotWritten(error)));
    };
    let _alone = match wait_for_lock(&directory, || load_matching_indexes(&directory, opened, files), wait)? {
        IndexLockOutcome::Ready(indexed) => return Ok((indexed, ServeIndexOutcome::Existing)),
        IndexLockOutcome::Locked(held) => held,
    };
    let indexed = build_indexes(opened, files, wait)?;
    let written = write_indexes(&directory, newest.manifest(), files, &indexed).and_then(|_| {
        let changed = || Error::corruption(&directory.join(INDEX_FILE), 0, "the file", "as it was written", "changed");
        read_index(&directory)?.and_then(|found| indexes_of_file(found, opened, files)).ok_or_else(changed)
    });
    Ok(match written {
        Ok(shared) => (shared, ServeIndexOutcome::Written),
        // The indexes in this process's own memory can be served as well.
        Err(error) => {
            tracing::warn!("the index of {name} is not shared: {error}");
            (indexed, ServeIndexOutcome::NotWritten(error))
        }
    })
}

/// Returns `Capacity` if the indexes of a checkpoint, in this process's own memory, would exceed a limit.
fn check_private_bytes(newest: &OpenCheckpoint, max_bytes: Option<u64>) -> Result<()> {
    let tables = &newest.manifest().tables;
    let rows = tables.iter().fold(0_u64, |rows, table| rows.saturating_add(table.total_rows));
    let needed = rows.saturating_mul(INDEX_BYTES_PER_ROW);
    match max_bytes {
        Some(max_bytes) if needed > max_bytes => {
            Err(Kind::Capacity.error(format!(
                "the indexes of checkpoint {} would take {needed} bytes of this process's memory, because no file can be written for them, and \
                 host_bytes allows {max_bytes}: serve a directory in which `embcache index` was run by a user who may write there, convert the \
                 newest checkpoint where a trainer's deltas are followed, or allow more",
                newest.manifest().name
            )))
        }
        _ => Ok(()),
    }
}

/// Reads the index file of a directory; returns its indexes if it is intact and covers the entire chain.
fn load_matching_indexes(
    directory: &CheckpointDirectory,
    opened: &[OpenedLink<'_>],
    files: &[RowFileSet],
) -> Option<ChainIndexes> {
    indexes_of_file(read_index(directory).ok()??, opened, files)
}

enum IndexLockOutcome {
    Ready(ChainIndexes),
    Locked(Option<DirLock>),
}

/// Loads the index that another process built, or locks the directory to build it.
fn wait_for_lock(
    directory: &CheckpointDirectory,
    take: impl Fn() -> Option<ChainIndexes>,
    wait: &mut WaitCallback<'_>,
) -> Result<IndexLockOutcome> {
    let start = Instant::now();
    loop {
        if let Some(indexed) = take() {
            return Ok(IndexLockOutcome::Ready(indexed));
        }
        match directory.lock() {
            Ok(held) => {
                // The previous lock holder may have written the file.
                return Ok(take().map_or(IndexLockOutcome::Locked(Some(held)), IndexLockOutcome::Ready));
            }
            Err(error) if error.kind() == Kind::InUse => {
                tracing::debug!(waited = ?start.elapsed(), "another process builds the index");
                wait()?;
                std::thread::sleep(INDEX_LOCK_RETRY_INTERVAL);
            }
            // Without a lock several processes may build the file, which is correct but slower.
            Err(_) => return Ok(IndexLockOutcome::Locked(None)),
        }
    }
}

/// True if an overlay should be merged into an index.
pub(super) fn has_large_overlay(table: &ServedTable) -> bool {
    let changed = table.overlay.len() as u64;
    let has_many_ids = changed > SMALL_OVERLAY && changed > table.index.len() / OVERLAY_FRACTION;
    has_many_ids || table.overlay.sweeps() > MAX_OVERLAY_SWEEPS
}

/// Returns an id whose locations in the two indexes differ. `wait` is called for every batch of ids.
fn first_difference(
    found: &ServeIndex,
    right: &ServeIndex,
    files: &RowFileSet,
    wait: &mut WaitCallback<'_>,
) -> Result<Option<Id>> {
    let (mut of_found, mut of_right) = (vec![0; IDS_AT_ONCE], vec![0; IDS_AT_ONCE]);
    for file in files.all() {
        // Pages outside memory would otherwise be read one by one, and a truncated file would kill the process.
        file.populate(&(file.ids..file.ids + file.rows * size_of::<Id>()))?;
        let ids: Vec<Id> = (0..file.rows).map(|row| file.id(row)).collect();
        for ids in ids.chunks(IDS_AT_ONCE) {
            wait()?;
            let (of_found, of_right) = (&mut of_found[..ids.len()], &mut of_right[..ids.len()]);
            found.get_batch(ids, of_found);
            right.get_batch(ids, of_right);
            let differs = ids.iter().zip(of_found.iter().zip(&*of_right)).find(|(_, (found, right))| found != right);
            if let Some((id, _)) = differs {
                return Ok(Some(*id));
            }
        }
    }
    // Ids that the files do not contain must not be in the index either.
    Ok(found.ids().find(|&id| right.get(id) == RowFileLocation::NONE))
}
