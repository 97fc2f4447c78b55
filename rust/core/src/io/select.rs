//! Which engine a process uses.

use std::sync::{Arc, OnceLock};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{IoEngine, PsyncEngine};
use crate::error::{Error, Kind, Result};
use crate::process::PerProcess;

/// The environment variable that overrides the choice: `uring` or `pread`.
const VARIABLE: &str = "EMBCACHE_IO";

/// Files that a process may have open, where the system permits it: every segment of every table is one.
const OPEN_FILES: u64 = 1 << 16;

static CHOSEN: PerProcess<Arc<dyn IoEngine>> = PerProcess::new();

/// Why the system permits no `io_uring`, where that was found.
static FALLBACK: OnceLock<String> = OnceLock::new();

/// Why [`default_engine`] fell back to plain `pread`; `None` where it did not.
pub fn fallback_reason() -> Option<&'static str> {
    FALLBACK.get().map(String::as_str)
}

/// The engine of this process: `io_uring` where the system permits it (a ring was made and read through), plain `pread`
/// otherwise; the environment variable `EMBCACHE_IO` (`uring`, `pread`) overrides the choice, which [`IoEngine::name`] tells.
/// A forked child gets an engine of its own. The process's limit of open files is raised as far as the system permits.
///
/// Errors: `Config` for another value of the variable, `Unsupported` when it asks for `io_uring` and the system refuses.
pub fn default_engine() -> Result<Arc<dyn IoEngine>> {
    let make = || {
        raise_file_limit();
        choose(std::env::var_os(VARIABLE).map(|value| value.to_string_lossy().into_owned()).as_deref())
    };
    CHOSEN.get(make).cloned()
}

/// Raise the process's own limit of open files towards the administrator's. The usual 1024 is less than a few tables need.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(OPEN_FILES, |most| most.min(OPEN_FILES));
    if limit.current.is_some_and(|now| now < wanted) {
        // What is refused is met where a file is opened, by name and number.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum });
    }
}

/// The engine for a value of the variable.
fn choose(wanted: Option<&str>) -> Result<Arc<dyn IoEngine>> {
    match wanted {
        None | Some("") => Ok(uring().unwrap_or_else(|refused| {
            FALLBACK.get_or_init(|| refused.to_string());
            Arc::new(PsyncEngine::default())
        })),
        Some("uring") => uring(),
        Some("pread") => Ok(Arc::new(PsyncEngine::default())),
        Some(other) => Err(Error::new(Kind::Config, format!("{VARIABLE}={other:?} is not known: use uring or pread"))),
    }
}

#[cfg(target_os = "linux")]
fn uring() -> Result<Arc<dyn IoEngine>> {
    Ok(Arc::new(super::UringEngine::new(true)?))
}

#[cfg(not(target_os = "linux"))]
fn uring() -> Result<Arc<dyn IoEngine>> {
    Err(Error::new(Kind::Unsupported, "io_uring is Linux's: unset EMBCACHE_IO or set it to pread"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_chooses_and_a_wrong_value_is_named() {
        assert!(choose(Some("pread")).unwrap().name().starts_with("pread"));
        let error = choose(Some("aio")).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert!(error.to_string().contains("\"aio\""), "{error}");
    }

    #[test]
    fn without_the_variable_a_refused_ring_falls_back() {
        let expected = if uring().is_ok() { "io_uring" } else { "pread" };
        assert!(choose(None).unwrap().name().starts_with(expected));
    }

    #[test]
    fn a_process_has_one_engine() {
        assert!(Arc::ptr_eq(&default_engine().unwrap(), &default_engine().unwrap()));
    }
}
