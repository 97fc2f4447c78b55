use super::TOMBSTONES_PER_GROUP;
use crate::checkpoint::manifest::manifests::{CheckpointKind, RankShare};

#[test]
fn a_group_with_too_many_tombstones_is_rejected() {
    let share = |tombstones: usize| -> RankShare {
        let group = serde_json::json!({
            "offset": 4096, "rows": 0, "tombstones": tombstones, "bucket_begin": 0, "bucket_end": 7, "checksums_crc32c": 0,
        });
        let file = serde_json::json!({
            "bytes": 1_u64 << 40, "header_crc32c": 0, "column_begin": 0, "column_end": 2, "groups": [group],
        });
        let optimizer = serde_json::json!({"name": "sgd", "hyperparameters": {}});
        let spec = serde_json::json!({
            "module": "m", "table": "t", "key": 1, "dim": 2, "dtype": "F32", "optimizer": optimizer, "step": 1, "seed": 1,
            "initializer": {"name": "constant", "value": 0.0}, "total_num_buckets": 7, "missing_read": "initial",
        });
        let share =
            serde_json::json!({"spec": spec, "bucket_begin": 0, "bucket_end": 7, "total_rows": 0, "files": [file]});
        serde_json::from_value(share).expect("a share")
    };
    assert_eq!(share(TOMBSTONES_PER_GROUP).check(CheckpointKind::Delta), Ok(()));
    let rejected = share(TOMBSTONES_PER_GROUP + 1).check(CheckpointKind::Delta);
    assert_eq!(rejected, Err("a group's counts or buckets are out of range".into()));
}
