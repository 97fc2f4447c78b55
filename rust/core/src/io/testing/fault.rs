//! An engine that injects faults into another one: errors, partial writes, flipped bits, a stop of everything, and
//! operations that hang.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::io::{DirLock, DirLockPurpose, IoEngine, IoFile, IoOpenMode, IoReadRequest, ReadSink, short_file_error};
use crate::runtime::sync::lock;

/// The kinds of operation of an engine. All but `Read`, `Exists`, `Open` and `List` are *changes*: they are counted and
/// logged, and a stop can hit any of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoOperation {
    /// Creates a file.
    Create,
    /// Writes to a file.
    Write,
    /// Truncates or extends a file.
    SetLen,
    /// Syncs a file.
    Sync,
    /// Renames a file or directory.
    Rename,
    /// Links a file to a second name.
    Link,
    /// Removes a file.
    RemoveFile,
    /// Removes a directory and everything in it.
    RemoveDir,
    /// Creates directories.
    CreateDir,
    /// Syncs a directory.
    SyncDir,
    /// One read, in a batch or separate.
    Read,
    /// Checks if a path exists.
    Exists,
    /// Opens an existing file.
    Open,
    /// Lists the entries of a directory.
    List,
}

impl IoOperation {
    fn is_change(self) -> bool {
        !matches!(self, Self::Read | Self::Exists | Self::Open | Self::List)
    }
}

/// The effect that replaces an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoFault {
    /// The operation does nothing and fails with this `errno`.
    Fail(i32),
    /// A write writes its first half, rounded down to the alignment, and fails with this `errno`. A read fails as if
    /// the file were too short. Any other operation does nothing and fails with `errno`.
    Tear(i32),
    /// A read returns, or a write writes, bytes with one bit flipped, and succeeds. Any other operation is executed
    /// unchanged.
    Flip,
    /// The operation does nothing, and it and everything later fails, as if the machine had lost power.
    Stop,
}

#[derive(Debug)]
struct FaultRule {
    /// The operation that the rule applies to; `None` for every change.
    operation: Option<IoOperation>,
    /// Number of operations that still pass.
    skip: u64,
    fault: IoFault,
    /// If true, the rule stays until [`FaultEngine::clear`].
    repeats: bool,
}

impl FaultRule {
    fn covers(&self, operation: IoOperation) -> bool {
        self.operation.map_or(operation.is_change(), |only| only == operation)
    }
}

#[derive(Debug, Default)]
struct FaultState {
    rules: Vec<FaultRule>,
    log: Vec<(IoOperation, PathBuf)>,
    stopped: bool,
    held: Option<IoOperation>,
    /// The kind of operation that is to panic, and the number of those that still pass before.
    panic: Option<(IoOperation, u64)>,
    /// Number of operations that hang.
    waiting: usize,
}

#[derive(Debug, Default)]
struct FaultInjector {
    state: Mutex<FaultState>,
    changed: Condvar,
}

impl FaultInjector {
    /// Returns the fault that hits this operation, if any. This waits while operations of the kind are held.
    fn hit(&self, operation: IoOperation, path: &Path) -> Option<IoFault> {
        let mut state = lock(&self.state);
        while state.held == Some(operation) && !state.stopped {
            state.waiting += 1;
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        if state.stopped {
            return Some(IoFault::Stop);
        }
        if operation.is_change() {
            state.log.push((operation, path.to_owned()));
        }
        match &mut state.panic {
            Some((failing, 0)) if *failing == operation => {
                state.panic = None;
                drop(state);
                panic!("the fault engine was asked to panic");
            }
            Some((failing, passing)) if *failing == operation => *passing -= 1,
            _ => {}
        }
        let mut hit = None;
        state.rules.retain_mut(|rule| {
            if hit.is_some() || !rule.covers(operation) {
                return true;
            }
            if rule.skip > 0 {
                rule.skip -= 1;
                return true;
            }
            hit = Some(rule.fault);
            rule.repeats
        });
        if hit == Some(IoFault::Stop) {
            state.stopped = true;
            self.changed.notify_all();
        }
        hit
    }

    /// Returns the error of an operation that cannot be partial or flipped, if a fault hits it.
    fn check(&self, operation: IoOperation, action: &str, path: &Path) -> Result<()> {
        match self.hit(operation, path) {
            None | Some(IoFault::Flip) => Ok(()),
            Some(IoFault::Fail(errno) | IoFault::Tear(errno)) => Err(injected_error(action, path, errno)),
            Some(IoFault::Stop) => Err(stopped_error(action, path)),
        }
    }

    fn check_running(&self, action: &str, path: &Path) -> Result<()> {
        if lock(&self.state).stopped { Err(stopped_error(action, path)) } else { Ok(()) }
    }
}

fn injected_error(action: &str, path: &Path, errno: i32) -> Error {
    Error::io(action, path, &std::io::Error::from_raw_os_error(errno))
}

fn stopped_error(action: &str, path: &Path) -> Error {
    injected_error(action, path, libc::EIO).context("the fault engine has stopped")
}

fn flip(data: &mut [u8]) {
    let middle = data.len() / 2;
    if let Some(byte) = data.get_mut(middle) {
        *byte ^= 1;
    }
}

/// An engine over another one that injects faults. Clones share the faults and the log.
#[derive(Clone)]
pub struct FaultEngine {
    inner: Arc<dyn IoEngine>,
    faults: Arc<FaultInjector>,
}

impl fmt::Debug for FaultEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultEngine").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl FaultEngine {
    /// Creates an engine without faults.
    pub fn new(inner: Arc<dyn IoEngine>) -> Self {
        Self { inner, faults: Arc::default() }
    }

    /// Number of requested changes, including failed ones.
    pub fn changes(&self) -> u64 {
        lock(&self.faults.state).log.len() as u64
    }

    /// The requested changes, in order, each with its path. For a rename that is the source.
    pub fn log(&self) -> Vec<(IoOperation, PathBuf)> {
        lock(&self.faults.state).log.clone()
    }

    /// Lets `passing` more changes of any kind pass, and hits the next one, once.
    pub fn hit_change(&self, passing: u64, fault: IoFault) {
        self.add_rule(None, passing, fault, false);
    }

    /// Lets `passing` more operations of one kind pass, and hits the next one, once.
    pub fn hit_once(&self, operation: IoOperation, passing: u64, fault: IoFault) {
        self.add_rule(Some(operation), passing, fault, false);
    }

    /// True if a fault is set that has neither hit nor been cleared.
    pub fn will_hit(&self) -> bool {
        !lock(&self.faults.state).rules.is_empty()
    }

    /// Hits every operation of a kind until [`FaultEngine::clear`].
    pub fn hit_every(&self, operation: IoOperation, fault: IoFault) {
        self.add_rule(Some(operation), 0, fault, true);
    }

    /// Lets `passing` more operations of one kind pass, and panics in the next one, once.
    pub fn panic_at(&self, operation: IoOperation, passing: u64) {
        lock(&self.faults.state).panic = Some((operation, passing));
    }

    /// True if a panic is set that has not happened yet.
    pub fn will_panic(&self) -> bool {
        lock(&self.faults.state).panic.is_some()
    }

    fn add_rule(&self, operation: Option<IoOperation>, skip: u64, fault: IoFault, repeats: bool) {
        lock(&self.faults.state).rules.push(FaultRule { operation, skip, fault, repeats });
    }

    /// Removes all faults. A stopped engine stays stopped.
    pub fn clear(&self) {
        lock(&self.faults.state).rules.clear();
    }

    /// Makes every later operation fail.
    pub fn stop(&self) {
        lock(&self.faults.state).stopped = true;
        self.faults.changed.notify_all();
    }

    /// True if a stop has hit.
    pub fn is_stopped(&self) -> bool {
        lock(&self.faults.state).stopped
    }

    /// Makes every operation of a kind hang until [`FaultEngine::release`] or a stop.
    pub fn hold(&self, operation: IoOperation) {
        lock(&self.faults.state).held = Some(operation);
    }

    /// Waits until an operation hangs, or the engine is stopped.
    pub fn wait_until_held(&self) {
        let mut state = lock(&self.faults.state);
        while state.waiting == 0 && !state.stopped {
            state = self.faults.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets the operations that hang continue.
    pub fn release(&self) {
        lock(&self.faults.state).held = None;
        self.faults.changed.notify_all();
    }
}

/// Returns true if a bit of this read is to be flipped, or the error of the read.
fn read_fault(faults: &FaultInjector, path: &Path, end: u64) -> Result<bool> {
    match faults.hit(IoOperation::Read, path) {
        None => Ok(false),
        Some(IoFault::Flip) => Ok(true),
        Some(IoFault::Fail(errno)) => Err(injected_error("read", path, errno)),
        Some(IoFault::Tear(_)) => Err(short_file_error(path, end, end.saturating_sub(1))),
        Some(IoFault::Stop) => Err(stopped_error("read", path)),
    }
}

#[derive(Debug)]
struct FaultFile {
    inner: Arc<dyn IoFile>,
    faults: Arc<FaultInjector>,
}

impl IoFile for FaultFile {
    fn path(&self) -> &Path {
        self.inner.path()
    }
    fn len(&self) -> Result<u64> {
        self.faults.check_running("read the size of", self.path())?;
        self.inner.len()
    }
    fn is_direct(&self) -> bool {
        self.inner.is_direct()
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        match self.faults.hit(IoOperation::Write, self.path()) {
            None => self.inner.write_at(offset, data),
            Some(IoFault::Fail(errno)) => Err(injected_error("write", self.path(), errno)),
            Some(IoFault::Tear(errno)) => {
                let half = data.len() / 2;
                self.inner.write_at(offset, &data[..half - half % crate::io::ALIGNMENT])?;
                Err(injected_error("write", self.path(), errno))
            }
            Some(IoFault::Flip) => {
                let mut data = data.to_vec();
                flip(&mut data);
                self.inner.write_at(offset, &data)
            }
            Some(IoFault::Stop) => Err(stopped_error("write", self.path())),
        }
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let flipped = read_fault(&self.faults, self.path(), offset + into.len() as u64)?;
        self.inner.read_at(offset, into)?;
        if flipped {
            flip(into);
        }
        Ok(())
    }
    fn set_len(&self, len: u64) -> Result<()> {
        self.faults.check(IoOperation::SetLen, "resize", self.path())?;
        self.inner.set_len(len)
    }
    fn sync(&self) -> Result<()> {
        self.faults.check(IoOperation::Sync, "sync", self.path())?;
        self.inner.sync()
    }
    fn links(&self) -> Result<u64> {
        self.faults.check_running("inspect", self.path())?;
        self.inner.links()
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl IoEngine for FaultEngine {
    fn name(&self) -> String {
        format!("fault over {}", self.inner.name())
    }

    fn open(&self, path: &Path, mode: IoOpenMode) -> Result<Arc<dyn IoFile>> {
        match mode {
            IoOpenMode::Read | IoOpenMode::Write => self.faults.check(IoOperation::Open, "open", path)?,
            IoOpenMode::Create { .. } => self.faults.check(IoOperation::Create, "make", path)?,
        }
        Ok(Arc::new(FaultFile { inner: self.inner.open(path, mode)?, faults: self.faults.clone() }))
    }

    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>) {
        let mut passed = Vec::with_capacity(reads.len());
        let mut whence = Vec::with_capacity(reads.len());
        for (position, read) in reads.iter().enumerate() {
            match read_fault(&self.faults, read.file.path(), read.offset + read.len as u64) {
                Ok(flipped) => {
                    let file = read.file.as_any().downcast_ref::<FaultFile>();
                    let file = file.map_or_else(|| read.file.clone(), |file| file.inner.clone());
                    passed.push(IoReadRequest { file, offset: read.offset, len: read.len });
                    whence.push((position, flipped));
                }
                Err(error) => sink(position, Err(error), Duration::ZERO),
            }
        }
        self.inner.read_batch(&passed, &mut |index, outcome, took| match (whence[index], outcome) {
            ((position, true), Ok(data)) => {
                let mut data = data.to_vec();
                flip(&mut data);
                sink(position, Ok(&data), took);
            }
            ((position, _), outcome) => sink(position, outcome, took),
        });
    }

    fn create_dir_all(&self, path: &Path) -> Result<()> {
        self.faults.check(IoOperation::CreateDir, "make", path)?;
        self.inner.create_dir_all(path)
    }
    fn list(&self, path: &Path) -> Result<Vec<PathBuf>> {
        self.faults.check(IoOperation::List, "list", path)?;
        self.inner.list(path)
    }
    fn exists(&self, path: &Path) -> Result<bool> {
        self.faults.check(IoOperation::Exists, "look at", path)?;
        self.inner.exists(path)
    }
    fn check_private(&self, path: &Path, allowed_mode: u32) -> Result<()> {
        self.inner.check_private(path, allowed_mode)
    }
    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.faults.check(IoOperation::Rename, "rename", from)?;
        self.inner.rename(from, to)
    }
    fn link(&self, file: &dyn IoFile, to: &Path) -> Result<()> {
        self.faults.check(IoOperation::Link, "link", to)?;
        self.inner.link(file.as_any().downcast_ref::<FaultFile>().map_or(file, |file| &*file.inner), to)
    }
    fn remove_file(&self, path: &Path) -> Result<()> {
        self.faults.check(IoOperation::RemoveFile, "remove", path)?;
        self.inner.remove_file(path)
    }
    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        self.faults.check(IoOperation::RemoveDir, "remove", path)?;
        self.inner.remove_dir_all(path)
    }
    fn sync_dir(&self, path: &Path) -> Result<()> {
        self.faults.check(IoOperation::SyncDir, "sync", path)?;
        self.inner.sync_dir(path)
    }
    fn lock_dir(&self, path: &Path) -> Result<DirLock> {
        self.faults.check_running("lock", path)?;
        self.inner.lock_dir(path)
    }
    fn lock_file(&self, path: &Path) -> Result<DirLock> {
        self.faults.check_running("lock", path)?;
        self.inner.lock_file(path)
    }
    fn lock_dir_for(&self, path: &Path, purpose: DirLockPurpose) -> Result<DirLock> {
        self.faults.check_running("lock", path)?;
        self.inner.lock_dir_for(path, purpose)
    }
}
