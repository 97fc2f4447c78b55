//! Loading checkpoints into tables, and merging them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use embcache::checkpoint::{
    ChainCompaction, ChainReader, CheckpointChain, CheckpointName, DenseExtent, DenseReader, LatestCheckpoint,
    LoadColumns, LoadSegments, TableRequest, TableSource,
};
use embcache::{Error, Kind};
use numpy::PyReadwriteArray1;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffers::slice_mut;
use crate::checkpoint::lock;
use crate::directory::PyCheckpointDirectory;
use crate::error::to_python;
use crate::records::{PyCheckpointId, PyManifestDigest, PySavedTable};
use crate::segments::PyLinkedSegments;
use crate::table::PyTable;

/// Reports the number of additional rows to a rank's progress callback. An exception from it aborts the work.
fn report_progress(progress: Option<&Py<PyAny>>, raised: &mut Option<PyErr>, rows: u64) -> embcache::Result<()> {
    let Some(progress) = progress else { return Ok(()) };
    Python::attach(|py| progress.call1(py, (rows,))).map(|_| ()).map_err(|error| {
        *raised = Some(error);
        Error::new(Kind::State, "progress raised an exception")
    })
}

/// Opens the checkpoint `latest` of a directory, with its base checkpoints.
pub(crate) fn open_chain(py: Python<'_>, directory: &PyCheckpointDirectory, latest: &str) -> PyResult<CheckpointChain> {
    let latest: LatestCheckpoint = latest.parse().map_err(to_python)?;
    py.detach(|| CheckpointChain::open(&directory.inner, latest)).map_err(to_python)
}

/// One rank's part of merging a chain of deltas.
#[pyclass(frozen, name = "ChainCompaction", module = "torchrec_embcache._native")]
pub(crate) struct PyChainCompaction {
    inner: ChainCompaction,
}

#[pymethods]
impl PyChainCompaction {
    #[staticmethod]
    #[pyo3(signature = (directory, latest, *, counters=true))]
    fn open(py: Python<'_>, directory: &PyCheckpointDirectory, latest: &str, counters: bool) -> PyResult<Option<Self>> {
        let latest: LatestCheckpoint = latest.parse().map_err(to_python)?;
        let inner = py.detach(|| ChainCompaction::open(&directory.inner, latest)).map_err(to_python)?;
        Ok(inner.map(|inner| Self { inner: if counters { inner } else { inner.without_counts() } }))
    }

    #[getter]
    fn id(&self) -> PyCheckpointId {
        self.inner.chain().identity().into()
    }

    #[getter]
    fn next_epoch(&self) -> u32 {
        self.inner.chain().manifest().next_epoch
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.inner.chain().manifest().tables.iter().map(|entry| entry.total_rows).sum()
    }

    fn release(&self) {
        self.inner.chain().release();
    }

    #[pyo3(signature = (name, rank, world_size, progress=None))]
    #[expect(clippy::needless_pass_by_value, reason = "it is called with the GIL taken anew")]
    fn write(
        &self,
        py: Python<'_>,
        name: &str,
        rank: u32,
        world_size: u32,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<PyManifestDigest> {
        let name: CheckpointName = name.parse().map_err(to_python)?;
        let mut raised = None;
        let written = py.detach(|| {
            let mut told = |rows| report_progress(progress.as_ref(), &mut raised, rows);
            self.inner.write(name, (rank, world_size), &mut told)
        });
        raised.map_or(Ok(()), Err)?;
        written.map(Into::into).map_err(to_python)
    }
}

/// A checkpoint with checked manifests, and its base checkpoints.
#[pyclass(frozen, name = "CheckpointReader", module = "torchrec_embcache._native")]
pub(crate) struct PyCheckpointReader {
    inner: CheckpointChain,
    /// Sources of the tables that `check_table` has checked, by the table's own module and name.
    sources: Mutex<HashMap<(String, String), TableSource>>,
    /// Dense state of the latest checkpoint.
    extents: DenseReader,
}

#[pymethods]
impl PyCheckpointReader {
    #[new]
    fn new(py: Python<'_>, directory: &PyCheckpointDirectory, latest: &str) -> PyResult<Self> {
        let inner = open_chain(py, directory, latest)?;
        Ok(Self { extents: inner.links()[0].dense_reader(), inner, sources: Mutex::default() })
    }

    #[getter]
    fn name(&self) -> &str {
        &self.inner.manifest().name
    }

    #[getter]
    fn id(&self) -> PyCheckpointId {
        self.inner.identity().into()
    }

    #[getter]
    fn kind(&self) -> &'static str {
        self.inner.manifest().kind.name()
    }

    #[getter]
    fn chain_names(&self) -> Vec<String> {
        self.inner.names().map(str::to_owned).collect()
    }

    #[getter]
    fn next_epoch(&self) -> u32 {
        self.inner.manifest().next_epoch
    }

    fn release(&self) {
        self.inner.release();
    }

    fn dense_metadata<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let metadata = py.detach(|| self.inner.links()[0].dense_metadata()).map_err(to_python)?;
        Ok(metadata.map(|metadata| PyBytes::new(py, &metadata)))
    }

    fn stream_bytes(&self) -> Vec<u64> {
        self.extents.stream_bytes()
    }

    fn read_dense(&self, py: Python<'_>, rank: u32, offset: u64, mut into: PyReadwriteArray1<'_, u8>) -> PyResult<()> {
        let into = slice_mut("into", &mut into)?;
        let extent = DenseExtent { offset, bytes: into.len() as u64 };
        py.detach(|| self.extents.read(rank, extent, into)).map_err(to_python)
    }

    fn tables(&self) -> Vec<PySavedTable> {
        self.inner.manifest().tables.iter().map(PySavedTable::of).collect()
    }

    #[pyo3(signature = (module, table, bucket_begin, bucket_end, *, saved=None, segments=false, slots=true))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one request")]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 extracts owned strings")]
    fn check_table(
        &self,
        py: Python<'_>,
        module: String,
        table: &PyTable,
        bucket_begin: u32,
        bucket_end: u32,
        saved: Option<&PySavedTable>,
        segments: bool,
        slots: bool,
    ) -> PyResult<u64> {
        let name = table.inner.config().name.clone();
        let request = TableRequest {
            module: saved.map_or(&module, |saved| &saved.module),
            table: saved.map_or(&name, |saved| &saved.table),
            buckets: bucket_begin..bucket_end,
            columns: if slots { LoadColumns::All } else { LoadColumns::WithoutSlots },
            segments: if segments { LoadSegments::Open } else { LoadSegments::Refuse },
        };
        py.detach(|| {
            let source = self.inner.check_table(&table.inner, &request)?;
            let rows = source.max_rows();
            lock(&self.sources).insert((module.clone(), name.clone()), source);
            Ok(rows)
        })
        .map_err(to_python)
    }

    /// Returns the segments from which the table is opened, if `check_table` found them. They are returned once.
    fn segments(&self, module: String, table: String) -> Option<PyLinkedSegments> {
        let (mut sources, key) = (lock(&self.sources), (module, table));
        match sources.remove(&key)? {
            TableSource::Segments(files, counters, counts, clock, shared_row) => {
                Some(PyLinkedSegments { files: Arc::new(files), counters, counts, clock, oov_row: shared_row })
            }
            rows @ TableSource::Rows(_) => {
                sources.insert(key, rows);
                None
            }
        }
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
        let reader = self.rows_of(module, table.inner.config().name.clone())?;
        let mut raised = None;
        let loaded = py.detach(|| {
            reader.load_with(&table.inner, &mut |rows| report_progress(progress.as_ref(), &mut raised, rows))
        });
        raised.map_or(Ok(()), Err)?;
        loaded.map_err(to_python)
    }
}

impl PyCheckpointReader {
    /// Takes the reader of a table's rows that `check_table` prepared.
    fn rows_of(&self, module: String, table: String) -> PyResult<ChainReader> {
        let source = lock(&self.sources).remove(&(module, table));
        match source {
            Some(TableSource::Rows(reader)) => Ok(reader),
            _ => Err(to_python(Error::new(Kind::State, "check_table() comes before load_table(), once for each"))),
        }
    }
}
