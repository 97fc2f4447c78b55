//! Helpers of the benches that write to the disk for a set time.

use std::path::Path;
use std::time::{Duration, Instant};

use embcache::ssd::SsdTier;

use crate::measure::Scale;
use crate::raw_disk::write_sequentially;
use crate::tier::ROW_BYTES;

/// The name of the limit of benches that write rows.
pub const RAW_WRITE: &str = "raw sequential O_DIRECT of 1 MiB + fdatasync, 288 bytes a row";
const CHUNK: usize = 1 << 20;

/// The integer in an environment variable, or `usual`.
pub fn setting(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// The length of a measured window: `EMBCACHE_BENCH_SSD_SECONDS`, by default 12 seconds.
pub fn window(scale: Scale) -> Duration {
    match setting("EMBCACHE_BENCH_SSD_SECONDS", 0) {
        0 => Duration::from_millis(scale.pick(12_000, 200)),
        seconds => Duration::from_secs(seconds),
    }
}

/// Waits until the tier has finished its background work, which would slow down the other sides.
pub fn settle(tier: &SsdTier) {
    let mut before = 0;
    loop {
        let now = tier.stats().tier.written_bytes;
        if now == before {
            return;
        }
        before = now;
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// The rows per second of a raw sequential write of 1 GiB into `dir`.
///
/// # Panics
/// Panics when the disk is full, or rejects the write.
pub fn raw_write_rate(dir: &Path, scale: Scale) -> f64 {
    let path = dir.join("raw");
    let bytes = raw_write_bytes(scale);
    let begin = Instant::now();
    write_sequentially(&path, bytes, CHUNK);
    let rate = bytes as f64 / ROW_BYTES as f64 / begin.elapsed().as_secs_f64();
    std::fs::remove_file(&path).expect("our own file");
    rate
}

/// Bytes of disk that [`raw_write_rate`] needs.
pub fn raw_write_bytes(scale: Scale) -> usize {
    scale.pick(1 << 30, 16 << 20)
}
