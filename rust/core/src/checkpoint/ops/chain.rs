//! Reads a chain of checkpoints, a full one and the deltas based on it, as one, and checks it against the tables to
//! load. The latest version of a row counts.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use crate::cache::{PickedRows, RowColumns, Table};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::latest::LatestCheckpoint;
use crate::checkpoint::manifest::manifests::{CheckpointId, CheckpointManifest, TableEntry};
use crate::checkpoint::manifest::spec::TableSpec;
use crate::checkpoint::rows::counters::MergedCounts;
use crate::checkpoint::rows::reader::{OpenCheckpoint, TableReader};
use crate::checkpoint::rows::writer::RowSink;
use crate::error::{Error, Kind, Result};
use crate::index::IdHash;
use crate::lifecycle::{BucketCounts, ExpirySweep, OovRow, StepClock};
use crate::runtime::memory;
use crate::ssd::{LinkedSegments, StateCounters};
use crate::types::Id;

/// Approximate number of delta ids in memory at once, at most 16 bytes each. Beyond this limit, buckets are read in
/// several passes.
const IDS_AT_ONCE: u64 = 2 << 20;

/// Columns of the rows that a load reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadColumns {
    /// All. The table must have the checkpoint's optimizer.
    All,
    /// All except the optimizer's slots, into a table with any optimizer.
    WithoutSlots,
}

/// States if the caller can open a table from the segments of a linked checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadSegments {
    /// It can.
    Open,
    /// It reads rows only.
    Refuse,
}

/// A table of a checkpoint to load, and how.
#[derive(Clone, Debug)]
pub struct TableRequest<'a> {
    /// Path of the table's module in the checkpoint.
    pub module: &'a str,
    /// Name of the table in the checkpoint.
    pub table: &'a str,
    /// The buckets that the rank owns.
    pub buckets: Range<u32>,
    /// Columns to load.
    pub columns: LoadColumns,
    /// Support for segments.
    pub segments: LoadSegments,
}

/// Source from which a checked table is loaded.
#[derive(Debug)]
pub enum TableSource {
    /// Row by row, by [`ChainReader::load_with`].
    Rows(ChainReader),
    /// By opening the table from segments, with these counters, admission counts, step times and OOV row.
    Segments(LinkedSegments, StateCounters, Vec<BucketCounts>, StepClock, Option<OovRow>),
}

impl TableSource {
    /// Upper bound of the number of rows that the table will have.
    pub fn max_rows(&self) -> u64 {
        match self {
            Self::Rows(reader) => reader.max_rows(),
            Self::Segments(files, ..) => files.rows(),
        }
    }
}

/// A checkpoint and its base checkpoints.
#[derive(Clone, Debug)]
pub struct CheckpointChain {
    /// Latest first; the last one is full.
    links: Arc<Vec<OpenCheckpoint>>,
    ids_at_once: u64,
}

impl CheckpointChain {
    /// Reads and checks the coordinators' manifests of the checkpoint that `latest` names in `root`, and of its base
    /// checkpoints. While the latest is locked no save removes any of them.
    ///
    /// Errors: as [`OpenCheckpoint::open`]; `Corruption` if a base checkpoint is missing, has changed since the next
    /// was based on it, or does not match the next.
    pub fn open(root: &CheckpointDirectory, latest: LatestCheckpoint) -> Result<Self> {
        let mut links = vec![OpenCheckpoint::open(root, latest)?];
        while let Some(parent) = &links[links.len() - 1].manifest().parent {
            let child = &links[links.len() - 1];
            let next = open_parent(root, child, parent)?;
            links.push(next);
        }
        Ok(Self { links: Arc::new(links), ids_at_once: IDS_AT_ONCE })
    }

    /// Sets the approximate number of delta ids in memory at once. The default is 2 million. A single bucket is never
    /// divided.
    #[must_use]
    pub fn with_ids_at_once(mut self, ids: u64) -> Self {
        self.ids_at_once = ids.max(1);
        self
    }

    /// Manifest of the latest checkpoint, which defines tables, settings and steps.
    pub fn manifest(&self) -> &CheckpointManifest {
        self.links[0].manifest()
    }

    /// Identity that a delta based on this chain names as its parent.
    pub fn identity(&self) -> CheckpointId {
        self.links[0].identity()
    }

    /// Names of the checkpoints, latest first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.links.iter().map(|link| link.manifest().name.as_str())
    }

    /// The checkpoints, latest first.
    pub fn links(&self) -> &[OpenCheckpoint] {
        &self.links
    }

    /// Allows saves to remove the checkpoints. They must not be read after this call.
    pub fn release(&self) {
        self.links.iter().for_each(OpenCheckpoint::release);
    }

    /// Returns a table of the latest checkpoint. Returns `Mismatch`, which lists its tables, if there is no such table.
    pub fn table(&self, module: &str, table: &str) -> Result<&TableEntry> {
        self.links[0].table(module, table)
    }

    /// Checks the headers and sizes of the files with rows of `buckets`, and returns a reader for them.
    pub fn table_reader(&self, module: &str, table: &str, buckets: Range<u32>) -> Result<ChainReader> {
        let entry = self.table(module, table)?;
        let (spec, total_rows) = (entry.spec.clone(), entry.total_rows);
        let whole = (buckets == (0..spec.total_num_buckets)).then_some(total_rows);
        let open = |link: &OpenCheckpoint| link.table_reader(module, table, buckets.clone());
        let readers = self.links.iter().map(open).collect::<Result<Vec<_>>>()?;
        Ok(ChainReader { chain: self.clone(), spec, buckets, expected_rows: whole, readers })
    }

    /// Checks that the checkpoint has a table that matches `into`, that no batch uses rows of `into`, and the headers
    /// of the files with rows of the buckets.
    ///
    /// Errors: `Mismatch` (no such table, another dim or optimizer, or segments that `into` cannot be opened from),
    /// `State` (rows in use), `Corruption`, `Storage`.
    pub fn check_table(&self, into: &Table, request: &TableRequest<'_>) -> Result<TableSource> {
        self.links[0].refuse_serving("load tables that a model trains or evaluates")?;
        let entry = self.table(request.module, request.table)?;
        entry.spec.check_fits(into.config(), request.columns == LoadColumns::All)?;
        into.check_unused()?;
        let rows = || self.table_reader(request.module, request.table, request.buckets.clone());
        if request.columns == LoadColumns::WithoutSlots {
            // Segments contain rows with their slots, so the rows are read one by one.
            return Ok(TableSource::Rows(rows()?.without_slots()));
        }
        let newest = &self.links()[0];
        let Some(files) = newest.segments_of(request.module, request.table, &request.buckets)? else {
            return rows().map(TableSource::Rows);
        };
        if request.segments == LoadSegments::Refuse {
            return Err(newest.only_for_same_ranks("only torchrec_embcache.Saver loads it"));
        }
        into.check_opens_from(&files).map_err(|error| match error.kind() {
            Kind::Mismatch => newest.only_for_same_ranks(&error.to_string()),
            _ => error,
        })?;
        let counters = StateCounters { step: entry.spec.step, epoch: self.manifest().next_epoch };
        let mut counts = Vec::new();
        if entry.pending.is_some() {
            let mut merged = MergedCounts::default();
            newest.table_reader(request.module, request.table, request.buckets.clone())?.read_counts(
                &mut |bucket| {
                    merged.add(bucket, |_| false);
                    Ok(())
                },
            )?;
            counts.extend(merged.into_buckets());
        }
        Ok(TableSource::Segments(files, counters, counts, entry.clock.clone(), entry.spec.oov_row.clone()))
    }
}

/// Opens the base of `child` without keeping a lock: while a checkpoint is locked, saves keep all its base checkpoints.
/// Each lock is an open file, and a chain may be longer than the limit of open files.
pub(crate) fn open_parent(
    root: &CheckpointDirectory,
    child: &OpenCheckpoint,
    named: &CheckpointId,
) -> Result<OpenCheckpoint> {
    let (path, manifest) = (child.directory().path(), child.manifest());
    let damaged = |what: &str, expected: String, got: String| Error::corruption(path, 0, what, expected, got);
    let name = named.name.parse().map_err(|e: Error| damaged("its parent", "a checkpoint".into(), e.to_string()))?;
    let latest = LatestCheckpoint { name };
    if !root.has(&named.name)? {
        let expected = format!("{} in {}", named.name, root.path().display());
        return Err(damaged("the checkpoint that this delta builds on", expected, "missing".into()));
    }
    let parent = OpenCheckpoint::open(root, latest)?;
    if parent.identity() != *named {
        let (was, is) = (named.manifest_xxh3, parent.identity().manifest_xxh3);
        let what = format!("the manifest of {}, which this delta builds on", named.name);
        return Err(damaged(&what, format!("{was:016x}"), format!("another, {is:016x}")));
    }
    // A merged parent may be newer than a delta started before the merge. It is full, so every chain ends.
    if name.seq >= manifest.seq && parent.manifest().merged.is_none() {
        return Err(damaged("the number of its parent", format!("below {}", manifest.seq), name.seq.to_string()));
    }
    manifest
        .check_fits_parent(parent.manifest())
        .map_err(|what| damaged("its tables", format!("a delta of {}", named.name), what))?;
    parent.release();
    Ok(parent)
}

/// Consumes a group of rows as columns.
type ColumnSink<'a> = dyn FnMut(PickedRows<'_>) -> Result<()> + 'a;

/// Reads the rows of some buckets of one table as of the latest checkpoint of a chain.
#[derive(Debug)]
pub struct ChainReader {
    chain: CheckpointChain,
    spec: TableSpec,
    buckets: Range<u32>,
    /// Number of rows of the table, if this reads all of them.
    expected_rows: Option<u64>,
    /// A reader per checkpoint, latest first.
    readers: Vec<TableReader>,
}

impl ChainReader {
    /// Omits the optimizer's slots from the rows of all checkpoints.
    #[must_use]
    pub fn without_slots(mut self) -> Self {
        self.readers = self.readers.into_iter().map(TableReader::without_slots).collect();
        self
    }

    /// Metadata of the table as it was saved.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// The buckets that it reads.
    pub fn buckets(&self) -> &Range<u32> {
        &self.buckets
    }

    /// Passes rows to `sink` in chunks, as headers and vectors.
    pub(crate) fn emit(&self, rows: PickedRows<'_>, sink: &mut RowSink<'_>) -> Result<()> {
        self.readers[0].emit(rows, sink)
    }

    /// Upper bound of the number of rows that [`Self::read`] delivers, exact without deltas.
    pub fn max_rows(&self) -> u64 {
        self.readers.iter().map(TableReader::rows).sum()
    }

    /// Maximum number of rows that [`Self::read`] delivers from the oldest checkpoint. In a chain these are nearly all.
    pub(crate) fn rows_of_oldest(&self) -> u64 {
        self.readers.last().map_or(0, TableReader::rows)
    }

    /// True if rows include slots.
    pub(crate) fn has_slots(&self) -> bool {
        self.readers[0].has_slots()
    }

    /// Reads and verifies every row of the buckets once, and passes it to `sink` in chunks of about 4 MiB. Returns the
    /// number of rows.
    ///
    /// Errors: as [`TableReader::read`]; `Corruption` if the row count differs from the latest manifest.
    pub fn read(&self, sink: &mut RowSink<'_>) -> Result<u64> {
        self.read_columns(&mut |rows| self.emit(rows, sink), None)
    }

    /// Reads and verifies every row of the buckets and the admission counts. Returns the number of rows.
    ///
    /// Errors: as [`Self::read`].
    pub fn verify(&self) -> Result<u64> {
        self.read_columns(&mut |_| Ok(()), Some(&mut MergedCounts::default()))
    }

    /// Like [`Self::read`], and then passes the admission counts to `counts`, one bucket per call, in ascending bucket
    /// order. All counts are in memory at that point.
    pub fn read_rows_and_counts(
        &self,
        sink: &mut RowSink<'_>,
        counts: &mut dyn FnMut(BucketCounts) -> Result<()>,
    ) -> Result<u64> {
        let mut merged = MergedCounts::default();
        let rows = self.read_columns(&mut |rows| self.emit(rows, sink), Some(&mut merged))?;
        merged.into_buckets().try_for_each(counts)?;
        Ok(rows)
    }

    /// True if one of the checkpoints has admission counts.
    pub(crate) fn has_counts(&self) -> bool {
        self.readers.iter().any(TableReader::has_counts)
    }

    /// Times of the steps up to the latest checkpoint, as far as recorded.
    pub(crate) fn clock(&self) -> Result<&StepClock> {
        Ok(&self.chain.links[0].table(&self.spec.module, &self.spec.table)?.clock)
    }

    /// True if one of the checkpoints counts clicks.
    pub(crate) fn counts_clicks(&self) -> bool {
        self.readers.iter().any(TableReader::counts_clicks)
    }

    /// Like [`Self::read`], but passes the rows as columns, and collects the admission counts in `counts`.
    pub(super) fn read_columns(&self, sink: &mut ColumnSink<'_>, mut counts: Option<&mut MergedCounts>) -> Result<u64> {
        let mut rows = 0;
        let mut counted = |some: PickedRows<'_>| {
            rows += some.len() as u64;
            sink(some)
        };
        let (module, table) = (&self.spec.module, &self.spec.table);
        let sweeps = self.chain.links.iter().map(|link| link.table(module, table).map(|entry| entry.sweeps.as_slice()));
        let sweeps = sweeps.collect::<Result<Vec<_>>>()?;
        let newer = &self.readers[..self.readers.len() - 1];
        let ids: u64 = newer.iter().map(|reader| reader.rows() + reader.tombstones() + reader.pending()).sum();
        let parts =
            ids.div_ceil(self.chain.ids_at_once).clamp(1, u64::from((self.buckets.end - self.buckets.start).max(1)));
        if parts == 1 {
            merge((&self.readers, &sweeps), &mut counted, counts)?;
        } else {
            let (start, len) = (self.buckets.start, u64::from(self.buckets.end - self.buckets.start));
            let bound = |part: u64| start + (len * part / parts) as u32;
            for part in 0..parts {
                let readers = self.chain.links.iter().map(|link| {
                    let part = bound(part)..bound(part + 1);
                    let reader = link.table_reader(&self.spec.module, &self.spec.table, part)?;
                    Ok(if self.has_slots() { reader } else { reader.without_slots() })
                });
                let readers = readers.collect::<Result<Vec<_>>>()?;
                merge((&readers, &sweeps), &mut counted, counts.as_deref_mut())?;
            }
        }
        match self.expected_rows {
            Some(whole) if whole != rows => {
                let what = format!("the rows of table {:?} in {}", self.spec.table, self.chain.manifest().name);
                Err(Error::corruption(self.chain.links[0].directory().path(), 0, &what, whole, rows))
            }
            _ => Ok(rows),
        }
    }
}

/// A set of ids from a file. Its hash is keyed, because ids may be chosen to collide.
type KnownIds = HashSet<Id, IdHash>;

/// Passes each row on once, in its latest version, unless a newer checkpoint has a tombstone of its id or a sweep that
/// matches the row. `sweeps` has one entry per checkpoint. Counts of an id come from the latest checkpoint that
/// contains the id.
fn merge(
    (readers, sweeps): (&[TableReader], &[&[ExpirySweep]]),
    sink: &mut ColumnSink<'_>,
    mut counts: Option<&mut MergedCounts>,
) -> Result<()> {
    let mut known = KnownIds::default();
    let refused = |_| memory::refused_error("keep the ids of deltas", IDS_AT_ONCE as usize * 16);
    let mut fresh: Vec<u32> = Vec::new();
    for (age, reader) in readers.iter().enumerate() {
        let is_oldest = age + 1 == readers.len();
        let mut own: Vec<Id> = Vec::new();
        let newer_sweeps: Vec<&ExpirySweep> = sweeps[..age].iter().flat_map(|sweeps| sweeps.iter()).collect();
        let is_expired = |rows: &RowColumns<'_>, row: u32| {
            !newer_sweeps.is_empty() && {
                let (row, dim) = (row as usize, rows.parts[0].len() / rows.len());
                let (header, weights) = (rows.header(row), &rows.parts[0][row * dim..][..dim]);
                newer_sweeps.iter().any(|sweep| sweep.matches(&header, weights))
            }
        };
        reader.read_columns(&mut |rows| {
            if !is_oldest {
                memory::reserve(&mut own, "keep the ids of deltas", rows.len())?;
                own.extend_from_slice(rows.ids);
            }
            if known.is_empty() && newer_sweeps.is_empty() {
                return sink(PickedRows::all(rows));
            }
            fresh.clear();
            memory::reserve(&mut fresh, "merge deltas", rows.len())?;
            let stays = |&(row, id): &(u32, &Id)| !known.contains(id) && !is_expired(rows, row);
            fresh.extend((0..).zip(rows.ids).filter(stays).map(|(row, _)| row));
            if fresh.is_empty() { Ok(()) } else { sink(PickedRows::some(rows, &fresh)) }
        })?;
        if let Some(merged) = &mut counts {
            reader.read_counts(&mut |older| {
                if !is_oldest {
                    memory::reserve(&mut own, "keep the ids of deltas", older.ids.len())?;
                    own.extend(older.ids.iter().map(|each| each.id));
                }
                merged.add(older, |id| known.contains(&id));
                Ok(())
            })?;
        }
        if is_oldest {
            break;
        }
        known.try_reserve(own.len()).map_err(refused)?;
        known.extend(own);
        // An id with both a row and a tombstone in this checkpoint was inserted again: the tombstone applies to the
        // base checkpoints.
        reader.read_tombstones(&mut |ids| {
            known.try_reserve(ids.len()).map_err(refused)?;
            known.extend(ids);
            Ok(())
        })?;
    }
    Ok(())
}
