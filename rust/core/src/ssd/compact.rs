//! Compaction: the live records of a segment move to the open segment of moved rows, byte for byte, and the segment goes.
//!
//! One thread a process serves all tiers. It works as late as it can (what waits longer has more dead records), and picks, in this order:
//!
//! 1. where room is short, segments that no published state names: their room is free at once. By cost and benefit, age counting
//!    for up to a factor of two (Rosenblum, Ousterhout: The design and implementation of a log-structured file system, 1992);
//! 2. where tombstones pile up, the oldest segment with dead records, which is what keeps them;
//! 3. where there is room to keep both copies, named segments with many dead records, so that the next publishes free theirs;
//! 4. where frequent publishes leave many small segments, the smallest.

use std::sync::Arc;

use super::buffer::Pool;
use super::format::Content;
use super::record::{decode, le_u64};
use super::segment::Segment;
use super::shared::{Counters, Shared, State, Stream};
use crate::error::Result;
use crate::sync::{Ordering, lock};
use crate::types::Id;

/// Bytes read at once from a victim.
const CHUNK_BYTES: usize = 1 << 20;
/// Small segments (of a quarter of the usual size at most) that may lie about.
const SMALL_SEGMENTS: usize = 16;
/// Segments of tombstones that may lie about.
const TOMBSTONE_SEGMENTS: usize = 8;

/// Compact the tier as long as that is worthwhile. Called by the compactor.
pub(super) fn run(tier: &Arc<Shared>) {
    tier.compaction_scheduled.store(false, Ordering::Release);
    while tier.compact_once() {}
    tier.home.space.poke();
}

/// The segment to compact next, if any.
pub(super) fn victim(tier: &Shared, state: &State) -> Option<Arc<Segment>> {
    let (space, unit) = (&tier.home.space, tier.home.geometry.segment_bytes);
    let cap = tier.home.geometry.cap_bytes;
    let free = space.free_bytes();
    let open_for_moved = state.open[Stream::Moved as usize].is_some();
    if state.closed || space.has_failed() || (free < tier.home.geometry.smallest_segment() && !open_for_moved) {
        return None;
    }
    let candidates = || {
        state.current().filter(|s| {
            s.content == Content::Rows
                && s.sealed().is_some()
                && s.scans.load(Ordering::Relaxed) == 0
                && !s.is_damaged()
        })
    };
    let live_share =
        |s: &Segment| f64::from(s.live.load(Ordering::Relaxed)) / f64::from(s.records.load(Ordering::Relaxed).max(1));
    let retained = if state.published.is_empty() { 0 } else { state.retained_bytes() };
    if free < (cap / 8).max(4 * unit) {
        let most = match (free < 3 * unit, !state.published.is_empty()) {
            (true, false) => 1.0,
            (true, true) => 0.75,
            (false, _) => 0.5,
        };
        let score = |s: &Segment| {
            let age = state.next_seq.saturating_sub(s.sealed().map_or(0, |sealed| sealed.trailer.highest_seq));
            let age = age as f64 / state.next_seq as f64;
            (1.0 - live_share(s)) / (1.0 + live_share(s)) * (1.0 + age)
        };
        let best = candidates()
            .filter(|s| s.holds() == 1 && s.dead() > 0 && live_share(s) <= most)
            .max_by(|a, b| score(a).total_cmp(&score(b)));
        if best.is_some() {
            return best.cloned();
        }
    }
    if free < 2 * unit {
        return None;
    }
    let tombstone_bytes: u64 = state.tombstones.iter().map(|t| t.segment.held_bytes()).sum();
    if tombstone_bytes > cap / 16 || state.tombstones.len() > TOMBSTONE_SEGMENTS {
        let before = state.tombstones.first().map_or(0, |t| t.before);
        let oldest = candidates().filter(|s| s.dead() > 0 && s.serial < before).min_by_key(|s| s.serial);
        if oldest.is_some() {
            return oldest.cloned();
        }
    }
    if free < 4 * unit {
        return None;
    }
    if free < cap / 3 && retained < cap / 4 {
        let emptiest =
            candidates().filter(|s| live_share(s) < 0.6).min_by(|a, b| live_share(a).total_cmp(&live_share(b)));
        if emptiest.is_some() {
            return emptiest.cloned();
        }
    }
    let small = || candidates().filter(|s| s.held_bytes() * 4 <= unit);
    if small().count() > SMALL_SEGMENTS { small().min_by_key(|s| s.held_bytes()).cloned() } else { None }
}

impl Shared {
    /// Compact one segment; whether there may be more to do.
    pub(super) fn compact_once(self: &Arc<Self>) -> bool {
        let _compacting = lock(&self.compacting);
        let victim = {
            let mut state = self.state();
            state.reap();
            let Some(victim) = victim(self, &state) else { return false };
            state.moving = true;
            victim
        };
        let moved = self.move_rows(&victim);
        let mut state = self.state();
        state.moving = false;
        let emptied = victim.live.load(Ordering::Relaxed) == 0;
        let failed = moved.is_err();
        if let Err(cause) = moved {
            victim.set_damaged(cause);
        }
        state.reap();
        drop(state);
        drop(victim);
        self.home.space.poke();
        emptied || failed
    }

    /// Move the live records of `victim` as far as there is room. An error means that bytes of it cannot be read.
    fn move_rows(self: &Arc<Self>, victim: &Arc<Segment>) -> Result<()> {
        let record_bytes = victim.record_bytes;
        let records = victim.records.load(Ordering::Relaxed);
        let at_once = (CHUNK_BYTES / record_bytes).max(1) as u32;
        let mut bytes = vec![0; at_once as usize * record_bytes];
        let mut ids: Vec<Id> = Vec::with_capacity(at_once as usize);
        for first in (0..records).step_by(at_once as usize) {
            if victim.live.load(Ordering::Relaxed) == 0 {
                break;
            }
            let count = at_once.min(records - first);
            let chunk = &mut bytes[..count as usize * record_bytes];
            victim.file.read_at(victim.offset(first), chunk)?;
            ids.clear();
            ids.extend(chunk.chunks_exact(record_bytes).map(|record| le_u64(record, 8) as Id));
            Pool::shared().throttle();
            if !self.move_chunk(victim, first, chunk, &ids)? {
                break;
            }
        }
        Ok(())
    }

    /// Move the live ones of the records from number `first` on; false when there is no more room.
    fn move_chunk(self: &Arc<Self>, victim: &Segment, first: u32, chunk: &[u8], ids: &[Id]) -> Result<bool> {
        let mut state = self.state();
        if state.closed || self.home.space.has_failed() {
            return Ok(false);
        }
        let mut locations = vec![None; ids.len()];
        state.index.get_batch(ids, &mut locations);
        let mut damage = None;
        for (at, bytes) in chunk.chunks_exact(victim.record_bytes).enumerate() {
            let from = victim.location(first + at as u32);
            if locations[at] != Some(from) {
                continue;
            }
            let record = match decode(bytes, victim.path(), victim.offset(first + at as u32)) {
                Ok(record) => record,
                Err(error) => {
                    damage.get_or_insert(error);
                    continue;
                }
            };
            // An error here is a failed write, kept by the space: the segment is not to blame.
            if !self.ready(&mut state, Stream::Moved).unwrap_or(false) {
                return Ok(false);
            }
            let mut open = state.open[Stream::Moved as usize].take().expect("just made ready");
            let (number, room) = open.push(record.id, record.write_seq, record.modified_epoch);
            room.copy_from_slice(bytes);
            let to = open.segment.location(number);
            open.segment.live.fetch_add(1, Ordering::Relaxed);
            state.open[Stream::Moved as usize] = Some(open);
            state.index.replace(record.id, to);
            state.bury(from);
            Counters::add(&self.counters.compaction_bytes, bytes.len() as u64);
        }
        damage.map_or(Ok(true), Err)
    }
}
