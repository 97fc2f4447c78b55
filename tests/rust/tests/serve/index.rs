//! The index file of a checkpoint, verified against the checkpoint: wrong contents in any line are detected, even if
//! all checksums are valid.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::Kind;
use embcache::config::OptimizerKind;
use embcache::io::{IoEngine, PsyncEngine};
use embcache::serve::{check_index, make_index};
use embcache::types::Id;
use embcache_tests::checkpoint::{Table, save};
use embcache_tests::directory_in;

/// Bytes of a line: five ids, their places plus one, and the number of ids that have passed it.
const LINE: usize = 64;
const IDS_OF_A_LINE: usize = 5;

/// A directory on the disk with a full checkpoint and a delta, whose index was built, and the path of the index.
fn indexed() -> (tempfile::TempDir, Arc<dyn IoEngine>, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::new(false));
    let ids: Vec<Id> = (0..500).map(|n| n * 7919 - 40_000).collect();
    let table = |ids: &[Id], salt| vec![Table::new("m", "item", OptimizerKind::Sgd, 3, ids, salt)];
    save(&engine, dir.path(), &table(&ids, 1), 2, 3000, 1).expect("saved");
    let made = make_index(&directory_in(&engine, dir.path()), None, &mut || Ok(())).expect("an index");
    assert_eq!(made.rows, 500);
    let index = dir.path().join(made.checkpoint.to_string()).join("serve.idx");
    (dir, engine, index)
}

/// Changes the lines of the index, and fixes every checksum.
fn lie(index: &Path, change: impl FnOnce(&mut [u8])) {
    lie_of_ids(index, 0, change);
}

/// Like [`lie`], and adds `more` to the number of ids.
fn lie_of_ids(index: &Path, more: usize, change: impl FnOnce(&mut [u8])) {
    let mut file = std::fs::read(index).expect("an index");
    let length = u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize;
    let text = String::from_utf8(file[8..8 + length].to_vec()).expect("text");
    let header: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let table = &header["tables"][0];
    let number = |name: &str| table[name].as_u64().expect("a number") as usize;
    let lines = number("start")..number("start") + number("lines") * LINE;
    change(&mut file[lines.clone()]);
    let crc = |crc: usize| format!("\"crc32c\": {crc}");
    let now = crc32c::crc32c(&file[lines]) as usize;
    let len = |len: usize| format!("\"len\": {len}");
    let changed =
        text.replace(&crc(number("crc32c")), &crc(now)).replace(&len(number("len")), &len(number("len") + more));
    let body = changed[..changed.rfind(",\n  \"xxh3\": ").expect("a sealed header")].to_owned();
    let seal = xxhash_rust::xxh3::xxh3_64(format!("{body}\n}}\n").as_bytes());
    let sealed = format!("{body},\n  \"xxh3\": {seal}\n}}\n");
    file[..8].copy_from_slice(&(sealed.len() as u64).to_le_bytes());
    file[8..8 + sealed.len()].copy_from_slice(sealed.as_bytes());
    std::fs::write(index, file).expect("written");
}

/// The bytes of the place of a line's entry.
fn place(line: usize, entry: usize) -> std::ops::Range<usize> {
    let start = line * LINE + IDS_OF_A_LINE * 8 + entry * 4;
    start..start + 4
}

/// The first line with at least two entries.
fn line_of_two(lines: &[u8]) -> usize {
    let is_used = |line: &usize| lines[place(*line, 1)].iter().any(|byte| *byte != 0);
    (0..lines.len() / LINE).find(is_used).expect("a line of two ids")
}

fn swap_places(lines: &mut [u8]) {
    let line = line_of_two(lines);
    let first: [u8; 4] = lines[place(line, 0)].try_into().expect("four bytes");
    lines.copy_within(place(line, 1), place(line, 0).start);
    lines[place(line, 1)].copy_from_slice(&first);
}

fn change_an_id(lines: &mut [u8]) {
    let line = line_of_two(lines);
    lines[line * LINE] ^= 1;
}

fn point_nowhere(lines: &mut [u8]) {
    let line = line_of_two(lines);
    lines[place(line, 0)].copy_from_slice(&u32::MAX.to_le_bytes());
}

fn add_an_id(lines: &mut [u8]) {
    add_an_id_after(lines, 0);
}

fn add_an_id_behind_a_gap(lines: &mut [u8]) {
    add_an_id_after(lines, 1);
}

/// Adds an id that is in no file to a line of one id, after this number of free entries.
fn add_an_id_after(lines: &mut [u8], gap: usize) {
    let is_free = |line: &usize, entry: usize| lines[place(*line, entry)].iter().all(|byte| *byte == 0);
    let has_room = |line: &usize| !is_free(line, 0) && is_free(line, 1) && is_free(line, 2);
    let line = (0..lines.len() / LINE).find(has_room).expect("a line of one id");
    let id = line * LINE + (1 + gap) * 8;
    lines[id..id + 8].copy_from_slice(&999_999_937_i64.to_le_bytes());
    lines.copy_within(place(line, 0), place(line, 1 + gap).start);
}

#[test]
fn false_index_with_valid_checksums_is_detected() {
    let lies: [fn(&mut [u8]); 5] = [swap_places, change_an_id, point_nowhere, add_an_id, add_an_id_behind_a_gap];
    for change in lies {
        let (dir, engine, index) = indexed();
        let check = || check_index(&directory_in(&engine, dir.path()), None, &mut || Ok(()));
        assert_eq!(check().expect("it is right"), Some(500));
        lie(&index, |_| ());
        assert_eq!(check().expect("it is sealed as it was"), Some(500));
        lie(&index, change);
        let error = check().expect_err("it lies");
        assert_eq!(error.kind(), Kind::Corruption);
        assert!(error.to_string().contains("the place of id"), "{error}");
    }
    let (dir, engine, index) = indexed();
    lie_of_ids(&index, 1, |_| ());
    let error = check_index(&directory_in(&engine, dir.path()), None, &mut || Ok(())).expect_err("it lies");
    assert!(error.to_string().contains("the number of ids should be 500"), "{error}");
}

#[test]
fn an_index_of_other_checkpoints_or_none_is_nothing_to_check() {
    let (dir, engine, index) = indexed();
    let whole = std::fs::read(&index).expect("an index");
    std::fs::remove_file(&index).expect("removed");
    let check = || check_index(&directory_in(&engine, dir.path()), None, &mut || Ok(()));
    assert_eq!(check().expect("there is none"), None);
    let ids: Vec<Id> = (0..20).collect();
    let delta = vec![Table::new("m", "item", OptimizerKind::Sgd, 3, &ids, 2)];
    save(&engine, dir.path(), &delta, 1, 3000, 2).expect("saved");
    let latest = std::fs::read_to_string(dir.path().join("LATEST")).expect("a name");
    let newest = latest.split_whitespace().next().expect("a name");
    std::fs::write(dir.path().join(newest).join("serve.idx"), whole).expect("written");
    assert_eq!(check().expect("it is of the one before"), None);
}
