//! Verifies the index file of a checkpoint against the checkpoint.

use super::files::{RowFileLocation, RowFileSet};
use super::index::{INDEX_FILE, ServeIndex, read_index};
use super::opening::{open_readers, resolve_name};
use super::version::{build_indexes, files_of, indexes_of_file};
use crate::checkpoint::{CheckpointChain, CheckpointDirectory, LatestCheckpoint, WaitCallback};
use crate::error::{Error, Result};
use crate::io::MappingAccess;
use crate::types::Id;

/// Number of ids looked up together.
const IDS_AT_ONCE: usize = 4096;

/// Verifies the index file of a checkpoint against its rows: of the latest checkpoint, or of the one that `at` names.
/// Returns its number of rows; `None` if there is no such file, or one that servers rebuild because it has another
/// version or belongs to other files. Reads and verifies all rows, and builds an index in this process's memory. `wait`
/// is called during the work; an error from it aborts it.
///
/// Errors: as [`TableServer::open`](super::TableServer::open), `Corruption` if the file is corrupted or contradicts the
/// rows; errors of `wait`.
pub fn check_index(root: &CheckpointDirectory, at: Option<&str>, wait: &mut WaitCallback<'_>) -> Result<Option<u64>> {
    let name = resolve_name(root, at)?;
    let directory = root.subdirectory(name);
    let Some(found) = read_index(&directory)? else { return Ok(None) };
    let chain = CheckpointChain::open(root, LatestCheckpoint { name })?;
    let opened = open_readers(chain.links().iter().rev())?;
    let files = files_of(&opened, MappingAccess::Scattered)?;
    let Some(found) = indexes_of_file(found, &opened, &files) else { return Ok(None) };
    let right = build_indexes(&opened, &files, wait)?;
    let mut rows = 0;
    let path = directory.join(INDEX_FILE);
    for ((found, right), files) in found.indexes.iter().zip(&right.indexes).zip(&files) {
        if found.len() != right.len() {
            return Err(Error::corruption(&path, 0, "the number of ids", right.len(), found.len()));
        }
        if let Some(id) = first_difference(found, right, files, wait)? {
            let what = format!("the place of id {id}");
            return Err(Error::corruption(&path, 0, &what, "that of the rows", "another one"));
        }
        rows += found.len();
    }
    Ok(Some(rows))
}

/// Returns an id whose locations in the two indexes differ. `wait` is called for every batch of ids.
fn first_difference(
    found: &ServeIndex,
    right: &ServeIndex,
    files: &RowFileSet,
    wait: &mut WaitCallback<'_>,
) -> Result<Option<Id>> {
    let (mut of_found, mut of_right) = (vec![0; IDS_AT_ONCE], vec![0; IDS_AT_ONCE]);
    for file in files.all() {
        // Pages outside memory would otherwise be read one by one, and a truncated file would kill the process.
        file.mapping().populate(&(file.ids..file.ids + file.rows * size_of::<Id>()))?;
        let ids: Vec<Id> = (0..file.rows).map(|row| file.id(row)).collect();
        for ids in ids.chunks(IDS_AT_ONCE) {
            wait()?;
            let (of_found, of_right) = (&mut of_found[..ids.len()], &mut of_right[..ids.len()]);
            found.get_batch(ids, of_found);
            right.get_batch(ids, of_right);
            let differs = ids.iter().zip(of_found.iter().zip(&*of_right)).find(|(_, (found, right))| found != right);
            if let Some((id, _)) = differs {
                return Ok(Some(*id));
            }
        }
    }
    // Ids that the files do not contain must not be in the index either.
    Ok(found.ids().find(|&id| right.get(id) == RowFileLocation::NONE))
}
