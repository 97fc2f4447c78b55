//! Tables whose SSD tiers' segments are in a linked checkpoint. A load links the segments back, or reads them row by row.

use std::collections::BTreeMap;
use std::ops::Range;

use super::reader::Checkpoint;
use super::writer::RankWriter;
use crate::cache::Table;
use crate::checkpoint::manifest::manifests::{RankManifest, Share, TableSpec};
use crate::checkpoint::manifest::names::{rank_file, segment_file, table_dir};
use crate::error::{Error, Kind, Result};
use crate::ssd::{Identity, LinkedBytes, SegmentFiles, SegmentSet};

/// What a linked checkpoint has of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkedTable {
    /// How many rows it has.
    pub rows: u64,
    /// How many bytes of its segments were linked, and how many were copied.
    pub bytes: LinkedBytes,
}

impl RankWriter {
    /// Put every row of a table, as of now, into a linked checkpoint. Of a table with an SSD tier these are the tier's segments, which are
    /// linked where the file system can do that and copied otherwise. Of another table the rows are written. `module` is the path of the
    /// table's module in the model.
    ///
    /// Errors: those of [`RankWriter::write_rows_of`], and those of handing rows in RAM down to the SSD tier.
    pub fn link_rows_of(
        &mut self,
        module: &str,
        table: &Table,
        hyperparameters: BTreeMap<String, f64>,
    ) -> Result<LinkedTable> {
        let Some((held, counters)) = table.hold_segments()? else {
            let rows = self.write_rows_of(module, table, hyperparameters)?;
            return Ok(LinkedTable { rows, bytes: LinkedBytes::default() });
        };
        let config = table.config();
        let spec = TableSpec::new(module, config, hyperparameters, counters.step);
        let set = held.set().clone();
        let rows = set.rows;
        let bytes =
            self.write_segments(spec, config.buckets.clone(), set, |engine, path_of| held.link_to(engine, path_of))?;
        Ok(LinkedTable { rows, bytes })
    }
}

impl Checkpoint {
    /// The segments that a rank's share of a table consists of, checked as far as their footers go.
    pub(crate) fn segment_files(&self, rank: &RankManifest, share: &Share, set: &SegmentSet) -> Result<SegmentFiles> {
        let spec = &share.spec;
        let layout = spec.optimizer_kind()?.layout(spec.dim as usize);
        let identity = Identity {
            table: spec.table.clone(),
            key: spec.key,
            dim: u64::from(spec.dim),
            optimizer: spec.optimizer.name.clone(),
            seed: spec.seed,
            initializer: format!("{:?}", spec.initializer),
            total_num_buckets: spec.total_num_buckets,
            bucket_hash: spec.bucket_hash,
            bucket_begin: share.bucket_begin,
            bucket_end: share.bucket_end,
        };
        let dir = self.dir().join(table_dir(&spec.module, &spec.table));
        SegmentFiles::open(
            self.engine.clone(),
            (identity, layout),
            set,
            |serial| dir.join(segment_file(rank.rank, rank.world, serial)),
            self.dir().join(rank_file(rank.rank, rank.world)),
        )
    }

    /// The segments that a table with exactly these buckets can be opened from. `None` where the rows of the buckets are in data files.
    ///
    /// Errors: `Mismatch` where segments hold the rows of other buckets too, or some only; `Corruption` as [`SegmentFiles::open`].
    pub fn segments_of(&self, module: &str, table: &str, buckets: &Range<u32>) -> Result<Option<SegmentFiles>> {
        let mut found = None;
        for rank in &self.ranks {
            for share in rank.tables.iter().filter(|share| share.spec.module == module && share.spec.table == table) {
                let Some(set) = &share.segments else { continue };
                let owned = share.bucket_begin..share.bucket_end;
                if owned == *buckets {
                    found = Some((rank, share, set));
                } else if buckets.start.max(owned.start) < buckets.end.min(owned.end) {
                    let what =
                        format!("holds buckets {owned:?} of table {table:?} together, and this rank owns {buckets:?}");
                    return Err(self.only_for_same_ranks(&what));
                }
            }
        }
        found.map(|(rank, share, set)| self.segment_files(rank, share, set)).transpose()
    }

    /// The error of a load that cannot use the segments of a linked checkpoint; `what` says why.
    pub fn only_for_same_ranks(&self, what: &str) -> Error {
        let (dir, world) = (self.dir(), self.ranks.len());
        let root = dir.parent().unwrap_or(dir).display();
        Error::new(
            Kind::Mismatch,
            format!(
                "{} is a linked checkpoint (kind snapshot) of {world} ranks, for a restart of the same ranks, and {what}: make it one that \
                 any ranks load by `embcache compact {root}`, or another directory of it by `embcache reshard`",
                dir.display()
            ),
        )
    }
}
