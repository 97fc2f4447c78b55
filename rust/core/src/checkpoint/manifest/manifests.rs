//! Manifests of a checkpoint: one per rank, which lists the files of its tables and of its dense state, and the
//! coordinator's, which is merged from them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::latest::CheckpointName;
use super::spec::{MAX_COUNT, TableSpec};
use super::{
    CHUNK_BYTES, FORMAT, MANIFEST_FILE, RankDigest, TOMBSTONES_PER_GROUP, VERSION, checksum, inconsistent, parse,
    rank_file, render, unseal,
};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::error::{Error, Result};
use crate::io::{ALIGNMENT, IoEngine, read_file};
use crate::lifecycle::{ExpirySweep, StepClock};
use crate::ssd::SegmentSet;
use crate::types::buckets_of_rank;

/// Larger manifests are rejected before they are read.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 256 << 20;
/// Maximum number of groups of a data file. Bounds its header.
pub(crate) const MAX_GROUPS_PER_FILE: usize = 64;
/// Bytes of a stream per checksum.
pub(crate) const STREAM_CHUNK_BYTES: usize = 256 << 10;
/// The file in the checkpoint's directory that describes the extents.
pub(crate) const DENSE_FILE: &str = "dense.json";
/// Subdirectory of the checkpoint that contains the dense data files.
pub(crate) const DENSE_DIR: &str = "dense";
/// Size of the checksum page at the end of a file.
pub(crate) const CHECKSUM_PAGE_BYTES: usize = ALIGNMENT;
/// Maximum bytes of a stream per file: one chunk per checksum that fits the page.
pub(crate) const DENSE_FILE_BYTES: u64 = (CHECKSUM_PAGE_BYTES / 4 * STREAM_CHUNK_BYTES) as u64;

/// Contents and format of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckpointKind {
    /// Every row.
    Full,
    /// Rows modified since the parent, and tombstones of rows removed since then.
    Delta,
    /// Every row, for a restart of the same ranks: a table with an SSD tier is stored as the tier's segments.
    Linked,
    /// Every row without optimizer state, for serving. Weights may have a smaller dtype. Training cannot resume from
    /// it.
    Serving,
}

impl CheckpointKind {
    /// Name in manifests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Delta => "delta",
            Self::Linked => "linked",
            Self::Serving => "serving",
        }
    }
}

/// Identifies a checkpoint, such as the base of a delta.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointId {
    /// Name of its directory.
    pub name: String,
    /// XXH3 of its manifest.
    pub manifest_xxh3: u64,
}

/// The buckets of a table that one rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BucketShare {
    /// The rank.
    pub rank: u32,
    /// Its first bucket; `bucket_end` is exclusive.
    pub bucket_begin: u32,
    /// End of its buckets.
    pub bucket_end: u32,
}

impl BucketShare {
    /// The shares of `world` ranks among which `total` buckets are divided in order.
    fn of_all_ranks(total: u32, world: u32) -> impl Iterator<Item = Self> {
        (0..world).map(move |rank| {
            let Range { start, end } = buckets_of_rank(total, rank, world);
            Self { rank, bucket_begin: start, bucket_end: end }
        })
    }
}

/// A table in the coordinator's manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableEntry {
    /// The table.
    pub spec: TableSpec,
    /// Number of rows of all ranks.
    pub rows: u64,
    /// Number of tombstones of all ranks; 0 except in a delta.
    pub tombstones: u64,
    /// Number of rows of the table: `rows`, plus in a delta the rows that are only in its base checkpoints.
    pub total_rows: u64,
    /// Number of pending ids with admission counts in this checkpoint. `None` if counts were not saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<u64>,
    /// The ranks that have buckets of the table, by bucket. Empty if the buckets are divided among all ranks in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<BucketShare>,
    /// In a delta: the sweeps since the parent. Rows of the base checkpoints that match one of them are expired.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweeps: Vec<ExpirySweep>,
    /// Times of the table's steps, if known: the maximum over all ranks.
    #[serde(default, skip_serializing_if = "StepClock::is_empty")]
    pub clock: StepClock,
}

/// `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointManifest {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// The checkpoint's directory.
    pub name: String,
    /// Its sequence number.
    pub seq: u64,
    /// Publication time in milliseconds since 1970, by the clock of the publishing machine.
    pub saved_unix_ms: u64,
    /// Kind of the checkpoint.
    pub kind: CheckpointKind,
    /// The checkpoint on which a delta is based; `None` for other kinds.
    pub parent: Option<CheckpointId>,
    /// The latest delta of the chain that this full checkpoint was merged from. Rows, steps and epochs are the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged: Option<CheckpointId>,
    /// The checkpoint from which a serving checkpoint was made; it is in another directory. The serving checkpoint has
    /// the merged rows of that chain. Deltas based on it can be applied to this checkpoint too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_from: Option<CheckpointId>,
    /// Rows whose `modified_epoch` is at least this were modified after this checkpoint.
    pub next_epoch: u32,
    /// [`CHUNK_BYTES`].
    pub chunk_bytes: u64,
    /// The ranks' manifests, by rank.
    pub ranks: Vec<RankDigest>,
    /// The tables, by (module, table).
    pub tables: Vec<TableEntry>,
    /// Tensors and objects outside the tables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense: Option<DenseEntry>,
}

/// The dense state in the coordinator's manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseEntry {
    /// Length and checksum of `dense.json`.
    pub metadata: RankDigest,
    /// Bytes of all ranks' streams.
    pub bytes: u64,
}

/// One rank's stream of dense state: bytes of any meaning (tensors, objects), as extents.
///
/// A rank's stream is divided into files `dense/<rank>-of-<world>.<n>.extents`. An extent starts at a multiple of
/// [`ALIGNMENT`] and may span several files. A file contains at most 256 MiB of the stream, a multiple of
/// [`ALIGNMENT`], followed by one page of that size with the CRC-32C of each 256 KiB, little-endian, padded with zeros.
///
/// The file `dense.json` describes the extents. The coordinator writes it, and its manifest contains the file's
/// checksum. The Rust core does not interpret it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseShare {
    pub(crate) files: Vec<DenseFile>,
}

/// A part of a rank's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseExtent {
    /// Offset in the stream.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The counts that determine the layout of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupShape {
    pub(crate) rows: usize,
    pub(crate) tombstones: usize,
    /// First bucket of its rows and tombstones; `bucket_end` is exclusive. Equal if it has none.
    pub(crate) bucket_begin: u32,
    pub(crate) bucket_end: u32,
    /// Number of buckets whose generations are stored; 0 except in the first group of counts.
    pub(crate) generations: usize,
}

/// A group of a data file in a rank's manifest: rows, tombstones, or admission counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GroupEntry {
    /// Offset of its first column in the file.
    pub(crate) offset: u64,
    pub(crate) rows: u64,
    pub(crate) tombstones: u64,
    /// First bucket of its rows and tombstones; `bucket_end` is exclusive. Equal if it has none.
    pub(crate) bucket_begin: u32,
    pub(crate) bucket_end: u32,
    /// CRC-32C of its tensor `checksums`.
    pub(crate) checksums_crc32c: u32,
}

impl GroupEntry {
    /// Shape of a group with the generations of this number of buckets.
    pub(crate) fn shape(&self, generations: usize) -> GroupShape {
        let (rows, tombstones) = (self.rows as usize, self.tombstones as usize);
        GroupShape { rows, tombstones, bucket_begin: self.bucket_begin, bucket_end: self.bucket_end, generations }
    }

    /// Checks that its counts are in range. Bounds the size of one read for any manifest.
    fn check(&self, share: &RankShare) -> Result<(), String> {
        let owned = share.buckets();
        let is_within = owned.start <= self.bucket_begin
            && self.bucket_begin <= self.bucket_end
            && self.bucket_end <= owned.end
            && (self.bucket_begin < self.bucket_end || (self.rows, self.tombstones) == (0, 0));
        if is_within && u32::try_from(self.rows).is_ok() && self.tombstones <= TOMBSTONES_PER_GROUP as u64 {
            return Ok(());
        }
        Err("a group's counts or buckets are out of range".into())
    }
}

/// A data file in a rank's manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DataFile {
    /// Length of the file.
    pub(crate) bytes: u64,
    /// CRC-32C of the header, including the length field.
    pub(crate) header_crc32c: u32,
    /// First of the table's columns that its vectors have; `column_end` is exclusive. 0 and 0 in a file of counts.
    pub(crate) column_begin: u32,
    pub(crate) column_end: u32,
    /// Its groups, by offset.
    pub(crate) groups: Vec<GroupEntry>,
}

impl DataFile {
    /// Number of rows, or of ids with counts.
    pub(crate) fn rows(&self) -> u64 {
        self.groups.iter().map(|group| group.rows).sum()
    }

    fn tombstones(&self) -> u64 {
        self.groups.iter().map(|group| group.tombstones).sum()
    }

    fn check(&self, share: &RankShare, columns: u32) -> Result<(), String> {
        if (self.column_begin, self.column_end) != (0, columns) {
            return Err(format!(
                "a file has columns {}..{} of {columns}: this release reads whole rows",
                self.column_begin, self.column_end
            ));
        }
        let ascend = self.groups.is_sorted_by(|before, after| before.offset < after.offset);
        if self.bytes > MAX_COUNT || !ascend || !(1..=MAX_GROUPS_PER_FILE).contains(&self.groups.len()) {
            return Err("a file's length or groups are out of range".into());
        }
        self.groups.iter().try_for_each(|group| group.check(share))
    }
}

/// A column of a table's data files that has values of each row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ColumnEntry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
}

/// One rank's shard of a table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RankShare {
    pub(crate) spec: TableSpec,
    /// First bucket that the rank owns; `bucket_end` is exclusive.
    pub(crate) bucket_begin: u32,
    pub(crate) bucket_end: u32,
    /// Number of rows of the shard, including in a delta the rows that are only in its base checkpoints.
    pub(crate) total_rows: u64,
    /// Columns of the data files, in file order. Empty in a linked checkpoint's segments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) columns: Vec<ColumnEntry>,
    pub(crate) files: Vec<DataFile>,
    /// Admission counts of pending ids, if they were saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) counts: Option<CountsShare>,
    /// Sweeps of a delta, the same on all ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) sweeps: Vec<ExpirySweep>,
    /// Times of the table's steps on this rank, if known.
    #[serde(default, skip_serializing_if = "StepClock::is_empty")]
    pub(crate) clock: StepClock,
    /// In a linked checkpoint, instead of data files: the segments of an SSD tier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) segments: Option<SegmentSet>,
}

/// Admission counts of pending ids in one rank's shard of a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CountsShare {
    /// True if clicks are counted too.
    pub(crate) clicks: bool,
    /// The files. Their rows are ids.
    pub(crate) files: Vec<DataFile>,
}

impl RankShare {
    /// Creates the entry of a shard without rows.
    pub(crate) fn new(spec: TableSpec, buckets: &Range<u32>) -> Self {
        Self {
            spec,
            bucket_begin: buckets.start,
            bucket_end: buckets.end,
            total_rows: 0,
            columns: Vec::new(),
            files: Vec::new(),
            counts: None,
            sweeps: Vec::new(),
            clock: StepClock::default(),
            segments: None,
        }
    }

    /// The buckets that the rank owns.
    pub(crate) fn buckets(&self) -> Range<u32> {
        self.bucket_begin..self.bucket_end
    }

    pub(crate) fn rows(&self) -> u64 {
        let in_files: u64 = self.files.iter().map(DataFile::rows).sum();
        in_files + self.segments.as_ref().map_or(0, |set| set.rows)
    }

    fn tombstones(&self) -> u64 {
        self.files.iter().map(DataFile::tombstones).sum()
    }

    pub(crate) fn check(&self, kind: CheckpointKind) -> Result<(), String> {
        self.spec.check().map_err(|e| e.to_string())?;
        if self.spec.precision.is_some() != (kind == CheckpointKind::Serving) {
            return Err("the tables of a serving checkpoint have a precision, and no others".into());
        }
        self.spec.check_buckets(&self.buckets())?;
        if self.clock.last_step() > self.spec.step {
            return Err(format!(
                "step times up to {}, of a table that made {}",
                self.clock.last_step(),
                self.spec.step
            ));
        }
        self.files.iter().try_for_each(|file| file.check(self, self.spec.dim))?;
        if kind != CheckpointKind::Delta && self.tombstones() > 0 {
            return Err(format!("a {} checkpoint has tombstones", kind.name()));
        }
        if kind != CheckpointKind::Delta && !self.sweeps.is_empty() {
            return Err(format!("a {} checkpoint has sweeps", kind.name()));
        }
        for file in self.counts.iter().flat_map(|counts| &counts.files) {
            file.check(self, 0)?;
            if file.tombstones() > 0 {
                return Err("a file of counts has tombstones".into());
            }
        }
        if let Some(set) = &self.segments {
            if kind != CheckpointKind::Linked || !self.files.is_empty() {
                return Err("segments are in linked checkpoints only, and without files".into());
            }
            set.check()?;
        }
        if self.total_rows > MAX_COUNT || (kind != CheckpointKind::Delta && self.total_rows != self.rows()) {
            return Err(format!("a share of {} rows has {} in its files", self.total_rows, self.rows()));
        }
        if self.files.len() as u64 > u64::from(u32::MAX) || (self.bucket_begin == self.bucket_end && self.rows() > 0) {
            return Err("the number of files or rows is out of range".into());
        }
        Ok(())
    }
}

/// `<rank>-of-<world>.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RankManifest {
    pub(crate) format: String,
    pub(crate) version: u32,
    pub(crate) name: String,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) tables: Vec<RankShare>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) dense: Option<DenseShare>,
}

impl RankManifest {
    pub(crate) fn new(name: String, rank: u32, world: u32) -> Self {
        let (tables, dense) = (Vec::new(), None);
        Self { format: FORMAT.to_owned(), version: VERSION, name, rank, world, tables, dense }
    }

    /// Returns the rank's shard of a table: one, or none.
    pub(crate) fn shares_of<'a>(&'a self, module: &'a str, table: &'a str) -> impl Iterator<Item = &'a RankShare> {
        self.tables.iter().filter(move |share| share.spec.module == module && share.spec.table == table)
    }
}

/// Entry of a dense data file in a rank's manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DenseFile {
    /// Length of the file, including its checksum page.
    pub(crate) bytes: u64,
    /// CRC-32C of the checksum page.
    pub(crate) checksums_crc32c: u32,
}

impl DenseFile {
    /// Bytes of the stream in the file.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.bytes - CHECKSUM_PAGE_BYTES as u64
    }
}

impl DenseShare {
    /// Length of the stream in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(DenseFile::data_bytes).sum()
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let page = CHECKSUM_PAGE_BYTES as u64;
        let whole = |file: &DenseFile| {
            (2 * page..=DENSE_FILE_BYTES + page).contains(&file.bytes) && file.bytes.is_multiple_of(ALIGNMENT as u64)
        };
        match self.files.iter().position(|file| !whole(file)) {
            Some(n) => Err(format!("file {n} of extents cannot have {} bytes", self.files[n].bytes)),
            None => Ok(()),
        }
    }
}

impl CheckpointManifest {
    /// Serializes the manifest.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        render(self)
    }

    /// Checks everything that does not need the ranks' manifests. The message describes the problem.
    pub(crate) fn check(&self, name: CheckpointName) -> Result<(), String> {
        if self.name != name.to_string() || self.seq != name.seq {
            return Err(format!("it belongs to {:?}, number {}", self.name, self.seq));
        }
        if (self.kind == CheckpointKind::Delta) == self.parent.is_none() {
            return Err("a delta has a parent, and no other checkpoint has one".into());
        }
        if self.merged.is_some() && self.kind != CheckpointKind::Full {
            return Err("only a full checkpoint can be a merged one".into());
        }
        if self.made_from.is_some() != (self.kind == CheckpointKind::Serving) {
            return Err("a serving checkpoint was made from another one, and no other kind".into());
        }
        if self.chunk_bytes != CHUNK_BYTES as u64 {
            return Err(format!("chunk_bytes is {}", self.chunk_bytes));
        }
        if self.next_epoch == u32::MAX {
            return Err("the epochs are used up".into());
        }
        if self.ranks.is_empty() || self.ranks.len() as u64 > u64::from(u32::MAX) {
            return Err(format!("it has {} ranks", self.ranks.len()));
        }
        let specs = self.tables.iter().map(|entry| (&entry.spec.module, &entry.spec.table));
        if !specs.is_sorted_by(|before, after| before < after) {
            return Err("its tables are not in order, or one is there twice".into());
        }
        self.tables.iter().try_for_each(|entry| {
            entry.spec.check().map_err(|e| e.to_string())?;
            let TableSpec { module, table, step, .. } = &entry.spec;
            if entry.clock.last_step() > *step {
                return Err(format!("table {table:?} has step times up to {}", entry.clock.last_step()));
            }
            entry.check_shares(self.world()).map_err(|what| format!("table {table:?} of module {module:?}: {what}"))
        })
    }

    /// Number of ranks.
    pub(crate) fn world(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// Checks that a delta's rows and tombstones can be applied to the tables of `parent`. The message describes the
    /// mismatch.
    pub(crate) fn check_fits_parent(&self, parent: &Self) -> Result<(), String> {
        if parent.kind == CheckpointKind::Linked {
            return Err("on a linked checkpoint, and a delta builds on a full checkpoint or a delta".into());
        }
        if parent.kind == CheckpointKind::Serving {
            return Err("on a serving checkpoint, and a delta builds on what that was made from".into());
        }
        self.check_changes(parent)
    }

    /// Checks that this delta can be applied to the serving checkpoint `served`: both must be based on the same
    /// checkpoint. The message describes the mismatch.
    pub fn check_fits_served(&self, served: &Self) -> Result<(), String> {
        match (&self.parent, &served.made_from) {
            (Some(parent), Some(source)) if parent == source => self.check_changes(served),
            (_, source) => {
                let source = source.as_ref().map_or("none", |source| &source.name);
                Err(format!("on another checkpoint than {}, which {} was made from", source, served.name))
            }
        }
    }

    /// Checks that epochs and tables follow those of `before`. The precision of weights may differ.
    fn check_changes(&self, before: &Self) -> Result<(), String> {
        if self.next_epoch < before.next_epoch {
            return Err(format!("of epochs up to {}, below its parent's {}", self.next_epoch, before.next_epoch));
        }
        // Hyperparameters, seed, initializer and the values read for missing ids may change during training.
        let lasting = |TableEntry { spec, .. }: &TableEntry| {
            let TableSpec { module, table, key, dim, optimizer, total_num_buckets, .. } = spec.clone();
            (module, table, key, dim, optimizer.name, total_num_buckets)
        };
        let pairs = || self.tables.iter().zip(&before.tables);
        if let Some((new, _)) = pairs().find(|(new, old)| lasting(new) != lasting(old)) {
            return Err(format!("of a table {:?} that is not its parent's", new.spec.table));
        }
        if self.tables.len() != before.tables.len() {
            return Err(format!("of {} tables, of which its parent has {}", self.tables.len(), before.tables.len()));
        }
        match pairs().find(|(new, old)| !new.can_follow(old)) {
            Some((new, old)) => Err(format!(
                "by which table {:?} of {} rows has {}: {} rows and {} tombstones are in it",
                new.spec.table, old.total_rows, new.total_rows, new.rows, new.tombstones
            )),
            None => Ok(()),
        }
    }

    /// Checks that the ranks' manifests belong to this checkpoint, agree with it, and together contain every bucket of
    /// every table once.
    pub(crate) fn check_ranks(&self, ranks: &[RankManifest]) -> Result<(), String> {
        ranks.iter().enumerate().try_for_each(|(rank, manifest)| self.check_rank(rank as u32, manifest))?;
        if merge_tables(ranks, self.kind)? != self.tables {
            return Err("the ranks' manifests hold other tables, settings or counts".into());
        }
        if dense_bytes(ranks) == self.dense.map_or(0, |dense| dense.bytes) {
            Ok(())
        } else {
            Err("the ranks' manifests have other extents".into())
        }
    }

    /// Checks that the manifest of `rank` belongs to this checkpoint and agrees with it.
    pub(crate) fn check_rank(&self, rank: u32, manifest: &RankManifest) -> Result<(), String> {
        if manifest.name != self.name || manifest.rank != rank || manifest.world != self.world() {
            return Err(format!("the manifest of rank {rank} belongs to rank {} of {}", manifest.rank, manifest.name));
        }
        let mut shares: BTreeMap<(&str, &str), &RankShare> = BTreeMap::new();
        for share in &manifest.tables {
            share.check(self.kind)?;
            if shares.insert((&share.spec.module, &share.spec.table), share).is_some() {
                return Err(format!("rank {rank} has table {:?} twice", share.spec.table));
            }
        }
        for entry in &self.tables {
            let share = shares.remove(&(&*entry.spec.module, &*entry.spec.table));
            if share.map(RankShare::buckets) != entry.buckets_of(rank, self.world()) {
                return Err(format!("rank {rank} has other buckets of table {:?}", entry.spec.table));
            }
            if share.is_some_and(|share| share.spec != entry.spec || share.sweeps != entry.sweeps) {
                return Err(format!("rank {rank} has other settings, steps or sweeps of table {:?}", entry.spec.table));
            }
        }
        if let Some((_, table)) = shares.keys().next() {
            return Err(format!("rank {rank} has another table, {table:?}"));
        }
        let checked = manifest.dense.as_ref().map_or(Ok(()), DenseShare::check);
        checked.map_err(|what| format!("rank {rank}: {what}"))?;
        if manifest.dense.is_some() != self.dense.is_some() {
            return Err(format!("one of rank {rank} and the coordinator has extents"));
        }
        Ok(())
    }
}

impl TableEntry {
    /// The ranks that have buckets of the table, by bucket, in a checkpoint of `world` ranks.
    pub(crate) fn all_shares(&self, world: u32) -> Vec<BucketShare> {
        if self.shares.is_empty() {
            return BucketShare::of_all_ranks(self.spec.total_num_buckets, world).collect();
        }
        self.shares.clone()
    }

    /// The buckets that `rank` of `world` has; `None` if it does not have the table.
    fn buckets_of(&self, rank: u32, world: u32) -> Option<Range<u32>> {
        if self.shares.is_empty() {
            return Some(buckets_of_rank(self.spec.total_num_buckets, rank, world));
        }
        self.shares.iter().find(|share| share.rank == rank).map(|share| share.bucket_begin..share.bucket_end)
    }

    /// Checks that the shares contain every bucket once. The message describes the problem.
    fn check_shares(&self, world: u32) -> Result<(), String> {
        let (mut end, mut ranks) = (0, BTreeSet::new());
        for share in &self.shares {
            if share.bucket_begin != end || share.bucket_end < end || share.rank >= world || !ranks.insert(share.rank) {
                return Err(format!("the buckets of rank {} do not follow {end}", share.rank));
            }
            end = share.bucket_end;
        }
        if self.shares.is_empty() || end == self.spec.total_num_buckets {
            return Ok(());
        }
        Err(format!("no rank has the buckets from {end} on"))
    }

    /// True if these changes can lead from the rows of `before` to this entry's row count: each row is new or was there
    /// before, and without sweeps only rows with a tombstone are removed.
    fn can_follow(&self, before: &Self) -> bool {
        let maximum = before.total_rows.saturating_add(self.rows);
        let unswept = before.total_rows.saturating_sub(self.tombstones);
        let minimum = if self.sweeps.is_empty() { self.rows.max(unswept) } else { self.rows };
        (minimum..=maximum).contains(&self.total_rows)
    }
}

/// Bytes of all ranks' dense extents.
pub(crate) fn dense_bytes(ranks: &[RankManifest]) -> u64 {
    ranks.iter().filter_map(|manifest| manifest.dense.as_ref()).map(DenseShare::bytes).sum()
}

/// Number of pending ids with counts in these shares; `None` if no share has counts.
fn count_pending<'a>(shares: impl Iterator<Item = &'a RankShare>) -> Option<u64> {
    let counts = shares.filter_map(|share| share.counts.as_ref());
    counts.map(|counts| counts.files.iter().map(DataFile::rows).sum()).reduce(|a: u64, b| a + b)
}

/// Merges the tables of all ranks. The message describes a mismatch.
pub(crate) fn merge_tables(ranks: &[RankManifest], kind: CheckpointKind) -> Result<Vec<TableEntry>, String> {
    let mut tables: BTreeMap<(&str, &str), Vec<(usize, &RankShare)>> = BTreeMap::new();
    for (rank, manifest) in ranks.iter().enumerate() {
        for share in &manifest.tables {
            share.check(kind)?;
            let shares = tables.entry((&share.spec.module, &share.spec.table)).or_default();
            if shares.last().is_some_and(|&(last, _)| last == rank) {
                return Err(format!(
                    "rank {rank} has table {:?} of module {:?} twice",
                    share.spec.table, share.spec.module
                ));
            }
            shares.push((rank, share));
        }
    }
    tables.into_values().map(|shares| merge_shares(shares, ranks.len() as u32)).collect()
}

/// Merges the shards of a table, each with its rank, in a checkpoint of `world` ranks. The message describes a mismatch.
pub(crate) fn merge_shares(mut shares: Vec<(usize, &RankShare)>, world: u32) -> Result<TableEntry, String> {
    let (first_rank, first) = *shares.first().ok_or("a table without shards")?;
    let name = format!("table {:?} of module {:?}", first.spec.table, first.spec.module);
    if let Some((rank, _)) = shares.iter().find(|(_, share)| share.spec != first.spec) {
        return Err(format!(
            "{name}: ranks {first_rank} and {rank} have different settings or steps, or their OOV rows differ"
        ));
    }
    if let Some((rank, _)) = shares.iter().find(|(_, share)| share.sweeps != first.sweeps) {
        return Err(format!("{name}: ranks {first_rank} and {rank} have made different sweeps"));
    }
    shares.sort_by_key(|(_, share)| (share.bucket_begin, share.bucket_end));
    let mut end = 0;
    for (rank, share) in &shares {
        if share.bucket_begin != end {
            return Err(format!("{name}: bucket {end} is followed by {} (rank {rank})", share.bucket_begin));
        }
        end = share.bucket_end;
    }
    if end != first.spec.total_num_buckets {
        return Err(format!("{name}: no rank has the buckets from {end} on"));
    }
    let listed = |&(rank, share): &(usize, &RankShare)| BucketShare {
        rank: rank as u32,
        bucket_begin: share.bucket_begin,
        bucket_end: share.bucket_end,
    };
    let listed: Vec<BucketShare> = shares.iter().map(listed).collect();
    let in_order = BucketShare::of_all_ranks(end, world).eq(listed.iter().copied());
    Ok(TableEntry {
        spec: first.spec.clone(),
        rows: shares.iter().map(|(_, share)| share.rows()).sum(),
        tombstones: shares.iter().map(|(_, share)| share.tombstones()).sum(),
        total_rows: shares.iter().map(|(_, share)| share.total_rows).sum(),
        pending: count_pending(shares.iter().map(|(_, share)| *share)),
        shares: if in_order { Vec::new() } else { listed },
        sweeps: first.sweeps.clone(),
        clock: StepClock::join(shares.iter().map(|(_, share)| &share.clock)),
    })
}

/// The manifests of a checkpoint. Those of ranks are read when they are needed.
#[derive(Debug)]
pub(crate) struct CheckpointManifests {
    pub(crate) directory: CheckpointDirectory,
    /// The coordinator's.
    pub(crate) coordinator: CheckpointManifest,
    pub(crate) identity: CheckpointId,
    /// The ranks' manifests that were read.
    ranks: Vec<OnceLock<RankManifest>>,
}

impl CheckpointManifests {
    /// Reads and checks the coordinator's manifest of the checkpoint `name` in `directory`.
    pub(crate) fn open(directory: CheckpointDirectory, name: CheckpointName) -> Result<Self> {
        let (coordinator, identity) = read_manifest(&directory)?;
        coordinator.check(name).map_err(|what| inconsistent(&directory.join(MANIFEST_FILE), what))?;
        let ranks = coordinator.ranks.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { directory, coordinator, identity, ranks })
    }

    /// Returns the manifest of `rank`, checked against the coordinator's.
    pub(crate) fn rank(&self, rank: u32) -> Result<&RankManifest> {
        let read = &self.ranks[rank as usize];
        if let Some(manifest) = read.get() {
            return Ok(manifest);
        }
        let manifest = read_rank(&self.directory, &self.coordinator.ranks, rank)?;
        let path = self.directory.join(rank_file(rank, self.coordinator.world()));
        self.coordinator.check_rank(rank, &manifest).map_err(|what| inconsistent(&path, what))?;
        Ok(read.get_or_init(|| manifest))
    }

    /// Reads and checks the manifests of `part` of `parts` of the ranks, and with one part compares their dense state with
    /// the coordinator's.
    pub(crate) fn check(&self, part: u32, parts: u32) -> Result<()> {
        let ranks = (part..self.coordinator.world()).step_by(parts.max(1) as usize);
        let dense = ranks.map(|rank| Ok(self.rank(rank)?.dense.as_ref().map_or(0, DenseShare::bytes)));
        let dense: u64 = dense.sum::<Result<u64>>()?;
        if parts > 1 || dense == self.coordinator.dense.map_or(0, |dense| dense.bytes) {
            return Ok(());
        }
        Err(inconsistent(&self.directory.join(MANIFEST_FILE), "the ranks' manifests have other extents"))
    }
}

/// Reads the coordinator's manifest of the checkpoint in `dir`, verifies its seal, and returns it with its identity.
pub(crate) fn read_manifest(dir: &CheckpointDirectory) -> Result<(CheckpointManifest, CheckpointId)> {
    let path = dir.join(MANIFEST_FILE);
    let sealed = read_file(dir.engine(), &path, MAX_MANIFEST_BYTES)?;
    let manifest: CheckpointManifest = parse(&unseal(&sealed, &path)?, &path)?;
    let identity = CheckpointId { name: manifest.name.clone(), manifest_xxh3: checksum(&sealed) };
    Ok((manifest, identity))
}

/// Reads the manifest of `rank` and verifies it against its digest, one of all ranks'. `Corruption` if it is missing.
pub(crate) fn read_rank(dir: &CheckpointDirectory, digests: &[RankDigest], rank: u32) -> Result<RankManifest> {
    let path = dir.join(rank_file(rank, digests.len() as u32));
    let read = read_digested(dir.engine(), &path, &digests[rank as usize]);
    let read = read.map_err(|error| match error.errno() {
        Some(libc::ENOENT) => Error::corruption(&path, 0, "the manifest", format!("that of rank {rank}"), "missing"),
        _ => error,
    });
    parse(&read?, &path)
}

/// Reads the file at `path`, which must match `digest`.
pub(crate) fn read_digested(engine: &dyn IoEngine, path: &Path, digest: &RankDigest) -> Result<Vec<u8>> {
    let bytes = read_file(engine, path, digest.bytes.min(MAX_MANIFEST_BYTES))?;
    let found = RankDigest { bytes: bytes.len() as u64, xxh3: checksum(&bytes) };
    if found != *digest {
        return Err(Error::corruption(
            path,
            0,
            "the manifest's length and checksum",
            format!("{} and {:016x}", digest.bytes, digest.xxh3),
            format!("{} and {:016x}", found.bytes, found.xxh3),
        ));
    }
    Ok(bytes)
}
