//! Many new rows at once, as columns: a load.
#![allow(unsafe_code)]

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use super::rows::RowBlock;
use super::table::{Shared, State, Table};
use crate::config::OnFull;
use crate::error::Result;
use crate::kernels::threads::beside;
use crate::memory;
use crate::rows::RowHeader;
use crate::slots::RowState;
use crate::types::{CacheSlot, Id};

/// Rows placed under one hold of the table's lock.
const ROWS_PER_CALL: usize = 65_536;
/// Rows that one thread copies at a time.
const ROWS_PER_TASK: usize = 2048;
/// How many rows ahead an insert asks for memory.
const INSERTS_AHEAD: usize = 24;

/// `n` rows of `D` columns, a slice for each field.
#[derive(Clone, Debug)]
pub struct RowColumns<'a> {
    /// `[n]`
    pub ids: &'a [Id],
    /// `[n]`
    pub last_steps: &'a [u64],
    /// `[n]`
    pub counts: &'a [u32],
    /// `[n]`
    pub scores: &'a [f32],
    /// `[n]`, for optimizers with a scalar slot.
    pub scalars: Option<&'a [f32]>,
    /// `[n]`
    pub modified_epochs: &'a [u32],
    /// `[n, D]` each: weights, then vector slots; there may be fewer than the table has, and the others are zeros.
    pub parts: Vec<&'a [f32]>,
}

impl RowColumns<'_> {
    /// How many rows.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The header of a row.
    pub fn header(&self, row: usize) -> RowHeader {
        RowHeader {
            id: self.ids[row],
            last_step: self.last_steps[row],
            count: self.counts[row],
            score: self.scores[row],
            scalar: self.scalars.map_or(0.0, |scalars| scalars[row]),
            modified_epoch: self.modified_epochs[row],
        }
    }

    /// Copy the vector part of a row: the parts that there are, then zeros.
    pub fn copy_vector(&self, row: usize, into: &mut [f32]) {
        let dim = self.parts[0].len() / self.len();
        let (given, slots) = into.split_at_mut(dim * self.parts.len());
        for (part, into) in self.parts.iter().zip(given.chunks_exact_mut(dim)) {
            into.copy_from_slice(&part[row * dim..(row + 1) * dim]);
        }
        slots.fill(0.0);
    }

    /// The same rows without the optimizer's slots.
    #[must_use]
    pub fn without_slots(&self) -> Self {
        Self { scalars: None, parts: self.parts[..1].to_vec(), ..self.clone() }
    }
}

/// Some rows of columns.
#[derive(Clone, Copy, Debug)]
pub struct PickedRows<'a> {
    columns: &'a RowColumns<'a>,
    /// Their numbers there, rising; without them it is all rows.
    numbers: Option<&'a [u32]>,
}

impl<'a> PickedRows<'a> {
    /// All rows.
    pub fn all(columns: &'a RowColumns<'a>) -> Self {
        Self { columns, numbers: None }
    }

    /// Those with these numbers, each once.
    pub fn some(columns: &'a RowColumns<'a>, numbers: &'a [u32]) -> Self {
        Self { columns, numbers: Some(numbers) }
    }

    /// How many rows.
    pub fn len(&self) -> usize {
        self.numbers.map_or(self.columns.len(), <[u32]>::len)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn number(&self, at: usize) -> usize {
        self.numbers.map_or(at, |numbers| numbers[at] as usize)
    }

    fn ids(&self, range: Range<usize>) -> Cow<'a, [Id]> {
        match self.numbers {
            None => Cow::Borrowed(&self.columns.ids[range]),
            Some(numbers) => Cow::Owned(numbers[range].iter().map(|&row| self.columns.ids[row as usize]).collect()),
        }
    }

    /// The header of one of them.
    pub fn header(&self, at: usize) -> RowHeader {
        self.columns.header(self.number(at))
    }

    /// Copy the vector part of one of them.
    pub fn copy_vector(&self, at: usize, into: &mut [f32]) {
        self.columns.copy_vector(self.number(at), into);
    }

    /// Rows one behind the other.
    fn block(&self, rows: Range<usize>, floats: usize) -> Result<(Vec<RowHeader>, Vec<f32>)> {
        let mut vectors = memory::zeros("copy rows", rows.len() * floats)?;
        let mut headers = Vec::new();
        memory::reserve(&mut headers, "copy rows", rows.len())?;
        for (row, vector) in rows.zip(vectors.chunks_exact_mut(floats)) {
            headers.push(self.header(row));
            self.copy_vector(row, vector);
        }
        Ok((headers, vectors))
    }
}

impl Table {
    /// Make room for so many rows at once, as far as the host budget has it.
    pub fn reserve_rows(&self, rows: u64) -> Result<()> {
        let mut state = self.shared.lock_any()?;
        let free = u64::from(state.host.slots.free_slots());
        state.host.reserve(rows.min(free) as usize)
    }

    /// Add or overwrite rows, each given once. As [`Table::import_rows`], which says what is an error; rows that the table has not, and
    /// that fit the host budget, go straight to their places.
    pub fn import_columns(&self, rows: PickedRows<'_>) -> Result<()> {
        let floats = self.shared.layout.vector_floats();
        let mut begin = 0;
        while begin < rows.len() {
            let end = rows.len().min(begin + ROWS_PER_CALL);
            let placed = self.place_new(rows, begin..end)?;
            if placed < end - begin {
                // Known rows, or a full tier: one part the usual way.
                let (headers, vectors) = rows.block(begin + placed..end, floats)?;
                self.import_rows(RowBlock { headers: &headers, vectors: &vectors })?;
            }
            begin = end;
        }
        Ok(())
    }

    /// Put rows that are new into free slots of the host tier, as many from the first on as possible; how many.
    fn place_new(&self, rows: PickedRows<'_>, range: Range<usize>) -> Result<usize> {
        memory::check()?;
        let shared = &self.shared;
        let _rows = shared.reading_rows()?;
        let mut state = shared.lock_any()?;
        shared.check_writable()?;
        let ids = &*rows.ids(range.clone());
        let fit = shared.new_rows_that_fit(&state, ids);
        state.host.reserve(fit)?;
        let mut slots: Vec<CacheSlot> = Vec::new();
        memory::reserve(&mut slots, "place rows", fit)?;
        slots.extend((0..fit).map_while(|_| state.host.slots.take()));
        let floats = shared.layout.vector_floats();
        let arena = Arc::clone(state.host.arena());
        let copy = |(task, slots): (usize, &[CacheSlot])| {
            for (at, &slot) in slots.iter().enumerate() {
                let (row, to) = (range.start + task * ROWS_PER_TASK + at, arena.row(slot));
                // SAFETY: the slot was free and is this row's alone; nobody reads it before the table's lock is given up.
                unsafe {
                    *to.header = rows.header(row);
                    rows.copy_vector(row, std::slice::from_raw_parts_mut(to.vector, floats));
                }
            }
        };
        let placed = beside(slots.chunks(ROWS_PER_TASK).enumerate(), copy, || {
            for (at, (&id, &slot)) in ids.iter().zip(&slots).enumerate() {
                if let Some(&later) = ids.get(at + INSERTS_AHEAD) {
                    state.host.slots.prefetch_insert(later);
                }
                if !state.host.slots.insert_new(slot, id, RowState::DIRTY.with(RowState::MODIFIED)) {
                    return at;
                }
            }
            slots.len()
        });
        for &slot in &slots[placed..] {
            state.host.slots.give_back(slot);
        }
        state.rows += placed as u64;
        shared.contents_changed();
        shared.fit_host_to_index(&mut state);
        Ok(placed)
    }
}

impl Shared {
    /// How many of `ids`, from the first on, are new to the table, belong to it, and have a free slot in the host tier each.
    fn new_rows_that_fit(&self, state: &State, ids: &[Id]) -> usize {
        let room = self.capacity_rows(state).saturating_sub(state.rows + state.provisional);
        let on_device = state.device.as_ref().map_or(0, |device| device.slots.used() + device.slots.overflow_used());
        // Rows of a table that descends from a checkpoint are marked as modified now.
        let descends = state.lineage.is_wanted();
        if descends || on_device > 0 || self.config.on_full == OnFull::Evict && room < ids.len() as u64 {
            return 0;
        }
        let fit = (ids.len() as u64).min(room).min(u64::from(state.host.slots.free_slots())) as usize;
        let mut new = fit;
        let (buckets, bucketing) = (&self.config.buckets, self.config.bucketing());
        if let Some(foreign) = ids[..new].iter().position(|&id| !buckets.contains(&bucketing.of(id))) {
            new = foreign;
        }
        if let Some(ssd) = &self.ssd
            && ssd.rows() > 0
        {
            let mut known = vec![false; new];
            ssd.maybe_contains(&ids[..new], &mut known);
            new = known.iter().position(|&known| known).unwrap_or(new);
        }
        new
    }
}
