//! Conversion of the Rust core's errors to exceptions of `torchrec_embcache.exceptions`.

use embcache::{Error, Kind};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

fn class_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Config => "ConfigError",
        Kind::Input => "InputError",
        Kind::Capacity => "CapacityError",
        Kind::Memory => "HostMemoryError",
        Kind::DeviceMemory => "DeviceMemoryError",
        Kind::Corruption => "CorruptionError",
        Kind::Storage => "StorageError",
        Kind::Path => "PathError",
        Kind::Permission => "StoragePermissionError",
        Kind::InUse => "InUseError",
        Kind::State => "StateError",
        Kind::Mismatch => "MismatchError",
        Kind::ReadOnly => "ReadOnlyError",
        Kind::Unsupported => "UnsupportedError",
        Kind::Stale => "StaleError",
        _ => "EmbCacheError",
    }
}

/// Returns the exception for an error of the Rust core, with its `errno` and path.
pub(crate) fn to_python(error: Error) -> PyErr {
    Python::attach(|py| {
        let make = || -> PyResult<PyErr> {
            let class = py.import("torchrec_embcache.exceptions")?.getattr(class_name(error.kind()))?;
            let exception = class.call1((error.to_string(),))?;
            if let Some(errno) = error.errno() {
                exception.setattr("errno", errno)?;
            }
            if let Some(path) = error.path() {
                exception.setattr("filename", path.to_string_lossy().into_owned())?;
            }
            Ok(PyErr::from_value(exception))
        };
        make().unwrap_or_else(|failure| failure)
    })
}

/// Returns the error for an exception that a callback raised during `operation` on a device.
pub(crate) fn from_python(py: Python<'_>, error: &PyErr, operation: &str) -> Error {
    let kind = if error.is_instance_of::<PyMemoryError>(py) { Kind::DeviceMemory } else { Kind::State };
    kind.error(format!("{operation}: {error}"))
}

/// Returns an `InputError` with this message.
pub(crate) fn input(message: impl Into<String>) -> PyErr {
    to_python(Kind::Input.error(message))
}
