//! Python binding of `embcache`: registration, and one core call a method. `_native.pyi` says what Python sees.
//!
//! Every call that can block, take a table's lock or run a kernel releases the GIL first: a core thread that holds a table's lock may
//! be waiting for the GIL (to read rows from the device).

mod blocks;
mod buckets;
mod buffers;
mod checkpoint;
mod checkpoint_load;
mod checkpoint_rows;
mod directory;
mod error;
mod foreign;
mod lock;
mod logging;
mod lookup;
mod moment;
mod part;
mod paths;
mod plan;
mod records;
mod rows;
mod segments;
mod settings;
mod stats;
mod table;

use embcache::memory::ReservingAllocator;
use pyo3::prelude::*;

#[global_allocator]
static ALLOCATOR: ReservingAllocator = ReservingAllocator;

/// The name of the I/O engine that this process uses.
#[pyfunction]
fn io_engine_name() -> PyResult<String> {
    embcache::io::default_engine().map(|engine| engine.name()).map_err(error::to_python)
}

/// Why the I/O engine is not `io_uring`, where the system refused that; `None` otherwise.
#[pyfunction]
fn io_fallback_reason() -> Option<&'static str> {
    embcache::io::fallback_reason()
}

/// The key of a table that is created under `name`.
#[pyfunction]
fn table_key(name: &str) -> u64 {
    embcache::types::table_key(name)
}

/// Whether there is memory for threads: one that begins and gets none for what is its own ends the process, or waits for ever.
#[pyfunction]
fn has_room_for_threads() -> bool {
    embcache::memory::room_for_threads()
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    ReservingAllocator::keep_reserve();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    foreign::register(module)?;
    logging::register(module)?;
    module.add_class::<table::PyTable>()?;
    module.add_class::<table::PyExport>()?;
    module.add_class::<lookup::PyLookup>()?;
    module.add_class::<rows::PyRowMetadata>()?;
    module.add_class::<rows::PyRowBlock>()?;
    module.add_class::<rows::PyFoundRows>()?;
    module.add_class::<rows::PyFetchedRows>()?;
    module.add_class::<rows::PyTransposed>()?;
    module.add_class::<rows::PyDeviceArrays>()?;
    module.add_class::<settings::PyInitializer>()?;
    module.add_class::<settings::PyPlanMode>()?;
    module.add_class::<settings::PyRowBytes>()?;
    module.add_class::<settings::PyTableCounters>()?;
    module.add_class::<stats::PyTierStats>()?;
    module.add_class::<stats::PySsdStats>()?;
    module.add_class::<stats::PyTableStats>()?;
    module.add_class::<plan::PyPlan>()?;
    module.add_class::<paths::PyRoot>()?;
    module.add_class::<checkpoint::PySave>()?;
    module.add_class::<checkpoint::PyWriter>()?;
    module.add_class::<checkpoint_load::PyReader>()?;
    module.add_class::<checkpoint_rows::PyRows>()?;
    module.add_class::<checkpoint_load::PyCompaction>()?;
    module.add_class::<part::PyPart>()?;
    module.add_function(wrap_pyfunction!(part::sweep, module)?)?;
    module.add_class::<moment::PyMoment>()?;
    module.add_class::<segments::PySegments>()?;
    module.add_function(wrap_pyfunction!(moment::work_behind, module)?)?;
    module.add_class::<directory::PyDirectory>()?;
    module.add_class::<records::PyDigest>()?;
    module.add_class::<records::PyCheckpointId>()?;
    module.add_class::<records::PyAncestor>()?;
    module.add_class::<records::PyTableWritten>()?;
    module.add_class::<records::PyPublished>()?;
    module.add_class::<records::PyWrittenPart>()?;
    module.add_class::<records::PyStreamRange>()?;
    module.add_class::<records::PyTableToSave>()?;
    module.add_class::<records::PyNewestCheckpoint>()?;
    module.add_class::<records::PySavedTable>()?;
    module.add_function(wrap_pyfunction!(blocks::chunk_checksums, module)?)?;
    module.add_function(wrap_pyfunction!(has_room_for_threads, module)?)?;
    module.add_function(wrap_pyfunction!(buckets::bucket_order, module)?)?;
    module.add_function(wrap_pyfunction!(buckets::buckets_of, module)?)?;
    module.add_function(wrap_pyfunction!(buckets::hash_ids, module)?)?;
    module.add_function(wrap_pyfunction!(buckets::ids_of_hashes, module)?)?;
    module.add_class::<blocks::BlockWriter>()?;
    module.add_class::<lock::PyEntryLock>()?;
    module.add_function(wrap_pyfunction!(checkpoint::latest_checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint::newest_checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(io_engine_name, module)?)?;
    module.add_function(wrap_pyfunction!(io_fallback_reason, module)?)?;
    module.add_function(wrap_pyfunction!(table_key, module)?)?;
    module.add_function(wrap_pyfunction!(table::row_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(paths::check_ssd_dir, module)?)?;
    module.add_function(wrap_pyfunction!(paths::table_dir, module)?)?;
    Ok(())
}
