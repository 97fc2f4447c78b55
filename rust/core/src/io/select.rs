//! Selects the engine of a process.

use std::sync::Arc;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{IoEngine, PsyncEngine};
use crate::error::{Error, Kind, Result};
use crate::process::PerProcess;

/// The environment variable that overrides the selection. Its values are `uring` and `pread`.
const ENGINE_VARIABLE: &str = "EMBCACHE_IO";

/// The requested limit of open files of a process, since each segment of each table is one.
const OPEN_FILE_LIMIT: u64 = 1 << 16;

static PROCESS_ENGINE: PerProcess<Arc<dyn IoEngine>> = PerProcess::new();

/// Returns the engine of this process: `io_uring` if available (a ring was created, and a read through it succeeded),
/// and plain `pread` otherwise, which is logged. The environment variable `EMBCACHE_IO` (`uring` or `pread`) overrides
/// the selection. [`IoEngine::name`] identifies it. A forked child gets its own engine. The first call raises the
/// process's limit of open files as far as permitted.
///
/// Errors: `Config` for another value of the variable; `Unsupported` if it requests `io_uring` and that is unavailable.
pub fn default_engine() -> Result<Arc<dyn IoEngine>> {
    let make = || {
        raise_file_limit();
        choose_engine(std::env::var_os(ENGINE_VARIABLE).map(|value| value.to_string_lossy().into_owned()).as_deref())
    };
    PROCESS_ENGINE.get(make).cloned()
}

/// Raises this process's soft limit of open files towards the hard limit. The usual 1024 is too low for some tables.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(OPEN_FILE_LIMIT, |most| most.min(OPEN_FILE_LIMIT));
    if limit.current.is_some_and(|now| now < wanted) {
        // If this fails, opening a file fails later with an error that names the file and the errno.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum });
    }
}

/// Returns the engine for a value of the environment variable.
fn choose_engine(requested: Option<&str>) -> Result<Arc<dyn IoEngine>> {
    match requested {
        None | Some("") => Ok(uring_engine().unwrap_or_else(|refused| {
            tracing::warn!("files are read by pread, which takes more time of the processor: {refused}");
            Arc::new(PsyncEngine::default())
        })),
        Some("uring") => uring_engine(),
        Some("pread") => Ok(Arc::new(PsyncEngine::default())),
        Some(other) => {
            Err(Error::new(Kind::Config, format!("{ENGINE_VARIABLE}={other:?} is not known: use uring or pread")))
        }
    }
}

#[cfg(target_os = "linux")]
fn uring_engine() -> Result<Arc<dyn IoEngine>> {
    Ok(Arc::new(super::UringEngine::new(true)?))
}

#[cfg(not(target_os = "linux"))]
fn uring() -> Result<Arc<dyn IoEngine>> {
    Err(Error::new(Kind::Unsupported, "io_uring exists on Linux only: unset EMBCACHE_IO or set it to pread"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_chooses_and_a_wrong_value_is_named() {
        assert!(choose_engine(Some("pread")).unwrap().name().starts_with("pread"));
        let error = choose_engine(Some("aio")).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert!(error.to_string().contains("\"aio\""), "{error}");
    }

    #[test]
    fn without_the_variable_a_refused_ring_falls_back() {
        let expected = if uring_engine().is_ok() { "io_uring" } else { "pread" };
        assert!(choose_engine(None).unwrap().name().starts_with(expected));
    }

    #[test]
    fn a_process_has_one_engine() {
        assert!(Arc::ptr_eq(&default_engine().unwrap(), &default_engine().unwrap()));
    }
}
