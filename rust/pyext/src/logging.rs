//! Hands what the core logs, its `tracing` events, to Python's `logging`.
//!
//! A handler of Python's `logging` is code of the user's. It may use a table, so it must not run while a lock of the core is held, and
//! events come up on any thread, under any lock. So an event only goes into a queue of the process. A thread of its own, which holds no
//! lock of the core, takes events out of the queue, takes the GIL and logs them.
//!
//! - The queue is bounded. An event that does not fit is counted, and the number is logged.
//! - The thread starts with the first event of a process. A forked child has a queue of its own, and its first event starts a thread
//!   there. Where the system gives no thread, events wait for the next [`drain_log`].
//! - `atexit` logs what is left and ends the thread, which never asks for the GIL of an interpreter that ends.
//! - The levels are those of Python's loggers. They are read when a table is opened, when a save or a load opens its directory, when a
//!   batch is planned or a table is flushed (once a second at most), and before events are logged. The core sees them as one atomic
//!   number.

use std::collections::VecDeque;
use std::fmt::{Debug, Write};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant, SystemTime};

use embcache::PerProcess;
use embcache::signals::is_main_thread;
use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber, span};

/// The logger of the package. What no other logger is for goes there.
const PACKAGE: &str = "torchrec_embcache";
/// Events that may wait to be logged. More than these come only where a handler is slow or stuck: at about 300 bytes each they take
/// 300 KiB.
const MOST_WAITING: usize = 1024;
/// Levels are read at most this often where a batch is planned or a table is flushed: reading them costs some microseconds.
const LEVELS_EVERY: Duration = Duration::from_secs(1);
/// The end of the interpreter waits so long for a handler that is under way on the queue's thread.
const MOST_WAIT_AT_EXIT: Duration = Duration::from_secs(5);

/// The modules of the core that log, with the level of each one's logger.
static MODULES: [Module; 4] = [Module::new("cache"), Module::new("checkpoint"), Module::new("io"), Module::new("ssd")];
/// The level of the package's logger.
static PACKAGE_LEVEL: AtomicU8 = AtomicU8::new(0);

/// A module of the core and the level of its logger, as [`verbosity`] numbers it.
struct Module {
    name: &'static str,
    level: AtomicU8,
}

impl Module {
    const fn new(name: &'static str) -> Self {
        Self { name, level: AtomicU8::new(0) }
    }

    /// The module that a target (the path of a Rust module) belongs to.
    fn of(target: &str) -> Option<&'static Self> {
        let name = target.strip_prefix("embcache::")?.split("::").next()?;
        MODULES.iter().find(|module| module.name == name)
    }

    fn logger(&self) -> String {
        format!("{PACKAGE}.{}", self.name)
    }
}

/// A level as a number: 0 logs nothing, 5 everything.
fn verbosity(level: Level) -> u8 {
    match level {
        Level::ERROR => 1,
        Level::WARN => 2,
        Level::INFO => 3,
        Level::DEBUG => 4,
        Level::TRACE => 5,
    }
}

/// The level of Python's `logging` for a level of the core.
fn python_level(level: Level) -> u8 {
    50 - 10 * verbosity(level).min(4) - if level == Level::TRACE { 5 } else { 0 }
}

/// Events that are to be logged, and who logs them.
#[derive(Default)]
struct Queue {
    inner: Mutex<Waiting>,
    /// An event came, or the end.
    arrived: Condvar,
    /// Nobody logs any more.
    idle: Condvar,
}

#[derive(Default)]
struct Waiting {
    events: VecDeque<Logged>,
    /// Events that did not fit since the last one that was logged.
    dropped: u64,
    has_thread: bool,
    /// The thread that is logging.
    logging: Option<ThreadId>,
    /// The interpreter ends: nothing is logged any more.
    ended: bool,
}

/// An event as it waits to be logged.
struct Logged {
    metadata: &'static Metadata<'static>,
    text: String,
    at: SystemTime,
    thread: Option<String>,
}

impl Queue {
    /// The queue of this process.
    fn here() -> &'static Self {
        static QUEUE: PerProcess<Queue> = PerProcess::new();
        QUEUE.get(|| Ok(Self::default())).expect("making a queue does not fail")
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Add an event. Called under any lock of the core: it waits for nobody but who holds the queue, which nobody does for long.
    fn push(&'static self, event: Logged) {
        let needs_thread = {
            let mut waiting = self.lock();
            if waiting.ended {
                return;
            }
            if waiting.events.len() == MOST_WAITING {
                waiting.dropped += 1;
            } else {
                waiting.events.push_back(event);
            }
            !std::mem::replace(&mut waiting.has_thread, true)
        };
        if needs_thread && !self.start_thread() {
            self.lock().has_thread = false;
        }
        self.arrived.notify_one();
    }

    fn start_thread(&'static self) -> bool {
        let builder = std::thread::Builder::new().name("embcache-log".into());
        embcache::memory::room_for_threads() && builder.spawn(|| self.log_until_the_end()).is_ok()
    }

    fn log_until_the_end(&self) {
        loop {
            {
                let mut waiting = self.lock();
                while waiting.logging.is_some() || waiting.events.is_empty() {
                    if waiting.ended {
                        return;
                    }
                    let changed = if waiting.logging.is_some() { &self.idle } else { &self.arrived };
                    waiting = changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                }
                if waiting.ended {
                    return;
                }
                waiting.logging = Some(std::thread::current().id());
            }
            let logged = Python::try_attach(|py| {
                if let Err(error) = self.log_waiting(py) {
                    error.write_unraisable(py, None);
                }
            });
            self.done();
            if logged.is_none() {
                return;
            }
        }
    }

    fn done(&self) {
        self.lock().logging = None;
        self.idle.notify_all();
    }

    /// Wait until nobody logs, at most so long, and be who logs. False where that took too long, and where the caller is a handler: then
    /// its own thread is logging.
    fn begin(&self, most: Duration) -> bool {
        let (me, began) = (std::thread::current().id(), Instant::now());
        let mut waiting = self.lock();
        while waiting.logging.is_some() {
            let left = most.saturating_sub(began.elapsed());
            if waiting.logging == Some(me) || left.is_zero() {
                return false;
            }
            waiting = self.idle.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        waiting.logging = Some(me);
        true
    }

    /// Log what waits. Nobody else does, and no lock of the core is held.
    fn log_waiting(&self, py: Python<'_>) -> PyResult<()> {
        read_levels(py)?;
        loop {
            let (event, dropped) = {
                let mut waiting = self.lock();
                (waiting.events.pop_front(), std::mem::take(&mut waiting.dropped))
            };
            if dropped > 0 {
                let text = format!(
                    "{dropped} log events of the core were dropped, because {MOST_WAITING} waited to be logged already: make the \
                     handlers of {PACKAGE} faster or its level higher"
                );
                logger(py, PACKAGE)?.call_method1("warning", (text,))?;
            }
            match event {
                Some(event) => event.log(py)?,
                None => return Ok(()),
            }
        }
    }
}

impl Logged {
    /// Log it as of the time and the thread of the event.
    fn log(&self, py: Python<'_>) -> PyResult<()> {
        let name = Module::of(self.metadata.target()).map_or_else(|| PACKAGE.to_owned(), Module::logger);
        let logger = logger(py, &name)?;
        let level = python_level(*self.metadata.level());
        if !logger.call_method1("isEnabledFor", (level,))?.is_truthy()? {
            return Ok(());
        }
        let place = (self.metadata.file().unwrap_or("(unknown file)"), self.metadata.line().unwrap_or(0));
        let args = (name, level, place.0, place.1, &self.text, (), py.None());
        let record = logger.call_method1("makeRecord", args)?;
        let since_epoch = self.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        record.setattr("created", since_epoch.as_secs_f64())?;
        record.setattr("msecs", f64::from(since_epoch.subsec_millis()))?;
        record.setattr("threadName", self.thread.as_deref().unwrap_or("(unnamed)"))?;
        logger.call_method1("handle", (record,)).map(drop)
    }
}

fn logger<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("logging")?.call_method1("getLogger", (name,))
}

/// Let the core log what Python's loggers take from now on. To be called where no lock of the core is held. Where a logger's own code
/// raises, the levels stay as they are.
pub(crate) fn follow_levels(py: Python<'_>) {
    let _ = read_levels(py);
}

fn read_levels(py: Python<'_>) -> PyResult<()> {
    let disabled: i64 = logger(py, PACKAGE)?.getattr("manager")?.getattr("disable")?.extract()?;
    let level_of = |name: &str| -> PyResult<u8> {
        let level: i64 = logger(py, name)?.call_method0("getEffectiveLevel")?.extract()?;
        Ok(match level.max(disabled + 1) {
            ..=5 => 5,
            6..=10 => 4,
            11..=20 => 3,
            21..=30 => 2,
            31..=40 => 1,
            _ => 0,
        })
    };
    let package = level_of(PACKAGE)?;
    let mut changed = PACKAGE_LEVEL.swap(package, Ordering::Relaxed) != package;
    for module in &MODULES {
        let level = level_of(&module.logger())?;
        changed |= module.level.swap(level, Ordering::Relaxed) != level;
    }
    if changed {
        tracing::callsite::rebuild_interest_cache();
    }
    Ok(())
}

/// As [`follow_levels`], once a second at most.
pub(crate) fn follow_levels_sometimes(py: Python<'_>) {
    static STARTED: PerProcess<Instant> = PerProcess::new();
    static NEXT_MS: AtomicU64 = AtomicU64::new(0);
    let Ok(started) = STARTED.get(|| Ok(Instant::now())) else { return };
    let now = started.elapsed().as_millis() as u64;
    if now >= NEXT_MS.load(Ordering::Relaxed) {
        NEXT_MS.store(now + LEVELS_EVERY.as_millis() as u64, Ordering::Relaxed);
        follow_levels(py);
    }
}

/// Puts the core's events into the queue.
struct ToPython;

impl Subscriber for ToPython {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let level = Module::of(metadata.target()).map_or(&PACKAGE_LEVEL, |module| &module.level);
        !metadata.is_span() && verbosity(*metadata.level()) <= level.load(Ordering::Relaxed)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        let modules = MODULES.iter().map(|module| module.level.load(Ordering::Relaxed));
        Some(match modules.fold(PACKAGE_LEVEL.load(Ordering::Relaxed), u8::max) {
            0 => LevelFilter::OFF,
            1 => LevelFilter::ERROR,
            2 => LevelFilter::WARN,
            3 => LevelFilter::INFO,
            4 => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        })
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let thread = match std::thread::current().name() {
            Some(name) => Some(name.to_owned()),
            None if is_main_thread() => Some("MainThread".to_owned()),
            None => None,
        };
        let text = text.message + &text.fields;
        Queue::here().push(Logged { metadata: event.metadata(), text, at: SystemTime::now(), thread });
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// An event as text: its message, then `key=value` of each field.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

/// Read the levels of Python's loggers, and log what waits. Afterwards everything that was logged before the call has been handed to its
/// handlers, except where one of them made the call.
#[pyfunction]
pub(crate) fn drain_log(py: Python<'_>) -> PyResult<()> {
    read_levels(py)?;
    let queue = Queue::here();
    if !py.detach(|| queue.begin(Duration::MAX)) {
        return Ok(());
    }
    let logged = queue.log_waiting(py);
    queue.done();
    logged
}

/// Log what waits, and nothing from then on. To be called by `atexit`.
#[pyfunction]
fn log_ends(py: Python<'_>) -> PyResult<()> {
    let queue = Queue::here();
    let begun = py.detach(|| queue.begin(MOST_WAIT_AT_EXIT));
    queue.lock().ended = true;
    queue.arrived.notify_all();
    if !begun {
        return Ok(());
    }
    let logged = queue.log_waiting(py);
    queue.done();
    logged
}

/// Have the core's events from now on. Where the process has another listener for them already, they stay with that.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let ends = wrap_pyfunction!(log_ends, module)?;
    py.import("atexit")?.call_method1("register", (ends,))?;
    if tracing::dispatcher::set_global_default(tracing::Dispatch::new(ToPython)).is_ok() {
        read_levels(py)?;
    }
    Ok(())
}
