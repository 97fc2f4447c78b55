//! Saving and loading checkpoints.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use embcache::cache::Ancestor;
use embcache::checkpoint::{
    Chain, ChainReader, Checkpoint, CheckpointName, Compaction, Extent, ExtentReader, Latest, Manifest, Parent,
    Published, RankDigest, RankWriter, Save, SaveOptions,
};
use embcache::io::IoEngine;
use embcache::ssd::StateCounters;
use embcache::{Error, Kind};
use numpy::PyReadwriteArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::blocks::{loading_from, saving_in};
use crate::buffers::slice_mut;
use crate::checkpoint_rows::GivenRows;
use crate::error::to_python;
use crate::segments::PySegments;
use crate::table::PyTable;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn ended(what: &str) -> PyErr {
    to_python(Error::new(Kind::State, format!("the {what} has ended: make another")))
}

/// The newest complete checkpoint of a directory.
#[pyfunction]
#[pyo3(signature = (path))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn latest_checkpoint(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    let read = || {
        let (path, engine) = loading_from(&path)?;
        Latest::read(&*engine, &path)
    };
    py.detach(read).map(|latest| latest.to_string()).map_err(to_python)
}

/// The coordinator's part of a save.
#[pyclass(frozen, name = "CheckpointSave", module = "torchrec_embcache._native")]
pub(crate) struct PySave {
    inner: Mutex<Option<Save>>,
    published: Mutex<Option<Published>>,
    #[pyo3(get)]
    name: String,
}

/// A checkpoint's name and the XXH3 of its manifest.
type Identity = (String, u64);

fn parent((name, manifest_xxh3): Identity) -> Parent {
    Parent { name, manifest_xxh3 }
}

fn identity(parent: &Parent) -> Identity {
    (parent.name.clone(), parent.manifest_xxh3)
}

impl PySave {
    fn take(&self) -> PyResult<Save> {
        lock(&self.inner).take().ok_or_else(|| ended("save"))
    }
}

#[pymethods]
impl PySave {
    #[new]
    #[pyo3(signature = (path, random, keep=1, parent=None, merged=None, snapshot=false))]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        random: u64,
        keep: usize,
        parent: Option<Identity>,
        merged: Option<Identity>,
        snapshot: bool,
    ) -> PyResult<Self> {
        let options =
            SaveOptions { parent: parent.map(self::parent), merged: merged.map(self::parent), snapshot, keep };
        let begin = || {
            let (path, engine) = saving_in(&path)?;
            Save::begin_with(engine, &path, random, options)
        };
        let save = py.detach(begin).map_err(to_python)?;
        Ok(Self { name: save.name().to_string(), inner: Mutex::new(Some(save)), published: Mutex::default() })
    }

    /// What was published, as a delta on it names it.
    #[getter]
    fn identity(&self) -> PyResult<Identity> {
        lock(&self.published)
            .as_ref()
            .map(|published| identity(&published.identity))
            .ok_or_else(|| to_python(Error::new(Kind::State, "publish() comes before identity")))
    }

    /// Take over the parts of a rank: directory, name and digest of each.
    fn adopt(
        &self,
        py: Python<'_>,
        rank: u32,
        world_size: u32,
        parts: Vec<(PathBuf, String, (u64, u64))>,
    ) -> PyResult<(u64, u64)> {
        let parts =
            parts.into_iter().map(|(root, name, (bytes, xxh3))| Ok((root, name.parse()?, RankDigest { bytes, xxh3 })));
        let parts = parts.collect::<embcache::Result<Vec<_>>>().map_err(to_python)?;
        py.detach(|| {
            let save = lock(&self.inner);
            let adopted = save.as_ref().ok_or_else(|| ended("save"))?.adopt(rank, world_size, &parts);
            adopted.map(|digest| (digest.bytes, digest.xxh3)).map_err(to_python)
        })
    }

    fn write_dense_metadata(&self, py: Python<'_>, metadata: &[u8]) -> PyResult<()> {
        py.detach(|| {
            let mut save = lock(&self.inner);
            save.as_mut().ok_or_else(|| ended("save"))?.write_dense_metadata(metadata).map_err(to_python)
        })
    }

    fn publish(&self, py: Python<'_>, digests: Vec<(u64, u64)>, next_epoch: u32) -> PyResult<Vec<String>> {
        let save = self.take()?;
        let digests: Vec<RankDigest> = digests.into_iter().map(|(bytes, xxh3)| RankDigest { bytes, xxh3 }).collect();
        let published = py.detach(|| save.publish(&digests, next_epoch)).map_err(to_python)?;
        let left = published.left.iter().map(Error::to_string).collect();
        *lock(&self.published) = Some(published);
        Ok(left)
    }

    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        let save = self.take()?;
        py.detach(|| save.abandon()).map_err(to_python)
    }
}

/// One rank's part of a save.
#[pyclass(frozen, name = "CheckpointWriter", module = "torchrec_embcache._native")]
pub(crate) struct PyWriter {
    inner: Mutex<Option<RankWriter>>,
}

#[pymethods]
impl PyWriter {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn new(py: Python<'_>, path: PathBuf, name: &str, rank: u32, world_size: u32) -> PyResult<Self> {
        let name: CheckpointName = name.parse().map_err(to_python)?;
        let make = || {
            let (path, engine) = saving_in(&path)?;
            RankWriter::new(engine, &path, name, rank, world_size)
        };
        let writer = py.detach(make).map_err(to_python)?;
        Ok(Self { inner: Mutex::new(Some(writer)) })
    }

    fn write_table(
        &self,
        py: Python<'_>,
        module: &str,
        table: &PyTable,
        hyperparameters: BTreeMap<String, f64>,
    ) -> PyResult<u64> {
        py.detach(|| {
            let mut writer = lock(&self.inner);
            let writer = writer.as_mut().ok_or_else(|| ended("writer"))?;
            writer.write_rows_of(module, &table.inner, hyperparameters).map_err(to_python)
        })
    }

    /// Rows of the table; bytes of its segments that were linked, and that were copied.
    fn link_table(
        &self,
        py: Python<'_>,
        module: &str,
        table: &PyTable,
        hyperparameters: BTreeMap<String, f64>,
    ) -> PyResult<(u64, u64, u64)> {
        py.detach(|| {
            let mut writer = lock(&self.inner);
            let writer = writer.as_mut().ok_or_else(|| ended("writer"))?;
            let linked = writer.link_rows_of(module, &table.inner, hyperparameters).map_err(to_python)?;
            Ok((linked.rows, linked.bytes.linked, linked.bytes.copied))
        })
    }

    #[pyo3(signature = (spec, bucket_begin, bucket_end, chunks))]
    fn write_rows(
        &self,
        py: Python<'_>,
        spec: &str,
        bucket_begin: u32,
        bucket_end: u32,
        chunks: &Bound<'_, PyAny>,
    ) -> PyResult<u64> {
        let mut source = GivenRows::new(spec, chunks)?;
        let written = py.detach(|| {
            let mut writer = lock(&self.inner);
            let writer = writer.as_mut().ok_or_else(|| ended("writer"))?;
            writer.write_table(source.spec(), bucket_begin..bucket_end, &mut source).map_err(to_python)
        });
        source.end(written)
    }

    fn write_changes(
        &self,
        py: Python<'_>,
        module: &str,
        table: &PyTable,
        hyperparameters: BTreeMap<String, f64>,
        ancestor: (String, u64, u32),
    ) -> PyResult<(u64, u64)> {
        let ancestor = self::ancestor(ancestor);
        py.detach(|| {
            let mut writer = lock(&self.inner);
            let writer = writer.as_mut().ok_or_else(|| ended("writer"))?;
            writer.write_changes_of(module, &table.inner, hyperparameters, &ancestor).map_err(to_python)
        })
    }

    fn finish(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        py.detach(|| {
            let writer = lock(&self.inner).take().ok_or_else(|| ended("writer"))?;
            writer.finish().map(|digest| (digest.bytes, digest.xxh3)).map_err(to_python)
        })
    }
}

pub(crate) fn ancestor((name, manifest_xxh3, next_epoch): (String, u64, u32)) -> Ancestor {
    Ancestor { name, manifest_xxh3, next_epoch }
}

/// What a rank's callable is told: rows that are done. Its exception ends the work.
fn report(progress: Option<&Py<PyAny>>, failed: &mut Option<PyErr>, rows: u64) -> embcache::Result<()> {
    let Some(progress) = progress else { return Ok(()) };
    Python::attach(|py| progress.call1(py, (rows,))).map(|_| ()).map_err(|error| {
        *failed = Some(error);
        Error::new(Kind::State, "progress raised an exception")
    })
}

/// What the newest checkpoint of a directory says of itself, if there is one.
#[pyfunction]
#[pyo3(signature = (path))]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
pub(crate) fn newest_checkpoint(py: Python<'_>, path: PathBuf) -> PyResult<Option<Bound<'_, PyDict>>> {
    let newest = py.detach(|| {
        let (path, engine) = saving_in(&path)?;
        let Some(latest) = Latest::find(&*engine, &path)? else { return Ok(None) };
        Checkpoint::open(engine, &path, latest).map(Some)
    });
    newest.map_err(to_python)?.map(|newest| about(py, newest.manifest(), &newest.identity())).transpose()
}

fn about<'py>(py: Python<'py>, manifest: &Manifest, own: &Parent) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("identity", identity(own))?;
    dict.set_item("merged", manifest.merged.as_ref().map(identity))?;
    dict.set_item("next_epoch", manifest.next_epoch)?;
    dict.set_item("kind", manifest.kind.name())?;
    let names = manifest.tables.iter().map(|entry| (entry.spec.module.clone(), entry.spec.table.clone()));
    dict.set_item("tables", names.collect::<Vec<(String, String)>>())?;
    Ok(dict)
}

/// One rank's part of merging a chain of deltas.
#[pyclass(frozen, name = "CheckpointCompaction", module = "torchrec_embcache._native")]
pub(crate) struct PyCompaction {
    inner: Compaction,
    path: PathBuf,
    engine: Arc<dyn IoEngine>,
}

#[pymethods]
impl PyCompaction {
    /// None where the checkpoint is full already.
    #[staticmethod]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn open(py: Python<'_>, path: PathBuf, latest: &str) -> PyResult<Option<Self>> {
        let latest: Latest = latest.parse().map_err(to_python)?;
        let open = || {
            let (path, engine) = saving_in(&path)?;
            let inner = Compaction::open(&engine, &path, latest)?;
            Ok(inner.map(|inner| Self { inner, path, engine }))
        };
        py.detach(open).map_err(to_python)
    }

    #[getter]
    fn identity(&self) -> Identity {
        identity(&self.inner.chain().identity())
    }

    #[getter]
    fn next_epoch(&self) -> u32 {
        self.inner.chain().manifest().next_epoch
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.inner.chain().manifest().tables.iter().map(|entry| entry.total_rows).sum()
    }

    #[getter]
    fn links(&self) -> usize {
        self.inner.chain().links().len()
    }

    /// Nothing more is read: saves may remove what it was merged from.
    fn release(&self) {
        self.inner.chain().let_go();
    }

    /// Write this rank's share to the checkpoint that was begun; its digest.
    #[pyo3(signature = (name, rank, world_size, progress=None))]
    #[expect(clippy::needless_pass_by_value, reason = "it is called with the GIL taken anew")]
    fn write(
        &self,
        py: Python<'_>,
        name: &str,
        rank: u32,
        world_size: u32,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<(u64, u64)> {
        let name: CheckpointName = name.parse().map_err(to_python)?;
        let mut failed = None;
        let written = py.detach(|| {
            let mut told = |rows| report(progress.as_ref(), &mut failed, rows);
            self.inner.write(&self.engine, &self.path, name, (rank, world_size), &mut told)
        });
        failed.map_or(Ok(()), Err)?;
        written.map(|digest| (digest.bytes, digest.xxh3)).map_err(to_python)
    }
}

/// The checkpoint `latest` of a directory, with all it builds on.
pub(crate) fn open_chain(py: Python<'_>, path: &Path, latest: &str) -> PyResult<Chain> {
    let latest: Latest = latest.parse().map_err(to_python)?;
    let open = || {
        let (path, engine) = loading_from(path)?;
        Chain::open(&engine, &path, latest)
    };
    py.detach(open).map_err(to_python)
}

/// A checkpoint whose manifests are checked.
#[pyclass(frozen, name = "CheckpointReader", module = "torchrec_embcache._native")]
pub(crate) struct PyReader {
    inner: Chain,
    /// By the table's own module and name: what `check_table` made ready.
    readers: Mutex<HashMap<(String, String), ChainReader>>,
    /// By the same: what tables can be opened from.
    segments: Mutex<HashMap<(String, String), PySegments>>,
    /// Of the newest checkpoint.
    extents: ExtentReader,
}

#[pymethods]
impl PyReader {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned paths")]
    fn new(py: Python<'_>, path: PathBuf, latest: &str) -> PyResult<Self> {
        let inner = open_chain(py, &path, latest)?;
        Ok(Self {
            extents: inner.links()[0].extent_reader(),
            inner,
            readers: Mutex::default(),
            segments: Mutex::default(),
        })
    }

    #[getter]
    fn name(&self) -> &str {
        &self.inner.manifest().name
    }

    /// Name and manifest hash of the newest checkpoint of the chain.
    #[getter]
    fn identity(&self) -> Identity {
        identity(&self.inner.identity())
    }

    /// `full`, `delta` or `snapshot`.
    #[getter]
    fn kind(&self) -> &'static str {
        self.inner.manifest().kind.name()
    }

    /// Names of the checkpoints it consists of, newest first.
    #[getter]
    fn links(&self) -> Vec<String> {
        self.inner.names().map(str::to_owned).collect()
    }

    #[getter]
    fn next_epoch(&self) -> u32 {
        self.inner.manifest().next_epoch
    }

    /// Nothing more is read: saves may remove what was.
    fn release(&self) {
        self.inner.let_go();
    }

    fn dense_metadata<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let metadata = py.detach(|| self.inner.links()[0].dense_metadata()).map_err(to_python)?;
        Ok(metadata.map(|metadata| PyBytes::new(py, &metadata)))
    }

    fn stream_bytes(&self) -> Vec<u64> {
        self.extents.stream_bytes()
    }

    fn read_extent(&self, py: Python<'_>, rank: u32, offset: u64, mut into: PyReadwriteArray1<'_, u8>) -> PyResult<()> {
        let into = slice_mut("into", &mut into)?;
        let extent = Extent { offset, bytes: into.len() as u64 };
        py.detach(|| self.extents.read(rank, extent, into)).map_err(to_python)
    }

    fn tables<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let entries = &self.inner.manifest().tables;
        entries
            .iter()
            .map(|entry| {
                let (spec, dict) = (&entry.spec, PyDict::new(py));
                dict.set_item("module", &spec.module)?;
                dict.set_item("table", &spec.table)?;
                dict.set_item("key", spec.key)?;
                dict.set_item("dim", spec.dim)?;
                dict.set_item("optimizer", &spec.optimizer.name)?;
                dict.set_item("hyperparameters", spec.optimizer.hyperparameters.clone())?;
                dict.set_item("step", spec.step)?;
                dict.set_item("seed", spec.seed)?;
                dict.set_item("total_num_buckets", spec.total_num_buckets)?;
                dict.set_item("bucket_hash", spec.bucket_hash.name())?;
                dict.set_item("rows", entry.total_rows)?;
                Ok(dict)
            })
            .collect()
    }

    /// `saved` is the module and name of the table in the checkpoint, where they are others there; `segments` says whether the caller asks
    /// for them afterwards. Without `slots` the rows' slots are left out, and any optimizer fits.
    #[pyo3(signature = (module, table, bucket_begin, bucket_end, saved=None, segments=false, slots=true))]
    #[expect(clippy::too_many_arguments, reason = "one call of Python")]
    fn check_table(
        &self,
        py: Python<'_>,
        module: String,
        table: &PyTable,
        bucket_begin: u32,
        bucket_end: u32,
        saved: Option<(String, String)>,
        segments: bool,
        slots: bool,
    ) -> PyResult<u64> {
        let name = table.inner.config().name.clone();
        let saved = saved.unwrap_or_else(|| (module.clone(), name.clone()));
        let check = || {
            let entry = self.inner.table(&saved.0, &saved.1)?;
            entry.spec.check_fits(table.inner.config(), slots)?;
            table.inner.check_idle()?;
            let (newest, buckets) = (&self.inner.links()[0], bucket_begin..bucket_end);
            if !slots {
                // Segments hold rows with their slots: these are read row by row.
                let reader = self.inner.table_reader(&saved.0, &saved.1, buckets)?.without_slots();
                let rows = reader.most_rows();
                lock(&self.readers).insert((module, name), reader);
                return Ok(rows);
            }
            let Some(files) = newest.segments_of(&saved.0, &saved.1, &buckets)? else {
                let reader = self.inner.table_reader(&saved.0, &saved.1, buckets)?;
                let rows = reader.most_rows();
                lock(&self.readers).insert((module, name), reader);
                return Ok(rows);
            };
            if !segments {
                return Err(newest.only_for_same_ranks("only torchrec_embcache.Saver loads it"));
            }
            table.inner.check_takes(&files).map_err(|error| match error.kind() {
                Kind::Mismatch => newest.only_for_same_ranks(&error.to_string()),
                _ => error,
            })?;
            let counters = StateCounters { step: entry.spec.step, epoch: self.inner.manifest().next_epoch };
            let rows = files.rows();
            lock(&self.segments).insert((module, name), PySegments { files: Arc::new(files), counters });
            Ok(rows)
        };
        py.detach(check).map_err(to_python)
    }

    /// What `check_table` found that the table is to be opened from, if it did; once.
    fn segments(&self, module: String, table: String) -> Option<PySegments> {
        lock(&self.segments).remove(&(module, table))
    }

    #[pyo3(signature = (module, table, progress=None))]
    #[expect(clippy::needless_pass_by_value, reason = "it is called with the GIL taken anew")]
    fn load_table(
        &self,
        py: Python<'_>,
        module: String,
        table: &PyTable,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        let name = table.inner.config().name.clone();
        let reader = lock(&self.readers).remove(&(module, name)).ok_or_else(|| {
            to_python(Error::new(Kind::State, "check_table() comes before load_table(), once for each"))
        })?;
        let mut failed = None;
        let loaded =
            py.detach(|| reader.load_with(&table.inner, &mut |rows| report(progress.as_ref(), &mut failed, rows)));
        failed.map_or(Ok(()), Err)?;
        loaded.map_err(to_python)
    }
}
