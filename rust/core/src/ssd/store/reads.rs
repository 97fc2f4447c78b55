//! Fetches in progress: batched reads, whose records are checked as they arrive and copied directly to their
//! destinations.
#![allow(unsafe_code)]

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::error::{Error, Kind, Result};
use crate::io::{ALIGNMENT, IoEngine, IoReadRequest};
use crate::rows::{RowLayout, RowMut};
use crate::runtime::sync::{AtomicU64, Condvar, Mutex, Ordering, lock, wait};
use crate::ssd::format::record::ID_AT;
use crate::ssd::index::{FingerprintHasher, RecordLocation};
use crate::ssd::segment::{Segment, SegmentContext};
use crate::ssd::space::reservation::SpaceTracker;
use crate::ssd::workers::{SsdTask, SsdWorkers};
use crate::stats::DurationHistogram;
use crate::types::Id;

/// Maximum bytes of adjacent records that are read together.
const LARGEST_READ: u64 = 128 << 10;
/// Maximum bytes between records that are read together. Reading the gap costs less than another read: 13 to 15 µs were
/// measured for a read, and 0.9 µs for each additional KiB.
const LARGEST_GAP: u64 = 16 << 10;

/// A fetch of rows in progress.
#[derive(Debug, Default)]
pub struct RowFetch {
    outcome: Mutex<Option<Result<Vec<u32>>>>,
    done: Condvar,
    /// The tier's fetches, of which this is one.
    reads: Weak<FetchContext>,
}

impl RowFetch {
    /// Waits until every row is at its destination. Returns the positions in the request of absent ids, ascending, or
    /// the first error of a read or a checksum. It may be called repeatedly, and from several threads.
    pub fn wait(&self) -> Result<Vec<u32>> {
        if !self.is_done()
            && let Some(reads) = self.reads.upgrade()
        {
            // The reads may be part of a batch that another thread has not submitted yet.
            reads.submit();
        }
        let mut outcome = lock(&self.outcome);
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            outcome = wait(&self.done, outcome);
        }
    }

    /// True if `wait` would return immediately.
    pub fn is_done(&self) -> bool {
        lock(&self.outcome).is_some()
    }

    /// Finishes it, unless it is finished.
    pub(crate) fn finish(&self, outcome: Result<Vec<u32>>) {
        lock(&self.outcome).get_or_insert(outcome);
        self.done.notify_all();
    }
}

/// Keeps the destination memory of rows alive.
pub type FetchKeepAlive = Arc<dyn Any + Send + Sync>;

/// The context that the fetches of a tier share.
#[derive(Debug)]
pub(crate) struct FetchContext {
    engine: Arc<dyn IoEngine>,
    space: Arc<SpaceTracker>,
    workers: &'static SsdWorkers,
    layout: RowLayout,
    hasher: FingerprintHasher,
    /// Jobs of batches that are not submitted; see [`FetchBatch`].
    unsubmitted: Mutex<Vec<FetchJob>>,
    counters: ReadCounters,
}

/// Counters of fetches.
#[derive(Debug, Default)]
pub(crate) struct ReadCounters {
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) fetch_ns: AtomicU64,
    pub(crate) latency: DurationHistogram,
}

impl FetchContext {
    /// Creates the fetch context of the tier at `context`. `hasher` is the hasher of its index.
    pub(crate) fn new(context: &SegmentContext, layout: RowLayout, hasher: FingerprintHasher) -> Self {
        Self {
            engine: context.engine.clone(),
            space: context.space.clone(),
            workers: context.workers,
            layout,
            hasher,
            unsubmitted: Mutex::default(),
            counters: ReadCounters::default(),
        }
    }

    /// Counters of fetches.
    pub(crate) fn counters(&self) -> &ReadCounters {
        &self.counters
    }

    /// Creates an unfinished fetch of this tier.
    pub(crate) fn begin(self: &Arc<Self>) -> Arc<RowFetch> {
        Arc::new(RowFetch { reads: Arc::downgrade(self), ..RowFetch::default() })
    }

    /// Submits all unsubmitted fetches, of any batch.
    pub(crate) fn submit(&self) {
        let jobs = self.take_unsubmitted();
        if !jobs.is_empty() {
            self.workers.submit_read(Box::new(ReadJobs(jobs)));
        }
    }

    /// Takes the unsubmitted jobs.
    fn take_unsubmitted(&self) -> Vec<FetchJob> {
        std::mem::take(&mut *lock(&self.unsubmitted))
    }

    /// Copies record `number` of `segment` to its destination if it is `id`'s row. Returns false if the id's
    /// fingerprint only equals that of the record. Any other record is corruption, and must not pass for a row that was
    /// never trained.
    #[inline]
    fn deliver_record(&self, bytes: &[u8], segment: &Segment, number: u32, (id, to): (Id, RowMut)) -> Result<bool> {
        let record = segment.decode(number, bytes)?;
        if record.payload.is_empty() {
            return Err(Error::corruption(
                segment.path(),
                segment.offset(number),
                "the record",
                "a row",
                "a tombstone",
            ));
        }
        if record.head.id != id {
            if self.hasher.are_equal(record.head.id, id) {
                return Ok(false);
            }
            let at = segment.offset(number) + ID_AT as u64;
            return Err(Error::corruption(segment.path(), at, "the record's id", id, record.head.id));
        }
        let to = to.address();
        // SAFETY: the creator of the RowMut promised that a header and `vector_floats` floats are there, and that
        // nothing else accesses them until this fetch is done.
        let (vector, header) =
            unsafe { (std::slice::from_raw_parts_mut(to.vector, self.layout.vector_floats()), &mut *to.header) };
        *header = record.unpack(&self.layout, vector);
        Ok(true)
    }
}

/// A record to read. `segment` is a position in the job's list.
#[derive(Clone, Copy, Debug)]
struct FetchItem {
    segment: u32,
    position: u32,
    record: u32,
}

/// The part of a fetch that needs the disk.
#[derive(Debug)]
pub(crate) struct FetchJob {
    fetch: Arc<RowFetch>,
    reads: Arc<FetchContext>,
    /// Segments to read from. Their files stay as long as this lives.
    segments: Vec<Arc<Segment>>,
    items: Vec<FetchItem>,
    requested: Vec<(Id, RowMut)>,
    /// The memory that `requested` points into, because the caller may return before the reads are done.
    _keep_alive: Option<FetchKeepAlive>,
    /// Positions of absent ids.
    missing: Vec<u32>,
    started: Instant,
}

impl Drop for FetchJob {
    fn drop(&mut self) {
        // Only a panic drops a job without an outcome. It must not leave threads waiting forever.
        self.fetch.finish(Err(Kind::State.error("a fetch from the SSD tier ended without a result")));
        self.segments.clear();
        self.reads.space.notify_waiters();
    }
}

impl FetchJob {
    /// Creates the job of `fetch`, before any lookup.
    pub(crate) fn new(
        reads: &Arc<FetchContext>,
        fetch: &Arc<RowFetch>,
        requested: Vec<(Id, RowMut)>,
        keep_alive: Option<FetchKeepAlive>,
    ) -> Self {
        Self {
            fetch: fetch.clone(),
            reads: reads.clone(),
            segments: Vec::new(),
            items: Vec::with_capacity(requested.len()),
            missing: Vec::new(),
            requested,
            _keep_alive: keep_alive,
            started: Instant::now(),
        }
    }

    /// The requested ids, by position.
    pub(crate) fn ids(&self) -> Vec<Id> {
        self.requested.iter().map(|(id, _)| *id).collect()
    }

    /// True if nothing is to be read from disk.
    pub(crate) fn needs_no_disk(&self) -> bool {
        self.items.is_empty()
    }

    /// Records that the id at `position` is absent.
    pub(crate) fn add_missing(&mut self, position: usize) {
        self.missing.push(position as u32);
    }

    /// Copies the row at `position` from the bytes of its record, which are in RAM.
    #[inline]
    pub(crate) fn take_buffered(
        &mut self,
        position: usize,
        segment: &Segment,
        record: u32,
        bytes: &[u8],
    ) -> Result<()> {
        if !self.reads.deliver_record(bytes, segment, record, self.requested[position])? {
            self.missing.push(position as u32);
        }
        Ok(())
    }

    /// Adds a read of the row at `position` from the file of `segment`. `listed` maps segment numbers to positions in
    /// the job's list, or `u32::MAX`.
    #[inline]
    pub(crate) fn add_read(&mut self, position: usize, segment: &Arc<Segment>, at: RecordLocation, listed: &mut [u32]) {
        let listed = &mut listed[at.segment as usize];
        if *listed == u32::MAX {
            *listed = self.segments.len() as u32;
            self.segments.push(segment.clone());
        }
        self.items.push(FetchItem { segment: *listed, position: position as u32, record: at.record });
    }

    /// Copies the rows of one read to their destinations: those of `items`, from `bytes` that start at `offset` of
    /// their file.
    fn deliver_read(&mut self, items: Range<usize>, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut result = Ok(());
        for item in &self.items[items] {
            let segment = &self.segments[item.segment as usize];
            let at = (segment.offset(item.record) - offset) as usize;
            let record = &bytes[at..at + segment.record_bytes];
            match self.reads.deliver_record(record, segment, item.record, self.requested[item.position as usize]) {
                Ok(true) => {}
                Ok(false) => self.missing.push(item.position),
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }

    /// Coalesces records that are near each other into one read. Read `i` serves items `groups[i]..groups[i + 1]`.
    fn coalesced_reads(&self) -> (Vec<IoReadRequest>, Vec<u32>) {
        let mut reads: Vec<IoReadRequest> = Vec::with_capacity(self.items.len());
        let mut groups: Vec<u32> = Vec::with_capacity(self.items.len() + 1);
        let mut last_segment = u32::MAX;
        for (at, item) in self.items.iter().enumerate() {
            let segment = &self.segments[item.segment as usize];
            let offset = segment.offset(item.record);
            let end = offset + segment.record_bytes as u64;
            if item.segment == last_segment
                && let Some(last) = reads.last_mut()
            {
                let last_end = last.offset + last.len as u64;
                let sector = offset - offset % ALIGNMENT as u64;
                if sector <= last_end.next_multiple_of(ALIGNMENT as u64) + LARGEST_GAP
                    && end - last.offset <= LARGEST_READ
                {
                    last.len = (end.max(last_end) - last.offset) as usize;
                    continue;
                }
            }
            last_segment = item.segment;
            groups.push(at as u32);
            reads.push(IoReadRequest { file: segment.file.clone(), offset, len: segment.record_bytes });
        }
        groups.push(self.items.len() as u32);
        (reads, groups)
    }

    /// Finishes the fetch.
    pub(crate) fn finish(mut self, result: Result<()>) {
        let counters = &self.reads.counters;
        counters.misses.fetch_add(self.missing.len() as u64, Ordering::Relaxed);
        counters.hits.fetch_add((self.requested.len() - self.missing.len()) as u64, Ordering::Relaxed);
        counters.fetch_ns.fetch_add(self.started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.missing.sort_unstable();
        let missing = std::mem::take(&mut self.missing);
        // Files of released segments are removed before waiters wake up.
        self.segments.clear();
        self.fetch.finish(result.map(|()| missing));
    }
}

/// Jobs that are read together: the readers' task.
struct ReadJobs(Vec<FetchJob>);

impl SsdTask for ReadJobs {
    /// Reads from the files, in one submission per I/O engine. (A process has one.)
    fn run(self: Box<Self>) {
        let mut jobs = self.0;
        while let Some(first) = jobs.first() {
            let engine = first.reads.engine.clone();
            let (together, rest) = jobs.into_iter().partition(|job| Arc::ptr_eq(&job.reads.engine, &engine));
            read_together(&*engine, together);
            jobs = rest;
        }
    }

    #[cfg(loom)]
    fn files(&self) -> Vec<std::path::PathBuf> {
        let segments = self.0.iter().flat_map(|job| &job.segments);
        segments.map(|segment| segment.path().to_owned()).collect()
    }
}

fn read_together(engine: &dyn IoEngine, mut jobs: Vec<FetchJob>) {
    let mut all: Vec<IoReadRequest> = Vec::new();
    // The job of each read, and the job's items that it serves.
    let mut serves: Vec<(usize, Range<usize>)> = Vec::new();
    for (number, job) in jobs.iter_mut().enumerate() {
        job.items.sort_unstable_by_key(|item| (item.segment, item.record));
        let (mut reads, groups) = job.coalesced_reads();
        let counters = &job.reads.counters;
        counters.reads.fetch_add(reads.len() as u64, Ordering::Relaxed);
        counters.read_bytes.fetch_add(reads.iter().map(|read| read.len as u64).sum(), Ordering::Relaxed);
        serves.extend(groups.windows(2).map(|pair| (number, pair[0] as usize..pair[1] as usize)));
        all.append(&mut reads);
    }
    let mut results: Vec<Result<()>> = jobs.iter().map(|_| Ok(())).collect();
    engine.read_batch(&all, &mut |position, bytes: Result<&[u8]>, took| {
        let (number, items) = &serves[position];
        if bytes.is_ok() {
            jobs[*number].reads.counters.latency.record(took);
        }
        let arrived = bytes.and_then(|bytes| jobs[*number].deliver_read(items.clone(), all[position].offset, bytes));
        if let Err(error) = arrived
            && results[*number].is_ok()
        {
            results[*number] = Err(error);
        }
    });
    for (job, result) in jobs.into_iter().zip(results) {
        job.finish(result);
    }
}

/// Fetches of one or several tiers that are read in one submission, by [`FetchBatch::submit`] or when the batch is
/// dropped.
///
/// An unsubmitted fetch pins the files that it is to read. A thread that waits for it, or for the space of those files,
/// would wait forever if the batch's owner waits for that thread, or is that thread. So the jobs are stored in their
/// tier until they are submitted, and any thread that is about to wait submits them.
#[derive(Debug, Default)]
pub struct FetchBatch {
    /// The fetch contexts of tiers that have, or had, jobs of this batch.
    tiers: Vec<Arc<FetchContext>>,
}

impl FetchBatch {
    /// Starts reading if at least `rows` rows are unsubmitted.
    pub fn submit_if_worthwhile(&mut self, rows: usize) {
        let waiting =
            |reads: &Arc<FetchContext>| lock(&reads.unsubmitted).iter().map(|job| job.items.len()).sum::<usize>();
        if self.tiers.iter().map(waiting).sum::<usize>() >= rows {
            self.submit_all();
        }
    }

    /// Starts reading.
    pub fn submit(mut self) {
        self.submit_all();
    }

    /// Adds a job, after its lookups.
    pub(crate) fn add(&mut self, job: FetchJob) {
        let reads = job.reads.clone();
        lock(&reads.unsubmitted).push(job);
        if !self.tiers.iter().any(|other| Arc::ptr_eq(other, &reads)) {
            self.tiers.push(reads);
        }
    }

    fn submit_all(&mut self) {
        let Some(first) = self.tiers.first() else { return };
        let workers = first.workers;
        let jobs: Vec<FetchJob> = self.tiers.drain(..).flat_map(|reads| reads.take_unsubmitted()).collect();
        if !jobs.is_empty() {
            workers.submit_read(Box::new(ReadJobs(jobs)));
        }
    }
}

impl Drop for FetchBatch {
    fn drop(&mut self) {
        self.submit_all();
    }
}

#[cfg(test)]
mod tests;
