//! The threads of the SSD tiers. A process has one set of them, whatever the number of its tables. It is started when the first tier
//! opens.
//!
//! The threads know nothing of what they do: they run tasks that tiers send them. A panic in a task ends no thread. Whoever sends a task
//! sees to it that a panic becomes an error there: a fetch ends with that error, and a tier whose write or compaction panicked only
//! reads from then on.

use std::collections::VecDeque;
#[cfg(not(loom))]
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::sync::{Condvar, Mutex, lock, wait};

/// Threads that write records and footers. There are two, so that a footer is sorted while the next segment's records are written.
#[cfg(not(loom))]
const WRITERS: usize = 2;
/// Threads that submit the reads of fetches, each as many at a time as the engine takes. There are two, so that the disk's queue stays full
/// while one of them ends its submission. With more of them reads would wait for a place in the queue.
#[cfg(not(loom))]
const READERS: usize = 2;
/// Threads that compact, which is also the number of segments of one tier that can be moved at a time.
pub(crate) const COMPACTORS: u32 = 3;

/// Something for a thread to do.
pub(crate) trait SsdTask: Send {
    /// Do it.
    fn run(self: Box<Self>);

    /// The files that it is going to read, for a model to look at.
    #[cfg(loom)]
    fn files(&self) -> Vec<std::path::PathBuf> {
        Vec::new()
    }
}

/// The process's threads, as those see them who have something to do for them.
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
    /// Whether the threads are to end. In a process they never are, unless one of them could not be started; a model's threads have to.
    closed: bool,
}

impl std::fmt::Debug for SsdTaskInbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SsdTaskInbox").field("waiting", &lock(&self.queue).waiting.len()).finish_non_exhaustive()
    }
}

impl SsdTaskInbox {
    fn send(&self, task: Box<dyn SsdTask>) {
        lock(&self.queue).waiting.push_back(task);
        self.arrived.notify_one();
    }

    fn close(&self) {
        lock(&self.queue).closed = true;
        self.arrived.notify_all();
    }

    /// Wait for the next task; `None` when the threads are to end.
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

    /// The process's threads, which the first call starts.
    #[cfg(not(loom))]
    pub(crate) fn of_process() -> Result<&'static Self> {
        static WORKERS: crate::process::PerProcess<SsdWorkers> = crate::process::PerProcess::new();
        WORKERS.get(|| {
            let workers = Self::without_threads();
            let started = start_threads("embcache-flush", WRITERS, &workers.writing)
                .and_then(|()| start_threads("embcache-fetch", READERS, &workers.reading))
                .and_then(|()| start_threads("embcache-compact", COMPACTORS as usize, &workers.compacting));
            match started {
                Ok(()) => Ok(workers),
                Err(error) => {
                    // Those that did start would wait for ever.
                    workers.writing.close();
                    workers.reading.close();
                    workers.compacting.close();
                    Err(error)
                }
            }
        })
    }

    /// The inboxes. A model's own threads do the work.
    #[cfg(loom)]
    pub(crate) fn of_process() -> Result<&'static Self> {
        loom::lazy_static! {
            static ref WORKERS: SsdWorkers = SsdWorkers::without_threads();
        }
        Ok(&WORKERS)
    }

    /// `State` in a process that was forked from the one that started the threads, because threads do not follow a fork.
    pub(crate) fn check_process(&self) -> Result<()> {
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

    /// Have a thread that writes do the task.
    pub(crate) fn submit_write(&self, task: Box<dyn SsdTask>) {
        self.writing.send(task);
    }

    /// Have a thread that reads do the task.
    pub(crate) fn submit_read(&self, task: Box<dyn SsdTask>) {
        self.reading.send(task);
    }

    /// Have a thread that compacts do the task.
    pub(crate) fn submit_compaction(&self, task: Box<dyn SsdTask>) {
        self.compacting.send(task);
    }
}

/// The threads' work, for a model to do.
#[cfg(loom)]
impl SsdWorkers {
    /// Be a thread that writes, until [`SsdWorkers::end_writer`].
    pub(crate) fn work_as_writer(&self) {
        while let Some(task) = self.writing.next() {
            task.run();
        }
    }

    pub(crate) fn end_writer(&self) {
        self.writing.close();
    }

    /// Do the reads that wait, each after `before` has looked at its files.
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
                // The task has told its owner of a panic; the thread goes on in any case.
                let _ = catch_unwind(AssertUnwindSafe(|| task.run()));
            }
        };
        std::thread::Builder::new()
            .name(name.into())
            .spawn(work)
            .map_err(|e| Error::new(Kind::Storage, format!("cannot start the thread {name} of the SSD tier: {e}")))?;
    }
    Ok(())
}
