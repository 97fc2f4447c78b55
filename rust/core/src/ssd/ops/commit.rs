//! Makes all rows durable: as a published state, or pinned while a checkpoint links their segments. Closes a tier, which
//! publishes nothing.
//!
//! A sealed segment is immutable, so a hard link of its file is a free copy. The tier removes only its own name when it
//! does not need the segment: a file with other links is not reused for another segment (see the drop of [`Segment`]).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::io::{IoEngine, link_or_copy};
use crate::runtime::sync::RwLockWriteGuard;
use crate::ssd::SsdTier;
use crate::ssd::directory::StateCounters;
use crate::ssd::format::state_file::{SegmentDescriptor, SegmentSet, StateFile};
use crate::ssd::ops::compaction;
use crate::ssd::ops::make_space::{remove_state_at, wait_for_space};
use crate::ssd::segment::{Segment, SegmentPart};
use crate::ssd::store::segment_sets::PublishedState;
use crate::ssd::store::{TierInner, read_only_error};

/// Number of states that are kept.
const MAX_STATES: usize = 2;

/// Returns the commit id of a state: `requested`, or the next even one. `Input` unless it is larger than `last`, that
/// of the latest state.
fn choose_commit_id(requested: Option<u64>, last: Option<u64>) -> Result<u64> {
    let next = || last.unwrap_or(0).checked_add(2).map(|next| next & !1);
    let refused = |commit_id: String| {
        let last = last.unwrap_or(0);
        Kind::Input.error(format!("commit_id = {commit_id}: the latest state has commit id {last}; pass a larger one"))
    };
    let commit_id = requested.or_else(next).ok_or_else(|| refused("the next one".to_owned()))?;
    if last.is_some_and(|last| commit_id <= last) { Err(refused(commit_id.to_string())) } else { Ok(commit_id) }
}

impl SsdTier {
    /// Makes all earlier appends and removals durable as one state named `commit_id`, which is larger than every earlier
    /// one; `None` selects the next even one. Keeps the previous state, and frees files that neither needs. A resume of
    /// the state returns `metadata`, which has at most [`SsdTier::max_metadata_bytes`] bytes.
    ///
    /// 1. Seal the open segments and reference the current set, which fixes the state.
    /// 2. Wait until the writers have written all of it, and sync it.
    /// 3. Sync the directory, then publish the state's file.
    /// 4. Remove the file of the state before the previous one, then release its segments.
    pub fn publish(&self, commit_id: Option<u64>, counters: StateCounters, metadata: Vec<u8>) -> Result<()> {
        let (most, bytes) = (self.max_metadata_bytes(), metadata.len());
        if bytes > most {
            return Err(Kind::Input.error(format!("metadata has at most {most} bytes and this has {bytes}")));
        }
        let tier = &self.inner;
        let _publishing = tier.publishing();
        tier.check_writable()?;
        let (commit_id, published, write_seq, rows) = {
            // No state references a segment that is being emptied in addition to the copies of its rows.
            let _compacting = pause_compaction_with_space(tier)?;
            let mut state = tier.state();
            let commit_id = choose_commit_id(commit_id, state.states().last_commit_id())?;
            let (segments, write_seq, rows) = state.seal_current_set();
            (commit_id, PublishedState::pin(commit_id, segments), write_seq, rows)
        };
        let durable =
            catch_unwind(AssertUnwindSafe(|| make_durable(tier, &published, (write_seq, rows), counters, metadata)));
        let failed = match durable {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some((error.clone(), error)),
            Err(panic) => {
                let cause = Error::panicked("publishing", &*panic);
                Some((read_only_error(&cause), cause))
            }
        };
        if let Some((error, cause)) = failed {
            // The state's file may exist and persist, for example after a rename whose sync failed. So its segments stay
            // pinned, and on disk.
            tier.context.space.fail(cause);
            return Err(error);
        }
        tracing::debug!(
            table = tier.identity.table,
            commit_id,
            rows,
            segments = published.segments.len(),
            "published a state of an SSD tier"
        );
        let mut state = tier.state();
        state.states_mut().add(published);
        state.reap();
        state.prune_tombstones();
        while state.states().len() > MAX_STATES {
            remove_state_at(tier, &mut state, 0)?;
        }
        compaction::schedule_if_worthwhile(tier, &state);
        Ok(())
    }

    /// Pins all rows, with all earlier appends and removals, as durable segments. Published states stay unchanged.
    pub fn pin_segments(&self) -> Result<PinnedSegments> {
        let tier = &self.inner;
        let _publishing = tier.publishing();
        tier.check_writable()?;
        let mut pinned = {
            let _compacting = pause_compaction_with_space(tier)?;
            let mut state = tier.state();
            let (segments, write_seq, rows) = state.seal_current_set();
            let parts = segments.into_iter().map(SegmentPart::of).collect();
            let set = SegmentSet { write_seq, rows, segments: Vec::new() };
            PinnedSegments { tier: Arc::clone(tier), parts, set }
        };
        let segments: Vec<Arc<Segment>> = pinned.parts.iter().map(|part| Arc::clone(&part.segment)).collect();
        pinned.set.segments = make_segments_durable(tier, &segments)?;
        Ok(pinned)
    }

    /// Stops the background work and writes the buffers, without publishing. Dropping the tier does so too. Does nothing
    /// in a forked child: the tier is its parent's, and threads that the child does not have may hold its locks forever.
    pub fn close(&self) -> Result<()> {
        let tier = &self.inner;
        if tier.context.workers.check_process().is_err() {
            return Ok(());
        }
        let _publishing = tier.publishing();
        {
            let mut state = tier.state();
            if state.is_closed() {
                return Ok(());
            }
            state.close();
        }
        drop(tier.pause_compaction());
        tier.context.space.wait_idle();
        tier.context.space.remove_reusable_files(None, |path| tier.context.engine.remove_file(path));
        tier.context.space.close();
        tier.unlock_directory();
        tier.context.space.failed().map_or(Ok(()), |cause| Err(read_only_error(&cause)))
    }
}

/// Waits until no segment's rows are being moved, and until compaction does not need the space in open segments, which
/// sealing wastes. No rows are moved as long as the guard is held.
fn pause_compaction_with_space(tier: &Arc<TierInner>) -> Result<RwLockWriteGuard<'_, ()>> {
    loop {
        let paused = tier.pause_compaction();
        if tier.context.space.free_bytes() >= tier.reserved_bytes(&tier.view()) {
            return Ok(paused);
        }
        drop(paused);
        if wait_for_space(tier).is_err() {
            tier.check_writable()?;
            // An unreadable segment, which causes this, does not prevent a state.
            return Ok(tier.pause_compaction());
        }
    }
}

/// Waits until the writers have written these sealed, pinned segments, and syncs them. Returns their descriptors for a
/// state.
fn make_segments_durable(tier: &TierInner, segments: &[Arc<Segment>]) -> Result<Vec<SegmentDescriptor>> {
    let mut descriptors = Vec::with_capacity(segments.len());
    for segment in segments {
        descriptors.push(wait_for_writers(tier, || segment.descriptor())?);
        segment.sync(tier.context.workers);
    }
    for segment in segments {
        wait_for_writers(tier, || segment.is_synced().then_some(()))?;
    }
    Ok(descriptors)
}

fn make_durable(
    tier: &TierInner,
    published: &PublishedState,
    (write_seq, rows): (u64, u64),
    counters: StateCounters,
    metadata: Vec<u8>,
) -> Result<()> {
    let segments = make_segments_durable(tier, &published.segments)?;
    tier.context.engine.sync_dir(&tier.context.dir)?;
    let file = StateFile {
        commit_id: published.commit_id,
        identity: tier.identity.clone(),
        vector_floats: tier.layout.vector_floats() as u64,
        scalar_slot: tier.layout.scalar_slot,
        counters,
        write_seq,
        rows,
        segments,
        metadata,
    };
    file.write(&*tier.context.engine, &tier.context.dir)
}

/// Waits until `done` returns a value, which depends on the writers.
fn wait_for_writers<T>(tier: &TierInner, done: impl Fn() -> Option<T>) -> Result<T> {
    loop {
        let generation = tier.context.space.generation();
        if let Some(done) = done() {
            return Ok(done);
        }
        if let Some(cause) = tier.context.space.failed() {
            return Err(read_only_error(&cause));
        }
        tier.context.space.wait_change(generation);
    }
}

/// Bytes of a set of files that were linked or copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkedBytes {
    /// Bytes of the files that were linked.
    pub linked: u64,
    /// Bytes of the files that were copied, because the file system does not link them there.
    pub copied: u64,
}

/// The durable segments of a snapshot of a tier's rows. They stay, and are not compacted, until this is dropped.
pub struct PinnedSegments {
    tier: Arc<TierInner>,
    parts: Vec<SegmentPart>,
    set: SegmentSet,
}

opaque_debug!(PinnedSegments, self, set = self.set);

impl PinnedSegments {
    /// The segments, for the checkpoint's manifest.
    pub fn set(&self) -> &SegmentSet {
        &self.set
    }

    /// Links or copies each file to the path that `path_of` returns for its serial, which must not exist. The caller
    /// syncs the directory.
    pub fn link_to(&self, engine: &dyn IoEngine, path_of: &dyn Fn(u64) -> PathBuf) -> Result<LinkedBytes> {
        let mut bytes = LinkedBytes::default();
        for (part, descriptor) in self.parts.iter().zip(&self.set.segments) {
            let linked = link_or_copy(engine, &*part.segment.file, &path_of(descriptor.serial))?;
            *(if linked { &mut bytes.linked } else { &mut bytes.copied }) += descriptor.file_bytes;
        }
        Ok(bytes)
    }
}

impl Drop for PinnedSegments {
    fn drop(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        if self.tier.context.workers.check_process().is_err() {
            // A forked child must not touch its parent's files and locks.
            std::mem::forget((parts, Arc::clone(&self.tier)));
            return;
        }
        drop(parts);
        self.tier.state().reap();
        self.tier.context.space.notify_waiters();
    }
}
