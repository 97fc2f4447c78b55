//! Values with named fields about checkpoints that cross the FFI boundary: frozen, compared by field, and pickled if ranks exchange them.

use std::collections::BTreeMap;
use std::ffi::OsString;

use embcache::cache::BaseCheckpoint;
use embcache::checkpoint::{CheckpointId, OpenCheckpoint, RankDigest, TableEntry};
use embcache::{Error, checkpoint};
use pyo3::prelude::*;

/// Identifies a manifest by its length and its XXH3.
#[pyclass(frozen, get_all, eq, hash, from_py_object, name = "ManifestDigest", module = "torchrec_embcache._native")]
#[pyo3(new = "from_fields")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PyManifestDigest {
    bytes: u64,
    xxh3: u64,
}

#[pymethods]
impl PyManifestDigest {
    fn __getnewargs__(&self) -> (u64, u64) {
        (self.bytes, self.xxh3)
    }

    fn __repr__(&self) -> String {
        format!("ManifestDigest(bytes={}, xxh3={})", self.bytes, self.xxh3)
    }
}

impl From<RankDigest> for PyManifestDigest {
    fn from(digest: RankDigest) -> Self {
        Self { bytes: digest.bytes, xxh3: digest.xxh3 }
    }
}

impl From<PyManifestDigest> for RankDigest {
    fn from(digest: PyManifestDigest) -> Self {
        Self { bytes: digest.bytes, xxh3: digest.xxh3 }
    }
}

/// Identifies a checkpoint by its name and the XXH3 of its manifest.
#[pyclass(frozen, get_all, eq, hash, from_py_object, name = "CheckpointId", module = "torchrec_embcache._native")]
#[pyo3(new = "from_fields")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PyCheckpointId {
    name: String,
    manifest_xxh3: u64,
}

#[pymethods]
impl PyCheckpointId {
    fn __getnewargs__(&self) -> (String, u64) {
        (self.name.clone(), self.manifest_xxh3)
    }

    fn __repr__(&self) -> String {
        format!("CheckpointId(name={:?}, manifest_xxh3={})", self.name, self.manifest_xxh3)
    }
}

impl From<CheckpointId> for PyCheckpointId {
    fn from(parent: CheckpointId) -> Self {
        Self { name: parent.name, manifest_xxh3: parent.manifest_xxh3 }
    }
}

impl From<PyCheckpointId> for CheckpointId {
    fn from(id: PyCheckpointId) -> Self {
        Self { name: id.name, manifest_xxh3: id.manifest_xxh3 }
    }
}

/// A checkpoint on which a delta of a table can be based, and the first epoch whose changes it does not have.
#[pyclass(frozen, get_all, eq, hash, from_py_object, name = "BaseCheckpoint", module = "torchrec_embcache._native")]
#[pyo3(new = "from_fields")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PyBaseCheckpoint {
    id: PyCheckpointId,
    next_epoch: u32,
}

#[pymethods]
impl PyBaseCheckpoint {
    fn __getnewargs__(&self) -> (PyCheckpointId, u32) {
        (self.id.clone(), self.next_epoch)
    }

    fn __repr__(&self) -> String {
        format!("BaseCheckpoint(id={}, next_epoch={})", self.id.__repr__(), self.next_epoch)
    }
}

impl From<BaseCheckpoint> for PyBaseCheckpoint {
    fn from(base: BaseCheckpoint) -> Self {
        let BaseCheckpoint { name, manifest_xxh3, next_epoch } = base;
        Self { id: PyCheckpointId { name, manifest_xxh3 }, next_epoch }
    }
}

impl From<PyBaseCheckpoint> for BaseCheckpoint {
    fn from(base: PyBaseCheckpoint) -> Self {
        let PyCheckpointId { name, manifest_xxh3 } = base.id;
        Self { name, manifest_xxh3, next_epoch: base.next_epoch }
    }
}

/// Result of writing one table.
#[pyclass(frozen, get_all, name = "TableWriteStats", module = "torchrec_embcache._native")]
#[derive(Clone, Debug, Default)]
pub(crate) struct PyTableWriteStats {
    pub(crate) rows: u64,
    pub(crate) tombstones: u64,
    linked_bytes: u64,
    copied_bytes: u64,
}

impl PyTableWriteStats {
    pub(crate) fn rows(rows: u64) -> Self {
        Self { rows, ..Self::default() }
    }

    pub(crate) fn changes((rows, tombstones): (u64, u64)) -> Self {
        Self { rows, tombstones, ..Self::default() }
    }

    pub(crate) fn linked(linked: checkpoint::LinkedTable) -> Self {
        let bytes = linked.bytes;
        Self { rows: linked.rows, tombstones: 0, linked_bytes: bytes.linked, copied_bytes: bytes.copied }
    }
}

/// Result of publishing a checkpoint.
#[pyclass(frozen, get_all, name = "PublishedCheckpoint", module = "torchrec_embcache._native")]
pub(crate) struct PyPublishedCheckpoint {
    id: PyCheckpointId,
    parent: Option<PyCheckpointId>,
    cleanup_errors: Vec<String>,
}

impl From<checkpoint::PublishedCheckpoint> for PyPublishedCheckpoint {
    fn from(published: checkpoint::PublishedCheckpoint) -> Self {
        let left = published.cleanup_errors.iter().map(Error::to_string).collect();
        Self { id: published.identity.into(), parent: published.parent.map(Into::into), cleanup_errors: left }
    }
}

/// Result of copying a checkpoint.
#[pyclass(frozen, get_all, name = "CheckpointCopyReport", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointCopyReport {
    names: Vec<String>,
    bytes: u64,
    is_newest: bool,
}

impl From<checkpoint::CheckpointCopyReport> for PyCheckpointCopyReport {
    fn from(copied: checkpoint::CheckpointCopyReport) -> Self {
        let names = copied.names.iter().map(ToString::to_string).collect();
        Self { names, bytes: copied.bytes, is_newest: copied.is_newest }
    }
}

/// Result of removing checkpoints.
#[pyclass(frozen, get_all, name = "PruneReport", module = "torchrec_embcache._native")]
pub(crate) struct PyPruneReport {
    removed: Vec<String>,
    errors: Vec<String>,
}

impl From<checkpoint::PruneReport> for PyPruneReport {
    fn from(pruned: checkpoint::PruneReport) -> Self {
        let removed = pruned.removed.iter().map(ToString::to_string).collect();
        Self { removed, errors: pruned.errors.iter().map(Error::to_string).collect() }
    }
}

/// A part that one rank wrote, to be adopted by the coordinator.
#[pyclass(frozen, get_all, from_py_object, name = "WrittenPart", module = "torchrec_embcache._native")]
#[pyo3(new = "from_fields")]
#[derive(Clone, Debug)]
pub(crate) struct PyWrittenPart {
    /// May be invalid UTF-8.
    pub(crate) directory: OsString,
    pub(crate) name: String,
    pub(crate) digest: PyManifestDigest,
}

#[pymethods]
impl PyWrittenPart {
    fn __getnewargs__(&self) -> (OsString, String, PyManifestDigest) {
        (self.directory.clone(), self.name.clone(), self.digest.clone())
    }

    fn __repr__(&self) -> String {
        format!("WrittenPart({:?}, {:?}, {})", self.directory.to_string_lossy(), self.name, self.digest.__repr__())
    }
}

/// A range of a rank's dense stream.
#[pyclass(frozen, get_all, name = "StreamRange", module = "torchrec_embcache._native")]
pub(crate) struct PyStreamRange {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// Metadata of the latest checkpoint of a directory.
#[pyclass(frozen, get_all, name = "NewestCheckpoint", module = "torchrec_embcache._native")]
pub(crate) struct PyNewestCheckpoint {
    id: PyCheckpointId,
    merged: Option<PyCheckpointId>,
    next_epoch: u32,
    kind: &'static str,
    tables: Vec<PySavedTable>,
}

impl PyNewestCheckpoint {
    pub(crate) fn of(checkpoint: &OpenCheckpoint) -> Self {
        let manifest = checkpoint.manifest();
        Self {
            id: checkpoint.identity().into(),
            merged: manifest.merged.clone().map(Into::into),
            next_epoch: manifest.next_epoch,
            kind: manifest.kind.name(),
            tables: manifest.tables.iter().map(PySavedTable::of).collect(),
        }
    }
}

/// Counts of a table's changes since a checkpoint. Pickled.
#[pyclass(frozen, get_all, eq, from_py_object, name = "ChangeCounts", module = "torchrec_embcache._native")]
#[pyo3(new = "from_fields")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PyChangeCounts {
    pub(crate) rows: u64,
    pub(crate) tombstones: u64,
    pub(crate) swept: u64,
    pub(crate) expiring: u64,
}

#[pymethods]
impl PyChangeCounts {
    fn __getnewargs__(&self) -> (u64, u64, u64, u64) {
        (self.rows, self.tombstones, self.swept, self.expiring)
    }
}

/// Metadata of one table of a checkpoint.
#[pyclass(frozen, get_all, name = "SavedTable", module = "torchrec_embcache._native")]
#[derive(Clone, Debug)]
pub(crate) struct PySavedTable {
    pub(crate) module: String,
    pub(crate) table: String,
    key: u64,
    dim: u32,
    optimizer: String,
    hyperparameters: BTreeMap<String, f64>,
    step: u64,
    seed: u64,
    total_num_buckets: u32,
    rows: u64,
    pending: Option<u64>,
    has_oov_row: bool,
}

impl PySavedTable {
    pub(crate) fn of(entry: &TableEntry) -> Self {
        let spec = &entry.spec;
        Self {
            module: spec.module.clone(),
            table: spec.table.clone(),
            key: spec.key,
            dim: spec.dim,
            optimizer: spec.optimizer.name.clone(),
            hyperparameters: spec.optimizer.hyperparameters.clone(),
            step: spec.step,
            seed: spec.seed,
            total_num_buckets: spec.total_num_buckets,
            rows: entry.total_rows,
            pending: entry.pending,
            has_oov_row: spec.oov_row.is_some(),
        }
    }
}
