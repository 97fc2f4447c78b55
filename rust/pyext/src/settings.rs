//! The settings of tables and plans, as Python gives them.

use embcache::cache::PlanMode;
use embcache::config::{OnFull, OptimizerKind, PolicyKind, Reopen};
use embcache::rows::Initializer;
use embcache::types::BucketHash;
use embcache::{Error, Kind};
use pyo3::prelude::*;

use crate::error::to_python;

pub(crate) fn config_error(message: String) -> PyErr {
    to_python(Error::new(Kind::Config, message))
}

/// How the rows of a table are born.
#[pyclass(frozen, name = "RowInitializer", module = "torchrec_embcache._native")]
pub(crate) struct PyInitializer {
    pub(crate) core: Initializer,
}

#[pymethods]
impl PyInitializer {
    #[staticmethod]
    fn constant(value: f32) -> Self {
        Self { core: Initializer::Constant { value } }
    }

    #[staticmethod]
    fn uniform(low: f32, high: f32) -> Self {
        Self { core: Initializer::Uniform { low, high } }
    }

    #[staticmethod]
    fn normal(mean: f32, std: f32) -> Self {
        Self { core: Initializer::Normal { mean, std } }
    }

    #[staticmethod]
    fn truncated_normal(mean: f32, std: f32) -> Self {
        Self { core: Initializer::TruncatedNormal { mean, std } }
    }

    #[staticmethod]
    fn linear(low: f32, high: f32) -> Self {
        Self { core: Initializer::Linear { low, high } }
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.core)
    }
}

/// How a plan treats the ids of its batch.
#[pyclass(frozen, get_all, name = "PlanMode", module = "torchrec_embcache._native")]
pub(crate) struct PyPlanMode {
    pub(crate) train: bool,
    pub(crate) ahead: bool,
    pub(crate) unseen_zeros: bool,
}

impl PyPlanMode {
    /// This mode, for a plan for which so many threads may work.
    pub(crate) fn on(&self, threads: usize) -> PlanMode {
        PlanMode { train: self.train, ahead: self.ahead, unseen_zeros: self.unseen_zeros, threads }
    }
}

#[pymethods]
impl PyPlanMode {
    #[new]
    #[pyo3(signature = (*, train, ahead, unseen_zeros))]
    fn new(train: bool, ahead: bool, unseen_zeros: bool) -> Self {
        Self { train, ahead, unseen_zeros }
    }

    fn __repr__(&self) -> String {
        format!("PlanMode(train={}, ahead={}, unseen_zeros={})", self.train, self.ahead, self.unseen_zeros)
    }
}

/// How many bytes a row takes of each budget in memory.
#[pyclass(frozen, get_all, name = "RowBytes", module = "torchrec_embcache._native")]
pub(crate) struct PyRowBytes {
    pub(crate) host: u64,
    pub(crate) device: u64,
}

#[pymethods]
impl PyRowBytes {
    fn __repr__(&self) -> String {
        format!("RowBytes(host={}, device={})", self.host, self.device)
    }
}

/// How often a table was trained, and by which epoch its rows are marked now.
#[pyclass(frozen, get_all, name = "TableCounters", module = "torchrec_embcache._native")]
pub(crate) struct PyTableCounters {
    pub(crate) step: u64,
    pub(crate) epoch: u32,
}

#[pymethods]
impl PyTableCounters {
    fn __repr__(&self) -> String {
        format!("TableCounters(step={}, epoch={})", self.step, self.epoch)
    }
}

pub(crate) fn bucket_hash_from(name: &str) -> PyResult<BucketHash> {
    BucketHash::from_name(name).ok_or_else(|| {
        config_error(format!(
            "bucket_hash {name:?} is not known: use \"splitmix64\", or \"plain\" for rows of older files"
        ))
    })
}

pub(crate) fn optimizer_from(name: &str) -> PyResult<OptimizerKind> {
    OptimizerKind::from_name(name).map_err(to_python)
}

pub(crate) fn policy_from(name: &str) -> PyResult<PolicyKind> {
    PolicyKind::from_name(name).map_err(to_python)
}

pub(crate) fn on_full_from(name: &str) -> PyResult<OnFull> {
    Ok(match name {
        "error" => OnFull::Error,
        "evict" => OnFull::Evict,
        _ => return Err(config_error(format!("on_full={name:?} is not known: use \"error\" or \"evict\""))),
    })
}

/// `unfinished`: the newest state that no flush of several tables completed, for "auto".
pub(crate) fn reopen_from(name: Option<&str>, unfinished: Option<u64>) -> PyResult<Reopen> {
    Ok(match name {
        None => Reopen::Never,
        Some("resume") => Reopen::Resume,
        Some("discard") => Reopen::Discard,
        Some("auto") => Reopen::Auto { unfinished },
        Some(other) => {
            return Err(config_error(format!(
                "reopen={other:?} is not known: use None, \"resume\", \"discard\" or \"auto\""
            )));
        }
    })
}
