use super::*;

#[test]
fn clock_precedes_the_rest_of_the_blob() {
    assert_eq!(clock_prefix(b""), b"");
    let blob = [clock_prefix(b"[0,1,2]"), b"counts 1\n...".to_vec()].concat();
    assert_eq!(split_clock(&blob), (&b"[0,1,2]"[..], &b"counts 1\n..."[..]));
    for old in [&b""[..], b"{old}", b"counts 1\n..."] {
        assert_eq!(split_clock(old), (&b""[..], old));
    }
    for end in CLOCK_TAG.len()..CLOCK_TAG.len() + 8 + 7 {
        assert_eq!(split_clock(&blob[..end]), (&b""[..], &b""[..]), "{end}");
    }
}

#[test]
fn unchanged_flag_precedes_the_rest_of_the_blob() {
    let blob = [UNCHANGED_TAG, b"counts 1\n..."].concat();
    assert_eq!(split_unchanged(&blob), (true, &b"counts 1\n..."[..]));
    for other in [&b""[..], b"{old}", b"swept"] {
        assert_eq!(split_unchanged(other), (false, other));
    }
}

#[test]
fn blob_round_trips_and_a_truncated_one_has_no_counts() {
    let pending = |id, is_older| CountedId { id, shows: (1 << 24) - 1, clicks: 7, is_older };
    let counts = vec![
        BucketCounts { bucket: 0, generation: u32::MAX, ids: vec![pending(-1, true), pending(5, false)] },
        BucketCounts { bucket: 9, generation: 2, ids: Vec::new() },
    ];
    let nothing = BucketCounts { bucket: 3, ..BucketCounts::default() };
    let all = || counts.iter().cloned().chain([nothing.clone()]);
    let blob = encode(b"{lineage}", all(), 1000).expect("it fits");
    assert_eq!(decode(&blob), MetadataBlob { history: b"{lineage}", counts: counts.clone() });
    assert_eq!(encode(b"{lineage}", all(), blob.len() - 1), None);
    for end in COUNTS_TAG.len()..blob.len() {
        assert!(decode(&blob[..end]).counts.len() < 2, "{end}");
    }
    assert_eq!(decode(b"{old}"), MetadataBlob { history: b"{old}", counts: Vec::new() });
}
