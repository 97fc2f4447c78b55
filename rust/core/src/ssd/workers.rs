//! The threads of the SSD tiers. A process has one set of them for all tables. It starts when the first tier opens.
//!
//! The threads run tasks that tiers send them, and know nothing about the tasks. A panic in a task ends no thread. The
//! sender of a task turns a panic into an error: a fetch ends with that error, and a tier whose write or compaction
//! panicked becomes read-only.

use std::collections::VecDeque;
#[cfg(not(loom))]
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::error::{Kind, Result};
use crate::runtime::sync::{Condvar, Mutex, lock, wait};

/// Threads that write records and footers. With two, a footer is sorted while the next segment's records are written.
#[cfg(not(loom))]
const WRITERS: usize = 2;
/// Threads that submit the reads of fetches, each as many at a time as the engine takes. With two, the disk's queue
/// stays full while one of them ends its submission. With more, reads would wait for a place in the queue.
#[cfg(not(loom))]
const READERS: usize = 2;
/// Threads that compact, which is also the number of segments of one tier that can be moved at a time.
pub(crate) const COMPACTORS: u32 = 3;

/// A task for a thread.
pub(crate) trait SsdTask: Send {
    /// Runs the task.
    fn run(self: Box<Self>);

    /// Files that the task reads. Only loom models use it.
    #[cfg(loom)]
    fn files(&self) -> Vec<std::path::PathBuf> {
        Vec::new()
    }
}

/// The process's threads, as seen by the senders of tasks.
#[derive(Debug)]
pub(crate) struct SsdWorkers {
    writing: Arc<SsdTaskInbox>,
    reading: Arc<SsdTaskInbox>,
    compacting: Arc<SsdTaskInbox>,
    pid: u32,
}

/// Tasks that wait for a thread.
#[derive(Default)]
struct SsdTaskInbox {
    queue: Mutex<SsdTaskQueue>,
    arrived: Condvar,
}

#[derive(Default)]
struct SsdTaskQueue {
    waiting: VecDeque<Box<dyn SsdTask>>,
    /// If true, the threads stop. In a process this happens only if one of them cannot be started; loom models close
    /// them.
    closed: bool,
}

opaque_debug!(SsdTaskInbox, self, waiting = lock(&self.queue).waiting.len());

impl SsdTaskInbox {
    fn send(&self, task: Box<dyn SsdTask>) {
        lock(&self.queue).waiting.push_back(task);
        self.arrived.notify_one();
    }

    fn close(&self) {
        lock(&self.queue).closed = true;
        self.arrived.notify_all();
    }

    /// Waits for the next task. Returns `None` when the threads are to stop.
    fn next(&self) -> Option<Box<dyn SsdTask>> {
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

impl SsdWorkers {
    fn without_threads() -> Self {
        Self { writing: Arc::default(), reading: Arc::default(), compacting: Arc::default(), pid: std::process::id() }
    }

    /// Returns the process's threads. The first call starts them.
    #[cfg(not(loom))]
    pub(crate) fn of_process() -> Result<&'static Self> {
        static WORKERS: crate::runtime::process::PerProcess<SsdWorkers> = crate::runtime::process::PerProcess::new();
        WORKERS.get(|| {
            let workers = Self::without_threads();
            let started = start_threads("embcache-flush", WRITERS, &workers.writing)
                .and_then(|()| start_threads("embcache-fetch", READERS, &workers.reading))
                .and_then(|()| start_threads("embcache-compact", COMPACTORS as usize, &workers.compacting));
            match started {
                Ok(()) => Ok(workers),
                Err(error) => {
                    // The threads that did start would wait forever.
                    workers.writing.close();
                    workers.reading.close();
                    workers.compacting.close();
                    Err(error)
                }
            }
        })
    }

    /// Returns the inboxes. A model's own threads do the work.
    #[cfg(loom)]
    pub(crate) fn of_process() -> Result<&'static Self> {
        loom::lazy_static! {
            static ref WORKERS: SsdWorkers = SsdWorkers::without_threads();
        }
        Ok(&WORKERS)
    }

    /// Returns `State` in a process that was forked from the one that started the threads, because threads do not
    /// survive a fork.
    pub(crate) fn check_process(&self) -> Result<()> {
        let pid = std::process::id();
        if pid == self.pid {
            return Ok(());
        }
        Err(Kind::State.error(format!(
            "the SSD tier was opened by process {} and this is {pid}, forked from it: open tables after the fork",
            self.pid
        )))
    }

    /// Queues a task for the writer threads.
    pub(crate) fn submit_write(&self, task: Box<dyn SsdTask>) {
        self.writing.send(task);
    }

    /// Queues a task for the reader threads.
    pub(crate) fn submit_read(&self, task: Box<dyn SsdTask>) {
        self.reading.send(task);
    }

    /// Queues a task for the compactor threads.
    pub(crate) fn submit_compaction(&self, task: Box<dyn SsdTask>) {
        self.compacting.send(task);
    }
}

/// The work of the threads, for loom models.
#[cfg(loom)]
impl SsdWorkers {
    /// Runs as a writer thread until [`SsdWorkers::end_writer`].
    pub(crate) fn work_as_writer(&self) {
        while let Some(task) = self.writing.next() {
            task.run();
        }
    }

    pub(crate) fn end_writer(&self) {
        self.writing.close();
    }

    /// Runs the queued reads, each after `before` was called with its files.
    pub(crate) fn read_waiting(&self, before: impl Fn(&std::path::Path)) {
        while let Some(task) = Self::waiting(&self.reading) {
            task.files().iter().for_each(|path| before(path));
            task.run();
        }
    }

    pub(crate) fn compact_waiting(&self) {
        while let Some(task) = Self::waiting(&self.compacting) {
            task.run();
        }
    }

    pub(crate) fn write_waiting(&self) {
        while let Some(task) = Self::waiting(&self.writing) {
            task.run();
        }
    }

    fn waiting(inbox: &SsdTaskInbox) -> Option<Box<dyn SsdTask>> {
        lock(&inbox.queue).waiting.pop_front()
    }
}

#[cfg(not(loom))]
fn start_threads(name: &str, count: usize, inbox: &Arc<SsdTaskInbox>) -> Result<()> {
    for _ in 0..count {
        let inbox = Arc::clone(inbox);
        let work = move || {
            while let Some(task) = inbox.next() {
                // The task has reported a panic to its owner; the thread continues in any case.
                let _ = catch_unwind(AssertUnwindSafe(|| task.run()));
            }
        };
        std::thread::Builder::new()
            .name(name.into())
            .spawn(work)
            .map_err(|e| Kind::Storage.error(format!("cannot start the thread {name} of the SSD tier: {e}")))?;
    }
    Ok(())
}
