//! Changes of the deltas after an index: the latest location of each of their ids, and their sweeps.

use super::build::check_unique;
use super::data_files::{RowFileLocation, RowFileSet};
use crate::checkpoint::TableReader;
use crate::error::{Error, Kind, Result};
use crate::index::SlotIndex;
use crate::lifecycle::ExpirySweep;
use crate::rows::RowHeader;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Number of ids looked up together.
const CHUNK: usize = 256;

/// A sweep of a delta. It expires rows of the checkpoints before that delta.
#[derive(Clone, Debug)]
struct OverlaySweep {
    link: usize,
    sweep: ExpirySweep,
}

/// Changes of the deltas after an index, as one map. The overlay of a version is immutable: the next version has a copy
/// with more deltas.
#[derive(Debug)]
pub(super) struct DeltaOverlay {
    places: SlotIndex,
    sweeps: Vec<OverlaySweep>,
}

impl DeltaOverlay {
    /// Creates an overlay without deltas.
    pub(super) fn empty() -> Self {
        Self { places: SlotIndex::unbounded(), sweeps: Vec::new() }
    }

    /// Returns a copy to which deltas can be added.
    pub(super) fn try_clone(&self) -> Result<Self> {
        Ok(Self { places: self.places.copied()?, sweeps: self.sweeps.clone() })
    }

    /// Adds a delta, whose files are the last of `files`. Every row and tombstone of the delta is read and verified.
    /// After an error the overlay contains a part of the delta, and must be dropped.
    pub(super) fn add(&mut self, files: &RowFileSet, reader: &TableReader, sweeps: &[ExpirySweep]) -> Result<()> {
        let places = &mut self.places;
        places.reserve((reader.rows() + reader.tombstones()) as usize)?;
        let link = files.links().len() - 1;
        let mut set = |id: Id, place: RowFileLocation| {
            if !places.insert_new(id, place.0) {
                check_unique(files, link, RowFileLocation(places.get(id)), id)?;
                places.replace(id, place.0);
            }
            Ok(())
        };
        // An id with both a row and a tombstone in a delta was inserted again.
        reader.read_tombstones(&mut |ids| ids.iter().try_for_each(|&id| set(id, RowFileLocation::TOMBSTONE)))?;
        let mut file = files.first_file_of(link);
        reader.read_columns(&mut |rows| {
            files.check_weights(rows.parts[0]).map_err(|row| precision_error(files, rows.ids[row]))?;
            for (row, &id) in rows.ids.iter().enumerate() {
                set(id, files.location(file, row))?;
            }
            file += 1;
            Ok(())
        })?;
        for sweep in sweeps {
            self.sweeps.retain(|before| !sweep.covers(&before.sweep));
            self.sweeps.push(OverlaySweep { link, sweep: sweep.clone() });
        }
        Ok(())
    }

    /// Replaces the location in `slots` of each id that a delta changed: [`RowFileLocation::TOMBSTONE`] for a removed
    /// id.
    pub(super) fn apply(&self, ids: &[Id], slots: &mut [CacheSlot]) {
        let mut changed: [CacheSlot; CHUNK] = [NO_SLOT; CHUNK];
        for (ids, slots) in ids.chunks(CHUNK).zip(slots.chunks_mut(CHUNK)) {
            let changed = &mut changed[..ids.len()];
            self.places.get_batch(ids, changed);
            for (slot, changed) in slots.iter_mut().zip(changed).filter(|(_, changed)| **changed != NO_SLOT) {
                *slot = *changed;
            }
        }
    }

    /// True if a rule evaluates the weights of rows.
    pub(super) fn needs_weights(&self) -> bool {
        self.sweeps.iter().any(|each| each.sweep.needs_weights())
    }

    /// True if a later sweep expired a row of checkpoint `link`. `weights` may be empty if no rule needs them.
    pub(super) fn is_expired(&self, link: usize, header: &RowHeader, weights: &[f32]) -> bool {
        self.sweeps.iter().any(|each| link < each.link && each.sweep.matches(header, weights))
    }

    /// True if no id was changed.
    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// True if there are sweeps to match rows against.
    pub(super) fn has_rules(&self) -> bool {
        !self.sweeps.is_empty()
    }

    /// Number of sweeps that rows are matched against.
    pub(super) fn sweeps(&self) -> usize {
        self.sweeps.len()
    }

    /// Number of changed ids.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        self.places.bytes()
    }
}

/// Returns the error for a row of a delta that exceeds the range of the served precision.
fn precision_error(files: &RowFileSet, id: Id) -> Error {
    let name = &files.links()[files.links().len() - 1].name;
    let precision = files.precision().name();
    Kind::Input.error(format!(
        "checkpoint {name} has a weight in the row of id {id} that {precision} cannot hold: serve a checkpoint in a wider precision, such as bf16"
    ))
}
