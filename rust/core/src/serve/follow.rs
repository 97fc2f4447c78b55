//! A thread that looks for newer checkpoints.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::serving::Serving;
use crate::error::{Error, Kind, Result};
use crate::sync::lock;

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
    /// Look for a newer checkpoint every so often, on a thread of its own. Looks that fail are counted and logged, and repeated.
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
    let mut asked = lock(&stop.asked);
    loop {
        let waited = stop.changed.wait_timeout_while(asked, every, |asked| !*asked);
        (asked, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *asked {
            return;
        }
        drop(asked);
        let Some(serving) = serving.upgrade() else { return };
        // A failed look is counted and logged where it fails, and the next one may succeed.
        let _ = serving.poll_while(&mut || {
            let ended = || Error::new(Kind::State, "the follower was ended");
            if *lock(&stop.asked) { Err(ended()) } else { Ok(()) }
        });
        drop(serving);
        asked = lock(&stop.asked);
    }
}

impl Follower {
    /// End the thread. An index that it makes, or waits for, is given up.
    pub fn stop(&mut self) {
        *lock(&self.stop.asked) = true;
        self.stop.changed.notify_all();
        // A forked process has no such thread.
        if let Some(thread) = self.thread.take().filter(|_| self.process == std::process::id()) {
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
