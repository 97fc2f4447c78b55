//! Opens a directory: the checks before anything is written, and the treatment of a directory that is not empty.
//! Removes the directories that runs with another number of ranks have left.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::{ReopenMode, SsdConfig};
use crate::error::{Error, Kind, Result};
use crate::io::{IoEngine, LOCK_FILE, open_files};
use crate::rows::RowLayout;
use crate::ssd::SsdTier;
use crate::ssd::directory::{DIR_MODE, ShardIdentity, StateCounters, lock_tier_dir};
use crate::ssd::format::segment_file::{
    SegmentSchema, commit_ids, is_temporary, segment_serial, state_commit_id, state_path,
};
use crate::ssd::format::state_file::StateFile;
use crate::ssd::index::{TAG_BITS, TagIndex};
use crate::ssd::recover::linked_segments::LinkedSegments;
use crate::ssd::recover::restore::{ExpectedSegments, OpenedSegments, restore};
use crate::ssd::segment::SegmentContext;
use crate::ssd::space::sizing::SegmentSizing;
use crate::ssd::store::TierInner;
use crate::ssd::store::segment_sets::{PublishedState, PublishedStates};
use crate::ssd::store::state::TierState;

/// Sizes that tests reduce. `None` selects the usual one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SsdTuning {
    pub(crate) segment_bytes: Option<u64>,
    pub(crate) block_bytes: Option<usize>,
    /// Bits that select a sub-table of the index, and bits of a tag. With few bits many ids collide.
    pub(crate) index_bits: Option<(u32, u32)>,
    /// Threads that restore.
    pub(crate) threads: Option<usize>,
}

impl SsdTuning {
    fn index(self) -> TagIndex {
        match self.index_bits {
            Some((sub_tables, tag)) => TagIndex::with_sub_tables(sub_tables, tag),
            None => TagIndex::new(TAG_BITS),
        }
    }
}

/// Opens the tier in a directory. With `source`, its segments replace the contents of the directory. Returns the
/// counters of the resumed state.
pub(crate) fn open(
    config: &SsdConfig,
    identity: &ShardIdentity,
    layout: RowLayout,
    engine: Arc<dyn IoEngine>,
    tuning: SsdTuning,
    source: Option<&LinkedSegments>,
) -> Result<(Arc<TierInner>, Option<StateCounters>)> {
    let schema = SegmentSchema::new(identity.key, &identity.optimizer, &layout);
    let sizing = SegmentSizing::new(config.bytes, &schema, tuning.segment_bytes)?;
    let context = SegmentContext::new(config.dir.clone(), schema, sizing, tuning.block_bytes, engine)?;
    let engine = &*context.engine;
    open_files::check_reserve(&config.dir)?;
    engine.check_private(&config.dir, DIR_MODE)?;
    make_directory(engine, &config.dir)?;
    // A directory that was never a tier's is rejected before the lock file is written into it.
    let found = engine.list(&config.dir)?;
    let is_tier_dir =
        found.is_empty() || found.iter().any(|path| path.file_name().is_some_and(|name| name == LOCK_FILE));
    if config.reopen == ReopenMode::Never && !is_tier_dir {
        return Err(not_empty(&config.dir, found.len()));
    }
    let dir_lock = lock_tier_dir(engine, &config.dir)?;
    let contents = initial_contents(config, (identity, &layout), &context, tuning, source)?;
    tracing::debug!(
        table = identity.table,
        dir = %context.dir.display(),
        rows = contents.state.rows(),
        segments = contents.state.segments().iter().count(),
        commit_id = contents.state.states().last_commit_id(),
        "opened an SSD tier"
    );
    let counters = contents.resumed.as_ref().map(|resumed| resumed.counters);
    let metadata = contents.resumed.map(|resumed| resumed.metadata).unwrap_or_default();
    Ok((Arc::new(TierInner::new(context, layout, identity.clone(), contents.state, (dir_lock, metadata))), counters))
}

/// The initial contents of a tier.
struct TierContents {
    state: TierState,
    resumed: Option<ResumedState>,
}

/// The table's counters and metadata blob in a resumed state.
struct ResumedState {
    counters: StateCounters,
    metadata: Vec<u8>,
}

/// Takes the contents from `source`, or treats those of the directory according to the configuration.
fn initial_contents(
    config: &SsdConfig,
    (identity, layout): (&ShardIdentity, &RowLayout),
    context: &SegmentContext,
    tuning: SsdTuning,
    source: Option<&LinkedSegments>,
) -> Result<TierContents> {
    let listing = list(context)?;
    let empty = || Ok(TierContents { state: TierState::new(tuning.index()), resumed: None });
    if let Some(source) = source {
        discard(context, &listing)?;
        let state = source.install(config, context, tuning.index(), tuning.threads)?;
        return Ok(TierContents { state, resumed: None });
    }
    match config.reopen {
        ReopenMode::Never if listing.is_empty() => empty(),
        ReopenMode::Never => Err(not_empty(&config.dir, listing.len())),
        ReopenMode::Discard => {
            discard(context, &listing)?;
            empty()
        }
        ReopenMode::Resume if listing.is_empty() && config.resume_commit_id.is_none() => empty(),
        ReopenMode::Auto { unfinished } if config.resume_commit_id.is_none() => {
            check_no_newer_state(&config.dir, &listing, unfinished)?;
            discard(context, &listing)?;
            empty()
        }
        ReopenMode::Resume | ReopenMode::Auto { .. } => resume(config, (identity, layout), context, tuning, &listing),
    }
}

/// Lists the files in the directory, except the lock file.
fn list(context: &SegmentContext) -> Result<Vec<PathBuf>> {
    let mut listing = context.engine.list(&context.dir)?;
    listing.retain(|path| path.file_name().is_none_or(|name| name != LOCK_FILE));
    Ok(listing)
}

/// Creates the directory, and its missing parents, durably.
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
    Kind::State.error(format!(
        "the SSD tier's directory {} is not empty ({files} files): open it with reopen = \"resume\" to resume its last \
         flush, with reopen = \"discard\" to remove what an earlier run left there, or with reopen = \"auto\" to resume a \
         flush if there is one, and to start with an empty tier otherwise",
        dir.display()
    ))
}

/// Returns an error instead of starting empty if a state was published between the caller's check and the lock on the
/// directory.
fn check_no_newer_state(dir: &Path, listing: &[PathBuf], unfinished: Option<u64>) -> Result<()> {
    if commit_ids(listing).last().copied() <= unfinished {
        return Ok(());
    }
    Err(Kind::InUse.error(format!(
        "another process published a state in {} just now: open the table again to resume it",
        dir.display()
    )))
}

/// Removes a tier's own files. States are removed first, so that no state is ever without its segments.
fn discard(context: &SegmentContext, listing: &[PathBuf]) -> Result<()> {
    for path in listing.iter().filter(|path| state_commit_id(path).is_some() || is_temporary(path)) {
        context.engine.remove_file(path)?;
    }
    context.engine.sync_dir(&context.dir)?;
    for path in listing.iter().filter(|path| segment_serial(path).is_some()) {
        context.engine.remove_file(path)?;
    }
    context.engine.sync_dir(&context.dir)
}

/// Resumes the configured state, or the latest.
fn resume(
    config: &SsdConfig,
    (identity, layout): (&ShardIdentity, &RowLayout),
    context: &SegmentContext,
    tuning: SsdTuning,
    listing: &[PathBuf],
) -> Result<TierContents> {
    let dir = &context.dir;
    let published_ids = commit_ids(listing);
    let commit_id = commit_id_to_resume(config.resume_commit_id, &published_ids, dir)?;
    let file = StateFile::read(&*context.engine, dir, commit_id)?;
    file.check_identity(identity, layout, dir)?;
    let mut opened = OpenedSegments::default();
    let segments = opened.segments_of(context, &file)?;
    let expected = ExpectedSegments { write_seq: file.write_seq, rows: file.rows, path: &state_path(dir, commit_id) };
    let mut state = restore(tuning.index(), &expected, &segments, context, tuning.threads)?;
    let previous = published_ids.iter().rev().find(|other| **other < commit_id).copied();
    let previous = previous.map(|previous| read_previous_state(context, (identity, layout), previous, &mut opened));
    let mut published: Vec<PublishedState> = previous.transpose()?.flatten().into_iter().collect();
    published.push(PublishedState::pin(commit_id, segments));
    let kept: Vec<u64> = published.iter().map(|published| published.commit_id).collect();
    state.resume(PublishedStates::resumed(published));
    let held_bytes: u64 = state.segments().iter().map(|segment| segment.held_bytes()).sum();
    context.sizing.check_space(config, state.rows(), held_bytes)?;
    for other in published_ids.iter().filter(|other| !kept.contains(other)) {
        context.engine.remove_file(&state_path(dir, *other))?;
    }
    context.engine.sync_dir(dir)?;
    let needless =
        |path: &&PathBuf| is_temporary(path) || segment_serial(path).is_some_and(|serial| !opened.contains(serial));
    for path in listing.iter().filter(needless) {
        context.engine.remove_file(path)?;
    }
    state.reap();
    let resumed = ResumedState { counters: file.counters, metadata: file.metadata };
    Ok(TierContents { state, resumed: Some(resumed) })
}

/// Returns the commit id `requested`, or the latest, of those published in `dir`.
fn commit_id_to_resume(requested: Option<u64>, published_ids: &[u64], dir: &Path) -> Result<u64> {
    let what = match (requested, published_ids.last()) {
        (None, Some(newest)) => return Ok(*newest),
        (Some(id), _) if published_ids.contains(&id) => return Ok(id),
        (Some(id), _) => format!("state {id} is not among those published there ({published_ids:?})"),
        (None, None) => "nothing was published there (no flush, or the last one was dropped to free space)".into(),
    };
    Err(Kind::State.error(format!(
        "cannot resume {}: {what}; load a checkpoint made with Saver and open the directory with reopen = \"discard\"",
        dir.display()
    )))
}

/// Reads the state `commit_id`, the predecessor of the resumed state, which only another resume needs. Returns `None`
/// if it is corrupted, missing, or belongs to another table: then its files are removed.
///
/// Returns any other error, because it does not concern the bytes on disk. Treating it as corruption would remove an
/// intact state.
fn read_previous_state(
    context: &SegmentContext,
    (identity, layout): (&ShardIdentity, &RowLayout),
    commit_id: u64,
    opened: &mut OpenedSegments,
) -> Result<Option<PublishedState>> {
    let mut read = || {
        let file = StateFile::read(&*context.engine, &context.dir, commit_id)?;
        file.check_identity(identity, layout, &context.dir)?;
        opened.segments_of(context, &file)
    };
    match read() {
        Ok(segments) => Ok(Some(PublishedState::pin(commit_id, segments))),
        Err(error) if error.is_damage_or_absence() || error.kind() == Kind::Mismatch => Ok(None),
        Err(error) => {
            let path = state_path(&context.dir, commit_id);
            let context = format!(
                "cannot read the older one of the two states in {}, and nothing there was changed; open the table again when the cause \
                 is gone, or remove {} yourself to continue without that state",
                context.dir.display(),
                path.display()
            );
            Err(error.context(context))
        }
    }
}

impl SsdTier {
    /// Returns the commit ids of the states in a directory, oldest first, by their file names. A resume verifies a
    /// state.
    pub fn published_commit_ids(dir: &Path, engine: &dyn IoEngine) -> Result<Vec<u64>> {
        if !engine.exists(dir)? {
            return Ok(Vec::new());
        }
        Ok(commit_ids(&engine.list(dir)?))
    }

    /// Removes the directory of an unused table shard and its contents.
    ///
    /// Errors: `State` for a directory that contains anything but a tier's own files, `InUse` (names the pid) if a
    /// table has it open, `Path`, `Permission` and `Storage`. After an error nothing was removed, unless the file
    /// system failed half-way.
    pub fn remove_shard(dir: &Path, engine: &dyn IoEngine) -> Result<()> {
        engine.check_private(dir, DIR_MODE)?;
        // This precedes the lock, which would create a file in a directory that is not a tier's.
        check_tier_directory(dir, &engine.list(dir)?)?;
        let dir_lock = lock_tier_dir(engine, dir)?;
        // Checks again under the lock, which only programs that ignore it can bypass to add files.
        let listing = engine.list(dir)?;
        check_tier_directory(dir, &listing)?;
        // States are removed first, so that no state is ever without its segments.
        for path in listing.iter().filter(|path| state_commit_id(path).is_some() || is_temporary(path)) {
            engine.remove_file(path)?;
        }
        engine.sync_dir(dir)?;
        engine.remove_dir_all(dir)?;
        drop(dir_lock);
        engine.sync_dir(dir.parent().unwrap_or(Path::new("/")))
    }
}

/// Returns `State` unless `listing` is that of a tier's directory: its lock file, and otherwise only states and
/// segments.
fn check_tier_directory(dir: &Path, listing: &[PathBuf]) -> Result<()> {
    let is_lock = |path: &Path| path.file_name().is_some_and(|name| name == LOCK_FILE);
    let is_ours = |path: &Path| {
        is_lock(path) || state_commit_id(path).is_some() || segment_serial(path).is_some() || is_temporary(path)
    };
    let refuse = |what: String| {
        Err(Kind::State
            .error(format!("{} is not removed, because {what}: remove it yourself if it is not needed", dir.display())))
    };
    if let Some(other) = listing.iter().find(|path| !is_ours(path)) {
        return refuse(format!("it holds {}, which is not a file of a table", other.display()));
    }
    if !listing.iter().any(|path| is_lock(path)) {
        return refuse("no table was ever opened there".into());
    }
    Ok(())
}
