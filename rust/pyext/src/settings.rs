//! Settings of tables and plans, and the budget that tables share, from Python.

use std::num::NonZeroU64;
use std::sync::Arc;

use embcache::Kind;
use embcache::cache::{MissingMode, PlanMode};
use embcache::config::{AdmissionRule, EvictionRule, MissingRead, OnFull, OptimizerKind, PolicyKind, ReopenMode};
use embcache::rows::{InitializerSpec, WeightPrecision};
use embcache::runtime::budget::SharedBudget;
use pyo3::prelude::*;

use crate::error::to_python;

fn config_error(message: String) -> PyErr {
    to_python(Kind::Config.error(message))
}

fn unknown_error(field: &str, name: &str, known: &str) -> PyErr {
    config_error(format!("{field}={name:?} is not known: use {known}"))
}

/// Returns the value of `field` that is called `name`.
pub(crate) fn value_named<T: Copy>(field: &str, name: &str, known: &[(&str, T)]) -> PyResult<T> {
    let found = known.iter().find(|(known, _)| *known == name);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let mut names: Vec<String> = known.iter().map(|(name, _)| format!("{name:?}")).collect();
        let last = names.pop().unwrap_or_default();
        unknown_error(field, name, &format!("{} or {last}", names.join(", ")))
    })
}

/// Returns the value read for missing ids that is called `name`.
pub(crate) fn missing_read_from(field: &str, name: &str) -> PyResult<MissingRead> {
    let known = [("zeros", MissingRead::Zeros), ("initial", MissingRead::Initial), ("oov", MissingRead::OovRow)];
    let found = known.into_iter().find(|(known, _)| *known == name).map(|(_, read)| read);
    found.ok_or_else(|| unknown_error(field, name, r#""zeros", "initial", "oov" or a number"#))
}

/// Initializer of a table's rows.
#[pyclass(frozen, name = "RowInitializer", module = "torchrec_embcache._native")]
pub(crate) struct PyRowInitializer {
    pub(crate) core: InitializerSpec,
}

#[pymethods]
impl PyRowInitializer {
    #[staticmethod]
    fn constant(value: f32) -> Self {
        Self { core: InitializerSpec::Constant { value } }
    }

    #[staticmethod]
    fn uniform(low: f32, high: f32) -> Self {
        Self { core: InitializerSpec::Uniform { low, high } }
    }

    #[staticmethod]
    fn normal(mean: f32, std: f32) -> Self {
        Self { core: InitializerSpec::Normal { mean, std } }
    }

    #[staticmethod]
    fn truncated_normal(mean: f32, std: f32) -> Self {
        Self { core: InitializerSpec::TruncatedNormal { mean, std } }
    }

    #[staticmethod]
    fn linear(low: f32, high: f32) -> Self {
        Self { core: InitializerSpec::Linear { low, high } }
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.core)
    }
}

/// Admission rule: which ids get a row.
#[pyclass(frozen, name = "RowAdmission", module = "torchrec_embcache._native")]
pub(crate) struct PyRowAdmission {
    pub(crate) core: AdmissionRule,
}

#[pymethods]
impl PyRowAdmission {
    #[staticmethod]
    #[pyo3(signature = (threshold, *, window_steps, memory))]
    fn count(threshold: u32, window_steps: Option<NonZeroU64>, memory: u64) -> Self {
        Self { core: AdmissionRule::Count { threshold, window_steps, memory } }
    }

    #[staticmethod]
    fn probability(p: f64) -> Self {
        Self { core: AdmissionRule::Probability { p } }
    }

    #[staticmethod]
    #[pyo3(signature = (*, alpha, beta, threshold, window_steps, memory))]
    fn show_click(alpha: f64, beta: f64, threshold: f64, window_steps: Option<NonZeroU64>, memory: u64) -> Self {
        Self { core: AdmissionRule::ShowClick { alpha, beta, threshold, window_steps, memory } }
    }

    #[staticmethod]
    fn no_new_rows() -> Self {
        Self { core: AdmissionRule::ReadOnly }
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.core)
    }
}

/// Eviction rule: the rows that a sweep expires.
#[pyclass(frozen, name = "SweepRule", module = "torchrec_embcache._native")]
pub(crate) struct PyEvictionRule {
    pub(crate) core: EvictionRule,
}

#[pymethods]
impl PyEvictionRule {
    #[staticmethod]
    fn last_step(steps: u64) -> Self {
        Self { core: EvictionRule::Unused { steps } }
    }

    #[staticmethod]
    fn trained_until(step: u64) -> Self {
        Self { core: EvictionRule::TrainedUntil { step } }
    }

    #[staticmethod]
    fn nothing() -> Self {
        Self { core: EvictionRule::Nothing }
    }

    #[staticmethod]
    #[pyo3(signature = (*, needs_clock=false))]
    fn per_sweep(needs_clock: bool) -> Self {
        Self { core: if needs_clock { EvictionRule::PerSweepTimed } else { EvictionRule::PerSweep } }
    }

    #[staticmethod]
    fn score(below: f32) -> Self {
        Self { core: EvictionRule::ScoreBelow(below) }
    }

    #[staticmethod]
    fn l2_norm(below: f64) -> Self {
        Self { core: EvictionRule::NormBelow(below) }
    }

    #[staticmethod]
    fn below_rank(score: u32, last_step: u64, row_id: u64) -> Self {
        Self { core: EvictionRule::Below { score, last_step, id: row_id } }
    }

    #[staticmethod]
    fn any(rules: Vec<Py<Self>>) -> Self {
        Self { core: EvictionRule::Any(rules.iter().map(|rule| rule.get().core.clone()).collect()) }
    }

    #[staticmethod]
    fn all(rules: Vec<Py<Self>>) -> Self {
        Self { core: EvictionRule::All(rules.iter().map(|rule| rule.get().core.clone()).collect()) }
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.core)
    }
}

/// Value read for a missing id: "zeros", "initial", "oov" or a number.
#[derive(FromPyObject)]
pub(crate) enum PyMissingRead {
    Value(f32),
    Name(String),
}

impl PyMissingRead {
    /// Returns the native form. The error names `field`.
    pub(crate) fn core(&self, field: &str) -> PyResult<MissingRead> {
        match self {
            Self::Value(value) if value.is_finite() => Ok(MissingRead::Value(*value)),
            Self::Value(value) => Err(config_error(format!("{field}={value}: give a finite number"))),
            Self::Name(name) => missing_read_from(field, name),
        }
    }
}

/// Treatment of a batch's ids by a plan.
#[pyclass(frozen, get_all, name = "PlanMode", module = "torchrec_embcache._native")]
pub(crate) struct PyPlanMode {
    train: bool,
    is_prefetch: bool,
    pub(crate) missing: String,
}

impl PyPlanMode {
    /// Returns this mode for a plan that uses `threads` threads.
    pub(crate) fn on(&self, threads: usize) -> PyResult<PlanMode> {
        Ok(PlanMode {
            train: self.train,
            is_prefetch: self.is_prefetch,
            missing: missing_mode_from(&self.missing)?,
            threads,
        })
    }
}

#[pymethods]
impl PyPlanMode {
    #[new]
    #[pyo3(signature = (*, train, is_prefetch, missing))]
    fn new(train: bool, is_prefetch: bool, missing: String) -> PyResult<Self> {
        missing_mode_from(&missing)?;
        Ok(Self { train, is_prefetch, missing })
    }

    fn __repr__(&self) -> String {
        format!("PlanMode(train={}, is_prefetch={}, missing={:?})", self.train, self.is_prefetch, self.missing)
    }
}

/// Bytes of a row in each memory budget.
#[pyclass(frozen, get_all, name = "RowBytes", module = "torchrec_embcache._native")]
pub(crate) struct PyRowBytes {
    pub(crate) host: u64,
    pub(crate) device: u64,
    pub(crate) ssd: u64,
    pub(crate) index: u64,
}

#[pymethods]
impl PyRowBytes {
    fn __repr__(&self) -> String {
        let Self { host, device, ssd, index } = self;
        format!("RowBytes(host={host}, device={device}, ssd={ssd}, index={index})")
    }
}

/// Number of training steps of a table, and its current epoch.
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

fn missing_mode_from(name: &str) -> PyResult<MissingMode> {
    use MissingMode::{Initial, NotAdmitted, Zeros};
    value_named("missing", name, &[("initial", Initial), ("zeros", Zeros), ("not_admitted", NotAdmitted)])
}

pub(crate) fn precision_from(name: &str) -> PyResult<WeightPrecision> {
    let unknown = || unknown_error("precision", name, r#""fp32", "fp16", "bf16" or "int8""#);
    WeightPrecision::from_name(name).ok_or_else(unknown)
}

pub(crate) fn optimizer_from(name: &str) -> PyResult<OptimizerKind> {
    OptimizerKind::from_name(name).map_err(to_python)
}

pub(crate) fn policy_from(name: &str) -> PyResult<PolicyKind> {
    PolicyKind::from_name(name).map_err(to_python)
}

pub(crate) fn on_full_from(name: &str) -> PyResult<OnFull> {
    value_named("on_full", name, &[("error", OnFull::Error), ("evict", OnFull::Evict)])
}

/// Parses `reopen`. `unfinished`: commit id of the latest state that no flush of several tables completed, for "auto".
pub(crate) fn reopen_from(name: Option<&str>, unfinished: Option<u64>) -> PyResult<ReopenMode> {
    Ok(match name {
        None => ReopenMode::Never,
        Some("resume") => ReopenMode::Resume,
        Some("discard") => ReopenMode::Discard,
        Some("auto") => ReopenMode::Auto { unfinished },
        Some(other) => return Err(unknown_error("reopen", other, r#"None, "resume", "discard" or "auto""#)),
    })
}

/// The bytes of a module's `host_bytes` that its tables share.
#[pyclass(frozen, name = "SharedBudget", module = "torchrec_embcache._native")]
pub(crate) struct PySharedBudget {
    pub(crate) core: Arc<SharedBudget>,
}

#[pymethods]
impl PySharedBudget {
    #[new]
    #[pyo3(signature = (size, *, host_bytes, tables, gain))]
    fn new(size: u64, host_bytes: u64, tables: u32, gain: f64) -> PyResult<Self> {
        if !(gain > 0.0 && gain <= 1.0) {
            return Err(config_error(format!("gain={gain} of a shared budget: give a number above 0, at most 1")));
        }
        Ok(Self { core: Arc::new(SharedBudget::new(size, host_bytes, tables, gain)) })
    }

    /// Bytes not allocated to a table.
    #[getter]
    fn free(&self) -> u64 {
        self.core.free()
    }

    #[getter]
    fn host_bytes(&self) -> u64 {
        self.core.host_bytes()
    }

    #[getter]
    fn tables(&self) -> u32 {
        self.core.tables()
    }

    /// Returns a budget for copies of the tables, with no bytes allocated.
    fn __deepcopy__(&self, _memo: &Bound<'_, PyAny>) -> Self {
        Self { core: Arc::new(self.core.untaken()) }
    }
}
