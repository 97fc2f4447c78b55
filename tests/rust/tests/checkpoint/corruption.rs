//! Corrupted and hostile checkpoints are rejected with typed errors. They never make a load allocate more than the size
//! of the files explains.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::Kind;
use embcache::config::OptimizerKind::{RowWiseAdagrad, Sgd};
use embcache::io::{IoEngine, LOCK_FILE, MemoryEngine, PsyncEngine, read_file, write_atomically};
use embcache::types::{Id, hash_id};

use embcache_tests::checkpoint::{ROOT, Table, kind, load, save};
use embcache_tests::{flips, tells_of_damage};

fn tables() -> Vec<Table> {
    let ids: Vec<Id> = (-30..30).collect();
    vec![Table::new("m", "a", RowWiseAdagrad, 4, &ids, 1), Table::new("m", "b", Sgd, 2, &ids[..9], 2)]
}

struct Saved {
    dir: tempfile::TempDir,
    engine: Arc<dyn IoEngine>,
    tables: Vec<Table>,
}

impl Saved {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::default());
        let tables = tables();
        save(&engine, dir.path(), &tables, 2, 1000, 7).expect("saved");
        Self { dir, engine, tables }
    }

    /// Loads on one rank, which compares all manifests, then on two.
    fn load(&self) -> embcache::Result<Vec<Table>> {
        load(&self.engine, self.dir.path(), 1)?;
        load(&self.engine, self.dir.path(), 2)
    }

    /// Every file of the checkpoint.
    fn files(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let mut dirs = vec![self.dir.path().to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir).expect("listed") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    dirs.push(path);
                } else if path.file_name().is_some_and(|name| name != LOCK_FILE) {
                    files.push(path);
                }
            }
        }
        files.sort();
        files
    }

    fn file(&self, ending: &str) -> PathBuf {
        self.files().into_iter().find(|path| path.to_string_lossy().ends_with(ending)).expect("there")
    }

    /// Replaces text in a file, then fixes every checksum above it, like an attacker.
    fn forge(&self, ending: &str, from: &str, to: &str) {
        let path = self.file(ending);
        let text = std::fs::read_to_string(&path).expect("text");
        assert!(text.contains(from), "{from} is not in {text}");
        std::fs::write(&path, text.replacen(from, to, 1)).expect("written");
        let manifest = self.file("manifest.json");
        let mut json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&manifest).expect("read")).expect("JSON");
        for rank in 0..2 {
            let bytes = std::fs::read(self.file(&format!("{rank}-of-2.json"))).expect("read");
            if let Some(digest) = json["ranks"].get_mut(rank) {
                digest["bytes"] = bytes.len().into();
                digest["xxh3"] = xxhash_rust::xxh3::xxh3_64(&bytes).into();
            }
        }
        // The manifest's own checksum is its last field, and covers the manifest without that field.
        let body = if ending == "manifest.json" {
            let text = std::fs::read_to_string(&manifest).expect("text");
            text[..text.rfind(",\n  \"xxh3\": ").expect("a sealed manifest")].to_owned()
        } else {
            json.as_object_mut().expect("an object").remove("xxh3");
            serde_json::to_string_pretty(&json).expect("JSON").trim_end_matches("\n}").to_owned()
        };
        let seal = xxhash_rust::xxh3::xxh3_64(format!("{body}\n}}\n").as_bytes());
        std::fs::write(&manifest, format!("{body},\n  \"xxh3\": {seal}\n}}\n")).expect("written");
    }
}

/// Flips one bit in each `step`-th byte of a file of a checkpoint in memory, starting at byte `first`. Returns the
/// number of flips.
fn flip_bits(memory: &MemoryEngine, path: &Path, first: usize, step: usize) -> u64 {
    let good = read_file(memory, path, 1 << 20).expect("read");
    let copy = memory.kill();
    let engine: Arc<dyn IoEngine> = Arc::new(copy.clone());
    let mut found = 0;
    for position in (first..good.len()).step_by(step) {
        let mut bad = good.clone();
        bad[position] ^= 1 << (hash_id(position as i64) % 8);
        write_atomically(&copy, path, &bad).expect("written");
        let Err(error) = load(&engine, Path::new(ROOT), 2) else {
            panic!("byte {position} of {} may change unseen", path.display());
        };
        // A flip in a name in LATEST or in a version is correctly rejected for another reason.
        assert!(
            matches!(error.kind(), Kind::Corruption | Kind::Storage | Kind::Unsupported | Kind::Path),
            "byte {position} of {}: {error}",
            path.display()
        );
        assert!(error.kind() != Kind::Corruption || tells_of_damage(&error), "{error}");
        found += 1;
    }
    found
}

#[test]
fn a_flipped_bit_anywhere_is_found() {
    const THREADS: usize = 4;
    let memory = MemoryEngine::default();
    memory.create_dir_all(Path::new(ROOT)).expect("made");
    let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
    let saved = tables();
    save(&engine, Path::new(ROOT), &saved, 2, 1000, 7).expect("saved");
    assert_eq!(load(&engine, Path::new(ROOT), 2).expect("whole"), saved);
    let (mut files, mut dirs) = (Vec::new(), vec![PathBuf::from(ROOT)]);
    while let Some(dir) = dirs.pop() {
        for path in memory.list(&dir).expect("listed") {
            if path.ends_with(LOCK_FILE) {
                continue;
            }
            if path.extension().is_some() || path.ends_with("LATEST") { files.push(path) } else { dirs.push(path) }
        }
    }
    assert!(files.len() >= 8, "{files:?}");
    let found: u64 = std::thread::scope(|scope| {
        let (memory, files) = (&memory, &files);
        let flip = |thread: usize| {
            let flip = move |path: &PathBuf| {
                let is_data = path.extension().is_some_and(|ending| ending == "safetensors");
                // One bit is flipped in each of many bytes: in every byte of LATEST, every 5th of the manifests, and
                // every 31st of the data.
                let len = read_file(memory, path, 1 << 20).expect("read").len();
                let step = flips(if is_data { 31 } else { (len / 200).clamp(1, 5) });
                flip_bits(memory, path, thread * step, THREADS * step)
            };
            scope.spawn(move || files.iter().map(flip).sum::<u64>())
        };
        let threads: Vec<_> = (0..THREADS).map(flip).collect();
        threads.into_iter().map(|thread| thread.join().expect("every flip is found")).sum()
    });
    println!("{found} flips in {} files", files.len());
    assert!(found > 1000, "{found} flips");
}

#[test]
fn a_file_cut_short_lengthened_or_missing_is_found() {
    let saved = Saved::new();
    for path in saved.files() {
        let good = std::fs::read(&path).expect("read");
        for bad in [&good[..good.len() - 1], &good[..good.len() / 2], &[], &[&good[..], &[0]].concat()] {
            std::fs::write(&path, bad).expect("written");
            assert!(saved.load().is_err(), "{} of {} bytes of {}", bad.len(), good.len(), path.display());
        }
        std::fs::remove_file(&path).expect("removed");
        assert!(saved.load().is_err(), "{} is missing", path.display());
        std::fs::write(&path, &good).expect("written");
    }
    assert_eq!(saved.load().expect("whole"), saved.tables);
}

#[test]
fn forged_manifests_are_refused_before_anything_is_allocated() {
    let max = u64::MAX.to_string();
    for (ending, from, to, expected) in [
        ("0-of-2.json", "\"rows\": ", "\"rows\": 4294967295, \"ignored\": ", Kind::Corruption),
        ("0-of-2.json", "\"rows\": ", "\"rows\": 42", Kind::Corruption),
        ("0-of-2.json", "\"bytes\": ", "\"bytes\": 9", Kind::Corruption),
        ("0-of-2.json", "\"bytes\": ", &format!("\"bytes\": {max}, \"x\": "), Kind::Corruption),
        ("0-of-2.json", "\"tombstones\": 0", "\"tombstones\": 1", Kind::Corruption),
        ("0-of-2.json", "\"tombstones\": 0", "\"tombstones\": -1", Kind::Corruption),
        ("0-of-2.json", "\"dim\": 4", "\"dim\": 8", Kind::Corruption),
        ("0-of-2.json", "\"dim\": 4", "\"dim\": 0", Kind::Corruption),
        ("0-of-2.json", "\"dim\": 4", "\"dim\": 4294967295", Kind::Corruption),
        ("0-of-2.json", "\"bucket_begin\": 0", "\"bucket_begin\": 1", Kind::Corruption),
        ("0-of-2.json", "\"bucket_end\": 4", "\"bucket_end\": 4294967295", Kind::Corruption),
        ("0-of-2.json", "\"total_num_buckets\": 7", "\"total_num_buckets\": 0", Kind::Corruption),
        ("0-of-2.json", "\"rank\": 0", "\"rank\": 1", Kind::Corruption),
        ("0-of-2.json", "\"world\": 2", "\"world\": 3", Kind::Corruption),
        ("0-of-2.json", "\"table\": \"a\"", "\"table\": \"../../a\"", Kind::Corruption),
        ("0-of-2.json", "\"version\": 1", "\"version\": 2", Kind::Unsupported),
        ("manifest.json", "\"version\": 1", "\"version\": 2", Kind::Unsupported),
        ("0-of-2.json", "\"version\": 1", "\"version\": 0", Kind::Unsupported),
        ("manifest.json", "\"version\": 1", "\"version\": 0", Kind::Unsupported),
        ("0-of-2.json", "\"version\": 1", "\"version\": -1", Kind::Unsupported),
        ("manifest.json", "\"version\": 1", "\"version\": 4294967297", Kind::Unsupported),
        ("manifest.json", "\"version\": 1", "\"version\": \"1\"", Kind::Unsupported),
        ("manifest.json", "\"version\": 1,", "", Kind::Corruption),
        ("manifest.json", "\"seed\": ", "\"oov_row\": \"0000000\", \"seed\": ", Kind::Corruption),
        ("manifest.json", "\"seed\": ", "\"oov_row\": \"00000000\", \"seed\": ", Kind::Corruption),
        ("manifest.json", "\"format\": \"torchrec-embcache\"", "\"format\": \"other\"", Kind::Corruption),
        ("manifest.json", "\"kind\": \"full\"", "\"kind\": \"delta\"", Kind::Corruption),
        ("manifest.json", "\"kind\": \"full\"", "\"kind\": \"half\"", Kind::Corruption),
        ("manifest.json", "\"seq\": 1", "\"seq\": 2", Kind::Corruption),
        ("manifest.json", "\"parent\": null", "\"parent\": null, \"extra\": 1", Kind::Corruption),
        ("manifest.json", "\"chunk_bytes\": 16384", "\"chunk_bytes\": 0", Kind::Corruption),
        ("manifest.json", "rowwise_adagrad", "rowwise_adagrab", Kind::Corruption),
        ("manifest.json", "\"rows\": 60", "\"rows\": 61", Kind::Corruption),
        ("manifest.json", "\"table\": \"b\"", "\"table\": \"a\"", Kind::Corruption),
        ("manifest.json", "\"low\": -0.1", "\"low\": -0.2", Kind::Corruption),
    ] {
        let saved = Saved::new();
        saved.forge(ending, from, to);
        let result = saved.load();
        assert_eq!(kind(result), expected, "{from} -> {to}");
    }
}

#[test]
fn a_forged_header_that_its_checksum_covers_is_refused() {
    let saved = Saved::new();
    let path = saved.file("m+a/0-of-2.0.safetensors");
    let good = std::fs::read(&path).expect("read");
    let length = u64::from_le_bytes(good[..8].try_into().expect("8")) as usize;
    let old = crc32c::crc32c(&good[..8 + length]);
    let text = String::from_utf8(good[8..8 + length].to_vec()).expect("UTF-8");
    for (from, to) in [
        ("\"weight\":{\"data_offsets\":", "\"weight\":{\"data_offsetz\":"),
        ("\"dtype\":\"I64\"", "\"dtype\":\"U64\""),
        ("\"weight\"", "\"wEight\""),
        ("__metadata__", "__metadatA__"),
        ("{\"__", "[\"__"),
    ] {
        assert!(text.contains(from), "{from} is not in {text}");
        let mut bad = good.clone();
        bad[8..8 + length].copy_from_slice(text.replacen(from, to, 1).as_bytes());
        let new = crc32c::crc32c(&bad[..8 + length]);
        std::fs::write(&path, &bad).expect("written");
        let forged = Saved::new();
        std::fs::write(forged.file("m+a/0-of-2.0.safetensors"), &bad).expect("written");
        forged.forge("0-of-2.json", &format!("\"header_crc32c\": {old}"), &format!("\"header_crc32c\": {new}"));
        let error = forged.load().expect_err("refused");
        assert_eq!(error.kind(), Kind::Corruption, "{from} -> {to}");
        assert!(error.to_string().contains("the header"), "{error}");
    }
}

#[test]
fn a_length_field_that_lies_is_refused() {
    for length in [0, 1, 4095, 1 << 20, 1 << 40, u64::MAX] {
        let saved = Saved::new();
        let path = saved.file("m+a/0-of-2.0.safetensors");
        let mut bytes = std::fs::read(&path).expect("read");
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8")) as usize;
        let old = crc32c::crc32c(&bytes[..header]);
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        std::fs::write(&path, &bytes).expect("written");
        let new = crc32c::crc32c(&bytes[..header]);
        saved.forge("0-of-2.json", &format!("\"header_crc32c\": {old}"), &format!("\"header_crc32c\": {new}"));
        let error = saved.load().expect_err("refused");
        assert!(error.to_string().contains("length field"), "{error}");
    }
}
