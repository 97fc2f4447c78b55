//! `RocksDB` through its C interface, tuned for rows of some 290 bytes. The library is loaded if the machine has it.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::time::Duration;

use crate::library::{self, calls};
use crate::rows::{THREADS, VALUE_BYTES, WEIGHT_BYTES, key, sharded, sorted_ids, value, weights};
use crate::{FetchStore, LookupStore, Missing, RewriteStore};

/// Bytes of a block of rows.
const BLOCK_BYTES: usize = 4096;
/// The number of threads that write a batch.
const WRITERS: usize = 4;
/// Bytes of a file that the load makes.
const FILE_BYTES: usize = 64 << 20;

calls! {
    "rocksdb_",
    fn options_create() -> *mut c_void;
    fn options_destroy(*mut c_void);
    fn get_options_from_string(*const c_void, *const c_char, *mut c_void, *mut *mut c_char);
    fn open_column_families(*const c_void, *const c_char, c_int, *const *const c_char, *const *const c_void,
        *mut *mut c_void, *mut *mut c_char) -> *mut c_void;
    fn column_family_handle_destroy(*mut c_void);
    fn close(*mut c_void);
    fn property_value(*mut c_void, *const c_char) -> *mut c_char;
    fn free(*mut c_void);
    fn envoptions_create() -> *mut c_void;
    fn sstfilewriter_create(*const c_void, *const c_void) -> *mut c_void;
    fn sstfilewriter_open(*mut c_void, *const c_char, *mut *mut c_char);
    fn sstfilewriter_put(*mut c_void, *const c_char, usize, *const c_char, usize, *mut *mut c_char);
    fn sstfilewriter_finish(*mut c_void, *mut *mut c_char);
    fn sstfilewriter_destroy(*mut c_void);
    fn ingestexternalfileoptions_create() -> *mut c_void;
    fn ingestexternalfileoptions_set_move_files(*mut c_void, c_uchar);
    fn ingest_external_file(*mut c_void, *const *const c_char, usize, *const c_void, *mut *mut c_char);
    fn readoptions_create() -> *mut c_void;
    fn readoptions_set_verify_checksums(*mut c_void, c_uchar);
    fn batched_multi_get_cf(*mut c_void, *const c_void, *mut c_void, usize, *const *const c_char, *const usize,
        *mut *mut c_void, *mut *mut c_char, bool);
    fn pinnableslice_value(*const c_void, *mut usize) -> *const c_char;
    fn pinnableslice_destroy(*mut c_void);
    fn writeoptions_create() -> *mut c_void;
    fn writeoptions_disable_WAL(*mut c_void, c_int);
    fn writebatch_create() -> *mut c_void;
    fn writebatch_put(*mut c_void, *const c_char, usize, *const c_char, usize);
    fn writebatch_clear(*mut c_void);
    fn writebatch_destroy(*mut c_void);
    fn write(*mut c_void, *const c_void, *mut c_void, *mut *mut c_char);
    fn flushoptions_create() -> *mut c_void;
    fn flush(*mut c_void, *const c_void, *mut *mut c_char);
}

/// An open database of one column family. The options that are made for it live as long as the process.
struct Db {
    calls: Calls,
    pointer: *mut c_void,
    family: *mut c_void,
}

// SAFETY: RocksDB's documentation says that several threads may use a database.
unsafe impl Sync for Db {}

/// Name and version. The name of the library's file has the version, and its C interface does not tell it.
fn version() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux with /proc");
    let version =
        maps.split_whitespace().find_map(|word| word.split_once("librocksdb.so.")).map(|(_, version)| version);
    format!("RocksDB {}", version.unwrap_or_default()).trim_end().to_owned()
}

fn text(text: &str) -> CString {
    CString::new(text).expect("no zero in it")
}

fn path_text(path: &Path) -> CString {
    text(path.to_str().expect("a path of ours"))
}

/// Call a function that takes a pointer to an error.
fn checked<T>(call: impl FnOnce(*mut *mut c_char) -> T) -> T {
    let mut error: *mut c_char = null_mut();
    let result = call(&raw mut error);
    // SAFETY: RocksDB's message ends with a zero.
    assert!(error.is_null(), "RocksDB: {:?}", unsafe { CStr::from_ptr(error) });
    result
}

impl Db {
    fn open(dir: &Path, options: &str) -> Result<Self, Missing> {
        let calls = Calls::of(library::load("librocksdb.so")?)?;
        let (path, default) = (path_text(&dir.join("rocksdb")), text("default"));
        let mut family = null_mut();
        // SAFETY: options, names and pointers outlive the call.
        let pointer = unsafe {
            let settings = (calls.options_create)();
            let base = (calls.options_create)();
            let string = text(options);
            checked(|error| (calls.get_options_from_string)(base, string.as_ptr(), settings, error));
            let settings_of_family = settings.cast_const();
            let name = default.as_ptr();
            let pointer = checked(|error| {
                (calls.open_column_families)(
                    settings,
                    path.as_ptr(),
                    1,
                    &raw const name,
                    &raw const settings_of_family,
                    &raw mut family,
                    error,
                )
            });
            (calls.options_destroy)(base);
            pointer
        };
        Ok(Self { calls, pointer, family })
    }

    /// Load sorted files of the ids `scattered_id(0..rows)`, with values as `value_of` gives them, into the last level. This leaves what a
    /// load and a full compaction leave.
    fn load<const BYTES: usize>(&self, dir: &Path, rows: u64, options: &str, value_of: fn(i64) -> [u8; BYTES]) {
        let calls = &self.calls;
        // SAFETY: options, writer and texts outlive the calls that they are handed to.
        unsafe {
            let settings = (calls.options_create)();
            let string = text(options);
            let base = (calls.options_create)();
            checked(|error| (calls.get_options_from_string)(base, string.as_ptr(), settings, error));
            let files: Vec<CString> = sorted_ids(rows)
                .chunks(FILE_BYTES / (8 + BYTES))
                .enumerate()
                .map(|(number, ids)| {
                    let path = path_text(&dir.join(format!("{number}.sst")));
                    let writer = (calls.sstfilewriter_create)((calls.envoptions_create)(), settings);
                    checked(|error| (calls.sstfilewriter_open)(writer, path.as_ptr(), error));
                    for &id in ids {
                        let (key, value) = (key(id), value_of(id));
                        let (key, value) = (key.as_ptr().cast(), value.as_ptr().cast());
                        checked(|error| (calls.sstfilewriter_put)(writer, key, 8, value, BYTES, error));
                    }
                    checked(|error| (calls.sstfilewriter_finish)(writer, error));
                    (calls.sstfilewriter_destroy)(writer);
                    path
                })
                .collect();
            let pointers: Vec<*const c_char> = files.iter().map(|path| path.as_ptr()).collect();
            let how = (calls.ingestexternalfileoptions_create)();
            (calls.ingestexternalfileoptions_set_move_files)(how, 1);
            checked(|error| (calls.ingest_external_file)(self.pointer, pointers.as_ptr(), pointers.len(), how, error));
        }
    }

    /// Call `take` with the index of each key, which are sorted, and its value.
    fn get_sorted(&self, read: &Options, keys: &[[u8; 8]], mut take: impl FnMut(usize, &[u8])) {
        let calls = &self.calls;
        let pointers: Vec<*const c_char> = keys.iter().map(|key| key.as_ptr().cast()).collect();
        let sizes = vec![8; keys.len()];
        let mut values = vec![null_mut(); keys.len()];
        let mut errors: Vec<*mut c_char> = vec![null_mut(); keys.len()];
        // SAFETY: the arrays have one length, and outlive the call.
        unsafe {
            (calls.batched_multi_get_cf)(
                self.pointer,
                read.0,
                self.family,
                keys.len(),
                pointers.as_ptr(),
                sizes.as_ptr(),
                values.as_mut_ptr(),
                errors.as_mut_ptr(),
                true,
            );
        }
        assert!(errors.iter().all(|error| error.is_null()), "a failed read");
        for (at, found) in values.into_iter().enumerate() {
            assert!(!found.is_null(), "a row that was loaded");
            let mut size = 0;
            // SAFETY: the slice is valid until it is destroyed, which happens once.
            unsafe {
                let bytes = (calls.pinnableslice_value)(found, &raw mut size);
                take(at, std::slice::from_raw_parts(bytes.cast(), size));
                (calls.pinnableslice_destroy)(found);
            }
        }
    }

    fn property(&self, name: &str) -> Option<String> {
        let name = text(name);
        // SAFETY: the name outlives the call. The answer ends with a zero, and is freed once.
        unsafe {
            let answer = (self.calls.property_value)(self.pointer, name.as_ptr());
            (!answer.is_null()).then(|| {
                let copied = CStr::from_ptr(answer).to_string_lossy().into_owned();
                (self.calls.free)(answer.cast());
                copied
            })
        }
    }

    fn number(&self, name: &str) -> u64 {
        let answer = self.property(name).expect("a property that RocksDB has");
        answer.parse().expect("a number")
    }
}

impl Drop for Db {
    fn drop(&mut self) {
        // SAFETY: nobody uses the database any more.
        unsafe {
            (self.calls.column_family_handle_destroy)(self.family);
            (self.calls.close)(self.pointer);
        }
    }
}

/// A database from which rows are read.
pub(crate) struct Fetches {
    db: Db,
    read: *mut c_void,
}

/// Options of reads or writes that several threads share.
struct Options(*const c_void);

// SAFETY: nobody changes the options.
unsafe impl Sync for Options {}

impl Fetches {
    pub(crate) fn load(dir: &Path, rows: u64, ram_bytes: u64) -> Result<Self, Missing> {
        // All reads come from the disk: no block of rows stays in RAM from one batch to the next. Index and filters do.
        let options = format!(
            "create_if_missing=true;max_open_files=-1;use_direct_reads=true;use_direct_io_for_flush_and_compaction=true;\
             compression=kNoCompression;disable_auto_compactions=true;\
             block_based_table_factory={{no_block_cache=true;block_size={BLOCK_BYTES};format_version=5;checksum=kXXH3;\
             filter_policy=ribbonfilter:10;data_block_index_type=kDataBlockBinaryAndHash;\
             data_block_hash_table_util_ratio=0.75;}}"
        );
        let db = Db::open(dir, &options)?;
        db.load(dir, rows, &options, value);
        let held = db.number("rocksdb.estimate-table-readers-mem");
        assert!(held <= ram_bytes, "index and filters take {held} bytes of a budget of {ram_bytes}");
        // SAFETY: the function makes a new value.
        let read = unsafe { (db.calls.readoptions_create)() };
        Ok(Self { db, read })
    }
}

impl FetchStore for Fetches {
    fn what(&self) -> String {
        format!("{} (direct reads, blocks of {BLOCK_BYTES}, sorted MultiGet on {THREADS} threads)", version())
    }

    /// There is nothing to do, because direct reads leave nothing in the page cache.
    fn cool(&mut self) {}

    fn fetch(&mut self, ids: &[i64], out: &mut [u8]) {
        let (db, read) = (&self.db, &Options(self.read));
        sharded(ids.iter().map(|id| *id as u64), out, || {
            move |shard, values_out| {
                let keys: Vec<[u8; 8]> = shard.iter().map(|&(id, _)| key(id as i64)).collect();
                db.get_sorted(read, &keys, |at, bytes| {
                    // SAFETY: this position is in this shard alone.
                    unsafe { values_out.put(shard[at].1, bytes) };
                });
            }
        });
    }
}

/// A database, all in RAM, in which rows are looked up.
pub(crate) struct Lookups {
    db: Db,
    read: *mut c_void,
}

impl Lookups {
    pub(crate) fn load(dir: &Path, rows: u64) -> Result<Self, Missing> {
        // Blocks are read where the files are mapped, so that no block is copied into a cache.
        let options = format!(
            "create_if_missing=true;max_open_files=-1;allow_mmap_reads=true;compression=kNoCompression;\
             disable_auto_compactions=true;\
             block_based_table_factory={{no_block_cache=true;block_size={BLOCK_BYTES};format_version=5;checksum=kXXH3;\
             data_block_index_type=kDataBlockBinaryAndHash;data_block_hash_table_util_ratio=0.75;}}"
        );
        let db = Db::open(dir, &options)?;
        db.load(dir, rows, &options, weights);
        // SAFETY: the first function makes a new value, which the second changes.
        let read = unsafe {
            let read = (db.calls.readoptions_create)();
            (db.calls.readoptions_set_verify_checksums)(read, 0);
            read
        };
        Ok(Self { db, read })
    }
}

impl LookupStore for Lookups {
    fn what(&self) -> String {
        format!("{} (MultiGet, mapped files, checksums not verified)", version())
    }

    fn lookup(&mut self, ids: &[i64], out: &mut [u8]) {
        let mut sorted: Vec<([u8; 8], u32)> = ids.iter().map(|id| key(*id)).zip(0..).collect();
        sorted.sort_unstable();
        let keys: Vec<[u8; 8]> = sorted.iter().map(|(key, _)| *key).collect();
        let places = out.as_chunks_mut::<WEIGHT_BYTES>().0;
        self.db.get_sorted(&Options(self.read), &keys, |at, bytes| {
            places[sorted[at].1 as usize].copy_from_slice(bytes);
        });
    }
}

/// A database in which rows are rewritten.
pub(crate) struct Rewrites {
    db: Db,
    write: *mut c_void,
    batches: [Batch; WRITERS],
    flush: *mut c_void,
}

impl Rewrites {
    pub(crate) fn load(dir: &Path, rows: u64, ram_bytes: u64) -> Result<Self, Missing> {
        let memtable = ram_bytes / 4;
        let options = format!(
            "create_if_missing=true;max_open_files=-1;use_direct_reads=true;use_direct_io_for_flush_and_compaction=true;\
             compression=kNoCompression;max_background_jobs=4;max_subcompactions=4;\
             write_buffer_size={memtable};max_write_buffer_number=4;level0_file_num_compaction_trigger=4;\
             target_file_size_base={FILE_BYTES};max_bytes_for_level_base={};level_compaction_dynamic_level_bytes=true;\
             block_based_table_factory={{block_size={BLOCK_BYTES};format_version=5;checksum=kXXH3;}}",
            ram_bytes * 2
        );
        let db = Db::open(dir, &options)?;
        db.load(dir, rows, &options, value);
        // SAFETY: each function makes a new value.
        let (write, batches, flush) = unsafe {
            let write = (db.calls.writeoptions_create)();
            (db.calls.writeoptions_disable_WAL)(write, 1);
            (write, [(); WRITERS].map(|()| Batch((db.calls.writebatch_create)())), (db.calls.flushoptions_create)())
        };
        Ok(Self { db, write, batches, flush })
    }
}

/// A batch of writes. One thread at a time uses it.
struct Batch(*mut c_void);

// SAFETY: a batch is memory that belongs to no thread.
unsafe impl Send for Batch {}

impl Batch {
    fn write(&mut self, db: &Db, options: &Options, ids: &[i64]) {
        let calls = &db.calls;
        // SAFETY: keys and values outlive their calls, which copy them.
        unsafe {
            (calls.writebatch_clear)(self.0);
            for &id in ids {
                let (key, value) = (key(id), value(id));
                (calls.writebatch_put)(self.0, key.as_ptr().cast(), 8, value.as_ptr().cast(), VALUE_BYTES);
            }
            checked(|error| (calls.write)(db.pointer, options.0, self.0, error));
        }
    }
}

impl Drop for Rewrites {
    fn drop(&mut self) {
        for batch in &self.batches {
            // SAFETY: nobody uses the batch any more.
            unsafe { (self.db.calls.writebatch_destroy)(batch.0) };
        }
    }
}

impl RewriteStore for Rewrites {
    fn what(&self) -> String {
        format!("{} (no log, direct I/O, {WRITERS} writing threads, drained)", version())
    }

    fn write(&mut self, ids: &[i64]) {
        let (db, options) = (&self.db, &Options(self.write));
        std::thread::scope(|scope| {
            for (ids, batch) in ids.chunks(ids.len().div_ceil(WRITERS)).zip(&mut self.batches) {
                scope.spawn(move || batch.write(db, options, ids));
            }
        });
    }

    fn drain(&mut self) {
        // SAFETY: the options outlive the call, which waits for the flush.
        checked(|error| unsafe { (self.db.calls.flush)(self.db.pointer, self.flush, error) });
        while self.db.number("rocksdb.compaction-pending") + self.db.number("rocksdb.num-running-compactions") > 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
