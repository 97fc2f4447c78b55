//! Fetches: one batched submission of reads, verified as they arrive and put straight into place.
#![allow(unsafe_code)]

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::index::Prints;
use super::record::RecordKind;
use super::segment::{Place, Segment};
use super::shared::{Counters, Shared};
use crate::error::{Error, Kind, Result};
use crate::io::{ALIGNMENT, IoEngine, Read};
use crate::rows::{RowLayout, RowMut};
use crate::sync::{Condvar, Mutex, Ordering, lock, wait};
use crate::types::Id;

/// The most bytes of records that lie together and are read together.
const LARGEST_READ: u64 = 128 << 10;
/// The most bytes between records that are read together. Reading on costs a disk less than another read: 13 to 15 µs for a read, and
/// 0.9 µs more for each KiB, were measured.
const LARGEST_GAP: u64 = 16 << 10;

/// A batch of reads under way.
#[derive(Debug, Default)]
pub struct Fetch {
    outcome: Mutex<Option<Result<Vec<u32>>>>,
    done: Condvar,
    /// Whose reads they are.
    tier: Weak<Shared>,
}

impl Fetch {
    /// Block until every row is in place. Returns the positions (in the request) of ids that turned out not to be here, ascending;
    /// the first I/O or checksum error otherwise. May be called more than once, from several threads.
    pub fn wait(&self) -> Result<Vec<u32>> {
        if !self.is_done()
            && let Some(tier) = self.tier.upgrade()
        {
            // The reads may be part of a batch that another thread has not submitted yet.
            tier.submit_fetches();
        }
        let mut outcome = lock(&self.outcome);
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            outcome = wait(&self.done, outcome);
        }
    }

    /// Whether `wait` would return at once.
    pub fn is_done(&self) -> bool {
        lock(&self.outcome).is_some()
    }

    fn finish(&self, outcome: Result<Vec<u32>>) {
        lock(&self.outcome).get_or_insert(outcome);
        self.done.notify_all();
    }
}

/// A record to read: `segment` is a position in the job's list.
#[derive(Clone, Copy, Debug)]
struct Item {
    segment: u32,
    position: u32,
    record: u32,
}

/// The part of a fetch that needs the disk.
#[derive(Debug)]
pub(super) struct FetchJob {
    fetch: Arc<Fetch>,
    tier: Arc<Shared>,
    /// Their files stay as long as this lives.
    segments: Vec<Arc<Segment>>,
    items: Vec<Item>,
    wanted: Vec<(Id, RowMut)>,
    /// What the places of `wanted` lie in, where whoever asked may be gone before the reads are.
    _places: Option<Places>,
    missing: Vec<u32>,
    started: Instant,
}

/// Keeps the memory that rows are read into.
pub type Places = Arc<dyn Any + Send + Sync>;

impl Drop for FetchJob {
    fn drop(&mut self) {
        // Only a panic gets here without an outcome: nobody may wait for ever.
        self.fetch.finish(Err(Error::new(Kind::State, "a fetch from the SSD tier ended without a result")));
        self.segments.clear();
        self.tier.home.space.poke();
    }
}

/// Puts rows that were read where they are wanted.
#[derive(Clone, Copy)]
struct Placing<'a> {
    layout: &'a RowLayout,
    prints: Prints,
}

/// Put record `number` of a segment in place if it is `id`'s row; whether it is. The index takes one id for another only where both have
/// the same print: any other record is damage, and never a row that was not trained yet.
#[inline]
fn place(with: Placing<'_>, bytes: &[u8], segment: &Segment, number: u32, id: Id, to: RowMut) -> Result<bool> {
    let record = segment.decode(number, bytes)?;
    if record.kind != RecordKind::Row {
        let (at, got) = (segment.offset(number) + 5, format!("{:?}", record.kind));
        return Err(Error::corruption(segment.path(), at, "the record's kind", "Row", got));
    }
    if record.id != id {
        if with.prints.are_equal(record.id, id) {
            return Ok(false);
        }
        let at = segment.offset(number) + 8;
        return Err(Error::corruption(segment.path(), at, "the record's id", id, record.id));
    }
    let layout = with.layout;
    let to = to.address();
    // SAFETY: who made the RowMut promised that a header and `vector_floats` floats are there, and that nobody else touches them until
    // this fetch says that it is done.
    let (vector, header) =
        unsafe { (std::slice::from_raw_parts_mut(to.vector, layout.vector_floats()), &mut *to.header) };
    *header = record.unpack(layout, vector);
    Ok(true)
}

/// Fetches, of one or several tiers, that go to the disk as one submission: with [`FetchBatch::submit`], or when the batch is dropped.
///
/// A fetch that is not submitted keeps the files that it is to read, and a thread that waits for it, or for the room that those files
/// take, would wait for ever where the batch's owner waits for that thread, or is that thread. So the jobs lie with their tier until
/// they are submitted, where whoever is about to wait submits them ([`Shared::submit_fetches`]).
#[derive(Debug, Default)]
pub struct FetchBatch {
    /// Tiers that have, or had, jobs of this batch.
    tiers: Vec<Arc<Shared>>,
}

impl FetchBatch {
    /// Start reading if `rows` or more are waiting for it.
    pub fn submit_if_worthwhile(&mut self, rows: usize) {
        let waiting = |tier: &Arc<Shared>| lock(&tier.unsubmitted).iter().map(|job| job.items.len()).sum::<usize>();
        if self.tiers.iter().map(waiting).sum::<usize>() >= rows {
            self.submit_all();
        }
    }

    /// Start reading.
    pub fn submit(mut self) {
        self.submit_all();
    }

    fn add(&mut self, job: FetchJob) {
        let tier = job.tier.clone();
        lock(&tier.unsubmitted).push(job);
        if !self.tiers.iter().any(|other| Arc::ptr_eq(other, &tier)) {
            self.tiers.push(tier);
        }
    }

    fn submit_all(&mut self) {
        let Some(first) = self.tiers.first() else { return };
        let background = first.home.background;
        let jobs: Vec<FetchJob> =
            self.tiers.drain(..).flat_map(|tier| std::mem::take(&mut *lock(&tier.unsubmitted))).collect();
        if !jobs.is_empty() {
            background.fetch(jobs);
        }
    }
}

impl Drop for FetchBatch {
    fn drop(&mut self) {
        self.submit_all();
    }
}

impl Shared {
    fn placing(&self) -> Placing<'_> {
        Placing { layout: &self.layout, prints: self.prints }
    }

    /// Submit every fetch of this tier that waits in a batch, whoever's batch it is.
    pub(super) fn submit_fetches(&self) {
        let jobs = std::mem::take(&mut *lock(&self.unsubmitted));
        if !jobs.is_empty() {
            self.home.background.fetch(jobs);
        }
    }

    /// Look rows up: those in buffers are put in place at once, those in files join `batch`.
    pub(super) fn fetch_in(
        self: &Arc<Self>,
        wanted: Vec<(Id, RowMut)>,
        places: Option<Places>,
        batch: &mut FetchBatch,
    ) -> Arc<Fetch> {
        let fetch = Arc::new(Fetch { tier: Arc::downgrade(self), ..Fetch::default() });
        if let Err(error) = self.check_usable() {
            fetch.finish(Err(error));
            return fetch;
        }
        let mut job = FetchJob {
            fetch: fetch.clone(),
            tier: self.clone(),
            segments: Vec::new(),
            items: Vec::with_capacity(wanted.len()),
            missing: Vec::new(),
            wanted,
            _places: places,
            started: Instant::now(),
        };
        if let Err(error) = job.resolve() {
            fetch.finish(Err(error));
        } else if job.items.is_empty() {
            job.finish(Ok(()));
        } else {
            batch.add(job);
        }
        fetch
    }
}

#[cfg(loom)]
impl FetchJob {
    /// The files that it is to read.
    pub(super) fn files(&self) -> impl Iterator<Item = &std::path::Path> {
        self.segments.iter().map(|segment| segment.path())
    }
}

impl FetchJob {
    /// Look every id up; copy what is in buffers, list what is in files.
    fn resolve(&mut self) -> Result<()> {
        let tier = self.tier.clone();
        let ids: Vec<Id> = self.wanted.iter().map(|(id, _)| *id).collect();
        let mut locations = vec![None; ids.len()];
        let state = tier.view();
        let placing = tier.placing();
        state.index.get_batch(&ids, &mut locations);
        let mut listed = vec![u32::MAX; state.segments.len()];
        for (position, location) in locations.into_iter().enumerate() {
            let Some(location) = location else {
                self.missing.push(position as u32);
                continue;
            };
            let segment = state.segment(location);
            let (id, to) = self.wanted[position];
            let offset = segment.offset(location.record);
            let mut found = Ok(true);
            let at = segment.locate(offset, segment.record_bytes, &mut |bytes| {
                found = place(placing, bytes, segment, location.record, id, to);
            });
            match at {
                Place::Block => {}
                Place::Buffer => {
                    let open = state.open.iter().flatten().find(|open| open.segment.slot == location.segment);
                    let bytes = open.and_then(|open| open.get(offset)).expect("a record is in file, block or buffer");
                    found = place(placing, bytes, segment, location.record, id, to);
                }
                Place::File => {
                    let listed = &mut listed[location.segment as usize];
                    if *listed == u32::MAX {
                        *listed = self.segments.len() as u32;
                        self.segments.push(segment.clone());
                    }
                    let (position, record) = (position as u32, location.record);
                    self.items.push(Item { segment: *listed, position, record });
                }
            }
            if !found? {
                self.missing.push(position as u32);
            }
        }
        Ok(())
    }

    /// Read what is in files, one submission an I/O engine (a process has one). Called by a fetch thread.
    pub(super) fn run(mut jobs: Vec<Self>) {
        while let Some(first) = jobs.first() {
            let engine = first.tier.home.engine.clone();
            let (together, rest) = jobs.into_iter().partition(|job| Arc::ptr_eq(&job.tier.home.engine, &engine));
            Self::run_together(&*engine, together);
            jobs = rest;
        }
    }

    fn run_together(engine: &dyn IoEngine, mut jobs: Vec<Self>) {
        let mut all: Vec<Read> = Vec::new();
        // For each read its job and the job's items that it serves.
        let mut serves: Vec<(usize, Range<usize>)> = Vec::new();
        for (number, job) in jobs.iter_mut().enumerate() {
            job.items.sort_unstable_by_key(|item| (item.segment, item.record));
            let (mut reads, groups) = job.reads();
            Counters::add(&job.tier.counters.reads, reads.len() as u64);
            Counters::add(&job.tier.counters.read_bytes, reads.iter().map(|read| read.len as u64).sum());
            serves.extend(groups.windows(2).map(|pair| (number, pair[0] as usize..pair[1] as usize)));
            all.append(&mut reads);
        }
        let mut results: Vec<Result<()>> = jobs.iter().map(|_| Ok(())).collect();
        engine.read_batch(&all, &mut |position, bytes: Result<&[u8]>| {
            let (number, items) = &serves[position];
            let arrived = bytes.and_then(|bytes| jobs[*number].arrived(items.clone(), all[position].offset, bytes));
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

    /// Put the rows of one read in place: those of `items`, from `bytes` that start at `offset` of their file.
    fn arrived(&mut self, items: Range<usize>, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut result = Ok(());
        let placing = self.tier.placing();
        for item in &self.items[items] {
            let segment = &self.segments[item.segment as usize];
            let at = (segment.offset(item.record) - offset) as usize;
            let (id, to) = self.wanted[item.position as usize];
            let record = &bytes[at..at + segment.record_bytes];
            match place(placing, record, segment, item.record, id, to) {
                Ok(true) => {}
                Ok(false) => self.missing.push(item.position),
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }

    /// One read for records that lie near each other. Read `i` serves items `groups[i]..groups[i + 1]`.
    fn reads(&self) -> (Vec<Read>, Vec<u32>) {
        let mut reads: Vec<Read> = Vec::with_capacity(self.items.len());
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
            reads.push(Read { file: segment.file.clone(), offset, len: segment.record_bytes });
        }
        groups.push(self.items.len() as u32);
        (reads, groups)
    }

    fn finish(mut self, result: Result<()>) {
        let counters = &self.tier.counters;
        Counters::add(&counters.misses, self.missing.len() as u64);
        Counters::add(&counters.hits, (self.wanted.len() - self.missing.len()) as u64);
        counters.fetch_ns.fetch_add(self.started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.missing.sort_unstable();
        let missing = std::mem::take(&mut self.missing);
        // Files of segments that are gone are removed before the rows are announced.
        self.segments.clear();
        self.fetch.finish(result.map(|()| missing));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiter_is_woken_by_a_fetch_that_dies() {
        let fetch = Arc::new(Fetch::default());
        let waiter = std::thread::spawn({
            let fetch = fetch.clone();
            move || fetch.wait()
        });
        fetch.finish(Err(Error::new(Kind::State, "gone")));
        assert_eq!(waiter.join().unwrap().unwrap_err().kind(), Kind::State);
        fetch.finish(Ok(vec![]));
        assert!(fetch.wait().is_err(), "the first outcome stays");
    }
}
