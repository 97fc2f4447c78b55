//! Publishing: everything so far, durable as one state; and giving published states up where their files are in the way.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::StateCounters;
use super::manifest::{Named, Published, StateFile, state_path};
use super::segment::Segment;
use super::shared::{Shared, State, Stream, read_only};
use crate::error::{Error, Kind, Result};
use crate::sync::{Ordering, RwLockWriteGuard, lock};

/// States kept.
const STATES: usize = 2;

/// The token of a state: `wanted`, or the next even one. `Input` where `last`, the newest state's, is not smaller.
fn choose_token(wanted: Option<u64>, last: Option<u64>) -> Result<u64> {
    let next = || last.unwrap_or(0).checked_add(2).map(|next| next & !1);
    let refused = |token: String| {
        let last = last.unwrap_or(0);
        Error::new(Kind::Input, format!("token = {token}: a state has the token {last} already, give a larger one"))
    };
    let token = wanted.or_else(next).ok_or_else(|| refused("the next one".to_owned()))?;
    if last.is_some_and(|last| token <= last) { Err(refused(token.to_string())) } else { Ok(token) }
}

impl Shared {
    /// 1. Close the open segments and name the current set, which fixes the state.
    /// 2. Wait until the flusher has written all of it, and sync it.
    /// 3. Sync the directory, then publish the state file.
    /// 4. Remove the state before the one before, then let go of its files.
    pub(super) fn publish(self: &Arc<Self>, token: Option<u64>, counters: StateCounters, note: Vec<u8>) -> Result<()> {
        let _publishing = lock(&self.publishing);
        self.check_writable()?;
        let (token, published, write_seq, rows) = {
            // No state names a segment that is being emptied beside the copies of its rows.
            let _compacting = self.not_amid_compaction()?;
            let mut state = self.state();
            let token = choose_token(token, state.last_token)?;
            let (segments, write_seq, rows) = Self::name_current(&mut state);
            (token, Published::hold(token, segments), write_seq, rows)
        };
        let durable =
            catch_unwind(AssertUnwindSafe(|| self.make_durable(&published, (write_seq, rows), counters, note)));
        let failed = match durable {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some((error.clone(), error)),
            Err(panic) => {
                let cause = Error::panicked("publishing", &*panic);
                Some((read_only(&cause), cause))
            }
        };
        if let Some((error, cause)) = failed {
            // Its file may be there and may last (a rename whose sync failed): what it names stays held, and so on disk.
            self.home.space.fail(cause);
            return Err(error);
        }
        tracing::debug!(
            table = self.identity.table,
            token,
            rows,
            segments = published.segments.len(),
            "published a state of an SSD tier"
        );
        let mut state = self.state();
        state.last_token = Some(token);
        state.published.push(published);
        state.given_up = false;
        state.reap();
        state.prune_tombstones();
        while state.published.len() > STATES {
            self.forget_at(&mut state, 0)?;
        }
        self.compact_if_worthwhile(&state);
        Ok(())
    }

    /// Wait until no segment's rows are being moved and the room in open segments, which closing them gives up, is not what compaction
    /// counts on; none are moved as long as this is held.
    pub(super) fn not_amid_compaction(self: &Arc<Self>) -> Result<RwLockWriteGuard<'_, ()>> {
        loop {
            let still = self.not_compacting();
            if self.home.space.free_bytes() >= self.bytes_kept(&self.view()) {
                return Ok(still);
            }
            drop(still);
            if self.wait_for_room().is_err() {
                self.check_writable()?;
                // What keeps the room, a segment that cannot be read, stands in the way of no state.
                return Ok(self.not_compacting());
            }
        }
    }

    /// Close the open segments; the current set, the last `write_seq` in it, and its rows.
    pub(super) fn name_current(state: &mut State) -> (Vec<Arc<Segment>>, u64, u64) {
        for stream in Stream::all() {
            state.seal(stream);
        }
        state.reap();
        (state.current().cloned().collect(), state.next_seq - 1, state.index.len() as u64)
    }

    /// Wait until the flusher has written these segments, which are closed and held, and sync them; how a state names them.
    pub(super) fn make_segments_durable(&self, segments: &[Arc<Segment>]) -> Result<Vec<Named>> {
        let mut named = Vec::with_capacity(segments.len());
        for segment in segments {
            named.push(self.wait_for(|| Named::of(segment))?);
            segment.sync(self.home.background);
        }
        for segment in segments {
            self.wait_for(|| segment.is_synced().then_some(()))?;
        }
        Ok(named)
    }

    fn make_durable(
        &self,
        published: &Published,
        (write_seq, rows): (u64, u64),
        counters: StateCounters,
        note: Vec<u8>,
    ) -> Result<()> {
        let named = self.make_segments_durable(&published.segments)?;
        self.home.engine.sync_dir(&self.home.dir)?;
        let file = StateFile {
            token: published.token,
            identity: self.identity.clone(),
            vector_floats: self.layout.vector_floats() as u64,
            scalar_slot: self.layout.scalar_slot,
            counters,
            write_seq,
            rows,
            segments: named,
            note,
        };
        file.write(&*self.home.engine, &self.home.dir)
    }

    /// Wait for something that the flusher does.
    fn wait_for<T>(&self, done: impl Fn() -> Option<T>) -> Result<T> {
        loop {
            let generation = self.home.space.generation();
            if let Some(done) = done() {
                return Ok(done);
            }
            if let Some(cause) = self.home.space.failed() {
                return Err(read_only(&cause));
            }
            self.home.space.wait_change(generation);
        }
    }

    /// Remove the file of the state at `place`, durably, then let go of its segments.
    fn forget_at(&self, state: &mut State, place: usize) -> Result<()> {
        let Some(published) = state.published.get(place) else { return Ok(()) };
        let path = state_path(&self.home.dir, published.token);
        let removed = self.home.engine.remove_file(&path).and_then(|()| self.home.engine.sync_dir(&self.home.dir));
        if let Err(error) = removed {
            self.home.space.fail(error.clone());
            return Err(error);
        }
        state.published.remove(place).release();
        Ok(())
    }

    /// Forget the state named `token`, if it is published.
    pub(super) fn forget_published(&self, token: u64) -> Result<()> {
        let _publishing = lock(&self.publishing);
        self.check_writable()?;
        let mut state = self.state();
        match state.published.iter().position(|published| published.token == token) {
            Some(place) => self.forget_at(&mut state, place),
            None => Ok(()),
        }
    }

    /// Make room by giving up the oldest state; with the last one nothing is left to resume until the next publish.
    pub(super) fn give_up_oldest(&self, state: &mut State) -> Result<()> {
        // Said first: where the removal fails the file may be gone all the same.
        state.given_up |= state.published.len() <= 1;
        self.forget_at(state, 0)
    }

    /// Stop writing; what is in buffers is written out, nothing is published. Not in a forked child: the tier is its parent's, and
    /// locks may be held for ever by threads that the child has not.
    pub(super) fn close(&self) -> Result<()> {
        if self.home.background.check_process().is_err() {
            return Ok(());
        }
        let _publishing = lock(&self.publishing);
        {
            let mut state = self.state();
            if state.closed {
                return Ok(());
            }
            state.closed = true;
            for stream in Stream::all() {
                state.seal(stream);
            }
        }
        drop(self.not_compacting());
        self.home.space.wait_idle();
        self.home.space.remove_spares(None, |path| self.home.engine.remove_file(path));
        self.home.space.close();
        drop(lock(&self.lock).take());
        self.home.space.failed().map_or(Ok(()), |cause| Err(read_only(&cause)))
    }

    /// Live record bytes of sealed segments / their record bytes.
    pub(super) fn live_share(state: &State) -> f64 {
        let bytes = |segments: &mut dyn Iterator<Item = &Arc<Segment>>, live: bool| -> u64 {
            segments
                .filter(|segment| segment.sealed().is_some())
                .map(|segment| {
                    let records = if live { &segment.live } else { &segment.records };
                    u64::from(records.load(Ordering::Relaxed)) * segment.record_bytes as u64
                })
                .sum()
        };
        let (live, all) = (bytes(&mut state.current(), true), bytes(&mut state.current(), false));
        if all == 0 { 1.0 } else { live as f64 / all as f64 }
    }
}
