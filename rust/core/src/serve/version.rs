//! Versions: the contents of one checkpoint, opened for lookups.

use std::sync::Arc;
use std::time::SystemTime;

use super::build::{build_index, link_of, map_files, reader_of};
use super::data_files::{RowFileLink, RowFileSet};
use super::index::ServeIndex;
use super::index_file::{INDEX_FILE, ServeIndexTable, read_index, write_index};
use super::lookup::MissingWeights;
use super::overlay::DeltaOverlay;
use super::page_age::PageGeneration;
use super::table::{LookupCounts, ServedTable};
use crate::checkpoint::{
    CheckpointDirectory, CheckpointId, CheckpointManifest, CheckpointName, MANIFEST_FILE, OpenCheckpoint, TableReader,
    WaitCallback,
};
use crate::config::MissingRead;
use crate::error::{Kind, Result};
use crate::io::{IoOpenMode, MappingAccess};
use crate::lifecycle::ExpirySweep;
use crate::rows::WeightPrecision;

/// One checkpoint, opened for lookups in all its tables. Immutable.
#[derive(Debug)]
pub struct ServedVersion {
    pub(super) name: CheckpointName,
    pub(super) manifest: CheckpointManifest,
    /// The checkpoint and its base checkpoints, oldest first.
    pub(super) links: Vec<RowFileLink>,
    pub(super) base: ServedBase,
    pub(super) published: SystemTime,
    pub(super) tables: Vec<Arc<ServedTable>>,
    /// Counts the versions that are held.
    pub(super) alive: Arc<()>,
}

/// The part of a version's chain that is in the served directory.
#[derive(Clone, Debug)]
pub(super) struct ServedBase {
    /// Number of checkpoints.
    pub(super) links: usize,
    /// The trainer's checkpoint with the same contents as the latest of them: the one from which it was made, or
    /// itself.
    pub(super) origin: CheckpointId,
}

impl ServedBase {
    /// Describes a chain whose `links`, up to `newest`, are all in the served directory.
    fn of(newest: &OpenCheckpoint, links: usize) -> Self {
        Self { links, origin: origin_of(newest) }
    }
}

/// The trainer's checkpoint with the same contents as a checkpoint: the one from which it was made, or itself.
pub(super) fn origin_of(checkpoint: &OpenCheckpoint) -> CheckpointId {
    checkpoint.manifest().made_from.clone().unwrap_or_else(|| checkpoint.identity())
}

impl ServedVersion {
    /// The trainer's checkpoint with the same contents as this version.
    pub(super) fn origin(&self) -> CheckpointId {
        if self.links.len() == self.base.links { self.base.origin.clone() } else { self.newest() }
    }

    /// The latest checkpoint of its chain.
    pub(super) fn newest(&self) -> CheckpointId {
        self.links.last().expect("a version is of a checkpoint").identity()
    }

    /// Name of the checkpoint.
    pub fn name(&self) -> CheckpointName {
        self.name
    }

    /// Time at which the checkpoint was published.
    pub fn published(&self) -> SystemTime {
        self.published
    }

    /// The tables, by (module, table).
    pub fn tables(&self) -> &[Arc<ServedTable>] {
        &self.tables
    }

    /// Returns a table: by its name if only one module has a table of that name, or by "module/table".
    ///
    /// Errors: `Mismatch`, which lists the tables.
    pub fn table(&self, name: &str) -> Result<&Arc<ServedTable>> {
        let whole = |table: &&Arc<ServedTable>| format!("{}/{}", table.module(), table.name()) == name;
        let mut named = self.tables.iter().filter(|table| table.name() == name);
        let by_name = named.next().filter(|_| named.next().is_none());
        by_name.or_else(|| self.tables.iter().find(whole)).ok_or_else(|| {
            let all: Vec<String> =
                self.tables.iter().map(|table| format!("{}/{}", table.module(), table.name())).collect();
            Kind::Mismatch.error(format!(
                "checkpoint {} has no table {name:?}, or several of that name; it has [{}]: give \"module/table\"",
                self.name,
                all.join(", ")
            ))
        })
    }
}

/// State shared by all versions of a server.
#[derive(Debug)]
pub(super) struct ServeContext {
    /// Maximum bytes of indexes and overlays in this process's own memory; `None` for no limit.
    pub(super) host_bytes: Option<u64>,
    pub(super) missing: Option<MissingRead>,
    /// If true, the weights of all rows are read into memory before a version is served.
    pub(super) preload: bool,
    /// If true, all rows are verified against their checksums before a version is served.
    pub(super) verify: bool,
    pub(super) counts: Arc<LookupCounts>,
    pub(super) alive: Arc<()>,
}

/// One checkpoint of a chain, with the readers of its tables in manifest order.
pub(super) struct OpenedLink<'a> {
    pub(super) link: &'a OpenCheckpoint,
    pub(super) readers: Vec<TableReader>,
}

impl<'a> OpenedLink<'a> {
    /// Checks the headers of all files of a checkpoint.
    pub(super) fn new(link: &'a OpenCheckpoint) -> Result<Self> {
        let tables = link.manifest().tables.iter();
        let readers = tables.map(|table| reader_of(link, &table.spec.module, &table.spec.table));
        Ok(Self { link, readers: readers.collect::<Result<_>>()? })
    }

    pub(super) fn sweeps(&self, table: usize) -> &'a [ExpirySweep] {
        &self.link.manifest().tables[table].sweeps
    }
}

/// The indexes of the tables of a chain up to one of its checkpoints.
pub(super) struct ChainIndexes {
    /// Number of checkpoints of the chain that they cover.
    pub(super) links: usize,
    pub(super) indexes: Vec<Arc<ServeIndex>>,
}

/// Finds the latest matching index file of a chain, whose checkpoints are passed oldest first. Skips a file that is
/// corrupted or cannot be read.
pub(super) fn find_indexes(links: &[OpenedLink<'_>], files: &[RowFileSet]) -> Option<ChainIndexes> {
    for count in (1..=links.len()).rev() {
        let directory = links[count - 1].link.directory();
        match read_index(directory) {
            Ok(Some(found)) => {
                if let Some(indexes) = match_indexes(found, links, files, count) {
                    return Some(ChainIndexes { links: count, indexes });
                }
            }
            Ok(None) => {}
            // It can be rebuilt from the checkpoint, so any error is ignored.
            Err(error) => tracing::warn!("{INDEX_FILE} of {} is not used: {error}", directory.path().display()),
        }
    }
    None
}

/// Returns the indexes in the order of the tables, if the file belongs to these tables and to the first `count`
/// checkpoints.
fn match_indexes(
    found: Vec<(ServeIndexTable, ServeIndex)>,
    links: &[OpenedLink<'_>],
    files: &[RowFileSet],
    count: usize,
) -> Option<Vec<Arc<ServeIndex>>> {
    let tables = &links[count - 1].link.manifest().tables;
    if found.len() != tables.len() {
        return None;
    }
    let fits =
        |((of, _), (entry, files)): (&(ServeIndexTable, ServeIndex), (&crate::checkpoint::TableEntry, &RowFileSet))| {
            (&of.module, &of.table) == (&entry.spec.module, &entry.spec.table)
                && of.row_bits == files.row_bits()
                && of.links == files.links()[..count]
        };
    let all = found.iter().zip(tables.iter().zip(files)).all(fits);
    all.then(|| found.into_iter().map(|(_, index)| Arc::new(index)).collect())
}

/// Returns the indexes of a file if it covers the entire chain, whose checkpoints are passed oldest first.
pub(super) fn indexes_of_file(
    found: Vec<(ServeIndexTable, ServeIndex)>,
    links: &[OpenedLink<'_>],
    files: &[RowFileSet],
) -> Option<ChainIndexes> {
    match_indexes(found, links, files, links.len()).map(|indexes| ChainIndexes { links: links.len(), indexes })
}

/// Maps the files of each table of a chain, whose checkpoints are passed oldest first.
pub(super) fn files_of(links: &[OpenedLink<'_>], access: MappingAccess) -> Result<Vec<RowFileSet>> {
    let newest = links.last().expect("a chain has a checkpoint");
    let engine = newest.link.directory().engine();
    let tables = 0..newest.readers.len();
    tables
        .map(|table| {
            let of_table: Vec<_> = links.iter().map(|opened| (opened.link, &opened.readers[table])).collect();
            map_files(engine, &of_table, access)
        })
        .collect()
}

/// Builds the indexes of a chain from all its files. `wait` is called repeatedly; an error from it aborts the work.
pub(super) fn build_indexes(
    links: &[OpenedLink<'_>],
    files: &[RowFileSet],
    wait: &mut WaitCallback<'_>,
) -> Result<ChainIndexes> {
    let newest = links.last().expect("a chain has a checkpoint");
    let mut build = |(table, entry): (usize, &crate::checkpoint::TableEntry)| {
        let of_table: Vec<(&TableReader, &[ExpirySweep])> =
            links.iter().map(|opened| (&opened.readers[table], opened.sweeps(table))).collect();
        let path = newest.link.directory().path();
        build_index(&files[table], &of_table, entry.total_rows, path, &mut *wait).map(Arc::new)
    };
    let indexes = newest.link.manifest().tables.iter().enumerate().map(&mut build).collect::<Result<_>>()?;
    Ok(ChainIndexes { links: links.len(), indexes })
}

/// Writes the index file of a chain's latest checkpoint to its `directory`, and returns the length of the file.
pub(super) fn write_indexes(
    directory: &CheckpointDirectory,
    manifest: &CheckpointManifest,
    files: &[RowFileSet],
    indexed: &ChainIndexes,
) -> Result<u64> {
    let tables = manifest.tables.iter().zip(files).zip(&indexed.indexes);
    let tables: Vec<(ServeIndexTable, &ServeIndex)> = tables
        .map(|((entry, files), index)| {
            let links = &files.links()[..indexed.links];
            (ServeIndexTable::new(&entry.spec.module, &entry.spec.table, links, files.row_bits()), &**index)
        })
        .collect();
    write_index(directory, &tables)
}

/// Opens a version from a chain with mapped files, and indexes of some of its checkpoints. The later deltas are read
/// and verified. `wait` is called while rows are preloaded; an error from it aborts this.
pub(super) fn open_version(
    opening: &ServeContext,
    links: &[OpenedLink<'_>],
    files: Vec<RowFileSet>,
    indexed: &ChainIndexes,
    wait: &mut WaitCallback<'_>,
) -> Result<ServedVersion> {
    let newest = links.last().expect("a chain has a checkpoint").link;
    let mut tables = Vec::new();
    for (number, (files, entry)) in files.into_iter().zip(&newest.manifest().tables).enumerate() {
        let page_generation = PageGeneration::new();
        if opening.preload {
            files.preload_all(page_generation.generation(), wait)?;
        }
        tables.push(Arc::new(ServedTable {
            spec: entry.spec.clone(),
            rows: entry.total_rows,
            index: Arc::clone(&indexed.indexes[number]),
            indexed_links: indexed.links,
            overlay: overlay_after(indexed, links, number, &files)?,
            missing: MissingWeights::of(&entry.spec, opening.missing)?,
            page_generation: Arc::new(page_generation),
            counts: Arc::clone(&opening.counts),
            files,
        }));
    }
    let base = ServedBase::of(newest, links.len());
    version_of(opening, newest, links.iter().map(|opened| link_of(opened.link)).collect(), base, tables)
}

/// Returns the previous version with more deltas after it, which are read and verified. They are in the served
/// directory, or with `is_trainers` in the trainer's.
pub(super) fn extend_version(
    opening: &ServeContext,
    before: &ServedVersion,
    links: &[OpenedLink<'_>],
    is_trainers: bool,
) -> Result<ServedVersion> {
    let newest = links.last().expect("one delta at least").link;
    let mut tables = Vec::new();
    for (number, (table, entry)) in before.tables.iter().zip(&newest.manifest().tables).enumerate() {
        let (mut files, mut overlay) = (table.files.clone(), table.overlay.try_clone()?);
        for opened in links {
            let reader = &opened.readers[number];
            check_sweeps(&files, opened, number)?;
            files.push(opened.link.directory().engine(), link_of(opened.link), reader)?;
            // Recently changed rows are likely to be requested.
            files.preload_newest(table.page_generation.generation())?;
            overlay.add(&files, reader, opened.sweeps(number))?;
        }
        tables.push(Arc::new(ServedTable {
            spec: entry.spec.clone(),
            rows: entry.total_rows,
            files,
            index: Arc::clone(&table.index),
            indexed_links: table.indexed_links,
            overlay,
            missing: MissingWeights::of(&entry.spec, opening.missing)?,
            page_generation: Arc::clone(&table.page_generation),
            counts: Arc::clone(&opening.counts),
        }));
    }
    let all: Vec<_> = before.links.iter().cloned().chain(links.iter().map(|opened| link_of(opened.link))).collect();
    let base = if is_trainers { before.base.clone() } else { ServedBase::of(newest, all.len()) };
    version_of(opening, newest, all, base, tables)
}

/// Returns `Mismatch` if a rule of a delta evaluates weights, and the weights of earlier rows differ from the
/// trainer's.
fn check_sweeps(files: &RowFileSet, opened: &OpenedLink<'_>, table: usize) -> Result<()> {
    let precision = files.precision();
    if precision == WeightPrecision::Fp32 || !opened.sweeps(table).iter().any(ExpirySweep::needs_weights) {
        return Ok(());
    }
    let name = &opened.link.manifest().name;
    Err(Kind::Mismatch.error(format!(
        "a rule of eviction of checkpoint {name} looks at weights, and rows that are stored in {} have others than the trainer: run \
         `embcache convert` with `--to serving` on {name}, or serve fp32",
        precision.name()
    )).at(opened.link.directory().path()))
}

/// Returns a version with other indexes. The overlays contain the changes of the later checkpoints. `links` is the
/// version's chain, oldest first, and may be empty if the indexes cover all of it.
pub(super) fn with_indexes(
    version: &ServedVersion,
    indexed: &ChainIndexes,
    links: &[OpenedLink<'_>],
) -> Result<ServedVersion> {
    let mut tables = Vec::new();
    for (number, (table, index)) in version.tables.iter().zip(&indexed.indexes).enumerate() {
        tables.push(Arc::new(ServedTable {
            spec: table.spec.clone(),
            rows: table.rows,
            files: table.files.clone(),
            index: Arc::clone(index),
            indexed_links: indexed.links,
            overlay: overlay_after(indexed, links, number, &table.files)?,
            missing: table.missing.clone(),
            page_generation: Arc::clone(&table.page_generation),
            counts: Arc::clone(&table.counts),
        }));
    }
    Ok(ServedVersion {
        name: version.name,
        manifest: version.manifest.clone(),
        links: version.links.clone(),
        base: version.base.clone(),
        published: version.published,
        tables,
        alive: Arc::clone(&version.alive),
    })
}

/// Reads and verifies the changes of the checkpoints after an index in a table.
fn overlay_after(
    indexed: &ChainIndexes,
    links: &[OpenedLink<'_>],
    table: usize,
    files: &RowFileSet,
) -> Result<DeltaOverlay> {
    let mut overlay = DeltaOverlay::empty();
    for (count, opened) in links.iter().enumerate().skip(indexed.links) {
        overlay.add(&files.truncated(count + 1), &opened.readers[table], opened.sweeps(table))?;
    }
    Ok(overlay)
}

fn version_of(
    opening: &ServeContext,
    newest: &OpenCheckpoint,
    links: Vec<RowFileLink>,
    base: ServedBase,
    tables: Vec<Arc<ServedTable>>,
) -> Result<ServedVersion> {
    let directory = newest.directory();
    let manifest = newest.manifest().clone();
    let published = directory.engine().open(&directory.join(MANIFEST_FILE), IoOpenMode::Read)?.modified()?;
    let name = manifest.name.parse()?;
    Ok(ServedVersion { name, manifest, links, base, published, tables, alive: Arc::clone(&opening.alive) })
}
