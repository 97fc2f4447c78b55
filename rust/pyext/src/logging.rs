//! Forwards the log of the Rust core, its `tracing` events, to Python's `logging`.
//!
//! A handler of Python's `logging` is user code. It may use a table, so it must not run while a lock of the Rust core
//! is held, and events occur on any thread, under any lock. So an event is only added to a queue of the process. A
//! background thread, which holds no lock of the core, takes events from the queue, acquires the GIL and logs them.
//!
//! - The queue is bounded. Events that do not fit are counted, and their number is logged.
//! - The thread starts with the first event of a process. A forked child has its own queue, and its first event starts
//!   a thread there. If the OS cannot start a thread, events wait for the next [`drain_log`].
//! - `atexit` logs the remaining events and stops the thread, so that it never acquires the GIL of an exiting
//!   interpreter. If a handler is stuck at that point, the events behind it are not logged.
//! - The levels are those of Python's loggers. They are read when a table is opened, when a save or a load opens its
//!   directory, and when a batch is planned or a table is flushed (at most once per second). The core sees them as one
//!   atomic number. The queue's thread does not read levels, because it could overwrite newer levels that a caller has
//!   read.
//! - An exception of a handler goes to `sys.unraisablehook`, and the next event is logged. An exception of logger code
//!   while the levels are read is the caller's error: a signal handler, such as that of Ctrl-C, may have raised it
//!   there.

use std::collections::VecDeque;
use std::fmt::{Debug, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant, SystemTime};

use embcache::PerProcess;
use embcache::runtime::signals::is_main_thread;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber, span};

/// Parent of the loggers of the core's modules. Receives events that belong to none of them.
const CORE: &str = "torchrec_embcache.core";
/// Maximum number of queued events. The limit is reached only if a handler is slow or stuck: at about 300 bytes each
/// they use 300 KiB.
const MOST_WAITING: usize = 1024;
/// Minimum interval between reading levels when a batch is planned or a table is flushed. Reading them takes
/// microseconds.
const LEVELS_EVERY: Duration = Duration::from_secs(1);
/// Maximum time that interpreter exit waits for a handler running on the queue's thread.
const MOST_WAIT_AT_EXIT: Duration = Duration::from_secs(5);

/// The modules of the core that log, with the level of each one's logger.
static MODULES: [LogModule; 5] = [
    LogModule::new("cache"),
    LogModule::new("checkpoint"),
    LogModule::new("io"),
    LogModule::new("serve"),
    LogModule::new("ssd"),
];
/// Level of the parent logger.
static CORE_LEVEL: AtomicU8 = AtomicU8::new(0);

/// A module of the core and the level of its logger, as numbered by [`verbosity`].
struct LogModule {
    name: &'static str,
    level: AtomicU8,
}

impl LogModule {
    const fn new(name: &'static str) -> Self {
        Self { name, level: AtomicU8::new(0) }
    }

    /// Returns the module of a target (the path of a Rust module).
    fn for_target(target: &str) -> Option<&'static Self> {
        let name = target.strip_prefix("embcache::")?.split("::").next()?;
        MODULES.iter().find(|module| module.name == name)
    }

    fn logger(&self) -> String {
        format!("{CORE}.{}", self.name)
    }
}

/// Converts a level to a number: 0 logs nothing, 5 everything.
fn verbosity(level: Level) -> u8 {
    match level {
        Level::ERROR => 1,
        Level::WARN => 2,
        Level::INFO => 3,
        Level::DEBUG => 4,
        Level::TRACE => 5,
    }
}

/// Converts a level to that of Python's `logging`.
fn python_level(level: Level) -> u8 {
    50 - 10 * verbosity(level).min(4) - if level == Level::TRACE { 5 } else { 0 }
}

/// Queue of events to log, and the thread that logs them.
#[derive(Default)]
struct LogQueue {
    inner: Mutex<LogBacklog>,
    /// Signaled when an event arrives, and at the end.
    arrived: Condvar,
    /// Signaled when no thread is logging.
    idle: Condvar,
}

#[derive(Default)]
struct LogBacklog {
    events: VecDeque<LogEvent>,
    /// Number of events that did not fit since the last one that was logged.
    dropped: u64,
    has_thread: bool,
    /// The thread that is logging.
    logging: Option<ThreadId>,
    /// Number of calls that wait to log the remaining events. The queue's thread leaves the events to them.
    calls: usize,
    /// Set at interpreter exit; later events are dropped.
    ended: bool,
}

/// A queued event.
struct LogEvent {
    metadata: &'static Metadata<'static>,
    text: String,
    at: SystemTime,
    thread: Option<String>,
}

impl LogQueue {
    /// The queue of this process.
    fn of_process() -> &'static Self {
        static QUEUE: PerProcess<LogQueue> = PerProcess::new();
        QUEUE.get(|| Ok(Self::default())).expect("making a queue does not fail")
    }

    fn lock(&self) -> MutexGuard<'_, LogBacklog> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an event. May be called under any lock of the core: it only waits for the queue's lock, which is held
    /// briefly.
    fn push(&'static self, event: LogEvent) {
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
        embcache::runtime::memory::can_start_threads() && builder.spawn(|| self.log_until_the_end()).is_ok()
    }

    /// Main loop of the queue's thread.
    fn log_until_the_end(&self) {
        while let Some(logging) = self.begin_with_an_event() {
            // Catches panics of functions that a handler calls. They stop neither this thread nor logging.
            let logged = catch_unwind(AssertUnwindSafe(|| {
                Python::try_attach(|py| {
                    if let Err(error) = logging.log_waiting(py, true) {
                        error.write_unraisable(py, None);
                    }
                })
            }));
            if let Ok(None) = logged {
                return;
            }
        }
    }

    /// Waits until there is an event and no other thread logs or waits to log, and starts logging. Returns `None` at
    /// the end.
    fn begin_with_an_event(&self) -> Option<LogGuard<'_>> {
        let mut waiting = self.lock();
        while !waiting.ended {
            let changed = if waiting.logging.is_some() || waiting.calls > 0 {
                &self.idle
            } else if waiting.events.is_empty() {
                &self.arrived
            } else {
                waiting.logging = Some(std::thread::current().id());
                return Some(LogGuard(self));
            };
            waiting = changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Waits at most `most` until no other thread logs, and starts logging. Returns `None` after a timeout, and if the
    /// caller is a handler: its own thread is then logging.
    fn begin(&self, most: Duration) -> Option<LogGuard<'_>> {
        let (me, began) = (std::thread::current().id(), Instant::now());
        let mut waiting = self.lock();
        if waiting.logging == Some(me) {
            return None;
        }
        waiting.calls += 1;
        while waiting.logging.is_some() {
            let left = most.saturating_sub(began.elapsed());
            if left.is_zero() {
                break;
            }
            waiting = self.idle.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        waiting.calls -= 1;
        if waiting.logging.is_some() {
            return None;
        }
        waiting.logging = Some(me);
        Some(LogGuard(self))
    }
}

/// The right to log, which one thread has at a time. Released on drop.
struct LogGuard<'a>(&'a LogQueue);

impl Drop for LogGuard<'_> {
    fn drop(&mut self) {
        self.0.lock().logging = None;
        self.0.idle.notify_all();
    }
}

impl LogGuard<'_> {
    /// Logs the events that are queued at the call. No lock of the core is held. With `yields_to_calls`, the queue's
    /// thread leaves the rest to calls that wait to log.
    ///
    /// Returns an exception of a handler only if it is not an `Exception`, for example after Ctrl-C.
    fn log_waiting(&self, py: Python<'_>, yields_to_calls: bool) -> PyResult<()> {
        let count = self.0.lock().events.len();
        for _ in 0..count {
            let (event, dropped) = {
                let mut waiting = self.0.lock();
                if yields_to_calls && waiting.calls > 0 {
                    return Ok(());
                }
                (waiting.events.pop_front(), std::mem::take(&mut waiting.dropped))
            };
            let logged = log_dropped(py, dropped).and(event.map_or(Ok(()), |event| event.log(py)));
            match logged {
                Err(error) if error.is_instance_of::<PyException>(py) => error.write_unraisable(py, None),
                logged => logged?,
            }
        }
        Ok(())
    }
}

/// Logs the number of dropped events, if there are any.
fn log_dropped(py: Python<'_>, dropped: u64) -> PyResult<()> {
    if dropped == 0 {
        return Ok(());
    }
    let text = format!(
        "{dropped} log events of the core were dropped, because {MOST_WAITING} waited to be logged already: make the handlers of \
         {CORE} faster or its level higher"
    );
    logger(py, CORE)?.call_method1("warning", (text,)).map(drop)
}

impl LogEvent {
    /// Logs the event with its time and thread.
    fn log(&self, py: Python<'_>) -> PyResult<()> {
        let name = LogModule::for_target(self.metadata.target()).map_or_else(|| CORE.to_owned(), LogModule::logger);
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

/// Sets the core's log levels to those of Python's loggers. Must be called while no lock of the core is held. After an
/// error the levels are unchanged.
pub(crate) fn follow_levels(py: Python<'_>) -> PyResult<()> {
    // Python levels are integers of any size. Larger ones are clamped.
    let number = |level: Bound<'_, PyAny>| level.extract::<i64>().unwrap_or(i64::MAX);
    let least = number(logger(py, CORE)?.getattr("manager")?.getattr("disable")?).saturating_add(1);
    let level_of = |name: &str| -> PyResult<u8> {
        let level = number(logger(py, name)?.call_method0("getEffectiveLevel")?);
        Ok(match level.max(least) {
            ..=5 => 5,
            6..=10 => 4,
            11..=20 => 3,
            21..=30 => 2,
            31..=40 => 1,
            _ => 0,
        })
    };
    let core = level_of(CORE)?;
    let modules = MODULES.iter().map(|module| level_of(&module.logger())).collect::<PyResult<Vec<u8>>>()?;
    let mut changed = CORE_LEVEL.swap(core, Ordering::Relaxed) != core;
    for (module, level) in MODULES.iter().zip(modules) {
        changed |= module.level.swap(level, Ordering::Relaxed) != level;
    }
    if changed {
        // Also applies `max_level_hint`.
        tracing::callsite::rebuild_interest_cache();
    }
    Ok(())
}

/// Like [`follow_levels`], at most once per second.
pub(crate) fn follow_levels_sometimes(py: Python<'_>) -> PyResult<()> {
    /// Start time, and the time of the next read in milliseconds since then. A forked child has its own, or it would
    /// wait for as long as its parent has lived.
    static NEXT: PerProcess<(Instant, AtomicU64)> = PerProcess::new();
    let Ok((started, next_ms)) = NEXT.get(|| Ok((Instant::now(), AtomicU64::new(0)))) else { return Ok(()) };
    let now = started.elapsed().as_millis() as u64;
    if now < next_ms.load(Ordering::Relaxed) {
        return Ok(());
    }
    next_ms.store(now + LEVELS_EVERY.as_millis() as u64, Ordering::Relaxed);
    follow_levels(py)
}

/// Adds the core's events to the queue.
struct PythonSubscriber;

impl Subscriber for PythonSubscriber {
    /// Calls [`Subscriber::enabled`] for every event of a level that some logger accepts. If events cached the first
    /// result, an event that first occurs while another thread changes the levels would keep the old result
    /// permanently.
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let level = LogModule::for_target(metadata.target()).map_or(&CORE_LEVEL, |module| &module.level);
        !metadata.is_span() && verbosity(*metadata.level()) <= level.load(Ordering::Relaxed)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        let modules = MODULES.iter().map(|module| module.level.load(Ordering::Relaxed));
        Some(match modules.fold(CORE_LEVEL.load(Ordering::Relaxed), u8::max) {
            0 => LevelFilter::OFF,
            1 => LevelFilter::ERROR,
            2 => LevelFilter::WARN,
            3 => LevelFilter::INFO,
            4 => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        })
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = EventText::default();
        event.record(&mut text);
        let thread = match std::thread::current().name() {
            Some(name) => Some(name.to_owned()),
            None if is_main_thread() => Some("MainThread".to_owned()),
            None => None,
        };
        let text = text.message + &text.fields;
        LogQueue::of_process().push(LogEvent { metadata: event.metadata(), text, at: SystemTime::now(), thread });
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// Text of an event: its message, then `key=value` of each field.
#[derive(Default)]
struct EventText {
    message: String,
    fields: String,
}

impl Visit for EventText {
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

/// Reads the levels of Python's loggers, and logs the queued events. On return every event before the call has been
/// passed to its handlers, unless the caller is a handler.
#[pyfunction]
pub(crate) fn drain_log(py: Python<'_>) -> PyResult<()> {
    follow_levels(py)?;
    let queue = LogQueue::of_process();
    py.detach(|| queue.begin(Duration::MAX)).map_or(Ok(()), |logging| logging.log_waiting(py, false))
}

/// Logs the queued events, and drops later ones. Called by `atexit`.
#[pyfunction]
fn end_log(py: Python<'_>) -> PyResult<()> {
    let queue = LogQueue::of_process();
    let logging = py.detach(|| queue.begin(MOST_WAIT_AT_EXIT));
    let mut waiting = queue.lock();
    waiting.ended = true;
    if logging.is_none() {
        // A handler is stuck. If it continues after all, it must not delay the exit once per event.
        waiting.events.clear();
    }
    drop(waiting);
    queue.arrived.notify_all();
    logging.map_or(Ok(()), |logging| logging.log_waiting(py, false))
}

/// Subscribes to the core's events, unless the process already has another global subscriber.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    // Imports `logging` first, because `atexit` calls functions in reverse order of registration: the handlers are
    // closed after everything is logged.
    py.import("logging")?;
    let ends = wrap_pyfunction!(end_log, module)?;
    py.import("atexit")?.call_method1("register", (ends,))?;
    if tracing::dispatcher::set_global_default(tracing::Dispatch::new(PythonSubscriber)).is_ok() {
        follow_levels(py)?;
    }
    Ok(())
}
