//! The JSON manifests of a checkpoint, and the checks that they pass before anything they say is used.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::dense::{DenseEntry, DenseShare};
use super::digest::RankDigest;
use super::latest::CheckpointName;
use super::names::{CHUNK_BYTES, FORMAT, TOMBSTONES_A_FILE, VERSION_WITHOUT_COUNTS};
use super::spec::MAX_COUNT;
use super::versions::{Needs, check_version, version_of};
use crate::error::Result;
use crate::lifecycle::{StepClock, Sweep};
use crate::ssd::SegmentSet;

pub(crate) use super::json::{parse, render, seal, unseal};
pub use super::spec::{OptimizerSpec, TableSpec};

/// Manifests larger than this are refused before they are read.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 256 << 20;
/// What a checkpoint holds, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckpointKind {
    /// Every row.
    Full,
    /// Rows modified since the parent, and tombstones of those that left the table.
    Delta,
    /// Every row, for a restart of the same ranks: tables with an SSD tier are in it as the tier's segments. Manifests call it `snapshot`.
    #[serde(rename = "snapshot")]
    Linked,
}

impl CheckpointKind {
    /// The name that manifests have for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Delta => "delta",
            Self::Linked => "snapshot",
        }
    }
}

/// The checkpoint that a delta builds on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parent {
    /// Its directory.
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
    /// Rows of all ranks.
    pub rows: u64,
    /// Tombstones of all ranks; 0 but in a delta.
    pub tombstones: u64,
    /// Rows of the table: `rows`, in a delta those not in it as well.
    pub total_rows: u64,
    /// How many ids without a row have counts in this checkpoint. `None` where counts were not saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<u64>,
    /// In a delta: the sweeps since the parent. Rows of the checkpoints that it builds on are gone where one of them takes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweeps: Vec<Sweep>,
    /// When the table's steps were made, where that is known: of all ranks the greatest times.
    #[serde(default, skip_serializing_if = "StepClock::is_empty")]
    pub clock: StepClock,
}

/// `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: String,
    /// [`OLDEST_VERSION`](super::names::OLDEST_VERSION) to [`VERSION`](super::names::VERSION).
    pub version: u32,
    /// The checkpoint's directory.
    pub name: String,
    /// Its number.
    pub seq: u64,
    /// What it holds.
    pub kind: CheckpointKind,
    /// What a delta builds on; none of others.
    pub parent: Option<Parent>,
    /// The delta that this full checkpoint was merged from, with all before it; rows, steps and epochs are the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged: Option<Parent>,
    /// Rows whose `modified_epoch` is at least this were modified after this checkpoint.
    pub next_epoch: u32,
    /// [`CHUNK_BYTES`].
    pub chunk_bytes: u64,
    /// The ranks' manifests, by rank.
    pub ranks: Vec<RankDigest>,
    /// The tables, by (module, table).
    pub tables: Vec<TableEntry>,
    /// Tensors and objects beside the tables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense: Option<DenseEntry>,
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
    /// CRC-32C of the header, length field included.
    pub(crate) header_crc32c: u32,
    /// CRC-32C of the tensor `checksums`.
    pub(crate) checksums_crc32c: u32,
}

/// One rank's share of a table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Share {
    pub(crate) spec: TableSpec,
    /// The buckets that the rank owns.
    pub(crate) bucket_begin: u32,
    pub(crate) bucket_end: u32,
    /// Rows of the share; in a delta those not in it as well.
    pub(crate) total_rows: u64,
    pub(crate) files: Vec<DataFile>,
    /// The counts of ids that wait for rows, where they were saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) counts: Option<CountsShare>,
    /// The sweeps of a delta, which all ranks have alike.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) sweeps: Vec<Sweep>,
    /// When the rank made the table's steps, where that is known.
    #[serde(default, skip_serializing_if = "StepClock::is_empty")]
    pub(crate) clock: StepClock,
    /// In a linked checkpoint, instead of data files: the segments of an SSD tier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) segments: Option<SegmentSet>,
}

/// The counts of ids that wait for rows, of one rank's share of a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CountsShare {
    /// Whether there are counts of clicks.
    pub(crate) clicks: bool,
    /// The files. Their rows are ids.
    pub(crate) files: Vec<DataFile>,
}

impl Share {
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
        if self.bucket_begin > self.bucket_end || self.bucket_end > self.spec.total_num_buckets {
            return Err(format!(
                "buckets {}..{} are not within 0..{}",
                self.bucket_begin, self.bucket_end, self.spec.total_num_buckets
            ));
        }
        if self.clock.last_step() > self.spec.step {
            return Err(format!(
                "times of steps up to {}, of a table that made {}",
                self.clock.last_step(),
                self.spec.step
            ));
        }
        for file in &self.files {
            // This bounds what is read at once, whatever a manifest says.
            let tombstones = file.tombstones > TOMBSTONES_A_FILE as u64;
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
                return Err("segments are in linked checkpoints (kind snapshot) only, and without files".into());
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
    pub(crate) tables: Vec<Share>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) dense: Option<DenseShare>,
}

impl RankManifest {
    pub(crate) fn new(name: String, rank: u32, world: u32) -> Self {
        let (tables, dense) = (Vec::new(), None);
        let version = VERSION_WITHOUT_COUNTS;
        Self { format: FORMAT.to_owned(), version, name, rank, world, tables, dense }
    }

    /// Say the version that can hold the tables.
    pub(crate) fn set_version(&mut self) {
        self.version = version_of(needs(&self.tables));
    }
}

impl Manifest {
    /// As JSON.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        render(self)
    }

    /// Check all that can be checked without the ranks' manifests. The message says what is wrong.
    pub(crate) fn check(&self, name: CheckpointName) -> Result<(), String> {
        if self.name != name.to_string() || self.seq != name.seq {
            return Err(format!("it belongs to {:?}, number {}", self.name, self.seq));
        }
        if (self.kind == CheckpointKind::Delta) == self.parent.is_none() {
            return Err("a delta has a parent, and no other checkpoint has one".into());
        }
        if self.merged.is_some() && self.kind != CheckpointKind::Full {
            return Err("what was merged is full".into());
        }
        check_version(self.version, needs_of(&self.tables))?;
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

    /// Whether a delta's rows and tombstones are changes of the tables of `parent`; the message says what does not fit.
    pub(crate) fn check_fits_parent(&self, parent: &Self) -> Result<(), String> {
        if parent.kind == CheckpointKind::Linked {
            return Err(
                "on a linked checkpoint (kind snapshot), and a delta builds on a full checkpoint or a delta".into()
            );
        }
        if self.next_epoch < parent.next_epoch {
            return Err(format!("of epochs up to {}, below its parent's {}", self.next_epoch, parent.next_epoch));
        }
        // Hyperparameters, seed, initializer and what ids without rows read may change as training goes on.
        let lasting = |TableEntry { spec, .. }: &TableEntry| {
            let TableSpec { module, table, key, dim, dtype, optimizer, total_num_buckets, bucket_hash, .. } =
                spec.clone();
            (module, table, key, dim, dtype, optimizer.name, total_num_buckets, bucket_hash)
        };
        match self.tables.iter().zip(&parent.tables).find(|(new, old)| lasting(new) != lasting(old)) {
            Some((new, _)) => Err(format!("of a table {:?} that is not its parent's", new.spec.table)),
            None if self.tables.len() != parent.tables.len() => {
                Err(format!("of {} tables, of which its parent has {}", self.tables.len(), parent.tables.len()))
            }
            None => Ok(()),
        }
    }

    /// Whether the ranks' manifests are of this checkpoint, agree with it, and together hold every bucket of every table once.
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
        if merge(ranks, self.kind)? != self.tables {
            return Err("the ranks' manifests hold other tables, settings or counts".into());
        }
        for (rank, manifest) in ranks.iter().enumerate() {
            check_version(manifest.version, needs(&manifest.tables))?;
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

fn needs(shares: &[Share]) -> Needs {
    shares.iter().fold(Needs::default(), |needs, share| Needs {
        counts: needs.counts || share.counts.is_some(),
        sweeps: needs.sweeps || !share.sweeps.is_empty(),
        clocks: needs.clocks || !share.clock.is_empty(),
        shared_row: needs.shared_row || share.spec.shared_row.is_some(),
        missing_reads: needs.missing_reads || share.spec.missing_read.is_some(),
    })
}

/// What tables in the coordinator's manifest need.
pub(crate) fn needs_of(tables: &[TableEntry]) -> Needs {
    tables.iter().fold(Needs::default(), |needs, table| Needs {
        counts: needs.counts || table.pending.is_some(),
        sweeps: needs.sweeps || !table.sweeps.is_empty(),
        clocks: needs.clocks || !table.clock.is_empty(),
        shared_row: needs.shared_row || table.spec.shared_row.is_some(),
        missing_reads: needs.missing_reads || table.spec.missing_read.is_some(),
    })
}

/// How many ids have counts in these shares; `None` where none of them has counts.
fn pending<'a>(shares: impl Iterator<Item = &'a Share>) -> Option<u64> {
    let counts = shares.filter_map(|share| share.counts.as_ref());
    counts.map(|counts| counts.files.iter().map(|file| file.rows).sum()).reduce(|a: u64, b| a + b)
}

/// Bytes of all ranks' extents.
pub(crate) fn dense_bytes(ranks: &[RankManifest]) -> u64 {
    ranks.iter().filter_map(|manifest| manifest.dense.as_ref()).map(DenseShare::bytes).sum()
}

/// The tables of all ranks together; the message says what does not fit.
pub(crate) fn merge(ranks: &[RankManifest], kind: CheckpointKind) -> Result<Vec<TableEntry>, String> {
    let mut tables: BTreeMap<(&str, &str), Vec<(usize, &Share)>> = BTreeMap::new();
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
                    "{name}: ranks {first_rank} and {rank} have different settings or steps, or their shared rows differ"
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
                pending: pending(shares.iter().map(|(_, share)| *share)),
                sweeps: first.sweeps.clone(),
                clock: StepClock::join(shares.iter().map(|(_, share)| &share.clock)),
            })
        })
        .collect()
}
