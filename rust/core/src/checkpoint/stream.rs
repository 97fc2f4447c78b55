//! Rows copied to their places in columns: read in the order in which they lie in memory, written past the caches, their checksums taken
//! on the way.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU32;

use crate::rows::RowRef;

/// Turns a checksum of some bytes into that of the bytes with `n` zeros behind them, for a fixed `n`: CRC-32C is linear, so the checksum of
/// a row and what follows is made of those of both.
pub(super) struct Shift([[u32; 256]; 4]);

impl std::fmt::Debug for Shift {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Shift").finish()
    }
}

impl Shift {
    pub(super) fn by(bytes: usize) -> Self {
        let of_bit: [u32; 32] = std::array::from_fn(|bit| crc32c::crc32c_combine(1 << bit, 0, bytes));
        let of_byte = |place: usize, byte: usize| {
            (0..8).filter(|bit| (byte >> bit) & 1 == 1).fold(0, |sum, bit| sum ^ of_bit[place * 8 + bit])
        };
        Self(std::array::from_fn(|place| std::array::from_fn(|byte| of_byte(place, byte))))
    }

    fn apply(&self, checksum: u32) -> u32 {
        let bytes = checksum.to_le_bytes();
        self.0.iter().zip(bytes).fold(0, |sum, (table, byte)| sum ^ table[usize::from(byte)])
    }

    /// The checksum of rows, each as long as this shift, from those of each.
    pub(super) fn join(&self, rows: &[u32]) -> u32 {
        rows.iter().copied().reduce(|sum, row| self.apply(sum) ^ row).unwrap_or(0)
    }
}

/// Copy row `i` to place `places[i]` of the columns, `dim` floats wide: part `k` of its vector part to column `k`; and where `sums` is not
/// empty, the CRC-32C of each to the same place of `sums[k]`. `places` is a permutation of the rows' numbers. False, and nothing done, where
/// rows do not fill whole cache lines or the processor cannot write past its caches.
///
/// # Panics
/// When a place is outside its column.
pub(super) fn scatter(
    rows: &[RowRef<'_>],
    places: &[AtomicU32],
    columns: &mut [&mut [u8]],
    dim: usize,
    sums: &mut [Vec<u32>],
) -> bool {
    #[cfg(target_arch = "x86_64")]
    return x86::scatter(rows, places, columns, dim, sums);
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{_mm_crc32_u64, _mm_loadu_ps, _mm_sfence, _mm_stream_ps};
    use std::sync::atomic::{AtomicU32, Ordering};

    use crate::kernels::threads::{Shared, for_each_on_half};
    use crate::rows::RowRef;

    /// What is written past the caches at once, in floats.
    const LINE: usize = 16;
    /// Rows that one thread copies at a time.
    const ROWS_PER_TASK: usize = 2048;

    pub(super) fn scatter(
        rows: &[RowRef<'_>],
        places: &[AtomicU32],
        columns: &mut [&mut [u8]],
        dim: usize,
        sums: &mut [Vec<u32>],
    ) -> bool {
        let aligned = |column: &&mut [u8]| column.as_ptr().addr().is_multiple_of(LINE * 4);
        if !is_x86_feature_detected!("sse4.2") || !dim.is_multiple_of(LINE) || !columns.iter().all(aligned) {
            return false;
        }
        let bytes = rows.len() * dim * 4;
        assert!(columns.iter().all(|column| column.len() == bytes), "columns of {} rows", rows.len());
        assert!(sums.is_empty() || sums.len() == columns.len(), "checksums of each column, or of none");
        assert!(sums.iter().all(|sums| sums.len() == rows.len()), "a checksum a row");
        let columns: Vec<Shared<u8>> = columns.iter_mut().map(|column| Shared(column.as_mut_ptr())).collect();
        let sums: Vec<Shared<u32>> = sums.iter_mut().map(|sums| Shared(sums.as_mut_ptr())).collect();
        for_each_on_half(rows.chunks(ROWS_PER_TASK).zip(places.chunks(ROWS_PER_TASK)), |(some, places)| {
            // SAFETY: SSE 4.2 is there; columns and checksums are borrowed by this call alone and as long as `rows` says; no two rows
            // have one place, so no two tasks write the same.
            unsafe {
                if sums.is_empty() {
                    place::<false>(some, places, rows.len(), &columns, &sums, dim);
                } else {
                    place::<true>(some, places, rows.len(), &columns, &sums, dim);
                }
            }
        });
        true
    }

    /// # Safety
    /// Columns start at lines and have room for `all` rows, `sums`, where wanted, for as many; nobody else uses the rows' places there.
    #[target_feature(enable = "sse4.2")]
    unsafe fn place<const SUM: bool>(
        rows: &[RowRef<'_>],
        places: &[AtomicU32],
        all: usize,
        columns: &[Shared<u8>],
        sums: &[Shared<u32>],
        dim: usize,
    ) {
        for (row, place) in rows.iter().zip(places) {
            let place = place.load(Ordering::Relaxed) as usize;
            assert!(place < all, "a place among the rows");
            for (part, (from, column)) in row.vector.chunks_exact(dim).zip(columns).enumerate() {
                #[allow(clippy::cast_ptr_alignment)] // Rows are whole lines, and columns start at one.
                let mut to: *mut f32 = column.at(place * dim * 4).cast();
                let mut sum = u64::from(u32::MAX);
                for line in from.chunks_exact(LINE) {
                    let from = line.as_ptr();
                    // SAFETY: all is within `line`, and `to` is a line of this row's place.
                    unsafe {
                        let parts = [0, 4, 8, 12].map(|at| _mm_loadu_ps(from.add(at)));
                        for (at, part) in parts.into_iter().enumerate() {
                            _mm_stream_ps(to.add(at * 4), part);
                        }
                        if SUM {
                            let words: *const u64 = from.cast();
                            for at in 0..LINE / 2 {
                                sum = _mm_crc32_u64(sum, words.add(at).read_unaligned());
                            }
                        }
                        to = to.add(LINE);
                    }
                }
                if SUM {
                    // SAFETY: the place is within `sums`, and this row's alone.
                    unsafe { sums[part].at(place).write(!(sum as u32)) };
                }
            }
        }
        // What was written past the caches is seen before anything that comes after.
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::AlignedBuf;
    use crate::rows::RowHeader;
    use crate::types::hash_id;

    #[test]
    fn rows_come_to_their_places_with_their_checksums_which_join_to_those_of_many() {
        for dim in [16, 64, 48] {
            let (count, parts) = (5000_usize, 2);
            let header = RowHeader::default();
            let values: Vec<f32> = (0..count * dim * parts).map(|n| hash_id(n as i64) as i32 as f32).collect();
            let rows: Vec<RowRef<'_>> =
                values.chunks(dim * parts).map(|vector| RowRef { header: &header, vector }).collect();
            let places: Vec<AtomicU32> = (0..count).map(|n| AtomicU32::new((n * 1237 % count) as u32)).collect();
            let mut columns: Vec<AlignedBuf> = (0..parts).map(|_| AlignedBuf::zeroed(count * dim * 4)).collect();
            let mut slices: Vec<&mut [u8]> = columns.iter_mut().map(|column| &mut column[..]).collect();
            let mut sums = vec![vec![0; count]; parts];
            let done = scatter(&rows, &places, &mut slices, dim, &mut sums);
            assert_eq!(done, cfg!(target_arch = "x86_64"));
            assert!(!scatter(&rows, &places, &mut [&mut [][..]], dim + 1, &mut []), "no whole lines");
            if !done {
                return;
            }
            for (number, row) in rows.iter().enumerate() {
                let place = number * 1237 % count;
                for (part, from) in row.vector.chunks(dim).enumerate() {
                    let found = &columns[part][place * dim * 4..(place + 1) * dim * 4];
                    assert_eq!(found, bytemuck::cast_slice::<f32, u8>(from), "row {number}, part {part}");
                    assert_eq!(sums[part][place], crc32c::crc32c(found));
                }
            }
            let shift = Shift::by(dim * 4);
            for (from, to) in [(0, 0), (3, 4), (0, 128), (17, count)] {
                let expected = crc32c::crc32c(&columns[0][from * dim * 4..to * dim * 4]);
                assert_eq!(shift.join(&sums[0][from..to]), expected, "rows {from}..{to} of {dim}");
            }
        }
    }
}
