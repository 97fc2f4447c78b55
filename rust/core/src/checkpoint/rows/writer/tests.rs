use super::TOMBSTONES_PER_FILE;
use crate::checkpoint::manifest::manifests::{CheckpointKind, RankShare};

#[test]
fn a_file_with_too_many_tombstones_is_rejected() {
    let share = |tombstones: usize| -> RankShare {
        let file = serde_json::json!({"rows": 0, "tombstones": tombstones, "bytes": 1_u64 << 40, "header_crc32c": 0, "checksums_crc32c": 0});
        let optimizer = serde_json::json!({"name": "sgd", "hyperparameters": {}});
        let spec = serde_json::json!({
            "module": "m", "table": "t", "key": 1, "dim": 2, "dtype": "F32", "optimizer": optimizer, "step": 1, "seed": 1,
            "initializer": {"name": "constant", "value": 0.0}, "total_num_buckets": 7, "missing_read": "initial",
        });
        let share =
            serde_json::json!({"spec": spec, "bucket_begin": 0, "bucket_end": 7, "total_rows": 0, "files": [file]});
        serde_json::from_value(share).expect("a share")
    };
    assert_eq!(share(TOMBSTONES_PER_FILE).check(CheckpointKind::Delta), Ok(()));
    let rejected = share(TOMBSTONES_PER_FILE + 1).check(CheckpointKind::Delta);
    assert_eq!(rejected, Err("a file's counts are out of range".into()));
}
