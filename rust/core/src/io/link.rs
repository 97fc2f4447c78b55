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
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::io::{FaultEngine, IoFault, IoOperation, MemoryEngine, PsyncEngine, read_file, write_atomically};

    #[test]
    fn a_linked_file_has_two_names_and_a_copy_one_each() {
        let dir = tempfile::tempdir().unwrap();
        let engines: [Arc<dyn IoEngine>; 2] = [Arc::new(MemoryEngine::default()), Arc::new(PsyncEngine::default())];
        for engine in engines {
            engine.create_dir_all(dir.path()).unwrap();
            let path = |name: &str| dir.path().join(name);
            let bytes: Vec<u8> = (0..10_000_u16).map(|n| n as u8).collect();
            write_atomically(&*engine, &path("a"), &bytes).unwrap();
            let open = |name: &str| engine.open(&path(name), IoOpenMode::Read).unwrap();
            assert_eq!(open("a").links().unwrap(), 1);
            assert!(link_or_copy(&*engine, &*open("a"), &path("b")).unwrap());
            assert_eq!((open("a").links().unwrap(), open("b").links().unwrap()), (2, 2));
            for errno in [libc::EXDEV, libc::EPERM, libc::EMLINK] {
                let faults = FaultEngine::new(Arc::clone(&engine));
                faults.hit_once(IoOperation::Link, 0, IoFault::Fail(errno));
                assert!(!link_or_copy(&faults, &*open("a"), &path("c")).unwrap());
                assert_eq!((open("a").links().unwrap(), open("c").links().unwrap()), (2, 1));
                assert_eq!(read_file(&*engine, &path("c"), 1 << 20).unwrap(), bytes);
                engine.remove_file(&path("c")).unwrap();
            }
            let error = link_or_copy(&*engine, &*open("a"), &path("b")).unwrap_err();
            assert_eq!(error.errno(), Some(libc::EEXIST), "{error}");
            // Another file under the same name is not the one that was opened, so it is not linked. A file without a
            // name is copied.
            let first = open("a");
            engine.remove_file(&path("a")).unwrap();
            write_atomically(&*engine, &path("a"), b"another").unwrap();
            assert!(link_or_copy(&*engine, &*first, &path("d")).unwrap());
            assert_eq!(read_file(&*engine, &path("d"), 1 << 20).unwrap(), bytes);
            engine.remove_file(&path("d")).unwrap();
            let nameless = open("a");
            engine.remove_file(&path("a")).unwrap();
            assert!(!link_or_copy(&*engine, &*nameless, &path("e")).unwrap());
            assert_eq!(read_file(&*engine, &path("e"), 1 << 20).unwrap(), b"another");
            // Another engine's files are copied.
            let foreign = MemoryEngine::default();
            foreign.create_dir_all(Path::new("/f")).unwrap();
            write_atomically(&foreign, Path::new("/f/a"), &bytes).unwrap();
            let file = foreign.open(Path::new("/f/a"), IoOpenMode::Read).unwrap();
            assert!(!link_or_copy(&*engine, &*file, &path("f")).unwrap());
            assert_eq!(read_file(&*engine, &path("f"), 1 << 20).unwrap(), bytes);
            assert_eq!((open("b").links().unwrap(), read_file(&*engine, &path("b"), 1 << 20).unwrap()), (1, bytes));
        }
    }

    #[test]
    fn link_survives_a_crash_after_the_directory_sync() {
        let engine = MemoryEngine::default();
        for dir in ["/d", "/e"] {
            engine.create_dir_all(Path::new(dir)).unwrap();
        }
        engine.sync_dir(Path::new("/")).unwrap();
        write_atomically(&engine, Path::new("/d/a"), b"bytes").unwrap();
        let file = engine.open(Path::new("/d/a"), IoOpenMode::Read).unwrap();
        engine.link(&*file, Path::new("/e/b")).unwrap();
        assert!(!engine.crash().exists(Path::new("/e/b")).unwrap());
        engine.sync_dir(Path::new("/e")).unwrap();
        let after = engine.crash();
        assert_eq!(after.open(Path::new("/e/b"), IoOpenMode::Read).unwrap().links().unwrap(), 2);
        after.remove_file(Path::new("/d/a")).unwrap();
        assert_eq!(read_file(&after, Path::new("/e/b"), 64).unwrap(), b"bytes");
    }
}
