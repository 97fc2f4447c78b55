use std::io::Write as _;

use super::*;

fn mapped(bytes: &[u8]) -> (tempfile::NamedTempFile, FileMapping) {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(bytes).expect("room");
    let mapping = FileMapping::of_file(file.path(), file.as_file(), bytes.len(), MappingAccess::Scattered);
    (file, mapping.expect("a mapping"))
}

#[test]
fn a_file_is_read_by_its_mapping_when_it_has_lost_its_name() {
    let bytes: Vec<u8> = (0..100_000_u32).map(|n| n as u8).collect();
    let (file, mapping) = mapped(&bytes);
    drop(file);
    mapping.prefetch(&(5000..90_000));
    mapping.populate(&(5000..90_000)).expect("it is there");
    assert!(mapping.bytes() == bytes && !mapping.is_copy());
}

#[test]
fn truncated_page_is_an_error_not_a_sigbus() {
    let (file, mapping) = mapped(&vec![7; 100_000]);
    file.as_file().set_len(10_000).expect("it is cut");
    mapping.populate(&(0..10_000)).expect("these are there");
    let error = mapping.populate(&(60_000..60_010)).expect_err("these are gone");
    assert_eq!(error.kind(), Kind::Corruption, "{error}");
}

#[test]
fn whole_access_reads_files_of_any_length() {
    for length in [1, 4096, 5000, (2 << 20) - 1, 2 << 20, (4 << 20) + 7] {
        let bytes: Vec<u8> = (0..length as u32).map(|n| (n >> 3) as u8).collect();
        let (file, _) = mapped(&bytes);
        let whole = FileMapping::of_file(file.path(), file.as_file(), length, MappingAccess::Whole).expect("a mapping");
        whole.populate(&(0..length)).expect("it is there");
        assert!(whole.bytes() == bytes);
    }
}

#[test]
fn a_quarter_of_the_mappings_stays_free() {
    let path = Path::new("/some/file");
    check_mapping_limit(path, 49_145, 65_530).expect("there is room");
    check_mapping_limit(path, usize::MAX - 1, usize::MAX).expect_err("there is none");
    let error = check_mapping_limit(path, 49_146, 65_530).expect_err("no room is left");
    assert_eq!(error.kind(), Kind::Capacity);
    assert!(error.to_string().contains("vm.max_map_count=262120"), "{error}");
    assert!(max_mappings() > 1000, "{}", max_mappings());
    let before = MAPPED_FILES.load(Ordering::Relaxed);
    let all: Vec<_> = (0..100).map(|_| mapped(b"abc")).collect();
    assert!(MAPPED_FILES.load(Ordering::Relaxed) >= before.max(100), "they are counted");
    drop(all);
}

#[test]
fn ranges_past_the_end_and_empty_files_do_no_harm() {
    let (_file, mapping) = mapped(b"abc");
    mapping.prefetch(&(1_000_000..2_000_000));
    mapping.populate(&(0..2_000_000)).expect("what there is");
    let (_file, empty) = mapped(b"");
    assert!(empty.bytes().is_empty());
    empty.populate(&(0..1)).expect("nothing to do");
}
