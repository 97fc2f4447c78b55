//! A segment: an append-only file of records, first open (filled through a buffer, see [`open_segment`]), then sealed
//! (immutable, with a footer, see [`footer_reader`]).
//!
//! A segment's file exists as long as its [`Segment`]: the tier's current set, published states, fetches and scans
//! share it. The current set and the published states also *reference* it ([`Segment::add_ref`]). When there are no
//! references, the last drop of the segment removes its file.

pub(crate) mod footer_reader;
pub(crate) mod open_segment;
pub(crate) mod write_buffer;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use crate::error::{Error, Kind, Result};
use crate::io::{ALIGNMENT, IoEngine, IoFile, IoOpenMode, open_files};
use crate::runtime::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, Ordering, lock};
use crate::ssd::format::footer::{EntryFormat, FooterEntry, FooterTrailer, StepRange};
use crate::ssd::format::record::{Record, RecordFormat, RecordMaxima, decode, decode_with};
use crate::ssd::format::segment_file::{SegmentContent, SegmentSchema, SegmentTail, encode_tail};
use crate::ssd::format::state_file::SegmentDescriptor;
use crate::ssd::hotness::HotnessClasses;
use crate::ssd::index::RecordLocation;
use crate::ssd::segment::write_buffer::{BLOCK_BYTES, WriteBlock, WriteBufferPool};
use crate::ssd::space::reservation::SpaceTracker;
use crate::ssd::space::sizing::SegmentSizing;
use crate::ssd::workers::{SsdTask, SsdWorkers};

/// Properties of a segment that are known once its footer is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SealedInfo {
    pub(crate) trailer: FooterTrailer,
    pub(crate) file_bytes: u64,
}

/// A segment's file and its shared state.
///
/// Fields that change under the tier's lock are atomic only so that they can be read without that lock.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) serial: u64,
    /// Its number in locations. It is reused only after this segment is dropped.
    pub(crate) slot: u32,
    pub(crate) content: SegmentContent,
    /// Layout and binding of its records.
    pub(crate) format: RecordFormat,
    /// Bytes of each record.
    pub(crate) record_bytes: usize,
    pub(crate) header_bytes: usize,
    /// The hotness group of its rows; see `hotness`.
    pub(crate) hotness: u8,
    /// The tier's next `write_seq` when the segment was created.
    pub(crate) made_seq: u64,
    pub(crate) file: Arc<dyn IoFile>,
    engine: Arc<dyn IoEngine>,
    space: Arc<SpaceTracker>,
    /// Bytes of the cap that it occupies.
    held_bytes: AtomicU64,
    unwritten: UnwrittenBlocks,
    sealed: OnceLock<SealedInfo>,
    /// True if all of it is durable.
    synced: AtomicBool,
    /// Number of references from the current set and the published states.
    ref_count: AtomicU32,
    /// True after the last reference was removed.
    is_unreferenced: AtomicBool,
    /// Records that the index points to. Changes under the tier's lock.
    live: AtomicU32,
    /// Records in it. Changes under the tier's lock.
    records: AtomicU32,
    /// The sum of its records' `write_seq`. Changes under the tier's lock.
    seq_sum: AtomicU64,
    /// The highest `modified_epoch` of its records. Changes under the tier's lock.
    highest_epoch: AtomicU32,
    /// Number of scans that have not reached it yet. Compaction must not empty it before.
    pending_scans: AtomicU32,
    /// True if compaction is moving its rows. Changes under the tier's lock.
    moving: AtomicBool,
    /// True if compaction found unreadable bytes in it and leaves it unchanged.
    damaged: AtomicBool,
    /// The error that set `damaged`.
    damage: Mutex<Option<Error>>,
}

/// Purpose of a segment: its content, its hotness group, and the tier's next `write_seq`.
pub(crate) type SegmentPurpose = (SegmentContent, u8, u64);

impl Segment {
    /// Creates a sealed segment from a file on disk, which the caller has checked.
    pub(crate) fn reopened(
        context: &SegmentContext,
        serial: u64,
        (content, format): (SegmentContent, RecordFormat),
        file: Arc<dyn IoFile>,
        sealed: SealedInfo,
    ) -> Result<Self> {
        // Files do not contain the hotness group: the rows get the group of rows without history.
        let purpose = (content, HotnessClasses::for_new_row(), sealed.trailer.highest_seq);
        let segment = Self::make(context, (serial, format), purpose, file, sealed.file_bytes)?;
        let middle = u64::midpoint(sealed.trailer.lowest_seq, sealed.trailer.highest_seq);
        let records = u64::from(sealed.trailer.records);
        segment.seq_sum.store(middle.saturating_mul(records), Ordering::Relaxed);
        segment.highest_epoch.store(sealed.trailer.highest_epoch, Ordering::Relaxed);
        segment.synced.store(true, Ordering::Relaxed);
        segment.unwritten.set_written(sealed.file_bytes);
        segment.records.store(sealed.trailer.records, Ordering::Relaxed);
        segment.sealed.set(sealed).expect("just made");
        Ok(segment)
    }

    /// Creates segment `serial`, with records of this format. Its file exists and occupies `bytes` of the cap.
    pub(crate) fn make(
        context: &SegmentContext,
        (serial, format): (u64, RecordFormat),
        (content, class, made_seq): SegmentPurpose,
        file: Arc<dyn IoFile>,
        bytes: u64,
    ) -> Result<Self> {
        Ok(Self {
            serial,
            slot: context.space.reserve(bytes)?,
            content,
            format,
            record_bytes: context.schema.record_bytes(content, format.widths),
            header_bytes: context.sizing.header_bytes,
            hotness: class,
            made_seq,
            file,
            engine: context.engine.clone(),
            space: context.space.clone(),
            held_bytes: AtomicU64::new(bytes),
            unwritten: UnwrittenBlocks::default(),
            sealed: OnceLock::new(),
            synced: AtomicBool::new(false),
            ref_count: AtomicU32::new(0),
            is_unreferenced: AtomicBool::new(false),
            live: AtomicU32::new(0),
            records: AtomicU32::new(0),
            seq_sum: AtomicU64::new(0),
            highest_epoch: AtomicU32::new(0),
            pending_scans: AtomicU32::new(0),
            moving: AtomicBool::new(false),
            damaged: AtomicBool::new(false),
            damage: Mutex::default(),
        })
    }

    /// Path of its file.
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Offset of record `number`.
    #[inline]
    pub(crate) fn offset(&self, number: u32) -> u64 {
        self.header_bytes as u64 + u64::from(number) * self.record_bytes as u64
    }

    /// Location of record `number`.
    #[inline]
    pub(crate) fn location(&self, number: u32) -> RecordLocation {
        RecordLocation { segment: self.slot, record: number }
    }

    /// Checks and decodes its record `number`, whose bytes are `bytes`.
    #[inline]
    pub(crate) fn decode<'a>(&self, number: u32, bytes: &'a [u8]) -> Result<Record<'a>> {
        decode(bytes, (self.format, number), self.path(), self.offset(number))
    }

    /// Like [`Segment::decode`], with the precomputed checksum of the bytes.
    #[inline]
    pub(crate) fn decode_with<'a>(&self, number: u32, bytes: &'a [u8], crc: u32) -> Result<Record<'a>> {
        decode_with(bytes, crc, (self.format, number), self.path(), self.offset(number))
    }

    /// Locates the `len` bytes at `offset`. Calls `with` with them if they are in a block.
    #[inline]
    pub(crate) fn locate(&self, offset: u64, len: usize, with: &mut dyn FnMut(&[u8])) -> SegmentByteSource {
        self.unwritten.locate(offset, len, with)
    }

    /// Properties of the sealed segment; `None` until its footer is written.
    pub(crate) fn sealed(&self) -> Option<&SealedInfo> {
        self.sealed.get()
    }

    /// Offset of the footer.
    pub(crate) fn footer_offset(&self) -> u64 {
        self.offset(self.records())
    }

    /// Layout of its footer's entries. It must be sealed.
    pub(crate) fn entry_format(&self) -> EntryFormat {
        self.sealed().map(|sealed| sealed.trailer.entry_format()).expect("only sealed segments have a footer")
    }

    /// The last steps of its rows, if its footer has them.
    pub(crate) fn step_range(&self) -> Option<StepRange> {
        self.sealed().and_then(|sealed| sealed.trailer.steps)
    }

    /// Maxima of its records. It must be sealed.
    pub(crate) fn highest(&self) -> RecordMaxima {
        let highest = self.format.widths.highest();
        let last_step = self.step_range().map_or(highest.last_step, |steps| steps.highest);
        RecordMaxima { write_seq: 0, last_step, modified_epoch: self.highest_epoch(), ..highest }
    }

    /// Its descriptor for a state, once it is sealed.
    pub(crate) fn descriptor(&self) -> Option<SegmentDescriptor> {
        let sealed = self.sealed()?;
        Some(SegmentDescriptor {
            serial: self.serial,
            tombstones: self.content == SegmentContent::Tombstones,
            file_bytes: sealed.file_bytes,
            crc: sealed.trailer.crc,
        })
    }

    /// Bytes of the cap that it occupies.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// Number of its records.
    #[inline]
    pub(crate) fn records(&self) -> u32 {
        self.records.load(Ordering::Relaxed)
    }

    /// Records that the index points to.
    #[inline]
    pub(crate) fn live(&self) -> u32 {
        self.live.load(Ordering::Relaxed)
    }

    /// Records that the index does not point to.
    pub(crate) fn dead(&self) -> u32 {
        self.records() - self.live()
    }

    /// The mean `write_seq` of its records.
    #[inline]
    pub(crate) fn mean_seq(&self) -> u64 {
        self.seq_sum.load(Ordering::Relaxed) / u64::from(self.records().max(1))
    }

    /// The highest `modified_epoch` of its records.
    pub(crate) fn highest_epoch(&self) -> u32 {
        self.highest_epoch.load(Ordering::Relaxed)
    }

    /// Counts a record that was just added. Must be called under the tier's lock.
    #[inline]
    pub(crate) fn count_record(&self, record: u32, write_seq: u64, modified_epoch: u32) {
        self.records.store(record + 1, Ordering::Relaxed);
        let sum = self.seq_sum.load(Ordering::Relaxed).saturating_add(write_seq);
        self.seq_sum.store(sum, Ordering::Relaxed);
        self.highest_epoch.store(self.highest_epoch().max(modified_epoch), Ordering::Relaxed);
    }

    /// Counts records that the index points to. Must be called under the tier's lock, so a load and a store are
    /// sufficient: an atomic addition would wait for the stores of the record, which are slow.
    #[inline]
    pub(crate) fn add_live(&self, records: u32) {
        self.live.store(self.live() + records, Ordering::Relaxed);
    }

    /// Subtracts records that the index does not point to. Returns the remaining live records. Must be called under the
    /// tier's lock.
    pub(crate) fn remove_live(&self, records: u32) -> u32 {
        let left = self.live() - records;
        self.live.store(left, Ordering::Relaxed);
        left
    }

    /// Sets the number of its live records, which a resume has counted.
    pub(crate) fn set_live(&self, records: u32) {
        self.live.store(records, Ordering::Relaxed);
    }

    /// Counts a scan that will read it.
    pub(crate) fn begin_scan(&self) {
        self.pending_scans.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a scan that has read it, or will not read it.
    pub(crate) fn end_scan(&self) {
        self.pending_scans.fetch_sub(1, Ordering::Relaxed);
    }

    /// True if a scan will read it.
    pub(crate) fn has_pending_scans(&self) -> bool {
        self.pending_scans.load(Ordering::Relaxed) > 0
    }

    /// True if compaction is moving its rows.
    pub(crate) fn is_moving(&self) -> bool {
        self.moving.load(Ordering::Relaxed)
    }

    /// Sets the flag of [`Segment::is_moving`]. Must be called under the tier's lock.
    pub(crate) fn set_moving(&self, moving: bool) {
        self.moving.store(moving, Ordering::Relaxed);
    }

    /// True if compaction must skip it.
    pub(crate) fn is_damaged(&self) -> bool {
        self.damaged.load(Ordering::Relaxed)
    }

    /// The error because of which compaction skips it, if it does.
    pub(crate) fn damage(&self) -> Option<Error> {
        lock(&self.damage).clone()
    }

    /// Makes compaction skip it.
    pub(crate) fn set_damaged(&self, cause: Error) {
        *lock(&self.damage) = Some(cause);
        self.damaged.store(true, Ordering::Relaxed);
    }

    /// Lets compaction retry, unless the bytes themselves are corrupted.
    pub(crate) fn retry_damaged(&self) {
        let mut damage = lock(&self.damage);
        if damage.as_ref().is_some_and(|cause| cause.kind() != Kind::Corruption) {
            *damage = None;
            self.damaged.store(false, Ordering::Relaxed);
        }
    }

    /// Number of references from the current set and the published states.
    pub(crate) fn ref_count(&self) -> u32 {
        self.ref_count.load(Ordering::Relaxed)
    }

    /// Adds a reference from the current set or a published state.
    pub(crate) fn add_ref(&self) {
        self.ref_count.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a reference of the current set or a published state.
    pub(crate) fn remove_ref(&self) {
        if self.ref_count.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.is_unreferenced.store(true, Ordering::Relaxed);
        }
    }

    /// Queues a job with a block for the writers. Until it is done the bytes are found in the block.
    pub(crate) fn submit(self: &Arc<Self>, block: Arc<WriteBlock>, job: SegmentJob, workers: &SsdWorkers) {
        lock(&self.unwritten.blocks).push(block);
        WriteBufferPool::of_process().begin_write();
        self.enqueue(job, workers);
    }

    /// Makes the writers sync it, if it is not durable. It must be sealed. Only a state that references it needs that:
    /// a segment is removed only when no state needs it, and its replacements in the current set are durable before a
    /// state references them.
    pub(crate) fn sync(self: &Arc<Self>, workers: &SsdWorkers) {
        if !self.is_synced() {
            self.enqueue(SegmentJob::Sync, workers);
        }
    }

    /// True if all of it is durable.
    pub(crate) fn is_synced(&self) -> bool {
        self.synced.load(Ordering::Acquire)
    }

    fn enqueue(self: &Arc<Self>, job: SegmentJob, workers: &SsdWorkers) {
        self.space.begin_job();
        if self.unwritten.add_job(job) {
            workers.submit_write(Box::new(SegmentJobTask(self.clone())));
        }
    }

    /// Runs the queued jobs. Only one thread does so at a time.
    fn run_jobs(&self) {
        while let Some(job) = self.unwritten.next_job() {
            let has_block = job.block().is_some();
            let run = || {
                if self.is_unreferenced.load(Ordering::Relaxed) {
                    job.block().into_iter().for_each(|block| self.unwritten.drop_block(block));
                    return Ok(());
                }
                // After a failure blocks stay, and are read from memory.
                if self.space.has_failed() { Ok(()) } else { self.run_job(job) }
            };
            let result = catch_unwind(AssertUnwindSafe(run))
                .unwrap_or_else(|panic| Err(Error::panicked(&format!("writing {}", self.path().display()), &*panic)));
            if has_block {
                WriteBufferPool::of_process().end_write();
            }
            self.space.end_job(result);
        }
    }

    fn run_job(&self, job: SegmentJob) -> Result<()> {
        match job {
            SegmentJob::Write(block) => {
                self.file.write_at(block.start, &block.bytes()[..block.to_write])?;
                self.space.count_written(block.to_write);
                self.unwritten.set_written(block.start + block.to_write as u64);
                self.unwritten.drop_block(&block);
            }
            SegmentJob::Seal { tail, mut entries } => {
                let capacity_bytes = self.held_bytes();
                let records = &tail.bytes()[..tail.filled];
                let SegmentTail { bytes, trailer, file_bytes } =
                    encode_tail(tail.start, records, &mut entries, self.serial, capacity_bytes)?;
                self.file.write_at(tail.start, &bytes)?;
                self.space.count_written(bytes.len());
                if file_bytes < capacity_bytes {
                    self.file.set_len(file_bytes)?;
                }
                self.unwritten.set_written(file_bytes);
                self.unwritten.drop_block(&tail);
                let before = self.held_bytes.swap(file_bytes, Ordering::Relaxed);
                self.sealed.get_or_init(|| SealedInfo { trailer, file_bytes });
                self.space.resize(before, file_bytes);
            }
            SegmentJob::Sync => {
                self.file.sync()?;
                self.synced.store(true, Ordering::Release);
            }
        }
        Ok(())
    }
}

/// The writers' task for a segment.
struct SegmentJobTask(Arc<Segment>);

impl SsdTask for SegmentJobTask {
    fn run(self: Box<Self>) {
        self.0.run_jobs();
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // Loom does not know that this is the last owner, and that these are the last values. Read-modify-write
        // operations return the latest.
        let held = self.held_bytes.fetch_add(0, Ordering::Relaxed);
        let is_unreferenced = self.is_unreferenced.fetch_or(false, Ordering::Relaxed);
        // A file that cannot be removed continues to occupy its bytes; the next open of the directory removes it.
        let remove = || self.engine.remove_file(self.path());
        // A file with other links is shared.
        let is_unshared = || self.file.links().is_ok_and(|links| links == 1);
        let is_removed = is_unreferenced && self.space.remove_or_reuse(self.path(), held, is_unshared, remove);
        self.space.release(self.slot, held, is_removed);
    }
}

/// The context that all segments of a table share.
#[derive(Clone, Debug)]
pub(crate) struct SegmentContext {
    pub(crate) dir: PathBuf,
    pub(crate) schema: SegmentSchema,
    pub(crate) sizing: SegmentSizing,
    /// Bytes of a write buffer.
    pub(crate) block_bytes: usize,
    pub(crate) engine: Arc<dyn IoEngine>,
    pub(crate) space: Arc<SpaceTracker>,
    pub(crate) workers: &'static SsdWorkers,
}

impl SegmentContext {
    /// Creates the context of segments in `dir`. Tests pass `block_bytes` to override the usual size of a write buffer.
    pub(crate) fn new(
        dir: PathBuf,
        schema: SegmentSchema,
        sizing: SegmentSizing,
        block_bytes: Option<usize>,
        engine: Arc<dyn IoEngine>,
    ) -> Result<Self> {
        Ok(Self {
            dir,
            schema,
            sizing,
            block_bytes: block_bytes.unwrap_or_else(|| default_block_bytes(&sizing)),
            engine,
            space: Arc::new(SpaceTracker::new(sizing.cap_bytes, sizing.segment_bytes)),
            workers: SsdWorkers::of_process()?,
        })
    }

    /// Creates the file of a segment, of at most `capacity_bytes` bytes, or reuses a kept file. Returns `None` if files
    /// that could not be removed occupy the space.
    pub(crate) fn make_file(&self, path: &Path, capacity_bytes: u64) -> Result<Option<Arc<dyn IoFile>>> {
        open_files::check_reserve(&self.dir)?;
        let reusable = if capacity_bytes == self.sizing.segment_bytes { self.space.take_reusable_file() } else { None };
        if let Some(reusable) = reusable {
            // No state references its old records and no reader uses them. A resume ignores the new segment until it is
            // synced.
            self.engine.rename(&reusable, path)?;
            let file = self.engine.open(path, IoOpenMode::Write)?;
            if file.links()? == 1 {
                return Ok(Some(file));
            }
            self.engine.remove_file(path)?;
        }
        if !self.space.remove_reusable_files(Some(capacity_bytes), |path| self.engine.remove_file(path)) {
            return Ok(None);
        }
        self.engine.open(path, IoOpenMode::Create { preallocate: capacity_bytes }).map(Some)
    }
}

/// Bytes of a write buffer: those of a full segment if that is small, those of several records if they are large.
fn default_block_bytes(sizing: &SegmentSizing) -> usize {
    let least = 2 * (sizing.row_bytes + ALIGNMENT);
    let usual = if 8 * least > BLOCK_BYTES { 4 * least } else { BLOCK_BYTES };
    usual.min(sizing.segment_bytes as usize).max(least).next_multiple_of(ALIGNMENT)
}

/// A segment to read: its first `records` records. Until this is dropped compaction skips the segment, and it stays in
/// the current set.
pub(crate) struct SegmentPart {
    pub(crate) segment: Arc<Segment>,
    pub(crate) records: u32,
}

impl SegmentPart {
    /// Selects all present records of a segment. Must be called under the tier's lock.
    pub(crate) fn of(segment: Arc<Segment>) -> Self {
        segment.begin_scan();
        let records = segment.records();
        Self { segment, records }
    }
}

impl Drop for SegmentPart {
    fn drop(&mut self) {
        self.segment.end_scan();
    }
}

/// A job of the writers for a segment.
#[derive(Debug)]
pub(crate) enum SegmentJob {
    /// Writes a block.
    Write(Arc<WriteBlock>),
    /// Writes the last records and the footer.
    Seal { tail: Arc<WriteBlock>, entries: Vec<FooterEntry> },
    /// Makes the file durable.
    Sync,
}

impl SegmentJob {
    /// The block that it writes, if it writes one.
    pub(crate) fn block(&self) -> Option<&Arc<WriteBlock>> {
        match self {
            Self::Write(block) | Self::Seal { tail: block, .. } => Some(block),
            Self::Sync => None,
        }
    }
}

/// Where bytes of a segment are.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SegmentByteSource {
    /// In the file.
    File,
    /// In a block that is being written. The reader received them.
    Block,
    /// In the buffer of the open segment.
    Buffer,
}

/// Blocks of a segment that are not in its file yet, and the queued jobs.
#[derive(Debug, Default)]
struct UnwrittenBlocks {
    jobs: Mutex<SegmentJobQueue>,
    blocks: Mutex<Vec<Arc<WriteBlock>>>,
    /// Bytes from the start of the file that can be read from it.
    written_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct SegmentJobQueue {
    waiting: VecDeque<SegmentJob>,
    /// True if a writer runs them, or is scheduled to.
    has_writer: bool,
}

impl UnwrittenBlocks {
    /// Locates the `len` bytes at `offset`. Calls `with` with them if they are in a block.
    #[inline]
    fn locate(&self, offset: u64, len: usize, with: &mut dyn FnMut(&[u8])) -> SegmentByteSource {
        let end = offset + len as u64;
        if self.written_bytes.load(Ordering::Acquire) >= end {
            return SegmentByteSource::File;
        }
        let blocks = lock(&self.blocks);
        if let Some(bytes) = blocks.iter().find_map(|block| block.get(offset, len)) {
            with(bytes);
            return SegmentByteSource::Block;
        }
        // A block is removed only after its bytes are in the file.
        if self.written_bytes.load(Ordering::Acquire) >= end {
            SegmentByteSource::File
        } else {
            SegmentByteSource::Buffer
        }
    }

    /// Records that the first `bytes` of the segment are in the file.
    fn set_written(&self, bytes: u64) {
        self.written_bytes.store(bytes, Ordering::Release);
    }

    /// Releases a block whose bytes are in the file, or are not needed.
    fn drop_block(&self, block: &Arc<WriteBlock>) {
        lock(&self.blocks).retain(|other| !Arc::ptr_eq(other, block));
    }

    /// Adds a job. Returns `true` if a writer must be scheduled.
    fn add_job(&self, job: SegmentJob) -> bool {
        let mut jobs = lock(&self.jobs);
        jobs.waiting.push_back(job);
        !std::mem::replace(&mut jobs.has_writer, true)
    }

    /// Takes the next job. If there is none, adding the next one schedules a writer again.
    fn next_job(&self) -> Option<SegmentJob> {
        let mut jobs = lock(&self.jobs);
        let next = jobs.waiting.pop_front();
        jobs.has_writer = next.is_some();
        next
    }
}
