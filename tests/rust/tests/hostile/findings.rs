//! Findings of the fuzz targets, and of reviews of the parsers, with a name each.

use serde_json::{Value, json};

use crate::mutate::Files;
use crate::ssd::{refusal, seed, state_file, use_it};

/// The seed with its latest state changed and sealed again.
fn with_state(change: impl Fn(&mut Value)) -> Files {
    let mut files = seed().clone();
    let (_, bytes) = files.iter_mut().filter(|(path, _)| path.to_string_lossy().ends_with(".state")).last().unwrap();
    let start = bytes.iter().position(|&byte| byte == b'\n').unwrap() + 1;
    let mut state: Value = serde_json::from_slice(&bytes[start..]).unwrap();
    change(&mut state);
    *bytes = state_file(&serde_json::to_vec(&state).unwrap());
    files
}

#[test]
fn a_state_whose_counters_cannot_go_on_is_refused() {
    for value in [json!(u64::MAX), json!(u64::MAX - 1), json!(1_u64 << 63)] {
        let files = with_state(|state| state["write_seq"] = value.clone());
        assert_eq!(refusal(&files), Some(embcache::Kind::Corruption), "write_seq {value}");
        use_it(&files, None, true).unwrap();
        let files = with_state(|state| state["counters"]["step"] = value.clone());
        assert_eq!(refusal(&files), Some(embcache::Kind::Corruption), "step {value}");
    }
    let files = with_state(|state| state["counters"]["epoch"] = json!(u32::MAX));
    use_it(&files, None, true).unwrap();
}

#[test]
fn a_state_that_names_a_segment_twice_is_refused() {
    let files = with_state(|state| {
        let segments = state["segments"].as_array_mut().unwrap();
        segments.push(segments[0].clone());
    });
    assert_eq!(refusal(&files), Some(embcache::Kind::Corruption));
    use_it(&files, None, true).unwrap();
}

#[test]
fn a_segment_with_the_last_serial_is_refused() {
    let mut files = with_state(|state| state["segments"][0]["n"] = json!(u64::MAX));
    let (path, bytes) = files.iter().find(|(path, _)| path.to_string_lossy().ends_with(".seg")).unwrap();
    let (path, mut bytes) = (path.with_file_name("ffffffffffffffff.seg"), bytes.clone());
    let header = u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize;
    bytes[20..28].fill(0xff);
    let crc = crc32c::crc32c(&bytes[..header - 4]).to_le_bytes();
    bytes[header - 4..header].copy_from_slice(&crc);
    let trailer = bytes.len() - 72;
    bytes[trailer + 32..trailer + 40].fill(0xff);
    let crc = crc32c::crc32c(&bytes[trailer..trailer + 68]);
    bytes[trailer + 68..].copy_from_slice(&crc.to_le_bytes());
    files.insert(path, bytes);
    let (_, state) = files.iter_mut().filter(|(path, _)| path.to_string_lossy().ends_with(".state")).last().unwrap();
    let start = state.iter().position(|&byte| byte == b'\n').unwrap() + 1;
    let mut value: Value = serde_json::from_slice(&state[start..]).unwrap();
    value["segments"][0]["c"] = json!(crc);
    *state = state_file(&serde_json::to_vec(&value).unwrap());
    assert_eq!(refusal(&files), Some(embcache::Kind::Corruption));
    use_it(&files, None, true).unwrap();
}

#[test]
fn a_state_of_another_format_is_refused() {
    for format in ["0", "2", "4294967297", "-1", "01", "one"] {
        let mut files = seed().clone();
        for (_, state) in files.iter_mut().filter(|(path, _)| path.to_string_lossy().ends_with(".state")) {
            let (first, rest) = (b"embcache-ssd-state ", state.split_off("embcache-ssd-state 1".len()));
            *state = [&first[..], format.as_bytes(), &rest].concat();
        }
        assert_eq!(refusal(&files), Some(embcache::Kind::Mismatch), "{format}");
        use_it(&files, None, false).unwrap();
    }
}

#[test]
fn files_with_similar_names_are_not_read_or_removed() {
    let mut files = seed().clone();
    let strange = ["+00000000000000a.seg", "00000000000000AB.seg", "+00000000000000a.state", "000000000000000A.state"];
    let dir = files.keys().next().unwrap().parent().unwrap().to_owned();
    files.extend(strange.map(|name| (dir.join(name), b"another's".to_vec())));
    assert_eq!(refusal(&files), None);
    let left = crate::ssd::files_after_use(&files);
    for name in strange {
        assert!(left.contains_key(&dir.join(name)), "{name}");
    }
}
