//! Manifests of a checkpoint: one per rank, which lists the files of its tables and of its dense state, and the
//! coordinator's, which is merged from them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::latest::CheckpointName;
use super::spec::{MAX_COUNT, TableSpec};
use super::{
    CHUNK_BYTES, FORMAT, MANIFEST_FILE, RankDigest, TOMBSTONES_PER_FILE, VERSION, checksum, parse, rank_file, render,
    unseal,
};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::error::{Error, Result};
use crate::io::{ALIGNMENT, IoEngine, read_file};
use crate::lifecycle::{ExpirySweep, StepClock};
use crate::ssd::SegmentSet;

/// Larger manifests are rejected before they are read.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 256 << 20;
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

/// The counts that determine the layout of a data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DataShape {
    pub(crate) rows: usize,
    pub(crate) buckets: usize,
    pub(crate) tombstones: usize,
}

/// A data file in a rank's manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DataFile {
    pub(crate) rows: u64,
    pub(crate) tombstones: u64,
    /// Length of the file.
    pub(crate) bytes: u64,
    /// CRC-32C of the header, including the length field.
    pub(crate) header_crc32c: u32,
    /// CRC-32C of the tensor `checksums`.
    pub(crate) checksums_crc32c: u32,
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
        let in_files: u64 = self.files.iter().map(|file| file.rows).sum();
        in_files + self.segments.as_ref().map_or(0, |set| set.rows)
    }

    fn tombstones(&self) -> u64 {
        self.files.iter().map(|file| file.tombstones).sum()
    }

    pub(crate) fn shape(&self, file: &DataFile) -> DataShape {
        DataShape {
            rows: file.rows as usize,
            buckets: (self.bucket_end - self.bucket_begin) as usize,
            tombstones: file.tombstones as usize,
        }
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
        for file in &self.files {
            // Bounds the size of one read for any manifest.
            let tombstones = file.tombstones > TOMBSTONES_PER_FILE as u64;
            if file.rows > u64::from(u32::MAX) || tombstones || file.bytes > MAX_COUNT {
                return Err("a file's counts are out of range".into());
            }
            if kind != CheckpointKind::Delta && file.tombstones > 0 {
                return Err(format!("a {} checkpoint has tombstones", kind.name()));
            }
        }
        if kind != CheckpointKind::Delta && !self.sweeps.is_empty() {
            return Err(format!("a {} checkpoint has sweeps", kind.name()));
        }
        for file in self.counts.iter().flat_map(|counts| &counts.files) {
            if file.rows > u64::from(u32::MAX) || file.tombstones > 0 || file.bytes > MAX_COUNT {
                return Err("the counts of a file of counts are out of range".into());
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
        let mut seen = BTreeSet::new();
        for TableEntry { spec, .. } in &self.tables {
            spec.check().map_err(|e| e.to_string())?;
            if !seen.insert((&spec.module, &spec.table)) {
                return Err(format!("table {:?} of module {:?} is there twice", spec.table, spec.module));
            }
        }
        Ok(())
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
        for (rank, manifest) in ranks.iter().enumerate() {
            if manifest.name != self.name
                || manifest.rank as usize != rank
                || manifest.world as usize != self.ranks.len()
            {
                return Err(format!(
                    "the manifest of rank {rank} belongs to rank {} of {}",
                    manifest.rank, manifest.name
                ));
            }
        }
        if merge_tables(ranks, self.kind)? != self.tables {
            return Err("the ranks' manifests hold other tables, settings or counts".into());
        }
        for (rank, manifest) in ranks.iter().enumerate() {
            let checked = manifest.dense.as_ref().map_or(Ok(()), DenseShare::check);
            checked.map_err(|what| format!("rank {rank}: {what}"))?;
            if manifest.dense.is_some() != self.dense.is_some() {
                return Err(format!("one of rank {rank} and the coordinator has extents"));
            }
        }
        if dense_bytes(ranks) == self.dense.map_or(0, |dense| dense.bytes) {
            Ok(())
        } else {
            Err("the ranks' manifests have other extents".into())
        }
    }
}

impl TableEntry {
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
    counts.map(|counts| counts.files.iter().map(|file| file.rows).sum()).reduce(|a: u64, b| a + b)
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
    tables
        .into_iter()
        .map(|((module, table), mut shares)| {
            let name = format!("table {table:?} of module {module:?}");
            let (first_rank, first) = shares[0];
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
            Ok(TableEntry {
                spec: first.spec.clone(),
                rows: shares.iter().map(|(_, share)| share.rows()).sum(),
                tombstones: shares.iter().map(|(_, share)| share.tombstones()).sum(),
                total_rows: shares.iter().map(|(_, share)| share.total_rows).sum(),
                pending: count_pending(shares.iter().map(|(_, share)| *share)),
                sweeps: first.sweeps.clone(),
                clock: StepClock::join(shares.iter().map(|(_, share)| &share.clock)),
            })
        })
        .collect()
}

/// Reads the coordinator's manifest of the checkpoint in `dir`, verifies its seal, and returns it with its identity.
pub(crate) fn read_manifest(dir: &CheckpointDirectory) -> Result<(CheckpointManifest, CheckpointId)> {
    let path = dir.join(MANIFEST_FILE);
    let sealed = read_file(dir.engine(), &path, MAX_MANIFEST_BYTES)?;
    let manifest: CheckpointManifest = parse(&unseal(&sealed, &path)?, &path)?;
    let identity = CheckpointId { name: manifest.name.clone(), manifest_xxh3: checksum(&sealed) };
    Ok((manifest, identity))
}

/// Reads the ranks' manifests and verifies them against their digests.
pub(crate) fn read_ranks(dir: &CheckpointDirectory, digests: &[RankDigest]) -> Result<Vec<RankManifest>> {
    let world = digests.len() as u32;
    digests
        .iter()
        .enumerate()
        .map(|(rank, digest)| {
            let path = dir.join(rank_file(rank as u32, world));
            parse(&read_digested(dir.engine(), &path, digest)?, &path)
        })
        .collect()
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
