//! Changes of files, both of their bytes and of the JSON in them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::io::{ALIGNMENT, AlignedBuf, IoEngine, IoOpenMode, MemoryEngine};
use proptest::prelude::*;
use serde_json::Value;

/// The files of a directory tree, by path.
pub(crate) type Files = BTreeMap<PathBuf, Vec<u8>>;

/// Reads every file below `dir`.
pub(crate) fn files(engine: &dyn IoEngine, dir: &Path) -> Files {
    let mut all = Files::new();
    for path in engine.list(dir).unwrap() {
        match engine.open(&path, IoOpenMode::Read) {
            Ok(file) => {
                let mut bytes = vec![0; file.len().unwrap() as usize];
                file.read_at(0, &mut bytes).unwrap();
                all.insert(path, bytes);
            }
            Err(_) => all.extend(files(engine, &path)),
        }
    }
    all
}

/// An engine with these files.
pub(crate) fn engine_of(files: &Files) -> Arc<dyn IoEngine> {
    let engine = MemoryEngine::default();
    for (path, bytes) in files {
        engine.create_dir_all(path.parent().unwrap()).unwrap();
        let file = engine.open(path, IoOpenMode::Create { preallocate: 0 }).unwrap();
        let mut padded = AlignedBuf::zeroed(bytes.len().next_multiple_of(ALIGNMENT));
        padded[..bytes.len()].copy_from_slice(bytes);
        file.write_at(0, &padded).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
    }
    Arc::new(engine)
}

/// A change of one file. Positions are fractions of its length.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Flip {
        at: f64,
        bit: u8,
    },
    /// Overwrite with an integer of 1, 2, 4 or 8 bytes. `at` counts from the start or, if it is negative, from the end.
    Number {
        at: i32,
        width: u8,
        value: u64,
    },
    Cut {
        at: f64,
    },
    Extend {
        bytes: usize,
        with: u8,
    },
    /// Copy `bytes` from one position to another.
    Copy {
        from: f64,
        to: f64,
        bytes: usize,
    },
    /// Replace a leaf or a container of the JSON in it.
    Json {
        which: f64,
        how: JsonChange,
    },
    Remove,
    /// Replace its contents by those of the next file of its kind.
    Next,
}

#[derive(Clone, Debug)]
pub(crate) enum JsonChange {
    Set(Value),
    Remove,
    /// Duplicate an element of an array, or a value of an object, as the next one.
    Twice,
    Swap,
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..4_u64,
        (0..64_u32, -1..2_i64).prop_map(|(bits, more)| (1_u64 << bits).wrapping_add_signed(more)),
        Just(u64::MAX),
        Just(u64::MAX - 1),
        Just(u64::from(u32::MAX)),
        any::<u64>(),
        0..5000_u64
    ]
}

fn json_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        6 => number().prop_map(Value::from),
        1 => any::<i64>().prop_map(Value::from),
        1 => any::<f64>().prop_map(Value::from),
        1 => Just(Value::Null),
        1 => any::<bool>().prop_map(Value::from),
        1 => ".{0,20}".prop_map(Value::from),
        1 => Just(Value::from("x".repeat(70_000))),
        1 => Just(Value::Array(vec![])),
        1 => Just(Value::Object(serde_json::Map::new())),
        // The depth goes up to the limit of the parser, and beyond.
        1 => (1..300_usize).prop_map(|depth| (0..depth).fold(Value::Null, |inner, _| Value::Array(vec![inner]))),
    ]
}

pub(crate) fn change() -> impl Strategy<Value = Change> {
    let part = || 0.0..1.0_f64;
    let json = prop_oneof![
        4 => json_value().prop_map(JsonChange::Set),
        1 => Just(JsonChange::Remove),
        1 => Just(JsonChange::Twice),
        1 => Just(JsonChange::Swap),
    ];
    prop_oneof![
        2 => (part(), 0..8_u8).prop_map(|(at, bit)| Change::Flip { at, bit }),
        6 => (prop_oneof![-200..200_i32, -9000..9000_i32], 0..4_u8, number())
            .prop_map(|(at, width, value)| Change::Number { at, width: 1 << width, value }),
        1 => part().prop_map(|at| Change::Cut { at }),
        1 => (1..9000_usize, any::<u8>()).prop_map(|(bytes, with)| Change::Extend { bytes, with }),
        2 => (part(), part(), 1..5000_usize).prop_map(|(from, to, bytes)| Change::Copy { from, to, bytes }),
        6 => (part(), json).prop_map(|(which, how)| Change::Json { which, how }),
        1 => Just(Change::Remove),
        1 => Just(Change::Next),
    ]
}

/// Finds where the JSON in a file's bytes starts and ends.
pub(crate) type FindJson = fn(&[u8]) -> Option<(usize, usize)>;

/// A file (the integer part selects its kind), and the change of it.
pub(crate) type Step = (f64, Change);

pub(crate) fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec((0.0..12.0_f64, change()), 1..4)
}

fn place(part: f64, len: usize) -> usize {
    ((part * len as f64) as usize).min(len.saturating_sub(1))
}

/// The files of one extension. All kinds have the same probability.
fn of_one_kind(files: &Files, which: f64) -> Vec<PathBuf> {
    let mut kinds: BTreeMap<_, Vec<PathBuf>> = BTreeMap::new();
    for path in files.keys() {
        kinds.entry(path.extension()).or_default().push(path.clone());
    }
    let count = kinds.len().max(1);
    kinds.into_values().nth(which as usize % count).unwrap_or_default()
}

/// Changes the files. Returns the paths of those that changed.
pub(crate) fn apply(files: &mut Files, steps: &[Step], json: FindJson) -> Vec<PathBuf> {
    let mut changed = Vec::new();
    for (which, change) in steps {
        let paths = of_one_kind(files, *which);
        let at = place(which.fract(), paths.len());
        let Some(path) = paths.get(at) else { return changed };
        let next = files[&paths[(at + 1) % paths.len()]].clone();
        let bytes = files.get_mut(path).unwrap();
        let len = bytes.len();
        match change {
            Change::Remove => _ = files.remove(path),
            Change::Next => *bytes = next,
            Change::Extend { bytes: more, with } => bytes.resize(len + more, *with),
            Change::Json { which, how } => {
                if let Some((start, end)) = json(bytes)
                    && let Ok(mut value) = serde_json::from_slice::<Value>(&bytes[start..end])
                {
                    change_json(&mut value, *which, how);
                    let mut rendered = serde_json::to_vec_pretty(&value).unwrap();
                    // The bytes after the JSON stay at their position, if possible.
                    rendered.resize(rendered.len().max(end - start), b' ');
                    bytes.splice(start..end, rendered);
                }
            }
            _ if len == 0 => {}
            Change::Flip { at, bit } => bytes[place(*at, len)] ^= 1 << bit,
            Change::Number { at, width, value } => {
                let at = if *at < 0 { len.saturating_sub(at.unsigned_abs() as usize) } else { *at as usize % len };
                let end = (at + usize::from(*width)).min(len);
                bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            }
            Change::Cut { at } => bytes.truncate(place(*at, len)),
            Change::Copy { from, to, bytes: count } => {
                let (from, to) = (place(*from, len), place(*to, len));
                let count = (*count).min(len - from.max(to));
                bytes.copy_within(from..from + count, to);
            }
        }
        changed.push(path.clone());
    }
    changed
}

/// The JSON pointers to every value in `value`, except itself.
fn pointers(value: &Value, at: &str, into: &mut Vec<String>) {
    let mut visit = |key: String, value: &Value| {
        let pointer = format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"));
        into.push(pointer.clone());
        pointers(value, &pointer, into);
    };
    match value {
        Value::Array(items) => items.iter().enumerate().for_each(|(at, item)| visit(at.to_string(), item)),
        Value::Object(fields) => fields.iter().for_each(|(key, field)| visit(key.clone(), field)),
        _ => {}
    }
}

fn change_json(value: &mut Value, which: f64, how: &JsonChange) {
    let mut all = Vec::new();
    pointers(value, "", &mut all);
    let Some(pointer) = all.get(place(which, all.len())) else { return };
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    if let JsonChange::Set(new) = how {
        *value.pointer_mut(pointer).unwrap() = new.clone();
        return;
    }
    match value.pointer_mut(parent).unwrap() {
        Value::Array(items) => {
            let at: usize = key.parse().unwrap();
            match how {
                JsonChange::Remove => _ = items.remove(at),
                JsonChange::Twice => items.insert(at, items[at].clone()),
                _ => {
                    let other = (at + 1) % items.len();
                    items.swap(at, other);
                }
            }
        }
        Value::Object(fields) => {
            let key = key.replace("~1", "/").replace("~0", "~");
            let field = fields.remove(&key).unwrap();
            match how {
                JsonChange::Remove => {}
                _ => _ = fields.insert(format!("{key}2"), field),
            }
        }
        _ => {}
    }
}
