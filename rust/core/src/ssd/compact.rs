//! Compaction: the live records of a segment move to the open segments of their classes, as they are and in order, and the segment goes.
//!
//! A few threads a process serve all tiers, each a segment at a time, so that as many reads are under way and files are removed beside
//! them. They work as late as they can (what waits longer has more dead records), and pick, in this order:
//!
//! 1. where room is short, segments that no published state names: their room is free at once. By cost and benefit (Rosenblum,
//!    Ousterhout: The design and implementation of a log-structured file system, 1992), which with rows apart by class waits for
//!    segments whose records are about to die; segments that publishes closed before they were full count as if the rest were dead;
//! 2. where tombstones pile up, the oldest segment with dead records, which is what keeps them;
//! 3. where there is room to keep both copies, named segments with many dead records, so that the next publishes free theirs;
//! 4. where frequent publishes leave many small segments, the smallest.
//!
//! None is taken whose live records do not all fit what is open and free ([`rows_to_move`]): what is moved in part frees nothing.

use std::ops::Range;
use std::sync::Arc;

use super::buffer::Pool;
use super::classes::MOST_CLASSES;
use super::format::Content;
use super::record::le_u64;
use super::segment::Segment;
use super::shared::{Counters, Shared, State};
use super::space::Geometry;
use crate::error::Result;
use crate::io::{ALIGNMENT, BufPool, PooledBuf};
use crate::memory;
use crate::process::PerProcess;
use crate::sync::Ordering;
use crate::types::Id;

/// Segments kept free for what is written while a victim is moved.
const KEPT_FREE: u64 = 5;
/// Bytes read at once from a victim.
const CHUNK_BYTES: usize = 1 << 20;
/// Where there are more small segments than this, the smallest is merged. Small is one with at most a quarter of the usual rows.
const SMALL_SEGMENTS: u64 = 16;
/// A cap that has room for few segments bears fewer small ones: one for each so many.
const SMALL_SHARE: u64 = 8;
/// Where there are more segments of tombstones than this, the oldest rows that they speak of are moved, so that tombstones can go.
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
    if state.closed || space.has_failed() {
        return None;
    }
    // Of several at a time each must find its room: none could be finished if all of them were half moved when it ends.
    if state.moving > 0 && (state.moving >= MOST_MOVING || free < u64::from(state.moving + 1) * unit) {
        return None;
    }
    let movable = rows_to_move(tier, state, free);
    let candidates = || {
        state.current().filter(|s| {
            s.content == Content::Rows
                && s.sealed().is_some()
                && s.scans.load(Ordering::Relaxed) == 0
                && !s.moving.load(Ordering::Relaxed)
                && !s.is_damaged()
                && u64::from(s.live.load(Ordering::Relaxed)) <= movable
        })
    };
    let share = |s: &Segment| share(s, &tier.home.geometry);
    let retained = if state.published.is_empty() { 0 } else { state.retained_bytes() };
    // A publish holds every segment of its moment: a tier that is published keeps room for what is written until the next.
    let short = if state.last_token.is_some() { (cap / 8).max(4 * unit) } else { KEPT_FREE * unit };
    if free < short {
        let most = match (free < 3 * unit, state.last_token.is_some()) {
            (true, true) if state.published_is_in_the_way(&tier.home.geometry) => 0.75,
            (_, false) | (true, true) => 1.0,
            (false, true) => 0.5,
        };
        let score = |s: &Segment| {
            let age = state.next_seq.saturating_sub(s.made_seq).max(1) as f64;
            (1.0 - share(s)) / (1.0 + share(s)) * age
        };
        let best = candidates()
            .filter(|s| s.holds() == 1 && share(s) < 1.0 && share(s) <= most)
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
        let live_share = |s: &Segment| f64::from(s.live.load(Ordering::Relaxed)) / records_of(s);
        let named = candidates().filter(|s| s.holds() > 1 && live_share(s) < 0.6);
        let emptiest = named.min_by(|a, b| live_share(a).total_cmp(&live_share(b)));
        if emptiest.is_some() {
            return emptiest.cloned();
        }
    }
    let rows = |s: &Segment| s.records.load(Ordering::Relaxed);
    let small = || candidates().filter(|s| rows(s) <= tier.home.geometry.rows_per_segment / 4);
    let many = SMALL_SEGMENTS.min(cap / unit / SMALL_SHARE);
    if small().count() as u64 > many { small().min_by_key(|s| rows(s)).cloned() } else { None }
}

/// Records of a segment, of which there is one at least.
fn records_of(segment: &Segment) -> f64 {
    f64::from(segment.records.load(Ordering::Relaxed).max(1))
}

/// How much of a segment is live: of its records, or of those that its bytes take in a full segment where these are more. It is below 1
/// where moving its rows to full segments makes room.
pub(super) fn share(segment: &Segment, geometry: &Geometry) -> f64 {
    let live = f64::from(segment.live.load(Ordering::Relaxed));
    let held = segment.held_bytes() as f64 * f64::from(geometry.rows_per_segment);
    (live / records_of(segment)).min(live * geometry.segment_bytes as f64 / held.max(1.0))
}

/// Rows that fit what is open for rows and what can be opened in `free` bytes, beside those that are being moved.
fn rows_to_move(tier: &Shared, state: &State, free: u64) -> u64 {
    let geometry = &tier.home.geometry;
    let rows_in = |room| geometry.rows_in(room, state.next_seq, state.highest_epoch);
    let open = state.open[..MOST_CLASSES as usize].iter().flatten();
    let left: u64 = open.map(|open| rows_in(open.room).saturating_sub(open.entries.len() as u64)).sum();
    let segments = (free / geometry.segment_bytes).saturating_sub(u64::from(state.moving));
    left + segments * rows_in(geometry.segment_bytes)
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

    /// Move the live records of `victim` as far as there is room. An error means that bytes of it cannot be read, or are not what was
    /// written: then it stays as it is.
    fn move_rows(self: &Arc<Self>, victim: &Arc<Segment>) -> Result<()> {
        for (first, count) in chunks_of(victim) {
            // Write buffers of its rows' classes: nobody can be told once some have moved.
            let buffers = Pool::shared().missing_bytes(usize::from(MOST_CLASSES), self.home.block_bytes);
            memory::room_or_reserve("compact the SSD tier", buffers)?;
            let chunk = Chunk::read(victim, first, count)?;
            Pool::shared().throttle();
            if !self.move_chunk(victim, &chunk)? || victim.live.load(Ordering::Relaxed) == 0 {
                return Ok(());
            }
        }
        // Every record was looked at, and each live one has moved or died since.
        let left = {
            let _counted = self.view();
            victim.live.load(Ordering::Relaxed)
        };
        if left == 0 {
            return Ok(());
        }
        Err(self.live_records_missing(victim, victim.records.load(Ordering::Relaxed), (left, 0)))
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
                match victim.decode(number, bytes) {
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
            let binding = open.segment.binding;
            let (to, room) = open.push(record.id, record.write_seq, record.modified_epoch);
            room.copy_from_slice(bytes);
            victim.binding.rebind(number, (binding, to), room);
            let to = open.segment.location(to);
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
