//! Makes the index of a table from the files of its chain.

use std::collections::HashSet;

use super::files::{Files, LinkOfFiles, Place};
use super::index::RowIndex;
use crate::cache::RowColumns;
use crate::checkpoint::{Checkpoint, CheckpointKind, TableReader, Wait};
use crate::error::{Error, Result};
use crate::index::IdHash;
use crate::io::{Access, IoEngine};
use crate::lifecycle::Sweep;
use crate::memory;
use crate::rows::Precision;
use crate::types::Id;

/// Check the files of a table in one checkpoint, and get ready to read all of its rows.
pub(super) fn reader_of(link: &Checkpoint, module: &str, table: &str) -> Result<TableReader> {
    if link.manifest().kind == CheckpointKind::Linked {
        return Err(link.only_for_same_ranks("a server reads files of rows"));
    }
    let buckets = link.table(module, table)?.spec.total_num_buckets;
    Ok(link.table_reader(module, table, 0..buckets)?.without_slots())
}

/// A checkpoint, as the files of a table name it.
pub(super) fn link_of(link: &Checkpoint) -> LinkOfFiles {
    let identity = link.identity();
    LinkOfFiles { name: identity.name, manifest_xxh3: identity.manifest_xxh3, files_end: 0 }
}

/// Map the files of a table in a chain, whose checkpoints and readers are given with the oldest first.
pub(super) fn map_files(engine: &dyn IoEngine, links: &[(&Checkpoint, &TableReader)], access: Access) -> Result<Files> {
    let most = links.iter().map(|(_, reader)| reader.most_rows_of_a_file()).max().unwrap_or(1);
    let spec = links.last().expect("a chain has a checkpoint").1.spec();
    let precision = spec.precision.unwrap_or(Precision::Fp32);
    let mut files = Files::new(most, precision, spec.dim as usize, access);
    for (link, reader) in links {
        files.push(engine, link_of(link), reader)?;
    }
    Ok(files)
}

/// Read and verify every row of a chain, and index those that the newest checkpoint has. Checkpoints come with the oldest first, each with
/// its sweeps. `wait` is called for each file, and its error ends the work.
pub(super) fn build_index(
    files: &Files,
    links: &[(&TableReader, &[Sweep])],
    rows: u64,
    path: &std::path::Path,
    wait: &mut Wait<'_>,
) -> Result<RowIndex> {
    let wrong = |got: u64| Error::corruption(path, 0, "the rows of a table", rows, got);
    let stored = links.iter().fold(0_u64, |stored, (reader, _)| stored.saturating_add(reader.rows()));
    if rows > stored {
        return Err(wrong(stored));
    }
    let mut building =
        Building { files, link: 0, index: RowIndex::with_room_for(rows)?, left: HashSet::default(), rows };
    for (number, (reader, _)) in links.iter().enumerate().rev() {
        let newer: Vec<&Sweep> = links[number + 1..].iter().flat_map(|(_, sweeps)| sweeps.iter()).collect();
        building.link = number;
        let (mut file, mut dead) = (files.first_of(number), Vec::new());
        reader.read_columns(&mut |rows| {
            wait()?;
            if !building.add(file, rows, &newer, &mut dead)? {
                return Err(wrong(building.rows + 1));
            }
            file += 1;
            // A row that died replaced the one of an older checkpoint, which must not come back.
            if number > 0 {
                building.leave(&dead)?;
            }
            dead.clear();
            Ok(())
        })?;
        reader.read_tombstones(&mut |ids| building.leave(ids))?;
    }
    let index = building.index;
    if index.len() == rows { Ok(index) } else { Err(wrong(index.len())) }
}

struct Building<'a> {
    files: &'a Files,
    /// The number of the checkpoint that is read.
    link: usize,
    index: RowIndex,
    /// Ids that left since the checkpoints that are still to be read.
    left: HashSet<Id, IdHash>,
    /// How many rows there are to be.
    rows: u64,
}

/// `Corruption` where an id that a checkpoint of the chain has, by its number, has another place in the same checkpoint.
pub(super) fn check_is_once(files: &Files, link: usize, place: Place, id: Id) -> Result<()> {
    match files.find(place) {
        Some((file, number, _)) if files.link_of(number) == link => {
            let what = format!("how often id {id} is in the checkpoint");
            Err(Error::corruption(file.mapping().path(), 0, &what, "once", "in two files"))
        }
        _ => Ok(()),
    }
}

/// How many ids ahead the line of an id is asked for.
const AHEAD: usize = 24;

impl Building<'_> {
    /// Add the rows of a file that no newer checkpoint has or took, and the ids of those that a newer sweep took to `dead`. `false` where there
    /// are more rows than there are to be.
    ///
    /// Errors: `Corruption` where the checkpoint has an id twice.
    fn add(&mut self, file: usize, rows: &RowColumns<'_>, newer: &[&Sweep], dead: &mut Vec<Id>) -> Result<bool> {
        let dim = rows.parts[0].len() / rows.len().max(1);
        for (row, &id) in rows.ids.iter().enumerate() {
            if let Some(&later) = rows.ids.get(row + AHEAD) {
                self.index.prefetch(later);
            }
            let weights = &rows.parts[0][row * dim..][..dim];
            if !self.left.is_empty() && self.left.contains(&id) {
                continue;
            }
            if newer.iter().any(|sweep| sweep.kills(&rows.header(row), weights)) {
                dead.push(id);
                continue;
            }
            let has_room = self.index.len() < self.rows;
            if has_room && self.index.insert_new(id, self.files.place(file, row)) {
                continue;
            }
            // A newer checkpoint has the row, or so does this one in another file.
            match self.index.get(id) {
                Place::NONE => return Ok(false),
                place => check_is_once(self.files, self.link, place, id)?,
            }
        }
        Ok(true)
    }

    /// These ids have no row, whatever older checkpoints have.
    fn leave(&mut self, ids: &[Id]) -> Result<()> {
        let refused = |_| memory::refused("keep the ids that left", 2 * size_of_val(ids));
        self.left.try_reserve(ids.len()).map_err(refused)?;
        self.left.extend(ids);
        Ok(())
    }
}
