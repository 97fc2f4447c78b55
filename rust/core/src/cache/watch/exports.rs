//! Exports under way of a table without a device tier. Each hands over the rows in RAM slot by slot, and then the rows on SSD.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use crate::sync::{Mutex, lock};
use crate::types::{CacheSlot, Id};

/// The exports of one table. Its rows may be read, planned and evicted meanwhile, so whoever moves rows asks or tells these first: no row
/// moves from slot to slot, and of rows that are written down it is noted whether they were handed over.
#[derive(Debug, Default)]
pub(crate) struct ExportSet {
    under_way: Vec<ExportState>,
    next: u64,
    /// The contents that somebody takes chunk by chunk, by their numbers, for as long as that somebody lives.
    pinned_contents: Vec<(u64, Weak<()>)>,
}

#[derive(Debug)]
struct ExportState {
    number: u64,
    /// The number of the table's contents that are exported. Once the table has another, the export will end with an error.
    version: u64,
    /// Rows in slots below this one were handed over.
    cursor: CacheSlot,
    written_back: WrittenBackIds,
}

/// Ids of rows that an export has handed over from RAM and that were written to SSD after that, where the export must leave them out.
///
/// Its lock may be taken with or without the table's. Nobody waits for the table's lock amid a scan of the SSD tier, because the holder of
/// that lock may wait for room there, and so for the end of the scan.
#[derive(Clone, Debug, Default)]
pub(crate) struct WrittenBackIds(Arc<Mutex<HashSet<Id>>>);

impl WrittenBackIds {
    pub(crate) fn contains(&self, id: Id) -> bool {
        lock(&self.0).contains(&id)
    }
}

impl ExportSet {
    /// Begin an export of the contents that have this number. Returns the number of the export.
    pub(crate) fn begin(&mut self, version: u64) -> (u64, WrittenBackIds) {
        self.next += 1;
        let written_down = WrittenBackIds::default();
        self.under_way.push(ExportState { number: self.next, version, cursor: 0, written_back: written_down.clone() });
        (self.next, written_down)
    }

    pub(crate) fn end(&mut self, number: u64) {
        self.under_way.retain(|export| export.number != number);
    }

    /// The first slot that an export has not handed over yet.
    pub(crate) fn cursor(&self, number: u64) -> CacheSlot {
        self.under_way.iter().find(|export| export.number == number).map_or(0, |export| export.cursor)
    }

    /// Note that an export has handed over the rows in slots below `cursor`.
    pub(crate) fn move_cursor(&mut self, number: u64, cursor: CacheSlot) {
        if let Some(export) = self.under_way.iter_mut().find(|export| export.number == number) {
            export.cursor = cursor;
        }
    }

    /// Whether rows must stay in their slots, because an export of these contents is under way.
    pub(crate) fn keeps_rows_in_slots(&self, version: u64) -> bool {
        self.under_way.iter().any(|export| export.version == version)
    }

    /// Whoever has what this returns wants the contents that have this number unchanged, as far as that hangs on nobody's call. It is let go
    /// of without the table's lock, which Python may not wait for.
    pub(crate) fn pin_contents(&mut self, version: u64) -> Arc<()> {
        self.pinned_contents.retain(|(_, wanted_by)| wanted_by.strong_count() > 0);
        let token = Arc::new(());
        self.pinned_contents.push((version, Arc::downgrade(&token)));
        token
    }

    /// Whether an export of these contents is under way, or somebody wants them.
    pub(crate) fn are_contents_pinned(&self, version: u64) -> bool {
        let is_wanted = |(of, wanted_by): &(u64, Weak<()>)| *of == version && wanted_by.strong_count() > 0;
        self.keeps_rows_in_slots(version) || self.pinned_contents.iter().any(is_wanted)
    }

    /// Note that the rows in these slots are about to be written down. This comes before a scan of the SSD tier can meet them.
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
    fn rows_that_were_handed_over_before_they_were_written_down_are_known_to_their_export_alone() {
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
