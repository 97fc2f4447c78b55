//! Tensors that grow adjacent to each other in files. Every byte is at its position, there are zeros between them, and
//! no partial file counts as complete.

use std::path::Path;
use std::sync::Arc;

use embcache::Kind;
use embcache::checkpoint::{CheckpointDirectory, RecisBlockRange, RecisBlockWriter, RecisFileSpec};
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, MemoryEngine, read_file};

const ROOT: &str = "/blocks";
const PAGE: u64 = 4096;
const CHUNK: usize = 256 << 10;

/// Two files, with tensors of several pieces, of one page, of a few bytes and of none.
fn layout() -> (Vec<RecisFileSpec>, Vec<RecisBlockRange>) {
    let lengths = [(0, 9_500_001_u64), (0, 4096), (1, 13), (1, 4_300_000), (1, 0)];
    let mut ends = [PAGE; 2];
    let places = lengths.map(|(file, bytes)| {
        let start = ends[file];
        ends[file] = (start + bytes).next_multiple_of(PAGE);
        RecisBlockRange { file, start, bytes }
    });
    let file =
        |n: usize| RecisFileSpec { name: n.to_string(), header: vec![n as u8 + 1; PAGE as usize], bytes: ends[n] };
    (vec![file(0), file(1)], places.to_vec())
}

fn byte(block: usize, at: usize) -> u8 {
    (block * 31 + at * 7 + at / 251) as u8
}

fn write(engine: impl IoEngine + 'static, threads: usize) -> embcache::Result<Vec<Vec<u32>>> {
    let (files, places) = layout();
    let writer = RecisBlockWriter::new(&in_engine(engine), &files, &places, CHUNK, threads)?;
    let mut filled = vec![0_usize; places.len()];
    // The tensors grow alternately, by lengths that are multiples of neither pages nor pieces.
    while filled.iter().zip(&places).any(|(filled, place)| (*filled as u64) < place.bytes) {
        for (block, place) in places.iter().enumerate() {
            let count = (place.bytes as usize - filled[block]).min(700_001 + block);
            let from = filled[block];
            let copy = |at: usize, into: &mut [u8]| {
                for (n, to) in into.iter_mut().enumerate() {
                    *to = byte(block, from + at + n);
                }
            };
            writer.append(block, count, copy)?;
            filled[block] += count;
        }
    }
    writer.finish()
}

fn in_engine(engine: impl IoEngine + 'static) -> CheckpointDirectory {
    CheckpointDirectory::with_engine(Arc::new(engine), Path::new(ROOT))
}

fn directory() -> MemoryEngine {
    let engine = MemoryEngine::default();
    engine.create_dir_all(Path::new(ROOT)).expect("made");
    engine.sync_dir(Path::new("/")).expect("synced");
    engine
}

#[test]
fn every_byte_is_in_its_place_and_under_a_checksum() {
    for threads in [0, 1, 8] {
        let engine = directory();
        let checksums = write(engine.clone(), threads).expect("written");
        engine.sync_dir(Path::new(ROOT)).expect("synced");
        let engine = engine.crash();
        let (files, places) = layout();
        let found: Vec<Vec<u8>> = files
            .iter()
            .map(|file| read_file(&engine, &Path::new(ROOT).join(&file.name), 1 << 30).expect("read"))
            .collect();
        for (file, found) in files.iter().zip(&found) {
            assert_eq!(found.len() as u64, file.bytes);
            assert_eq!(found[..PAGE as usize], file.header);
        }
        for (block, place) in places.iter().enumerate() {
            let end = (place.start + place.bytes).next_multiple_of(PAGE);
            let data = &found[place.file][place.start as usize..end as usize];
            let (written, zeros) = data.split_at(place.bytes as usize);
            assert!(written.iter().enumerate().all(|(at, &found)| found == byte(block, at)), "block {block}");
            assert!(zeros.iter().all(|&byte| byte == 0));
            assert_eq!(checksums[block], data.chunks(CHUNK).map(crc32c::crc32c).collect::<Vec<u32>>());
        }
    }
}

#[test]
fn a_failed_operation_ends_it_typed() {
    for operation in [IoOperation::Create, IoOperation::SetLen, IoOperation::Write, IoOperation::Sync] {
        for threads in [0, 4] {
            let mut passing = 0;
            loop {
                let engine = FaultEngine::new(Arc::new(directory()));
                engine.hit_once(operation, passing, IoFault::Fail(libc::ENOSPC));
                let Err(error) = write(engine, threads) else { break };
                assert_eq!((error.kind(), error.errno()), (Kind::Storage, Some(libc::ENOSPC)), "{error}");
                passing += 1;
            }
            assert!(passing >= 2, "{operation:?} is done {passing} times");
        }
    }
}

#[test]
fn blocks_that_do_not_fit_or_are_not_complete_are_refused() {
    let (files, places) = layout();
    let made =
        |places: &[RecisBlockRange], chunk| RecisBlockWriter::new(&in_engine(directory()), &files, places, chunk, 0);
    let wrong = [
        RecisBlockRange { file: 2, ..places[0] },
        RecisBlockRange { start: 100, ..places[1] },
        RecisBlockRange { bytes: u64::MAX, ..places[1] },
        RecisBlockRange { bytes: places[0].bytes + PAGE * 2, ..places[0] },
    ];
    for place in wrong {
        assert_eq!(made(&[place], CHUNK).expect_err("outside").kind(), Kind::Input);
    }
    assert_eq!(made(&places, 1000).expect_err("no divisor").kind(), Kind::Input);
    let writer = made(&places, CHUNK).expect("made");
    assert_eq!(writer.append(9, 1, |_, _| ()).expect_err("no block").kind(), Kind::Input);
    assert_eq!(writer.append(2, 14, |_, _| ()).expect_err("too long").kind(), Kind::Input);
    let writer = made(&places, CHUNK).expect("made");
    writer.append(2, 13, |_, into| into.fill(1)).expect("it fits");
    assert_eq!(writer.finish().expect_err("not complete").kind(), Kind::State);
}
