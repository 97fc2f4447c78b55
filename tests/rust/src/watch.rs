//! A watchdog for tests. A test that hangs reports the state of its threads, and aborts.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// The seconds that a watched test may run. This is for hangs and not for slowness, so it is many times the time of the
/// slowest machine.
const LIMIT_S: u64 = 600;

/// Runs `body`. If that takes longer than [`LIMIT_S`] seconds (or `EMBCACHE_WATCHDOG_S`), prints `report()` and the
/// state of each thread, and aborts.
pub fn watched<T>(report: impl Fn() -> String + Send + 'static, body: impl FnOnce() -> T) -> T {
    let limit = std::env::var("EMBCACHE_WATCHDOG_S").ok().and_then(|limit| limit.parse().ok()).unwrap_or(LIMIT_S);
    let (done, wait) = channel::<()>();
    let dog = std::thread::spawn(move || {
        if wait.recv_timeout(Duration::from_secs(limit)) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        eprintln!("nothing moves since {limit} s at the latest; threads:\n{}", threads());
        // The report is last, because it may need a lock that is never released.
        eprintln!("{}", report());
        std::process::abort();
    });
    let result = body();
    drop(done);
    let _ = dog.join();
    result
}

/// The name, the state and the kernel's wait channel of each thread of this process.
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
