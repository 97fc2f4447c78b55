//! A thread that polls for newer checkpoints.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::server::{NewestCheckpoints, TableServer};
use crate::error::{Kind, Result};
use crate::runtime::process::lower_priority;
use crate::runtime::sync::lock;

/// Maximum number of polls skipped after a failed one.
const MAX_SKIPPED_POLLS: u32 = 15;

/// Skips polls that would find the same checkpoint that could not be served before. Each poll reads and verifies it
/// again.
#[derive(Debug, Default)]
struct PollBackoff {
    failed: Option<NewestCheckpoints>,
    /// Number of polls skipped after a failed one: 1, 3, 7 and so on.
    skips_after_failure: u32,
    /// Number of polls still to skip.
    remaining_skips: u32,
}

impl PollBackoff {
    /// True if a poll is due, given the latest checkpoints.
    fn is_due(&mut self, newest: Option<NewestCheckpoints>) -> bool {
        if newest.is_none() || newest != self.failed {
            return true;
        }
        let is_due = self.remaining_skips == 0;
        self.remaining_skips = self.remaining_skips.saturating_sub(1);
        is_due
    }

    /// Records the result of a poll.
    fn record(&mut self, newest: Option<NewestCheckpoints>, has_failed: bool) {
        let again = has_failed && newest == self.failed;
        self.failed = newest.filter(|_| has_failed);
        self.skips_after_failure = if again { (2 * self.skips_after_failure + 1).min(MAX_SKIPPED_POLLS) } else { 1 };
        self.remaining_skips = self.skips_after_failure;
    }
}

#[derive(Debug, Default)]
struct FollowerStop {
    is_requested: Mutex<bool>,
    changed: Condvar,
}

/// Polls for newer checkpoints until it is stopped or dropped.
#[derive(Debug)]
pub struct ServingFollower {
    stop: Arc<FollowerStop>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl TableServer {
    /// Polls for a newer checkpoint at intervals of `every`, on its own thread. Failed polls are counted, logged and
    /// repeated: with increasing intervals, up to every sixteenth time, while the latest checkpoint stays the same.
    ///
    /// Errors: `Config` if the interval is 0; `Storage` if the OS cannot start a thread.
    pub fn follow(self: &Arc<Self>, every: Duration) -> Result<ServingFollower> {
        if every.is_zero() {
            return Err(Kind::Config.error("poll_seconds must be more than 0"));
        }
        let (stop, serving) = (Arc::new(FollowerStop::default()), Arc::downgrade(self));
        let theirs = Arc::clone(&stop);
        let thread = Builder::new().name("embcache-follow".into()).spawn(move || run(&theirs, &serving, every));
        let thread = thread.map_err(|error| Kind::Storage.error(format!("cannot start a thread: {error}")))?;
        Ok(ServingFollower { stop, thread: Some(thread), process: std::process::id() })
    }
}

fn run(stop: &FollowerStop, serving: &Weak<TableServer>, every: Duration) {
    // Requests have priority.
    lower_priority();
    let mut back_off = PollBackoff::default();
    let mut asked = lock(&stop.is_requested);
    loop {
        let waited = stop.changed.wait_timeout_while(asked, every, |asked| !*asked);
        (asked, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *asked {
            return;
        }
        drop(asked);
        let Some(serving) = serving.upgrade() else { return };
        poll_once(stop, &serving, &mut back_off);
        drop(serving);
        asked = lock(&stop.is_requested);
    }
}

/// Polls once, unless this poll is skipped. A failed poll is counted and logged where it fails, and the next one may
/// succeed.
fn poll_once(stop: &FollowerStop, serving: &TableServer, back_off: &mut PollBackoff) {
    let mut wait = || {
        let ended = || Kind::State.error("the follower was ended");
        if *lock(&stop.is_requested) { Err(ended()) } else { Ok(()) }
    };
    let mut newest = None;
    // A version interrupted by a panic is not served yet. Without catching the panic the thread would stop, and the
    // served version would silently become stale.
    let has_failed = catch_unwind(AssertUnwindSafe(|| {
        newest = serving.newest();
        back_off.is_due(newest).then(|| serving.poll_while(&mut wait).is_err())
    }));
    let has_failed = has_failed.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        serving.record_panic(text.unwrap_or("no message"));
        Some(true)
    });
    if let Some(has_failed) = has_failed {
        back_off.record(newest, has_failed);
    }
}

impl ServingFollower {
    /// Stops the thread. Cancels building an index or waiting for one.
    pub fn stop(&mut self) {
        let thread = self.thread.take();
        // A forked process has no such thread, and no thread may exist there to release the lock.
        if self.process != std::process::id() {
            std::mem::forget(thread);
            return;
        }
        *lock(&self.stop.is_requested) = true;
        self.stop.changed.notify_all();
        if let Some(thread) = thread {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for ServingFollower {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests;
