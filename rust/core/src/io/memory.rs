//! A file system in RAM that knows what a power cut would leave: the test twin of the disk engines.
//!
//! Every file has a *live* content and a *durable* one, and the tree has live and durable entries. `sync` makes a file's content
//! durable, `sync_dir` the entries of one directory (a new directory is itself an entry of its parent). [`MemoryEngine::crash`]
//! gives an engine that holds only what was durable.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::memory_tree::{Change, Content, Edit, Entries, Node, SECTOR, Tree, errno, is_root, normal, write_into};
use super::{DirLock, Hold, IoEngine, IoFile, Open, Read, ReadSink, check_aligned, lock, short_file};
use crate::error::{Error, Result};
use crate::sync::lock as locked;

/// Files in RAM. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct MemoryEngine {
    tree: Arc<Mutex<Tree>>,
}

#[derive(Debug)]
struct MemoryFile {
    path: PathBuf,
    tree: Arc<Mutex<Tree>>,
    content: Arc<Mutex<Content>>,
    writable: bool,
}

struct Held {
    tree: Arc<Mutex<Tree>>,
    dir: PathBuf,
}

impl Drop for Held {
    fn drop(&mut self) {
        locked(&self.tree).held.remove(&self.dir);
    }
}

/// A directory held by [`IoEngine::hold_dir`].
struct HeldDir {
    tree: Arc<Mutex<Tree>>,
    dir: PathBuf,
    how: Hold,
}

impl Drop for HeldDir {
    fn drop(&mut self) {
        let mut tree = locked(&self.tree);
        match self.how {
            Hold::ToRemove | Hold::ToOpen => {
                tree.removing.remove(&self.dir);
            }
            Hold::ToRead => {
                if let Some(place) = tree.reading.iter().position(|dir| *dir == self.dir) {
                    tree.reading.swap_remove(place);
                }
            }
        }
    }
}

impl MemoryEngine {
    /// What a power cut now would leave: synced contents under synced entries. Nothing of it is shared with this engine.
    #[must_use]
    pub fn crash(&self) -> Self {
        let tree = locked(&self.tree);
        Self::image(&tree.durable, |content| content.durable.clone())
    }

    /// What a power cut might leave besides: of the entry changes not synced the first few, in order, and of the writes not
    /// synced any sectors, in any order. Decided by `seed`.
    #[must_use]
    pub fn crash_torn(&self, seed: u64) -> Self {
        let mut draw = Draw(seed);
        let tree = locked(&self.tree);
        let mut entries = tree.durable.clone();
        let kept = draw.below(tree.unsynced.len() + 1);
        tree.unsynced[..kept].iter().for_each(|change| change.apply(&mut entries));
        Self::image(&entries, |content| {
            let mut bytes = content.durable.clone();
            for edit in &content.unsynced {
                match edit {
                    Edit::Len(_) if draw.below(2) == 0 => {}
                    Edit::Len(_) => edit.apply(&mut bytes),
                    Edit::Write { offset, data } => {
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

    /// What the death of the process alone leaves: everything that was written. Locks are free.
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
                Node::Dir => 0,
                Node::File(content) => locked(content).live.len() as u64,
            })
            .sum()
    }

    fn image(entries: &Entries, mut bytes_of: impl FnMut(&Content) -> Vec<u8>) -> Self {
        let reachable = |path: &Path| {
            path.ancestors().skip(1).filter(|dir| !is_root(dir)).all(|dir| matches!(entries.get(dir), Some(Node::Dir)))
        };
        let mut copied = BTreeMap::new(); // A file with several names stays one.
        let copy: Entries = entries
            .iter()
            .filter(|(path, _)| reachable(path))
            .map(|(path, node)| {
                let node = match node {
                    Node::Dir => Node::Dir,
                    Node::File(content) => {
                        let copy = copied.entry(Arc::as_ptr(content).addr()).or_insert_with(|| {
                            let bytes = bytes_of(&locked(content));
                            Arc::new(Mutex::new(Content { live: bytes.clone(), durable: bytes, unsynced: Vec::new() }))
                        });
                        Node::File(Arc::clone(copy))
                    }
                };
                (path.clone(), node)
            })
            .collect();
        let tree = Tree { live: copy.clone(), durable: copy, ..Tree::default() };
        Self { tree: Arc::new(Mutex::new(tree)) }
    }
}

/// `SplitMix64` as a generator.
struct Draw(u64);

impl Draw {
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
        locked(&self.content).edit(Edit::Write { offset: offset as usize, data: data.to_vec() });
        Ok(())
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        if into.is_empty() {
            return Ok(());
        }
        let content = locked(&self.content);
        let (start, end) = (offset as usize, offset as usize + into.len());
        let Some(bytes) = content.live.get(start..end) else {
            return Err(short_file(&self.path, end as u64, content.live.len() as u64));
        };
        into.copy_from_slice(bytes);
        Ok(())
    }
    fn set_len(&self, len: u64) -> Result<()> {
        self.check_writable("resize")?;
        locked(&self.content).edit(Edit::Len(len as usize));
        Ok(())
    }
    fn sync(&self) -> Result<()> {
        locked(&self.content).sync();
        Ok(())
    }
    fn links(&self) -> Result<u64> {
        Ok(locked(&self.tree).names_of(&self.content))
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl MemoryFile {
    fn check_writable(&self, what: &str) -> Result<()> {
        if self.writable { Ok(()) } else { Err(Error::io(what, &self.path, &errno(libc::EBADF))) }
    }
}

impl IoEngine for MemoryEngine {
    fn name(&self) -> String {
        "memory".into()
    }

    fn open(&self, path: &Path, how: Open) -> Result<Arc<dyn IoFile>> {
        let path = normal(path);
        let mut tree = locked(&self.tree);
        let content = match (how, tree.live.get(&path)) {
            (Open::Read | Open::Write, Some(Node::File(content))) => content.clone(),
            (Open::Read | Open::Write, Some(Node::Dir)) => return Err(Error::io("open", &path, &errno(libc::EISDIR))),
            (Open::Read | Open::Write, None) => return Err(Error::io("open", &path, &errno(libc::ENOENT))),
            (Open::Create { .. }, Some(_)) => return Err(Error::io("make", &path, &errno(libc::EEXIST))),
            (Open::Create { .. }, None) => {
                tree.check_parent(&path).map_err(|e| Error::io("make", &path, &e))?;
                let content = Arc::new(Mutex::new(Content::default()));
                tree.change(Change::Add(path.clone(), Node::File(content.clone())));
                content
            }
        };
        Ok(Arc::new(MemoryFile { path, tree: Arc::clone(&self.tree), content, writable: how != Open::Read }))
    }

    fn read_batch(&self, reads: &[Read], sink: &mut ReadSink<'_>) {
        let mut buffer = Vec::new();
        for (position, read) in reads.iter().enumerate() {
            buffer.resize(read.len, 0);
            let done = read.file.read_at(read.offset, &mut buffer);
            sink(position, done.map(|()| &buffer[..]));
        }
    }

    fn create_dir_all(&self, path: &Path) -> Result<()> {
        let path = normal(path);
        let mut tree = locked(&self.tree);
        let mut missing: Vec<&Path> = Vec::new();
        for dir in path.ancestors().filter(|dir| !is_root(dir)) {
            match tree.live.get(dir) {
                Some(Node::Dir) => break,
                Some(Node::File(_)) => return Err(Error::io("make", &path, &errno(libc::ENOTDIR))),
                None => missing.push(dir),
            }
        }
        for dir in missing.into_iter().rev() {
            tree.change(Change::Add(dir.to_owned(), Node::Dir));
        }
        Ok(())
    }

    fn list(&self, path: &Path) -> Result<Vec<PathBuf>> {
        let path = normal(path);
        let tree = locked(&self.tree);
        if !tree.is_dir(&path) {
            return Err(Error::io("list", &path, &errno(libc::ENOENT)));
        }
        Ok(tree.children(&path))
    }

    fn exists(&self, path: &Path) -> Result<bool> {
        let path = normal(path);
        Ok(is_root(&path) || locked(&self.tree).live.contains_key(&path))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let (from, to) = (normal(from), normal(to));
        let fail = |code| Err(Error::io("rename", &from, &errno(code)));
        let mut tree = locked(&self.tree);
        if tree.check_parent(&to).is_err() {
            return fail(libc::ENOENT);
        }
        match (tree.live.get(&from), tree.live.get(&to)) {
            (None, _) => return fail(libc::ENOENT),
            (Some(Node::Dir), _) if to.starts_with(&from) && to != from => return fail(libc::EINVAL),
            (Some(Node::Dir), Some(Node::File(_))) => return fail(libc::ENOTDIR),
            (Some(Node::File(_)), Some(Node::Dir)) => return fail(libc::EISDIR),
            (Some(Node::Dir), Some(Node::Dir)) if from != to && !tree.children(&to).is_empty() => {
                return fail(libc::ENOTEMPTY);
            }
            _ => {}
        }
        if from != to {
            tree.change(Change::Rename(from, to));
        }
        Ok(())
    }

    fn link(&self, file: &dyn IoFile, to: &Path) -> Result<()> {
        let to = normal(to);
        let fail = |code| Err(Error::io("link", &to, &errno(code)));
        let Some(file) = file.as_any().downcast_ref::<MemoryFile>().filter(|file| Arc::ptr_eq(&file.tree, &self.tree))
        else {
            return fail(libc::EXDEV);
        };
        let mut tree = locked(&self.tree);
        if tree.names_of(&file.content) == 0 || tree.check_parent(&to).is_err() {
            return fail(libc::ENOENT);
        }
        if tree.live.contains_key(&to) {
            return fail(libc::EEXIST);
        }
        tree.change(Change::Add(to, Node::File(Arc::clone(&file.content))));
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        let path = normal(path);
        let mut tree = locked(&self.tree);
        match tree.live.get(&path) {
            Some(Node::File(_)) => {
                tree.change(Change::Remove(path));
                Ok(())
            }
            Some(Node::Dir) => Err(Error::io("remove", &path, &errno(libc::EISDIR))),
            None => Err(Error::io("remove", &path, &errno(libc::ENOENT))),
        }
    }

    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        let path = normal(path);
        let mut tree = locked(&self.tree);
        if !matches!(tree.live.get(&path), Some(Node::Dir)) {
            return Err(Error::io("remove", &path, &errno(libc::ENOENT)));
        }
        // Children sort behind their directory: backwards, each directory is empty when its turn comes.
        let inside: Vec<PathBuf> = tree.live.keys().filter(|entry| entry.starts_with(&path)).cloned().collect();
        for entry in inside.into_iter().rev() {
            tree.change(Change::Remove(entry));
        }
        Ok(())
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        let path = normal(path);
        let mut guard = locked(&self.tree);
        let tree = &mut *guard;
        if !tree.is_dir(&path) {
            return Err(Error::io("sync", &path, &errno(libc::ENOENT)));
        }
        // A rename between directories happens as a whole, so it brings what came before it in the other one.
        let mut dirs = BTreeSet::from([path]);
        loop {
            let before = dirs.len();
            for change in &tree.unsynced {
                if let Change::Rename(from, to) = change
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
        let path = normal(path);
        let mut tree = locked(&self.tree);
        if !tree.is_dir(&path) {
            return Err(Error::io("lock", &path, &errno(libc::ENOENT)));
        }
        // The lock file is there, as on disk: whoever asks whether the directory is empty sees the same.
        let file = path.join(OsStr::new(lock::LOCK_FILE));
        if !tree.live.contains_key(&file) {
            tree.change(Change::Add(file, Node::File(Arc::default())));
        }
        if !tree.held.insert(path.clone()) {
            return Err(lock::in_use(&path, &format!("by pid {} (this process)", std::process::id())));
        }
        Ok(DirLock::held(&path, Held { tree: self.tree.clone(), dir: path.clone() }))
    }

    fn hold_dir(&self, path: &Path, how: Hold) -> Result<DirLock> {
        let dir = normal(path);
        let mut tree = locked(&self.tree);
        if !tree.is_dir(&dir) {
            return Err(Error::io("open the directory", &dir, &errno(libc::ENOENT)));
        }
        let is_read = tree.reading.contains(&dir);
        if tree.removing.contains(&dir) || (how != Hold::ToRead && is_read) {
            return Err(lock::held_otherwise(&dir, how));
        }
        match how {
            Hold::ToRead => tree.reading.push(dir.clone()),
            Hold::ToRemove | Hold::ToOpen => drop(tree.removing.insert(dir.clone())),
        }
        Ok(DirLock::held(&dir, HeldDir { tree: self.tree.clone(), dir: dir.clone(), how }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{ALIGNMENT, AlignedBuf, publish, read_file};

    fn page(byte: u8) -> AlignedBuf {
        let mut page = AlignedBuf::zeroed(ALIGNMENT);
        page.fill(byte);
        page
    }

    fn engine_with_dir() -> MemoryEngine {
        let engine = MemoryEngine::default();
        engine.create_dir_all(Path::new("/d")).unwrap();
        engine.sync_dir(Path::new("/")).unwrap();
        engine
    }

    #[test]
    fn a_crash_keeps_synced_content_under_synced_entries_only() {
        let engine = engine_with_dir();
        let file = engine.open(Path::new("/d/a"), Open::Create { preallocate: 0 }).unwrap();
        file.write_at(0, &page(1)).unwrap();
        file.sync().unwrap();
        assert!(!engine.crash().exists(Path::new("/d/a")).unwrap(), "the entry was not synced");
        engine.sync_dir(Path::new("/d")).unwrap();
        file.write_at(ALIGNMENT as u64, &page(2)).unwrap();
        assert_eq!(read_file(&engine.crash(), Path::new("/d/a"), 1 << 20).unwrap(), &page(1)[..]);
        assert_eq!(read_file(&engine.kill(), Path::new("/d/a"), 1 << 20).unwrap().len(), 2 * ALIGNMENT);
    }

    #[test]
    fn a_crash_brings_back_what_was_removed_without_a_sync_of_the_directory() {
        let engine = engine_with_dir();
        publish(&engine, Path::new("/d/a"), b"old").unwrap();
        engine.remove_file(Path::new("/d/a")).unwrap();
        assert!(engine.crash().exists(Path::new("/d/a")).unwrap());
        engine.sync_dir(Path::new("/d")).unwrap();
        assert!(!engine.crash().exists(Path::new("/d/a")).unwrap());
    }

    #[test]
    fn entries_below_a_directory_that_is_not_durable_are_lost() {
        let engine = MemoryEngine::default();
        engine.create_dir_all(Path::new("/p/q")).unwrap();
        publish(&engine, Path::new("/p/q/a"), b"x").unwrap();
        engine.sync_dir(Path::new("/p")).unwrap();
        assert!(!engine.crash().exists(Path::new("/p/q/a")).unwrap());
        engine.sync_dir(Path::new("/")).unwrap();
        assert!(engine.crash().exists(Path::new("/p/q/a")).unwrap());
    }

    #[test]
    fn a_rename_between_directories_is_whole_after_a_sync_of_either() {
        for synced in ["/d", "/e"] {
            let engine = engine_with_dir();
            engine.create_dir_all(Path::new("/e")).unwrap();
            engine.sync_dir(Path::new("/")).unwrap();
            engine.open(Path::new("/d/a"), Open::Create { preallocate: 0 }).unwrap();
            engine.rename(Path::new("/d/a"), Path::new("/e/b")).unwrap();
            engine.sync_dir(Path::new(synced)).unwrap();
            let after = engine.crash();
            assert!(
                after.exists(Path::new("/e/b")).unwrap() && !after.exists(Path::new("/d/a")).unwrap(),
                "{synced} synced"
            );
        }
    }

    #[test]
    fn a_torn_crash_keeps_some_sectors_and_never_tears_a_sector() {
        let engine = engine_with_dir();
        let file = engine.open(Path::new("/d/a"), Open::Create { preallocate: 0 }).unwrap();
        file.write_at(0, &page(1)).unwrap();
        file.sync().unwrap();
        engine.sync_dir(Path::new("/d")).unwrap();
        file.write_at(0, &page(2)).unwrap();
        let mut partial = 0;
        for seed in 0..16 {
            let bytes = read_file(&engine.crash_torn(seed), Path::new("/d/a"), 1 << 20).unwrap();
            for sector in bytes.chunks(SECTOR) {
                assert!(sector.iter().all(|byte| *byte == sector[0]) && [1, 2].contains(&sector[0]));
            }
            partial += usize::from(bytes.contains(&1) && bytes.contains(&2));
        }
        assert!(partial > 0, "16 seeds and no torn write");
    }

    #[test]
    fn publishing_over_a_file_leaves_the_old_or_the_new_one_at_every_torn_crash() {
        let engine = engine_with_dir();
        publish(&engine, Path::new("/d/a"), b"old").unwrap();
        publish(&engine, Path::new("/d/b"), b"other").unwrap();
        let file = engine.open(Path::new("/d/a.tmp"), Open::Create { preallocate: 0 }).unwrap();
        file.write_at(0, &page(b'n')).unwrap();
        file.set_len(3).unwrap();
        file.sync().unwrap();
        engine.rename(Path::new("/d/a.tmp"), Path::new("/d/a")).unwrap();
        for seed in 0..32 {
            let found = read_file(&engine.crash_torn(seed), Path::new("/d/a"), 1 << 20).unwrap();
            assert!(found == b"old" || found == b"nnn", "{found:?}");
        }
    }
}
