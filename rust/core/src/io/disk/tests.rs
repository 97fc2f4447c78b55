use super::*;
use crate::io::{ALIGNMENT, AlignedBuf, PsyncEngine};

impl<R: BatchReader> DiskEngine<R> {
    /// Limits a system call to `bytes`, so that tests cover continued reads and writes.
    fn with_call_bytes(mut self, bytes: usize) -> Self {
        self.files.call_bytes = bytes;
        self
    }
}

fn pattern(len: usize) -> AlignedBuf {
    let mut data = AlignedBuf::zeroed(len);
    data.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 31 % 251) as u8);
    data
}

fn continued<R: BatchReader>(engine: &DiskEngine<R>) {
    let dir = tempfile::tempdir().unwrap();
    let file = engine.open(&dir.path().join("a"), IoOpenMode::Create { preallocate: 1 << 20 }).unwrap();
    let data = pattern(40 * ALIGNMENT);
    file.write_at(0, &data).unwrap();
    let places = [(0, data.len()), (1, 3 * ALIGNMENT), (5000, 20_000), (data.len() as u64 - 1, 1)];
    for (offset, len) in places {
        let mut found = vec![0; len];
        file.read_at(offset, &mut found).unwrap();
        assert!(found == data[offset as usize..][..len], "{len} bytes at {offset}");
    }
    let reads: Vec<IoReadRequest> =
        places.iter().map(|&(offset, len)| IoReadRequest { file: file.clone(), offset, len }).collect();
    let mut seen = 0;
    engine.read_batch(&reads, &mut |position, outcome, _| {
        let (offset, len) = places[position];
        assert!(outcome.unwrap() == &data[offset as usize..][..len], "{len} bytes at {offset}");
        seen += 1;
    });
    assert_eq!(seen, places.len());
}

#[test]
fn writes_and_reads_that_the_system_cuts_short_are_continued() {
    for direct in [false, true] {
        continued(&PsyncEngine::new(direct).with_call_bytes(ALIGNMENT));
        #[cfg(target_os = "linux")]
        if let Ok(engine) = crate::io::UringEngine::new(direct) {
            continued(&engine.with_call_bytes(ALIGNMENT));
        }
    }
}

#[test]
fn non_regular_file_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let (pipe, inner, file) = (dir.path().join("pipe"), dir.path().join("inner"), dir.path().join("file"));
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    std::fs::create_dir(&inner).unwrap();
    std::fs::write(&file, "x").unwrap();
    for direct in [false, true] {
        let engine = PsyncEngine::new(direct);
        for (path, found) in [(&pipe, "a pipe"), (&inner, "a directory")] {
            let error = engine.open(path, IoOpenMode::Read).unwrap_err();
            let expected = format!(
                "{} is damaged at byte 0: what is there should be a regular file and is {found}",
                path.display()
            );
            assert_eq!((error.kind(), error.to_string()), (Kind::Corruption, expected));
        }
        let locked = dir.path().join("locked").join(direct.to_string());
        std::fs::create_dir_all(&locked).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, locked.join("lock"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(engine.lock_dir(&locked).unwrap_err().kind(), Kind::Corruption);
        let flags = rustix::fs::fcntl_getfl(DiskFile::open(&file, IoOpenMode::Read, &engine.files).unwrap()).unwrap();
        assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK), "{flags:?}");
    }
}

#[test]
fn engine_of_another_process_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = PsyncEngine::default();
    engine.files.process = 1;
    let file = DiskFile::open(&dir.path().join("a"), IoOpenMode::Create { preallocate: 0 }, &engine.files).unwrap();
    let file: Arc<dyn IoFile> = Arc::new(file);
    let kind = |e: Error| e.kind();
    assert_eq!(engine.open(dir.path(), IoOpenMode::Read).map_err(kind).unwrap_err(), Kind::State);
    assert_eq!(file.write_at(0, &[]).map_err(kind), Err(Kind::State));
    assert_eq!(file.sync().map_err(kind), Err(Kind::State));
    let mut errors = Vec::new();
    let read = IoReadRequest { file, offset: 0, len: 1 };
    engine.read_batch(&[read.clone(), read], &mut |_, outcome, _| errors.push(outcome.unwrap_err().kind()));
    assert_eq!(errors, [Kind::State, Kind::State]);
}

#[test]
fn a_sector_read_covers_the_fewest_whole_sectors() {
    let read = SectorRead::new(1000, 308, 512);
    assert_eq!((read.start, read.span, read.skip), (512, 1024, 488));
    let read = SectorRead::new(1024, 512, 512);
    assert_eq!((read.start, read.span, read.skip), (1024, 512, 0));
    let read = SectorRead::new(7, 3, 1);
    assert_eq!((read.start, read.span, read.skip), (7, 3, 0));
}

#[test]
fn a_partial_read_continues_to_the_last_requested_byte() {
    let mut read = SectorRead::new(1000, 3000, 512);
    assert_eq!(read.advance(700), SectorReadStep::More);
    assert_eq!(read.bytes_read, 512, "a part of a sector is read again");
    assert_eq!(read.advance(512), SectorReadStep::More);
    assert_eq!(read.advance(488 + 3000 - 1024), SectorReadStep::Done, "the rest of the last sector is not needed");
}

#[test]
fn a_read_without_progress_is_past_the_end() {
    let mut read = SectorRead::new(0, 1024, 512);
    assert_eq!(read.advance(600), SectorReadStep::More);
    assert_eq!(read.advance(88), SectorReadStep::Short);
    assert_eq!(SectorRead::new(0, 1, 1).advance(0), SectorReadStep::Short);
}
