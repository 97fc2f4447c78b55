//! Shared code of the benches: the workloads, and the measurement in alternating rounds.
//!
//! A bench measures this project's code ("ours") and a limit on the same data. The limit is the result of a plain,
//! well-written loop or of raw system calls. Each file in `benches/all` has a [`Group`] of benches, and one program has
//! all groups, because separate programs would each be linked and optimized:
//!
//! - `cargo bench [NAME…]` measures each bench, or those whose name contains one of the names, in alternating rounds,
//!   prints ours, the limit and their ratio, and writes `target/bench/<name>.json`. Each group has its own process.
//!   `--smoke` or `EMBCACHE_BENCH=smoke` shrinks the data, which only shows that the bench runs.
//! - `--serve NAME` measures one round for each line on stdin that requests one. Another program (`benches/python`) can
//!   thus measure rivals between our rounds on the same data. See [`serve`].
//!
//! A group whose one measurement gives several rows is not served. `--list` prints its name after each of its rows, and
//! `--rows NAME…` prints a [`Row`] for each as a line of JSON. See [`Group::rows`].

mod evictions;
mod groups;
mod in_turn;
mod measure;
mod null_disk;
mod plain;
mod plain_kernels;
mod plain_load;
mod plain_serving;
mod plain_writeback;
mod process;
mod raw_disk;
mod requests;
mod scratch;
mod serve;
mod served_rows;
mod store;
mod table;
mod tier;
mod training;
mod windows;
mod workload;
mod written_disk;

pub use evictions::Evictions;
pub use groups::{Group, Wanted, run};
pub use in_turn::{TrainedInTurn, table_in_ram};
pub use measure::{Bench, Better, Limit, Rounds, Row, Scale, median, quantile};
pub use null_disk::NullDisk;
pub use plain::{PlainCounts, PlainDedupe, PlainIndex, huge_pages, prefetch};
pub use plain_kernels::{BAG, DIM, FreshRows, PlainOptimizer, PlainTable, plain_backward, plain_forward};
pub use plain_load::PlainLoad;
pub use plain_serving::{BufferedReads, PlainServing, RowRun};
pub use plain_writeback::PlainWriteBack;
pub use process::{Resident, cpu_seconds, die_with_parent, forget_cached, forget_peak, resident};
pub use raw_disk::{RAW_DEPTH, RawFiles, RawReads, RawRecords, RecordPosition, write_sequentially};
pub use requests::{REQUEST_IDS, Requests};
pub use scratch::Scratch;
pub use served_rows::{Publisher, SERVED_TABLE, Unpublished, forget_all_cached, read_through, served_row};
pub use store::StoreWork;
pub use table::table_config;
pub use tier::{APPEND_ROWS, CountedEngine, RECORD_BYTES, ROW_BYTES, TierRows, new_tier, open_tier, tier_layout};
pub use training::{Saved, Training, bytes_of, disk_bytes_of, give_rows, save};
pub use windows::{RAW_WRITE, raw_write_bytes, raw_write_rate, setting, settle, window};
pub use workload::{BATCH_IDS, Ids, SplitMix64, Zipf, scattered_id, scattered_slot, uniform_ranks, zipf_ranks};
pub use written_disk::WrittenDisk;
