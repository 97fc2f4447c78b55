//! Exports in progress of a table without a device tier. Each passes on the rows in RAM slot by slot, and then the rows
//! on SSD.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use crate::sync::{Mutex, lock};
use crate::types::{CacheSlot, Id};

/// The exports of one table. Its rows may be read, planned and evicted during an export, so code that moves rows
/// consults it first: no row moves from slot to slot, and for rows that are written back it records whether they were
/// passed on.
#[derive(Debug, Default)]
pub(crate) struct ExportSet {
    under_way: Vec<ExportState>,
    next: u64,
    /// Versions of the contents that consumers take chunk by chunk, each pinned until its token is dropped.
    pinned_contents: Vec<(u64, Weak<()>)>,
}

#[derive(Debug)]
struct ExportState {
    number: u64,
    /// The version of the exported contents. Once the table has another, the export will end with an error.
    version: u64,
    /// Rows in slots below this one were passed on.
    cursor: CacheSlot,
    written_back: WrittenBackIds,
}

/// Ids of rows that an export has passed on from RAM and that were written to SSD afterwards, where the export must
/// skip them.
///
/// Its lock may be taken with or without the table's. No thread waits for the table's lock during a scan of the SSD
/// tier, because the holder of that lock may wait for free space there, and so for the end of the scan.
#[derive(Clone, Debug, Default)]
pub(crate) struct WrittenBackIds(Arc<Mutex<HashSet<Id>>>);

impl WrittenBackIds {
    pub(crate) fn contains(&self, id: Id) -> bool {
        lock(&self.0).contains(&id)
    }
}

impl ExportSet {
    /// Starts an export of the contents of this version. Returns the number of the export.
    pub(crate) fn begin(&mut self, version: u64) -> (u64, WrittenBackIds) {
        self.next += 1;
        let written_down = WrittenBackIds::default();
        self.under_way.push(ExportState { number: self.next, version, cursor: 0, written_back: written_down.clone() });
        (self.next, written_down)
    }

    pub(crate) fn end(&mut self, number: u64) {
        self.under_way.retain(|export| export.number != number);
    }

    /// The first slot that an export has not passed on yet.
    pub(crate) fn cursor(&self, number: u64) -> CacheSlot {
        self.under_way.iter().find(|export| export.number == number).map_or(0, |export| export.cursor)
    }

    /// Records that an export has passed on the rows in slots below `cursor`.
    pub(crate) fn move_cursor(&mut self, number: u64, cursor: CacheSlot) {
        if let Some(export) = self.under_way.iter_mut().find(|export| export.number == number) {
            export.cursor = cursor;
        }
    }

    /// True if rows must stay in their slots, because an export of these contents is in progress.
    pub(crate) fn keeps_rows_in_slots(&self, version: u64) -> bool {
        self.under_way.iter().any(|export| export.version == version)
    }

    /// Pins the contents of this version, as far as background work could change them, until the returned token is
    /// dropped. Dropping it needs no table lock, because Python must not wait for that lock.
    pub(crate) fn pin_contents(&mut self, version: u64) -> Arc<()> {
        self.pinned_contents.retain(|(_, wanted_by)| wanted_by.strong_count() > 0);
        let token = Arc::new(());
        self.pinned_contents.push((version, Arc::downgrade(&token)));
        token
    }

    /// True if an export of these contents is in progress, or they are pinned.
    pub(crate) fn are_contents_pinned(&self, version: u64) -> bool {
        let is_wanted = |(of, wanted_by): &(u64, Weak<()>)| *of == version && wanted_by.strong_count() > 0;
        self.keeps_rows_in_slots(version) || self.pinned_contents.iter().any(is_wanted)
    }

    /// Records that the rows in these slots are about to be written to SSD. Must precede any scan of the SSD tier that
    /// can find them.
    pub(crate) fn record_written_back(
        &self,
        version: u64,
        slots: &(impl Iterator<Item = CacheSlot> + Clone),
        id: impl Fn(CacheSlot) -> Id,
    ) {
        for export in self.under_way.iter().filter(|export| export.version == version) {
            let handed_over = slots.clone().filter(|&slot| slot < export.cursor);
            lock(&export.written_back.0).extend(handed_over.map(&id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_written_back_after_delivery_are_known_to_own_export() {
        let mut exports = ExportSet::default();
        let (first, seen_by_first) = exports.begin(7);
        let (second, seen_by_second) = exports.begin(7);
        let (_outdated, seen_by_outdated) = exports.begin(6);
        exports.move_cursor(first, 4);
        exports.move_cursor(second, 1);
        exports.record_written_back(7, &[0, 3, 4].into_iter(), |slot| Id::from(slot) * 10);
        let seen = |by: &WrittenBackIds| [0, 30, 40].map(|id| by.contains(id));
        assert_eq!(seen(&seen_by_first), [true, true, false]);
        assert_eq!(seen(&seen_by_second), [true, false, false]);
        assert_eq!(seen(&seen_by_outdated), [false; 3]);
        assert!(exports.keeps_rows_in_slots(7) && !exports.keeps_rows_in_slots(8));
        exports.end(first);
        exports.end(second);
        assert!(!exports.keeps_rows_in_slots(7) && !exports.are_contents_pinned(7));
        let token = exports.pin_contents(7);
        assert!(exports.are_contents_pinned(7) && !exports.are_contents_pinned(8) && !exports.keeps_rows_in_slots(7));
        drop(token);
        assert!(!exports.are_contents_pinned(7));
    }
}
