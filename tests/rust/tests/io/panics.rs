//! A panic (a bug) in a thread that reads a batch becomes the error of its current read, and no thread waits forever.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use embcache::Result;
use embcache::io::{IoEngine, IoFile, IoReadRequest, PsyncEngine};
use embcache_tests::watched;

/// A file whose bytes are the lowest byte of their offset. A read at [`Patterned::PANICS_AT`] panics.
#[derive(Debug)]
struct Patterned;

impl Patterned {
    const PANICS_AT: u64 = 7000;
}

impl IoFile for Patterned {
    fn path(&self) -> &Path {
        Path::new("/patterned")
    }
    fn len(&self) -> Result<u64> {
        Ok(u64::MAX)
    }
    fn write_at(&self, _offset: u64, _data: &[u8]) -> Result<()> {
        unreachable!("it is only read")
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        assert_ne!(offset, Self::PANICS_AT, "a bug in a thread that reads");
        into.fill(offset as u8);
        Ok(())
    }
    fn set_len(&self, _len: u64) -> Result<()> {
        unreachable!("it is only read")
    }
    fn sync(&self) -> Result<()> {
        unreachable!("it is only read")
    }
    fn links(&self) -> Result<u64> {
        Ok(1)
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

/// Reads at `offsets` in one batch. Returns the result of each read, which must arrive once.
fn read(engine: &PsyncEngine, offsets: &[u64]) -> Vec<Result<u8>> {
    let file: Arc<dyn IoFile> = Arc::new(Patterned);
    let reads: Vec<IoReadRequest> =
        offsets.iter().map(|&offset| IoReadRequest { file: Arc::clone(&file), offset, len: 10 }).collect();
    let mut came: Vec<Option<Result<u8>>> = vec![None; reads.len()];
    engine.read_batch(&reads, &mut |place, bytes, _| {
        assert!(came[place].replace(bytes.map(|bytes| bytes[9])).is_none(), "read {place} came twice");
    });
    came.into_iter().map(|one| one.expect("each read comes")).collect()
}

#[test]
fn panic_in_read_thread_fails_its_reads_and_others_complete() {
    let offsets: Vec<u64> = (0..400).map(|read| read * 100).collect();
    let engine = PsyncEngine::default();
    watched(String::new, || {
        // This repeats more often than there are threads, so no thread was lost.
        for _ in 0..40 {
            let mut failed = 0;
            for (came, &offset) in read(&engine, &offsets).iter().zip(&offsets) {
                match came {
                    Ok(byte) => assert_eq!(*byte, offset as u8),
                    Err(error) => {
                        assert!(error.to_string().contains("a bug in a thread that reads"), "{error}");
                        failed += 1;
                    }
                }
            }
            assert!((1..offsets.len() / 2).contains(&failed), "{failed} of {} reads failed", offsets.len());
        }
        let whole: Vec<u64> = offsets.iter().map(|offset| offset + 1).collect();
        assert!(read(&engine, &whole).iter().all(Result::is_ok), "the engine reads on");
    });
}
