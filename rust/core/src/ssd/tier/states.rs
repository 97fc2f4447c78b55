//! Published states, from which the directory can be resumed.

use std::sync::Arc;

use crate::ssd::segment::file::Segment;

/// A state from which the directory can be resumed. It pins the files of its segments.
#[derive(Debug)]
pub(crate) struct PublishedState {
    pub(crate) commit_id: u64,
    pub(crate) segments: Vec<Arc<Segment>>,
}

impl PublishedState {
    /// References `segments`: their files stay until [`PublishedState::release`].
    pub(crate) fn pin(commit_id: u64, segments: Vec<Arc<Segment>>) -> Self {
        for segment in &segments {
            segment.add_ref();
        }
        Self { commit_id, segments }
    }

    /// Releases the segments. The state's file has been removed durably.
    pub(crate) fn release(mut self) {
        for segment in std::mem::take(&mut self.segments) {
            segment.remove_ref();
        }
    }
}

/// The published states of a tier.
#[derive(Debug, Default)]
pub(crate) struct PublishedStates {
    /// Oldest first, at most two.
    published: Vec<PublishedState>,
    last_commit_id: Option<u64>,
    is_last_dropped: bool,
}

impl PublishedStates {
    /// The states that a resume found, oldest first. It resumed the latest.
    pub(crate) fn resumed(published: Vec<PublishedState>) -> Self {
        let last_token = published.last().map(|newest| newest.commit_id);
        Self { published, last_commit_id: last_token, is_last_dropped: false }
    }

    /// Number of states.
    pub(crate) fn len(&self) -> usize {
        self.published.len()
    }

    /// Commit id of the last state that was published or resumed, even if that state was removed since. Later states
    /// have larger ones.
    pub(crate) fn last_commit_id(&self) -> Option<u64> {
        self.last_commit_id
    }

    /// True if the last state was discarded for space.
    pub(crate) fn is_last_dropped(&self) -> bool {
        self.is_last_dropped
    }

    /// The segments that they reference, some of them twice.
    pub(crate) fn segments(&self) -> impl Iterator<Item = &Arc<Segment>> {
        self.published.iter().flat_map(|published| &published.segments)
    }

    /// Adds a newly published state.
    pub(crate) fn add(&mut self, published: PublishedState) {
        self.last_commit_id = Some(published.commit_id);
        self.is_last_dropped = false;
        self.published.push(published);
    }

    /// Records that the oldest is about to be discarded for space. This must precede the removal: if that fails the
    /// file may be gone anyway.
    pub(crate) fn mark_oldest_dropped(&mut self) {
        self.is_last_dropped |= self.published.len() <= 1;
    }

    /// Commit id of the state at a position, oldest first.
    pub(crate) fn commit_id_at(&self, position: usize) -> Option<u64> {
        self.published.get(position).map(|published| published.commit_id)
    }

    /// Position of a commit id.
    pub(crate) fn position(&self, commit_id: u64) -> Option<usize> {
        self.published.iter().position(|published| published.commit_id == commit_id)
    }

    /// Removes the state at a position. Its file has been removed durably.
    pub(crate) fn remove(&mut self, position: usize) {
        self.published.remove(position).release();
    }
}
