//! Tensors that grow adjacent to each other in files. Every byte is at its position, there are zeros between them, and
//! no partial file counts as complete.

use std::path::Path;
use std::sync::Arc;

use embcache::checkpoint::{RecisBlockSpec, RecisJoinMode, RecisSave, RecisShard, RecisShardWriter};
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, read_file};
use embcache::{Kind, Result};
use embcache_tests::recis::{directory, memory, never};
use safetensors::SafeTensors;

const PAGE: usize = 4096;
const CHUNK: usize = 256 << 10;
const SHARD: RecisShard = RecisShard { index: 0, count: 1 };
/// Tensors of several pieces, of one page, of a few bytes and of none, in turn in each of two files.
const LENGTHS: [usize; 5] = [9_500_001, 13, PAGE, 4_300_000, 0];

fn byte(block: usize, at: usize) -> u8 {
    (block * 31 + at * 7 + at / 251) as u8
}

fn begin(engine: impl IoEngine + 'static) -> Result<RecisSave> {
    RecisSave::begin(&directory(engine), SHARD, &[], &RecisJoinMode::New, 1, &mut never)
}

fn open(save: &RecisSave, lengths: &[usize]) -> Result<RecisShardWriter> {
    let spec = |(n, &bytes): (usize, &usize)| RecisBlockSpec {
        name: n.to_string(),
        slot: None,
        dtype: "U8".into(),
        shape: vec![bytes as u64],
    };
    RecisShardWriter::new(save, 2, lengths.iter().enumerate().map(spec).collect())
}

/// Writes tensors that grow alternately, by lengths that are multiples of neither pages nor pieces.
fn write(engine: impl IoEngine + 'static, lengths: &[usize]) -> Result<String> {
    let save = begin(engine)?;
    let writer = open(&save, lengths)?;
    let mut filled = vec![0; lengths.len()];
    while filled != lengths {
        for (block, &length) in lengths.iter().enumerate() {
            let (from, count) = (filled[block], (length - filled[block]).min(700_001 + block));
            let copy = |at: usize, into: &mut [u8]| {
                for (n, to) in into.iter_mut().enumerate() {
                    *to = byte(block, from + at + n);
                }
            };
            writer.append(block, count, copy)?;
            filled[block] += count;
        }
    }
    writer.finish(&save, Vec::new(), &mut never)?;
    Ok(save.name().to_string())
}

#[test]
fn every_byte_is_in_its_place_and_under_a_checksum() {
    // All of them are written by threads, and the small ones by the caller.
    for lengths in [LENGTHS, [0, 13, PAGE, 70_000, 1]] {
        let engine = memory();
        let name = write(engine.clone(), &lengths).expect("written");
        let engine = engine.crash();
        let read = |file: &str| {
            let path = Path::new("/blocks").join(&name).join(file);
            read_file(&engine, &path, 1 << 30).expect("read")
        };
        let files = [0, 1].map(|n| read(&format!("model-{n:06}-of-000002.safetensors")));
        let checks = read("check-000000-of-000001.safetensors");
        for (block, &length) in lengths.iter().enumerate() {
            let file = &files[block % 2];
            let found = SafeTensors::deserialize(file).expect("valid");
            let data = found.tensor(&block.to_string()).expect("the tensor").data();
            assert!(data.len() == length && data.iter().enumerate().all(|(at, &found)| found == byte(block, at)));
            let start = data.as_ptr().addr() - file.as_ptr().addr();
            assert!(start.is_multiple_of(PAGE), "block {block}");
            let pages = &file[start..(start + length).next_multiple_of(PAGE)];
            assert!(pages[length..].iter().all(|&byte| byte == 0), "block {block}");
            let checks = SafeTensors::deserialize(&checks).expect("valid");
            let checksums: Vec<u8> =
                pages.chunks(CHUNK).flat_map(|chunk| crc32c::crc32c(chunk).to_le_bytes()).collect();
            assert_eq!(checks.tensor(&format!("{block}.crc32c")).expect("checksums").data(), checksums);
        }
    }
}

#[test]
fn a_failed_operation_ends_it_typed() {
    for operation in [IoOperation::Create, IoOperation::SetLen, IoOperation::Write, IoOperation::Sync] {
        for lengths in [LENGTHS, [1; 5]] {
            let mut passing = 0;
            loop {
                let engine = FaultEngine::new(Arc::new(memory()));
                engine.hit_once(operation, passing, IoFault::Fail(libc::ENOSPC));
                let Err(error) = write(engine, &lengths) else { break };
                assert_eq!((error.kind(), error.errno()), (Kind::Storage, Some(libc::ENOSPC)), "{error}");
                passing += 1;
            }
            assert!(passing >= 2, "{operation:?} is done {passing} times");
        }
    }
}

#[test]
fn blocks_that_do_not_fit_or_are_not_complete_are_refused() {
    let save = begin(memory()).expect("begun");
    let writer = open(&save, &LENGTHS).expect("made");
    assert_eq!(writer.append(9, 1, |_, _| ()).expect_err("no block").kind(), Kind::Input);
    assert_eq!(writer.append(1, 14, |_, _| ()).expect_err("too long").kind(), Kind::Input);
    drop(writer);
    // The files of the first writer are replaced.
    let writer = open(&save, &LENGTHS).expect("made");
    writer.append(1, 13, |_, into| into.fill(1)).expect("it fits");
    assert_eq!(writer.finish(&save, Vec::new(), &mut never).expect_err("not complete").kind(), Kind::State);
}
