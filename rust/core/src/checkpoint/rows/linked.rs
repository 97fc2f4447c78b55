//! Tables whose SSD tier's segments are in a linked checkpoint. A load links the segments back, or reads them row by
//! row and converts the rows to columns, like those that readers of data files deliver.

use std::ops::Range;

use super::reader::OpenCheckpoint;
use crate::cache::RowColumns;
use crate::checkpoint::manifest::manifests::{RankManifest, RankShare};
use crate::checkpoint::manifest::{rank_file, segment_file, table_dir};
use crate::error::{Error, Kind, Result};
use crate::rows::RowRef;
use crate::ssd::{LinkedSegments, SegmentSet, ShardIdentity};
use crate::types::{BucketMapper, Id};

impl OpenCheckpoint {
    /// Opens the segments of a rank's shard of a table, with checked footers.
    pub(crate) fn segment_files(
        &self,
        rank: &RankManifest,
        share: &RankShare,
        set: &SegmentSet,
    ) -> Result<LinkedSegments> {
        let spec = &share.spec;
        let layout = spec.row_layout()?;
        let identity = ShardIdentity {
            table: spec.table.clone(),
            key: spec.key,
            dim: u64::from(spec.dim),
            optimizer: spec.optimizer.name.clone(),
            seed: spec.seed,
            initializer: format!("{:?}", spec.initializer),
            total_num_buckets: spec.total_num_buckets,
            bucket_begin: share.bucket_begin,
            bucket_end: share.bucket_end,
        };
        let dir = self.directory().join(table_dir(&spec.module, &spec.table));
        LinkedSegments::open(
            self.directory().shared_engine(),
            (identity, layout),
            set,
            |serial| dir.join(segment_file(rank.rank, rank.world, serial)),
            self.directory().join(rank_file(rank.rank, rank.world)),
        )
    }

    /// Returns the segments from which a table with exactly these buckets can be opened. `None` if the rows of the
    /// buckets are in data files.
    ///
    /// Errors: `Mismatch` if segments also contain rows of other buckets, or only of some; `Corruption` as
    /// [`LinkedSegments::open`].
    pub fn segments_of(&self, module: &str, table: &str, buckets: &Range<u32>) -> Result<Option<LinkedSegments>> {
        let mut found = None;
        for rank in &self.ranks {
            for share in rank.shares_of(module, table) {
                let Some(set) = &share.segments else { continue };
                let owned = share.buckets();
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

    /// Returns the error of a load that cannot use the segments of a linked checkpoint, for `reason`.
    pub fn only_for_same_ranks(&self, reason: &str) -> Error {
        let (dir, world) = (self.directory().path(), self.ranks.len());
        let root = dir.parent().unwrap_or(dir).display();
        Error::new(
            Kind::Mismatch,
            format!(
                "{} is a linked checkpoint of {world} ranks, for a restart of the same ranks, and {reason}: make it one that \
                 any ranks load by `embcache compact {root}`, or another directory of it by `embcache reshard`",
                dir.display()
            ),
        )
    }
}

/// Rows that are being collected into columns.
#[derive(Debug, Default)]
struct SegmentColumns {
    ids: Vec<Id>,
    last_steps: Vec<u64>,
    counts: Vec<u32>,
    scores: Vec<f32>,
    scalars: Vec<f32>,
    modified_epochs: Vec<u32>,
    parts: Vec<Vec<f32>>,
}

impl SegmentColumns {
    fn push(&mut self, row: RowRef<'_>) {
        let header = row.header;
        self.ids.push(header.id);
        self.last_steps.push(header.last_step);
        self.counts.push(header.count);
        self.scores.push(header.score);
        self.scalars.push(header.scalar);
        self.modified_epochs.push(header.modified_epoch);
        let dim = row.vector.len() / self.parts.len();
        self.parts.iter_mut().zip(row.vector.chunks_exact(dim)).for_each(|(part, from)| part.extend_from_slice(from));
    }

    fn clear(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        *self = Self { parts, ..Self::default() };
        self.parts.iter_mut().for_each(Vec::clear);
    }

    fn columns(&self, has_scalars: bool) -> RowColumns<'_> {
        RowColumns {
            ids: &self.ids,
            last_steps: &self.last_steps,
            counts: &self.counts,
            scores: &self.scores,
            scalars: has_scalars.then_some(&self.scalars),
            modified_epochs: &self.modified_epochs,
            parts: self.parts.iter().map(Vec::as_slice).collect(),
        }
    }
}

/// Passes the rows of `buckets` in segments to `sink`, as columns of about `bytes`.
pub(crate) fn read_segments(
    files: &LinkedSegments,
    buckets: &Range<u32>,
    bucketing: BucketMapper,
    bytes: usize,
    sink: &mut dyn FnMut(&RowColumns<'_>) -> Result<()>,
) -> Result<()> {
    let layout = files.layout();
    let max_rows = (bytes / (layout.floats() * 4 + 32)).max(1);
    let mut collected =
        SegmentColumns { parts: vec![Vec::new(); 1 + layout.vector_slots], ..SegmentColumns::default() };
    files.read(&mut |row| {
        if buckets.contains(&bucketing.of(row.header.id)) {
            collected.push(row);
        }
        if collected.ids.len() < max_rows {
            return Ok(());
        }
        sink(&collected.columns(layout.scalar_slot))?;
        collected.clear();
        Ok(())
    })?;
    if collected.ids.is_empty() { Ok(()) } else { sink(&collected.columns(layout.scalar_slot)) }
}
