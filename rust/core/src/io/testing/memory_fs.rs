//! A file system in RAM that models the effect of a power cut. Tests use it in place of a disk.
//!
//! Every file has a *live* and a *durable* content, and the tree has live and durable entries. `sync` makes the content
//! of a file durable, and `sync_dir` the entries of one directory. A new directory is itself an entry of its parent.
//! [`MemoryEngine::crash`] returns an engine with only the durable state.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::io::{
    DirLock, DirLockPurpose, IoEngine, IoFile, IoOpenMode, IoReadRequest, ReadSink, check_aligned, dir_lock,
    short_file_error,
};
use crate::runtime::sync::lock as locked;

/// Bytes of a sector of the medium. A power cut during a write keeps or loses each sector completely.
const SECTOR: usize = 512;

/// A file system in RAM. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct MemoryEngine {
    tree: Arc<Mutex<MemoryTree>>,
}

#[derive(Debug)]
struct MemoryFile {
    path: PathBuf,
    tree: Arc<Mutex<MemoryTree>>,
    content: Arc<Mutex<MemoryContent>>,
    writable: bool,
}

struct MemoryFileLock {
    tree: Arc<Mutex<MemoryTree>>,
    dir: PathBuf,
}

impl Drop for MemoryFileLock {
    fn drop(&mut self) {
        locked(&self.tree).locked.remove(&self.dir);
    }
}

/// A directory lock of [`IoEngine::lock_dir_for`].
struct MemoryDirLock {
    tree: Arc<Mutex<MemoryTree>>,
    dir: PathBuf,
    how: DirLockPurpose,
}

impl Drop for MemoryDirLock {
    fn drop(&mut self) {
        let mut tree = locked(&self.tree);
        match self.how {
            DirLockPurpose::ToRemove | DirLockPurpose::ToChange | DirLockPurpose::ToOpen => {
                tree.exclusive_locks.remove(&self.dir);
            }
            DirLockPurpose::ToRead => {
                if let Some(index) = tree.shared_locks.iter().position(|dir| *dir == self.dir) {
                    tree.shared_locks.swap_remove(index);
                }
            }
        }
    }
}

impl MemoryEngine {
    /// Returns the state after a power cut: synced contents under synced entries. The copy shares nothing with this
    /// engine.
    #[must_use]
    pub fn crash(&self) -> Self {
        let tree = locked(&self.tree);
        Self::image(&tree.durable, |content| content.durable.clone())
    }

    /// Returns another possible state after a power cut than [`MemoryEngine::crash`]. It has the first few of the
    /// unsynced changes of entries, in order, and any sectors of the unsynced writes. `seed` determines them.
    #[must_use]
    pub fn crash_torn(&self, seed: u64) -> Self {
        let mut draw = SplitMixRng(seed);
        let tree = locked(&self.tree);
        let mut entries = tree.durable.clone();
        let kept = draw.below(tree.unsynced.len() + 1);
        tree.unsynced[..kept].iter().for_each(|change| change.apply(&mut entries));
        Self::image(&entries, |content| {
            let mut bytes = content.durable.clone();
            for edit in &content.unsynced {
                match edit {
                    FileEdit::Len(_) if draw.below(2) == 0 => {}
                    FileEdit::Len(_) => edit.apply(&mut bytes),
                    FileEdit::Write { offset, data } => {
                        for (sector, part) in data.chunks(SECTOR).enumerate() {
                            if draw.below(2) == 1 {
                                write_into(&mut bytes, offset + sector * SECTOR, part);
                            }
                        }
                    }
                }
            }
            bytes
        })
    }

    /// Returns the state after only the process is killed: everything that was written. Locks are free.
    #[must_use]
    pub fn kill(&self) -> Self {
        let tree = locked(&self.tree);
        Self::image(&tree.live, |content| content.live.clone())
    }

    /// Bytes of all live files.
    pub fn live_bytes(&self) -> u64 {
        locked(&self.tree)
            .live
            .values()
            .map(|node| match node {
                MemoryNode::Dir => 0,
                MemoryNode::File(content) => locked(content).live.len() as u64,
            })
            .sum()
    }

    fn image(entries: &MemoryEntries, mut bytes_of: impl FnMut(&MemoryContent) -> Vec<u8>) -> Self {
        let reachable = |path: &Path| {
            path.ancestors()
                .skip(1)
                .filter(|dir| !is_root(dir))
                .all(|dir| matches!(entries.get(dir), Some(MemoryNode::Dir)))
        };
        let mut copied = BTreeMap::new(); // A file with several names stays one file.
        let copy: MemoryEntries = entries
            .iter()
            .filter(|(path, _)| reachable(path))
            .map(|(path, node)| {
                let node = match node {
                    MemoryNode::Dir => MemoryNode::Dir,
                    MemoryNode::File(content) => {
                        let copy = copied.entry(Arc::as_ptr(content).addr()).or_insert_with(|| {
                            let bytes = bytes_of(&locked(content));
                            Arc::new(Mutex::new(MemoryContent {
                                live: bytes.clone(),
                                durable: bytes,
                                unsynced: Vec::new(),
                            }))
                        });
                        MemoryNode::File(Arc::clone(copy))
                    }
                };
                (path.clone(), node)
            })
            .collect();
        let tree = MemoryTree { live: copy.clone(), durable: copy, ..MemoryTree::default() };
        Self { tree: Arc::new(Mutex::new(tree)) }
    }

    /// Locks the file `file`, whose lock represents `resource`.
    fn lock_path(&self, file: &Path, resource: &Path) -> Result<DirLock> {
        let mut tree = locked(&self.tree);
        if !file.parent().is_some_and(|dir| tree.is_dir(dir)) {
            return Err(Error::io("lock", resource, &errno(libc::ENOENT)));
        }
        // The lock file exists as it does on disk, so that a check for an empty directory has the same result.
        if !tree.live.contains_key(file) {
            tree.change(EntryChange::Add(file.to_owned(), MemoryNode::File(Arc::default())));
        }
        if !tree.locked.insert(resource.to_owned()) {
            return Err(dir_lock::in_use_error(resource, &format!("by pid {} (this process)", std::process::id())));
        }
        Ok(DirLock::from_guard(resource, MemoryFileLock { tree: self.tree.clone(), dir: resource.to_owned() }))
    }
}

/// The `SplitMix64` generator (Steele, Lea, Flood, OOPSLA 2014): a counter that steps by the golden ratio, and a mixing
/// function of it.
struct SplitMixRng(u64);

impl SplitMixRng {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (crate::types::hash_id(self.0 as i64) % bound as u64) as usize
    }
}

impl IoFile for MemoryFile {
    fn path(&self) -> &Path {
        &self.path
    }
    fn len(&self) -> Result<u64> {
        Ok(locked(&self.content).live.len() as u64)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        check_aligned(&self.path, offset, data.len())?;
        self.check_writable("write")?;
        locked(&self.content).edit(FileEdit::Write { offset: offset as usize, data: data.to_vec() });
        Ok(())
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        if into.is_empty() {
            return Ok(());
        }
        let content = locked(&self.content);
        let (start, end) = (offset as usize, offset as usize + into.len());
        let Some(bytes) = content.live.get(start..end) else {
            return Err(short_file_error(&self.path, end as u64, content.live.len() as u64));
        };
        into.copy_from_slice(bytes);
        Ok(())
    }
    fn set_len(&self, len: u64) -> Result<()> {
        self.check_writable("resize")?;
        locked(&self.content).edit(FileEdit::Len(len as usize));
        Ok(())
    }
    fn sync(&self) -> Result<()> {
        locked(&self.content).sync();
        Ok(())
    }
    fn links(&self) -> Result<u64> {
        Ok(locked(&self.tree).link_count(&self.content))
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl MemoryFile {
    fn check_writable(&self, action: &str) -> Result<()> {
        if self.writable { Ok(()) } else { Err(Error::io(action, &self.path, &errno(libc::EBADF))) }
    }
}

impl IoEngine for MemoryEngine {
    fn name(&self) -> String {
        "memory".into()
    }

    fn open(&self, path: &Path, mode: IoOpenMode) -> Result<Arc<dyn IoFile>> {
        let path = normalize(path);
        let mut tree = locked(&self.tree);
        let content = match (mode, tree.live.get(&path)) {
            (IoOpenMode::Read | IoOpenMode::Write, Some(MemoryNode::File(content))) => content.clone(),
            (IoOpenMode::Read | IoOpenMode::Write, Some(MemoryNode::Dir)) => {
                return Err(Error::io("open", &path, &errno(libc::EISDIR)));
            }
            (IoOpenMode::Read | IoOpenMode::Write, None) => return Err(Error::io("open", &path, &errno(libc::ENOENT))),
            (IoOpenMode::Create { .. }, Some(_)) => return Err(Error::io("make", &path, &errno(libc::EEXIST))),
            (IoOpenMode::Create { .. }, None) => {
                tree.check_parent(&path).map_err(|e| Error::io("make", &path, &e))?;
                let content = Arc::new(Mutex::new(MemoryContent::default()));
                tree.change(EntryChange::Add(path.clone(), MemoryNode::File(content.clone())));
                content
            }
        };
        Ok(Arc::new(MemoryFile { path, tree: Arc::clone(&self.tree), content, writable: mode != IoOpenMode::Read }))
    }

    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>) {
        let mut buffer = Vec::new();
        for (position, read) in reads.iter().enumerate() {
            buffer.resize(read.len, 0);
            let done = read.file.read_at(read.offset, &mut buffer);
            sink(position, done.map(|()| &buffer[..]), Duration::ZERO);
        }
    }

    fn create_dir_all(&self, path: &Path) -> Result<()> {
        let path = normalize(path);
        let mut tree = locked(&self.tree);
        let mut missing: Vec<&Path> = Vec::new();
        for dir in path.ancestors().filter(|dir| !is_root(dir)) {
            match tree.live.get(dir) {
                Some(MemoryNode::Dir) => break,
                Some(MemoryNode::File(_)) => return Err(Error::io("make", &path, &errno(libc::ENOTDIR))),
                None => missing.push(dir),
            }
        }
        for dir in missing.into_iter().rev() {
            tree.change(EntryChange::Add(dir.to_owned(), MemoryNode::Dir));
        }
        Ok(())
    }

    fn list(&self, path: &Path) -> Result<Vec<PathBuf>> {
        let path = normalize(path);
        let tree = locked(&self.tree);
        if !tree.is_dir(&path) {
            return Err(Error::io("list", &path, &errno(libc::ENOENT)));
        }
        Ok(tree.children(&path))
    }

    fn exists(&self, path: &Path) -> Result<bool> {
        let path = normalize(path);
        Ok(is_root(&path) || locked(&self.tree).live.contains_key(&path))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let (from, to) = (normalize(from), normalize(to));
        let fail = |code| Err(Error::io("rename", &from, &errno(code)));
        let mut tree = locked(&self.tree);
        if tree.check_parent(&to).is_err() {
            return fail(libc::ENOENT);
        }
        match (tree.live.get(&from), tree.live.get(&to)) {
            (None, _) => return fail(libc::ENOENT),
            (Some(MemoryNode::Dir), _) if to.starts_with(&from) && to != from => return fail(libc::EINVAL),
            (Some(MemoryNode::Dir), Some(MemoryNode::File(_))) => return fail(libc::ENOTDIR),
            (Some(MemoryNode::File(_)), Some(MemoryNode::Dir)) => return fail(libc::EISDIR),
            (Some(MemoryNode::Dir), Some(MemoryNode::Dir)) if from != to && !tree.children(&to).is_empty() => {
                return fail(libc::ENOTEMPTY);
            }
            _ => {}
        }
        if from != to {
            tree.change(EntryChange::Rename(from, to));
        }
        Ok(())
    }

    fn link(&self, file: &dyn IoFile, to: &Path) -> Result<()> {
        let to = normalize(to);
        let fail = |code| Err(Error::io("link", &to, &errno(code)));
        let Some(file) = file.as_any().downcast_ref::<MemoryFile>().filter(|file| Arc::ptr_eq(&file.tree, &self.tree))
        else {
            return fail(libc::EXDEV);
        };
        let mut tree = locked(&self.tree);
        if tree.link_count(&file.content) == 0 || tree.check_parent(&to).is_err() {
            return fail(libc::ENOENT);
        }
        if tree.live.contains_key(&to) {
            return fail(libc::EEXIST);
        }
        tree.change(EntryChange::Add(to, MemoryNode::File(Arc::clone(&file.content))));
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        let path = normalize(path);
        let mut tree = locked(&self.tree);
        match tree.live.get(&path) {
            Some(MemoryNode::File(_)) => {
                tree.change(EntryChange::Remove(path));
                Ok(())
            }
            Some(MemoryNode::Dir) => Err(Error::io("remove", &path, &errno(libc::EISDIR))),
            None => Err(Error::io("remove", &path, &errno(libc::ENOENT))),
        }
    }

    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        let path = normalize(path);
        let mut tree = locked(&self.tree);
        if !matches!(tree.live.get(&path), Some(MemoryNode::Dir)) {
            return Err(Error::io("remove", &path, &errno(libc::ENOENT)));
        }
        // Children sort after their directory. In reverse order each directory is empty when it is removed.
        let inside: Vec<PathBuf> = tree.live.keys().filter(|entry| entry.starts_with(&path)).cloned().collect();
        for entry in inside.into_iter().rev() {
            tree.change(EntryChange::Remove(entry));
        }
        Ok(())
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        let path = normalize(path);
        let mut guard = locked(&self.tree);
        let tree = &mut *guard;
        if !tree.is_dir(&path) {
            return Err(Error::io("sync", &path, &errno(libc::ENOENT)));
        }
        // A rename between two directories is durable atomically. So it also makes the earlier changes of the other
        // directory durable.
        let mut dirs = BTreeSet::from([path]);
        loop {
            let before = dirs.len();
            for change in &tree.unsynced {
                if let EntryChange::Rename(from, to) = change
                    && dirs.iter().any(|dir| change.touches(dir))
                {
                    dirs.extend(from.parent().map(Path::to_owned));
                    dirs.extend(to.parent().map(Path::to_owned));
                }
            }
            if dirs.len() == before {
                break;
            }
        }
        tree.unsynced.retain(|change| {
            let touches = dirs.iter().any(|dir| change.touches(dir));
            if touches {
                change.apply(&mut tree.durable);
            }
            !touches
        });
        Ok(())
    }

    fn lock_dir(&self, path: &Path) -> Result<DirLock> {
        let path = normalize(path);
        self.lock_path(&path.join(OsStr::new(dir_lock::LOCK_FILE)), &path)
    }

    fn lock_file(&self, path: &Path) -> Result<DirLock> {
        let path = normalize(path);
        self.lock_path(&path, &path)
    }

    fn lock_dir_for(&self, path: &Path, purpose: DirLockPurpose) -> Result<DirLock> {
        let dir = normalize(path);
        let mut tree = locked(&self.tree);
        if !tree.is_dir(&dir) {
            return Err(Error::io("open the directory", &dir, &errno(libc::ENOENT)));
        }
        let is_read = tree.shared_locks.contains(&dir);
        if tree.exclusive_locks.contains(&dir) || (purpose != DirLockPurpose::ToRead && is_read) {
            return Err(dir_lock::conflict_error(&dir, purpose));
        }
        match purpose {
            DirLockPurpose::ToRead => tree.shared_locks.push(dir.clone()),
            DirLockPurpose::ToRemove | DirLockPurpose::ToChange | DirLockPurpose::ToOpen => {
                tree.exclusive_locks.insert(dir.clone());
            }
        }
        Ok(DirLock::from_guard(&dir, MemoryDirLock { tree: self.tree.clone(), dir: dir.clone(), how: purpose }))
    }
}

#[derive(Clone, Debug)]
enum FileEdit {
    Write { offset: usize, data: Vec<u8> },
    Len(usize),
}

impl FileEdit {
    fn apply(&self, to: &mut Vec<u8>) {
        match self {
            Self::Write { offset, data } => write_into(to, *offset, data),
            Self::Len(len) => to.resize(*len, 0),
        }
    }
}

fn write_into(content: &mut Vec<u8>, offset: usize, data: &[u8]) {
    let end = offset + data.len();
    if content.len() < end {
        content.resize(end, 0);
    }
    content[offset..end].copy_from_slice(data);
}

#[derive(Debug, Default)]
struct MemoryContent {
    live: Vec<u8>,
    durable: Vec<u8>,
    /// The edits from `durable` to `live`, in order.
    unsynced: Vec<FileEdit>,
}

impl MemoryContent {
    fn edit(&mut self, edit: FileEdit) {
        edit.apply(&mut self.live);
        self.unsynced.push(edit);
    }
    fn sync(&mut self) {
        for edit in std::mem::take(&mut self.unsynced) {
            edit.apply(&mut self.durable);
        }
    }
}

#[derive(Clone, Debug)]
enum MemoryNode {
    Dir,
    File(Arc<Mutex<MemoryContent>>),
}

type MemoryEntries = BTreeMap<PathBuf, MemoryNode>;

/// An atomic change of directory entries.
#[derive(Clone, Debug)]
enum EntryChange {
    Add(PathBuf, MemoryNode),
    Remove(PathBuf),
    Rename(PathBuf, PathBuf),
}

impl EntryChange {
    fn apply(&self, entries: &mut MemoryEntries) {
        match self {
            Self::Add(path, node) => {
                entries.insert(path.clone(), node.clone());
            }
            Self::Remove(path) => {
                entries.remove(path);
            }
            Self::Rename(from, to) => {
                let moved: Vec<PathBuf> = entries.keys().filter(|path| path.starts_with(from)).cloned().collect();
                for path in moved {
                    let Some(node) = entries.remove(&path) else { continue };
                    let target = match path.strip_prefix(from) {
                        Ok(rest) if rest.as_os_str().is_empty() => to.clone(),
                        Ok(rest) => to.join(rest),
                        Err(_) => continue,
                    };
                    entries.insert(target, node);
                }
            }
        }
    }

    fn touches(&self, dir: &Path) -> bool {
        match self {
            Self::Add(path, _) | Self::Remove(path) => path.parent() == Some(dir),
            Self::Rename(from, to) => from.parent() == Some(dir) || to.parent() == Some(dir),
        }
    }
}

#[derive(Debug, Default)]
struct MemoryTree {
    live: MemoryEntries,
    durable: MemoryEntries,
    /// The changes in `live` that are not in `durable`, in order.
    unsynced: Vec<EntryChange>,
    locked: BTreeSet<PathBuf>,
    /// The directories that are being read, once per reader.
    shared_locks: Vec<PathBuf>,
    /// The exclusively locked directories.
    exclusive_locks: BTreeSet<PathBuf>,
}

impl MemoryTree {
    fn change(&mut self, change: EntryChange) {
        change.apply(&mut self.live);
        self.unsynced.push(change);
    }

    fn is_dir(&self, path: &Path) -> bool {
        is_root(path) || matches!(self.live.get(path), Some(MemoryNode::Dir))
    }

    fn children(&self, path: &Path) -> Vec<PathBuf> {
        self.live.keys().filter(|entry| entry.parent() == Some(path)).cloned().collect()
    }

    /// Number of a file's names.
    fn link_count(&self, content: &Arc<Mutex<MemoryContent>>) -> u64 {
        self.live.values().filter(|node| matches!(node, MemoryNode::File(file) if Arc::ptr_eq(file, content))).count()
            as u64
    }

    fn check_parent(&self, path: &Path) -> io::Result<()> {
        match path.parent() {
            Some(parent) if !self.is_dir(parent) => Err(errno(libc::ENOENT)),
            _ => Ok(()),
        }
    }
}

fn is_root(path: &Path) -> bool {
    path.as_os_str().is_empty() || path.parent().is_none()
}

fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

fn normalize(path: &Path) -> PathBuf {
    path.components().filter(|part| *part != Component::CurDir).collect()
}
