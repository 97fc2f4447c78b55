//! Rows in and out of the tier: append, remove, clear.

use std::sync::Arc;

use super::buffer::{Pool, WAITING};
use super::classes::{Classes, MOST_CLASSES, keep_neighbours_together};
use super::format::Content;
use super::index::TagIndex;
use super::record::{encode_row, encode_tombstone};
use super::seal::end_bytes;
use super::segment::OpenSegment;
use super::shared::{Counters, Shared, State, Stream};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::RowRef;
use crate::sync::lock;
use crate::types::Id;

/// The most records that are written while the table's lock is held once.
const AT_ONCE: usize = 2048;
/// The most bytes of records that are written while the table's lock is held once.
const BYTES_AT_ONCE: usize = 1 << 20;

/// Records of rows that are being appended, not yet in a segment.
#[derive(Default)]
struct Records {
    bytes: Vec<u8>,
    classes: Vec<u8>,
    /// `write_seq` of the first one; those of the others follow.
    first_seq: u64,
}

impl Shared {
    pub(super) fn append(self: &Arc<Self>, rows: &[RowRef<'_>], known: &[bool]) -> Result<()> {
        self.check_rows(rows, known)?;
        self.check_writable()?;
        let new = known.iter().filter(|known| !**known).count() as u64;
        if new > 0 {
            let mut state = self.state();
            let held = state.index.len() as u64;
            if held + new > self.home.geometry.capacity_rows {
                drop(state);
                return Err(self.full(held, new));
            }
            debug_assert!(held + new <= TagIndex::MOST_IDS, "the capacity is no larger");
            state.index.reserve(new as usize)?;
        }
        self.check_memory(rows.len(), self.home.geometry.row_bytes)?;
        let mut done = 0;
        self.append_all(rows, known, &mut done).inspect_err(|_| {
            // What the caller does not know of as being here is not here.
            let new = rows[..done].iter().zip(known).filter(|(_, known)| !**known);
            self.remove_unwritten(&new.map(|(row, _)| row.header.id).collect::<Vec<Id>>());
        })
    }

    /// Append rows, of which `done` are done.
    fn append_all(self: &Arc<Self>, rows: &[RowRef<'_>], known: &[bool], done: &mut usize) -> Result<()> {
        let at_once = (BYTES_AT_ONCE / self.home.geometry.row_bytes).clamp(1, AT_ONCE);
        let (mut seq, dither) = {
            let mut state = self.state();
            let first = state.next_seq;
            state.next_seq += rows.len() as u64;
            (first, state.next_dither())
        };
        let mut records = Records::default();
        for (rows, known) in rows.chunks(at_once).zip(known.chunks(at_once)) {
            self.make_records(rows, known, (seq, dither), &mut records);
            seq += rows.len() as u64;
            let mut taken = 0;
            while taken < rows.len() {
                Pool::shared().throttle();
                if self.home.space.has_failed() {
                    self.check_writable()?;
                }
                let mut state = self.state();
                let (more, ready) = self.append_some(&mut state, rows, known, &records, taken);
                *done += more;
                ready?;
                if more == 0 {
                    drop(state);
                    self.wait_for_more_room(*done > 0)?;
                    continue;
                }
                taken += more;
                state.reap();
                self.compact_if_worthwhile(&state);
            }
        }
        self.spill_if_short();
        Counters::add(&self.counters.row_bytes_given, (rows.len() * self.home.geometry.row_bytes) as u64);
        Ok(())
    }

    /// `Memory` unless the system has what as many records of `record_bytes` may take: write buffers, those that wait for the disk
    /// included, and room for their entries. While records go in, and some of them are there, nobody can be told any more.
    fn check_memory(&self, records: usize, record_bytes: usize) -> Result<()> {
        let block_bytes = self.home.block_bytes;
        // Each stream has one that is not full at the beginning, and one at the end.
        let begun = 2 * (usize::from(MOST_CLASSES) + 1);
        let filled = (records.saturating_mul(record_bytes) / block_bytes).min(WAITING);
        let blocks = Pool::shared().missing_bytes(records.min(filled + begun), block_bytes);
        let ends = if filled == 0 { 0 } else { end_bytes(self.home.geometry.rows_per_segment as usize, block_bytes) };
        let entries: usize = self.view().open.iter().flatten().map(|open| open.entries_to_come(records)).sum();
        memory::room_or_reserve("write rows to the SSD tier", blocks + ends + entries)
    }

    fn check_rows(&self, rows: &[RowRef<'_>], known: &[bool]) -> Result<()> {
        if rows.len() != known.len() {
            let message = format!("{} rows and {} flags: give one flag a row", rows.len(), known.len());
            return Err(Error::new(Kind::Input, message));
        }
        let floats = self.layout.vector_floats();
        match rows.iter().find(|row| row.vector.len() != floats) {
            None => Ok(()),
            Some(row) => Err(Error::new(
                Kind::Input,
                format!(
                    "the row of id {} has {} floats and the table's rows have {floats}",
                    row.header.id,
                    row.vector.len()
                ),
            )),
        }
    }

    /// Make the records of rows, the first with this `write_seq`, outside the table's lock.
    fn make_records(&self, rows: &[RowRef<'_>], known: &[bool], (seqs, dither): (u64, f32), records: &mut Records) {
        let row_bytes = self.home.geometry.row_bytes;
        records.first_seq = seqs;
        records.classes.clear();
        records.classes.resize(rows.len(), Classes::of_new());
        if known.contains(&true) {
            let ids: Vec<Id> = rows.iter().map(|row| row.header.id).collect();
            let mut older = vec![None; ids.len()];
            let state = self.view();
            state.index.get_batch(&ids, &mut older);
            let classes = self.classes(&state);
            older.iter_mut().zip(known).filter(|(_, known)| !**known).for_each(|(older, _)| *older = None);
            for ((class, older), seq) in records.classes.iter_mut().zip(&older).zip(seqs..) {
                if let Some(older) = older {
                    let segment = state.segment(*older);
                    let interval = seq.saturating_sub(segment.mean_seq());
                    *class = classes.of_rewritten(segment.class.min(classes.count - 1), interval, dither);
                }
            }
            keep_neighbours_together(&mut records.classes, &older);
        }
        records.bytes.resize(rows.len() * row_bytes, 0);
        for ((row, bytes), seq) in rows.iter().zip(records.bytes.chunks_exact_mut(row_bytes)).zip(seqs..) {
            encode_row(bytes, row.header, row.vector, self.layout.scalar_slot, seq);
        }
    }

    /// Take rows from number `first` on as long as there is room in the open segments, or for new ones; how many.
    fn append_some(
        &self,
        state: &mut State,
        rows: &[RowRef<'_>],
        known: &[bool],
        records: &Records,
        first: usize,
    ) -> (usize, Result<()>) {
        if self.home.space.free_bytes() < self.bytes_kept(state) {
            return (0, Ok(()));
        }
        let highest_epoch = rows.iter().map(|row| row.header.modified_epoch).max().unwrap_or(0);
        state.highest_epoch = state.highest_epoch.max(highest_epoch);
        let bytes = records.bytes.chunks_exact(self.home.geometry.row_bytes);
        let each = rows.iter().zip(known).zip(records.classes.iter().zip(bytes)).zip(records.first_seq..);
        let (mut taken, mut ready) = (0, Ok(true));
        for (((row, known), (class, bytes)), seq) in each.skip(first) {
            let stream = Stream::Rows(*class);
            if state.is_full(stream) {
                ready = self.ready(state, stream);
                if !matches!(ready, Ok(true)) {
                    break;
                }
            }
            let header = row.header;
            let open = state.open[stream.index()].as_mut().expect("just made ready");
            let binding = open.segment.binding;
            let (record, room) = open.push(header.id, seq, header.modified_epoch);
            room.copy_from_slice(bytes);
            binding.bind(record, room);
            open.segment.add_live(1);
            let location = open.segment.location(record);
            match if *known { state.index.replace(header.id, location) } else { None } {
                Some(older) => state.bury_later(older),
                None => state.index.insert(header.id, location),
            }
            taken += 1;
        }
        state.count_buried();
        (taken, ready.map(|_| ()))
    }

    /// Where buffers are scarce, keep none that is half filled.
    fn spill_if_short(&self) {
        if Pool::shared().is_short() {
            self.state().open.iter_mut().flatten().for_each(OpenSegment::spill);
        }
    }

    pub(super) fn remove(self: &Arc<Self>, ids: &[Id]) -> Result<()> {
        let mut gone = Vec::new();
        let removed = self.forget(ids, |_, _| true, &mut gone);
        let last = gone.last().and_then(|last| ids.iter().position(|id| id == last));
        if let (Err(_), Some(last), true) = (&removed, last, self.home.space.has_failed()) {
            // Those that are gone cannot come back: their records may be gone too.
            self.remove_unwritten(&ids[last + 1..]);
            return Ok(());
        }
        removed
    }

    /// Remove ids that are here without tombstones, for a tier that only reads: it publishes no state any more that would need them.
    pub(super) fn remove_unwritten(&self, ids: &[Id]) {
        let mut state = self.state();
        for &id in ids {
            if let Some(location) = state.index.remove(id) {
                state.bury_later(location);
            }
        }
        state.count_buried();
    }

    /// As [`Shared::wait_for_room`], for a call of which a part may be `begun`. Where there is none then, not all of it can be done, and
    /// the tier only reads from now on: only damaged segments that cannot be compacted lead there.
    fn wait_for_more_room(self: &Arc<Self>, begun: bool) -> Result<()> {
        self.wait_for_room().inspect_err(|error| {
            if begun {
                self.home.space.fail(error.clone());
            }
        })
    }

    /// Remove those of `ids` that are here and for which `still` says true, each with a tombstone; on an error too they are in `gone`.
    pub(super) fn forget(
        self: &Arc<Self>,
        ids: &[Id],
        still: impl Fn(&State, usize) -> bool,
        gone: &mut Vec<Id>,
    ) -> Result<()> {
        self.check_writable()?;
        self.check_memory(ids.len(), self.home.schema.record_bytes(Content::Tombstones))?;
        let mut done = 0;
        while done < ids.len() {
            Pool::shared().throttle();
            let mut state = self.state();
            if !self.ready(&mut state, Stream::Tombstones)? {
                drop(state);
                self.wait_for_more_room(done > 0)?;
                continue;
            }
            let mut open = state.open[Stream::Tombstones.index()].take().expect("just made ready");
            for (at, &id) in ids.iter().enumerate().skip(done).take(AT_ONCE) {
                if open.is_full(state.next_seq, state.highest_epoch) {
                    break;
                }
                done += 1;
                if !still(&state, at) {
                    continue;
                }
                let Some(location) = state.index.remove(id) else { continue };
                state.bury_later(location);
                let binding = open.segment.binding;
                let (record, bytes) = open.push(id, state.next_seq, state.highest_epoch);
                encode_tombstone(bytes, id, state.highest_epoch, state.next_seq);
                binding.bind(record, bytes);
                state.next_seq += 1;
                gone.push(id);
            }
            state.open[Stream::Tombstones.index()] = Some(open);
            state.count_buried();
            state.reap();
            self.compact_if_worthwhile(&state);
        }
        self.spill_if_short();
        Ok(())
    }

    pub(super) fn clear(&self) -> Result<()> {
        self.check_writable()?;
        let _publishing = lock(&self.publishing);
        let _compacting = self.not_compacting();
        let mut state = self.state();
        state.index.clear();
        state.tallies.drain(..).for_each(|tally| tally.end());
        state.emptied.clear();
        state.tombstones.clear();
        // The flusher finds the dropped segments doomed and gives their buffers back.
        for stream in Stream::all() {
            if let Some(open) = state.open[stream.index()].take() {
                open.abandon();
            }
        }
        for slot in 0..state.segments.len() as u32 {
            state.drop_segment(slot);
        }
        Ok(())
    }
}
