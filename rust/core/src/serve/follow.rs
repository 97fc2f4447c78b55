//! A thread that looks for newer checkpoints.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::serving::{Newest, Serving};
use crate::error::{Error, Kind, Result};
use crate::process::give_way;
use crate::sync::lock;

/// The most looks that are left out after a failed one.
const MOST_LEFT_OUT: u32 = 15;

/// Leaves looks out that would find what could not be served when it was looked at last. Each look reads and verifies it anew.
#[derive(Debug, Default)]
struct BackOff {
    failed: Option<Newest>,
    /// How many looks are left out after a failed one: 1, 3, 7 and so on.
    after_one: u32,
    /// How many are still to be left out.
    left: u32,
}

impl BackOff {
    /// Whether to look now, where this is the newest.
    fn is_due(&mut self, newest: Option<Newest>) -> bool {
        if newest.is_none() || newest != self.failed {
            return true;
        }
        let is_due = self.left == 0;
        self.left = self.left.saturating_sub(1);
        is_due
    }

    /// A look at this is over.
    fn note(&mut self, newest: Option<Newest>, has_failed: bool) {
        let again = has_failed && newest == self.failed;
        self.failed = newest.filter(|_| has_failed);
        self.after_one = if again { (2 * self.after_one + 1).min(MOST_LEFT_OUT) } else { 1 };
        self.left = self.after_one;
    }
}

#[derive(Debug, Default)]
struct Stop {
    asked: Mutex<bool>,
    changed: Condvar,
}

/// Looks for newer checkpoints until it is stopped or dropped.
#[derive(Debug)]
pub struct Follower {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl Serving {
    /// Look for a newer checkpoint every so often, on a thread of its own. Looks that fail are counted and logged, and repeated: ever more
    /// seldom, down to every sixteenth time, for as long as the newest checkpoint is the same.
    ///
    /// Errors: `Config` where the time is 0; `Storage` where the system has no room for a thread.
    pub fn follow(self: &Arc<Self>, every: Duration) -> Result<Follower> {
        if every.is_zero() {
            return Err(Error::new(
                Kind::Config,
                "the time between two looks for a newer checkpoint must be more than 0",
            ));
        }
        let (stop, serving) = (Arc::new(Stop::default()), Arc::downgrade(self));
        let theirs = Arc::clone(&stop);
        let thread = Builder::new().name("embcache-follow".into()).spawn(move || run(&theirs, &serving, every));
        let thread = thread.map_err(|error| Error::new(Kind::Storage, format!("cannot start a thread: {error}")))?;
        Ok(Follower { stop, thread: Some(thread), process: std::process::id() })
    }
}

fn run(stop: &Stop, serving: &Weak<Serving>, every: Duration) {
    // Requests come first.
    give_way();
    let mut back_off = BackOff::default();
    let mut asked = lock(&stop.asked);
    loop {
        let waited = stop.changed.wait_timeout_while(asked, every, |asked| !*asked);
        (asked, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *asked {
            return;
        }
        drop(asked);
        let Some(serving) = serving.upgrade() else { return };
        look(stop, &serving, &mut back_off);
        drop(serving);
        asked = lock(&stop.asked);
    }
}

/// Look once, unless this look is left out. A failed look is counted and logged where it fails, and the next one may succeed.
fn look(stop: &Stop, serving: &Serving, back_off: &mut BackOff) {
    let mut wait = || {
        let ended = || Error::new(Kind::State, "the follower was ended");
        if *lock(&stop.asked) { Err(ended()) } else { Ok(()) }
    };
    let mut newest = None;
    // What a panic interrupts was not served yet. Without this the thread would end, and what is served would grow old in silence.
    let has_failed = catch_unwind(AssertUnwindSafe(|| {
        newest = serving.newest();
        back_off.is_due(newest).then(|| serving.poll_while(&mut wait).is_err())
    }));
    let has_failed = has_failed.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        serving.note_panic(text.unwrap_or("no message"));
        Some(true)
    });
    if let Some(has_failed) = has_failed {
        back_off.note(newest, has_failed);
    }
}

impl Follower {
    /// End the thread. An index that it makes, or waits for, is given up.
    pub fn stop(&mut self) {
        let thread = self.thread.take();
        // A forked process has no such thread, and nobody may be left there to give the lock up.
        if self.process != std::process::id() {
            std::mem::forget(thread);
            return;
        }
        *lock(&self.stop.asked) = true;
        self.stop.changed.notify_all();
        if let Some(thread) = thread {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::CheckpointName;

    fn newest(followed: u64, served: u64) -> Newest {
        let name = |seq| CheckpointName { seq, random: 7 };
        Newest { followed: name(followed), served: Some(name(served)) }
    }

    /// Which of the next looks are made where the newest checkpoint cannot be served.
    fn looks(back_off: &mut BackOff, newest: Option<Newest>, times: usize) -> Vec<usize> {
        let mut looked = Vec::new();
        for time in 0..times {
            if back_off.is_due(newest) {
                looked.push(time);
                back_off.note(newest, true);
            }
        }
        looked
    }

    #[test]
    fn a_checkpoint_that_cannot_be_served_is_looked_at_ever_more_seldom_and_a_newer_one_at_once() {
        let mut back_off = BackOff::default();
        assert_eq!(looks(&mut back_off, Some(newest(1, 1)), 60), [0, 2, 6, 14, 30, 46]);
        assert_eq!(looks(&mut back_off, Some(newest(2, 1)), 10), [0, 2, 6]);
        // What was converted meanwhile may be what the trainer's checkpoint lacked.
        assert_eq!(looks(&mut back_off, Some(newest(2, 2)), 4), [0, 2]);
        // The directory cannot be read, which takes no time.
        assert_eq!(looks(&mut back_off, None, 4), [0, 1, 2, 3]);
        back_off.note(Some(newest(3, 3)), false);
        assert!(back_off.is_due(Some(newest(3, 3))) && back_off.is_due(Some(newest(3, 3))), "it was served");
    }
}
