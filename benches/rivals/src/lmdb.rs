//! LMDB through its C interface. The library is loaded if the machine has it.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use embcache_benches::forget_cached;

use crate::library::{self, calls};
use crate::rows::{THREADS, VALUE_BYTES, WEIGHT_BYTES, key, sharded, sorted_ids};
use crate::{FetchStore, LookupStore, Missing};

const MDB_NOSUBDIR: c_uint = 0x4000;
const MDB_NOSYNC: c_uint = 0x1_0000;
const MDB_RDONLY: c_uint = 0x2_0000;
const MDB_NOTLS: c_uint = 0x20_0000;
const MDB_NORDAHEAD: c_uint = 0x80_0000;
const MDB_APPEND: c_uint = 0x2_0000;
/// The number of rows that a transaction of the load writes.
const LOADED_TOGETHER: usize = 100_000;

#[repr(C)]
pub(super) struct Val {
    size: usize,
    data: *const c_void,
}

impl Val {
    fn of(bytes: &[u8]) -> Self {
        Self { size: bytes.len(), data: bytes.as_ptr().cast() }
    }
}

calls! {
    "mdb_",
    fn version(*mut c_int, *mut c_int, *mut c_int) -> *const c_char;
    fn strerror(c_int) -> *const c_char;
    fn env_create(*mut *mut c_void) -> c_int;
    fn env_set_mapsize(*mut c_void, usize) -> c_int;
    fn env_set_maxreaders(*mut c_void, c_uint) -> c_int;
    fn env_open(*mut c_void, *const c_char, c_uint, c_uint) -> c_int;
    fn env_sync(*mut c_void, c_int) -> c_int;
    fn env_close(*mut c_void);
    fn txn_begin(*mut c_void, *mut c_void, c_uint, *mut *mut c_void) -> c_int;
    fn txn_commit(*mut c_void) -> c_int;
    fn txn_abort(*mut c_void);
    fn dbi_open(*mut c_void, *const c_char, c_uint, *mut c_uint) -> c_int;
    fn put(*mut c_void, c_uint, *mut Val, *mut Val, c_uint) -> c_int;
    fn get(*mut c_void, c_uint, *mut Val, *mut Val) -> c_int;
}

impl Calls {
    fn check(&self, result: c_int) {
        // SAFETY: the function returns a string that lives for ever.
        assert_eq!(result, 0, "LMDB: {:?}", unsafe { CStr::from_ptr((self.strerror)(result)) });
    }
}

pub(crate) struct Lmdb {
    calls: Calls,
    path: PathBuf,
    map_bytes: usize,
    /// Null while no environment is open.
    env: *mut c_void,
}

/// An environment in which several threads begin transactions.
struct Env<'a>(&'a Calls, *mut c_void);

// SAFETY: LMDB's documentation says that several threads may use an environment.
unsafe impl Sync for Env<'_> {}

/// A thread's read-only transaction.
struct Reading<'a>(&'a Calls, *mut c_void, c_uint);

impl<'a> Reading<'a> {
    fn begin(env: &Env<'a>) -> Self {
        let (calls, mut txn, mut dbi) = (env.0, null_mut(), 0);
        // SAFETY: the environment is open, and this thread alone uses the transaction.
        unsafe {
            calls.check((calls.txn_begin)(env.1, null_mut(), MDB_RDONLY, &raw mut txn));
            calls.check((calls.dbi_open)(txn, null(), 0, &raw mut dbi));
        }
        Self(calls, txn, dbi)
    }

    fn get(&self, key: &[u8]) -> &[u8] {
        let (mut key, mut found) = (Val::of(key), Val { size: 0, data: null() });
        // SAFETY: key and result outlive the call. The bytes found live as long as the transaction, which self borrows.
        unsafe {
            self.0.check((self.0.get)(self.1, self.2, &raw mut key, &raw mut found));
            std::slice::from_raw_parts(found.data.cast(), found.size)
        }
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        // SAFETY: the transaction has not ended, and all that it gave out was borrowed from self.
        unsafe { (self.0.txn_abort)(self.1) };
    }
}

impl Lmdb {
    /// Load the ids `scattered_id(0..rows)`, with values as `value_of` gives them.
    pub(crate) fn load<const BYTES: usize>(
        dir: &Path,
        rows: u64,
        value_of: fn(i64) -> [u8; BYTES],
    ) -> Result<Self, Missing> {
        let calls = Calls::of(library::load("liblmdb.so")?)?;
        // A leaf of 4 KiB holds 13 rows.
        let map_bytes = (rows as usize).div_ceil(12) * 4096 + (64 << 20);
        let mut this = Self { calls, path: dir.join("lmdb"), map_bytes, env: null_mut() };
        this.open(MDB_NOSYNC);
        let ids = sorted_ids(rows);
        let calls = &this.calls;
        for ids in ids.chunks(LOADED_TOGETHER) {
            let (mut txn, mut dbi) = (null_mut(), 0);
            // SAFETY: the environment is open, this thread alone writes, and keys and values outlive their calls.
            unsafe {
                calls.check((calls.txn_begin)(this.env, null_mut(), 0, &raw mut txn));
                calls.check((calls.dbi_open)(txn, null(), 0, &raw mut dbi));
                for &id in ids {
                    let (key, value) = (key(id), value_of(id));
                    let (mut key, mut value) = (Val::of(&key), Val::of(&value));
                    calls.check((calls.put)(txn, dbi, &raw mut key, &raw mut value, MDB_APPEND));
                }
                calls.check((calls.txn_commit)(txn));
            }
        }
        // SAFETY: the environment is open.
        calls.check(unsafe { (calls.env_sync)(this.env, 1) });
        this.cool();
        Ok(this)
    }

    fn open(&mut self, flags: c_uint) {
        let calls = &self.calls;
        let path = CString::new(self.path.to_str().expect("a path of ours")).expect("no zero in it");
        // SAFETY: the environment is new, and is set up before it is opened, as LMDB asks.
        unsafe {
            calls.check((calls.env_create)(&raw mut self.env));
            calls.check((calls.env_set_mapsize)(self.env, self.map_bytes));
            calls.check((calls.env_set_maxreaders)(self.env, THREADS as c_uint + 1));
            let flags = MDB_NOSUBDIR | MDB_NOTLS | MDB_NORDAHEAD | flags;
            calls.check((calls.env_open)(self.env, path.as_ptr(), flags, 0o600));
        }
    }
}

impl Lmdb {
    fn version(&self) -> String {
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: the three integers outlive the call.
        unsafe { (self.calls.version)(&raw mut major, &raw mut minor, &raw mut patch) };
        format!("LMDB {major}.{minor}.{patch}")
    }

    /// Close the environment, forget its file, and open it again. Pages that are mapped would stay in the page cache.
    fn cool(&mut self) {
        // SAFETY: the environment is open, and no transaction is.
        unsafe { (self.calls.env_close)(self.env) };
        forget_cached(&File::open(&self.path).expect("our own file"));
        self.open(MDB_RDONLY);
    }
}

impl Drop for Lmdb {
    fn drop(&mut self) {
        // SAFETY: the environment is open, and no transaction is.
        unsafe { (self.calls.env_close)(self.env) };
    }
}

/// An environment from which rows are read that are on the disk.
pub(crate) struct Fetches(pub(crate) Lmdb);

impl FetchStore for Fetches {
    fn what(&self) -> String {
        format!("{} ({THREADS} threads, no read-ahead)", self.0.version())
    }

    fn cool(&mut self) {
        self.0.cool();
    }

    fn fetch(&mut self, ids: &[i64], out: &mut [u8]) {
        let env = &Env(&self.0.calls, self.0.env);
        sharded(ids.iter().map(|id| *id as u64), out, || {
            let reading = Reading::begin(env);
            move |shard, values_out| {
                for &(id, position) in shard {
                    let found = reading.get(&key(id as i64));
                    assert_eq!(found.len(), VALUE_BYTES, "a row as it was loaded");
                    // SAFETY: this position is in this shard alone.
                    unsafe { values_out.put(position, found) };
                }
            }
        });
    }
}

/// An environment, all in RAM, in which rows are looked up.
pub(crate) struct Lookups(pub(crate) Lmdb);

impl Lookups {
    /// Read the whole file, so that it is in the page cache.
    pub(crate) fn new(store: Lmdb) -> Self {
        let mut file = File::open(&store.path).expect("our own file");
        std::io::copy(&mut file, &mut std::io::sink()).expect("a readable file");
        Self(store)
    }
}

impl LookupStore for Lookups {
    fn what(&self) -> String {
        format!("{} (one transaction a request)", self.0.version())
    }

    fn lookup(&mut self, ids: &[i64], out: &mut [u8]) {
        let reading = Reading::begin(&Env(&self.0.calls, self.0.env));
        for (id, place) in ids.iter().zip(out.as_chunks_mut::<WEIGHT_BYTES>().0) {
            place.copy_from_slice(reading.get(&key(*id)));
        }
    }
}
