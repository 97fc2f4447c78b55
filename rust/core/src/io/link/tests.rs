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
