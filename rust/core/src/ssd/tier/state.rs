//! What changes under a tier's lock: the index, the segments that it points into, and what counts them.
//!
//! Its operations keep these together. Where a record dies, [`TierState::count_dead`] is called before the lock is given up.

use std::sync::Arc;

use crate::error::Result;
use crate::ssd::classes::HotnessClasses;
use crate::ssd::format::footer::LastStep;
use crate::ssd::format::head::{HeadWidths, RecordMaxima};
use crate::ssd::format::record::encode_tombstone;
use crate::ssd::format::segment::SegmentContent;
use crate::ssd::index::{PREFETCH_DISTANCE, RecordLocation, TagIndex, TagMatch};
use crate::ssd::segment::file::Segment;
use crate::ssd::segment::open::{NewRecord, OpenSegment};
use crate::ssd::tier::moment::{SsdSnapshotState, UnreadSegments};
use crate::ssd::tier::segments::CurrentSegments;
use crate::ssd::tier::states::{PublishedState, PublishedStates};
use crate::ssd::tier::streams::{OpenSegments, SegmentStream};
use crate::ssd::tier::tally::ScanTally;
use crate::types::Id;

/// The state of a tier, under its lock.
#[derive(Debug)]
pub(crate) struct TierState {
    index: TagIndex,
    segments: CurrentSegments,
    open: OpenSegments,
    states: PublishedStates,
    /// The next record's `write_seq`.
    next_seq: u64,
    /// The next segment's serial.
    next_serial: u64,
    /// No record has more than this, but for `write_seq`.
    highest: RecordMaxima,
    /// Segments whose rows compaction is moving now.
    moving: u32,
    /// See [`HotnessClasses::after_rewrite`].
    dither: f32,
    closed: bool,
    /// The moment whose rows are being read, if there is one.
    snapshot: Option<SsdSnapshotState>,
    /// What the scans under way have still to find.
    tallies: Vec<Arc<ScanTally>>,
}

impl TierState {
    /// The state of an empty tier. `index` is empty too.
    pub(crate) fn new(index: TagIndex) -> Self {
        Self {
            index,
            segments: CurrentSegments::default(),
            open: OpenSegments::default(),
            states: PublishedStates::default(),
            next_seq: 1,
            next_serial: 1,
            highest: RecordMaxima::default(),
            moving: 0,
            dither: 0.0,
            closed: false,
            snapshot: None,
            tallies: Vec::new(),
        }
    }

    /// The state of a tier that `segments` hold, to whose records `index` points. None has a larger `write_seq` or epoch than these.
    pub(crate) fn restored(
        index: TagIndex,
        segments: &[Arc<Segment>],
        (highest_seq, highest_epoch): (u64, u32),
    ) -> Self {
        let rows = segments.iter().filter(|segment| segment.content == SegmentContent::Rows && segment.records() > 0);
        let highest = rows.fold(RecordMaxima::default(), |highest, segment| highest.max(segment.highest()));
        let highest = RecordMaxima { modified_epoch: highest_epoch, ..highest };
        let mut state = Self { next_seq: highest_seq + 1, highest, ..Self::new(index) };
        state.reserve_serials(segments);
        for segment in segments {
            segment.add_ref();
            state.segments.add(segment.clone());
            match segment.content {
                SegmentContent::Rows if segment.live() == 0 => state.segments.mark_emptied(segment.slot),
                SegmentContent::Rows => {}
                SegmentContent::Tombstones => state.segments.add_tombstones(segment.clone(), state.next_serial),
            }
        }
        state
    }

    /// Take over the states that a resume found, oldest first.
    pub(crate) fn resume(&mut self, states: PublishedStates) {
        let named: Vec<Arc<Segment>> = states.segments().cloned().collect();
        self.reserve_serials(&named);
        self.states = states;
    }

    /// Give no segment the serial of one of these.
    fn reserve_serials(&mut self, segments: &[Arc<Segment>]) {
        let next = segments.iter().map(|segment| segment.serial + 1).max();
        self.next_serial = self.next_serial.max(next.unwrap_or(0));
    }

    // ---- looking

    /// Where the newest record of each id is.
    #[inline]
    pub(crate) fn index(&self) -> &TagIndex {
        &self.index
    }

    /// Rows here.
    pub(crate) fn rows(&self) -> u64 {
        self.index.len() as u64
    }

    /// The current set.
    #[inline]
    pub(crate) fn segments(&self) -> &CurrentSegments {
        &self.segments
    }

    /// The open segments.
    pub(crate) fn open(&self) -> &OpenSegments {
        &self.open
    }

    /// The published states.
    pub(crate) fn states(&self) -> &PublishedStates {
        &self.states
    }

    /// The moment whose rows are being read, if there is one.
    pub(crate) fn snapshot(&self) -> Option<&SsdSnapshotState> {
        self.snapshot.as_ref()
    }

    /// The next record's `write_seq`.
    pub(crate) fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// The next record has no more than this. It has more only where the tier was told so ([`TierState::raise_highest`]).
    #[inline]
    pub(crate) fn highest(&self) -> RecordMaxima {
        RecordMaxima { write_seq: self.next_seq, ..self.highest }
    }

    /// Widths of the heads of rows' records that are written now. They never become less.
    pub(crate) fn widths(&self) -> HeadWidths {
        HeadWidths::of_rows(&self.highest())
    }

    /// Segments whose rows compaction is moving now.
    pub(crate) fn moving(&self) -> u32 {
        self.moving
    }

    /// Whether the tier is closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// The classes of rows, `count` of them, for as many rows as there are now.
    pub(crate) fn hotness_classes(&self, count: u8) -> HotnessClasses {
        HotnessClasses { count, rows: self.rows() }
    }

    /// Bytes of files that only published states need.
    pub(crate) fn retained_bytes(&self) -> u64 {
        let is_current = |segment: &&Arc<Segment>| {
            self.segments.in_slot(segment.slot).is_some_and(|current| Arc::ptr_eq(current, segment))
        };
        let mut retained: Vec<&Arc<Segment>> = self.states.segments().filter(|segment| !is_current(segment)).collect();
        retained.sort_unstable_by_key(|segment| segment.serial);
        retained.dedup_by_key(|segment| segment.serial);
        retained.iter().map(|segment| segment.held_bytes()).sum()
    }

    /// Whether `stream` has no open segment with room for one more record.
    #[inline]
    pub(crate) fn is_full(&self, stream: SegmentStream) -> bool {
        self.open.get(stream).is_none_or(|open| open.is_full(&self.highest()))
    }

    // ---- records

    /// Have memory for `more` ids that are not here yet.
    ///
    /// Errors: `Kind::Memory`, and nothing has changed.
    pub(crate) fn reserve(&mut self, more: usize) -> Result<()> {
        self.index.reserve(more)
    }

    /// Take `records` numbers for records; the first of them.
    pub(crate) fn take_seqs(&mut self, records: u64) -> u64 {
        let first = self.next_seq;
        self.next_seq += records;
        first
    }

    /// The next of a series that is spread evenly over 0 to 1: multiples of the golden ratio.
    pub(crate) fn next_dither(&mut self) -> f32 {
        self.dither = (self.dither + 0.618_034).fract();
        self.dither
    }

    /// Rows that have no more than this are about to be written.
    pub(crate) fn raise_highest(&mut self, rows: RecordMaxima) {
        self.highest = self.highest.max(rows);
    }

    /// How many more records the open segment of `stream` takes; 0 where there is none.
    pub(crate) fn records_left(&self, stream: SegmentStream) -> usize {
        self.open.get(stream).map_or(0, |open| open.records_left(&self.highest()))
    }

    /// Write a row's record to a stream that has room, and return where it is. The index does not point there yet: see
    /// [`TierState::point_to`].
    #[inline]
    pub(crate) fn write_row(&mut self, stream: SegmentStream, row: NewRecord<'_>) -> RecordLocation {
        self.open.get_mut(stream).expect("just made ready").write_row(row)
    }

    /// As [`TierState::write_row`], of a copy of the live record `number` of `victim`, which was checked.
    pub(crate) fn copy_row(
        &mut self,
        stream: SegmentStream,
        row: NewRecord<'_>,
        source: (&Segment, u32),
    ) -> RecordLocation {
        self.open.get_mut(stream).expect("just made ready").copy_row(row, source)
    }

    /// Point the index to records that were written. `found` is what the index had for each id, where an older version of it is `known` to be
    /// here; else it is not here.
    pub(crate) fn point_to(
        &mut self,
        rows: impl Iterator<Item = (Id, bool)> + Clone,
        found: &[TagMatch],
        to: &[RecordLocation],
    ) {
        let mut ahead = rows.clone().zip(found).skip(PREFETCH_DISTANCE);
        for (((id, known), found), location) in rows.zip(found).zip(to) {
            match ahead.next() {
                Some(((_, true), found)) => self.index.prefetch_match(found),
                Some(((id, false), _)) => self.index.prefetch(id),
                None => {}
            }
            match if known { self.index.replace_match(id, found, *location) } else { None } {
                Some(older) => self.mark_dead(older),
                None => self.index.insert(id, *location),
            }
        }
    }

    /// Whether the index, which had this for an id, points to its record number `number` of `victim`.
    #[inline]
    pub(crate) fn is_live(&mut self, id: Id, found: &TagMatch, (victim, number): (&Segment, u32)) -> bool {
        self.index.is_match_at(id, found, victim.location(number))
    }

    /// Remove an id, and write its tombstone to the open segment of tombstones, which has room; whether the id was here.
    pub(crate) fn write_tombstone(&mut self, id: Id) -> bool {
        if !self.remove_without_tombstone(id) {
            return false;
        }
        let widths = OpenSegment::widths_for(SegmentContent::Tombstones, &self.highest());
        let (seq, epoch) = (self.take_seqs(1), self.highest.modified_epoch);
        let open = self.open.get_mut(SegmentStream::Tombstones).expect("just made ready");
        let binding = open.segment().format.binding;
        let (record, bytes) = open.push(id, seq, epoch, LastStep::UNKNOWN);
        encode_tombstone(bytes, id, epoch, (widths, seq));
        binding.bind(record, bytes);
        true
    }

    /// Remove an id without a tombstone; whether it was here.
    pub(crate) fn remove_without_tombstone(&mut self, id: Id) -> bool {
        let location = self.index.remove(id);
        if let Some(location) = location {
            self.mark_dead(location);
        }
        location.is_some()
    }

    /// The record at `location` is no longer the newest of its id.
    #[inline]
    fn mark_dead(&mut self, location: RecordLocation) {
        if let Some(moment) = &mut self.snapshot {
            moment.mark(location);
        }
        self.tallies.iter().for_each(|tally| tally.remove_dead(location));
        self.segments.mark_dead(location);
    }

    /// Count the records that died since the last call.
    pub(crate) fn count_dead(&mut self) {
        self.segments.count_dead();
    }

    /// Forget all rows.
    pub(crate) fn clear(&mut self) {
        self.index.clear();
        self.tallies.drain(..).for_each(|tally| tally.end());
        // The writers find that nobody names the segments any more, and give their buffers back.
        for stream in SegmentStream::all() {
            if let Some(open) = self.open.take(stream) {
                open.abandon();
            }
        }
        self.segments.clear();
    }

    // ---- segments

    /// The serial of a segment of `stream` that is to be opened now, the widths of its records' heads, and the `write_seq` of the first one.
    pub(crate) fn next_segment(&self, stream: SegmentStream) -> (u64, HeadWidths, u64) {
        (self.next_serial, OpenSegment::widths_for(stream.content(), &self.highest()), self.next_seq)
    }

    /// Add an open segment, which has the serial of [`TierState::next_segment`].
    pub(crate) fn add_open(&mut self, stream: SegmentStream, open: OpenSegment) {
        self.next_serial += 1;
        self.segments.add(open.segment().clone());
        self.open.put(stream, open);
    }

    /// Whether `stream` has an open segment with room. One that is full is closed.
    pub(crate) fn has_writable_segment(&mut self, stream: SegmentStream) -> bool {
        if self.is_full(stream) {
            self.seal(stream);
        }
        self.open.get(stream).is_some()
    }

    /// Close the open segment of a stream. The writers finish it.
    pub(crate) fn seal(&mut self, stream: SegmentStream) {
        let Some(open) = self.open.take(stream) else { return };
        let segment = open.seal();
        if stream == SegmentStream::Tombstones {
            self.segments.add_tombstones(segment, self.next_serial);
        } else if segment.live() == 0 {
            self.segments.mark_emptied(segment.slot);
        }
    }

    /// Close all open segments.
    pub(crate) fn seal_all(&mut self) {
        for stream in SegmentStream::all() {
            self.seal(stream);
        }
    }

    /// The stream of an open segment that holds dead rows, or that takes no more because the heads of records that are written now are
    /// wider. Among several, that of the rows that are rewritten least often comes first.
    pub(crate) fn open_stream_holding_space(&self) -> Option<SegmentStream> {
        let highest = self.highest();
        let is_in_the_way = |open: &OpenSegment| {
            open.segment().content == SegmentContent::Rows && open.segment().dead() > 0
                || !open.has_current_widths(&highest)
        };
        let mut streams = SegmentStream::of_rows().rev().chain([SegmentStream::Tombstones]);
        streams.find(|stream| self.open.get(*stream).is_some_and(is_in_the_way))
    }

    /// Hand in the buffers of open segments, so that none that is half filled is kept.
    pub(crate) fn spill(&mut self) {
        self.open.spill();
    }

    /// Let go of segments without live rows, and of tombstones that nothing needs any more.
    pub(crate) fn reap(&mut self) {
        self.segments.reap();
    }

    /// Let go of tombstones that nothing needs any more.
    pub(crate) fn prune_tombstones(&mut self) {
        self.segments.prune_tombstones();
    }

    /// Close the open segments; the current set, the last `write_seq` in it, and its rows.
    pub(crate) fn seal_current_set(&mut self) -> (Vec<Arc<Segment>>, u64, u64) {
        self.seal_all();
        self.reap();
        (self.segments.iter().cloned().collect(), self.next_seq - 1, self.rows())
    }

    /// Compaction begins to move the rows of a segment.
    pub(crate) fn begin_moving(&mut self, segment: &Segment) {
        self.moving += 1;
        segment.set_moving(true);
    }

    /// Compaction has ended to move the rows of a segment.
    pub(crate) fn end_moving(&mut self, segment: &Segment) {
        self.moving -= 1;
        segment.set_moving(false);
    }

    /// Close the tier: nothing is written any more.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        self.seal_all();
    }

    // ---- published states

    /// A state was published.
    pub(crate) fn add_state(&mut self, published: PublishedState) {
        self.states.add(published);
    }

    /// The oldest state is about to be given up for room.
    pub(crate) fn mark_oldest_dropped(&mut self) {
        self.states.mark_oldest_dropped();
    }

    /// Let go of the state at `position`, oldest first. Its file is gone from the disk, durably.
    pub(crate) fn remove_state(&mut self, position: usize) {
        self.states.remove(position);
    }

    // ---- scans and the moment

    /// Hold the moment of now. None is held.
    pub(crate) fn begin_snapshot(&mut self, snapshot: SsdSnapshotState) {
        debug_assert!(self.snapshot.is_none(), "one moment is held at a time");
        self.snapshot = Some(snapshot);
    }

    /// Let go of the moment.
    pub(crate) fn end_snapshot(&mut self) -> Option<SsdSnapshotState> {
        self.snapshot.take()
    }

    /// The rows of a segment were read for the moment of `unread`, or cannot be.
    pub(crate) fn end_snapshot_read(&mut self, unread: &Arc<UnreadSegments>, slot: u32) {
        if let Some(moment) = &mut self.snapshot {
            moment.end_read(unread, slot);
        }
    }

    /// A scan begins; every record that dies is taken off its tally.
    pub(crate) fn begin_scan(&mut self, tally: Arc<ScanTally>) {
        self.tallies.push(tally);
    }

    /// A scan has ended.
    pub(crate) fn end_scan(&mut self, tally: &Arc<ScanTally>) {
        self.tallies.retain(|other| !Arc::ptr_eq(other, tally));
    }
}
