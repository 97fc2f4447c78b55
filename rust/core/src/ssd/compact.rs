//! Compaction: the live records of a segment move to the open segments of their classes, byte for byte and in order, and the segment goes.
//!
//! A few threads a process serve all tiers, each a segment at a time, so that as many reads are under way and files are removed beside
//! them. They work as late as they can (what waits longer has more dead records), and pick, in this order:
//!
//! 1. where room is short, segments that no published state names: their room is free at once. By cost and benefit (Rosenblum,
//!    Ousterhout: The design and implementation of a log-structured file system, 1992), which with rows apart by class waits for
//!    segments whose records are about to die;
//! 2. where tombstones pile up, the oldest segment with dead records, which is what keeps them;
//! 3. where there is room to keep both copies, named segments with many dead records, so that the next publishes free theirs;
//! 4. where frequent publishes leave many small segments, the smallest.

use std::ops::Range;
use std::sync::Arc;

use super::buffer::Pool;
use super::classes::MOST_CLASSES;
use super::format::Content;
use super::record::{decode, le_u64};
use super::segment::Segment;
use super::shared::{Counters, Shared, State};
use crate::error::Result;
use crate::io::{ALIGNMENT, BufPool, PooledBuf};
use crate::process::PerProcess;
use crate::sync::Ordering;
use crate::types::Id;

/// Segments kept free for what is written while a victim is moved.
const KEPT_FREE: u64 = 5;
/// Bytes read at once from a victim.
const CHUNK_BYTES: usize = 1 << 20;
/// Small segments (of a quarter of the usual size at most) that may lie about.
const SMALL_SEGMENTS: usize = 16;
/// Segments of tombstones that may lie about.
const TOMBSTONE_SEGMENTS: usize = 8;

/// Segments of one tier that are moved at a time.
pub(super) const MOST_MOVING: u32 = 3;

/// Compact the tier as long as that is worthwhile. Called by the compactors.
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
    let open_for_moved = state.open[..MOST_CLASSES as usize].iter().any(Option::is_some);
    if state.closed || space.has_failed() || (free < tier.home.geometry.smallest_segment() && !open_for_moved) {
        return None;
    }
    // Of several at a time each must find its room: none could be finished if all of them were half moved when it ends.
    if state.moving > 0 && (state.moving >= MOST_MOVING || free < u64::from(state.moving + 1) * unit) {
        return None;
    }
    let candidates = || {
        state.current().filter(|s| {
            s.content == Content::Rows
                && s.sealed().is_some()
                && s.scans.load(Ordering::Relaxed) == 0
                && !s.moving.load(Ordering::Relaxed)
                && !s.is_damaged()
        })
    };
    let live_share =
        |s: &Segment| f64::from(s.live.load(Ordering::Relaxed)) / f64::from(s.records.load(Ordering::Relaxed).max(1));
    let retained = if state.published.is_empty() { 0 } else { state.retained_bytes() };
    // A publish holds every segment of its moment: a tier that is published keeps room for what is written until the next.
    let short = if state.last_token.is_some() { (cap / 8).max(4 * unit) } else { KEPT_FREE * unit };
    if free < short {
        let most = match (free < 3 * unit, !state.published.is_empty()) {
            (_, false) if state.last_token.is_none() => 1.0,
            (true, false) => 1.0,
            (true, true) => 0.75,
            (false, _) => 0.5,
        };
        let score = |s: &Segment| {
            let age = state.next_seq.saturating_sub(s.made_seq).max(1) as f64;
            (1.0 - live_share(s)) / (1.0 + live_share(s)) * age
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
        let named = candidates().filter(|s| s.holds() > 1 && live_share(s) < 0.6);
        let emptiest = named.min_by(|a, b| live_share(a).total_cmp(&live_share(b)));
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
        let _compacting = self.compacting();
        let victim = {
            let mut state = self.state();
            state.reap();
            let Some(victim) = victim(self, &state) else { return false };
            state.moving += 1;
            victim.moving.store(true, Ordering::Relaxed);
            // Another thread can take the next one meanwhile.
            self.compact_if_worthwhile(&state);
            victim
        };
        // Dropped before the victim, and so before its file is removed.
        let _moving = Moving { tier: self, victim: &victim };
        let moved = self.move_rows(&victim);
        let mut state = self.state();
        let emptied = victim.live.load(Ordering::Relaxed) == 0;
        let failed = moved.is_err();
        if let Err(cause) = moved {
            victim.set_damaged(cause);
        }
        state.reap();
        drop(state);
        emptied || failed
    }

    /// Move the live records of `victim` as far as there is room. An error means that bytes of it cannot be read.
    fn move_rows(self: &Arc<Self>, victim: &Arc<Segment>) -> Result<()> {
        for (first, count) in chunks_of(victim) {
            let chunk = Chunk::read(victim, first, count)?;
            Pool::shared().throttle();
            if !self.move_chunk(victim, &chunk)? || victim.live.load(Ordering::Relaxed) == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Move the live ones of the records of a chunk; false when there is no more room.
    fn move_chunk(self: &Arc<Self>, victim: &Segment, chunk: &Chunk) -> Result<bool> {
        let numbered = chunk.records(victim);
        let ids: Vec<Id> = numbered.clone().map(|(_, record)| le_u64(record, 8) as Id).collect();
        let mut locations = vec![None; ids.len()];
        self.view().index.get_batch(&ids, &mut locations);
        // A record that is not live now never will be.
        let (mut records, mut damage) = (Vec::new(), None);
        for ((number, bytes), location) in numbered.zip(locations) {
            if location == Some(victim.location(number)) {
                match decode(bytes, victim.path(), victim.offset(number)) {
                    Ok(record) => records.push((number, bytes, record)),
                    Err(error) => drop(damage.get_or_insert(error)),
                }
            }
        }
        let mut state = self.state();
        if state.closed || self.home.space.has_failed() {
            return Ok(false);
        }
        let classes = self.classes(&state);
        let (mut moved_bytes, mut room_left) = (0, true);
        for (number, bytes, record) in records {
            let from = victim.location(number);
            if !state.index.is_at(record.id, from) {
                continue;
            }
            let age = state.next_seq.saturating_sub(record.write_seq);
            let class = classes.of_moved(victim.class.min(classes.count - 1), age);
            // An error here is a failed write, kept by the space: the segment is not to blame.
            let Some(stream) = self.ready_for_moved(&mut state, class).unwrap_or(None) else {
                room_left = false;
                break;
            };
            let open = state.open[stream.index()].as_mut().expect("just made ready");
            let (number, room) = open.push(record.id, record.write_seq, record.modified_epoch);
            room.copy_from_slice(bytes);
            let to = open.segment.location(number);
            open.segment.add_live(1);
            state.index.replace(record.id, to);
            state.bury_later(from);
            moved_bytes += bytes.len() as u64;
        }
        state.count_buried();
        drop(state);
        Counters::add(&self.counters.compaction_bytes, moved_bytes);
        damage.map_or(Ok(room_left), Err)
    }
}

/// A segment that is being moved, until it is dropped.
struct Moving<'a> {
    tier: &'a Shared,
    victim: &'a Segment,
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        let mut state = self.tier.state();
        state.moving -= 1;
        self.victim.moving.store(false, Ordering::Relaxed);
        drop(state);
        self.tier.home.space.poke();
    }
}

/// The first record of each chunk, and how many it has.
fn chunks_of(segment: &Segment) -> impl Iterator<Item = (u32, u32)> + use<> {
    let records = segment.records.load(Ordering::Relaxed);
    let at_once = (CHUNK_BYTES / segment.record_bytes).max(1) as u32;
    (0..records).step_by(at_once as usize).map(move |first| (first, at_once.min(records - first)))
}

/// Some consecutive records of a segment, as they lie on disk.
struct Chunk {
    first: u32,
    bytes: PooledBuf,
    /// Where in `bytes` the records are.
    place: Range<usize>,
}

impl Chunk {
    /// Read `count` records from number `first` on, in whole sectors where the file has them.
    fn read(segment: &Segment, first: u32, count: u32) -> Result<Self> {
        static BUFFERS: PerProcess<Arc<BufPool>> = PerProcess::new();
        let (start, end) = (segment.offset(first), segment.offset(first + count));
        let from = start - start % ALIGNMENT as u64;
        let whole = end.next_multiple_of(ALIGNMENT as u64);
        let to = segment.sealed().filter(|sealed| whole <= sealed.file_bytes).map_or(end, |_| whole);
        let buffers = BUFFERS.get(|| Ok(Arc::new(BufPool::new(CHUNK_BYTES + 2 * ALIGNMENT, MOST_MOVING as usize))))?;
        let mut bytes = buffers.take_at_least((to - from) as usize)?;
        segment.file.read_at(from, &mut bytes[..(to - from) as usize])?;
        Ok(Self { first, bytes, place: (start - from) as usize..(end - from) as usize })
    }

    /// The records and their numbers.
    fn records(&self, segment: &Segment) -> impl Iterator<Item = (u32, &[u8])> + Clone {
        (self.first..).zip(self.bytes[self.place.clone()].chunks_exact(segment.record_bytes))
    }
}
