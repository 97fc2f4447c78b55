use super::*;
use crate::io::{ALIGNMENT, AlignedBuf, read_file, write_atomically};

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
    let file = engine.open(Path::new("/d/a"), IoOpenMode::Create { preallocate: 0 }).unwrap();
    file.write_at(0, &page(1)).unwrap();
    file.sync().unwrap();
    assert!(!engine.crash().exists(Path::new("/d/a")).unwrap(), "the entry was not synced");
    engine.sync_dir(Path::new("/d")).unwrap();
    file.write_at(ALIGNMENT as u64, &page(2)).unwrap();
    assert_eq!(read_file(&engine.crash(), Path::new("/d/a"), 1 << 20).unwrap(), &page(1)[..]);
    assert_eq!(read_file(&engine.kill(), Path::new("/d/a"), 1 << 20).unwrap().len(), 2 * ALIGNMENT);
}

#[test]
fn crash_undoes_unsynced_removal() {
    let engine = engine_with_dir();
    write_atomically(&engine, Path::new("/d/a"), b"old").unwrap();
    engine.remove_file(Path::new("/d/a")).unwrap();
    assert!(engine.crash().exists(Path::new("/d/a")).unwrap());
    engine.sync_dir(Path::new("/d")).unwrap();
    assert!(!engine.crash().exists(Path::new("/d/a")).unwrap());
}

#[test]
fn entries_below_a_directory_that_is_not_durable_are_lost() {
    let engine = MemoryEngine::default();
    engine.create_dir_all(Path::new("/p/q")).unwrap();
    write_atomically(&engine, Path::new("/p/q/a"), b"x").unwrap();
    engine.sync_dir(Path::new("/p")).unwrap();
    assert!(!engine.crash().exists(Path::new("/p/q/a")).unwrap());
    engine.sync_dir(Path::new("/")).unwrap();
    assert!(engine.crash().exists(Path::new("/p/q/a")).unwrap());
}

#[test]
fn a_rename_between_directories_is_durable_after_a_sync_of_either() {
    for synced in ["/d", "/e"] {
        let engine = engine_with_dir();
        engine.create_dir_all(Path::new("/e")).unwrap();
        engine.sync_dir(Path::new("/")).unwrap();
        engine.open(Path::new("/d/a"), IoOpenMode::Create { preallocate: 0 }).unwrap();
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
    let file = engine.open(Path::new("/d/a"), IoOpenMode::Create { preallocate: 0 }).unwrap();
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
fn atomic_write_leaves_old_or_new_after_torn_crash() {
    let engine = engine_with_dir();
    write_atomically(&engine, Path::new("/d/a"), b"old").unwrap();
    write_atomically(&engine, Path::new("/d/b"), b"other").unwrap();
    let file = engine.open(Path::new("/d/a.tmp"), IoOpenMode::Create { preallocate: 0 }).unwrap();
    file.write_at(0, &page(b'n')).unwrap();
    file.set_len(3).unwrap();
    file.sync().unwrap();
    engine.rename(Path::new("/d/a.tmp"), Path::new("/d/a")).unwrap();
    for seed in 0..32 {
        let found = read_file(&engine.crash_torn(seed), Path::new("/d/a"), 1 << 20).unwrap();
        assert!(found == b"old" || found == b"nnn", "{found:?}");
    }
}
