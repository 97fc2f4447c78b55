//! The threads of the SSD tiers: one set a process, whatever the number of tables, made when the first tier opens.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::compact;
use super::fetch::FetchJob;
use super::segment::Segment;
use super::shared::Shared;
use crate::error::{Error, Kind, Result};
use crate::sync::lock;

/// Threads that write blocks and footers. Two, so that a footer is sorted while the next segment's blocks are written.
const FLUSHERS: usize = 2;
/// Threads that submit the reads of plans; each submission is as deep as the engine likes.
const FETCHERS: usize = 4;

/// The threads' inboxes.
#[derive(Debug)]
pub(super) struct Background {
    flush: Sender<Arc<Segment>>,
    fetch: Sender<Vec<FetchJob>>,
    compact: Sender<Weak<Shared>>,
    pid: u32,
}

impl Background {
    /// The process's threads. `State` in a process forked after they were made: threads do not follow a fork.
    pub(super) fn shared() -> Result<&'static Self> {
        static BACKGROUND: OnceLock<Result<Background>> = OnceLock::new();
        let background = BACKGROUND.get_or_init(Self::start).as_ref().map_err(Clone::clone)?;
        background.check_process()?;
        Ok(background)
    }

    /// `State` in a process that was forked after the threads were made.
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

    fn start() -> Result<Self> {
        Ok(Self {
            flush: workers("embcache-flush", FLUSHERS, |segment: Arc<Segment>| segment.run_jobs())?,
            fetch: workers("embcache-fetch", FETCHERS, FetchJob::run)?,
            compact: workers("embcache-compact", 1, |tier: Weak<Shared>| {
                if let Some(tier) = tier.upgrade() {
                    compact::run(&tier);
                }
            })?,
            pid: std::process::id(),
        })
    }

    pub(super) fn flush(&self, segment: Arc<Segment>) {
        self.flush.send(segment).expect("the threads outlive the process's static");
    }

    pub(super) fn fetch(&self, jobs: Vec<FetchJob>) {
        self.fetch.send(jobs).expect("the threads outlive the process's static");
    }

    pub(super) fn compact(&self, tier: &Arc<Shared>) {
        self.compact.send(Arc::downgrade(tier)).expect("the threads outlive the process's static");
    }
}

fn workers<T: Send + 'static>(name: &str, count: usize, work: impl Fn(T) + Copy + Send + 'static) -> Result<Sender<T>> {
    let (sender, receiver) = channel::<T>();
    let receiver: Arc<Mutex<Receiver<T>>> = Arc::new(Mutex::new(receiver));
    for _ in 0..count {
        let receiver = receiver.clone();
        let worker = move || {
            loop {
                let received = lock(&receiver).recv();
                let Ok(task) = received else { return };
                // A panic concerns one task: its owner finds out (a fetch ends with an error), the thread goes on.
                let _ = catch_unwind(AssertUnwindSafe(|| work(task)));
            }
        };
        std::thread::Builder::new()
            .name(name.into())
            .spawn(worker)
            .map_err(|e| Error::new(Kind::Storage, format!("cannot start the thread {name} of the SSD tier: {e}")))?;
    }
    Ok(sender)
}
