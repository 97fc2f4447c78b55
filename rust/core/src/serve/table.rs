//! One immutable version of a served table.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::data_files::RowFileSet;
use super::index::ServeIndex;
use super::lookup::{Float32Output, LookupWriter, MissingWeights, RowOutput, ServeLookup, StoredOutput};
use super::overlay::DeltaOverlay;
use super::page_age::PageGeneration;
use crate::checkpoint::TableSpec;
use crate::error::{Error, Kind, Result};
use crate::kernels::{TensorRows, forward_pooled};
use crate::rows::{RowLayout, WeightPrecision};
use crate::types::{CacheSlot, Id};

/// Method of pooling the rows of a bag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolingMode {
    /// Their sum.
    Sum,
    /// Their sum divided by their number. An empty bag is zeros.
    Mean,
}

/// Counters shared by all versions of all tables.
#[derive(Debug, Default)]
pub(super) struct LookupCounts {
    pub(super) lookups: AtomicU64,
    pub(super) ids: AtomicU64,
    pub(super) missing: AtomicU64,
    pub(super) cold: AtomicU64,
}

/// Number of ids whose rows are pooled at a time; a bag is never divided.
const POOLED_AT_ONCE: usize = 2048;

/// One version of a table.
#[derive(Debug)]
pub struct ServedTable {
    pub(super) spec: TableSpec,
    pub(super) rows: u64,
    pub(super) files: RowFileSet,
    pub(super) index: Arc<ServeIndex>,
    /// Number of checkpoints of the chain that the index covers.
    pub(super) indexed_links: usize,
    pub(super) overlay: DeltaOverlay,
    pub(super) missing: MissingWeights,
    pub(super) page_generation: Arc<PageGeneration>,
    pub(super) counts: Arc<LookupCounts>,
}

impl ServedTable {
    /// Path of the table's module in the model.
    pub fn module(&self) -> &str {
        &self.spec.module
    }

    /// Name of the table in its module.
    pub fn name(&self) -> &str {
        &self.spec.table
    }

    /// Width of a row.
    pub fn dim(&self) -> usize {
        self.spec.dim as usize
    }

    /// Precision of the weights in the served files.
    pub fn precision(&self) -> WeightPrecision {
        self.files.precision()
    }

    /// Number of rows of the table, from the checkpoint's manifest.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Number of training steps of the table.
    pub fn step(&self) -> u64 {
        self.spec.step
    }

    /// Writes the row of each id to `out`, `[N, D]`, and to `found`, `[N]`, true if the id has a row. The server's
    /// options define the value of a missing id. Returns the number of missing ids.
    ///
    /// Errors: `Input` if lengths do not match; `Corruption` and `Storage` if a row cannot be read.
    pub fn lookup(&self, ids: &[Id], out: &mut [f32], found: &mut [bool]) -> Result<usize> {
        self.check_lengths(ids.len(), self.dim(), (out.len(), found.len()))?;
        let mut out = Float32Output { out, dim: self.dim() };
        self.count_lookup(self.gather(ids, &mut out, |position, has_row| found[position] = has_row))
    }

    /// Like [`Self::lookup`], with rows in the format of [`Self::precision`]: `out` has [`WeightPrecision::row_bytes`]
    /// per id. Rows of a trainer's deltas and the values of missing ids are converted to it.
    ///
    /// Errors: also `Input` if the precision cannot represent the value of a missing id.
    pub fn lookup_stored(&self, ids: &[Id], out: &mut [u8], found: &mut [bool]) -> Result<usize> {
        let precision = self.precision();
        self.check_lengths(ids.len(), precision.row_bytes(self.dim()), (out.len(), found.len()))?;
        let mut out = StoredOutput { out, precision, row: vec![0.0; self.dim()], unrepresentable: None };
        let missing = self.count_lookup(self.gather(ids, &mut out, |position, has_row| found[position] = has_row))?;
        match out.unrepresentable {
            None => Ok(missing),
            Some(position) => Err(self.input_error(&format!(
                "{} cannot hold what id {} reads: look it up as float32, or say by `missing` what else an id without a row reads",
                precision.name(),
                ids[position]
            ))),
        }
    }

    /// Pools the rows of each bag: `out`, `[B, D]`, in row-major order. `offsets`, `[B + 1]`, are the start of each bag
    /// in `ids`, then the number of ids. `weights`, `[N]`, multiply the rows. The sums are bitwise identical to those
    /// of training's forward. Returns the number of missing ids.
    ///
    /// Errors: `Input` if lengths or offsets do not match; `Corruption` and `Storage` if a row cannot be read.
    pub fn lookup_pooled(
        &self,
        ids: &[Id],
        offsets: &[i64],
        pooling: PoolingMode,
        weights: Option<&[f32]>,
        out: &mut [f32],
    ) -> Result<usize> {
        self.check_bags(ids.len(), offsets, weights)?;
        self.check_lengths(offsets.len() - 1, self.dim(), (out.len(), offsets.len() - 1))?;
        let (dim, mut missing, mut first) = (self.dim(), 0, 0);
        let mut rows: Vec<f32> = Vec::new();
        while first < offsets.len() - 1 {
            let start = offsets[first] as usize;
            let fits = offsets[first + 1..].partition_point(|&end| end as usize - start <= POOLED_AT_ONCE);
            let last = first + fits.max(1);
            let end = offsets[last] as usize;
            rows.clear();
            rows.resize((end - start) * dim, 0.0);
            missing += self.gather(&ids[start..end], &mut Float32Output { out: &mut rows, dim }, |_, _| ())?;
            let bags: Vec<i64> = offsets[first..=last].iter().map(|&offset| offset - start as i64).collect();
            let weights = weights.map(|weights| &weights[start..end]);
            self.pool(&mut rows, &bags, pooling, weights, &mut out[first * dim..last * dim]);
            first = last;
        }
        self.count_lookup(Ok(missing))
    }

    /// Pools gathered rows, `[N, D]`.
    #[allow(unsafe_code)]
    fn pool(&self, rows: &mut [f32], bags: &[i64], pooling: PoolingMode, weights: Option<&[f32]>, out: &mut [f32]) {
        let dim = self.dim();
        let slots: Vec<CacheSlot> = (0..(rows.len() / dim) as CacheSlot).collect();
        let rows = TensorRows {
            layout: RowLayout { dim, vector_slots: 0, scalar_slot: false },
            weights: rows.as_mut_ptr(),
            vector_slots: [std::ptr::null_mut(); 2],
            scalars: std::ptr::null_mut(),
        };
        // SAFETY: the slots are the indexes of the rows in `rows`, which is borrowed exclusively and not written during
        // the call.
        unsafe { forward_pooled(&rows, &slots, None, bags, weights, pooling == PoolingMode::Mean, out, dim, 0, 1) };
    }

    /// Writes the row of each id to `out`. `on_row` receives the position of each id, and true if it has a row. Returns
    /// the number of missing ids.
    fn gather(&self, ids: &[Id], out: &mut impl RowOutput, on_row: impl FnMut(usize, bool)) -> Result<usize> {
        let of = (&*self.index, &self.overlay);
        let gather = ServeLookup::new(&self.files, of, self.dim(), self.page_generation.generation(), ids.len());
        let mut answer = LookupWriter::new((&self.files, &self.missing), ids, out, on_row);
        let cold_rows =
            self.page_generation.advance_on_faults(&self.files, || gather.write_resident_rows(ids, &mut answer));
        if !cold_rows.is_empty() {
            gather.write_cold_rows(&cold_rows, &mut answer)?;
        }
        let missing = answer.missing_rows();
        let cold = cold_rows.len() as u64;
        for (count, more) in
            [(&self.counts.ids, ids.len() as u64), (&self.counts.missing, missing as u64), (&self.counts.cold, cold)]
        {
            count.fetch_add(more, Ordering::Relaxed);
        }
        Ok(missing)
    }

    /// Counts a lookup call that has finished.
    fn count_lookup(&self, missing: Result<usize>) -> Result<usize> {
        self.counts.lookups.fetch_add(u64::from(missing.is_ok()), Ordering::Relaxed);
        missing
    }

    fn input_error(&self, message: &str) -> Error {
        Kind::Input.error(format!("table {:?} of module {:?}: {message}", self.spec.table, self.spec.module))
    }

    /// Checks that the outputs fit `rows` rows of `width` elements, and one flag per row.
    fn check_lengths(&self, rows: usize, width: usize, (out, found): (usize, usize)) -> Result<()> {
        if rows.checked_mul(width) != Some(out) || found != rows {
            return Err(self.input_error(&format!(
                "the output of {rows} rows of {width} elements has room for {out} and for {found} flags"
            )));
        }
        Ok(())
    }

    fn check_bags(&self, ids: usize, offsets: &[i64], weights: Option<&[f32]>) -> Result<()> {
        let (first, last) = (offsets.first().copied(), offsets.last().copied());
        if first != Some(0) || last != i64::try_from(ids).ok() || !offsets.is_sorted() {
            return Err(self
                .input_error(&format!("offsets must begin with 0, not fall, and end with {ids}, the number of ids")));
        }
        match weights {
            Some(weights) if weights.len() != ids => {
                Err(self.input_error(&format!("{ids} ids come with {} weights: give one for each id", weights.len())))
            }
            _ => Ok(()),
        }
    }
}
