//! False contents of a delta, one at a time: in its manifests, in its data files, and in the eviction rules that were
//! applied since its parent.

use embcache::Kind;
use embcache::types::Id;
use serde_json::{Value, json};

use crate::checkpoint::{reseal, sealed, set_header, tables, value};
use crate::mutate::Files;
use crate::serving::{Served, column, manifests, meet, of_delta, seed, truth};

/// The seed's delta with false contents and valid checksums.
fn with(lie: impl Fn(&mut Files)) -> Files {
    let mut files = seed().delta.clone();
    lie(&mut files);
    reseal(&mut files);
    files
}

/// The seed's delta, with a change of the JSON of all of its manifests.
fn with_manifests(change: impl Fn(&mut Value)) -> Files {
    with(|files| manifests(files, |_, manifest| change(manifest)))
}

/// The seed's delta, with a change of the JSON of the coordinator's manifest.
fn with_coordinator(change: impl Fn(&mut Value)) -> Files {
    with(|files| {
        manifests(files, |path, manifest| {
            if path.ends_with("manifest.json") {
                change(manifest);
            }
        });
    })
}

/// The seed's delta, with a change of a column of one of its data files with rows of table `a`.
fn with_column(name: &str, change: impl Fn(&mut [u8])) -> Files {
    with(|files| {
        let path = of_delta(files, true).remove(0);
        change(column(files.get_mut(&path).unwrap(), name));
    })
}

/// Adds to a number in a manifest.
fn add(number: &mut Value, more: i64) {
    *number = number.as_u64().unwrap().wrapping_add_signed(more).into();
}

/// Adds `more` to the stored row count of table `a`. Each rank's manifest gets half of it.
fn miscount(files: &mut Files, more: i64) {
    manifests(files, |path, manifest| {
        let more = match path.file_name().and_then(|name| name.to_str()) {
            Some("0-of-2.json") => more / 2,
            Some("1-of-2.json") => more - more / 2,
            _ => more,
        };
        add(&mut manifest["tables"][0]["total_rows"], more);
    });
}

/// The seed's delta, with these sweeps of table `a`, and a row count that differs by `more`.
fn with_sweeps(sweeps: &Value, more: i64) -> Files {
    with(|files| {
        manifests(files, |_, manifest| {
            manifest["tables"][0]["sweeps"] = sweeps.clone();
        });
        miscount(files, more);
    })
}

/// Checks that every server reports the delta as corrupted.
fn assert_refused(number: usize, files: &Files) {
    let met = meet(files);
    for result in [met.polled, met.opened, met.anew] {
        let error = result.expect_err(&format!("lie {number}"));
        assert_eq!(error.kind(), Kind::Corruption, "lie {number}: {error}");
        assert!(error.path().is_some(), "lie {number}: {error}");
    }
}

/// Checks that every server of the delta serves these rows.
fn assert_served(what: &str, files: &Files, rows: &Served) {
    let met = meet(files);
    for result in [met.polled, met.opened, met.anew] {
        assert!(result.unwrap_or_else(|error| panic!("{what}: {error}")) == *rows, "{what}");
    }
}

/// The seed's delta is served, and so is a delta that differs from it only in parts that are not served.
#[test]
fn seed_delta_and_equivalent_deltas_are_served() {
    assert_served("the seed", &seed().delta, &truth(false));
    let other_seed = with_manifests(|manifest| manifest["tables"][0]["spec"]["seed"] = json!(3));
    assert_served("births", &other_seed, &truth(false));
    let other_step = with_manifests(|manifest| manifest["tables"][0]["spec"]["step"] = json!(0));
    assert_served("steps that go back", &other_step, &truth(false));
    let steps = with_column("last_step", |steps| steps.fill(0xff));
    assert_served("rows of the last step that there can be", &steps, &truth(false));
    // A reader of all buckets does not use their starts.
    let starts = with_column("bucket_offsets", |starts| {
        let last = starts.len() - 4;
        starts[..last].fill(0);
    });
    assert_served("buckets", &starts, &truth(false));
    let met = meet(&with_column("weight", |weights| weights.fill(0xff)));
    let (polled, anew) = (met.polled.unwrap(), met.anew.unwrap());
    assert!(polled == anew && polled == met.opened.unwrap(), "weights that are no numbers are served bit for bit");
    assert!(polled[0].iter().any(|(_, row)| row.iter().all(|bits| *bits == u32::MAX)));
}

#[test]
fn a_delta_whose_manifests_lie_is_refused() {
    let spec = |field: &'static str, to: Value| {
        with_manifests(move |manifest| manifest["tables"][0]["spec"][field] = to.clone())
    };
    let parent = |name: &'static str| with_coordinator(move |manifest| manifest["parent"]["name"] = name.into());
    let kind = |kind: &'static str| {
        with_coordinator(move |manifest| {
            (manifest["kind"], manifest["parent"]) = (kind.into(), Value::Null);
        })
    };
    let lies = [
        spec("dim", json!(5)),
        spec("dim", json!(0)),
        spec("dtype", json!("F16")),
        spec("precision", json!("fp32")),
        spec("key", json!(5)),
        spec("total_num_buckets", json!(8)),
        spec("optimizer", json!({"name": "sgd", "hyperparameters": {}})),
        spec("table", json!("c")),
        with_coordinator(|manifest| manifest["next_epoch"] = json!(0)),
        kind("full"),
        kind("serving"),
        kind("delta"),
        parent("0000000002-0000000000000008"),
        parent("0000000003-0000000000000009"),
        parent("0000000001-0000000000000099"),
        parent("../0000000001-0000000000000007"),
        parent(""),
        with_coordinator(|manifest| manifest["made_from"] = manifest["parent"].clone()),
        with_coordinator(|manifest| manifest["merged"] = manifest["parent"].clone()),
        with_coordinator(|manifest| manifest["seq"] = json!(3)),
        with_manifests(|manifest| manifest["name"] = json!("0000000003-0000000000000009")),
        with_manifests(|manifest| manifest["tables"].as_array_mut().unwrap().swap(0, 1)),
        with_manifests(|manifest| _ = manifest["tables"].as_array_mut().unwrap().pop()),
        with_manifests(|manifest| {
            let table = manifest["tables"][0].clone();
            manifest["tables"].as_array_mut().unwrap().push(table);
        }),
        with(|files| miscount(files, 1 << 57)),
        // A rank has one table twice, and not the other.
        with(|files| {
            manifests(files, |path, manifest| {
                if path.ends_with("0-of-2.json") {
                    manifest["tables"][1] = manifest["tables"][0].clone();
                }
            });
        }),
    ];
    for (number, files) in lies.iter().enumerate() {
        assert_refused(number, files);
    }
    // Servers do not read a linked checkpoint's other manifests.
    let met = meet(&kind("linked"));
    for result in [met.polled, met.opened, met.anew] {
        assert_eq!(result.expect_err("a linked checkpoint").kind(), Kind::Mismatch);
    }
    // The parent has a manifest that differs from the one in the delta, with a valid checksum.
    let mut files = seed().delta.clone();
    let path = of_delta(&files, false).into_iter().find(|path| path.ends_with("manifest.json")).unwrap();
    let mut manifest = value(&files[&path]).unwrap();
    manifest.as_object_mut().unwrap().remove("xxh3");
    manifest["parent"]["manifest_xxh3"] = json!(5);
    files.insert(path, sealed(&manifest));
    assert_refused(lies.len(), &files);
}

#[test]
fn a_delta_whose_data_files_lie_is_refused() {
    let file = |change: &dyn Fn(&mut Vec<u8>)| {
        with(|files| {
            let path = of_delta(files, true).remove(0);
            change(files.get_mut(&path).unwrap());
        })
    };
    let count = |field: &'static str, more: i64| {
        with(move |files| {
            manifests(files, |path, manifest| match path.file_name().and_then(|name| name.to_str()) {
                Some("manifest.json") => add(&mut manifest["tables"][0][field], more),
                Some("0-of-2.json") => add(&mut manifest["tables"][0]["files"][0]["groups"][0][field], more),
                _ => {}
            });
        })
    };
    let header = |tensor: &'static str, field: &'static str, to: Value| {
        file(&move |bytes| {
            let mut header = value(bytes).unwrap();
            header[tensor][field] = to.clone();
            set_header(bytes, &header);
        })
    };
    let lies = [
        count("rows", 1),
        count("rows", -1),
        count("rows", 1 << 31),
        count("tombstones", 1),
        header("weight", "data_offsets", json!([1_u64 << 40, (1_u64 << 40) + 96])),
        header("weight", "data_offsets", json!([0, 96])),
        header("weight", "data_offsets", json!([u64::MAX, 0])),
        header("weight", "dtype", json!("F16")),
        header("weight", "shape", json!([1_u64 << 40, 4])),
        file(&|bytes| bytes.truncate(bytes.len() - 4096)),
        file(&|bytes| bytes.truncate(8)),
        file(&Vec::clear),
        file(&|bytes| bytes.extend([0; 4096])),
        with_column("bucket_offsets", |starts| {
            let last = starts.len() - 4;
            starts[last..].copy_from_slice(&99_u32.to_le_bytes());
        }),
        with_column("bucket_offsets", |starts| starts[..4].copy_from_slice(&1_u32.to_le_bytes())),
        with_column("id", |ids| ids.copy_within(0..8, 8)),
        with_column("id", |ids| ids[..16].rotate_left(8)),
        with_column("id", |ids| ids[..8].copy_from_slice(&i64::MAX.to_le_bytes())),
        with(|files| {
            // The id is of a bucket of the other rank.
            let paths = of_delta(files, true);
            let other: Vec<u8> = column(files.get_mut(paths.last().unwrap()).unwrap(), "id")[..8].to_vec();
            column(files.get_mut(&paths[0]).unwrap(), "id")[..8].copy_from_slice(&other);
        }),
    ];
    for (number, files) in lies.iter().enumerate() {
        assert_refused(number, files);
    }
}

#[test]
fn false_row_count_serves_actual_rows_or_is_rejected() {
    for more in [1, -1, 1 << 50] {
        let met = meet(&with(|files| miscount(files, more)));
        for found in [met.polled, met.opened] {
            match found {
                // Applying a delta to an index reads only the delta, and does not count the previous rows.
                Ok(rows) => assert!(more.abs() == 1 && rows == truth(false), "{more}"),
                // The rows of the delta cannot lead to this count.
                Err(error) => assert_eq!((more, error.kind()), (1 << 50, Kind::Corruption), "{error}"),
            }
        }
        let error = met.anew.expect_err("who makes an index counts them");
        assert_eq!(error.kind(), Kind::Corruption, "{error}");
    }
}

#[test]
fn invalid_eviction_rules_are_rejected_or_applied_literally() {
    let last = u64::MAX;
    let rule = |rule: Value| json!([{"step": last, "rule": rule}]);
    let nested = |levels: usize| (0..levels).fold(json!({"last_step": last}), |inner, _| json!({"any": [inner]}));
    let unread = [
        rule(json!({"some": 1})),
        rule(json!("last_step")),
        rule(json!({"norm_below": null})),
        rule(json!({"last_step": -1})),
        rule(json!({"last_step": 0.5})),
        rule(json!({"last_step": 1, "norm_below": 1.0})),
        rule(json!({"score_below": {"below": 1.0}})),
        json!([{"rule": {"last_step": 1}}]),
        json!({"step": 1}),
    ];
    for (number, sweeps) in unread.iter().enumerate() {
        assert_refused(number, &with_sweeps(sweeps, 0));
    }
    let takes_none = [
        rule(json!({"any": []})),
        rule(json!({"norm_below": 0.0})),
        rule(json!({"all": [{"any": []}, {"last_step": last}]})),
        rule(json!({"score_below": {"below": -3e38, "half_life": 0}})),
    ];
    for sweeps in &takes_none {
        assert_served(&sweeps.to_string(), &with_sweeps(sweeps, 0), &truth(false));
    }
    // All rows that are not in the delta have expired.
    let taken = truth(true)[0].len() as i64 - truth(false)[0].len() as i64;
    let takes_all = [
        rule(json!({"last_step": last})),
        rule(json!({"all": []})),
        rule(json!({"norm_below": -1e300})),
        rule(json!({"score_below": {"below": 3e38, "half_life": 0}})),
        rule(nested(40)),
    ];
    for sweeps in &takes_all {
        assert_served(&sweeps.to_string(), &with_sweeps(sweeps, taken), &truth(true));
    }
}

/// Two sweeps expire the same rows for every reader, also if the later sweep alone would expire fewer rows.
#[test]
fn two_sweeps_expire_same_rows_for_every_reader() {
    let taken = truth(true)[0].len() as i64 - truth(false)[0].len() as i64;
    let sweep = |below: f64| json!({"step": u64::MAX, "rule": {"norm_below": below}});
    for (one, other) in [(1e9, 0.0), (-1e9, 0.0)] {
        let both = with_sweeps(&json!([sweep(one), sweep(other)]), taken);
        assert_served(&format!("norms below {one} and then below {other}"), &both, &truth(true));
    }
}

/// Copies an id of one group over an id of the next group, so that both are in order.
fn say_twice(files: &mut Files) {
    let (paths, bucketing) = (of_delta(files, true), tables()[0].spec.bucketing());
    let read =
        |bytes: &[u8]| -> Vec<Id> { bytes.chunks(8).map(|id| Id::from_le_bytes(id.try_into().unwrap())).collect() };
    let from = read(column(files.get_mut(&paths[0]).unwrap(), "id"));
    let into = column(files.get_mut(&paths[0]).unwrap(), "id.1");
    let ids = read(into);
    let with = |at: usize, id: Id| ids.iter().enumerate().map(move |(n, &other)| if n == at { id } else { other });
    let is_in_order = |at: usize, id: Id| with(at, id).is_sorted_by_key(|id| (bucketing.of(id), id as u64));
    let places = (0..ids.len()).flat_map(|at| from.iter().map(move |&id| (at, id)));
    let (at, id) = places.into_iter().find(|&(at, id)| is_in_order(at, id)).expect("an id that fits");
    into[at * 8..][..8].copy_from_slice(&id.to_le_bytes());
}

#[test]
fn a_delta_that_has_an_id_in_two_groups_is_refused_by_all_servers() {
    // There is one row less if the number of rows is to be right.
    for more in [0, -1] {
        let met = meet(&with(|files| {
            say_twice(files);
            miscount(files, more);
        }));
        for result in [met.polled, met.opened, met.anew] {
            let error = result.expect_err("no server knows which of the two rows counts");
            assert_eq!(error.kind(), Kind::Corruption, "{error}");
            assert!(error.to_string().contains("how often id"), "{error}, with {more} rows more");
        }
    }
}
