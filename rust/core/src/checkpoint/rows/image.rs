//! The image of a small data file, whose columns are filled one after the other.

use super::format::{ColumnField, FileLayout};
use crate::checkpoint::manifest::manifests::{DataFile, DataShape};
use crate::checkpoint::manifest::names::CHUNK_BYTES;
use crate::error::Result;
use crate::io::AlignedBuf;

/// Builds a file with this layout and header. `fill` receives each checksummed column, zero-initialized, in file order.
pub(super) fn image_of(
    (layout, shape): (&FileLayout, DataShape),
    header: &[u8],
    mut fill: impl FnMut(ColumnField, &mut [u8]),
) -> Result<(AlignedBuf, DataFile)> {
    let mut image = AlignedBuf::try_zeroed(header.len() + layout.data_bytes)?;
    let (head, data) = image.split_at_mut(header.len());
    head.copy_from_slice(header);
    let mut checksums: Vec<u32> = Vec::new();
    for column in layout.checked_columns() {
        fill(column.field, &mut data[column.range()]);
        checksums.extend(data[column.range()].chunks(CHUNK_BYTES).map(crc32c::crc32c));
    }
    let checksums: &[u8] = bytemuck::cast_slice(&checksums);
    data[layout.column(ColumnField::Checksums).range()].copy_from_slice(checksums);
    let file = DataFile {
        rows: shape.rows as u64,
        tombstones: shape.tombstones as u64,
        bytes: image.len() as u64,
        header_crc32c: crc32c::crc32c(header),
        checksums_crc32c: crc32c::crc32c(checksums),
    };
    Ok((image, file))
}
