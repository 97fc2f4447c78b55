//! The layout of data files: groups of rows as safetensors columns.
//!
//! A file has up to 64 groups and about 1 GiB. A group has at most 16 MiB of rows and is the unit of sorting, reading and
//! verification. Its columns are tensors of the file: `n` rows, `D` the embedding width, `t` tombstones. In file order:
//!
//! | tensor | type, shape | |
//! | --- | --- | --- |
//! | `id` | I64 `[n]` | sorted by (bucket, `uint64(id)`), see [`BucketMapper`](crate::types::BucketMapper) |
//! | `last_step` | U64 `[n]` | |
//! | `tombstone` | I64 `[t]` | removed ids, sorted the same way; empty in a full checkpoint |
//! | `bucket_offsets` | U32 `[k]` | index of the first row of every so many buckets, then the number of rows |
//! | `weight` | F32 `[n, D]` | |
//! | optimizer slots, torch's names | F32 `[n, D]`, rowwise `sum` `[n]` | |
//! | `count`, `score`, `modified_epoch` | U32, F32, U32 `[n]` | |
//! | `checksums` | U32 | CRC-32C of each 16 KiB of each tensor above, from its start, in file order |
//! | `__pad` | U8 | zeros up to the next group, or to a multiple of 4096 at the end of the file |
//!
//! The tensors of group `k > 0` are named `id.k` and so on. Groups after the first start in a page of their own.
//!
//! A serving checkpoint has no slots and no `modified_epoch`. Its weights come last, in the [`WeightPrecision`] of its
//! tables: `weight` is F32, F16 or BF16 `[n, D]`, or U8 `[n, D + 4]`.
//!
//! A counts file contains the admission counts of pending ids in the same form:
//!
//! | tensor | type, shape | |
//! | --- | --- | --- |
//! | `id` | I64 `[n]` | sorted as above |
//! | `bucket_offsets` | U32 `[k]` | |
//! | `generation` | U32 `[B]` | number of past generations of each of the rank's buckets, modulo 2³²; only in the first group |
//! | `shows` | U32 `[n]` | occurrences |
//! | `clicks` | U32 `[n]` | only if the rule counts clicks |
//! | `age` | U32 `[n]` | 1 in the older generation of the bucket, else 0 |
//! | `checksums`, `__pad` | | |
//!
//! Groups are placed so that weights start at a multiple of 64, and so do slots if `D` is a multiple of 16. The header is
//! padded with blanks up to the first group.

use std::ops::Range;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use crate::checkpoint::manifest::manifests::{ColumnEntry, GroupEntry, GroupShape};
use crate::checkpoint::manifest::spec::TableSpec;
use crate::error::Result;
use crate::io::ALIGNMENT;
use crate::rows::{RowLayout, WeightPrecision};

pub use crate::checkpoint::manifest::{CHUNK_BYTES, FORMAT, VERSION};

/// Maximum bytes of rows per group (at least one row).
pub const GROUP_BYTES: usize = 16 << 20;
/// A file gets no further group that could make it longer than this.
pub(crate) const MAX_FILE_BYTES: u64 = 1 << 30;
/// Maximum number of bucket offsets of a group.
const MAX_BUCKET_OFFSETS: usize = 1024;
/// Number of rows per bucket offset of a small group.
const ROWS_PER_OFFSET: usize = 64;
/// Alignment of the weights.
pub(crate) const LINE_BYTES: usize = 64;
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
}

impl ColumnField {
    /// True if the column has an entry per row.
    pub(crate) fn is_per_row(self) -> bool {
        !matches!(self, Self::BucketOffsets | Self::Tombstone | Self::Generation | Self::Checksums)
    }

    /// True for optimizer state columns.
    pub(crate) fn is_slot(self) -> bool {
        matches!(self, Self::Vector(1..) | Self::Scalar)
    }

    fn is_checked(self) -> bool {
        self != Self::Checksums
    }
}

/// A tensor of a group. `start` is relative to the start of the group.
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

/// The buckets whose first row is stored in `bucket_offsets`: from the group's first bucket on, every `stride`-th, then
/// its end, with the number of rows. Rows of other buckets are searched between two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BucketOffsets {
    first: u32,
    end: u32,
    stride: u32,
    /// Number of offsets, an even number, so that the columns after them are aligned. The end may be there twice.
    pub(crate) len: usize,
}

impl BucketOffsets {
    /// Returns the offsets of a group of this shape.
    pub(crate) fn new(shape: GroupShape) -> Self {
        let (first, end) = (shape.bucket_begin, shape.bucket_end);
        let intervals = (shape.rows / ROWS_PER_OFFSET).clamp(1, MAX_BUCKET_OFFSETS - 1) as u32;
        let stride = (end - first).div_ceil(intervals).max(1);
        Self { first, end, stride, len: ((end - first).div_ceil(stride) as usize + 1).next_multiple_of(2) }
    }

    /// The buckets whose offsets are stored, in order.
    pub(crate) fn buckets(self) -> impl Iterator<Item = u32> {
        let bucket = move |at| u64::from(self.first) + at as u64 * u64::from(self.stride);
        (0..self.len).map(move |at| bucket(at).min(u64::from(self.end)) as u32)
    }

    /// Index of the last offset that is not after the first row of `bucket`, one of the group's.
    pub(crate) fn before(self, bucket: u32) -> usize {
        ((bucket - self.first) / self.stride) as usize
    }

    /// True if the offset of `bucket`, one of the group's, is stored.
    pub(crate) fn has(self, bucket: u32) -> bool {
        (bucket - self.first).is_multiple_of(self.stride)
    }
}

/// The columns of a group, in file order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupLayout {
    pub(crate) columns: Vec<FileColumn>,
    /// Bytes of the columns.
    pub(crate) data_bytes: usize,
    /// Offset of the group past a multiple of [`LINE_BYTES`].
    pub(crate) lead: usize,
    pub(crate) offsets: BucketOffsets,
}

impl GroupLayout {
    /// Lays out a group of rows of a checked table. Returns `None` if the sizes overflow.
    pub(crate) fn new(spec: &TableSpec, shape: GroupShape) -> Option<Self> {
        let (n, dim, precision) = (shape.rows, spec.dim as usize, spec.precision);
        let stored = precision.unwrap_or(WeightPrecision::Fp32);
        let offsets = BucketOffsets::new(shape);
        // Wide values come first, so that all are aligned.
        let mut wanted = vec![
            (ColumnField::Id, "id", Dtype::I64, vec![n]),
            (ColumnField::LastStep, "last_step", Dtype::U64, vec![n]),
            (ColumnField::Tombstone, "tombstone", Dtype::I64, vec![shape.tombstones]),
            (ColumnField::BucketOffsets, "bucket_offsets", Dtype::U32, vec![offsets.len]),
        ];
        let weight = (ColumnField::Vector(0), "weight", dtype_of(stored), vec![n, stored.columns(dim)]);
        let uses =
            [(ColumnField::Count, "count", Dtype::U32, vec![n]), (ColumnField::Score, "score", Dtype::F32, vec![n])];
        if precision.is_some() {
            // Weights come last, because their values may be narrower than the others.
            wanted.extend(uses);
            wanted.push(weight);
            return Self::of(wanted, ColumnField::Vector(0), offsets);
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
        Self::of(wanted, ColumnField::Vector(0), offsets)
    }

    /// Layout of a group of counts; `clicks` adds the counts of clicks. Returns `None` if the sizes overflow.
    pub(crate) fn of_counts(clicks: bool, shape: GroupShape) -> Option<Self> {
        let (n, offsets) = (shape.rows, BucketOffsets::new(shape));
        let mut wanted = vec![
            (ColumnField::Id, "id", Dtype::I64, vec![n]),
            (ColumnField::BucketOffsets, "bucket_offsets", Dtype::U32, vec![offsets.len]),
            (ColumnField::Generation, "generation", Dtype::U32, vec![shape.generations]),
            (ColumnField::Shows, "shows", Dtype::U32, vec![n]),
        ];
        wanted.extend(clicks.then(|| (ColumnField::Clicks, "clicks", Dtype::U32, vec![n])));
        wanted.push((ColumnField::Age, "age", Dtype::U32, vec![n]));
        Self::of(wanted, ColumnField::Id, offsets)
    }

    /// Lays columns out contiguously, such that `aligned` starts at a multiple of [`LINE_BYTES`] in the file.
    fn of(specs: Vec<ColumnSpec>, aligned: ColumnField, offsets: BucketOffsets) -> Option<Self> {
        let mut layout = Self { columns: Vec::with_capacity(specs.len() + 1), data_bytes: 0, lead: 0, offsets };
        specs.into_iter().try_for_each(|spec| layout.add(spec))?;
        let start = layout.columns.iter().find(|column| column.field == aligned)?.start;
        layout.lead = start.checked_next_multiple_of(LINE_BYTES)? - start;
        let checksums = layout.columns.last().map_or(0, FileColumn::checksums_end);
        layout.add((ColumnField::Checksums, "checksums", Dtype::U32, vec![checksums]))?;
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

    /// Columns with a value or a vector of each row.
    fn row_columns(&self) -> impl Iterator<Item = &FileColumn> {
        self.columns.iter().filter(|column| column.field.is_per_row())
    }

    /// Bytes of one row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.row_columns().map(FileColumn::bytes_per_row).sum()
    }

    /// The columns of rows, for the manifest.
    pub(crate) fn entries(&self) -> Vec<ColumnEntry> {
        self.row_columns().map(|column| ColumnEntry { name: column.name.to_owned(), dtype: column.dtype }).collect()
    }

    /// Writes a group of this shape to `data`, which starts with the first column and ends with the padding. `fill`
    /// receives the bytes of the columns with checksums, and their checksums to fill. Returns the manifest entry of the
    /// group at `offset`.
    pub(super) fn write(
        &self,
        (shape, offset): (GroupShape, u64),
        data: &mut [u8],
        fill: impl FnOnce(&mut [u8], &mut [u32]) -> Result<()>,
    ) -> Result<GroupEntry> {
        let column = self.column(ColumnField::Checksums);
        let (checked, rest) = data.split_at_mut(column.start);
        let mut checksums = vec![0; column.shape[0]];
        fill(checked, &mut checksums)?;
        let checksums: &[u8] = bytemuck::cast_slice(&checksums);
        let (to, pad) = rest.split_at_mut(checksums.len());
        to.copy_from_slice(checksums);
        pad.fill(0);
        let GroupShape { bucket_begin, bucket_end, .. } = shape;
        Ok(GroupEntry {
            offset,
            rows: shape.rows as u64,
            tombstones: shape.tombstones as u64,
            bucket_begin,
            bucket_end,
            checksums_crc32c: crc32c::crc32c(checksums),
        })
    }
}

/// A file, as its header describes it.
#[derive(Debug)]
pub(crate) struct FileLayout<'a> {
    pub(crate) spec: &'a TableSpec,
    /// Buckets of the rank.
    pub(crate) buckets: &'a Range<u32>,
    /// Its groups, each with its offset.
    pub(crate) groups: &'a [(u64, GroupLayout)],
    /// Length of the file.
    pub(crate) bytes: u64,
}

impl FileLayout<'_> {
    /// Tensors of the file: name, type, shape, and range relative to the first group.
    fn tensors(&self) -> impl Iterator<Item = (String, Dtype, Vec<usize>, [u64; 2])> {
        let first = self.groups.first().map_or(0, |(offset, _)| *offset);
        self.groups.iter().enumerate().flat_map(move |(k, (offset, layout))| {
            let name = move |name: &str| if k == 0 { name.to_owned() } else { format!("{name}.{k}") };
            let start = offset - first;
            let columns = layout.columns.iter().map(move |column| {
                let range = [start + column.start as u64, start + (column.start + column.bytes) as u64];
                (name(column.name), column.dtype, column.shape.clone(), range)
            });
            let pad = [start + layout.data_bytes as u64, self.end_of(k) - first];
            let bytes = pad[1].saturating_sub(pad[0]) as usize;
            columns.chain([(name("__pad"), Dtype::U8, vec![bytes], pad)])
        })
    }

    /// End of the padding of a group.
    pub(crate) fn end_of(&self, group: usize) -> u64 {
        self.groups.get(group + 1).map_or(self.bytes, |(offset, _)| *offset)
    }

    /// The safetensors header, without the length field and blanks.
    fn text(&self) -> String {
        let about = json!({
            "format": FORMAT,
            "version": VERSION.to_string(),
            "module": self.spec.module,
            "table": self.spec.table,
            "total_num_buckets": self.spec.total_num_buckets.to_string(),
            "bucket_begin": self.buckets.start.to_string(),
            "bucket_end": self.buckets.end.to_string(),
            "chunk_bytes": CHUNK_BYTES.to_string(),
            "checksum": "crc32c",
        });
        let mut tensors = Map::from_iter([("__metadata__".to_owned(), about)]);
        for (name, dtype, shape, range) in self.tensors() {
            tensors.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": range}));
        }
        Value::Object(tensors).to_string()
    }

    /// Maximum length of the header of a file of `groups` groups, none larger than `largest`.
    pub(crate) fn max_header_bytes(
        spec: &TableSpec,
        buckets: &Range<u32>,
        groups: usize,
        largest: &GroupLayout,
    ) -> usize {
        // Numbers with as many digits as there can be.
        let groups = vec![(2 * MAX_FILE_BYTES, largest.clone()); groups];
        let bytes = 2 * MAX_FILE_BYTES + (largest.data_bytes + ALIGNMENT) as u64;
        let mut text = FileLayout { spec, buckets, groups: &groups, bytes }.text().len();
        // Ranges are relative to the first group, and paddings between groups were counted as empty.
        text += groups.len() * (largest.columns.len() + 1) * 2 * "2147483648".len();
        8 + text
    }

    /// The header: the length field, the description of all tensors, and blanks up to the first group.
    pub(crate) fn header(&self) -> Vec<u8> {
        let (text, bytes) = (self.text(), self.groups[0].0 as usize);
        let mut header = (bytes as u64 - 8).to_le_bytes().to_vec();
        header.extend_from_slice(text.as_bytes());
        assert!(header.len() <= bytes, "{} bytes of header before {bytes}", header.len());
        header.resize(bytes, b' ');
        header
    }

    /// Checks that a header (without the length field) describes exactly this file. The message describes the
    /// difference.
    pub(crate) fn check_header(&self, header: &[u8]) -> Result<(), String> {
        // Deserializing checks that the tensors are contiguous, and that types and shapes match their sizes.
        let metadata: Metadata = serde_json::from_slice(header).map_err(|e| e.to_string())?;
        let tensors = metadata.tensors();
        let expected: usize = self.groups.iter().map(|(_, layout)| layout.columns.len() + 1).sum();
        if tensors.len() != expected {
            return Err(format!("{} tensors", tensors.len()));
        }
        self.tensors().try_for_each(|(name, dtype, shape, range)| {
            let range = (range[0] as usize, range[1] as usize);
            let is_expected =
                |info: &&TensorInfo| (info.dtype, &info.shape, info.data_offsets) == (dtype, &shape, range);
            match tensors.get(&name) {
                None => Err(format!("no tensor {name:?}")),
                Some(info) if is_expected(info) => Ok(()),
                Some(info) => Err(format!("tensor {name:?} {info:?}")),
            }
        })
    }
}

/// Returns a safetensors header: the length field, `text`, and blanks up to a multiple of [`ALIGNMENT`].
pub(crate) fn pad_header(text: &[u8]) -> Vec<u8> {
    let whole = (8 + text.len()).next_multiple_of(ALIGNMENT);
    let mut header = (whole as u64 - 8).to_le_bytes().to_vec();
    header.extend_from_slice(text);
    header.resize(whole, b' ');
    header
}

/// Number of rows in a group of at most `group_bytes` (at least one). `layout` is that of the table's rows.
pub(crate) fn group_rows(spec: &TableSpec, layout: RowLayout, group_bytes: usize) -> usize {
    let values = spec.precision.map_or(layout.floats() * 4, |precision| precision.row_bytes(spec.dim as usize));
    let row_bytes = values + 8 + 8 + 4 + 4 + 4;
    (group_bytes / row_bytes).max(1)
}
