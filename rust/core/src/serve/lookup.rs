//! Lookups of many ids: finds their rows, copies them to the output, and writes the values of missing ids.
#![allow(clippy::inline_always)] // Compiled for every instruction set; see `simd`.

use super::data_files::{RowFile, RowFileLocation, RowFilePointer, RowFileSet};
use super::index::ServeIndex;
use super::overlay::DeltaOverlay;
use super::page_age::major_faults;
use crate::checkpoint::TableSpec;
use crate::config::MissingRead;
use crate::error::{Kind, Result};
use crate::rows::{RowInitializer, WeightPrecision};
use crate::runtime::simd::{InstructionSet, SimdJob};
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Number of ids looked up together in the index.
const IDS_AT_ONCE: usize = 4096;
/// Number of rows prefetched together, and then copied.
const BLOCK: usize = 64;
/// Size of a cache line.
const LINE_BYTES: usize = 64;
/// Bytes copied per instruction, if the CPU has registers of this size.
const COPIED_BYTES: usize = 64;

/// The row of an id whose pages were not recently seen in memory.
pub(super) struct ColdRow {
    position: usize,
    place: RowFileLocation,
}

/// Detects that the OS has reclaimed pages since the start of a lookup. Not measured for short lookups.
enum PageFaultProbe {
    Unmeasured,
    Baseline(u64),
    Increased,
}

impl PageFaultProbe {
    fn of(ids: &[Id]) -> Self {
        if ids.len() > IDS_AT_ONCE { Self::Baseline(major_faults()) } else { Self::Unmeasured }
    }

    fn has_increased(&mut self) -> bool {
        if matches!(*self, Self::Baseline(before) if major_faults() != before) {
            *self = Self::Increased;
        }
        matches!(self, Self::Increased)
    }
}

/// Copies the float32 rows at locations, for positions starting at `first`. All of them are resident.
struct CopyRowsJob<'a, 'b, O, N> {
    gather: &'a ServeLookup<'a>,
    first: usize,
    slots: &'a [CacheSlot],
    answer: &'a mut LookupWriter<'b, O, N>,
}

impl<O: RowOutput, N: FnMut(usize, bool)> SimdJob for CopyRowsJob<'_, '_, O, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut spots = [RowFilePointer::NONE; BLOCK];
        for (number, block) in self.slots.chunks(BLOCK).enumerate() {
            self.gather.prefetch_rows(block, &mut spots);
            for (at, spot) in spots[..block.len()].iter().enumerate() {
                let position = self.first + number * BLOCK + at;
                if spot.is_none() {
                    self.answer.put(position, None);
                } else {
                    self.answer.copy(position, self.gather.files.row_at(spot));
                }
            }
        }
    }
}

/// Looks up ids in one version of a table.
pub(super) struct ServeLookup<'a> {
    files: &'a RowFileSet,
    index: &'a ServeIndex,
    overlay: &'a DeltaOverlay,
    /// Width of a row.
    dim: usize,
    /// Page generation.
    generation: usize,
    /// True if the rows of all files may be read immediately.
    all_resident: bool,
    /// For each file, true if all its rows may be read immediately. Empty if nothing is known, or all may.
    resident_files: Vec<bool>,
    /// True if rows are matched against eviction rules.
    has_rules: bool,
    /// True if these rules evaluate weights.
    needs_weights: bool,
}

impl<'a> ServeLookup<'a> {
    /// Creates a lookup of `ids` ids.
    pub(super) fn new(
        files: &'a RowFileSet,
        (index, overlay): (&'a ServeIndex, &'a DeltaOverlay),
        dim: usize,
        generation: usize,
        ids: usize,
    ) -> Self {
        let (rules, needs_weights) = (overlay.has_rules(), overlay.needs_weights());
        // Pages are checked per row for few ids, and if rules evaluate more than weights.
        let is_asked = !rules && (ids >= files.all().len() || files.are_known_resident(generation));
        let which = if is_asked { files.resident_files(generation) } else { Some(Vec::new()) };
        let (all_resident, resident_files) = (which.is_none(), which.unwrap_or_default());
        Self { files, index, overlay, dim, generation, all_resident, resident_files, has_rules: rules, needs_weights }
    }

    /// Writes the row of each id to `answer`. Returns the rows whose pages may not be in memory, which were not
    /// written.
    pub(super) fn write_resident_rows<O: RowOutput, N: FnMut(usize, bool)>(
        &self,
        ids: &[Id],
        answer: &mut LookupWriter<'_, O, N>,
    ) -> Vec<ColdRow> {
        let mut cold: Vec<ColdRow> = Vec::new();
        let mut slots = vec![NO_SLOT; ids.len().min(IDS_AT_ONCE)];
        let is_plain = self.all_resident && self.files.are_float32() && answer.is_float32();
        let mut faults = PageFaultProbe::of(ids);
        for (number, ids) in ids.chunks(IDS_AT_ONCE).enumerate() {
            let (slots, first) = (&mut slots[..ids.len()], number * IDS_AT_ONCE);
            self.index.get_batch(ids, slots);
            if !self.overlay.is_empty() {
                self.overlay.apply(ids, slots);
            }
            // The OS reclaimed pages that were assumed resident. Other missing pages are better prefetched together.
            if faults.has_increased() {
                self.defer_rows(first, slots, &mut cold, answer);
            } else if is_plain {
                InstructionSet::best().run(CopyRowsJob { gather: self, first, slots, answer });
            } else {
                self.gather(first, slots, &mut cold, answer);
            }
        }
        cold
    }

    /// Defers the rows at locations and prefetches their pages; reports missing ids immediately.
    fn defer_rows<O: RowOutput, N: FnMut(usize, bool)>(
        &self,
        first: usize,
        slots: &[CacheSlot],
        cold: &mut Vec<ColdRow>,
        answer: &mut LookupWriter<'_, O, N>,
    ) {
        for (at, &slot) in slots.iter().enumerate() {
            let (position, place) = (first + at, RowFileLocation(slot));
            if self.files.find(place).is_none() {
                answer.put(position, None);
            } else {
                cold.push(ColdRow { position, place });
                self.prefetch_row_pages(place);
            }
        }
    }

    /// Writes the resident rows at locations, for positions starting at `first`, and adds the others to `cold`.
    fn gather<O: RowOutput, N: FnMut(usize, bool)>(
        &self,
        first: usize,
        slots: &[CacheSlot],
        cold: &mut Vec<ColdRow>,
        answer: &mut LookupWriter<'_, O, N>,
    ) {
        // The disk reads the cold rows while the resident ones are written.
        let cold_bits = self.prefetch_cold_rows(first, slots, cold);
        let mut spots = [RowFilePointer::NONE; BLOCK];
        for (number, (block, cold)) in slots.chunks(BLOCK).zip(cold_bits).enumerate() {
            self.prefetch_rows(block, &mut spots);
            for (at, (&slot, spot)) in block.iter().zip(&spots).enumerate() {
                let position = first + number * BLOCK + at;
                if spot.is_none() {
                    answer.put(position, None);
                } else if self.has_rules {
                    if cold >> at & 1 == 0 {
                        answer.put(position, self.live_row(RowFileLocation(slot)));
                    }
                } else if cold >> at & 1 == 0 {
                    answer.put(position, Some(self.files.row_at(spot)));
                }
            }
        }
    }

    /// Adds the cold rows at locations, for positions starting at `first`, to `cold`, and prefetches their pages.
    /// Returns a word per block, with a bit per location that is set if the row is cold.
    fn prefetch_cold_rows(&self, first: usize, slots: &[CacheSlot], cold: &mut Vec<ColdRow>) -> Vec<u64> {
        let of_block = |(number, block): (usize, &[CacheSlot])| {
            let mut which = 0;
            for (at, &slot) in block.iter().enumerate() {
                let (place, spot) = (RowFileLocation(slot), self.files.pointer(RowFileLocation(slot)));
                if !spot.is_none() && !self.is_pointer_resident(&spot) && !self.is_resident(place) {
                    which |= 1 << at;
                    cold.push(ColdRow { position: first + number * BLOCK + at, place });
                    self.prefetch_row_pages(place);
                }
            }
            which
        };
        slots.chunks(BLOCK).enumerate().map(of_block).collect()
    }

    /// Prefetches the pages that a lookup of the row at a location reads.
    #[cold]
    fn prefetch_row_pages(&self, place: RowFileLocation) {
        if let Some((file, _, row)) = self.files.find(place) {
            file.ranges(row, self.has_rules).for_each(|range| file.prefetch(&range));
        }
    }

    /// Finds the addresses of the rows at some locations, and prefetches them into the CPU cache. The loop does nothing
    /// else: a CPU looks a few hundred instructions ahead, and overlaps more page walks the fewer instructions there
    /// are per row.
    #[inline(always)]
    fn prefetch_rows(&self, slots: &[CacheSlot], spots: &mut [RowFilePointer; BLOCK]) {
        let row_bytes = self.files.row_bytes();
        for (slot, spot) in slots.iter().zip(&mut *spots) {
            *spot = self.files.pointer(RowFileLocation(*slot));
            for offset in (0..row_bytes).step_by(LINE_BYTES) {
                spot.prefetch(offset);
            }
        }
        // Columns start at cache lines, and so does each row if a row is whole lines. Otherwise a row may end in one
        // more line.
        if !row_bytes.is_multiple_of(LINE_BYTES) {
            spots[..slots.len()].iter().for_each(|spot| spot.prefetch(row_bytes - 1));
        }
    }

    /// True if a row may be read immediately: there are no rules to evaluate, and its pages were recently seen in
    /// memory.
    #[inline]
    fn is_pointer_resident(&self, spot: &RowFilePointer) -> bool {
        let all = self.all_resident || self.resident_files.get(spot.file as usize).is_some_and(|all| *all);
        all || !self.has_rules && self.files.is_resident(spot, self.generation)
    }

    /// True if everything that a location needs was recently seen in memory.
    fn is_resident(&self, place: RowFileLocation) -> bool {
        let found = self.files.find(place);
        found.is_none_or(|(file, _, row)| file.is_resident(row, self.has_rules, self.generation))
    }

    /// Bytes of the row at a location, unless it is expired. The pages that this reads are in memory.
    fn live_row(&self, place: RowFileLocation) -> Option<&'a [u8]> {
        let (file, number, row) = self.files.find(place)?;
        let bytes = file.weights(row);
        let is_expired = || {
            let mut weights = vec![0.0; if self.needs_weights { self.dim } else { 0 }];
            if self.needs_weights {
                self.files.read(bytes, &mut weights);
            }
            self.overlay.is_expired(self.files.link_of(number), &file.header(row), &weights)
        };
        (!self.has_rules || !is_expired()).then_some(bytes)
    }

    /// Writes the rows that [`Self::write_resident_rows`] deferred, all of which were prefetched.
    #[cold]
    pub(super) fn write_cold_rows<O: RowOutput, N: FnMut(usize, bool)>(
        &self,
        cold: &[ColdRow],
        answer: &mut LookupWriter<'_, O, N>,
    ) -> Result<()> {
        for (file, _, row) in cold.iter().filter_map(|each| self.files.find(each.place)) {
            self.load_row_pages(file, row)?;
        }
        for each in cold {
            answer.put(each.position, self.live_row(each.place));
        }
        Ok(())
    }

    /// Waits until everything that a lookup of a row reads is in memory.
    fn load_row_pages(&self, file: &RowFile, row: usize) -> Result<()> {
        file.ranges(row, self.has_rules).try_for_each(|range| {
            if !file.pages.are_resident(range.start, range.len(), self.generation) {
                file.populate(&range)?;
                file.pages.mark_resident(range.start, range.len(), self.generation);
            }
            Ok(())
        })
    }
}

/// Destination of a lookup's rows, in one of the supported formats.
pub(super) trait RowOutput {
    /// Writes the row at a position, from its bytes in a file.
    fn put(&mut self, files: &RowFileSet, position: usize, row: &[u8]);

    /// Writes the value of a missing id.
    fn put_missing(&mut self, missing: &MissingWeights, position: usize, id: Id);

    /// Destination of the row at a position, as the bytes of a float32 file; `None` for other formats.
    fn float32(&mut self, position: usize) -> Option<&mut [u8]>;

    /// True if [`Self::float32`] returns destinations.
    fn is_float32(&self) -> bool;
}

/// Rows as float32: `[N, D]`.
pub(super) struct Float32Output<'a> {
    pub(super) out: &'a mut [f32],
    pub(super) dim: usize,
}

impl Float32Output<'_> {
    #[inline(always)]
    fn row(&mut self, position: usize) -> &mut [f32] {
        &mut self.out[position * self.dim..][..self.dim]
    }
}

impl RowOutput for Float32Output<'_> {
    fn put(&mut self, files: &RowFileSet, position: usize, row: &[u8]) {
        files.read(row, self.row(position));
    }

    fn put_missing(&mut self, missing: &MissingWeights, position: usize, id: Id) {
        missing.fill(id, self.row(position));
    }

    #[inline(always)]
    fn float32(&mut self, position: usize) -> Option<&mut [u8]> {
        Some(bytemuck::cast_slice_mut(self.row(position)))
    }

    fn is_float32(&self) -> bool {
        true
    }
}

/// Rows as the served files store them: `[N, bytes of a row]`.
pub(super) struct StoredOutput<'a> {
    pub(super) out: &'a mut [u8],
    pub(super) precision: WeightPrecision,
    /// One row as float32.
    pub(super) row: Vec<f32>,
    /// Position of a row that the precision cannot represent.
    pub(super) unrepresentable: Option<usize>,
}

impl StoredOutput<'_> {
    /// Stores the row in `self.row`.
    fn store(&mut self, position: usize) {
        let bytes = self.precision.row_bytes(self.row.len());
        let to = &mut self.out[position * bytes..][..bytes];
        if self.precision.store(&self.row, self.row.len(), to).is_err() {
            self.unrepresentable.get_or_insert(position);
        }
    }
}

impl RowOutput for StoredOutput<'_> {
    fn put(&mut self, _: &RowFileSet, position: usize, row: &[u8]) {
        let bytes = self.precision.row_bytes(self.row.len());
        if row.len() == bytes {
            self.out[position * bytes..][..bytes].copy_from_slice(row);
            return;
        }
        // A row of a trainer's delta, which is checked against the precision before the delta is served.
        WeightPrecision::Fp32.load(row, &mut self.row);
        self.store(position);
    }

    fn put_missing(&mut self, missing: &MissingWeights, position: usize, id: Id) {
        missing.fill(id, &mut self.row);
        self.store(position);
    }

    fn float32(&mut self, _: usize) -> Option<&mut [u8]> {
        None
    }

    fn is_float32(&self) -> bool {
        false
    }
}

/// Writes the rows of a lookup one by one. `on_row` receives the position of each id, and true if it has a row.
pub(super) struct LookupWriter<'a, O, N> {
    files: &'a RowFileSet,
    missing: &'a MissingWeights,
    ids: &'a [Id],
    out: &'a mut O,
    on_row: N,
    missing_rows: usize,
}

impl<'a, O: RowOutput, N: FnMut(usize, bool)> LookupWriter<'a, O, N> {
    pub(super) fn new(
        (files, missing): (&'a RowFileSet, &'a MissingWeights),
        ids: &'a [Id],
        out: &'a mut O,
        on_row: N,
    ) -> Self {
        Self { files, missing, ids, out, on_row, missing_rows: 0 }
    }

    /// Number of missing ids written.
    pub(super) fn missing_rows(&self) -> usize {
        self.missing_rows
    }

    /// True if [`Self::copy`] may be used for float32 files.
    fn is_float32(&self) -> bool {
        self.out.is_float32()
    }

    /// Writes the row of the id at a position, from its bytes in a file; `None` if the id is missing.
    pub(super) fn put(&mut self, position: usize, row: Option<&[u8]>) {
        (self.on_row)(position, row.is_some());
        if let Some(bytes) = row {
            self.out.put(self.files, position, bytes);
        } else {
            self.missing_rows += 1;
            self.out.put_missing(self.missing, position, self.ids[position]);
        }
    }

    /// Copies a row whose bytes are float32.
    #[inline(always)]
    pub(super) fn copy(&mut self, position: usize, row: &[u8]) {
        let Some(to) = self.out.float32(position) else { return self.put(position, Some(row)) };
        let (lines, rest) = row.as_chunks::<COPIED_BYTES>();
        let (to_lines, to_rest) = to.as_chunks_mut::<COPIED_BYTES>();
        for (to, from) in to_lines.iter_mut().zip(lines) {
            *to = *from;
        }
        if !rest.is_empty() {
            to_rest.copy_from_slice(rest);
        }
        (self.on_row)(position, true);
    }
}

/// Value read for a missing id of one table, with the data needed to write it.
#[derive(Clone, Debug)]
pub(super) enum MissingWeights {
    Value(f32),
    Initial(RowInitializer),
    OovRow(Vec<f32>),
}

impl MissingWeights {
    /// Returns the configured value. `None` selects the value that evaluation reads during training.
    pub(super) fn of(spec: &TableSpec, configured: Option<MissingRead>) -> Result<Self> {
        let layout = spec.row_layout()?;
        let shared = spec.oov_row.as_ref().map(|row| row.weights(layout).to_vec());
        Ok(match (configured.unwrap_or(spec.missing_read), shared) {
            (MissingRead::Zeros, _) => Self::Value(0.0),
            (MissingRead::Value(value), _) => Self::Value(value),
            (MissingRead::Initial, _) => Self::Initial(RowInitializer::new(spec.initializer, spec.seed, spec.key)?),
            (MissingRead::OovRow, Some(row)) => Self::OovRow(row),
            (MissingRead::OovRow, None) => {
                return Err(Kind::Mismatch.error(format!(
                    "table {:?} of module {:?} has no OOV row in its checkpoint: set missing= to \"zeros\", \"initial\" or a number",
                    spec.table, spec.module
                )));
            }
        })
    }

    /// Writes the value of a missing id to `weights`, which is `[D]`.
    pub(super) fn fill(&self, id: Id, weights: &mut [f32]) {
        match self {
            Self::Value(value) => weights.fill(*value),
            Self::Initial(initializer) => initializer.fill(id, weights),
            Self::OovRow(row) => weights.copy_from_slice(row),
        }
    }
}
