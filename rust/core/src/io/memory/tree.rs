//! The entries and files of the memory engine: their current state, and the part of it that is durable.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Bytes of a sector of the medium. A power cut during a write keeps or loses each sector completely.
pub(super) const SECTOR: usize = 512;

#[derive(Clone, Debug)]
pub(super) enum FileEdit {
    Write { offset: usize, data: Vec<u8> },
    Len(usize),
}

impl FileEdit {
    pub(super) fn apply(&self, to: &mut Vec<u8>) {
        match self {
            Self::Write { offset, data } => write_into(to, *offset, data),
            Self::Len(len) => to.resize(*len, 0),
        }
    }
}

pub(super) fn write_into(content: &mut Vec<u8>, offset: usize, data: &[u8]) {
    let end = offset + data.len();
    if content.len() < end {
        content.resize(end, 0);
    }
    content[offset..end].copy_from_slice(data);
}

#[derive(Debug, Default)]
pub(super) struct MemoryContent {
    pub(super) live: Vec<u8>,
    pub(super) durable: Vec<u8>,
    /// The edits from `durable` to `live`, in order.
    pub(super) unsynced: Vec<FileEdit>,
}

impl MemoryContent {
    pub(super) fn edit(&mut self, edit: FileEdit) {
        edit.apply(&mut self.live);
        self.unsynced.push(edit);
    }
    pub(super) fn sync(&mut self) {
        for edit in std::mem::take(&mut self.unsynced) {
            edit.apply(&mut self.durable);
        }
    }
}

#[derive(Clone, Debug)]
pub(super) enum MemoryNode {
    Dir,
    File(Arc<Mutex<MemoryContent>>),
}

pub(super) type MemoryEntries = BTreeMap<PathBuf, MemoryNode>;

/// An atomic change of directory entries.
#[derive(Clone, Debug)]
pub(super) enum EntryChange {
    Add(PathBuf, MemoryNode),
    Remove(PathBuf),
    Rename(PathBuf, PathBuf),
}

impl EntryChange {
    pub(super) fn apply(&self, entries: &mut MemoryEntries) {
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

    pub(super) fn touches(&self, dir: &Path) -> bool {
        match self {
            Self::Add(path, _) | Self::Remove(path) => path.parent() == Some(dir),
            Self::Rename(from, to) => from.parent() == Some(dir) || to.parent() == Some(dir),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct MemoryTree {
    pub(super) live: MemoryEntries,
    pub(super) durable: MemoryEntries,
    /// The changes in `live` that are not in `durable`, in order.
    pub(super) unsynced: Vec<EntryChange>,
    pub(super) locked: BTreeSet<PathBuf>,
    /// The directories that are being read, once per reader.
    pub(super) shared_locks: Vec<PathBuf>,
    /// The exclusively locked directories.
    pub(super) exclusive_locks: BTreeSet<PathBuf>,
}

impl MemoryTree {
    pub(super) fn change(&mut self, change: EntryChange) {
        change.apply(&mut self.live);
        self.unsynced.push(change);
    }

    pub(super) fn is_dir(&self, path: &Path) -> bool {
        is_root(path) || matches!(self.live.get(path), Some(MemoryNode::Dir))
    }

    pub(super) fn children(&self, path: &Path) -> Vec<PathBuf> {
        self.live.keys().filter(|entry| entry.parent() == Some(path)).cloned().collect()
    }

    /// Number of a file's names.
    pub(super) fn link_count(&self, content: &Arc<Mutex<MemoryContent>>) -> u64 {
        self.live.values().filter(|node| matches!(node, MemoryNode::File(file) if Arc::ptr_eq(file, content))).count()
            as u64
    }

    pub(super) fn check_parent(&self, path: &Path) -> io::Result<()> {
        match path.parent() {
            Some(parent) if !self.is_dir(parent) => Err(errno(libc::ENOENT)),
            _ => Ok(()),
        }
    }
}

pub(super) fn is_root(path: &Path) -> bool {
    path.as_os_str().is_empty() || path.parent().is_none()
}

pub(super) fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

pub(super) fn normalize(path: &Path) -> PathBuf {
    path.components().filter(|part| *part != Component::CurDir).collect()
}
