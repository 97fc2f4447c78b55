//! The Python binding of `embcache`. `_native.pyi` declares its Python API.
//!
//! A method makes one call to the Rust core. Every call that can block, take a table's lock or run a kernel releases
//! the GIL first: a thread that keeps kernels from a table's rows may be waiting for the GIL to read rows from the
//! device. Other Python threads continue during the call.
#![allow(clippy::needless_pass_by_value, reason = "pyo3 extracts owned arguments")]
#![allow(clippy::too_many_arguments, reason = "they are keyword arguments of Python")]

mod buckets;
mod buffers;
mod checkpoint_read;
mod checkpoint_save;
mod error;
mod eviction;
mod foreign;
mod logging;
mod paths;
mod plan;
mod recis;
mod records;
mod rows;
mod serving;
mod settings;
mod stats;
mod table;

use embcache::runtime::memory::ReservingAllocator;
use pyo3::prelude::*;

#[global_allocator]
static ALLOCATOR: ReservingAllocator = ReservingAllocator;

/// Returns the name of the I/O engine that this process uses.
#[pyfunction]
fn io_engine_name() -> PyResult<String> {
    embcache::io::default_engine().map(|engine| engine.name()).map_err(error::to_python)
}

/// Returns the key of a table that is created under `name`.
#[pyfunction]
fn table_key(name: &str) -> u64 {
    embcache::types::table_key(name)
}

/// True if there is memory for another thread. A thread that starts and cannot allocate memory aborts the process, or
/// waits indefinitely.
#[pyfunction]
fn has_memory_for_threads() -> bool {
    embcache::runtime::memory::can_start_threads()
}

/// The module `torchrec_embcache._native` with all its exports.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::buckets::{bucket_order, buckets_of, hash_ids, unhash_ids};
    #[pymodule_export]
    use super::checkpoint_read::{
        PyChainCompaction, PyCheckpointReader, PyCheckpointRows, PyCountedIds, PyIdExpiry, PyIdHistoryEntry,
    };
    #[pymodule_export]
    use super::checkpoint_save::{
        PyAsyncSaveTable, PyCheckpointPart, PyCheckpointSave, PyCheckpointSnapshot, PyCheckpointWriter,
        PyRowWriteBatch, latest_checkpoint, newest_checkpoint, prune_checkpoints, remove_stale_parts,
        work_in_background,
    };
    #[pymodule_export]
    use super::eviction::{
        PyEvictedBlock, PyEvictedQueue, PyRankKey, PyRankKeyRange, PyRankRangeCounts, PyScoreHistogram,
    };
    #[pymodule_export]
    use super::logging::drain_log;
    #[pymodule_export]
    use super::paths::{PyCheckpointDirectory, PyCommitDirectory, check_path, check_ssd_dir, table_dir};
    #[pymodule_export]
    use super::plan::{PyLookup, PyPlan};
    #[pymodule_export]
    use super::recis::{
        PyRecisBlockShape, PyRecisBlockSpec, PyRecisReader, PyRecisRun, PyRecisSave, PyRecisShardOutcome,
        PyRecisTableInfo, PyRecisWrittenTable, PyTableStep, chunk_checksums,
    };
    #[pymodule_export]
    use super::records::{
        PyBaseCheckpoint, PyChangeCounts, PyCheckpointCopyReport, PyCheckpointId, PyManifestDigest, PyNewestCheckpoint,
        PyPruneReport, PyPublishedCheckpoint, PySavedTable, PyStreamRange, PyTableWriteStats, PyWrittenPart,
    };
    #[pymodule_export]
    use super::rows::{
        PyDeviceArrays, PyFetchedRows, PyFoundRows, PyGatheredRows, PyRowBlock, PyRowMetadata, PyRowOccurrences,
    };
    #[pymodule_export]
    use super::serving::{
        PyServeIndexReport, PyServedTable, PyServedVersion, PyServingStats, PyTableServer, build_serving_index,
        check_serving_index,
    };
    #[pymodule_export]
    use super::settings::{
        PyEvictionRule, PyPlanMode, PyRowAdmission, PyRowBytes, PyRowInitializer, PySharedBudget, PyTableCounters,
    };
    #[pymodule_export]
    use super::stats::{PyAdmissionStats, PyEvictionStats, PyHistogram, PySsdStats, PyTableStats, PyTierStats};
    #[pymodule_export]
    use super::table::{
        PyLinkedSegments, PyMissRatioCurve, PyTable, PyTableExport, miss_ratio_curves, row_bytes, sweep_tables,
    };
    #[pymodule_export]
    use super::{has_memory_for_threads, io_engine_name, table_key};

    use super::{ReservingAllocator, foreign, logging};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn begin(module: &Bound<'_, PyModule>) -> PyResult<()> {
        ReservingAllocator::keep_reserve();
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        foreign::register(module)?;
        logging::register(module)
    }
}
