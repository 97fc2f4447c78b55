//! Opening a directory: what is checked before anything is written, and the ways to treat a directory that is not empty.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::{Reopen, SsdConfig};
use crate::error::{Error, Kind, Result};
use crate::io::{IoEngine, LOCK_FILE, descriptors};
use crate::rows::RowLayout;
use crate::ssd::directory::{DIR_MODE, hold_alone};
use crate::ssd::format::names::{is_temporary, segment_serial, state_path, state_token, tokens};
use crate::ssd::format::segment::Schema;
use crate::ssd::format::state::StateFile;
use crate::ssd::identity::{Identity, StateCounters};
use crate::ssd::index::{TAG_BITS, TagIndex};
use crate::ssd::resume::restore::{Opened, Wanted, restore};
use crate::ssd::resume::segment_files::SegmentFiles;
use crate::ssd::room::geometry::Geometry;
use crate::ssd::segment::home::Home;
use crate::ssd::tier::inner::TierInner;
use crate::ssd::tier::state::TierState;
use crate::ssd::tier::states::{Published, States};

/// Sizes that tests make small. `None` stands for the usual one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tuning {
    pub(crate) segment_bytes: Option<u64>,
    pub(crate) block_bytes: Option<usize>,
    /// Bits that choose a sub-table of the index, and bits of a tag. Few make many ids collide.
    pub(crate) index_bits: Option<(u32, u32)>,
    /// Threads that restore.
    pub(crate) threads: Option<usize>,
}

impl Tuning {
    fn index(self) -> TagIndex {
        match self.index_bits {
            Some((sub_tables, tag)) => TagIndex::with_sub_tables(sub_tables, tag),
            None => TagIndex::new(TAG_BITS),
        }
    }
}

/// Open the tier in a directory. With `source`, its segments are the contents, in place of whatever is in the directory. Returns the
/// counters of the state that was resumed.
pub(crate) fn open(
    config: &SsdConfig,
    identity: &Identity,
    layout: RowLayout,
    engine: Arc<dyn IoEngine>,
    tuning: Tuning,
    source: Option<&SegmentFiles>,
) -> Result<(Arc<TierInner>, Option<StateCounters>)> {
    let schema = Schema::new(identity.key, &identity.optimizer, &layout);
    let geometry = Geometry::new(config.bytes, &schema, tuning.segment_bytes)?;
    let home = Home::new(config.dir.clone(), schema, geometry, tuning.block_bytes, engine)?;
    let engine = &*home.engine;
    descriptors::check_reserve(&config.dir)?;
    engine.check_private(&config.dir, DIR_MODE)?;
    make_directory(engine, &config.dir)?;
    // A directory that was never a tier's is refused before the lock file is written into it.
    let found = engine.list(&config.dir)?;
    let ours = found.is_empty() || found.iter().any(|path| path.file_name().is_some_and(|name| name == LOCK_FILE));
    if config.reopen == Reopen::Never && !ours {
        return Err(not_empty(&config.dir, found.len()));
    }
    let held = hold_alone(engine, &config.dir)?;
    let contents = contents(config, (identity, &layout), &home, tuning, source)?;
    tracing::debug!(
        table = identity.table,
        dir = %home.dir.display(),
        rows = contents.state.rows(),
        segments = contents.state.segments().iter().count(),
        token = contents.state.states().last_token(),
        "opened an SSD tier"
    );
    let counters = contents.resumed.as_ref().map(|resumed| resumed.counters);
    let note = contents.resumed.map(|resumed| resumed.note).unwrap_or_default();
    Ok((Arc::new(TierInner::new(home, layout, identity.clone(), contents.state, (held, note))), counters))
}

/// What a tier begins with.
struct Contents {
    state: TierState,
    resumed: Option<Resumed>,
}

/// What a resumed state says of its table.
struct Resumed {
    counters: StateCounters,
    note: Vec<u8>,
}

/// Take the contents from `source`, or do with those of the directory what the configuration says.
fn contents(
    config: &SsdConfig,
    (identity, layout): (&Identity, &RowLayout),
    home: &Home,
    tuning: Tuning,
    source: Option<&SegmentFiles>,
) -> Result<Contents> {
    let listing = list(home)?;
    let anew = || Ok(Contents { state: TierState::new(tuning.index()), resumed: None });
    if let Some(source) = source {
        discard(home, &listing)?;
        let state = source.install(config, home, tuning.index(), tuning.threads)?;
        return Ok(Contents { state, resumed: None });
    }
    match config.reopen {
        Reopen::Never if listing.is_empty() => anew(),
        Reopen::Never => Err(not_empty(&config.dir, listing.len())),
        Reopen::Discard => {
            discard(home, &listing)?;
            anew()
        }
        Reopen::Resume if listing.is_empty() && config.resume_token.is_none() => anew(),
        Reopen::Auto { unfinished } if config.resume_token.is_none() => {
            check_nothing_newer(&config.dir, &listing, unfinished)?;
            discard(home, &listing)?;
            anew()
        }
        Reopen::Resume | Reopen::Auto { .. } => resume(config, (identity, layout), home, tuning, &listing),
    }
}

/// The files in the directory, except the lock file.
fn list(home: &Home) -> Result<Vec<PathBuf>> {
    let mut listing = home.engine.list(&home.dir)?;
    listing.retain(|path| path.file_name().is_none_or(|name| name != LOCK_FILE));
    Ok(listing)
}

/// Make the directory, and the missing ones above it, durably.
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

/// Refuse to start anew where a state was published between the caller's look and the lock on the directory.
fn check_nothing_newer(dir: &Path, listing: &[PathBuf], unfinished: Option<u64>) -> Result<()> {
    if tokens(listing).last().copied() <= unfinished {
        return Ok(());
    }
    Err(Error::new(
        Kind::InUse,
        format!("another process published a state in {} just now: open the table again to resume it", dir.display()),
    ))
}

/// Remove a tier's own files. States go first, so that no state is ever without its segments.
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

/// Resume the state that the configuration names, or the newest.
fn resume(
    config: &SsdConfig,
    (identity, layout): (&Identity, &RowLayout),
    home: &Home,
    tuning: Tuning,
    listing: &[PathBuf],
) -> Result<Contents> {
    let dir = &home.dir;
    let tokens = tokens(listing);
    let token = token_to_resume(config.resume_token, &tokens, dir)?;
    let file = StateFile::read(&*home.engine, dir, token)?;
    file.check_identity(identity, layout, dir)?;
    let mut opened = Opened::default();
    let segments = opened.segments_of(home, &file)?;
    let wanted = Wanted { write_seq: file.write_seq, rows: file.rows, path: &state_path(dir, token) };
    let mut state = restore(tuning.index(), &wanted, &segments, home, tuning.threads)?;
    let before = tokens.iter().rev().find(|other| **other < token).copied();
    let before = before.map(|before| state_before(home, (identity, layout), before, &mut opened));
    let mut published: Vec<Published> = before.transpose()?.flatten().into_iter().collect();
    published.push(Published::hold(token, segments));
    let kept: Vec<u64> = published.iter().map(|published| published.token).collect();
    state.resume(States::resumed(published));
    let held: u64 = state.segments().iter().map(|segment| segment.held_bytes()).sum();
    home.geometry.check_room(config, state.rows(), held)?;
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
    let resumed = Resumed { counters: file.counters, note: file.note };
    Ok(Contents { state, resumed: Some(resumed) })
}

/// The token `wanted`, or the newest, of those published in `dir`.
fn token_to_resume(wanted: Option<u64>, tokens: &[u64], dir: &Path) -> Result<u64> {
    let what = match (wanted, tokens.last()) {
        (None, Some(newest)) => return Ok(*newest),
        (Some(token), _) if tokens.contains(&token) => return Ok(token),
        (Some(token), _) => format!("state {token} is not among those published there ({tokens:?})"),
        (None, None) => "nothing was published there (no flush, or the last one was given up for want of room)".into(),
    };
    Err(Error::new(
        Kind::State,
        format!(
            "cannot resume {}: {what}; load a checkpoint made with Saver and open the directory with reopen = \"discard\"",
            dir.display()
        ),
    ))
}

/// The state `token`, which comes before the one that is resumed, and which nothing but another resume needs. `None` where it is damaged,
/// not there, or another table's: then its files are removed.
///
/// Any other error is raised, because it says nothing of the bytes on disk. To take it for damage would remove a state that is whole.
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

/// See [`SsdTier::published`](crate::ssd::SsdTier::published).
pub(crate) fn published(dir: &Path, engine: &dyn IoEngine) -> Result<Vec<u64>> {
    if !engine.exists(dir)? {
        return Ok(Vec::new());
    }
    Ok(tokens(&engine.list(dir)?))
}
