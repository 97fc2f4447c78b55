//! Builds the index of a table from the files of its chain.

use std::collections::HashSet;

use super::data_files::{RowFileLink, RowFileLocation, RowFileSet};
use super::index::ServeIndex;
use crate::cache::RowColumns;
use crate::checkpoint::{CheckpointKind, OpenCheckpoint, TableReader, WaitCallback};
use crate::error::{Error, Result};
use crate::index::IdHash;
use crate::io::{IoEngine, MappingAccess};
use crate::lifecycle::ExpirySweep;
use crate::rows::WeightPrecision;
use crate::runtime::memory;
use crate::types::Id;

/// Checks the files of a table in one checkpoint, and returns a reader for all of its rows.
pub(super) fn reader_of(link: &OpenCheckpoint, module: &str, table: &str) -> Result<TableReader> {
    if link.manifest().kind == CheckpointKind::Linked {
        return Err(link.only_for_same_ranks("a server reads files of rows"));
    }
    let buckets = link.table(module, table)?.spec.total_num_buckets;
    Ok(link.table_reader(module, table, 0..buckets)?.without_slots())
}

/// Returns the identity of a checkpoint as stored with a table's files.
pub(super) fn link_of(link: &OpenCheckpoint) -> RowFileLink {
    let identity = link.identity();
    RowFileLink { name: identity.name, manifest_xxh3: identity.manifest_xxh3, files_end: 0 }
}

/// Maps the files of a table in a chain. `links` has the checkpoints and their readers, oldest first.
pub(super) fn map_files(
    engine: &dyn IoEngine,
    links: &[(&OpenCheckpoint, &TableReader)],
    access: MappingAccess,
) -> Result<RowFileSet> {
    let max_rows = links.iter().map(|(_, reader)| reader.max_rows_per_group()).max().unwrap_or(1);
    let spec = links.last().expect("a chain has a checkpoint").1.spec();
    let precision = spec.precision.unwrap_or(WeightPrecision::Fp32);
    let mut files = RowFileSet::new(max_rows, precision, spec.dim as usize, access);
    for (link, reader) in links {
        files.push(engine, link_of(link), reader)?;
    }
    Ok(files)
}

/// Reads and verifies every row of a chain, and indexes those in the latest checkpoint. Checkpoints are passed oldest
/// first, each with its sweeps. `wait` is called for each file; an error from it aborts the work.
pub(super) fn build_index(
    files: &RowFileSet,
    links: &[(&TableReader, &[ExpirySweep])],
    rows: u64,
    path: &std::path::Path,
    wait: &mut WaitCallback<'_>,
) -> Result<ServeIndex> {
    let wrong = |got: u64| Error::corruption(path, 0, "the rows of a table", rows, got);
    let stored = links.iter().fold(0_u64, |stored, (reader, _)| stored.saturating_add(reader.rows()));
    if rows > stored {
        return Err(wrong(stored));
    }
    let mut building = ServeIndexBuilder {
        files,
        link: 0,
        index: ServeIndex::with_capacity(rows)?,
        tombstones: HashSet::default(),
        rows,
    };
    for (number, (reader, _)) in links.iter().enumerate().rev() {
        let newer: Vec<&ExpirySweep> = links[number + 1..].iter().flat_map(|(_, sweeps)| sweeps.iter()).collect();
        building.link = number;
        let (mut file, mut expired) = (files.first_file_of(number), Vec::new());
        reader.read_columns(&mut |rows| {
            wait()?;
            if !building.add(file, rows, &newer, &mut expired)? {
                return Err(wrong(building.rows + 1));
            }
            file += 1;
            // An expired row replaced the row of an older checkpoint, which must not be indexed.
            if number > 0 {
                building.mark_removed(&expired)?;
            }
            expired.clear();
            Ok(())
        })?;
        reader.read_tombstones(&mut |ids| building.mark_removed(ids))?;
    }
    let index = building.index;
    if index.len() == rows { Ok(index) } else { Err(wrong(index.len())) }
}

struct ServeIndexBuilder<'a> {
    files: &'a RowFileSet,
    /// Index of the checkpoint that is being read.
    link: usize,
    index: ServeIndex,
    /// Ids removed after the checkpoints that remain to be read.
    tombstones: HashSet<Id, IdHash>,
    /// Expected number of rows.
    rows: u64,
}

/// Returns `Corruption` if an id of a checkpoint, given by its index in the chain, has another location in the same
/// checkpoint.
pub(super) fn check_unique(files: &RowFileSet, link: usize, place: RowFileLocation, id: Id) -> Result<()> {
    match files.find(place) {
        Some((file, number, _)) if files.link_of(number) == link => {
            let what = format!("how often id {id} is in the checkpoint");
            Err(Error::corruption(file.path(), 0, &what, "once", "in two groups"))
        }
        _ => Ok(()),
    }
}

/// Prefetch distance of index lines, in ids.
const AHEAD: usize = 24;

impl ServeIndexBuilder<'_> {
    /// Adds the rows of a file that no newer checkpoint contains or expired, and adds ids that a newer sweep expired to
    /// `expired`. Returns false if there are more rows than expected.
    ///
    /// Errors: `Corruption` if the checkpoint has an id twice.
    fn add(
        &mut self,
        file: usize,
        rows: &RowColumns<'_>,
        newer: &[&ExpirySweep],
        expired: &mut Vec<Id>,
    ) -> Result<bool> {
        let dim = rows.parts[0].len() / rows.len().max(1);
        for (row, &id) in rows.ids.iter().enumerate() {
            if let Some(&later) = rows.ids.get(row + AHEAD) {
                self.index.prefetch(later);
            }
            let weights = &rows.parts[0][row * dim..][..dim];
            if !self.tombstones.is_empty() && self.tombstones.contains(&id) {
                continue;
            }
            if newer.iter().any(|sweep| sweep.matches(&rows.header(row), weights)) {
                expired.push(id);
                continue;
            }
            let has_space = self.index.len() < self.rows;
            if has_space && self.index.insert_new(id, self.files.location(file, row)) {
                continue;
            }
            // The row is in a newer checkpoint, or in another file of this one.
            match self.index.get(id) {
                RowFileLocation::NONE => return Ok(false),
                place => check_unique(self.files, self.link, place, id)?,
            }
        }
        Ok(true)
    }

    /// Marks ids as removed, so that rows of older checkpoints are ignored.
    fn mark_removed(&mut self, ids: &[Id]) -> Result<()> {
        let failed = |_| memory::refused_error("keep the removed ids", 2 * size_of_val(ids));
        self.tombstones.try_reserve(ids.len()).map_err(failed)?;
        self.tombstones.extend(ids);
        Ok(())
    }
}
