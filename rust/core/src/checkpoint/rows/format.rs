//! The layout of a data file: one group of rows as safetensors columns.
//!
//! `n` rows, `D` the embedding width, `B` the number of buckets of the rank, `t` tombstones. In file order:
//!
//! | tensor | type, shape | |
//! | --- | --- | --- |
//! | `id` | I64 `[n]` | sorted by (bucket, `uint64(id)`), see [`BucketMapper`](crate::types::BucketMapper) |
//! | `last_step` | U64 `[n]` | |
//! | `bucket_offsets` | I64 `[B + 1]` | index of the first row of each of the rank's buckets |
//! | `tombstone` | I64 `[t]` | removed ids, sorted the same way; empty in a full checkpoint |
//! | `weight` | F32 `[n, D]` | |
//! | optimizer slots, torch's names | F32 `[n, D]`, rowwise `sum` `[n]` | |
//! | `count`, `score`, `modified_epoch` | U32, F32, U32 `[n]` | |
//! | `checksums` | U32 | CRC-32C of each 16 KiB of each tensor above, from its start, in file order |
//! | `__pad` | U8 | zeros that pad the file to a multiple of 4096 |
//!
//! A serving checkpoint has no slots and no `modified_epoch`. Its weights come last, in the [`WeightPrecision`] of its
//! tables: `weight` is F32, F16 or BF16 `[n, D]`, or U8 `[n, D + 4]`.
//!
//! A counts file contains the admission counts of pending ids in the same form:
//!
//! | tensor | type, shape | |
//! | --- | --- | --- |
//! | `id` | I64 `[n]` | sorted as above |
//! | `bucket_offsets` | I64 `[B + 1]` | |
//! | `generation` | U32 `[B]` | number of past generations of each bucket, modulo 2³² |
//! | `shows` | U32 `[n]` | occurrences |
//! | `clicks` | U32 `[n]` | only if the rule counts clicks |
//! | `age` | U32 `[n]` | 1 in the older generation of the bucket, else 0 |
//! | `checksums`, `__pad` | | |
//!
//! The header is padded with blanks so that weights start at a multiple of 64, and so do slots if `D` is a multiple of
//! 16. The file's length is a multiple of 4096.

use std::ops::Range;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use crate::checkpoint::manifest::manifests::{DataFile, DataShape};
use crate::checkpoint::manifest::spec::TableSpec;
use crate::error::Result;
use crate::io::{ALIGNMENT, AlignedBuf};
use crate::rows::{RowLayout, WeightPrecision};

pub use crate::checkpoint::manifest::{CHUNK_BYTES, FORMAT, VERSION};

/// Maximum bytes of rows per group (at least one row).
pub const GROUP_BYTES: usize = 16 << 20;
/// Alignment of the weights.
const LINE_BYTES: usize = 64;
/// Larger headers are rejected before they are read.
pub(crate) const MAX_HEADER_BYTES: usize = 1 << 20;

// Columns are stored in the machine's memory representation.
const _: () = assert!(cfg!(target_endian = "little"));

/// Contents of a column of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ColumnField {
    Id,
    LastStep,
    BucketOffsets,
    Tombstone,
    /// The `k`-th part of width `D` of a row's vector part: the weights, then the vector slots.
    Vector(usize),
    Scalar,
    Count,
    Score,
    ModifiedEpoch,
    Generation,
    Shows,
    Clicks,
    Age,
    Checksums,
    Pad,
}

impl ColumnField {
    /// True if the column has an entry per row.
    pub(crate) fn is_per_row(self) -> bool {
        !matches!(self, Self::BucketOffsets | Self::Tombstone | Self::Generation | Self::Checksums | Self::Pad)
    }

    /// True for optimizer state columns.
    pub(crate) fn is_slot(self) -> bool {
        matches!(self, Self::Vector(1..) | Self::Scalar)
    }

    fn is_checked(self) -> bool {
        !matches!(self, Self::Checksums | Self::Pad)
    }
}

/// A tensor of the file. `start` and `bytes` are relative to the start of the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileColumn {
    pub(crate) field: ColumnField,
    pub(crate) name: &'static str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    /// Index in `checksums` of the checksum of its first chunk.
    pub(crate) first_checksum: usize,
}

impl FileColumn {
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + self.bytes
    }

    /// Index in `checksums` of the checksum that follows those of this column.
    fn checksums_end(&self) -> usize {
        self.first_checksum + self.bytes.div_ceil(CHUNK_BYTES)
    }

    /// Bytes per row in the column.
    pub(crate) fn bytes_per_row(&self) -> usize {
        width(self.dtype) * self.shape[1..].iter().product::<usize>()
    }
}

/// Contents, name, type and shape of a column.
type ColumnSpec = (ColumnField, &'static str, Dtype, Vec<usize>);

fn dtype_of(precision: WeightPrecision) -> Dtype {
    match precision {
        WeightPrecision::Fp32 => Dtype::F32,
        WeightPrecision::Fp16 => Dtype::F16,
        WeightPrecision::Bf16 => Dtype::BF16,
        WeightPrecision::Int8 => Dtype::U8,
    }
}

fn width(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// The columns of a data file, in file order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileLayout {
    pub(crate) columns: Vec<FileColumn>,
    /// Bytes of the data, including padding.
    pub(crate) data_bytes: usize,
    /// Bytes of the header past a multiple of [`ALIGNMENT`].
    pub(crate) lead: usize,
}

impl FileLayout {
    /// Lays out a file of rows of a checked table. Returns `None` if the sizes overflow.
    pub(crate) fn new(spec: &TableSpec, shape: DataShape) -> Option<Self> {
        let (n, dim, precision) = (shape.rows, spec.dim as usize, spec.precision);
        let stored = precision.unwrap_or(WeightPrecision::Fp32);
        let mut wanted = vec![
            (ColumnField::Id, "id", Dtype::I64, vec![n]),
            (ColumnField::LastStep, "last_step", Dtype::U64, vec![n]),
            (ColumnField::BucketOffsets, "bucket_offsets", Dtype::I64, vec![shape.buckets.checked_add(1)?]),
            (ColumnField::Tombstone, "tombstone", Dtype::I64, vec![shape.tombstones]),
        ];
        let weight = (ColumnField::Vector(0), "weight", dtype_of(stored), vec![n, stored.columns(dim)]);
        let uses =
            [(ColumnField::Count, "count", Dtype::U32, vec![n]), (ColumnField::Score, "score", Dtype::F32, vec![n])];
        if precision.is_some() {
            // Weights come last, because their values may be narrower than the others, which must stay aligned: the
            // columns before the weights have a multiple of 8 bytes in total.
            wanted.extend(uses);
            wanted.push(weight);
            return Self::of(wanted, ColumnField::Vector(0));
        }
        wanted.push(weight);
        let optimizer = spec.optimizer_kind().ok()?;
        let layout = optimizer.layout(dim);
        for (slot, name) in optimizer.slot_names().iter().enumerate() {
            wanted.push(if slot < layout.vector_slots {
                (ColumnField::Vector(1 + slot), name, Dtype::F32, vec![n, dim])
            } else {
                (ColumnField::Scalar, name, Dtype::F32, vec![n])
            });
        }
        wanted.extend(uses);
        wanted.push((ColumnField::ModifiedEpoch, "modified_epoch", Dtype::U32, vec![n]));
        Self::of(wanted, ColumnField::Vector(0))
    }

    /// Layout of a counts file; `clicks` adds the counts of clicks. Returns `None` if the sizes overflow.
    pub(crate) fn of_counts(clicks: bool, shape: DataShape) -> Option<Self> {
        let n = shape.rows;
        let mut wanted = vec![
            (ColumnField::Id, "id", Dtype::I64, vec![n]),
            (ColumnField::BucketOffsets, "bucket_offsets", Dtype::I64, vec![shape.buckets.checked_add(1)?]),
            (ColumnField::Generation, "generation", Dtype::U32, vec![shape.buckets]),
            (ColumnField::Shows, "shows", Dtype::U32, vec![n]),
        ];
        wanted.extend(clicks.then(|| (ColumnField::Clicks, "clicks", Dtype::U32, vec![n])));
        wanted.push((ColumnField::Age, "age", Dtype::U32, vec![n]));
        Self::of(wanted, ColumnField::Id)
    }

    /// Lays columns out contiguously, such that `aligned` starts at a multiple of [`LINE_BYTES`] in the file.
    fn of(specs: Vec<ColumnSpec>, aligned: ColumnField) -> Option<Self> {
        let mut layout = Self { columns: Vec::with_capacity(specs.len() + 2), data_bytes: 0, lead: 0 };
        specs.into_iter().try_for_each(|spec| layout.add(spec))?;
        let start = layout.columns.iter().find(|column| column.field == aligned)?.start;
        layout.lead = start.checked_next_multiple_of(LINE_BYTES)? - start;
        let checksums = layout.columns.last().map_or(0, FileColumn::checksums_end);
        layout.add((ColumnField::Checksums, "checksums", Dtype::U32, vec![checksums]))?;
        let end = layout.data_bytes.checked_add(layout.lead)?;
        let pad = end.checked_next_multiple_of(ALIGNMENT)? - end;
        layout.add((ColumnField::Pad, "__pad", Dtype::U8, vec![pad]))?;
        Some(layout)
    }

    /// Adds a column at the end. Returns `None` if the sizes overflow.
    fn add(&mut self, (field, name, dtype, shape): ColumnSpec) -> Option<()> {
        let first_checksum = self.columns.last().map_or(0, FileColumn::checksums_end);
        let elements = shape.iter().copied().try_fold(1_usize, usize::checked_mul)?;
        let (start, bytes) = (self.data_bytes, elements.checked_mul(width(dtype))?);
        self.data_bytes = start.checked_add(bytes)?;
        self.columns.push(FileColumn { field, name, dtype, shape, start, bytes, first_checksum });
        Some(())
    }

    pub(crate) fn column(&self, field: ColumnField) -> &FileColumn {
        self.columns.iter().find(|column| column.field == field).expect("asked for a column that every file has")
    }

    /// Columns with checksums, in file order.
    pub(crate) fn checked_columns(&self) -> impl Iterator<Item = &FileColumn> {
        self.columns.iter().filter(|column| column.field.is_checked())
    }

    /// The safetensors header, including the length field. Header and data together are a multiple of [`ALIGNMENT`]
    /// long.
    pub(crate) fn header(&self, spec: &TableSpec, buckets: &Range<u32>) -> Vec<u8> {
        let about = json!({
            "format": FORMAT,
            "version": VERSION.to_string(),
            "module": spec.module,
            "table": spec.table,
            "total_num_buckets": spec.total_num_buckets.to_string(),
            "bucket_begin": buckets.start.to_string(),
            "bucket_end": buckets.end.to_string(),
            "chunk_bytes": CHUNK_BYTES.to_string(),
            "checksum": "crc32c",
        });
        let mut tensors = Map::from_iter([("__metadata__".to_owned(), about)]);
        for column in &self.columns {
            let range = column.range();
            tensors.insert(
                column.name.to_owned(),
                json!({"dtype": column.dtype, "shape": column.shape, "data_offsets": [range.start, range.end]}),
            );
        }
        pad_header(Value::Object(tensors).to_string().as_bytes(), self.lead)
    }

    /// Checks that a header (without the length field) describes exactly this layout. The message describes the
    /// difference.
    pub(crate) fn check_header(&self, header: &[u8]) -> Result<(), String> {
        // Deserializing checks that the tensors are contiguous, and that types and shapes match their sizes.
        let metadata: Metadata = serde_json::from_slice(header).map_err(|e| e.to_string())?;
        let tensors = metadata.tensors();
        if tensors.len() != self.columns.len() {
            return Err(format!("{} tensors", tensors.len()));
        }
        self.columns.iter().try_for_each(|column| {
            let range = column.range();
            let expected = |info: &&TensorInfo| {
                (info.dtype, &info.shape, info.data_offsets) == (column.dtype, &column.shape, (range.start, range.end))
            };
            match tensors.get(column.name) {
                None => Err(format!("no tensor {:?}", column.name)),
                Some(info) if expected(info) => Ok(()),
                Some(info) => Err(format!("tensor {:?} {info:?}", column.name)),
            }
        })
    }

    /// Writes the parts of a file with this layout and the counts of `shape` to `image`, which is as long as the file.
    /// `fill` receives the bytes of the columns with checksums, and their checksums to fill.
    pub(super) fn write(
        &self,
        header: &[u8],
        shape: DataShape,
        image: &mut [u8],
        fill: impl FnOnce(&mut [u8], &mut [u32]) -> Result<()>,
    ) -> Result<DataFile> {
        let column = self.column(ColumnField::Checksums);
        let bytes = image.len() as u64;
        let (head, data) = image.split_at_mut(header.len());
        head.copy_from_slice(header);
        let (checked, rest) = data.split_at_mut(column.start);
        let mut checksums = vec![0; column.shape[0]];
        fill(checked, &mut checksums)?;
        let checksums: &[u8] = bytemuck::cast_slice(&checksums);
        let (to, pad) = rest.split_at_mut(checksums.len());
        to.copy_from_slice(checksums);
        pad.fill(0);
        Ok(DataFile {
            rows: shape.rows as u64,
            tombstones: shape.tombstones as u64,
            bytes,
            header_crc32c: crc32c::crc32c(header),
            checksums_crc32c: crc32c::crc32c(checksums),
        })
    }
}

/// Returns a safetensors header: the length field, `text`, and blanks, so that it is `lead` bytes longer than a multiple
/// of [`ALIGNMENT`].
pub(crate) fn pad_header(text: &[u8], lead: usize) -> Vec<u8> {
    let whole = (8 + text.len()).saturating_sub(lead).next_multiple_of(ALIGNMENT);
    let mut header = (whole as u64 + lead as u64 - 8).to_le_bytes().to_vec();
    header.extend_from_slice(text);
    header.resize(whole + lead, b' ');
    header
}

/// Number of rows in a group of at most `group_bytes` (at least one). `layout` is that of the table's rows.
pub(crate) fn group_rows(spec: &TableSpec, layout: RowLayout, group_bytes: usize) -> usize {
    let values = spec.precision.map_or(layout.floats() * 4, |precision| precision.row_bytes(spec.dim as usize));
    let row_bytes = values + 8 + 8 + 4 + 4 + 4;
    (group_bytes / row_bytes).max(1)
}

/// Builds a file with this layout and header. `fill` receives each checksummed column, zero-initialized, in file order.
pub(super) fn image_of(
    (layout, shape): (&FileLayout, DataShape),
    header: &[u8],
    mut fill: impl FnMut(ColumnField, &mut [u8]),
) -> Result<(AlignedBuf, DataFile)> {
    let mut image = AlignedBuf::try_zeroed(header.len() + layout.data_bytes)?;
    let file = layout.write(header, shape, &mut image, |data, checksums| {
        for column in layout.checked_columns() {
            fill(column.field, &mut data[column.range()]);
            let chunks = data[column.range()].chunks(CHUNK_BYTES);
            checksums[column.first_checksum..]
                .iter_mut()
                .zip(chunks)
                .for_each(|(to, chunk)| *to = crc32c::crc32c(chunk));
        }
        Ok(())
    })?;
    Ok((image, file))
}
