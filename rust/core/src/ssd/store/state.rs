//! The data under a tier's lock: the index, the segments that it points into, and their counters.
//!
//! Its operations keep these consistent. After records become dead, [`TierState::count_dead`] must be called before the
//! lock is released.

use std::sync::Arc;

use crate::error::Result;
use crate::ssd::format::footer::LastStep;
use crate::ssd::format::record::{HeadWidths, RecordMaxima, encode_tombstone};
use crate::ssd::format::segment_file::SegmentContent;
use crate::ssd::hotness::{HotnessClasses, MAX_HOTNESS_CLASSES};
use crate::ssd::index::{PREFETCH_DISTANCE, RecordLocation, TagIndex, TagMatch};
use crate::ssd::segment::Segment;
use crate::ssd::segment::open_segment::{NewRecord, OpenSegment};
use crate::ssd::store::scan_state::ScanTally;
use crate::ssd::store::segment_sets::{CurrentSegments, PublishedStates};
use crate::ssd::store::snapshot::{SsdSnapshotState, UnreadSegments};
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
    /// Maxima of all records, except `write_seq`.
    highest: RecordMaxima,
    /// Number of segments whose rows compaction is moving.
    moving: u32,
    /// See [`HotnessClasses::after_rewrite`].
    dither: f32,
    closed: bool,
    /// The snapshot whose rows are being read, if there is one.
    snapshot: Option<SsdSnapshotState>,
    /// The tallies of the scans in progress.
    tallies: Vec<Arc<ScanTally>>,
}

impl TierState {
    /// Creates the state of an empty tier. `index` is empty too.
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

    /// Creates the state of a tier with `segments`, to whose records `index` points, and with these maxima of
    /// `write_seq` and epoch.
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

    /// Adopts the states that a resume found, oldest first.
    pub(crate) fn resume(&mut self, states: PublishedStates) {
        let segments: Vec<Arc<Segment>> = states.segments().cloned().collect();
        self.reserve_serials(&segments);
        self.states = states;
    }

    /// Excludes the serials of these segments for new segments.
    fn reserve_serials(&mut self, segments: &[Arc<Segment>]) {
        let next = segments.iter().map(|segment| segment.serial + 1).max();
        self.next_serial = self.next_serial.max(next.unwrap_or(0));
    }

    // ---- reading

    /// The index, with the location of the latest record of each id.
    #[inline]
    pub(crate) fn index(&self) -> &TagIndex {
        &self.index
    }

    /// Number of rows in this tier.
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

    /// The snapshot whose rows are being read, if there is one.
    pub(crate) fn snapshot(&self) -> Option<&SsdSnapshotState> {
        self.snapshot.as_ref()
    }

    /// The next record's `write_seq`.
    pub(crate) fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// Maxima of the records, including the next one, unless [`TierState::raise_highest`] raises them.
    #[inline]
    pub(crate) fn highest(&self) -> RecordMaxima {
        RecordMaxima { write_seq: self.next_seq, ..self.highest }
    }

    /// Widths of the heads of new rows' records. They never decrease.
    pub(crate) fn widths(&self) -> HeadWidths {
        HeadWidths::of_rows(&self.highest())
    }

    /// Number of segments whose rows compaction is moving.
    pub(crate) fn moving(&self) -> u32 {
        self.moving
    }

    /// True if the tier is closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Returns the `count` hotness groups for the present number of rows.
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

    /// True if `stream` has no open segment with space for one more record.
    #[inline]
    pub(crate) fn is_full(&self, stream: SegmentStream) -> bool {
        self.open.get(stream).is_none_or(|open| open.is_full(&self.highest()))
    }

    // ---- records

    /// Reserves memory for `more` new ids.
    ///
    /// Errors: `Kind::Memory`, without any change.
    pub(crate) fn reserve(&mut self, more: usize) -> Result<()> {
        self.index.reserve(more)
    }

    /// Takes `records` sequence numbers. Returns the first of them.
    pub(crate) fn take_seqs(&mut self, records: u64) -> u64 {
        let first = self.next_seq;
        self.next_seq += records;
        first
    }

    /// Returns the next element of a series that is evenly distributed over 0 to 1: multiples of the golden ratio.
    pub(crate) fn next_dither(&mut self) -> f32 {
        self.dither = (self.dither + 0.618_034).fract();
        self.dither
    }

    /// Raises the maxima before rows up to these maxima are written.
    pub(crate) fn raise_highest(&mut self, rows: RecordMaxima) {
        self.highest = self.highest.max(rows);
    }

    /// Number of further records that fit the open segment of `stream`; 0 if there is none.
    pub(crate) fn records_left(&self, stream: SegmentStream) -> usize {
        self.open.get(stream).map_or(0, |open| open.records_left(&self.highest()))
    }

    /// Writes a row's record to a stream that has space, and returns its location. The index does not point there yet:
    /// see [`TierState::point_to`].
    #[inline]
    pub(crate) fn write_row(&mut self, stream: SegmentStream, row: NewRecord<'_>) -> RecordLocation {
        self.open.get_mut(stream).expect("just made ready").write_row(row)
    }

    /// Like [`TierState::write_row`], for a copy of the verified live record `number` of `victim`.
    pub(crate) fn copy_row(
        &mut self,
        stream: SegmentStream,
        row: NewRecord<'_>,
        source: (&Segment, u32),
    ) -> RecordLocation {
        self.open.get_mut(stream).expect("just made ready").copy_row(row, source)
    }

    /// Points the index to written records. `found` has the lookup result of each id with a `known` older version in
    /// the tier; other ids are absent.
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

    /// True if the index points to record number `number` of `victim` for an id with the lookup result `found`.
    #[inline]
    pub(crate) fn is_live(&mut self, id: Id, found: &TagMatch, (victim, number): (&Segment, u32)) -> bool {
        self.index.is_match_at(id, found, victim.location(number))
    }

    /// Removes an id, and writes its tombstone to the open segment of tombstones, which has space. Returns true if the
    /// id was present.
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

    /// Removes an id without a tombstone. Returns true if it was present.
    pub(crate) fn remove_without_tombstone(&mut self, id: Id) -> bool {
        let location = self.index.remove(id);
        if let Some(location) = location {
            self.mark_dead(location);
        }
        location.is_some()
    }

    /// Marks the record at `location`, which is not the latest of its id.
    #[inline]
    fn mark_dead(&mut self, location: RecordLocation) {
        if let Some(snapshot) = &mut self.snapshot {
            snapshot.mark(location);
        }
        self.tallies.iter().for_each(|tally| tally.remove_dead(location));
        self.segments.mark_dead(location);
    }

    /// Counts the records that became dead since the last call.
    pub(crate) fn count_dead(&mut self) {
        self.segments.count_dead();
    }

    /// Removes all rows.
    pub(crate) fn clear(&mut self) {
        self.index.clear();
        self.tallies.drain(..).for_each(|tally| tally.end());
        // The writers find that the segments are unreferenced, and return their buffers.
        for stream in SegmentStream::all() {
            if let Some(open) = self.open.take(stream) {
                open.abandon();
            }
        }
        self.segments.clear();
    }

    // ---- segments

    /// The serial of the next segment of `stream`, the widths of its records' heads, and the `write_seq` of its first
    /// record.
    pub(crate) fn next_segment(&self, stream: SegmentStream) -> (u64, HeadWidths, u64) {
        (self.next_serial, OpenSegment::widths_for(stream.content(), &self.highest()), self.next_seq)
    }

    /// Adds an open segment with the serial of [`TierState::next_segment`].
    pub(crate) fn add_open(&mut self, stream: SegmentStream, open: OpenSegment) {
        self.next_serial += 1;
        self.segments.add(open.segment().clone());
        self.open.put(stream, open);
    }

    /// True if `stream` has an open segment with space. Seals a full one.
    pub(crate) fn has_writable_segment(&mut self, stream: SegmentStream) -> bool {
        if self.is_full(stream) {
            self.seal(stream);
        }
        self.open.get(stream).is_some()
    }

    /// Seals the open segment of a stream. The writers complete it.
    pub(crate) fn seal(&mut self, stream: SegmentStream) {
        let Some(open) = self.open.take(stream) else { return };
        let segment = open.seal();
        if stream == SegmentStream::Tombstones {
            self.segments.add_tombstones(segment, self.next_serial);
        } else if segment.live() == 0 {
            self.segments.mark_emptied(segment.slot);
        }
    }

    /// Seals all open segments.
    pub(crate) fn seal_all(&mut self) {
        for stream in SegmentStream::all() {
            self.seal(stream);
        }
    }

    /// Returns the stream of an open segment that has dead rows, or that is full because the heads of new records are
    /// wider. Among several, prefers that of the rows that are rewritten least often.
    pub(crate) fn open_stream_holding_space(&self) -> Option<SegmentStream> {
        let highest = self.highest();
        let is_in_the_way = |open: &OpenSegment| {
            open.segment().content == SegmentContent::Rows && open.segment().dead() > 0
                || !open.has_current_widths(&highest)
        };
        let mut streams = SegmentStream::of_rows().rev().chain([SegmentStream::Tombstones]);
        streams.find(|stream| self.open.get(*stream).is_some_and(is_in_the_way))
    }

    /// Submits the buffers of open segments, so that no half-filled one is kept.
    pub(crate) fn spill(&mut self) {
        self.open.spill();
    }

    /// Removes segments without live rows, and tombstones that are not needed.
    pub(crate) fn reap(&mut self) {
        self.segments.reap();
    }

    /// Removes tombstones that are not needed.
    pub(crate) fn prune_tombstones(&mut self) {
        self.segments.prune_tombstones();
    }

    /// Seals the open segments. Returns the current set, the last `write_seq` in it, and its number of rows.
    pub(crate) fn seal_current_set(&mut self) -> (Vec<Arc<Segment>>, u64, u64) {
        self.seal_all();
        self.reap();
        (self.segments.iter().cloned().collect(), self.next_seq - 1, self.rows())
    }

    /// Marks a segment as being moved by compaction.
    pub(crate) fn begin_moving(&mut self, segment: &Segment) {
        self.moving += 1;
        segment.set_moving(true);
    }

    /// Ends [`TierState::begin_moving`].
    pub(crate) fn end_moving(&mut self, segment: &Segment) {
        self.moving -= 1;
        segment.set_moving(false);
    }

    /// Closes the tier, which ends all writes.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        self.seal_all();
    }

    // ---- published states

    /// The published states, for changes.
    pub(crate) fn states_mut(&mut self) -> &mut PublishedStates {
        &mut self.states
    }

    // ---- scans and snapshots

    /// Starts a snapshot. There must be none.
    pub(crate) fn begin_snapshot(&mut self, snapshot: SsdSnapshotState) {
        debug_assert!(self.snapshot.is_none(), "there is at most one snapshot at a time");
        self.snapshot = Some(snapshot);
    }

    /// Ends the snapshot.
    pub(crate) fn end_snapshot(&mut self) -> Option<SsdSnapshotState> {
        self.snapshot.take()
    }

    /// Marks a segment as read for the snapshot of `unread`, even after a failed read.
    pub(crate) fn end_snapshot_read(&mut self, unread: &Arc<UnreadSegments>, slot: u32) {
        if let Some(snapshot) = &mut self.snapshot {
            snapshot.end_read(unread, slot);
        }
    }

    /// Registers a scan's tally. Every record that becomes dead is subtracted from it.
    pub(crate) fn begin_scan(&mut self, tally: Arc<ScanTally>) {
        self.tallies.push(tally);
    }

    /// Unregisters a scan's tally.
    pub(crate) fn end_scan(&mut self, tally: &Arc<ScanTally>) {
        self.tallies.retain(|other| !Arc::ptr_eq(other, tally));
    }
}

/// The destination of a record: the open segment of its hotness group (see `hotness`), or that of tombstones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SegmentStream {
    Rows(u8),
    Tombstones,
}

impl SegmentStream {
    const COUNT: usize = MAX_HOTNESS_CLASSES as usize + 1;

    /// Iterates over every stream.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        Self::of_rows().chain([Self::Tombstones])
    }

    /// The streams of rows, by hotness group.
    pub(crate) fn of_rows() -> impl DoubleEndedIterator<Item = Self> {
        (0..MAX_HOTNESS_CLASSES).map(Self::Rows)
    }

    #[inline]
    fn index(self) -> usize {
        match self {
            Self::Rows(class) => class as usize,
            Self::Tombstones => MAX_HOTNESS_CLASSES as usize,
        }
    }

    pub(crate) fn content(self) -> SegmentContent {
        match self {
            Self::Rows(_) => SegmentContent::Rows,
            Self::Tombstones => SegmentContent::Tombstones,
        }
    }

    pub(crate) fn hotness(self) -> u8 {
        match self {
            Self::Rows(class) => class,
            Self::Tombstones => 0,
        }
    }
}

/// The open segments, each of one stream.
#[derive(Debug, Default)]
pub(crate) struct OpenSegments([Option<OpenSegment>; SegmentStream::COUNT]);

impl OpenSegments {
    #[inline]
    pub(crate) fn get(&self, stream: SegmentStream) -> Option<&OpenSegment> {
        self.0[stream.index()].as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, stream: SegmentStream) -> Option<&mut OpenSegment> {
        self.0[stream.index()].as_mut()
    }

    pub(crate) fn put(&mut self, stream: SegmentStream, open: OpenSegment) {
        self.0[stream.index()] = Some(open);
    }

    pub(crate) fn take(&mut self, stream: SegmentStream) -> Option<OpenSegment> {
        self.0[stream.index()].take()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &OpenSegment> {
        self.0.iter().flatten()
    }

    /// The open segments of rows.
    pub(crate) fn of_rows(&self) -> impl Iterator<Item = &OpenSegment> {
        self.0[..MAX_HOTNESS_CLASSES as usize].iter().flatten()
    }

    /// The open segment that is `segment`, if that is open.
    pub(crate) fn find(&self, segment: &Arc<Segment>) -> Option<&OpenSegment> {
        self.iter().find(|open| Arc::ptr_eq(open.segment(), segment))
    }

    /// Submits their buffers, so that no half-filled one is kept.
    pub(crate) fn spill(&mut self) {
        self.0.iter_mut().flatten().for_each(OpenSegment::spill);
    }
}
