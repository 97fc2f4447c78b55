//! Immutable context of an open table: its settings, its SSD tier, and the version of its contents.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::config::{MissingRead, TableConfig};
use crate::error::{Error, Kind, Result};
use crate::kernels::parallel_ranges;
use crate::kernels::thread_pool::DisjointPtr;
use crate::rows::{RowAddress, RowHeader, RowInitializer, RowLayout, RowMut, RowRef, ScoreDecay};
use crate::runtime::call_context::ForeignReaders;
use crate::runtime::sync::{AtomicU64, Ordering};
use crate::sizing::TableSizing;
use crate::ssd::SsdTier;
use crate::stats::DurationHistogram;
use crate::tiers::DeviceRowReader;
use crate::types::{CacheSlot, Id};

/// The part of a table that its lock does not guard, because it is immutable or synchronized internally.
pub(crate) struct TableContext {
    pub(crate) config: TableConfig,
    pub(crate) layout: RowLayout,
    pub(crate) ssd: Option<SsdTier>,
    pub(crate) decay: ScoreDecay,
    /// Measures the miss ratio as a function of the rows in RAM, if enabled.
    pub(crate) sizing: TableSizing,
    initializer: RowInitializer,
    device_rows: Option<Arc<dyn DeviceRowReader>>,
    /// The holders of `rows_in_use` that are running code of `device_rows`.
    reading_device: ForeignReaders,
    version: AtomicU64,
    /// Time that each plan's forward waited until all of its rows had slots.
    pub(crate) row_wait: DurationHistogram,
    /// Durations of holding the table's lock.
    pub(crate) lock_held: DurationHistogram,
}

impl TableContext {
    pub(crate) fn new(
        config: TableConfig,
        (initializer, decay): (RowInitializer, ScoreDecay),
        device_rows: Option<Arc<dyn DeviceRowReader>>,
        ssd: Option<SsdTier>,
    ) -> Self {
        Self {
            layout: config.layout(),
            decay,
            sizing: TableSizing::default(),
            initializer,
            ssd,
            device_rows,
            reading_device: ForeignReaders::default(),
            version: AtomicU64::new(0),
            row_wait: DurationHistogram::default(),
            lock_held: DurationHistogram::default(),
            config,
        }
    }

    /// True if the table has a device tier. Its kernels then run on it.
    pub(crate) fn has_device(&self) -> bool {
        self.device_rows.is_some()
    }

    /// True if ids that are not admitted share a row.
    pub(crate) fn has_oov_row(&self) -> bool {
        self.config.not_admitted == MissingRead::OovRow
    }

    /// Number of floats in the vector part of a row.
    #[inline]
    pub(crate) fn floats(&self) -> usize {
        self.layout.vector_floats()
    }

    /// A version that changes with every change of the table's rows: a training step, an import, a removal. Moves of
    /// rows between tiers do not change it.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Records a change of the table's rows.
    pub(crate) fn bump_version(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    /// Adds the table's name to an error.
    pub(crate) fn in_table(&self, error: Error) -> Error {
        error.context(format!("table {:?}", self.config.name))
    }

    /// Rejects changes of rows, including rows in RAM, after a write of the SSD tier has failed.
    ///
    /// Errors: `ReadOnly`.
    pub(crate) fn check_writable(&self) -> Result<()> {
        match &self.ssd {
            Some(ssd) if ssd.is_read_only() => ssd.check_writable().map_err(|error| self.in_table(error)),
            _ => Ok(()),
        }
    }

    /// Appends rows to the SSD tier. `known[i]` is true if an older copy of row `i` is there. The error names the table
    /// and states which rows are safe.
    pub(crate) fn append(&self, ssd: &SsdTier, rows: &[RowRef<'_>], known: &[bool]) -> Result<()> {
        ssd.append(rows, known).map_err(|error| self.not_written(error))
    }

    /// Removes rows from the SSD tier. Errors: as [`TableContext::append`].
    pub(crate) fn remove_on_ssd(&self, ssd: &SsdTier, ids: &[Id]) -> Result<()> {
        if ids.is_empty() { Ok(()) } else { ssd.remove(ids).map_err(|error| self.not_written(error)) }
    }

    fn not_written(&self, error: Error) -> Error {
        match error.kind() {
            Kind::Storage => error.context(format!(
                "table {:?}: nothing more can be written to its SSD tier, so it trains no further; its rows stay as the steps before left \
                 them, and can be read and saved elsewhere with Saver",
                self.config.name
            )),
            _ => self.in_table(error),
        }
    }

    /// Writes the initial weights of a row, and zeros to its vector slots.
    pub(crate) fn fill_initial(&self, id: Id, vector: &mut [f32]) {
        vector.fill(0.0);
        self.initializer.fill(id, &mut vector[..self.layout.dim]);
    }

    /// Writes the initial values of `count` rows on up to `threads` threads. The result is bitwise independent of their
    /// number.
    ///
    /// # Safety
    /// For each number below `count`, `row` must return the address of a row of this table's layout, whose memory
    /// contains floats and is valid for writes. The rows must not overlap, and no other thread may read or write them
    /// during the call.
    pub(crate) unsafe fn initialize_rows(
        &self,
        count: usize,
        row: impl Fn(usize) -> (Id, RowAddress) + Sync,
        threads: usize,
    ) {
        let (floats, dim) = (self.floats(), self.layout.dim);
        let cost_before = |row: usize| (row * floats) as u64;
        parallel_ranges(threads, count, cost_before, |range| {
            self.initializer.fill_all(range.map(&row).map(|(id, to)| {
                // SAFETY: the caller guarantees a valid address of floats that no other thread uses, and each number is
                // processed by one thread.
                let weights = unsafe {
                    to.header.write(RowHeader { id, ..RowHeader::default() });
                    to.vector.wrapping_add(dim).write_bytes(0, floats - dim);
                    std::slice::from_raw_parts_mut(to.vector, dim)
                };
                (id, weights)
            }));
        });
    }

    /// Like [`TableContext::initialize_rows`], but into buffers: headers `[n]` and vector parts `[n, V]`. Each of
    /// `new_rows` is an id and the position of its row in the buffers; positions ascend.
    pub(crate) fn initialize_rows_into(
        &self,
        new_rows: &[(Id, usize)],
        headers: &mut [RowHeader],
        vectors: &mut [f32],
        threads: usize,
    ) {
        let floats = self.floats();
        assert!(new_rows.windows(2).all(|pair| pair[0].1 < pair[1].1), "each row is inserted once");
        assert!(new_rows.last().is_none_or(|&(_, row)| row < headers.len() && (row + 1) * floats <= vectors.len()));
        let (headers, vectors) = (DisjointPtr(headers.as_mut_ptr()), DisjointPtr(vectors.as_mut_ptr()));
        let address = |row: usize| RowAddress { header: headers.at(row), vector: vectors.at(row * floats) };
        // SAFETY: the positions are within the buffers, as checked above, and distinct. The buffers are borrowed for
        // this call.
        unsafe {
            self.initialize_rows(new_rows.len(), |number| (new_rows[number].0, address(new_rows[number].1)), threads);
        }
    }

    /// Reads rows from SSD into buffers and waits for them: headers `[n]` and vector parts `[n, V]`. Each of `requests`
    /// is an id and the position of its row in the buffers. Returns the indices of the requests that are not on SSD,
    /// ascending.
    pub(crate) fn read_from_ssd(
        &self,
        ssd: &SsdTier,
        requests: &[(Id, usize)],
        headers: &mut [RowHeader],
        vectors: &mut [f32],
    ) -> Result<Vec<u32>> {
        let floats = self.floats();
        let fits = |row: usize| row < headers.len() && (row + 1) * floats <= vectors.len();
        assert!(requests.iter().all(|&(_, row)| fits(row)), "there is room for each row");
        let (headers, vectors) = (DisjointPtr(headers.as_mut_ptr()), DisjointPtr(vectors.as_mut_ptr()));
        let request = |&(id, row): &(Id, usize)| {
            let to = RowAddress { header: headers.at(row), vector: vectors.at(row * floats) };
            // SAFETY: the row is within the buffers, as checked above. They are borrowed until the fetch below is done.
            (id, unsafe { RowMut::new(to) })
        };
        ssd.fetch(requests.iter().map(request).collect()).wait()
    }

    /// Reads rows of the device tier into RAM: vector parts `[n, V]` and scalar slots `[n]`. Runs code outside of the
    /// Rust core. The caller holds `rows_in_use`, so that no kernel writes the rows, and not the table's lock.
    pub(crate) fn gather(&self, slots: &[CacheSlot], vectors: &mut [f32], scalars: &mut [f32]) -> Result<()> {
        let reader = self.device_rows.as_ref().expect("a device tier comes with a way to read it");
        let _foreign = self.reading_device.begin();
        reader.gather(slots, vectors, scalars)
    }

    /// Rejects calls from the code run by [`TableContext::gather`]: they would wait for the lock that their own caller
    /// holds.
    ///
    /// Errors: `State`.
    pub(crate) fn check_not_reading_device(&self) -> Result<()> {
        if self.reading_device.is_calling() {
            Err(self.called_from_within("its rows are read from the device"))
        } else {
            Ok(())
        }
    }

    /// The error for a caller that would wait for a lock that it holds itself.
    pub(crate) fn called_from_within(&self, activity: &str) -> Error {
        Kind::State.error(format!(
            "table {:?} is used by code that runs while {activity} (a destructor, perhaps, or an object that the garbage collector \
             finalizes), which would wait for itself for ever: use the table when that is done",
            self.config.name
        ))
    }
}
