//! Copies a checkpoint, with its base checkpoints, to another directory.

use super::chain::CheckpointChain;
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::latest::{
    CheckpointName, LATEST_FILE, LatestCheckpoint, hold_to_remove, lock_root, make_held,
};
use crate::checkpoint::manifest::manifests::{
    DENSE_DIR, DENSE_FILE, DenseExtent, MAX_MANIFEST_BYTES, STREAM_CHUNK_BYTES, read_manifest,
};
use crate::checkpoint::manifest::{MANIFEST_FILE, rank_file, table_dir};
use crate::checkpoint::rows::reader::OpenCheckpoint;
use crate::error::{Kind, Result};
use crate::io::{DirLock, IoOpenMode, LOCK_FILE, copy_file, read_file, write_atomically};

/// Bytes of a dense stream that are read at a time.
const WINDOW_BYTES: u64 = 64 * STREAM_CHUNK_BYTES as u64;

/// Result of a copy.
#[derive(Debug)]
pub struct CheckpointCopyReport {
    /// The copied checkpoints, oldest first, without those that existed already.
    pub names: Vec<CheckpointName>,
    /// Bytes of their files.
    pub bytes: u64,
    /// True if the copy is the latest checkpoint of the directory.
    pub is_newest: bool,
}

/// A checkpoint that is copied, locked until the copy is the latest one.
#[derive(Debug)]
struct CheckpointCopy {
    name: CheckpointName,
    dir: CheckpointDirectory,
    bytes: u64,
    _lock: DirLock,
}

/// Copies a checkpoint and its base checkpoints to another directory, byte for byte and under the same names. Skips the
/// serving index, and checkpoints that exist already. Then verifies every byte of the copy against its checksums, and
/// makes the copy the latest checkpoint there, unless one with a higher number exists. After an error nothing of the
/// copy remains.
///
/// While `from` is locked no save removes the copied files. No save to `to` removes the copy before it is the latest
/// one.
///
/// Errors: `Corruption` of the source, `State` if `to` has another checkpoint of the same name, `InUse` if another
/// process copies the same checkpoint, `Storage`.
pub fn copy(from: &CheckpointChain, to: &CheckpointDirectory) -> Result<CheckpointCopyReport> {
    to.check_to_save()?;
    let mut copies = Vec::new();
    let copied = copy_links(from, to, &mut copies).and_then(|()| make_newest(from, to));
    match copied {
        Ok(is_newest) => {
            for copy in &copies {
                // A removal takes the lock, and creates its file if it is missing.
                let _ = copy.dir.engine().remove_file(&copy.dir.join(LOCK_FILE));
            }
            let bytes = copies.iter().map(|copy| copy.bytes).sum();
            Ok(CheckpointCopyReport { names: copies.iter().map(|copy| copy.name).collect(), bytes, is_newest })
        }
        Err(error) => {
            for copy in copies.iter().rev() {
                // The next removal deletes any leftovers.
                let _ = copy.dir.remove();
            }
            Err(error)
        }
    }
}

fn copy_links(from: &CheckpointChain, to: &CheckpointDirectory, copies: &mut Vec<CheckpointCopy>) -> Result<()> {
    for link in from.links().iter().rev() {
        let name: CheckpointName = link.manifest().name.parse()?;
        let dir = to.subdirectory(name);
        if dir.has(MANIFEST_FILE)? {
            if read_manifest(&dir)?.1 == link.identity() {
                continue;
            }
            let what = format!("{} has another checkpoint {name}: give another directory", to.path().display());
            return Err(Kind::State.error(what).at(dir.path()));
        }
        if to.has(&name.to_string())? {
            // Left by an interrupted copy or save.
            let Some(_unused) = hold_to_remove(to, &dir)? else {
                let what = format!("{} is being written by another process: wait for its end", dir.path().display());
                return Err(Kind::InUse.error(what).at(dir.path()));
            };
            dir.remove()?;
        }
        let (dir, lock) = make_held(to, name)?;
        let copied = copy_files(link, &dir);
        copies.push(CheckpointCopy { name, dir, bytes: *copied.as_ref().unwrap_or(&0), _lock: lock });
        copied?;
    }
    to.sync()
}

/// Copies the files of one checkpoint, its manifest last. Returns their bytes.
fn copy_files(link: &OpenCheckpoint, to: &CheckpointDirectory) -> Result<u64> {
    let (from, manifest) = (link.directory(), link.manifest());
    let world = manifest.ranks.len() as u32;
    let mut bytes = 0;
    let mut copy = |from: &CheckpointDirectory, to: &CheckpointDirectory, name: &std::path::Path| {
        let file = from.engine().open(&from.join(name), IoOpenMode::Read)?;
        bytes += file.len()?;
        copy_file(to.engine(), &*file, &to.join(name))
    };
    for rank in 0..world {
        copy(from, to, rank_file(rank, world).as_ref())?;
    }
    let mut folders: Vec<String> =
        manifest.tables.iter().map(|entry| table_dir(&entry.spec.module, &entry.spec.table)).collect();
    if manifest.dense.is_some() {
        copy(from, to, DENSE_FILE.as_ref())?;
        folders.push(DENSE_DIR.to_owned());
    }
    for folder in folders {
        if !from.has(&folder)? {
            continue; // a table without rows
        }
        let (from, to) = (from.subdirectory(&folder), to.subdirectory(&folder));
        to.make()?;
        for path in from.engine().list(from.path())? {
            copy(&from, &to, path.file_name().unwrap_or_default().as_ref())?;
        }
        to.sync()?;
    }
    to.sync()?;
    let manifest = read_file(from.engine(), &from.join(MANIFEST_FILE), MAX_MANIFEST_BYTES)?;
    write_atomically(to.engine(), &to.join(MANIFEST_FILE), &manifest)?;
    Ok(bytes + manifest.len() as u64)
}

/// Verifies the copy and makes it the latest checkpoint, unless one with a higher number exists. Returns true if the
/// copy is the latest.
fn make_newest(from: &CheckpointChain, to: &CheckpointDirectory) -> Result<bool> {
    let latest = LatestCheckpoint { name: from.manifest().name.parse()? };
    let copy = CheckpointChain::open(to, latest)?;
    verify(&copy)?;
    let _naming = lock_root(to)?;
    let is_link = |name: CheckpointName| copy.links().iter().any(|link| link.manifest().name == name.to_string());
    match LatestCheckpoint::find(to)? {
        Some(newest) if newest.name == latest.name => Ok(true),
        // Base checkpoints of the copy are older, even if merged while the copied delta was written.
        Some(newest) if newest.name.seq >= latest.name.seq && !is_link(newest.name) => Ok(false),
        _ => {
            write_atomically(to.engine(), &to.join(LATEST_FILE), format!("{latest}\n").as_bytes())?;
            Ok(true)
        }
    }
}

/// Reads every byte of a checkpoint and its base checkpoints, and verifies it against its checksums.
fn verify(chain: &CheckpointChain) -> Result<()> {
    chain.links().iter().try_for_each(|link| link.check_ranks(0, 1))?;
    for entry in &chain.manifest().tables {
        let spec = &entry.spec;
        chain.table_reader(&spec.module, &spec.table, 0..spec.total_num_buckets)?.verify()?;
    }
    let mut window = vec![0; WINDOW_BYTES as usize];
    for link in chain.links().iter().filter(|link| link.manifest().dense.is_some()) {
        link.dense_metadata()?;
        let reader = link.dense_reader();
        for (rank, stream_bytes) in reader.stream_bytes()?.into_iter().enumerate() {
            for offset in (0..stream_bytes).step_by(window.len()) {
                let bytes = WINDOW_BYTES.min(stream_bytes - offset);
                reader.read(rank as u32, DenseExtent { offset, bytes }, &mut window[..bytes as usize])?;
            }
        }
    }
    Ok(())
}
