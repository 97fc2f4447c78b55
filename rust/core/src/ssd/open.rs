//! Opening a directory: what is checked before anything is written, and the three ways to treat one that is not empty.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::background::Background;
use super::format::Schema;
use super::home::Home;
use super::index::TagIndex;
use super::linked::SegmentFiles;
use super::manifest::{Published, StateFile, is_temporary, state_path, state_token, tokens};
use super::recover::{Opened, Wanted, restore};
use super::segment::segment_serial;
use super::shared::{KEPT_SEGMENTS, Shared, State};
use super::space::{Geometry, Space};
use super::{Identity, StateCounters};
use crate::config::{Reopen, SsdConfig};
use crate::error::{Error, Kind, Result};
use crate::io::{DirLock, Hold, IoEngine, LOCK_FILE, descriptors};
use crate::rows::RowLayout;
use crate::sync::lock;
use crate::types::BucketHash;

/// Permission bits that the tier's directory may have.
pub(super) const DIR_MODE: u32 = 0o750;

/// Sizes that tests make small; `None` takes the usual one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tuning {
    pub(super) segment_bytes: Option<u64>,
    pub(super) block_bytes: Option<usize>,
    /// Bits that choose a sub-table of the index, and bits of a tag: few make many ids collide.
    pub(super) index_bits: Option<(u32, u32)>,
    /// Threads that reopen.
    pub(super) threads: Option<usize>,
}

pub(super) const TAG_BITS: u32 = 24;

impl Shared {
    pub(super) fn open(
        config: &SsdConfig,
        identity: &Identity,
        layout: RowLayout,
        engine: Arc<dyn IoEngine>,
        tuning: Tuning,
    ) -> Result<(Arc<Self>, Option<StateCounters>)> {
        Self::open_from(config, identity, layout, engine, tuning, None)
    }

    /// As [`Shared::open`]; with `source` its segments are the contents, in place of whatever is in the directory.
    pub(super) fn open_from(
        config: &SsdConfig,
        identity: &Identity,
        layout: RowLayout,
        engine: Arc<dyn IoEngine>,
        tuning: Tuning,
        source: Option<&SegmentFiles>,
    ) -> Result<(Arc<Self>, Option<StateCounters>)> {
        let schema = Schema::new(identity.key, &identity.optimizer, &layout);
        let geometry = Geometry::new(config.bytes, &schema, tuning.segment_bytes)?;
        let background = Background::shared()?;
        descriptors::check_reserve(&config.dir)?;
        engine.check_private(&config.dir, DIR_MODE)?;
        make_directory(&*engine, &config.dir)?;
        // A directory that was never ours is refused before the lock file is written into it.
        let found = engine.list(&config.dir)?;
        let ours = found.is_empty() || found.iter().any(|path| path.file_name().is_some_and(|name| name == LOCK_FILE));
        if config.reopen == Reopen::Never && !ours {
            return Err(not_empty(&config.dir, found.len()));
        }
        let held = hold_alone(&*engine, &config.dir)?;
        let block_bytes = tuning.block_bytes.unwrap_or_else(|| Home::usual_block_bytes(&geometry));
        let home = Home {
            dir: config.dir.clone(),
            schema,
            geometry,
            block_bytes,
            engine,
            space: Arc::new(Space::new(geometry.cap_bytes, geometry.segment_bytes)),
            background,
        };
        let mut state = State::new(match tuning.index_bits {
            Some((sub_tables, tag)) => TagIndex::with_sub_tables(sub_tables, tag),
            None => TagIndex::new(TAG_BITS),
        });
        let listing = list(&home)?;
        let resumed = match config.reopen {
            _ if source.is_some() => {
                discard(&home, &listing)?;
                source.map_or(Ok(()), |source| source.install(config, &home, tuning.threads, &mut state))?;
                None
            }
            Reopen::Never if listing.is_empty() => None,
            Reopen::Never => return Err(not_empty(&config.dir, listing.len())),
            Reopen::Discard => {
                discard(&home, &listing)?;
                None
            }
            Reopen::Resume if listing.is_empty() && config.resume_token.is_none() => None,
            Reopen::Auto { unfinished } if config.resume_token.is_none() => {
                check_nothing_newer(&config.dir, &listing, unfinished)?;
                discard(&home, &listing)?;
                None
            }
            Reopen::Resume | Reopen::Auto { .. } => {
                Some(resume(config, identity, &layout, (&home, tuning.threads), &listing, &mut state)?)
            }
        };
        let mut identity = identity.clone();
        if let Some(resumed) = &resumed {
            // The rows there are those of this rank's buckets by that hash.
            identity.bucket_hash = resumed.bucket_hash;
        }
        tracing::debug!(
            table = identity.table,
            dir = %home.dir.display(),
            rows = state.index.len(),
            segments = state.current().count(),
            token = state.last_token,
            "opened an SSD tier"
        );
        let shared = Arc::new(Self::new(home, layout, identity, state, Some(held)));
        let counters = resumed.map(|resumed| {
            *lock(&shared.note) = resumed.note;
            resumed.counters
        });
        Ok((shared, counters))
    }
}

/// A table's directory, held as long as this lives. The lock on the directory is given up first: until the one on its file goes too, whoever
/// opens the table next is told the pid.
#[derive(Debug)]
pub(super) struct HeldDir {
    _directory: DirLock,
    _file: DirLock,
}

/// Hold a table's directory, which exists, as no other table of any process does: by its lock file, which says who holds it, and by a
/// lock on the directory itself, which stays where somebody removes that file.
///
/// Errors: `InUse` at once.
pub(super) fn hold_alone(engine: &dyn IoEngine, dir: &Path) -> Result<HeldDir> {
    let file = engine.lock_dir(dir)?;
    Ok(HeldDir { _directory: engine.hold_dir(dir, Hold::ToOpen)?, _file: file })
}

/// What lies in the directory beside the lock file.
fn list(home: &Home) -> Result<Vec<PathBuf>> {
    let mut listing = home.engine.list(&home.dir)?;
    listing.retain(|path| path.file_name().is_none_or(|name| name != LOCK_FILE));
    Ok(listing)
}

/// Make the directory and the missing ones above it, durably.
fn make_directory(engine: &dyn IoEngine, dir: &Path) -> Result<()> {
    let mut missing: Vec<&Path> = Vec::new();
    for path in dir.ancestors().take_while(|path| !path.as_os_str().is_empty()) {
        if engine.exists(path)? {
            break;
        }
        missing.push(path);
    }
    if missing.is_empty() {
        return Ok(());
    }
    engine.create_dir_all(dir)?;
    for made in missing.iter().rev() {
        let parent = made.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        engine.sync_dir(parent)?;
    }
    Ok(())
}

fn not_empty(dir: &Path, files: usize) -> Error {
    Error::new(
        Kind::State,
        format!(
            "the SSD tier's directory {} is not empty ({files} files): open it with reopen = \"resume\" to go on from its last \
             flush, with reopen = \"discard\" to remove what an earlier run left there, or with reopen = \"auto\" to go on where a \
             flush is there and to start anew where none is",
            dir.display()
        ),
    )
}

/// Refuse to start anew where a state was published after the caller looked, and before the directory was locked.
fn check_nothing_newer(dir: &Path, listing: &[PathBuf], unfinished: Option<u64>) -> Result<()> {
    if tokens(listing).last().copied() <= unfinished {
        return Ok(());
    }
    Err(Error::new(
        Kind::InUse,
        format!("another process published a state in {} just now: open the table again to resume it", dir.display()),
    ))
}

/// Remove our own files: states first, so that no state is ever without its segments.
fn discard(home: &Home, listing: &[PathBuf]) -> Result<()> {
    for path in listing.iter().filter(|path| state_token(path).is_some() || is_temporary(path)) {
        home.engine.remove_file(path)?;
    }
    home.engine.sync_dir(&home.dir)?;
    for path in listing.iter().filter(|path| segment_serial(path).is_some()) {
        home.engine.remove_file(path)?;
    }
    home.engine.sync_dir(&home.dir)
}

/// What a resumed state says of its table.
struct Resumed {
    counters: StateCounters,
    bucket_hash: BucketHash,
    note: Vec<u8>,
}

fn resume(
    config: &SsdConfig,
    identity: &Identity,
    layout: &RowLayout,
    (home, threads): (&Home, Option<usize>),
    listing: &[PathBuf],
    state: &mut State,
) -> Result<Resumed> {
    let dir = &home.dir;
    let tokens = tokens(listing);
    let none = |what: String| {
        Err(Error::new(
            Kind::State,
            format!(
                "cannot resume {}: {what}; load a checkpoint made with Saver and open the directory with reopen = \"discard\"",
                dir.display()
            ),
        ))
    };
    let token = match (config.resume_token, tokens.last()) {
        (None, Some(newest)) => *newest,
        (Some(token), _) if tokens.contains(&token) => token,
        (Some(token), _) => return none(format!("state {token} is not among those published there ({tokens:?})")),
        (None, None) => {
            return none(
                "nothing was published there (no flush, or the last one was given up for want of room)".into(),
            );
        }
    };
    let file = StateFile::read(&*home.engine, dir, token)?;
    file.check_identity(identity, layout, dir)?;
    let mut opened = Opened::default();
    let segments = opened.segments_of(home, &file)?;
    let wanted = Wanted { write_seq: file.write_seq, rows: file.rows, path: &state_path(dir, token) };
    restore(state, &wanted, &segments, home, threads)?;
    state.last_token = Some(token);
    let before = tokens.iter().rev().find(|other| **other < token).copied();
    let before = before.map(|before| state_before(home, (identity, layout), before, &mut opened));
    state.published.extend(before.transpose()?.flatten());
    state.published.push(Published::hold(token, segments));
    for segment in state.published.iter().flat_map(|published| &published.segments) {
        state.next_serial = state.next_serial.max(segment.serial + 1);
    }
    let held: u64 = state.current().map(|segment| segment.held_bytes()).sum();
    check_room(config, &home.geometry, state.index.len() as u64, held)?;
    let kept: Vec<u64> = state.published.iter().map(|published| published.token).collect();
    for other in tokens.iter().filter(|other| !kept.contains(other)) {
        home.engine.remove_file(&state_path(dir, *other))?;
    }
    home.engine.sync_dir(dir)?;
    let needless =
        |path: &&PathBuf| is_temporary(path) || segment_serial(path).is_some_and(|serial| !opened.contains(serial));
    for path in listing.iter().filter(needless) {
        home.engine.remove_file(path)?;
    }
    state.reap();
    Ok(Resumed { counters: file.counters, bucket_hash: file.identity.bucket_hash, note: file.note })
}

/// The state `token`, which comes before the one that is resumed and which nothing but another resume needs; `None` where it is damaged,
/// not there, or of another table: then its files are removed.
///
/// Any other error is raised. It says nothing of the bytes on disk, and whoever took it for damage would remove a state that is whole.
fn state_before(
    home: &Home,
    (identity, layout): (&Identity, &RowLayout),
    token: u64,
    opened: &mut Opened,
) -> Result<Option<Published>> {
    let mut read = || {
        let file = StateFile::read(&*home.engine, &home.dir, token)?;
        file.check_identity(identity, layout, &home.dir)?;
        opened.segments_of(home, &file)
    };
    match read() {
        Ok(segments) => Ok(Some(Published::hold(token, segments))),
        Err(error) if error.is_damage_or_absence() || error.kind() == Kind::Mismatch => Ok(None),
        Err(error) => {
            let path = state_path(&home.dir, token);
            let context = format!(
                "cannot read the older one of the two states in {}, and nothing there was changed; open the table again when the cause \
                 is gone, or remove {} yourself to go on without that state",
                home.dir.display(),
                path.display()
            );
            Err(error.context(context))
        }
    }
}

/// `Config` when the cap is too small for `rows` in segments that hold `held` bytes.
pub(super) fn check_room(config: &SsdConfig, geometry: &Geometry, rows: u64, held: u64) -> Result<()> {
    // What compaction needs is free whenever a state is made; see [`Shared::bytes_kept`].
    if rows <= geometry.capacity_rows && held + u64::from(KEPT_SEGMENTS) * geometry.segment_bytes <= geometry.cap_bytes
    {
        return Ok(());
    }
    let overhead = config.bytes - geometry.cap_bytes;
    let records = rows * geometry.segment_bytes.div_ceil(u64::from(geometry.rows_per_segment));
    let least = held.max(records + records / 8) + geometry.spare_bytes() + geometry.segment_bytes + overhead;
    Err(Error::new(
        Kind::Config,
        format!(
            "ssd_bytes = {} is too small for the {rows} rows in {}: set it to {least} or more to resume",
            config.bytes,
            config.dir.display()
        ),
    ))
}

/// See [`super::SsdTier::published`].
pub(super) fn published(dir: &Path, engine: &dyn IoEngine) -> Result<Vec<u64>> {
    if !engine.exists(dir)? {
        return Ok(Vec::new());
    }
    Ok(tokens(&engine.list(dir)?))
}
