//! Measures the process's I/O engine beside raw system calls on the same file.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use embcache::io::{AlignedBuf, IoEngine, IoFile, IoOpenMode, IoReadRequest, default_engine};
use embcache_benches::{
    Bench, Better, Group, RAW_DEPTH, RawReads, Rounds, Scale, SplitMix64, cpu_seconds, write_sequentially,
};

/// Bytes of a read, about a record of 64 float32 with its header.
const READ_BYTES: usize = 308;
const CHUNK: usize = 1 << 20;

fn directory() -> tempfile::TempDir {
    let target = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target");
    tempfile::tempdir_in(target).expect("the target directory is writable")
}

struct Reads {
    engine: Arc<dyn IoEngine>,
    batches: Vec<Vec<IoReadRequest>>,
    offsets: Vec<u64>,
    raw: RawReads,
    cost: bool,
    _dir: tempfile::TempDir,
}

impl Reads {
    fn make(scale: Scale, cost: bool) -> Box<dyn Rounds> {
        let dir = directory();
        let path = dir.path().join("rows");
        let bytes = scale.pick(2 << 30, 16 << 20);
        let engine = default_engine().expect("an engine");
        let file = engine.open(&path, IoOpenMode::Create { preallocate: bytes }).expect("a new file");
        let mut random = SplitMix64(5);
        let mut data = AlignedBuf::zeroed(CHUNK);
        for word in data.chunks_exact_mut(8) {
            word.copy_from_slice(&random.next_u64().to_le_bytes());
        }
        for offset in (0..bytes).step_by(CHUNK) {
            data[..8].copy_from_slice(&offset.to_le_bytes());
            file.write_at(offset, &data).expect("room on the disk");
        }
        file.sync().expect("a sync");
        let offsets: Vec<u64> =
            (0..20 * scale.pick(8192, 256)).map(|_| random.next_below(bytes - READ_BYTES as u64)).collect();
        let read = |&offset: &u64| IoReadRequest { file: file.clone(), offset, len: READ_BYTES };
        let batches = offsets.chunks(offsets.len() / 20).map(|batch| batch.iter().map(read).collect()).collect();
        let raw = RawReads::new(&path, READ_BYTES, RAW_DEPTH);
        Box::new(Self { engine, batches, offsets, raw, cost, _dir: dir })
    }

    fn ours_once(&self) -> u64 {
        let mut sum = 0;
        for batch in &self.batches {
            self.engine.read_batch(batch, &mut |_, data, _| sum += u64::from(data.expect("a whole file")[0]));
        }
        sum
    }

    fn rate(&self, begin: Instant, cpu: f64) -> f64 {
        let reads = self.offsets.len() as f64;
        if self.cost { (cpu_seconds() - cpu) * 1e6 / reads } else { reads / begin.elapsed().as_secs_f64() }
    }
}

impl Rounds for Reads {
    fn ours(&mut self) -> f64 {
        let (begin, cpu) = (Instant::now(), cpu_seconds());
        self.ours_once();
        self.rate(begin, cpu)
    }

    fn limit(&mut self) -> Option<f64> {
        let (begin, cpu) = (Instant::now(), cpu_seconds());
        for batch in self.offsets.chunks(self.offsets.len() / 20) {
            self.raw.read(batch, READ_BYTES);
        }
        Some(self.rate(begin, cpu))
    }

    fn check(&mut self) {
        let raw: u64 = self.offsets.chunks(self.offsets.len() / 20).map(|batch| self.raw.read(batch, READ_BYTES)).sum();
        assert_eq!(self.ours_once(), raw, "both read the same bytes");
    }
}

struct Writes {
    engine: Arc<dyn IoEngine>,
    dir: tempfile::TempDir,
    bytes: u64,
}

impl Writes {
    fn make(scale: Scale) -> Box<dyn Rounds> {
        Box::new(Self {
            engine: default_engine().expect("an engine"),
            dir: directory(),
            bytes: scale.pick(1 << 30, 16 << 20),
        })
    }

    fn write(&self, file: &dyn IoFile) {
        let data = AlignedBuf::zeroed(CHUNK);
        for offset in (0..self.bytes).step_by(CHUNK) {
            file.write_at(offset, &data).expect("room on the disk");
        }
        file.sync().expect("a sync");
    }
}

impl Rounds for Writes {
    fn ours(&mut self) -> f64 {
        let path = self.dir.path().join("ours");
        let begin = Instant::now();
        let file = self.engine.open(&path, IoOpenMode::Create { preallocate: self.bytes }).expect("a new file");
        self.write(&*file);
        let rate = self.bytes as f64 / begin.elapsed().as_secs_f64();
        self.engine.remove_file(&path).expect("our own file");
        rate
    }

    fn limit(&mut self) -> Option<f64> {
        let path = self.dir.path().join("raw");
        let begin = Instant::now();
        write_sequentially(&path, self.bytes as usize, CHUNK);
        let rate = self.bytes as f64 / begin.elapsed().as_secs_f64();
        std::fs::remove_file(&path).expect("our own file");
        Some(rate)
    }
}

pub(crate) fn group() -> Group {
    Group::Alone(vec![
        Bench {
            name: "io_read_uniform",
            unit: "reads/s",
            better: Better::Higher,
            limit: Some("raw io_uring, O_DIRECT, the same reads at depth 128"),
            make: |scale| Reads::make(scale, false),
        },
        Bench {
            name: "io_read_cpu_us_per_read",
            unit: "us",
            better: Better::Lower,
            limit: Some("raw io_uring, O_DIRECT, the same reads at depth 128"),
            make: |scale| Reads::make(scale, true),
        },
        Bench {
            name: "io_write_sequential",
            unit: "bytes/s",
            better: Better::Higher,
            limit: Some("raw sequential O_DIRECT + fdatasync, 1 MiB a write"),
            make: Writes::make,
        },
    ])
}
