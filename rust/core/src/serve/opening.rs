//! Opens a checkpoint for a server: its files, and its index, which is found, waited for, or made.

use std::time::{Duration, Instant};

use super::files::Files;
use super::index::{INDEX_FILE, read_index};
use super::table::ServedTable;
use super::version::{
    Indexed, OpenedLink, Opening, Version, build_indexes, files_of, find_indexes, indexes_of_file, open_version,
    write_indexes,
};
use crate::checkpoint::{Chain, Checkpoint, CheckpointName, Directory, Latest, MANIFEST_FILE, Wait};
use crate::error::{Error, Kind, Result};
use crate::io::{Access, DirLock};

/// An overlay is merged into an index where it has more than one of so many of the index's ids, and more than [`SMALL_OVERLAY`].
const OVERLAY_SHARE: u64 = 4;
/// Ids of an overlay that is not merged, whatever the index has.
const SMALL_OVERLAY: u64 = 1 << 16;
/// Sweeps against which each row is held in an overlay that is not merged.
const MOST_SWEEPS: usize = 8;
/// Bytes of an index for each row, at least.
const BYTES_OF_A_ROW: u64 = 17;
/// How often a process looks whether another one has made the index that both need.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How often an open begins again because a save removed the checkpoint that `LATEST` named.
const OPENS: usize = 10;

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

/// Make the index of a checkpoint beside it, unless it is there: of the newest one, or of the one that `at` names. `wait` is called while the
/// index is made, or waited for, and its error ends that: nothing was written then.
///
/// Errors: those of [`Serving::open`]; `State` where `root` was opened to load from; that of `wait`; `Storage` where the file cannot be
/// written.
pub fn make_index(root: &Directory, at: Option<&str>, wait: &mut Wait<'_>) -> Result<IndexMade> {
    root.check_to_save()?;
    let name = name_of(root, at)?;
    let chain = Chain::open(root, Latest { name })?;
    let opened = opened(chain.links().iter().rev())?;
    let files = files_of(&opened, Access::Scattered)?;
    let (indexed, kept) = make_or_take(&opened, &files, (Some(root), None), wait)?;
    let was_there = match kept {
        Kept::WasThere => true,
        Kept::Written => false,
        // A server would use what it made all the same. Whoever asks for the file alone has nothing.
        Kept::NotWritten(error) => {
            return Err(error.context(format!("{INDEX_FILE} of checkpoint {name} was not written")));
        }
    };
    Ok(IndexMade {
        checkpoint: name,
        rows: indexed.indexes.iter().map(|index| index.len()).sum(),
        bytes: indexed.indexes.iter().map(|index| index.bytes() as u64).sum(),
        was_there,
    })
}

/// The directory, where something may be written to it.
pub(super) fn writable(root: &Directory) -> Option<Directory> {
    if root.check_to_save().is_ok() {
        return Some(root.clone());
    }
    match root.again(root.path()) {
        Ok(directory) => Some(directory),
        Err(error) => {
            tracing::info!("indexes are made in this process's own memory, because none can be written: {error}");
            None
        }
    }
}

pub(super) fn name_of(root: &Directory, at: Option<&str>) -> Result<CheckpointName> {
    let Some(at) = at else { return Ok(Latest::read(root)?.name) };
    let mut there = root.named::<CheckpointName>()?;
    there.sort_unstable();
    for name in &there {
        let is_it = name.to_string() == at || at.parse() == Ok(name.seq);
        if is_it && root.below(name).has(MANIFEST_FILE)? {
            return Ok(*name);
        }
    }
    let all: Vec<String> = there.iter().map(ToString::to_string).collect();
    let what = format!(
        "{} has no checkpoint {at:?}; it has [{}]: give one of these names, or its number",
        root.path().display(),
        all.join(", ")
    );
    Err(Error::new(Kind::Path, what).at(root.path()))
}

pub(super) fn first_version(
    root: &Directory,
    writable: Option<&Directory>,
    at: Option<&str>,
    opening: &Opening,
    wait: &mut Wait<'_>,
) -> Result<Version> {
    let mut name = name_of(root, at)?;
    for _ in 1..OPENS {
        match open_named(root, name, writable, opening, wait) {
            // A save may have removed it since its name was read.
            Err(error) if error.is_damage_or_absence() && at.is_none() => {
                let newest = Latest::read(root)?.name;
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
    root: &Directory,
    name: CheckpointName,
    writable: Option<&Directory>,
    opening: &Opening,
    wait: &mut Wait<'_>,
) -> Result<Version> {
    let chain = Chain::open(root, Latest { name })?;
    open_links(&opened(chain.links().iter().rev())?, writable, opening, wait)
}

pub(super) fn opened<'a>(links: impl Iterator<Item = &'a Checkpoint>) -> Result<Vec<OpenedLink<'a>>> {
    links.map(OpenedLink::new).collect()
}

/// Open a version from a chain, whose checkpoints come with the oldest first.
pub(super) fn open_links(
    opened: &[OpenedLink<'_>],
    writable: Option<&Directory>,
    opening: &Opening,
    wait: &mut Wait<'_>,
) -> Result<Version> {
    let files = files_of(opened, if opening.preload { Access::Whole } else { Access::Scattered })?;
    if let Some(indexed) = find_indexes(opened, &files) {
        let version = open_version(opening, opened, files.clone(), &indexed, wait)?;
        if !version.tables.iter().any(|table| is_large(table)) {
            // The deltas after the index were verified when they were added to the overlays.
            verify_rows(&opened[..indexed.links], opening, wait)?;
            return Ok(version);
        }
    }
    let (indexed, kept) = make_or_take(opened, &files, (writable, opening.host_bytes), wait)?;
    if kept.was_there() {
        verify_rows(opened, opening, wait)?;
    }
    open_version(opening, opened, files, &indexed, wait)
}

/// Where that is asked for, read the rows of checkpoints, without slots, and hold them against their checksums. `wait` is called for each file,
/// and its error ends the work.
fn verify_rows(opened: &[OpenedLink<'_>], opening: &Opening, wait: &mut Wait<'_>) -> Result<()> {
    if !opening.verify {
        return Ok(());
    }
    for reader in opened.iter().flat_map(|link| &link.readers) {
        reader.read_columns(&mut |_| wait())?;
        reader.read_tombstones(&mut |_| Ok(()))?;
    }
    Ok(())
}

/// What became of the file of indexes.
#[derive(Debug)]
pub(super) enum Kept {
    /// It was there, and its indexes are used.
    WasThere,
    /// It was made.
    Written,
    /// It could not be written, and this is why. The indexes are in this process's own memory.
    NotWritten(Error),
}

impl Kept {
    fn was_there(&self) -> bool {
        matches!(self, Self::WasThere)
    }
}

/// The indexes of all of a chain: those of the file beside the newest checkpoint, which is made if it is not there. Where nothing may be written,
/// they take at most `most` bytes of this process's memory.
pub(super) fn make_or_take(
    opened: &[OpenedLink<'_>],
    files: &[Files],
    (writable, most): (Option<&Directory>, Option<u64>),
    wait: &mut Wait<'_>,
) -> Result<(Indexed, Kept)> {
    let newest = opened.last().expect("a chain has a checkpoint").link;
    let name = &newest.manifest().name;
    let Some(directory) = writable.map(|root| root.below(name)) else {
        check_private(newest, most)?;
        let what = format!("nothing may be written beside checkpoint {name}");
        let error = Error::new(Kind::Path, what).at(newest.directory().path());
        return Ok((build_indexes(opened, files, wait)?, Kept::NotWritten(error)));
    };
    let _alone = match wait_for_lock(&directory, || take(&directory, opened, files), wait)? {
        Waited::Taken(indexed) => return Ok((indexed, Kept::WasThere)),
        Waited::Locked(held) => held,
    };
    let indexed = build_indexes(opened, files, wait)?;
    let written = write_indexes(&directory, newest.manifest(), files, &indexed).and_then(|_| {
        let changed = || Error::corruption(&directory.join(INDEX_FILE), 0, "the file", "as it was written", "changed");
        read_index(&directory)?.and_then(|found| indexes_of_file(found, opened, files)).ok_or_else(changed)
    });
    Ok(match written {
        Ok(shared) => (shared, Kept::Written),
        // It serves as well from this process's own memory.
        Err(error) => {
            tracing::warn!("the index of {name} is not shared: {error}");
            (indexed, Kept::NotWritten(error))
        }
    })
}

/// `Capacity` where the indexes of a checkpoint, in this process's own memory, would pass a bound.
fn check_private(newest: &Checkpoint, most: Option<u64>) -> Result<()> {
    let tables = &newest.manifest().tables;
    let rows = tables.iter().fold(0_u64, |rows, table| rows.saturating_add(table.total_rows));
    let needed = rows.saturating_mul(BYTES_OF_A_ROW);
    match most {
        Some(most) if needed > most => {
            let what = format!(
                "the indexes of checkpoint {} would take {needed} bytes of this process's memory, because no file can be written for them, and \
                 host_bytes allows {most}: serve a directory in which `embcache index` was run by a user who may write there, convert the \
                 newest checkpoint where a trainer's deltas are followed, or allow more",
                newest.manifest().name
            );
            Err(Error::new(Kind::Capacity, what))
        }
        _ => Ok(()),
    }
}

/// The indexes of the file in a directory, where it is whole and fits all of the chain.
fn take(directory: &Directory, opened: &[OpenedLink<'_>], files: &[Files]) -> Option<Indexed> {
    indexes_of_file(read_index(directory).ok()??, opened, files)
}

enum Waited {
    Taken(Indexed),
    Locked(Option<DirLock>),
}

/// Take what another process made, or hold the directory to make it.
fn wait_for_lock(directory: &Directory, take: impl Fn() -> Option<Indexed>, wait: &mut Wait<'_>) -> Result<Waited> {
    let began = Instant::now();
    loop {
        if let Some(indexed) = take() {
            return Ok(Waited::Taken(indexed));
        }
        match directory.lock() {
            Ok(held) => {
                // Whoever held it before may have made the file meanwhile.
                return Ok(take().map_or(Waited::Locked(Some(held)), Waited::Taken));
            }
            Err(error) if error.kind() == Kind::InUse => {
                tracing::debug!(waited = ?began.elapsed(), "another process makes the index");
                wait()?;
                std::thread::sleep(LOOK_AGAIN);
            }
            // Without a lock several processes may make the file, which is right though not quick.
            Err(_) => return Ok(Waited::Locked(None)),
        }
    }
}

/// Whether an overlay is to be merged into an index.
pub(super) fn is_large(table: &ServedTable) -> bool {
    let changed = table.overlay.len() as u64;
    let has_many_ids = changed > SMALL_OVERLAY && changed > table.index.len() / OVERLAY_SHARE;
    has_many_ids || table.overlay.sweeps() > MOST_SWEEPS
}
