//! Compaction: moves the live records of a segment to the open segments of their hotness groups, in order, and removes
//! the segment. Copies them unchanged if new records have the same head layout.
//!
//! A few threads serve all tiers of a process, each a segment at a time. So several reads are in flight, and files are
//! removed concurrently. [`choose`] selects the segment.

use std::ops::Range;
use std::sync::{Arc, Weak};

use crate::error::Result;
use crate::io::{ALIGNMENT, BufPool, PooledBuf};
use crate::runtime::memory;
use crate::runtime::process::PerProcess;
use crate::runtime::sync::{Ordering, RwLockWriteGuard};
use crate::ssd::format::record::{HeadFields, HeadWidths, Record, checksums_of, id_of, repack};
use crate::ssd::format::segment_file::SegmentContent;
use crate::ssd::hotness::MAX_HOTNESS_CLASSES;
use crate::ssd::index::{PREFETCH_DISTANCE, RecordLocation, TagMatch};
use crate::ssd::ops::cursor::{CHUNK_BYTES, record_chunks};
use crate::ssd::ops::scan::missing_live_records_error;
use crate::ssd::segment::Segment;
use crate::ssd::segment::open_segment::NewRecord;
use crate::ssd::segment::write_buffer::WriteBufferPool;
use crate::ssd::space::compaction_choice::{CompactionChoice, CompactionView, SegmentView, choose};
use crate::ssd::store::TierInner;
use crate::ssd::store::state::{SegmentStream, TierState};
use crate::ssd::workers::{COMPACTORS, SsdTask};
use crate::types::Id;

/// The compactors' task: compacts a tier as long as that is worthwhile.
struct CompactionTask(Weak<TierInner>);

impl SsdTask for CompactionTask {
    fn run(self: Box<Self>) {
        let Some(tier) = self.0.upgrade() else { return };
        tier.run_background("compaction", || {
            tier.begin_compaction();
            while compact_one(&tier) {}
            tier.context.space.notify_waiters();
        });
    }
}

/// Schedules compaction of this tier.
pub(crate) fn schedule(tier: &Arc<TierInner>) {
    if tier.request_compaction() {
        tier.context.workers.submit_compaction(Box::new(CompactionTask(Arc::downgrade(tier))));
    }
}

/// Schedules compaction of this tier if there is anything to do.
pub(crate) fn schedule_if_worthwhile(tier: &Arc<TierInner>, state: &TierState) {
    if next_choice(tier, state) != CompactionChoice::Nothing {
        schedule(tier);
    }
}

/// Chooses the next segment to compact.
pub(crate) fn next_choice(tier: &TierInner, state: &TierState) -> CompactionChoice {
    choose(&compaction_view(tier, state), segment_views(state))
}

/// Returns the view of the tier for [`choose`].
pub(crate) fn compaction_view(tier: &TierInner, state: &TierState) -> CompactionView {
    let (space, sizing) = (&tier.context.space, &tier.context.sizing);
    let free_bytes = space.free_bytes();
    let highest = state.highest();
    let left: u64 = state.open().of_rows().map(|open| open.rows_left(sizing, &highest)).sum();
    let to_open = (free_bytes / sizing.segment_bytes).saturating_sub(u64::from(state.moving()));
    let rows_in = sizing.min_rows_per_segment(&highest);
    let tombstones = state.segments().tombstones();
    CompactionView {
        can_write: !state.is_closed() && !space.has_failed(),
        cap_bytes: sizing.cap_bytes,
        segment_bytes: sizing.segment_bytes,
        rows_per_segment: rows_in as u32,
        full_bytes: sizing.full_bytes(&highest),
        free_bytes,
        moving: state.moving(),
        rows_to_move: left + to_open * rows_in,
        was_published: state.states().last_commit_id().is_some(),
        states: state.states().len(),
        retained_bytes: if state.states().len() == 0 { 0 } else { state.retained_bytes() },
        tombstone_segments: tombstones.segments,
        tombstone_bytes: tombstones.bytes,
        tombstones_before: tombstones.before,
        next_seq: highest.write_seq,
    }
}

/// Returns the views of the current set's segments for [`choose`].
pub(crate) fn segment_views(state: &TierState) -> impl Iterator<Item = SegmentView> + Clone {
    state.segments().iter().map(|segment| {
        let sealed = segment.sealed().is_some();
        let idle = !segment.has_pending_scans() && !segment.is_moving() && !segment.is_damaged();
        SegmentView {
            slot: segment.slot,
            serial: segment.serial,
            can_move: segment.content == SegmentContent::Rows && sealed && idle,
            sealed,
            records: segment.records(),
            live: segment.live(),
            held_bytes: segment.held_bytes(),
            ref_count: segment.ref_count(),
            made_seq: segment.made_seq,
        }
    })
}

/// Compacts one segment. Returns true if there may be more to do.
pub(crate) fn compact_one(tier: &Arc<TierInner>) -> bool {
    let _compacting = tier.compacting();
    let victim = {
        let mut state = tier.state();
        state.reap();
        let choice = next_choice(tier, &state);
        let chosen = choice.slot().and_then(|slot| state.segments().in_slot(slot)).cloned();
        let Some(victim) = chosen else { return false };
        log_choice(tier, &state, choice, &victim);
        state.begin_moving(&victim);
        // Another thread can take the next one concurrently.
        schedule_if_worthwhile(tier, &state);
        victim
    };
    // It is dropped before the victim, and so before the victim's file is removed.
    let _moving = SegmentMoveGuard { tier, victim: &victim };
    let moved = move_rows(tier, &victim);
    let mut state = tier.state();
    let emptied = victim.live() == 0;
    let failed = moved.is_err();
    if let Err(cause) = moved {
        tracing::debug!(
            table = tier.identity.table,
            serial = victim.serial,
            "compaction leaves a segment alone: {cause}"
        );
        victim.set_damaged(cause);
    }
    state.reap();
    drop(state);
    emptied || failed
}

/// Logs the choice and the numbers behind it.
fn log_choice(tier: &TierInner, state: &TierState, choice: CompactionChoice, victim: &Segment) {
    if !tracing::enabled!(tracing::Level::DEBUG) {
        return;
    }
    let view = compaction_view(tier, state);
    let share = segment_views(state).find(|s| s.slot == victim.slot).map_or(0.0, |s| s.utilization(&view));
    tracing::debug!(
        table = tier.identity.table,
        reason = choice.reason(),
        serial = victim.serial,
        live = victim.live(),
        records = victim.records(),
        share = %format_args!("{share:.3}"),
        names = victim.ref_count(),
        free_bytes = view.free_bytes,
        rows_to_move = view.rows_to_move,
        moving = view.moving,
        states = view.states,
        retained_bytes = view.retained_bytes,
        tombstone_bytes = view.tombstone_bytes,
        "compaction moves a segment"
    );
}

/// Moves the live records of `victim`, as long as there is space. Returns an error if bytes of it cannot be read or are
/// corrupted. Then the segment stays unchanged.
fn move_rows(tier: &Arc<TierInner>, victim: &Arc<Segment>) -> Result<()> {
    for (first, count) in record_chunks(victim, victim.records()) {
        // The memory of write buffers of its rows' hotness groups is checked here, because errors cannot be reported
        // after some rows have moved.
        let buffers =
            WriteBufferPool::of_process().missing_bytes(usize::from(MAX_HOTNESS_CLASSES), tier.context.block_bytes);
        let is_repacked = victim.format.widths != tier.view().widths();
        let repacked = if is_repacked { count as usize * tier.context.sizing.row_bytes } else { 0 };
        memory::check_system_memory_or_reserve("compact the SSD tier", buffers + repacked)?;
        let chunk = RecordChunk::read(victim, first, count)?;
        WriteBufferPool::of_process().throttle();
        if !move_chunk(tier, victim, &chunk)? || victim.live() == 0 {
            return Ok(());
        }
    }
    // Every record was read, and each live one has been moved or has become dead since. Under the lock the count is
    // consistent.
    let left = {
        let _counted = tier.view();
        victim.live()
    };
    if left == 0 {
        return Ok(());
    }
    Err(missing_live_records_error(tier, victim, victim.records(), (left, 0)))
}

/// Moves the live records of a chunk. Returns false when there is no more space.
fn move_chunk(tier: &Arc<TierInner>, victim: &Segment, chunk: &RecordChunk) -> Result<bool> {
    let (records, damage) = live_records(tier, victim, chunk);
    // Memory is allocated before any change.
    let mut moved = CompactedRows::with_capacity(records.len());
    let (mut state, repacked) = lock_repacked(tier, victim, &records);
    if state.is_closed() || tier.context.space.has_failed() {
        return Ok(false);
    }
    let classes = tier.hotness_classes(&state);
    let mut has_space = true;
    // The stream for the rows of each hotness group, and the number of further records that fit each stream.
    let (mut streams, mut left) = ([None; MAX_HOTNESS_CLASSES as usize], [0; MAX_HOTNESS_CLASSES as usize]);
    for (at, LiveRecord { number, bytes, record, tag_match: found }) in records.iter().enumerate() {
        if let Some(later) = records.get(at + PREFETCH_DISTANCE) {
            state.index().prefetch_match(&later.tag_match);
        }
        let number = *number;
        if !state.is_live(record.head.id, found, (victim, number)) {
            continue;
        }
        let age = state.next_seq().saturating_sub(record.head.write_seq);
        let class = classes.after_move(victim.hotness.min(classes.count - 1), age);
        let target = streams[class as usize].filter(|target| left[*target as usize] > 0);
        let target = target.or_else(|| {
            // An error here is a failed write, which the space tracker keeps. The segment is not the cause.
            let Some(SegmentStream::Rows(target)) = tier.prepare_stream_for_move(&mut state, class).unwrap_or(None)
            else {
                return None;
            };
            left[target as usize] = state.records_left(SegmentStream::Rows(target));
            Some(target)
        });
        streams[class as usize] = target;
        let Some(target) = target else {
            has_space = false;
            break;
        };
        let HeadFields { id, write_seq, modified_epoch, last_step, .. } = record.head;
        let row = |bytes| NewRecord { id, write_seq, modified_epoch, last_step, bytes };
        moved.locations.push(match &repacked {
            None => state.copy_row(SegmentStream::Rows(target), row(bytes), (victim, number)),
            Some(repacked) => state.write_row(SegmentStream::Rows(target), row(repacked.record(at))),
        });
        moved.ids.push(id);
        moved.matches.push(*found);
        left[target as usize] -= 1;
    }
    state.point_to(moved.ids.iter().map(|id| (*id, true)), &moved.matches, &moved.locations);
    state.count_dead();
    drop(state);
    let record_bytes = repacked.as_ref().map_or(victim.record_bytes, |repacked| repacked.record_bytes);
    let moved_bytes = (moved.ids.len() * record_bytes) as u64;
    tier.counters.compaction_bytes.fetch_add(moved_bytes, Ordering::Relaxed);
    damage.map_or(Ok(has_space), Err)
}

/// Locks the tier's state. Returns copies of `records` with its head widths, if those of `victim` differ.
fn lock_repacked<'a>(
    tier: &'a TierInner,
    victim: &Segment,
    records: &[LiveRecord<'_>],
) -> (RwLockWriteGuard<'a, TierState>, Option<RepackedRecords>) {
    let mut repacked: Option<RepackedRecords> = None;
    loop {
        let state = tier.state();
        let widths = state.widths();
        if repacked.as_ref().map_or(victim.format.widths, |repacked| repacked.widths) == widths {
            return (state, repacked);
        }
        drop(state);
        repacked = Some(RepackedRecords::of(records, widths));
    }
}

/// Rows that were copied to other segments: the lookup result of each, and its new location.
struct CompactedRows {
    ids: Vec<Id>,
    matches: Vec<TagMatch>,
    locations: Vec<RecordLocation>,
}

impl CompactedRows {
    fn with_capacity(rows: usize) -> Self {
        Self { ids: Vec::with_capacity(rows), matches: Vec::with_capacity(rows), locations: Vec::with_capacity(rows) }
    }
}

/// Copies of records with the current head widths, which differ from those of the records' segment.
struct RepackedRecords {
    widths: HeadWidths,
    record_bytes: usize,
    bytes: Vec<u8>,
}

impl RepackedRecords {
    fn of(records: &[LiveRecord<'_>], widths: HeadWidths) -> Self {
        let payload_bytes = records.first().map_or(0, |live| live.record.payload.len());
        let record_bytes = widths.bytes() + payload_bytes;
        let mut bytes = vec![0; records.len() * record_bytes];
        repack(&mut bytes, records.iter().map(|live| &live.record), widths);
        Self { widths, record_bytes, bytes }
    }

    fn record(&self, at: usize) -> &[u8] {
        &self.bytes[at * self.record_bytes..][..self.record_bytes]
    }
}

/// A record of a chunk that the index pointed to, and the lookup result of its id.
struct LiveRecord<'a> {
    number: u32,
    bytes: &'a [u8],
    record: Record<'a>,
    tag_match: TagMatch,
}

/// Returns the records of a chunk that the index points to, verified, and the first error of a corrupted one. A dead
/// record stays dead.
fn live_records<'a>(
    tier: &TierInner,
    victim: &Segment,
    chunk: &'a RecordChunk,
) -> (Vec<LiveRecord<'a>>, Option<crate::Error>) {
    let maybe_live: Vec<(u32, &[u8])> = {
        let state = tier.view();
        let dead = state.segments().dead_in(victim.slot);
        let is_known_dead = |number: u32| dead.is_some_and(|dead| dead.contains(number));
        chunk.records(victim).filter(|(number, _)| !is_known_dead(*number)).collect()
    };
    let ids: Vec<Id> = maybe_live.iter().map(|(_, record)| id_of(record)).collect();
    let mut found = vec![TagMatch::NONE; ids.len()];
    tier.view().index().find_batch(&ids, &mut found);
    let found = maybe_live.into_iter().zip(found);
    let live = found.filter(|((number, _), found)| found.location() == Some(victim.location(*number)));
    let live: Vec<(u32, &[u8], TagMatch)> = live.map(|((number, bytes), found)| (number, bytes, found)).collect();
    let (mut records, mut damage) = (Vec::with_capacity(live.len()), None);
    checksums_of(live.iter().map(|(_, bytes, _)| *bytes), |at, crc| {
        let (number, bytes, found) = live[at];
        match victim.decode_with(number, bytes, crc) {
            Ok(record) => records.push(LiveRecord { number, bytes, record, tag_match: found }),
            Err(error) => drop(damage.get_or_insert(error)),
        }
    });
    (records, damage)
}

/// Marks a segment as being moved, until it is dropped.
struct SegmentMoveGuard<'a> {
    tier: &'a TierInner,
    victim: &'a Segment,
}

impl Drop for SegmentMoveGuard<'_> {
    fn drop(&mut self) {
        self.tier.state().end_moving(self.victim);
        self.tier.context.space.notify_waiters();
    }
}

/// Consecutive records of a segment, in their format on disk.
struct RecordChunk {
    first: u32,
    bytes: PooledBuf,
    /// Position of the records in `bytes`.
    range: Range<usize>,
}

impl RecordChunk {
    /// Reads `count` records from number `first` on, in complete sectors if the file has them.
    fn read(segment: &Segment, first: u32, count: u32) -> Result<Self> {
        static BUFFERS: PerProcess<Arc<BufPool>> = PerProcess::new();
        let (start, end) = (segment.offset(first), segment.offset(first + count));
        let from = start - start % ALIGNMENT as u64;
        let whole = end.next_multiple_of(ALIGNMENT as u64);
        let to = segment.sealed().filter(|sealed| whole <= sealed.file_bytes).map_or(end, |_| whole);
        let buffers = BUFFERS.get(|| Ok(Arc::new(BufPool::new(CHUNK_BYTES + 2 * ALIGNMENT, COMPACTORS as usize))))?;
        let mut bytes = buffers.take_at_least((to - from) as usize)?;
        segment.file.read_at(from, &mut bytes[..(to - from) as usize])?;
        Ok(Self { first, bytes, range: (start - from) as usize..(end - from) as usize })
    }

    /// The records and their numbers.
    fn records(&self, segment: &Segment) -> impl Iterator<Item = (u32, &[u8])> + Clone {
        (self.first..).zip(self.bytes[self.range.clone()].chunks_exact(segment.record_bytes))
    }
}
