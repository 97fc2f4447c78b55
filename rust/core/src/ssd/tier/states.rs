//! Published states, which the directory can be resumed from.

use std::sync::Arc;

use crate::ssd::segment::file::Segment;

/// A state that the directory can be resumed from. It keeps the files of its segments.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) token: u64,
    pub(crate) segments: Vec<Arc<Segment>>,
}

impl Published {
    /// Name `segments`: their files stay until [`Published::release`].
    pub(crate) fn hold(token: u64, segments: Vec<Arc<Segment>>) -> Self {
        for segment in &segments {
            segment.name();
        }
        Self { token, segments }
    }

    /// Let go of the segments. The state's file is gone from the disk, durably.
    pub(crate) fn release(mut self) {
        for segment in std::mem::take(&mut self.segments) {
            segment.unname();
        }
    }
}

/// The published states of a tier.
#[derive(Debug, Default)]
pub(crate) struct States {
    /// Oldest first, at most two.
    published: Vec<Published>,
    last_token: Option<u64>,
    given_up: bool,
}

impl States {
    /// The states that a resume found, oldest first. It resumed the newest.
    pub(crate) fn resumed(published: Vec<Published>) -> Self {
        let last_token = published.last().map(|newest| newest.token);
        Self { published, last_token, given_up: false }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.published.len()
    }

    /// Token of the last state that was published or resumed, whether or not it is still there. Later states have larger ones.
    pub(crate) fn last_token(&self) -> Option<u64> {
        self.last_token
    }

    /// Whether the last state was given up for room.
    pub(crate) fn was_given_up(&self) -> bool {
        self.given_up
    }

    /// The segments that they name, some of them twice.
    pub(crate) fn segments(&self) -> impl Iterator<Item = &Arc<Segment>> {
        self.published.iter().flat_map(|published| &published.segments)
    }

    /// A state was published.
    pub(crate) fn add(&mut self, published: Published) {
        self.last_token = Some(published.token);
        self.given_up = false;
        self.published.push(published);
    }

    /// The oldest is about to be given up for room. This is said first, because where its removal fails the file may be gone all the same.
    pub(crate) fn give_up_oldest(&mut self) {
        self.given_up |= self.published.len() <= 1;
    }

    /// The token of the state at a position, oldest first.
    pub(crate) fn token_at(&self, position: usize) -> Option<u64> {
        self.published.get(position).map(|published| published.token)
    }

    /// The position of a token.
    pub(crate) fn position(&self, token: u64) -> Option<usize> {
        self.published.iter().position(|published| published.token == token)
    }

    /// Take the state at a position out. Its file is gone from the disk, durably.
    pub(crate) fn remove(&mut self, position: usize) {
        self.published.remove(position).release();
    }
}
