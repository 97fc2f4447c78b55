//! Portable batches of reads: a pool of threads that call `pread`.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::disk::{BatchReader, DiskEngine, DiskFile, SectorRead};
use super::{ALIGNMENT, BufPool, IoReadRequest, PooledBuf, ReadSink};
use crate::error::{Error, Result};
use crate::runtime::memory;
use crate::runtime::sync::lock;

/// Threads of the pool, and thus the maximum number of concurrent reads.
const THREADS: usize = 32;
/// Maximum number of a batch's chunks that were read and wait for the sink.
const READ_AHEAD: usize = 8;
/// Maximum number of unused buffers: the number that all threads and two batches use at the same time.
const KEPT_BUFFERS: usize = THREADS + 2 * READ_AHEAD;
/// Maximum number of reads of a batch that a thread takes at a time.
const CHUNK_READS: usize = 16;
/// A thread takes no further read of a batch once its reads have this many bytes.
const CHUNK_BYTES: usize = 128 << 10;

/// The engine of plain system calls.
pub type PsyncEngine = DiskEngine<PreadPool>;

impl PsyncEngine {
    /// Creates an engine that requests `O_DIRECT` if `direct` is true.
    pub fn new(direct: bool) -> Self {
        Self::with_reader(PreadPool::default(), direct)
    }
}

impl Default for PsyncEngine {
    /// Creates an engine that uses `O_DIRECT` if the file system supports it.
    fn default() -> Self {
        Self::new(true)
    }
}

/// Reads batches on a pool of threads, which the first batch starts.
#[derive(Debug, Default)]
pub struct PreadPool {
    workers: OnceLock<Option<Arc<PreadWorkers>>>,
}

/// The data that the threads of a pool share.
#[derive(Debug)]
struct PreadWorkers {
    queue: Mutex<PreadQueue>,
    ready: Condvar,
    buffers: Arc<BufPool>,
}

#[derive(Debug, Default)]
struct PreadQueue {
    /// Batches with chunks that no thread has taken yet, oldest first.
    batches: VecDeque<Arc<PreadBatch>>,
    closed: bool,
}

#[derive(Debug)]
struct PreadBatch {
    reads: Vec<IoReadRequest>,
    process: u32,
    /// The positions of the reads of each chunk.
    chunks: Vec<Range<usize>>,
    next: AtomicUsize,
    done: SyncSender<PreadChunk>,
}

/// Completed reads of one thread, consecutive in one buffer.
struct PreadChunk {
    first: usize,
    /// `None` if the allocation of a buffer failed, and after a panic.
    buffer: Option<PooledBuf>,
    outcomes: Vec<PreadOutcome>,
}

/// Outcome of a read: the range of the requested bytes in its chunk's buffer, and the duration.
type PreadOutcome = (Result<Range<usize>>, Duration);

impl PreadChunk {
    /// Creates a chunk whose reads all fail with this error.
    fn failed(positions: Range<usize>, error: &Error) -> Self {
        let first = positions.start;
        Self { first, buffer: None, outcomes: positions.map(|_| (Err(error.clone()), Duration::ZERO)).collect() }
    }
}

/// Returns the positions of the reads of each chunk. Chunks are small, so that the threads share a batch, and large
/// enough to be worth the cost of queueing.
fn chunks_of(reads: &[IoReadRequest]) -> Vec<Range<usize>> {
    let most = reads.len().div_ceil(THREADS).clamp(1, CHUNK_READS);
    let mut chunks: Vec<Range<usize>> = Vec::new();
    let mut bytes = 0;
    for (position, read) in reads.iter().enumerate() {
        match chunks.last_mut() {
            Some(chunk) if chunk.len() < most && bytes + read.len <= CHUNK_BYTES => {
                chunk.end = position + 1;
                bytes += read.len;
            }
            _ => {
                chunks.push(position..position + 1);
                bytes = read.len;
            }
        }
    }
    chunks
}

/// Bytes of the buffer for `read`. They are a multiple of the largest alignment, so that the next read starts aligned
/// too.
fn buffer_bytes_of(read: &IoReadRequest) -> usize {
    let skip = (read.offset % ALIGNMENT as u64) as usize;
    (skip + read.len).next_multiple_of(ALIGNMENT)
}

/// Reads into `buffer`. Returns the range of the requested bytes in `buffer`.
fn read_one(read: &IoReadRequest, process: u32, buffer: &mut [u8]) -> Result<Range<usize>> {
    let Some(file) = read.file.as_any().downcast_ref::<DiskFile>().filter(|file| file.is_opened_by(process)) else {
        read.file.read_at(read.offset, &mut buffer[..read.len])?;
        return Ok(0..read.len);
    };
    let mut cover = SectorRead::new(read.offset, read.len, file.align());
    file.read_sectors(&mut cover, buffer)?;
    Ok(cover.skip..cover.skip + cover.len)
}

/// Runs reads on this thread, one after the other, and passes each with its position to `sink`.
pub(super) fn read_serially<'a>(reads: impl Iterator<Item = (usize, &'a IoReadRequest)>, sink: &mut ReadSink<'_>) {
    let mut data = Vec::new();
    for (position, read) in reads {
        data.clear();
        let asked = Instant::now();
        let done = memory::reserve(&mut data, "read", read.len).and_then(|()| {
            data.resize(read.len, 0);
            read.file.read_at(read.offset, &mut data)
        });
        sink(position, done.map(|()| &data[..]), asked.elapsed());
    }
}

impl PreadWorkers {
    fn read_chunk(&self, batch: &PreadBatch, chunk: Range<usize>) -> PreadChunk {
        let reads = &batch.reads[chunk.clone()];
        let mut buffer = match self.buffers.take_at_least(reads.iter().map(buffer_bytes_of).sum()) {
            Ok(buffer) => buffer,
            Err(refused) => {
                return PreadChunk::failed(chunk, &refused);
            }
        };
        let (mut at, mut asked) = (0, Instant::now());
        let rows = reads
            .iter()
            .map(|read| {
                let start = at;
                at += buffer_bytes_of(read);
                let row = read_one(read, batch.process, &mut buffer[start..at]);
                let now = Instant::now();
                let took = now - std::mem::replace(&mut asked, now);
                (row.map(|row| start + row.start..start + row.end), took)
            })
            .collect();
        PreadChunk { first: chunk.start, buffer: Some(buffer), outcomes: rows }
    }

    fn run(&self) {
        loop {
            let batch = {
                let mut queue = lock(&self.queue);
                loop {
                    if let Some(batch) = queue.batches.front() {
                        break batch.clone();
                    }
                    if queue.closed {
                        return;
                    }
                    queue = self.ready.wait(queue).unwrap_or_else(std::sync::PoisonError::into_inner);
                }
            };
            loop {
                let taken = batch.next.fetch_add(1, Ordering::Relaxed);
                let Some(chunk) = batch.chunks.get(taken) else { break };
                // The thread that waits for the batch counts its chunks. So a chunk is sent even when reading it
                // panicked.
                let read = catch_unwind(AssertUnwindSafe(|| self.read_chunk(&batch, chunk.clone())));
                let read = read.unwrap_or_else(|panic| {
                    PreadChunk::failed(chunk.clone(), &Error::panicked("a thread that reads", &*panic))
                });
                if batch.done.send(read).is_err() {
                    // The receiver is gone, because the batch's sink panicked. The other chunks need not be read.
                    batch.next.store(batch.chunks.len(), Ordering::Relaxed);
                }
            }
            lock(&self.queue).batches.retain(|queued| !Arc::ptr_eq(queued, &batch));
        }
    }
}

impl PreadPool {
    /// `None` if the OS cannot start a thread.
    fn workers(&self) -> Option<&Arc<PreadWorkers>> {
        let workers = self.workers.get_or_init(|| {
            let work = Arc::new(PreadWorkers {
                queue: Mutex::default(),
                ready: Condvar::new(),
                buffers: Arc::new(BufPool::new(CHUNK_BYTES + 2 * CHUNK_READS * ALIGNMENT, KEPT_BUFFERS)),
            });
            for number in 0..THREADS {
                let shared = work.clone();
                let started =
                    std::thread::Builder::new().name(format!("embcache-io-{number}")).spawn(move || shared.run());
                if started.is_err() {
                    // With fewer threads, or none, reads are slower but correct.
                    return (number > 0).then_some(work);
                }
            }
            Some(work)
        });
        workers.as_ref()
    }
}

impl Drop for PreadPool {
    fn drop(&mut self) {
        if let Some(Some(work)) = self.workers.get() {
            lock(&work.queue).closed = true;
            work.ready.notify_all();
        }
    }
}

impl BatchReader for PreadPool {
    fn name(&self) -> &'static str {
        "pread"
    }

    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>) {
        let work = self.workers();
        let work = match work {
            Some(work) if reads.len() > 1 => work,
            _ => return read_serially(reads.iter().enumerate(), sink),
        };
        // Threads that are ahead of the sink wait here, which bounds the number of buffers of a batch.
        let (done, finished) = sync_channel(READ_AHEAD);
        let chunks = chunks_of(reads);
        let batch = Arc::new(PreadBatch {
            reads: reads.to_vec(),
            process: std::process::id(),
            chunks,
            next: AtomicUsize::new(0),
            done,
        });
        lock(&work.queue).batches.push_back(batch.clone());
        work.ready.notify_all();
        for _ in 0..batch.chunks.len() {
            let Ok(chunk) = finished.recv() else { break };
            for (row, (result, took)) in chunk.outcomes.into_iter().enumerate() {
                let bytes = chunk.buffer.as_deref().unwrap_or_default();
                sink(chunk.first + row, result.map(|range| &bytes[range]), took);
            }
        }
    }
}
