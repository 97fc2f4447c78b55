//! What the deltas after an index changed: the newest place of each of their ids, and the rules of eviction that were applied since.

use super::build::check_unique;
use super::files::{RowFileLocation, RowFileSet};
use crate::checkpoint::TableReader;
use crate::error::{Error, Kind, Result};
use crate::index::SlotIndex;
use crate::lifecycle::ExpirySweep;
use crate::rows::RowHeader;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Ids that are looked up together.
const CHUNK: usize = 256;

/// A sweep of a delta. It takes rows of the checkpoints before that delta.
#[derive(Clone, Debug)]
struct OverlaySweep {
    link: usize,
    sweep: ExpirySweep,
}

/// The changes of the deltas after an index, as one map. That of a version is never changed: the next version has a copy with more deltas.
#[derive(Debug)]
pub(super) struct DeltaOverlay {
    places: SlotIndex,
    sweeps: Vec<OverlaySweep>,
}

impl DeltaOverlay {
    /// Of no deltas.
    pub(super) fn empty() -> Self {
        Self { places: SlotIndex::unbounded(), sweeps: Vec::new() }
    }

    /// A copy, to which deltas can be added.
    pub(super) fn try_clone(&self) -> Result<Self> {
        Ok(Self { places: self.places.copied()?, sweeps: self.sweeps.clone() })
    }

    /// Add a delta, whose files are the last of `files`. Every row and tombstone of the delta is read and verified. With an error the overlay
    /// has a part of the delta, and is to be dropped.
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
        // An id with both a row and a tombstone in a delta is back.
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

    /// Put the place of each id into `slots` where a delta changed it: [`Place::TOMBSTONE`] of one that left.
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

    /// Whether a rule looks at the weights of rows.
    pub(super) fn needs_weights(&self) -> bool {
        self.sweeps.iter().any(|each| each.sweep.needs_weights())
    }

    /// Whether a rule of eviction took a row of a checkpoint since. `weights` may be empty where no rule needs them.
    pub(super) fn is_expired(&self, link: usize, header: &RowHeader, weights: &[f32]) -> bool {
        self.sweeps.iter().any(|each| link < each.link && each.sweep.matches(header, weights))
    }

    /// Whether no id was changed.
    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Whether there are rules of eviction to hold rows against.
    pub(super) fn has_rules(&self) -> bool {
        !self.sweeps.is_empty()
    }

    /// How many sweeps rows are held against.
    pub(super) fn sweeps(&self) -> usize {
        self.sweeps.len()
    }

    /// How many ids were changed.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        self.places.bytes()
    }
}

/// The row of an id in a delta is beyond what the served weights are stored in.
fn precision_error(files: &RowFileSet, id: Id) -> Error {
    let name = &files.links()[files.links().len() - 1].name;
    let precision = files.precision().name();
    let what = format!(
        "checkpoint {name} has a weight in the row of id {id} that {precision} cannot hold: serve a checkpoint in a wider precision, such as bf16"
    );
    Error::new(Kind::Input, what)
}
