//! The JSON manifests of a checkpoint, and the checks that they pass before anything they say is used.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::dense::{DenseEntry, DenseShare};
use super::digest::{RankDigest, checksum};
use super::latest::CheckpointName;
use super::names::{CHUNK_BYTES, FORMAT, OLDEST_VERSION, TOMBSTONES_A_FILE, VERSION};
use crate::config::{OptimizerKind, TableConfig};
use crate::error::{Error, Kind, Result};
use crate::rows::Initializer;
use crate::ssd::SegmentSet;
use crate::types::{BucketHash, Bucketing};

/// Manifests larger than this are refused before they are read.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 256 << 20;
/// Longest name of a module or table.
const MAX_NAME_BYTES: usize = 4096;
const MAX_DIM: u32 = 65_536;
/// More rows, ranks or files than this are damage, and sums of such numbers do not overflow.
const MAX_COUNT: u64 = 1 << 56;

/// What a checkpoint holds, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckpointKind {
    /// Every row.
    Full,
    /// Rows modified since the parent, and tombstones of those that left the table.
    Delta,
    /// Every row, of tables with an SSD tier as the segments of that: for the same ranks.
    Snapshot,
}

impl CheckpointKind {
    /// As manifests have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Delta => "delta",
            Self::Snapshot => "snapshot",
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

/// An optimizer and its hyperparameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerSpec {
    /// [`OptimizerKind::name`].
    pub name: String,
    /// Finite numbers by name (`lr`, `eps`, …).
    pub hyperparameters: BTreeMap<String, f64>,
}

/// What a checkpoint says of a table as a whole: the same on every rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// Path of the module in the model, wrappers' names left out.
    pub module: String,
    /// Name of the table in the module.
    pub table: String,
    /// See [`crate::types::table_key`].
    pub key: u64,
    /// Width of the embedding.
    pub dim: u32,
    /// Type of weights and slots, in safetensors' terms: `F32`.
    pub dtype: String,
    /// The optimizer.
    pub optimizer: OptimizerSpec,
    /// Training steps so far.
    pub step: u64,
    /// Seed of births.
    pub seed: u64,
    /// How rows are born.
    pub initializer: Initializer,
    /// Buckets of the table.
    pub total_num_buckets: u32,
    /// How ids fall into them. Manifests of version 1 do not say: [`BucketHash::Plain`].
    #[serde(default)]
    pub bucket_hash: BucketHash,
}

impl TableSpec {
    /// What a table's configuration says of it. `module` is the path of its module in the model.
    pub fn new(module: &str, config: &TableConfig, hyperparameters: BTreeMap<String, f64>, step: u64) -> Self {
        Self {
            module: module.to_owned(),
            table: config.name.clone(),
            key: config.key,
            dim: config.dim as u32,
            dtype: "F32".to_owned(),
            optimizer: OptimizerSpec { name: config.optimizer.name().to_owned(), hyperparameters },
            step,
            seed: config.seed,
            initializer: config.initializer,
            total_num_buckets: config.total_num_buckets,
            bucket_hash: config.bucket_hash,
        }
    }

    /// From its JSON, as a manifest has it; `Kind::Input` says what is missing, unknown or out of range.
    pub fn from_json(text: &str) -> Result<Self> {
        let spec: Self = serde_json::from_str(text)
            .map_err(|e| Error::new(Kind::Input, format!("the description of a table is not one: {e}")))?;
        spec.check()?;
        Ok(spec)
    }

    /// How ids fall into the table's buckets.
    pub fn bucketing(&self) -> Bucketing {
        Bucketing::new(self.total_num_buckets, self.bucket_hash)
    }

    /// The optimizer's kind.
    pub fn optimizer_kind(&self) -> Result<OptimizerKind> {
        OptimizerKind::from_name(&self.optimizer.name)
    }

    /// Whether rows of this table fit one configured as `config`, without `slots` under any optimizer; `Kind::Mismatch` names the
    /// field that does not.
    pub fn check_fits(&self, config: &TableConfig, slots: bool) -> Result<()> {
        let differs = |field: &str, here: &dyn std::fmt::Display, there: &dyn std::fmt::Display| {
            Err(Error::new(
                Kind::Mismatch,
                format!(
                    "table {:?} of module {:?} has {field} {here} and the checkpoint {there}: make the table as it was saved",
                    self.table, self.module
                ),
            ))
        };
        if self.dim as usize != config.dim {
            return differs("embedding_dim", &config.dim, &self.dim);
        }
        if slots && self.optimizer.name != config.optimizer.name() {
            return differs("optimizer", &config.optimizer.name(), &self.optimizer.name);
        }
        Ok(())
    }

    /// `Kind::Input` where a number is outside what the format can hold.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |what: String| {
            Err(Error::new(Kind::Input, format!("table {:?} of module {:?}: {what}", self.table, self.module)))
        };
        if self.module.len() > MAX_NAME_BYTES || self.table.len() > MAX_NAME_BYTES {
            return refuse(format!("names have at most {MAX_NAME_BYTES} bytes"));
        }
        if self.dim == 0 || self.dim > MAX_DIM {
            return refuse(format!("dim {} is not within 1 to {MAX_DIM}", self.dim));
        }
        if self.dtype != "F32" {
            return refuse(format!("dtype {:?} is not F32", self.dtype));
        }
        if self.total_num_buckets == 0 {
            return refuse("total_num_buckets is 0".into());
        }
        if self.step > MAX_COUNT {
            return refuse(format!("step {} is more than any table has made", self.step));
        }
        if let Some((name, value)) = self.optimizer.hyperparameters.iter().find(|(_, value)| !value.is_finite()) {
            return refuse(format!("hyperparameter {name} is {value}"));
        }
        self.optimizer_kind().map(|_| ())
    }
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
}

/// `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: String,
    /// [`OLDEST_VERSION`] to [`VERSION`].
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

/// Counts that fix the layout of a data file.
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
    /// In a snapshot, instead of data files: the segments of an SSD tier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) segments: Option<SegmentSet>,
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
        for file in &self.files {
            // What is read at once is bounded by this, and not by what a manifest says.
            let tombstones = file.tombstones > TOMBSTONES_A_FILE as u64;
            if file.rows > u64::from(u32::MAX) || tombstones || file.bytes > MAX_COUNT {
                return Err("a file's counts are out of range".into());
            }
            if kind != CheckpointKind::Delta && file.tombstones > 0 {
                return Err(format!("a {} checkpoint has tombstones", kind.name()));
            }
        }
        if let Some(set) = &self.segments {
            if kind != CheckpointKind::Snapshot || !self.files.is_empty() {
                return Err("segments are in snapshots only, and without files".into());
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
        Self { format: FORMAT.to_owned(), version: VERSION, name, rank, world, tables, dense }
    }
}

/// Version first, so that a newer format is called that, whatever else it holds.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u32,
}

/// JSON bytes to a manifest; `Kind::Unsupported` for a newer version, `Kind::Corruption` for anything else that is not one.
pub(crate) fn parse<T: for<'de> Deserialize<'de>>(bytes: &[u8], path: &Path) -> Result<T> {
    let damaged = |e: serde_json::Error| Error::corruption(path, 0, "the manifest", "valid", e).at(path);
    let head: Head = serde_json::from_slice(bytes).map_err(damaged)?;
    if head.format != FORMAT {
        return Err(Error::corruption(path, 0, "the format", FORMAT, head.format));
    }
    if !(OLDEST_VERSION..=VERSION).contains(&head.version) {
        return Err(Error::new(
            Kind::Unsupported,
            format!(
                "{} has format version {} and this release reads {OLDEST_VERSION} to {VERSION}: load it with a newer one",
                path.display(),
                head.version
            ),
        )
        .at(path));
    }
    serde_json::from_slice(bytes).map_err(damaged)
}

/// A manifest as JSON.
pub(crate) fn render<T: Serialize>(manifest: &T) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(manifest)
        .map_err(|e| Error::new(Kind::Input, format!("cannot write the manifest as JSON: {e}")))?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// The last field of a sealed manifest: the checksum of what it was without that field.
const SEAL: &str = ",\n  \"xxh3\": ";
const END: &str = "\n}\n";

/// A rendered manifest with its own checksum as the last field.
pub(crate) fn seal(rendered: &[u8]) -> Vec<u8> {
    let body = rendered.strip_suffix(END.as_bytes()).expect("what render() gives ends an object");
    [body, format!("{SEAL}{}{END}", checksum(rendered)).as_bytes()].concat()
}

/// What was sealed, if not a bit of it has changed.
pub(crate) fn unseal(sealed: &[u8], path: &Path) -> Result<Vec<u8>> {
    let at = sealed.windows(SEAL.len()).rposition(|window| window == SEAL.as_bytes());
    let rendered = [&sealed[..at.unwrap_or(0)], END.as_bytes()].concat();
    if sealed == seal(&rendered) {
        return Ok(rendered);
    }
    let found = checksum(&rendered);
    let said = String::from_utf8_lossy(&sealed[at.map_or(sealed.len(), |at| at + SEAL.len())..]);
    let said: String = said.chars().take_while(char::is_ascii_digit).collect();
    let said = if said.is_empty() { "none".to_owned() } else { said };
    if said == found.to_string() {
        let (whole, len) = (seal(&rendered).len(), sealed.len());
        return Err(Error::corruption(path, whole as u64, "the manifest's length", whole, len));
    }
    Err(Error::corruption(path, at.unwrap_or(0) as u64, "the manifest's checksum", said, found))
}

impl Manifest {
    /// As JSON.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        render(self)
    }

    /// What does not need the ranks' manifests.
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
        if parent.kind == CheckpointKind::Snapshot {
            return Err("on a snapshot, and a delta builds on a full checkpoint or a delta".into());
        }
        if self.next_epoch < parent.next_epoch {
            return Err(format!("of epochs up to {}, below its parent's {}", self.next_epoch, parent.next_epoch));
        }
        // How rows are trained, and how those that come are born, may change as training goes on.
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
                return Err(format!("{name}: ranks {first_rank} and {rank} have different settings or steps"));
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
            })
        })
        .collect()
}
