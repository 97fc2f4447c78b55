//! Creates a second name of a file's bytes: a hard link if the file system supports it, else a copy.

use std::path::Path;

use super::{ALIGNMENT, AlignedBuf, IoEngine, IoFile, IoOpenMode};
use crate::error::{Error, Result};

/// Bytes copied at a time.
const COPY_BYTES: usize = 4 << 20;

/// True if a link that failed with `error` must be replaced by a copy: the target is on another file system (`EXDEV`),
/// the file system has no links or the file too many of them, only the file's owner may link it, or the file cannot be
/// reached through its descriptor (`ENOENT`).
fn needs_copy(error: &Error) -> bool {
    let errnos = [libc::EXDEV, libc::EPERM, libc::EMLINK, libc::EOPNOTSUPP, libc::ENOSYS, libc::ENOENT];
    error.errno().is_some_and(|errno| errnos.contains(&errno))
}

/// Links an open file to the name `to`, which must not exist, or else copies it there. Returns true if it was linked. A
/// copy's bytes are durable, its name is not yet. The file must not be written during the call or later.
pub fn link_or_copy(engine: &dyn IoEngine, file: &dyn IoFile, to: &Path) -> Result<bool> {
    match engine.link(file, to) {
        Err(error) if needs_copy(&error) => {}
        linked => return linked.map(|()| true),
    }
    copy_file(engine, file, to)?;
    Ok(false)
}

/// Copies an open file, possibly of another engine, to `to`, which must not exist. The copy's bytes are durable, its
/// name is not yet. The file must not be written during the call.
pub(crate) fn copy_file(engine: &dyn IoEngine, file: &dyn IoFile, to: &Path) -> Result<()> {
    let len = file.len()?;
    let copy = engine.open(to, IoOpenMode::Create { preallocate: len })?;
    let mut piece = AlignedBuf::zeroed(COPY_BYTES.min(len as usize).next_multiple_of(ALIGNMENT).max(ALIGNMENT));
    let mut at = 0;
    while at < len {
        let bytes = (len - at).min(piece.len() as u64) as usize;
        let whole = bytes.next_multiple_of(ALIGNMENT);
        file.read_at(at, &mut piece[..bytes])?;
        piece[bytes..whole].fill(0);
        copy.write_at(at, &piece[..whole])?;
        at += bytes as u64;
    }
    copy.set_len(len)?;
    copy.sync()
}

#[cfg(test)]
mod tests;
