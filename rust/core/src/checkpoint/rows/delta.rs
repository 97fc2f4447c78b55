//! A table's part of a delta: the rows modified since a base checkpoint, and tombstones of removed ids.

use std::ops::Range;

use super::format::{ColumnField, FileLayout};
use super::image::image_of;
use super::source::RowSource;
use super::writer::RankWriter;
use crate::checkpoint::manifest::manifests::{DataFile, DataShape, TableSpec};
use crate::checkpoint::manifest::names::TOMBSTONES_PER_FILE;
use crate::error::{Error, Kind, Result};
use crate::io::AlignedBuf;
use crate::lifecycle::ExpirySweep;
use crate::types::Id;

/// The changes of one rank's shard of a table in a delta, other than modified rows.
#[derive(Clone, Copy, Debug)]
pub struct DeltaChanges<'a> {
    /// Ids removed since the parent, in any order. An id with a row in the delta was inserted again. Expired rows that
    /// were not modified since the parent may be omitted.
    pub tombstones: &'a [Id],
    /// The sweeps since the parent.
    pub sweeps: &'a [ExpirySweep],
    /// Number of rows of the entire shard, including unchanged ones.
    pub total_rows: u64,
}

impl RankWriter {
    /// Writes a table into a delta. `rows` are the rows modified since the parent. Otherwise like
    /// [`Self::write_table`].
    pub fn write_changes(
        &mut self,
        spec: TableSpec,
        buckets: Range<u32>,
        rows: &mut dyn RowSource,
        changes: DeltaChanges<'_>,
    ) -> Result<u64> {
        let bucketing = spec.bucketing();
        let written = self.write_table(spec, buckets.clone(), rows)?;
        let mut left: Vec<(u32, u64)> = changes.tombstones.iter().map(|&id| (bucketing.of(id), id as u64)).collect();
        left.sort_unstable();
        left.dedup();
        if let Some((bucket, id)) = left.iter().find(|(bucket, _)| !buckets.contains(bucket)) {
            let what = format!("tombstone {} is of bucket {bucket}, which is not within {buckets:?}", *id as Id);
            return Err(Error::new(Kind::Input, what));
        }
        for left in left.chunks(TOMBSTONES_PER_FILE) {
            let ids: Vec<Id> = left.iter().map(|(_, id)| *id as Id).collect();
            self.append_file(|spec, buckets| tombstone_file(spec, buckets, &ids))?;
        }
        self.set_changes(changes.total_rows, changes.sweeps);
        Ok(written)
    }
}

/// Builds a file with tombstones and no rows. `ids` are in file order.
fn tombstone_file(spec: &TableSpec, buckets: &Range<u32>, ids: &[Id]) -> Result<(AlignedBuf, DataFile)> {
    let shape = DataShape { rows: 0, buckets: buckets.len(), tombstones: ids.len() };
    let layout = FileLayout::new(spec.optimizer_kind()?, spec.dim as usize, spec.precision, shape)
        .ok_or_else(|| Error::new(Kind::Input, "the size of the tombstones overflows"))?;
    image_of((&layout, shape), &layout.header(spec, buckets), |field, column| {
        if field == ColumnField::Tombstone {
            column.copy_from_slice(bytemuck::cast_slice(ids));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::TOMBSTONES_PER_FILE;
    use crate::checkpoint::manifest::manifests::{CheckpointKind, RankShare};

    #[test]
    fn a_file_of_more_tombstones_than_any_save_writes_is_refused() {
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
        let refused = share(TOMBSTONES_PER_FILE + 1).check(CheckpointKind::Delta);
        assert_eq!(refused, Err("a file's counts are out of range".into()));
    }
}
