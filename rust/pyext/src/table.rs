//! The native Table, the export of its rows, sweeps of several tables, and measurements for sizing their budgets.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use embcache::Kind;
use embcache::cache::{ExportStream, INDEX_BYTES_PER_ROW, RowBlock, Table, device_row_bytes, host_row_bytes};
use embcache::config::{AdmissionRule, EvictionConfig, MissingRead, SsdConfig, TableConfig};
use embcache::io::default_engine;
use embcache::lifecycle::{BucketCounts, OovRow, StepClock};
use embcache::sizing::MissRatioCurve;
use embcache::ssd::{LinkedSegments, SsdTier, StateCounters};
use embcache::types::{DEFAULT_SCORE_HALF_LIFE_STEPS, table_key};
use numpy::{PyArray1, PyReadonlyArray1, PyReadonlyArray2, ToPyArray};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::buffers::{headers_from_python, slice, slice2};
use crate::error::to_python;
use crate::eviction::{PyEvictedBlock, PyEvictedQueue, PyRankKeyRange, PyScoreHistogram};
use crate::foreign::detached;
use crate::logging::{follow_levels, follow_levels_sometimes};
use crate::paths::{CheckedSsdDir, PyCommitDirectory};
use crate::records::{PyBaseCheckpoint, PyChangeCounts};
use crate::rows::{PyFoundRows, PyRowBlock, PyRowMetadata, PythonGather};
use crate::settings::{
    PyEvictionRule, PyMissingRead, PyRowAdmission, PyRowBytes, PyRowInitializer, PySharedBudget, PyTableCounters,
    on_full_from, optimizer_from, policy_from, reopen_from,
};
use crate::stats::PyTableStats;

/// Maximum time that a call waits in the Rust core before Python can handle signals.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// One table shard.
#[pyclass(frozen, name = "Table", module = "torchrec_embcache._native")]
pub(crate) struct PyTable {
    pub(crate) inner: Table,
}

impl PyTable {
    /// Waits until no asynchronous save has a snapshot of the rows. Python's signal handlers run during this time, so
    /// that Ctrl-C ends the wait.
    fn wait_for_save(&self, py: Python<'_>) -> PyResult<()> {
        while !detached(py, || self.inner.wait_for_save(SIGNALS_EVERY))? {
            py.check_signals()?;
        }
        Ok(())
    }
}

/// Opens a table below the directory `ssd_root`, from `segments` if given.
fn open_table(
    config: TableConfig,
    gather: Option<Py<PyAny>>,
    ssd_root: Option<&Py<PyCommitDirectory>>,
    segments: Option<&Py<PyLinkedSegments>>,
    sizing: bool,
) -> embcache::Result<PyTable> {
    let gather = gather.map(|callable| PythonGather::of(callable, &config));
    let segments = segments.map(Py::get);
    let source = segments.map(|from| (&*from.files, from.counters));
    let table = Table::open_from(
        config,
        gather,
        ssd_root.map_or_else(default_engine, |root| Ok(Arc::clone(&root.get().engine)))?,
        source,
    )?;
    let counts = segments.into_iter().flat_map(|from| &from.counts);
    counts.into_iter().try_for_each(|counts| table.restore_bucket(counts))?;
    if let Some(from) = segments {
        table.restore_clock(&from.clock)?;
        table.load_oov_row(from.oov_row.as_ref())?;
    }
    if sizing {
        table.begin_sizing()?;
    }
    Ok(PyTable { inner: table })
}

#[pymethods]
impl PyTable {
    #[new]
    #[pyo3(signature = (*, name, key, dim, optimizer, initializer, seed, total_num_buckets, bucket_begin, bucket_end,
        host_bytes, device_rows, device_gather, ssd_dir, ssd_bytes, reopen, resume_commit_id, policy, on_full, segments=None,
        uncommitted=None, ssd_root=None, admission=None, not_admitted=None, missing_read=None, score_half_life_steps=None,
        eviction=None, evict_every_steps=None, sizing=false, shared_budget=None))]
    fn new(
        py: Python<'_>,
        name: String,
        key: Option<u64>,
        dim: usize,
        optimizer: &str,
        initializer: Py<PyRowInitializer>,
        seed: u64,
        total_num_buckets: u32,
        bucket_begin: u32,
        bucket_end: u32,
        host_bytes: u64,
        device_rows: Option<u32>,
        device_gather: Option<Py<PyAny>>,
        ssd_dir: Option<PathBuf>,
        ssd_bytes: u64,
        reopen: Option<&str>,
        resume_commit_id: Option<u64>,
        policy: &str,
        on_full: &str,
        segments: Option<Py<PyLinkedSegments>>,
        uncommitted: Option<u64>,
        ssd_root: Option<Py<PyCommitDirectory>>,
        admission: Option<Py<PyRowAdmission>>,
        not_admitted: Option<PyMissingRead>,
        missing_read: Option<PyMissingRead>,
        score_half_life_steps: Option<u64>,
        eviction: Option<Py<PyEvictionRule>>,
        evict_every_steps: Option<NonZeroU64>,
        sizing: bool,
        shared_budget: Option<Py<PySharedBudget>>,
    ) -> PyResult<Self> {
        let reopen = reopen_from(reopen, uncommitted)?;
        let not_admitted = not_admitted.map_or(Ok(MissingRead::Initial), |read| read.core("not_admitted"))?;
        let config = TableConfig {
            key: key.unwrap_or_else(|| table_key(&name)),
            name,
            dim,
            optimizer: optimizer_from(optimizer)?,
            initializer: initializer.get().core,
            seed,
            total_num_buckets,
            buckets: bucket_begin..bucket_end,
            host_bytes,
            shared_budget: shared_budget.map(|shared| Arc::clone(&shared.get().core)),
            device_rows,
            ssd: ssd_dir.map(|dir| SsdConfig { dir, bytes: ssd_bytes, reopen, resume_commit_id }),
            policy: policy_from(policy)?,
            on_full: on_full_from(on_full)?,
            admission: admission.map_or(AdmissionRule::All, |admission| admission.get().core),
            not_admitted,
            missing_read: missing_read.map_or(Ok(not_admitted), |read| read.core("missing_read"))?,
            score_half_life_steps: score_half_life_steps.unwrap_or(DEFAULT_SCORE_HALF_LIFE_STEPS),
            eviction: eviction
                .map(|rule| EvictionConfig { rule: rule.get().core.clone(), every_steps: evict_every_steps }),
        };
        follow_levels(py)?;
        detached(py, || open_table(config, device_gather, ssd_root.as_ref(), segments.as_ref(), sizing))
    }

    #[getter]
    fn name(&self) -> &str {
        &self.inner.config().name
    }
    #[getter]
    fn key(&self) -> u64 {
        self.inner.config().key
    }
    #[getter]
    fn dim(&self) -> usize {
        self.inner.config().dim
    }
    #[getter]
    fn optimizer(&self) -> &'static str {
        self.inner.config().optimizer.name()
    }
    #[getter]
    fn slot_names(&self) -> Vec<&'static str> {
        self.inner.config().optimizer.slot_names().to_vec()
    }
    #[getter]
    fn vector_floats(&self) -> usize {
        self.inner.config().layout().vector_floats()
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        detached(py, || self.inner.len()).map(|rows| rows as usize)
    }
    fn version(&self) -> u64 {
        self.inner.version()
    }
    fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }
    fn step(&self, py: Python<'_>) -> PyResult<u64> {
        detached(py, || self.inner.step())
    }
    fn set_step(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        detached(py, || self.inner.set_step(step))
    }
    #[getter]
    fn has_oov_row(&self) -> bool {
        self.inner.config().not_admitted == MissingRead::OovRow
    }
    fn oov_row<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyArray1<f32>>>> {
        let row = detached(py, || self.inner.oov_row())?;
        Ok(row.map(|row| row.values().to_pyarray(py)))
    }
    fn set_oov_row(&self, py: Python<'_>, values: PyReadonlyArray1<'_, f32>) -> PyResult<()> {
        let values = slice("values", &values)?.to_vec();
        let layout = self.inner.config().layout();
        let (len, expected) = (values.len(), layout.floats());
        let row = OovRow::from_values(layout, values).ok_or_else(|| {
            to_python(Kind::Input.error(format!("the OOV row of this table has {expected} values, not {len}")))
        })?;
        detached(py, || self.inner.set_oov_row(Some(&row)))
    }
    fn epoch(&self, py: Python<'_>) -> PyResult<u32> {
        detached(py, || self.inner.epoch())
    }
    fn set_epoch(&self, py: Python<'_>, epoch: u32) -> PyResult<()> {
        detached(py, || self.inner.set_epoch(epoch))
    }
    fn base_checkpoints(&self, py: Python<'_>) -> PyResult<Vec<PyBaseCheckpoint>> {
        let bases = detached(py, || self.inner.base_checkpoints())?;
        Ok(bases.into_iter().map(Into::into).collect())
    }
    fn sweeps_since(&self, py: Python<'_>, base: PyBaseCheckpoint) -> PyResult<Vec<String>> {
        let sweeps = detached(py, || self.inner.sweeps_since(&base.into()))?;
        Ok(sweeps.iter().map(|sweep| format!("{sweep:?}")).collect())
    }
    fn count_changes(&self, py: Python<'_>, base: PyBaseCheckpoint) -> PyResult<PyChangeCounts> {
        let counts = detached(py, || self.inner.count_changes(&base.into()))?;
        Ok(PyChangeCounts {
            rows: counts.rows,
            tombstones: counts.tombstones,
            swept: counts.expired,
            expiring: counts.expiring,
        })
    }
    #[pyo3(signature = (next_epoch, base=None))]
    fn finish_background_save(&self, py: Python<'_>, next_epoch: u32, base: Option<PyBaseCheckpoint>) {
        py.detach(|| self.inner.finish_background_save(next_epoch, base.map(Into::into)));
    }
    fn record_base(&self, py: Python<'_>, base: PyBaseCheckpoint) -> PyResult<()> {
        detached(py, || self.inner.saved_as(base.into()))
    }
    fn set_unusable(&self, py: Python<'_>, reason: Option<String>) -> PyResult<()> {
        detached(py, || self.inner.set_unusable(reason))
    }

    fn unusable(&self, py: Python<'_>) -> PyResult<Option<String>> {
        detached(py, || self.inner.unusable())
    }
    fn counters(&self, py: Python<'_>) -> PyResult<PyTableCounters> {
        let (step, epoch) = detached(py, || self.inner.counters())?;
        Ok(PyTableCounters { step, epoch })
    }

    fn stats(&self, py: Python<'_>) -> PyResult<PyTableStats> {
        PyTableStats::new(py, detached(py, || self.inner.stats())?)
    }

    fn export(&self, py: Python<'_>, chunk_rows: usize) -> PyResult<PyTableExport> {
        let stream = detached(py, || self.inner.export(chunk_rows))?;
        Ok(PyTableExport { stream: Mutex::new(stream), vector_floats: self.vector_floats() })
    }

    #[pyo3(signature = (ids, *, incomplete=false))]
    fn read_rows(&self, py: Python<'_>, ids: PyReadonlyArray1<'_, i64>, incomplete: bool) -> PyResult<PyFoundRows> {
        let ids = slice("ids", &ids)?;
        let read = || if incomplete { self.inner.read_incomplete_rows(ids) } else { self.inner.read_rows(ids) };
        let rows = detached(py, read)?;
        PyFoundRows::of(py, rows.found, &rows.headers, rows.vectors, self.vector_floats())
    }

    fn import_rows<'py>(
        &self,
        py: Python<'py>,
        ids: PyReadonlyArray1<'py, i64>,
        vectors: PyReadonlyArray2<'py, f32>,
        scalars: Option<PyReadonlyArray1<'py, f32>>,
        metadata: Option<Py<PyRowMetadata>>,
    ) -> PyResult<()> {
        let scalars = scalars.as_ref().map(|scalars| slice("scalars", scalars)).transpose()?;
        let metadata = metadata.as_ref().map(|metadata| metadata.get().borrowed(py)).transpose()?;
        let headers = headers_from_python(slice("ids", &ids)?, scalars, metadata.as_ref())?;
        let vectors = slice2("vectors", &vectors, self.vector_floats())?;
        detached(py, || self.inner.import_rows(RowBlock { headers: &headers, vectors }))
    }

    fn remove_rows(&self, py: Python<'_>, ids: PyReadonlyArray1<'_, i64>) -> PyResult<u64> {
        let ids = slice("ids", &ids)?;
        detached(py, || self.inner.remove_rows(ids))
    }
    fn adopt_lifecycle(&self, py: Python<'_>, source: &Self) -> PyResult<()> {
        detached(py, || self.inner.take_counts(&source.inner))
    }
    fn adopt_time_source(&self, py: Python<'_>, previous: &Self) -> PyResult<()> {
        detached(py, || self.inner.adopt_time_source(&previous.inner))
    }
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        self.wait_for_save(py)?;
        detached(py, || self.inner.clear())
    }
    /// Applies the table's eviction rule, or `rule`, after the current step.
    #[pyo3(signature = (rule=None))]
    fn sweep(&self, py: Python<'_>, rule: Option<&PyEvictionRule>) -> PyResult<()> {
        let rule = rule.map(|rule| &rule.core);
        detached(py, || rule.map_or_else(|| self.inner.sweep(), |rule| self.inner.sweep_with_rule(rule)))
    }
    #[pyo3(signature = (rule=None))]
    fn prepare_sweep(&self, py: Python<'_>, rule: Option<&PyEvictionRule>) -> PyResult<()> {
        detached(py, || self.inner.prepare_sweep(rule.map(|rule| &rule.core)))
    }
    fn now(&self, py: Python<'_>) -> PyResult<u64> {
        detached(py, || self.inner.now())
    }
    fn step_at(&self, py: Python<'_>, time: u64) -> PyResult<Option<u64>> {
        detached(py, || self.inner.step_at(time))
    }
    fn set_time(&self, py: Python<'_>, time: u64) -> PyResult<()> {
        detached(py, || self.inner.set_time(time))
    }
    fn check_time(&self, py: Python<'_>, time: u64) -> PyResult<()> {
        detached(py, || self.inner.check_time(time))
    }
    /// Returns the queue of rows that are evicted after this call.
    fn start_evicted_queue(&self, py: Python<'_>) -> PyResult<PyEvictedQueue> {
        detached(py, || self.inner.start_evicted_queue()).map(|inner| PyEvictedQueue { inner })
    }
    fn next_evicted(&self, py: Python<'_>) -> PyResult<Option<PyEvictedBlock>> {
        let next = detached(py, || self.inner.next_evicted())?;
        next.map(|rows| PyEvictedBlock::of(py, rows, self.vector_floats())).transpose()
    }
    fn end_evicted_queue(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.inner.end_evicted_queue())
    }
    /// Counts the rows by rank key in the eviction order after `step`. Returns `None` if `version` is given and the
    /// table's version differs from it.
    fn score_histogram(
        &self,
        py: Python<'_>,
        step: u64,
        ranges: Vec<Py<PyRankKeyRange>>,
        version: Option<u64>,
    ) -> PyResult<Option<PyScoreHistogram>> {
        let ranges: Vec<_> = ranges.iter().map(|range| range.get().core).collect();
        let counted = detached(py, || self.inner.score_histogram(step, &ranges, version))?;
        counted.map(|counted| PyScoreHistogram::of(py, counted)).transpose()
    }
    fn is_unchanged_since_sweep(&self, py: Python<'_>) -> PyResult<bool> {
        detached(py, || self.inner.is_unchanged_since_sweep())
    }
    fn clear_rows(&self, py: Python<'_>) -> PyResult<()> {
        self.wait_for_save(py)?;
        detached(py, || self.inner.clear_rows())
    }
    fn flush(&self, py: Python<'_>, commit_id: Option<u64>) -> PyResult<()> {
        follow_levels_sometimes(py)?;
        detached(py, || commit_id.map_or_else(|| self.inner.flush_next(), |commit_id| self.inner.flush(commit_id)))
    }
    fn has_lost_flush(&self, py: Python<'_>) -> bool {
        py.detach(|| self.inner.published_given_up())
    }
    fn last_commit_id(&self, py: Python<'_>) -> Option<u64> {
        py.detach(|| self.inner.last_commit_id())
    }
    fn check_writable(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.inner.check_writable())
    }
    fn is_read_only(&self, py: Python<'_>) -> bool {
        py.detach(|| self.inner.is_read_only())
    }
    fn forget_commit(&self, py: Python<'_>, commit_id: u64) -> PyResult<()> {
        detached(py, || self.inner.forget_published(commit_id))
    }
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.wait_for_save(py)?;
        detached(py, || self.inner.close())
    }
    #[staticmethod]
    fn commit_ids(py: Python<'_>, ssd_dir: PathBuf, ssd_root: PathBuf, path_checks: &str) -> PyResult<Vec<u64>> {
        let root = CheckedSsdDir::new(ssd_root, path_checks)?;
        detached(py, || SsdTier::published_commit_ids(&ssd_dir, &*root.engine()?.1))
    }
    #[staticmethod]
    fn remove_shard(py: Python<'_>, ssd_dir: PathBuf, ssd_root: PathBuf, path_checks: &str) -> PyResult<()> {
        let root = CheckedSsdDir::new(ssd_root, path_checks)?;
        detached(py, || SsdTier::remove_shard(&ssd_dir, &*root.engine()?.1))
    }
}

/// A stream of blocks of rows.
#[pyclass(frozen, name = "TableExport", module = "torchrec_embcache._native")]
pub(crate) struct PyTableExport {
    stream: Mutex<ExportStream>,
    vector_floats: usize,
}

#[pymethods]
impl PyTableExport {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<PyRowBlock>> {
        let next = py.detach(|| self.stream.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next());
        let Some(chunk) = next.transpose().map_err(to_python)? else { return Ok(None) };
        PyRowBlock::of(py, &chunk.headers, chunk.vectors, self.vector_floats).map(Some)
    }
}

/// State of a table's SSD tier when a linked checkpoint was saved.
#[pyclass(frozen, name = "LinkedSegments", module = "torchrec_embcache._native")]
pub(crate) struct PyLinkedSegments {
    pub(crate) files: Arc<LinkedSegments>,
    pub(crate) counters: StateCounters,
    pub(crate) counts: Vec<BucketCounts>,
    pub(crate) clock: StepClock,
    pub(crate) oov_row: Option<OovRow>,
}

#[pymethods]
impl PyLinkedSegments {
    #[getter]
    fn rows(&self) -> u64 {
        self.files.rows()
    }
}

/// Sweeps tables by the rules in `rules`, or by a table's own rule for `None`. No Python signal handler runs between
/// two of them.
#[pyfunction]
pub(crate) fn sweep_tables(
    py: Python<'_>,
    tables: Vec<Py<PyTable>>,
    rules: Vec<Option<Py<PyEvictionRule>>>,
) -> PyResult<()> {
    if tables.len() != rules.len() {
        return Err(PyValueError::new_err(format!("{} tables and {} rules", tables.len(), rules.len())));
    }
    let rules = rules.iter().map(|rule| rule.as_ref().map(|rule| &rule.get().core));
    let all: Vec<_> = tables.iter().map(|table| table.get().inner.clone()).zip(rules).collect();
    detached(py, || Table::sweep_all(&all))
}

/// The miss ratios of caches of many sizes under one policy.
#[pyclass(frozen, get_all, name = "MissRatioCurve", module = "torchrec_embcache._native")]
pub(crate) struct PyMissRatioCurve {
    policy: &'static str,
    /// `[n]`
    rows: Py<PyArray1<u64>>,
    /// `[n]`
    miss_ratios: Py<PyArray1<f64>>,
    first_use_ratio: f64,
    new_row_ratio: f64,
    lookups: u64,
    batches: u64,
    largest_batch: u64,
    distinct_ids: u64,
    sampling_rate: f64,
}

impl PyMissRatioCurve {
    fn new(py: Python<'_>, curve: &MissRatioCurve) -> Self {
        Self {
            policy: curve.policy.name(),
            rows: curve.rows.to_pyarray(py).unbind(),
            miss_ratios: curve.miss_ratios.to_pyarray(py).unbind(),
            first_use_ratio: curve.first_use_ratio,
            new_row_ratio: curve.new_row_ratio,
            lookups: curve.lookups,
            batches: curve.batches,
            largest_batch: curve.largest_batch,
            distinct_ids: curve.distinct_ids,
            sampling_rate: curve.sampling_rate,
        }
    }
}

/// Returns the curve of the table's policy, then that of `lru` if the policy differs; `None` if nothing is measured.
/// With `reset` the counts restart at zero.
#[pyfunction]
#[pyo3(signature = (table, *, reset))]
pub(crate) fn miss_ratio_curves(
    py: Python<'_>,
    table: Py<PyTable>,
    reset: bool,
) -> PyResult<Option<Vec<PyMissRatioCurve>>> {
    let table: &Table = &table.get().inner;
    let curves = detached(py, || table.miss_ratio_curves(reset))?;
    Ok(curves.map(|curves| curves.iter().map(|curve| PyMissRatioCurve::new(py, curve)).collect()))
}

/// Returns the bytes of one row in each budget.
#[pyfunction]
pub(crate) fn row_bytes(dim: usize, optimizer: &str, policy: &str) -> PyResult<PyRowBytes> {
    let layout = optimizer_from(optimizer)?.layout(dim);
    let policy = policy_from(policy)?;
    Ok(PyRowBytes {
        host: host_row_bytes(&layout, policy),
        device: device_row_bytes(&layout, policy),
        ssd: SsdTier::record_bytes(&layout),
        index: INDEX_BYTES_PER_ROW,
    })
}
