//! The threads of the SSD tiers: one set a process, whatever the number of tables, made when the first tier opens.
//!
//! A panic ends no thread and strands nobody: what the task belongs to gets it as an error (a fetch ends with one, a tier whose write
//! or compaction panicked only reads from then on).

use std::collections::VecDeque;
#[cfg(not(loom))]
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use super::compact;
#[cfg(not(loom))]
use super::compact::MOST_MOVING;
use super::fetch::FetchJob;
use super::segment::Segment;
use super::shared::Shared;
use crate::error::{Error, Kind, Result};
use crate::sync::{Condvar, Mutex, lock, wait};

/// Threads that write blocks and footers. Two, so that a footer is sorted while the next segment's blocks are written.
#[cfg(not(loom))]
const FLUSHERS: usize = 2;
/// Threads that submit the reads of plans, each as deep as the engine likes. Two, so that the disk's queue is full while one of them ends
/// its submission; more, where two fill the queue, make reads wait for a place in it.
#[cfg(not(loom))]
const FETCHERS: usize = 2;

/// The threads' inboxes.
#[derive(Debug)]
pub(super) struct Background {
    flush: Arc<Inbox<Arc<Segment>>>,
    fetch: Arc<Inbox<Vec<FetchJob>>>,
    compact: Arc<Inbox<Weak<Shared>>>,
    pid: u32,
}

/// Tasks that wait for a thread.
#[derive(Debug)]
struct Inbox<T> {
    queue: Mutex<Queue<T>>,
    arrived: Condvar,
}

#[derive(Debug)]
struct Queue<T> {
    waiting: VecDeque<T>,
    /// Never where all threads of a process started; a model's threads have to end.
    closed: bool,
}

impl<T> Default for Inbox<T> {
    fn default() -> Self {
        Self { queue: Mutex::new(Queue { waiting: VecDeque::new(), closed: false }), arrived: Condvar::new() }
    }
}

impl<T> Inbox<T> {
    fn send(&self, task: T) {
        lock(&self.queue).waiting.push_back(task);
        self.arrived.notify_one();
    }

    fn close(&self) {
        lock(&self.queue).closed = true;
        self.arrived.notify_all();
    }

    /// The next task, waited for; `None` when there will be none.
    fn next(&self) -> Option<T> {
        let mut queue = lock(&self.queue);
        loop {
            let task = queue.waiting.pop_front();
            if task.is_some() || queue.closed {
                return task;
            }
            queue = wait(&self.arrived, queue);
        }
    }
}

impl Background {
    fn idle() -> Self {
        Self { flush: Arc::default(), fetch: Arc::default(), compact: Arc::default(), pid: std::process::id() }
    }

    /// The process's threads.
    #[cfg(not(loom))]
    pub(super) fn shared() -> Result<&'static Self> {
        static BACKGROUND: crate::process::PerProcess<Background> = crate::process::PerProcess::new();
        BACKGROUND.get(|| {
            let background = Self::idle();
            match background.start() {
                Ok(()) => Ok(background),
                Err(error) => {
                    // Those that did start would wait for ever.
                    background.flush.close();
                    background.fetch.close();
                    background.compact.close();
                    Err(error)
                }
            }
        })
    }

    #[cfg(not(loom))]
    fn start(&self) -> Result<()> {
        start("embcache-flush", FLUSHERS, &self.flush, |segment| segment.run_jobs())?;
        start("embcache-fetch", FETCHERS, &self.fetch, FetchJob::run)?;
        start("embcache-compact", MOST_MOVING as usize, &self.compact, |tier| compact_tier(&tier))
    }

    /// The inboxes; a model's threads do the work.
    #[cfg(loom)]
    pub(super) fn shared() -> Result<&'static Self> {
        loom::lazy_static! {
            static ref BACKGROUND: Background = Background::idle();
        }
        Ok(&BACKGROUND)
    }

    /// `State` in a process that was forked from the one that opened the tier: threads do not follow a fork.
    pub(super) fn check_process(&self) -> Result<()> {
        let pid = std::process::id();
        if pid == self.pid {
            return Ok(());
        }
        Err(Error::new(
            Kind::State,
            format!(
                "the SSD tier was opened by process {} and this is {pid}, forked from it: open tables after the fork",
                self.pid
            ),
        ))
    }

    pub(super) fn flush(&self, segment: Arc<Segment>) {
        self.flush.send(segment);
    }

    pub(super) fn fetch(&self, jobs: Vec<FetchJob>) {
        self.fetch.send(jobs);
    }

    pub(super) fn compact(&self, tier: &Arc<Shared>) {
        self.compact.send(Arc::downgrade(tier));
    }
}

/// What the threads do, for a model's threads to do until the inboxes are closed, or for a model to do itself.
#[cfg(loom)]
impl Background {
    pub(super) fn work_as_flusher(&self) {
        while let Some(segment) = self.flush.next() {
            segment.run_jobs();
        }
    }

    /// What waits to be read, after `before` has looked at it.
    pub(super) fn fetch_waiting(&self, before: impl Fn(&FetchJob)) {
        while let Some(jobs) = { lock(&self.fetch.queue).waiting.pop_front() } {
            jobs.iter().for_each(&before);
            FetchJob::run(jobs);
        }
    }

    pub(super) fn compact_waiting(&self) {
        while let Some(tier) = { lock(&self.compact.queue).waiting.pop_front() } {
            compact_tier(&tier);
        }
    }

    pub(super) fn flush_waiting(&self) {
        while let Some(segment) = { lock(&self.flush.queue).waiting.pop_front() } {
            segment.run_jobs();
        }
    }

    pub(super) fn end_flusher(&self) {
        self.flush.close();
    }
}

fn compact_tier(tier: &Weak<Shared>) {
    if let Some(tier) = tier.upgrade() {
        tier.contain("compaction", || compact::run(&tier));
    }
}

#[cfg(not(loom))]
fn start<T: Send + 'static>(
    name: &str,
    count: usize,
    inbox: &Arc<Inbox<T>>,
    work: impl Fn(T) + Copy + Send + 'static,
) -> Result<()> {
    for _ in 0..count {
        let inbox = Arc::clone(inbox);
        let worker = move || {
            while let Some(task) = inbox.next() {
                // The task's own panics are contained where their owner is known; the thread goes on in any case.
                let _ = catch_unwind(AssertUnwindSafe(|| work(task)));
            }
        };
        std::thread::Builder::new()
            .name(name.into())
            .spawn(worker)
            .map_err(|e| Error::new(Kind::Storage, format!("cannot start the thread {name} of the SSD tier: {e}")))?;
    }
    Ok(())
}
