//! Segments: an append-only file of records, first open (filled through a buffer), then sealed (with a footer, never written again).
//!
//! A segment file lives as long as anyone holds its [`Segment`]: the table's current set, a published state, a fetch or a scan under
//! way. When the current set and the published states have let go of it (`unhold`), the last holder's drop removes the file.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::background::Background;
use super::buffer::{Block, Pool};
use super::classes::Classes;
use super::format::{Content, Entry, EntryFormat, TRAILER_BYTES, Trailer, most_entry_bytes};
use super::home::Home;
use super::index::Location;
use super::manifest::number_of;
use super::record::{Binding, Record, decode};
use super::seal::{End, end_of};
use super::space::Space;
use crate::error::{Error, Kind, Result};
use crate::io::{ALIGNMENT, AlignedBuf, IoEngine, IoFile};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, Ordering, lock};
use crate::types::Id;

const SUFFIX: &str = "seg";
/// The file of segment `serial` in `dir`.
pub(super) fn segment_path(dir: &Path, serial: u64) -> PathBuf {
    dir.join(format!("{serial:016x}.{SUFFIX}"))
}

/// The serial of a segment file, `None` for any other file.
pub(super) fn segment_serial(path: &Path) -> Option<u64> {
    number_of(path, SUFFIX)
}

/// What is known of a segment once its footer is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sealed {
    pub(super) trailer: Trailer,
    pub(super) file_bytes: u64,
}

#[derive(Debug)]
pub(super) enum Job {
    Write(Arc<Block>),
    Seal { tail: Arc<Block>, entries: Vec<Entry> },
    Sync,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    scheduled: bool,
}

/// Where a record is, as far as the segment knows.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the file.
    File,
    /// In a block on its way to the file; it was handed to the reader.
    Block,
    /// In the buffer of the open segment.
    Buffer,
}

/// A segment file and what its holders share.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) serial: u64,
    /// Its number in locations; another segment gets it only when this one is dropped.
    pub(super) slot: u32,
    pub(super) content: Content,
    /// What ties its records to it.
    pub(super) binding: Binding,
    pub(super) record_bytes: usize,
    header_bytes: usize,
    pub(super) file: Arc<dyn IoFile>,
    engine: Arc<dyn IoEngine>,
    space: Arc<Space>,
    /// Bytes of the space it holds.
    bytes: AtomicU64,
    /// Bytes from the start of the file that can be read from it.
    written: AtomicU64,
    queue: Mutex<Queue>,
    blocks: Mutex<Vec<Arc<Block>>>,
    sealed: OnceLock<Sealed>,
    /// The current set and published states that name it.
    holds: AtomicU32,
    doomed: AtomicBool,
    /// Records that the index points to (changed under the table's lock).
    pub(super) live: AtomicU32,
    /// Records in it (changed under the table's lock).
    pub(super) records: AtomicU32,
    /// The class of its rows; see `classes`.
    pub(super) class: u8,
    /// The tier's next `write_seq` when the segment was made.
    pub(super) made_seq: u64,
    /// The sum of its records' `write_seq` (changed under the table's lock).
    seq_sum: AtomicU64,
    /// The highest `modified_epoch` of its records (changed under the table's lock).
    pub(super) highest_epoch: AtomicU32,
    /// Whether all of it is durable.
    synced: AtomicBool,
    /// A scan that has not come to it yet: compaction must not empty it.
    pub(super) scans: AtomicU32,
    /// Whether compaction is moving its rows (changed under the table's lock).
    pub(super) moving: AtomicBool,
    /// Compaction met bytes in it that it could not read, so it stays as it is.
    damaged: AtomicBool,
    /// The error that set `damaged`.
    damage: Mutex<Option<Error>>,
}

/// What a segment is made for: content, class, and the tier's next `write_seq`.
type What = (Content, u8, u64);

impl Segment {
    /// A sealed segment found on disk, checked by the caller.
    pub(super) fn reopened(
        home: &Home,
        serial: u64,
        (content, binding): (Content, Binding),
        file: Arc<dyn IoFile>,
        sealed: Sealed,
    ) -> Result<Self> {
        let held = sealed.file_bytes;
        // What its class was is not kept: what nothing is known of.
        let what = (content, Classes::of_new(), sealed.trailer.highest_seq);
        let mut segment = Self::make(home, serial, what, file, held)?;
        segment.binding = binding;
        let middle = u64::midpoint(sealed.trailer.lowest_seq, sealed.trailer.highest_seq);
        let records = u64::from(sealed.trailer.records);
        segment.seq_sum.store(middle.saturating_mul(records), Ordering::Relaxed);
        segment.highest_epoch.store(sealed.trailer.highest_epoch, Ordering::Relaxed);
        segment.synced.store(true, Ordering::Relaxed);
        segment.written.store(sealed.file_bytes, Ordering::Release);
        segment.records.store(sealed.trailer.records, Ordering::Relaxed);
        segment.sealed.set(sealed).expect("just made");
        Ok(segment)
    }

    fn make(home: &Home, serial: u64, what: What, file: Arc<dyn IoFile>, bytes: u64) -> Result<Self> {
        let (content, class, made_seq) = what;
        Ok(Self {
            serial,
            slot: home.space.take(bytes)?,
            content,
            binding: home.schema.binding(serial),
            record_bytes: home.schema.record_bytes(content),
            header_bytes: home.geometry.header_bytes,
            file,
            engine: home.engine.clone(),
            space: home.space.clone(),
            bytes: AtomicU64::new(bytes),
            written: AtomicU64::new(0),
            queue: Mutex::default(),
            blocks: Mutex::default(),
            sealed: OnceLock::new(),
            holds: AtomicU32::new(0),
            doomed: AtomicBool::new(false),
            live: AtomicU32::new(0),
            records: AtomicU32::new(0),
            class,
            made_seq,
            seq_sum: AtomicU64::new(0),
            highest_epoch: AtomicU32::new(0),
            synced: AtomicBool::new(false),
            scans: AtomicU32::new(0),
            moving: AtomicBool::new(false),
            damaged: AtomicBool::new(false),
            damage: Mutex::default(),
        })
    }

    /// The path of its file.
    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Where record `number` starts.
    #[inline]
    pub(super) fn offset(&self, number: u32) -> u64 {
        self.header_bytes as u64 + u64::from(number) * self.record_bytes as u64
    }

    /// Check and take apart its record `number`, which is `bytes`.
    #[inline]
    pub(super) fn decode<'a>(&self, number: u32, bytes: &'a [u8]) -> Result<Record<'a>> {
        decode(bytes, (self.binding, number), self.path(), self.offset(number))
    }

    /// Where the footer starts.
    pub(super) fn footer_offset(&self) -> u64 {
        self.offset(self.records.load(Ordering::Relaxed))
    }

    /// How the entries of its footer lie; it must be sealed.
    pub(super) fn entry_format(&self) -> EntryFormat {
        self.sealed().map(|sealed| sealed.trailer.entries()).expect("only sealed segments have a footer")
    }

    /// The location of record `number`.
    #[inline]
    pub(super) fn location(&self, number: u32) -> Location {
        Location { segment: self.slot, record: number }
    }

    /// The footer's summary, once it is written.
    pub(super) fn sealed(&self) -> Option<&Sealed> {
        self.sealed.get()
    }

    /// The mean `write_seq` of its records.
    #[inline]
    pub(super) fn mean_seq(&self) -> u64 {
        self.seq_sum.load(Ordering::Relaxed) / u64::from(self.records.load(Ordering::Relaxed).max(1))
    }

    /// Bytes of the cap it holds.
    pub(super) fn held_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Records that are not live.
    pub(super) fn dead(&self) -> u32 {
        self.records.load(Ordering::Relaxed) - self.live.load(Ordering::Relaxed)
    }

    /// Count records that the index points to. To be called under the table's lock: an atomic addition would wait for the stores before
    /// it, those of the record, which are slow.
    #[inline]
    pub(super) fn add_live(&self, records: u32) {
        self.live.store(self.live.load(Ordering::Relaxed) + records, Ordering::Relaxed);
    }

    /// Count records that it points to no longer; how many are left. As [`Segment::add_live`].
    pub(super) fn remove_live(&self, records: u32) -> u32 {
        let left = self.live.load(Ordering::Relaxed) - records;
        self.live.store(left, Ordering::Relaxed);
        left
    }

    /// Whether it is sealed, and no scan is to come to it.
    pub(super) fn is_unneeded_by_scans(&self) -> bool {
        self.sealed().is_some() && self.scans.load(Ordering::Relaxed) == 0
    }

    /// How many of the current set and the published states name it.
    pub(super) fn holds(&self) -> u32 {
        self.holds.load(Ordering::Relaxed)
    }

    /// Whether compaction is to leave it alone.
    pub(super) fn is_damaged(&self) -> bool {
        self.damaged.load(Ordering::Relaxed)
    }

    /// Why compaction leaves it alone, if it does.
    pub(super) fn damage(&self) -> Option<Error> {
        lock(&self.damage).clone()
    }

    /// From now on compaction leaves it alone.
    pub(super) fn set_damaged(&self, cause: Error) {
        *lock(&self.damage) = Some(cause);
        self.damaged.store(true, Ordering::Relaxed);
    }

    /// Let compaction try again what failed for another reason than the bytes themselves.
    pub(super) fn forgive(&self) {
        let mut damage = lock(&self.damage);
        if damage.as_ref().is_some_and(|cause| cause.kind() != Kind::Corruption) {
            *damage = None;
            self.damaged.store(false, Ordering::Relaxed);
        }
    }

    pub(super) fn hold(&self) {
        self.holds.fetch_add(1, Ordering::Relaxed);
    }

    /// The current set or a published state no longer names it.
    pub(super) fn unhold(&self) {
        if self.holds.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.doomed.store(true, Ordering::Relaxed);
        }
    }

    /// Find the bytes at `offset`; `with` gets them if they are in a block.
    #[inline]
    pub(super) fn locate(&self, offset: u64, len: usize, with: &mut dyn FnMut(&[u8])) -> Place {
        let end = offset + len as u64;
        if self.written.load(Ordering::Acquire) >= end {
            return Place::File;
        }
        let blocks = lock(&self.blocks);
        if let Some(bytes) = blocks.iter().find_map(|block| block.get(offset, len)) {
            with(bytes);
            return Place::Block;
        }
        // A block leaves only after its bytes are in the file.
        if self.written.load(Ordering::Acquire) >= end { Place::File } else { Place::Buffer }
    }

    fn submit(self: &Arc<Self>, block: &Arc<Block>, job: Job, background: &Background) {
        lock(&self.blocks).push(block.clone());
        Pool::shared().submitted();
        self.enqueue(job, background);
    }

    /// Have the flusher make a sealed segment durable, if it is not; see [`Segment::is_synced`]. Nothing needs that but a state that names
    /// it: a segment goes only when no state needs it, and what the current set has instead is durable before it is published.
    pub(super) fn sync(self: &Arc<Self>, background: &Background) {
        if !self.is_synced() {
            self.enqueue(Job::Sync, background);
        }
    }

    /// Whether all of it is durable.
    pub(super) fn is_synced(&self) -> bool {
        self.synced.load(Ordering::Acquire)
    }

    fn enqueue(self: &Arc<Self>, job: Job, background: &Background) {
        self.space.begin();
        let mut queue = lock(&self.queue);
        queue.jobs.push_back(job);
        if !std::mem::replace(&mut queue.scheduled, true) {
            background.flush(self.clone());
        }
    }

    /// Do the jobs that wait. Called by the flusher, by one thread at a time.
    pub(super) fn run_jobs(&self) {
        loop {
            let job = {
                let mut queue = lock(&self.queue);
                let Some(job) = queue.jobs.pop_front() else {
                    queue.scheduled = false;
                    return;
                };
                job
            };
            let with_block = job.block().is_some();
            // What cannot be written stays in its block, to be read from there.
            let run = || {
                if self.doomed.load(Ordering::Relaxed) {
                    job.block().into_iter().for_each(|block| self.drop_block(block));
                    return Ok(());
                }
                if self.space.has_failed() { Ok(()) } else { self.run(job) }
            };
            let result = catch_unwind(AssertUnwindSafe(run))
                .unwrap_or_else(|panic| Err(Error::panicked(&format!("writing {}", self.path().display()), &*panic)));
            if with_block {
                Pool::shared().done();
            }
            self.space.end(result);
        }
    }

    fn run(&self, job: Job) -> Result<()> {
        match job {
            Job::Write(block) => {
                self.file.write_at(block.start, &block.bytes()[..block.to_write])?;
                self.space.wrote(block.to_write);
                self.written.store(block.start + block.to_write as u64, Ordering::Release);
                self.drop_block(&block);
            }
            Job::Seal { tail, mut entries } => {
                let room = self.held_bytes();
                let End { bytes, trailer, file_bytes } = end_of(&tail, &mut entries, self.serial, room)?;
                self.file.write_at(tail.start, &bytes)?;
                self.space.wrote(bytes.len());
                if file_bytes < room {
                    self.file.set_len(file_bytes)?;
                }
                self.written.store(file_bytes, Ordering::Release);
                self.drop_block(&tail);
                let before = self.bytes.swap(file_bytes, Ordering::Relaxed);
                self.sealed.get_or_init(|| Sealed { trailer, file_bytes });
                self.space.resize(before, file_bytes);
            }
            Job::Sync => {
                self.file.sync()?;
                self.synced.store(true, Ordering::Release);
            }
        }
        Ok(())
    }

    fn drop_block(&self, block: &Arc<Block>) {
        lock(&self.blocks).retain(|other| !Arc::ptr_eq(other, block));
    }
}

impl Job {
    fn block(&self) -> Option<&Arc<Block>> {
        match self {
            Self::Write(block) | Self::Seal { tail: block, .. } => Some(block),
            Self::Sync => None,
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // The last values, which loom, that does not know of the holders' count, finds by changing them.
        let held = self.bytes.fetch_add(0, Ordering::Relaxed);
        // A file that cannot be removed goes on holding its bytes; the next open removes it.
        let doomed = self.doomed.fetch_or(false, Ordering::Relaxed);
        let remove = || self.engine.remove_file(self.path());
        // A file with other names is somebody else's too.
        let alone = || self.file.links().is_ok_and(|links| links == 1);
        let gone = doomed && self.space.remove_or_keep(self.path(), held, alone, remove);
        self.space.release(self.slot, held, gone);
    }
}

/// A segment that takes records. Owned by the table's state, under its lock.
#[derive(Debug)]
pub(super) struct OpenSegment {
    pub(super) segment: Arc<Segment>,
    /// Of the records so far, in the order of writing.
    pub(super) entries: Vec<Entry>,
    buffer: AlignedBuf,
    start: u64,
    filled: usize,
    /// Bytes that the file takes at most.
    pub(super) room: u64,
    block_bytes: usize,
    background: &'static Background,
}

impl OpenSegment {
    /// Make the file of segment `serial`, which takes at most `room` bytes; `None` where files that could not be removed hold them.
    pub(super) fn create(home: &Home, serial: u64, what: What, room: u64) -> Result<Option<Self>> {
        let content = what.0;
        let path = segment_path(&home.dir, serial);
        let room = home.geometry.segment_bytes.min(room - room % ALIGNMENT as u64);
        let Some(file) = home.make_file(&path, room)? else { return Ok(None) };
        let segment = Segment::make(home, serial, what, file, room)?;
        segment.hold();
        let header = home.schema.header(serial, content);
        let mut buffer = AlignedBuf::zeroed(header.len().next_multiple_of(ALIGNMENT));
        buffer[..header.len()].copy_from_slice(&header);
        Ok(Some(Self {
            segment: Arc::new(segment),
            entries: Vec::new(),
            buffer,
            start: 0,
            filled: header.len(),
            room,
            block_bytes: home.block_bytes,
            background: home.background,
        }))
    }

    /// Whether there is no room for one more record, where none has a larger `write_seq` or epoch than these.
    #[inline]
    pub(super) fn is_full(&self, highest_seq: u64, highest_epoch: u32) -> bool {
        let records = self.entries.len() as u32 + 1;
        let entry_bytes = most_entry_bytes(records, highest_seq, highest_epoch);
        let frame = self.segment.header_bytes + TRAILER_BYTES;
        let bytes = frame as u64 + u64::from(records) * (self.segment.record_bytes + entry_bytes) as u64;
        records > Location::MAX_RECORDS || bytes > self.room
    }

    /// Room for one more record, and its number. The bytes are the caller's to fill, whole.
    #[inline]
    pub(super) fn push(&mut self, id: Id, write_seq: u64, modified_epoch: u32) -> (u32, &mut [u8]) {
        let len = self.segment.record_bytes;
        if self.filled + len > self.buffer.len() {
            self.make_room(len);
        }
        let record = self.entries.len() as u32;
        if self.entries.len() == self.entries.capacity() {
            self.make_room_for_entries();
        }
        self.entries.push(Entry { id, write_seq, modified_epoch, record });
        self.segment.records.store(record + 1, Ordering::Relaxed);
        let sum = self.segment.seq_sum.load(Ordering::Relaxed).saturating_add(write_seq);
        self.segment.seq_sum.store(sum, Ordering::Relaxed);
        let highest_epoch = self.segment.highest_epoch.load(Ordering::Relaxed).max(modified_epoch);
        self.segment.highest_epoch.store(highest_epoch, Ordering::Relaxed);
        let at = self.filled;
        self.filled += len;
        (record, &mut self.buffer[at..at + len])
    }

    /// Bytes that its entries take beside those they have, where `more` follow.
    pub(super) fn entries_to_come(&self, more: usize) -> usize {
        let (entries, room) = (self.entries.len(), self.entries.capacity());
        if entries.saturating_add(more) <= room {
            0
        } else {
            entries.max(more.min(self.most_entries())) * size_of::<Entry>()
        }
    }

    fn most_entries(&self) -> usize {
        self.room as usize / (self.segment.record_bytes + most_entry_bytes(0, 0, 0)) + 1
    }

    /// Room for twice as many entries, as far as so many records fit the file.
    #[cold]
    fn make_room_for_entries(&mut self) {
        let entries = self.entries.len();
        self.entries.reserve_exact(entries.max(64).min(self.most_entries().saturating_sub(entries)).max(1));
    }

    #[cold]
    fn make_room(&mut self, len: usize) {
        if self.buffer.len() < self.block_bytes {
            let mut larger = Pool::shared().take(self.block_bytes);
            larger[..self.filled].copy_from_slice(&self.buffer[..self.filled]);
            self.buffer = larger;
        }
        if self.filled + len > self.buffer.len() {
            let usual = self.block_bytes;
            self.hand_in(|_| usual);
        }
    }

    /// Give the whole sectors of the buffer to the flusher. What follows them goes into the next buffer, of `size(bytes left)`, from
    /// the sector on in which the record that straddles their end begins: so each record is whole in a block or in the buffer.
    fn hand_in(&mut self, size: impl Fn(usize) -> usize) {
        let end = self.start + self.filled as u64;
        let whole = end - end % ALIGNMENT as u64;
        if whole == self.start {
            return;
        }
        let carry = if whole == end {
            end
        } else {
            let (header, record) = (self.segment.header_bytes as u64, self.segment.record_bytes as u64);
            let straddling = header + (whole - header) / record * record;
            (straddling - straddling % ALIGNMENT as u64).max(self.start)
        };
        let left = (end - carry) as usize;
        let mut next = Pool::shared().take(size(left));
        next[..left].copy_from_slice(&self.buffer[self.filled - left..self.filled]);
        let buffer = std::mem::replace(&mut self.buffer, next);
        let to_write = (whole - self.start) as usize;
        let block = Arc::new(Block::new(buffer, self.start, self.filled, to_write));
        self.start = carry;
        self.filled = left;
        self.segment.submit(&block, Job::Write(block.clone()), self.background);
    }

    /// Keep no more memory than the bytes that cannot be written yet.
    pub(super) fn spill(&mut self) {
        if self.buffer.len() == self.block_bytes {
            self.hand_in(|left| left.next_multiple_of(ALIGNMENT).max(ALIGNMENT));
        }
    }

    /// The record at `offset`, if it is in the buffer.
    #[inline]
    pub(super) fn get(&self, offset: u64) -> Option<&[u8]> {
        let at = offset.checked_sub(self.start)? as usize;
        let end = at + self.segment.record_bytes;
        (end <= self.filled).then(|| &self.buffer[at..end])
    }

    /// Give the buffer back; nothing of the segment is wanted any more.
    pub(super) fn abandon(self) {
        Pool::shared().give(self.buffer);
    }

    /// No more records: the flusher writes the rest and the footer. The segment is [`Segment::sealed`] when that is done.
    pub(super) fn seal(self) -> Arc<Segment> {
        let tail = Arc::new(Block::new(self.buffer, self.start, self.filled, 0));
        self.segment.submit(&tail, Job::Seal { tail: tail.clone(), entries: self.entries }, self.background);
        self.segment
    }
}
