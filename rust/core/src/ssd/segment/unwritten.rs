//! The parts of a segment that are not in its file yet: blocks being written, and the queue of jobs that write them, in
//! order.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::ssd::format::footer::FooterEntry;
use crate::ssd::segment::buffer::WriteBlock;
use crate::sync::{AtomicU64, Mutex, Ordering, lock};

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
pub(crate) struct UnwrittenBlocks {
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
    pub(crate) fn locate(&self, offset: u64, len: usize, with: &mut dyn FnMut(&[u8])) -> SegmentByteSource {
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

    /// Adds a block, in which its bytes are found.
    pub(crate) fn add_block(&self, block: Arc<WriteBlock>) {
        lock(&self.blocks).push(block);
    }

    /// Records that the first `bytes` of the segment are in the file.
    pub(crate) fn set_written(&self, bytes: u64) {
        self.written_bytes.store(bytes, Ordering::Release);
    }

    /// Releases a block whose bytes are in the file, or are not needed.
    pub(crate) fn drop_block(&self, block: &Arc<WriteBlock>) {
        lock(&self.blocks).retain(|other| !Arc::ptr_eq(other, block));
    }

    /// Adds a job. Returns `true` if a writer must be scheduled.
    pub(crate) fn add_job(&self, job: SegmentJob) -> bool {
        let mut jobs = lock(&self.jobs);
        jobs.waiting.push_back(job);
        !std::mem::replace(&mut jobs.has_writer, true)
    }

    /// Takes the next job. If there is none, adding the next one schedules a writer again.
    pub(crate) fn next_job(&self) -> Option<SegmentJob> {
        let mut jobs = lock(&self.jobs);
        let next = jobs.waiting.pop_front();
        jobs.has_writer = next.is_some();
        next
    }
}
