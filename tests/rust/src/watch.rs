//! A watchdog: a test that hangs says what its threads do, and ends.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Seconds that a watched test may take: a hang, not slowness, so many times what the slowest machine needs.
const LIMIT_S: u64 = 600;

/// Run `body`; if it is not done after [`LIMIT_S`] (`EMBCACHE_WATCHDOG_S`), print what `report` says and each thread's state, and
/// abort.
pub fn watched<T>(report: impl Fn() -> String + Send + 'static, body: impl FnOnce() -> T) -> T {
    let limit = std::env::var("EMBCACHE_WATCHDOG_S").ok().and_then(|limit| limit.parse().ok()).unwrap_or(LIMIT_S);
    let (done, wait) = channel::<()>();
    let dog = std::thread::spawn(move || {
        if wait.recv_timeout(Duration::from_secs(limit)) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        eprintln!("nothing moves since {limit} s at the latest; threads:\n{}", threads());
        // Last: it may need a lock that is held for ever.
        eprintln!("{}", report());
        std::process::abort();
    });
    let result = body();
    drop(done);
    let _ = dog.join();
    result
}

/// Name, state and kernel wait channel of each thread of this process.
fn threads() -> String {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return String::new() };
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let lines = tasks.flatten().map(|task| {
        let path = task.path();
        let status = read(path.join("status"));
        let state = status.lines().find(|line| line.starts_with("State:")).unwrap_or_default().to_owned();
        format!("  {:24} {state} {}", read(path.join("comm")), read(path.join("wchan")))
    });
    lines.collect::<Vec<_>>().join("\n")
}
